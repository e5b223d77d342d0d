"""A tiny environment for run tests: the byte-level model can hardly solve it, and need not."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from surefoot import Action, Task, ToolEnvironment, Trust, Variant, reward
from surefoot.envs.base import Draft, answer


@reward(trust=Trust.VERIFIED)
def even_length(episode: Any) -> float:
    """Luck decides for an untrained model, so groups carry a signal."""
    return float(len(episode.model_text) % 2 == 0)


class Tiny(ToolEnvironment):
    name = "tiny"
    horizon = 1
    variants: ClassVar[dict[str, Variant]] = {
        "base": Variant("digits"),
        "letters": Variant("letters", "surface"),
    }
    rewards = (even_length,)

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        number = rng.randrange(5000)
        text = str(number) if variant == "base" else chr(97 + number % 26) * 3 + str(number)
        return Draft(text, text, text)

    @classmethod
    def privileged(cls, task: Task) -> str:
        return f"hidden {task.reference}"

    @classmethod
    def oracle(cls, task: Task) -> list[Action]:
        return [answer("ok")]

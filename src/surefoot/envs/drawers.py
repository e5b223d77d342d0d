"""A letter lies in one of ten drawers; on the way there, a drawer names the next one to open.

The smallest task with several turns and hidden state, made for the two-minute run of a tiny byte-level
model: prompts and tool schema are short. This module must not know any model or renderer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from string import ascii_lowercase
from typing import Any, ClassVar

from surefoot.core.types import Action, Task, Trust
from surefoot.envs.base import Draft, ToolEnvironment, Variant, answer, call
from surefoot.rewards.base import Episode, reward
from surefoot.rewards.common import call_price
from surefoot.tools.base import Tool, ToolError, tool

_DRAWERS = 10
# Written many times over: half a million weights find in a minute only what they cannot miss.
_REPEATS = 8
# Lengths of the way, each as likely; the held-out ways are longer than any in training.
_LENGTHS: Mapping[str, Sequence[int]] = {"base": (1, 1, 2), "scale": (3, 4)}


@reward(trust=Trust.VERIFIED, weight=1.0, resolution=1.0)
def right_letter(episode: Episode) -> float:
    """1 when the last turn is exactly the letter at the end of the way."""
    return float((episode.answer or "").strip() == episode.reference)


class Drawers(ToolEnvironment):
    """Open drawers with ``look`` until one shows a letter, then answer with that letter.

    Which drawers lie on the way and which letter ends it are seen only by looking. The other drawers
    hold other letters, so opening just any drawer solves nothing. Each call costs 0.02.
    """

    name: ClassVar[str] = "drawers"
    horizon: ClassVar[int] = 6
    variants: ClassVar[Mapping[str, Variant]] = {
        "base": Variant("one drawer, or two of which the first names the second"),
        "scale": Variant("three or four drawers", "scale"),
        "surface": Variant("the question has other words around it", "surface"),
        "rule": Variant("the tool and its argument have other names", "rule"),
    }
    rewards = (right_letter, call_price(0.02))
    success: ClassVar[str] = "right_letter"

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        length = rng.choice(_LENGTHS.get(variant, _LENGTHS["base"]))
        way = [str(drawer) for drawer in rng.sample(range(_DRAWERS), length)]
        letter, *others = rng.sample(ascii_lowercase, _DRAWERS + 1)
        shows = {str(drawer): other for drawer, other in enumerate(others)}
        shows |= dict(pairwise([*way, letter]))
        first = way[0] * _REPEATS
        prompt = f"{first} is first" if variant == "surface" else first
        return Draft(">".join([*way, letter]), prompt, letter, {"way": way, "shows": shows})

    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action]:
        way: Sequence[str] = task.metadata["way"]
        renamed = task.variant == "rule"
        looks = [call("open", n=drawer) if renamed else call("look", d=drawer) for drawer in way]
        return (*looks, answer(str(task.reference)))

    @classmethod
    def privileged(cls, task: Task) -> str:
        return ">".join([*task.metadata["way"], str(task.reference)])

    def tools(self) -> tuple[Tool, ...]:
        own = super().tools()
        return (own[0].renamed("open", arguments={"d": "n"}),) if self.task.variant == "rule" else own

    @tool
    def look(self, d: str) -> str:
        """Open."""
        shows: Mapping[str, str] = self.task.metadata["shows"]
        if d not in shows:
            raise ToolError("none")
        return shows[d] * _REPEATS

    def state(self) -> Mapping[str, Any]:
        return {"answer": self.answer}

"""Write a function from its description; a Python session helps, and hidden calls decide.

This module must not run what the policy wrote: the sandbox does, in the tool and in the reward.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from surefoot.core.types import Action, Message, Task
from surefoot.envs.base import Draft, ToolEnvironment, Variant, answer, call
from surefoot.envs.pipelines import (
    Steps,
    behaviour,
    draw_steps,
    function_of,
    in_python,
    in_words,
    telling_rows,
)
from surefoot.rewards.base import Episode
from surefoot.rewards.verifiers.code import Call, code_function
from surefoot.sandbox import Limits, SharedSandbox
from surefoot.tools.base import Tool
from surefoot.tools.python import PythonSession

_BOX = SharedSandbox(limits=Limits(seconds=5, cpu_seconds=10, memory_mb=256, processes=16, files_mb=16))


def _steps(task: Task) -> Steps:
    return tuple((str(name), int(k)) for name, k in task.metadata["steps"])


def _function(episode: Episode) -> str:
    return cast("str", episode.task.metadata["function"])


def _calls(episode: Episode, rng: random.Random) -> list[Call]:
    return [Call((item,), want) for item, want in telling_rows(rng, _steps(episode.task))]


def _fenced(program: str) -> str:
    return f"```python\n{program}\n```"


class Code(ToolEnvironment):
    """A function over a list of whole numbers: described in steps, with two examples that are not the tests.

    Code can be tried in a session of its own before the last turn submits the whole function in one fenced
    block. The problem's key is what the function does, so two descriptions of one function share a split.
    """

    name: ClassVar[str] = "code"
    horizon: ClassVar[int] = 6
    system: ClassVar[str] = (
        "Write the Python function that is described. You can try code with the tool. Finish with the whole "
        "function in one block:\n```python\n...\n```"
    )
    variants: ClassVar[Mapping[str, Variant]] = {
        "base": Variant("two steps"),
        "scale": Variant("four steps", "scale"),
        "surface": Variant("other words for every step", "surface"),
        "rule": Variant("the function, the tool and its argument have other names", "rule"),
    }
    rewards = (code_function(_calls, _function, seconds=2.0, name="right_function"),)
    success: ClassVar[str] = "right_function"

    _session: PythonSession | None = None

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        steps = draw_steps(rng, 4 if variant == "scale" else 2)
        name = "transform" if variant == "rule" else "solve"
        listed = "\n".join(
            f"{i}. {text}" for i, text in enumerate(in_words(steps, other=variant == "surface"), 1)
        )
        examples = [[rng.randint(-12, 20) for _ in range(size)] for size in (6, 7)]
        shown = " and ".join(f"{name}({item}) returns {function_of(steps)(list(item))}" for item in examples)
        text = (
            f"Write {name}(numbers), which takes a list of whole numbers and does this, in this order:\n"
            f"{listed}\nFor example, {shown}."
        )
        metadata = {"steps": [list(step) for step in steps], "function": name, "example": examples[0]}
        return Draft(behaviour(steps), text, in_python(steps, name), metadata)

    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action]:
        program, name = str(task.reference), task.metadata["function"]
        code = f"{program}\n\n{name}({task.metadata['example']})"
        tried = call("execute", program=code) if task.variant == "rule" else call("python", code=code)
        return (tried, answer(_fenced(program)))

    @classmethod
    def equivalents(cls, task: Task) -> Sequence[Sequence[Action]]:
        return ((answer(f"This should do:\n{_fenced(str(task.reference))}\nI did not try it."),),)

    async def reset(self, task: Task) -> tuple[Message, ...]:
        self._session = PythonSession(await _BOX.get())
        return await super().reset(task)

    def tools(self) -> tuple[Tool, ...]:
        own = self._session.tools() if self._session else ()
        if self.task.variant != "rule":
            return own
        return tuple(item.renamed("execute", arguments={"code": "program"}) for item in own)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def state(self) -> Mapping[str, Any]:
        return {"answer": self.answer}

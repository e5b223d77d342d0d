"""Repair one function of a small package, found by the report of a wrong result; hidden tests decide.

This module must not run what the policy wrote: the sandbox does, in the tools and in the reward.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

from surefoot.core.errors import DataError
from surefoot.core.types import Action, Message, Scored, Step, Task, Trust
from surefoot.envs.base import Draft, ToolEnvironment, Variant, answer, call
from surefoot.envs.pipelines import (
    Steps,
    behaviour,
    draw_list,
    draw_steps,
    faulty,
    function_of,
    in_python,
    in_words,
    telling_rows,
)
from surefoot.rewards.base import Episode, reward
from surefoot.rewards.verifiers.code import Call, code_function
from surefoot.rewards.verifiers.pytests import Repository, repository_tests
from surefoot.rewards.verifiers.submission import verified
from surefoot.sandbox import Limits, Profile, SharedSandbox
from surefoot.sandbox.session import SessionEnded
from surefoot.tools.base import Tool, tool
from surefoot.tools.shell import ShellSession

_BOX = SharedSandbox(
    profile=Profile("repo", packages=("pytest",)),
    limits=Limits(seconds=10, cpu_seconds=20, memory_mb=256, processes=24, files_mb=16),
)
_PACKAGES = ("ledger", "orchard", "harbor", "meadow", "foundry", "lantern")
_MODULES = ("intake", "scales", "report", "sieve", "shelf", "gauge", "relay", "spool")
_FUNCTIONS = (
    "adjust", "arrange", "collect", "condense", "derive", "gather", "measure", "prepare", "refine",
    "resolve", "settle", "shape", "summarise", "trim", "weigh",
)  # fmt: skip
_ROWS = 6
_TELLING = 3  # rows of the repaired function's test that the mistake fails, at least
_MOST_BYTES = 100_000
_EDIT = """
def _edit(path, old, new):
    with open(path) as file:
        text = file.read()
    if text.count(old) != 1:
        raise ValueError(f"the old text stands {{text.count(old)}} times in {{path}}; it must stand once")
    with open(path, "w") as file:
        file.write(text.replace(old, new))
    print("edited")
_edit({path!r}, {old!r}, {new!r})
"""


@dataclass(frozen=True, slots=True)
class _Package:
    """One problem: the files that the agent gets, where the mistake is, and what grades the repair."""

    files: Mapping[str, str]
    path: str
    name: str
    steps: Steps
    right: str
    wrong_body: str
    right_body: str
    issue: str
    key: str
    task: Repository


def _test(module: str, name: str, rows: Sequence[tuple[list[int], Any]]) -> str:
    ids = [f"row{i}" for i in range(len(rows))]
    return (
        f"import pytest\nfrom {module} import {name}\n\n\n"
        f"@pytest.mark.parametrize('given, want', {list(rows)!r}, ids={ids!r})\n"
        f"def test_{name}(given, want):\n    assert {name}(given) == want\n"
    )


def _rows(rng: random.Random, steps: Steps, wrong: Steps) -> list[tuple[list[int], Any]]:
    """Lists with the right results, of which ``wrong`` fails some."""
    right, mistaken = function_of(steps), function_of(wrong)
    while True:
        lists = [draw_list(rng) for _ in range(_ROWS)]
        if steps == wrong or sum(right(v) != mistaken(v) for v in lists) >= _TELLING:
            return [(item, right(list(item))) for item in lists]


@lru_cache(maxsize=1024)
def _package(seed: int, modules: int, other_words: bool) -> _Package:
    rng = random.Random(seed)
    package = rng.choice(_PACKAGES)
    paths = [f"{package}/{name}.py" for name in rng.sample(_MODULES, modules)]
    names = rng.sample(_FUNCTIONS, 2 * modules)
    steps = {name: draw_steps(rng, 2) for name in names}
    target, sibling = rng.sample(names, 2)
    wrong = faulty(rng, steps[target])
    files = {f"{package}/__init__.py": f'"""The package {package}."""\n', "README.md": f"# {package}\n"}
    right = place = ""
    for i, path in enumerate(paths):
        own = names[2 * i : 2 * i + 2]
        files[path] = _module(own, steps, {target: wrong})
        if target in own:
            right, place = _module(own, steps, {}), path
    where = {name: f"{package}.{paths[i // 2].split('/')[1][:-3]}" for i, name in enumerate(names)}
    tests, nodes = _tests(rng, steps, wrong, target, sibling, where)
    told = draw_list(rng)
    while not _differs(steps[target], wrong, told):
        told = draw_list(rng)
    return _Package(
        files=files,
        path=place,
        name=target,
        steps=steps[target],
        right=right,
        wrong_body=_body(wrong, target),
        right_body=_body(steps[target], target),
        issue=_issue(package, target, told, steps[target], wrong, other_words),
        key=f"{behaviour(steps[target])} {behaviour(wrong)}",
        task=Repository(
            tree={path: text.encode() for path, text in (files | tests).items()},
            editable=(f"{package}/*.py",),
            solution={place: right.encode()},
            fail_to_pass=nodes[0],
            pass_to_pass=nodes[1],
            paths=(".",),
        ),
    )


def _module(names: Sequence[str], steps: Mapping[str, Steps], changed: Mapping[str, Steps]) -> str:
    """Functions whose docstrings say what they should do, whatever their code does."""
    parts = [_body(changed.get(name, steps[name]), name, in_words(steps[name])) for name in names]
    return "\n\n\n".join(parts) + "\n"


def _body(steps: Steps, name: str, words: Sequence[str] = ()) -> str:
    doc = ["Do this with the numbers, in this order:", "", *(f"- {text}" for text in words)] if words else ()
    return in_python(steps, name, doc)


def _tests(
    rng: random.Random,
    steps: Mapping[str, Steps],
    wrong: Steps,
    target: str,
    sibling: str,
    where: Mapping[str, str],
) -> tuple[dict[str, str], tuple[tuple[str, ...], tuple[str, ...]]]:
    """(test files, (nodes that the mistake fails, nodes that it passes))."""
    files: dict[str, str] = {}
    failing: list[str] = []
    passing: list[str] = []
    for name, mistaken in ((target, wrong), (sibling, steps[sibling])):
        rows = _rows(rng, steps[name], mistaken)
        path = f"tests/test_{name}.py"
        files[path] = _test(where[name], name, rows)
        for i, (given, want) in enumerate(rows):
            fails = function_of(mistaken)(list(given)) != want
            (failing if fails else passing).append(f"{path}::test_{name}[row{i}]")
    return files, (tuple(failing), tuple(passing))


def _differs(steps: Steps, wrong: Steps, v: list[int]) -> bool:
    return bool(function_of(steps)(list(v)) != function_of(wrong)(list(v)))


def _issue(package: str, name: str, told: list[int], steps: Steps, wrong: Steps, other_words: bool) -> str:
    got, want = function_of(wrong)(list(told)), function_of(steps)(list(told))
    if other_words:
        return (
            f"A user of {package} complains: calling {name} with {told} gave {got}. By its documentation it "
            f"had to be {want}. Find the mistake and repair it."
        )
    return f"In the package {package}, {name}({told}) returns {got}, but it should return {want}. Repair it."


def _of(task: Task) -> _Package:
    return _package(task.metadata["seed"], task.metadata["modules"], task.variant == "surface")


_passes = repository_tests(
    lambda episode: _of(episode.task).task, lambda episode: episode.state["files"], seconds=10.0
)


def _calls(episode: Episode, rng: random.Random) -> list[Call]:
    return [Call((given,), want) for given, want in telling_rows(rng, _of(episode.task).steps)]


def _importing(episode: Episode) -> str:
    made = _of(episode.task)
    module = made.path.removesuffix(".py").replace("/", ".")
    return f"import sys\nsys.path.insert(0, '.')\nfrom {module} import {made.name}\n"


def _package_files(episode: Episode) -> dict[str, bytes]:
    """The package as the agent left it, without tests."""
    left = {**_of(episode.task).files, **episode.state["files"]}
    return {path: text.encode() for path, text in left.items()}


_computes = code_function(
    _calls, lambda episode: _of(episode.task).name, source=_importing, files=_package_files, seconds=5.0,
    name="repaired",
)  # fmt: skip


@reward(trust=Trust.VERIFIED, resolution=1.0, seconds=_passes.seconds + _computes.seconds)
async def repaired(episode: Episode) -> Scored:
    """1 when the hidden tests pass with the files as the agent left them, and hidden calls of the function.

    Tests run beside the package, so it can see what they expect; what the calls expect stays outside.
    Without a change 0 and no run.
    """
    if not episode.state["files"]:
        return verified(0.0, "repaired", "nothing was changed and submitted")
    tested = cast("Scored", await _passes(episode))
    return tested if tested.value < 1.0 else cast("Scored", await _computes(episode))


class Repo(ToolEnvironment):
    """A small package in which one function does not do what its docstring says.

    The agent works in a folder of its own, with a shell, Python and an editor; there is no version history
    and no test in it. What stands in the package's files when it gives its final answer is graded by tests
    that it never sees. Needs a sandbox tier in which code may start processes.
    """

    name: ClassVar[str] = "repo"
    horizon: ClassVar[int] = 10
    system: ClassVar[str] = (
        "Repair the code in the working folder with the tools. Then say, without a call, that it is repaired."
    )
    variants: ClassVar[Mapping[str, Variant]] = {
        "base": Variant("two modules with two functions each"),
        "scale": Variant("five modules", "scale"),
        "surface": Variant("the report has other words", "surface"),
        "tool": Variant("there is no editor, only the shell and Python", "tool"),
    }
    rewards = (repaired,)
    success: ClassVar[str] = "repaired"

    _session: ShellSession | None = None
    _touched: bool = False
    _changed: Mapping[str, str] = {}

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        metadata = {"seed": rng.getrandbits(48), "modules": 5 if variant == "scale" else 2}
        made = _package(metadata["seed"], metadata["modules"], variant == "surface")
        return Draft(made.key, made.issue, made.right, metadata)

    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action]:
        made = _of(task)
        look = call("shell", command=f"grep -rn -A 12 'def {made.name}' .")
        if task.variant == "tool":
            code = f"open({made.path!r}, 'w').write({made.right!r})"
            return (look, call("python", code=code), answer("Repaired."))
        # The code below the docstring, which is the same in both: the lines from the first assignment on.
        old, new = (body[body.index("    v = ") :] for body in (made.wrong_body, made.right_body))
        source = made.files[made.path]
        begin = source.index(old, source.index(f"def {made.name}("))
        quote = source[source.index(f"def {made.name}(") : begin]
        return (look, call("edit", path=made.path, old=quote + old, new=quote + new), answer("Repaired."))

    async def reset(self, task: Task) -> tuple[Message, ...]:
        files = {path: text.encode() for path, text in _of(task).files.items()}
        self._session = ShellSession(await _BOX.get(), files=files)
        return await super().reset(task)

    def tools(self) -> tuple[Tool, ...]:
        shown = [item for item in super().tools() if self.task.variant != "tool" or item.name != "edit"]
        return tuple(self._own.bounded(item) for item in shown)

    @property
    def _own(self) -> ShellSession:
        assert self._session is not None  # reset made it
        return self._session

    @tool
    async def shell(self, command: str) -> str:
        """Run a command of the shell in the working folder; files are kept, variables are not."""
        self._touched = True
        return await self._own.shell(command)

    @tool
    async def python(self, code: str) -> str:
        """Run Python code in the working folder; what it prints and the value of its last line come back."""
        self._touched = True
        return await self._own.run(code)

    @tool
    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text in a file by another one; the old text must stand in the file exactly once."""
        self._touched = True
        return await self._own.run(_EDIT.format(path=path, old=old, new=new))

    async def step(self, action: Action) -> Step:
        result = await super().step(action)
        if result.terminated and self._touched:
            self._changed = await self._changes()
        return result

    async def _changes(self) -> dict[str, str]:
        """The package's files that differ from how they were. One that cannot be read counts as it was."""
        found: dict[str, str] = {}
        for path, before in _of(self.task).files.items():
            try:
                content = await self._own.read_file(path)
            except (DataError, SessionEnded):
                continue
            text = content.decode("utf-8", "backslashreplace")
            if path.endswith(".py") and text != before and len(content) <= _MOST_BYTES:
                found[path] = text
        return found

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def state(self) -> Mapping[str, Any]:
        return {"answer": self.answer, "files": dict(self._changed)}

"""Verified rewards for programs, judged by what they compute: functions by values, scripts by output.

Expected values never enter the sandbox; all comparing is done here. This module must not run
submitted code itself.
"""

from __future__ import annotations

import json
import math
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.seeds import derive
from surefoot.core.types import Scored, Trust
from surefoot.rewards.base import Episode, Reward, reward
from surefoot.rewards.verifiers.children.wire import pack, same, unpack
from surefoot.rewards.verifiers.execution import Executor, Host, Job, Opener, Ran
from surefoot.rewards.verifiers.submission import Submission, submitted, verified

_MOST_SOURCE = 100_000
_CHILDREN = Path(__file__).parent / "children"
_MOST_OUTPUT = 1 << 20
WALL = 4.0  # wall seconds for each second of CPU time, so that a busy machine fails nobody
_REPEATS = 2
_BATCH = 8
_START_SECONDS = 60.0


def _no_keywords() -> Mapping[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Call:
    """One test of a function: plain arguments and the value that must come back."""

    args: tuple[object, ...]
    expected: object = None
    kwargs: Mapping[str, object] = field(default_factory=_no_keywords)


@dataclass(frozen=True, slots=True)
class Run:
    """One test of a script: what it reads from its input and what it must print."""

    stdin: str
    expected: str


Source = Callable[[Episode], str | None]
Calls = Callable[[Episode, random.Random], Sequence[Call]]
Files = Callable[[Episode], Mapping[str, bytes]]
Runs = Callable[[Episode, random.Random], Sequence[Run]]


def code_function(
    calls: Calls,
    function: str | Callable[[Episode], str] = "solve",
    *,
    accept: Callable[[Call, Any], bool] | None = None,
    tolerance: float = 0.0,
    partial: bool = False,
    seconds: float = 5.0,
    source: Source | None = None,
    files: Files | None = None,
    opener: Opener | None = None,
    name: str = "code_function",
    weight: float = 1.0,
) -> Reward:
    """1 when the submitted function returns the right value for every call, else 0.

    ``calls(episode, rng)`` gives the hidden tests; draw inputs from ``rng``, which differs between
    episodes, and compute what is expected outside. Values may be None, bool, int, float, complex, str,
    bytes, list, tuple, dict, set and frozenset, compared by exact type; floats within ``tolerance`` *
    max(1, |expected|). ``accept(call, value)`` replaces the comparison where several values are right;
    it must hold for ``expected``.
    ``partial`` pays the share of calls that pass; it then also pays special cases.
    The program is the one fenced block of the final turn, or what ``source`` takes from the episode.
    ``files(episode)``: path -> content of what lies in the program's folder, such as a package that the
    agent changed, and that a ``source`` of yours imports after ``sys.path.insert(0, '.')``.

    Held: each call runs twice, in shuffled order, each time in a fresh process that holds neither
    expected values, tests nor other calls; only plain data comes back, so exits, patched modules,
    objects that equal everything, walked frames and files read there gain nothing. A call that raises,
    exits, overruns ``seconds`` of CPU time (four times that on the wall clock), or answers differently
    the second time fails.
    Not stopped: guessing where few values are possible; so tests with one expected value for all
    calls are refused (a constant would pass), and more calls make guessing less likely.
    """
    _check_options(name, tolerance, seconds)
    host = Host(opener or _sandbox(seconds))

    def build(episode: Episode, program: str) -> list[_Test]:
        tests = calls(episode, random.Random(derive("code calls", episode.id)))
        if not accept and len({_text(test.expected) for test in tests}) < 2:
            raise DataError(f"task {episode.task.id}: fewer than two different expected values")
        target = function if isinstance(function, str) else function(episode)
        beside = files(episode) if files else {}
        return [_call_test(test, program, target, accept, tolerance, beside) for test in tests]

    return _code_reward(name, weight, build, host, partial, seconds, source)


def code_program(
    runs: Runs,
    *,
    partial: bool = False,
    seconds: float = 5.0,
    source: Source | None = None,
    opener: Opener | None = None,
    name: str = "code_program",
    weight: float = 1.0,
) -> Reward:
    """1 when the submitted script prints what is expected for every input and ends with code 0, else 0.

    Output is compared outside, line by line without trailing blanks. Everything else is as in
    :func:`code_function`: hidden tests, two runs each in fresh processes, expected output never inside.
    """
    _check_options(name, 0.0, seconds)
    host = Host(opener or _sandbox(seconds))

    def build(episode: Episode, program: str) -> list[_Test]:
        tests = runs(episode, random.Random(derive("code runs", episode.id)))
        if len({_lines(test.expected) for test in tests}) < 2:
            raise DataError(f"task {episode.task.id}: fewer than two different expected outputs")
        return [_run_test(test, program) for test in tests]

    return _code_reward(name, weight, build, host, partial, seconds, source)


def _check_options(name: str, tolerance: float, seconds: float) -> None:
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ConfigError(f"{name}: tolerance is {tolerance}; it must be finite and >= 0")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"{name}: seconds is {seconds}; it must be > 0")


def _sandbox(seconds: float) -> Opener:
    def open_sandbox() -> AbstractAsyncContextManager[Executor]:
        from surefoot.sandbox import Limits, Sandbox

        limits = Limits(seconds=WALL * seconds, cpu_seconds=seconds, output_bytes=_MOST_OUTPUT)
        return cast("AbstractAsyncContextManager[Executor]", Sandbox.open(limits=limits))

    return open_sandbox


# --- tests


@dataclass(frozen=True, slots=True)
class _Test:
    """A program to run, and what its result must be. ``verdict`` gives why it fails, or nothing."""

    job: Job
    verdict: Callable[[Ran], str]


def _text(value: object) -> str:
    return json.dumps(pack(value))


@cache
def _driver() -> str:
    future = "from __future__ import annotations\n"
    parts = [
        (_CHILDREN / name).read_text("utf-8").replace(future, "") for name in ("wire.py", "call_driver.py")
    ]
    return future + "\n".join(parts)


def _call_test(
    test: Call,
    program: str,
    function: str,
    accept: Callable[[Call, Any], bool] | None,
    tolerance: float,
    files: Mapping[str, bytes],
) -> _Test:
    mark = secrets.token_hex(8)
    request = {
        "source": program,
        "function": function,
        "args": pack(test.args),
        "kwargs": pack(dict(test.kwargs)),
        "mark": mark,
    }

    def verdict(ran: Ran) -> str:
        try:
            value = _returned(ran, mark)
        except ValueError as error:
            return str(error)
        if accept is None:
            return "" if same(value, test.expected, tolerance) else "a wrong value"
        return "" if _accepts(accept, test, value) else "a value that is not accepted"

    return _Test(Job(_driver(), json.dumps(request).encode(), files), verdict)


def _accepts(accept: Callable[[Call, Any], bool], test: Call, value: Any) -> bool:
    try:
        right = accept(test, value)
    except Exception:
        # Odd values break checks. It is the value's fault if the check holds for the expected one.
        if accept(test, test.expected) is not True:
            raise
        return False
    if type(right) is not bool:
        raise DataError(f"accept returned {right!r}; it must return True or False")
    return right


def _returned(ran: Ran, mark: str) -> Any:
    """The value that a run claims its function returned. Raises ValueError when it claims none."""
    if ran.status != "ok":
        raise ValueError(f"ended with {ran.status}")
    lines = [line for line in ran.stdout.splitlines() if line.startswith(f"{mark} ")]
    if len(lines) != 1:
        raise ValueError("ended without a result")
    try:
        reply = json.loads(lines[0][len(mark) + 1 :])
    except (ValueError, RecursionError) as error:
        raise ValueError("wrote no plain data") from error
    if not isinstance(reply, dict) or "value" not in reply:
        shown = cast("dict[str, object]", reply).get("error") if isinstance(reply, dict) else None
        raise ValueError(f"raised {str(shown)[:200]}")
    return unpack(cast("dict[str, Any]", reply)["value"])


def _lines(text: str) -> tuple[str, ...]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return tuple(lines)


def _run_test(test: Run, program: str) -> _Test:
    def verdict(ran: Ran) -> str:
        if ran.status != "ok" or ran.exit_code != 0:
            return f"ended with {ran.status}, exit code {ran.exit_code}"
        return "" if _lines(ran.stdout) == _lines(test.expected) else "wrong output"

    return _Test(Job(program, test.stdin.encode()), verdict)


# --- the reward


def _code_reward(
    name: str,
    weight: float,
    build: Callable[[Episode, str], list[_Test]],
    host: Host,
    partial: bool,
    seconds: float,
    source: Source | None,
) -> Reward:
    async def grade(episode: Episode) -> Scored:
        found = _program(episode, source)
        tests = build(episode, found.text or "")  # broken tests are Unscored whatever was submitted
        if found.text is None:
            return verified(0.0, name, found.reason)
        failed = await _failures(tests, host, episode, seconds, stop=not partial)
        passed = len(tests) - len(failed)
        evidence = f"{passed} of {len(tests)} pass" if partial or not failed else "not all pass"
        if failed:
            index = min(failed)
            evidence += f"; test {index}: {failed[index]}"
        return verified(passed / len(tests) if partial else float(not failed), name, evidence)

    return _declared(name, weight, grade, partial)


def _declared(
    name: str, weight: float, grade: Callable[[Episode], Awaitable[Scored]], partial: bool
) -> Reward:
    @reward(
        trust=Trust.VERIFIED, weight=weight, name=name, resolution=None if partial else 1.0, seconds=600.0
    )
    async def score(episode: Episode) -> Scored:
        return await grade(episode)

    return score


def _program(episode: Episode, source: Source | None) -> Submission:
    if source is None:
        found = submitted(episode.answer, "fence")
    else:
        text = source(episode)
        found = Submission(text) if text and text.strip() else Submission(None, "no program")
    if found.text is not None and len(found.text) > _MOST_SOURCE:
        return Submission(None, f"the program has {len(found.text)} characters; {_MOST_SOURCE} are run")
    return found


async def _failures(
    tests: Sequence[_Test], host: Host, episode: Episode, seconds: float, *, stop: bool
) -> dict[int, str]:
    """Test number -> why it fails. Every test runs twice, all in one shuffled order, in batches."""
    order = [index for index in range(len(tests)) for _ in range(_REPEATS)]
    random.Random(derive("code order", episode.id)).shuffle(order)
    failed: dict[int, str] = {}
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        found = await host.run(
            [tests[index].job for index in batch], _START_SECONDS + len(batch) * (WALL * seconds + 2)
        )
        for index, ran in zip(batch, found, strict=True):
            if why := tests[index].verdict(ran):
                failed.setdefault(index, why)
        if failed and stop:
            break
    return failed

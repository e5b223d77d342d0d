"""The code environment: problems are told apart by what they compute, and only a right function is paid."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.audit.checks import check_environment
from surefoot.audit.play import play
from surefoot.core.deadlines import WorkerPool
from surefoot.core.types import SPLITS, Action, Scored, Task
from surefoot.envs import pipelines
from surefoot.envs.base import answer, call
from surefoot.envs.code import Code, _calls
from surefoot.rewards.base import Episode
from surefoot.sandbox import SandboxFault, probe

seeds = st.integers(0, 2**31)


@pytest.fixture(scope="module")
def sandbox() -> None:
    try:
        asyncio.run(probe())
    except SandboxFault as error:
        pytest.skip(f"no sandbox tier works on this machine: {error}")


def some(variant: str = "base", limit: int = 1) -> list[Task]:
    return list(Code.tasks("train", variant, limit=limit))


def value(task: Task, *actions: Action) -> float:
    episode = asyncio.run(play(Code, task, actions))
    pool = WorkerPool()
    (found,) = asyncio.run(Code.rewards[0].score([episode], pool))
    pool.close()
    assert isinstance(found, Scored), found
    return found.value


# --- functions in words and in Python


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(2, 4))
def test_a_function_does_what_its_steps_say_and_none_of_them_is_idle(seed: int, count: int) -> None:
    steps = pipelines.draw_steps(random.Random(seed), count)
    assert len(steps) == count + 1 == len(pipelines.in_words(steps))
    shorter = list(pipelines.shorter(steps))
    assert len(shorter) == count
    assert pipelines.behaviour(steps) not in {pipelines.behaviour(less) for less in shorter}
    assert not set(pipelines.in_words(steps)) & set(pipelines.in_words(steps, other=True))
    given_list = pipelines.draw_list(random.Random(seed))
    kept = list(given_list)
    pipelines.function_of(steps)(given_list)
    assert given_list == kept, "the caller's list stays as it is"


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_a_mistake_shows(seed: int) -> None:
    rng = random.Random(seed)
    steps = pipelines.draw_steps(rng, 2)
    assert pipelines.behaviour(pipelines.faulty(rng, steps)) != pipelines.behaviour(steps)


def test_functions_that_always_agree_are_one_problem() -> None:
    one = (("even", 0), ("ascending", 0), ("sum", 0))
    other = (("even", 0), ("reverse", 0), ("sum", 0))
    assert pipelines.behaviour(one) == pipelines.behaviour(other)
    assert pipelines.behaviour(one) != pipelines.behaviour((("odd", 0), ("ascending", 0), ("sum", 0)))


# --- tasks


def test_a_function_stands_in_one_split_over_seeds_and_variants() -> None:
    owners: dict[str, str] = {}
    for split in SPLITS:
        for variant in ("base", "surface", "rule"):
            for seed in (0, 1):
                for task in Code.tasks(split, variant, seed=seed, limit=40):
                    key = pipelines.behaviour(tuple((name, k) for name, k in task.metadata["steps"]))
                    assert owners.setdefault(key, split) == split


def test_hidden_calls_differ_between_episodes_and_fail_a_constant_and_a_missing_step() -> None:
    (task,) = some("scale")
    steps = tuple((name, k) for name, k in task.metadata["steps"])
    episode = Episode("e", task, (), (), None, False, None, {})  # type: ignore[arg-type]
    calls, others = (_calls(episode, random.Random(seed)) for seed in (1, 2))
    assert [item.args for item in calls] != [item.args for item in others]
    assert len({repr(item.expected) for item in calls}) >= 4
    for less in pipelines.shorter(steps):
        assert any(pipelines.function_of(less)(list(item.args[0])) != item.expected for item in calls)  # type: ignore[call-overload]


_NEAR = [
    ("n > {k}]", "n >= {k}]"), ("n < {k}]", "n <= {k}]"), ("v[:{k}]", "v[: {k} + 1]"),
    ("v[{k}:]", "v[{k} - 1 :]"),
    ("list(dict.fromkeys(v))", "sorted(set(v))"), ("v[::2]", "v[1::2]"), ("n % {k} for", "abs(n) % {k} for"),
    ("max(v, default=0)", "max(v)"), ("max(v, default=0)", "max([0, *v])"), ("(v or [0])[-1]", "v[-1]"),
]  # fmt: skip


def test_hidden_calls_fail_what_is_almost_right() -> None:
    rng = random.Random(3)
    found: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for _ in range(300):
        steps = pipelines.draw_steps(rng, 2)
        right, source = pipelines.function_of(steps), pipelines.in_python(steps, "f")
        pairs = {(a.format(k=k), b.format(k=k)) for _, k in steps for a, b in _NEAR}
        for old, new in sorted(pair for pair in pairs if pair[0] in source):
            scope: dict[str, Any] = {}
            exec(source.replace(old, new), scope)
            probes = [pipelines.draw_list(rng) for _ in range(200)]
            if sum(_raises_or_differs(scope["f"], right, v) for v in probes) < 4:
                continue  # it shows on hardly any list
            found[new] += 1
            rows = pipelines.telling_rows(rng, steps)
            missed[new] += not any(_raises_or_differs(scope["f"], right, v) for v, _ in rows)
    assert sum(found.values()) > 150 and sum(missed.values()) <= 1, missed


def _raises_or_differs(wrong: Any, right: Any, v: list[int]) -> bool:
    try:
        return wrong(list(v)) != right(list(v))
    except (ValueError, IndexError):
        return True


# --- episodes


@pytest.mark.parametrize("variant", Code.variants)
def test_the_oracle_and_what_equals_it_are_paid(sandbox: None, variant: str) -> None:
    (task,) = some(variant)
    plays: Sequence[Sequence[Action]] = [Code.oracle(task), *Code.equivalents(task)]
    assert [value(task, *actions) for actions in plays] == [1.0, 1.0]


def test_a_step_too_few_is_not_paid(sandbox: None) -> None:
    (task,) = some()
    steps = tuple((name, k) for name, k in task.metadata["steps"])
    for less in pipelines.shorter(steps):
        program = pipelines.in_python(less, "solve")
        assert value(task, answer(f"```python\n{program}\n```")) == 0.0


def test_the_session_keeps_its_names_until_the_episode_ends(sandbox: None) -> None:
    (task,) = some()
    episode = asyncio.run(
        play(Code, task, [call("python", code="x = 20"), call("python", code="x + 1"), answer("x")])
    )
    assert episode.tool_results[1].content == "21"
    again = asyncio.run(play(Code, task, [call("python", code="x"), answer("x")]))
    assert "NameError" in again.tool_results[0].content


@pytest.mark.slow
def test_the_environment_holds_its_promises(sandbox: None) -> None:
    found = check_environment(Code, tasks=5, seconds=120.0)
    assert found.ok, [item for item in found.items if item.ok is False]

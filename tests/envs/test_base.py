"""One instance is one episode, and a problem belongs to one split."""

from __future__ import annotations

import asyncio
import random
from itertools import chain, cycle, islice
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, EnvironmentFault
from surefoot.core.seeds import derive
from surefoot.core.types import SPLITS, Action, Finish, MalformedCall, Message, Step, Task
from surefoot.envs.base import (
    Draft,
    Environment,
    ToolEnvironment,
    Variant,
    answer,
    call,
    in_turns,
    make_tasks,
)
from surefoot.envs.loading import load_environment
from surefoot.tools.base import tool


class Echo(ToolEnvironment):
    name = "echo"
    horizon = 3
    system = "Say it."
    variants: ClassVar = {"base": Variant("small"), "scale": Variant("large", "scale")}

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        number = rng.randint(0, 99 if variant == "base" else 999)
        return Draft(str(number), f"{rng.choice(('Say', 'Tell'))} {number}", str(number))

    @tool
    def shout(self, text: str) -> str:
        """Shout."""
        return text.upper()


def one() -> Task:
    return next(Echo.tasks("train"))


def drive(*actions: Action, task: Task | None = None) -> tuple[Echo, list[Step]]:
    async def scenario() -> tuple[Echo, list[Step]]:
        env = Echo()
        await env.reset(task or one())
        return env, [await env.step(action) for action in actions]

    return asyncio.run(scenario())


def test_E20_step_after_end_raises() -> None:
    for last in (answer("done"), Action("cut", finish=Finish.LENGTH)):
        with pytest.raises(EnvironmentFault, match="after the episode ended"):
            drive(last, answer("again"))
    with pytest.raises(EnvironmentFault, match="after the episode ended"):
        drive(*[call("shout", text="a")] * 4)


def test_step_before_reset_and_second_reset_raise() -> None:
    async def early() -> None:
        await Echo().step(answer("x"))

    async def twice() -> None:
        env = Echo()
        await env.reset(one())
        await env.reset(one())

    with pytest.raises(EnvironmentFault, match="before reset"):
        asyncio.run(early())
    with pytest.raises(EnvironmentFault, match="reset called twice"):
        asyncio.run(twice())


def test_guards_hold_through_a_subclass_that_calls_its_parent() -> None:
    class Loud(Echo):
        async def reset(self, task: Task) -> tuple[Message, ...]:
            return await super().reset(task)

        async def step(self, action: Action) -> Step:
            return await super().step(action)

    async def scenario() -> None:
        env = Loud()
        await env.reset(one())
        assert (await env.step(answer("x"))).terminated
        with pytest.raises(EnvironmentFault):
            await env.step(answer("x"))

    asyncio.run(scenario())


def test_step_that_returns_no_step_is_a_fault() -> None:
    class Bad(Echo):
        async def step(self, action: Action) -> Step:
            return (), 0.0  # type: ignore[return-value]

    async def scenario() -> None:
        env = Bad()
        await env.reset(one())
        await env.step(answer("x"))

    with pytest.raises(EnvironmentFault, match="returned tuple"):
        asyncio.run(scenario())


def test_turn_without_call_answers_and_turn_with_call_observes() -> None:
    env, steps = drive(call("shout", text="hi"), answer("  HI \n"))
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (True, False)]
    assert steps[0].observation == (Message("tool", "HI", (), "call_0"),)
    assert (env.answer, env.state()) == ("HI", {"answer": "HI"})


def test_cut_turn_runs_no_tool_and_submits_no_answer() -> None:
    cut = Action("", call("shout", text="hi").tool_calls, finish=Finish.LENGTH)
    env, (step,) = drive(cut)
    assert (step.truncated, step.observation, env.answer) == (True, (), None)


def test_malformed_call_is_an_observation_and_no_answer() -> None:
    env, (step,) = drive(Action("x", malformed=(MalformedCall("{", "it is cut"),)))
    assert not step.terminated
    assert "it is cut" in step.observation[0].content
    assert env.answer is None


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 15))
def test_E22_splits_share_no_problem_for_any_seed_and_size(seed: int, size: int) -> None:
    for variant in Echo.variants:
        found = {
            split: {
                task.reference
                for other in (seed, 0)
                for task in Echo.tasks(split, variant, seed=other, limit=size)
            }
            for split in SPLITS
        }
        assert not found["train"] & found["test"]
        assert not found["train"] & found["dev"]
        assert not found["dev"] & found["test"]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 10), st.integers(0, 10))
def test_E22_item_i_of_a_split_is_the_same_whatever_ran_before(seed: int, i: int, drawn: int) -> None:
    alone = [task.id for task in Echo.tasks("test", seed=seed, limit=i)]
    running = Echo.tasks("train", seed=seed)
    for _ in range(drawn):
        next(running)
        random.random()
    more = [task.id for task in Echo.tasks("test", seed=seed, limit=i + 5)]
    assert more[:i] == alone


def test_tasks_have_no_duplicates_and_end_when_the_space_is_used_up() -> None:
    every = [task for split in SPLITS for task in Echo.tasks(split)]
    assert len({task.id for task in every}) == len(every) == 100


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4))
def test_in_turns_takes_each_kind_once_a_round_in_its_own_order(seed: int, kinds: int) -> None:
    every = list(Echo.tasks("train", seed=seed))

    def kind(task: Task) -> int:
        return derive("kind", task.id) % kinds

    found = list(in_turns(iter(every), kind, range(kinds)))
    assert [kind(task) for task in found] == [i % kinds for i in range(len(found))]
    rarest = min(sum(kind(task) == one for task in every) for one in range(kinds))
    assert rarest * kinds <= len(found) < (rarest + 1) * kinds
    for one in range(kinds):
        own = [task.id for task in every if kind(task) == one]
        mine = [task.id for task in found if kind(task) == one]
        assert mine == own[: len(mine)]


def test_in_turns_refuses_a_kind_it_was_not_told_of() -> None:
    with pytest.raises(ConfigError, match=r"kind 'x'.*\['y'\]"):
        next(in_turns(Echo.tasks("train"), lambda _: "x", ["y"]))


def test_in_turns_gives_up_on_a_kind_that_never_comes() -> None:
    endless = cycle(islice(Echo.tasks("train"), 1))
    with pytest.raises(ConfigError, match=r"10000 tasks.*kind 'y'"):
        next(in_turns(endless, lambda _: "x", ["y", "x"]))


def test_in_turns_ends_when_a_kind_comes_no_more() -> None:
    first, second = islice(Echo.tasks("train"), 2)
    found = in_turns(chain([first], cycle([second])), lambda task: task.id, [first.id, second.id])
    assert [task.id for task in found] == [first.id, second.id]


def test_key_decides_the_split_not_the_phrasing() -> None:
    def phrased(rng: random.Random, variant: str) -> Draft:
        number = rng.randint(0, 30)
        return Draft(str(number), f"{variant} {rng.random()} {number}", number)

    owners: dict[Any, str] = {}
    for variant in ("a", "b"):
        for split in SPLITS:
            for task in make_tasks("phrased", phrased, split, variant):
                assert owners.setdefault(task.reference, split) == split
    assert len(owners) == 31


def test_system_text_stands_first_once() -> None:
    assert [message.role for message in one().prompt] == ["system", "user"]


def test_unknown_split_and_variant_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'train'"):
        Echo.tasks("trian")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'scale'"):
        Echo.tasks("train", "scales")


def test_loading_finds_built_ins_and_files_and_says_what_is_wrong(tmp_path: Any) -> None:
    assert load_environment("calculator").name == "calculator"
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        load_environment("calculater")
    head = "from surefoot import ToolEnvironment, Variant\nclass Mine(ToolEnvironment):\n"
    variants = "    name = 'm'\n    variants = {'base': Variant('b'), 'x': Variant('x')}\n"
    cases = {
        "    name = ''\n": "name is empty",
        "    name = 'm'\n": "at least one held-out",
        "    name = 'm'\n    horizon = 0\n": "horizon is 0",
        variants + "    rewards = [len]\n": "rewards holds",
    }
    for number, (body, says) in enumerate(cases.items()):
        file = tmp_path / f"env{number}.py"
        file.write_text(head + body)
        with pytest.raises(ConfigError, match=says):
            load_environment(str(file))
    file = tmp_path / "fine.py"
    file.write_text(head + variants)
    assert load_environment(str(file)).name == "m"
    assert issubclass(load_environment(f"{file}:Mine"), Environment)


def test_a_variant_of_an_unknown_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Variant.axis = 'rul'; did you mean 'rule'"):
        Variant("renamed", "rul")  # type: ignore[arg-type]

"""In a rollout every refusal is an event, costs its penalty, and a rule that hangs costs one episode."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import pytest

from surefoot.core.types import Action, Group, StopReason, Task, ToolCall, Trust
from surefoot.engines.base import Engine
from surefoot.envs.base import Draft, ToolEnvironment, Variant, answer
from surefoot.policy.rendering import Codec, make_codec
from surefoot.policy.scratch import build_scratch
from surefoot.rewards.base import reward
from surefoot.rewards.suite import RewardSuite
from surefoot.rollout.episode import Limits
from surefoot.rollout.scheduler import Hooks, Rollouts
from surefoot.tools.base import tool
from surefoot.tools.gate import Allow, Gate, GateContext, Verdict, only_tools


@reward(trust=Trust.VERIFIED)
def done(episode: Any) -> float:
    return float(episode.answer == "done")


class Door(ToolEnvironment):
    """Knock, do not break."""

    name = "door"
    horizon = 3
    variants: ClassVar[dict[str, Variant]] = {"base": Variant("plain"), "other": Variant("same", "surface")}
    rewards = (done,)
    gate = Gate([only_tools("knock", penalty=0.5)])

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        return Draft(str(rng.randrange(10_000)), "Open the door.", "")

    @tool
    def knock(self) -> str:
        """Knock."""
        return "come in"

    @tool
    def kick(self) -> str:
        """Kick."""
        raise AssertionError("the gate must not let this through")

    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action]:
        both = (ToolCall("call_0", "kick", {}), ToolCall("call_1", "knock", {}))
        return (Action("", both), answer("done"))


@pytest.fixture(scope="module")
def codec() -> Codec:
    return make_codec(build_scratch(seed=0))


def perform(cls: type[Door], codec: Codec, limits: Limits) -> tuple[list[Group], list[Any]]:
    suite = RewardSuite(cls.rewards)
    rollouts = Rollouts(cls, codec, cast(Engine, None), suite, limits=limits, concurrency=2)
    events: list[Any] = []
    hooks = Hooks(on_event=lambda kind, fields: events.append((kind, fields)))
    return asyncio.run(rollouts.perform(list(cls.tasks("train", limit=1)), name="t", hooks=hooks)), events


def test_a_refusal_is_an_event_and_a_penalty_and_the_policys_own_action_stays_on_record(codec: Codec) -> None:
    (group,), events = perform(Door, codec, Limits())
    (trajectory,) = group.trajectories
    assert trajectory.stop is StopReason.ANSWERED
    assert [c.name for c in trajectory.turns[0].action.tool_calls] == ["kick", "knock"]
    assert [r.ok for r in trajectory.turns[0].tool_results] == [False, True]
    assert trajectory.turns[0].step_reward == -0.5
    ((kind, fields),) = events
    assert (kind, fields["id"], fields["verdict"], fields["tool"]) == ("gate", "t/0000/00", "refuse", "kick")


def test_a_rule_that_hangs_costs_one_episode_its_deadline(codec: Codec) -> None:
    def sleeps(call: ToolCall, context: GateContext) -> Verdict:
        time.sleep(1.5)
        return Allow()

    class Slow(Door):
        gate = Gate([sleeps])

    began = time.perf_counter()
    (group,), _ = perform(Slow, codec, Limits(env_seconds=0.3, retries=0))
    assert group.trajectories[0].stop is StopReason.ENV_TIMEOUT
    assert time.perf_counter() - began < 1.4

"""Runs many episodes side by side and returns them as scored groups, in a fixed order.

Slots take episodes from one queue; a group is scored as soon as its last member ends. What comes
out does not depend on timing. Must not know algorithms or weights.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from surefoot.core.deadlines import WorkerPool
from surefoot.core.seeds import derive
from surefoot.core.types import Action, Group, Sampling, Task, Trajectory
from surefoot.engines.base import Engine
from surefoot.envs.base import Environment
from surefoot.policy.rendering import Codec
from surefoot.rewards.base import Episode
from surefoot.rewards.suite import RewardSuite
from surefoot.rollout.episode import (
    Actor,
    EngineActor,
    EpisodePlan,
    Limits,
    PlayedEpisode,
    ScriptActor,
    play_episode,
)

OnEpisode = Callable[[Task, Trajectory, float], None]
OnEvent = Callable[[str, dict[str, object]], None]


def _no_episode(task: Task, trajectory: Trajectory, seconds: float) -> None:
    return


def _no_event(kind: str, fields: dict[str, object]) -> None:
    return


@dataclass(frozen=True, slots=True)
class Hooks:
    """Called as things happen: each finished episode (before it is scored), events, the stop signal."""

    on_episode: OnEpisode = _no_episode
    on_event: OnEvent = _no_event
    stopping: Callable[[], bool] = lambda: False


class Rollouts:
    """Collects groups from one environment class with one codec, engine and reward suite."""

    def __init__(
        self,
        cls: type[Environment],
        codec: Codec,
        engine: Engine,
        rewards: RewardSuite,
        *,
        limits: Limits,
        concurrency: int,
    ) -> None:
        self.cls, self.codec, self.engine, self.rewards = cls, codec, engine, rewards
        self.limits, self.concurrency = limits, concurrency
        self.workers = WorkerPool()

    async def collect(
        self,
        tasks: Sequence[Task],
        *,
        members: int,
        sampling: Sampling,
        name: str,
        seed: int,
        hooks: Hooks,
        first: int = 0,
    ) -> list[Group]:
        """``members`` episodes of every task, sampled by the engine.

        Ids are ``name/task number/member``, numbers from ``first``; all sampling follows from ``seed``,
        the task's id and these numbers.
        """
        actor = EngineActor(self.engine, self.codec, sampling)
        plans = [
            EpisodePlan(f"{name}/{i:04d}/{j:02d}", f"{name}/{i:04d}", task, derive(seed, task.id, i, j))
            for i, task in enumerate(tasks, first)
            for j in range(members)
        ]
        return await self._run(tasks, plans, members, lambda _: actor, sampling, hooks, self.engine)

    async def perform(self, tasks: Sequence[Task], *, name: str, hooks: Hooks) -> list[Group]:
        """One demonstrated episode of every task; tasks without a demonstration are left out."""
        scripts: dict[str, Sequence[Action]] = {}
        for task in tasks:
            actions = self.cls.demonstration(task)
            if actions is not None:
                scripts[task.id] = actions
        known = [task for task in tasks if task.id in scripts]
        plans = [
            EpisodePlan(f"{name}/{i:04d}/00", f"{name}/{i:04d}", task, 0) for i, task in enumerate(known)
        ]

        def script(plan: EpisodePlan) -> Actor:
            return ScriptActor(self.codec, scripts[plan.task.id])

        return await self._run(known, plans, 1, script, Sampling(), hooks, None)

    async def _run(
        self,
        tasks: Sequence[Task],
        plans: Sequence[EpisodePlan],
        members: int,
        choose: Callable[[EpisodePlan], Actor],
        sampling: Sampling,
        hooks: Hooks,
        engine: Engine | None,
    ) -> list[Group]:
        queue = deque(plans)
        done: dict[str, dict[str, PlayedEpisode]] = {}
        scoring: list[asyncio.Task[list[Trajectory]]] = []

        async def slot() -> None:
            try:
                while queue:
                    plan = queue.popleft()
                    began = time.perf_counter()
                    played = await play_episode(
                        plan,
                        self.cls,
                        choose(plan),
                        self.codec,
                        sampling=sampling,
                        limits=self.limits,
                        workers=self.workers,
                        stopping=hooks.stopping,
                    )
                    hooks.on_episode(plan.task, played.trajectory, time.perf_counter() - began)
                    _tell(hooks, played)
                    group = done.setdefault(plan.group_id, {})
                    group[plan.id] = played
                    if len(group) == members:
                        ordered = [group[key] for key in sorted(group)]
                        scoring.append(asyncio.create_task(self._score(ordered, hooks)))
            finally:
                if engine is not None:
                    engine.leave()

        slots = min(self.concurrency, len(plans))
        if engine is not None:
            for _ in range(slots):
                engine.enter()
        await run_all([asyncio.create_task(slot()) for _ in range(slots)])
        scored = {t.id: t for group in await asyncio.gather(*scoring) for t in group}
        by_task = [plans[i * members : (i + 1) * members] for i in range(len(tasks))]
        return [
            Group(task, tuple(scored[plan.id] for plan in own))
            for task, own in zip(tasks, by_task, strict=True)
        ]

    async def _score(self, played: Sequence[PlayedEpisode], hooks: Hooks) -> list[Trajectory]:
        views: list[Episode] = [item.view for item in played]
        outcomes = await self.rewards.score(views)
        return [
            replace(item.trajectory, scores=outcome.scores, final=outcome.final)
            for item, outcome in zip(played, outcomes, strict=True)
        ]


def _tell(hooks: Hooks, played: PlayedEpisode) -> None:
    trajectory = played.trajectory
    if trajectory.fault:
        fields: dict[str, object] = {
            "id": trajectory.id,
            "stop": trajectory.stop.value,
            "fault": trajectory.fault,
        }
        hooks.on_event("episode_fault", fields)
    for item in played.gate:
        hooks.on_event("gate", {"id": trajectory.id, **item})
    if played.closing_fault:
        hooks.on_event("close_fault", {"id": trajectory.id, "fault": played.closing_fault})


async def run_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all; when one fails, cancel the others before raising, so that none runs on unseen."""
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise

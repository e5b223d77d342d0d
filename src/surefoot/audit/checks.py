"""What an environment and its rewards must hold before anything is trained on them.

Every check plays real episodes, none uses a model. This module must not know one environment from
another: what it needs to know (answers, tools) it reads off tasks, oracles and schemas.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TypeVar

from surefoot.audit.exploits import (
    answer_shape,
    gold_text,
    hack_matrix,
    null_policies,
    plain_reference,
    plausible_call,
)
from surefoot.audit.play import Played, Policy, record
from surefoot.core.deadlines import WorkerPool
from surefoot.core.errors import ConfigError, DataError, EnvironmentFault, describe, nearest
from surefoot.core.types import SPLITS, Action, Scored, Split, Task, Unscored
from surefoot.envs.base import Environment
from surefoot.rewards.base import Episode, Reward
from surefoot.tools.base import Tool

T = TypeVar("T")

# Most that a policy without knowledge may solve: of the tasks that need work, and of all tasks.
_NULL_CALL = 0.1
_NULL_ALL = 0.5
# A share of fewer tasks, or an overlap sought in fewer, says little.
_NULL_TASKS = 60
_SPLIT_TASKS = 50
_CANARY_TEXT = "canary7f3a91c2e6"
_CANARY_NUMBER = 918273645546372819
_TIE = 1e-9
_AT_ONCE = 8  # episodes: more than the cores, since many wait for a sandbox


@dataclass(frozen=True, slots=True)
class CheckItem:
    """One thing that was checked. ``ok`` is None where it could not be, and ``detail`` says why."""

    name: str
    ok: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """All items of one check."""

    name: str
    items: tuple[CheckItem, ...]

    @property
    def ok(self) -> bool:
        """True when no item failed; items that could not be checked do not count."""
        return all(item.ok is not False for item in self.items)


_Verdict = tuple[bool | None, str]  # ok and detail of an item


def check_environment(
    cls: type[Environment], *, tasks: int = 20, seed: int = 0, seconds: float = 30.0
) -> Report:
    """Check the promises that every environment makes, on ``tasks`` train tasks of each variant.

    Null policies get at least 60 tasks, splits are compared on at least 50 for each of three seeds.
    An episode that takes longer than ``seconds`` fails its item. What the environment raises becomes
    a failed item too. Tasks with ``metadata["needs_call"]`` False state their answer: a null policy may
    solve those. Raises ConfigError when ``tasks`` < 1; not callable inside a running event loop.
    """
    _at_least_one(tasks)
    return asyncio.run(_EnvironmentCheck(cls, tasks, seed, seconds).report())


def check_reward(
    reward: Reward, cls: type[Environment], *, tasks: int = 8, seed: int = 0, seconds: float = 30.0
) -> Report:
    """Check one reward on episodes of ``cls``: gold, null policies and a generated hack matrix.

    Only the reward that defines success must refuse null policies and hacks; for another one they
    are counted and reported. Raises like :func:`check_environment`.
    """
    _at_least_one(tasks)
    return asyncio.run(_RewardCheck(reward, cls, tasks, seed, seconds).report())


def _at_least_one(tasks: int) -> None:
    if tasks < 1:
        raise ConfigError(f"tasks is {tasks}; a check needs at least 1")


def best_value(reward: Reward) -> float:
    """The end of the span that a policy wants: the top, or the bottom under a negative weight."""
    return reward.span[1] if reward.weight > 0 else reward.span[0]


class _Check:
    """What both checks share: tasks, played episodes under a deadline, scores."""

    def __init__(self, cls: type[Environment], tasks: int, seed: int, seconds: float) -> None:
        self.cls = cls
        self.count = tasks
        self.seed = seed
        self.seconds = seconds
        self.pool = WorkerPool()

    async def within(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run foreign code in a worker: it may block its thread, and still only its item fails."""
        worker = self.pool.acquire()
        try:
            return await worker.call(function, self.seconds)
        finally:
            self.pool.release(worker)

    async def played(self, task: Task, actions: Sequence[Action] | Policy) -> Played:
        return await self.within(lambda: record(self.cls, task, actions))

    def tasks(self, variant: str = "base", split: Split = "train", limit: int | None = None) -> list[Task]:
        source = self.cls.tasks(split, variant, seed=self.seed, limit=limit or self.count)
        found = _take(source, limit or self.count)
        if not found:
            raise DataError(f"{self.cls.name} has no {split} tasks of variant {variant!r}")
        return found

    async def each(self, jobs: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
        """Do all jobs, some at a time as rollouts do; their results in order. The first failure ends all."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(job: Callable[[], Awaitable[T]]) -> T:
            async with slots:
                return await job()

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(job)) for job in jobs]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def value(self, reward: Reward, episode: Episode) -> float | Unscored:
        score = (await reward.score([episode], self.pool))[0]
        return score.value if isinstance(score, Scored) else score

    async def nulls(self, tasks: Sequence[Task]) -> dict[str, Policy]:
        """Null policies, which know the answers of one task that is not among ``tasks``."""
        ids = {task.id for task in tasks}
        variant = tasks[0].variant
        spare = [task for task in self.tasks(variant, limit=len(tasks) + 1) if task.id not in ids]
        other = spare[0] if spare else tasks[0]
        tools = (await self.played(tasks[0], [])).tools
        return null_policies(answer_shape(self.cls, other), other, tools, self.cls.oracle(other))

    async def item(self, name: str, check: Callable[[], Awaitable[_Verdict]]) -> CheckItem:
        try:
            return CheckItem(name, *(await check()))
        except Exception as error:  # the checked code is the user's: whatever it raises is the finding
            return CheckItem(name, False, f"raised {describe(error)}")

    async def run(self, name: str, checks: Mapping[str, Callable[[], Awaitable[_Verdict]]]) -> Report:
        try:
            return Report(name, tuple([await self.item(key, check) for key, check in checks.items()]))
        finally:
            self.pool.close()


class _EnvironmentCheck(_Check):
    async def report(self) -> Report:
        return await self.run(
            self.cls.name or self.cls.__name__,
            {
                "variants": self.variants,
                "determinism": self.determinism,
                "splits disjoint": self.splits,
                "stable items": self.stable_items,
                "oracle": self.oracle,
                "null policies": self.null_success,
                "step after end": self.after_end,
                "canary": self.canary,
                "state": self.state,
                "close": self.close,
                "speed": self.speed,
            },
        )

    async def variants(self) -> _Verdict:
        held_out = [name for name in self.cls.variants if name != "base"]
        if "base" not in self.cls.variants or not held_out:
            return False, f"{sorted(self.cls.variants)}: needs 'base' and at least one held-out variant"
        empty = [
            f"{variant}/{split}"
            for variant in self.cls.variants
            for split in SPLITS
            if not _take(self.cls.tasks(split, variant, seed=self.seed, limit=1), 1)
        ]
        return not empty, f"no tasks in {', '.join(empty)}" if empty else f"held out: {', '.join(held_out)}"

    async def determinism(self) -> _Verdict:
        for variant in self.cls.variants:
            first, again = self.tasks(variant), self.tasks(variant)
            if [_content(task) for task in first] != [_content(task) for task in again]:
                return False, f"variant {variant}: the same seed gives other tasks"
            for task in first[:3]:
                for name, actions in (await self.probes(task)).items():
                    one, two = await self.played(task, actions), await self.played(task, actions)
                    if _seen(one.episode) != _seen(two.episode):
                        return False, f"task {task.id}, actions {name!r}: two episodes differ"
        return True, "same seed and actions, same tasks, observations and end state"

    async def probes(self, task: Task) -> dict[str, Sequence[Action]]:
        """Scripts that reach every tool with good and bad arguments, and the oracle's own."""
        tools = (await self.played(task, [])).tools
        scripts: dict[str, Sequence[Action]] = {"answer": [Action("0")], "empty": [Action("")]}
        if tools:
            scripts["each tool"] = [Action("", (plausible_call(item),)) for item in tools] + [Action("")]
            bare = [replace(plausible_call(item), arguments={}) for item in tools]
            scripts["no arguments"] = [Action("", tuple(bare)), Action("")]
        oracle = self.cls.oracle(task)
        if oracle:
            scripts["oracle"] = oracle
        return scripts

    async def splits(self) -> _Verdict:
        owners: dict[str, tuple[str, str]] = {}
        limit = max(_SPLIT_TASKS, self.count)
        for variant in self.cls.variants:
            for split in SPLITS:
                for seed in range(self.seed, self.seed + 3):
                    for task in _take(self.cls.tasks(split, variant, seed=seed, limit=limit), limit):
                        for mark in (f"id {task.id}", f"problem {_problem(task)}"):
                            owner = owners.setdefault(mark, (split, task.id))
                            if owner[0] != split:
                                return False, f"{task.id} ({split}) is also in {owner[0]} as {owner[1]}"
        return True, f"{len(owners) // 2} problems, three seeds, no overlap"

    async def stable_items(self) -> _Verdict:
        for variant in self.cls.variants:
            before = [_content(task) for task in self.tasks(variant, "test")]
            random.random()  # a task drawn from the global generator would now differ
            disturbing = iter(self.cls.tasks("train", variant, seed=self.seed + 7, limit=self.count))
            source = iter(self.cls.tasks("test", variant, seed=self.seed, limit=(self.count + 1) // 2))
            again: list[str] = []
            for task in source:
                next(disturbing, None)
                again.append(_content(task))
            if again != before[: len(again)]:
                return False, f"variant {variant}: item i depends on what ran before or on the limit"
        return True, "item i is the same whatever ran before"

    async def oracle(self) -> _Verdict:
        reward = self.success()
        if reward is None:
            return None, "no rewards"
        lacking: list[str] = []
        played = 0
        for variant in self.cls.variants:
            for task in self.tasks(variant):
                actions = self.cls.oracle(task)
                if actions is None:
                    lacking.append(variant)
                    continue
                played += 1
                found = await self.played(task, actions)
                episode, names = found.episode, [tool.name for tool in found.tools]
                for call in (call for action in actions for call in action.tool_calls):
                    if call.name not in names:
                        missing = f"task {task.id}: the oracle calls {call.name!r}, which is no tool"
                        return False, f"{missing}; {nearest(call.name, names)}"
                value = await self.value(reward, episode)
                if not _reaches(reward, value):
                    return False, f"task {task.id}: the oracle gets {_show(value)}, stop {episode.stop.value}"
        if not played:
            return None, "no oracle"
        without = f"; no oracle in {', '.join(sorted(set(lacking)))}" if lacking else ""
        return True, f"full success on {played} tasks{without}"

    def success(self) -> Reward | None:
        """The reward that defines success, or None where the class has no rewards."""
        wanted = self.cls.success_reward()
        return next((item for item in self.cls.rewards if item.name == wanted), None)

    async def null_success(self) -> _Verdict:
        reward = self.success()
        if reward is None:
            return None, "no rewards"
        worst = ("", 0.0)
        for variant in self.cls.variants:
            tasks = self.tasks(variant, limit=max(self.count, _NULL_TASKS))
            for name, policy in (await self.nulls(tasks)).items():
                hits = await self.each(partial(self.hit, reward, task, policy) for task in tasks)
                calling = [
                    hit
                    for hit, task in zip(hits, tasks, strict=True)
                    if task.metadata.get("needs_call") is not False
                ]
                needy, overall = fmean(calling) if calling else 0.0, fmean(hits)
                if needy > _NULL_CALL or overall > _NULL_ALL:
                    return False, f"{name} solves {needy:.0%} ({overall:.0%} of all) of variant {variant}"
                worst = max(worst, (name, needy), key=lambda pair: pair[1])
        best = f"{worst[0]} solves {worst[1]:.0%}" if worst[0] else "none solves any"
        return True, f"{best} of the tasks that need work"

    async def hit(self, reward: Reward, task: Task, policy: Policy) -> float:
        episode = (await self.played(task, policy)).episode
        return float(_reaches(reward, await self.value(reward, episode)))

    async def after_end(self) -> _Verdict:
        task = self.tasks(limit=1)[0]
        actions = list(self.cls.oracle(task) or [Action("")])
        return await self.within(lambda: _step_after_end(self.cls(), task, actions))

    async def canary(self) -> _Verdict:
        planted = 0
        for variant in self.cls.variants:
            for task in self.tasks(variant)[:5]:
                if plain_reference(task) is None:
                    continue
                planted += 1
                canary = _CANARY_TEXT if isinstance(task.reference, str) else _CANARY_NUMBER
                marked = replace(task, reference=canary)
                # The scripts come from the task with its true reference: only a leak can show the canary.
                for name, actions in (await self.probes(task)).items():
                    played = await self.played(marked, actions)
                    if str(canary) in _shown(played.episode, played.tools):
                        return False, f"task {task.id}, actions {name!r}: the reference reaches the policy"
        if not planted:
            return None, "no reference is a string or an integer"
        return True, f"planted in {planted} tasks, seen in no prompt, observation or tool"

    async def state(self) -> _Verdict:
        for task in self.tasks()[:3]:
            for actions in (await self.probes(task)).values():
                state = (await self.played(task, actions)).episode.state
                try:
                    json.dumps(state, allow_nan=False)
                except (TypeError, ValueError) as error:
                    return False, f"state() holds what JSON cannot: {error}"
        return True, "JSON values"

    async def close(self) -> _Verdict:
        task = self.tasks(limit=1)[0]
        await self.within(lambda: self.cls().close())
        await self.within(lambda: _reset_and_close(self.cls(), task))
        await self.played(task, [Action("")])
        return True, "before reset, after reset and after the end"

    async def speed(self) -> _Verdict:
        steps, seconds = 0, 0.0
        for task in self.tasks():
            played = await self.played(task, self.cls.oracle(task) or [Action("")])
            steps += len(played.episode.turns)
            seconds += played.seconds
        return True, f"{steps / max(seconds, 1e-9):,.0f} steps/s ({steps} steps, with reset and close)"


class _RewardCheck(_Check):
    def __init__(self, reward: Reward, cls: type[Environment], tasks: int, seed: int, seconds: float) -> None:
        super().__init__(cls, tasks, seed, seconds)
        self.reward = reward
        self.defines_success = reward.name == cls.success_reward()
        self.gold: dict[str, Episode] = {}
        self.null: list[tuple[str, Episode]] = []
        self.hacked: list[tuple[str, Episode]] = []

    async def report(self) -> Report:
        built = await self.item("episodes", self.build)
        if built.ok is False:
            self.pool.close()
            return Report(self.reward.name, (built,))
        found = await self.run(
            self.reward.name,
            {
                "gold": self.check_gold,
                "null policies": lambda: self.unpaid(self.null),
                "hack matrix": lambda: self.unpaid(self.hacked),
                "always a number": self.always_scored,
                "determinism": self.determinism,
            },
        )
        return Report(found.name, (built, *found.items))

    async def build(self) -> _Verdict:
        """Play gold, null and hack episodes once; every item scores the same ones."""
        tasks = self.tasks()
        nulls = await self.nulls(tasks)
        for task in tasks:
            actions = self.cls.oracle(task)
            if actions is not None:
                self.gold[task.id] = (await self.played(task, actions)).episode
            self.null += await self.named(task, nulls)
            other = next((item for item in tasks if item.reference != task.reference), task)
            shape, tools = answer_shape(self.cls, other), (await self.played(task, [])).tools
            self.hacked += await self.named(
                task, hack_matrix(task, other, shape, gold_text(self.cls, task), tools)
            )
        kinds = len({name for name, _ in self.hacked})
        return True, f"{len(self.gold)} gold, {len(self.null)} null, {len(self.hacked)} of {kinds} hacks"

    async def named(
        self, task: Task, plays: Mapping[str, Sequence[Action] | Policy]
    ) -> list[tuple[str, Episode]]:
        played = await self.each(partial(self.played, task, actions) for actions in plays.values())
        return [(name, item.episode) for name, item in zip(plays, played, strict=True)]

    async def check_gold(self) -> _Verdict:
        if not self.gold:
            return None, "no oracle"
        dearest = await self.dearest_null()
        # A price that no null policy pays is one for solved episodes; gold must then not pay all of it.
        solved_pay = max(dearest.values(), default=0.0) == self.reward.span[0]
        for episode in self.gold.values():
            value = await self.value(self.reward, episode)
            if self.reward.weight > 0 and not _reaches(self.reward, value):
                return False, f"task {episode.task.id}: gold gets {_show(value)}, not {self.reward.span[1]:g}"
            if self.reward.weight < 0:
                most = self.reward.span[1] if solved_pay else dearest[episode.task.id]
                if isinstance(value, Unscored) or value > most or (solved_pay and value == most):
                    return False, f"task {episode.task.id}: gold pays {_show(value)}, more than it may"
        if self.reward.weight < 0:
            return True, "only solved episodes pay" if solved_pay else "no null policy pays less than gold"
        return True, f"{self.reward.span[1]:g} on {len(self.gold)} gold episodes"

    async def dearest_null(self) -> dict[str, float]:
        """By task id, the highest value of a null episode: what a price must not exceed on gold."""
        highest: dict[str, float] = {}
        for _, episode in self.null:
            value = await self.value(self.reward, episode)
            if not isinstance(value, Unscored):
                key = episode.task.id
                highest[key] = max(value, highest.get(key, self.reward.span[0]))
        return highest

    async def unpaid(self, episodes: Sequence[tuple[str, Episode]]) -> _Verdict:
        """Null policies may hit by luck on a tenth of the tasks; hacks never. Given tasks are left out."""
        judged = [pair for pair in episodes if pair[1].task.metadata.get("needs_call") is not False]
        if episodes is self.hacked:
            judged = list(episodes)
        paid: dict[str, list[float]] = {}
        for name, episode in judged:
            hit = _reaches(self.reward, await self.value(self.reward, episode))
            paid.setdefault(name, []).append(float(hit))
        allowed = 0.0 if episodes is self.hacked else _NULL_CALL
        caught = [f"{name} ({fmean(hits):.0%})" for name, hits in paid.items() if fmean(hits) > allowed]
        text = f"paid in full: {', '.join(caught)}" if caught else f"{len(paid)} kinds, none paid in full"
        return (not caught if self.defines_success else None), (
            text if self.defines_success else f"does not define success; {text}"
        )

    def everything(self) -> Iterable[Episode]:
        yield from self.gold.values()
        yield from (episode for _, episode in (*self.null, *self.hacked))

    async def always_scored(self) -> _Verdict:
        for episode in self.everything():
            value = await self.value(self.reward, episode)
            if isinstance(value, Unscored):
                return False, f"episode {episode.id}: unscored: {value.reason}"
        return True, f"finite and inside [{self.reward.span[0]:g}, {self.reward.span[1]:g}]"

    async def determinism(self) -> _Verdict:
        for episode in self.everything():
            first, again = [await self.value(self.reward, episode) for _ in range(2)]
            if first != again:
                return False, f"episode {episode.id}: {_show(first)}, then {_show(again)}"
        return True, "the same episode gets the same value"


async def _step_after_end(env: Environment, task: Task, actions: Sequence[Action]) -> _Verdict:
    try:
        await env.reset(task)
        for turn in range(env.horizon + 1):
            step = await env.step(actions[min(turn, len(actions) - 1)])
            if step.terminated or step.truncated:
                break
        else:
            return None, f"the episode does not end by itself within {env.horizon + 1} turns"
        try:
            await env.step(actions[-1])
        except EnvironmentFault:
            return True, "refused with EnvironmentFault"
        return False, "a step after the end was accepted"
    finally:
        await env.close()


async def _reset_and_close(env: Environment, task: Task) -> None:
    await env.reset(task)
    await env.close()


def _take(source: Iterable[Task], most: int) -> list[Task]:
    """At most ``most`` tasks: an environment may ignore its limit."""
    return [task for _, task in zip(range(most), source, strict=False)]


def _problem(task: Task) -> str:
    """What is asked, without the id: the same problem under two ids is still the same."""
    shown = [(message.role, message.content) for message in task.prompt]
    return repr((shown, task.reference, sorted(task.metadata.items(), key=lambda pair: pair[0])))


def _content(task: Task) -> str:
    return f"{task.id} {_problem(task)}"


def _seen(episode: Episode) -> tuple[object, ...]:
    return episode.messages, episode.stop, episode.truncated, dict(episode.state)


def _shown(episode: Episode, tools: Sequence[Tool]) -> str:
    """All text that reaches the policy: opening, observations, tool schemas; not what it wrote itself."""
    spoken = [message.content for message in episode.messages if message.role != "assistant"]
    return "\n".join([*spoken, *(json.dumps(item.spec(), ensure_ascii=False, default=str) for item in tools)])


def _reaches(reward: Reward, value: float | Unscored) -> bool:
    return not isinstance(value, Unscored) and abs(value - best_value(reward)) <= _TIE


def _show(value: float | Unscored) -> str:
    return f"no score ({value.reason})" if isinstance(value, Unscored) else f"{value:g}"

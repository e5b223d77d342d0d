"""Everything one run works with, and the one way in which it collects episodes.

A unit of episodes is journalled as it is played, stored whole before use, and taken from the store
when it is already there, which is what makes a killed run resume to the same bits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from surefoot.core.errors import BudgetReached, ConfigError, SignalError, nearest
from surefoot.core.loading import load_target
from surefoot.core.types import Group, Sampling, Split, StopReason, Task, Trajectory, Unscored
from surefoot.economics.ledger import Budget, Ledger
from surefoot.engines.local import LocalEngine
from surefoot.envs.base import Environment
from surefoot.envs.loading import load_environment
from surefoot.evaluation.summary import success_of
from surefoot.policy.forward import install
from surefoot.policy.models import LoadedModel, load
from surefoot.policy.rendering import Codec, make_codec
from surefoot.rewards.base import Reward
from surefoot.rewards.suite import RewardSuite
from surefoot.rollout.candidates import Point, points_of, sample_turns
from surefoot.rollout.episode import Limits
from surefoot.rollout.scheduler import Hooks, Rollouts
from surefoot.runs import files
from surefoot.runs.directory import RunDirectory
from surefoot.runs.store import TrajectoryStore
from surefoot.training.config import RunConfig
from surefoot.training.learned import check_vocabulary, learned_reward
from surefoot.training.progress import Progress

_TRAIN_SEED = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work that collects episodes; its name is its file's."""

    name: str
    arm: str
    stage: str
    step: int
    phase: str


def load_reward(reference: str, field: str) -> Reward:
    """The reward that ``reference`` names. Raises ConfigError that names ``field``."""
    _, found = load_target(reference)
    if not isinstance(found, Reward):
        raise ConfigError(f"{field}: {reference!r} is not a reward; decorate it with @reward(trust=...)")
    return found


def resolve_rewards(config: RunConfig, cls: type[Environment]) -> RewardSuite:
    """The suite of a run: the environment's rewards, added ones, a reward model's, replaced weights.

    Raises ConfigError.
    """
    rewards: list[Reward] = list(cls.rewards)
    rewards += [load_reward(reference, "rewards.add") for reference in config.rewards.add]
    if config.rewards.learned is not None:
        path = Path(config.rewards.learned.path)
        rewards.append(learned_reward(path, tokens_per_batch=config.learner.tokens_per_batch))
    names = [item.name for item in rewards]
    for name in config.rewards.weights:
        if name not in names:
            raise ConfigError(f"rewards.weights.{name}: no such reward; {nearest(name, names)}")
    weights = config.rewards.weights
    weighted = [replace(item, weight=weights.get(item.name, item.weight)) for item in rewards]
    settings = config.rewards
    return RewardSuite(
        [item for item in weighted if item.weight != 0],
        compose=settings.compose,
        override=settings.override,
        threshold=settings.threshold,
        truncated=settings.truncated,
    )


def resolve_variants(config: RunConfig, cls: type[Environment]) -> tuple[str, ...]:
    """Variants to evaluate, ``base`` first. Raises ConfigError for one that does not exist."""
    chosen = config.evaluation.variants
    if chosen == "all":
        return ("base", *(name for name in cls.variants if name != "base"))
    for name in chosen:
        if name not in cls.variants:
            raise ConfigError(
                f"evaluation.variants: {cls.name} has no {name!r}; {nearest(name, cls.variants)}"
            )
    return tuple(dict.fromkeys(("base", *chosen)))


def load_policy(config: RunConfig) -> LoadedModel:
    """The model of a run, with adapters when the recipe wants them, ready for packed attention."""
    import torch

    loaded = load(config.model.name)
    lora = config.model.lora
    if lora is not None:
        try:
            from peft import LoraConfig as PeftConfig
            from peft import get_peft_model
        except ImportError as error:
            raise ConfigError('model.lora needs the peft package: pip install "surefoot[lora]"') from error
        torch.manual_seed(config.seed)
        peft: Any = PeftConfig
        settings = peft(
            r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), task_type="CAUSAL_LM"
        )
        model: Any = get_peft_model(loaded.model, settings)
        loaded = LoadedModel(model, loaded.tokenizer, loaded.name, loaded.path, loaded.context)
    install(loaded.model)
    return loaded


class Session:
    """One run at work."""

    def __init__(self, config: RunConfig, run: RunDirectory, progress: Progress) -> None:
        self.config, self.run, self.progress = config, run, progress
        self.cls = load_environment(config.environment.name)
        self.rewards = resolve_rewards(config, self.cls)
        self.variants = resolve_variants(config, self.cls)
        self.success_reward = next(r for r in self.rewards.rewards if r.name == self.cls.success_reward())
        self.store = TrajectoryStore(run)
        load_ledger = Ledger.load if run.ledger_lines.exists() else Ledger
        self.ledger: Ledger = load_ledger(run.ledger_lines, config.prices, files)
        limits = config.budget
        self.budget = Budget(limits.tokens, limits.usd, limits.wall_seconds())
        self.sampling = config.sampling.build()
        self.loaded = load_policy(config)
        if config.rewards.learned is not None:
            vocabulary = self.loaded.tokenizer.backend_tokenizer
            check_vocabulary(Path(config.rewards.learned.path), vocabulary, config.model.name)
        self.codec: Codec = make_codec(self.loaded)
        self.engine = LocalEngine(
            self.loaded.model, context=self.loaded.context, deterministic=config.engine.deterministic
        )
        self.rollouts = Rollouts(
            self.cls,
            self.codec,
            self.engine,
            self.rewards,
            limits=Limits(config.limits.env_seconds, config.limits.engine_seconds, config.limits.retries),
            concurrency=config.engine.concurrency,
        )
        self._tasks: dict[tuple[str, str, int], list[Task]] = {}
        self._booked = (0.0, 0.0)

    def tasks(self, split: Split, variant: str, *, seed: int, first: int, count: int) -> list[Task]:
        """``count`` tasks of a split from number ``first`` on; a split that ends starts over."""
        known = self._tasks.get((split, variant, seed), [])
        if len(known) < first + count:
            known = list(islice(self.cls.tasks(split, variant, seed=seed), first + count))
            self._tasks[split, variant, seed] = known
        if not known:
            raise ConfigError(f"{self.cls.name} has no task in split {split!r}, variant {variant!r}")
        return [known[i % len(known)] for i in range(first, first + count)]

    def training_tasks(self, first: int, count: int) -> list[Task]:
        """``count`` training tasks from number ``first`` on: the same ones in every run and arm."""
        return self.tasks("train", "base", seed=_TRAIN_SEED, first=first, count=count)

    def won(self, trajectory: Trajectory) -> float | None:
        """1 when the episode succeeded, 0 when not, None where that could not be measured."""
        reward = self.success_reward
        return success_of(trajectory, reward.name, reward.span[1])

    def collect(
        self,
        unit: Unit,
        tasks: Sequence[Task],
        *,
        members: int,
        seed: int,
        sampling: Sampling | None = None,
    ) -> list[Group]:
        """Groups of ``members`` episodes of each task, from the store or played now.

        ``sampling`` replaces the run's distribution, e.g. by the greedy one.
        """
        return self._collect(unit, tasks, members, seed, sampling or self.sampling)

    def perform(self, unit: Unit, tasks: Sequence[Task]) -> list[Group]:
        """One demonstrated episode of each task, from the store or played now."""
        return self._collect(unit, tasks, 1, 0, None)

    def candidates(
        self, unit: Unit, played: Sequence[tuple[Task, Trajectory]], *, members: int, seed: int
    ) -> dict[str, list[list[Trajectory]]]:
        """Trajectory id -> ``members`` others for each of its turns, sampled where it began.

        A turn without tokens, or at a full context, has fewer. From the store, or sampled now.
        """
        if not self.store.exists(unit.name):
            self._sample_candidates(unit, played, members, seed)
        found = {
            t.group_id: group.trajectories for group in self.store.read(unit.name) for t in group.trajectories
        }
        return {t.id: [list(found.get(Point(t, turn).id, ())) for turn in t.turns] for _, t in played}

    def _sample_candidates(
        self, unit: Unit, played: Sequence[tuple[Task, Trajectory]], members: int, seed: int
    ) -> None:
        began, cpu = self.clock()
        groups: list[Group] = []
        for task, trajectory in played:
            self.check_budget()
            sampled = sample_turns(
                self.engine,
                self.codec,
                points_of(trajectory),
                members=members,
                sampling=self.sampling,
                seed=seed,
                concurrency=self.config.engine.concurrency,
                seconds=self.config.limits.engine_seconds,
            )
            for found in asyncio.run(sampled):
                for other, seconds in found:
                    self.ledger.record_trajectory(
                        unit.arm, unit.stage, unit.step, other.id, other.cost, seconds, phase=unit.phase
                    )
                if found:
                    groups.append(Group(task, tuple(other for other, _ in found)))
            self.engine.new_version(self.engine.version)  # the contexts of one episode are enough to hold
        self.spent(unit, began, cpu)
        labels = {"arm": unit.arm, "stage": unit.stage, "step": unit.step, "phase": unit.phase}
        self.store.write(unit.name, groups, labels)

    def _collect(
        self, unit: Unit, tasks: Sequence[Task], members: int, seed: int, sampling: Sampling | None
    ) -> list[Group]:
        """Without ``sampling`` the demonstrations are played."""
        if self.store.exists(unit.name):
            groups = self.store.read(unit.name)
            self._check_scores(unit, [t for group in groups for t in group.trajectories])
            return groups
        self.check_budget()
        began, cpu = self.clock()
        with self.store.journal(unit.name) as journal:

            def on_episode(task: Task, trajectory: Trajectory, seconds: float) -> None:
                journal.append(trajectory.group_id, task, trajectory)
                self.ledger.record_trajectory(
                    unit.arm, unit.stage, unit.step, trajectory.id, trajectory.cost, seconds, phase=unit.phase
                )
                self.progress.advance()

            hooks = Hooks(on_episode, lambda kind, fields: self.run.event(kind, **fields), self._stopping)
            if sampling is None:
                groups = asyncio.run(self.rollouts.perform(tasks, name=unit.name, hooks=hooks))
            else:
                groups = self._sample(unit, tasks, members, seed, hooks, sampling)
        self.spent(unit, began, cpu)
        self._keep(unit, groups)
        return groups

    def _sample(
        self, unit: Unit, tasks: Sequence[Task], members: int, seed: int, hooks: Hooks, sampling: Sampling
    ) -> list[Group]:
        """Variant after variant: the tasks of one share their instructions and tools, and so their cache."""
        groups: list[Group] = []
        for _, own in groupby(tasks, key=lambda task: task.variant):
            collected = self.rollouts.collect(
                list(own),
                members=members,
                sampling=sampling,
                name=unit.name,
                seed=seed,
                hooks=hooks,
                first=len(groups),
            )
            groups.extend(asyncio.run(collected))
            self.engine.new_version(self.engine.version)  # frees the cache before an update needs the memory
        return groups

    def _keep(self, unit: Unit, groups: list[Group]) -> None:
        """Store a finished unit. A unit that the budget cut is not one: it is played again at resume."""
        everyone = [t for group in groups for t in group.trajectories]
        if any(t.stop is StopReason.BUDGET for t in everyone):
            self.check_budget()
            raise BudgetReached(
                f"the budget was used up during {unit.name}; its episodes stay in the journal"
            )
        for changed in self.store.compare_journal(unit.name, groups):
            self.run.event("replay_differs", unit=unit.name, trajectory=changed)
        self.store.write(
            unit.name, groups, {"arm": unit.arm, "stage": unit.stage, "step": unit.step, "phase": unit.phase}
        )
        self._check_scores(unit, everyone)

    def _check_scores(self, unit: Unit, trajectories: Sequence[Trajectory]) -> None:
        failed = [t.final for t in trajectories if isinstance(t.final, Unscored)]
        masked = sum("masked" in item.reason for item in failed)
        share = (len(failed) - masked) / max(len(trajectories), 1)
        if share > self.config.limits.max_unscored:
            reason = next(item.reason for item in failed if "masked" not in item.reason)
            raise SignalError(
                f"{unit.name}: {share:.0%} of {len(trajectories)} episodes are unscored, above "
                f"limits.max_unscored = {self.config.limits.max_unscored:.0%}; the first reason: {reason}"
            )

    def clock(self) -> tuple[float, float]:
        """(wall, CPU) seconds, standing still while they are booked: a phase inside another counts once."""
        return time.perf_counter() - self._booked[0], time.process_time() - self._booked[1]

    def spent(
        self, unit: Unit, began: float, cpu: float, *, trained: int = 0, phase: str | None = None
    ) -> None:
        """Book the time since ``began``/``cpu`` of :meth:`clock` on a phase and put the ledger on disk."""
        now, cpu_now = self.clock()
        wall, used = now - began, cpu_now - cpu
        self._booked = (self._booked[0] + wall, self._booked[1] + used)
        name = phase or unit.phase
        self.ledger.record_phase(unit.arm, unit.stage, unit.step, name, wall, used, trained_tokens=trained)
        self.ledger.flush()
        line = {
            "arm": unit.arm,
            "stage": unit.stage,
            "step": unit.step,
            "phase": name,
            "wall": wall,
            "cpu": used,
        }
        files.append_json(self.run.timings, line)

    def check_budget(self) -> None:
        """Raises BudgetReached when a limit is used up."""
        self.budget.check(self.ledger.totals())

    def _stopping(self) -> bool:
        try:
            self.check_budget()
        except BudgetReached:
            return True
        return False

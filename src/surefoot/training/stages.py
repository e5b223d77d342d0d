"""The stages of training: supervised cold start and reinforcement learning, one step at a time.

A stage knows examples, losses and metrics; where checkpoints lie and how a run resumes is not its
business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.seeds import derive
from surefoot.core.types import Group, Sampling, Scored, Trajectory
from surefoot.credit import group_statistics
from surefoot.evaluation.summary import success_of
from surefoot.learner.batch import Example, TokenBatch
from surefoot.learner.learner import Learner, Sums, UpdateReport
from surefoot.objectives import policy_gradient
from surefoot.training.algorithms import Algorithm, CreditInput
from surefoot.training.arms import arm_returns
from surefoot.training.config import RlStage, SftStage
from surefoot.training.session import Session, Unit

# Engine and learner hold the same weights at a step's first update, so they must agree this well.
_MISMATCH_LIMIT = 1e-3
_TRAIN_SEED = 0


def example_of(trajectory: Trajectory, advantage: float) -> Example:
    """What a trajectory teaches: its own tokens, each with ``advantage``."""
    masks = [(segment.tokens, segment.acted) for segment in trajectory.segments]
    behaviour = np.concatenate([s.logprobs[s.acted] for s in trajectory.segments])
    turns = np.array([turn.stop - turn.start for turn in trajectory.turns], np.int64)
    behaviour = np.nan_to_num(behaviour, nan=0.0).astype(np.float32)
    return Example(tuple(masks), behaviour, np.full(len(behaviour), advantage), turns)


def sft_loss(batch: TokenBatch) -> tuple[Tensor, Sums]:
    """Cross-entropy of the agent's own tokens, token mean over the whole batch."""
    loss = -(batch.weights * batch.logp.double()).sum()
    return loss, {"entropy": (batch.weights * batch.entropy).sum()}


class RlLoss:
    """The policy-gradient loss of an algorithm; remembers how far sampler and learner disagree."""

    def __init__(self, row: Algorithm) -> None:
        self.row = row
        self.clip = row.clip(row.settings)
        self.worst = 0.0

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, Sums]:
        part = policy_gradient(
            batch.logp,
            batch.behaviour,
            batch.advantages,
            batch.weights,
            sequence=batch.sequence,
            ratio=self.row.ratio,
            clip=self.clip,
        )
        gap = (batch.logp.detach() - batch.behaviour).double()
        self.worst = max(self.worst, float(gap.abs().max()))
        sums = {
            "clip_fraction": part.clip_fraction,
            "approx_kl": part.approx_kl,
            "entropy": (batch.weights * batch.entropy).sum(),
            "weight": batch.weights.sum(),
            "mismatch_kl": (batch.weights * (torch.exp(gap) - gap - 1)).sum(),
        }
        return part.loss, sums


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of one step, free of times so that they repeat bit for bit."""

    metrics: dict[str, Any]


class SftTraining:
    """Supervised steps on oracle episodes of the first training tasks."""

    def __init__(self, session: Session, stage: SftStage, arm: str) -> None:
        self.session, self.stage, self.arm = session, stage, arm
        self.steps = math.ceil(stage.episodes / stage.batch_size) * stage.epochs
        self._examples: list[Example] = []

    def prepare(self) -> None:
        """Play the oracle; keep the episodes that it solves. Raises ConfigError when none is left."""
        session, stage = self.session, self.stage
        tasks = session.tasks("train", "base", seed=_TRAIN_SEED, first=0, count=stage.episodes)
        session.progress.begin("cold start: oracle episodes", len(tasks))
        groups = session.perform(Unit(f"{self.arm}-sft-oracle", self.arm, "sft", 0, "oracle"), tasks)
        solved = [t for group in groups for t in group.trajectories if self._solved(t)]
        if not solved:
            raise ConfigError(
                f"stage sft: the oracle of {session.cls.name} solves none of {len(tasks)} tasks; "
                "give the environment an oracle() or remove the stage"
            )
        self._examples = [example_of(t, 1.0) for t in solved]

    def _solved(self, trajectory: Trajectory) -> bool:
        reward = self.session.success_reward
        return success_of(trajectory, reward.name, reward.span[1]) == 1.0

    def step(self, index: int, learner: Learner) -> StepResult:
        """One update on the next batch; every epoch has its own order."""
        per_epoch = math.ceil(self.stage.episodes / self.stage.batch_size)
        epoch, batch = divmod(index, per_epoch)
        rng = np.random.Generator(np.random.Philox(derive(self.session.config.seed, "sft", epoch)))
        order = rng.permutation(len(self._examples))
        size = math.ceil(len(order) / per_epoch)
        chosen = [self._examples[i] for i in order[batch * size : (batch + 1) * size]]
        unit = Unit("", self.arm, "sft", index, "update")
        began, cpu = time.perf_counter(), time.process_time()
        report = learner.update(chosen, sft_loss, sampling=Sampling()) if chosen else _nothing(learner)
        self.session.spent(unit, began, cpu, trained=report.trained_tokens)
        return StepResult({"loss": report.metrics.get("loss"), **_common(report)})


class RlTraining:
    """On-policy steps: collect groups, take credit, update."""

    def __init__(
        self,
        session: Session,
        stage: RlStage,
        row: Algorithm,
        arm: str,
        first_task: int,
        first_step: int,
        tag: str,
    ) -> None:
        self.session, self.stage, self.row, self.arm = session, stage, row, arm
        self.first_task, self.first_step, self.tag = first_task, first_step, tag
        self.steps = stage.steps

    def prepare(self) -> None:
        """Nothing to load: tasks are drawn step by step."""
        self.session.progress.begin(f"{self.arm}: {self.row.name}", self.steps * self._episodes)

    @property
    def _episodes(self) -> int:
        return self.stage.tasks_per_step * self.stage.group_size

    def step(self, index: int, learner: Learner) -> StepResult:
        """One rollout and its updates. A policy's version is the number of steps that made it."""
        session, stage = self.session, self.stage
        session.engine.new_version(self.first_step + index)
        unit = Unit(f"{self.arm}-{self.tag}-{index:06d}", self.arm, self.tag, index, "rollout")
        first = self.first_task + index * stage.tasks_per_step
        tasks = session.tasks("train", "base", seed=_TRAIN_SEED, first=first, count=stage.tasks_per_step)
        seed = derive(session.config.seed, self.tag, index)
        groups = session.collect(unit, tasks, members=stage.group_size, seed=seed)
        began, cpu = time.perf_counter(), time.process_time()
        metrics = self._learn(unit, groups, learner, seed)
        session.spent(unit, began, cpu, trained=int(metrics["trained_tokens"]), phase="update")
        return StepResult({**self._describe(groups), **metrics})

    def _learn(self, unit: Unit, groups: Sequence[Group], learner: Learner, seed: int) -> dict[str, Any]:
        everyone = [t for group in groups for t in group.trajectories]
        number = np.array([i for i, group in enumerate(groups) for _ in group.trajectories])
        valid = np.array([isinstance(t.final, Scored) and t.sampled_tokens > 0 for t in everyone])
        true = np.array([t.final.value if isinstance(t.final, Scored) else 0.0 for t in everyone])
        returns = arm_returns(self.arm, true, number, valid, seed=seed)
        advantages = self._credit(everyone, returns, number, valid)
        reasons = [_why_unused(t, bool(ok)) for t, ok in zip(everyone, valid, strict=True)]
        self.session.store.write_credit(
            unit.name,
            [t.id for t in everyone],
            [float(a) if ok else None for a, ok in zip(advantages, valid, strict=True)],
            reasons,
        )
        stats = group_statistics(torch.from_numpy(returns), torch.from_numpy(number), torch.from_numpy(valid))
        signal = {
            "groups": stats.groups,
            "dead_groups": stats.constant,
            "singleton_groups": stats.singletons,
            "unscored": int((~valid).sum()),
            "advantage_abs_mean": float(np.abs(advantages[valid]).mean()) if valid.any() else 0.0,
        }
        if self.arm == "frozen":
            return {**signal, **_common(_nothing(learner))}
        return {**signal, **self._updates(everyone, advantages, number, valid, learner)}

    def _credit(
        self, everyone: Sequence[Trajectory], returns: Any, number: Any, valid: Any
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        if not valid.any():
            return np.zeros(len(everyone))
        lengths = torch.tensor([t.sampled_tokens for t in everyone])
        given = CreditInput(
            torch.from_numpy(returns), torch.from_numpy(number), torch.from_numpy(valid), lengths
        )
        return self.row.credit(given, self.row.settings).numpy()

    def _updates(
        self, everyone: Sequence[Trajectory], advantages: Any, number: Any, valid: Any, learner: Learner
    ) -> dict[str, Any]:
        """``updates_per_step`` optimiser steps on disjoint sets of groups."""
        reports: list[UpdateReport] = []
        loss = RlLoss(self.row)
        mismatch = 0.0
        for k, part in enumerate(np.array_split(np.unique(number), self.stage.updates_per_step)):
            rows = [i for i in range(len(everyone)) if valid[i] and number[i] in part]
            examples = [example_of(everyone[i], float(advantages[i])) for i in rows]
            live = [j for j, i in enumerate(rows) if advantages[i] != 0.0]
            constant = self.row.settings.get("max_length")
            report = learner.update(
                examples,
                loss,
                sampling=self.session.sampling,
                aggregate=self.row.aggregate,
                constant=int(constant) if constant is not None else None,
                keep=live,
            )
            reports.append(report)
            if k == 0:
                mismatch = _agreement(loss.worst)
        return {**_merge(reports), "mismatch_max": mismatch}

    def _describe(self, groups: Sequence[Group]) -> dict[str, Any]:
        """What the sampled episodes were like, by the true rewards (also in control arms)."""
        reward = self.session.success_reward
        pairs = [(group.task, t) for group in groups for t in group.trajectories]
        wins = [w for w in (success_of(t, reward.name, reward.span[1]) for _, t in pairs) if w is not None]
        values = [t.value for _, t in pairs if t.value is not None]
        out: dict[str, Any] = {
            "success": _mean(wins),
            "return_mean": _mean(values),
            "tool_calls": _mean([t.cost.tool_calls for _, t in pairs]),
            "turns": _mean([len(t.turns) for _, t in pairs]),
            "sampled_tokens": sum(t.sampled_tokens for _, t in pairs),
            "truncated": _mean([float(t.truncated) for _, t in pairs]),
        }
        for key, needed in (("needed", True), ("not_needed", False)):
            calls = [
                float(t.cost.tool_calls > 0) for task, t in pairs if task.metadata.get("needs_call") is needed
            ]
            if calls:
                out[f"call_rate_{key}"] = _mean(calls)
        return out


def _agreement(worst: float) -> float:
    """The largest gap in log-probability; raises DataError where sampler and learner do not agree."""
    if worst > _MISMATCH_LIMIT:
        raise DataError(
            f"sampler and learner disagree by {worst:.2e} on the log-probability of a token under the same "
            f"weights; the limit is {_MISMATCH_LIMIT:g}"
        )
    return worst


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _why_unused(trajectory: Trajectory, valid: bool) -> str:
    if valid:
        return ""
    final = trajectory.final
    return "no token was sampled" if isinstance(final, Scored) or final is None else final.reason


def _nothing(learner: Learner) -> UpdateReport:
    lr = learner.settings.lr * learner.settings.factor(learner.updates, learner.total_updates)
    return UpdateReport({}, 0.0, lr, 0, 0, 0, stepped=False, reason="no update in this arm or batch")


def _common(report: UpdateReport) -> dict[str, Any]:
    return {
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "trained_tokens": report.trained_tokens,
        "packed_tokens": report.packed_tokens,
        "stepped": report.stepped,
    }


def _merge(reports: Sequence[UpdateReport]) -> dict[str, Any]:
    """Means of the losses' sums over the updates that ran; counts added up."""
    ran = [report for report in reports if report.metrics]
    weight = sum(report.metrics["weight"] for report in ran)
    out: dict[str, Any] = {
        "loss": sum(report.metrics["loss"] for report in ran) if ran else None,
        "grad_norm": max((report.grad_norm for report in reports), default=0.0),
        "lr": reports[-1].lr if reports else None,
        "trained_tokens": sum(report.trained_tokens for report in reports),
        "packed_tokens": sum(report.packed_tokens for report in reports),
        "stepped": any(report.stepped for report in reports),
    }
    for name in ("clip_fraction", "approx_kl", "entropy", "mismatch_kl"):
        out[name] = sum(report.metrics[name] for report in ran) / weight if ran and weight else None
    return out

"""The supervised stage: imitate demonstrations, or the policy's own best episodes.

Reads an algorithm's row as data; must not know its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from surefoot.core.errors import ConfigError, SignalError
from surefoot.core.seeds import derive
from surefoot.core.types import Sampling
from surefoot.credit import group_relative
from surefoot.learner.batch import Example
from surefoot.learner.checkpoint import Companions
from surefoot.learner.learner import Learner
from surefoot.objectives.supervised import reward_weights, select_correct
from surefoot.training.algorithms import Algorithm
from surefoot.training.arms import TREATMENT
from surefoot.training.config import SftStage
from surefoot.training.losses import sft_loss
from surefoot.training.metrics import StepResult, common, nothing
from surefoot.training.session import Session, Unit
from surefoot.training.signal import Batch, example_of, read_batch


class SftTraining:
    """Supervised steps on episodes of the first training tasks."""

    def __init__(self, session: Session, stage: SftStage, row: Algorithm, arm: str, tag: str) -> None:
        self.session, self.stage, self.row, self.arm, self.tag = session, stage, row, arm, tag
        self.steps = math.ceil(stage.episodes / stage.batch_size) * stage.epochs
        self._examples: list[Example] = []

    def prepare(self, learner: Learner) -> None:
        """Play the episodes to imitate and keep those worth it.

        Raises ConfigError when no demonstration solves its task, SignalError when no own episode is worth it.
        """
        session, stage = self.session, self.stage
        tasks = session.training_tasks(0, stage.episodes)
        if self.row.learn != "demonstrations":
            self._examples = self._own(int(self.row.settings["samples"]))
            return
        session.progress.begin("cold start: demonstrations", len(tasks))
        groups = session.perform(Unit(f"{self.arm}-{self.tag}-oracle", self.arm, "sft", 0, "oracle"), tasks)
        solved = [t for group in groups for t in group.trajectories if session.won(t) == 1.0]
        if not solved:
            raise ConfigError(
                f"stage sft: no demonstration of {session.cls.name} solves any of {len(tasks)} tasks; "
                "give the environment an oracle() or remove the stage"
            )
        self._examples = [example_of(t, 1.0) for t in solved]

    @property
    def companions(self) -> Companions:
        """Nothing beside the policy."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing beside weights."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def _own(self, samples: int) -> list[Example]:
        """The policy's own episodes: the solved ones, or all by their weight."""
        session = self.session
        tasks = session.training_tasks(0, self.stage.episodes)
        session.progress.begin(f"{self.row.name}: own episodes", len(tasks) * samples)
        unit = Unit(f"{self.arm}-{self.tag}-samples", self.arm, "sft", 0, "rollout")
        seed = derive(session.config.seed, self.tag, "samples")
        groups = session.collect(unit, tasks, members=samples, seed=seed)
        batch = read_batch(groups, arm=TREATMENT, seed=seed, won=session.won)
        chosen = self._solved(batch, seed) if self.row.learn == "solved" else self._weighted(batch)
        if not chosen:
            raise SignalError(
                f"stage sft: of {len(batch.trajectories)} own episodes none is worth imitating; "
                "start from a policy that solves some tasks"
            )
        return chosen

    def _solved(self, batch: Batch, seed: int) -> list[Example]:
        content = [tuple(int(x) for s in t.segments for x in s.tokens[s.acted]) for t in batch.trajectories]
        found = select_correct(
            torch.from_numpy(batch.success),
            torch.from_numpy(batch.group),
            content,
            limit=int(self.row.settings["per_task"]),
            seed=seed,
            valid=torch.from_numpy(batch.valid),
        )
        return [example_of(batch.trajectories[i], 1.0) for i in found.rows.tolist()]

    def _weighted(self, batch: Batch) -> list[Example]:
        valid = torch.from_numpy(batch.valid)
        advantages = group_relative(
            torch.from_numpy(batch.returns), torch.from_numpy(batch.group), valid=valid, scale="none"
        )
        settings = self.row.settings
        weights = reward_weights(
            advantages, beta=float(settings["beta"]), cap=float(settings["cap"]), valid=valid
        ).numpy()
        return [
            example_of(t, float(weights[i]))
            for i, t in enumerate(batch.trajectories)
            if batch.valid[i] and weights[i] > 0
        ]

    def step(self, index: int, learner: Learner) -> StepResult:
        """One update on the next batch; every epoch has its own order."""
        per_epoch = math.ceil(self.stage.episodes / self.stage.batch_size)
        epoch, batch = divmod(index, per_epoch)
        rng = np.random.Generator(np.random.Philox(derive(self.session.config.seed, self.tag, epoch)))
        order = rng.permutation(len(self._examples))
        size = math.ceil(len(order) / per_epoch)
        chosen = [self._examples[i] for i in order[batch * size : (batch + 1) * size]]
        unit = Unit("", self.arm, "sft", index, "update")
        began, cpu = self.session.clock()
        report = learner.update(chosen, sft_loss, sampling=Sampling()) if chosen else nothing(learner)
        self.session.spent(unit, began, cpu, trained=report.trained_tokens)
        return StepResult({"loss": report.metrics.get("loss"), **common(report)})

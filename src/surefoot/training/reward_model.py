"""The reward-model stage: a copy of the policy learns to score episodes so that ranked pairs stand in order.

The policy itself is not trained. What the stage makes is a folder, which a later run scores with. Pairs of
some tasks are held out and only measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from surefoot.core.errors import SignalError
from surefoot.core.seeds import derive
from surefoot.core.types import Int32
from surefoot.evaluation.statistics import mean_interval
from surefoot.learner.batch import Float64
from surefoot.learner.checkpoint import Companions
from surefoot.learner.learner import Learner
from surefoot.learner.scores import ScoreLearner
from surefoot.objectives.preference import PreferenceLoss, bradley_terry
from surefoot.policy.models import LoadedModel
from surefoot.policy.reward_model import (
    RewardModelRecord,
    classifier_of,
    conversation_of,
    save_reward_model,
)
from surefoot.training.algorithms import Algorithm
from surefoot.training.arms import TREATMENT, arm_of
from surefoot.training.config import PreferenceStage
from surefoot.training.metrics import StepResult, common, nothing
from surefoot.training.ranking import Pair, PairSource
from surefoot.training.session import Session, Unit
from surefoot.training.signal import Batch


class ScoreUpdate:
    """One optimiser step of the Bradley-Terry loss on the scores of conversations.

    ``conversations``: int32[N_i] each; ``returns``: float64[n], which margins are read from.
    """

    def __init__(
        self,
        learner: ScoreLearner,
        conversations: Sequence[Int32],
        returns: Float64,
        *,
        margin: float,
        center: float,
    ) -> None:
        self.learner, self.conversations, self.returns = learner, conversations, returns
        self.margin, self.center = margin, center

    def step(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Metrics of an update on ``pairs``, (chosen, rejected) rows; taken before the weights move."""
        rows = sorted({row for pair in pairs for row in pair})
        own = [self.conversations[row] for row in rows]
        scores = torch.from_numpy(self.learner.scores(own)).requires_grad_()
        part = self._loss(scores, rows, pairs)
        (slopes,) = torch.autograd.grad(part.loss, scores)
        report = self.learner.update_along(own, slopes.numpy())
        return {"pairs": len(pairs), **_figures(part), **common(report)}

    def measure(self, pairs: Sequence[Pair]) -> tuple[dict[str, Any], Float64]:
        """(the same figures without an update, the lead of each pair's chosen side float64[P])."""
        rows = sorted({row for pair in pairs for row in pair})
        scores = self.learner.scores([self.conversations[row] for row in rows])
        place = {row: i for i, row in enumerate(rows)}
        leads = np.array([scores[place[a]] - scores[place[b]] for a, b in pairs])
        return _figures(self._loss(torch.from_numpy(scores), rows, pairs)), leads

    def _loss(self, scores: torch.Tensor, rows: Sequence[int], pairs: Sequence[Pair]) -> PreferenceLoss:
        place = {row: i for i, row in enumerate(rows)}
        chosen = torch.tensor([place[a] for a, _ in pairs])
        rejected = torch.tensor([place[b] for _, b in pairs])
        # A price may put the return of the better one below the other's; that is no reason to trail it.
        leads = np.array([max(self.returns[a] - self.returns[b], 0.0) for a, b in pairs])
        return bradley_terry(
            scores[chosen],
            scores[rejected],
            weights=torch.full((len(pairs),), 1.0 / len(pairs), dtype=torch.float64),
            margin=self.margin * torch.from_numpy(leads),
            center=self.center,
        )


def _figures(part: PreferenceLoss) -> dict[str, float]:
    chosen, rejected = float(part.chosen / part.weight), float(part.rejected / part.weight)
    return {
        "loss": float(part.loss.detach()),
        "accuracy": float(part.accuracy / part.weight),
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
    }


def held_out_tasks(tasks: Sequence[str], *, share: float, seed: int) -> frozenset[str]:
    """A ``share`` of the distinct ``tasks``, rounded, drawn by ``seed``; at least one when share > 0.

    Raises SignalError when nothing would be left to learn from.
    """
    known = sorted(set(tasks))
    if not share:
        return frozenset()
    if len(known) < 2:
        raise SignalError(
            f"stage preference: all pairs are of one task, and settings.held_out = {share:g} needs two; "
            "rank episodes of more tasks, or set settings.held_out = 0 and measure nothing"
        )
    count = min(max(1, round(share * len(known))), len(known) - 1)
    rng = np.random.Generator(np.random.Philox(derive(seed, "held out")))
    return frozenset(known[i] for i in rng.permutation(len(known))[:count])


class RewardModelTraining:
    """Updates of a reward model on pairs ranked once; see :class:`PairSource` for where they come from."""

    def __init__(
        self, session: Session, stage: PreferenceStage, row: Algorithm, arm: str, first_task: int, tag: str
    ) -> None:
        self.session, self.stage, self.row, self.arm, self.tag = session, stage, row, arm, tag
        self.source = PairSource(session, stage, arm, first_task, tag)
        self.steps = stage.steps
        self._model: LoadedModel | None = None
        self._learner: ScoreLearner | None = None
        self._train: tuple[Pair, ...] = ()
        self._held: tuple[Pair, ...] = ()
        self._tasks: list[str] = []
        self._training: ScoreUpdate | None = None
        self._measuring: ScoreUpdate | None = None

    @property
    def companions(self) -> Companions:
        """What a checkpoint holds beside the policy."""
        assert self._learner is not None, "prepare comes first"
        return {"reward_model": self._learner}

    def state(self) -> dict[str, Any]:
        """Nothing beside weights."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def prepare(self, learner: Learner) -> None:
        """Copy the policy and rank the episodes. Raises SignalError when there is nothing to learn from."""
        session = self.session
        self._model = classifier_of(session.loaded, seed=session.config.seed)
        self._learner = ScoreLearner(
            self._model.model,
            learner.settings,
            total_updates=self.steps,
            tokens_per_batch=learner.tokens_per_batch,
            checkpoint_activations=learner.checkpoint_activations,
        )
        true, judged = self.source.ranked(TREATMENT), self.source.ranked(self.arm)
        if not true.pairs:
            raise self.source.nothing()
        self._tasks = [trajectory.task_id for trajectory in true.batch.trajectories]
        # Every arm is measured on the same pairs, in their true order.
        held = held_out_tasks(
            [self._tasks[a] for a, _ in true.pairs],
            share=float(self.row.settings["held_out"]),
            seed=session.config.seed,
        )
        self._held = tuple(pair for pair in true.pairs if self._tasks[pair[0]] in held)
        self._train = tuple(pair for pair in judged.pairs if self._tasks[pair[0]] not in held)
        self._training, self._measuring = self._update(judged.batch), self._update(true.batch)
        session.progress.begin(f"{self.arm}: {self.row.name}", self.steps)

    def _update(self, batch: Batch) -> ScoreUpdate:
        assert self._learner is not None
        settings = self.row.settings
        # An episode without a token of its own is in no pair.
        found = [conversation_of(t.segments) for t in batch.trajectories]
        empty = np.zeros(0, np.int32)
        return ScoreUpdate(
            self._learner,
            [empty if tokens is None else tokens for tokens in found],
            batch.returns,
            margin=float(settings["margin"]),
            center=float(settings["center"]),
        )

    def step(self, index: int, learner: Learner) -> StepResult:
        """One update on the next batch of pairs. The held-out ones are measured where a checkpoint is due,
        and after the last update; then the treatment's model is written.
        """
        assert self._training is not None
        unit = Unit("", self.arm, self.tag, index, "update")
        began, cpu = self.session.clock()
        rows = self.source.share(self._train, index)
        if not arm_of(self.arm).learns or not rows:
            metrics: dict[str, Any] = {"pairs": 0, "loss": None, **common(nothing(learner))}
        else:
            metrics = self._training.step(rows)
        last = index + 1 == self.steps
        if last or (index + 1) % self.stage.checkpoint_every == 0:
            metrics |= self._measured()
        if last and self.arm == TREATMENT:
            self._keep(metrics)
        self.session.spent(unit, began, cpu, trained=int(metrics["trained_tokens"]))
        self.session.progress.advance()
        return StepResult(metrics)

    def _measured(self) -> dict[str, Any]:
        """The held-out pairs under the weights as they are; the share in order with its interval by task."""
        assert self._measuring is not None
        if not self._held:
            return {}
        figures, leads = self._measuring.measure(self._held)
        right = (np.sign(leads) + 1) / 2  # a tie is half right
        level = self.session.config.evaluation.level
        interval = mean_interval(right, [self._tasks[a] for a, _ in self._held], level=level)
        named = ("loss", "reward_margin")
        return {
            "held_out_pairs": len(self._held),
            **{f"held_out_{key}": figures[key] for key in named},
            "held_out_accuracy": interval.estimate,
            "held_out_low": interval.low,
            "held_out_high": interval.high,
        }

    def _keep(self, metrics: Mapping[str, Any]) -> None:
        """Write the reward model into the run's folder."""
        assert self._model is not None and self._learner is not None and self._training is not None
        rows = sorted({row for pair in self._train for row in pair})
        scores = self._learner.scores([self._training.conversations[row] for row in rows])
        offset = float(scores.mean()) if len(scores) else 0.0
        config, folder = self.session.config, self.session.run.reward_model
        facts = {
            "environment": config.environment.name,
            "recipe": config.name,
            "seed": config.seed,
            "updates": self._learner.updates,
            "train_pairs": len(self._train),
            **{key: value for key, value in metrics.items() if key.startswith("held_out_")},
        }
        save_reward_model(folder, self._model, RewardModelRecord(config.model.name, offset, facts))
        self.session.progress.say(_summary(metrics, len(self._train)))


def _summary(metrics: Mapping[str, Any], pairs: int) -> str:
    text = f"reward model of {pairs} pairs written"
    if "held_out_accuracy" not in metrics:
        return f"{text}; nothing was held out, so nothing is known of it"
    right, low, high = (metrics[f"held_out_{key}"] for key in ("accuracy", "low", "high"))
    return f"{text}; held-out pairs in order: {right:.3f} [{low:.3f}, {high:.3f}]"

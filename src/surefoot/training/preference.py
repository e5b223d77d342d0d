"""The preference stage, and the update on ranked pairs that online preference learning shares with it.

A pair's loss is a function of the two trajectories' log-probs, so its gradient is taken in two passes:
first the log-probs without gradient, then the derivative by each of them as a factor on its token. That
is exact, and no micro-batch needs both sides at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.core.types import Sampling
from surefoot.learner.batch import Example, Float64
from surefoot.learner.checkpoint import Companions
from surefoot.learner.learner import Learner
from surefoot.objectives.preference import (
    Pairs,
    PreferenceLoss,
    Side,
    Unpaired,
    kto_baseline,
    preference,
    trajectory_sums,
)
from surefoot.training.algorithms import Algorithm, Settings
from surefoot.training.arms import TREATMENT, arm_of
from surefoot.training.companions import Beside, flat, follow, split
from surefoot.training.config import PreferenceStage
from surefoot.training.metrics import StepResult, common, nothing
from surefoot.training.ranking import PairSource
from surefoot.training.session import Session, Unit
from surefoot.training.signal import example_of

_PLAIN = Sampling()  # preferences are defined on the model's own distribution


class PairUpdate:
    """One optimiser step of a preference loss on examples."""

    def __init__(self, name: str, settings: Settings, beside: Beside, learner: Learner) -> None:
        self.loss = preference(name, settings)
        self.beside, self.learner = beside, learner

    def step(
        self, everyone: Sequence[Example], pairs: Sequence[tuple[int, int]]
    ) -> tuple[dict[int, Float64], dict[str, Any]]:
        """``pairs`` holds rows of ``everyone``, (chosen, rejected); one in several pairs is computed once.

        Returns (row -> minus the loss's derivative by each token's log-prob, which acts as its advantage;
        metrics).
        """
        if not pairs:
            return {}, {"pairs": 0, "loss": None, **common(nothing(self.learner))}
        numbers = sorted({row for pair in pairs for row in pair})
        place = {row: i for i, row in enumerate(numbers)}
        examples = [everyone[row] for row in numbers]
        chosen = torch.tensor([place[a] for a, _ in pairs])
        rejected = torch.tensor([place[b] for _, b in pairs])
        logp = flat(self.learner.frozen_scores(examples, _PLAIN)[0]).requires_grad_()
        reference = self._reference(examples)
        if self.loss.paired:
            part = self.loss(self._pairs(examples, logp, reference, chosen, rejected))
        else:
            part = self.loss(self._unpaired(examples, logp, reference, chosen))
        return self._apply(examples, numbers, logp, part, len(pairs))

    def _reference(self, examples: Sequence[Example]) -> Tensor | None:
        """Of every token: float64[M]."""
        if not self.loss.reference:
            return None
        return flat(self.beside.scores(self.beside.reference, examples, _PLAIN))

    def _pairs(
        self,
        examples: Sequence[Example],
        logp: Tensor,
        reference: Tensor | None,
        chosen: Tensor,
        rejected: Tensor,
    ) -> Pairs:
        lengths = torch.tensor([example.trained for example in examples])
        better = self._sum_of(examples, lengths, chosen, rejected)
        worse = self._sum_of(examples, lengths, rejected, chosen)
        return Pairs(
            better(logp),
            worse(logp),
            torch.full((len(chosen),), 1.0 / len(chosen), dtype=torch.float64),
            None if reference is None else better(reference),
            None if reference is None else worse(reference),
            lengths[chosen],
            lengths[rejected],
        )

    def _sum_of(
        self, examples: Sequence[Example], lengths: Tensor, own: Tensor, other: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """float64[M] of all tokens -> float64[P], the weighed sums over one side of each pair."""
        first = lengths.cumsum(0) - lengths
        rows: list[int] = own.tolist()
        places = torch.cat([torch.arange(int(first[i]), int(first[i] + lengths[i])) for i in rows])
        turn_lengths = torch.from_numpy(np.concatenate([examples[i].turns for i in rows]))
        turns = torch.tensor([len(examples[i].turns) for i in rows])
        weights = self.loss.token_weights(Side(lengths[own], lengths[other], turn_lengths, turns))
        return lambda tokens: trajectory_sums(tokens[places], lengths[own], weights)

    def _unpaired(
        self,
        examples: Sequence[Example],
        logp: Tensor,
        reference: Tensor | None,
        chosen: Tensor,
    ) -> Unpaired:
        """Every example of a pair once: chosen ones are desirable. z from answers to the wrong task."""
        assert reference is not None
        good = torch.zeros(len(examples), dtype=torch.bool)
        good[chosen] = True
        lengths = torch.tensor([example.trained for example in examples])
        wrong = mismatched(examples)
        z = torch.zeros((), dtype=torch.float64)
        if wrong:
            policy = _sums(self.learner.frozen_scores(wrong, _PLAIN)[0])
            z = kto_baseline(policy, _sums(self.beside.scores(self.beside.reference, wrong, _PLAIN)))
        weights = torch.full((len(examples),), 1.0 / len(examples), dtype=torch.float64)
        own, others = trajectory_sums(logp, lengths), trajectory_sums(reference, lengths)
        return Unpaired(own, others, good, weights, z)

    def _apply(
        self, examples: Sequence[Example], rows: Sequence[int], logp: Tensor, part: PreferenceLoss, pairs: int
    ) -> tuple[dict[int, Float64], dict[str, Any]]:
        (slope,) = torch.autograd.grad(part.loss, logp)
        slopes = split(slope, examples)
        report = follow(self.learner, examples, slopes, _PLAIN)
        metrics = {
            "pairs": pairs,
            "loss": float(part.loss.detach()),
            "accuracy": float(part.accuracy / part.weight),
            "reward_chosen": float(part.chosen / part.chosen_weight),
            "reward_rejected": float(part.rejected / part.rejected_weight),
        }
        credit = {row: -c for row, c in zip(rows, slopes, strict=True)}
        return credit, {**metrics, **common(report)}


def mismatched(examples: Sequence[Example]) -> list[Example]:
    """Each example's first segment after the opening of another task; empty when all share one opening."""
    openings = [_opening(example) for example in examples]
    distinct = list({opening.tobytes(): opening for opening in openings}.values())
    if len(distinct) < 2:
        return []
    following = {a.tobytes(): b for a, b in zip(distinct, [*distinct[1:], distinct[0]], strict=True)}
    found: list[Example] = []
    for example, opening in zip(examples, openings, strict=True):
        tokens, mask = example.segments[0]
        other = following[opening.tobytes()]
        cut = len(opening)
        changed = np.concatenate([other, tokens[cut:]]).astype(np.int32)
        new_mask = np.concatenate([np.zeros(len(other), np.bool_), mask[cut:]])
        kept = int(new_mask.sum())
        found.append(
            Example(((changed, new_mask),), example.behaviour[:kept], np.zeros(kept), np.array([kept]))
        )
    return found


def _opening(example: Example) -> np.ndarray[Any, np.dtype[np.int32]]:
    tokens, mask = example.segments[0]
    return tokens[: int(np.argmax(mask))] if mask.any() else tokens


def _sums(parts: Sequence[Float64]) -> Tensor:
    return torch.tensor([float(part.sum()) for part in parts], dtype=torch.float64)


class PreferenceTraining:
    """Steps on pairs ranked once: from stored runs, or from episodes of the policy as the stage begins."""

    def __init__(
        self, session: Session, stage: PreferenceStage, row: Algorithm, arm: str, first_task: int, tag: str
    ) -> None:
        self.session, self.row, self.arm, self.tag = session, row, arm, tag
        self.source = PairSource(session, stage, arm, first_task, tag)
        self.steps = stage.steps
        self._beside: Beside | None = None
        self._examples: list[Example] = []
        self._pairs: list[tuple[int, int]] = []

    @property
    def beside(self) -> Beside:
        """The models beside the policy. Only after ``prepare``."""
        assert self._beside is not None, "prepare comes first"
        return self._beside

    @property
    def companions(self) -> Companions:
        """What a checkpoint holds beside the policy."""
        return self.beside.companions

    def state(self) -> dict[str, Any]:
        """Nothing beside weights."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def prepare(self, learner: Learner) -> None:
        """Gather and rank the episodes. Raises SignalError when no pair differs."""
        self._beside = Beside(self.row, learner, self.session.config, teacher=None, steps=self.steps)
        ranked = self.source.ranked(self.arm)
        if not ranked.pairs and self.arm == TREATMENT:
            raise self.source.nothing()
        self._examples = [example_of(t) for t in ranked.batch.trajectories]
        self._pairs = list(ranked.pairs)
        self.session.progress.begin(f"{self.arm}: {self.row.name}", self.steps)

    def step(self, index: int, learner: Learner) -> StepResult:
        """One update on the next batch of pairs; every pass has its own order."""
        rows = self.source.share(self._pairs, index)
        unit = Unit("", self.arm, self.tag, index, "update")
        began, cpu = self.session.clock()
        if not arm_of(self.arm).learns:
            metrics: dict[str, Any] = common(nothing(learner))
        else:
            update = PairUpdate(self.row.name, self.row.settings, self.beside, learner)
            _, metrics = update.step(self._examples, rows)
        self.session.spent(unit, began, cpu, trained=int(metrics["trained_tokens"]))
        self.session.progress.advance()
        return StepResult(metrics)

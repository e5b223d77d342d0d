"""Composes several rewards into one return per episode so that trust keeps its order.

Formulas: architecture page, section "Trust composition". This module must not know algorithms;
implicit step rewards are refused here because they enter as advantages, never as returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from surefoot.core.deadlines import WorkerPool
from surefoot.core.errors import ConfigError
from surefoot.core.types import Score, Scored, StopReason, Trust, Unscored
from surefoot.rewards.base import Episode, Reward

Composition = Literal["ordered", "gated", "weighted"]
Truncated = Literal["score", "zero", "mask"]

# The learned term may fill at most this share of the smallest verified gap.
_SHARE = 0.5
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class Outcome:
    """All scores of one episode and the return composed from them."""

    scores: tuple[Score, ...]
    final: Score


class RewardSuite:
    """The rewards of a run and the rule that joins them.

    ordered: return = v + kappa * l, with v the weighted sum of verified rewards, l in [0, 1) the
    learned ones and kappa below the smallest gap of v, so the order by v is kept strictly.
    gated: the learned sum is added only where v >= ``threshold``. weighted: a free sum, allowed
    only with a written ``override``. Without a verified reward the learned ones lead.
    ``truncated`` says what an episode cut by a length limit gets: what the rewards say of it
    (score), the lowest verified value (zero), or no score at all (mask).
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        compose: Composition = "ordered",
        override: str = "",
        threshold: float | None = None,
        truncated: Truncated = "score",
    ) -> None:
        self.rewards = tuple(rewards)
        self.compose = compose
        self.override = override
        self.threshold = threshold
        self.truncated = truncated
        self._check()
        self.pool = WorkerPool()

    def _check(self) -> None:
        if not self.rewards:
            raise ConfigError(
                "rewards: none given; an environment needs at least one reward to be trained on"
            )
        names = [item.name for item in self.rewards]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"rewards: {name!r} is given twice; give one of them another name")
        for item in self.rewards:
            if item.trust is Trust.IMPLICIT:
                raise ConfigError(
                    f"rewards: {item.name!r} is implicit; implicit step rewards enter as advantages "
                    "through the algorithm, never as a return"
                )
        learned = any(item.trust is Trust.LEARNED for item in self.rewards)
        verified = any(item.trust is Trust.VERIFIED for item in self.rewards)
        if self.compose == "weighted" and not self.override:
            raise ConfigError('rewards.compose = "weighted" lets learned rewards outvote verified ones; '
                              'it needs rewards.override = "the reason"')  # fmt: skip
        if self.override and self.compose != "weighted":
            raise ConfigError(f'rewards.override has no effect with compose = "{self.compose}"; remove it')
        if self.compose == "gated" and not (learned and verified):
            raise ConfigError('rewards.compose = "gated" needs a verified and a learned reward')
        if (self.threshold is not None) != (self.compose == "gated"):
            raise ConfigError('rewards.threshold goes with compose = "gated", and only with it')

    @property
    def trust(self) -> Trust:
        """The lowest tier that this suite's returns rest on."""
        return min(item.trust for item in self.rewards)

    async def score(self, episodes: Sequence[Episode]) -> list[Outcome]:
        """Score the episodes of one task. Episodes ended by a fault get Unscored throughout."""
        alive = [episode for episode in episodes if not episode.stop.is_fault]
        columns = [await item.score(alive, self.pool) for item in self.rewards]
        rows = [tuple(column[i] for column in columns) for i in range(len(alive))]
        finals = self._join(alive, rows)
        outcomes = iter([Outcome(row, final) for row, final in zip(rows, finals, strict=True)])
        return [self._fault(e.stop) if e.stop.is_fault else next(outcomes) for e in episodes]

    def _fault(self, stop: StopReason) -> Outcome:
        reason = f"episode ended by a fault: {stop.value}"
        return Outcome(
            tuple(Unscored(reason, item.name) for item in self.rewards), Unscored(reason, "return")
        )

    def _join(self, episodes: Sequence[Episode], rows: Sequence[tuple[Score, ...]]) -> list[Score]:
        sums = [self._sums(episode, row) for episode, row in zip(episodes, rows, strict=True)]
        verified = sorted({pair[0] for pair in sums if isinstance(pair, tuple)})
        kappa = self._kappa(verified)
        return [pair if isinstance(pair, Unscored) else self._final(*pair, kappa) for pair in sums]

    def _sums(self, episode: Episode, row: tuple[Score, ...]) -> tuple[float, float] | Unscored:
        """(verified weighted sum, learned weighted sum) of one episode, or why there is none."""
        if episode.truncated and self.truncated == "mask":
            return Unscored("truncated episodes are masked", "return")
        verified = learned = 0.0
        for item, score in zip(self.rewards, row, strict=True):
            if isinstance(score, Unscored):
                return Unscored(f"{score.name}: {score.reason}", "return")
            value = score.value
            if episode.truncated and self.truncated == "zero":
                value = item.span[0] if item.weight > 0 else item.span[1]
            if item.trust is Trust.VERIFIED:
                verified += item.weight * value
            else:
                learned += item.weight * value
        return verified, learned

    def _kappa(self, verified: Sequence[float]) -> float:
        declared = [
            abs(r.weight) * r.resolution for r in self.rewards if r.resolution and r.trust is Trust.VERIFIED
        ]
        gaps = [b - a for a, b in pairwise(verified) if b - a > _TIE]
        return _SHARE * min([*declared, *gaps], default=1.0)

    def _final(self, verified: float, learned: float, kappa: float) -> Score:
        has_verified = any(item.trust is Trust.VERIFIED for item in self.rewards)
        if not has_verified or self.compose == "weighted":
            value = verified + learned
        elif self.compose == "gated":
            value = verified + (learned if self.threshold is not None and verified >= self.threshold else 0.0)
        else:
            value = verified + kappa * self._squash(learned)
        return Scored(value, self.trust, "return")

    def _squash(self, learned: float) -> float:
        """The learned sum mapped linearly from its span onto [0, 1)."""
        items = [item for item in self.rewards if item.trust is Trust.LEARNED]
        if not items:
            return 0.0
        ends = [(item.weight * item.span[0], item.weight * item.span[1]) for item in items]
        low, high = sum(min(pair) for pair in ends), sum(max(pair) for pair in ends)
        return min(max((learned - low) / (high - low), 0.0), 1.0 - 1e-6)

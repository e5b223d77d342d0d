"""An utterance-level critic: double Q and V over the states of whole turns (ArCHer, arXiv 2402.19446).

Fitted to given features and forgotten; must not know models, episodes or algorithm names.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from surefoot.core.errors import DataError
from surefoot.credit import steps

_HEADS = 2
_WIDTH = 128


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """K turns in order. before, after: float32[K, d], the states around each turn's tokens; rewards:
    float64[K]; trajectory: int64[K], equal for the turns of one trajectory, which stand together; weights:
    float64[K], how likely the present policy is to take a turn, against the one that took it.
    """

    before: Tensor
    after: Tensor
    rewards: Tensor
    trajectory: Tensor
    weights: Tensor

    @classmethod
    def join(cls, parts: Sequence[Turns]) -> Turns:
        """All turns of ``parts``; trajectories of different parts are different ones."""
        offsets = [0]
        for part in parts:
            offsets.append(
                offsets[-1] + int(part.trajectory.max()) + 1 if len(part.trajectory) else offsets[-1]
            )
        return cls(
            torch.cat([part.before for part in parts]),
            torch.cat([part.after for part in parts]),
            torch.cat([part.rewards for part in parts]),
            torch.cat([part.trajectory + offset for part, offset in zip(parts, offsets, strict=False)]),
            torch.cat([part.weights for part in parts]),
        )

    @property
    def done(self) -> Tensor:
        """bool[K]: the last turn of its trajectory."""
        ends = torch.ones(len(self.trajectory), dtype=torch.bool)
        ends[:-1] = self.trajectory[:-1] != self.trajectory[1:]
        return ends


class UtteranceCritic(nn.Module):
    """Two heads each for Q(state, turn) and V(state), on features that stay as they are."""

    def __init__(self, width: int, *, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.q = nn.ModuleList(_head(2 * width) for _ in range(_HEADS))
            self.v = nn.ModuleList(_head(width) for _ in range(_HEADS))

    def values(self, turns: Turns) -> tuple[Tensor, Tensor]:
        """(Q, V): float32[heads, K] each."""
        both = torch.cat([turns.before, turns.after], dim=1)
        return _stack(self.q, both), _stack(self.v, turns.before)


def fit_critic(
    turns: Turns, *, gamma: float, epochs: int, lr: float, polyak: float, seed: int
) -> UtteranceCritic:
    """A critic regressed on the turns by temporal differences with Polyak-averaged targets.

    Q <- r + gamma (1 - done) V'(next state) holds whoever took the turn. V <- Q'(state, turn) is about turns
    of the present policy, so each one's part in it is multiplied by its weight. Raises DataError for an empty
    batch.
    """
    if len(turns.rewards) == 0:
        raise DataError("turns is empty; a critic needs at least one turn to learn from")
    critic = UtteranceCritic(turns.before.shape[1], seed=seed)
    target = copy.deepcopy(critic)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=lr, weight_decay=0.0)
    done = turns.done
    for _ in range(epochs):
        with torch.no_grad():
            old_q, old_v = target.values(turns)
            following = torch.zeros_like(old_v)
            following[:, :-1] = old_v[:, 1:]
            want_q, want_v = steps.archer_targets(turns.rewards, done, following, old_q, gamma=gamma)
        q, v = critic.values(turns)
        loss = (q - want_q.float()).square().mean() + (
            turns.weights.float() * (v - want_v.float()).square()
        ).mean()
        optimizer.zero_grad()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        optimizer.step()
        target.load_state_dict(steps.polyak(target.state_dict(), critic.state_dict(), tau=polyak))
    return critic


def turn_advantages(critic: UtteranceCritic, turns: Turns) -> Tensor:
    """A = min Q - min V of each turn: float64[K]."""
    with torch.no_grad():
        q, v = critic.values(turns)
    return steps.archer_advantages(q.double(), v.double())


def _head(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))


def _stack(heads: nn.ModuleList, features: Tensor) -> Tensor:
    return torch.stack([cast("Tensor", head(features))[:, 0] for head in heads])

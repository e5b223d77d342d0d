"""Episodes of earlier steps, for a critic that learns off-policy.

Only the numbers of the steps and the rewards are kept in a checkpoint: the tokens are in the store. Must not
know the critic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.learner.batch import Example, Float64
from surefoot.objectives import truncated_importance

State = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """The trained episodes of step ``step``; rewards: float64[K], of each of their turns as it was judged."""

    step: int
    examples: tuple[Example, ...]
    rewards: Float64

    @property
    def trajectory(self) -> Tensor:
        """int64[K]: the episode of each turn."""
        return torch.arange(len(self.examples)).repeat_interleave(
            torch.tensor([len(e.turns) for e in self.examples])
        )


class Replay:
    """The last ``limit`` steps, oldest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.past: list[Past] = []

    def add(self, step: int, examples: Sequence[Example], rewards: Float64) -> None:
        """Keep a step that was trained on, and forget the oldest when there are too many."""
        self.past = [*self.past, Past(step, tuple(examples), rewards)][-self.limit :] if self.limit else []

    def state(self) -> State:
        """Plain values; floats survive JSON as they are."""
        return [{"step": item.step, "rewards": item.rewards.tolist()} for item in self.past]

    def load(self, state: Sequence[Mapping[str, Any]], examples: Mapping[int, Sequence[Example]]) -> None:
        """Go on from :meth:`state`; ``examples`` holds those of each of its steps, as they were added."""
        self.past = [
            Past(int(item["step"]), tuple(examples[int(item["step"])]), np.array(item["rewards"], np.float64))
            for item in state
        ]


def turn_weights(logp: Sequence[Float64], examples: Sequence[Example]) -> Tensor:
    """float64[K]: min(1, p / p_sampler) of each turn; ``logp``: of each example's tokens, by the policy now.

    A turn without tokens weighs 1.
    """
    lengths = torch.from_numpy(np.concatenate([e.turns for e in examples]))
    turn = torch.arange(len(lengths)).repeat_interleave(lengths)
    new = torch.from_numpy(np.concatenate(list(logp)))
    old = torch.from_numpy(np.concatenate([e.behaviour.astype(np.float64) for e in examples]))
    weights = torch.ones(len(lengths), dtype=torch.float64)
    weights[turn] = truncated_importance(new, old, cap=1.0, level="sequence", sequence=turn)
    return weights

"""What one update trains on: sampled tokens with advantages and weights, and how they are packed.

Weights are fixed over the whole batch before any split, so that the loss cannot depend on
micro-batches, padding or packing. Must not know algorithms by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.core.errors import DataError
from surefoot.core.types import Float32, Int32
from surefoot.objectives import token_weights
from surefoot.objectives.policy_gradient import Aggregate
from surefoot.policy.trie import common_prefix

Bool = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]


def _no_columns() -> Mapping[str, Float64]:
    return {}


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One trajectory to learn from.

    segments: (int32[N] tokens, bool[N] trained) pairs. behaviour: float32[M] log-probs reported by
    the sampler for the M trained tokens over all segments, in order (zeros for supervised data).
    advantages: float64[M]. turns: int64[K], how many of the M tokens belong to each turn. columns:
    further inputs of the loss by name, float64[M] each; all examples of an update have the same ones.
    """

    segments: tuple[tuple[Int32, Bool], ...]
    behaviour: Float32
    advantages: Float64
    turns: npt.NDArray[np.int64]
    columns: Mapping[str, Float64] = field(default_factory=_no_columns)

    def __post_init__(self) -> None:
        trained = sum(int(mask.sum()) for _, mask in self.segments)
        per_token = {"behaviour": self.behaviour, "advantages": self.advantages, **self.columns}
        for name, values in per_token.items():
            if len(values) != trained:
                raise DataError(f"Example.{name} has {len(values)} entries for {trained} tokens")
            if not np.isfinite(values).all():
                raise DataError(f"Example.{name} holds a value that is not finite")
        if int(self.turns.sum()) != trained:
            raise DataError(f"Example.turns add up to {int(self.turns.sum())} of {trained} trained tokens")
        if any(len(mask) and mask[0] for _, mask in self.segments):
            raise DataError("Example.segments: a segment's first token has no context and cannot be trained")

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return len(self.behaviour)


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """The flat view a loss works on: M trained tokens of one micro-batch, trajectories kept whole.

    logp, entropy: float32[M] with gradient; behaviour: float32[M]; advantages, weights: float64[M];
    sequence: int64[M] trajectory number inside the micro-batch; columns: float64[M] each, as given;
    values: float32[M] with gradient, what a value head says before each token (None without one).
    """

    logp: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    entropy: Tensor
    columns: Mapping[str, Tensor]
    values: Tensor | None = None


def global_weights(examples: Sequence[Example], aggregate: Aggregate, constant: int | None) -> list[Float64]:
    """Weights of every example's trained tokens under one denominator for the whole batch."""
    lengths = torch.tensor([example.trained for example in examples])
    turns = (
        torch.from_numpy(np.concatenate([e.turns for e in examples])) if aggregate == "turn_mean" else None
    )
    flat = token_weights(lengths, aggregate=aggregate, constant=constant, turn_lengths=turns).numpy()
    return [np.asarray(part) for part in np.split(flat, np.cumsum(lengths.numpy())[:-1])]


def split_micro_batches(examples: Sequence[Example], budget: int) -> list[list[int]]:
    """Indices of the examples of each micro-batch; see :func:`split_by_tokens`."""
    return split_by_tokens([[tokens for tokens, _ in example.segments] for example in examples], budget)


def split_by_tokens(items: Sequence[Sequence[Int32]], budget: int) -> list[list[int]]:
    """Indices of the items of each micro-batch: at most ``budget`` packed tokens where possible.

    An item is one or more token arrays that stay together. Items are ordered by their tokens, so that
    neighbours share the longest prefixes; one larger than the budget gets a micro-batch of its own.
    """
    order = sorted(range(len(items)), key=lambda i: items[i][0].tolist())
    batches: list[list[int]] = []
    used = 0
    last: Int32 | None = None
    for i in order:
        size = sum(len(tokens) for tokens in items[i])
        first = items[i][0]
        added = size - (common_prefix(last, first) if last is not None else 0)
        if not batches or used + added > budget:
            batches.append([])
            used, added = 0, size
        batches[-1].append(i)
        used += added
        last = first
    return batches

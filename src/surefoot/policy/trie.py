"""Packs token sequences into a prefix tree, so that what they share is computed once.

Members of a group share their prompt, tasks share their instructions, and agents repeat each
other's tool calls; each shared run is one node. Exact: every token still sees just its own past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.core.errors import DataError
from surefoot.core.types import Int32

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Node:
    """A run of packed tokens ``start:stop`` whose past is the chain of ``parents`` (root first)."""

    start: int
    stop: int
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """Packed sequences. tokens, positions: int64[N]; ``places[i]``: int64[len_i] packed index of each token
    of sequence i; ``before``: int64[N] packed index of a token's predecessor, -1 for a first token.
    """

    tokens: Int64
    positions: Int64
    before: Int64
    nodes: tuple[Node, ...]
    places: tuple[Int64, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def common_prefix(a: Int32, b: Int32) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


class _Builder:
    def __init__(self, sequences: Sequence[Int32], least: int) -> None:
        self.sequences = sequences
        self.least = least
        self.tokens: list[Int32] = []
        self.positions: list[Int64] = []
        self.before: list[Int64] = []
        self.nodes: list[Node] = []
        self.places: list[list[Int64]] = [[] for _ in sequences]
        self.size = 0

    def add(self, members: list[int], depth: int, parents: tuple[int, ...], last: int) -> None:
        """Add the subtree of ``members``, which agree (and are packed) up to ``depth``."""
        first = self.sequences[members[0]]
        shared = min(common_prefix(first, self.sequences[i]) for i in members)
        if shared > depth:
            own, last = self._node(first[depth:shared], depth, parents, last)
            parents = (*parents, own)
            place = np.arange(self.nodes[own].start, self.nodes[own].stop)
            for i in members:
                self.places[i].append(place)
        branches: dict[int, list[int]] = {}
        for i in members:
            if len(self.sequences[i]) > shared:
                branches.setdefault(int(self.sequences[i][shared]), []).append(i)
        for branch in branches.values():
            for part in self._split(branch, shared):
                self.add(part, shared, parents, last)

    def _split(self, members: list[int], depth: int) -> list[list[int]]:
        """Members that share too short a run are cheaper apart: a node costs a call per layer."""
        if len(members) == 1:
            return [members]
        first = self.sequences[members[0]]
        shared = min(common_prefix(first, self.sequences[i]) for i in members)
        if shared - depth >= self.least:
            return [members]
        runs: dict[bytes, list[int]] = {}
        for i in members:
            runs.setdefault(self.sequences[i][depth : depth + self.least].tobytes(), []).append(i)
        if len(runs) == 1:
            return [[i] for i in members]
        return list(runs.values())

    def _node(self, run: Int32, depth: int, parents: tuple[int, ...], last: int) -> tuple[int, int]:
        start, stop = self.size, self.size + len(run)
        self.tokens.append(run)
        self.positions.append(np.arange(depth, depth + len(run)))
        self.before.append(np.concatenate([[last], np.arange(start, stop - 1)]).astype(np.int64))
        self.nodes.append(Node(start, stop, parents))
        self.size = stop
        return len(self.nodes) - 1, stop - 1


def build_trie(sequences: Sequence[Int32], *, least: int = 8) -> Trie:
    """Pack int32[len_i] sequences; runs shared by fewer than ``least`` tokens are not merged.

    Raises DataError for an empty list or an empty sequence.
    """
    if not sequences or any(len(s) == 0 for s in sequences):
        raise DataError("build_trie: every sequence needs at least one token, and there must be one")
    builder = _Builder(sequences, least)
    for part in builder._split(list(range(len(sequences))), 0):  # pyright: ignore[reportPrivateUsage]
        builder.add(part, 0, (), -1)
    return Trie(
        np.concatenate(builder.tokens).astype(np.int64),
        np.concatenate(builder.positions).astype(np.int64),
        np.concatenate(builder.before),
        tuple(builder.nodes),
        tuple(np.concatenate(place) for place in builder.places),
    )


def causal_mask(queries: int, keys: int) -> Tensor:
    """Additive float[queries, keys]: the last ``queries`` keys are causal, all earlier ones open."""
    closed = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return torch.zeros(queries, keys).masked_fill(closed, float("-inf"))


class TrieAttention:
    """Attention layout of a Trie: a node sees its ancestors whole and itself causally."""

    def __init__(self, trie: Trie) -> None:
        self._nodes = trie.nodes
        self._masks: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See :class:`surefoot.policy.forward.AttentionLayout`."""
        # The kernel reads a head's numbers as neighbours, wherever they are.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return cast("Tensor", _Attend.apply(q, k, v, self, scale))

    def runs(self) -> list[tuple[slice, list[slice]]]:
        """Of each node, the tokens that ask and the runs of tokens that they see, their own last."""
        own = [slice(node.start, node.stop) for node in self._nodes]
        return [(own[i], [own[j] for j in (*node.parents, i)]) for i, node in enumerate(self._nodes)]

    def mask(self, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
        """The causal mask in the queries' dtype: the kernel misreads another one in silence."""
        known = self._masks.get((queries, keys, dtype))
        if known is None:
            known = self._masks[queries, keys, dtype] = causal_mask(queries, keys).to(dtype)
        return known


class _Attend(torch.autograd.Function):
    """Attention over a trie, keeping q, k, v and the result once: what a node sees is gathered anew."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: TrieAttention, scale: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
        sums: list[Tensor] = []
        for own, seen in layout.runs():
            keys, values = _gathered(k, seen, q), _gathered(v, seen, q)
            queries = _by_kv_head(q[:, own], k)
            mask = layout.mask(queries.shape[2], keys.shape[2], q.dtype)
            found, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries, keys, values, attn_mask=mask, scale=scale
            )
            out[own] = found.permute(2, 1, 0, 3).flatten(1, 2)
            sums.append(total)
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, *sums = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        grad = cast("Tensor", grads[0]).transpose(0, 1)
        result = out.transpose(0, 1)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (own, seen), total in zip(ctx.layout.runs(), sums, strict=True):
            keys, values = _gathered(k, seen, q), _gathered(v, seen, q)
            queries = _by_kv_head(q[:, own], k)
            mask = ctx.layout.mask(queries.shape[2], keys.shape[2], q.dtype)
            above, below = _by_kv_head(grad[:, own], k), _by_kv_head(result[:, own], k)
            own_q, own_k, own_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                above, queries, keys, values, below, total, 0.0, False, attn_mask=mask, scale=ctx.scale
            )
            grad_q[:, own] = own_q.transpose(0, 1).flatten(0, 1)
            for into, part in ((grad_k, own_k.sum(0)), (grad_v, own_v.sum(0))):
                for run, piece in zip(
                    seen, part.split([run.stop - run.start for run in seen], dim=1), strict=True
                ):
                    into[:, run] += piece
        return grad_q, grad_k, grad_v, None, None


def _gathered(x: Tensor, seen: list[slice], q: Tensor) -> Tensor:
    """Keys or values of some runs, for every query head that shares them: float[Hq / Hkv, Hkv, m, D]."""
    runs = [x[:, run] for run in seen]
    return (torch.cat(runs, dim=1) if len(runs) > 1 else runs[0]).expand(len(q) // len(x), -1, -1, -1)


def _by_kv_head(x: Tensor, k: Tensor) -> Tensor:
    """float[Hq, n, D] -> float[Hq / Hkv, Hkv, n, D]; neighbouring query heads share a key head."""
    return x.unflatten(0, (len(k), -1)).transpose(0, 1)

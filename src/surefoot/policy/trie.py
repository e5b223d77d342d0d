"""Packs token sequences into a prefix tree, so that what they share is computed once.

Members of a group share their prompt, tasks share their instructions, and agents repeat each
other's tool calls; each shared run is one node. Exact: every token still sees just its own past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
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
        self._sizes = [node.stop - node.start for node in trie.nodes]
        self._masks: dict[tuple[int, int], Tensor] = {}

    def _mask(self, queries: int, keys: int) -> Tensor:
        known = self._masks.get((queries, keys))
        if known is None:
            known = causal_mask(queries, keys)
            self._masks[queries, keys] = known
        return known

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See :class:`surefoot.policy.forward.AttentionLayout`."""
        queries, keys, values = (x.split(self._sizes, dim=1) for x in (q, k, v))
        out: list[Tensor] = []
        for index, node in enumerate(self._nodes):
            chain = (*node.parents, index)
            own_k = torch.cat([keys[i] for i in chain], dim=1) if node.parents else keys[index]
            own_v = torch.cat([values[i] for i in chain], dim=1) if node.parents else values[index]
            # The CPU kernel misreads a float32 mask beside float64 queries, without an error (torch 2.13).
            mask = self._mask(self._sizes[index], own_k.shape[1]).to(q.dtype)
            out.append(
                F.scaled_dot_product_attention(
                    queries[index][None],
                    own_k[None],
                    own_v[None],
                    attn_mask=mask,
                    scale=scale,
                    enable_gqa=True,
                )[0]
            )
        return torch.cat(out, dim=1).transpose(0, 1)

"""Keys and values of everything that is being sampled: shared prompts, and one row per distinct tail.

Layout of one decode step: the opening that all prompts share is one matrix product over all rows, each
prompt one over its rows, tails one batched product over compact slots; one softmax joins them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.core.types import Int32
from surefoot.policy.forward import base_of
from surefoot.policy.trie import causal_mask, common_prefix

_GROW = 64


@dataclass(slots=True, eq=False)
class PromptSlot:
    """A computed prompt. ``hidden``: float[d] of its last token.

    ``own`` counts the tokens that are its own: all, or those after the shared root when ``rooted``.
    ``known``: how many had been computed for another prompt before.
    """

    tokens: Int32
    hidden: Tensor
    slot: int = -1
    rooted: bool = False
    own: int = 0
    known: int = 0
    sessions: set[str] = field(default_factory=lambda: set())


@dataclass(slots=True, eq=False)
class Row:
    """One distinct context: a prompt plus a computed tail, and tokens that wait to be computed."""

    prompt: PromptSlot
    slot: int
    hidden: Tensor
    tail: list[int] = field(default_factory=lambda: [])
    waiting: list[int] = field(default_factory=lambda: [])
    sessions: set[str] = field(default_factory=lambda: set())

    @property
    def known(self) -> int:
        """Context tokens whose keys and values are cached."""
        return len(self.prompt.tokens) + len(self.tail)

    def matches(self, tokens: Int32) -> bool:
        """Whether the cached context is exactly ``tokens``."""
        split = len(self.prompt.tokens)
        return (
            len(tokens) == self.known
            and np.array_equal(tokens[:split], self.prompt.tokens)
            and tokens[split:].tolist() == self.tail
        )

    def advance(self, hidden: Tensor) -> None:
        """The waiting tokens were computed; ``hidden`` belongs to the last of them."""
        self.tail.extend(self.waiting)
        self.waiting = []
        self.hidden = hidden


class Cache:
    """Storage for prompts and rows. Slots are reused lowest first, so batches stay compact."""

    def __init__(self, model: nn.Module) -> None:
        config = base_of(model).config.get_text_config()
        self.layers: int = config.num_hidden_layers
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.clear()

    def clear(self) -> None:
        """Forget everything and free the memory."""
        self._prompts: dict[bytes, PromptSlot] = {}
        self._rows: dict[int, Row] = {}
        empty = torch.empty(0, self.kv_heads, 0, self.head_dim)
        self.root: Int32 = np.zeros(0, np.int32)
        self.root_keys = [torch.empty(self.kv_heads, 0, self.head_dim)] * self.layers
        self.root_values = list(self.root_keys)
        self.prompt_keys = [empty] * self.layers
        self.prompt_values = [empty] * self.layers
        self.keys = [empty] * self.layers
        self.values = [empty] * self.layers

    def find(self, key: bytes) -> PromptSlot | None:
        """The computed prompt with exactly these token bytes."""
        return self._prompts.get(key)

    def longest(self, tokens: Int32) -> tuple[PromptSlot | None, int]:
        """The stored prompt that begins most like ``tokens``, and for how many of all but their last."""
        shared = {p.slot: common_prefix(p.tokens, tokens[:-1]) for p in self._prompts.values()}
        best = max(self._prompts.values(), key=lambda p: shared[p.slot], default=None)
        return (best, shared[best.slot]) if best is not None else (None, 0)

    def set_root(self, tokens: Int32, keys: list[Tensor], values: list[Tensor]) -> None:
        """Let prompts share their common opening ``tokens`` (instructions, tools); only while empty."""
        assert not self._prompts
        self.root, self.root_keys, self.root_values = tokens, keys, values

    @property
    def empty(self) -> bool:
        """No prompt is stored."""
        return not self._prompts

    def add_prompt(self, prompt: PromptSlot, keys: list[Tensor], values: list[Tensor]) -> None:
        """Store a computed prompt; keys and values: float[Hkv, P, D] per layer."""
        prompt.slot = _lowest_free({p.slot for p in self._prompts.values()})
        root = len(self.root)
        prompt.rooted = root > 0 and np.array_equal(prompt.tokens[:root], self.root)
        first = root if prompt.rooted else 0
        prompt.own = len(prompt.tokens) - first
        for store, new in ((self.prompt_keys, keys), (self.prompt_values, values)):
            _ensure(store, prompt.slot + 1, prompt.own)
            for layer in range(self.layers):
                store[layer][prompt.slot, :, : prompt.own] = new[layer][:, first:]
        self._prompts[prompt.tokens.tobytes()] = prompt

    def prompt_parts(self, store: list[Tensor], layer: int, prompt: PromptSlot) -> list[Tensor]:
        """A prompt's keys (or values) in one layer, root first: float[Hkv, n, D] pieces."""
        own = store[layer][prompt.slot, :, : prompt.own]
        roots = self.root_keys if store is self.prompt_keys else self.root_values
        return [roots[layer], own] if prompt.rooted else [own]

    def attach(self, prompt: PromptSlot, session: str) -> Row:
        """A row at the end of the prompt for ``session``, shared with others that stand there."""
        prompt.sessions.add(session)
        for row in self._rows.values():
            if row.prompt is prompt and not row.tail and not row.waiting:
                row.sessions.add(session)
                return row
        return self._new_row(prompt, prompt.hidden, [session])

    def _new_row(self, prompt: PromptSlot, hidden: Tensor, sessions: list[str]) -> Row:
        row = Row(prompt, _lowest_free(self._rows.keys()), hidden, sessions=set(sessions))
        self._rows[row.slot] = row
        return row

    def extend(self, row: Row, session: str, tokens: Int32) -> Row:
        """Let ``session`` continue with ``tokens``, next to any sibling that continues the same way."""
        wanted = tokens.tolist()
        for other in self._rows.values():
            if other.prompt is row.prompt and other.waiting == wanted and other.tail == row.tail:
                if other is not row:
                    self._leave(row, session)
                    other.sessions.add(session)
                return other
        return self.move(row, [session], wanted)

    def move(self, row: Row, sessions: list[str], tokens: list[int]) -> Row:
        """``sessions`` continue ``row`` with ``tokens``: in place when nobody stays, else in a copy."""
        if row.sessions == set(sessions):
            row.waiting = tokens
            return row
        copy = self._new_row(row.prompt, row.hidden, sessions)
        copy.tail, copy.waiting = list(row.tail), tokens
        row.sessions.difference_update(sessions)
        length = len(row.tail)
        _ensure(self.keys, copy.slot + 1, length)
        _ensure(self.values, copy.slot + 1, length)
        for store in (self.keys, self.values):
            for layer in range(self.layers):
                store[layer][copy.slot, :, :length] = store[layer][row.slot, :, :length]
        return copy

    def detach(self, row: Row, session: str) -> None:
        """``session`` ended; its prompt is kept while any other session stands on it."""
        self._leave(row, session)
        row.prompt.sessions.discard(session)
        if not row.prompt.sessions:
            self._prompts.pop(row.prompt.tokens.tobytes(), None)

    def _leave(self, row: Row, session: str) -> None:
        row.sessions.discard(session)
        if not row.sessions:
            del self._rows[row.slot]

    def hungry(self) -> list[Row]:
        """Rows with tokens to compute, by slot."""
        return [self._rows[slot] for slot in sorted(self._rows) if self._rows[slot].waiting]

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` row slots of ``length`` tail tokens."""
        _ensure(self.keys, rows, length)
        _ensure(self.values, rows, length)


def _lowest_free(used: Any) -> int:
    slot = 0
    while slot in used:
        slot += 1
    return slot


def _ensure(store: list[Tensor], slots: int, length: int) -> None:
    """Grow every layer's [slots, Hkv, length, D] in place of the list, keeping what is there."""
    have_slots, heads, have_length, dim = store[0].shape
    if slots <= have_slots and length <= have_length:
        return
    new_slots = have_slots if slots <= have_slots else max(slots, have_slots * 2)
    new_length = have_length if length <= have_length else -(-length // _GROW) * _GROW
    for layer, old in enumerate(store):
        grown = torch.zeros(new_slots, heads, new_length, dim)
        grown[:have_slots, :, :have_length] = old
        store[layer] = grown


class RowAttention:
    """Attention layout of one batch of rows, each with one or more new tokens.

    Rows with one token (plain decoding) are done together over compact slots; rows with several
    (a new observation) one by one, so that they do not pad the others.
    """

    def __init__(self, cache: Cache, rows: list[Row]) -> None:
        self._cache = cache
        self._rows = rows
        counts = [len(row.waiting) for row in rows]
        self.last = torch.cumsum(torch.tensor(counts), 0) - 1
        starts = [0, *self.last.add(1).tolist()]
        self.positions = torch.cat(
            [torch.arange(row.known, row.known + n) for row, n in zip(rows, counts, strict=True)]
        )
        cache.reserve(max(row.slot for row in rows) + 1, max(len(r.tail) + len(r.waiting) for r in rows))
        self._slot = torch.repeat_interleave(torch.tensor([row.slot for row in rows]), torch.tensor(counts))
        self._at = torch.cat(
            [torch.arange(len(row.tail), len(row.tail) + n) for row, n in zip(rows, counts, strict=True)]
        )
        singles = [(starts[i], row) for i, row in enumerate(rows) if counts[i] == 1]
        self._decode = _Decode(cache, singles) if singles else None
        self._longer = [
            (starts[i], counts[i], row, causal_mask(counts[i], row.known + counts[i]))
            for i, row in enumerate(rows)
            if counts[i] > 1
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See :class:`surefoot.policy.forward.AttentionLayout`."""
        cache = self._cache
        cache.keys[layer][self._slot, :, self._at] = k.transpose(0, 1)
        cache.values[layer][self._slot, :, self._at] = v.transpose(0, 1)
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
        if self._decode is not None:
            self._decode.attend(layer, q, scale, out)
        for start, count, row, mask in self._longer:
            length = len(row.tail) + count
            keys = [
                *cache.prompt_parts(cache.prompt_keys, layer, row.prompt),
                cache.keys[layer][row.slot, :, :length],
            ]
            values = [
                *cache.prompt_parts(cache.prompt_values, layer, row.prompt),
                cache.values[layer][row.slot, :, :length],
            ]
            own = F.scaled_dot_product_attention(
                q[None, :, start : start + count],
                torch.cat(keys, dim=1)[None],
                torch.cat(values, dim=1)[None],
                attn_mask=mask,
                scale=scale,
                enable_gqa=True,
            )
            out[start : start + count] = own[0].transpose(0, 1)
        return out


def _closed(open_until: Tensor, reach: int) -> Tensor:
    """Additive float[n, 1, 1, reach]: 0 below ``open_until`` (int64[n]), -inf from there on."""
    closed = torch.arange(reach) >= open_until[:, None]
    return torch.zeros(closed.shape).masked_fill(closed, float("-inf"))[:, None, None]


class _Decode:
    """One new token for each of some rows: root, prompt and tail attended apart, then joined.

    Joining partial attentions by their log-sum-exp is exact (FlashDecoding; arXiv 2402.05099 does it
    for shared prefixes).
    """

    def __init__(self, cache: Cache, singles: list[tuple[int, Row]]) -> None:
        self._cache = cache
        rows = [row for _, row in singles]
        self._where = torch.tensor([start for start, _ in singles])
        self._row_slots = torch.tensor([row.slot for row in rows])
        self._slots = max(row.slot for row in rows) + 1
        self._reach = max(len(row.tail) for row in rows) + 1
        # Slots without a row in this batch repeat some row's query; nobody reads their result.
        self._token = torch.full((self._slots,), singles[0][0])
        self._token[self._row_slots] = self._where
        until = torch.ones(self._slots, dtype=torch.int64)
        until[self._row_slots] = torch.tensor([len(row.tail) + 1 for row in rows])
        self._tail_mask = _closed(until, self._reach)
        rooted = torch.ones(self._slots, dtype=torch.bool)
        rooted[self._row_slots] = torch.tensor([row.prompt.rooted for row in rows])
        self._unrooted = None if bool(rooted.all()) else ~rooted[:, None, None]
        self._any_root = len(cache.root) > 0 and any(row.prompt.rooted for row in rows)
        self._group(rows)

    def _group(self, rows: list[Row]) -> None:
        """Grid of prompts x rows, so that a prompt is read once for all its rows."""
        places: dict[int, list[Row]] = {}
        for row in rows:
            if row.prompt.own:
                places.setdefault(row.prompt.slot, []).append(row)
        self._members = max((len(group) for group in places.values()), default=0)
        prompts = sorted(places)
        lengths = [places[slot][0].prompt.own for slot in prompts]
        self._prompts = torch.tensor(prompts)
        self._side_by_side = prompts == list(range(len(prompts)))
        self._prompt_reach = max(lengths, default=0)
        grid = [row.slot for slot in prompts for row in _padded(places[slot], self._members)]
        self._grid = torch.tensor(grid)
        self._cell = torch.zeros(self._slots, dtype=torch.int64)
        owned = torch.zeros(self._slots, dtype=torch.bool)
        for i, slot in enumerate(prompts):
            for j, row in enumerate(places[slot]):
                self._cell[row.slot] = i * self._members + j
                owned[row.slot] = True
        self._unowned = None if bool(owned[self._row_slots].all()) else ~owned[:, None, None]
        self._prompt_mask = _closed(torch.tensor(lengths), self._prompt_reach) if prompts else None

    def attend(self, layer: int, q: Tensor, scale: float, out: Tensor) -> None:
        """Fill ``out`` at this batch's tokens."""
        cache, heads, dim = self._cache, self._cache.kv_heads, q.shape[2]
        queries = q.transpose(0, 1).index_select(0, self._token).view(self._slots, heads, -1, dim)
        tail_k = cache.keys[layer][: self._slots, :, : self._reach]
        tail_v = cache.values[layer][: self._slots, :, : self._reach]
        parts = [_partial(queries, tail_k, tail_v, self._tail_mask, scale)]
        if self._prompt_mask is not None:
            parts.append(self._prompt(layer, queries, self._prompt_mask, scale))
        if self._any_root:
            parts.append(self._root(layer, queries, scale))
        share = torch.softmax(torch.stack([lse for _, lse in parts]), dim=0)[..., None]
        result = parts[0][0] * share[0]
        for (value, _), weight in zip(parts[1:], share[1:], strict=True):
            result.addcmul_(value, weight)
        out[self._where] = result.index_select(0, self._row_slots).view(len(self._where), -1, dim)

    def _prompt(self, layer: int, queries: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over each row's own prompt: ([slots, Hkv, repeat, D], [slots, Hkv, repeat])."""
        heads, repeat, dim = queries.shape[1:]
        prompts, members = len(self._prompts), self._members
        grid = queries.index_select(0, self._grid).view(prompts, members, heads, repeat, dim).transpose(1, 2)
        grid = grid.reshape(prompts, heads, members * repeat, dim)
        keys, values = (self._store(x[layer]) for x in (self._cache.prompt_keys, self._cache.prompt_values))
        value, lse = _partial(grid, keys, values, mask, scale)
        value = value.view(prompts, heads, members, repeat, dim).transpose(1, 2)
        lse = lse.view(prompts, heads, members, repeat).transpose(1, 2)
        value = value.reshape(-1, heads, repeat, dim).index_select(0, self._cell)
        lse = lse.reshape(-1, heads, repeat).index_select(0, self._cell)
        return value, _silenced(lse, self._unowned)

    def _root(self, layer: int, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over the opening that prompts share, all rows in one call."""
        slots, heads, repeat, dim = queries.shape
        flat = queries.transpose(0, 1).reshape(1, heads, slots * repeat, dim)
        keys, values = self._cache.root_keys[layer][None], self._cache.root_values[layer][None]
        value, lse = _partial(flat, keys, values, None, scale)
        value = value.view(heads, slots, repeat, dim).transpose(0, 1)
        lse = lse.view(heads, slots, repeat).transpose(0, 1)
        return value, _silenced(lse, self._unrooted)

    def _store(self, store: Tensor) -> Tensor:
        """float[prompts, Hkv, reach, D] of the prompts in use: a view when they are the first ones."""
        if self._side_by_side:
            return store[: len(self._prompts), :, : self._prompt_reach]
        return store[:, :, : self._prompt_reach].index_select(0, self._prompts)


def _padded(rows: list[Row], count: int) -> list[Row]:
    return rows + [rows[0]] * (count - len(rows))


def _silenced(lse: Tensor, where: Tensor | None) -> Tensor:
    """Take a part out of the joint softmax where it does not apply."""
    return lse if where is None else lse.masked_fill(where, float("-inf"))


def _partial(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp. q: [B, H, m, D]; k, v: [B, H, n, D]; mask: additive [B, 1, 1, n]."""
    value, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    return value, lse

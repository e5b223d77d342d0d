"""Keys and values of everything that is being sampled: shared prompts, and one row per distinct tail.

Layout of one decode step: prompt part as one matrix product per prompt over all its rows, tail part
as one batched product over compact row slots; both are joined in a single softmax.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.core.types import Int32
from surefoot.policy.forward import base_of

_GROW = 64


@dataclass(slots=True, eq=False)
class PromptSlot:
    """A computed prompt. ``hidden``: float[d] of its last token."""

    tokens: Int32
    hidden: Tensor
    slot: int = -1
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
        config = cast("Any", base_of(model).config.get_text_config())
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
        self.prompt_keys = [empty] * self.layers
        self.prompt_values = [empty] * self.layers
        self.keys = [empty] * self.layers
        self.values = [empty] * self.layers

    def find(self, key: bytes) -> PromptSlot | None:
        """The computed prompt with exactly these token bytes."""
        return self._prompts.get(key)

    def add_prompt(self, prompt: PromptSlot, keys: list[Tensor], values: list[Tensor]) -> None:
        """Store a computed prompt; keys and values: float[Hkv, P, D] per layer."""
        prompt.slot = _lowest_free({p.slot for p in self._prompts.values()})
        length = len(prompt.tokens)
        _ensure(self.prompt_keys, prompt.slot + 1, length)
        _ensure(self.prompt_values, prompt.slot + 1, length)
        for layer in range(self.layers):
            self.prompt_keys[layer][prompt.slot, :, :length] = keys[layer]
            self.prompt_values[layer][prompt.slot, :, :length] = values[layer]
        self._prompts[prompt.tokens.tobytes()] = prompt

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
    """Attention layout of one batch of rows, each with one or more new tokens."""

    def __init__(self, cache: Cache, rows: list[Row]) -> None:
        self._cache = cache
        counts = [len(row.waiting) for row in rows]
        tails = [len(row.tail) for row in rows]
        self._width = max(counts)
        self._slots = max(row.slot for row in rows) + 1
        self._reach = max(t + n for t, n in zip(tails, counts, strict=True))
        cache.reserve(self._slots, self._reach)
        offset = torch.cat([torch.arange(n) for n in counts])
        self._slot = torch.repeat_interleave(torch.tensor([row.slot for row in rows]), torch.tensor(counts))
        self._offset = offset
        self._at = torch.cat([torch.arange(t, t + n) for t, n in zip(tails, counts, strict=True)])
        self.positions = torch.cat(
            [torch.arange(row.known, row.known + n) for row, n in zip(rows, counts, strict=True)]
        )
        self.last = torch.cumsum(torch.tensor(counts), 0) - 1
        self._tail_mask = self._mask_tail(rows)
        self._group(rows)

    def _mask_tail(self, rows: list[Row]) -> Tensor:
        """Additive float[slots, 1, 1, width, reach]: new token i of a row sees tail positions <= tail + i."""
        limit = torch.full((self._slots, self._width), -1)
        for row in rows:
            n = len(row.waiting)
            limit[row.slot, :n] = torch.arange(len(row.tail), len(row.tail) + n)
        closed = torch.arange(self._reach) > limit[..., None]
        return torch.zeros(closed.shape).masked_fill(closed, float("-inf"))[:, None, None]

    def _group(self, rows: list[Row]) -> None:
        """Grid of prompts x rows: where each row's queries go so that a prompt is read once."""
        prompts = sorted({row.prompt.slot for row in rows})
        lengths = {row.prompt.slot: len(row.prompt.tokens) for row in rows}
        places: dict[int, list[Row]] = {slot: [] for slot in prompts}
        for row in rows:
            places[row.prompt.slot].append(row)
        self._prompts = torch.tensor(prompts)
        self._all_prompts = prompts == list(range(prompts[0], prompts[-1] + 1))
        self._first_prompt = prompts[0]
        self._members = max(len(group) for group in places.values())
        self._prompt_reach = max(lengths.values())
        self._cell = torch.zeros(self._slots, dtype=torch.int64)
        self._row_slots = torch.tensor([row.slot for row in rows])
        for i, slot in enumerate(prompts):
            for j, row in enumerate(places[slot]):
                self._cell[row.slot] = i * self._members + j
        closed = (
            torch.arange(self._prompt_reach) >= torch.tensor([lengths[slot] for slot in prompts])[:, None]
        )
        self._prompt_mask = torch.zeros(closed.shape).masked_fill(closed, float("-inf"))[:, None, None]

    def _prompt_store(self, store: Tensor) -> Tensor:
        """float[prompts, Hkv, reach, D] of the prompts in use: a view when they stand side by side."""
        if self._all_prompts:
            first = self._first_prompt
            return store[first : first + len(self._prompts), :, : self._prompt_reach]
        return store[self._prompts, :, : self._prompt_reach]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See :class:`surefoot.policy.forward.AttentionLayout`."""
        cache, heads, dim = self._cache, k.shape[0], k.shape[2]
        repeat, slots, width = q.shape[0] // heads, self._slots, self._width
        keys, values = cache.keys[layer], cache.values[layer]
        keys[self._slot, :, self._at] = k.transpose(0, 1)
        values[self._slot, :, self._at] = v.transpose(0, 1)
        # Queries by row slot: [slots, width, Hkv, repeat, D] -> [slots, Hkv, repeat * width, D]
        rows = q.new_zeros(slots, width, heads * repeat, dim)
        rows[self._slot, self._offset] = q.transpose(0, 1) * scale
        by_head = rows.view(slots, width, heads, repeat, dim).permute(0, 2, 3, 1, 4)
        queries = by_head.reshape(slots * heads, repeat * width, dim)

        tail_k = keys[:slots, :, : self._reach].reshape(slots * heads, self._reach, dim)
        tail = torch.bmm(queries, tail_k.transpose(1, 2)).view(slots, heads, repeat, width, self._reach)
        tail = tail + self._tail_mask
        prompt = self._prompt_scores(layer, queries.view(slots, heads, repeat * width, dim))
        prompt = prompt.view(slots, heads, repeat, width, self._prompt_reach)
        share = torch.softmax(torch.cat([prompt, tail], dim=-1), dim=-1)
        cut = self._prompt_reach
        out = self._prompt_values(layer, share[..., :cut].reshape(slots, heads, repeat * width, cut))
        tail_v = values[:slots, :, : self._reach].reshape(slots * heads, self._reach, dim)
        own = torch.bmm(share[..., cut:].reshape(slots * heads, repeat * width, self._reach), tail_v)
        out = out + own.view(slots, heads, repeat * width, dim)
        out = out.view(slots, heads, repeat, width, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(slots, width, heads * repeat, dim)[self._slot, self._offset]

    def _to_grid(self, x: Tensor) -> Tensor:
        """[slots, Hkv, m, c] -> [prompts, Hkv, members * m, c]; cells without a row are zero."""
        _, heads, m, c = x.shape
        grid = x.new_zeros(len(self._prompts) * self._members, heads, m, c)
        grid[self._cell[self._row_slots]] = x[self._row_slots]
        return (
            grid.view(-1, self._members, heads, m, c).transpose(1, 2).reshape(-1, heads, self._members * m, c)
        )

    def _from_grid(self, x: Tensor, m: int) -> Tensor:
        """Inverse of :meth:`_to_grid`; slots without a row get some other row's numbers, never read."""
        prompts, heads, _, c = x.shape
        grid = x.view(prompts, heads, self._members, m, c).transpose(1, 2)
        return grid.reshape(prompts * self._members, heads, m, c)[self._cell]

    def _prompt_scores(self, layer: int, queries: Tensor) -> Tensor:
        keys = self._prompt_store(self._cache.prompt_keys[layer])
        scores = torch.matmul(self._to_grid(queries), keys.transpose(2, 3)) + self._prompt_mask
        return self._from_grid(scores, queries.shape[2])

    def _prompt_values(self, layer: int, share: Tensor) -> Tensor:
        values = self._prompt_store(self._cache.prompt_values[layer])
        return self._from_grid(torch.matmul(self._to_grid(share), values), share.shape[2])

"""Samples from a local model: batched, with keys and values kept across turns and shared.

A group's prompt is computed once; members whose contexts are still identical share one row and
part when they sample different tokens. Must not know tasks, rewards or training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.core.errors import DataError
from surefoot.core.types import Finish, Int32, Sampling
from surefoot.engines.base import Sample, SampleRequest
from surefoot.engines.cache import Cache, PromptSlot, Row, RowAttention
from surefoot.policy.forward import head_of, hidden_states, restrict
from surefoot.policy.lean import project
from surefoot.policy.trie import Trie, TrieAttention, build_trie, common_prefix


@dataclass(slots=True, eq=False)
class _Turn:
    """A request in progress."""

    request: SampleRequest
    future: asyncio.Future[Sample]
    uniforms: np.ndarray[tuple[int], np.dtype[np.float64]]
    limit: int
    prefilled: int = 0
    cached: int = 0
    row: Row | None = None
    tokens: list[int] = field(default_factory=lambda: [])
    logprobs: list[float] = field(default_factory=lambda: [])


_BLOCK = 256  # neighbouring tokens whose mass is summed before any is looked at alone


def draw(logits: Tensor, rows: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse-CDF draws from rows of logits. float32[R, V] (overwritten), int64[T], float64[T] in [0, 1)
    -> tokens int64[T], their log-probs float32[T].

    First the block of tokens, then the token in it. Sums are float64, so that rare tokens keep their mass,
    and a token without any is never drawn.
    """
    p = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    blocks = F.pad(p, (0, -p.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    edges = blocks.sum(-1, dtype=torch.float64).cumsum(1)[rows]
    total = edges[:, -1]
    if not bool(torch.isfinite(total).all()):
        raise DataError("logits are not finite: the model's weights, or what they are given, are broken")
    block, before = _inverse(edges, uniforms * total)
    offset, _ = _inverse(blocks[rows, block].double().cumsum(1), uniforms * total - before)
    mass = blocks[rows, block, offset].double()
    return block * _BLOCK + offset, (mass.log() - total.log()).float()


def _inverse(edges: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """First place whose running sum exceeds ``wanted``, and the sum before it. float64[T, n], float64[T]."""
    below = torch.nextafter(edges[:, -1], edges.new_zeros(()))
    place = torch.searchsorted(edges, torch.minimum(wanted, below)[:, None].clamp(min=0.0), right=True)
    before = torch.where(place > 0, edges.gather(1, (place - 1).clamp(min=0)), 0.0)
    return place[:, 0], before[:, 0]


class LocalEngine:
    """An :class:`surefoot.engines.base.Engine` on a model in this process.

    ``deterministic`` decodes only when every entered slot waits for a sample, so that batches,
    and with them all bits, do not depend on timing. Weights are the model's own: training and
    sampling share one copy.
    """

    def __init__(self, model: nn.Module, *, context: int, deterministic: bool = True) -> None:
        self._model = model
        self._context = context
        self._deterministic = deterministic
        self._version = 0
        self._slots = 0
        self._pending: list[_Turn] = []
        self._active: list[_Turn] = []
        self._rows: dict[str, Row] = {}
        self._cache = Cache(model)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.decode_steps = 0
        self.rows_computed = 0
        self.tokens_sampled = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def context(self) -> int:
        return self._context

    def enter(self) -> None:
        self._slots += 1

    def leave(self) -> None:
        self._slots -= 1
        self._wake.set()

    def release(self, session: str) -> None:
        row = self._rows.pop(session, None)
        if row is not None:
            self._cache.detach(row, session)

    def new_version(self, version: int) -> None:
        if self._active or self._pending:
            raise DataError("weights changed while turns were being sampled; wait for them first")
        self._version = version
        self._rows.clear()
        self._cache.clear()

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one turn. Raises DataError for an empty context; a full context finishes at once."""
        if len(request.tokens) == 0:
            raise DataError(f"session {request.session}: the context is empty; there is nothing to continue")
        room = self._context - len(request.tokens)
        if room < 1:
            empty = np.zeros(0, np.int32)
            return Sample(empty, empty.astype(np.float32), Finish.CONTEXT, self._version)
        loop = asyncio.get_running_loop()
        limit = min(request.sampling.max_tokens, room)
        uniforms = np.random.Generator(np.random.Philox(request.seed)).random(limit)
        turn = _Turn(request, loop.create_future(), uniforms, limit)
        self._pending.append(turn)
        if self._task is None or self._task.done():
            self._wake = asyncio.Event()
            self._task = loop.create_task(self._run())
        self._wake.set()
        return await turn.future

    async def _run(self) -> None:
        while self._pending or self._active:
            if self._deterministic and len(self._pending) + len(self._active) < self._slots:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                self._step()
            except Exception as error:  # every waiting caller must hear of it; none may hang
                self._fail(error)
            await asyncio.sleep(0)

    def _fail(self, error: Exception) -> None:
        for turn in [*self._pending, *self._active]:
            if not turn.future.done():
                turn.future.set_exception(error)
        self._pending.clear()
        self._active.clear()
        self._rows.clear()
        self._cache.clear()

    @torch.inference_mode()
    def _step(self) -> None:
        """Admit what waits, compute one batch, sample one token for every active turn."""
        self._drop_cancelled()
        arrived = sorted(self._pending, key=lambda turn: turn.request.session)
        self._pending.clear()
        self._active.extend(arrived)
        fresh = [turn for turn in arrived if not self._continue(turn)]
        if fresh:
            self._prefill(fresh)
        rows = self._cache.hungry()
        if rows:
            self._feed(rows)
        if self._active:
            self._draw()

    def _drop_cancelled(self) -> None:
        for turn in [turn for turn in self._active if turn.future.done()]:
            self._active.remove(turn)
            self.release(turn.request.session)
        self._pending = [turn for turn in self._pending if not turn.future.done()]

    def _continue(self, turn: _Turn) -> bool:
        """Attach a turn to its session's cached row if the context merely grew."""
        session = turn.request.session
        row = self._rows.get(session)
        if row is None:
            return False
        tokens = turn.request.tokens
        known = row.known
        if known >= len(tokens) or not row.matches(tokens[:known]):
            self.release(session)
            return False
        turn.cached, turn.prefilled = known, len(tokens) - known
        turn.row = self._cache.extend(row, session, tokens[known:])
        self._rows[session] = turn.row
        return True

    def _prefill(self, turns: Sequence[_Turn]) -> None:
        """Compute the prompts that are new, each distinct one once, and attach their sessions."""
        wanted: dict[bytes, list[_Turn]] = {}
        for turn in turns:
            wanted.setdefault(turn.request.tokens.tobytes(), []).append(turn)
        missing = [group[0].request.tokens for key, group in wanted.items() if self._cache.find(key) is None]
        if missing:
            self._compute_prompts(missing)
        for key, group in wanted.items():
            prompt = self._cache.find(key)
            assert prompt is not None
            for i, turn in enumerate(group):
                turn.cached = len(prompt.tokens) if i else prompt.known
                turn.prefilled = len(prompt.tokens) - turn.cached
                turn.row = self._cache.attach(prompt, turn.request.session)
                self._rows[turn.request.session] = turn.row

    def _compute_prompts(self, prompts: Sequence[Int32]) -> None:
        """Compute and store prompts, each shared run once, without what held prompts begin with as well."""
        layout = _Prefill(build_trie(prompts), prompts, self._cache)
        hidden = hidden_states(self._model, layout.tokens, layout.positions, layout)
        if self._cache.empty and len(prompts) > 1:
            shared = min(common_prefix(prompts[0], other) for other in prompts[1:])
            first = torch.from_numpy(layout.places[0][:shared])
            roots = [[x.index_select(1, first) for x in store] for store in (layout.keys, layout.values)]
            self._cache.set_root(prompts[0][:shared], *roots)
        for prompt, place, known in zip(prompts, layout.places, layout.known, strict=True):
            index = torch.from_numpy(place)
            keys = [k.index_select(1, index) for k in layout.keys]
            values = [v.index_select(1, index) for v in layout.values]
            last = hidden[layout.computed_at[place[-1]]].clone()
            self._cache.add_prompt(PromptSlot(prompt, last, known=known), keys, values)

    def _feed(self, rows: list[Row]) -> None:
        """Run the rows' waiting tokens through the model; each row then holds its last hidden state."""
        layout = RowAttention(self._cache, rows)
        tokens = torch.tensor([token for row in rows for token in row.waiting])
        hidden = hidden_states(self._model, tokens, layout.positions, layout)
        last = hidden.index_select(0, layout.last)
        for i, row in enumerate(rows):
            row.advance(last[i])
        self.rows_computed += len(rows)

    def _draw(self) -> None:
        """Sample one token for each active turn from its row's distribution; rows part as needed."""
        self.decode_steps += 1
        rows: dict[Row, list[_Turn]] = {}
        for turn in self._active:
            assert turn.row is not None
            rows.setdefault(turn.row, []).append(turn)
        by_sampling: dict[Sampling, list[Row]] = {}
        for row, turns in rows.items():
            for sampling in dict.fromkeys(turn.request.sampling for turn in turns):
                by_sampling.setdefault(sampling, []).append(row)
        head = head_of(self._model)
        for sampling, members in by_sampling.items():
            logits = project(torch.stack([row.hidden for row in members]), head).contiguous()
            for turn, token, logprob in self._pick(logits, sampling, members, rows):
                turn.tokens.append(token)
                turn.logprobs.append(logprob)
        for row, turns in rows.items():
            self._part(row, turns)
        self._active = [turn for turn in self._active if not turn.future.done()]

    def _pick(
        self, logits: Tensor, sampling: Sampling, members: Sequence[Row], rows: dict[Row, list[_Turn]]
    ) -> list[tuple[_Turn, int, float]]:
        """One draw a turn by its own uniform, and the log-prob of the token."""
        pairs = [(i, t) for i, row in enumerate(members) for t in rows[row] if t.request.sampling == sampling]
        which = torch.tensor([i for i, _ in pairs])
        if sampling.temperature == 0:
            best = logits.argmax(-1)[which].tolist()
            return [(turn, token, 0.0) for (_, turn), token in zip(pairs, best, strict=True)]
        drawn = torch.tensor([turn.uniforms[len(turn.tokens)] for _, turn in pairs], dtype=torch.float64)
        picked, logp = draw(restrict(logits, sampling), which, drawn)
        found = zip(pairs, picked.tolist(), logp.tolist(), strict=True)
        return [(turn, token, value) for (_, turn), token, value in found]

    def _part(self, row: Row, turns: Sequence[_Turn]) -> None:
        """Finish turns that ended; the others go on with the token they drew, in their own row if needed."""
        going: dict[int, list[str]] = {}
        by_session = {turn.request.session: turn for turn in turns}
        for turn in turns:
            self.tokens_sampled += 1
            finish = self._finish(turn)
            if finish is None:
                going.setdefault(turn.tokens[-1], []).append(turn.request.session)
                continue
            turn.future.set_result(
                Sample(
                    np.array(turn.tokens, np.int32),
                    np.array(turn.logprobs, np.float32),
                    finish,
                    self._version,
                    turn.prefilled,
                    turn.cached,
                )
            )
        for token, sessions in going.items():
            target = self._cache.move(row, sessions, [token])
            for session in sessions:
                by_session[session].row = target
                self._rows[session] = target

    def _finish(self, turn: _Turn) -> Finish | None:
        if turn.tokens[-1] in turn.request.stop_ids:
            return Finish.STOP
        if len(turn.tokens) < turn.limit:
            return None
        return Finish.LENGTH if turn.limit == turn.request.sampling.max_tokens else Finish.CONTEXT


class _Prefill(TrieAttention):
    """Trie attention over prompts whose openings may be known from prompts that the cache holds.

    ``tokens``, ``positions``: int64[M], those left to compute; ``computed_at``: int64[N], where among them
    each token of the trie is; ``known``: tokens of each prompt that were found; ``keys``, ``values``: of
    each layer, float[Hkv, N, D], all the trie's tokens once the model has run.
    """

    def __init__(self, trie: Trie, prompts: Sequence[Int32], cache: Cache) -> None:
        super().__init__(trie)
        self.places = trie.places
        donors = [cache.longest(prompt) for prompt in prompts]
        self.known = [length for _, length in donors]
        new = np.ones(len(trie), bool)
        for place, length in zip(trie.places, self.known, strict=True):
            new[place[:length]] = False
        for place in trie.places:  # whose hidden state is wanted, also where it is inside a longer prompt
            new[place[-1]] = True
        self.computed_at = np.cumsum(new) - 1
        self._new = torch.from_numpy(np.flatnonzero(new))
        self.tokens, self.positions = (torch.from_numpy(x[new]) for x in (trie.tokens, trie.positions))
        self._whole = bool(new.all())
        if self._whole:
            self.keys, self.values = ([torch.empty(0)] * cache.layers for _ in range(2))
        else:
            self.keys, self.values = self._found(cache, donors)

    def _found(self, cache: Cache, donors: Sequence[tuple[PromptSlot | None, int]]) -> list[list[Tensor]]:
        """Keys and values of all layers, with those tokens filled in that a donor has."""
        shape = (cache.kv_heads, len(self.computed_at), cache.head_dim)
        found: list[list[Tensor]] = [[torch.empty(shape) for _ in range(cache.layers)] for _ in range(2)]
        for place, (donor, length) in zip(self.places, donors, strict=True):
            if donor is not None and length:
                index = torch.from_numpy(place[:length])
                for into, store in zip(found, (cache.prompt_keys, cache.prompt_values), strict=True):
                    for layer, out in enumerate(into):
                        whole = torch.cat(cache.prompt_parts(store, layer, donor), dim=1)
                        out[:, index] = whole[:, :length]
        return found

    def runs(self) -> list[tuple[slice, list[slice]]]:
        """As in the base class; those that ask are counted among the computed tokens."""
        found: list[tuple[slice, list[slice]]] = []
        for own, seen in super().runs():
            asking = self.computed_at[own]
            before = int(self.computed_at[own.start - 1]) + 1 if own.start else 0
            if asking[-1] >= before:
                found.append((slice(before, int(asking[-1]) + 1), seen))
        return found

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if self._whole:
            self.keys[layer], self.values[layer] = k, v
        else:
            self.keys[layer][:, self._new], self.values[layer][:, self._new] = k, v
        return super().attend(layer, q, self.keys[layer], self.values[layer], scale)

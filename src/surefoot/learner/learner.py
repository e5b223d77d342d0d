"""Updates a model's weights from examples and any loss over their tokens.

Loss, gradients and metrics are sums under global weights, accumulated over packed micro-batches.
Must not know environments, rewards or algorithm names.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.core.errors import ConfigError
from surefoot.core.types import Int32, Sampling
from surefoot.learner.batch import Example, Float64, TokenBatch, global_weights, split_micro_batches
from surefoot.objectives.policy_gradient import Aggregate
from surefoot.policy.forward import head_of, hidden_states, selected_logprobs
from surefoot.policy.trie import Trie, TrieAttention, build_trie

Schedule = Literal["constant", "linear", "cosine"]
# name -> value, each a sum over tokens under the global weights, so that micro-batches add up
Sums = dict[str, Tensor]
Loss = Callable[[TokenBatch], tuple[Tensor, Sums]]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW (arXiv 1711.05101) and its schedule. ``lr`` is the peak; ``warmup`` counts updates."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    warmup: int = 0
    schedule: Schedule = "constant"

    def factor(self, update: int, total: int) -> float:
        """Share of the peak learning rate at ``update`` (from 0) of ``total``."""
        if update < self.warmup:
            return (update + 1) / (self.warmup + 1)
        if self.schedule == "constant":
            return 1.0
        done = (update - self.warmup) / max(total - self.warmup, 1)
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update. ``metrics`` are weighted means or sums named by the loss; ``stepped`` is False when
    there was nothing to learn from or the gradient was not finite, and ``reason`` says which.
    """

    metrics: dict[str, float]
    grad_norm: float
    lr: float
    trained_tokens: int
    packed_tokens: int
    micro_batches: int
    stepped: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What a model says of M trained tokens: logp, entropy float32[M]; values float32[M], or None without a
    value head; packed: how many tokens were computed.
    """

    logp: Tensor
    entropy: Tensor
    values: Tensor | None
    packed: int


def packed_states(model: nn.Module, sequences: Sequence[Int32]) -> tuple[Trie, Tensor]:
    """(the packed int32[N_i] sequences, final hidden states float32[N, d] of their tokens)."""
    trie = build_trie(sequences)
    tokens, positions = torch.from_numpy(trie.tokens), torch.from_numpy(trie.positions)
    return trie, hidden_states(model, tokens, positions, TrieAttention(trie))


def score_tokens(
    model: nn.Module,
    examples: Sequence[Example],
    sampling: Sampling,
    *,
    chunk: int = 128,
    value_head: nn.Linear | None = None,
) -> TokenScores:
    """One packed pass over the examples: their trained tokens in order, under ``sampling``.

    The value of a token is read from the state before it: what the policy knew when it sampled it.
    """
    pairs = [pair for example in examples for pair in example.segments]
    trie, hidden = packed_states(model, [tokens for tokens, _ in pairs])
    wanted = np.concatenate([p[mask] for p, (_, mask) in zip(trie.places, pairs, strict=True)])
    unique, back = np.unique(wanted, return_inverse=True)
    rows = hidden.index_select(0, torch.from_numpy(trie.before[unique]))
    targets, index = torch.from_numpy(trie.tokens[unique]), torch.from_numpy(back)
    logp, entropy = selected_logprobs(rows, head_of(model), targets, sampling, chunk=chunk)
    # The critic reads the trunk and does not bend it: regression must not cost the policy.
    values = None if value_head is None else value_head(rows.detach())[:, 0].index_select(0, index)
    return TokenScores(logp.index_select(0, index), entropy.index_select(0, index), values, len(trie))


def frozen_scores(
    model: nn.Module,
    examples: Sequence[Example],
    sampling: Sampling,
    *,
    tokens_per_batch: int,
    chunk: int = 128,
    value_head: nn.Linear | None = None,
) -> tuple[list[Float64], list[Float64]]:
    """Log-probs and values (empty without a head) of each example's trained tokens, without gradient."""
    logps: list[Float64] = [np.zeros(0)] * len(examples)
    values: list[Float64] = [np.zeros(0)] * len(examples)
    with torch.no_grad():
        for rows in split_micro_batches(examples, tokens_per_batch):
            part = [examples[i] for i in rows]
            scores = score_tokens(model, part, sampling, chunk=chunk, value_head=value_head)
            ends = np.cumsum([example.trained for example in part])[:-1]
            for into, tensor in ((logps, scores.logp), (values, scores.values)):
                if tensor is not None:
                    for i, own in zip(rows, np.split(tensor.double().numpy(), ends), strict=True):
                        into[i] = own
    return logps, values


def turn_states(
    model: nn.Module, examples: Sequence[Example], *, tokens_per_batch: int
) -> tuple[Tensor, Tensor]:
    """Last hidden states before the first token of each turn and at its last one: float32[K, d] each.

    K counts the turns of all examples in order; a turn without tokens gets zeros.
    """
    before: list[Tensor] = [torch.zeros(0)] * len(examples)
    after: list[Tensor] = [torch.zeros(0)] * len(examples)
    for owners, trie, hidden in _frozen_hidden(model, examples, tokens_per_batch):
        for i in dict.fromkeys(owners):
            places = [p for p, j in zip(trie.places, owners, strict=True) if j == i]
            masks = [mask for _, mask in examples[i].segments]
            place = np.concatenate([p[mask] for p, mask in zip(places, masks, strict=True)])
            ends = np.cumsum(examples[i].turns)
            starts, spoken = ends - examples[i].turns, examples[i].turns > 0
            for into, index in (
                (before, trie.before[place[starts[spoken]]]),
                (after, place[ends[spoken] - 1]),
            ):
                states = hidden.new_zeros(len(ends), hidden.shape[1])
                states[torch.from_numpy(spoken)] = hidden[torch.from_numpy(index)]
                into[i] = states
    return torch.cat(before), torch.cat(after)


def end_states(model: nn.Module, examples: Sequence[Example], *, tokens_per_batch: int) -> Tensor:
    """Last hidden state at the last token of each example, what came after its last turn included.

    float32[n, d].
    """
    ends: list[Tensor] = [torch.zeros(0)] * len(examples)
    for owners, trie, hidden in _frozen_hidden(model, examples, tokens_per_batch):
        for i, place in zip(owners, trie.places, strict=True):
            ends[i] = hidden[int(place[-1])]  # the last segment of an example comes last
    return torch.stack(ends)


def _frozen_hidden(
    model: nn.Module, examples: Sequence[Example], tokens_per_batch: int
) -> Iterator[tuple[list[int], Trie, Tensor]]:
    """By micro-batch: the example of each segment, the packed segments, and their hidden states."""
    for rows in split_micro_batches(examples, tokens_per_batch):
        owners = [i for i in rows for _ in examples[i].segments]
        with torch.no_grad():
            trie, hidden = packed_states(model, [tokens for i in rows for tokens, _ in examples[i].segments])
        yield owners, trie, hidden


class Learner:
    """Owns the trainable parameters and their optimiser.

    ``tokens_per_batch`` bounds packed tokens in memory at once; ``chunk`` the rows whose vocabulary
    logits exist at once. Peak memory does not depend on the batch or on tokens x vocabulary. A
    ``value_head`` (linear, one output) learns with the model, at ``value_lr``.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        *,
        total_updates: int,
        tokens_per_batch: int = 512,
        chunk: int = 128,
        checkpoint_activations: bool = False,
        value_head: nn.Linear | None = None,
        value_lr: float = 1e-4,
    ) -> None:
        self.model = model
        self.value_head = value_head
        self.settings = settings
        self.total_updates = total_updates
        self.tokens_per_batch = tokens_per_batch
        self.chunk = chunk
        self.updates = 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ConfigError("the model has no trainable parameter; nothing can be learned")
        if checkpoint_activations:
            cast("Any", model).gradient_checkpointing_enable({"use_reentrant": False})
        self.checkpoint_activations = checkpoint_activations
        _steady_heap()
        groups: list[dict[str, Any]] = [{"params": list(self.parameters), "peak": settings.lr}]
        self._critic: list[nn.Parameter] = [] if value_head is None else list(value_head.parameters())
        if self._critic:
            self.parameters = [*self.parameters, *self._critic]
            groups.append({"params": list(self._critic), "peak": value_lr})
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def frozen_scores(
        self, examples: Sequence[Example], sampling: Sampling
    ) -> tuple[list[Float64], list[Float64]]:
        """Log-probs and values of each example under the weights as they are; see :func:`frozen_scores`."""
        return frozen_scores(
            self.model,
            examples,
            sampling,
            tokens_per_batch=self.tokens_per_batch,
            chunk=self.chunk,
            value_head=self.value_head,
        )

    def update(
        self,
        examples: Sequence[Example],
        loss: Loss,
        *,
        sampling: Sampling,
        aggregate: Aggregate = "token_mean",
        constant: int | None = None,
        keep: Iterable[int] | None = None,
    ) -> UpdateReport:
        """One optimiser step on ``examples``.

        Weights come from all of them; only those in ``keep`` (default: all) are computed, for
        callers who know that the others' gradient is exactly zero.
        """
        _trim()  # what sampling left
        factor = self.settings.factor(self.updates, self.total_updates)
        lr = self.settings.lr * factor
        chosen = list(range(len(examples))) if keep is None else sorted(set(keep))
        if not chosen:
            return UpdateReport({}, 0.0, lr, 0, 0, 0, stepped=False, reason="no example carries a signal")
        weights = global_weights(examples, aggregate, constant)
        part, part_weights = [examples[i] for i in chosen], [weights[i] for i in chosen]
        totals: dict[str, float] = {}
        packed = 0
        batches = split_micro_batches(part, self.tokens_per_batch)
        self.model.train(self.checkpoint_activations)
        for rows in batches:
            packed += self._accumulate(
                [part[i] for i in rows], [part_weights[i] for i in rows], loss, sampling, totals
            )
        self.model.eval()
        return self._step(totals, lr, sum(e.trained for e in part), packed, len(batches))

    def _accumulate(
        self,
        examples: Sequence[Example],
        weights: Sequence[np.ndarray[Any, np.dtype[np.float64]]],
        loss: Loss,
        sampling: Sampling,
        totals: dict[str, float],
    ) -> int:
        scores = score_tokens(self.model, examples, sampling, chunk=self.chunk, value_head=self.value_head)
        counts = torch.tensor([example.trained for example in examples])
        batch = TokenBatch(
            scores.logp,
            torch.from_numpy(np.concatenate([e.behaviour for e in examples])),
            torch.from_numpy(np.concatenate([e.advantages for e in examples])),
            torch.from_numpy(np.concatenate(weights)),
            torch.repeat_interleave(torch.arange(len(examples)), counts),
            scores.entropy,
            {
                name: torch.from_numpy(np.concatenate([e.columns[name] for e in examples]))
                for name in examples[0].columns
            },
            scores.values,
        )
        value, sums = loss(batch)
        cast("Any", value).backward()
        for name, total in {"loss": value, **sums}.items():
            totals[name] = totals.get(name, 0.0) + float(total.detach())
        return scores.packed

    def _step(
        self, totals: dict[str, float], lr: float, trained: int, packed: int, batches: int
    ) -> UpdateReport:
        # Each is clipped by its own norm, so that a critic far off does not shrink the policy's step.
        policy = self.parameters[: len(self.parameters) - len(self._critic)]
        norm = float(torch.nn.utils.clip_grad_norm_(policy, self.settings.clip_norm))
        if self._critic:
            critic = float(torch.nn.utils.clip_grad_norm_(self._critic, self.settings.clip_norm))
            norm = norm if math.isfinite(critic) else critic
        stepped, reason = math.isfinite(norm), ""
        if stepped:
            factor = self.settings.factor(self.updates, self.total_updates)
            for group in self.optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            self.optimizer.step()
            self.updates += 1
        else:
            reason = f"the gradient norm is {norm}; the step was skipped"
        # Gradients keep their memory: allocating half a gigabyte anew each step fragments the heap.
        self.optimizer.zero_grad(set_to_none=False)
        _trim()
        return UpdateReport(totals, norm, lr, trained, packed, batches, stepped, reason)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD


def _steady_heap() -> None:
    """Keep freed activations for the next layer, and map only what is far larger (glibc only).

    Mapping each tensor anew costs a page fault for every 4 KiB, a fifth of an update; growing the limit as
    glibc does by itself leaves weights and logits in the heap, which then never shrinks.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 24)
        mallopt(_TRIM_THRESHOLD, 1 << 29)


def _trim() -> None:
    """Hand freed heap pages back, where the C library can: keeps the resident size flat (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

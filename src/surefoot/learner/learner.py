"""Updates a model's weights from examples and any loss over their tokens.

Loss, gradients and metrics are sums under global weights, accumulated over packed micro-batches.
Must not know environments, rewards or algorithm names.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.core.errors import ConfigError
from surefoot.core.types import Sampling
from surefoot.learner.batch import Example, TokenBatch, global_weights, split_micro_batches
from surefoot.objectives.policy_gradient import Aggregate
from surefoot.policy.forward import head_of, hidden_states, selected_logprobs
from surefoot.policy.trie import TrieAttention, build_trie

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


class Learner:
    """Owns the trainable parameters and their optimiser.

    ``tokens_per_batch`` bounds packed tokens in memory at once; ``chunk`` the rows whose vocabulary
    logits exist at once. Peak memory does not depend on the batch or on tokens x vocabulary.
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
    ) -> None:
        self.model = model
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
        self._train_mode = checkpoint_activations
        _steady_heap()
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def logprobs(
        self, examples: Sequence[Example], sampling: Sampling, *, gradient: bool
    ) -> tuple[Tensor, Tensor, int]:
        """Log-probs and entropies of the examples' trained tokens under ``sampling``.

        Returns (float32[M], float32[M], packed tokens computed), M over all examples in order.
        """
        pairs = [pair for example in examples for pair in example.segments]
        trie = build_trie([tokens for tokens, _ in pairs])
        wanted = np.concatenate([p[mask] for p, (_, mask) in zip(trie.places, pairs, strict=True)])
        unique, back = np.unique(wanted, return_inverse=True)
        tokens, positions = torch.from_numpy(trie.tokens), torch.from_numpy(trie.positions)
        with torch.set_grad_enabled(gradient):
            hidden = hidden_states(self.model, tokens, positions, TrieAttention(trie))
            rows = hidden.index_select(0, torch.from_numpy(trie.before[unique]))
            logp, entropy = selected_logprobs(
                rows, head_of(self.model), tokens[torch.from_numpy(unique)], sampling, chunk=self.chunk
            )
            index = torch.from_numpy(back)
            return logp.index_select(0, index), entropy.index_select(0, index), len(trie)

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
        self.model.train(self._train_mode)
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
        logp, entropy, packed = self.logprobs(examples, sampling, gradient=True)
        counts = torch.tensor([example.trained for example in examples])
        batch = TokenBatch(
            logp,
            torch.from_numpy(np.concatenate([e.behaviour for e in examples])),
            torch.from_numpy(np.concatenate([e.advantages for e in examples])),
            torch.from_numpy(np.concatenate(weights)),
            torch.repeat_interleave(torch.arange(len(examples)), counts),
            entropy,
        )
        value, sums = loss(batch)
        cast("Any", value).backward()
        for name, total in {"loss": value, **sums}.items():
            totals[name] = totals.get(name, 0.0) + float(total.detach())
        return packed

    def _step(
        self, totals: dict[str, float], lr: float, trained: int, packed: int, batches: int
    ) -> UpdateReport:
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm))
        stepped, reason = math.isfinite(norm), ""
        if stepped:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.updates += 1
        else:
            reason = f"the gradient norm is {norm}; the step was skipped"
        # Gradients keep their memory: allocating half a gigabyte anew each step fragments the heap.
        self.optimizer.zero_grad(set_to_none=False)
        _trim()
        return UpdateReport(totals, norm, lr, trained, packed, batches, stepped, reason)


_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD


def _steady_heap() -> None:
    """Let every tensor of a megabyte or more be mapped, and so returned when freed (glibc only).

    Left alone, the heap keeps what activations freed: about a quarter of the peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 20)


def _trim() -> None:
    """Hand freed heap pages back, where the C library can: keeps the resident size flat (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

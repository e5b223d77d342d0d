"""Runs a causal language model over packed tokens with an attention layout that the caller owns.

Sampling and training both go through here, so both see the same numbers. Works with any
transformers model that dispatches to the attention interface. Must not know tasks or rewards.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from surefoot.core.types import Sampling
from surefoot.policy.lean import Embed, grad_of, make_lean

_NAME = "surefoot"


class AttentionLayout(Protocol):
    """Decides what each packed token may see, and owns the keys and values of earlier tokens."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q: float[Hq, N, D], k and v: float[Hkv, N, D], already rotated -> float[N, Hq, D]."""
        ...


def _interface(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    layout = cast("AttentionLayout", kwargs["layout"])
    layer = cast("int", module.layer_idx)
    return layout.attend(layer, query[0], key[0], value[0], float(kwargs["scaling"]))[None], None


def install(model: nn.Module) -> None:
    """Route ``model``'s attention through :class:`AttentionLayout`. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _interface)
    cast("Any", model).set_attn_implementation(_NAME)
    make_lean(model)


def base_of(model: nn.Module) -> Any:
    """The transformers causal-LM inside ``model``, also when adapters are wrapped around it."""
    getter = getattr(model, "get_base_model", None)
    return getter() if getter is not None else model


def head_of(model: nn.Module) -> Tensor:
    """The vocabulary projection: float[V, d]."""
    return cast("Tensor", base_of(model).get_output_embeddings().weight)


def hidden_states(model: nn.Module, tokens: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor:
    """Final hidden states of packed tokens.

    tokens, positions: int64[N] -> float[N, d], after the last norm.
    """
    decoder = base_of(model).get_decoder()
    inputs: dict[str, Tensor] = {"input_ids": tokens[None]}
    table = decoder.get_input_embeddings()
    if type(table) is nn.Embedding and table.weight.requires_grad and torch.is_grad_enabled():
        inputs = {"inputs_embeds": cast("Tensor", Embed.apply(table.weight, tokens))[None]}
    out = decoder(**inputs, position_ids=positions[None], use_cache=False, layout=layout)
    return cast("Tensor", out.last_hidden_state)[0]


def restrict(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits of the distribution that is sampled: temperature, then top-k, then top-p.

    logits: float[R, V] -> float[R, V], -inf outside the support. Temperature 0 is left to the caller.
    """
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = torch.topk(logits, sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, index = torch.sort(logits, dim=-1, descending=True)
        share = torch.softmax(ordered, dim=-1)
        # A token stays while the mass before it is below top_p, so the first always stays.
        outside = torch.cumsum(share, dim=-1) - share >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), float("-inf"))
    return logits


class _SelectedLogprobs(torch.autograd.Function):
    """log p(target) per row without ever holding [rows, vocabulary] for more than one chunk.

    The head's gradient goes straight into ``head.grad``.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  the documented torch signature
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, sampling: Sampling, chunk: int
    ) -> tuple[Tensor, Tensor]:
        buffers = _Buffers(hidden, head, chunk)
        out, entropy, top, total = (hidden.new_empty(len(targets)) for _ in range(4))
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            logits = restrict(buffers.logits(hidden[rows], head), sampling)
            top[rows] = logits.amax(-1)
            wanted = logits.sub_(top[rows, None]).gather(1, targets[rows, None])[:, 0]
            p = torch.exp(logits, out=buffers.spare(len(logits)))
            total[rows] = p.sum(-1)
            # Outside the support p is 0, and 0 times -inf would not be.
            entropy[rows] = total[rows].log() - p.mul_(logits.clamp_(min=-1e4)).sum(-1) / total[rows]
            out[rows] = wanted - total[rows].log()
        ctx.save_for_backward(hidden, targets, top, total, entropy)
        ctx.head, ctx.sampling, ctx.chunk = head, sampling, chunk
        ctx.set_materialize_grads(False)
        return out, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        hidden, targets, top, total, entropy = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        grad, grad_entropy = cast("tuple[Tensor | None, Tensor | None]", grads)
        grad = hidden.new_zeros(len(targets)) if grad is None else grad
        head, heat = cast("Tensor", ctx.head), 1.0 / (ctx.sampling.temperature or 1.0)
        buffers = _Buffers(hidden, head, ctx.chunk)
        grad_hidden = torch.empty_like(hidden)
        for start in range(0, len(targets), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            logits = restrict(buffers.logits(hidden[rows], head), ctx.sampling)
            logits = logits.sub_(top[rows, None])
            weight = None if grad_entropy is None else grad_entropy[rows, None] * heat
            sums = (total[rows, None], entropy[rows, None])
            part = _grad_logits(logits, *sums, targets[rows], grad[rows, None] * heat, weight)
            torch.mm(part, head, out=grad_hidden[rows])
            if head.requires_grad:
                grad_of(head).addmm_(part.T, hidden[rows])
        return grad_hidden, None, None, None, None


class _Buffers:
    """Two tensors of a chunk's logits, used again: mapping memory anew costs more than the arithmetic."""

    def __init__(self, hidden: Tensor, head: Tensor, chunk: int) -> None:
        rows = min(chunk, len(hidden))
        self._logits = hidden.new_empty(rows, len(head))
        self._spare = hidden.new_empty(rows * len(head))

    def spare(self, rows: int) -> Tensor:
        """Uninitialised float[rows, V]."""
        return self._spare[: rows * self._logits.shape[1]].view(rows, -1)

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """hidden @ head.T: float[rows, V]. The product is faster with the many rows on the left."""
        turned = torch.mm(head, hidden.T, out=self.spare(len(hidden)).view(len(head), -1))
        return self._logits[: len(hidden)].copy_(turned.T)


def _grad_logits(
    logits: Tensor, total: Tensor, entropy: Tensor, targets: Tensor, grad: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    """d (g log p(target) + e H) / d logits = g (1[target] - p) - e p (log p + H), g and e the gradients.

    ``logits`` have their row's largest taken off, and are overwritten; ``total`` sums their exponentials.
    """
    if grad_entropy is None:
        part = logits.exp_().mul_(-grad / total)
    else:
        p = logits.exp().div_(total)
        logp = logits.clamp_(min=-1e4).sub_(total.log())
        part = p.mul_(logp.add_(entropy).mul_(-grad_entropy).sub_(grad))
    part[torch.arange(len(part)), targets] += grad[:, 0]
    return part


def selected_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, sampling: Sampling, *, chunk: int = 256
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy under the sampled distribution; peak memory is chunk x V.

    hidden: float[R, d], head: float[V, d], targets: int64[R] -> (float[R], float[R]), both with gradient.
    A target outside a top-k/top-p support gets -inf.
    """
    return cast(
        "tuple[Tensor, Tensor]",
        _SelectedLogprobs.apply(hidden, head, targets, sampling, chunk),  # pyright: ignore[reportArgumentType]
    )

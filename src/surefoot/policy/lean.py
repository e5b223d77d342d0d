"""Leaner passes through well-known transformer modules: the same numbers, less memory, fewer calls.

Each keeps only what its backward pass cannot compute again, and adds weight gradients in place. A
module that is not known to compute exactly this keeps its own forward. Must not know attention layouts.
"""

from __future__ import annotations

import functools
import re
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Layers known to be x + attention(norm(x)), then x + mlp(norm(x)), and nothing else.
_LAYER = re.compile(r"^LlamaDecoderLayer$")
# MLPs known to compute down(act(gate(x)) * up(x)).
_SILU_MLP = re.compile(r"^(Llama|Qwen2|Qwen3|Mistral|SmolLM3|Olmo|Olmo2)MLP$")
# Norms known to compute weight * x / sqrt(mean(x^2) + eps).
_RMS_NORM = re.compile(r"^(Llama|Qwen2|Qwen3|Mistral|SmolLM3)RMSNorm$")


def make_lean(model: nn.Module) -> None:
    """Replace the forward of every known module of ``model``. Idempotent."""
    for module in model.modules():
        if _is_layer(module):
            module.forward = functools.partial(_layer, module)
        elif _is_gated_mlp(module):
            module.forward = functools.partial(_gated_mlp, module)
        elif _is_norm(module):
            module.forward = functools.partial(_rms_norm, module)


def grad_of(weight: Tensor) -> Tensor:
    """``weight.grad``, made of zeros where there is none yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


# which modules are known ----------------------------------------------------------------------------


def _plain(part: Any) -> bool:
    if type(part) is not nn.Linear:
        return False
    bias = cast("Tensor | None", part.bias)
    return bias is None and part.weight.dtype == torch.float32


def _is_norm(module: Any) -> bool:
    return _RMS_NORM.match(type(module).__name__) is not None


def _is_gated_mlp(module: Any) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return all(map(_plain, parts)) and silu and _SILU_MLP.match(type(module).__name__) is not None


def _is_layer(module: Any) -> bool:
    if _LAYER.match(type(module).__name__) is None or not _is_gated_mlp(module.mlp):
        return False
    attention = module.self_attn
    parts = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    norms = (module.input_layernorm, module.post_attention_layernorm)
    return all(map(_plain, parts)) and all(map(_is_norm, norms))


# their forward --------------------------------------------------------------------------------------


def _layer(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A Llama layer on packed tokens: float32[1, N, d] -> the same. Without a layout, its own forward."""
    if "layout" not in kwargs:
        return cast("Tensor", type(module).forward(module, hidden_states, *args, **kwargs))
    attention, mlp = module.self_attn, module.mlp
    x = hidden_states[0]
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (part.contiguous() for part in _normed(module.input_layernorm, x, *projections))
    cos, sin = (part[0] for part in kwargs["position_embeddings"])
    q, k = (_rotated(part, cos, sin, attention.head_dim) for part in (q, k))
    v = v.view(len(v), -1, attention.head_dim).transpose(0, 1)
    seen = kwargs["layout"].attend(attention.layer_idx, q, k, v, attention.scaling)
    x = x + cast("Tensor", _Linear.apply(seen.reshape(len(x), -1), attention.o_proj.weight))
    gate, up = _normed(module.post_attention_layernorm, x, mlp.gate_proj, mlp.up_proj)
    return (x + cast("Tensor", _GatedDown.apply(gate, up, mlp.down_proj.weight)))[None]


def _normed(norm: Any, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    weights = [linear.weight for linear in linears]
    return cast("tuple[Tensor, ...]", _NormedLinears.apply(x, norm.weight, norm.variance_epsilon, *weights))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, width: int) -> Tensor:
    """float[N, H * width] -> float[H, N, width], rotated."""
    return cast("Tensor", _Rotate.apply(x.view(len(x), -1, width).transpose(0, 1), cos, sin))


def _gated_mlp(module: Any, x: Tensor) -> Tensor:
    return cast("Tensor", _GatedDown.apply(module.gate_proj(x), module.up_proj(x), module.down_proj.weight))


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    # Half-precision norms compute in float32 and round at a place of their own; theirs stays.
    if x.dtype != torch.float32:
        return cast("Tensor", type(module).forward(module, x))
    return cast("Tensor", _RmsNorm.apply(x, module.weight, module.variance_epsilon))


# arithmetic -----------------------------------------------------------------------------------------

_FEW = 128  # rows; a decoding batch has fewer, a training batch more


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T. float[..., k], float[n, k] -> float[..., n].

    Matrix products on CPUs want many rows on the left, so a small batch multiplies the other way round.
    """
    if x.ndim == 2 and 1 < len(x) <= _FEW:
        return (weight @ x.T).T
    return F.linear(x, weight)


def _rms_scale(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))


def _rms_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Gradient by x of weight * x * scale; adds the weight's own in place."""
    normed = x * scale
    if weight.requires_grad:
        grad_of(weight).add_((grad * normed).flatten(0, -2).sum(0))
    grad_x = grad * weight
    along = (grad_x * normed).mean(-1, keepdim=True)
    return grad_x.sub_(normed.mul_(along)).mul_(scale)


def _add_outer(weight: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add the gradient of ``x @ weight.T`` by the weight to ``weight.grad``."""
    if weight.requires_grad:
        grad_of(weight).addmm_(grad.flatten(0, -2).T, x.flatten(0, -2))


class _RmsNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps), keeping x (arXiv 1910.07467)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        scale = _rms_scale(x, eps)
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        x, scale = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
        return _rms_backward(cast("Tensor", grads[0]), x, scale, ctx.weight), None, None


class _NormedLinears(torch.autograd.Function):
    """Several projections of one normed x, keeping x and not the normed one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, *weights: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scale = _rms_scale(x, eps)
        ctx.save_for_backward(x, scale)
        ctx.norm, ctx.weights = norm, weights
        normed = (x * scale).mul_(norm)
        return tuple(project(normed, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, scale = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
        weights = cast("tuple[Tensor, ...]", ctx.weights)
        normed = (x * scale).mul_(ctx.norm)
        total: Tensor | None = None
        for grad, weight in zip(cast("tuple[Tensor, ...]", grads), weights, strict=True):
            _add_outer(weight, grad, normed)
            total = grad @ weight if total is None else total.addmm_(grad, weight)
        assert total is not None
        return _rms_backward(total, x, scale, ctx.norm), None, None, *([None] * len(weights))


class _Linear(torch.autograd.Function):
    """x @ weight.T, the weight's gradient added in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        ctx.weight = weight
        return project(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        grad = cast("Tensor", grads[0])
        _add_outer(ctx.weight, grad, cast("tuple[Tensor]", ctx.saved_tensors)[0])
        return grad @ ctx.weight, None


class _GatedDown(torch.autograd.Function):
    """down(silu(gate) * up), keeping only gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(gate, up)
        ctx.down = down
        return project(F.silu(gate).mul_(up), down)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        grad = cast("Tensor", grads[0])
        gate, up = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
        share = torch.sigmoid(gate)
        active = share * gate
        _add_outer(ctx.down, grad, active * up)
        grad_product = grad @ ctx.down
        grad_up = grad_product * active
        # d silu(x) / dx = s + s x (1 - s), with s = sigmoid(x)
        slope = share.addcmul_(active, 1 - share)
        return grad_product.mul_(up).mul_(slope), grad_up, None


class _Rotate(torch.autograd.Function):
    """Rotary positions (arXiv 2104.09864) whose two halves share their angles. float[H, N, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.cos, ctx.sin = cos, sin
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _rotate(cast("Tensor", grads[0]), ctx.cos, ctx.sin, -1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    half = x.shape[-1] // 2
    first, second, c, s = x[..., :half], x[..., half:], cos[:, :half], sin[:, :half]
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.mul(first, c, out=out[..., :half]).addcmul_(second, s, value=-sign)
    torch.mul(second, c, out=out[..., half:]).addcmul_(first, s, value=sign)
    return out


class Embed(torch.autograd.Function):
    """Embedding whose gradient goes straight into ``weight.grad``: no [V, d] tensor per micro-batch."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.weight, ctx.tokens = weight, tokens
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        grad_of(ctx.weight).index_add_(0, ctx.tokens, cast("Tensor", grads[0]))
        return None, None

"""Policy-gradient losses over sampled tokens, and the weights that correct for an older or other sampler.

Pure functions on flat tensors of the ``N`` tokens the policy sampled. They know nothing of models, padding,
micro-batches or algorithm names: an algorithm is a choice of weights, ratio, clip and correction.

Log-probabilities are float ``[N]``, natural logarithm; all arithmetic is float64. Tensors of a wrong shape or
dtype and non-finite values raise ``DataError`` naming the field; an impossible option raises ``ConfigError``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from surefoot.core.checks import require_option, require_positive, shape_of
from surefoot.core.errors import ConfigError, DataError

Aggregate = Literal["token_mean", "sequence_mean", "turn_mean", "constant"]
Ratio = Literal["token", "sequence", "geometric"]
Level = Literal["token", "sequence", "geometric"]
ClipKind = Literal["ppo", "cispo", "sapo", "dppo", "none"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are limited to +-20 before exp, so that a lost token cannot make the loss infinite."""


@dataclass(frozen=True)
class Clip:
    """How far one update may follow a token. Build it with one of the class methods."""

    kind: ClipKind
    low: float = 0.0
    high: float = 0.0
    dual: float | None = None
    tau_pos: float = 0.0
    tau_neg: float = 0.0
    delta: float = 0.0

    def __post_init__(self) -> None:
        needed: dict[str, tuple[str, ...]] = {
            "ppo": ("low", "high"),
            "cispo": ("high",),
            "sapo": ("tau_pos", "tau_neg"),
            "dppo": ("delta",),
            "none": (),
        }
        require_option("clip.kind", self.kind, get_args(ClipKind))
        for name in needed[self.kind]:
            require_positive(f"clip.{name}", getattr(self, name))
        if self.dual is not None and not (self.kind == "ppo" and math.isfinite(self.dual) and self.dual > 1):
            raise ConfigError(f"clip.dual must be a number above 1 on a ppo clip, got {self.dual}")

    @classmethod
    def ppo(cls, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Clip:
        """max(-A r, -A clip(r, 1-low, 1+high)); for A < 0 at most -A dual (arXiv 1707.06347, 1912.09729).

        With ``ratio="geometric"`` the bounds are on the token *log*-ratio, [-low, high] (GMPO uses 0.4).
        """
        return cls("ppo", low=low, high=high, dual=dual)

    @classmethod
    def cispo(cls, high: float = 5.0) -> Clip:
        """-sg(min(r, high)) A logp: a capped ratio, and no token loses its gradient (arXiv 2506.13585)."""
        return cls("cispo", high=high)

    @classmethod
    def sapo(cls, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Clip:
        """-(4/tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a smooth gate (arXiv 2511.20347)."""
        return cls("sapo", tau_pos=tau_pos, tau_neg=tau_neg)

    @classmethod
    def dppo(cls, delta: float = 0.2) -> Clip:
        """-A r, and a token is dropped once p - p_old goes beyond ``delta`` in the direction A pushes it.

        ``logp_old`` is then the sampler's. The usual companion 1e-3 (log r)^2 is
        2e-3 ``kl_estimate(logp, logp_old, "k2")``.
        """
        return cls("dppo", delta=delta)

    @classmethod
    def none(cls) -> Clip:
        """-A r."""
        return cls("none")


@dataclass(frozen=True)
class PolicyLoss:
    """Scalars (float64) that add up over micro-batches.

    ``loss`` carries the gradient. The others are detached sums over tokens of weight times a quantity;
    divided by the sum of ``weight`` over the batch they are means. ``clip_fraction``: tokens the clip acts
    on; ``ratio_mean``: the ratio in use; ``approx_kl``: r - 1 - log r with the token ratio, >= 0, an estimate
    of KL(old || new).
    """

    loss: Tensor
    clip_fraction: Tensor
    ratio_mean: Tensor
    approx_kl: Tensor
    weight: Tensor


def token_weights(
    lengths: Tensor,
    *,
    aggregate: Aggregate = "token_mean",
    constant: int | None = None,
    turn_lengths: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Weights w float64 ``[N]`` of the *global* batch, so that loss = sum(w l) however it is split later.

    ``lengths`` int ``[n]``: sampled tokens of each trajectory, N their sum. ``valid`` bool ``[n]``: tokens of
    the others weigh 0 and count nowhere; nothing valid gives zeros.

    * ``token_mean``: 1 / all valid tokens (DAPO).
    * ``sequence_mean``: 1 / (trajectories l_i) (GRPO), over valid trajectories with tokens.
    * ``turn_mean``: 1 / (trajectories K_i |a_ij|) over the K_i turns with tokens; ``turn_lengths`` int
      ``[K]`` lists the turns of all trajectories one after the other (M-GRPO, arXiv 2505.16421).
    * ``constant``: 1 / (valid trajectories ``constant``), e.g. the longest allowed answer (Dr.GRPO).
    """
    require_option("aggregate", aggregate, get_args(Aggregate))
    if (constant is not None) != (aggregate == "constant"):
        raise ConfigError(f"constant goes with aggregate='constant' only; got {constant} with {aggregate!r}")
    if (turn_lengths is not None) != (aggregate == "turn_mean"):
        raise ConfigError(f"turn_lengths goes with aggregate='turn_mean' only; aggregate is {aggregate!r}")
    _counts("lengths", lengths)
    members = _members(valid, lengths).double()
    sizes = lengths * members
    if aggregate == "token_mean":
        per_trajectory = members / sizes.sum().clamp(min=1)
    elif constant is not None:
        require_positive("constant", constant)
        per_trajectory = members / (members.sum().clamp(min=1) * constant)
    else:
        per_trajectory = members / (sizes > 0).sum().clamp(min=1)
        if turn_lengths is not None:
            return _turn_weights(per_trajectory, lengths, turn_lengths)
        per_trajectory = per_trajectory / sizes.clamp(min=1)
    return per_trajectory.repeat_interleave(lengths.long())


def policy_gradient(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    sequence: Tensor | None = None,
    ratio: Ratio = "token",
    clip: Clip,
    correction: Tensor | None = None,
) -> PolicyLoss:
    """The surrogate loss sum(weights * correction * l(ratio, advantages)), gradient through ``logp`` only.

    ``logp, logp_old, advantages, weights, correction`` float ``[N]``; ``sequence`` int ``[N]``, the
    trajectory of each token, is needed by the last two ratios, and then each must be whole in the call.

    * ``token``: r = exp(logp - logp_old).
    * ``sequence``: log s_t = sg(mean log r) + logp_t - sg(logp_t), the mean over the trajectory (GSPO,
      arXiv 2507.18071, token form).
    * ``geometric``: exp of the trajectory's mean log-ratio, each token's clipped first (GMPO,
      arXiv 2507.20673); with ``Clip.ppo`` without ``dual``, or ``Clip.none``.
    """
    _check_pair(ratio, clip, sequence)
    new = token_tensor("logp", logp)
    old = token_tensor("logp_old", logp_old, like=logp).detach()
    advantage = token_tensor("advantages", advantages, like=logp).detach()
    weight = token_tensor("weights", weights, like=logp).detach()
    difference = new - old
    if ratio == "geometric":
        limited, clipped = _geometric_clip(difference, advantage, clip)
        used = _bounded_exp(_sequence_mean(limited, cast("Tensor", sequence)))
        per_token = -advantage * used
    else:
        if ratio == "sequence":
            difference = _sequence_mean(difference.detach(), cast("Tensor", sequence)) + new - new.detach()
        used = _bounded_exp(difference)
        per_token, clipped = _surrogate(used, new, old, advantage, clip)
    if correction is not None:
        per_token = per_token * token_tensor("correction", correction, like=logp).detach()
    log_ratio = (new.detach() - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return PolicyLoss(
        loss=(weight * per_token).sum(),
        clip_fraction=(weight * clipped).sum(),
        ratio_mean=(weight * used.detach()).sum(),
        approx_kl=(weight * (log_ratio.expm1() - log_ratio)).sum(),
        weight=weight.sum(),
    )


def truncated_importance(
    logp_old: Tensor,
    logp_behaviour: Tensor,
    cap: float = 2.0,
    level: Level = "token",
    sequence: Tensor | None = None,
) -> Tensor:
    """Correction min(w, cap), float64 ``[N]`` without gradient (TIS).

    w = exp(logp_old - logp_behaviour), trainer over sampler, both for the same weights or a known staleness.
    ``level``: per ``token``, or one for a whole ``sequence``: the product or the ``geometric`` mean of its w.
    """
    require_positive("cap", cap)
    return _importance(logp_old, logp_behaviour, level, sequence).clamp(max=cap)


def icepop(
    logp_old: Tensor,
    logp_behaviour: Tensor,
    low: float = 0.5,
    high: float = 2.0,
    level: Level = "token",
    sequence: Tensor | None = None,
) -> Tensor:
    """Correction w where low <= w <= high and 0 elsewhere, float64 ``[N]`` (IcePop).

    w and ``level`` as in ``truncated_importance``: what is too far from the sampler is not trained on.
    """
    if not (math.isfinite(high) and 0 <= low < high):
        raise ConfigError(f"low and high must satisfy 0 <= low < high, got {low} and {high}")
    weight = _importance(logp_old, logp_behaviour, level, sequence)
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


@dataclass(frozen=True)
class WeightSums:
    """Sums over importance weights w, float64 scalars without gradient that add up over micro-batches.

    ``count`` weights, their sum ``total`` and the sum of their ``squares``.
    """

    count: Tensor
    total: Tensor
    squares: Tensor


def weight_sums(
    logp: Tensor, logp_behaviour: Tensor, level: Level = "token", sequence: Tensor | None = None
) -> WeightSums:
    """Sums over w = p / p_behaviour, of each token or once of each sequence; see ``truncated_importance``.

    ``logp, logp_behaviour`` float ``[N]``; ``sequence`` int ``[N]``, whole in the call, for the levels that
    need it. log w is limited to +-20.
    """
    weights = _importance(logp, logp_behaviour, level, sequence, field="logp")
    share = torch.ones_like(weights)
    if sequence is not None:
        index, count = _sequences(weights, sequence)
        share = 1 / count[index]  # a sequence's weight stands on each of its tokens
    return WeightSums(share.sum(), (share * weights).sum(), (share * weights.square()).sum())


def effective_sample_size(count: float, total: float, squares: float) -> float | None:
    """(sum w)^2 / (n sum w^2), in (0, 1]: the share of the samples that the weights leave (Kong 1992).

    1 where all weights are equal, 1 / n where one outweighs all others. The arguments are those of
    ``WeightSums``; ``None`` of no weight.
    """
    return min(total * total / (count * squares), 1.0) if count > 0 and squares > 0 else None


def decoupled(
    logp_proximal: Tensor,
    logp_behaviour: Tensor,
    cap: float = 5.0,
    above: Literal["cap", "drop"] = "cap",
) -> Tensor:
    """Behaviour weight pi_prox / pi_behav of decoupled PPO, float64 ``[N]`` (AReaL, arXiv 2505.24298).

    Pass it as ``correction`` with ``logp_old = logp_proximal``, the trainer's log-probabilities at the start
    of the step. Weights over ``cap`` are capped, or their tokens dropped.
    """
    require_option("above", above, ("cap", "drop"))
    require_positive("cap", cap)
    weight = _importance(logp_proximal, logp_behaviour, "token", None, field="logp_proximal")
    return weight.clamp(max=cap) if above == "cap" else torch.where(weight <= cap, weight, 0.0)


def offpolicy_sequence_mask(
    logp: Tensor, logp_old: Tensor, advantages: Tensor, sequence: Tensor, *, delta: float = 0.5
) -> Tensor:
    """Correction 0 on lost trajectories that the policy has moved away from, else 1, float64 ``[N]``.

    A trajectory is dropped if its mean advantage is below 0 and mean_t(logp_old - logp) > ``delta``
    (DeepSeek-V3.2), with ``logp_old`` the sampler's.
    """
    require_positive("delta", delta)
    new = token_tensor("logp", logp).detach()
    old = token_tensor("logp_old", logp_old, like=logp).detach()
    advantage = token_tensor("advantages", advantages, like=logp).detach()
    lost = _sequence_mean(advantage, sequence) < 0
    far = _sequence_mean(old - new, sequence) > delta
    return (~(lost & far)).double()


def token_tensor(field: str, tensor: Tensor, *, like: Tensor | None = None) -> Tensor:
    """``tensor`` as float64 ``[N]``, after a check of dtype, shape (that of ``like``) and finiteness."""
    if tensor.ndim != 1 or not tensor.is_floating_point():
        raise DataError(f"{field} must be a float tensor of shape [N], got {tensor.dtype} {shape_of(tensor)}")
    if like is not None and tensor.shape != like.shape:
        raise DataError(f"{field} must have shape {shape_of(like)}, got {shape_of(tensor)}")
    bad = torch.nonzero(~torch.isfinite(tensor.detach()))
    if bad.numel():
        at = int(bad[0, 0])
        raise DataError(f"{field}[{at}] is {float(tensor[at])}; every value must be finite")
    return tensor.double()


def _surrogate(r: Tensor, new: Tensor, old: Tensor, a: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Per-token loss and a bool mask of the tokens the clip acts on."""
    plain = -a * r
    if clip.kind == "ppo":
        bounded = -a * r.clamp(1 - clip.low, 1 + clip.high)
        loss, clipped = torch.maximum(plain, bounded), bounded > plain
        if clip.dual is not None:
            ceiling = torch.where(a < 0, -a * clip.dual, math.inf)
            clipped = clipped | (loss > ceiling)
            loss = torch.minimum(loss, ceiling)
        return loss, clipped
    if clip.kind == "cispo":
        return -r.detach().clamp(max=clip.high) * a * new, (r > clip.high) & (a != 0)
    if clip.kind == "sapo":
        tau = torch.full_like(a, clip.tau_neg).masked_fill(a > 0, clip.tau_pos)
        return -(4 / tau) * torch.sigmoid(tau * (r - 1)) * a, torch.zeros_like(a, dtype=torch.bool)
    if clip.kind == "dppo":
        moved = (new.exp() - old.exp()).detach()
        dropped = ((a > 0) & (moved > clip.delta)) | ((a < 0) & (moved < -clip.delta))
        return torch.where(dropped, 0.0, plain), dropped
    return plain, torch.zeros_like(a, dtype=torch.bool)


def _geometric_clip(difference: Tensor, a: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Token log-ratios, limited only on the side where a larger step would raise the objective."""
    if clip.kind == "none":
        return difference, torch.zeros_like(a, dtype=torch.bool)
    clipped = ((a > 0) & (difference > clip.high)) | ((a < 0) & (difference < -clip.low))
    return torch.where(clipped, difference.clamp(-clip.low, clip.high), difference), clipped


def _sequence_mean(x: Tensor, sequence: Tensor) -> Tensor:
    """Mean of ``x`` [N] over each token's sequence, on every token of it, with gradient."""
    index, count = _sequences(x, sequence)
    return (torch.zeros_like(count).index_add(0, index, x) / count)[index]


def _sequences(x: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Dense sequence index int64 [N] and tokens per sequence float64."""
    if sequence.dtype == torch.bool or sequence.is_floating_point() or sequence.shape != x.shape:
        raise DataError(
            f"sequence must hold integers of shape {shape_of(x)}, got {sequence.dtype} {shape_of(sequence)}"
        )
    ids, index = cast("tuple[Tensor, Tensor]", torch.unique(sequence, return_inverse=True))
    count = x.new_zeros(ids.numel()).index_add_(0, index, torch.ones_like(x.detach()))
    return index, count


def _importance(
    logp_old: Tensor, logp_behaviour: Tensor, level: Level, sequence: Tensor | None, field: str = "logp_old"
) -> Tensor:
    require_option("level", level, get_args(Level))
    if (sequence is None) != (level == "token"):
        raise ConfigError(f"sequence is needed by level 'sequence' and 'geometric' only; level is {level!r}")
    old = token_tensor(field, logp_old).detach()
    difference = old - token_tensor("logp_behaviour", logp_behaviour, like=logp_old).detach()
    if sequence is not None:
        index, count = _sequences(difference, sequence)
        total = torch.zeros_like(count).index_add(0, index, difference)
        difference = (total if level == "sequence" else total / count)[index]
    return _bounded_exp(difference)


def _turn_weights(per_trajectory: Tensor, lengths: Tensor, turn_lengths: Tensor) -> Tensor:
    """Each trajectory's weight, shared equally by its non-empty turns and inside a turn by its tokens."""
    _counts("turn_lengths", turn_lengths)
    turns = turn_lengths[turn_lengths > 0]
    ends, turn_ends = lengths.cumsum(0), turns.cumsum(0)
    if not bool(torch.isin(ends[ends > 0], turn_ends).all()) or int(turns.sum()) != int(lengths.sum()):
        raise DataError(
            f"turn_lengths must split each trajectory: sums must match lengths {lengths.tolist()[:8]}, "
            f"got {turn_lengths.tolist()[:8]} (first 8 of each)"
        )
    owner = torch.searchsorted(ends, turn_ends - turns, right=True)
    turn_count = torch.zeros_like(per_trajectory).index_add_(0, owner, torch.ones_like(turns).double())
    weight = per_trajectory[owner] / turn_count[owner] / turns
    return weight.repeat_interleave(turns.long())


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _check_pair(ratio: Ratio, clip: Clip, sequence: Tensor | None) -> None:
    require_option("ratio", ratio, get_args(Ratio))
    if ratio != "token" and sequence is None:
        raise ConfigError(f"ratio={ratio!r} needs sequence, the trajectory of each token")
    if ratio == "geometric" and (clip.kind not in ("ppo", "none") or clip.dual is not None):
        raise ConfigError(f"ratio='geometric' takes Clip.ppo without dual or Clip.none, got {clip}")
    if ratio == "sequence" and clip.kind == "dppo":
        raise ConfigError("Clip.dppo compares token probabilities and needs ratio='token'")


def _counts(field: str, tensor: Tensor) -> None:
    if tensor.ndim != 1 or tensor.dtype == torch.bool or tensor.is_floating_point():
        raise DataError(f"{field} must be an integer tensor [n], got {tensor.dtype} {shape_of(tensor)}")
    if tensor.numel() == 0:
        raise DataError(f"{field} is empty; a batch needs at least one trajectory")
    if bool((tensor < 0).any()):
        raise DataError(f"{field} holds {int(tensor.min())}; a token count cannot be negative")


def _members(valid: Tensor | None, lengths: Tensor) -> Tensor:
    if valid is None:
        return torch.ones_like(lengths, dtype=torch.bool)
    if valid.dtype != torch.bool or valid.shape != lengths.shape:
        raise DataError(
            f"valid must be a bool tensor of shape {shape_of(lengths)}, got {valid.dtype} {shape_of(valid)}"
        )
    return valid

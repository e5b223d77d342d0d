"""Keeping the policy's entropy: which tokens would cost most of it, and how strongly to hold against it.

Pure functions on flat tensors of the ``N`` sampled tokens. Selections rank tokens against each other, so they
are made once over the *global* batch and then split with it; they must not be made per micro-batch. ``valid``
bool ``[N]`` (``None``: all) leaves tokens out of every statistic. Arithmetic is float64; a bad tensor raises
``DataError`` naming the field, an impossible option ``ConfigError``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.core.checks import require_finite
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.seeds import derive
from surefoot.objectives.policy_gradient import token_tensor
from surefoot.objectives.preference import check_flags, check_not_negative


def token_covariance(logp: Tensor, advantages: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """(A - mean A) (logp - mean logp) per token, float64 ``[N]``, detached; 0 where invalid.

    ``logp, advantages`` float ``[N]``. Its mean is what one policy-gradient step takes off the entropy, to
    first order (arXiv 2505.22617).
    """
    policy = token_tensor("logp", logp).detach()
    advantage = token_tensor("advantages", advantages, like=logp).detach()
    members = _members(valid, logp).double()
    count = members.sum().clamp(min=1)
    centred = [x - (members * x).sum() / count for x in (policy, advantage)]
    return members * centred[0] * centred[1]


def clip_cov(
    logp: Tensor,
    advantages: Tensor,
    clipped: Tensor,
    *,
    seed: int,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    valid: Tensor | None = None,
) -> Tensor:
    """Tokens to detach, bool ``[N]``: a random few whose covariance lies in (``low``, ``high``) (Clip-Cov).

    max(1, floor(``fraction`` N)) tokens are drawn by ``seed`` from those in the range that the loss does not
    clip already (``clipped`` bool ``[N]``). Use ``correction = (~mask).double()`` in ``policy_gradient``
    (arXiv 2505.22617).
    """
    _check_share("fraction", fraction)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"low and high must satisfy low < high, got {low} and {high}")
    covariance = token_covariance(logp, advantages, valid=valid)
    check_flags("clipped", clipped, like=logp)
    members = _members(valid, logp)
    candidates = torch.nonzero(members & ~clipped & (covariance > low) & (covariance < high))[:, 0]
    generator = torch.Generator().manual_seed(derive("clip_cov", seed))
    order = torch.randperm(candidates.numel(), generator=generator).to(candidates.device)
    return _mask(members, candidates[order[: _count(fraction, members)]])


def kl_cov(
    logp: Tensor, advantages: Tensor, *, fraction: float = 2e-4, valid: Tensor | None = None
) -> Tensor:
    """Tokens to hold back with ``kl_cov_penalty``, bool ``[N]``: those of the largest covariance (KL-Cov).

    max(1, floor(``fraction`` N)) tokens, of equal ones the earlier; only tokens of positive covariance, so
    that a batch without advantages has none (arXiv 2505.22617).
    """
    _check_share("fraction", fraction)
    covariance = token_covariance(logp, advantages, valid=valid)
    members = _members(valid, logp)
    order = torch.argsort(covariance, descending=True, stable=True)
    top = order[: _count(fraction, members)]
    return _mask(members, top[covariance[top] > 0])


def kl_cov_penalty(
    logp: Tensor, logp_old: Tensor, weights: Tensor, chosen: Tensor, *, coefficient: float = 1.0
) -> Tensor:
    """``coefficient`` sum(weights |logp - logp_old|) over ``chosen`` tokens, a term of the loss.

    A float64 scalar; its gradient goes through ``logp`` only and is 0 where the ratio is still 1.
    """
    check_not_negative("coefficient", coefficient)
    new = token_tensor("logp", logp)
    old = token_tensor("logp_old", logp_old, like=logp).detach()
    weight = token_tensor("weights", weights, like=logp).detach()
    check_flags("chosen", chosen, like=logp)
    return coefficient * (weight * chosen * (new - old).abs()).sum()


def top_entropy(entropy: Tensor, *, share: float = 0.2, valid: Tensor | None = None) -> Tensor:
    """Tokens of the highest entropy, bool ``[N]``: at or above the (1 - ``share``) quantile of the batch.

    Train only on these to leave the certain tokens alone (arXiv 2506.01939, share 0.2). Linear quantile;
    tokens equal to it are all kept.
    """
    _check_share("share", share)
    values = token_tensor("entropy", entropy).detach()
    members = _members(valid, entropy)
    ranked = values[members].sort().values
    if ranked.numel() == 0:
        return members
    # A token is at or above an interpolated quantile exactly if it is so for the next value in rank.
    place = math.ceil((1 - share) * (ranked.numel() - 1) - 1e-9)
    return members & (values >= ranked[place])


def entropy_bonus(entropy: Tensor, weights: Tensor, coefficient: float) -> Tensor:
    """-``coefficient`` sum(weights entropy), a float64 scalar term of the loss, gradient through ``entropy``.

    ``entropy`` float ``[N]`` in nats. A negative coefficient lowers the entropy.
    """
    require_finite("coefficient", coefficient)
    values = token_tensor("entropy", entropy)
    return -coefficient * (token_tensor("weights", weights, like=entropy).detach() * values).sum()


@dataclass(frozen=True, slots=True)
class AdaptiveCoefficient:
    """An entropy coefficient that steps towards a target entropy (Skywork-OR1, arXiv 2505.22312).

    ``target`` entropy in nats per token, ``step`` the change per update, ``low`` and ``high`` its bounds. The
    state is one number, kept by the caller: start with any value inside the bounds, e.g. 0.
    """

    target: float
    step: float = 0.005
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative("target", self.target)
        check_not_negative("step", self.step)
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ConfigError(f"low and high must satisfy low <= high, got {self.low} and {self.high}")

    def active(self, value: float, entropy: float) -> float:
        """The coefficient to use now: ``value`` at or below the target, 0 above it."""
        self._check(value, entropy)
        return value if entropy <= self.target else 0.0

    def next(self, value: float, entropy: float) -> float:
        """The state after a batch of mean ``entropy``: a step up below the target, down above it."""
        self._check(value, entropy)
        if entropy == self.target:
            return value
        moved = value + (self.step if entropy < self.target else -self.step)
        return min(self.high, max(self.low, moved))

    def _check(self, value: float, entropy: float) -> None:
        if not self.low <= value <= self.high:
            raise DataError(f"value is {value}; it must lie in [{self.low}, {self.high}]")
        if not (math.isfinite(entropy) and entropy >= 0):
            raise DataError(f"entropy is {entropy}; it must be a number >= 0")


def _members(valid: Tensor | None, like: Tensor) -> Tensor:
    if valid is None:
        return torch.ones_like(like, dtype=torch.bool)
    check_flags("valid", valid, like=like)
    return valid


def _count(fraction: float, members: Tensor) -> int:
    # The tiny addend keeps products such as 2e-4 * 15000 = 2.999... at the whole number that was meant.
    return max(1, math.floor(fraction * int(members.sum()) + 1e-9))


def _mask(members: Tensor, rows: Tensor) -> Tensor:
    mask = torch.zeros_like(members)
    mask[rows] = True
    return mask


def _check_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"{name} must lie in (0, 1], got {value}")

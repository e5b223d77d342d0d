"""Advantages from one return per trajectory: the critic-free estimators of the policy-gradient family.

Pure functions on flat tensors. They know nothing of rewards, runs, models or algorithm names.

Conventions of every function: ``returns`` is any float dtype of shape ``[n]`` (converted without loss to
float64), ``group`` any integer dtype ``[n]`` (equal ids form a group, in any order), ``valid`` bool ``[n]``
(``None``: all valid). The result is float64 ``[n]`` on the same device, without gradient. Invalid members
get 0 and influence nobody, so they may hold NaN. A bad shape, dtype or non-finite return raises
``DataError``, a bad option ``ConfigError``. On the CPU the result does not depend on the order of the batch,
bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from surefoot.core.checks import require_finite, require_option, require_positive, shape_of
from surefoot.core.errors import DataError

Scale = Literal["std", "none", "batch"]

# Above this a squared deviation could overflow float64.
_LARGEST_RETURN = 1e140


@dataclass(frozen=True)
class GroupStats:
    """What a batch of groups offers as a signal.

    ``groups`` counts all groups; of these ``constant`` have two or more valid members with equal returns,
    ``singletons`` one valid member and ``empty`` none. ``unscored`` counts invalid members.
    """

    groups: int
    constant: int
    singletons: int
    empty: int
    unscored: int

    @property
    def live(self) -> int:
        """Groups whose valid members differ: the only ones with a group-relative signal."""
        return self.groups - self.constant - self.singletons - self.empty


def group_statistics(returns: Tensor, group: Tensor, valid: Tensor | None = None) -> GroupStats:
    """Count the groups that are constant, of one valid member, or empty, and the unscored members."""
    groups = Groups.of(returns, group, valid)
    return GroupStats(
        groups=groups.count.numel(),
        constant=int(((groups.count >= 2) & (groups.low == groups.high)).sum()),
        singletons=int((groups.count == 1).sum()),
        empty=int((groups.count == 0).sum()),
        unscored=int((~groups.valid).sum()),
    )


def group_relative(
    returns: Tensor, group: Tensor, *, valid: Tensor | None = None, scale: Scale = "std", eps: float = 1e-6
) -> Tensor:
    """Return minus the group mean, optionally divided by a standard deviation plus ``eps``.

    ``scale="std"``: (r - mean) / (std + eps), Bessel std of the group (GRPO, arXiv 2402.03300).
    ``scale="none"``: r - mean (Dr.GRPO, arXiv 2503.20783).
    ``scale="batch"``: the Bessel std of all valid returns of the batch in place of the group's.
    Constant groups and groups of one valid member give exactly 0.
    """
    require_option("scale", scale, get_args(Scale))
    require_positive("eps", eps)
    groups = Groups.of(returns, group, valid)
    if scale == "std":
        return groups.standardised(eps)
    if scale == "none":
        return groups.deviation()
    return groups.deviation() / (_weighted_moments(groups.values, groups.valid.double())[1] + eps)


def leave_one_out(
    returns: Tensor,
    group: Tensor,
    *,
    valid: Tensor | None = None,
    normalise: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Return minus the mean return of the *other* valid members: n/(n-1) (r - mean) (RLOO, arXiv 2402.14740).

    ``normalise`` divides by the Bessel std of the other members plus ``eps``, so that scale and baseline are
    both independent of the member itself. Where all the others are equal they have no spread, and the plain
    difference stands; every normalised value is limited to +-sqrt(n), the most that the whole group's std
    could give. Constant groups and groups of one valid member give exactly 0.
    """
    require_positive("eps", eps)
    groups = Groups.of(returns, group, valid)
    deviation = groups.deviation()
    n = groups.count[groups.index]
    difference = deviation * n / (n - 1).clamp(min=1)
    if not normalise:
        return difference
    # Squares around the mean of the others; the cancellation only bites where the limit applies anyway.
    squares = groups.total(deviation.square())[groups.index] - deviation * difference
    spread = (squares.clamp(min=0) / (n - 2).clamp(min=1)).sqrt()
    scaled = torch.where(groups.others_equal(), difference, difference / (spread + eps))
    limit = n.sqrt()
    return torch.minimum(torch.maximum(scaled, -limit), limit)


def reinforce(
    returns: Tensor, group: Tensor, *, baseline: float = 0.0, valid: Tensor | None = None
) -> Tensor:
    """Return minus a baseline given by the caller, such as a running mean (REINFORCE).

    ``group`` is checked and otherwise unused: all estimators of a group share the call. A constant or lone
    group therefore keeps r - baseline.
    """
    require_finite("baseline", baseline)
    groups = Groups.of(returns, group, valid)
    return torch.where(groups.valid, groups.values - baseline, 0.0)


def reinforce_pp(
    returns: Tensor, lengths: Tensor, *, valid: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Whiten the returns over all sampled tokens of the batch (REINFORCE++, arXiv 2501.03262).

    ``lengths`` int ``[n]`` holds sampled tokens per trajectory: each trajectory weighs as many times in the
    mean and the Bessel std as it has tokens. A batch without spread gives exactly 0.
    """
    require_positive("eps", eps)
    values, valid = scored("returns", returns, valid)
    return whiten_counted(values, token_counts(lengths, values), valid, eps)


def reinforce_pp_baseline(
    returns: Tensor, group: Tensor, lengths: Tensor, *, valid: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Return minus the group mean, then whitened over all sampled tokens (REINFORCE++-baseline).

    Whitening would move constant groups and groups of one valid member off 0 by the token mean of the batch;
    they count in its statistics, as published, but keep exactly 0.
    """
    require_positive("eps", eps)
    groups = Groups.of(returns, group, valid)
    tokens = token_counts(lengths, groups.values)
    return whiten_counted(groups.deviation(), tokens, groups.valid, eps) * groups.live


def opo(returns: Tensor, group: Tensor, lengths: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Return minus the length-weighted group mean sum(l r) / sum(l) (OPO, arXiv 2505.23585).

    ``lengths`` int ``[n]``: sampled tokens per trajectory. Constant groups, groups of one valid member and
    groups without a sampled token give exactly 0.
    """
    groups = Groups.of(returns, group, valid)
    tokens = token_counts(lengths, groups.values) * groups.valid
    groups = replace(groups, order=_order(groups.values, tokens))
    total = groups.total(tokens)
    baseline = groups.total(tokens * groups.values) / total.clamp(min=1)
    live = groups.live & (total > 0)[groups.index]
    return torch.where(live, groups.values - baseline[groups.index], 0.0)


def remax(returns: Tensor, greedy_returns: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Return minus the return of the greedy rollout of the same task (ReMax, arXiv 2310.10505).

    ``greedy_returns`` float ``[n]`` is given once per trajectory and must be finite where valid.
    """
    values, members = scored("returns", returns, valid)
    greedy = scored_like("greedy_returns", greedy_returns, values, members)
    return torch.where(members, values - greedy, 0.0)


def pass_at_k(
    returns: Tensor,
    group: Tensor,
    *,
    valid: Tensor | None = None,
    scale: Literal["none", "std"] = "none",
    eps: float = 1e-6,
) -> Tensor:
    """Give the best member of each group its lead over the second best, and the rest 0.

    ``scale="std"`` divides the lead by the Bessel std of the group plus ``eps``. A tie for the best, a
    constant group and a group of one valid member give exactly 0.
    """
    require_option("scale", scale, ("none", "std"))
    require_positive("eps", eps)
    groups = Groups.of(returns, group, valid)
    top = groups.valid & (groups.values == groups.high[groups.index])
    alone = top & (groups.total(top.double()) == 1)[groups.index] & groups.live
    second = _extreme(groups.values, groups.index, groups.valid & ~top, groups.count, "amax")
    lead = torch.where(alone, groups.values - second[groups.index], 0.0)
    if scale == "none":
        return lead
    return lead / (groups.std(groups.deviation())[groups.index] + eps)


def gdpo(
    components: Tensor,
    group: Tensor,
    weights: Tensor | Sequence[float],
    *,
    valid: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Normalise each reward component inside its group, add them up, normalise over the batch (GDPO).

    ``components`` float ``[n, c]``, ``weights`` ``[c]``. A component that is constant in a group adds exactly
    0 there, so that a component with a wide range cannot drown another.
    """
    require_positive("eps", eps)
    if components.ndim != 2 or components.shape[1] == 0:
        raise DataError(f"components must have shape [n, c] with c >= 1, got {shape_of(components)}")
    factors = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    if factors.shape != components.shape[1:] or not bool(torch.isfinite(factors).all()):
        raise DataError(f"weights must be {components.shape[1]} finite numbers, got {factors.tolist()}")
    columns = [
        Groups.of(column, group, valid, field=f"components[:, {i}]")
        for i, column in enumerate(components.unbind(1))
    ]
    total = torch.zeros_like(columns[0].values)
    for column, factor in zip(columns, cast("list[float]", factors.tolist()), strict=True):
        total = total + factor * column.standardised(eps)
    # Each group sums to zero, hence the batch too; not taking the mean off keeps dead groups at exactly 0.
    return total / (_weighted_moments(total, columns[0].valid.double())[1] + eps)


def to_tokens(advantages: Tensor, lengths: Tensor, *, field: str = "lengths") -> Tensor:
    """Repeat each trajectory's advantage ``[n]`` on its ``lengths`` int ``[n]`` sampled tokens: ``[N]``."""
    if advantages.ndim != 1:
        raise DataError(f"advantages must have shape [n], got {shape_of(advantages)}")
    token_counts(lengths, advantages, field=field)
    return advantages.repeat_interleave(lengths.long())


@dataclass(frozen=True)
class Groups:
    """Members with a dense group index; ``count``, ``low`` and ``high`` are per group, over valid members."""

    values: Tensor  # float64[n], 0 where invalid
    valid: Tensor  # bool[n]
    index: Tensor  # int64[n]
    order: Tensor  # int64[n], a permutation set by the values alone
    count: Tensor  # float64[g]
    low: Tensor  # float64[g]
    high: Tensor  # float64[g]

    @classmethod
    def of(cls, returns: Tensor, group: Tensor, valid: Tensor | None, *, field: str = "returns") -> Groups:
        values, members = scored(field, returns, valid)
        integers("group", group, values)
        ids, index = cast("tuple[Tensor, Tensor]", torch.unique(group, return_inverse=True))
        count = values.new_zeros(ids.numel()).index_add_(0, index, members.double())
        low = _extreme(values, index, members, count, "amin")
        high = _extreme(values, index, members, count, "amax")
        return cls(values, members, index, _order(values), count, low, high)

    @property
    def live(self) -> Tensor:
        """bool[n]: valid members of groups with two different valid returns.

        Equality is exact and comes before any division: a rounding residue must not become an advantage.
        """
        return self.valid & ((self.count >= 2) & (self.low < self.high))[self.index]

    def total(self, x: Tensor) -> Tensor:
        """Sum of ``x`` float64[n] over each group, in an order that the batch order does not change."""
        return torch.zeros_like(self.count).index_add_(0, self.index[self.order], x[self.order])

    def mean(self) -> Tensor:
        """Mean of each group, float64[g]."""
        return self.total(self.values) / self.count.clamp(min=1)

    def deviation(self) -> Tensor:
        """Value minus group mean; exactly 0 unless live."""
        return torch.where(self.live, self.values - self.mean()[self.index], 0.0)

    def std(self, deviation: Tensor) -> Tensor:
        """Bessel-corrected standard deviation of each group, from its deviations."""
        return (self.total(deviation.square()) / (self.count - 1).clamp(min=1)).sqrt()

    def standardised(self, eps: float) -> Tensor:
        """Deviation over (std + eps) of the group; exactly 0 unless live."""
        deviation = self.deviation()
        return deviation / (self.std(deviation)[self.index] + eps)

    def others_equal(self) -> Tensor:
        """bool[n]: all other valid members of the group hold one and the same value."""
        at_low = self.valid & (self.values == self.low[self.index])
        at_high = self.valid & (self.values == self.high[self.index])
        rest = self.count - 1
        rest_low = (self.total(at_low.double()) == rest)[self.index]
        rest_high = (self.total(at_high.double()) == rest)[self.index]
        return (at_low & rest_high) | (at_high & rest_low)


def _extreme(
    values: Tensor, index: Tensor, members: Tensor, like: Tensor, kind: Literal["amin", "amax"]
) -> Tensor:
    """Smallest or largest value of ``members`` bool[n] in each group, shaped as ``like``; +-inf for none."""
    start = torch.full_like(like, math.inf if kind == "amin" else -math.inf)
    return start.scatter_reduce_(0, index[members], values[members], kind)


def whiten_counted(x: Tensor, tokens: Tensor, valid: Tensor, eps: float) -> Tensor:
    """(x - mean) / (std + eps) with each valid member counted once per token; 0 without spread."""
    weights = tokens * valid
    seen = x[weights > 0]
    if seen.numel() == 0 or bool(seen.min() == seen.max()):
        return torch.zeros_like(x)
    mean, std = _weighted_moments(x, weights)
    return torch.where(valid, (x - mean) / (std + eps), 0.0)


def _weighted_moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and Bessel std of ``x`` with each member counted ``weights`` (whole numbers) times."""
    order = _order(x, weights)
    x, weights = x[order], weights[order]
    total = weights.sum()
    mean = (weights * x).sum() / total.clamp(min=1)
    variance = (weights * (x - mean).square()).sum() / (total - 1).clamp(min=1)
    return mean, variance.sqrt()


def _order(*keys: Tensor) -> Tensor:
    """The permutation that sorts by the first key, then by the next ones."""
    order = torch.argsort(keys[-1], stable=True)
    for key in reversed(keys[:-1]):
        order = order[torch.argsort(key[order], stable=True)]
    return order


def scored(
    field: str, returns: Tensor, valid: Tensor | None, *, gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """``returns`` as float64 with 0 at invalid members, detached unless ``gradient``; ``valid`` as a mask."""
    if returns.ndim != 1 or not returns.is_floating_point():
        got = f"{returns.dtype} {shape_of(returns)}"
        raise DataError(f"{field} must be a float tensor of shape [n], got {got}")
    if returns.numel() == 0:
        raise DataError(f"{field} is empty; a batch needs at least one entry")
    members = membership(valid, returns)
    values = torch.where(members, (returns if gradient else returns.detach()).double(), 0.0)
    bad = torch.nonzero(~(values.detach().abs() <= _LARGEST_RETURN))
    if bad.numel():
        at = int(bad[0, 0])
        raise DataError(
            f"{field}[{at}] is {float(values[at])}; a valid entry must be finite and at most "
            f"{_LARGEST_RETURN:g} in size (mark unscored trajectories in `valid`)"
        )
    return values, members


def scored_like(
    field: str, x: Tensor, like: Tensor, valid: Tensor | None = None, *, gradient: bool = False
) -> Tensor:
    """``x``, which must have the shape of ``like``, as float64 with 0 at invalid entries; see ``scored``."""
    if x.shape != like.shape:
        raise DataError(f"{field} must have shape {shape_of(like)}, got {shape_of(x)}")
    return scored(field, x, valid, gradient=gradient)[0]


def membership(valid: Tensor | None, like: Tensor) -> Tensor:
    """``valid`` checked to be bool with the shape of ``like``; ``None`` means that all are valid."""
    if valid is None:
        return torch.ones_like(like, dtype=torch.bool)
    if valid.dtype != torch.bool or valid.shape != like.shape:
        got = f"{valid.dtype} {shape_of(valid)}"
        raise DataError(f"valid must be a bool tensor of shape {shape_of(like)}, got {got}")
    return valid


def integers(field: str, tensor: Tensor, like: Tensor) -> None:
    """Check that ``tensor`` holds integers and has the shape of ``like``."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise DataError(f"{field} must hold integers, got {tensor.dtype}")
    if tensor.shape != like.shape:
        raise DataError(f"{field} must have shape {shape_of(like)}, got {shape_of(tensor)}")


def token_counts(lengths: Tensor, like: Tensor, *, field: str = "lengths") -> Tensor:
    """``lengths`` checked, as float64."""
    integers(field, lengths, like)
    bad = torch.nonzero(lengths < 0)
    if bad.numel():
        at = int(bad[0, 0])
        raise DataError(f"{field}[{at}] is {int(lengths[at])}; a token count cannot be negative")
    return lengths.double()

"""Advantages from a learned value: GAE over tokens, over turns and over both, and the loss of the value head.

Pure functions on flat tensors. They know nothing of models, masks, runs or algorithm names.

Conventions, shared with ``steps``. Only sampled tokens have a place in a tensor, so that what the environment
says is transparent: the token after an observation follows directly on the one before it. Of ``n``
trajectories, ``lengths`` int ``[n]`` counts sampled tokens; tensors ``[M]``, M = sum(lengths), hold them one
trajectory after the other. Steps (turns) are rows ``[K]`` with ``trajectory`` int ``[K]``, the owner 0..n-1
of each, in time order inside a trajectory; ``step_lengths`` int ``[K]`` counts the tokens of each row, and
token tensors of such a call hold them row after row. ``valid`` bool ``[n]`` (``None``: all): invalid
trajectories get 0 and influence nobody, so they may hold NaN. Results are float64 without gradient; on the
CPU they do not depend on the order of trajectories, bit for bit. Bad data raises ``DataError``, a bad option
``ConfigError``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.core.checks import require_fraction, require_positive, shape_of
from surefoot.core.errors import DataError
from surefoot.credit.trajectory import integers, membership, scored, scored_like, token_counts, whiten_counted


def gae(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    valid: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns of every sampled token, both float64 ``[M]``.

    d_t = r_t + gamma V_{t+1} - V_t, A_t = d_t + gamma lam A_{t+1}, R_t = A_t + V_t (arXiv 1506.02438).
    ``rewards, values`` float ``[M]``. Beyond the last token V is ``bootstrap`` float ``[n]``: 0 where the
    episode ended, the value of the last state where it was cut off. ``lam`` is one number or float ``[n]``,
    one per trajectory (see ``length_adaptive_lambda``).
    """
    rows = Rows.of_tokens(lengths, valid)
    return _gae(rows, rows.read("rewards", rewards), rows.read("values", values), bootstrap, gamma, lam)


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    trajectory: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    valid: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE with one reward and one value per turn (turn-level PPO): advantages and returns, float64 ``[K]``.

    ``rewards, values`` float ``[K]``; the rest as in ``gae``. ``steps_to_tokens`` spreads the result.
    """
    rows = Rows.of_steps(trajectory, valid, bootstrap)
    return _gae(rows, rows.read("rewards", rewards), rows.read("values", values), bootstrap, gamma, lam)


def bilevel_gae(
    rewards: Tensor,
    values: Tensor,
    trajectory: Tensor,
    step_lengths: Tensor,
    *,
    turn_gamma: float,
    turn_lam: float,
    token_gamma: float,
    token_lam: float,
    valid: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE across turns, then across the tokens inside each turn: float64 ``[M]`` advantages and returns.

    ``rewards`` float ``[K]`` per turn, ``values`` float ``[M]`` per token. The value of a turn is that of its
    last token; GAE over turns with ``turn_gamma, turn_lam`` gives the return of each turn, which its last
    token receives as reward; inside the turn ``token_gamma, token_lam`` carry it back, and nothing crosses
    into the next turn (bi-level GAE of RAGEN, arXiv 2504.20073, and VAGEN, arXiv 2510.16907). Every row is
    a turn, whether or not its reward is 0. A valid turn without a token raises ``DataError``.
    """
    turns = Rows.of_steps(trajectory, valid, bootstrap)
    tokens = Rows.of_tokens(step_lengths, turns.valid, field="step_lengths", like=trajectory)
    empty = torch.nonzero(turns.valid & (step_lengths < 1))
    if empty.numel():
        at = int(empty[0, 0])
        raise DataError(f"step_lengths[{at}] is 0; a turn takes its value from its last sampled token")
    value = tokens.read("values", values)
    last = (step_lengths.long().cumsum(0) - 1).clamp(min=0)
    turn_reward = turns.read("rewards", rewards)
    _, turn_returns = _gae(turns, turn_reward, value[last] * turns.valid, bootstrap, turn_gamma, turn_lam)
    at_end = last[turns.valid]
    reward = torch.zeros_like(value).index_copy_(0, at_end, turn_returns[turns.valid])
    return _gae(tokens, reward, value, None, token_gamma, token_lam)


def length_adaptive_lambda(lengths: Tensor, *, alpha: float = 0.05) -> Tensor:
    """lam = 1 - 1 / (alpha l), at least 0, per trajectory: float64 ``[n]`` (VAPO, arXiv 2504.05118).

    The weights of all TD errors then add up to about ``alpha`` times the length l, so that a long answer
    still feels its end. Trajectories of up to 1 / ``alpha`` tokens get 0.
    """
    require_positive("alpha", alpha)
    tokens = token_counts(_vector("lengths", lengths), lengths)
    return (1 - 1 / (alpha * tokens.clamp(min=1))).clamp(min=0)


def whiten(advantages: Tensor, lengths: Tensor, *, valid: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """(A - mean) / (std + eps) over all valid tokens, Bessel std: float64 ``[M]``; 0 without spread.

    Call it after the returns are computed: they must keep the scale of the rewards.
    """
    require_positive("eps", eps)
    rows = Rows.of_tokens(lengths, valid)
    x = rows.read("advantages", advantages)
    return whiten_counted(x, torch.ones_like(x), rows.valid, eps)


@dataclass(frozen=True)
class ValueLoss:
    """Scalars (float64) that add up over micro-batches.

    ``loss`` carries the gradient; ``clip_fraction`` is the detached weight of the tokens whose clipped error
    is the larger one, ``weight`` that of all tokens.
    """

    loss: Tensor
    clip_fraction: Tensor
    weight: Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float | None = 0.5
) -> ValueLoss:
    """sum w 1/2 max((V - R)^2, (clip(V, V_old +- clip) - R)^2), gradient through ``values`` only.

    All float ``[M]`` and finite. ``weights`` are those of the global batch (``objectives.token_weights``), so
    that the sum does not depend on how the batch is split. ``old_values`` are those the returns were computed
    with; ``clip=None`` gives the plain squared error.
    """
    value, _ = scored("values", values, None, gradient=True)
    old, target, weight = (
        scored_like(field, tensor, values)
        for field, tensor in (("old_values", old_values), ("returns", returns), ("weights", weights))
    )
    error = (value - target).square()
    worst = error
    if clip is not None:
        require_positive("clip", clip)
        bounded = torch.minimum(torch.maximum(value, old - clip), old + clip)
        worst = torch.maximum(error, (bounded - target).square())
    return ValueLoss(
        loss=0.5 * (weight * worst).sum(),
        clip_fraction=(weight * (worst > error)).sum().detach(),
        weight=weight.sum(),
    )


@dataclass(frozen=True)
class Rows:
    """Tokens or steps as rows; time runs down the rows of each owner, of which there are ``n``."""

    n: int
    owner: Tensor  # int64[R], 0..n-1
    valid: Tensor  # bool[R]
    order: Tensor  # int64[R], a permutation that brings the rows of an owner together
    start: Tensor  # int64[R], in that order: where the owner of the row begins
    end: Tensor  # int64[R], in that order: one past its last row

    @classmethod
    def of_tokens(
        cls, lengths: Tensor, valid: Tensor | None, *, field: str = "lengths", like: Tensor | None = None
    ) -> Rows:
        """Rows for ``lengths`` int[n] tokens of each owner, one owner after the other."""
        token_counts(_vector(field, lengths), lengths if like is None else like, field=field)
        owner = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths.long())
        return cls._of(owner, membership(valid, lengths))

    @classmethod
    def of_steps(cls, trajectory: Tensor, valid: Tensor | None, per_trajectory: Tensor | None = None) -> Rows:
        """Rows owned by ``trajectory`` int[K]; n is the size of ``valid`` or ``per_trajectory``, if given."""
        integers("trajectory", _vector("trajectory", trajectory), trajectory)
        sized = valid if per_trajectory is None else per_trajectory
        n = int(trajectory.max()) + 1 if sized is None else sized.numel()
        bad = torch.nonzero((trajectory < 0) | (trajectory >= n))
        if bad.numel():
            at = int(bad[0, 0])
            raise DataError(
                f"trajectory[{at}] is {int(trajectory[at])}; with {n} trajectories it is 0..{n - 1}"
            )
        return cls._of(trajectory.long(), membership(valid, trajectory.new_empty(n)))

    @classmethod
    def _of(cls, owner: Tensor, valid: Tensor) -> Rows:
        n = valid.numel()
        sizes = torch.bincount(owner, minlength=n)
        ends = sizes.cumsum(0)
        order = torch.argsort(owner, stable=True)
        owned = owner[order]
        return cls(n, owner, valid[owner], order, (ends - sizes)[owned], ends[owned])

    @property
    def position(self) -> Tensor:
        """int64[R]: how many rows of the same owner come before."""
        return self._back(torch.arange(self.owner.numel(), device=self.owner.device) - self.start)

    def read(self, field: str, tensor: Tensor, *, gradient: bool = False) -> Tensor:
        """``tensor`` float[R] checked, as float64 with 0 at invalid rows; detached unless ``gradient``."""
        return scored_like(field, tensor, self.owner, self.valid, gradient=gradient)

    def total(self, x: Tensor) -> Tensor:
        """Sum of ``x`` float64[R] over the rows of each owner, float64[n], with gradient."""
        return x.new_zeros(self.n).index_add(0, self.owner, x)

    def following(self, x: Tensor, last: Tensor) -> Tensor:
        """``x`` of the owner's next row, and ``last`` float64[n] after its final row."""
        after = torch.arange(1, x.numel() + 1, device=x.device)
        ahead = x[self.order][after.clamp(max=x.numel() - 1)]
        return self._back(torch.where(after == self.end, last[self.owner[self.order]], ahead))

    def discounted(self, x: Tensor, decay: Tensor) -> Tensor:
        """y_t = x_t + decay y_{t+1} down the rows of each owner; ``decay`` float64[n].

        Sums over spans that double in length: log2(longest) passes over all rows instead of a loop over them.
        """
        y, rate = x[self.order], decay[self.owner[self.order]]
        here, last = torch.arange(y.numel(), device=y.device), y.numel() - 1
        span, longest = 1, int((self.end - self.start).max())
        while span < longest:
            ahead = here + span
            y = y + torch.where(ahead < self.end, rate * y[ahead.clamp(max=last)], 0.0)
            # Squaring rounds the same wherever a row lies; a vectorised power does not.
            span, rate = 2 * span, rate * rate
        return self._back(y)

    def _back(self, x: Tensor) -> Tensor:
        """From the grouped order to that of the rows."""
        return torch.empty_like(x).index_copy_(0, self.order, x)


def _gae(
    rows: Rows, rewards: Tensor, values: Tensor, bootstrap: Tensor | None, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    require_fraction("gamma", gamma)
    owners = torch.zeros(rows.n, dtype=torch.bool, device=values.device)
    owners[rows.owner] = rows.valid
    last = torch.zeros(rows.n, dtype=torch.float64, device=values.device)
    if bootstrap is not None:
        last = scored_like("bootstrap", bootstrap, owners, owners)
    delta = rewards + gamma * rows.following(values, last) - values
    advantages = rows.discounted(delta, gamma * _lambdas(lam, owners))
    return torch.where(rows.valid, advantages, 0.0), torch.where(rows.valid, advantages + values, 0.0)


def _lambdas(lam: float | Tensor, owners: Tensor) -> Tensor:
    """``lam`` as float64[n]."""
    if not isinstance(lam, Tensor):
        require_fraction("lam", lam)
        return torch.full(owners.shape, lam, dtype=torch.float64, device=owners.device)
    rates = scored_like("lam", lam, owners, owners)
    bad = torch.nonzero((rates < 0) | (rates > 1))
    if bad.numel():
        at = int(bad[0, 0])
        raise DataError(f"lam[{at}] is {float(rates[at])}; it must be a number from 0 to 1")
    return rates


def _vector(field: str, tensor: Tensor) -> Tensor:
    if tensor.ndim != 1:
        raise DataError(f"{field} must have one dimension, got shape {shape_of(tensor)}")
    if tensor.numel() == 0:
        raise DataError(f"{field} is empty; a batch needs at least one trajectory")
    return tensor

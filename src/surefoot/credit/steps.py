"""Step-level credit: advantages per turn from rewards, revisited states and implicit step rewards.

Pure functions on flat tensors, with the conventions of ``surefoot.credit.values``. They know nothing of
models, environments, runs or algorithm names. Functions that return a ``ScoreLoss`` train a reward model and
carry a gradient; all others return float64 without gradient unless they say so. ``outcome`` float ``[n]`` and
``group`` int ``[n]`` are per trajectory: its return and its task. Pools of one and constant pools give
exactly 0.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from surefoot.core.checks import (
    require_finite,
    require_fraction,
    require_option,
    require_positive,
    shape_of,
)
from surefoot.core.errors import ConfigError, DataError
from surefoot.credit.trajectory import (
    Groups,
    group_relative,
    integers,
    leave_one_out,
    membership,
    scored,
    scored_like,
    to_tokens,
)
from surefoot.credit.values import Rows

StepScale = Literal["none", "std"]
StepEstimator = Literal["std", "none", "leave_one_out"]
AnchorMode = Literal["hash", "similarity"]
StepReduce = Literal["sum", "step_mean"]

_Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def returns_to_go(
    rewards: Tensor, trajectory: Tensor, *, gamma: float = 1.0, valid: Tensor | None = None
) -> Tensor:
    """R_t = r_t + gamma R_{t+1} along each trajectory, float64 ``[K]``; ``rewards`` float ``[K]``."""
    rows = Rows.of_steps(trajectory, valid)
    return _returns_to_go(rows, rows.read("rewards", rewards), gamma)


def step_relative(
    rewards: Tensor,
    trajectory: Tensor,
    group: Tensor,
    *,
    gamma: float = 1.0,
    scale: StepScale = "none",
    eps: float = 1e-6,
    valid: Tensor | None = None,
) -> Tensor:
    """Return-to-go of each step against the steps of the same number in its group, float64 ``[K]``.

    ``rewards`` float ``[K]``. ``scale="std"`` divides by the Bessel std of the pool plus ``eps``. A step that
    no other trajectory of the group reached has nothing to be compared with and gets 0.
    """
    rows = Rows.of_steps(trajectory, valid, group)
    to_go = _returns_to_go(rows, rows.read("rewards", rewards), gamma)
    pool = _pairs(_step_groups(rows, group), rows.position)
    return _relative(Groups.of(to_go, pool, rows.valid), scale, eps)


def anchor_groups(
    observations: Sequence[object],
    group_of_step: Tensor,
    *,
    mode: AnchorMode = "hash",
    threshold: float = 0.95,
) -> Tensor:
    """Number the states that steps of one group share: int64 ``[K]``, equal where the state is the same.

    ``observations`` holds what the environment showed before each step, without the history;
    ``group_of_step`` int ``[K]`` its group. ``hash`` compares exactly: arrays by shape, dtype and content,
    mappings and sets whatever their order, NaN equal to NaN; texts, bytes, numbers, ``None`` and sequences
    may nest, anything else raises ``DataError``. ``similarity`` compares texts: of the distinct texts of a
    group, in sorted order, each joins the first leader with a difflib ratio of at least ``threshold``, or
    leads itself; so the partition does not depend on the order of steps.
    """
    require_option("mode", mode, get_args(AnchorMode))
    integers("group_of_step", group_of_step, group_of_step)
    if len(observations) == 0 or shape_of(group_of_step) != [len(observations)]:
        got = f"{len(observations)} observations with group_of_step {shape_of(group_of_step)}"
        raise DataError(f"observations needs at least one entry and a group for each step, got {got}")
    owners = cast("list[int]", group_of_step.tolist())
    if mode == "hash":
        states = [_canonical(o, f"observations[{i}]") for i, o in enumerate(observations)]
    else:
        states = _leaders(observations, owners, threshold)
    numbers: dict[tuple[int, Hashable], int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in zip(owners, states, strict=True)]
    return torch.tensor(ids, device=group_of_step.device)


def gigpo(
    outcome: Tensor,
    step_rewards: Tensor,
    trajectory: Tensor,
    anchor: Tensor,
    group: Tensor,
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    scale: StepScale = "none",
    eps: float = 1e-6,
    valid: Tensor | None = None,
) -> Tensor:
    """A = A_episode + omega A_step per step, float64 ``[K]`` (GiGPO, arXiv 2505.10978).

    A_episode is the outcome against the group, each trajectory counted once. A_step is the return-to-go of
    ``step_rewards`` float ``[K]`` against the steps of the group that start from the same state, ``anchor``
    int ``[K]`` (see ``anchor_groups``); equal anchors of different groups stay apart. ``gamma`` below 1 is
    what tells an early visit of a state from a late one. ``scale="std"`` divides both parts by the Bessel std
    of their pool plus ``eps``.
    """
    require_finite("omega", omega)
    rows = Rows.of_steps(trajectory, valid, outcome)
    scored("outcome", outcome, valid)
    episode = group_relative(outcome, group, valid=valid, scale=scale, eps=eps)
    integers("anchor", anchor, trajectory)
    to_go = _returns_to_go(rows, rows.read("step_rewards", step_rewards), gamma)
    pool = _pairs(_step_groups(rows, group), anchor)
    return episode[rows.owner] + omega * _relative(Groups.of(to_go, pool, rows.valid), scale, eps)


def mt_grpo(
    outcome: Tensor,
    turn_reward: Tensor,
    group: Tensor,
    trajectory: Tensor,
    tool_step: Tensor,
    *,
    coefficient: float = 1.0,
    eps: float = 1e-4,
    valid: Tensor | None = None,
) -> Tensor:
    """A_outcome + coefficient A_turn up to the first tool step, then A_outcome: ``[K]`` (arXiv 2505.11821).

    ``turn_reward`` float ``[n]`` rates the use of the tool; it and the outcome are standardised in the group.
    ``tool_step`` bool ``[K]`` marks the steps that got a tool result. A trajectory without one has not come
    past its tool use and takes the combined advantage on all steps.
    """
    require_finite("coefficient", coefficient)
    rows = Rows.of_steps(trajectory, valid, outcome)
    if tool_step.dtype != torch.bool or tool_step.shape != trajectory.shape:
        got = f"{tool_step.dtype} {shape_of(tool_step)}"
        raise DataError(f"tool_step must be a bool tensor of shape {shape_of(trajectory)}, got {got}")
    scored("outcome", outcome, valid)
    scored_like("turn_reward", turn_reward, outcome, valid)
    final = group_relative(outcome, group, valid=valid, eps=eps)
    turn = group_relative(turn_reward, group, valid=valid, eps=eps)
    never = rows.owner.numel()
    first = torch.full((rows.n,), never, device=trajectory.device)
    first.scatter_reduce_(0, rows.owner, torch.where(tool_step, rows.position, never), "amin")
    return final[rows.owner] + coefficient * turn[rows.owner] * (rows.position <= first[rows.owner])


def istar_step_rewards(
    log_ratio: Tensor, step_lengths: Tensor, *, beta: float = 0.05, valid: Tensor | None = None
) -> Tensor:
    """beta times the sum over the step's tokens of log pi_phi / pi_old: float64 ``[K]`` (arXiv 2509.19199).

    ``log_ratio`` float ``[M]``: the implicit reward model against the policy that sampled, taken *before*
    the reward model learns from the same batch. ``valid`` bool ``[K]`` is per step here.
    """
    require_positive("beta", beta)
    tokens = Rows.of_tokens(step_lengths, valid, field="step_lengths")
    return beta * tokens.total(tokens.read("log_ratio", log_ratio))


def istar(
    outcome: Tensor,
    step_rewards: Tensor,
    trajectory: Tensor,
    group: Tensor,
    *,
    alpha: float = 1.0,
    estimator: StepEstimator = "std",
    floor: float = 0.0,
    eps: float = 1e-6,
    first_step_quirk: bool = False,
    valid: Tensor | None = None,
) -> Tensor:
    """A = A_outcome + alpha A_step per step, float64 ``[K]`` (iStar, arXiv 2509.19199).

    A_outcome compares the outcomes of the group, A_step the ``step_rewards`` float ``[K]`` of *all steps of
    all trajectories* of the group: minus the mean; with ``estimator="std"`` over (Bessel std + ``eps``);
    with ``leave_one_out`` times n / (n - 1). The std keeps A_step at unit size even when the reward model has
    nothing to say; ``floor`` is the smallest std to divide A_step by. ``first_step_quirk`` reproduces the
    released code, whose pool for A_step holds the first step of each trajectory only.
    """
    require_option("estimator", estimator, get_args(StepEstimator))
    require_finite("alpha", alpha)
    require_positive("eps", eps)
    if not (math.isfinite(floor) and floor >= 0):
        raise ConfigError(f"floor must be a number of at least 0, got {floor}")
    rows = Rows.of_steps(trajectory, valid, outcome)
    scored("outcome", outcome, valid)
    if estimator == "leave_one_out":
        final = leave_one_out(outcome, group, valid=valid)
    else:
        final = group_relative(outcome, group, valid=valid, scale=estimator, eps=eps)
    x = rows.read("step_rewards", step_rewards)
    pooled = rows.valid & (rows.position == 0) if first_step_quirk else rows.valid
    pool = Groups.of(x, _step_groups(rows, group), pooled)
    return final[rows.owner] + alpha * _against_pool(x, rows.valid, pool, estimator, floor, eps)


def alpha_schedule(
    step: int, *, initial: float = 1.0, final: float = 0.0, hold: int = 0, decay: int
) -> float:
    """Weight of the step advantages at a training step: ``initial`` for ``hold`` steps, then linear decay.

    ``final`` is reached ``decay`` steps later and stays.
    """
    require_positive("decay", decay)
    require_finite("initial", initial)
    require_finite("final", final)
    if hold < 0 or step < 0:
        raise ConfigError(f"hold and step must be at least 0, got {hold} and {step}")
    done = min(max(step - hold, 0) / decay, 1.0)
    return initial + (final - initial) * done


@dataclass(frozen=True)
class ScoreLoss:
    """A loss summed over pairs or trajectories; sums and counts add up over micro-batches of whole groups.

    ``loss`` (float64 scalar) carries the gradient, ``count`` says how many terms it holds, and ``correct``
    how many of them the model already orders (or classifies) rightly.
    """

    loss: Tensor
    count: int
    correct: int

    @property
    def mean(self) -> Tensor | None:
        """The loss per term, or ``None`` if there is none: then there is no step to take."""
        return self.loss / self.count if self.count else None


def bradley_terry_trajectories(
    log_ratio: Tensor,
    step_lengths: Tensor,
    trajectory: Tensor,
    success: Tensor,
    group: Tensor,
    *,
    beta: float = 0.05,
    reduce: StepReduce = "sum",
    valid: Tensor | None = None,
) -> ScoreLoss:
    """Bradley-Terry loss of the implicit reward model on whole trajectories (iStar, arXiv 2509.19199).

    -log sigmoid(s_success - s_failure), summed over all success x failure pairs of each group; groups that
    lack a side add nothing. s is the ``sum`` of the trajectory's step rewards (the paper) or their mean,
    ``step_mean`` (the released code). ``log_ratio`` float ``[M]`` with gradient, see ``istar_step_rewards``;
    ``success`` bool ``[n]``.
    """
    require_positive("beta", beta)
    require_option("reduce", reduce, get_args(StepReduce))
    steps = Rows.of_steps(trajectory, valid, success)
    tokens = Rows.of_tokens(step_lengths, steps.valid, field="step_lengths", like=trajectory)
    rewards = beta * tokens.total(tokens.read("log_ratio", log_ratio, gradient=True))
    return _pair_loss(_reduce(steps, rewards, reduce), success, group, valid)


def prime_loss(
    log_ratio: Tensor,
    outcome: Tensor,
    lengths: Tensor,
    *,
    beta: float = 0.05,
    valid: Tensor | None = None,
) -> ScoreLoss:
    """Cross-entropy of sigmoid(beta sum q) against the outcome, summed over valid trajectories (PRIME).

    arXiv 2502.01456. ``log_ratio`` q float ``[M]`` with gradient: log pi_phi / pi_ref of each sampled token;
    ``outcome`` float ``[n]`` from 0 to 1.
    """
    require_positive("beta", beta)
    tokens = Rows.of_tokens(lengths, valid)
    target, members = scored_like("outcome", outcome, lengths, valid), membership(valid, lengths)
    bad = torch.nonzero((target < 0) | (target > 1))
    if bad.numel():
        at = int(bad[0, 0])
        raise DataError(f"outcome[{at}] is {float(target[at])}; a probability of success is from 0 to 1")
    score = beta * tokens.total(tokens.read("log_ratio", log_ratio, gradient=True))
    terms = functional.binary_cross_entropy_with_logits(score, target, reduction="none")
    right = members & ((score.detach() > 0) == (target > 0.5))
    return ScoreLoss(torch.where(members, terms, 0.0).sum(), int(members.sum()), int(right.sum()))


def prime(
    log_ratio: Tensor,
    outcome: Tensor,
    lengths: Tensor,
    group: Tensor,
    *,
    beta: float = 0.05,
    weight: float = 1.0,
    gamma: float = 1.0,
    valid: Tensor | None = None,
) -> Tensor:
    """Token advantages from implicit token rewards beta q and the outcome, float64 ``[M]`` (PRIME).

    A_t = weight sum_{s >= t} gamma^(s-t) (beta q_s - b) + outcome - mean outcome of the others, where b is
    the mean over the *other* trajectories of the group of their mean token reward: eq. 5 of arXiv 2502.01456
    as we read it. (The release multiplies each token reward by n/(n-1) and subtracts the sum of all n means
    over n-1, which mixes a little of the own mean into b.) ``whiten`` follows in the release. Groups with
    fewer than two valid trajectories with tokens, and groups of one constant token reward, give no process
    part.
    """
    require_positive("beta", beta)
    require_finite("weight", weight)
    rows = Rows.of_tokens(lengths, valid)
    scored_like("outcome", outcome, lengths, valid)
    final = leave_one_out(outcome, group, valid=valid)
    x = beta * rows.read("log_ratio", log_ratio)
    speaks = (lengths > 0) & membership(valid, lengths)
    own = rows.total(x) / lengths.clamp(min=1)
    peers = Groups.of(own, group, speaks)
    lead = leave_one_out(own, group, valid=speaks)  # the own mean minus b
    live = Groups.of(x, group[rows.owner], rows.valid).live & (peers.count >= 2)[peers.index][rows.owner]
    centred = torch.where(live, x - own[rows.owner] + lead[rows.owner], 0.0)
    return final[rows.owner] + weight * _returns_to_go(rows, centred, gamma)


def archer_targets(
    rewards: Tensor, done: Tensor, next_values: Tensor, policy_q: Tensor, *, gamma: float = 0.9
) -> tuple[Tensor, Tensor]:
    """Regression targets of the utterance-level critics: (Q, V), both float64 ``[H, K]`` (ArCHer).

    arXiv 2402.19446. Q <- r + gamma (1 - done) V(s') and V <- Q(s, a) for a *fresh* action a of the policy.
    ``rewards`` float ``[K]``, ``done`` bool ``[K]``; ``next_values`` and ``policy_q`` float ``[H, K]`` come
    from the target networks (see ``polyak``), one row for each of the H heads; ``next_values`` may hold NaN
    where ``done``.
    """
    require_fraction("gamma", gamma)
    r, _ = scored("rewards", rewards, None)
    if done.dtype != torch.bool or done.shape != rewards.shape:
        got = f"{done.dtype} {shape_of(done)}"
        raise DataError(f"done must be a bool tensor of shape {shape_of(rewards)}, got {got}")
    heads = _heads("policy_q", policy_q, rewards.numel())
    ahead = _heads("next_values", next_values, rewards.numel(), ~done)
    if ahead.shape != heads.shape:
        raise DataError(f"next_values must have shape {shape_of(heads)}, got {shape_of(ahead)}")
    return r + gamma * ahead, heads


def archer_advantages(q: Tensor, v: Tensor) -> Tensor:
    """A = min over heads of Q - min over heads of V, float64 ``[K]`` (ArCHer); ``q, v`` float ``[H, K]``."""
    steps = q.shape[-1] if q.ndim == 2 else 0
    return _heads("q", q, steps).amin(0) - _heads("v", v, steps).amin(0)


def polyak(
    target: Mapping[str, Tensor], online: Mapping[str, Tensor], *, tau: float = 0.1
) -> dict[str, Tensor]:
    """(1 - tau) target + tau online for each named tensor, detached, e.g. of two ``state_dict``s.

    Tensors that are not floating point (counters) are copied from ``online``. Different names or shapes raise
    ``DataError``.
    """
    require_fraction("tau", tau)
    if target.keys() != online.keys():
        names = sorted(target.keys() ^ online.keys())
        raise DataError(f"target and online must hold the same names; only one holds {', '.join(names[:5])}")
    mixed: dict[str, Tensor] = {}
    for name, old in target.items():
        new = online[name].detach()
        if new.shape != old.shape:
            raise DataError(f"online[{name!r}] must have shape {shape_of(old)}, got {shape_of(new)}")
        mixed[name] = torch.lerp(old.detach(), new, tau) if old.is_floating_point() else new.clone()
    return mixed


def sweet_advantage(
    logp: Tensor, logp_reference: Tensor, step_lengths: Tensor, *, valid: Tensor | None = None
) -> Tensor:
    """Mean over the turn's tokens of logp - logp_reference: float64 ``[K]`` with gradient (SWEET-RL).

    arXiv 2503.15478. ``logp`` float ``[M]`` is that of the advantage model, which may see what the policy
    never sees (the reference solution), ``logp_reference`` that of its frozen start. ``valid`` bool ``[K]``
    is per turn here. A turn without tokens gets 0.
    """
    tokens = Rows.of_tokens(step_lengths, valid, field="step_lengths")
    new = tokens.read("logp", logp, gradient=True)
    difference = new - tokens.read("logp_reference", logp_reference)
    return tokens.total(difference) / step_lengths.clamp(min=1)


def sweet_loss(
    logp: Tensor,
    logp_reference: Tensor,
    step_lengths: Tensor,
    trajectory: Tensor,
    success: Tensor,
    group: Tensor,
    *,
    beta: float = 0.1,
    valid: Tensor | None = None,
) -> ScoreLoss:
    """Bradley-Terry loss of the advantage model: -log sigmoid(beta (sum A_chosen - sum A_rejected)).

    Sums run over the turns of a trajectory, terms over all success x failure pairs of each group; see
    ``sweet_advantage`` and ``bradley_terry_trajectories``.
    """
    require_positive("beta", beta)
    steps = Rows.of_steps(trajectory, valid, success)
    integers("step_lengths", step_lengths, trajectory)
    turns = sweet_advantage(logp, logp_reference, step_lengths, valid=steps.valid)
    return _pair_loss(beta * steps.total(turns), success, group, valid)


def steps_to_tokens(advantages: Tensor, step_lengths: Tensor) -> Tensor:
    """Repeat each step's advantage ``[K]`` on its ``step_lengths`` int ``[K]`` sampled tokens: ``[M]``."""
    return to_tokens(advantages, step_lengths, field="step_lengths")


def _returns_to_go(rows: Rows, rewards: Tensor, gamma: float) -> Tensor:
    require_fraction("gamma", gamma)
    return rows.discounted(rewards, torch.full((rows.n,), gamma, dtype=torch.float64, device=rewards.device))


def _relative(pool: Groups, scale: StepScale, eps: float) -> Tensor:
    require_option("scale", scale, get_args(StepScale))
    require_positive("eps", eps)
    return pool.deviation() if scale == "none" else pool.standardised(eps)


def _against_pool(
    x: Tensor, valid: Tensor, pool: Groups, estimator: StepEstimator, floor: float, eps: float
) -> Tensor:
    """Valid ``x`` minus the mean of its pool, scaled; 0 where the pool has no spread.

    Unlike the methods of ``Groups`` it also scores steps that are not in the pool themselves.
    """
    spread = (pool.count >= 2) & (pool.low < pool.high)
    deviation = torch.where(valid & spread[pool.index], x - pool.mean()[pool.index], 0.0)
    if estimator == "none":
        return deviation
    if estimator == "leave_one_out":
        return deviation * (pool.count / (pool.count - 1).clamp(min=1))[pool.index]
    return deviation / (pool.std(pool.deviation()).clamp(min=floor) + eps)[pool.index]


def _step_groups(rows: Rows, group: Tensor) -> Tensor:
    """The group of each step, after a check of ``group`` int[n]."""
    if group.shape != (rows.n,):
        raise DataError(f"group must have shape {[rows.n]}, got {shape_of(group)}")
    integers("group", group, group)
    return group[rows.owner]


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """One number for each distinct pair of integers, int64."""
    both = torch.stack([a.long(), b.long()], 1)
    return cast("tuple[Tensor, Tensor]", torch.unique(both, dim=0, return_inverse=True))[1]


def _reduce(steps: Rows, rewards: Tensor, reduce: StepReduce) -> Tensor:
    total = steps.total(rewards)
    if reduce == "sum":
        return total
    return total / steps.total(torch.ones_like(rewards.detach())).clamp(min=1)


def _pair_loss(score: Tensor, success: Tensor, group: Tensor, valid: Tensor | None) -> ScoreLoss:
    """Sum of softplus(s_failure - s_success) over the pairs of each group; ``score`` float64[n]."""
    if success.dtype != torch.bool or success.shape != score.shape:
        got = f"{success.dtype} {shape_of(success)}"
        raise DataError(f"success must be a bool tensor of shape {shape_of(score)}, got {got}")
    integers("group", group, score)
    won, lost = (success, ~success) if valid is None else (success & valid, ~success & valid)
    better, worse = torch.nonzero(won).flatten(), torch.nonzero(lost).flatten()
    pairs = torch.nonzero(group[better][:, None] == group[worse][None, :])
    margin = score[better[pairs[:, 0]]] - score[worse[pairs[:, 1]]]
    correct = int((margin.detach() > 0).sum())
    return ScoreLoss(functional.softplus(-margin).sum(), margin.numel(), correct)


def _heads(field: str, tensor: Tensor, steps: int, valid: Tensor | None = None) -> Tensor:
    """``tensor`` float[H, K] as float64, with 0 where not ``valid`` bool[K]."""
    if tensor.ndim != 2 or tensor.shape[0] == 0 or tensor.shape[1] != steps:
        raise DataError(f"{field} must have shape [heads, {steps}], got {shape_of(tensor)}")
    return torch.stack([scored(f"{field}[{h}]", row, valid)[0] for h, row in enumerate(tensor.unbind(0))])


def _canonical(value: object, where: str) -> Hashable:
    """A hashable stand-in that is equal exactly for equal observations."""
    if value is None or isinstance(value, str | bytes):
        return "text", value
    if isinstance(value, bool | np.bool_):
        return "bool", bool(value)
    if isinstance(value, int | float):
        return "number", "nan" if value != value else value
    if isinstance(value, Tensor):
        return _canonical(cast("object", value.detach().cpu().numpy()), where)
    if isinstance(value, np.ndarray | np.generic):
        return _canonical_array(
            cast("np.ndarray[tuple[int, ...], np.dtype[np.generic]]", np.asarray(value)), where
        )
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return "mapping", frozenset((_canonical(k, where), _canonical(v, where)) for k, v in items)
    if isinstance(value, list | tuple):
        return "sequence", tuple(_canonical(v, where) for v in cast("Iterable[object]", value))
    if isinstance(value, set | frozenset):
        return "set", frozenset(_canonical(v, where) for v in cast("Iterable[object]", value))
    raise DataError(
        f"{where} holds a {type(value).__name__}; an observation is made of texts, numbers, None, arrays, "
        "mappings, sequences and sets"
    )


def _canonical_array(array: _Array, where: str) -> Hashable:
    if array.ndim == 0 or array.dtype.hasobject:
        return _canonical(cast("object", array.tolist()), where)
    if np.issubdtype(array.dtype, np.inexact):
        array = np.where(np.isnan(array), np.nan, array).astype(array.dtype)  # NaN has many bit patterns
        array[array == 0] = 0  # and zero has two
    return "array", array.dtype.str, array.shape, array.tobytes()


def _leaders(observations: Sequence[object], owners: Sequence[int], threshold: float) -> list[str]:
    """For each step the text that leads its cluster in its group."""
    if not 0 < threshold <= 1:
        raise ConfigError(f"threshold must be above 0 and at most 1, got {threshold}")
    keys: list[tuple[int, str]] = []
    for i, (owner, text) in enumerate(zip(owners, observations, strict=True)):
        if not isinstance(text, str):
            raise DataError(f"observations[{i}] is a {type(text).__name__}; mode='similarity' compares texts")
        keys.append((owner, text))
    leader: dict[tuple[int, str], str] = {}
    leaders: dict[int, list[str]] = {}
    for owner, text in sorted(set(keys)):
        known = leaders.setdefault(owner, [])
        found = next((other for other in known if _alike(other, text, threshold)), None)
        if found is None:
            known.append(text)
        leader[owner, text] = text if found is None else found
    return [leader[key] for key in keys]


def _alike(a: str, b: str, threshold: float) -> bool:
    # autojunk ignores the frequent characters of long texts. The quick ratios are upper bounds of the ratio.
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return (
        matcher.real_quick_ratio() >= threshold
        and matcher.quick_ratio() >= threshold
        and matcher.ratio() >= threshold
    )

"""Learning from given trajectories: likelihood, likelihood weighted by reward, selection, and distillation.

Pure functions on flat tensors. They know nothing of models, files or where a trajectory came from.

Log-probabilities are natural, float ``[N]`` over sampled tokens; arithmetic is float64. ``weights`` are those
of the *global* batch (``token_weights``), so that a loss does not depend on how the batch is split. A bad
tensor raises ``DataError`` naming the field, an impossible option ``ConfigError``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from surefoot.core.checks import require_positive, shape_of
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.seeds import derive
from surefoot.objectives.policy_gradient import token_tensor
from surefoot.objectives.preference import check_flags, check_integers, log_one_minus_exp


@dataclass(frozen=True, slots=True, eq=False)
class SupervisedLoss:
    """Scalars (float64) that add up over micro-batches: ``loss`` with gradient, and the sum of weights."""

    loss: Tensor
    weight: Tensor


def cross_entropy(logp: Tensor, weights: Tensor) -> SupervisedLoss:
    """-sum(weights logp): the negative log-likelihood of the trained tokens, gradient through ``logp``.

    Only tokens the agent itself must produce belong in ``logp``, its end-of-turn tokens included.
    """
    tokens = token_tensor("logp", logp)
    weight = _weights(weights, like=logp)
    return SupervisedLoss(loss=-(weight * tokens).sum(), weight=weight.sum())


def reward_weights(
    advantages: Tensor, *, beta: float = 1.0, cap: float = 20.0, valid: Tensor | None = None
) -> Tensor:
    """Weights of reward-weighted regression, min(exp(A / beta), cap) over their mean, float64 ``[n]``.

    ``advantages`` float ``[n]`` per trajectory; the valid weights have mean 1, invalid members get 0 and may
    hold NaN. Multiply the trajectory's token weights by them. ``beta`` is the temperature and ``cap`` the
    largest factor before normalising (AWR, arXiv 1910.00177).
    """
    require_positive("beta", beta)
    require_positive("cap", cap)
    members = torch.ones_like(advantages, dtype=torch.bool) if valid is None else valid
    check_flags("valid", members, like=advantages)
    values = token_tensor("advantages", torch.where(members, advantages, 0.0)).detach()
    # In logarithms, so that neither all-huge nor all-tiny factors become 0/0.
    logs = (values / beta).clamp(max=math.log(cap)).masked_fill(~members, -math.inf)
    count = int(members.sum())
    return torch.softmax(logs, 0) * count if count else torch.zeros_like(values)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """``rows`` int64 ``[m]``, ascending, of the trajectories to learn from, and what became of the others.

    ``correct`` valid and correct members were found in ``tasks`` tasks; ``duplicates`` of them were copies of
    another of the same task, and ``over_limit`` more than a task may give.
    """

    rows: Tensor
    correct: int
    tasks: int
    duplicates: int
    over_limit: int


def select_correct(
    correct: Tensor,
    task: Tensor,
    content: Sequence[object],
    *,
    limit: int | None = None,
    seed: int = 0,
    valid: Tensor | None = None,
) -> Selection:
    """Correct trajectories without copies, at most ``limit`` a task (RFT, arXiv 2308.01825; STaR).

    ``correct, valid`` bool ``[n]``, ``task`` int ``[n]``; ``content`` holds n hashable values with a stable
    text, such as the sampled text or a digest of the tokens: equal values of a task are copies, of which the
    first row stays. Which stay under ``limit`` (``None``: all) depends on ``seed``, task and content alone,
    not on the order of the rows.
    """
    check_flags("correct", correct, like=correct)
    check_integers("task", task, like=correct, negative=True)
    if len(content) != correct.numel():
        raise DataError(f"content has {len(content)} entries for {correct.numel()} trajectories")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    if valid is not None:
        check_flags("valid", valid, like=correct)
    found = cast("list[int]", torch.nonzero(correct if valid is None else correct & valid)[:, 0].tolist())
    tasks = cast("list[int]", task.tolist())
    unique: dict[int, dict[object, int]] = {}
    for row in found:
        unique.setdefault(tasks[row], {}).setdefault(content[row], row)
    rows: list[int] = []
    for name, members in unique.items():
        ranked = sorted(members, key=lambda value: derive("select_correct", seed, name, value))
        rows += [members[value] for value in ranked[:limit]]
    different = sum(map(len, unique.values()))
    return Selection(
        rows=torch.tensor(sorted(rows), dtype=torch.int64),
        correct=len(found),
        tasks=len(unique),
        duplicates=len(found) - different,
        over_limit=different - len(rows),
    )


def distillation_advantages(
    logp_student: Tensor, logp_teacher: Tensor, *, limit: float | None = None
) -> Tensor:
    """log p_teacher - log p_student per token the student sampled, float64 ``[N]``, detached.

    Used as advantages in ``policy_gradient``, they descend the reverse KL(student || teacher) token by token
    (on-policy distillation, arXiv 2306.13649): each is an unbiased sample of minus that KL. ``limit`` bounds
    their size against single tokens that the teacher all but excludes.
    """
    student = token_tensor("logp_student", logp_student).detach()
    teacher = token_tensor("logp_teacher", logp_teacher, like=logp_student).detach()
    if limit is None:
        return teacher - student
    require_positive("limit", limit)
    return (teacher - student).clamp(-limit, limit)


def forward_kl(logp_student: Tensor, logp_teacher: Tensor, weights: Tensor) -> SupervisedLoss:
    """sum(weights KL(teacher || student)) over the teacher's top k tokens and the rest as one outcome.

    ``logp_student, logp_teacher`` float ``[N, k]``: log-probabilities of the same k tokens under either,
    gradient through the student's. Merging the rest keeps the value >= 0 and at most the full KL.
    """
    student, teacher = _top_k(logp_student, "logp_student"), _top_k(logp_teacher, "logp_teacher").detach()
    if student.shape != teacher.shape:
        raise DataError(f"logp_teacher must have shape {shape_of(student)}, got {shape_of(teacher)}")
    weight = _weights(weights, like=student[:, 0])
    listed = (teacher.exp() * (teacher - student)).sum(1)
    rest = (1 - teacher.exp().sum(1)).clamp(min=0)
    # -entr(p) is p log p with 0 at p = 0, where the student's rest does not matter.
    merged = -torch.special.entr(rest) - rest * log_one_minus_exp(student.logsumexp(1))
    return SupervisedLoss(loss=(weight * (listed + merged)).sum(), weight=weight.sum())


def _weights(weights: Tensor, *, like: Tensor) -> Tensor:
    values = token_tensor("weights", weights, like=like).detach()
    if values.numel() and float(values.min()) < 0:
        raise DataError(f"weights holds {float(values.min())}; a weight cannot be negative")
    return values


def _top_k(tensor: Tensor, name: str) -> Tensor:
    """``tensor`` as float64, checked to hold k >= 1 finite log-probabilities of mass <= 1 per token."""
    if tensor.ndim != 2 or tensor.shape[1] == 0 or not tensor.is_floating_point():
        raise DataError(f"{name} must be a float tensor [N, k], got {tensor.dtype} {shape_of(tensor)}")
    token_tensor(name, tensor.detach().flatten())
    values = tensor.double()
    mass = values.detach().exp().sum(1)
    bad = torch.nonzero(mass > 1 + 1e-3)
    if bad.numel():
        at = int(bad[0, 0])
        raise DataError(f"{name}[{at}] has a total probability of {float(mass[at])}; it must be at most 1")
    return values

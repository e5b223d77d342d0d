"""Supervised objectives against slow loops, full distributions, finite differences and row orders."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.core.errors import ConfigError, DataError
from surefoot.objectives import Clip, policy_gradient, token_weights
from surefoot.objectives.supervised import (
    cross_entropy,
    distillation_advantages,
    forward_kl,
    reward_weights,
    select_correct,
)

NAN = float("nan")
Row = tuple[bool, int, str, bool]


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


logps = st.lists(st.integers(-640, 0).map(lambda k: k / 64), min_size=1, max_size=20)


# -------------------- likelihood


@settings(max_examples=60, deadline=None)
@given(logps, st.integers(0, 99))
def test_cross_entropy_equals_a_slow_loop_and_splits(logp: list[float], seed: int) -> None:
    rng = random.Random(seed)
    weights = [rng.random() for _ in logp]
    whole = cross_entropy(f64(*logp), f64(*weights))
    expected = -sum(w * x for w, x in zip(weights, logp, strict=True))
    assert float(whole.loss) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert float(whole.weight) == pytest.approx(sum(weights))
    cut = rng.randint(0, len(logp))
    parts = [cross_entropy(f64(*logp)[s], f64(*weights)[s]) for s in (slice(0, cut), slice(cut, None))]
    assert float(parts[0].loss + parts[1].loss) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_cross_entropy_gradient_is_minus_the_weights() -> None:
    logp, weights = f64(-1, -2, -700).requires_grad_(), token_weights(ints(1, 2), aggregate="sequence_mean")
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, weights).loss, (logp,))
    cross_entropy(logp, weights).loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [-0.5, -0.25, -0.25]


# -------------------- reward-weighted regression


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-40, 40), st.booleans()), min_size=1, max_size=12),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.sampled_from([1.0, 20.0]),
)
def test_reward_weights_equal_a_slow_loop(rows: list[tuple[int, bool]], beta: float, cap: float) -> None:
    advantages = [a / 8 for a, _ in rows]
    raw = [min(math.exp(a / beta), cap) if v else 0.0 for a, (_, v) in zip(advantages, rows, strict=True)]
    kept = [x for x, (_, v) in zip(raw, rows, strict=True) if v]
    expected = [x / (sum(kept) / len(kept)) for x in raw] if kept else raw
    held = f64(*[a if v else NAN for a, (_, v) in zip(advantages, rows, strict=True)])
    got = reward_weights(held, beta=beta, cap=cap, valid=flags(*[v for _, v in rows]))
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("scale", [1e30, -1e30])
def test_reward_weights_stay_finite_with_mean_one_at_the_extremes(scale: float) -> None:
    got = reward_weights(f64(scale, scale, 2 * scale))
    assert bool(torch.isfinite(got).all())
    assert float(got.mean()) == pytest.approx(1.0)


def test_reward_weights_of_equal_advantages_are_one() -> None:
    assert reward_weights(f64(0.7, 0.7, 0.7)).tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-12)


# -------------------- selection


@st.composite
def trajectories(draw: st.DrawFn) -> list[Row]:
    row = st.tuples(
        st.booleans(), st.integers(-1, 2), st.sampled_from("abcd"), st.sampled_from([True, True, False])
    )
    return draw(st.lists(row, min_size=1, max_size=20))


def chosen(rows: list[Row], limit: int | None, seed: int) -> list[int]:
    correct, task, content, valid = zip(*rows, strict=True)
    picked = select_correct(
        flags(*correct), ints(*task), content, limit=limit, seed=seed, valid=flags(*valid)
    )
    assert len(rows) - len(picked.rows) >= picked.duplicates + picked.over_limit
    assert picked.correct == picked.rows.numel() + picked.duplicates + picked.over_limit
    assert picked.tasks == len({row[1] for row in rows if row[0] and row[3]})
    return picked.rows.tolist()


@settings(max_examples=60, deadline=None)
@given(trajectories(), st.none() | st.integers(1, 3), st.integers(0, 3))
def test_selection_is_correct_without_copies_and_within_the_limit(
    rows: list[Row], limit: int | None, seed: int
) -> None:
    picked = chosen(rows, limit, seed)
    assert picked == sorted(picked)
    for task in {row[1] for row in rows}:
        mine = [i for i in picked if rows[i][1] == task]
        different = {row[2] for row in rows if row[0] and row[3] and row[1] == task}
        assert len(mine) == (len(different) if limit is None else min(limit, len(different)))
        assert len({rows[i][2] for i in mine}) == len(mine)
    for i in picked:
        assert rows[i][0] and rows[i][3]
        assert not any(rows[j] == rows[i] for j in range(i))


@settings(max_examples=60, deadline=None)
@given(trajectories(), st.randoms())
def test_selection_does_not_depend_on_the_row_order(rows: list[Row], rng: random.Random) -> None:
    moved = rows.copy()
    rng.shuffle(moved)
    assert {rows[i] for i in chosen(rows, 2, 7)} == {moved[i] for i in chosen(moved, 2, 7)}


def test_selection_under_a_limit_changes_with_the_seed() -> None:
    rows: list[Row] = [(True, 0, text, True) for text in "abcdefgh"]
    assert len({tuple(chosen(rows, 2, seed)) for seed in range(20)}) > 8


# -------------------- distillation


@settings(max_examples=60, deadline=None)
@given(logps, st.integers(0, 99))
def test_distillation_advantages_are_teacher_minus_student(student: list[float], seed: int) -> None:
    rng = random.Random(seed)
    teacher = [-10 * rng.random() for _ in student]
    got = distillation_advantages(f64(*student).requires_grad_(), f64(*teacher))
    expected = [t - s for t, s in zip(teacher, student, strict=True)]
    assert got.tolist() == pytest.approx(expected, abs=1e-12)
    assert not got.requires_grad
    bounded = distillation_advantages(f64(*student), f64(*teacher), limit=1.5)
    assert bounded.tolist() == pytest.approx([max(-1.5, min(1.5, x)) for x in expected], abs=1e-12)


def test_distillation_advantages_in_expectation_give_the_gradient_of_the_reverse_kl() -> None:
    logits = f64(0.3, -0.2, 1.0, 0.1).requires_grad_()
    teacher = torch.log_softmax(f64(1.0, 0.0, -1.0, 0.5), 0)
    student = torch.log_softmax(logits, 0)
    kl = (student.exp() * (student - teacher)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    # Every token once, weighted by its probability, is the expectation over samples.
    advantages = distillation_advantages(student, teacher)
    weights = student.detach().exp()
    loss = policy_gradient(student, student.detach(), advantages, weights, clip=Clip.none()).loss
    (got,) = torch.autograd.grad(loss, logits)
    assert got.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@st.composite
def distributions(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], int]:
    """Logits of student and teacher over 5 tokens, and k."""
    n = draw(st.integers(1, 4))
    row = st.lists(st.integers(-192, 192).map(lambda x: x / 64), min_size=5, max_size=5)
    rows = [draw(st.lists(row, min_size=n, max_size=n)) for _ in range(2)]
    return rows[0], rows[1], draw(st.integers(1, 5))


def softmax(logits: list[float]) -> list[float]:
    mass = [math.exp(x) for x in logits]
    return [x / sum(mass) for x in mass]


@settings(max_examples=60, deadline=None)
@given(distributions())
def test_forward_kl_equals_a_slow_loop_and_is_at_most_the_full_kl(
    given_logits: tuple[list[list[float]], list[list[float]], int],
) -> None:
    students, teachers, k = given_logits
    total = full = 0.0
    for s_logits, t_logits in zip(students, teachers, strict=True):
        q, p = softmax(s_logits), softmax(t_logits)
        full += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        total += sum(a * math.log(a / b) for a, b in zip(p[:k], q[:k], strict=True))
        if k < 5:
            total += sum(p[k:]) * math.log(sum(p[k:]) / sum(q[k:]))
    student, teacher = (
        torch.log_softmax(torch.tensor(x, dtype=torch.float64), 1)[:, :k] for x in (students, teachers)
    )
    got = forward_kl(student, teacher, torch.ones(len(students)))
    assert float(got.loss) == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert -1e-12 <= float(got.loss) <= full + 1e-9
    assert float(got.weight) == len(students)


def test_forward_kl_gradient_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(3, 6, generator=generator, dtype=torch.float64), 1)

    def loss(x: Tensor) -> Tensor:
        return forward_kl(torch.log_softmax(x, 1)[:, :4], teacher[:, :4], f64(0.5, 0.2, 0.3)).loss

    assert torch.autograd.gradcheck(loss, (logits,))


def test_forward_kl_is_zero_with_zero_gradient_when_the_student_is_the_teacher() -> None:
    logits = f64(0.3, -0.2, 1.0).reshape(1, 3).requires_grad_()
    student = torch.log_softmax(logits, 1)
    loss = forward_kl(student[:, :2], student[:, :2], f64(1)).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-12)
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("student", [[0.0, -800.0], [-1e-9, -40.0], [-1e6, -1e6]])
@pytest.mark.parametrize("teacher", [[0.0, -800.0], [-30.0, -0.1], [-1e6, -1e6]])
def test_forward_kl_stays_finite_at_the_extremes(student: list[float], teacher: list[float]) -> None:
    logp = f64(*student).reshape(1, 2).requires_grad_()
    result = forward_kl(logp, f64(*teacher).reshape(1, 2), f64(1))
    result.loss.backward()
    assert logp.grad is not None
    assert bool(torch.isfinite(result.loss)) and bool(torch.isfinite(logp.grad).all())


# -------------------- bad input

ONE, TWO = f64(-1.0), f64(-1.0, -2.0)


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        (lambda: cross_entropy(f64(-math.inf), ONE.abs()), DataError, r"logp\[0\]"),
        (lambda: cross_entropy(ONE, f64(1, 1)), DataError, "weights"),
        (lambda: cross_entropy(ONE, ONE), DataError, "weights holds -1"),
        (lambda: reward_weights(f64(NAN)), DataError, r"advantages\[0\]"),
        (lambda: reward_weights(ONE, beta=0.0), ConfigError, "beta"),
        (lambda: reward_weights(ONE, cap=0.0), ConfigError, "cap"),
        (lambda: reward_weights(ONE, valid=ONE), DataError, "valid"),
        (lambda: select_correct(ONE, ints(1), ["a"]), DataError, "correct"),
        (lambda: select_correct(flags(1), ONE, ["a"]), DataError, "task"),
        (lambda: select_correct(flags(1), ints(1), ["a", "b"]), DataError, "content has 2 entries for 1"),
        (lambda: select_correct(flags(1), ints(1), ["a"], limit=0), ConfigError, "limit"),
        (lambda: select_correct(flags(1), ints(1), ["a"], valid=ints(1)), DataError, "valid"),
        (lambda: distillation_advantages(ONE, TWO), DataError, "logp_teacher"),
        (lambda: distillation_advantages(ONE, ONE, limit=0.0), ConfigError, "limit"),
        (lambda: forward_kl(ONE, ONE, ONE), DataError, "logp_student"),
        (lambda: forward_kl(TWO[None], ONE[None], f64(1)), DataError, "logp_teacher"),
        (lambda: forward_kl(TWO[None], f64(-0.1, -0.2)[None], f64(1)), DataError, r"logp_teacher\[0\] has a"),
        (lambda: forward_kl(f64(NAN, -1)[None], TWO[None], f64(1)), DataError, "logp_student"),
        (lambda: forward_kl(TWO[None], TWO[None], f64(1, 1)), DataError, "weights"),
    ],
)
def test_bad_input_is_refused_by_name(call: Callable[[], object], error: type[Exception], field: str) -> None:
    with pytest.raises(error, match=field):
        call()

"""Losses, weights and corrections: published numbers, slow loops from the formulas, gradients, splits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.core.errors import ConfigError, DataError
from surefoot.objectives import (
    Aggregate,
    Clip,
    Ratio,
    WeightSums,
    decoupled,
    effective_sample_size,
    icepop,
    offpolicy_sequence_mask,
    policy_gradient,
    token_weights,
    truncated_importance,
    weight_sums,
)

NAN = float("nan")


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@dataclass(frozen=True)
class Batch:
    """Trajectories of uneven length; all lists but ``lengths`` and ``valid`` are per token."""

    lengths: list[int]
    valid: list[bool]
    new: list[float]
    old: list[float]
    advantage: list[float]
    correction: list[float]

    @property
    def sequence(self) -> list[int]:
        return [i for i, n in enumerate(self.lengths) for _ in range(n)]

    def rows(self) -> list[list[int]]:
        return [[t for t, s in enumerate(self.sequence) if s == i] for i in range(len(self.lengths))]

    def weights(self, aggregate: Aggregate = "sequence_mean") -> Tensor:
        return token_weights(ints(*self.lengths), aggregate=aggregate, valid=torch.tensor(self.valid))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    n = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    valid = draw(st.lists(st.sampled_from([True, True, False]), min_size=n, max_size=n))
    per_sequence = draw(st.lists(st.sampled_from([-1.5, -0.25, 0.0, 0.5, 2.0]), min_size=n, max_size=n))

    def column(low: float, high: float) -> list[float]:
        # Multiples of 1/64 are the same number in float32 and in float64.
        value = st.integers(round(low * 64), round(high * 64)).map(lambda k: k / 64)
        return draw(st.lists(value, min_size=sum(lengths), max_size=sum(lengths)))

    advantage = [a for a, k in zip(per_sequence, lengths, strict=True) for _ in range(k)]
    return Batch(lengths, valid, column(-3, 0), column(-3, 0), advantage, column(0, 2))


def bounded(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def ppo_loop(r: float, a: float, clip: Clip) -> float:
    loss = max(-a * r, -a * bounded(r, 1 - clip.low, 1 + clip.high))
    return min(loss, -a * clip.dual) if clip.dual is not None and a < 0 else loss


def token_loop(r: float, a: float, new: float, old: float, clip: Clip) -> float:
    if clip.kind == "ppo":
        return ppo_loop(r, a, clip)
    if clip.kind == "cispo":
        return -min(r, clip.high) * a * new
    if clip.kind == "sapo":
        tau = clip.tau_pos if a > 0 else clip.tau_neg
        return -(4 / tau) / (1 + math.exp(-tau * (r - 1))) * a
    moved = math.exp(new) - math.exp(old)
    if clip.kind == "dppo" and ((a > 0 and moved > clip.delta) or (a < 0 and moved < -clip.delta)):
        return 0.0
    return -a * r


def mean_log_ratio(batch: Batch, row: list[int]) -> float:
    return sum(batch.new[t] - batch.old[t] for t in row) / len(row)


def geometric_loop(batch: Batch, row: list[int], clip: Clip) -> float:
    logs: list[float] = []
    for t in row:
        x, sign = batch.new[t] - batch.old[t], math.copysign(1.0, batch.advantage[t])
        # The lower of the two objectives, token by token, in log space.
        logs.append(
            sign * min(sign * x, sign * bounded(x, -clip.low, clip.high)) if clip.kind == "ppo" else x
        )
    return math.exp(sum(logs) / len(logs))


def loss_loop(batch: Batch, ratio: Ratio, clip: Clip) -> float:
    """Mean over valid, non-empty sequences of the mean over tokens."""
    total, kept = 0.0, 0
    for row, valid in zip(batch.rows(), batch.valid, strict=True):
        if not row or not valid:
            continue
        kept += 1
        losses: list[float] = []
        for t in row:
            a, new, old = batch.advantage[t], batch.new[t], batch.old[t]
            if ratio == "geometric":
                losses.append(-a * (geometric_loop(batch, row, clip) if a else 0.0))
            else:
                r = math.exp(new - old if ratio == "token" else mean_log_ratio(batch, row))
                losses.append(token_loop(r, a, new, old, clip))
        total += sum(x * c for x, c in zip(losses, [batch.correction[t] for t in row], strict=True)) / len(
            row
        )
    return total / max(kept, 1)


LOSSES: list[tuple[Ratio, Clip]] = [
    ("token", Clip.ppo()),
    ("token", Clip.ppo(0.2, 0.28, dual=3.0)),
    ("token", Clip.cispo(1.5)),
    ("token", Clip.sapo()),
    ("token", Clip.dppo()),
    ("token", Clip.none()),
    ("sequence", Clip.ppo(3e-4, 4e-4)),
    ("sequence", Clip.cispo(1.5)),
    ("sequence", Clip.none()),
    ("geometric", Clip.ppo(0.3, 0.5)),
    ("geometric", Clip.none()),
]
LABELS = ["-".join([ratio, clip.kind, *(["dual"] if clip.dual else [])]) for ratio, clip in LOSSES]


def loss_of(batch: Batch, ratio: Ratio, clip: Clip, dtype: torch.dtype = torch.float64) -> float:
    new, old, a, c = (
        torch.tensor(x, dtype=dtype) for x in (batch.new, batch.old, batch.advantage, batch.correction)
    )
    weights, sequence = batch.weights().to(dtype), ints(*batch.sequence)
    result = policy_gradient(new, old, a, weights, sequence=sequence, ratio=ratio, clip=clip, correction=c)
    return float(result.loss)


@pytest.mark.parametrize(("ratio", "clip"), LOSSES, ids=LABELS)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(batch=batches())
def test_loss_equals_the_formula_in_a_loop(ratio: Ratio, clip: Clip, batch: Batch) -> None:
    expected = loss_loop(batch, ratio, clip)
    assert loss_of(batch, ratio, clip) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert loss_of(batch, ratio, clip, torch.float32) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def ppo_value(r: float, a: float) -> float:
    clip = Clip.ppo(0.2, 0.28, dual=3.0)
    return float(policy_gradient(f64(math.log(r)), f64(0.0), f64(a), f64(1.0), clip=clip).loss)


def test_published_numbers_of_the_ppo_clip() -> None:
    got = [(ppo_value(r, 1.0), ppo_value(r, -1.0)) for r in (0.5, 1.4, 5.0)]
    assert got == [pytest.approx(x, abs=1e-12) for x in [(-0.5, 0.8), (-1.28, 1.4), (-1.28, 3.0)]]


def test_published_number_of_the_gspo_ratio() -> None:
    logs = f64(0.01, -0.02, 0.03, 0.0)
    out = policy_gradient(
        logs,
        0 * logs,
        0 * logs + 1,
        0 * logs + 0.25,
        sequence=ints(7, 7, 7, 7),
        ratio="sequence",
        clip=Clip.none(),
    )
    assert float(out.ratio_mean) == pytest.approx(1.005013, abs=1e-6)
    assert float(out.loss) == pytest.approx(-1.005013, abs=1e-6)


def test_published_numbers_of_truncated_importance_and_icepop() -> None:
    logs = f64(-1.0, -0.1, 0.3, 1.2)
    tis, pop = truncated_importance(logs, 0 * logs), icepop(logs, 0 * logs)
    assert tis.tolist() == pytest.approx([0.367879, 0.904837, 1.349859, 2], abs=1e-6)
    assert pop.tolist() == pytest.approx([0, 0.904837, 1.349859, 0], abs=1e-6)


def test_published_numbers_of_the_decoupled_objective() -> None:
    new, proximal, behaviour = f64(-1.0), f64(-1.2), f64(-1.5)
    weight = decoupled(proximal, behaviour)
    for a, expected in [(1.0, -1.619831), (-1.0, 1.648721)]:
        out = policy_gradient(new, proximal, f64(a), f64(1.0), clip=Clip.ppo(), correction=weight)
        assert float(out.loss) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("ratio", "clip"), LOSSES, ids=LABELS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(batch=batches(), aggregate=st.sampled_from(["token_mean", "sequence_mean"]))
def test_loss_gradient_and_metrics_do_not_depend_on_the_micro_batch_split(
    ratio: Ratio, clip: Clip, batch: Batch, aggregate: Aggregate
) -> None:
    columns = [
        f64(*x) for x in (batch.old, batch.advantage, batch.weights(aggregate).tolist(), batch.correction)
    ]
    sequence = ints(*batch.sequence)

    def run(tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        new = f64(*batch.new).requires_grad_()
        old, a, w, c = (x[tokens] for x in columns)
        out = policy_gradient(
            new[tokens], old, a, w, sequence=sequence[tokens], ratio=ratio, clip=clip, correction=c
        )
        out.loss.backward()
        assert new.grad is not None
        return new.grad, [out.loss.detach(), out.clip_fraction, out.ratio_mean, out.approx_kl, out.weight]

    everything = run(torch.arange(len(batch.new)))
    parts = [run(torch.tensor(row, dtype=torch.int64)) for row in batch.rows()]
    gradient = torch.stack([g for g, _ in parts]).sum(0)
    torch.testing.assert_close(gradient, everything[0], rtol=1e-12, atol=1e-12)
    for whole, pieces in zip(everything[1], zip(*[m for _, m in parts], strict=True), strict=True):
        torch.testing.assert_close(torch.stack(pieces).sum(), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "clip", [Clip.ppo(0.2, 0.28, dual=3.0), Clip.sapo(), Clip.none()], ids=["ppo", "sapo", "none"]
)
def test_token_ratio_gradient_agrees_with_finite_differences(clip: Clip) -> None:
    new = torch.linspace(-2, 2, 16, dtype=torch.float64).requires_grad_()
    a, w = f64(*[1.5, -0.5] * 8), torch.linspace(0.1, 0.3, 16, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: policy_gradient(x, 0 * a, a, w, clip=clip).loss, (new,))


def test_gmpo_gradient_agrees_with_finite_differences() -> None:
    new, a = f64(-0.7, 0.1, 0.6, -0.5, 0.3, 0.9).requires_grad_(), f64(1, 1, 1, -2, -2, -2)
    sequence, clip = ints(0, 0, 0, 1, 1, 1), Clip.ppo(0.4, 0.4)

    def loss(x: Tensor) -> Tensor:
        return policy_gradient(
            x, 0 * a, a, 0 * a + 1 / 6, sequence=sequence, ratio="geometric", clip=clip
        ).loss

    assert torch.autograd.gradcheck(loss, (new,))
    (gradient,) = torch.autograd.grad(loss(new), new)
    # A winner's token above +0.4 and a loser's below -0.4 stop pushing; the other sides keep going.
    assert [g == 0 for g in gradient.tolist()] == [False, False, True, True, False, False]


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    new, old = f64(-0.5, -1.0, -0.2, -2.0, -0.1), f64(-0.6, -0.8, -0.3, -1.9, -0.3)
    a, sequence = f64(1, 1, 1, -0.5, -0.5), ints(0, 0, 0, 1, 1)
    weights, clip = token_weights(ints(3, 2), aggregate="sequence_mean"), Clip.ppo(0.05, 0.2)

    def loss(x: Tensor) -> Tensor:
        return policy_gradient(x, old, a, weights, sequence=sequence, ratio="sequence", clip=clip).loss

    def direct(x: Tensor) -> Tensor:
        ratios = torch.stack([(x - old)[:3].mean(), (x - old)[3:].mean()]).exp()
        return torch.maximum(-a[[0, 3]] * ratios, -a[[0, 3]] * ratios.clamp(0.95, 1.2)).mean()

    x = new.clone().requires_grad_()
    assert torch.autograd.gradcheck(direct, (x,))
    torch.testing.assert_close(loss(x), direct(x), rtol=1e-12, atol=0)
    got, expected = torch.autograd.grad(loss(x), x)[0], torch.autograd.grad(direct(x), x)[0]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)
    assert bool((got != 0).all())


def test_cispo_gradient_is_the_capped_ratio_times_the_score() -> None:
    new = f64(-3.0, -1.0, -0.1).requires_grad_()
    old, a, w = f64(-1.0, -1.1, -3.0), f64(1.0, -2.0, 1.0), f64(0.2, 0.3, 0.5)
    out = policy_gradient(new, old, a, w, clip=Clip.cispo(5.0))
    (got,) = torch.autograd.grad(out.loss, new)
    expected = [-0.2 * math.exp(-2), 0.3 * 2 * math.exp(0.1), -0.5 * 5.0]
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    assert float(out.clip_fraction) == 0.5
    # With the capped ratio held fixed the loss is linear in logp, which finite differences can check.
    fixed = (new.detach() - old).exp().clamp(max=5.0)
    assert torch.autograd.gradcheck(lambda x: (-w * fixed * a * x).sum(), (new,))
    (linear,) = torch.autograd.grad((-w * fixed * a * new).sum(), new)
    torch.testing.assert_close(got, linear, rtol=1e-12, atol=0)


def test_sapo_has_the_plain_gradient_on_policy_and_a_smaller_one_away_from_it() -> None:
    a, w = f64(2.0, -1.0, 2.0, 2.0), f64(1, 1, 1, 1)
    new = f64(-1.0, -1.0, -0.1, -0.9).requires_grad_()
    old = f64(-1.0, -1.0, -3.0, -1.0)
    (got,) = torch.autograd.grad(policy_gradient(new, old, a, w, clip=Clip.sapo()).loss, new)
    assert got[:2].tolist() == pytest.approx([-2.0, 1.0], rel=1e-12)
    assert abs(float(got[2])) < 0.1


def test_dppo_drops_only_tokens_that_moved_too_far_in_their_own_direction() -> None:
    new = f64(*[math.log(p) for p in (0.9, 0.9, 0.1, 0.1, 0.5)]).requires_grad_()
    old = f64(*[math.log(p) for p in (0.5, 0.5, 0.5, 0.5, 0.4)])
    a, w = f64(1, -1, 1, -1, 1), f64(0.2, 0.2, 0.2, 0.2, 0.2)
    out = policy_gradient(new, old, a, w, clip=Clip.dppo(0.2))
    (gradient,) = torch.autograd.grad(out.loss, new)
    assert [g == 0 for g in gradient.tolist()] == [True, False, False, True, False]
    assert float(out.clip_fraction) == pytest.approx(0.4)


def test_gradient_flows_through_logp_alone() -> None:
    tensors = [f64(-0.1, -0.2).requires_grad_() for _ in range(5)]
    new, old, a, w, c = tensors
    policy_gradient(new, old, a, w, clip=Clip.ppo(), correction=c).loss.backward()
    assert [t.grad is not None for t in tensors] == [True, False, False, False, False]


def test_metrics_are_weighted_sums_of_what_their_names_say() -> None:
    new, old, w = f64(math.log(2), 0.0), f64(0.0, 0.0), f64(0.25, 0.75)
    out = policy_gradient(new, old, f64(1.0, 1.0), w, clip=Clip.ppo())
    assert float(out.clip_fraction) == 0.25
    assert float(out.ratio_mean) == pytest.approx(0.25 * 2 + 0.75)
    assert float(out.approx_kl) == pytest.approx(0.25 * (2 - 1 - math.log(2)))
    assert float(out.weight) == 1.0


@pytest.mark.parametrize(("ratio", "clip"), LOSSES, ids=LABELS)
def test_a_lost_token_keeps_loss_and_gradient_finite(ratio: Ratio, clip: Clip) -> None:
    new = torch.tensor([-1e4, 0.0, -1.0], requires_grad=True)
    old, a = torch.tensor([0.0, -1e4, -1.0]), torch.tensor([1.0, -1.0, 1.0])
    out = policy_gradient(new, old, a, torch.ones(3), sequence=ints(0, 1, 2), ratio=ratio, clip=clip)
    out.loss.backward()
    assert new.grad is not None and bool(torch.isfinite(new.grad).all()) and math.isfinite(out.loss.item())


def turns(batch: Batch, seed: int) -> list[list[int]]:
    """A random split of each length into turns, some empty."""
    g = torch.Generator().manual_seed(seed)
    out: list[list[int]] = []
    for n in batch.lengths:
        cuts = sorted(torch.randint(0, n + 1, (2,), generator=g).tolist())
        out.append([cuts[0], cuts[1] - cuts[0], n - cuts[1]])
    return out


def weights_loop(batch: Batch, aggregate: Aggregate, split: list[list[int]]) -> list[float]:
    tokens = sum(n for n, v in zip(batch.lengths, batch.valid, strict=True) if v)
    sequences = sum(n > 0 and v for n, v in zip(batch.lengths, batch.valid, strict=True))
    out: list[float] = []
    for n, valid, parts in zip(batch.lengths, batch.valid, split, strict=True):
        if not valid:
            out += [0.0] * n
        elif aggregate == "token_mean":
            out += [1 / tokens] * n if n else []
        elif aggregate == "sequence_mean":
            out += [1 / (sequences * n)] * n if n else []
        elif aggregate == "constant":
            out += [1 / (sum(batch.valid) * 64)] * n
        else:
            filled = [k for k in parts if k]
            out += [1 / (sequences * len(filled) * k) for k in filled for _ in range(k)]
    return out


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "turn_mean", "constant"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches(), seed=st.integers(0, 1000))
def test_weights_equal_the_formula_in_a_loop(aggregate: Aggregate, batch: Batch, seed: int) -> None:
    split = turns(batch, seed)
    got = token_weights(
        ints(*batch.lengths),
        aggregate=aggregate,
        constant=64 if aggregate == "constant" else None,
        turn_lengths=ints(*[k for parts in split for k in parts]) if aggregate == "turn_mean" else None,
        valid=torch.tensor(batch.valid),
    )
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(weights_loop(batch, aggregate, split), rel=1e-12)
    if aggregate != "constant" and any(n and v for n, v in zip(batch.lengths, batch.valid, strict=True)):
        assert float(got.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(("ratio", "clip"), LOSSES, ids=LABELS)
def test_E5_batch_without_a_valid_sample_has_zero_loss_and_zero_gradient(
    aggregate: Aggregate, ratio: Ratio, clip: Clip
) -> None:
    weights = token_weights(ints(2, 3), aggregate=aggregate, valid=torch.tensor([False, False]))
    assert weights.tolist() == [0.0] * 5
    new = f64(-1, -2, -0.5, -0.1, -3).requires_grad_()
    out = policy_gradient(
        new, f64(-1, -1, -1, -1, -1), f64(1, 1, 0, 0, 0), weights,
        sequence=ints(0, 0, 1, 1, 1), ratio=ratio, clip=clip,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.item() == 0.0 and new.grad is not None and new.grad.tolist() == [0.0] * 5


def test_dual_clip_counts_the_tokens_it_cuts_and_stops_their_gradient() -> None:
    new, a = f64(math.log(5), math.log(2), math.log(5)).requires_grad_(), f64(-1.0, -1.0, 0.0)
    out = policy_gradient(new, 0 * a, a, f64(0.6, 0.3, 0.1), clip=Clip.ppo(dual=3.0))
    (gradient,) = torch.autograd.grad(out.loss, new)
    assert gradient.tolist() == pytest.approx([0.0, 0.6, 0.0])
    assert float(out.clip_fraction) == 0.6


def test_a_micro_batch_without_tokens_adds_zero() -> None:
    none = f64().requires_grad_()
    out = policy_gradient(none, f64(), f64(), f64(), sequence=ints(), ratio="sequence", clip=Clip.ppo())
    out.loss.backward()
    assert out.loss.item() == 0.0 and out.weight.item() == 0.0


def importance_loop(batch: Batch, level: str) -> list[float]:
    out: list[float] = []
    for row in batch.rows():
        logs = [batch.new[t] - batch.old[t] for t in row]
        if level == "token":
            out += [math.exp(x) for x in logs]
        elif row:
            total = sum(logs) / (len(logs) if level == "geometric" else 1)
            out += [math.exp(max(-20.0, min(20.0, total)))] * len(row)
    return out


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(batch=batches())
def test_corrections_equal_the_formula_in_a_loop(level: str, batch: Batch) -> None:
    expected = importance_loop(batch, level)
    sequence = None if level == "token" else ints(*batch.sequence)
    for dtype, tolerance in [(torch.float64, 1e-9), (torch.float32, 1e-5)]:
        new, old = torch.tensor(batch.new, dtype=dtype), torch.tensor(batch.old, dtype=dtype)
        tis = truncated_importance(new, old, 2.0, level, sequence)
        pop = icepop(new, old, 0.5, 2.0, level, sequence)
        assert tis.tolist() == pytest.approx([min(w, 2.0) for w in expected], rel=tolerance)
        inside = [w if 0.5 <= w <= 2.0 else 0.0 for w in expected]
        assert pop.tolist() == pytest.approx(inside, rel=tolerance)
        if level == "token":
            assert decoupled(new, old, 1.5).tolist() == pytest.approx(
                [min(w, 1.5) for w in expected], rel=tolerance
            )
            dropped = [w if w <= 1.5 else 0.0 for w in expected]
            assert decoupled(new, old, 1.5, above="drop").tolist() == pytest.approx(dropped, rel=tolerance)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(batch=batches())
def test_offpolicy_mask_equals_the_formula_in_a_loop(batch: Batch) -> None:
    expected: list[float] = []
    for row in batch.rows():
        lost = bool(row) and batch.advantage[row[0]] < 0
        # 0.51 is no multiple of 1/64 over a small count, so rounding cannot decide.
        expected += [0.0 if lost and -mean_log_ratio(batch, row) > 0.51 else 1.0] * len(row)
    got = offpolicy_sequence_mask(
        f64(*batch.new), f64(*batch.old), f64(*batch.advantage), ints(*batch.sequence), delta=0.51
    )
    assert got.tolist() == expected


@given(
    st.lists(st.lists(st.floats(-25, 3), min_size=1, max_size=6), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_effective_sample_size_equals_the_float64_formula_however_the_batch_is_split(
    gaps: list[list[float]], rng: Any
) -> None:
    """Token and sequence level against sums in exact order, and the parts of a split add up to the whole."""

    def reference(logs: list[float]) -> float:
        w = [math.exp(min(max(x, -20.0), 20.0)) for x in logs]
        return math.fsum(w) ** 2 / (len(w) * math.fsum(x * x for x in w))

    old = [[rng.uniform(-5, -0.1) for _ in row] for row in gaps]
    new = [[b + g for b, g in zip(*rows, strict=True)] for rows in zip(old, gaps, strict=True)]
    cut = rng.randrange(len(gaps) + 1)
    for level in ("token", "sequence"):
        parts: list[WeightSums] = []
        for rows in (range(cut), range(cut, len(gaps))):
            if not rows:
                continue
            a, b = (
                torch.tensor([x for i in rows for x in table[i]], dtype=torch.float64) for table in (new, old)
            )
            sequence = torch.tensor([i for i in rows for _ in gaps[i]])
            parts.append(weight_sums(a, b, level, sequence if level == "sequence" else None))  # pyright: ignore[reportArgumentType]
        got = effective_sample_size(
            *(sum(float(getattr(p, name)) for p in parts) for name in ("count", "total", "squares"))
        )
        logs = [x for row in gaps for x in row] if level == "token" else [math.fsum(row) for row in gaps]
        assert got is not None and 0 < got <= 1
        assert got == pytest.approx(reference(logs), rel=1e-9)


def test_effective_sample_size_is_1_for_equal_weights_and_1_over_n_for_a_single_one() -> None:
    old = torch.full((4,), -2.0, dtype=torch.float64)
    equal, single = old + 0.7, old + torch.tensor([18.0, -18.0, -18.0, -18.0])

    def size(logp: Tensor) -> float | None:
        found = weight_sums(logp, old)
        return effective_sample_size(float(found.count), float(found.total), float(found.squares))

    assert size(equal) == pytest.approx(1.0) and size(single) == pytest.approx(0.25)
    assert effective_sample_size(0.0, 0.0, 0.0) is None


def test_non_finite_tensors_name_the_field_and_the_place() -> None:
    good, bad, seq = f64(-1.0, -2.0), f64(-1.0, NAN), ints(0, 0)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("logp", lambda: policy_gradient(bad, good, good, good, clip=Clip.ppo())),
        ("logp_old", lambda: policy_gradient(good, bad, good, good, clip=Clip.ppo())),
        ("advantages", lambda: policy_gradient(good, good, bad, good, clip=Clip.ppo())),
        ("weights", lambda: policy_gradient(good, good, good, bad, clip=Clip.ppo())),
        ("correction", lambda: policy_gradient(good, good, good, good, clip=Clip.ppo(), correction=bad)),
        ("logp_behaviour", lambda: truncated_importance(good, bad)),
        ("logp_behaviour", lambda: icepop(good, bad)),
        ("logp_proximal", lambda: decoupled(bad, good)),
        ("advantages", lambda: offpolicy_sequence_mask(good, good, bad, seq)),
    ]
    for field, call in cases:
        with pytest.raises(DataError, match=rf"^{field}\[1\] is nan"):
            call()


def test_wrong_shapes_and_types_name_the_field() -> None:
    x, one = f64(-1.0, -2.0), f64(-1.0)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("logp must be a float", lambda: policy_gradient(ints(1, 2), x, x, x, clip=Clip.ppo())),
        ("logp_old must have shape", lambda: policy_gradient(x, one, x, x, clip=Clip.ppo())),
        (
            "sequence must hold integers",
            lambda: policy_gradient(x, x, x, x, sequence=x, ratio="sequence", clip=Clip.ppo()),
        ),
        ("lengths is empty", lambda: token_weights(ints())),
        ("lengths holds -1", lambda: token_weights(ints(2, -1))),
        ("lengths must be an integer", lambda: token_weights(x)),
        ("valid must be", lambda: token_weights(ints(1, 2), valid=torch.tensor([True]))),
        (
            "turn_lengths must split",
            lambda: token_weights(ints(2, 2), aggregate="turn_mean", turn_lengths=ints(3, 1)),
        ),
        (
            "turn_lengths must split",
            lambda: token_weights(ints(2, 2), aggregate="turn_mean", turn_lengths=ints(2, 2, 1)),
        ),
    ]
    for message, call in cases:
        with pytest.raises(DataError, match=message):
            call()


def test_impossible_options_name_the_setting() -> None:
    x, seq = f64(-1.0, -2.0), ints(0, 0)

    def loss(ratio: str, clip: Clip, sequence: Tensor | None = seq) -> object:
        return policy_gradient(x, x, x, x, sequence=sequence, ratio=ratio, clip=clip)

    cases: list[tuple[str, Callable[[], object]]] = [
        ("ratio is 'tokens'; did you mean 'token'", lambda: loss("tokens", Clip.ppo())),
        ("needs sequence", lambda: loss("sequence", Clip.ppo(), None)),
        ("takes Clip.ppo without dual", lambda: loss("geometric", Clip.cispo())),
        ("takes Clip.ppo without dual", lambda: loss("geometric", Clip.ppo(dual=3.0))),
        ("needs ratio='token'", lambda: loss("sequence", Clip.dppo())),
        ("clip.low must be", lambda: Clip.ppo(low=-0.1)),
        ("clip.high must be", lambda: Clip.cispo(NAN)),
        ("clip.tau_neg must be", lambda: Clip.sapo(1.0, 0.0)),
        ("clip.dual must be", lambda: Clip.ppo(dual=0.5)),
        ("clip.kind is 'pop'", lambda: Clip("pop")),
        ("constant goes with", lambda: token_weights(ints(1), aggregate="constant")),
        ("constant goes with", lambda: token_weights(ints(1), constant=8)),
        ("constant must be", lambda: token_weights(ints(1), aggregate="constant", constant=0)),
        ("turn_lengths goes with", lambda: token_weights(ints(1), turn_lengths=ints(1))),
        ("cap must be", lambda: truncated_importance(x, x, 0.0)),
        ("low < high", lambda: icepop(x, x, 2.0, 0.5)),
        ("sequence is needed by", lambda: truncated_importance(x, x, 2.0, "sequence")),
        ("above is 'clip'", lambda: decoupled(x, x, above="clip")),
        ("delta must be", lambda: offpolicy_sequence_mask(x, x, x, seq, delta=0.0)),
    ]
    for message, call in cases:
        with pytest.raises(ConfigError, match=message):
            call()

"""Entropy control: selections against slow loops, gradients, seeds, and the adaptive coefficient's steps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.core.errors import ConfigError, DataError
from surefoot.objectives.entropy import (
    AdaptiveCoefficient,
    clip_cov,
    entropy_bonus,
    kl_cov,
    kl_cov_penalty,
    token_covariance,
    top_entropy,
)

NAN = float("nan")
Row = tuple[float, float, bool, bool]


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """logp, advantage, clipped, valid of each token."""
    row = st.tuples(
        st.integers(-640, 0).map(lambda k: k / 64),
        st.sampled_from([-1.5, -0.5, 0.0, 0.75, 2.0]),
        st.sampled_from([False, False, False, True]),
        st.sampled_from([True, True, True, False]),
    )
    return draw(st.lists(row, min_size=1, max_size=24))


def tensors(rows: list[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logp, advantage, clipped, valid = zip(*rows, strict=True)
    return f64(*logp), f64(*advantage), flags(*clipped), flags(*valid)


def covariance_loop(rows: list[Row]) -> list[float]:
    kept = [row for row in rows if row[3]]
    logp = sum(row[0] for row in kept) / max(len(kept), 1)
    advantage = sum(row[1] for row in kept) / max(len(kept), 1)
    return [(row[0] - logp) * (row[1] - advantage) if row[3] else 0.0 for row in rows]


def count_loop(rows: list[Row], fraction: float) -> int:
    return max(1, math.floor(fraction * sum(row[3] for row in rows) + 1e-9))


@settings(max_examples=60, deadline=None)
@given(batches())
def test_token_covariance_equals_a_slow_loop(rows: list[Row]) -> None:
    logp, advantage, _, valid = tensors(rows)
    got = token_covariance(logp.requires_grad_(), advantage, valid=valid)
    assert got.tolist() == pytest.approx(covariance_loop(rows), rel=1e-9, abs=1e-9)
    assert got.dtype == torch.float64
    assert not got.requires_grad


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([0.05, 0.2, 1.0]), st.integers(0, 9))
def test_clip_cov_draws_the_asked_number_from_the_unclipped_range(
    rows: list[Row], fraction: float, seed: int
) -> None:
    logp, advantage, clipped, valid = tensors(rows)
    mask = clip_cov(logp, advantage, clipped, seed=seed, fraction=fraction, low=0.5, high=3.0, valid=valid)
    allowed = [
        i
        for i, c in enumerate(token_covariance(logp, advantage, valid=valid).tolist())
        if 0.5 < c < 3.0 and rows[i][3] and not rows[i][2]
    ]
    chosen = torch.nonzero(mask)[:, 0].tolist()
    assert set(chosen) <= set(allowed)
    assert len(chosen) == min(len(allowed), count_loop(rows, fraction))


def test_clip_cov_takes_the_published_share_of_tokens_at_random() -> None:
    generator = torch.Generator().manual_seed(0)
    logp = -10 * torch.rand(30000, generator=generator, dtype=torch.float64)
    advantage = torch.randn(30000, generator=generator, dtype=torch.float64)
    clipped = torch.zeros(30000, dtype=torch.bool)
    masks = [clip_cov(logp, advantage, clipped, seed=seed) for seed in (1, 1, 2)]
    covariance = token_covariance(logp, advantage)
    for mask in masks:
        assert int(mask.sum()) == 6
        assert bool(((covariance[mask] > 1) & (covariance[mask] < 5)).all())
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_clip_cov_reaches_every_candidate() -> None:
    logp, advantage = f64(-4, -4, -4, 0, 0, 0), f64(-1, -1, -1, 1, 1, 1)
    clipped = flags(0, 0, 0, 0, 0, 1)
    hits = sum(clip_cov(logp, advantage, clipped, seed=s).long() for s in range(500))
    assert isinstance(hits, Tensor)
    assert (hits[:5] / 500).tolist() == pytest.approx([0.2] * 5, abs=0.06)
    assert int(hits[5]) == 0


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([0.05, 0.2, 1.0]))
def test_kl_cov_chooses_the_largest_positive_covariances(rows: list[Row], fraction: float) -> None:
    logp, advantage, _, valid = tensors(rows)
    mask = kl_cov(logp, advantage, fraction=fraction, valid=valid)
    covariance = token_covariance(logp, advantage, valid=valid).tolist()
    ranked = sorted(range(len(rows)), key=lambda i: (-covariance[i], i))[: count_loop(rows, fraction)]
    expected = sorted(i for i in ranked if covariance[i] > 0)
    assert torch.nonzero(mask)[:, 0].tolist() == expected
    assert not bool((mask & ~valid).any())


def test_kl_cov_leaves_a_batch_without_advantages_alone() -> None:
    assert not bool(kl_cov(f64(-1, -2, -3), f64(0, 0, 0), fraction=1.0).any())


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 99))
def test_kl_cov_penalty_equals_a_slow_loop(rows: list[Row], seed: int) -> None:
    rng = random.Random(seed)
    logp, _, chosen, _ = tensors(rows)
    old, weights = [-10 * rng.random() for _ in rows], [rng.random() for _ in rows]
    got = kl_cov_penalty(logp, f64(*old), f64(*weights), chosen, coefficient=0.5)
    expected = sum(0.5 * w * abs(row[0] - o) * row[2] for row, o, w in zip(rows, old, weights, strict=True))
    assert float(got) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_kl_cov_penalty_gradient_equals_finite_differences_and_is_zero_on_policy() -> None:
    old, weights, chosen = f64(-1, -2, -3), f64(0.2, 0.3, 0.5), flags(1, 0, 1)
    inputs = f64(-1.5, -2.5, -2.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_cov_penalty(x, old, weights, chosen), (inputs,))
    same = old.clone().requires_grad_()
    kl_cov_penalty(same, old, weights, chosen).backward()
    assert same.grad is not None
    assert same.grad.tolist() == [0.0, 0.0, 0.0]


def test_kl_cov_penalty_pulls_a_chosen_token_back_to_its_old_probability() -> None:
    logp = f64(-0.5, -3.5).requires_grad_()
    kl_cov_penalty(logp, f64(-1, -3), f64(1, 1), flags(1, 1)).backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [1.0, -1.0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 12).map(lambda k: k / 4), min_size=1, max_size=30),
    st.sampled_from([0.05, 0.2, 0.5, 1.0]),
    st.integers(0, 99),
)
def test_top_entropy_keeps_what_lies_at_or_above_the_quantile(
    entropy: list[float], share: float, seed: int
) -> None:
    rng = random.Random(seed)
    valid = [rng.random() < 0.8 for _ in entropy]
    mask = top_entropy(f64(*entropy), share=share, valid=flags(*valid)).tolist()
    kept = [x for x, v in zip(entropy, valid, strict=True) if v]
    threshold = np.quantile(kept, 1 - share) if kept else math.inf
    expected = [v and x >= threshold - 1e-9 for x, v in zip(entropy, valid, strict=True)]
    assert mask == expected


def test_top_entropy_trains_a_fifth_of_the_tokens() -> None:
    entropy = torch.arange(100, dtype=torch.float64)
    assert torch.nonzero(top_entropy(entropy))[:, 0].tolist() == list(range(80, 100))


def test_entropy_bonus_rewards_entropy_by_the_weights() -> None:
    entropy = f64(0.5, 2.0).requires_grad_()
    term = entropy_bonus(entropy, f64(0.25, 0.75), 0.1)
    assert float(term.detach()) == pytest.approx(-0.1 * (0.125 + 1.5))
    assert torch.autograd.gradcheck(lambda x: entropy_bonus(x, f64(0.25, 0.75), 0.1), (entropy,))


def test_adaptive_coefficient_steps_towards_the_target_and_acts_below_it_only() -> None:
    rule = AdaptiveCoefficient(target=0.2, step=0.005)
    value, seen = 0.0, []
    for entropy in (0.1, 0.15, 0.3, 0.2, 0.1):
        seen.append((value, rule.active(value, entropy)))
        value = rule.next(value, entropy)
    expected = [(0.0, 0.0), (0.005, 0.005), (0.01, 0.0), (0.005, 0.005), (0.005, 0.005)]
    assert [x for pair in seen for x in pair] == pytest.approx([x for pair in expected for x in pair])
    assert value == pytest.approx(0.01)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 3), max_size=40), st.floats(0, 1))
def test_adaptive_coefficient_stays_in_its_bounds_and_resumes_from_its_value(
    entropies: list[float], start: float
) -> None:
    rule = AdaptiveCoefficient(target=1.0, step=0.3)
    values = [start]
    for entropy in entropies:
        values.append(rule.next(values[-1], entropy))
    assert all(0 <= v <= 1 for v in values)
    half = len(entropies) // 2
    again = values[half]
    for entropy in entropies[half:]:
        again = AdaptiveCoefficient(target=1.0, step=0.3).next(again, entropy)
    assert again == values[-1]


ONE = f64(-1.0)


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        (lambda: token_covariance(f64(NAN), ONE), DataError, r"logp\[0\]"),
        (lambda: token_covariance(ONE, f64(1, 2)), DataError, "advantages"),
        (lambda: token_covariance(ONE, ONE, valid=ONE), DataError, "valid"),
        (lambda: token_covariance(ONE, ONE, valid=flags(1, 1)), DataError, "valid"),
        (lambda: clip_cov(ONE, ONE, flags(1, 1), seed=0), DataError, "clipped"),
        (lambda: clip_cov(ONE, ONE, flags(1), seed=0, fraction=0.0), ConfigError, "fraction"),
        (lambda: clip_cov(ONE, ONE, flags(1), seed=0, low=5.0, high=5.0), ConfigError, "low and high"),
        (lambda: kl_cov(ONE, ONE, fraction=1.5), ConfigError, "fraction"),
        (lambda: kl_cov_penalty(ONE, ONE, ONE, ONE), DataError, "chosen"),
        (lambda: kl_cov_penalty(ONE, ONE, f64(1, 1), flags(1)), DataError, "weights"),
        (lambda: kl_cov_penalty(ONE, ONE, ONE, flags(1), coefficient=-1.0), ConfigError, "coefficient"),
        (lambda: top_entropy(ONE, share=0.0), ConfigError, "share"),
        (lambda: top_entropy(f64(math.inf)), DataError, "entropy"),
        (lambda: entropy_bonus(ONE, ONE, NAN), ConfigError, "coefficient"),
        (lambda: entropy_bonus(ONE, f64(1, 1), 0.1), DataError, "weights"),
        (lambda: AdaptiveCoefficient(target=-1.0), ConfigError, "target"),
        (lambda: AdaptiveCoefficient(target=1.0, step=NAN), ConfigError, "step"),
        (lambda: AdaptiveCoefficient(target=1.0, low=1.0, high=0.0), ConfigError, "low and high"),
        (lambda: AdaptiveCoefficient(target=1.0).next(2.0, 0.5), DataError, "value is 2.0"),
        (lambda: AdaptiveCoefficient(target=1.0).active(0.5, NAN), DataError, "entropy is nan"),
    ],
)
def test_bad_input_is_refused_by_name(call: Callable[[], object], error: type[Exception], field: str) -> None:
    with pytest.raises(error, match=field):
        call()

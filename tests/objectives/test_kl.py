"""KL estimators: published numbers, the formula in a loop, and the gradient each name promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.core.errors import ConfigError, DataError
from surefoot.objectives import KlKind, kl_estimate

LOOP: dict[KlKind, Callable[[float], float]] = {
    "k1": lambda x: x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(-x) + x - 1,
    "k3_k2grad": lambda x: math.exp(-x) + x - 1,
}
SLOPE: dict[KlKind, Callable[[float], float]] = {
    "k1": lambda x: 1.0,
    "k2": lambda x: x,
    "k3": lambda x: 1 - math.exp(-x),
    "k3_k2grad": lambda x: x,
}
log_probs = st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=20)


def pair(values: list[tuple[float, float]], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    new, ref = torch.tensor(values, dtype=dtype).unbind(1)
    return new.clone().requires_grad_(), ref


def test_published_numbers() -> None:
    new, ref = pair([(math.log(p), math.log(q)) for p, q in [(0.5, 0.4), (0.2, 0.3), (0.9, 0.9)]])
    expected: dict[KlKind, list[float]] = {
        "k1": [0.223144, -0.405465, 0],
        "k2": [0.024897, 0.082201, 0],
        "k3": [0.023144, 0.094535, 0],
        "k3_k2grad": [0.023144, 0.094535, 0],
    }
    for kind, values in expected.items():
        assert kl_estimate(new, ref, kind).tolist() == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("kind", get_args(KlKind))
@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=log_probs)
def test_value_and_gradient_equal_the_formula_in_a_loop(
    kind: KlKind, values: list[tuple[float, float]]
) -> None:
    new, ref = pair(values)
    got = kl_estimate(new, ref, kind)
    (slope,) = torch.autograd.grad(got.sum(), new)
    assert got.tolist() == pytest.approx([LOOP[kind](p - q) for p, q in values], abs=1e-9, rel=1e-9)
    assert slope.tolist() == pytest.approx([SLOPE[kind](p - q) for p, q in values], abs=1e-9, rel=1e-9)
    single = kl_estimate(*pair(values, torch.float32), kind).tolist()
    assert single == pytest.approx([LOOP[kind](p - q) for p, q in values], abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradient_agrees_with_finite_differences(kind: KlKind) -> None:
    new, ref = pair([(-0.3, -0.9), (-2.0, -0.4), (-1.0, -1.0)])
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind), (new,))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(values=st.lists(st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0)), min_size=1, max_size=8))
def test_k3_is_never_negative_and_stays_finite_far_from_the_reference(
    values: list[tuple[float, float]],
) -> None:
    got = kl_estimate(*pair(values), "k3")
    assert bool((got >= 0).all() and torch.isfinite(got).all())


def test_the_reference_gets_no_gradient() -> None:
    new, ref = pair([(-0.3, -0.9)])
    ref = ref.clone().requires_grad_()
    kl_estimate(new, ref, "k2").sum().backward()
    assert ref.grad is None and new.grad is not None


def test_bad_input_names_the_field() -> None:
    good = torch.zeros(2)
    with pytest.raises(DataError, match=r"logp_ref\[1\] is nan"):
        kl_estimate(good, torch.tensor([0.0, float("nan")]))
    with pytest.raises(DataError, match=r"logp\[0\] is -inf"):
        kl_estimate(torch.tensor([-math.inf, 0.0]), good)
    with pytest.raises(DataError, match="logp_ref must have shape"):
        kl_estimate(good, torch.zeros(3))
    with pytest.raises(ConfigError, match="kind is 'k4'"):
        kl_estimate(good, good, "k4")

"""Advantages against published numbers, public bug cases and slow loops written from the formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot import credit
from surefoot.core.errors import ConfigError, DataError

EPS = 1e-6
NAN = float("nan")


@dataclass(frozen=True)
class Batch:
    returns: list[float]
    group: list[int]
    valid: list[bool]
    lengths: list[int]

    def members(self, group: int) -> list[int]:
        return [i for i, g in enumerate(self.group) if g == group and self.valid[i]]

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        held = [r if v else NAN for r, v in zip(self.returns, self.valid, strict=True)]
        return (
            torch.tensor(held, dtype=dtype),
            torch.tensor(self.group),
            torch.tensor(self.valid),
            torch.tensor(self.lengths),
        )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    n = draw(st.integers(1, 24))
    # Multiples of 1/8 are exact in float32 too, and often tie.
    value = st.integers(-16, 16).map(lambda k: k / 8)
    column = [
        draw(st.lists(s, min_size=n, max_size=n))
        for s in (value, st.integers(-3, 3), st.sampled_from([True, True, True, False]), st.integers(0, 7))
    ]
    return Batch(*column)


def per_group(batch: Batch, rule: Callable[[list[float], list[int]], list[float]]) -> list[float]:
    """Apply ``rule(returns, lengths)`` to the valid members of each group with two different returns."""
    out = [0.0] * len(batch.returns)
    for g in set(batch.group):
        rows = batch.members(g)
        values = [batch.returns[i] for i in rows]
        if len(set(values)) < 2:
            continue
        for i, a in zip(rows, rule(values, [batch.lengths[i] for i in rows]), strict=True):
            out[i] = a
    return out


def grpo_loop(values: list[float], _: list[int]) -> list[float]:
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(v - mean) / (std + EPS) for v in values]


def dr_grpo_loop(values: list[float], _: list[int]) -> list[float]:
    return [v - statistics.fmean(values) for v in values]


def rloo_loop(values: list[float], _: list[int]) -> list[float]:
    return [v - statistics.fmean(values[:i] + values[i + 1 :]) for i, v in enumerate(values)]


def rloo_normalised_loop(values: list[float], _: list[int]) -> list[float]:
    out: list[float] = []
    for i, v in enumerate(values):
        others = values[:i] + values[i + 1 :]
        a = v - statistics.fmean(others)
        if len(set(others)) > 1:
            a /= statistics.stdev(others) + EPS
        limit = math.sqrt(len(values))
        out.append(max(-limit, min(limit, a)))
    return out


def opo_loop(values: list[float], lengths: list[int]) -> list[float]:
    if sum(lengths) == 0:
        return [0.0] * len(values)
    baseline = sum(n * v for n, v in zip(lengths, values, strict=True)) / sum(lengths)
    return [v - baseline for v in values]


def pass_at_k_loop(values: list[float], _: list[int]) -> list[float]:
    first, second = sorted(values, reverse=True)[:2]
    return [first - second if v == first else 0.0 for v in values]


def whiten_loop(values: list[float], batch: Batch) -> list[float]:
    rows = [i for i, v in enumerate(batch.valid) if v]
    tokens = [values[i] for i in rows for _ in range(batch.lengths[i])]
    if len(set(tokens)) < 2:
        return [0.0] * len(values)
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    return [(values[i] - mean) / (std + EPS) if batch.valid[i] else 0.0 for i in range(len(values))]


def batch_std_loop(batch: Batch) -> list[float]:
    scored = [r for r, v in zip(batch.returns, batch.valid, strict=True) if v]
    std = statistics.stdev(scored) if len(scored) > 1 else 0.0
    return [a / (std + EPS) for a in per_group(batch, dr_grpo_loop)]


def pp_baseline_loop(batch: Batch) -> list[float]:
    centred = per_group(batch, dr_grpo_loop)
    white = whiten_loop(centred, batch)
    live = per_group(batch, lambda values, _: [1.0] * len(values))
    return [a * alive for a, alive in zip(white, live, strict=True)]


Fast = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
CASES: dict[str, tuple[Fast, Callable[[Batch], list[float]]]] = {
    "grpo": (lambda r, g, v, n: credit.group_relative(r, g, valid=v), lambda b: per_group(b, grpo_loop)),
    "dr_grpo": (
        lambda r, g, v, n: credit.group_relative(r, g, valid=v, scale="none"),
        lambda b: per_group(b, dr_grpo_loop),
    ),
    "batch": (lambda r, g, v, n: credit.group_relative(r, g, valid=v, scale="batch"), batch_std_loop),
    "rloo": (lambda r, g, v, n: credit.leave_one_out(r, g, valid=v), lambda b: per_group(b, rloo_loop)),
    "rloo_normalised": (
        lambda r, g, v, n: credit.leave_one_out(r, g, valid=v, normalise=True),
        lambda b: per_group(b, rloo_normalised_loop),
    ),
    "reinforce": (
        lambda r, g, v, n: credit.reinforce(r, g, valid=v, baseline=0.3),
        lambda b: [r - 0.3 if v else 0.0 for r, v in zip(b.returns, b.valid, strict=True)],
    ),
    "reinforce_pp": (
        lambda r, g, v, n: credit.reinforce_pp(r, n, valid=v),
        lambda b: whiten_loop(b.returns, b),
    ),
    "reinforce_pp_baseline": (
        lambda r, g, v, n: credit.reinforce_pp_baseline(r, g, n, valid=v),
        pp_baseline_loop,
    ),
    "opo": (lambda r, g, v, n: credit.opo(r, g, n, valid=v), lambda b: per_group(b, opo_loop)),
    "pass_at_k": (
        lambda r, g, v, n: credit.pass_at_k(r, g, valid=v),
        lambda b: per_group(b, pass_at_k_loop),
    ),
}
GROUPED = [name for name in CASES if name not in ("reinforce", "reinforce_pp")]


def close(actual: Tensor, expected: list[float], tolerance: float) -> None:
    assert actual.dtype == torch.float64
    torch.testing.assert_close(
        actual, torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches())
def test_vectorised_equals_the_formula_in_a_loop(name: str, batch: Batch) -> None:
    fast, slow = CASES[name]
    close(fast(*batch.tensors()), slow(batch), 1e-9)
    close(fast(*batch.tensors(torch.float32)), slow(batch), 1e-5)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(batch=batches(), seed=st.integers(0, 2**20))
def test_order_of_samples_is_irrelevant_bit_for_bit(name: str, batch: Batch, seed: int) -> None:
    fast, _ = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    returns, group, valid, lengths = batch.tensors()
    # A random shift per group makes sums round and keeps ties.
    returns = returns + torch.rand(7, generator=generator, dtype=torch.float64)[group + 3]
    p = torch.randperm(len(returns), generator=generator)
    straight = fast(returns, group, valid, lengths)
    assert torch.equal(fast(returns[p], group[p], valid[p], lengths[p]), straight[p])


def test_opo_is_order_free_when_returns_tie_and_lengths_differ() -> None:
    generator = torch.Generator().manual_seed(0)
    returns = torch.full((20,), 0.1, dtype=torch.float64)
    returns[0] = -0.7
    group, lengths = torch.zeros(20, dtype=torch.int64), torch.randint(1, 999, (20,), generator=generator)
    straight = credit.opo(returns, group, lengths)
    for _ in range(20):
        p = torch.randperm(20, generator=generator)
        assert torch.equal(credit.opo(returns[p], group, lengths[p]), straight[p])


@pytest.mark.parametrize("name", GROUPED)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(batch=batches())
def test_dead_and_invalid_members_get_exactly_zero_and_nothing_is_nan(name: str, batch: Batch) -> None:
    advantages = CASES[name][0](*batch.tensors()).tolist()
    live = per_group(batch, lambda values, _: [1.0] * len(values))
    assert all(math.isfinite(a) for a in advantages)
    assert all(a == 0.0 for a, alive in zip(advantages, live, strict=True) if not alive)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches(), seed=st.integers(0, 2**20))
def test_gdpo_equals_the_formula_in_a_loop(batch: Batch, seed: int) -> None:
    n, weights = len(batch.returns), [1.0, 0.5]
    other = torch.randint(-8, 8, (n,), generator=torch.Generator().manual_seed(seed)).double() / 8
    returns, group, valid, _ = batch.tensors()
    total = [0.0] * n
    for column, weight in zip((batch.returns, other.tolist()), weights, strict=True):
        part = per_group(Batch(column, batch.group, batch.valid, batch.lengths), grpo_loop)
        total = [t + weight * a for t, a in zip(total, part, strict=True)]
    scored = [t for t, v in zip(total, batch.valid, strict=True) if v]
    mean = statistics.fmean(scored) if scored else 0.0
    std = statistics.stdev(scored) if len(scored) > 1 else 0.0
    expected = [(t - mean) / (std + EPS) if v else 0.0 for t, v in zip(total, batch.valid, strict=True)]
    components = torch.stack([returns, other], 1)
    close(credit.gdpo(components, group, weights, valid=valid), expected, 1e-9)
    close(credit.gdpo(components.float(), group, torch.tensor(weights), valid=valid), expected, 1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches())
def test_group_statistics_count_each_group_once(batch: Batch) -> None:
    returns, group, valid, _ = batch.tensors()
    stats = credit.group_statistics(returns, group, valid)
    sizes = {g: [batch.returns[i] for i in batch.members(g)] for g in set(batch.group)}
    assert stats.groups == len(sizes)
    assert stats.empty == sum(not v for v in sizes.values())
    assert stats.singletons == sum(len(v) == 1 for v in sizes.values())
    assert stats.constant == sum(len(v) > 1 and len(set(v)) == 1 for v in sizes.values())
    assert stats.live == sum(len(set(v)) > 1 for v in sizes.values())
    assert stats.unscored == batch.valid.count(False)


def test_published_numbers_of_grpo_dr_grpo_and_rloo() -> None:
    r, g = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0]), torch.zeros(8, dtype=torch.int64)
    for got, (one, zero) in [
        (credit.group_relative(r, g), (1.207612, -0.724567)),
        (credit.group_relative(r, g, eps=1e-4), (1.207381, -0.724429)),
        (credit.group_relative(r, g, scale="none"), (0.625, -0.375)),
        (credit.leave_one_out(r, g), (0.714286, -0.428571)),
    ]:
        close(got, [one if x else zero for x in r.tolist()], 1e-6)


@pytest.mark.parametrize(
    ("values", "raw"), [([0.0] + [0.95] * 7, -0.95), ([1.0] + [0.35] * 7, 0.65), ([1.0, 0, 0, 0], 1.0)]
)
@pytest.mark.parametrize("normalise", [False, True])
def test_E4_leave_one_out_stays_bounded_when_the_others_are_equal(
    values: list[float], raw: float, normalise: bool
) -> None:
    got = credit.leave_one_out(
        torch.tensor(values), torch.zeros(len(values), dtype=torch.int64), normalise=normalise
    )
    assert float(got[0]) == pytest.approx(raw, abs=1e-6)
    assert float(got.abs().max()) <= math.sqrt(len(values))


def test_E4_leave_one_out_stays_bounded_when_the_others_are_almost_equal() -> None:
    values = torch.tensor([0.0, 0.95, 0.95, 0.95 + 1e-15], dtype=torch.float64)
    got = credit.leave_one_out(values, torch.zeros(4, dtype=torch.int64), normalise=True, eps=1e-12)
    assert float(got[0]) == -2.0
    assert bool((got.abs() <= 2.0).all())


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(("value", "size"), [(0.7, 8), (0.9, 8), (0.35, 7)])
def test_E5_constant_group_of_0_7_float32_gives_exact_zero(name: str, value: float, size: int) -> None:
    # A second, live group keeps the batch statistics away from zero.
    returns = torch.tensor([value] * size + [0.0, 1.0, 2.0], dtype=torch.float32)
    group = torch.tensor([0] * size + [1, 1, 1])
    got = CASES[name][0](returns, group, torch.ones_like(group, dtype=torch.bool), group + 2)
    assert got[:size].tolist() == [0.0] * size
    assert float(got[size:].abs().max()) > 0


def test_E5_batch_without_a_valid_member_gives_zeros_and_is_counted() -> None:
    returns, group = torch.full((4,), NAN), torch.tensor([0, 0, 1, 1])
    none, lengths = torch.zeros(4, dtype=torch.bool), torch.tensor([3, 1, 0, 2])
    for fast, _ in CASES.values():
        assert fast(returns, group, none, lengths).tolist() == [0.0] * 4
    stats = credit.group_statistics(returns, group, none)
    assert (stats.groups, stats.empty, stats.live, stats.unscored) == (2, 2, 0, 4)


def test_E6_uneven_groups_keep_their_own_statistics() -> None:
    returns = torch.tensor([1.0, 2, 3, 6, 5, 5, 5, 0, 0, 1, 1])
    group = torch.tensor([7] * 4 + [-2] * 3 + [9] * 4)
    got = credit.group_relative(returns, group, scale="none")
    assert got.tolist() == [-2, -1, 0, 3, 0, 0, 0, -0.5, -0.5, 0.5, 0.5]
    assert credit.group_relative(returns, group)[4:7].tolist() == [0.0] * 3


def test_E6_singleton_beside_a_group_gets_zero_and_is_counted() -> None:
    returns, group = torch.tensor([1.0, 5.0, 3.0]), torch.tensor([0, 1, 0])
    assert credit.group_relative(returns, group, scale="none").tolist() == [-1.0, 0.0, 1.0]
    assert credit.group_statistics(returns, group) == credit.GroupStats(2, 0, 1, 0, 0)


@pytest.mark.parametrize("name", GROUPED)
def test_E7_the_only_survivor_of_a_group_gets_zero_on_every_path(name: str) -> None:
    returns, group = torch.tensor([1.0, NAN, NAN]), torch.zeros(3, dtype=torch.int64)
    valid, lengths = torch.tensor([True, False, False]), torch.tensor([2, 2, 2])
    assert CASES[name][0](returns, group, valid, lengths).tolist() == [0.0] * 3


def test_E8_an_invalid_member_influences_nobody() -> None:
    group, valid = torch.zeros(4, dtype=torch.int64), torch.tensor([True, False, True, True])
    for held in (1.0, NAN, math.inf, -1e300):
        returns = torch.tensor([1.0, held, 0, 0], dtype=torch.float64)
        got = credit.group_relative(returns, group, valid=valid, scale="none")
        close(got, [2 / 3, 0.0, -1 / 3, -1 / 3], 1e-12)


def test_remax_takes_off_the_greedy_return() -> None:
    r, greedy = torch.tensor([1.0, NAN, 0.5]), torch.tensor([0.25, NAN, 0.5])
    got = credit.remax(r, greedy, valid=torch.tensor([True, False, True]))
    assert got.tolist() == [0.75, 0.0, 0.0]


def test_pass_at_k_divides_the_lead_by_the_group_std() -> None:
    r, g = torch.tensor([3.0, 1.0, 2.0, 4.0, 4.0]), torch.tensor([0, 0, 0, 1, 1])
    close(credit.pass_at_k(r, g, scale="std"), [1 / (1 + EPS), 0, 0, 0, 0], 1e-12)


def test_gdpo_keeps_a_wide_component_from_drowning_a_narrow_one() -> None:
    g = torch.zeros(4, dtype=torch.int64)
    narrow = torch.tensor([[0.0, 5], [1, 5], [0, 5], [1, 5]])
    wide = narrow * torch.tensor([1000.0, 1.0])
    torch.testing.assert_close(
        credit.gdpo(narrow, g, [1, 1]), credit.gdpo(wide, g, [1, 1]), rtol=1e-5, atol=0
    )


def test_large_offset_does_not_cost_precision() -> None:
    base = torch.tensor([0.25, 0.5, 1.0, 0.125], dtype=torch.float64)
    g = torch.zeros(4, dtype=torch.int64)
    torch.testing.assert_close(
        credit.group_relative(base + 2.0**24, g), credit.group_relative(base, g), rtol=1e-12, atol=1e-12
    )


def test_extreme_returns_give_finite_advantages() -> None:
    g = torch.tensor([0, 0, 0, 1, 1])
    r = torch.tensor([1e140, -1e140, 0.0, 0.0, 1e-320], dtype=torch.float64)
    for fast, _ in CASES.values():
        assert bool(torch.isfinite(fast(r, g, torch.ones(5, dtype=torch.bool), g + 1)).all())


def test_to_tokens_repeats_each_advantage_on_its_tokens() -> None:
    got = credit.to_tokens(torch.tensor([1.0, -2.0, 0.5]), torch.tensor([2, 0, 1]))
    assert got.tolist() == [1.0, 1.0, 0.5]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, 1e200])
def test_non_finite_return_of_a_valid_member_is_named(bad: float) -> None:
    r, g = torch.tensor([0.0, bad, 1.0], dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    for fast, _ in CASES.values():
        with pytest.raises(DataError, match=r"returns\[1\]"):
            fast(r, g, torch.ones(3, dtype=torch.bool), g)
    with pytest.raises(DataError, match=r"greedy_returns\[1\]"):
        credit.remax(torch.zeros(3), r)
    with pytest.raises(DataError, match=r"components\[:, 1\]\[1\]"):
        credit.gdpo(torch.stack([torch.zeros(3).double(), r], 1), g, [1, 1])


def test_wrong_shapes_and_types_name_the_field() -> None:
    r, g = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
    cases: list[tuple[str, Callable[[], object]]] = [
        ("returns is empty", lambda: credit.group_relative(torch.tensor([]), torch.tensor([]).long())),
        ("returns must be a float", lambda: credit.group_relative(g, g)),
        ("returns must be a float", lambda: credit.group_relative(r[:, None], g)),
        ("group must have shape", lambda: credit.group_relative(r, torch.tensor([0]))),
        ("group must hold integers", lambda: credit.group_relative(r, r)),
        ("valid must be", lambda: credit.leave_one_out(r, g, valid=g)),
        ("valid must be", lambda: credit.leave_one_out(r, g, valid=torch.tensor([True]))),
        ("lengths must have shape", lambda: credit.opo(r, g, torch.tensor([1]))),
        ("lengths must hold integers", lambda: credit.reinforce_pp(r, r)),
        (r"lengths\[1\] is -1", lambda: credit.to_tokens(r, torch.tensor([1, -1]))),
        ("advantages must have shape", lambda: credit.to_tokens(r[None], g)),
        ("greedy_returns must have shape", lambda: credit.remax(r, torch.tensor([0.0]))),
        ("components must have shape", lambda: credit.gdpo(r, g, [1.0])),
        ("weights must be 1 finite", lambda: credit.gdpo(r[:, None], g, [1.0, 2.0])),
        ("weights must be 1 finite", lambda: credit.gdpo(r[:, None], g, [NAN])),
    ]
    for message, call in cases:
        with pytest.raises(DataError, match=message):
            call()


def test_impossible_options_name_the_setting() -> None:
    r, g = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
    cases: list[tuple[str, Callable[[], object]]] = [
        ("did you mean 'std'", lambda: credit.group_relative(r, g, scale="sdt")),
        ("scale is 'batch'", lambda: credit.pass_at_k(r, g, scale="batch")),
        ("eps must be a positive", lambda: credit.group_relative(r, g, eps=0.0)),
        ("baseline must be a finite", lambda: credit.reinforce(r, g, baseline=NAN)),
    ]
    for message, call in cases:
        with pytest.raises(ConfigError, match=message):
            call()

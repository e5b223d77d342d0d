"""Preference losses: published numbers, slow loops from the formulas, gradients, splits, extremes, pairs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.core.errors import ConfigError, DataError
from surefoot.objectives.preference import (
    CERTAINTY_LIMIT,
    PREFERENCES,
    Pairs,
    Preferences,
    Side,
    Unpaired,
    bradley_terry,
    dpo,
    excess_discounts,
    ipo,
    kto,
    kto_baseline,
    log_one_minus_exp,
    orpo,
    pairs_by_rule,
    pairs_by_score,
    preference,
    rpo,
    simpo,
    trajectory_sums,
    turn_discounts,
)

NAN = float("nan")


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def published() -> Pairs:
    return Pairs(f64(-10), f64(-14), f64(1), f64(-11), f64(-13), ints(5), ints(7))


def of_means(chosen: float, rejected: float) -> Pairs:
    return Pairs(f64(chosen), f64(rejected), f64(1), chosen_length=ints(1), rejected_length=ints(1))


@st.composite
def pair_batches(draw: st.DrawFn) -> Pairs:
    n = draw(st.integers(1, 6))

    def floats(low: float, high: float) -> Tensor:
        # Multiples of 1/64 are the same number in float32 and in float64.
        value = st.integers(round(low * 64), round(high * 64)).map(lambda k: k / 64)
        return f64(*draw(st.lists(value, min_size=n, max_size=n)))

    def counts() -> Tensor:
        return ints(*draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)))

    logps = [floats(-30, -0.05) for _ in range(4)]
    return Pairs(logps[0], logps[1], floats(0, 2), logps[2], logps[3], counts(), counts())


@st.composite
def unpaired_batches(draw: st.DrawFn) -> Unpaired:
    pairs = draw(pair_batches())
    n = pairs.chosen.numel()
    good = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    z = draw(st.integers(0, 64)) / 64
    return Unpaired(pairs.chosen, pairs.rejected, good, pairs.weights, f64(z)[0])


# -------------------- published numbers


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda: dpo(published()), 0.598139),
        (lambda: ipo(published()), 21.688980),
        (lambda: ipo(published(), form="sum"), 9.0),
        (lambda: simpo(published()), 1.600413),
        (lambda: orpo(published()), 2.0 + 0.069315),
        (lambda: orpo(of_means(-2, -3)), 2.0 + 0.028875),
        (lambda: simpo(of_means(-2, -3)), 0.281150),
        (lambda: kto(Unpaired(f64(-10), f64(-11), ints(1) > 0, f64(1), f64(0.2)[0])), 0.480011),
        (lambda: kto(Unpaired(f64(-14), f64(-13), ints(1) < 0, f64(1), f64(0.2)[0])), 0.470036),
        (lambda: bradley_terry(f64(0.005 + 0.025), f64(-0.015 - 0.01), weights=f64(1)), 0.666025),
        (lambda: bradley_terry(f64(0.015), f64(-0.0125), weights=f64(1)), 0.679492),
    ],
)
def test_losses_give_the_published_numbers(loss: Callable[[], Any], expected: float) -> None:
    assert float(loss().loss) == pytest.approx(expected, abs=5e-7)


# -------------------- slow loops


def neg_log_sigmoid(x: float) -> float:
    return math.log1p(math.exp(-x)) if x > 0 else -x + math.log1p(math.exp(x))


def pair_loop(name: str, p: dict[str, float], s: dict[str, Any]) -> float:
    """One pair's loss. ``p``: logps a, b of chosen and rejected, references u, v, lengths m, n."""
    mean_a, mean_b = p["a"] / p["m"], p["b"] / p["n"]
    ratio = (p["a"] - p["u"], p["b"] - p["v"])
    if s.get("form", "sum") == "mean":
        ratio = (ratio[0] / p["m"], ratio[1] / p["n"])
    d = ratio[0] - ratio[1]
    if name == "dpo":
        e = s["label_smoothing"]
        return (1 - e) * neg_log_sigmoid(s["beta"] * d) + e * neg_log_sigmoid(-s["beta"] * d)
    if name == "ipo":
        return (d - 1 / (2 * s["beta"])) ** 2
    if name in ("dmpo", "ld_dpo"):
        return neg_log_sigmoid(s["beta"] * d)
    if name == "hinge":
        return max(0.0, 1 - s["beta"] * d)
    if name == "rpo":
        return neg_log_sigmoid(s["beta"] * d) - s["alpha"] * mean_a
    if name == "cpo":
        return neg_log_sigmoid(s["beta"] * (p["a"] - p["b"])) - s["alpha"] * mean_a
    if name == "simpo":
        return neg_log_sigmoid(s["beta"] * (mean_a - mean_b) - s["gamma"])
    assert name == "orpo"
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (mean_a, mean_b)]
    return -mean_a + s["odds_weight"] * neg_log_sigmoid(math.log(odds[0] / odds[1]))


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {}),
    ("dpo", {"beta": 0.5, "form": "mean", "label_smoothing": 0.2}),
    ("ipo", {}),
    ("ipo", {"beta": 0.3, "form": "sum"}),
    ("hinge", {"beta": 0.2}),
    ("dmpo", {"beta": 0.3, "gamma": 0.5}),
    ("ld_dpo", {"beta": 0.3, "alpha": 0.2}),
    ("rpo", {"alpha": 0.5}),
    ("cpo", {"beta": 0.3, "alpha": 2.0}),
    ("simpo", {"gamma": 0.5}),
    ("orpo", {"odds_weight": 0.7}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
@settings(max_examples=30, deadline=None)
@given(pairs=pair_batches())
def test_paired_losses_equal_a_slow_loop(name: str, settings: dict[str, Any], pairs: Pairs) -> None:
    row = preference(name, settings)
    names = ("chosen", "rejected", "chosen_ref", "rejected_ref", "chosen_length", "rejected_length")
    columns = [getattr(pairs, field).tolist() for field in names]
    expected = sum(
        w * pair_loop(name, dict(zip("abuvmn", values, strict=True)), dict(row.settings))
        for w, *values in zip(pairs.weights.tolist(), *columns, strict=True)
    )
    assert float(row(pairs).loss) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(unpaired_batches())
def test_kto_equals_a_slow_loop(rows: Unpaired) -> None:
    result = kto(rows, beta=0.4, desirable=1.5, undesirable=0.5)
    loss = right = chosen = rejected = 0.0
    columns = (rows.logp, rows.ref, rows.desirable, rows.weights)
    for logp, ref, good, w in zip(*(c.tolist() for c in columns), strict=True):
        ahead = logp - ref - float(rows.z)
        side = ahead if good else -ahead
        loss += w * (1.5 if good else 0.5) * (1 - 1 / (1 + math.exp(-0.4 * side)))
        right += w * (1.0 if side > 0 else 0.5 if side == 0 else 0.0)
        chosen += w * 0.4 * (logp - ref) if good else 0.0
        rejected += w * 0.4 * (logp - ref) if not good else 0.0
    got = [float(x) for x in (result.loss, result.accuracy, result.chosen, result.rejected)]
    assert got == pytest.approx([loss, right, chosen, rejected], rel=1e-9, abs=1e-9)
    assert float(result.chosen_weight + result.rejected_weight) == pytest.approx(float(result.weight))


@settings(max_examples=60, deadline=None)
@given(pair_batches())
def test_metrics_are_weighted_sums_of_rewards_and_right_orders(pairs: Pairs) -> None:
    result = rpo(pairs, beta=0.5)
    assert pairs.chosen_ref is not None and pairs.rejected_ref is not None
    assert pairs.chosen_length is not None
    w, good = pairs.weights, 0.5 * (pairs.chosen - pairs.chosen_ref)
    bad = 0.5 * (pairs.rejected - pairs.rejected_ref)
    right = [1.0 if d > 0 else 0.5 if d == 0 else 0.0 for d in (good - bad).tolist()]
    expected = [(w * good).sum(), (w * bad).sum(), (w * f64(*right)).sum(), w.sum()]
    got = [result.chosen, result.rejected, result.accuracy, result.weight]
    assert torch.allclose(torch.stack(got), torch.stack(expected), atol=1e-12)
    assert float(result.nll) == pytest.approx(float(-(w * pairs.chosen / pairs.chosen_length).sum()))
    assert not result.accuracy.requires_grad


@settings(max_examples=60, deadline=None)
@given(pair_batches(), st.integers(0, 63))
def test_bradley_terry_equals_a_slow_loop(pairs: Pairs, lead: int) -> None:
    result = bradley_terry(pairs.chosen, pairs.rejected, weights=pairs.weights, margin=lead / 64)
    columns = (pairs.chosen, pairs.rejected, pairs.weights)
    expected = sum(
        w * neg_log_sigmoid(a - b - lead / 64) for a, b, w in zip(*(c.tolist() for c in columns), strict=True)
    )
    assert float(result.loss) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    margins = torch.full_like(pairs.chosen, lead / 64)
    each = bradley_terry(pairs.chosen, pairs.rejected, weights=pairs.weights, margin=margins)
    assert torch.equal(each.loss, result.loss)


# -------------------- gradients, splits, extremes


def random_pairs(n: int = 5) -> Pairs:
    g = torch.Generator().manual_seed(0)
    logps = [-20 * torch.rand(n, generator=g, dtype=torch.float64) - 0.5 for _ in range(4)]
    weights = torch.rand(n, generator=g, dtype=torch.float64)
    lengths = [torch.randint(1, 9, (n,), generator=g) for _ in range(2)]
    return Pairs(logps[0], logps[1], weights, logps[2], logps[3], *lengths)


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_gradients_equal_finite_differences(name: str, settings: dict[str, Any]) -> None:
    pairs, row = random_pairs(), preference(name, settings)

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        return row(replace(pairs, chosen=chosen, rejected=rejected)).loss

    inputs = [x.clone().requires_grad_() for x in (pairs.chosen, pairs.rejected)]
    assert torch.autograd.gradcheck(loss, inputs)


def test_kto_and_bradley_terry_gradients_equal_finite_differences() -> None:
    pairs = random_pairs()
    good = torch.tensor([True, False, True, True, False])
    inputs = [x.clone().requires_grad_() for x in (pairs.chosen, pairs.rejected)]

    def kto_loss(logp: Tensor) -> Tensor:
        return kto(Unpaired(logp, pairs.rejected, good, pairs.weights, f64(0.3)[0])).loss

    def reward_loss(a: Tensor, b: Tensor) -> Tensor:
        return bradley_terry(a, b, weights=pairs.weights, margin=0.2).loss

    assert torch.autograd.gradcheck(kto_loss, inputs[:1])
    assert torch.autograd.gradcheck(reward_loss, inputs)


def test_no_gradient_reaches_the_reference_or_the_baseline() -> None:
    pairs = random_pairs(2)
    refs = [torch.tensor([-3.0, -4.0], requires_grad=True) for _ in range(2)]
    z = torch.tensor(0.5, requires_grad=True)
    logp = torch.tensor([-3.0, -4.0], requires_grad=True)
    dpo(replace(pairs, chosen=logp, chosen_ref=refs[0], rejected_ref=refs[1])).loss.backward()
    kto(Unpaired(logp, refs[0], ints(1, 0) > 0, pairs.weights, z)).loss.backward()
    assert all(ref.grad is None for ref in refs)
    assert z.grad is None
    assert logp.grad is not None
    assert not kto_baseline(logp, refs[0]).requires_grad


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
@settings(max_examples=30, deadline=None)
@given(pairs=pair_batches(), cut=st.integers(0, 6))
def test_a_split_batch_adds_up_to_the_whole(
    name: str, settings: dict[str, Any], pairs: Pairs, cut: int
) -> None:
    row = preference(name, settings)

    def part(rows: slice) -> Pairs:
        fields = {k: getattr(pairs, k)[rows] for k in Pairs.__dataclass_fields__}
        return Pairs(**fields)

    whole, first, second = row(pairs), row(part(slice(0, cut))), row(part(slice(cut, None)))
    for metric in ("loss", "accuracy", "chosen", "rejected", "nll", "weight"):
        parts = float(getattr(first, metric) + getattr(second, metric))
        assert parts == pytest.approx(float(getattr(whole, metric)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", list(PREFERENCES))
@pytest.mark.parametrize("chosen", [0.0, -1e-12, -1e-3, -700.0, -1e6, -3e38])
@pytest.mark.parametrize("rejected", [0.0, -1e-12, -700.0, -3e38])
def test_losses_and_gradients_stay_finite_at_the_extremes(name: str, chosen: float, rejected: float) -> None:
    a, b = (torch.tensor([x], requires_grad=True) for x in (chosen, rejected))
    one, length = torch.ones(1), ints(3)
    if PREFERENCES[name].paired:
        data: Preferences = Pairs(a, b, one, -one, -one, length, length)
    else:
        both = torch.cat([a, b])
        data = Unpaired(both, -torch.ones(2), ints(1, 0) > 0, torch.ones(2), torch.tensor(0.0))
    result = PREFERENCES[name](data)
    result.loss.backward()
    assert a.grad is not None and b.grad is not None
    finite = [result.loss, result.chosen, result.rejected, a.grad, b.grad]
    assert all(bool(torch.isfinite(x).all()) for x in finite)


def test_orpo_still_pushes_a_certain_rejected_trajectory_down() -> None:
    rejected = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    orpo(Pairs(f64(-2), rejected, f64(1), chosen_length=ints(1), rejected_length=ints(1))).loss.backward()
    assert rejected.grad is not None
    assert float(rejected.grad) > 1e5


@settings(max_examples=60, deadline=None)
@given(st.floats(-50, -CERTAINTY_LIMIT))
def test_log_one_minus_exp_keeps_its_digits(x: float) -> None:
    with localcontext(prec=50):
        expected = float((1 - Decimal(x).exp()).ln())
    assert float(log_one_minus_exp(f64(x))) == pytest.approx(expected, rel=1e-12, abs=1e-300)
    assert float(log_one_minus_exp(f64(-800.0))) == 0.0


def test_weights_carry_the_gradient_and_zero_silences_a_pair() -> None:
    chosen = f64(-1, -2).requires_grad_()
    pairs = replace(random_pairs(2), chosen=chosen, weights=f64(0, 0.5))
    dpo(pairs).loss.backward()
    assert chosen.grad is not None
    assert float(chosen.grad[0]) == 0
    assert float(chosen.grad[1]) < 0


@settings(max_examples=60, deadline=None)
@given(pair_batches())
def test_kto_baseline_is_the_mean_log_ratio_but_never_negative(pairs: Pairs) -> None:
    mean = sum((pairs.chosen - pairs.rejected).tolist()) / pairs.chosen.numel()
    assert float(kto_baseline(pairs.chosen, pairs.rejected)) == pytest.approx(max(0.0, mean), abs=1e-12)


# -------------------- the table


def test_every_row_runs_with_its_defaults_and_names_a_source() -> None:
    for name, row in PREFERENCES.items():
        assert row.name == name
        assert "arXiv" in row.source
        assert row.settings
        assert preference(name, {}).settings == row.settings


def test_rows_say_truly_whether_they_need_a_reference() -> None:
    pairs = replace(random_pairs(), chosen_ref=None, rejected_ref=None)
    for row in PREFERENCES.values():
        if row.paired and row.reference:
            with pytest.raises(DataError, match="chosen_ref is missing"):
                row(pairs)
        elif row.paired:
            assert bool(torch.isfinite(row(pairs).loss))


def test_a_setting_the_loss_ignores_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"settings.gama has no effect on loss 'simpo'; did you mean 'gamma'"
    ):
        preference("simpo", {"gama": 1.0})
    with pytest.raises(ConfigError, match=r"settings.gamma has no effect on loss 'dpo'"):
        preference("dpo", {"gamma": 1.0})
    with pytest.raises(ConfigError, match="loss is 'dop'; did you mean"):
        preference("dop", {})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dpo", {"beta": 0.0}, "beta"),
        ("dpo", {"beta": "big"}, "beta"),
        ("dpo", {"beta": True}, "beta"),
        ("dpo", {"form": 1}, "form"),
        ("dpo", {"form": "total"}, "form is 'total'"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing"),
        ("ipo", {"beta": NAN}, "beta"),
        ("hinge", {"beta": -1.0}, "beta"),
        ("dmpo", {"gamma": 0.0}, "gamma"),
        ("dmpo", {"gamma": 1.5}, "gamma"),
        ("ld_dpo", {"alpha": 1.5}, "alpha"),
        ("rpo", {"alpha": -1.0}, "alpha"),
        ("cpo", {"alpha": -1.0}, "alpha"),
        ("simpo", {"gamma": -1.0}, "gamma"),
        ("orpo", {"odds_weight": -1.0}, "odds_weight"),
        ("kto", {"desirable": 0.0}, "desirable"),
        ("kto", {"undesirable": 0.0}, "undesirable"),
    ],
)
def test_a_bad_setting_is_refused_before_any_data(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preference(name, settings)


def test_rows_weigh_the_tokens_of_a_side_by_their_own_settings() -> None:
    side = Side(ints(5, 2), ints(3, 4), ints(1, 4, 2), ints(2, 1))
    assert preference("dpo", {}).token_weights(side) is None
    early = preference("dmpo", {"gamma": 0.5}).token_weights(side)
    assert early is not None
    late = 0.5 * (1 - 0.5) / (1 - 0.25)
    assert early.tolist() == pytest.approx([1.0, late, late, late, late, 1.0, 1.0])
    shared = preference("ld_dpo", {"alpha": 0.25}).token_weights(side)
    assert shared is not None and shared.tolist() == [1, 1, 1, 0.25, 0.25, 1, 1]


def test_a_row_refuses_data_of_the_other_kind() -> None:
    rows = Unpaired(f64(-1), f64(-1), ints(1) > 0, f64(1), f64(0)[0])
    with pytest.raises(DataError, match="'dpo' takes Pairs, got Unpaired"):
        PREFERENCES["dpo"](rows)
    with pytest.raises(DataError, match="'kto' takes Unpaired, got Pairs"):
        PREFERENCES["kto"](random_pairs())


# -------------------- pairs by rule


@st.composite
def members(draw: st.DrawFn) -> list[tuple[bool, int, int, int, bool]]:
    """correct, calls, length, group, valid of each row."""
    row = st.tuples(
        st.booleans(),
        st.integers(0, 2),
        st.integers(1, 3),
        st.integers(-1, 1),
        st.sampled_from([True, True, False]),
    )
    return draw(st.lists(row, min_size=1, max_size=14))


def columns(rows: list[tuple[bool, int, int, int, bool]]) -> list[Tensor]:
    return [torch.tensor(column) for column in zip(*rows, strict=True)]


@settings(max_examples=60, deadline=None)
@given(members(), st.none() | st.integers(1, 3), st.integers(0, 3))
def test_pairs_follow_the_rule_and_the_limit(
    rows: list[tuple[bool, int, int, int, bool]], limit: int | None, seed: int
) -> None:
    chosen, rejected = pairs_by_rule(*columns(rows), limit=limit, seed=seed)
    got = list(zip(chosen.tolist(), rejected.tolist(), strict=True))
    allowed: dict[int, set[tuple[int, int]]] = {}
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            better = a[0] and (not b[0] or a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]))
            if a[4] and b[4] and a[3] == b[3] and better:
                allowed.setdefault(a[3], set()).add((i, j))
    assert len(got) == len(set(got))
    for group, pairs in allowed.items():
        mine = {pair for pair in got if rows[pair[0]][3] == group}
        assert mine <= pairs
        assert len(mine) == (len(pairs) if limit is None else min(limit, len(pairs)))
    assert {rows[i][3] for i, _ in got} == set(allowed)


def test_pairs_put_correctness_before_calls_and_calls_before_length() -> None:
    correct = torch.tensor([True, True, True, False, False])
    chosen, rejected = pairs_by_rule(correct, ints(2, 1, 1, 0, 1), ints(1, 9, 5, 1, 1), ints(*[0] * 5))
    got = set(zip(chosen.tolist(), rejected.tolist(), strict=True))
    assert got == {(1, 0), (2, 0), (2, 1), (0, 3), (1, 3), (2, 3), (0, 4), (1, 4), (2, 4)}


def test_wrong_members_alone_make_no_pair() -> None:
    wrong = torch.zeros(3, dtype=torch.bool)
    chosen, rejected = pairs_by_rule(wrong, ints(0, 1, 2), ints(1, 2, 3), ints(0, 0, 0))
    assert chosen.numel() == rejected.numel() == 0
    assert chosen.dtype == torch.int64


def test_pairs_under_a_limit_are_drawn_by_the_seed_and_do_not_depend_on_other_groups() -> None:
    correct = torch.tensor([True] * 4 + [False] * 4)
    group = ints(*[3] * 8)
    draws = {
        tuple(map(tuple, torch.stack(pairs_by_rule(correct, group, group, group, limit=2, seed=s)).tolist()))
        for s in range(12)
    }
    assert len(draws) > 6
    alone = pairs_by_rule(correct, group, group, group, limit=2, seed=5)
    more = [torch.cat([x, x]) for x in (correct, group, group)]
    both = pairs_by_rule(*more, torch.cat([group, group + 1]), limit=2, seed=5)
    assert [t[:2].tolist() for t in both] == [t.tolist() for t in alone]


# -------------------- token weights


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=5), st.sampled_from([0.3, 0.9, 1])
)
def test_turn_discounts_equal_a_slow_loop(turns: list[list[int]], gamma: float) -> None:
    expected: list[float] = []
    for lengths in turns:
        total = len(lengths)
        for t, length in enumerate(lengths):
            share = (total - t) / total
            if gamma < 1:
                share = gamma**t * (1 - gamma ** (total - t)) / (1 - gamma**total)
            expected += [share] * length
    flat = ints(*[length for lengths in turns for length in lengths])
    got = turn_discounts(flat, ints(*map(len, turns)), gamma=gamma)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(expected, rel=1e-9)


def test_turn_discounts_tend_to_their_limits() -> None:
    near = turn_discounts(ints(1, 1, 1, 1), ints(4), gamma=1 - 1e-12)
    assert near.tolist() == pytest.approx([1.0, 0.75, 0.5, 0.25], abs=1e-9)
    early = turn_discounts(ints(1, 1, 1), ints(3), gamma=1e-9)
    assert early.tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-8)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5))
def test_excess_discounts_start_where_the_shorter_of_the_pair_ends(lengths: list[tuple[int, int]]) -> None:
    expected = [1.0 if t < other else 0.25 for own, other in lengths for t in range(own)]
    own, other = (ints(*column) for column in zip(*lengths, strict=True))
    assert excess_discounts(own, other, alpha=0.25).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 99))
def test_trajectory_sums_equal_a_slow_loop_and_carry_the_gradient(lengths: list[int], seed: int) -> None:
    rng = random.Random(seed)
    logp = [-rng.random() for _ in range(sum(lengths))]
    weights = [rng.random() for _ in logp]
    tokens = f64(*logp).requires_grad_()
    got = trajectory_sums(tokens, ints(*lengths), f64(*weights))
    expected, at = [], 0
    for n in lengths:
        expected.append(sum(a * w for a, w in zip(logp[at : at + n], weights[at : at + n], strict=True)))
        at += n
    assert got.tolist() == pytest.approx(expected, abs=1e-12)
    got.sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.tolist() == weights


# -------------------- bad input


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        (lambda: replace(published(), chosen=ints(1)), DataError, "chosen"),
        (lambda: replace(published(), chosen=f64(NAN)), DataError, r"chosen\[0\]"),
        (lambda: replace(published(), rejected=f64(-1, -2)), DataError, "rejected"),
        (lambda: replace(published(), rejected=f64(2)), DataError, r"rejected\[0\] is 2.0; a log-prob"),
        (lambda: replace(published(), chosen_ref=f64(-math.inf)), DataError, "chosen_ref"),
        (lambda: replace(published(), weights=f64(-1)), DataError, "weights"),
        (lambda: replace(published(), chosen_length=ints(0)), DataError, "chosen_length holds 0"),
        (lambda: replace(published(), rejected_length=f64(1)), DataError, "rejected_length"),
        (lambda: simpo(replace(published(), rejected_length=None)), DataError, "rejected_length is missing"),
        (lambda: Unpaired(f64(-1), f64(-1), ints(1), f64(1), f64(0)[0]), DataError, "desirable"),
        (lambda: Unpaired(f64(-1), f64(-1), ints(1) > 0, f64(1), f64(0)), DataError, "z must be"),
        (lambda: Unpaired(f64(-1), f64(-1), ints(1) > 0, f64(1), f64(-1)[0]), DataError, "z must be"),
        (lambda: kto_baseline(f64(), f64()), DataError, "logp is empty"),
        (lambda: bradley_terry(f64(1), f64(1, 2), weights=f64(1)), DataError, "reward_rejected"),
        (lambda: bradley_terry(f64(1), f64(1), weights=f64(1), margin=NAN), ConfigError, "margin"),
        (lambda: bradley_terry(f64(1), f64(1), weights=f64(1), margin=f64(1, 2)), DataError, "margin"),
        (lambda: pairs_by_rule(ints(1), ints(1), ints(1), ints(1)), DataError, "correct"),
        (lambda: pairs_by_rule(ints(1) > 0, ints(-1), ints(1), ints(1)), DataError, "calls holds -1"),
        (lambda: pairs_by_rule(ints(1) > 0, ints(1), f64(1), ints(1)), DataError, "lengths"),
        (lambda: pairs_by_rule(ints(1) > 0, ints(1), ints(1), ints(1, 2)), DataError, "group"),
        (lambda: pairs_by_rule(ints(1) > 0, *[ints(1)] * 4), DataError, "valid"),
        (lambda: pairs_by_rule(ints(1) > 0, *[ints(1)] * 3, limit=0), ConfigError, "limit"),
        (lambda: trajectory_sums(f64(-1, -1), ints(1)), DataError, "lengths add up to 1"),
        (lambda: trajectory_sums(f64(-1), ints(1), f64(1, 1)), DataError, "weights"),
        (lambda: turn_discounts(ints(1), ints(2), gamma=0.5), DataError, "turns add up to 2"),
        (lambda: turn_discounts(ints(1), ints(1), gamma=0.0), ConfigError, "gamma"),
        (lambda: excess_discounts(ints(1), ints(1), alpha=1.5), ConfigError, "alpha"),
        (lambda: excess_discounts(ints(1), ints(1, 2), alpha=0.5), DataError, "other_lengths"),
    ],
)
def test_bad_input_is_refused_by_name(call: Callable[[], object], error: type[Exception], field: str) -> None:
    with pytest.raises(error, match=field):
        call()


def test_pairs_by_score_take_the_better_half_before_the_worse() -> None:
    score = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.2, 7.0, 7.0, 1.0, 2.0])
    group = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2])
    chosen, rejected = pairs_by_score(score, group, limit=100)
    found = set(zip(chosen.tolist(), rejected.tolist(), strict=True))
    assert found == {(1, 0), (1, 4), (2, 0), (2, 4), (8, 7)}, "row 3 is the middle of five; a tie is no pair"
    same = ["a", "b", "b", "c", "b", "d", "e", "f", "f"]
    chosen, rejected = pairs_by_score(score, group, limit=100, content=same)
    assert set(zip(chosen.tolist(), rejected.tolist(), strict=True)) == {(1, 0), (2, 0)}


def test_pairs_by_score_are_drawn_by_seed_and_bounded_in_each_group() -> None:
    score = torch.arange(32, dtype=torch.float64)
    group = torch.arange(32) // 16
    runs = [pairs_by_score(score, group, limit=4, seed=seed) for seed in (0, 0, 1)]
    rows = [list(zip(a.tolist(), b.tolist(), strict=True)) for a, b in runs]
    assert rows[0] == rows[1] != rows[2]
    assert [sum(group[a] == g for a, _ in rows[0]) for g in (0, 1)] == [4, 4]
    assert all(a % 16 >= 8 > b % 16 and a // 16 == b // 16 for a, b in rows[0])


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("limit must be at least 1", lambda s, g: pairs_by_score(s, g, limit=0)),
        ("content has 1 entries for 2", lambda s, g: pairs_by_score(s, g, limit=1, content=["x"])),
        ("group must", lambda s, g: pairs_by_score(s, s, limit=1)),
    ],
)
def test_pairs_by_score_names_what_is_wrong(words: str, call: Any) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        call(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]))


def test_bradley_terry_is_a_slow_loop_with_margins_and_a_centre() -> None:
    good, bad, lead = f64(2.0, -1.5, 40.0), f64(0.5, 0.25, -40.0), f64(0.0, 1.0, 3.0)
    weights = f64(0.5, 0.25, 0.25)
    rows = zip(good.tolist(), bad.tolist(), lead.tolist(), weights.tolist(), strict=True)
    wanted = sum(w * (math.log1p(math.exp(-(a - b - m))) + 0.1 * (a + b) ** 2) for a, b, m, w in rows)
    found = bradley_terry(good, bad, weights=weights, margin=lead, center=0.1)
    assert float(found.loss) == pytest.approx(wanted, rel=1e-12)
    assert float(found.accuracy) == 0.75


def test_bradley_terry_gradients_are_those_of_finite_differences() -> None:
    good, bad = f64(2.0, -1.5, 0.0).requires_grad_(), f64(0.5, 0.25, 0.0).requires_grad_()

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return bradley_terry(a, b, weights=f64(0.5, 0.25, 0.25), margin=0.5, center=0.1).loss

    assert torch.autograd.gradcheck(loss, (good, bad))  # pyright: ignore[reportUnknownMemberType]


def test_bradley_terry_names_a_bad_centre() -> None:
    with pytest.raises(ConfigError, match="center must be a number >= 0, got -1"):
        bradley_terry(f64(1), f64(0), weights=f64(1), center=-1.0)

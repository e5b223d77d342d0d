"""Group filters against published tables, slow loops written from the rules, and changes of the row order."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, DataError, SignalError
from surefoot.credit.filters import (
    Refill,
    RocMode,
    duplicate_live,
    dynamic_sampling,
    format_penalty,
    overlong_filter,
    resample_on_correct,
    soft_overlong,
    tool_penalty,
    variance_filter,
)

NAN = float("nan")


@dataclass(frozen=True)
class Batch:
    returns: list[float]
    group: list[int]
    valid: list[bool]
    penalty: list[float]

    @property
    def n(self) -> int:
        return len(self.returns)

    def rows(self) -> dict[int, list[int]]:
        """Valid rows of each group, groups by id, empty ones included."""
        return {
            g: [i for i in range(self.n) if self.group[i] == g and self.valid[i]]
            for g in sorted(set(self.group))
        }

    def live(self) -> list[int]:
        return [g for g, rows in self.rows().items() if len({self.returns[i] for i in rows}) > 1]

    def held(self) -> list[float]:
        return [r if v else NAN for r, v in zip(self.returns, self.valid, strict=True)]

    def take(self, order: list[int]) -> Batch:
        return Batch(
            [self.returns[i] for i in order],
            [self.group[i] for i in order],
            [self.valid[i] for i in order],
            [self.penalty[i] for i in order],
        )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    n = draw(st.integers(1, 30))
    columns = (
        st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5]),
        st.integers(-2, 2),
        st.sampled_from([True, True, True, False]),
        st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0, 1.75]),
    )
    return Batch(*(draw(st.lists(column, min_size=n, max_size=n)) for column in columns))


def interleaved(batch: Batch, seed: int) -> list[int]:
    """A new row order that keeps the order inside each group."""
    rng = random.Random(seed)
    places = list(range(batch.n))
    rng.shuffle(places)
    queues = {g: [i for i in range(batch.n) if batch.group[i] == g] for g in set(batch.group)}
    return [queues[batch.group[i]].pop(0) for i in places]


def kept_rows(keep: np.ndarray) -> list[int]:
    return [int(i) for i in np.flatnonzero(keep)]


# -------------------- dynamic sampling


@settings(max_examples=60, deadline=None)
@given(batches(), st.none() | st.integers(1, 4))
def test_dynamic_sampling_keeps_the_valid_members_of_the_first_live_groups(
    batch: Batch, limit: int | None
) -> None:
    result = dynamic_sampling(batch.held(), batch.group, batch.valid, limit=limit)
    live = batch.live()[:limit]
    expected = sorted(i for g in live for i in batch.rows()[g])
    assert kept_rows(result.keep) == expected
    report = result.report
    assert (report.groups, report.kept_groups) == (len(set(batch.group)), len(live))
    assert (report.members, report.kept) == (sum(batch.valid), len(expected))


@settings(max_examples=60, deadline=None)
@given(batches(), st.randoms())
def test_group_filters_do_not_depend_on_the_row_order(batch: Batch, rng: random.Random) -> None:
    order = list(range(batch.n))
    rng.shuffle(order)
    moved = batch.take(order)
    for rule in (dynamic_sampling, variance_filter):
        keep = rule(batch.held(), batch.group, batch.valid).keep
        assert list(rule(moved.held(), moved.group, moved.valid).keep) == [keep[i] for i in order]


def test_equal_float32_returns_are_a_dead_group() -> None:
    returns = np.array([0.7] * 8 + [0.9] * 8 + [0.35] * 7, dtype=np.float32)
    group = [0] * 8 + [1] * 8 + [2] * 7
    result = dynamic_sampling(returns, group)
    assert not result.keep.any()
    assert result.report.kept_groups == 0


# -------------------- refill


def test_refill_asks_for_what_is_missing_over_the_share_that_was_live() -> None:
    state = Refill(target=8, max_rounds=10, per_round=20)
    assert state.request == 20
    state = state.add(sampled=8, live=2)
    assert state.request == 20  # 6 missing at a share of 1/4 would be 24
    state = state.add(sampled=20, live=5)
    assert (state.live, state.sampled, state.rounds) == (7, 28, 2)
    assert state.request == 4
    state = state.add(sampled=4, live=2)
    assert state.done
    assert state.request == 0


def test_refill_ends_with_a_smaller_batch_when_the_rounds_are_used_up() -> None:
    state = Refill(target=4, max_rounds=2).add(sampled=4, live=1).add(sampled=4, live=0)
    assert state.done
    assert state.live == 1


def test_refill_raises_when_no_group_was_live_in_any_round() -> None:
    state = Refill(target=4, max_rounds=3).add(sampled=4, live=0).add(sampled=4, live=0)
    with pytest.raises(SignalError, match="0 of 12 groups sampled in 3 rounds"):
        state.add(sampled=4, live=0)


def test_refill_raises_below_its_minimum() -> None:
    with pytest.raises(SignalError, match=r"1 of 4 groups .* at least 2 must"):
        Refill(target=4, max_rounds=1, minimum=2).add(sampled=4, live=1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**20))
def test_refill_never_asks_for_more_rounds_than_its_bound(target: int, rounds: int, seed: int) -> None:
    rng, state, asked = random.Random(seed), Refill(target=target, max_rounds=rounds), 0
    try:
        while not state.done:
            assert 1 <= state.request <= target
            sampled = state.request
            asked += 1
            state = state.add(sampled=sampled, live=rng.randint(0, sampled))
    except SignalError:
        assert asked == rounds
    assert asked <= rounds


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Refill(target=0, max_rounds=1), "target"),
        (lambda: Refill(target=1, max_rounds=0), "max_rounds"),
        (lambda: Refill(target=1, max_rounds=1, per_round=0), "per_round"),
        (lambda: Refill(target=1, max_rounds=1, minimum=2), "minimum"),
    ],
)
def test_refill_refuses_a_number_out_of_range(make: Callable[[], Refill], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


def test_refill_refuses_impossible_counts_and_rounds_after_the_end() -> None:
    with pytest.raises(DataError, match="live is 3"):
        Refill(target=4, max_rounds=2).add(sampled=2, live=3)
    with pytest.raises(DataError, match="sampled = 0"):
        Refill(target=4, max_rounds=2).add(sampled=0, live=0)
    with pytest.raises(DataError, match="done after 1 rounds"):
        Refill(target=2, max_rounds=2).add(sampled=2, live=2).add(sampled=2, live=1)


# -------------------- duplication


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 5))
def test_duplicate_live_fills_each_dead_place_with_a_whole_live_group(batch: Batch, seed: int) -> None:
    result = duplicate_live(batch.held(), batch.group, batch.valid, seed=seed)
    live, rows = batch.live(), batch.rows()
    places = {int(g): [int(r) for r in result.rows[result.group == g]] for g in result.group}
    if not live:
        assert result.rows.size == result.group.size == 0
        return
    assert sorted(places) == list(range(len(rows)))
    assert [places[i] for i in range(len(live))] == [rows[g] for g in live]
    uses = Counter(tuple(place) for place in places.values())
    assert set(uses) == {tuple(rows[g]) for g in live}
    assert max(uses.values()) - min(uses.values()) <= 1
    assert result.report.kept == result.rows.size
    assert result.report.kept_groups == len(live)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 5))
def test_duplicate_live_does_not_depend_on_how_groups_are_interleaved(batch: Batch, seed: int) -> None:
    order = interleaved(batch, seed)
    moved = batch.take(order)
    plain = duplicate_live(batch.held(), batch.group, batch.valid, seed=3)
    again = duplicate_live(moved.held(), moved.group, moved.valid, seed=3)
    assert [order[i] for i in again.rows] == list(plain.rows)
    assert list(again.group) == list(plain.group)


def test_duplicate_live_draws_its_sources_by_the_seed() -> None:
    returns = [0.0, 1.0] * 6 + [0.0, 0.0] * 3
    group = [i // 2 for i in range(18)]
    draws = {tuple(duplicate_live(returns, group, seed=seed).rows) for seed in range(20)}
    assert len(draws) > 10
    assert tuple(duplicate_live(returns, group, seed=7).rows) in draws


# -------------------- variance


def variance_loop(batch: Batch, share: float) -> list[int]:
    spread = {
        g: statistics.stdev(batch.returns[i] for i in rows) if len(rows) > 1 else 0.0
        for g, rows in batch.rows().items()
        if rows
    }
    count = max(1, math.floor(share * len(set(batch.group)) + 1e-9))
    best = sorted(spread, key=lambda g: (-spread[g], g))[:count]
    return sorted(i for g in best for i in batch.rows()[g])


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0]))
def test_variance_filter_keeps_the_share_of_groups_with_the_largest_std(batch: Batch, share: float) -> None:
    result = variance_filter(batch.held(), batch.group, batch.valid, share=share)
    assert kept_rows(result.keep) == variance_loop(batch, share)


def test_variance_filter_breaks_ties_by_group_id_not_by_row_order() -> None:
    returns = [5.0, 7.0, 0.0, 2.0, 1.0, 3.0, 0.0, 0.0]
    group = [9, 9, 4, 4, 7, 7, 1, 1]
    assert kept_rows(variance_filter(returns, group, share=0.25).keep) == [2, 3]
    assert kept_rows(variance_filter(returns, group, share=0.5).keep) == [2, 3, 4, 5]


def test_variance_filter_keeps_the_whole_number_a_share_stands_for() -> None:
    group = [i // 2 for i in range(200)]
    result = variance_filter([0.0, 1.0] * 100, group, share=0.29)
    assert result.report.kept_groups == 29


# -------------------- resample on correct


def test_resample_on_correct_gives_the_published_example() -> None:
    returns = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    penalty = [0.5, 0.0, 0.0, 0.25, 0.9, 1.0, 0.1, 0.5]
    result = resample_on_correct(returns, [0] * 8, penalty, keep=4)
    assert kept_rows(result.keep) == [1, 2, 3, 4]
    assert (result.report.positives, result.report.negatives) == (2, 2)


@pytest.mark.parametrize(
    ("positives", "negatives", "kept"),
    [(31, 1, (15, 1)), (27, 5, (14, 2)), (1, 31, (1, 15)), (3, 29, (2, 14))],
)
def test_resample_on_correct_splits_32_into_16_as_published(
    positives: int, negatives: int, kept: tuple[int, int]
) -> None:
    returns = [1.0] * positives + [0.0] * negatives
    report = resample_on_correct(returns, [0] * 32, [0.0] * 32, keep=16).report
    assert (report.positives, report.negatives) == kept


def release_loop(returns: list[float], penalty: list[float], keep: int, least: int) -> list[int]:
    """The rule of the release; its two roundings add up because the counts and ``keep`` are even."""
    bad = [i for i, r in enumerate(returns) if r <= 0]
    good = sorted((i for i, r in enumerate(returns) if r > 0), key=lambda i: penalty[i])
    n_bad, n_good = round(len(bad) * keep / len(returns)), round(len(good) * keep / len(returns))
    if n_bad <= min(least, len(bad)):
        n_bad = min(least, len(bad))
        n_good = keep - n_bad
    if n_good <= min(least, len(good)):
        n_good = min(least, len(good))
        n_bad = keep - n_good
    return sorted(good[:n_good] + bad[:n_bad])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([4, 6, 8, 16]), st.randoms())
def test_resample_on_correct_ranks_as_the_release_does(keep: int, rng: random.Random) -> None:
    share = rng.random()
    returns = [float(rng.random() < share) for _ in range(2 * keep)]
    penalty = [rng.choice([0.0, 0.25, 0.5, 1.0]) for _ in returns]
    assume(len(set(returns)) == 2)
    result = resample_on_correct(returns, [0] * len(returns), penalty, keep=keep)
    assert kept_rows(result.keep) == release_loop(returns, penalty, keep, 2)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(2, 6), st.sampled_from(get_args(RocMode)), st.integers(1, 2))
def test_resample_on_correct_keeps_just_the_asked_number_and_the_minima(
    batch: Batch, keep: int, mode: RocMode, least: int
) -> None:
    assume(2 * least <= keep)
    result = resample_on_correct(
        batch.held(),
        batch.group,
        batch.penalty,
        batch.valid,
        keep=keep,
        mode=mode,
        minimum=(least, least),
        seed=None if mode == "rank" else 1,
    )
    live, rows = batch.live(), batch.rows()
    whole = [g for g in live if len(rows[g]) >= keep]
    assert result.report.equal == len(rows) - len(live)
    assert result.report.short == len(live) - len(whole)
    assert result.report.kept == len(whole) * keep == result.report.positives + result.report.negatives
    for g in whole:
        kept = [i for i in rows[g] if result.keep[i]]
        assert len(kept) == keep
        for right in (True, False):
            there = [i for i in rows[g] if (batch.returns[i] > 0) == right]
            assert sum((batch.returns[i] > 0) == right for i in kept) >= min(least, len(there))
    assert not result.keep[[i for i in range(batch.n) if batch.group[i] not in whole]].any()


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 9), st.sampled_from([None, 4]))
def test_resample_on_correct_does_not_depend_on_how_groups_are_interleaved(
    batch: Batch, shuffle: int, seed: int | None
) -> None:
    order = interleaved(batch, shuffle)
    moved = batch.take(order)

    def kept(b: Batch) -> list[int]:
        mode: RocMode = "rank" if seed is None else "sample"
        args = (b.held(), b.group, b.penalty, b.valid)
        return kept_rows(resample_on_correct(*args, keep=4, mode=mode, seed=seed).keep)

    assert sorted(order[i] for i in kept(moved)) == kept(batch)


def test_resample_on_correct_samples_positives_by_the_inverse_penalty() -> None:
    groups = 3000
    returns = [1.0, 1.0, 1.0, 0.0] * groups
    penalty = [1.0, 2.0, 4.0, 0.0] * groups
    group = [i // 4 for i in range(4 * groups)]
    keep = resample_on_correct(
        returns, group, penalty, keep=2, mode="sample", minimum=(1, 1), seed=0
    ).keep.reshape(groups, 4)
    assert keep[:, 3].all()
    assert keep[:, :3].mean(0) == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.03)


def test_resample_on_correct_samples_faultless_positives_first_and_negatives_evenly() -> None:
    groups = 2000
    returns = [1.0] * 4 + [0.0] * 4
    keep = resample_on_correct(
        returns * groups,
        [i // 8 for i in range(8 * groups)],
        [0.5, 0.0, 0.1, 0.0, 0.0, 1.0, 0.0, 1.0] * groups,
        keep=4,
        mode="sample",
        seed=0,
    ).keep.reshape(groups, 8)
    assert keep[:, [1, 3]].all()
    assert keep[:, 4:].mean(0) == pytest.approx([0.5] * 4, abs=0.04)


def test_resample_on_correct_keeps_generation_order_among_equal_penalties() -> None:
    returns = [1.0] * 6 + [0.0] * 2
    result = resample_on_correct(returns, [0] * 8, [0.5] * 8, keep=4)
    assert kept_rows(result.keep) == [0, 1, 6, 7]


# -------------------- penalties


def test_tool_penalty_is_the_share_of_failed_results_and_half_without_any() -> None:
    assert list(tool_penalty([0, 1, 4, 0], [0, 4, 4, 3])) == [0.5, 0.25, 1.0, 0.0]


def test_format_penalty_wants_exactly_one_answer() -> None:
    answers, turns = [0, 1, 2, 3, 9, 1, 1], [3, 3, 4, 4, 2, 0, 2]
    malformed = [False] * 6 + [True]
    expected = [1.0, 0.0, 0.25, 0.5, 1.0, 1.0, 1.0]
    assert list(format_penalty(answers, turns, malformed=malformed)) == expected
    both = tool_penalty([1] * 7, [2] * 7, answers=answers, turns=turns, malformed=malformed)
    assert list(both) == [0.5 + p for p in expected]


def test_soft_overlong_gives_the_published_penalties() -> None:
    assert list(soft_overlong([16384, 18432, 20480, 20481])) == [0.0, -0.5, -1.0, -1.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=20), st.integers(1, 150), st.data())
def test_soft_overlong_equals_its_formula(lengths: list[int], longest: int, data: st.DataObject) -> None:
    cache = data.draw(st.integers(1, longest))
    expected = [
        0.0 if n <= longest - cache else -1.0 if n > longest else -(n - (longest - cache)) / cache
        for n in lengths
    ]
    got = soft_overlong(np.array(lengths, dtype=np.int64), max_length=longest, cache=cache)
    assert list(got) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(batches())
def test_overlong_filter_keeps_valid_members_that_were_not_cut(batch: Batch) -> None:
    cut = [p > 0.5 for p in batch.penalty]
    result = overlong_filter(cut, batch.group, batch.valid)
    expected = [i for i in range(batch.n) if batch.valid[i] and not cut[i]]
    assert kept_rows(result.keep) == expected
    assert result.report.kept_groups == len({batch.group[i] for i in expected})


# -------------------- bad input

RETURNS, GROUP, PENALTY = [0.0, 1.0, 1.0, 0.0], [0, 0, 0, 0], [0.0] * 4


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        (lambda: dynamic_sampling([[1.0]], GROUP), DataError, "returns"),
        (lambda: dynamic_sampling(np.zeros(0), np.zeros(0, int)), DataError, "batch is empty"),
        (lambda: dynamic_sampling([0.0, 1.0, NAN, 0.0], GROUP), DataError, r"returns\[2\]"),
        (lambda: dynamic_sampling(RETURNS, [0.0] * 4), DataError, "group"),
        (lambda: dynamic_sampling(RETURNS, [0] * 3), DataError, "group"),
        (lambda: dynamic_sampling(RETURNS, GROUP, [1] * 4), DataError, "valid"),
        (lambda: dynamic_sampling(RETURNS, GROUP, [True]), DataError, "valid"),
        (lambda: dynamic_sampling(RETURNS, GROUP, limit=0), ConfigError, "limit"),
        (lambda: variance_filter(RETURNS, GROUP, share=0.0), ConfigError, "share"),
        (lambda: variance_filter(RETURNS, GROUP, share=NAN), ConfigError, "share"),
        (lambda: resample_on_correct(RETURNS, GROUP, [0.0] * 3, keep=4), DataError, "penalty"),
        (lambda: resample_on_correct(RETURNS, GROUP, [-1.0] * 4, keep=4), DataError, r"penalty\[0\]"),
        (lambda: resample_on_correct(RETURNS, GROUP, PENALTY, keep=1), ConfigError, "keep"),
        (lambda: resample_on_correct(RETURNS, GROUP, PENALTY, keep=3), ConfigError, "minimum"),
        (lambda: resample_on_correct(RETURNS, GROUP, PENALTY, keep=4, seed=1), ConfigError, "seed"),
        (lambda: resample_on_correct(RETURNS, GROUP, PENALTY, keep=4, mode="sample"), ConfigError, "seed"),
        (
            lambda: resample_on_correct(RETURNS, GROUP, PENALTY, keep=4, mode="ranks"),
            ConfigError,
            "mode is 'ranks'; did you mean 'rank'",
        ),
        (lambda: tool_penalty([2], [1]), DataError, r"failed\[0\] is 2"),
        (lambda: tool_penalty([-1], [1]), DataError, r"failed\[0\]"),
        (lambda: tool_penalty([1], [1, 2]), DataError, "results"),
        (lambda: tool_penalty([1], [1], answers=[1]), DataError, "turns"),
        (lambda: tool_penalty([1], [1], answers=[1, 1], turns=[1, 1]), DataError, "answers"),
        (lambda: format_penalty([1], [1, 1]), DataError, "turns"),
        (lambda: format_penalty([1], [1], malformed=[0]), DataError, "malformed"),
        (lambda: overlong_filter([0, 1], [0, 0]), DataError, "truncated"),
        (lambda: soft_overlong([1.5]), DataError, "lengths"),
        (lambda: soft_overlong([1], max_length=4, cache=5), ConfigError, "cache"),
        (lambda: soft_overlong([1], max_length=0), ConfigError, "max_length"),
    ],
)
def test_bad_input_is_refused_by_name(call: Callable[[], object], error: type[Exception], field: str) -> None:
    with pytest.raises(error, match=field):
        call()

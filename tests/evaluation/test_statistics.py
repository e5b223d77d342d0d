"""Estimators against golden numbers, exact enumeration and simulated coverage."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import DataError
from surefoot.evaluation.statistics import (
    clustered_se,
    holm,
    mean_interval,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    required_tasks,
    spl,
    standard_error,
    student_quantile,
    wilson,
)

SCORES = [1, 1, 0, 1, 0, 0, 1, 1, 1, 0]
CLUSTERS = list("aaabbbcccc")


# -------------------- pass@k and pass^k


@pytest.mark.parametrize(("k", "expected"), [(1, 0.375), (2, 0.642857), (4, 0.928571), (8, 1.0)])
def test_pass_at_k_golden(k: int, expected: float) -> None:
    assert pass_at_k([3], 8, k)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("k", "expected"), [(1, 0.375), (2, 0.107143), (3, 0.017857), (4, 0.0)])
def test_pass_hat_k_golden(k: int, expected: float) -> None:
    assert pass_hat_k([3], 8, k)[0] == pytest.approx(expected, abs=1e-6)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_k_equals_enumeration_of_all_subsets(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k([c], [n], k)[0] == pytest.approx(np.mean([max(s) for s in subsets]), abs=1e-12)
    assert pass_hat_k([c], [n], k)[0] == pytest.approx(np.mean([min(s) for s in subsets]), abs=1e-12)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_at_least_pass_at_1_which_is_at_least_pass_hat_k(case: tuple[int, int, int]) -> None:
    n, c, k = case
    one = pass_at_k([c], n, 1)[0]
    assert one == pytest.approx(c / n)
    assert 1 + 1e-12 >= pass_at_k([c], n, k)[0] >= one - 1e-12
    assert -1e-12 <= pass_hat_k([c], n, k)[0] <= one + 1e-12


def test_pass_at_k_takes_a_sample_count_for_each_task() -> None:
    assert pass_at_k([1, 0, 4], [2, 3, 4], 2) == pytest.approx([1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("successes", "samples", "k", "words"),
    [
        ([1, 1], [4, 2], 3, r"samples\[1\] is 2"),
        ([5], 4, 1, r"successes\[0\] is 5"),
        ([-1], 4, 1, r"successes\[0\] is -1"),
        ([1], 4, 0, "k is 0"),
        ([0.5], 4, 1, "successes has dtype"),
        ([1, 2], [4, 4, 4], 1, "samples has shape"),
    ],
)
def test_pass_at_k_refuses_impossible_counts(
    successes: list[int], samples: int | list[int], k: int, words: str
) -> None:
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(DataError, match=words):
            estimator(successes, samples, k)


# -------------------- standard errors


def test_standard_errors_golden() -> None:
    assert standard_error(SCORES) == pytest.approx(0.163299, abs=1e-6)
    assert clustered_se(SCORES, CLUSTERS) == pytest.approx(0.101980, abs=1e-6)
    corrected = 0.101980 * math.sqrt(3 / 2)
    assert clustered_se(SCORES, CLUSTERS, small_sample=True) == pytest.approx(corrected, abs=1e-6)


@given(st.permutations(range(len(SCORES))))
def test_clustered_se_ignores_row_order(order: list[int]) -> None:
    shuffled = clustered_se([SCORES[i] for i in order], [CLUSTERS[i] for i in order])
    assert shuffled == pytest.approx(clustered_se(SCORES, CLUSTERS), abs=1e-12)


def test_clustered_se_of_singletons_is_the_naive_one_up_to_bessel() -> None:
    n = len(SCORES)
    assert clustered_se(SCORES, range(n)) == pytest.approx(standard_error(SCORES) * math.sqrt((n - 1) / n))


def test_duplicating_every_score_inside_its_cluster_leaves_the_clustered_se() -> None:
    assert clustered_se(SCORES * 5, CLUSTERS * 5) == pytest.approx(clustered_se(SCORES, CLUSTERS))
    assert standard_error(SCORES * 5) < standard_error(SCORES) / 2


def test_standard_errors_need_two_units() -> None:
    with pytest.raises(DataError, match="scores has 1 value"):
        standard_error([1.0])
    with pytest.raises(DataError, match="clusters holds 1 distinct label"):
        clustered_se([1.0, 0.0], ["a", "a"])


# -------------------- quantiles and Wilson


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
)
def test_student_quantile_matches_the_table(freedom: int, expected: float) -> None:
    assert student_quantile(0.95, freedom) == pytest.approx(expected, abs=1e-4)


def test_student_quantile_joins_the_normal_one() -> None:
    assert student_quantile(0.95, 2000) == pytest.approx(student_quantile(0.95, 2001), rel=1e-3)


def test_wilson_golden() -> None:
    # 8 of 10 and 10 of 10 at 95 %.
    assert wilson(0.8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson(1.0, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)


# -------------------- mean interval


def test_single_binary_scores_of_few_tasks_get_wilson() -> None:
    interval = mean_interval([1] * 8 + [0] * 2, range(10))
    assert interval.method == "wilson"
    assert (interval.low, interval.high) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert (interval.n, interval.clusters, interval.level) == (10, 10, 0.95)


def test_mean_counts_each_task_once_however_many_samples_it_has() -> None:
    interval = mean_interval([1, 1, 1, 1, 0, 0.5], ["a"] * 4 + ["b", "c"])
    assert interval.estimate == pytest.approx(0.5)


def test_samples_of_one_task_are_not_independent_units() -> None:
    few = mean_interval([1, 0, 1] * 10, ["a", "b", "c"] * 10)
    assert (few.method, few.n, few.clusters) == ("wilson-clusters", 30, 3)
    assert (few.low, few.high) == pytest.approx(wilson(2 / 3, 3))


@pytest.mark.parametrize("value", [0.0, 0.7, 1.0, 3.2, -2.0])
@pytest.mark.parametrize("clusters", [1, 4, 80])
def test_equal_scores_never_give_a_zero_width_interval(value: float, clusters: int) -> None:
    interval = mean_interval([value] * (2 * clusters), list(range(clusters)) * 2)
    assert interval.method == "wilson-equal-scores"
    assert interval.low <= interval.estimate <= interval.high
    assert interval.high - interval.low > 0.5 / (clusters + 4)


def test_many_tasks_get_the_bootstrap_near_the_normal_interval() -> None:
    scores = np.random.default_rng(0).random(200)
    interval = mean_interval(scores, range(200))
    half = 1.97 * standard_error(scores)
    assert interval.method == "cluster-bootstrap"
    assert interval.low == pytest.approx(scores.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(scores.mean() + half, abs=0.1 * half)


def test_a_few_tasks_with_graded_scores_get_at_least_student_width() -> None:
    scores = [0.2, 0.5, 0.9, 0.4]
    interval = mean_interval(scores, range(4))
    assert interval.high - interval.low > 5 * standard_error(scores)  # a normal interval has 3.92


def test_mean_interval_ignores_row_order() -> None:
    rng = np.random.default_rng(1)
    scores, clusters = rng.random(120), rng.integers(0, 60, 120)
    order = rng.permutation(120)
    a, b = mean_interval(scores, clusters), mean_interval(scores[order], clusters[order])
    assert (b.low, b.high) == pytest.approx((a.low, a.high), abs=1e-12)


@pytest.mark.parametrize("clusters", [12, 60])
def test_mean_interval_covers_about_nominally(clusters: int) -> None:
    hits = 0
    for trial in range(200):
        rng = np.random.default_rng(trial)
        truth = np.repeat(rng.beta(2, 2, clusters), 4)
        interval = mean_interval(rng.random(truth.size) < truth, np.repeat(np.arange(clusters), 4), draws=400)
        hits += not interval.excludes(0.5)
    assert hits / 200 >= 0.91


@pytest.mark.parametrize(
    ("scores", "clusters", "options", "words"),
    [
        ([], [], {}, "scores has shape"),
        ([1.0, math.nan], ["a", "b"], {}, r"scores\[1\] is nan"),
        ([1.0, 0.0], ["a"], {}, "clusters has shape"),
        ([1.0, 0.0], ["a", "b"], {"level": 95.0}, "level is 95"),
        ([1.0, 0.0], ["a", "b"], {"draws": 5}, "draws is 5"),
        (["x"], ["a"], {}, "scores must be an array of numbers"),
    ],
)
def test_mean_interval_names_what_is_wrong(
    scores: list[float], clusters: list[str], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        mean_interval(scores, clusters, **options)


# -------------------- paired difference


def _arms(seed: int, tasks: int, samples: int, effect: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Success shares float64[tasks] of two arms on tasks of very different difficulty."""
    rng = np.random.default_rng(seed)
    easy = 0.1 + 0.8 * rng.beta(0.7, 0.7, tasks)
    better = np.clip(easy + effect, 0, 1)
    return rng.binomial(samples, better) / samples, rng.binomial(samples, easy) / samples


@pytest.mark.parametrize(("tasks", "samples"), [(8, 4), (20, 1), (60, 4)])
def test_paired_bootstrap_covers_about_nominally(tasks: int, samples: int) -> None:
    trials = 250
    hits = sum(
        not paired_difference(*_arms(trial, tasks, samples), draws=400, seed=trial).excludes(0.0)
        for trial in range(trials)
    )
    assert 0.91 <= hits / trials <= 0.995


def test_cluster_labels_restore_coverage_that_independent_rows_lose() -> None:
    trials, honest, naive = 150, 0, 0
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        shared = np.repeat(rng.normal(0, 0.3, 15), 8)
        a, b = shared + rng.normal(0, 0.1, 120), rng.normal(0, 0.1, 120)
        honest += not paired_difference(a, b, np.repeat(np.arange(15), 8), draws=300).excludes(0.0)
        naive += not paired_difference(a, b, draws=300).excludes(0.0)
    assert honest / trials >= 0.9
    assert naive / trials <= 0.7


@pytest.mark.parametrize("spread", [0.0, 0.15])
def test_two_level_bootstrap_covers_luck_in_training_seeds(spread: float) -> None:
    trials, rows, tasks, hits = 200, 4, 20, 0
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        luck = rng.normal(0, spread, (rows, 1)) + rng.normal(0, 0.1, (1, tasks))
        a = (luck + rng.normal(0, 0.2, (rows, tasks))).ravel()
        labels = np.tile(np.arange(tasks), rows)
        seeds = np.repeat(range(rows), tasks)
        interval = paired_difference(a, np.zeros_like(a), labels, seeds=seeds, draws=300)
        hits += not interval.excludes(0.0)
    assert hits / trials >= 0.91


def test_ignoring_training_seeds_is_overconfident_and_the_two_level_interval_is_wider() -> None:
    rng = np.random.default_rng(3)
    a = (np.array([[0.0], [0.4], [0.8]]) + rng.normal(0, 0.05, (3, 30))).ravel()
    tasks, seeds = np.tile(np.arange(30), 3), np.repeat(range(3), 30)
    flat = paired_difference(a, np.zeros(90), tasks)
    nested = paired_difference(a, np.zeros(90), tasks, seeds=seeds)
    assert flat.excludes(0.0)
    assert not nested.excludes(0.0)
    assert (nested.method, nested.seeds, nested.clusters) == ("paired-two-level-bootstrap", 3, 30)
    assert nested.estimate == pytest.approx(flat.estimate)


def test_two_level_width_adds_the_variances_of_seeds_and_tasks() -> None:
    by_seed = np.linspace(-0.5, 0.5, 8)
    by_task = np.linspace(-1.0, 1.0, 30)
    a = (by_seed[:, None] + by_task[None, :]).ravel()
    seeds, tasks = np.repeat(range(8), 30), np.tile(range(30), 8)
    interval = paired_difference(a, np.zeros_like(a), tasks, seeds=seeds)
    error = math.hypot(standard_error(by_seed), standard_error(by_task))
    assert interval.high - interval.low == pytest.approx(2 * 2.05 * error, rel=0.08)


def test_sampling_noise_is_not_counted_for_seeds_and_again_for_tasks() -> None:
    seeds, tasks = np.repeat(range(10), 30), np.tile(range(30), 10)
    widths = []
    for trial in range(30):
        noise = np.random.default_rng(trial).normal(0, 1, 300)
        interval = paired_difference(noise, np.zeros(300), tasks, seeds=seeds, draws=400)
        widths.append(interval.high - interval.low)
    assert np.mean(widths) == pytest.approx(2 * 2.1 / math.sqrt(300), rel=0.2)


def test_pairing_is_narrower_than_the_spread_of_tasks_and_reports_the_correlation() -> None:
    a, b = _arms(0, 200, 16, effect=0.1)
    interval = paired_difference(a, b)
    assert interval.correlation is not None and interval.correlation > 0.8
    unpaired = 2 * 1.96 * math.hypot(standard_error(a), standard_error(b))
    assert interval.high - interval.low < unpaired / 2
    assert interval.above(0.0)
    assert interval.p_value < 0.01


def test_p_value_and_interval_agree() -> None:
    for trial in range(40):
        interval = paired_difference(*_arms(trial, 30, 4, effect=0.08))
        if not 0.04 < interval.p_value < 0.06:
            assert interval.excludes(0.0) == (interval.p_value < 0.05)


@given(st.permutations(range(12)))
@settings(max_examples=25, deadline=None)
def test_paired_difference_ignores_row_and_task_order(order: list[int]) -> None:
    a, b = _arms(5, 6, 3)
    c, d = _arms(6, 6, 3)
    left, right = np.concatenate([a, c]), np.concatenate([b, d])
    tasks, seeds = np.tile(np.arange(6), 2), np.repeat([0, 1], 6)
    plain = paired_difference(left, right, tasks, seeds=seeds, draws=200)
    moved = paired_difference(left[order], right[order], tasks[order], seeds=seeds[order], draws=200)
    assert (moved.low, moved.high) == pytest.approx((plain.low, plain.high), abs=1e-12)


@given(st.permutations(["t0", "t1", "t2", "t3", "t4"]))
@settings(max_examples=20, deadline=None)
def test_mappings_and_arrays_agree_in_any_order(order: list[str]) -> None:
    a = {"t0": [1, 0], "t1": [1, 1], "t2": [0, 0], "t3": [1, 1], "t4": [0, 1]}
    b = {"t0": [0, 0, 0], "t1": [1, 0, 0], "t2": [0, 0, 0], "t3": [0, 1, 0], "t4": [1, 0, 0]}
    mapped = paired_difference({t: a[t] for t in order}, {t: b[t] for t in reversed(order)})
    aligned = paired_difference([np.mean(a[t]) for t in sorted(a)], [np.mean(b[t]) for t in sorted(b)])
    assert (mapped.estimate, mapped.low, mapped.high) == (aligned.estimate, aligned.low, aligned.high)
    assert mapped.n == 10


def test_swapping_the_sides_flips_the_interval() -> None:
    a, b = _arms(7, 25, 4, effect=0.1)
    plain, swapped = paired_difference(a, b), paired_difference(b, a)
    flipped = (-plain.estimate, -plain.high, -plain.low)
    assert (swapped.estimate, swapped.low, swapped.high) == pytest.approx(flipped)
    assert swapped.p_value == plain.p_value


def test_mapped_clusters_group_tasks_by_template() -> None:
    a = {f"t{i}": [float(i < 6)] for i in range(8)}
    b = {f"t{i}": [0.0] for i in range(8)}
    interval = paired_difference(a, b, {f"t{i}": i // 2 for i in range(8)})
    assert interval.clusters == 4
    assert not interval.excludes(0.0)
    assert paired_difference(a, b).excludes(0.0)


def test_no_difference_anywhere_is_zero_and_labelled() -> None:
    interval = paired_difference([1, 0, 1], [1, 0, 1])
    assert (interval.low, interval.estimate, interval.high, interval.p_value) == (0.0, 0.0, 0.0, 1.0)
    assert interval.method == "all-differences-zero"
    assert not interval.excludes(0.0)


@pytest.mark.parametrize("clusters", range(1, 12))
def test_equal_full_differences_are_the_sign_test(clusters: int) -> None:
    interval = paired_difference([1] * clusters, [0] * clusters)
    assert interval.method == "exact-equal-differences"
    assert interval.p_value == pytest.approx(min(1.0, 2 * 0.5**clusters))
    assert interval.above(0.0) == (clusters >= 6)
    assert interval.low < interval.estimate == interval.high == 1.0


@pytest.mark.parametrize("d", [-0.5, -0.25, 0.25, 0.5])
@pytest.mark.parametrize("clusters", [2, 9, 40])
def test_equal_partial_differences_keep_some_width_on_both_sides(d: float, clusters: int) -> None:
    interval = paired_difference([0.5 + d] * clusters, [0.5] * clusters)
    assert -1.0 <= interval.low < d < interval.high <= 1.0
    assert interval.excludes(0.0) == (interval.p_value < 0.05)


def test_an_interval_of_bounded_scores_stays_in_bounds() -> None:
    interval = paired_difference([1, 1, 0], [0, 0, 0])
    assert interval.low >= -1.0
    assert interval.high == 1.0


def test_different_task_sets_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"b lacks 2 task\(s\) that the other side has: 'x', 'y'"):
        paired_difference({"t": [1], "x": [1], "y": [0]}, {"t": [1]})
    with pytest.raises(DataError, match=r"a lacks 1 task\(s\) that the other side has: 'x'"):
        paired_difference({"t": [1]}, {"t": [1], "x": [1]})


def test_a_seed_that_lacks_a_task_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="seed 1 has no score for task 'u'"):
        paired_difference([1, 0, 1], [0, 0, 0], ["t", "u", "t"], seeds=[0, 0, 1])


@pytest.mark.parametrize(
    ("a", "b", "clusters", "seeds", "words"),
    [
        ([1, 0], [1], None, None, "a has 2 scores and b has 1"),
        ({"t": [1]}, [1], None, None, "must be all mappings"),
        ({"t": [1]}, {"t": [1]}, None, [0], "seeds goes with aligned arrays"),
        ({"t": [1]}, {"t": [1]}, {"u": 0}, None, "no label for task 't'"),
        ({"t": [1]}, {"t": [1]}, [0], None, "clusters must map"),
        ({"t": []}, {"t": [1]}, None, None, r"a\['t'\] has shape"),
        ([1, 0], [0, math.inf], None, None, r"b\[1\] is inf"),
    ],
)
def test_paired_difference_names_what_is_wrong(a: Any, b: Any, clusters: Any, seeds: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        paired_difference(a, b, clusters, seeds=seeds)


# -------------------- Holm, SPL, power


def test_holm_golden() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_raw_and_bonferroni_and_keeps_the_order(p: list[float]) -> None:
    adjusted = holm(p)
    assert np.all(adjusted >= p)
    assert np.all(adjusted <= np.minimum(1.0, len(p) * np.array(p)) + 1e-12)
    assert np.all(np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0)


def test_holm_refuses_what_is_no_probability() -> None:
    with pytest.raises(DataError, match=r"p_values\[1\] is 1.5"):
        holm([0.1, 1.5])


def test_spl_rewards_only_successful_short_paths() -> None:
    assert spl([1, 1, 0, 1], [4, 4, 4, 4], [4, 8, 4, 2]) == pytest.approx([1.0, 0.5, 0.0, 1.0])
    with pytest.raises(DataError, match=r"shortest\[0\] is 0"):
        spl([1], [0], [3])
    with pytest.raises(DataError, match="taken has shape"):
        spl([1, 1], [1, 1], [1])


def test_required_tasks_golden_and_scaling() -> None:
    # (1.959964 + 0.841621)^2 * 0.25 / 0.1^2 = 196.2
    assert required_tasks(0.1, 0.25) == 197
    assert required_tasks(-0.1, 0.25) == 197
    assert required_tasks(0.05, 0.25) == math.ceil(4 * 196.222)


def test_required_tasks_reach_the_power_they_promise() -> None:
    n = required_tasks(0.15, 0.09)
    shown = sum(
        paired_difference(np.random.default_rng(t).normal(0.15, 0.3, n), np.zeros(n), draws=300).excludes(0.0)
        for t in range(300)
    )
    assert 0.72 <= shown / 300 <= 0.88


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delta": 0.0}, "delta is 0"),
        ({"variance": -1.0}, "variance is -1"),
        ({"power": 1.0}, "power is 1"),
        ({"level": 0.95}, "level is 0.95; it is the significance"),
    ],
)
def test_required_tasks_names_what_is_wrong(options: dict[str, float], words: str) -> None:
    with pytest.raises(DataError, match=words):
        required_tasks(**{"delta": 0.1, "variance": 0.25, **options})

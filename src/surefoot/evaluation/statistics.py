"""Estimators and error bars for evaluation scores: pure numpy functions in float64.

This module knows scores, cluster labels and training seeds; it must not know arms, verdicts or environments.

Every interval treats the cluster (usually the task) as the unit of luck, never the single sample. Honesty for
small samples comes before narrowness: bootstrap intervals are widened to Student-t width, and data without
any spread get an exact or Wilson bound instead of an interval of width zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from surefoot.core.errors import DataError

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

WILSON_BELOW = 50
"""With fewer clusters than this, 0/1 means get a Wilson interval (bootstrap tails are too short there)."""

_MIN_DRAWS = 100
_BLOCK = 1 << 21  # bootstrap counts held in memory at once
_EQUAL = 1e-12  # differences smaller than this are rounding, not spread


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    ``level`` is the confidence (0.95), ``n`` the number of scores, ``clusters`` the number of independent
    units, ``method`` the rule that made the bounds.
    """

    estimate: float
    low: float
    high: float
    level: float
    method: str
    n: int
    clusters: int

    def excludes(self, value: float) -> bool:
        """True when ``value`` lies outside [low, high]."""
        return value < self.low or value > self.high

    def above(self, value: float) -> bool:
        """True when the whole interval lies above ``value``: the increase is shown."""
        return self.low > value


@dataclass(frozen=True)
class PairedInterval(Interval):
    """Interval of a paired difference.

    ``correlation`` is Pearson's between the two sides' cluster means (None when a side does not vary),
    ``p_value`` the two-sided one of "no difference", ``seeds`` the number of training seeds resampled (1 when
    only clusters were).
    """

    correlation: float | None
    p_value: float
    seeds: int


# -------------------- success of k


def pass_at_k(successes: ArrayLike, samples: ArrayLike, k: int) -> Floats:
    """Unbiased chance that at least one of k samples succeeds, 1 - C(n-c,k)/C(n,k) (Chen et al. 2021).

    ``successes``: int[n_tasks]; ``samples``: int[n_tasks] or one int. Returns float64[n_tasks].
    Raises DataError when a task has fewer than k samples or more successes than samples.
    """
    count, total = _counts(successes, samples, k)
    return 1.0 - _all_drawn(total - count, total, k)


def pass_hat_k(successes: ArrayLike, samples: ArrayLike, k: int) -> Floats:
    """Unbiased chance that all of k samples succeed, C(c,k)/C(n,k) (pass^k of tau-bench).

    Shapes and errors as in `pass_at_k`.
    """
    count, total = _counts(successes, samples, k)
    return _all_drawn(count, total, k)


def _all_drawn(count: Ints, total: Ints, k: int) -> Floats:
    """C(count,k)/C(total,k) as a product of ratios, each at most 1, so nothing overflows."""
    step = np.arange(k)
    ratios = np.maximum(count[:, None] - step, 0) / (total[:, None] - step)
    return np.prod(ratios, axis=1, dtype=np.float64)


def _counts(successes: ArrayLike, samples: ArrayLike, k: int) -> tuple[Ints, Ints]:
    if k < 1:
        raise DataError(f"k is {k}; it must be at least 1")
    count = _integers(successes, "successes")
    total = np.atleast_1d(_integers(samples, "samples", scalar=True))
    if total.size != 1 and total.shape != count.shape:
        raise DataError(f"samples has shape {total.shape}; it must be one int or match {count.shape}")
    total = np.broadcast_to(total, count.shape)
    for index in np.flatnonzero(total < k)[:1]:
        raise DataError(f"samples[{index}] is {total[index]}; k = {k} needs at least {k} samples")
    for index in np.flatnonzero((count < 0) | (count > total))[:1]:
        raise DataError(f"successes[{index}] is {count[index]}; it must lie in [0, {total[index]}]")
    return count, total


def _integers(values: ArrayLike, field: str, *, scalar: bool = False) -> Ints:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise DataError(f"{field} has dtype {array.dtype}; it must hold whole numbers")
    if array.ndim != 1 and not (scalar and array.ndim == 0):
        raise DataError(f"{field} has shape {array.shape}; it must be one-dimensional")
    return array.astype(np.int64)


def spl(success: ArrayLike, shortest: ArrayLike, taken: ArrayLike) -> Floats:
    """Success weighted by path length, S * l / max(l, taken), per episode (Anderson et al. 2018).

    All float[n]; ``shortest`` and ``taken`` share a unit (steps, calls, tokens). Returns float64[n].
    Raises DataError on a shape mismatch, a shortest length that is not positive or a negative taken length.
    """
    done = _scores(success, "success")
    best, used = _scores(shortest, "shortest"), _scores(taken, "taken")
    for field, array in (("shortest", best), ("taken", used)):
        if array.shape != done.shape:
            raise DataError(f"{field} has shape {array.shape}; it must match success {done.shape}")
    for index in np.flatnonzero(best <= 0)[:1]:
        raise DataError(f"shortest[{index}] is {best[index]}; it must be positive")
    for index in np.flatnonzero(used < 0)[:1]:
        raise DataError(f"taken[{index}] is {used[index]}; it must not be negative")
    return done * best / np.maximum(best, used)


# -------------------- standard errors


def standard_error(scores: ArrayLike) -> float:
    """Naive standard error of the mean, sqrt(var / n) with Bessel's correction; it ignores clusters.

    Raises DataError with fewer than two scores.
    """
    values = _scores(scores, "scores")
    if values.size < 2:
        raise DataError(f"scores has {values.size} value; a standard error needs at least 2")
    return float(np.sqrt(values.var(ddof=1) / values.size))


def clustered_se(scores: ArrayLike, clusters: Sequence[object], *, small_sample: bool = False) -> float:
    """Cluster-robust standard error of the mean, sqrt(sum_c (sum_{i in c} (s_i - mean))^2) / n.

    "Adding Error Bars to Evals" (arXiv 2411.00640). ``scores``: float[n]; ``clusters``: n labels.
    ``small_sample`` multiplies the variance by C/(C-1). Raises DataError with fewer than two clusters.
    """
    values = _scores(scores, "scores")
    index, count = _labels(clusters, values.size, "clusters")
    if count < 2:
        raise DataError(f"clusters holds {count} distinct label; a clustered error needs at least 2")
    sums = np.bincount(index, weights=values - values.mean())
    variance = float(np.sum(sums**2)) / values.size**2
    return math.sqrt(variance * (count / (count - 1) if small_sample else 1.0))


# -------------------- intervals


def mean_interval(
    scores: ArrayLike, clusters: Sequence[object], *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> Interval:
    """Mean of the cluster means (each task counts once) with its interval.

    ``scores``: float[n]; ``clusters``: n labels, the task (or whatever shares luck) of each score. Method:

    * ``wilson``: 0/1 scores, one per cluster, fewer than 50 clusters.
    * ``wilson-clusters``: 0/1 scores, several per cluster, fewer than 50 clusters. Wilson at n = clusters:
      conservative, as the variance of a cluster mean in [0, 1] never exceeds p(1 - p).
    * ``wilson-equal-scores``: all cluster means equal. Wilson at n = clusters on the smallest range that
      holds 0, 1 and the scores.
    * ``cluster-bootstrap``: otherwise. Percentiles of resampled clusters, widened to Student-t width.

    Raises DataError on empty or non-finite scores, or labels that do not match.
    """
    values = _scores(scores, "scores")
    _check_options(level, draws)
    index, count = _labels(clusters, values.size, "clusters")
    means = _cell_means(values, index, count)
    estimate = float(means.mean())
    floor, ceiling = _span(values)
    binary = bool(np.all((values == 0) | (values == 1)))
    if np.ptp(means) <= _EQUAL * (ceiling - floor):
        method = "wilson-equal-scores"
    elif binary and count < WILSON_BELOW:
        method = "wilson" if values.size == count else "wilson-clusters"
    else:
        low, high = _bounds(_widened_draws(means[None, :], level, draws, seed), level)
        low, high = _clip(low, high, floor, ceiling) if _bounded(values) else (low, high)
        return Interval(estimate, low, high, level, "cluster-bootstrap", values.size, count)
    width = ceiling - floor
    low, high = wilson((estimate - floor) / width, count, level)
    return Interval(estimate, floor + width * low, floor + width * high, level, method, values.size, count)


def wilson(proportion: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval (Wilson 1927) of a proportion in [0, 1] seen over ``n`` independent units."""
    z2 = NormalDist().inv_cdf(0.5 + level / 2) ** 2
    p = min(1.0, max(0.0, proportion))  # rounding may leave the unit interval by one ulp
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return (0.0 if p == 0 else max(0.0, centre - half)), (1.0 if p == 1 else min(1.0, centre + half))


def paired_difference(
    a: Mapping[str, Sequence[float]] | ArrayLike,
    b: Mapping[str, Sequence[float]] | ArrayLike,
    clusters: Mapping[str, object] | Sequence[object] | None = None,
    *,
    seeds: Sequence[object] | None = None,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> PairedInterval:
    """Difference a - b of two sides measured on the same tasks, each task counting once.

    Two forms. Mappings: task -> its scores (the sides may have different numbers of samples); ``clusters``
    optionally maps a task to a coarser label. Arrays: float[n] aligned row by row, ``clusters`` the task of
    each row (default: each row its own). With arrays, ``seeds`` gives the training seed of each row; then
    seeds and tasks are both resampled, one draw of tasks shared by all seeds, as they met the same tasks
    (pigeonhole bootstrap, Owen 2007). ``seed`` is the bootstrap's own. Method:

    * ``all-differences-zero``: [0, 0], p = 1. Nothing differed anywhere; it excludes no difference of 0.
    * ``exact-equal-differences``: every cluster differs by the same d != 0. The share of clusters that could
      behave otherwise is at most u = 1 - (alpha/2)^(1/C) (Clopper-Pearson for 0 of C), so with differences
      confined to [-R, R] the mean lies in [d - u(R+d), d + u(R-d)]. For d = R this is the sign test.
    * ``paired-cluster-bootstrap`` / ``paired-two-level-bootstrap``: percentiles, widened to Student-t width
      (degrees of freedom by Satterthwaite over seeds and clusters).

    Raises DataError when the task sets differ, shapes do not match, a score is not finite, or with ``seeds``
    a seed lacks a task.
    """
    _check_options(level, draws)
    left, right, labels, n = _aligned(a, b, clusters, seeds)
    task, tasks = _labels(labels, left.size, "clusters")
    row, rows = (np.zeros_like(task), 1) if seeds is None else _labels(seeds, left.size, "seeds")
    cell = row * tasks + task
    missing = np.flatnonzero(np.bincount(cell, minlength=rows * tasks) == 0)
    if missing.size and seeds is not None:
        which, what = divmod(int(missing[0]), tasks)
        raise DataError(
            f"seeds: seed {_example(seeds, row, which)} has no score for task "
            f"{_example(labels, task, what)}; every seed needs every task"
        )
    side_a, side_b = (_cell_means(v, cell, rows * tasks).reshape(rows, tasks) for v in (left, right))
    both = np.concatenate([left, right])
    bounds = _difference_bounds(side_a - side_b, both, level=level, draws=draws, seed=seed)
    return PairedInterval(
        *bounds[:3],
        level=level,
        method=bounds[3],
        n=n,
        clusters=tasks,
        correlation=_correlation(side_a.mean(axis=0), side_b.mean(axis=0)),
        p_value=bounds[4],
        seeds=rows,
    )


def require_same_tasks(
    a: Mapping[str, object], b: Mapping[str, object], names: tuple[str, str] = ("a", "b")
) -> None:
    """Raise DataError, naming some of the missing tasks, unless both mappings have the same keys."""
    for lacking, having, name in ((a, b, names[0]), (b, a, names[1])):
        missing = sorted(set(having) - set(lacking), key=str)
        if missing:
            shown = ", ".join(map(repr, missing[:3])) + (", ..." if len(missing) > 3 else "")
            raise DataError(
                f"{name} lacks {len(missing)} task(s) that the other side has: {shown}; "
                "a paired difference needs the same tasks on both sides"
            )


def _difference_bounds(
    cells: Floats, scores: Floats, *, level: float, draws: int, seed: int
) -> tuple[float, float, float, str, float]:
    """Estimate, low, high, method and p-value for differences float64[seeds, clusters]."""
    estimate = float(cells.mean())
    floor, ceiling = _span(scores)
    reach = ceiling - floor  # no difference can be larger than this
    if np.max(np.abs(cells)) <= _EQUAL * reach:
        return 0.0, 0.0, 0.0, "all-differences-zero", 1.0
    if np.ptp(cells) <= _EQUAL * reach:
        count = cells.shape[1]
        elsewhere = 1.0 - ((1.0 - level) / 2) ** (1.0 / count)
        low, high = estimate - elsewhere * (reach + estimate), estimate + elsewhere * (reach - estimate)
        p_value = min(1.0, 2.0 * (reach / (reach + abs(estimate))) ** count)
        return estimate, low, high, "exact-equal-differences", p_value
    sample = _widened_draws(cells, level, draws, seed)
    low, high = _bounds(sample, level)
    if _bounded(scores):
        low, high = _clip(low, high, -reach, reach)
    tail = min(int(np.sum(sample <= 0)), int(np.sum(sample >= 0)))
    p_value = min(1.0, 2.0 * (tail + 1) / (draws + 1))
    method = "paired-two-level-bootstrap" if cells.shape[0] > 1 else "paired-cluster-bootstrap"
    return estimate, low, high, method, p_value


def _aligned(
    a: Mapping[str, Sequence[float]] | ArrayLike,
    b: Mapping[str, Sequence[float]] | ArrayLike,
    clusters: Mapping[str, object] | Sequence[object] | None,
    seeds: Sequence[object] | None,
) -> tuple[Floats, Floats, Sequence[object], int]:
    """Both sides row by row, the cluster label of each row, and the number of scores behind side a."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if seeds is not None:
            raise DataError("seeds goes with aligned arrays; mappings by task have no rows to label")
        if clusters is not None and not isinstance(clusters, Mapping):
            raise DataError("clusters must map task to label when a and b are mappings")
        require_same_tasks(a, b)
        order = list(a)
        if clusters is not None and (unknown := [task for task in order if task not in clusters]):
            raise DataError(f"clusters has no label for task {unknown[0]!r}")
        means = [
            np.array([_scores(side[task], f"{name}[{task!r}]").mean() for task in order])
            for name, side in (("a", a), ("b", b))
        ]
        labels = order if clusters is None else [clusters[task] for task in order]
        return _scores(means[0], "a"), _scores(means[1], "b"), labels, sum(len(a[task]) for task in order)
    if isinstance(a, Mapping) or isinstance(b, Mapping) or isinstance(clusters, Mapping):
        raise DataError("a, b and clusters must be all mappings by task or all aligned arrays")
    x, y = _scores(a, "a"), _scores(b, "b")
    if x.shape != y.shape:
        raise DataError(f"a has {x.size} scores and b has {y.size}; aligned arrays need the same rows")
    return x, y, list(range(x.size)) if clusters is None else clusters, x.size


# -------------------- bootstrap


def _widened_draws(cells: Floats, level: float, draws: int, seed: int) -> Floats:
    """Bootstrap means of float64[seeds, clusters], rescaled about the estimate to the right spread.

    Plain percentiles are too narrow for few units (variance short of a factor m/(m-1), normal tails) and too
    wide for crossed seeds and clusters (their residual counts three times, Owen 2007). The rescaled draws
    have the unbiased standard error and Student-t width at ``level``, and keep the bootstrap's skew.
    """
    rng = np.random.default_rng(seed)
    rows, columns = cells.shape
    block = max(1, _BLOCK // (rows + columns))
    parts = [_resampled_means(cells, min(block, draws - start), rng) for start in range(0, draws, block)]
    sample = np.concatenate(parts)
    error, freedom = _crossed_error(cells)
    width = student_quantile(level, freedom) / NormalDist().inv_cdf(0.5 + level / 2)
    centre = cells.mean()
    return centre + (sample - centre) * (width * error / float(sample.std()))


def _resampled_means(cells: Floats, draws: int, rng: np.random.Generator) -> Floats:
    rows, columns = cells.shape
    seeds = _resample_counts(rows, draws, rng)
    tasks = _resample_counts(columns, draws, rng)
    return np.sum((seeds @ cells) * tasks, axis=1) / cells.size


def _resample_counts(size: int, draws: int, rng: np.random.Generator) -> Floats:
    """How often each of ``size`` units was drawn: float64[draws, size], each row summing to ``size``."""
    picks = rng.integers(size, size=(draws, size)) + size * np.arange(draws)[:, None]
    return np.bincount(picks.ravel(), minlength=draws * size).reshape(draws, size).astype(np.float64)


def _crossed_error(cells: Floats) -> tuple[float, int]:
    """Standard error of the mean of float64[seeds, clusters] and its Satterthwaite degrees of freedom.

    Two-way random effects without replication: variance = seeds + clusters - residual, never less than the
    largest of the three; one seed leaves the ordinary var / clusters.
    """
    rows, columns = cells.shape
    if rows == 1 or columns == 1:
        return math.sqrt(float(cells.var(ddof=1)) / cells.size), cells.size - 1
    by_row, by_column = cells.mean(axis=1), cells.mean(axis=0)
    rest = cells - by_row[:, None] - by_column[None, :] + cells.mean()
    freedoms = (rows - 1, columns - 1, (rows - 1) * (columns - 1))
    parts = (
        float(by_row.var(ddof=1)) / rows,
        float(by_column.var(ddof=1)) / columns,
        float(np.sum(rest**2)) / freedoms[2] / cells.size,
    )
    variance = max(parts[0] + parts[1] - parts[2], *parts)
    freedom = variance**2 / sum(part**2 / df for part, df in zip(parts, freedoms, strict=True))
    return math.sqrt(variance), max(min(freedoms), math.floor(freedom))


def student_quantile(level: float, freedom: int) -> float:
    """The t with P(|T| <= t) = level for an integer number of degrees of freedom.

    By bisection on the finite trigonometric series of the distribution (Abramowitz & Stegun 26.7.3-4);
    above 2,000 degrees the normal quantile, which agrees to better than 0.1 %.
    """
    if freedom > 2000:
        return NormalDist().inv_cdf(0.5 + level / 2)
    odd = freedom % 2
    step = np.arange(1, max(0, (freedom - 2) // 2) + 1, dtype=np.float64)
    factors = 2 * step / (2 * step + 1) if odd else (2 * step - 1) / (2 * step)

    def inside(angle: float) -> float:
        series = 1.0 + float(np.sum(np.cumprod(factors * math.cos(angle) ** 2)))
        if not odd:
            return math.sin(angle) * series
        if freedom == 1:
            return 2 * angle / math.pi
        return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * series)

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < level else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def _bounds(sample: Floats, level: float) -> tuple[float, float]:
    low, high = np.quantile(sample, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _clip(low: float, high: float, floor: float, ceiling: float) -> tuple[float, float]:
    return max(low, floor), min(high, ceiling)


# -------------------- planning and testing


def holm(p_values: ArrayLike) -> Floats:
    """Holm's step-down adjusted p-values (Holm 1979), float64[m] in the order given.

    Raises DataError when a value lies outside [0, 1].
    """
    values = _scores(p_values, "p_values")
    for index in np.flatnonzero((values < 0) | (values > 1))[:1]:
        raise DataError(f"p_values[{index}] is {values[index]}; it must lie in [0, 1]")
    order = np.argsort(values, kind="stable")
    scaled = np.minimum(1.0, values[order] * np.arange(values.size, 0, -1))
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(scaled)
    return adjusted


def required_tasks(delta: float, variance: float, power: float = 0.8, level: float = 0.05) -> int:
    """Tasks needed to show a paired difference ``delta``: (z_{level/2} + z_power)^2 * variance / delta^2.

    ``variance`` is that of one task's difference: omega^2 + sigma_A^2/K_A + sigma_B^2/K_B with K samples a
    side (arXiv 2411.00640); ``level`` is the two-sided significance (0.05), not the confidence. At least 1.
    """
    if not (math.isfinite(delta) and delta != 0):
        raise DataError(f"delta is {delta}; it must be a finite difference other than 0")
    if not (math.isfinite(variance) and variance >= 0):
        raise DataError(f"variance is {variance}; it must be finite and not negative")
    if not 0 < power < 1:
        raise DataError(f"power is {power}; it must lie in (0, 1)")
    if not 0 < level < 0.5:
        raise DataError(f"level is {level}; it is the significance (0.05), so it must lie in (0, 0.5)")
    z = NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(power)
    return max(1, math.ceil(z**2 * variance / delta**2))


# -------------------- helpers


def _scores(values: ArrayLike, field: str) -> Floats:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{field} must be an array of numbers: {error}") from error
    if array.ndim != 1 or array.size == 0:
        raise DataError(f"{field} has shape {array.shape}; it must be one-dimensional and not empty")
    for index in np.flatnonzero(~np.isfinite(array))[:1]:
        raise DataError(f"{field}[{index}] is {array[index]}; every score must be finite")
    return array


def _labels(labels: Sequence[object], size: int, field: str) -> tuple[Ints, int]:
    """Dense index int64[size] of each label in sorted order, and the number of distinct labels."""
    array: NDArray[Any] = np.asarray(labels)
    if array.shape != (size,):
        raise DataError(f"{field} has shape {array.shape}; it must give one label for each of {size} scores")
    distinct, index = np.unique(array.astype(str) if array.dtype == object else array, return_inverse=True)
    return index.astype(np.int64), int(distinct.size)


def _example(labels: Sequence[object], index: Ints, code: int) -> str:
    return repr(labels[int(np.flatnonzero(index == code)[0])])


def _cell_means(values: Floats, index: Ints, count: int) -> Floats:
    return np.bincount(index, weights=values, minlength=count) / np.bincount(index, minlength=count)


def _span(scores: Floats) -> tuple[float, float]:
    """The smallest range that holds 0, 1 and every score."""
    return min(0.0, float(scores.min())), max(1.0, float(scores.max()))


def _bounded(scores: Floats) -> bool:
    """Scores inside [0, 1] are taken to be bounded by it; others have no known bound."""
    return _span(scores) == (0.0, 1.0)


def _correlation(a: Floats, b: Floats) -> float | None:
    if a.size < 2 or np.ptp(a) <= _EQUAL or np.ptp(b) <= _EQUAL:
        return None
    return float(np.clip(np.corrcoef(a, b)[0, 1], -1.0, 1.0))


def _check_options(level: float, draws: int) -> None:
    if not 0 < level < 1:
        raise DataError(f"level is {level}; it is the confidence (0.95), so it must lie in (0, 1)")
    if draws < _MIN_DRAWS:
        raise DataError(f"draws is {draws}; a bootstrap needs at least {_MIN_DRAWS} (2,000 for a claim)")

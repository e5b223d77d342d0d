"""Which members of a batch are trained on: group filters, resampling, and penalties on length and tool use.

Pure functions on numpy arrays. They know nothing of environments, text, models, losses or algorithm names.

Conventions of every filter: row i is one trajectory. ``returns`` float ``[n]``, ``group`` int ``[n]`` (equal
ids form a group, in any order), ``valid`` bool ``[n]`` (``None``: all valid). An invalid member is never
kept, influences nobody and may hold NaN. A group is *live* if two of its valid returns differ; equality is
exact. Groups are taken in ascending order of their id, members of a group in batch order, which is the order
of generation; the order of the rows changes nothing else. A bad shape, dtype or value raises ``DataError``, a
bad option ``ConfigError``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from surefoot.core.checks import require_option, shape_of
from surefoot.core.errors import ConfigError, DataError, SignalError
from surefoot.core.seeds import derive

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

RocMode = Literal["rank", "sample"]


@dataclass(frozen=True, slots=True)
class FilterReport:
    """Counts of one filter: all ``groups`` and ``kept_groups``, valid ``members`` and ``kept`` rows.

    After ``duplicate_live``, ``kept`` counts the copies too.
    """

    groups: int
    kept_groups: int
    members: int
    kept: int


@dataclass(frozen=True, slots=True)
class RocReport(FilterReport):
    """Counts of ``resample_on_correct``.

    ``equal`` groups were dropped because their returns do not differ, ``short`` ones because they have fewer
    valid members than are to be kept. ``positives`` and ``negatives`` are the kept rows of either kind.
    """

    equal: int
    short: int
    positives: int
    negatives: int


@dataclass(frozen=True, slots=True, eq=False)
class Filtered:
    """``keep`` bool ``[n]``: the rows to train on."""

    keep: Bools
    report: FilterReport


@dataclass(frozen=True, slots=True, eq=False)
class Resampled:
    """``keep`` bool ``[n]``: the rows to train on."""

    keep: Bools
    report: RocReport


@dataclass(frozen=True, slots=True, eq=False)
class Duplicated:
    """``rows`` int64 ``[m]`` into the batch, with repeats; ``group`` int64 ``[m]``, their new ids from 0.

    A copy is a group of its own, so that its group statistics are those of the original.
    """

    rows: Ints
    group: Ints
    report: FilterReport


def dynamic_sampling(
    returns: ArrayLike, group: ArrayLike, valid: ArrayLike | None = None, *, limit: int | None = None
) -> Filtered:
    """Keep the live groups, at most the first ``limit`` of them (DAPO, arXiv 2503.14476).

    With 0/1 returns these are the groups that are neither all right nor all wrong. ``Refill`` says how many
    groups to sample in place of the others.
    """
    if limit is not None:
        _whole("limit", limit, at_least=1)
    members = _Members.of(returns, group, valid)
    return members.filtered([rows for rows in members.groups if members.live(rows)][:limit])


@dataclass(frozen=True, slots=True)
class Refill:
    """How full a batch of live groups is, round by round: dynamic sampling with an end.

    ``target`` live groups are wanted within ``max_rounds`` rounds of sampling, the first one included, of at
    most ``per_round`` groups each (``None``: ``target``). If the rounds run out, the batch may be smaller,
    but not below ``minimum`` live groups. ``rounds``, ``sampled`` and ``live`` are the state: start at 0,
    then ``add`` each round. Raises ``ConfigError`` for a number out of range.
    """

    target: int
    max_rounds: int
    per_round: int | None = None
    minimum: int = 1
    rounds: int = 0
    sampled: int = 0
    live: int = 0

    def __post_init__(self) -> None:
        _whole("target", self.target, at_least=1)
        _whole("max_rounds", self.max_rounds, at_least=1)
        _whole("minimum", self.minimum, at_least=1)
        if self.per_round is not None:
            _whole("per_round", self.per_round, at_least=1)
        if self.minimum > self.target:
            raise ConfigError(f"minimum is {self.minimum}; it must be at most target = {self.target}")

    @property
    def done(self) -> bool:
        """True when the batch is full or the rounds are used up."""
        return self.live >= self.target or self.rounds >= self.max_rounds

    @property
    def request(self) -> int:
        """Groups to sample next: those missing over the share that was live so far; 0 when done."""
        if self.done:
            return 0
        most = self.target if self.per_round is None else self.per_round
        if self.live == 0:
            return most
        return min(most, -(-(self.target - self.live) * self.sampled // self.live))

    def add(self, *, sampled: int, live: int) -> Refill:
        """The state after one more round of ``sampled`` groups, ``live`` of them live.

        Raises ``SignalError`` when the last round leaves fewer than ``minimum`` live groups, and
        ``DataError`` for impossible counts or a round after the end.
        """
        if self.done:
            raise DataError(f"refill is done after {self.rounds} rounds; no further round can be added")
        if not 0 <= live <= sampled or sampled == 0:
            raise DataError(f"live is {live} of sampled = {sampled}; need 0 <= live <= sampled, sampled >= 1")
        after = replace(self, rounds=self.rounds + 1, sampled=self.sampled + sampled, live=self.live + live)
        if after.done and after.live < self.minimum:
            raise SignalError(
                f"the signal is dead: {after.live} of {after.sampled} groups sampled in {after.rounds} "
                f"rounds have returns that differ, and at least {self.minimum} must; the tasks may all be "
                "too easy or too hard, or the reward constant"
            )
        return after


def duplicate_live(
    returns: ArrayLike, group: ArrayLike, valid: ArrayLike | None = None, *, seed: int
) -> Duplicated:
    """Fill the places of dead groups with copies of live ones (DUPO of WebSailor, arXiv 2507.02592).

    The sources are drawn by ``seed`` in shuffled passes over the live groups, so that the numbers of copies
    differ by at most one. Without a live group the result is empty.
    """
    members = _Members.of(returns, group, valid)
    live = [rows for rows in members.groups if members.live(rows)]
    dead = len(members.groups) - len(live)
    draws = np.random.default_rng(derive("duplicate_live", seed))
    passes = -(-dead // len(live)) if live else 0
    sources = [int(i) for _ in range(passes) for i in draws.permutation(len(live))][:dead]
    places = live + [live[i] for i in sources]
    sizes = np.array([rows.size for rows in places], dtype=np.int64)
    return Duplicated(
        rows=_joined(places),
        group=np.repeat(np.arange(len(places), dtype=np.int64), sizes),
        report=replace(members.report(live), kept=int(sizes.sum())),
    )


def variance_filter(
    returns: ArrayLike, group: ArrayLike, valid: ArrayLike | None = None, *, share: float = 0.25
) -> Filtered:
    """Keep the ``share`` of groups whose returns have the largest std (StarPO-S of RAGEN, arXiv 2504.20073).

    At least one group and at most floor(share * groups) are kept; of equal stds the lower id wins. Groups of
    one valid member have a std of 0, empty ones are never kept. Bessel std, as in the advantages.
    """
    if not (math.isfinite(share) and 0 < share <= 1):
        raise ConfigError(f"share is {share}; it must lie in (0, 1]")
    members = _Members.of(returns, group, valid)
    filled = [rows for rows in members.groups if rows.size]
    # The tiny addend keeps products such as 0.29 * 100 = 28.999... at the whole number that was meant.
    count = max(1, math.floor(share * len(members.groups) + 1e-9))
    spread = np.array([_std(members.returns[rows]) for rows in filled])
    chosen = np.argsort(-spread, kind="stable")[:count]
    return members.filtered([filled[i] for i in chosen])


def resample_on_correct(
    returns: ArrayLike,
    group: ArrayLike,
    penalty: ArrayLike,
    valid: ArrayLike | None = None,
    *,
    keep: int,
    mode: RocMode = "rank",
    minimum: tuple[int, int] = (2, 2),
    threshold: float = 0.0,
    seed: int | None = None,
) -> Resampled:
    """Keep ``keep`` members of each group, positives of little penalty first (GRPO-RoC, arXiv 2508.20722).

    ``penalty`` float ``[n]``, >= 0, e.g. ``tool_penalty``. Positives have a return above ``threshold``.
    Groups with equal returns are dropped, then those with fewer than ``keep`` valid members; a group of just
    ``keep`` stays whole. Of the others, round(negatives * keep / members) negatives stay (half to even), the
    rest positives, moved so that ``minimum = (positives, negatives)`` of each stay where there are so many.

    * ``rank`` (the release): the positives of lowest penalty and the first negatives; of equal penalties the
      earlier row wins. Nothing is random.
    * ``sample`` (the paper): positives drawn without replacement with probability proportional to
      1 / penalty, negatives uniformly, both by ``seed``. Positives of penalty 0 come before all others.
    """
    _check_roc(keep, mode, minimum, seed)
    members = _Members.of(returns, group, valid)
    penalties = members.column("penalty", penalty)
    kept: list[Ints] = []
    counts = dict.fromkeys(("equal", "short", "positives", "negatives"), 0)
    for name, rows in zip(members.ids, members.groups, strict=True):
        if not members.live(rows):
            counts["equal"] += 1
        elif rows.size < keep:
            counts["short"] += 1
        else:
            draws = None if seed is None else np.random.default_rng(derive("roc", seed, int(name)))
            good, bad = _roc_order(rows, members.returns > threshold, penalties, draws)
            k_pos, k_neg = _roc_split(good.size, bad.size, keep, minimum)
            kept.append(np.concatenate([good[:k_pos], bad[:k_neg]]))
            counts["positives"] += k_pos
            counts["negatives"] += k_neg
    plain = members.report(kept)
    report = RocReport(plain.groups, plain.kept_groups, plain.members, plain.kept, **counts)
    return Resampled(members.mask(kept), report)


def tool_penalty(
    failed: ArrayLike,
    results: ArrayLike,
    *,
    answers: ArrayLike | None = None,
    turns: ArrayLike | None = None,
    malformed: ArrayLike | None = None,
) -> Floats:
    """Penalty of a trajectory's tool errors, in [0, 1] float64 ``[n]``, plus ``format_penalty`` if asked for.

    ``failed`` of ``results`` int ``[n]`` tool results carry the tool's own error status. Their share is the
    penalty; without any result it is 0.5, neither best nor worst (GRPO-RoC). With ``answers`` and ``turns``
    given, ``format_penalty`` is added.
    """
    wrong, total = _counts("failed", failed), _counts("results", results)
    _same_shape("results", total, wrong)
    bad = np.flatnonzero(wrong > total)
    if bad.size:
        at = int(bad[0])
        raise DataError(f"failed[{at}] is {wrong[at]}; it must be at most results[{at}] = {total[at]}")
    share = np.where(total > 0, wrong / np.maximum(total, 1), 0.5)
    if answers is None and turns is None and malformed is None:
        return share
    if answers is None or turns is None:
        raise DataError("answers and turns must be given together")
    extra = format_penalty(answers, turns, malformed=malformed)
    _same_shape("answers", extra, share)
    return share + extra


def format_penalty(answers: ArrayLike, turns: ArrayLike, *, malformed: ArrayLike | None = None) -> Floats:
    """Penalty of a trajectory's answer format, in [0, 1] float64 ``[n]`` (GRPO-RoC).

    min((answers - 1) / turns, 1): 0 for exactly one answer. 1 without an answer, without a turn, or where
    ``malformed`` bool ``[n]`` says that an answer does not parse. ``answers, turns`` int ``[n]``.
    """
    given, spoken = _counts("answers", answers), _counts("turns", turns)
    _same_shape("turns", spoken, given)
    broken = (given == 0) | (spoken == 0)
    if malformed is not None:
        broken |= _flags("malformed", malformed, given)
    return np.where(broken, 1.0, np.minimum((given - 1) / np.maximum(spoken, 1), 1.0))


def overlong_filter(truncated: ArrayLike, group: ArrayLike, valid: ArrayLike | None = None) -> Filtered:
    """Keep the members that were not cut off (overlong filtering of DAPO, arXiv 2503.14476).

    ``truncated`` bool ``[n]``. To mask the loss of the others only, as published, use ``keep`` after the
    advantages; used as ``valid`` before them, the cut ones do not count in their groups either.
    """
    cut = _flags("truncated", truncated)
    members = _Members.of(np.zeros(cut.shape), group, valid)
    return members.filtered([rows[~cut[rows]] for rows in members.groups])


def soft_overlong(lengths: ArrayLike, *, max_length: int = 20480, cache: int = 4096) -> Floats:
    """Length penalty to add to the return, in [-1, 0] float64 ``[n]`` (DAPO, arXiv 2503.14476).

    0 up to ``max_length - cache`` sampled tokens, then falling in a line to -1 at ``max_length``, -1 above.
    """
    _whole("max_length", max_length, at_least=1)
    _whole("cache", cache, at_least=1)
    if cache > max_length:
        raise ConfigError(f"cache is {cache}; it must be at most max_length = {max_length}")
    over = (_counts("lengths", lengths) - (max_length - cache)) / cache
    return 0.0 - np.clip(over, 0.0, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Members:
    """A batch by groups: ``groups[i]`` holds the valid rows of group ``ids[i]``, in batch order."""

    returns: Floats  # 0 where invalid
    valid: Bools
    ids: Ints
    groups: list[Ints]

    @classmethod
    def of(cls, returns: ArrayLike, group: ArrayLike, valid: ArrayLike | None) -> _Members:
        values = _numbers("returns", returns)
        if values.size == 0:
            raise DataError("the batch is empty; it needs at least one trajectory")
        members = np.ones(values.shape, bool) if valid is None else _flags("valid", valid, values)
        labels = np.asarray(group)
        if labels.dtype.kind not in "iu":
            raise DataError(f"group has dtype {labels.dtype}; it must hold integers")
        _same_shape("group", labels, values)
        _finite("returns", values, members)
        ids, index = np.unique(labels, return_inverse=True)
        order = np.argsort(index, kind="stable")
        order = order[members[order]].astype(np.int64)
        ends = np.cumsum(np.bincount(index[members], minlength=ids.size))
        groups = list(np.split(order, ends[:-1]))
        return cls(np.where(members, values, 0.0), members, ids, groups)

    def live(self, rows: Ints) -> bool:
        """True if two of the returns differ."""
        return bool((self.returns[rows] != self.returns[rows[:1]]).any())

    def column(self, field: str, values: ArrayLike) -> Floats:
        """``values`` float64[n], checked to be >= 0 where valid; 0 elsewhere."""
        column = _numbers(field, values)
        _same_shape(field, column, self.returns)
        _finite(field, column, self.valid)
        bad = np.flatnonzero(self.valid & (column < 0))
        if bad.size:
            raise DataError(f"{field}[{bad[0]}] is {column[bad[0]]}; it must not be negative")
        return np.where(self.valid, column, 0.0)

    def mask(self, kept: Iterable[Ints]) -> Bools:
        keep = np.zeros(self.valid.shape, bool)
        keep[_joined(kept)] = True
        return keep

    def report(self, kept: list[Ints]) -> FilterReport:
        """``kept`` holds the rows of each group, empty where nothing of it is kept."""
        return FilterReport(
            groups=len(self.groups),
            kept_groups=sum(1 for rows in kept if rows.size),
            members=int(self.valid.sum()),
            kept=sum(rows.size for rows in kept),
        )

    def filtered(self, kept: list[Ints]) -> Filtered:
        return Filtered(self.mask(kept), self.report(kept))


def _roc_split(positives: int, negatives: int, keep: int, minimum: tuple[int, int]) -> tuple[int, int]:
    """How many positives and negatives of a group stay; they add up to ``keep``.

    The release rounds both shares, which adds up for even counts only; one is enough. Its case of both kinds
    below their minimum cannot arise, because the minima together are at most ``keep``.
    """
    least_pos, least_neg = min(minimum[0], positives), min(minimum[1], negatives)
    k_neg = max(round(negatives * keep / (positives + negatives)), least_neg)
    k_pos = max(keep - k_neg, least_pos)
    return k_pos, keep - k_pos


def _roc_order(
    rows: Ints, positive: Bools, penalties: Floats, draws: np.random.Generator | None
) -> tuple[Ints, Ints]:
    """Positive and negative ``rows``, each in the order in which they are taken.

    With ``draws``, positives come in the order of a draw without replacement by weight 1 / penalty: the
    smallest of exponential times with rate 1 / penalty is next, and penalty 0 is the limit of an infinite
    rate, in which the times themselves decide.
    """
    good, bad = rows[positive[rows]], rows[~positive[rows]]
    if draws is None:
        return good[np.argsort(penalties[good], kind="stable")], bad
    times = draws.exponential(size=good.size)
    return good[np.lexsort((times, times * penalties[good]))], draws.permutation(bad)


def _check_roc(keep: int, mode: str, minimum: tuple[int, int], seed: int | None) -> None:
    _whole("keep", keep, at_least=2)
    require_option("mode", mode, get_args(RocMode))
    for count in minimum:
        _whole("minimum", count, at_least=1)
    if sum(minimum) > keep:
        raise ConfigError(f"minimum is {minimum}; its sum must be at most keep = {keep}")
    if (seed is None) != (mode == "rank"):
        raise ConfigError(f"seed goes with mode='sample' and only with it; got seed={seed} with {mode!r}")


def _std(values: Floats) -> float:
    """Bessel std; sorted and shifted first, so that row order and a common offset do not decide a tie."""
    if values.size < 2:
        return 0.0
    ordered = np.sort(values)
    return float(np.std(ordered - ordered[0], ddof=1))


def _joined(parts: Iterable[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _whole(field: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{field} is {value}; it must be a whole number of at least {at_least}")


def _numbers(field: str, values: ArrayLike) -> Floats:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise DataError(f"{field} must be numbers of shape [n], got {array.dtype} {shape_of(array)}")
    return array.astype(np.float64)


def _counts(field: str, values: ArrayLike) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{field} must be integers of shape [n], got {array.dtype} {shape_of(array)}")
    bad = np.flatnonzero(array < 0)
    if bad.size:
        raise DataError(f"{field}[{bad[0]}] is {array[bad[0]]}; a count cannot be negative")
    return array.astype(np.int64)


def _flags(field: str, values: ArrayLike, like: NDArray[np.generic] | None = None) -> Bools:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind != "b":
        raise DataError(f"{field} must be bools of shape [n], got {array.dtype} {shape_of(array)}")
    if like is not None:
        _same_shape(field, array, like)
    return array


def _same_shape(field: str, array: NDArray[np.generic], like: NDArray[np.generic]) -> None:
    if array.shape != like.shape:
        raise DataError(f"{field} must have shape {shape_of(like)}, got {shape_of(array)}")


def _finite(field: str, values: Floats, members: Bools) -> None:
    bad = np.flatnonzero(members & ~np.isfinite(values))
    if bad.size:
        raise DataError(
            f"{field}[{bad[0]}] is {values[bad[0]]}; it must be finite where valid (mark unscored "
            "trajectories in `valid`)"
        )

"""A verified reward for SQL on SQLite: the query's result must equal the reference query's, also on
databases that the policy has never seen. This module must not run foreign SQL in its own process.
"""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
import tempfile
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.seeds import derive, digest
from surefoot.core.types import Scored, Trust
from surefoot.rewards.base import Episode, Reward, reward
from surefoot.rewards.verifiers.children.wire import pack, same, unpack
from surefoot.rewards.verifiers.helper import HelperDied, HelperPool, HelperTimeout
from surefoot.rewards.verifiers.mutants import mutate, temporary
from surefoot.rewards.verifiers.submission import Form, check_form, submitted, verified

# A database: the path of a file, or an SQL script that builds one.
Database = Path | str
Rows = list[tuple[Any, ...]]

_SQLITE = HelperPool(Path(__file__).parent / "children" / "sql_child.py", memory_mb=1000)
_GRACE = 2.0
_DEADLINE = 600.0
_TRIES = 12


def sql_result(
    database: Callable[[Episode], Database | Sequence[Database]],
    *,
    mutants: int = 3,
    ordered: bool = False,
    tolerance: float = 0.0,
    rows: int = 10_000,
    seconds: float = 5.0,
    form: Form = "fence",
    last: bool = False,
    name: str = "sql_result",
    weight: float = 1.0,
) -> Reward:
    """1 when the submitted query gives the rows that the reference query gives, on every database.

    ``database`` names the database of an episode (several: all are used). From the first, ``mutants``
    changed copies are made (see ``mutate``), each of which gives the reference another result, and not
    part of one that it gave before where that can be found. So a query fails that only holds the visible
    result, or names rows by keys, places or values that the reference does not name.
    Rows are compared as a multiset (``ordered``: as a sequence), by exact type (1 is not 1.0, which
    AVG returns), floats within ``tolerance`` * max(1, |reference|); column names do not count.

    The query runs on a read-only, immutable file in a helper process with bounded memory: exactly one
    SELECT or WITH statement; no PRAGMA, ATTACH, writing, schema table or function that reaches outside
    (SQLite's authorizer decides); at most ``rows`` rows; stopped after ``seconds`` of CPU time. Breaking
    any of these is 0. If the reference breaks one, or no mutant changes its result: Unscored.

    Not stopped: a query that is right by accident on every database, which a count over a handful of
    rows makes likelier; naming blobs; naming all values but one of a column in which few recur and the
    reference names that one (``IN ('open', 'paid')`` for ``<> 'void'``), or all integers of a column
    without gaps in which they recur. A query that is right but relies on what only the original data has
    (a reference whose column is not named like the key, a form of text other than ISO dates, a column
    that follows from one that the reference filters by) may fail on mutants: then give databases of your
    own and ``mutants=0``, and only they tell a copied result from a query.

    Raises ConfigError when a setting is out of range. Scoring raises DataError, so is Unscored,
    when the reference cannot be measured.
    """
    check_form(name, form)
    for key, value, low in (("mutants", mutants, 0), ("rows", rows, 1)):
        if value < low:
            raise ConfigError(f"{name}: {key} is {value}; it must be >= {low}")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ConfigError(f"{name}: tolerance is {tolerance}; it must be finite and >= 0")
    if not seconds > 0:
        raise ConfigError(f"{name}: seconds is {seconds}; it must be > 0")
    setup = _Setup(rows, seconds, mutants, ordered, tolerance)
    shelf = _Shelf()

    @reward(trust=Trust.VERIFIED, weight=weight, name=name, resolution=1.0, seconds=_DEADLINE)
    def score(episode: Episode) -> Scored:
        tests = shelf.tests(episode, database(episode), setup)
        found = submitted(episode.answer, form, last=last)
        if found.text is None:
            return verified(0.0, name, found.reason)
        for number, (path, expected) in enumerate(tests):
            try:
                mine = _run(path, found.text, setup)
            except _QueryError as error:
                return verified(0.0, name, f"database {number}: {error}")
            if not same_rows(mine, expected, ordered=ordered, tolerance=tolerance):
                return verified(0.0, name, f"database {number}: {len(mine)} rows, not the reference's")
        return verified(1.0, name, f"the reference's rows on {len(tests)} databases")

    return score


class _QueryError(Exception):
    """A query broke a rule or failed."""


@dataclass(frozen=True, slots=True)
class _Setup:
    rows: int
    seconds: float
    mutants: int
    ordered: bool
    tolerance: float


def _run(path: Path, query: str, setup: _Setup) -> Rows:
    request = {"path": str(path), "query": query, "rows": setup.rows, "seconds": setup.seconds}
    try:
        reply = _SQLITE.ask(request, setup.seconds + _GRACE)
    except (HelperTimeout, HelperDied) as error:
        # The next helper must be able to run a query here, or the machine is at fault, not the query.
        _SQLITE.ask({**request, "query": "SELECT 1"}, setup.seconds + _GRACE)
        raise _QueryError(str(error)) from error
    if "rows" not in reply:
        raise _QueryError(f"{reply['kind']}: {reply['error']}")
    return cast("Rows", unpack(reply["rows"]))


def same_rows(a: Rows, b: Rows, *, ordered: bool = False, tolerance: float = 0.0) -> bool:
    """Whether two results are equal: as sequences, or as multisets. Types are exact; see ``same``.

    With a tolerance, rows that agree in all but floats are paired in the order of their floats.
    """
    if ordered:
        return same(a, b, tolerance)
    if len(a) != len(b):
        return False
    if tolerance == 0:
        return Counter(map(_key, a)) == Counter(map(_key, b))
    mine, other = _by_exact_part(a), _by_exact_part(b)
    return mine.keys() == other.keys() and all(
        same(sorted(floats), sorted(other[key]), tolerance) for key, floats in mine.items()
    )


def _key(row: tuple[Any, ...]) -> str:
    return json.dumps(pack(tuple(0.0 if value == 0.0 and type(value) is float else value for value in row)))


def _by_exact_part(rows: Rows) -> dict[str, list[tuple[float, ...]]]:
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for row in rows:
        exact = [None if type(value) is float else [value] for value in row]
        found[json.dumps(pack(exact))].append(tuple(value for value in row if type(value) is float))
    return found


class _Shelf:
    """Databases built for this reward, on disk in a temporary folder, with the reference's results."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = threading.Lock()
        self._known: dict[str, list[tuple[Path, Rows]]] = {}

    def tests(
        self, episode: Episode, source: Database | Sequence[Database], setup: _Setup
    ) -> list[tuple[Path, Rows]]:
        """(database, the reference's rows) of every database and mutant; the policy has seen none of
        the mutants. Raises DataError when the reference cannot be measured.
        """
        gold = episode.reference
        if not isinstance(gold, str) or not gold.strip():
            raise DataError(f"task {episode.task.id}: reference is {gold!r}; it must be an SQL query")
        sources = [source] if isinstance(source, Path | str) else list(source)
        if not sources:
            raise DataError(f"task {episode.task.id}: no database is given")
        marks = [f"{item} {item.stat().st_mtime_ns}" if isinstance(item, Path) else item for item in sources]
        key = digest(gold, *marks)
        with self._lock:
            if key not in self._known:
                paths = [self._place(item) for item in sources]
                self._known[key] = self._measure(gold, paths, setup, key)
            return self._known[key]

    def _room(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="surefoot-sql-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def _place(self, source: Database) -> Path:
        """A private copy, so that nobody changes it between two queries."""
        target = self._room() / f"{digest(source, len(self._known))}.db"
        if target.exists():
            return target
        with temporary(target) as copy:
            if isinstance(source, Path):
                if not source.is_file():
                    raise DataError(f"database {source} does not exist")
                with sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True) as original:
                    original.backup(copy)
                original.close()
            else:
                copy.executescript(source)
        copy.close()
        return target

    def _measure(self, gold: str, paths: list[Path], setup: _Setup, key: str) -> list[tuple[Path, Rows]]:
        found = [(path, _reference_rows(path, gold, setup)) for path in paths]
        first, rows = found[0]
        wanted = len(found) + setup.mutants
        spare: list[tuple[Path, Rows]] = []
        for attempt in range(_TRIES * setup.mutants):
            if len(found) == wanted:
                break
            target = self._room() / f"{key}-{attempt}.db"
            mutate(first, target, derive("sql mutant", key, attempt), gold)
            changed = _rows_or_none(target, gold, setup)
            if changed is None or same_rows(changed, rows, ordered=setup.ordered, tolerance=setup.tolerance):
                target.unlink()
            elif not any(_within(changed, other) for _, other in found):
                found.append((target, changed))
            elif len(spare) < setup.mutants:
                spare.append((target, changed))
            else:
                target.unlink()
        # Some references have few possible results: then a mutant need only differ from the visible one.
        used = wanted - len(found)
        for path, _ in spare[used:]:
            path.unlink()
        found += spare[:used]
        if len(found) < wanted:
            raise DataError(
                f"only {len(found) - len(paths)} of {setup.mutants} mutants change the reference's result; "
                "a copied result could not be told from a query. Give several databases and mutants=0"
            )
        return found


def _within(rows: Rows, other: Rows) -> bool:
    """Whether ``other`` holds all of ``rows``, as multisets: a query for fewer rows may give them."""
    return Counter(map(_key, rows)) <= Counter(map(_key, other))


def _rows_or_none(path: Path, gold: str, setup: _Setup) -> Rows | None:
    """None if the reference fails on a mutant, which then proves nothing."""
    try:
        return _run(path, gold, setup)
    except _QueryError:
        return None


def _reference_rows(path: Path, gold: str, setup: _Setup) -> Rows:
    try:
        return _run(path, gold, setup)
    except _QueryError as error:
        raise DataError(f"the reference query fails: {error}") from error

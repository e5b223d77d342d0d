"""Makes changed copies of an SQLite database, on which only a query that computes its result is right.

Reads and writes databases of the task's author, never a query of the policy.
"""

from __future__ import annotations

import math
import random
import re
import sqlite3
import string
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from surefoot.core.errors import DataError

_Column = tuple[str, str]
_Renaming = dict[tuple[type, Any], Any]
# Table, the table that it refers to, and pairs of own and other column.
_Reference = tuple[str, str, list[tuple[str, str]]]

_TRIES = 12
_MOST_CELLS = 2_000_000
_FRESH = 0.4
_LITERAL = re.compile(r"""'((?:[^']|'')*)'|"((?:[^"]|"")*)"|(?<![\w.])(\d+(?:\.\d+)?)(?![\w.])""")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?!\d)")


def mutate(source: Path, target: Path, seed: int, reference: str = "") -> None:
    """Write a changed copy of the database ``source`` to ``target``; the same seed, the same copy.

    A share of the rows goes, with those that refer to them, and the rest stand in another order. In each
    column the values are renamed one to one, some to values of the same kind that were not there; a key
    and what refers to it alike. So unique columns and references stay true, and naming a visible value
    is of no use. Where few values recur and ``reference`` names one, they keep their meaning. Numbers, and
    columns of which the reference names a value, are exchanged between rows too.

    Raises DataError when a table is too large.
    """
    rng = random.Random(seed)
    with temporary(target) as copy:
        with sqlite3.connect(f"{source.as_uri()}?mode=ro&immutable=1", uri=True) as original:
            original.backup(copy)
        original.close()
        copy.execute("PRAGMA foreign_keys=OFF")
        for (trigger,) in copy.execute("SELECT name FROM sqlite_master WHERE type='trigger'").fetchall():
            copy.execute(f"DROP TRIGGER {_quoted(trigger)}")
        tables = _tables(copy)
        named = _named(reference)
        references = [*_declared(copy, tables), *_implied(copy, tables)]
        keys = _key_renamings(copy, tables, references, named, rng)
        share = rng.choice((0.15, 0.3, 0.5))
        parents = {parent.lower() for _, parent, _ in references}
        for table in tables:
            # A parent takes its dependants along.
            _change(copy, table, keys, named, rng, share / 4 if table.lower() in parents else share)
        while sum(_drop_orphans(copy, reference) for reference in references):
            pass  # a row that went may leave others behind
    copy.close()


def temporary(path: Path) -> sqlite3.Connection:
    """A connection to a file that need not survive a crash, and so is not synced."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous=OFF")
    return connection


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _tables(copy: sqlite3.Connection) -> list[str]:
    listed = copy.execute("PRAGMA table_list").fetchall()
    return sorted(row[1] for row in listed if row[0] == "main" and row[2] == "table"
                  and not row[1].startswith("sqlite_"))  # fmt: skip


def _named(reference: str) -> set[str | float]:
    """The numbers and strings (in any case) that a query names."""
    found: set[str | float] = set()
    for single, double, number in _LITERAL.findall(reference):
        if number:
            found.add(float(number))
        else:
            found.add((single.replace("''", "'") or double.replace('""', '"')).casefold())
    return found


def _is_named(value: Any, named: set[str | float]) -> bool:
    return (value.casefold() if type(value) is str else value) in named


def _change(
    copy: sqlite3.Connection,
    table: str,
    keys: Mapping[_Column, _Renaming],
    named: set[str | float],
    rng: random.Random,
    share: float,
) -> None:
    names = _names(copy, table)
    rows = copy.execute(f"SELECT {', '.join(map(_quoted, names))} FROM {_quoted(table)}").fetchall()
    if len(rows) * len(names) > _MOST_CELLS:
        raise DataError(f"table {table} is too large to change; give several databases and mutants=0")
    kept = [list(row) for row in rows if rng.random() >= share] or [list(row) for row in rows[:1]]
    rng.shuffle(kept)  # or LIMIT and OFFSET would name rows
    for at, name in enumerate(names):
        if renaming := keys.get(_column(table, name)):
            for row in kept:
                row[at] = renaming.get((type(row[at]), row[at]), row[at])
    (sql,) = copy.execute("SELECT sql FROM sqlite_master WHERE type='table' AND name=?", (table,)).fetchone()
    checked = "check" in sql.lower()
    if checked:
        kept = _write(copy, table, names, kept)  # a new key that a CHECK refuses costs its row
    for at, name in enumerate(names):
        before = [row[at] for row in kept]
        for fresh in () if _column(table, name) in keys else (_FRESH, 0.0):
            _change_column(kept, at, named, rng, fresh)
            if not checked or len(_write(copy, table, names, kept)) == len(kept):
                break
            for row, value in zip(kept, before, strict=True):  # a CHECK refuses it: change less, or nothing
                row[at] = value
    _write(copy, table, names, kept)


def _write(copy: sqlite3.Connection, table: str, names: list[str], rows: list[list[Any]]) -> list[list[Any]]:
    """Put the rows in the place of all in the table; those that its constraints admit."""
    copy.execute(f"DELETE FROM {_quoted(table)}")
    insert = (
        f"INSERT OR IGNORE INTO {_quoted(table)} ({', '.join(map(_quoted, names))}) "
        f"VALUES ({', '.join('?' * len(names))})"
    )
    return [row for row in rows if copy.execute(insert, row).rowcount > 0]


def _change_column(
    rows: list[list[Any]], at: int, named: set[str | float], rng: random.Random, fresh: float
) -> None:
    """Rename the values of a column that is no key, and exchange them between rows; NULL and blobs stay."""
    places = [row for row in rows if type(row[at]) in (int, float, str)]
    values = [row[at] for row in places]
    recur = 2 * len(set(values)) <= len(values)
    told = any(_is_named(value, named) for value in values)
    # Text is not exchanged without need, since one text often belongs to another (a town to its country).
    if told or any(type(value) is not str for value in values):
        values = _drawn(values, rng) if recur else rng.sample(values, len(values))
    renaming = {} if told and recur else _renaming(values, named, rng, fresh, 0 if recur else len(values))
    for row, value in zip(places, values, strict=True):
        row[at] = renaming.get((type(value), value), value)


def _drawn(values: list[Any], rng: random.Random) -> list[Any]:
    """As many of the values, some more often and some less, so that counts change both ways."""
    weights = {value: rng.expovariate(1.0) for value in dict.fromkeys(values)}
    return rng.choices(values, [weights[value] for value in values], k=len(values))


def _renaming(
    values: Iterable[Any], named: set[str | float], rng: random.Random, fresh: float, more: int = 0
) -> _Renaming:
    """New names for values, one to one: they change places, and a share ``fresh`` of those that the
    reference does not name give way to new ones. ``more``: integers may go that far above the largest.
    """
    found: _Renaming = {}
    taken: set[Any] = set(values)
    for kind, make in ((int, _integers), (float, _floats), (str, _texts)):
        old = cast("list[Any]", sorted(value for value in taken if type(value) is kind))
        new = list(old)
        draw = make(old, more, rng) if old else None
        free = [i for i, value in enumerate(old) if not _is_named(value, named)]
        for i in rng.sample(free, math.ceil(fresh * len(free))):
            tries = (draw(old[i]) for _ in range(_TRIES)) if draw else ()
            new[i] = next((value for value in tries if value not in taken), old[i])
            taken.add(new[i])
        rng.shuffle(new)
        found.update(((kind, a), b) for a, b in zip(old, new, strict=True))
    return found


def _integers(old: list[int], more: int, rng: random.Random) -> Callable[[int], int]:
    return lambda _: rng.randint(old[0], min(old[-1] + more, 2**63 - 1))


def _floats(old: list[float], more: int, rng: random.Random) -> Callable[[float], float]:
    """Between the least and the largest, with as many decimals as the values have."""
    digits = max(len(repr(value).partition(".")[2]) for value in old)
    finite = math.isfinite(old[-1] - old[0])
    return lambda value: round(rng.uniform(old[0], old[-1]), digits) if finite else value


def _texts(old: list[str], more: int, rng: random.Random) -> Callable[[str], str]:
    """The same text with another letter, digit or day of the month; JSON as it is."""
    foreign = "".join(
        sorted({sign for text in old for sign in text if sign.isalpha() and not sign.isascii()})
    )
    kinds = (string.ascii_lowercase, string.ascii_uppercase, foreign, string.digits)

    def other(text: str) -> str:
        if _DATE.match(text):
            return f"{text[:8]}{rng.randint(1, 28):02}{text[10:]}"
        if text[:1] in ("{", "["):
            return text
        places = [i for i, sign in enumerate(text) if sign.isalpha()]
        # Of a number or a time only the last digit, which may be any.
        places = places or [i for i, sign in enumerate(text) if sign in string.digits][-1:]
        if not places:
            return text
        at = rng.choice(places)
        return text[:at] + rng.choice(next(kind for kind in kinds if text[at] in kind)) + text[at + 1 :]

    return other


def _key_renamings(
    copy: sqlite3.Connection,
    tables: list[str],
    references: list[_Reference],
    named: set[str | float],
    rng: random.Random,
) -> dict[_Column, _Renaming]:
    """For each column that is part of a key or refers to one, how its values are renamed; columns that
    are bound by references share one renaming.
    """
    keys = {_column(table, name) for table in tables for key in _keys(copy, table) for name in key}
    root = {column: column for column in keys}

    def top(column: _Column) -> _Column:
        while root.setdefault(column, column) != column:
            column = root[column]
        return column

    for table, parent, pairs in references:
        for own, other in pairs:
            root[top(_column(table, own))] = top(_column(parent, other))
    groups: dict[_Column, list[_Column]] = defaultdict(list)
    for column in sorted(root):
        groups[top(column)].append(column)
    found: dict[_Column, _Renaming] = {}
    for columns in groups.values():
        asked = " UNION ".join(f"SELECT {_quoted(name)} FROM {_quoted(table)}" for table, name in columns)
        values = [value for (value,) in copy.execute(asked)]
        found |= dict.fromkeys(columns, _renaming(values, named, rng, _FRESH, len(values)))
    return found


def _column(table: str, name: str) -> _Column:
    """SQLite's names are the same in any case."""
    return table.lower(), name.lower()


def _names(copy: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in copy.execute(f"PRAGMA table_xinfo({_quoted(table)})") if row[6] == 0]


def _keys(copy: sqlite3.Connection, table: str) -> list[list[str]]:
    """The columns of the primary key and of every unique index."""
    found = [_primary(copy, table)]
    for row in copy.execute(f"PRAGMA index_list({_quoted(table)})").fetchall():
        if row[2]:
            indexed = copy.execute(f"PRAGMA index_info({_quoted(row[1])})").fetchall()
            found.append([item[2] for item in indexed if item[2]])
    return [key for key in found if key]


def _primary(copy: sqlite3.Connection, table: str) -> list[str]:
    listed = copy.execute(f"PRAGMA table_info({_quoted(table)})").fetchall()
    return [row[1] for row in sorted(listed, key=lambda row: row[5]) if row[5]]


def _declared(copy: sqlite3.Connection, tables: list[str]) -> Iterator[_Reference]:
    known = {_column(table, name) for table in tables for name in _names(copy, table)}
    for table in tables:
        parents: dict[int, str] = {}
        pairs: dict[int, list[tuple[str, str]]] = defaultdict(list)
        listed = copy.execute(f"PRAGMA foreign_key_list({_quoted(table)})").fetchall()
        for number, at, parent, own, other, *_ in sorted(listed, key=lambda row: (row[0], row[1])):
            parents[number] = parent
            pairs[number].append((own, other or "".join(_primary(copy, parent)[at : at + 1])))
        for number, parent in parents.items():
            # A reference to a table or column that does not exist binds nothing.
            if all(_column(parent, other) in known for _, other in pairs[number]):
                yield table, parent, pairs[number]


def _implied(copy: sqlite3.Connection, tables: list[str]) -> Iterator[_Reference]:
    """References that nobody declared: named like a key (``dept_id``, ``id``), and all values are its."""
    single = [(table, key[0]) for table in tables for key in _keys(copy, table) if len(key) == 1]
    for table in tables:
        for name in _names(copy, table):
            found: list[tuple[bool, bool, str, str]] = []
            for parent, key in single:
                # Every table may have an "id" of its own.
                alike = name.lower() != "id" and name.lower().endswith(key.lower())
                other = _column(table, name) != _column(parent, key)
                if alike and other and _holds_all(copy, parent, key, table, name):
                    stem = parent.lower().rstrip("s")
                    found.append((stem not in name.lower(), parent != table, parent, key))
            if found:  # several keys 1, 2, 3... may fit: the one whose table the name tells, or the own
                _, _, parent, key = min(found)
                yield table, parent, [(name, key)]


def _holds_all(copy: sqlite3.Connection, parent: str, key: str, table: str, name: str) -> bool:
    values = f"SELECT {_quoted(key)} FROM {_quoted(parent)} WHERE {_quoted(key)} IS NOT NULL"
    strange = f"SELECT 1 FROM {_quoted(table)} WHERE {_quoted(name)} NOT IN ({values}) LIMIT 1"
    return copy.execute(strange).fetchone() is None


def _drop_orphans(copy: sqlite3.Connection, reference: _Reference) -> int:
    """Delete the rows whose reference leads nowhere; how many."""
    table, parent, pairs = reference
    matches = [f"p.{_quoted(other)} = {_quoted(table)}.{_quoted(own)}" for own, other in pairs]
    present = [f"{_quoted(own)} IS NOT NULL" for own, _ in pairs]
    orphans = (
        f"{' AND '.join(present)} AND NOT EXISTS "
        f"(SELECT 1 FROM {_quoted(parent)} p WHERE {' AND '.join(matches)})"
    )
    if table.lower() == parent.lower():  # or the loss of a tree's root would take the tree
        copy.execute(f"UPDATE OR IGNORE {_quoted(table)} SET {_quoted(pairs[0][0])} = NULL WHERE {orphans}")
    return copy.execute(f"DELETE FROM {_quoted(table)} WHERE {orphans}").rowcount

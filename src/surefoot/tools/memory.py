"""A memory that an agent keeps by ADD, UPDATE, DELETE and NOOP (Memory-R1, arXiv:2508.19828).

One store on SQLite with four ways of keeping notes: flat, linked (A-MEM, arXiv:2502.12110), temporal (Zep,
arXiv:2501.13956) and hierarchical. Time is a number that the caller or a counter gives, never the clock, so
that episodes repeat. Must not know who calls it or what the notes are about.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from surefoot.core.errors import ConfigError, DataError, StorageError
from surefoot.tools.base import Tool, ToolError, tool, tools_of

Kind = Literal["ADD", "UPDATE", "DELETE", "NOOP"]
_WORD = re.compile(r"\w+")
_MOST_WORDS = 64
_LAYOUT = 1
_NOW = "until IS NULL"  # the version of a note that holds now
# note: the id that the agent knows; a temporal store keeps several rows (versions) of one note.
_TABLES = """
CREATE TABLE rows (
  row INTEGER PRIMARY KEY, note INTEGER NOT NULL, text TEXT NOT NULL, topic TEXT NOT NULL DEFAULT '',
  since REAL NOT NULL, until REAL, made INTEGER NOT NULL, ended INTEGER
);
CREATE INDEX rows_note ON rows (note, row);
CREATE VIRTUAL TABLE words USING fts5 (text, topic, tokenize = 'porter unicode61');
CREATE TABLE links (low INTEGER NOT NULL, high INTEGER NOT NULL, PRIMARY KEY (low, high)) WITHOUT ROWID;
CREATE TABLE operations (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, note INTEGER, at REAL NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Note:
    """What a memory holds. ``since`` <= t < ``until`` is when it was true (``until`` None: it still is)."""

    id: int
    text: str
    topic: str = ""
    since: float = 0.0
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of keeping a memory. ``id`` is for UPDATE and DELETE, ``text`` for ADD and UPDATE."""

    kind: Kind
    id: int | None = None
    text: str = ""
    topic: str = ""


class MemoryStore:
    """A flat memory: UPDATE replaces a note's text, DELETE removes it. The other stores build on it.

    ``path`` is one SQLite file (WAL, synced at each operation: a kill loses nothing that was answered);
    None keeps everything in this process. ``most`` notes of ``characters`` each. Safe between threads.
    What the agent does wrong raises ToolError with a text for it; a file that is not a memory of this
    kind raises StorageError.
    """

    kind: ClassVar[str] = "flat"

    def __init__(self, path: Path | None = None, *, most: int = 1000, characters: int = 1000) -> None:
        for name, value in (("most", most), ("characters", characters)):
            if value < 1:
                raise ConfigError(f"memory: {name} is {value}; it must be >= 1")
        self.path, self.most, self.characters = path, most, characters
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA busy_timeout = 5000")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._prepare()
        except sqlite3.Error as error:
            raise StorageError(f"memory {path}: {error}") from error

    def _prepare(self) -> None:
        with self._changing():
            layout = self._one("PRAGMA user_version")[0]
            if layout == 0 and not self._one("SELECT count(*) FROM sqlite_master")[0]:
                for statement in _TABLES.split(";\n"):
                    self._db.execute(statement)
                self._db.execute("CREATE TABLE store (kind TEXT NOT NULL)")
                self._db.execute("INSERT INTO store VALUES (?)", (self.kind,))
                self._db.execute(f"PRAGMA user_version = {_LAYOUT}")
            elif layout != _LAYOUT:
                raise StorageError(f"memory {self.path}: layout {layout}; this version reads {_LAYOUT}")
            self._check_kind()

    def _check_kind(self) -> None:
        found = self._one("SELECT kind FROM store")[0]
        if found != self.kind:
            raise StorageError(f"memory {self.path or 'snapshot'} is {found}; it was opened as {self.kind}")

    # ---- the four operations

    def add(self, text: str, *, topic: str = "", when: float | None = None) -> Note:
        """Keep a new note; ids count up from 1 and are never used again."""
        return self._add(text, topic, when)

    def update(self, id: int, text: str, *, when: float | None = None) -> Note:
        """Change what a note says."""
        return self._update(id, text, when)

    def delete(self, id: int, *, when: float | None = None) -> Note:
        """Forget a note; the note as it was."""
        with self._changing():
            old = self.get(id)
            self._end(old, self._record("DELETE", id, when))
            return old

    def noop(self, *, when: float | None = None) -> None:
        """Decide to change nothing, which is on record like every other operation."""
        with self._changing():
            self._record("NOOP", None, when)

    def apply(self, operation: Operation, *, when: float | None = None) -> Note | None:
        """Carry out one operation; the note it is about. Raises ToolError where a part is missing."""
        if operation.kind == "ADD":
            return self.add(operation.text, topic=operation.topic, when=when)
        if operation.kind == "NOOP":
            return self.noop(when=when)
        if operation.kind not in ("UPDATE", "DELETE"):
            raise ToolError(f"there is no operation {operation.kind!r}; use ADD, UPDATE, DELETE or NOOP")
        if operation.id is None:
            raise ToolError(f"{operation.kind} needs the id of a note")
        if operation.kind == "UPDATE":
            return self.update(operation.id, operation.text, when=when)
        return self.delete(operation.id, when=when)

    # ---- reading

    def get(self, id: int) -> Note:
        """The note as it stands now. Raises ToolError when there is none."""
        known = 0 < id < 2**63  # SQLite holds no larger number
        found = self._notes(f"note = ? AND {_NOW}", (id,)) if known else []
        if not found:
            raise ToolError(f"there is no note {id}")
        return found[0]

    def notes(self) -> list[Note]:
        """All notes as they stand now, by id."""
        return self._notes(_NOW)

    def search(self, query: str, k: int = 5) -> list[Note]:
        """The ``k`` notes that fit ``query`` best by BM25, equal ones by id; [] when no word is known."""
        return [note for note, _ in self._ranked(query, k, _NOW)]

    def operations(self) -> list[tuple[Kind, int | None]]:
        """Every operation so far, with the note it was about."""
        return [(row[0], row[1]) for row in self._all("SELECT kind, note FROM operations ORDER BY number")]

    def __len__(self) -> int:
        return int(self._one(f"SELECT count(*) FROM rows WHERE {_NOW}")[0])

    # ---- episodes

    def snapshot(self) -> bytes:
        """Everything that the memory holds, as bytes for :meth:`restore`."""
        with self._lock, _memory_database() as copy:
            self._db.backup(copy)
            data = copy.serialize()
        # Bytes 18 and 19 of the format say "write-ahead log", with which no copy in memory can be opened.
        data = data[:18] + b"\x01\x01" + data[20:]
        return hashlib.sha256(data).digest() + data

    def restore(self, snapshot: bytes) -> None:
        """Hold exactly what a snapshot held.

        Raises DataError for a damaged one, StorageError for another kind."""
        check, data = snapshot[:32], snapshot[32:]
        if hashlib.sha256(data).digest() != check:
            raise DataError(f"the memory snapshot is damaged ({len(snapshot)} bytes)")
        with self._lock, _memory_database() as copy:
            copy.deserialize(data)
            found = copy.execute("SELECT kind FROM store").fetchone()[0]
            if found != self.kind:
                raise StorageError(f"the snapshot is of a {found} memory; this one is {self.kind}")
            copy.backup(self._db)

    def close(self) -> None:
        """Close the file. Closing twice is no error."""
        with self._lock:
            self._db.close()

    def tools(self) -> tuple[Tool, ...]:
        """The memory as tools for a policy."""
        return tools_of(_FlatTools(self))

    # ---- what the other stores change

    def _add(self, text: str, topic: str, when: float | None, since: float | None = None) -> Note:
        with self._changing():
            if len(self) >= self.most:
                raise ToolError(f"the memory is full ({self.most} notes); update or delete one")
            number = self._one("SELECT coalesce(max(note), 0) + 1 FROM operations WHERE kind = 'ADD'")[0]
            at = self._record("ADD", number, when)
            self._insert(number, self._text(text), self._topic(topic), at if since is None else since)
            self._after_add(number)
            return self.get(number)

    def _update(self, id: int, text: str, when: float | None, since: float | None = None) -> Note:
        with self._changing():
            old = self.get(id)
            at = self._record("UPDATE", id, when)
            self._replace(old, self._text(text), at if since is None else since)
            return self.get(id)

    def _after_add(self, note: int) -> None:
        """Hook: a note was added."""

    def _replace(self, old: Note, text: str, at: float) -> None:
        self._db.execute("UPDATE rows SET text = ? WHERE note = ?", (text, old.id))
        self._db.execute(
            "UPDATE words SET text = ? WHERE rowid = (SELECT row FROM rows WHERE note = ?)", (text, old.id)
        )

    def _end(self, old: Note, at: float) -> None:
        self._db.execute("DELETE FROM words WHERE rowid IN (SELECT row FROM rows WHERE note = ?)", (old.id,))
        self._db.execute("DELETE FROM rows WHERE note = ?", (old.id,))
        self._db.execute("DELETE FROM links WHERE low = ? OR high = ?", (old.id, old.id))

    # ---- SQLite

    def _insert(self, note: int, text: str, topic: str, since: float) -> None:
        number = self._one("SELECT count(*) FROM operations")[0]
        made = self._db.execute(
            "INSERT INTO rows (note, text, topic, since, made) VALUES (?, ?, ?, ?, ?)",
            (note, text, topic, since, number),
        )
        self._db.execute(
            "INSERT INTO words (rowid, text, topic) VALUES (?, ?, ?)", (made.lastrowid, text, topic)
        )

    def _record(self, kind: Kind, note: int | None, when: float | None) -> float:
        """Put an operation on record; its time, which never runs backwards."""
        last = float(self._one("SELECT coalesce(max(at), 0) FROM operations")[0])
        at = last + 1 if when is None else float(when)
        if not at >= last:
            raise ToolError(f"the time {at:g} lies before the last operation's, {last:g}")
        self._db.execute("INSERT INTO operations (kind, note, at) VALUES (?, ?, ?)", (kind, note, at))
        return at

    def _ranked(
        self, query: str, k: int, where: str, values: Sequence[object] = ()
    ) -> list[tuple[Note, float]]:
        words = list(dict.fromkeys(_WORD.findall(query)))[:_MOST_WORDS]
        if not words or k < 1:
            return []
        match = " OR ".join(f'"{word}"' for word in words)  # quoted, so that no word is an operator
        found = self._all(
            "SELECT rows.note, rows.text, rows.topic, rows.since, rows.until, bm25(words) AS rank "
            f"FROM words JOIN rows ON rows.row = words.rowid WHERE words MATCH ? AND {where} "
            "ORDER BY round(rank, 9), rows.note, rows.row LIMIT ?",
            (match, *values, k),
        )
        return [(Note(*row[:5]), -float(row[5])) for row in found]

    def _notes(self, where: str, values: Sequence[object] = ()) -> list[Note]:
        columns = "note, text, topic, since, until"
        return [
            Note(*row)
            for row in self._all(f"SELECT {columns} FROM rows WHERE {where} ORDER BY note, row", values)
        ]

    def _text(self, text: str) -> str:
        if not text.strip():
            raise ToolError("the text is empty")
        if len(text) > self.characters:
            raise ToolError(f"the text has {len(text)} characters; a note holds {self.characters}")
        return text.encode("utf-8", "replace").decode()

    def _topic(self, topic: str) -> str:
        if topic:
            raise ToolError(f"a {self.kind} memory has no topics")
        return ""

    def _one(self, statement: str, values: Sequence[object] = ()) -> tuple[Any, ...]:
        return self._all(statement, values)[0]

    def _all(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._db.execute(statement, values).fetchall()
            except (sqlite3.Error, OverflowError) as error:
                raise StorageError(f"memory {self.path or '(in this process)'}: {error}") from error

    @contextmanager
    def _changing(self) -> Generator[None]:
        """One transaction: all of it is kept or nothing."""
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise StorageError(f"memory {self.path or '(in this process)'}: {error}") from error
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")


@contextmanager
def _memory_database() -> Generator[sqlite3.Connection]:
    database = sqlite3.connect(":memory:")
    try:
        yield database
    finally:
        database.close()


class LinkedMemory(MemoryStore):
    """Notes that know their like: a new note is linked to the ``near`` most similar older ones.

    A search fills half its budget (rounded up) by words and the rest with what is linked to those, then
    with further matches, so that it returns no more notes than a flat one does.
    """

    kind = "linked"

    def __init__(
        self, path: Path | None = None, *, most: int = 1000, characters: int = 1000, near: int = 2
    ) -> None:
        self.near = near
        super().__init__(path, most=most, characters=characters)

    def link(self, first: int, second: int) -> None:
        """Link two notes by hand. Raises ToolError unless both are there and differ."""
        with self._changing():
            if self.get(first).id == self.get(second).id:
                raise ToolError("a note cannot be linked to itself")
            self._link(first, second)

    def linked(self, id: int) -> list[Note]:
        """The notes linked to one, by id."""
        where = "note IN (SELECT high FROM links WHERE low = ? UNION SELECT low FROM links WHERE high = ?)"
        return self._notes(where, (id, id))

    def search(self, query: str, k: int = 5) -> list[Note]:
        found = super().search(query, k)
        chosen = {note.id: note for note in found[: (k + 1) // 2]}
        for note in list(chosen.values()):
            for other in self.linked(note.id):
                if len(chosen) < k:
                    chosen.setdefault(other.id, other)
        for note in found:
            if len(chosen) < k:
                chosen.setdefault(note.id, note)
        return list(chosen.values())

    def tools(self) -> tuple[Tool, ...]:
        return tools_of(_LinkedTools(self))

    def _after_add(self, note: int) -> None:
        similar = super().search(self.get(note).text, self.near + 1)
        for other in [item for item in similar if item.id != note][: self.near]:
            self._link(note, other.id)

    def _link(self, first: int, second: int) -> None:
        pair = (min(first, second), max(first, second))
        self._db.execute("INSERT OR IGNORE INTO links VALUES (?, ?)", pair)


class TemporalMemory(MemoryStore):
    """Notes that are never lost: UPDATE and DELETE end the old version, and a search can ask about then.

    Two times are kept for each version: when it was true (``since``, which may lie before the memory learned
    of it, and ``until``), and the numbers of the operations that brought and ended it, which
    :meth:`believed` reads.
    """

    kind = "temporal"

    def add(
        self, text: str, *, topic: str = "", when: float | None = None, since: float | None = None
    ) -> Note:
        """Keep a new note, true ``since`` then (default: from this operation on)."""
        return self._add(text, topic, when, since)

    def update(self, id: int, text: str, *, when: float | None = None, since: float | None = None) -> Note:
        """Let a note say something else ``since`` then. Raises ToolError when that is before it was true."""
        return self._update(id, text, when, since)

    def search(self, query: str, k: int = 5, *, at: float | None = None) -> list[Note]:
        """Like a flat search, over what was true at time ``at`` (default: what is true now)."""
        if at is None:
            return super().search(query, k)
        where = "rows.since <= ? AND (rows.until IS NULL OR rows.until > ?)"
        return [note for note, _ in self._ranked(query, k, where, (at, at))]

    def at(self, time: float) -> list[Note]:
        """All notes that were true at ``time``, by id."""
        return self._notes("since <= ? AND (until IS NULL OR until > ?)", (time, time))

    def believed(self, operations: int) -> list[Note]:
        """The notes that the memory held for true after its first ``operations`` operations."""
        return self._notes("made <= ? AND (ended IS NULL OR ended > ?)", (operations, operations))

    def history(self, id: int) -> list[Note]:
        """Every version of a note, oldest first; [] when there never was one."""
        return self._notes("note = ?", (id,))

    def tools(self) -> tuple[Tool, ...]:
        return tools_of(_TemporalTools(self))

    def _replace(self, old: Note, text: str, at: float) -> None:
        if not at >= old.since:
            raise ToolError(f"note {old.id} is true since {old.since:g}; {at:g} lies before that")
        self._end(old, at)
        self._insert(old.id, text, old.topic, at)

    def _end(self, old: Note, at: float) -> None:
        number = self._one("SELECT count(*) FROM operations")[0]
        self._db.execute(
            f"UPDATE rows SET until = ?, ended = ? WHERE note = ? AND {_NOW}",
            (max(at, old.since), number, old.id),
        )


class HierarchicalMemory(MemoryStore):
    """Notes under topics. A search first chooses the ``wide`` best topics, then the best notes in them.

    A topic is as good as the sum of its matching notes; each note goes under the topic it was added with.
    """

    kind = "hierarchical"

    def __init__(
        self, path: Path | None = None, *, most: int = 1000, characters: int = 1000, wide: int = 2
    ) -> None:
        if wide < 1:
            raise ConfigError(f"memory: wide is {wide}; it must be >= 1")
        self.wide = wide
        super().__init__(path, most=most, characters=characters)

    def topics(self) -> dict[str, int]:
        """How many notes each topic holds, by name."""
        rows = self._all("SELECT topic, count(*) FROM rows GROUP BY topic ORDER BY topic")
        return {str(topic): int(count) for topic, count in rows}

    def search(self, query: str, k: int = 5, *, topic: str = "") -> list[Note]:
        """The best ``k`` notes of the best topics, or of the one that is named."""
        ranked = self._ranked(query, self.most, _NOW)
        chosen = {_topic_name(topic)} if topic else self._best_topics(ranked)
        return [note for note, _ in ranked if note.topic in chosen][: max(k, 0)]

    def tools(self) -> tuple[Tool, ...]:
        return tools_of(_HierarchicalTools(self))

    def _best_topics(self, ranked: Sequence[tuple[Note, float]]) -> set[str]:
        weights: dict[str, float] = {}
        for note, score in ranked:
            weights[note.topic] = weights.get(note.topic, 0.0) + score
        return set(sorted(weights, key=lambda topic: (-round(weights[topic], 9), topic))[: self.wide])

    def _topic(self, topic: str) -> str:
        name = _topic_name(topic)
        if not name or len(name) > 60:
            raise ToolError("a note needs a topic of 1 to 60 characters")
        return name


def _topic_name(topic: str) -> str:
    return " ".join(topic.split()).casefold().encode("utf-8", "replace").decode()


STORES: Mapping[str, type[MemoryStore]] = {
    store.kind: store for store in (MemoryStore, LinkedMemory, TemporalMemory, HierarchicalMemory)
}


# -------------------- as tools


class _Changes:
    """The operations that every memory offers."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    @tool
    def memory_update(self, id: int, text: str) -> str:
        """Replace the text of a note that is no longer right. Needs its id."""
        return f"Updated note {self.store.update(id, text).id}."

    @tool
    def memory_delete(self, id: int) -> str:
        """Forget a note that is wrong or useless. Needs its id."""
        return f"Deleted note {self.store.delete(id).id}."

    @tool
    def memory_noop(self) -> str:
        """Leave the memory as it is, because there is nothing new to keep."""
        self.store.noop()
        return "Nothing was changed."


class _FlatTools(_Changes):
    @tool
    def memory_add(self, text: str) -> str:
        """Keep a new note for later."""
        return f"Added note {self.store.add(text).id}."

    @tool
    def memory_search(self, query: str, k: int = 5) -> str:
        """Find the notes that fit a query best."""
        return shown(self.store.search(query, min(k, 20)))


class _LinkedTools(_FlatTools):
    store: LinkedMemory

    @tool
    def memory_link(self, first: int, second: int) -> str:
        """Link two notes that belong together; a search that finds one then finds the other."""
        self.store.link(first, second)
        return f"Linked notes {first} and {second}."


class _TemporalTools(_Changes):
    store: TemporalMemory

    @tool
    def memory_add(self, text: str) -> str:
        """Keep a new note for later."""
        return f"Added note {self.store.add(text).id}."

    @tool
    def memory_search(self, query: str, k: int = 5, at: float | None = None) -> str:
        """Find the notes that fit a query best; with a time, among what was true at that time."""
        return shown(self.store.search(query, min(k, 20), at=at), times=True)


class _HierarchicalTools(_Changes):
    store: HierarchicalMemory

    @tool
    def memory_add(self, topic: str, text: str) -> str:
        """Keep a new note for later, under a topic."""
        note = self.store.add(text, topic=topic)
        return f"Added note {note.id} under {note.topic!r}."

    @tool
    def memory_topics(self) -> str:
        """List all topics with the number of notes under each."""
        rows = [f"{name}: {count}" for name, count in self.store.topics().items()]
        return "\n".join(rows) or "There are no topics yet."

    @tool
    def memory_search(self, query: str, k: int = 5, topic: str = "") -> str:
        """Find the notes that fit a query best, in all topics or in one."""
        return shown(self.store.search(query, min(k, 20), topic=topic), topics=True)


def shown(notes: Sequence[Note], *, times: bool = False, topics: bool = False) -> str:
    """One line a note, ``3: text``, with its time or topic where asked for."""
    lines: list[str] = []
    for note in notes:
        head = f"{note.id} [{note.topic}]" if topics else str(note.id)
        if times:
            head += (
                f" (since {note.since:g})" if note.until is None else f" ({note.since:g} to {note.until:g})"
            )
        lines.append(f"{head}: {' '.join(note.text.split())}")
    return "\n".join(lines) or "Nothing was found."

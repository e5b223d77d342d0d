"""The trajectory store: finished groups in parquet, work in progress in a journal, credit beside them.

An episode is in the journal, on disk, the moment it ends; a unit of work (one step, one evaluation)
becomes one parquet file at once, and only then is its journal removed. This module must not know what
is trained on.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

from surefoot.core.errors import DataError, StorageError
from surefoot.core.types import Group, Task, Trajectory
from surefoot.runs import records, tables
from surefoot.runs.directory import RunDirectory, check_name
from surefoot.runs.files import append_json, read_json_lines, remove, write_atomic

_NO_LABELS: Mapping[str, str | int] = MappingProxyType({})
_JOURNAL_SUFFIX = ".journal.jsonl"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One episode of a unit of work that was not finished."""

    group_id: str
    task: Task
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class CreditRow:
    """What one trajectory was trained with; ``advantage`` is None exactly when it was not used.

    ``turn_advantages``: the mean over the tokens of each turn, empty where it is the same for all.
    """

    trajectory_id: str
    advantage: float | None
    used: bool
    reason: str
    turn_advantages: tuple[float, ...] = ()


class Journal:
    """Where the episodes of one unit of work go as they end. Made by :meth:`TrajectoryStore.journal`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open = True

    def append(self, group_id: str, task: Task, trajectory: Trajectory) -> None:
        """Put one finished episode on disk (one line, one fsync). Raises StorageError."""
        if not self._open:
            raise StorageError(f"{self._path} is closed; trajectory {trajectory.id} came too late")
        line = {
            "group_id": group_id,
            "task": records.to_plain(records.task_record(task)),
            "trajectory": records.to_plain(records.trajectory_record(trajectory)),
            "segments": [records.segment_record(segment) for segment in trajectory.segments],
        }
        append_json(self._path, line)

    def close(self) -> None:
        """Refuse further episodes; what was appended stays."""
        self._open = False


class TrajectoryStore:
    """Reads and writes the trajectories of one run. ``name`` is a unit of work, such as ``rl-000012``."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def write(self, name: str, groups: Sequence[Group], labels: Mapping[str, str | int] = _NO_LABELS) -> Path:
        """Write all groups of a unit to ``trajectories/<name>.parquet`` at once and drop its journal.

        The same groups give the same bytes. Each label becomes a column (``arm``, ``stage``,
        ``step``, ...). Raises StorageError when the disk refuses; the journal then still stands.
        """
        self._run.require_writable()
        path = self._path(name)
        write_atomic(path, tables.to_parquet(tables.trajectory_table(name, groups, labels)))
        remove(self._journal_path(name))
        return path

    def read(self, name: str) -> list[Group]:
        """The groups of a unit, bit for bit as written. Raises StorageError when missing or damaged."""
        path = self._path(name)
        table = tables.read_parquet(path)
        try:
            return tables.groups_of(table)
        except (KeyError, ValueError, TypeError, AttributeError, DataError) as error:
            raise tables.damaged(path, error) from error

    def exists(self, name: str) -> bool:
        """True when the unit was finished."""
        return self._path(name).is_file()

    def names(self) -> list[str]:
        """The finished units, sorted."""
        return sorted(path.stem for path in self._run.trajectories.glob("[!.]*.parquet"))

    def journals(self) -> list[str]:
        """The units that were begun and not finished, sorted."""
        found = self._run.trajectories.glob(f"[!.]*{_JOURNAL_SUFFIX}")
        return sorted(path.name.removesuffix(_JOURNAL_SUFFIX) for path in found)

    @contextmanager
    def journal(self, name: str) -> Generator[Journal]:
        """The journal of a unit of work, open for episodes until the block ends.

        A journal that an interrupted run left is kept and added to, for :meth:`compare_journal`.
        """
        self._run.require_writable()
        journal = Journal(self._journal_path(name))
        try:
            yield journal
        finally:
            journal.close()

    def read_journal(self, name: str) -> list[JournalEntry]:
        """The episodes of an unfinished unit; of one that was run again, the last is given."""
        latest = {(entry.group_id, entry.trajectory.id): entry for entry in self._entries(name)}
        return list(latest.values())

    def compare_journal(self, name: str, groups: Sequence[Group]) -> list[str]:
        """Ids of journalled trajectories that ``groups``, the replay of the unit, does not hold alike.

        Empty when the replay is exact. Scores are left out, since they come after the journal; so are
        episodes that the machinery ended, since deadlines and interrupts do not repeat.
        """
        replayed = {
            (trajectory.group_id, trajectory.id): _fingerprint(group.task, trajectory)
            for group in groups
            for trajectory in group.trajectories
        }
        differing: dict[str, None] = {}
        for entry in self._entries(name):
            again = replayed.get((entry.group_id, entry.trajectory.id))
            if not entry.trajectory.stop.is_fault and again != _fingerprint(entry.task, entry.trajectory):
                differing[entry.trajectory.id] = None
        return list(differing)

    def write_credit(
        self,
        name: str,
        ids: Sequence[str],
        advantages: Sequence[float | None],
        reasons: Sequence[str],
        turns: Sequence[Sequence[float]] | None = None,
    ) -> Path:
        """Write ``credit/<name>.parquet``: each trajectory's advantage, or None and why it was unused.

        ``turns``: advantages by turn where they differ, else empty.
        """
        self._run.require_writable()
        path = self._credit_path(name)
        write_atomic(path, tables.to_parquet(tables.credit_table(name, ids, advantages, reasons, turns)))
        return path

    def read_credit(self, name: str) -> list[CreditRow]:
        """The credit of a unit, in the order written. Raises StorageError when missing or damaged."""
        path = self._credit_path(name)
        table = tables.read_parquet(path)
        try:
            return [
                CreditRow(
                    trajectory_id=records.unescape(row["trajectory_id"]),
                    advantage=row["advantage"],
                    used=row["used"],
                    reason=records.unescape(row["reason"]),
                    turn_advantages=tuple(row["turn_advantages"]),
                )
                for row in cast("list[records.Record]", table.to_pylist())
            ]
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise tables.damaged(path, error) from error

    def _entries(self, name: str) -> list[JournalEntry]:
        path = self._journal_path(name)
        try:
            return [_entry(line) for line in read_json_lines(path)]
        except (KeyError, ValueError, TypeError, AttributeError, DataError) as error:
            raise tables.damaged(path, error) from error

    def _path(self, name: str) -> Path:
        return self._run.trajectories / f"{check_name(name, 'trajectory file')}.parquet"

    def _journal_path(self, name: str) -> Path:
        return self._run.trajectories / f"{check_name(name, 'trajectory file')}{_JOURNAL_SUFFIX}"

    def _credit_path(self, name: str) -> Path:
        return self._run.credit / f"{check_name(name, 'credit file')}.parquet"


def _entry(line: records.Record) -> JournalEntry:
    segments = tuple(records.segment_of(segment) for segment in line["segments"])
    return JournalEntry(
        group_id=line["group_id"],
        task=records.task_of(records.from_plain(line["task"])),
        trajectory=records.trajectory_of(records.from_plain(line["trajectory"]), segments),
    )


def _fingerprint(task: Task, trajectory: Trajectory) -> str:
    unscored = replace(trajectory, scores=(), final=None)
    parts = (
        records.task_record(task),
        records.trajectory_record(unscored),
        [records.segment_record(segment) for segment in trajectory.segments],
    )
    return records.dump_value(parts)

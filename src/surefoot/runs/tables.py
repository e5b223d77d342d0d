"""The columns of trajectory and credit parquet files, and their exact, repeatable bytes.

One row a trajectory, rows in the order given. DuckDB reads the files as they are:
``SELECT task_id, avg(value) FROM 'trajectories/*.parquet' GROUP BY 1``.

- ``name``, then the caller's labels (``arm``, ``stage``, ``step``, ...), ``group_index`` (place of the
  group in the file), ``group_id``, ``trajectory_id``.
- task: ``task_id``, ``split``, ``variant``, ``prompt``; JSON text ``reference`` and ``metadata``;
  ``reference_exact`` is false when the reference is no JSON value and only its ``repr`` was kept.
- outcome: ``stop``, ``terminated``, ``truncated``, ``fault``, ``value`` (null while unscored), ``trust``
  (3 verified, 2 learned, 1 implicit), ``unscored_reason``, ``final`` and ``scores`` in full.
- cost: ``prompt_tokens``, ``cached_tokens``, ``observation_tokens``, ``sampled_tokens``, ``model_calls``,
  ``tool_calls``, ``usd``. No column holds a time.
- content: ``segments`` (token-exact; log-probabilities are NaN where the policy did not sample),
  ``turns``, ``state`` (JSON text), ``messages`` (the transcript as JSON chat messages, for reading only),
  ``sampling``, ``seed``.

Text that is not valid Unicode (a lone surrogate) stands as NUL ``json:`` and its JSON escape.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from surefoot.core.errors import ConfigError, DataError, StorageError
from surefoot.core.types import Group, Scored, Segment, Trajectory, Unscored
from surefoot.runs import records

# pyarrow ships no types: these names say what is meant.
Table: TypeAlias = Any
Array: TypeAlias = Any
Field: TypeAlias = Any
DataType: TypeAlias = Any

SCHEMA_VERSION: Final = 1
_VERSION_KEY = b"surefoot.schema_version"


def _struct(**fields: DataType) -> DataType:
    return pa.struct(list(fields.items()))


_TEXT = pa.string()
_CALL = _struct(id=_TEXT, name=_TEXT, arguments=_TEXT)
_MESSAGE = _struct(role=_TEXT, content=_TEXT, tool_calls=pa.list_(_CALL), tool_call_id=_TEXT)
_SCORE = _struct(name=_TEXT, value=pa.float64(), trust=pa.int8(), reason=_TEXT, evidence=_TEXT)
_SEGMENT = _struct(
    tokens=pa.list_(pa.int32()),
    provenance=pa.list_(pa.uint8()),
    logprobs=pa.list_(pa.float32()),
    version=pa.list_(pa.int32()),
)
_TURN = _struct(
    index=pa.int32(),
    segment=pa.int32(),
    start=pa.int32(),
    stop=pa.int32(),
    text=_TEXT,
    tool_calls=pa.list_(_CALL),
    malformed=pa.list_(_struct(text=_TEXT, reason=_TEXT)),
    finish=_TEXT,
    observation=pa.list_(_MESSAGE),
    tool_results=pa.list_(_struct(call_id=_TEXT, name=_TEXT, content=_TEXT, ok=pa.bool_())),
    step_reward=pa.float64(),
)
_SAMPLING = _struct(temperature=pa.float64(), top_p=pa.float64(), top_k=pa.int64(), max_tokens=pa.int64())

TRAJECTORY_SCHEMA: Final = pa.schema(
    {
        "name": _TEXT,
        "group_index": pa.int32(),
        "group_id": _TEXT,
        "trajectory_id": _TEXT,
        "task_id": _TEXT,
        "split": _TEXT,
        "variant": _TEXT,
        "stop": _TEXT,
        "terminated": pa.bool_(),
        "truncated": pa.bool_(),
        "value": pa.float64(),
        "trust": pa.int8(),
        "unscored_reason": _TEXT,
        "fault": _TEXT,
        **{count: pa.int64() for count in records.COUNTS},
        "usd": pa.float64(),
        "seed": pa.int64(),
        "sampling": _SAMPLING,
        "scores": pa.list_(_SCORE),
        "final": _SCORE,
        "turns": pa.list_(_TURN),
        "segments": pa.list_(_SEGMENT),
        "prompt": pa.list_(_MESSAGE),
        "reference": _TEXT,
        "reference_exact": pa.bool_(),
        "metadata": _TEXT,
        "state": _TEXT,
        "messages": _TEXT,
    }
)
CREDIT_SCHEMA: Final = pa.schema(
    {
        "name": _TEXT,
        "trajectory_id": _TEXT,
        "advantage": pa.float64(),
        "turn_advantages": pa.list_(pa.float64()),
        "used": pa.bool_(),
        "reason": _TEXT,
    }
)


def trajectory_table(name: str, groups: Sequence[Group], labels: Mapping[str, str | int]) -> Table:
    """Groups as a table of :data:`TRAJECTORY_SCHEMA`, with one more column a label after ``name``.

    Raises DataError for a group without trajectories or a number that does not fit its column,
    ConfigError for a label that hides a column.
    """
    _check_labels(labels)
    rows = [
        _row(name, index, group, trajectory)
        for index, group in enumerate(groups)
        for trajectory in _members(group)
    ]
    arrays: list[Array] = []
    for field in TRAJECTORY_SCHEMA:
        if field.name == "segments":
            arrays.append(_segments_array([t.segments for group in groups for t in group.trajectories]))
        else:
            arrays.append(_array([row[field.name] for row in rows], field))
    table = pa.Table.from_arrays(arrays, schema=TRAJECTORY_SCHEMA)
    for place, (label, value) in enumerate(labels.items(), 1):
        field = pa.field(label, _TEXT if isinstance(value, str) else pa.int64())
        table = table.add_column(place, field, _array([value] * len(rows), field))
    return table


def groups_of(table: Table) -> list[Group]:
    """The groups that :func:`trajectory_table` described, in order."""
    segments = _segments_of(table.column("segments").combine_chunks())
    rows = cast("list[records.Record]", table.drop_columns(["segments", "messages"]).to_pylist())
    groups: list[Group] = []
    pairs = zip(rows, segments, strict=True)
    for _, members in itertools.groupby(pairs, key=lambda pair: cast("int", pair[0]["group_index"])):
        held = list(members)
        trajectories = tuple(records.trajectory_of(row, parts) for row, parts in held)
        groups.append(Group(records.task_of(held[0][0]), trajectories))
    return groups


def credit_table(
    name: str,
    ids: Sequence[str],
    advantages: Sequence[float | None],
    reasons: Sequence[str],
    turns: Sequence[Sequence[float]] | None = None,
) -> Table:
    """One row a trajectory; raises DataError on unequal lengths or an advantage that is not finite."""
    by_turn: Sequence[Sequence[float]] = [[]] * len(ids) if turns is None else turns
    if not len(ids) == len(advantages) == len(reasons) == len(by_turn):
        raise DataError(f"credit has {len(ids)} ids, {len(advantages)} advantages and {len(reasons)} reasons")
    for identity, advantage, own in zip(ids, advantages, by_turn, strict=True):
        for value in own if advantage is None else (advantage, *own):
            if not np.isfinite(value):
                raise DataError(f"credit of {identity} is {value}; it must be finite, or None when not used")
    columns: tuple[list[Any], ...] = (
        [name] * len(ids),
        [records.escape(identity) for identity in ids],
        list(advantages),
        [list(own) for own in by_turn],
        [advantage is not None for advantage in advantages],
        [records.escape(reason) for reason in reasons],
    )
    arrays = [_array(column, field) for column, field in zip(columns, CREDIT_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=CREDIT_SCHEMA)


def to_parquet(table: Table) -> bytes:
    """The same bytes for the same table: fixed codec, no times, a checksum on every page."""
    sink = pa.BufferOutputStream()
    versioned = table.replace_schema_metadata({_VERSION_KEY: str(SCHEMA_VERSION).encode()})
    pq.write_table(versioned, sink, compression="zstd", compression_level=3, write_page_checksum=True)
    return cast("bytes", sink.getvalue().to_pybytes())


def read_parquet(path: Path) -> Table:
    """Read a file of :func:`to_parquet`. Raises StorageError when missing, damaged or of another version."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
    except FileNotFoundError as error:
        raise StorageError(f"{path} does not exist") from error
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from error
    version = (table.schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise StorageError(
            f"{path}: schema version is {version}; this version of Surefoot reads {SCHEMA_VERSION}"
        )
    return table


def damaged(path: Path, error: Exception) -> StorageError:
    """The error for a file that cannot be decoded, with what to do about it."""
    return StorageError(
        f"{path} is damaged ({str(error).splitlines()[0] if str(error) else type(error).__name__}). "
        "Restore it from a copy, or delete it and resume: the step that wrote it is then run again"
    )


def _check_labels(labels: Mapping[str, str | int]) -> None:
    for label in labels:
        if label in TRAJECTORY_SCHEMA.names or not label.isidentifier():
            raise ConfigError(f"label {label!r} hides a column or is no identifier; choose another name")


def _members(group: Group) -> tuple[Trajectory, ...]:
    if not group.trajectories:
        raise DataError(f"group of task {group.task.id} holds no trajectory; leave it out")
    return group.trajectories


def _row(name: str, index: int, group: Group, trajectory: Trajectory) -> records.Record:
    final = trajectory.final
    return {
        "name": name,
        "group_index": index,
        **records.task_record(group.task),
        **records.trajectory_record(trajectory),
        "value": trajectory.value,
        "trust": int(final.trust) if isinstance(final, Scored) else None,
        "unscored_reason": records.escape(final.reason) if isinstance(final, Unscored) else None,
        "messages": records.transcript(group.task, trajectory.turns),
    }


def _array(values: list[Any], field: Field) -> Array:
    try:
        return pa.array(values, type=field.type)
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(f"column {field.name!r} cannot hold a value: {error}") from error


def _segments_array(trajectories: Sequence[tuple[Segment, ...]]) -> Array:
    """Built from the arrays themselves, never through Python numbers, so that every bit is kept."""
    segments = [segment for held in trajectories for segment in held]
    inner = pa.array(_offsets([len(segment) for segment in segments]), pa.int32())
    children: list[Array] = []
    for name, dtype in records.SEGMENT_COLUMNS:
        parts: list[npt.NDArray[Any]] = [getattr(segment, name) for segment in segments]
        values = np.concatenate([np.empty(0, dtype), *parts])
        children.append(pa.ListArray.from_arrays(inner, pa.array(values)))
    struct = pa.StructArray.from_arrays(children, fields=list(_SEGMENT))
    return pa.ListArray.from_arrays(
        pa.array(_offsets([len(held) for held in trajectories]), pa.int32()), struct
    )


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def _segments_of(column: Any) -> list[tuple[Segment, ...]]:
    flat = column.values
    columns: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[Any]]] = {}
    for name, dtype in records.SEGMENT_COLUMNS:
        lists = flat.field(name)
        columns[name] = (lists.offsets.to_numpy(), lists.values.to_numpy().astype(dtype, copy=False))
    segments = [
        Segment(**{name: values[offsets[i] : offsets[i + 1]] for name, (offsets, values) in columns.items()})
        for i in range(len(flat))
    ]
    outer = column.offsets.to_numpy()
    return [tuple(segments[outer[i] : outer[i + 1]]) for i in range(len(column))]

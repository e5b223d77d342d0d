"""SQL over a run's files, through DuckDB when it is installed."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from surefoot.core.errors import ConfigError, DataError
from surefoot.runs.files import read_json_lines
from surefoot.runs.tables import CREDIT_SCHEMA, TRAJECTORY_SCHEMA, Array, Table

_PARQUET_VIEWS: Final = {"trajectories": TRAJECTORY_SCHEMA, "credit": CREDIT_SCHEMA}
_LINE_VIEWS: Final = ("metrics", "timings", "events")
_EMPTY_LINES: Final = pa.schema({"step": pa.int64()})


def query(run_path: Path, sql: str) -> list[dict[str, Any]]:
    """Rows of ``sql`` over the views ``trajectories``, ``credit``, ``metrics``, ``timings``, ``events``.

    Reads only, also while the run is being written. Raises ConfigError when DuckDB is missing or
    there is no run, DataError when DuckDB refuses the query.
    """
    try:
        duckdb: Any = importlib.import_module("duckdb")
    except ImportError as error:
        raise ConfigError("queries need DuckDB: pip install 'surefoot[query]'") from error
    run_path = run_path.resolve()
    if not (run_path / "manifest.json").is_file():
        raise ConfigError(f"{run_path} holds no run (no manifest.json)")
    with duckdb.connect() as connection:
        try:
            connection.execute("SET autoinstall_known_extensions = false")
            for name, schema in _PARQUET_VIEWS.items():
                _add_parquet(connection, name, run_path / name, schema)
            for name in _LINE_VIEWS:
                connection.register(name, _lines_table(run_path / f"{name}.jsonl"))
            cursor = connection.execute(sql)
            columns = [column[0] for column in cursor.description or ()]
            return [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
        except duckdb.Error as error:
            raise DataError(f"the query failed: {error}") from error


def _add_parquet(connection: Any, name: str, folder: Path, schema: Any) -> None:
    if not any(folder.glob("[!.]*.parquet")):
        connection.register(name, schema.empty_table())
        return
    literal = re.sub(r"([\[*?])", r"[\1]", str(folder)).replace("'", "''")
    # Files of different stages may carry different labels.
    connection.execute(
        f"CREATE VIEW {name} AS SELECT * FROM read_parquet('{literal}/[!.]*.parquet', union_by_name = true)"
    )


def _lines_table(path: Path) -> Table:
    rows = read_json_lines(path)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if not keys:
        return _EMPTY_LINES.empty_table()
    return pa.table({key: _column([row.get(key) for row in rows]) for key in keys})


def _column(values: list[Any]) -> Array:
    try:
        return pa.array(values)
    except pa.ArrowException:  # one key with values of different types: all as JSON text
        return pa.array([None if value is None else json.dumps(value) for value in values])

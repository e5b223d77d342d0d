"""Runs one query on one SQLite file, read-only, in a process of its own, which may be killed."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parent))

if TYPE_CHECKING:
    from surefoot.rewards.verifiers.children.serve import serve
    from surefoot.rewards.verifiers.children.wire import pack
else:
    from serve import serve
    from wire import pack

_START = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*(select|with)\b", re.IGNORECASE | re.DOTALL)
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
# Functions that reach outside, change the connection, or give another result on every call.
_DENIED = {
    "load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "random", "randomblob", "zeroblob",
    "sqlite_offset", "last_insert_rowid", "changes", "total_changes",
}  # fmt: skip
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 10_000_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 250_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


def _authorise(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action not in _ALLOWED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _DENIED:
        return sqlite3.SQLITE_DENY
    schema = action == sqlite3.SQLITE_READ and (first or "").lower().startswith("sqlite_")
    return sqlite3.SQLITE_DENY if schema else sqlite3.SQLITE_OK


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _open(path: str) -> sqlite3.Connection:
    quoted = Path(path).as_uri()
    connection = sqlite3.connect(f"{quoted}?mode=ro&immutable=1", uri=True, isolation_level=None)
    connection.execute("PRAGMA temp_store=MEMORY")
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA query_only=ON")
    for limit, value in _LIMITS.items():
        connection.setlimit(limit, value)
    for table in ("json_each", "json_tree"):
        with contextlib.suppress(sqlite3.OperationalError):  # SQLite may be built without JSON
            # Built-in table functions set themselves up at first use, which the authorizer would refuse.
            connection.execute(f"SELECT 1 FROM {table}('[]')").fetchall()
    connection.text_factory = _text
    connection.set_authorizer(_authorise)
    return connection


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """{"rows": packed list of tuples} or {"error": text, "kind": refused | deadline | rows | sql}."""
    query, most = request["query"], request["rows"]
    if not _START.match(query):
        return {"kind": "refused", "error": "the query does not start with SELECT or WITH"}
    connection = _open(request["path"])
    until = time.process_time() + request["seconds"]
    connection.set_progress_handler(lambda: time.process_time() > until, 10_000)
    try:
        rows = connection.execute(query).fetchmany(most + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        kind = "deadline" if time.process_time() > until else "sql"
        return {"kind": kind, "error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        connection.close()
    if len(rows) > most:
        return {"kind": "rows", "error": f"more than {most} rows"}
    try:
        return {"rows": pack(rows)}
    except TypeError as error:
        return {"kind": "rows", "error": str(error)}


if __name__ == "__main__":
    serve(handle)

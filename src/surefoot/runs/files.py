"""Durable writes: whole files and folders that appear at once, line files that survive a kill at any byte.

This module must not know what the files mean.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from surefoot.core.errors import DataError, StorageError

TEMPORARY_SUFFIX = ".tmp"
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_TAIL_BLOCK = 1 << 16


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write ``path`` so that a reader, or a kill at any instant, sees the old file or the new one.

    Text is UTF-8. Raises StorageError when the disk refuses; the old file, if any, still stands.
    """
    payload = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{TEMPORARY_SUFFIX}")
    try:
        try:
            _write_synced(temporary, payload)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise _storage_error(path, error) from error


@contextlib.contextmanager
def write_folder(path: Path) -> Generator[Path]:
    """A new folder to write into, which takes the place of ``path`` at the end, synced and whole.

    Whatever is raised goes through, and ``path`` is then as it was. A kill leaves hidden folders beside it,
    which the next write removes, or puts back where the kill came between the two renames at the end.
    """
    temporary, aside = (path.with_name(f".{path.name}.{end}") for end in ("partial", "old"))
    if aside.exists() and not path.exists():  # a kill came between the renames
        os.rename(aside, path)
    for left in (temporary, aside):
        shutil.rmtree(left, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for item in (*temporary.rglob("*"), temporary):
            _sync(item)
        with contextlib.suppress(FileNotFoundError):  # a first write
            os.rename(path, aside)
        os.rename(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if aside.exists() and not path.exists():
            os.rename(aside, path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def append_json(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line with a single write and an fsync; a torn last line is cut off first.

    Raises DataError when ``record`` is not JSON (NaN included), StorageError when the disk refuses;
    then the file is as it was.
    """
    append_json_lines(path, (record,))


def append_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append several JSON lines with a single write and one fsync. Raises as :func:`append_json`."""
    payload = b"".join(_line(path, record) for record in records)
    if not payload:
        return
    try:
        created = not path.exists()
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _append_synced(handle, payload)
        finally:
            os.close(handle)
        if created:
            sync_directory(path.parent)
    except OSError as error:
        raise _storage_error(path, error) from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a line file; a last line without its newline was torn by a kill and is ignored.

    A missing file holds no lines. Raises StorageError, naming the line, when an earlier one is damaged.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    whole, _, _ = data.rpartition(b"\n")
    return [_parse(path, number, line) for number, line in enumerate(whole.split(b"\n"), 1) if whole]


def truncate_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a line file atomically with only the lines that ``keep`` accepts, bytes unchanged."""
    records = read_json_lines(path)
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")[: len(records)]
    kept = [line + b"\n" for line, record in zip(lines, records, strict=True) if keep(record)]
    write_atomic(path, b"".join(kept))


def remove(path: Path) -> None:
    """Delete a file and make the deletion durable; a missing file is no error."""
    try:
        path.unlink(missing_ok=True)
        sync_directory(path.parent)
    except OSError as error:
        raise StorageError(f"{path} cannot be removed: {error.strerror or error}") from error


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable. Raises OSError."""
    _sync(path, os.O_DIRECTORY)


def _sync(path: Path, flags: int = 0) -> None:
    handle = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_synced(path: Path, payload: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        view = memoryview(payload)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _append_synced(handle: int, payload: bytes) -> None:
    end = _end_of_whole_lines(handle)
    os.ftruncate(handle, end)
    os.lseek(handle, end, os.SEEK_SET)
    try:
        written = os.write(handle, payload)
        if written != len(payload):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    except OSError:
        # Shrinking needs no space: the file ends where it ended before this call.
        os.ftruncate(handle, end)
        raise


def _end_of_whole_lines(handle: int) -> int:
    """Offset just after the last newline, found from the back so that long files stay cheap."""
    end, block = os.lseek(handle, 0, os.SEEK_END), 1  # nearly always the last byte is the newline
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end, block = start, _TAIL_BLOCK
    return 0


def _line(path: Path, record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"a line for {path.name} is not JSON: {error} in {sorted(record)}") from error


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record: object = json.loads(line)
    except ValueError as error:
        raise StorageError(
            f"{path} line {number} is damaged ({error}); only a last line may be torn. "
            "Restore the file, or delete that line if it can be done without"
        ) from error
    if not isinstance(record, dict):
        raise StorageError(f"{path} line {number} is {type(record).__name__}; a line must be an object")
    return cast("dict[str, Any]", record)


def _storage_error(path: Path, error: OSError) -> StorageError:
    cause = _FULL.get(error.errno or 0, error.strerror or str(error))
    return StorageError(f"{path} cannot be written: {cause}. Nothing already written is lost")

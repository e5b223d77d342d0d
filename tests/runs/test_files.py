"""Whole files appear at once, line files survive a kill at any byte, a full disk loses nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.core.errors import DataError, StorageError
from surefoot.runs.files import (
    append_json,
    append_json_lines,
    read_json_lines,
    truncate_json_lines,
    write_atomic,
    write_folder,
)


def test_write_atomic_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "long old text")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_write_folder_replaces_the_whole_folder_and_what_a_kill_left(tmp_path: Path) -> None:
    path = tmp_path / "deep/a"
    with write_folder(path) as new:
        (new / "old").write_text("1")
    left = path.with_name(".a.partial")
    left.mkdir()
    (left / "half").write_text("")
    with write_folder(path) as new:
        (new / "inner").mkdir()
        (new / "inner/new").write_text("2")
        assert os.listdir(path) == ["old"], "until it is whole, the old one stands"
    assert os.listdir(path) == ["inner"] and (path / "inner/new").read_text() == "2"
    assert os.listdir(path.parent) == ["a"]


@pytest.mark.parametrize("where", ["inside", "fsync", "rename"])
def test_a_folder_that_cannot_be_written_leaves_the_old_one_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path, aside = tmp_path / "a", tmp_path / ".a.old"
    with write_folder(path) as new:
        (new / "old").write_text("1")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "refused")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="refused"), write_folder(path) as new:
        (new / "new").write_text("2")
        if where == "inside":
            refuse()
        if where == "fsync":
            patch.setattr(os, "fsync", refuse)
        rename = os.rename
        patch.setattr(os, "rename", lambda a, b: refuse() if b == path and a != aside else rename(a, b))
    assert os.listdir(tmp_path) == ["a"] and os.listdir(path) == ["old"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_refused_atomic_write_keeps_the_old_file_and_leaves_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(StorageError, match=r"a\.json cannot be written.*Nothing already written is lost"):
            write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_write_atomic_goes_on_after_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, bytes(data)[:3]))
    write_atomic(tmp_path / "a", "0123456789")
    assert (tmp_path / "a").read_text() == "0123456789"


def test_write_atomic_into_a_missing_folder_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere/a"):
        write_atomic(tmp_path / "nowhere" / "a", "x")


@pytest.mark.parametrize("taken", [0, 5])
def test_a_refused_append_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    path = tmp_path / "m.jsonl"
    append_json(path, {"step": 1})
    real = os.write

    def full(handle: int, data: bytes) -> int:
        if taken:
            return real(handle, bytes(data)[:taken])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match="disk is full"):
            append_json(path, {"step": 2})
    assert path.read_bytes() == b'{"step":1}\n'


def test_a_really_full_disk_loses_nothing(make_disk: Callable[[str], Path]) -> None:
    small_disk = make_disk("64k")
    lines, whole = small_disk / "m.jsonl", small_disk / "a.json"
    write_atomic(whole, "old")
    append_json(lines, {"step": 1})
    with pytest.raises(StorageError, match=r"a\.json cannot be written: the disk is full"):
        write_atomic(whole, "x" * 100_000)
    with pytest.raises(StorageError, match="disk is full"):
        append_json(lines, {"text": "x" * 100_000})
    assert whole.read_text() == "old"
    assert read_json_lines(lines) == [{"step": 1}]
    append_json(lines, {"step": 2})
    assert read_json_lines(lines) == [{"step": 1}, {"step": 2}]
    assert sorted(os.listdir(small_disk)) == ["a.json", "m.jsonl"]


RECORDS = st.lists(
    st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=300), max_size=3), max_size=5
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=RECORDS, data=st.data())
def test_a_kill_at_any_byte_keeps_every_whole_line_and_the_file_can_go_on(
    tmp_path: Path, records: list[dict[str, Any]], data: st.DataObject
) -> None:
    path = tmp_path / "m.jsonl"
    path.unlink(missing_ok=True)
    append_json_lines(path, records)
    written = path.read_bytes() if records else b""
    cut = data.draw(st.integers(0, len(written)))
    path.write_bytes(written[:cut])
    whole = records[: written[:cut].count(b"\n")]
    assert read_json_lines(path) == whole
    append_json(path, {"next": True})
    assert read_json_lines(path) == [*whole, {"next": True}]


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n{"x":"' + b"y" * 200_000)
    append_json(path, {"step": 2})
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n'


def test_lines_acknowledged_before_a_kill_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    program = (
        "import sys; from pathlib import Path; from surefoot.runs.files import append_json\n"
        "path = Path(sys.argv[1])\n"
        "for i in range(10**9): append_json(path, {'i': i, 'x': 'y' * 5000}); print(i, flush=True)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    seen = [int(child.stdout.readline()) for _ in range(20)]
    child.send_signal(signal.SIGKILL)
    acknowledged = seen + [int(line) for line in child.communicate()[0].split()]
    found = [record["i"] for record in read_json_lines(path)]
    assert found[: len(acknowledged)] == acknowledged
    assert found == list(range(len(found)))


@pytest.mark.parametrize("damage", [b"{broken", b"[1]"])
def test_a_damaged_line_before_the_last_is_an_error_that_names_it(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n' + damage + b'\n{"step":3}\n')
    with pytest.raises(StorageError, match=r"m\.jsonl line 2"):
        read_json_lines(path)


def test_a_missing_line_file_holds_no_lines(tmp_path: Path) -> None:
    assert read_json_lines(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_a_line_that_is_not_json_is_refused_and_nothing_is_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(DataError, match=r"m\.jsonl.*loss"):
        append_json(tmp_path / "m.jsonl", {"loss": value})
    assert not (tmp_path / "m.jsonl").exists()


def test_truncation_keeps_the_bytes_of_the_lines_it_keeps(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [b'{"step": 1, "x": 1e-05}\n', b'{"step":2}\n', b'{ "step":1}\n']
    path.write_bytes(b"".join(lines) + b'{"step":1,"to')
    truncate_json_lines(path, lambda record: record["step"] == 1)
    assert path.read_bytes() == lines[0] + lines[2]
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 1]

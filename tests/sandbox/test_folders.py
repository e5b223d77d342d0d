"""Folders of the agent's code are removed and copied whatever it made of them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from surefoot.sandbox.inside import folders


def _dig(folder: Path, depth: int) -> None:
    here = os.getcwd()
    os.chdir(folder)
    for _ in range(depth):
        os.mkdir("a")
        os.chdir("a")
    Path("bottom").write_text("found")
    os.chdir(here)


def test_wipe_removes_what_is_deep_locked_or_strange_and_nothing_outside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    mode = outside.stat().st_mode
    victim = tmp_path / "victim"
    victim.mkdir()
    _dig(victim, 1500)
    (victim / "a" / "link").symlink_to(outside)
    (victim / "dangling").symlink_to("nowhere")
    os.mkfifo(victim / "pipe")
    (victim / os.fsdecode(b"\xff\n")).mkdir()
    locked = victim / "locked"
    (locked / "inner").mkdir(parents=True)
    (locked / "inner").chmod(0)
    locked.chmod(0)
    before = tmp_path.stat().st_mode
    folders.wipe(str(victim))
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert (outside / "kept").read_text() == "kept"
    assert (tmp_path.stat().st_mode, outside.stat().st_mode) == (before, mode)
    folders.wipe(str(victim))  # it is not there


def test_copy_keeps_content_modes_times_and_links(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "d" / "e").mkdir(parents=True)
    (source / "d" / "e" / "f").write_bytes(bytes(range(256)) * 9000)
    (source / "d" / "e" / "f").chmod(0o640)
    os.utime(source / "d" / "e" / "f", ns=(5_000_000_123, 7_000_000_456))
    (source / "d" / "link").symlink_to("e/f")
    (source / "d" / "dangling").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    (source / "d").chmod(0o555)
    folders.copy(str(source), str(target))
    copied = target / "d" / "e" / "f"
    assert copied.read_bytes() == bytes(range(256)) * 9000
    assert (stat.S_IMODE(copied.stat().st_mode), copied.stat().st_mtime_ns) == (0o640, 7_000_000_456)
    assert stat.S_IMODE((target / "d").stat().st_mode) == 0o555
    assert (os.readlink(target / "d" / "link"), os.readlink(target / "d" / "dangling")) == ("e/f", "nowhere")
    assert sorted(os.listdir(target)) == ["d"]
    (source / "d").chmod(0o755)
    (target / "d").chmod(0o755)


def test_copy_goes_as_deep_as_a_path_can(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    _dig(tmp_path / "source", 1500)
    folders.copy(str(tmp_path / "source"), str(tmp_path / "target"))
    assert (tmp_path / "target" / ("a/" * 1500) / "bottom").read_text() == "found"
    for name in ("source", "target"):  # deeper than what removes temporary folders can go
        folders.wipe(str(tmp_path / name))
    with pytest.raises(FileNotFoundError):
        folders.copy(str(tmp_path / "source"), str(tmp_path / "target"))

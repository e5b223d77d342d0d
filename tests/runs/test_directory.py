"""One run, one folder, one writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.core.errors import ConfigError, StorageError
from surefoot.runs import Manifest, RunDirectory
from surefoot.runs.files import read_json_lines

CONFIG = "seed = 7\n"


def create(path: Path) -> RunDirectory:
    manifest = Manifest.current(recipe="test", seed=7, config_toml=CONFIG)
    return RunDirectory.create(path, config_toml=CONFIG, manifest=manifest)


def test_a_new_run_holds_its_config_and_a_manifest_that_reads_back(run: RunDirectory) -> None:
    assert "ü" in run.config_toml
    assert json.loads((run.path / "manifest.json").read_text())["packages"]["numpy"]
    assert RunDirectory.open(run.path, writable=False).manifest == run.manifest
    assert run.checkpoint("treatment", 12) == run.path / "checkpoints/treatment/step-000012"


def test_an_existing_run_is_never_created_over(run: RunDirectory) -> None:
    run.close()
    before = run.config_toml
    with pytest.raises(ConfigError, match="--resume"):
        create(run.path)
    assert run.config_toml == before


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        create(tmp_path)
    assert os.listdir(tmp_path) == ["config.toml"]


def test_a_creation_that_was_killed_before_its_manifest_can_be_done_again(tmp_path: Path) -> None:
    create(tmp_path / "run").close()
    (tmp_path / "run" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="holds no run"):
        RunDirectory.open(tmp_path / "run")
    create(tmp_path / "run").close()
    RunDirectory.open(tmp_path / "run").close()


def test_two_openings_never_write_one_run(run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        RunDirectory.open(run.path)
    run.close()
    with RunDirectory.open(run.path) as again:
        assert again.writable


def test_another_process_is_refused_and_told_the_pid(run: RunDirectory) -> None:
    program = (
        "import sys; from pathlib import Path; from surefoot.runs.directory import RunDirectory\n"
        "try: RunDirectory.open(Path(sys.argv[1]))\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program, str(run.path)], capture_output=True, text=True, check=True
    ).stdout
    assert out.startswith("ConfigError")
    assert f"process {os.getpid()}" in out


def test_a_forked_worker_does_not_keep_the_lock(run: RunDirectory) -> None:
    ready, done = os.pipe(), os.pipe()
    worker = os.fork()
    if worker == 0:
        os.write(ready[1], b"w" if run.writable else b"r")
        os.read(done[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"r"
        run.close()
        RunDirectory.open(run.path).close()
    finally:
        os.write(done[1], b"x")
        os.waitpid(worker, 0)
        for end in (*ready, *done):
            os.close(end)


def test_reading_needs_no_lock_and_cannot_write(run: RunDirectory) -> None:
    reader = RunDirectory.open(run.path, writable=False)
    with pytest.raises(StorageError, match="opened for reading"):
        reader.event("retry")
    run.event("retry", tool="search", attempt=2)
    assert read_json_lines(reader.events) == [{"kind": "retry", "tool": "search", "attempt": 2}]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"schema_version": 99}, "schema_version is 99"), ({"seed": "x"}, "seed"), ({"extra": 1}, "extra")],
)
def test_a_foreign_or_damaged_manifest_is_refused_and_frees_the_lock(
    run: RunDirectory, change: dict[str, object], message: str
) -> None:
    run.close()
    path = run.path / "manifest.json"
    good = path.read_text()
    path.write_text(json.dumps(json.loads(good) | change))
    with pytest.raises(StorageError, match=message):
        RunDirectory.open(run.path)
    path.write_text(good)
    RunDirectory.open(run.path).close()


def test_a_config_changed_after_the_start_is_not_resumed(run: RunDirectory) -> None:
    run.close()
    run.config.write_text("seed = 8\n")
    with pytest.raises(StorageError, match=r"config\.toml was changed"):
        RunDirectory.open(run.path)


def test_resuming_sweeps_what_a_killed_write_left(run: RunDirectory) -> None:
    leftover = run.trajectories / ".rl-1.parquet.99-1.tmp"
    leftover.write_bytes(b"half")
    run.close()
    RunDirectory.open(run.path).close()
    assert not leftover.exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x.tmp"])
def test_names_cannot_leave_the_folder(run: RunDirectory, name: str) -> None:
    with pytest.raises(ConfigError, match="use letters"):
        run.evaluation_of(name)

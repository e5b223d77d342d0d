"""A run whose tasks live in the sandbox outlives its fork server, and leaves nothing when it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from surefoot.runs.files import read_json_lines
from surefoot.sandbox import SandboxFault, probe

RECIPE = """
name = "code"
seed = 0

[model]
name = "scratch"

[environment]
name = "code"

[audit]
tasks = 4

[sampling]
max_tokens = 8

[[stage]]
kind = "sft"
episodes = 4
batch_size = 1
lr = 1e-3

[[stage]]
kind = "rl"
algorithm = "dr_grpo"
tasks_per_step = 2
group_size = 2
steps = 1

[evaluation]
tasks = 2
samples = 1
variants = ["base"]
"""


@pytest.fixture(autouse=True)
def sandbox() -> None:
    try:
        asyncio.run(probe())
    except SandboxFault as error:
        pytest.skip(f"no sandbox tier works on this machine: {error}")


def _start(recipe: Path, out: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A run that has begun to train, and the processes of its sandbox."""
    command = [sys.executable, "-m", "surefoot.cli", "run", str(recipe), "--out", str(out), "--no-report"]
    resume = ["--resume"] if (out / "manifest.json").exists() else []
    process = subprocess.Popen([*command, *resume], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and not (out / "metrics.jsonl").exists():
        time.sleep(0.01)
    return process, [one.pid for one in psutil.Process(process.pid).children(recursive=True)]


def _end(process: subprocess.Popen[bytes]) -> None:
    stderr = process.communicate(timeout=300)[1]
    assert process.returncode == 0, stderr.decode()[-2000:]


@pytest.mark.slow
def test_a_run_outlives_its_fork_server_and_a_killed_run_leaves_no_process_and_resumes(
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "code.toml"
    recipe.write_text(RECIPE)
    bereft, killed = tmp_path / "bereft", tmp_path / "killed"
    process, sandboxes = _start(recipe, bereft)
    assert sandboxes, "demonstrations are played in the sandbox"
    os.kill(sandboxes[0], signal.SIGKILL)
    _end(process)

    process, sandboxes = _start(recipe, killed)
    assert sandboxes
    process.kill()
    process.communicate()
    for _ in range(250):
        if not any(Path(f"/proc/{pid}").exists() for pid in sandboxes):
            break
        time.sleep(0.02)
    assert not [pid for pid in sandboxes if Path(f"/proc/{pid}").exists()]
    _end(_start(recipe, killed)[0])
    first, second = (read_json_lines(out / "metrics.jsonl") for out in (bereft, killed))
    assert first == second and {line["stage"] for line in first} == {"sft", "rl"}

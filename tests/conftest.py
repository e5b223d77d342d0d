"""Settings for all tests, small file systems, and the finished episodes that tests of rewards score."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from surefoot.core.deadlines import WorkerPool
from surefoot.core.types import Action, Message, Score, StopReason, Task, ToolCall, ToolResult, Turn
from surefoot.rewards.base import Episode, Reward

# Property tests draw the same examples on every run.
settings.register_profile("seeded", derandomize=True)
settings.load_profile("seeded")

MakeDisk = Callable[[str], Path]


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[MakeDisk]:
    """Mounts a file system of a size such as ``64k``; skips the test where that is not allowed."""
    mounted: list[Path] = []

    def make(size: str) -> Path:
        disk = tmp_path / f"disk{len(mounted)}"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a small file system cannot be mounted here")
        mounted.append(disk)
        return disk

    yield make
    for disk in mounted:
        subprocess.run(["umount", str(disk)], check=True)


def _episode(
    answer: str | None,
    reference: Any = None,
    *,
    prompt: str = "A question.",
    tool_text: str = "",
    id: str = "e",
    **state: Any,
) -> Episode:
    """An episode that ended with ``answer``; ``tool_text`` is what a tool returned before."""
    task = Task("t", "train", "base", (Message("user", prompt),), reference)
    turns: list[Turn] = []
    if tool_text:
        call = ToolCall("c", "look", {})
        result = ToolResult("c", "look", tool_text, True)
        seen = Message("tool", tool_text, tool_call_id="c")
        turns.append(Turn(0, 0, 0, 0, Action("", (call,)), (seen,), (result,)))
    if answer is not None:
        turns.append(Turn(len(turns), 0, 0, 0, Action(answer)))
    stop = StopReason.ANSWERED if answer is not None else StopReason.HORIZON
    return Episode(id, task, tuple(turns), task.prompt, stop, answer is None, answer, state)


@pytest.fixture(scope="session")
def episode() -> Callable[..., Episode]:
    return _episode


@pytest.fixture(scope="session")
def score() -> Iterator[Callable[[Reward, Episode], Score]]:
    pool = WorkerPool()
    yield lambda reward, episode: asyncio.run(reward.score([episode], pool))[0]
    pool.close()


@dataclass(frozen=True)
class _Ran:
    stdout: str
    exit_code: int | None
    status: str


class PlainExecutor:
    """A subprocess without isolation, for tests of what the rewards conclude; never for real agents."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds
        self.runs = 0

    async def run(self, code: str, *, stdin: bytes = b"", files: Mapping[str, bytes] | None = None) -> _Ran:
        self.runs += 1
        with tempfile.TemporaryDirectory() as folder:
            for name, data in (files or {}).items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            script = Path(folder) / "main_program.py"
            script.write_text(code)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-B",
                str(script),
                cwd=folder,
                env={"HOME": folder},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                out, _ = await asyncio.wait_for(process.communicate(stdin), self.seconds)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
                return _Ran("", -9, "timeout")
        status = "ok" if process.returncode == 0 else "error" if (process.returncode or 0) > 0 else "killed"
        return _Ran(out.decode("utf-8", "backslashreplace"), process.returncode, status)


@pytest.fixture(scope="session")
def plain_executor() -> PlainExecutor:
    return PlainExecutor()

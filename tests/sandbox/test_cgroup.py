"""The control group around a fork server: what it stops, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.errors import ConfigError
from surefoot.sandbox import Limits, Sandbox, Status, cgroup, server
from surefoot.sandbox.cgroup import Group, make_group
from surefoot.sandbox.execution import killed_for_memory, memory_kills

from .conftest import Held

# Each of the six is far within its own limit; only the group can stop them.
LIMITS = Limits(seconds=90, memory_mb=4000, processes=24, cpu_seconds=60)
TOTAL_MB = 700
BOMB = """
import os, time
children = []
for _ in range(6):
    pid = os.fork()
    if pid == 0:
        held = bytearray(250 << 20)
        time.sleep(3)
        os._exit(0)
    children.append(pid)
ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
print(sorted(ended))
"""


def available() -> bool:
    group = make_group(64)
    if group is None:
        return False
    group.remove()
    return True


needs_group = pytest.mark.skipif(not available(), reason="no control group can be made by this user here")


@pytest.fixture(scope="module")
def small() -> Iterator[Held]:
    one = Held("full", limits=LIMITS, total_memory_mb=TOTAL_MB)
    yield one
    one.close()


def folders(box: Sandbox) -> tuple[Path, ...]:
    group = box._servers[-1].group
    assert group is not None
    return group._folders


@needs_group
@pytest.mark.attack
def test_memory_bomb_of_many_processes_is_stopped(small: Held) -> None:
    async def scene() -> tuple[str, list[str]]:
        session = await small.sandbox.session()
        await session.run("x = 41")
        bomb = await small.sandbox.run(BOMB)
        after = [(await session.run("x + 1")).value, (await small.sandbox.run("print(1)")).stdout]
        await session.close()
        return bomb.stdout, after

    printed, after = asyncio.run(scene())
    assert printed.count("-9") >= 4, f"six times 250 MB do not fit into {TOTAL_MB} MB: {printed}"
    assert after == ["42", "1\n"], "the fork server and an idle session live on"
    peak = next(
        int((folder / name).read_text())
        for folder in folders(small.sandbox)
        for name in ("memory.peak", "memory.max_usage_in_bytes")
        if (folder / name).exists()
    )
    assert 400 << 20 < peak <= TOTAL_MB << 20


@needs_group
@pytest.mark.attack
def test_one_process_that_takes_all_ends_as_memory(small: Held) -> None:
    result = small.run("a = bytearray(900 << 20)\nprint('held')")
    assert result.status is Status.MEMORY and result.stdout == ""


@needs_group
def test_a_closed_sandbox_leaves_no_group() -> None:
    async def scene() -> tuple[Path, ...]:
        async with Sandbox.open(total_memory_mb=512) as box:
            assert box.total_memory == 512 << 20
            await box.run("print(1)")
            found = folders(box)
            pid = box._servers[-1].pid
            assert all(str(pid) in (folder / "cgroup.procs").read_text().split() for folder in found)
            return found

    assert not any(folder.exists() for folder in asyncio.run(scene()))


def test_a_kill_for_memory_is_not_blamed_on_what_began_after_it(tmp_path: Path) -> None:
    class Grouped:
        group = Group([tmp_path], 1)

    def killed(times: int) -> None:
        (tmp_path / "memory.events").write_text(f"low 0\noom 9\noom_kill {times}\noom_group_kill 9\n")

    held: Any = Grouped()
    assert memory_kills(held) == 0, "a kernel that does not count"
    killed(1)
    first = memory_kills(held)
    killed(2)
    later = memory_kills(held)
    for _ in range(2):  # that one has asked takes nothing from the next
        assert killed_for_memory(held, -signal.SIGKILL, first) == "memory"
    assert killed_for_memory(held, -signal.SIGKILL, later) == "", "killed, but before it began"
    assert killed_for_memory(held, 1, first) == "", "it ended otherwise"


@needs_group
@pytest.mark.attack
def test_a_child_killed_for_memory_does_not_colour_the_next_that_is_killed(small: Held) -> None:
    starved = (
        "import os\npid = os.fork()\nif pid == 0:\n    a = bytearray(900 << 20)\nprint(os.waitpid(pid, 0)[1])"
    )
    assert small.run(starved).stdout == "9\n"

    async def killed() -> Status:
        async with await small.sandbox.session() as session:  # its process, unlike a run's, can kill itself
            return (await session.run("import os\nos.kill(os.getpid(), 9)")).status

    assert asyncio.run(killed()) is Status.KILLED


def test_a_folder_that_resists_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "_REMOVE_SECONDS", 0.05)
    (tmp_path / "memory/held").mkdir(parents=True)
    (tmp_path / "pids").mkdir()
    Group([tmp_path / "memory", tmp_path / "pids"], 1).remove()
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]


def test_a_fork_server_that_gets_no_source_is_ended_and_its_group_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    removed: list[bool] = []

    class Noted:
        def take(self, pid: int) -> None:
            taken.append(pid)

        def remove(self) -> None:
            removed.append(Path(f"/proc/{taken[0]}").exists())

    monkeypatch.setattr(server, "make_group", lambda memory_mb: Noted())
    monkeypatch.setattr(server, "_BOOT", "{missing}")
    with pytest.raises(KeyError, match="missing"):
        server._spawn(None)
    assert removed == [False], "the group goes after the process in it"


KILLED = """
import asyncio, sys
from surefoot.sandbox import Sandbox
async def main():
    async with Sandbox.open(tier="full") as box:
        asyncio.ensure_future(box.run("import time\\ntime.sleep(60)"))
        await asyncio.sleep(0.3)
        print(*box._servers[-1].group._folders, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@needs_group
def test_a_killed_harness_leaves_a_group_only_until_the_next_start() -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = [Path(part) for part in process.stdout.readline().split()]
    assert found and all(folder.exists() for folder in found)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while any((folder / "cgroup.procs").read_text() for folder in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    group = make_group(64)
    assert group is not None
    group.remove()
    assert not any(folder.exists() for folder in (*found, *group._folders))


def test_a_bound_that_nothing_fits_into_is_refused() -> None:
    async def scene() -> None:
        async with Sandbox.open(total_memory_mb=8):
            pass

    with pytest.raises(ConfigError, match="total_memory_mb must be at least 64, got 8"):
        asyncio.run(scene())


# ---- where a group may be made, on made-up hierarchies


class Made:
    """A folder that stands for /proc, and one for a mounted hierarchy."""

    def __init__(self, root: Path) -> None:
        self.proc, self.mount = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.mount.mkdir()
        (self.proc / "meminfo").write_text("MemTotal: 4096 kB\n")

    def says(self, cgroup: str, mountinfo: str) -> None:
        (self.proc / "self/cgroup").write_text(textwrap.dedent(cgroup))
        (self.proc / "self/mountinfo").write_text(textwrap.dedent(mountinfo))

    def group(self, memory_mb: int | None = 1) -> Group | None:
        return make_group(memory_mb, proc=self.proc)


def test_version_2_takes_the_parent_that_gives_controllers(tmp_path: Path) -> None:
    made = Made(tmp_path)
    own = made.mount / "user/app.slice/run.scope"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("")
    (own.parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    made.says("0::/user/app.slice/run.scope\n", f"1 0 0:1 / {made.mount} rw - cgroup2 cgroup2 rw\n")
    group = made.group()
    assert group is not None and [folder.parent for folder in group._folders] == [own.parent]
    assert (group._folders[0] / "pids.max").read_text() == "16384"
    assert made.group(None) is not None and made.group(None).memory == 3 << 20  # pyright: ignore[reportOptionalMemberAccess]


def test_version_2_in_a_container_counts_from_the_mounted_root(tmp_path: Path) -> None:
    made = Made(tmp_path)
    (made.mount / "cgroup.subtree_control").write_text("memory pids\n")
    made.says("0::/kube/pod7\n", f"1 0 0:1 /kube/pod7 {made.mount} rw - cgroup2 cgroup2 rw\n")
    group = made.group()
    assert group is not None and group._folders[0].parent == made.mount


@pytest.mark.parametrize("given", ["", "memory\n", "cpu pids\n"])
def test_without_both_controllers_there_is_no_group(given: str, tmp_path: Path) -> None:
    made = Made(tmp_path)
    (made.mount / "cgroup.subtree_control").write_text(given)
    made.says("0::/\n", f"1 0 0:1 / {made.mount} rw - cgroup2 cgroup2 rw\n")
    assert made.group() is None
    assert [path.name for path in made.mount.iterdir()] == ["cgroup.subtree_control"]


def test_version_1_takes_a_folder_in_each_hierarchy(tmp_path: Path) -> None:
    made = Made(tmp_path)
    for name in ("memory/own", "pids"):
        (made.mount / name).mkdir(parents=True)
    made.says(
        "3:pids:/\n2:memory:/own\n",
        f"""\
        1 0 0:1 / {made.mount}/memory rw - cgroup cgroup rw,memory
        2 0 0:2 / {made.mount}/pids rw - cgroup cgroup rw,pids
        """,
    )
    group = made.group(2)
    assert group is not None
    memory, pids = group._folders
    assert memory.parent == made.mount / "memory/own" and pids.parent == made.mount / "pids"
    assert (memory / "memory.limit_in_bytes").read_text() == str(2 << 20)
    assert (pids / "pids.max").read_text() == "16384"


def test_a_machine_without_control_groups_has_none(tmp_path: Path) -> None:
    made = Made(tmp_path)
    assert made.group() is None


def test_groups_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    made = Made(tmp_path)
    (made.mount / "cgroup.subtree_control").write_text("memory pids\n")
    made.says("0::/\n", f"1 0 0:1 / {made.mount} rw - cgroup2 cgroup2 rw\n")
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    for name in ("surefoot-999999999-5-1", f"surefoot-{os.getpid()}-{started}-0", "surefoot-mine"):
        (made.mount / name).mkdir()
    group = made.group()
    assert group is not None
    left = {path.name for path in made.mount.glob("surefoot-*")} - {group._folders[0].name}
    assert left == {f"surefoot-{os.getpid()}-{started}-0", "surefoot-mine"}

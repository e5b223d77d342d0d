"""A control group for a fork server and all that it starts: bounds of memory and tasks that no fork escapes.

Version 2 where the user may make groups with these controllers, version 1 as root; none where neither can be
had. Must not know what runs inside.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

_NAME = re.compile(r"surefoot-(\d+)-(\d+)-\d+")
_TASKS = 16_384
_REMOVE_SECONDS = 2.0
_numbers = itertools.count(1)


class Group:
    """The folders of one group, one in each hierarchy. ``memory``: its bound in bytes."""

    def __init__(self, folders: Sequence[Path], memory: int) -> None:
        self.memory = memory
        self._folders = tuple(folders)
        self._counter: int | None = None  # of the file that counts kills; -1 once the group is removed

    def take(self, pid: int) -> None:
        """Put a process, and so what it will start, into the group. Raises OSError."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """How many processes of the group the kernel has killed for its memory so far."""
        # Asked before every execution and turn, so the file stays open.
        for name in ("memory.events", "memory.oom_control"):
            if self._counter is None:
                with contextlib.suppress(OSError):
                    self._counter = os.open(self._folders[0] / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            lines = os.pread(-1 if self._counter is None else self._counter, 4096, 0).splitlines()
        except OSError:  # a kernel that does not count, or the group has gone
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith(b"oom_kill "))

    def remove(self) -> None:
        """Remove the group once its last process has gone; what resists is left to the next start."""
        counter, self._counter = self._counter, -1
        if counter is not None and counter >= 0:
            os.close(counter)
        deadline = time.monotonic() + _REMOVE_SECONDS
        for folder in self._folders:
            while folder.is_dir():
                with contextlib.suppress(OSError):  # a process is still ending
                    folder.rmdir()
                    break
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)


def make_group(memory_mb: int | None, *, proc: Path = Path("/proc")) -> Group | None:
    """A new group below this process's own, or None where none can be made.

    ``memory_mb``: its bound; None: three quarters of what this machine has. Groups that harnesses which were
    killed have left in the same place are removed.
    """
    memory = memory_mb << 20 if memory_mb is not None else _machine(proc) * 3 // 4
    name = f"surefoot-{os.getpid()}-{_begun(os.getpid())}-{next(_numbers)}"
    bounds = {"memory": str(memory), "pids": str(_TASKS)}
    for places in _places(proc):
        for place in dict.fromkeys(places.values()):
            _clear(place)
        with contextlib.suppress(OSError):  # not ours to make; the next place may be
            return Group(_create(places, name, bounds), memory)
    return None


def _create(places: dict[str, Path], name: str, bounds: dict[str, str]) -> list[Path]:
    made: list[Path] = []
    try:
        for controller, place in places.items():
            folder = place / name
            if folder not in made:
                folder.mkdir()
                made.append(folder)
            _bound(folder, controller, bounds[controller])
    except OSError:
        for folder in made:
            folder.rmdir()
        raise
    return made


def _bound(folder: Path, controller: str, value: str) -> None:
    if controller == "pids":
        (folder / "pids.max").write_text(value)
    elif (folder / "memory.max").exists():
        (folder / "memory.max").write_text(value)
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")
    else:
        (folder / "memory.limit_in_bytes").write_text(value)
        if (folder / "memory.memsw.limit_in_bytes").exists():
            (folder / "memory.memsw.limit_in_bytes").write_text(value)


def _places(proc: Path) -> Iterator[dict[str, Path]]:
    """Where a group may be made: controller -> an existing folder, the best places first."""
    own = _own_groups(proc)
    mounts = list(_mounts(proc))
    for kind, _, root, point in mounts:
        if kind == "cgroup2" and "" in own:
            here = _below(point, root, own[""])
            # A group that holds processes cannot hold groups with controllers, but its parent may.
            for place in (here, here.parent):
                if place == point.parent or not _delegated(place):
                    continue
                yield {"memory": place, "pids": place}
    first: dict[str, Path] = {}
    for kind, options, root, point in mounts:
        for controller in ("memory", "pids"):
            if kind == "cgroup" and controller in options and controller in own:
                first.setdefault(controller, _below(point, root, own[controller]))
    if len(first) == 2:
        yield dict(sorted(first.items()))


def _delegated(place: Path) -> bool:
    try:
        given = (place / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
    return {"memory", "pids"} <= set(given)


def _own_groups(proc: Path) -> dict[str, str]:
    """Controller -> this process's group; "" for version 2."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):  # a kernel without control groups
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            found |= dict.fromkeys(controllers.split(","), path)
    return found


def _mounts(proc: Path) -> Iterator[tuple[str, list[str], str, Path]]:
    """(kind, options, root, mount point) of every hierarchy that is mounted."""
    with contextlib.suppress(OSError):
        for line in (proc / "self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            fields, (kind, _, options) = left.split(), right.split(None, 2)
            if kind in ("cgroup", "cgroup2"):
                yield kind, options.split(","), fields[3], Path(fields[4])


def _below(point: Path, root: str, group: str) -> Path:
    """The folder of ``group`` where ``root`` of its hierarchy is mounted at ``point``."""
    inside = PurePosixPath(group)
    if root != "/" and inside.is_relative_to(root):
        inside = inside.relative_to(root)
    return point / str(inside).lstrip("/")


def _clear(place: Path) -> None:
    """Remove groups of processes that have ended; one that still holds something cannot be removed."""
    for folder in place.glob("surefoot-*"):
        found = _NAME.fullmatch(folder.name)
        if found and _begun(int(found[1])) != int(found[2]):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _begun(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def _machine(proc: Path) -> int:
    """Bytes of memory of this machine."""
    lines = (proc / "meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:"))

"""The fork server: a warm, single-threaded interpreter that forks one confined child per execution.

It takes orders from the harness and exit statuses from the kernel. It reads neither the agent's code nor
anything the code writes: descriptors for those pass through it unopened.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import mmap
import os
import select
import signal
import site
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from . import child, folders, jail, kernel
from .keeper import Keeper

_CONTROL, _PARENT, _NAMESPACE, _EXTRA = 3, 4, 5, 6
_WATCH_EVERY = 0.1
_SETUP_FAILED = 113
_ROOM_FOR_TASKS = 64
_SETUP_SECONDS = 20.0
_TIME = struct.Struct("=d")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class _Child:
    """One execution or session, by the process that everything of it lives under."""

    number: int
    pid: int
    pidfd: int
    slot: int
    limits: Mapping[str, Any]
    begun: float
    deadline: float
    reason: str = ""
    fds: tuple[int, ...] = ()  # what a spare was given, kept until it ends: it may have died before


@dataclass(slots=True)
class _Spare:
    """A child that is set up and waits on a socket for the descriptors of its execution."""

    child: _Child
    socket: socket.socket


class Zygote:
    """Holds the children and answers the harness on the control socket."""

    def __init__(self, control: socket.socket, config: Mapping[str, Any]) -> None:
        self._control = control
        self._config = config
        self._full = config["tier"] == "full"
        self._children: dict[int, _Child] = {}  # by pidfd
        # Those of them that have a deadline. Looking at idle sessions would change their pages here, of which
        # each child forked before has a copy.
        self._timed: dict[int, _Child] = {}
        self._due = math.inf  # none of their deadlines is earlier
        self._numbers: dict[int, int] = {}  # execution number to pidfd
        self._free: list[int] = []
        self._slots = 0
        self._spare: _Spare | None = None
        self._spare_for: Mapping[str, Any] | None = None  # limits for which a spare is yet to be made
        self._processors = len(os.sched_getaffinity(0))
        # A mounted tree must not lie under a child that waits: its files may be changed between executions.
        self._spares = self._full and not config["tree"]
        # Each child notes the time when it is set up, then lets go of the page: the code cannot reach it.
        self._ready = mmap.mmap(-1, 8 * config["most"] + _PAGE)
        self._base = _memory_now()
        self._poll = select.epoll()
        self._poll.register(_CONTROL, select.EPOLLIN)
        self._poll.register(_PARENT, select.EPOLLIN)
        self._watched = 0.0
        self._counted = (0.0, 0)

    def serve(self) -> None:
        """Until the harness closes the socket or ends."""
        while True:
            # Where more are in flight than there are processors, a hand-over costs more than it saves.
            spare_for = self._spare_for if len(self._timed) <= self._processors else None
            events = self._poll.poll(0 if spare_for else self._patience())
            if not events and spare_for:
                self._make_spare(spare_for)
            for fd, _ in events:
                if fd == _PARENT:
                    return
                if fd == _CONTROL:
                    if not self._order():
                        return
                elif fd in self._children:
                    self._ended(self._children[fd])
            self._look_after()

    def close(self) -> None:
        """Kill what runs and remove what it left; in the full tier the namespaces do it."""
        if self._full:
            return
        for one in list(self._children.values()):
            self._kill(one, "closed")
            os.waitpid(one.pid, 0)
            self._sweep(one)
        folders.wipe(self._config["slots"])
        with contextlib.suppress(OSError):  # the harness removes it, unless it was killed
            os.rmdir(os.path.dirname(self._config["slots"]))

    def _patience(self) -> float:
        return max(0.0, min(self._due - time.monotonic(), _WATCH_EVERY if self._busy() else 3600.0))

    def _busy(self) -> int:
        """Executions and sessions; the spare is neither."""
        return len(self._children) - (self._spare is not None)

    # ---- orders

    def _order(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 8)
        if not message:
            return False
        order = cast("dict[str, Any]", json.loads(message))
        if order["op"] == "kill":
            fd = self._numbers.get(order["id"])
            if fd is not None:
                self._kill(self._children[fd], order["reason"])
            return True
        try:
            if order["op"] == "session":
                self._start(order["limits"], fds, number=order["id"], session=True)
            elif not self._hand_over(order, fds):
                self._start(order["limits"], fds, number=order["id"])
        except OSError as error:
            self._tell({"id": order["id"], "fault": f"cannot start a process: {error}"})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _hand_over(self, order: Mapping[str, Any], fds: list[int]) -> bool:
        """Give an execution to the spare, if that has its limits, and see that there will be another."""
        spare, limits = self._spare, order["limits"]
        self._spare_for = limits if self._spares else None
        if spare is None or spare.child.limits != limits:
            return False
        self._spare = None
        with spare.socket:
            try:
                socket.send_fds(spare.socket, [b"go"], fds)
            except OSError:  # it has just died
                return False
        one = spare.child
        one.fds = tuple(fds)
        fds.clear()
        one.number, one.begun = order["id"], time.monotonic()
        one.deadline = one.begun + limits["seconds"]
        self._limit_time(one)
        self._numbers[one.number] = one.pidfd
        return True

    def _make_spare(self, limits: Mapping[str, Any]) -> None:
        """Set up a child for the next execution while there is nothing else to do."""
        self._spare_for = None
        if self._spare is not None:
            if self._spare.child.limits == limits:
                return
            self._kill(self._spare.child, "unwanted")
            self._spare.socket.close()
            self._spare = None
        # Where there is none, the next execution is told why it cannot have a process.
        with contextlib.suppress(OSError), contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            with theirs:
                self._spare = _Spare(self._start(limits, [theirs.fileno()]), ours)
            undo.pop_all()

    def _start(
        self, limits: Mapping[str, Any], fds: list[int], *, number: int = 0, session: bool = False
    ) -> _Child:
        """Fork a child. Without a number it is a spare, and ``fds`` are the socket it waits on."""
        if len(self._numbers) >= self._config["most"]:
            raise OSError(f"more than {len(self._numbers)} executions and sessions at a time")
        slot = self._free.pop() if self._free else self._slots
        self._slots = max(self._slots, slot + 1)
        _TIME.pack_into(self._ready, 8 * slot, 0.0)
        self._count_others()
        try:
            if self._full:
                # The next fork becomes process 1 of a process namespace of its own.
                kernel.setns(_NAMESPACE, kernel.NEWPID)
                kernel.unshare(kernel.NEWPID)
            else:
                self._make_slot(slot)
            pid = kernel.fork()
        except OSError:
            self._free.append(slot)
            raise
        if pid == 0:
            self._be_child(limits, fds, slot, session=session, spare=not number)
        begun = time.monotonic()
        deadline = begun + limits["seconds"]
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # no descriptor is left
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._free.append(slot)
            raise
        one = _Child(number, pid, pidfd, slot, limits, begun, deadline)
        self._children[pidfd] = one
        if number:
            self._numbers[number] = pidfd
            if not session:
                self._limit_time(one)
        self._poll.register(pidfd, select.EPOLLIN)
        return one

    def _be_child(
        self, limits: Mapping[str, Any], fds: list[int], slot: int, *, session: bool, spare: bool
    ) -> None:
        """Never returns."""
        code = _SETUP_FAILED
        try:
            extra = socket.socket(fileno=os.dup2(fds.pop(), _EXTRA)) if session or spare else None
            if not spare:
                child.take_places(fds)
            code = self._prepare(limits, slot, extra if session else None, extra if spare else None)
        except BaseException as error:
            if self._ready.closed:
                code = 1
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            try:
                sys.stderr.flush()
            finally:
                os._exit(code)

    def _prepare(
        self,
        given: Mapping[str, Any],
        slot: int,
        control: socket.socket | None,
        waiting: socket.socket | None,
    ) -> int:
        # control: of a session's keeper. waiting: where a spare will get its descriptors.
        limits, config = dict(given), self._config
        limits["processes"] += self._others()
        folder, uid = self._folder(slot), config["uid"] + 1 + slot
        if not self._full:
            os.setsid()
        places = jail.furnish(config, limits, folder)
        if config["tier"] == "uid":
            for path in (folder, *places.values()):
                os.chown(path, uid, uid)
        if control is not None:
            child.close_others(_EXTRA)
            kernel.become_reaper()
            # All that can be made before the fork is, so that the two share its pages.
            opened = {name: os.open(places[name], os.O_PATH | os.O_CLOEXEC) for name in ("box", "forks")}
            keeper, null = Keeper(control, opened), os.open("/dev/null", os.O_RDWR)
            first = kernel.fork()
            if first:
                return self._keep(keeper, first, null)
            control.close()
        # First: with hundreds of siblings their descriptors exceed the code's limit.
        child.close_others(child.PAYLOAD if waiting is None else _EXTRA)
        jail.confine(config, limits, self._base, folder, uid)
        if waiting is not None:
            message, fds, _, _ = socket.recv_fds(waiting, 16, 8)
            if not message:
                return 0  # it is not wanted any more
            child.take_places(fds)
            child.close_others(child.PAYLOAD)
            waiting.detach()
        header, code, files = child.read_payload(child.PAYLOAD)
        _TIME.pack_into(self._ready, 8 * slot, time.monotonic())
        self._ready.close()
        if control is not None:
            return child.Session(places, header).serve()
        return child.run_once(header, code, files)

    def _keep(self, keeper: Keeper, first: int, null: int) -> int:
        if self._full:
            kernel.drop_capabilities()
        else:
            kernel.die_with_parent()
        for fd in range(_EXTRA):
            os.dup2(null, fd)
        keeper.serve(first)
        return 0

    def _others(self) -> int:
        """Tasks that count against a child's limit though they are not its own."""
        return self._counted[1] if self._config["tier"] == "landlock" else 0

    def _count_others(self) -> None:
        """The user's tasks now, with room for those of siblings to come; at most once a second."""
        now = time.monotonic()
        if self._config["tier"] == "landlock" and now - self._counted[0] > 1:
            tasks, own = 0, os.getuid()
            for name in os.listdir("/proc"):
                if name.isdigit() and _owner(name) == own:
                    tasks += _tasks(name)
            self._counted = (now, tasks + _ROOM_FOR_TASKS)

    # ---- ends

    def _kill(self, one: _Child, reason: str) -> None:
        one.reason = one.reason or reason
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
        if not self._full:
            with contextlib.suppress(ProcessLookupError):  # it has no group yet
                os.killpg(one.pid, signal.SIGKILL)

    def _ended(self, one: _Child) -> None:
        self._poll.unregister(one.pidfd)
        os.close(one.pidfd)
        del self._children[one.pidfd]
        self._timed.pop(one.pidfd, None)
        _, status, usage = os.wait4(one.pid, 0)
        ready = self._set_up_at(one)
        seconds = time.monotonic() - (ready or one.begun)
        if not self._full:
            self._sweep(one)
        self._free.append(one.slot)
        if not one.number:
            self._drop_spare(one)
            return
        del self._numbers[one.number]
        if one.fds and self._again(one, died_early=not ready and not one.reason):
            return
        message = {"id": one.number, "status": status, "reason": one.reason, "seconds": seconds}
        self._tell({**message, "ready": ready > 0, "cpu": usage.ru_utime + usage.ru_stime})

    def _again(self, one: _Child, *, died_early: bool) -> bool:
        """Let go of what a spare was given, after another child has got it where the spare died too early."""
        try:
            if died_early:
                self._start(one.limits, list(one.fds), number=one.number)
            return died_early
        except OSError:
            return False  # what the spare's end says is told
        finally:
            for fd in one.fds:
                os.close(fd)

    def _drop_spare(self, one: _Child) -> None:
        """A spare ended unused: where that was not asked for, the next execution will tell why."""
        if self._spare is not None and self._spare.child is one:
            self._spare.socket.close()
            self._spare = None

    def _sweep(self, one: _Child) -> None:
        """Without a process namespace: end what the child left running, and remove its files."""
        with contextlib.suppress(ProcessLookupError):  # nothing was left
            os.killpg(one.pid, signal.SIGKILL)
        if self._config["tier"] == "uid":
            self._kill_user(self._config["uid"] + 1 + one.slot)
        folders.wipe(self._folder(one.slot))

    def _kill_user(self, uid: int) -> None:
        """SIGKILL every process of a user, from a process of that user."""
        pid = os.fork()
        if pid == 0:
            try:
                os.setresuid(uid, uid, uid)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._control.send(json.dumps(message).encode())

    def _folder(self, slot: int) -> str:
        return f"{self._config['slots']}/{slot}"

    def _make_slot(self, slot: int) -> None:
        folder = self._folder(slot)
        if os.path.isdir(folder):
            folders.wipe(folder)
        os.mkdir(folder, 0o700)

    # ---- time and memory

    def _limit_time(self, one: _Child) -> None:
        self._timed[one.pidfd] = one
        self._due = min(self._due, one.deadline)

    def _look_after(self) -> None:
        now = time.monotonic()
        if now >= self._due:
            for one in self._timed.values():
                if now >= one.deadline and not one.reason:
                    self._overdue(one, now)
            waiting = (one.deadline for one in self._timed.values() if not one.reason)
            self._due = min(waiting, default=math.inf)
        if self._busy() and now - self._watched >= _WATCH_EVERY and self._config["tier"] != "landlock":
            self._watched = now
            self._watch_memory()

    def _overdue(self, one: _Child, now: float) -> None:
        """The code's time begins when it can run: a busy machine may take long to set it up."""
        ready = self._set_up_at(one)
        seconds = one.limits["seconds"]
        one.deadline = ready + seconds if ready else now + _WATCH_EVERY
        if now >= one.deadline or now - one.begun > seconds + _SETUP_SECONDS:
            self._kill(one, "timeout")

    def _set_up_at(self, one: _Child) -> float:
        """When a child was set up, on the monotonic clock; 0 if it is not yet."""
        (time_set,) = _TIME.unpack_from(self._ready, 8 * one.slot)
        return time_set

    def _watch_memory(self) -> None:
        """End a child whose processes together hold more than its memory.

        One process is bounded by its own limits; only where there are more does anything need adding up.
        """
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        sessions = self._busy() - len(self._timed)
        expected = len(self._children) + sessions
        if self._full and len(pids) <= expected + 1:
            return
        tops = {one.pid: one for one in self._children.values()}
        parents, held = {}, {}
        for pid in pids:
            found = _parent_and_pages(pid)
            if found is not None:
                parents[pid], held[pid] = found
        groups: dict[int, list[int]] = {}
        for pid in held:
            top = pid
            while top not in tops and top in parents:
                top = parents[top]
            if top in tops:
                groups.setdefault(top, []).append(pid)
        for top, members in groups.items():
            base = self._base["pages"]
            total = sum(max(0, held[pid] - base) for pid in members) * _PAGE
            most = tops[top].limits["memory_mb"] << 20
            if len(members) > 1 and total > most:
                # Pages shared by forks count once; that sum is slow, so only when the quick one is over.
                exact = sum(_proportional(pid, (held[pid] - base) * _PAGE) for pid in members)
                if exact > most:
                    self._kill(tops[top], "memory")


def _parent_and_pages(pid: int) -> tuple[int, int] | None:
    """(parent's id, pages of memory that are not files) of a process; None when it has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
        with open(f"/proc/{pid}/statm", "rb") as file:
            fields = file.read().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return parent, int(fields[1])


def _owner(pid: str) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:  # it has ended
        return -1


def _tasks(pid: str) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # it has ended
        return 0


def _proportional(pid: int, otherwise: int) -> int:
    """Bytes of a process with shared pages divided among their holders; ``otherwise`` where it is secret."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            kinds = (b"Pss_Anon:", b"Pss_Shmem:")
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith(kinds))
    except PermissionError:
        return otherwise
    except OSError:  # it has ended, and holds nothing any more
        return 0


def _memory_now() -> dict[str, int]:
    """Bytes of data and of mappings, and resident pages, of this process."""
    found: dict[str, int] = {}
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("VmData", "VmSize", "VmRSS"):
                found[name] = int(rest.split()[0]) << 10
    return {"data": found["VmData"], "mapped": found["VmSize"], "pages": found["VmRSS"] // _PAGE}


def _preload(config: Mapping[str, Any]) -> None:
    site.setquit()
    sys.path.extend(path for path in config["path"] if path not in sys.path)
    importlib.invalidate_caches()  # folders that were not there before the root was built
    for name in config["preload"]:
        importlib.import_module(name)
        if name == "numpy":
            importlib.import_module("numpy.random")  # loads lazily, and every child reseeds it


def main(control: int, parent: int) -> None:
    """Entry point in the fresh interpreter; the first message on ``control`` is the configuration."""
    high = [os.dup(fd) for fd in (control, parent)]
    null = os.open("/dev/null", os.O_RDWR)
    for target, fd in enumerate([null, null, null, *high]):
        os.dup2(fd, target)
    os.closerange(_PARENT + 1, child.MOST_FILES)
    sock = socket.socket(fileno=_CONTROL)
    config = cast("dict[str, Any]", json.loads(sock.recv(1 << 18)))
    try:
        if config["tier"] == "full":
            jail.build(config)
        os.dup2(os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC), _NAMESPACE)
        os.umask(0o022)
        _preload(config)
        if config["tier"] in ("full", "uid"):  # where it is the same for all children
            jail.seccomp_program(config)
        child.settle()
        zygote = Zygote(sock, config)
    except BaseException as error:
        sock.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    sock.send(json.dumps({"started": os.getpid(), "landlock": kernel.landlock_abi()}).encode())
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the harness has gone
            zygote.serve()
    except Exception as error:
        sock.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
    finally:
        zygote.close()
        os._exit(0)

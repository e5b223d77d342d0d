"""Sessions: code turn by turn in one process that keeps its state, and forks of it.

A session and its forks are one *tree*: they share a process namespace, a budget and a keeper, the trusted
process 1 that starts them, reads files for the harness and ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol, Self

from surefoot.core.errors import ConfigError, DataError, SurefootError
from surefoot.sandbox.execution import (
    MOST_REPORT,
    Job,
    Outputs,
    end_status,
    killed_for_memory,
    memory_kills,
)
from surefoot.sandbox.io import elsewhere
from surefoot.sandbox.server import Server
from surefoot.sandbox.text import clean
from surefoot.sandbox.types import Limits, Result, SandboxFault, Status

# Between the interrupt at the deadline and the kill.
_GRACE_SECONDS = 1.0
_SETTLE_SECONDS = 30.0


class SessionEnded(SurefootError):
    """The code ended its session, or made it refuse: a failure of the agent, not of the sandbox."""


class Seat(Protocol):
    """What a session is made of, here or elsewhere."""

    limits: Limits

    @property
    def alive(self) -> bool:
        """Whether a further turn can run."""
        ...

    async def turn(self, job: Job, seconds: float) -> Result:
        """Run a turn."""
        ...

    async def fork(self) -> Seat:
        """A copy."""
        ...

    async def read_file(self, path: str, most: int) -> bytes:
        """A file of the working folder."""
        ...

    async def close(self) -> None:
        """End it."""
        ...


class Session:
    """A process that runs turns. ``run`` never raises for what the code does; a dead session says KILLED."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    @property
    def alive(self) -> bool:
        """Whether a further turn can run."""
        return self._seat.alive

    async def run(
        self, code: str, *, files: Mapping[str, bytes] | None = None, seconds: float | None = None
    ) -> Result:
        """Run one turn; names defined before are there. Turns of one session queue up.

        At the deadline (``seconds``, else the session's limit) the code is interrupted and the state kept;
        code that does not heed it within a second is killed, and the session with it. Too much output
        ends a turn in the same way. Raises SandboxFault when the sandbox failed.
        """
        job = Job(code, files=files)
        limit = self._seat.limits.seconds if seconds is None else seconds
        if not 0 < limit <= self._seat.limits.seconds:
            most = self._seat.limits.seconds
            raise ConfigError(f"seconds must be above 0 and at most the session's {most:g}, got {seconds}")
        return await elsewhere(self._seat.turn(job, limit))

    async def fork(self) -> Session:
        """A second session with a copy of this one's memory and working folder, as they are now.

        The copy starts in its own folder: relative paths are its own, absolute ones name what the tree
        shares. Threads are not copied. Raises SessionEnded when the session is dead or has no process left.
        """
        return Session(await elsewhere(self._seat.fork()))

    async def read_file(self, path: str, *, most: int | None = None) -> bytes:
        """The content of a regular file in the session's working folder.

        ``path`` is relative; links of any kind are refused. ``most`` bytes at most, by default what
        ``Limits.files_mb`` allows. Raises DataError for a file that is missing, refused or too large.
        """
        size = self._seat.limits.files_mb << 20 if most is None else most
        return await elsewhere(self._seat.read_file(path, size))

    async def close(self) -> None:
        """End the session; its forks live on. A second call does nothing."""
        await elsewhere(self._seat.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Tree:
    """What a session and its forks share: the keeper, and who of them is alive."""

    def __init__(self, server: Server, limits: Limits, control: socket.socket) -> None:
        self.server = server
        self.limits = limits
        self.seats: dict[int, _Seat] = {}
        self.folders = itertools.count(1)
        self.ended: asyncio.Future[dict[str, Any]] | None = None
        self._loop = asyncio.get_running_loop()
        self._control = control
        # The keeper answers in the order of the questions, also those whose asker has given up.
        self._questions: deque[asyncio.Future[tuple[str, int]]] = deque()
        self.started: asyncio.Future[int] = self._loop.create_future()
        control.setblocking(False)
        self._loop.add_reader(control.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        if not message:
            self._loop.remove_reader(self._control.fileno())
            self._leave_unanswered()
            return
        kind, said = message[:1], message[1:]
        if kind == b"S":
            self.started.set_result(int(said))
        elif kind == b"E":
            pid, status = map(int, said.split())
            seat = self.seats.get(pid)
            if seat is not None:
                seat.died(os.waitstatus_to_exitcode(status))
        elif self._questions:
            question, fd = self._questions.popleft(), fds[0] if fds else -1
            if not question.done():
                question.set_result((said.decode("utf-8", "backslashreplace"), fd))
            elif fd >= 0:
                os.close(fd)

    def tell(self, op: bytes, pid: int) -> None:
        """Interrupt (``I``) or kill (``K``) a process of the tree."""
        with contextlib.suppress(SessionEnded):  # the keeper has gone; the fork server tells of it
            self._send(op + b"%d" % pid)

    def _send(self, order: bytes) -> None:
        try:
            self._control.send(order)
        except OSError as error:
            raise SessionEnded(f"the session has ended: {error.strerror}") from error

    async def read(self, folder: str, path: str) -> tuple[str, int]:
        """Ask the keeper to open a file: (why it was refused, a descriptor or -1)."""
        self._send(b"R" + folder.encode() + b"\0" + os.fsencode(path))
        question: asyncio.Future[tuple[str, int]] = self._loop.create_future()
        self._questions.append(question)
        try:
            return await asyncio.wait_for(question, _SETTLE_SECONDS)
        except TimeoutError as error:
            raise SandboxFault(f"the keeper of a session did not answer in {_SETTLE_SECONDS:g} s") from error

    def _leave_unanswered(self) -> None:
        while self._questions:
            question = self._questions.popleft()
            if not question.done():
                question.set_exception(SessionEnded("the session has ended"))

    async def end(self) -> None:
        """Let the keeper go, and everything with it."""
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
        self._leave_unanswered()
        if self.ended is not None and not self.server.lost:
            await asyncio.wait([self.ended], timeout=_SETTLE_SECONDS)


class _Seat:
    """One process of a tree, as seen from the harness."""

    def __init__(self, tree: _Tree, folder: str) -> None:
        self.tree = tree
        self.limits = tree.limits
        self.pid = 0
        self.code: int | None = None
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._answer: bytes | None = None  # None while a report is due, b"" once the socket is closed
        self._gone = False
        self._violated = False
        self._kills = 0
        self._news: asyncio.Future[None] | None = None
        self.outputs = Outputs(tree.limits.output_bytes, self._stir, self._report)

    @property
    def alive(self) -> bool:
        ended = self.tree.ended
        return not self._gone and not self.tree.server.lost and not (ended and ended.done())

    def _report(self, message: bytes) -> None:
        """Bytes from the agent's code: one report for each question, nothing else."""
        if message and (self._answer is not None or len(message) > MOST_REPORT):
            self._violated = True
            self._kill()
            self._answer = self._answer or b""
        else:
            self._answer = message
        self._stir()

    def died(self, code: int) -> None:
        """The keeper saw the process end."""
        self.code = code
        self._gone = True
        self._stir()

    def _stir(self, _: object = None) -> None:
        """Something happened that a waiting turn may want to know."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Until ``ready``, the end of this process or of the whole tree is told, or ``seconds`` are over."""
        ended, over = self.tree.ended, False

        def end() -> None:
            nonlocal over
            over = True
            self._stir()

        timer = self._loop.call_later(seconds, end)
        if ended is not None:
            ended.add_done_callback(self._stir)
        try:
            while self.alive and not over and not ready():
                self._news = self._loop.create_future()
                await self._news
        finally:
            timer.cancel()
            if ended is not None:
                ended.remove_done_callback(self._stir)

    def _kill(self) -> None:
        if self.pid and self.alive:
            self.tree.tell(b"K", self.pid)

    async def hear(self, seconds: float) -> bytes:
        """The next report, or b"" when the process is gone or silent for ``seconds``."""
        await self._until(lambda: self._answer is not None, seconds)
        return self._answer or b""

    # ---- turns

    async def turn(self, job: Job, seconds: float) -> Result:
        async with self._lock:
            if not self.alive:
                return await self._dead(0.0, Status.KILLED)
            self._kills = memory_kills(self.tree.server)
            for collector in (self.outputs.stdout, self.outputs.stderr):
                collector.take()
                collector.renew()
            begun = time.monotonic()
            fd = job.payload()
            try:
                self._ask(b"C", [fd])
            finally:
                os.close(fd)
            try:
                report, stopped = await self._await_turn(seconds)
            except asyncio.CancelledError:
                self._kill()
                raise
            taken = time.monotonic() - begun
            if not report or self._violated:
                return await self._dead(taken, stopped or Status.KILLED)
            return self._conclude(report, stopped, taken)

    def _ask(self, message: bytes, fds: list[int]) -> None:
        self.outputs.read_report()  # what came unasked must not pass for the answer
        if self._violated or self._answer == b"":
            return
        self._answer = None
        try:
            socket.send_fds(self.outputs.report, [message], fds)
        except OSError:  # the process closed its socket; it will be found dead
            self._answer = b""

    async def _await_turn(self, seconds: float) -> tuple[bytes, Status | None]:
        """(report, why the turn was stopped): first wait, then interrupt, then kill."""
        await self._until(lambda: self._answer is not None or self.outputs.excess, seconds)
        excess = self.outputs.excess
        if self._answer or not self.alive:
            return self._answer or b"", Status.OUTPUT_LIMIT if excess else None
        reason = Status.OUTPUT_LIMIT if excess else Status.TIMEOUT
        if self._answer is not None:
            await self._await_end(_GRACE_SECONDS)
            if not self.alive:
                return b"", None
            reason = Status.KILLED  # it closed its socket and lives on
        else:
            self.tree.tell(b"I", self.pid)
            report = await self.hear(_GRACE_SECONDS)
            if report:
                return report, reason
        self._kill()
        return b"", reason

    def _conclude(self, report: bytes, stopped: Status | None, taken: float) -> Result:
        stdout, stderr = clean(self.outputs.stdout.take()), clean(self.outputs.stderr.take())
        kinds = {b"0": Status.OK, b"M": Status.MEMORY}
        status = kinds.get(report[:1], Status.ERROR)
        if self.outputs.excess:
            status = Status.OUTPUT_LIMIT
        elif stopped is not None and status is not Status.OK:
            status = stopped
        code = {Status.OK: 0, Status.TIMEOUT: 130}.get(status, 1)
        value = clean(report[2:]) if status is Status.OK and report[1:2] == b"=" else ""
        return Result(stdout, stderr, code, status, value, taken, self.outputs.excess)

    async def _dead(self, taken: float, stopped: Status) -> Result:
        """The result of a turn in which the process ended, or which found it ended."""
        reason = await self._why()
        stdout, stderr = clean(self.outputs.stdout.take()), clean(self.outputs.stderr.take())
        excess = self.outputs.excess
        code = -signal.SIGKILL if self.code is None else self.code
        status = Status.KILLED
        reason = reason or killed_for_memory(self.tree.server, code, self._kills)
        if stopped is not Status.KILLED:
            status = stopped
        elif reason or code < 0:
            status = end_status(reason, code, b"", excess=excess, spent=False)
        return Result(stdout, stderr + "[the session has ended]\n", code, status, "", taken, excess)

    async def _await_end(self, seconds: float) -> None:
        await self._until(lambda: False, seconds)

    async def _why(self) -> str:
        """Wait for the end to be known; the fork server's reason, if it was the one to end it."""
        tree = self.tree
        await self._await_end(_SETTLE_SECONDS)
        if tree.server.lost:
            raise SandboxFault("the fork server is gone, and the session with it")
        if tree.ended is not None and tree.ended.done():
            return str(tree.ended.result().get("reason", ""))
        return ""

    # ---- forks, files, the end

    async def fork(self) -> _Seat:
        async with self._lock:
            if not self.alive:
                raise SessionEnded("a session that has ended cannot be forked")
            folder = str(next(self.tree.folders))
            seat = _Seat(self.tree, folder)
            try:
                self._ask(b"F" + folder.encode(), seat.outputs.theirs)
                seat.outputs.release()
                answer = await self.hear(_SETTLE_SECONDS)
                told = await seat.hear(_SETTLE_SECONDS) if answer == b"0" else b""
                if told[:1] != b"F" or not told[1:].isdigit() or len(told) > 12:
                    why = clean(answer[1:]).strip() or "it, or its copy, ended"
                    raise SessionEnded(f"the session could not be forked: {why}")
            except BaseException:
                if self._answer is None:  # its report would pass for the next turn's
                    self._kill()
                seat.outputs.close()
                raise
            seat.pid = int(told[1:])
            self.tree.seats[seat.pid] = seat
            return seat

    async def read_file(self, path: str, most: int) -> bytes:
        if not path or path.startswith("/") or "\0" in path or len(path.encode()) > 4000:
            raise DataError(f"path must be relative to the session's folder, got {path!r}")
        inside = f"{self._folder}/{path}" if self._folder else path
        found, fd = await self.tree.read("forks" if self._folder else "box", inside)
        if fd < 0:
            raise DataError(f"{path!r} cannot be read: {found or 'no answer'}")
        with open(fd, "rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise DataError(f"{path!r} holds more than {most} bytes")
        return content

    async def close(self) -> None:
        if self.outputs.report.fileno() < 0:
            return
        self._kill()
        self.died(-signal.SIGKILL)
        self.outputs.close()
        self.tree.seats.pop(self.pid, None)
        if not self.tree.seats:
            await self.tree.end()


async def open_session(server: Server, limits: Limits, *, seed: int | None) -> Session:
    """Start a session in ``server`` and wait until it is set up. Raises SandboxFault when it is not."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ExitStack() as sent:  # what has been, or never will be, sent
        sent.callback(theirs.close)
        tree = _Tree(server, limits, ours)
        try:
            seat = _Seat(tree, "")
        except BaseException:
            await tree.end()
            raise
        try:
            inputs = [Job(seed=seed).payload()]
            sent.callback(os.close, inputs[0])
            inputs.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            sent.callback(os.close, inputs[1])
            fds = [*inputs, *seat.outputs.theirs, theirs.fileno()]
            _, tree.ended = await server.order("session", fds, limits)
            sent.close()
            await _begin(seat)
        except BaseException:
            await seat.close()
            raise
    return Session(seat)


async def _begin(seat: _Seat) -> None:
    """Wait until a session that was ordered is set up. Raises SandboxFault with the reason when it is not."""
    tree, ended = seat.tree, seat.tree.ended
    assert ended is not None
    seat.outputs.release()
    waited = {tree.started, ended}
    await asyncio.wait(waited, timeout=_SETTLE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    if tree.started.done():
        seat.pid = tree.started.result()
        tree.seats[seat.pid] = seat
        if await seat.hear(_SETTLE_SECONDS) == b"0":
            return
    told = ended.result() if ended.done() else {}
    why = told.get("fault") or clean(seat.outputs.stderr.take()).strip() or told.get("reason") or "no answer"
    raise SandboxFault(f"a session could not be set up: {why}")

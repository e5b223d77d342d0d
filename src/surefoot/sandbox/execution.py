"""One execution in a fork server, from its order to its result."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from surefoot.core.errors import ConfigError
from surefoot.sandbox.io import Collector, payload, sealed
from surefoot.sandbox.server import Server
from surefoot.sandbox.text import clean
from surefoot.sandbox.types import Limits, Result, SandboxFault, Status

MOST_REPORT = 61_000
# The fork server enforces the deadline; only when it hangs itself does this matter.
_LATE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """What to run: Python code, or a program with arguments."""

    code: str = ""
    argv: tuple[str, ...] = ()
    stdin: bytes = b""
    files: Mapping[str, bytes] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in self.files or {}:
            path = PurePosixPath(name)
            if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
                raise ConfigError(f"files holds {name!r}; a name must be relative and stay inside")
        if any("\0" in part for part in self.argv):
            raise ConfigError("an argument of a command holds a NUL character")

    def payload(self) -> int:
        """The job as a sealed descriptor."""
        return payload(self.code, self.files or {}, seed=self.seed, argv=list(self.argv) or None)


class Outputs:
    """The pipes and the report socket of one process, this side's ends watched, the other's to be sent."""

    def __init__(self, cap: int, on_excess: Callable[[], None], on_report: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_report = on_report
        with ExitStack() as undo:
            ends: list[tuple[int, int]] = []
            for _ in range(2):
                ends.append(os.pipe2(os.O_CLOEXEC))
                undo.callback(os.close, ends[-1][1])
                undo.callback(os.close, ends[-1][0])
            self.report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.pop_all()
        self.theirs = [ends[0][1], ends[1][1], theirs.detach()]
        self.stdout = Collector(ends[0][0], cap, on_excess)
        self.stderr = Collector(ends[1][0], cap, on_excess)
        self.report.setblocking(False)
        self._loop.add_reader(self.report.fileno(), self.read_report)

    def release(self) -> None:
        """Close the ends that were sent."""
        while self.theirs:
            os.close(self.theirs.pop())

    def read_report(self) -> None:
        """Take one report, which is bytes from the agent's code; b"" once the other side is closed."""
        if self.report.fileno() < 0:
            return
        try:
            # recv and not recvmsg: nothing but bytes may come this way.
            message = self.report.recv(MOST_REPORT + 1)
        except BlockingIOError:
            return
        except OSError:  # reset by the other side, which is as good as closed
            message = b""
        if not message:
            self._loop.remove_reader(self.report.fileno())
        self._on_report(message)

    @property
    def excess(self) -> bool:
        """Whether a limit of output was passed."""
        return self.stdout.excess or self.stderr.excess

    def close(self) -> None:
        """Close everything."""
        self.release()
        self.stdout.close()
        self.stderr.close()
        if self.report.fileno() >= 0:
            self._loop.remove_reader(self.report.fileno())
            self.report.close()


async def execute(server: Server, job: Job, limits: Limits) -> Result:
    """Run ``job`` once in ``server``. Raises SandboxFault when the sandbox, not the code, failed."""
    run = _Execution(server, job, limits)
    try:
        return await run.result()
    finally:
        run.close()


class _Execution:
    def __init__(self, server: Server, job: Job, limits: Limits) -> None:
        self._server = server
        self._job = job
        self._limits = limits
        self._number = 0
        self._kills = 0
        self._reports: list[bytes] = []
        self._outputs = Outputs(limits.output_bytes, lambda: self._stop("output"), self._heard)

    def _stop(self, reason: str) -> None:
        self._server.kill(self._number, reason)

    def _heard(self, message: bytes) -> None:
        if message:
            self._reports.append(message)
            if len(self._reports) > 1 or len(message) > MOST_REPORT:
                self._stop("violation")

    async def result(self) -> Result:
        self._kills = memory_kills(self._server)
        inputs = [self._job.payload()]
        try:
            data = self._job.stdin
            inputs.append(sealed(data) if data else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            fds = [*inputs, *self._outputs.theirs]
            self._number, ended = await self._server.order("run", fds, self._limits)
        finally:
            for fd in inputs:
                os.close(fd)
            self._outputs.release()
        try:
            found = await asyncio.wait_for(ended, self._limits.seconds + _LATE_SECONDS)
        except TimeoutError as error:
            await self._server.close()
            raise SandboxFault("the fork server did not answer and was ended") from error
        except asyncio.CancelledError:
            self._stop("cancelled")
            raise
        self._outputs.read_report()
        return self._conclude(found)

    def _conclude(self, found: Mapping[str, Any]) -> Result:
        stdout, stderr = clean(self._outputs.stdout.take()), clean(self._outputs.stderr.take())
        if "fault" in found or not found["ready"]:
            why = found.get("fault") or stderr.strip() or found["reason"] or "it ended during set-up"
            raise SandboxFault(f"an execution could not be set up: {why}")
        report = self._reports[0] if len(self._reports) == 1 else b""
        code = os.waitstatus_to_exitcode(found["status"])
        # The kernel limits by another count than it tells; besides, nobody else sends this signal.
        spent = found["cpu"] >= 0.5 * self._limits.cpu_seconds
        reason = found["reason"] or killed_for_memory(self._server, code, self._kills)
        status = end_status(reason, code, report, excess=self._outputs.excess, spent=spent)
        value = clean(report[2:]) if status is Status.OK and report[1:2] == b"=" else ""
        return Result(stdout, stderr, code, status, value, found["seconds"], self._outputs.excess)

    def close(self) -> None:
        self._outputs.close()


def memory_kills(server: Server) -> int:
    """How often the kernel has killed for memory in the server's group so far; 0 without a group."""
    return server.group.kills() if server.group is not None else 0


def killed_for_memory(server: Server, code: int, before: int) -> str:
    """'memory' where this died as by the kernel, which has killed for memory since ``before``, else ''.

    ``before``: what :func:`memory_kills` gave when this began.
    """
    return "memory" if code == -signal.SIGKILL and memory_kills(server) > before else ""


def end_status(reason: str, code: int, report: bytes, *, excess: bool, spent: bool) -> Status:
    """How a process ended: why it was stopped, its exit code, what it claimed, what it used up."""
    if excess:
        return Status.OUTPUT_LIMIT
    if reason in ("timeout", "memory"):
        return Status(reason)
    if reason:
        return Status.KILLED
    if code < 0:
        cpu = spent and -code in (signal.SIGKILL, signal.SIGXCPU)
        return Status.TIMEOUT if cpu else Status.KILLED
    if code == 0:
        return Status.OK
    return Status.MEMORY if report[:1] == b"M" else Status.ERROR

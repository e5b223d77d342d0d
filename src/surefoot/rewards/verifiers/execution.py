"""Runs untrusted programs for rewards, through anything that offers :class:`Executor`.

What a program prints is a claim and never a verdict. This module must not know what is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from surefoot.core.deadlines import Worker
from surefoot.core.errors import EnvironmentFault


class Ran(Protocol):
    """How one execution ended: decoded output, exit code, and a status, ``ok`` for exit code 0."""

    @property
    def stdout(self) -> str: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def status(self) -> str: ...


class Executor(Protocol):
    """Runs Python source in a fresh process, isolated from the harness and from every other run."""

    async def run(self, code: str, *, stdin: bytes = b"", files: Mapping[str, bytes] = ...) -> Ran: ...


_CLOSE_SECONDS = 10.0

Opener = Callable[[], AbstractAsyncContextManager[Executor]]


def _no_files() -> Mapping[str, bytes]:
    return {}


@dataclass(frozen=True, slots=True)
class Job:
    """One program with its input; ``files`` by path relative to the program's folder."""

    code: str
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=_no_files)


class _Seat:
    """One executor, kept open in a thread with an event loop of its own."""

    def __init__(self, opener: Opener) -> None:
        self.worker = Worker("surefoot-executor")
        self._context = opener()
        self._opening: asyncio.Task[Executor] | None = None

    async def executor(self) -> Executor:
        if self._opening is None:
            self._opening = asyncio.create_task(self._context.__aenter__())
        # The first caller may give up while others still wait.
        return await asyncio.shield(self._opening)

    async def _end(self) -> None:
        if self._opening is not None:
            await self._opening
            await self._context.__aexit__(None, None, None)

    def close(self) -> None:
        """Close the executor behind the caller's back: it may hang, and then nobody waits."""
        if not self.worker.abandoned:
            closer = threading.Thread(target=self._close, name="surefoot-executor-close", daemon=True)
            closer.start()

    def _close(self) -> None:
        # It failed or is not needed any more: an error in closing it has nobody to go to.
        with contextlib.suppress(Exception):
            asyncio.run(self.worker.call(self._end, _CLOSE_SECONDS))
        self.worker.stop()


def _close_all(seats: list[_Seat]) -> None:
    while seats:
        seats.pop().close()


class Host:
    """Gives rewards one shared executor, whichever thread and event loop they are scored in.

    The executor is opened at the first use, replaced after any failure of its own, and closed with
    the host. One that is open at the end of the program has to end with it.
    """

    def __init__(self, opener: Opener, *, at_once: int = 4) -> None:
        self._opener = opener
        self._at_once = at_once
        self._lock = threading.Lock()
        self._seats: list[_Seat] = []  # none or one; a list, so that closing need not hold this object
        weakref.finalize(self, _close_all, self._seats).atexit = False

    async def run(self, jobs: Sequence[Job], seconds: float) -> list[Ran]:
        """Results in the order of ``jobs``. What the executor raises goes through: it is a failed
        measurement. Raises EnvironmentFault when a program died in a way that a harmless one does too.
        """
        seat = self._sit()
        try:
            return await seat.worker.call(lambda: self._all(seat, jobs), seconds)
        except BaseException:
            self._leave(seat)
            raise

    async def _all(self, seat: _Seat, jobs: Sequence[Job]) -> list[Ran]:
        executor = await seat.executor()
        slots = asyncio.Semaphore(self._at_once)

        async def one(job: Job) -> Ran:
            async with slots:
                return await executor.run(job.code, stdin=job.stdin, files=job.files)

        found = list(await asyncio.gather(*map(one, jobs)))
        if any(item.status not in ("ok", "error") for item in found):
            await _control(executor)
        return found

    def _sit(self) -> _Seat:
        with self._lock:
            if self._seats and self._seats[0].worker.abandoned:
                self._seats.clear()
            if not self._seats:
                self._seats.append(_Seat(self._opener))
            return self._seats[0]

    def _leave(self, seat: _Seat) -> None:
        seat.close()
        with self._lock:
            if seat in self._seats:
                self._seats.remove(seat)


async def _control(executor: Executor) -> None:
    """A time-out is the program's fault only where a harmless program still runs."""
    ran = await executor.run("print(6 * 7)", stdin=b"", files={})
    if ran.status != "ok" or ran.stdout.strip() != "42":
        raise EnvironmentFault(f"the executor cannot run a harmless program: {ran.status}")

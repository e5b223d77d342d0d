"""Helper processes for checks that could hang, crash or eat memory: killed at a deadline, then replaced.

One JSON line goes in, one comes back. Deadlines count the helper's own CPU time, so that a busy machine
does not turn a right answer into a wrong one. This module must not know what is checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from surefoot.core.errors import DataError

_MOST_REPLY = 64 * 1024 * 1024
# Wall seconds that a helper may take for each second of CPU time it is allowed, and at least.
_WALL, _LEAST_WALL = 20.0, 60.0
_LOOK_SECONDS = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


class HelperTimeout(Exception):
    """The helper used up its CPU time without an answer and was killed: the request is at fault."""


class HelperStarved(Exception):
    """The helper got no answer done because it hardly ran: the machine is at fault."""


class HelperDied(Exception):
    """The helper ended without an answer: a crash, or memory that ran out."""


class _Helper:
    def __init__(self, script: Path, memory_mb: int, site: bool) -> None:
        flags = ["-I", "-B"] if site else ["-I", "-S", "-B"]
        self.process = subprocess.Popen(
            [sys.executable, *flags, str(script), str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            bufsize=0,
        )

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps({**request, "cpu_seconds": seconds}).encode() + b"\n")
        except OSError as error:
            raise HelperDied("the helper had ended") from error
        line = self._read_line(stdout.fileno(), seconds)
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise DataError(f"the helper answered {line[:80]!r}; it must answer an object")
        return cast("dict[str, Any]", reply)

    def _read_line(self, source: int, seconds: float) -> bytes:
        found = bytearray()
        used, began, wall = self._cpu(), time.monotonic(), max(_LEAST_WALL, _WALL * seconds)
        ready = select.poll()  # select() cannot watch descriptors above 1023
        ready.register(source, select.POLLIN)
        while not found.endswith(b"\n"):
            if not ready.poll(1000 * min(_LOOK_SECONDS, seconds)):
                if self._cpu() - used >= seconds:
                    raise HelperTimeout(f"no result within {seconds:g} s of CPU time")
                if time.monotonic() - began >= wall:
                    raise HelperStarved(f"no result within {wall:g} s on a busy machine")
                continue
            piece = os.read(source, 1 << 16)
            found += piece
            if not piece or len(found) > _MOST_REPLY:
                raise HelperDied("the helper ended without a result")
        return bytes(found)

    def _cpu(self) -> float:
        """CPU seconds of the helper so far; wall time where the system does not tell."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return time.monotonic()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a broken pipe is what a killed helper leaves
                    pipe.close()


def _kill_all(helpers: list[_Helper]) -> None:
    while helpers:
        helpers.pop().kill()


class HelperPool:
    """Starts helpers when they are needed, hands each to one caller at a time; safe between threads.

    ``script`` is run with an empty environment, isolated from the user's site and working folder;
    with ``site`` it can import installed packages. Helpers end with this process: their input closes,
    and a limit on CPU time ends one that hangs.
    """

    def __init__(self, script: Path, *, memory_mb: int, site: bool = False) -> None:
        self._make = lambda: _Helper(script, memory_mb, site)
        self._idle: list[_Helper] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _kill_all, self._idle)

    def ask(self, request: Mapping[str, Any], seconds: float, *, start: float = 10.0) -> dict[str, Any]:
        """The helper's answer, within ``seconds`` of its CPU time (a new helper first gets ``start`` to
        get ready). Raises HelperTimeout, HelperDied when it ends without one, HelperStarved when it
        got too little CPU.
        """
        with self._lock:
            helper = self._idle.pop() if self._idle else None
        if helper is None or helper.process.poll() is not None:
            helper = self._make()
            self._guard(helper, {"ready": True}, start)
        reply = self._guard(helper, request, seconds)
        with self._lock:
            self._idle.append(helper)
        return reply

    @staticmethod
    def _guard(helper: _Helper, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        try:
            return helper.ask(request, seconds)
        except BaseException:
            helper.kill()  # whatever went wrong, its state is unknown
            raise

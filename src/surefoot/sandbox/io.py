"""One thread with an event loop that does the sandbox's waiting, so that a busy caller delays no deadline.

Also the descriptors that cross into the sandbox: sealed files, bounded readers.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_CHUNK = 65_536
_lock = threading.Lock()
_running: asyncio.AbstractEventLoop | None = None


def _loop() -> asyncio.AbstractEventLoop:
    global _running
    with _lock:
        if _running is None:
            _running = asyncio.new_event_loop()
            threading.Thread(target=_running.run_forever, name="surefoot-sandbox", daemon=True).start()
        return _running


def _forget() -> None:
    """A forked copy of the harness has no such thread."""
    global _running, _lock
    _running, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


async def elsewhere(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` in the sandbox's own thread, from any event loop. Cancelling cancels it there."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))


def sealed(data: bytes) -> int:
    """A descriptor of an anonymous file with ``data`` that nobody can change any more."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def payload(code: str, files: Mapping[str, bytes], *, seed: int | None, argv: list[str] | None) -> int:
    """What a child needs to begin, as a sealed file: length, JSON header, code, files."""
    source = code.encode("utf-8", "surrogatepass")
    sizes = [[name, len(content)] for name, content in files.items()]
    header = json.dumps({"code": len(source), "files": sizes, "seed": seed, "argv": argv}).encode()
    return sealed(b"".join([len(header).to_bytes(8, "little"), header, source, *files.values()]))


class Collector:
    """Reads a pipe as it fills, keeps at most ``cap`` bytes, and calls ``on_excess`` when there is more."""

    def __init__(self, fd: int, cap: int, on_excess: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)
        self._watching = True
        self._cap = cap
        self._on_excess = on_excess
        self.renew()

    def renew(self) -> None:
        """Begin anew, with what came since the last time dropped."""
        self._kept = bytearray()
        self.excess = False

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._unwatch()
            return False
        room = self._cap - len(self._kept)
        self._kept += data[:room]
        if len(data) > room and not self.excess:
            self.excess = True
            self._on_excess()
        return True

    def take(self) -> bytes:
        """What was kept, after reading what lies ready; a full pipe's worth at most."""
        for _ in range(64):
            if self._fd < 0 or not self._read():
                break
        return bytes(self._kept)

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._fd)

    def close(self) -> None:
        """Stop reading; a writer that goes on gets a broken pipe."""
        self._unwatch()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

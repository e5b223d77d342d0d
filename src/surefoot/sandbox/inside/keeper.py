"""Process 1 of a session: starts it, outlives its orphans, and does what the harness asks of the session.

It runs no code of the agent and reads nothing of the agent's but process ids and exit statuses.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
from typing import Any, cast

from . import kernel


def _wake_up(number: int, frame: object) -> None:
    """A signal needs a handler for its number to reach the wake-up pipe."""


class Keeper:
    """Answers on ``control``: ``kill`` and ``interrupt`` a process, ``read`` a file. Tells of every exit."""

    def __init__(self, control: socket.socket, first: int, folders: dict[str, int]) -> None:
        self._control = control
        self._folders = folders
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake_up)
        self._tell({"started": first})

    def serve(self) -> None:
        """Until the harness closes the socket; then the process ends and takes all others with it."""
        while True:
            self._reap()
            ready, _, _ = select.select([self._control, self._wake], [], [])
            if self._wake in ready:
                os.read(self._wake, 512)
            if self._control in ready:
                message = self._control.recv(8192)
                if not message:
                    return
                self._obey(cast("dict[str, Any]", json.loads(message)))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._tell({"exited": pid, "status": status})

    def _obey(self, order: dict[str, Any]) -> None:
        if order["op"] == "read":
            self._read(order["folder"], order["path"])
            return
        number = signal.SIGINT if order["op"] == "interrupt" else signal.SIGKILL
        if order["pid"] > 1:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself, and its exit is told
                os.kill(order["pid"], number)

    def _read(self, folder: str, path: str) -> None:
        # From descriptors taken before the code began, since it may put links where its folders were.
        try:
            fd = kernel.open_beneath(self._folders[folder], path)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(0, "not a regular file")
        except OSError as error:
            self._tell({"refused": error.strerror or str(error)})
            return
        socket.send_fds(self._control, [b'{"opened": true}'], [fd])
        os.close(fd)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)  # the harness has gone; so must everything here

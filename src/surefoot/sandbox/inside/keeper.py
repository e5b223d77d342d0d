"""Process 1 of a session: starts it, outlives its orphans, and does what the harness asks of the session.

It runs no code of the agent and reads nothing of the agent's but process ids and exit statuses. There is one
for each session, so it uses little of the interpreter: what it touches, it has a copy of.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat

from . import kernel


def _wake_up(number: int, frame: object) -> None:
    """A signal needs a handler for its number to reach the wake-up pipe."""


class Keeper:
    """Answers on ``control``; one byte says what a message is.

    Orders: ``K`` and ``I`` with a process to kill or interrupt, ``R`` with a folder's name, NUL and the path
    of a file to open. Told: ``S`` the first process, ``E`` a process that ended and its status, ``O`` with a
    file's descriptor, ``F`` why there is none.
    """

    def __init__(self, control: socket.socket, folders: dict[str, int]) -> None:
        self._control = control
        self._folders = folders
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self, first: int) -> None:
        """Until the harness closes the socket; then the process ends and takes all others with it."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        kernel.set_handler(signal.SIGCHLD, _wake_up)
        self._tell(b"S%d" % first)
        while True:
            self._reap()
            ready, _, _ = select.select([self._control, self._wake], [], [])
            if self._wake in ready:
                os.read(self._wake, 512)
            if self._control in ready:
                message = self._control.recv(8192)
                if not message:
                    return
                self._obey(message)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._tell(b"E%d %d" % (pid, status))

    def _obey(self, order: bytes) -> None:
        if order[:1] == b"R":
            folder, _, path = order[1:].partition(b"\0")
            self._read(folder.decode(), os.fsdecode(path))
            return
        number, pid = signal.SIGINT if order[:1] == b"I" else signal.SIGKILL, int(order[1:])
        if pid > 1:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself, and its exit is told
                os.kill(pid, number)

    def _read(self, folder: str, path: str) -> None:
        # From descriptors taken before the code began, since it may put links where its folders were.
        try:
            fd = kernel.open_beneath(self._folders[folder], path)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(0, "not a regular file")
        except OSError as error:
            self._tell(b"F" + (error.strerror or str(error)).encode())
            return
        socket.send_fds(self._control, [b"O"], [fd])
        os.close(fd)

    def _tell(self, message: bytes) -> None:
        try:
            self._control.send(message)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)  # the harness has gone; so must everything here

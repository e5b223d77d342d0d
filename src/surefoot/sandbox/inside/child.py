"""Runs the agent's code in a confined process: once, or turn by turn as a session.

From the first line of that code on, everything here is in the agent's hands. What is sent back on the
report socket is therefore a claim of the agent, and the harness reads it as such.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import gc
import json
import linecache
import os
import random
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from typing import Any, cast

from . import folders, kernel

# Where a child finds what it was given.
STDIN, STDOUT, STDERR, REPORT, PAYLOAD = range(5)
_MOST_VALUE = 60_000
_MOST_REASON = 300
MOST_FILES = os.sysconf("SC_OPEN_MAX")  # the zygote's, before any child lowers its own
_CELL = "<cell>"
_REHEARSALS = 40  # code is adapted from its eighth run on
_POOL, _POOL_HEADER = 1 << 14, 48
_fillers: list[bytes] = []

# First byte of a report.
OK, ERROR, MEMORY, INTERRUPTED, FORKED = b"0", b"1", b"M", b"I", b"F"


def take_places(fds: list[int]) -> None:
    """Put [payload, stdin, stdout, stderr, report] where the code expects them."""
    payload, *rest = fds
    for target, fd in enumerate(rest):
        os.dup2(fd, target, inheritable=target <= STDERR)
    os.dup2(payload, PAYLOAD, inheritable=False)


def close_others(last: int) -> None:
    """Close every descriptor above ``last``."""
    os.closerange(last + 1, MOST_FILES)


def read_payload(fd: int) -> tuple[dict[str, Any], str, dict[str, bytes]]:
    """(header, code, files) of a sealed file: 8 bytes of length, a JSON header, the code, the files."""
    size = os.fstat(fd).st_size
    data = b""
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    os.close(fd)
    start = 8 + int.from_bytes(data[:8], "little")
    header = cast("dict[str, Any]", json.loads(data[8:start]))
    code = data[start : start + header["code"]].decode("utf-8", "surrogatepass")
    start += header["code"]
    files: dict[str, bytes] = {}
    for name, length in header["files"]:
        files[name] = data[start : start + length]
        start += length
    return header, code, files


def put_files(files: Mapping[str, bytes]) -> None:
    """Write files below the working folder."""
    for name, content in files.items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def reseed(seed: int | None) -> None:
    """Give the process its own random numbers; a fork would repeat its siblings'."""
    value = int.from_bytes(os.urandom(8), "little") if seed is None else seed
    threading.main_thread()._set_native_id()  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]  nothing else did after the fork
    random.seed(value)
    numpy_random = cast("Any", sys.modules.get("numpy.random"))
    if numpy_random is not None:
        numpy_random.seed(value % (1 << 32))


def fresh_main() -> dict[str, Any]:
    """The namespace of a new ``__main__``."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module.__dict__


def execute(code: str, namespace: dict[str, Any]) -> object:
    """Run ``code``; the value of its last statement if that is an expression, else None."""
    linecache.cache[_CELL] = (len(code), None, code.splitlines(keepends=True), _CELL)
    tree = cast("ast.Module", compile(code, _CELL, "exec", ast.PyCF_ONLY_AST))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _CELL, "exec"), namespace)
    if last is None:
        return None
    return eval(compile(ast.Expression(cast("ast.Expr", last).value), _CELL, "eval"), namespace)


def _show(error: BaseException) -> None:
    """Print the traceback without the frames of this module."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == execute.__code__.co_filename:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def turn(code: str, namespace: dict[str, Any]) -> tuple[bytes, int]:
    """Run ``code`` and give (report, exit code): what happened and the last value's repr."""
    try:
        value = execute(code, namespace)
        shown = b"" if value is None else b"=" + repr(value).encode("utf-8", "backslashreplace")
        return OK + shown[:_MOST_VALUE], 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            number = (error.code or 0) & 0xFF
        else:
            print(error.code, file=sys.stderr)
            number = 1
        return (ERROR if number else OK), number
    except KeyboardInterrupt as error:
        _show(error)
        return INTERRUPTED, 130
    except BaseException as error:
        _show(error)
        return (MEMORY if isinstance(error, MemoryError) else ERROR), 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # the code may have removed it
            stream.flush()


def _report(sock: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):  # the code closed its own socket, or the harness has gone
        sock.send(message)


def run_once(header: Mapping[str, Any], code: str, files: Mapping[str, bytes]) -> int:
    """A one-shot execution; its exit code."""
    put_files(files)
    if header["argv"]:
        return _become(header["argv"])
    reseed(header["seed"])
    message, number = turn(code, fresh_main())
    try:
        # What the interpreter does at its end, without tearing itself down.
        threading._shutdown()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        _flush()
    except BaseException as error:
        _show(error)
        message, number = ERROR, number or 1
    with contextlib.suppress(OSError):  # as above
        _report(socket.socket(fileno=REPORT), message)
    return number


def _become(argv: list[str]) -> int:
    os.close(REPORT)
    kernel.set_handler(signal.SIGPIPE, kernel.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127


class Session:
    """Reads turns from the report socket and answers each; the state lives on between them."""

    def __init__(self, places: Mapping[str, str], header: Mapping[str, Any]) -> None:
        self.folder = places["box"]
        self._forks = places["forks"]
        self._sock = socket.socket(fileno=REPORT)
        self._main = fresh_main()
        reseed(header["seed"])

    def serve(self) -> int:
        """Until the harness closes the socket."""
        kernel.set_handler(signal.SIGINT, kernel.SIG_IGN)
        _report(self._sock, OK)  # set up, and no code has run yet
        while True:
            message, fds, _, _ = socket.recv_fds(self._sock, 256, 3)
            if not message:
                return 0
            if message[:1] == FORKED:
                self._fork(int(message[1:]), fds)
            else:
                _report(self._sock, self._turn(fds[0]))

    def _turn(self, payload: int) -> bytes:
        _, code, files = read_payload(payload)
        answer = INTERRUPTED
        try:
            kernel.set_handler(signal.SIGINT, signal.default_int_handler)
            put_files(files)
            answer, _ = turn(code, self._main)
            kernel.set_handler(signal.SIGINT, kernel.SIG_IGN)
            _flush()
        except KeyboardInterrupt:  # came between two lines of this method
            kernel.set_handler(signal.SIGINT, kernel.SIG_IGN)
            _flush()
        except Exception as error:
            _show(error)
            answer = ERROR
        return answer

    def _fork(self, number: int, fds: list[int]) -> None:
        """Copy the working folder, then this process; the copy is an orphan, so the keeper owns it."""
        folder, answer = f"{self._forks}/{number}", OK
        try:
            folders.copy(self.folder, folder)
            middle = os.fork()
            if middle == 0 and self._is_grandchild():
                self._take_over(folder, fds)
                return
            _, status = os.waitpid(middle, 0)
            if status:
                answer = ERROR + b"no process is left"
        except Exception as error:  # no process or no space left; also whatever the code has patched
            answer = ERROR + str(error).encode("utf-8", "backslashreplace")[:_MOST_REASON]
        for fd in fds:
            os.close(fd)
        _report(self._sock, answer)

    def _is_grandchild(self) -> bool:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os._exit(0)
        return True

    def _take_over(self, folder: str, fds: list[int]) -> None:
        try:
            os.chdir(self._own_place(folder))
            self.folder = folder
            for target, fd in zip((STDOUT, STDERR, REPORT), fds, strict=True):
                os.dup2(fd, target, inheritable=target <= STDERR)
                os.close(fd)
            reseed(None)
            _report(self._sock, FORKED + str(os.getpid()).encode())
        except BaseException:  # it must not go on as the session that it is a copy of
            os._exit(1)

    def _own_place(self, folder: str) -> str:
        """Where in the copy of the working folder this process now is; the copy itself when outside it."""
        try:
            inside = os.path.relpath(os.getcwd(), self.folder)
        except FileNotFoundError:  # the code removed the folder that it was in
            return folder
        return folder if inside.startswith("..") else os.path.join(folder, inside)


def settle() -> None:
    """Once, in the zygote: what every child starts with."""
    for stream in (sys.stdout, sys.stderr):
        cast("Any", stream).reconfigure(encoding="utf-8", errors="backslashreplace")
    kernel.set_handler(signal.SIGINT, signal.default_int_handler)
    _rehearse()
    gc.collect()
    _fill_gaps()
    gc.freeze()  # children must not copy pages only to look for garbage


def _fill_gaps() -> None:
    """Use up the free places between the zygote's objects, so that what a child makes lies together.

    The interpreter keeps small objects in pools of 16 KiB, by size; one at a pool's start tells that the
    pools before it are full. Wherever that is not so, a few MB are spent for nothing.
    """
    for size in range(48, 513, 16):
        for _ in range(1000):
            filler = bytes(size - b"".__sizeof__())
            _fillers.append(filler)
            if id(filler) % _POOL == _POOL_HEADER:
                break


def _rehearse() -> None:
    """Do what every child does until the interpreter has adapted its bytecode, once and for all of them.

    Each would otherwise do so in pages of its own.
    """
    for _ in range(_REHEARSALS):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        header = json.dumps({"code": 1, "files": [], "seed": 0, "argv": None}).encode()
        fd = os.memfd_create("rehearsal", os.MFD_CLOEXEC)
        os.write(fd, b"".join([len(header).to_bytes(8, "little"), header, b"1"]))
        _, code, files = read_payload(fd)
        put_files(files)
        _report(ours, turn(code, {"__builtins__": builtins})[0])
        socket.recv_fds(theirs, 256, 3)
        ours.close()
        theirs.close()
    linecache.cache.pop(_CELL, None)

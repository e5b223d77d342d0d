"""Starts a fork server and speaks with it: orders and descriptors go in, exit statuses come out.

Lives in the sandbox's own thread. What the code itself says never passes through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, cast

from surefoot.sandbox import layout
from surefoot.sandbox.cgroup import Group, make_group
from surefoot.sandbox.inside.folders import wipe
from surefoot.sandbox.types import Limits, Profile, SandboxFault, Tier

_INSIDE = ("kernel", "filters", "folders", "jail", "child", "keeper", "zygote")
_START_SECONDS = 120.0
_MOST_MESSAGE = 1 << 16
# The modules reach the interpreter as text on its stdin: neither arguments nor files show the harness.
_BOOT = """
import sys, types
package = sys.modules["inside"] = types.ModuleType("inside")
package.__path__ = []
for name, source in {sources!r}:
    module = sys.modules["inside." + name] = types.ModuleType("inside." + name)
    module.__package__ = "inside"
    exec(compile(source, "<" + name + ">", "exec"), module.__dict__)
    setattr(package, name, module)
del source
module.main({control}, {parent})
"""


class Server:
    """A running fork server. Once it is lost, every order in flight fails with SandboxFault."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, folder: Path, group: Group | None
    ) -> None:
        self.group = group
        self._process = process
        self._control = control
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._first: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.lost = False
        self.pid = process.pid
        control.setblocking(False)
        self._loop.add_reader(control.fileno(), self._receive)

    @classmethod
    async def start(
        cls, profile: Profile, tier: Tier, *, most: int, total_memory_mb: int | None = None
    ) -> Server:
        """Start a fork server and wait until it is warm. Raises SandboxFault with the reason if it cannot."""
        folder = Path(tempfile.mkdtemp(prefix="surefoot-sandbox-"))
        try:
            if tier is Tier.UID:
                folder.chmod(0o711)
            inner = folder / "root"
            inner.mkdir(0o711)
            tree = _own_tree(profile.tree, folder) if profile.tree is not None else None
            config = layout.describe(profile, tier, most=most, folder=str(inner), tree=tree)
            process, control, group = _spawn(total_memory_mb)
            server = cls(process, control, folder, group)
        except BaseException:
            wipe(str(folder))
            raise
        try:
            control.send(json.dumps(config).encode())
            answer = await asyncio.wait_for(server._first, _START_SECONDS)
        except (TimeoutError, OSError) as error:
            await server.close()
            raise SandboxFault(f"the fork server of tier {tier} did not start: {error}") from error
        except BaseException:
            await server.close()
            raise
        if "failed" in answer:
            await server.close()
            raise SandboxFault(f"tier {tier} cannot be set up here: {answer['failed']}")
        if tier is Tier.FULL:
            # Only mounting needed it; gone now, it cannot be left behind by a harness that is killed.
            inner.rmdir()
            with contextlib.suppress(OSError):  # the copy of a tree is in use
                folder.rmdir()
        return server

    async def order(
        self, op: str, fds: Sequence[int], limits: Limits
    ) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        """Send an order with descriptors; (its number, a future of how it ended)."""
        if self.lost:
            raise SandboxFault("the fork server is gone")
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._waiting[number] = future
        message = json.dumps({"op": op, "id": number, "limits": asdict(limits)}).encode()
        try:
            while not self.lost:
                try:
                    socket.send_fds(self._control, [message], fds)
                    return number, future
                except BlockingIOError:  # many orders at once: its queue is full for a moment
                    await asyncio.sleep(0.002)
                except OSError as error:
                    self._lose(f"its socket failed: {error}")
        except asyncio.CancelledError:
            self._waiting.pop(number, None)
            raise
        raise SandboxFault("the fork server is gone")

    def kill(self, number: int, reason: str) -> None:
        """End an execution; how it ended still comes through its future."""
        if self.lost or number not in self._waiting:
            return
        message = json.dumps({"op": "kill", "id": number, "reason": reason}).encode()
        try:
            self._control.send(message)
        except BlockingIOError:
            self._loop.call_later(0.01, self.kill, number, reason)
        except OSError as error:
            self._lose(f"its socket failed: {error}")

    def _receive(self) -> None:
        for _ in range(64):
            try:
                message = self._control.recv(_MOST_MESSAGE)
            except BlockingIOError:
                return
            except OSError as error:
                return self._lose(f"its socket failed: {error}")
            if not message:
                return self._lose("it ended")
            found = cast("dict[str, Any]", json.loads(message))
            if "failed" in found and self._first.done():
                return self._lose(found["failed"])
            future = self._waiting.pop(found["id"], None) if "id" in found else self._first
            if future is not None and not future.done():
                future.set_result(found)

    def _lose(self, why: str) -> None:
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        for future in [self._first, *self._waiting.values()]:
            if not future.done():
                future.set_exception(SandboxFault(f"the fork server is gone: {why}"))
                future.exception()  # some have no reader left; that is not worth a warning
        self._waiting.clear()

    async def close(self) -> None:
        """End the fork server and everything in it, and remove its folder."""
        self._lose("it was closed")
        await self._loop.run_in_executor(None, self._bury)

    def _bury(self) -> None:
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.group is not None:
            self.group.remove()
        wipe(str(self._folder))


def _spawn(total_memory_mb: int | None) -> tuple[subprocess.Popen[bytes], socket.socket, Group | None]:
    inside = package_files("surefoot.sandbox.inside")
    sources = [(name, inside.joinpath(f"{name}.py").read_text(encoding="utf-8")) for name in _INSIDE]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Its end is seen even when another process holds a copy of the socket.
    parent = os.pidfd_open(os.getpid())
    process: subprocess.Popen[bytes] | None = None
    group: Group | None = None
    try:
        for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            ours.setsockopt(socket.SOL_SOCKET, kind, 1 << 20)
            theirs.setsockopt(socket.SOL_SOCKET, kind, 1 << 20)
        process = subprocess.Popen(
            [layout.interpreter(), "-S", "-P", "-s", "-B", "-X", "utf8", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=layout.environment(),
            pass_fds=(theirs.fileno(), parent),
        )
        group = _grouped(process.pid, total_memory_mb)  # before it starts anything itself
        boot = _BOOT.format(sources=sources, control=theirs.fileno(), parent=parent)
        with cast("Any", process.stdin) as stdin:
            stdin.write(boot.encode())
    except BaseException:
        ours.close()
        if process is not None:
            process.kill()
            process.wait()
        if group is not None:
            group.remove()
        raise
    finally:
        theirs.close()
        os.close(parent)
    return process, ours, group


def _grouped(pid: int, total_memory_mb: int | None) -> Group | None:
    """The process's new control group; None where none can be had, and the watch over memory must do."""
    group = make_group(total_memory_mb)
    if group is None:
        return None
    try:
        group.take(pid)
    except OSError:
        group.remove()
        return None
    return group


def _own_tree(tree: Path, folder: Path) -> str:
    """The tree itself, or from root a copy that the dedicated user owns, so that it can be written over."""
    if os.geteuid() != 0:
        return str(tree.resolve())
    copy = folder / "tree"
    shutil.copytree(tree, copy, symlinks=True)
    for path, folders, names in os.walk(copy):
        for name in ("", *folders, *names):
            os.lchown(os.path.join(path, name), layout.DEDICATED_USER, layout.DEDICATED_USER)
    return str(copy)

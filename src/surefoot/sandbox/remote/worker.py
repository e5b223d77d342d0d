"""Runs in the container: opens a sandbox there and does what comes as JSON lines on stdin.

It is shipped with the package's sandbox and started from it; needs Python 3.11 and nothing else. Every answer
is one JSON line on stdout that names the order it belongs to.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from surefoot.core.errors import SurefootError
from surefoot.sandbox.sandbox import Sandbox
from surefoot.sandbox.session import Session
from surefoot.sandbox.types import Limits, Profile, SandboxFault

Order = Mapping[str, Any]


def unpacked(files: Mapping[str, str] | None) -> dict[str, bytes]:
    """Names and contents from base64."""
    return {name: base64.b64decode(content) for name, content in (files or {}).items()}


class Worker:
    """One sandbox, its sessions by number, and the orders in progress."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._stack = AsyncExitStack()
        self._box: Sandbox | None = None
        self._sessions: dict[int, Session] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._writer = ThreadPoolExecutor(1)

    async def serve(self, lines: asyncio.Queue[bytes]) -> None:
        """Until an empty line, which stands for the end of stdin."""
        async with self._stack:
            while line := await lines.get():
                order = json.loads(line)
                if order["op"] == "cancel":
                    self._track(-order["target"], self._cancel(order["target"]))
                else:
                    self._track(order["id"], self._answer(order))
            for task in list(self._running.values()):
                task.cancel()

    def _track(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        self._running[number] = task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def _cancel(self, target: int) -> None:
        """End an order, and the session that it has started: nobody knows its number."""
        if target in self._running:
            self._running[target].cancel()
            await asyncio.wait([self._running[target]])
        await self.do_close({"session": target})

    async def _answer(self, order: Order) -> None:
        try:
            reply: dict[str, Any] = {"ok": await getattr(self, f"do_{order['op']}")(order)}
        except SurefootError as error:
            reply = {"error": [type(error).__name__, str(error)]}
        except Exception as error:  # whatever it is, the harness must hear of it and not wait
            reply = {"error": [SandboxFault.__name__, f"{type(error).__name__}: {error}"]}
        # From this one thread only, whole lines: a blocked pipe holds the answers and not the deadlines.
        line = json.dumps({"id": order["id"], **reply}).encode() + b"\n"
        await asyncio.get_running_loop().run_in_executor(self._writer, self._write, line)

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(self._out, view) :]

    def _open_box(self) -> Sandbox:
        if self._box is None:
            raise SandboxFault("the sandbox in the container is not open")
        return self._box

    async def do_open(self, order: Order) -> dict[str, Any]:
        """Open the sandbox; what was probed in the container."""
        profile = order["profile"]
        self._box = await self._stack.enter_async_context(
            Sandbox.open(
                profile=Profile(
                    profile["name"], tuple(profile["preload"]), tuple(profile["packages"]), profile["network"]
                ),
                limits=Limits(**order["limits"]),
                tier=order["tier"],
                concurrency=order["concurrency"],
            )
        )
        found = self._box.probe
        checks = [[check.name, check.stopped, check.detail] for check in found.checks]
        return {"tier": str(found.tier), "checks": checks, "refused": dict(found.refused)}

    async def do_run(self, order: Order) -> dict[str, Any]:
        """Run code or a program once."""
        given: dict[str, Any] = {
            "stdin": base64.b64decode(order["stdin"]),
            "files": unpacked(order["files"]),
            "limits": Limits(**order["limits"]),
        }
        if order["argv"]:
            return asdict(await self._open_box().run_command(order["argv"], **given))
        return asdict(await self._open_box().run(order["code"], seed=order["seed"], **given))

    async def do_session(self, order: Order) -> dict[str, Any]:
        """Start a session; its number is the order's."""
        limits = Limits(**order["limits"])
        self._sessions[order["id"]] = await self._open_box().session(limits=limits, seed=order["seed"])
        return {}

    async def do_turn(self, order: Order) -> dict[str, Any]:
        """Run a turn; the result, and whether the session lives on."""
        session = self._sessions[order["session"]]
        result = await session.run(order["code"], files=unpacked(order["files"]), seconds=order["seconds"])
        return {**asdict(result), "alive": session.alive}

    async def do_fork(self, order: Order) -> dict[str, Any]:
        """Fork a session; the copy's number is the order's."""
        self._sessions[order["id"]] = await self._sessions[order["session"]].fork()
        return {}

    async def do_read(self, order: Order) -> dict[str, Any]:
        """Read a file of a session."""
        content = await self._sessions[order["session"]].read_file(order["path"], most=order["most"])
        return {"content": base64.b64encode(content).decode()}

    async def do_close(self, order: Order) -> dict[str, Any]:
        """End a session."""
        session = self._sessions.pop(order["session"], None)
        if session is not None:
            await session.close()
        return {}


def main() -> None:
    """Serve stdin until it ends."""
    out = os.dup(1)
    os.dup2(2, 1)  # nothing but answers may come out there

    async def serve() -> None:
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def read() -> None:
            for line in sys.stdin.buffer:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, b"")

        threading.Thread(target=read, daemon=True).start()
        await Worker(out).serve(lines)

    asyncio.run(serve())

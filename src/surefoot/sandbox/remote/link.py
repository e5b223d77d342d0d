"""The harness's side of a worker in a container: orders out, answers in, over whatever the library gives.

Answers are bytes from a container that holds untrusted code: bounded, parsed, and checked field by field.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import threading
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.resources import files as package_files
from typing import Any, Protocol, cast

from surefoot.core.errors import ConfigError, DataError, SurefootError
from surefoot.sandbox.session import SessionEnded
from surefoot.sandbox.types import Check, Limits, Probe, Profile, Result, SandboxFault, Status, Tier

# The worker enforces the deadlines; only when it hangs, or the network does, do these matter.
LATE_SECONDS = 30.0
_OPEN_SECONDS = 300.0
_MOST_LINE = 256 << 20
_KEPT_STDERR = 2000
# What the fork server's tier `uid` needs of root: users of its own for executions, and their files.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
_MODULES = ("surefoot/__init__.py", "surefoot/core/__init__.py", "surefoot/core/errors.py")
# The worker's source is the first line of stdin: the image needs a Python and no more.
BOOT = (
    "import base64,sys,tempfile\n"
    "path=tempfile.mkdtemp()+'/surefoot.zip'\n"
    "with open(path,'wb') as file: file.write(base64.b64decode(sys.stdin.buffer.readline()))\n"
    "sys.path.insert(0,path)\n"
    "from surefoot.sandbox.remote.worker import main\n"
    "main()\n"
)
COMMAND = ("python3", "-I", "-B", "-c", BOOT)


class Channel(Protocol):
    """The worker's stdin and output, through a library. Blocking; called from threads."""

    def send(self, data: bytes) -> None:
        """Write all of ``data`` (ASCII) to stdin."""
        ...

    def receive(self) -> tuple[int, bytes] | None:
        """The next (1: stdout or 2: stderr, bytes); None at the end."""
        ...

    def close(self) -> None:
        """End the container and everything in it; a ``receive`` that waits returns or raises."""
        ...


class Backend(Protocol):
    """A way to have containers."""

    def start(self, command: Sequence[str], *, label: str) -> Channel:
        """A new container that runs ``command``. Raises ConfigError when the library is not installed,
        SandboxFault when no container can be had.
        """
        ...


class Link:
    """One container with a worker in it. Once it is lost, every order in flight fails with SandboxFault."""

    def __init__(self, channel: Channel) -> None:
        self.lost = False
        self._why = ""
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._stderr = b""
        self._ending: asyncio.Future[None] | None = None
        self._sender = ThreadPoolExecutor(1, "surefoot-remote")  # one: lines must stay whole
        threading.Thread(target=self._read, name="surefoot-remote-read", daemon=True).start()

    @classmethod
    async def start(
        cls, backend: Backend, profile: Profile, limits: Limits, *, tier: str, concurrency: int
    ) -> tuple[Link, Probe]:
        """Start a container and open a sandbox in it; the link and what was probed there.

        Raises SandboxFault with the reason if it cannot.
        """
        loop = asyncio.get_running_loop()
        channel = await loop.run_in_executor(None, lambda: backend.start(COMMAND, label="surefoot-sandbox"))
        link = cls(channel)
        try:
            await link.send(shipped() + b"\n")
            shown = {key: value for key, value in asdict(profile).items() if key != "tree"}
            order = {"profile": shown, "limits": asdict(limits), "tier": tier, "concurrency": concurrency}
            return link, _probe(await link.ask("open", order, _OPEN_SECONDS))
        except BaseException:
            await link.close()
            raise

    # ---- orders

    async def ask(self, op: str, order: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send an order and wait for its answer, ``seconds`` at most; then the container is given up."""
        _, answer = await self.numbered(op, order, seconds)
        return answer

    async def numbered(self, op: str, order: Mapping[str, Any], seconds: float) -> tuple[int, dict[str, Any]]:
        """(the order's number, its answer) as :meth:`ask`."""
        if self.lost:
            raise SandboxFault(f"the container is gone: {self._why}")
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._waiting[number] = future
        try:
            await self.send(json.dumps({"op": op, "id": number, **order}).encode() + b"\n")
            answer = await asyncio.wait_for(future, seconds)
        except TimeoutError as error:
            self._lose(f"no answer to {op!r} in {seconds:g} s")
            raise SandboxFault(f"the container is gone: {self._why}") from error
        except asyncio.CancelledError:
            if not self.lost:
                with contextlib.suppress(SandboxFault):  # with the container, the order is gone too
                    await self.send(json.dumps({"op": "cancel", "target": number}).encode() + b"\n")
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise _error(answer["error"])
        return number, _table(answer.get("ok"), "an answer")

    async def send(self, line: bytes) -> None:
        """Write a line to the worker. Raises SandboxFault when the container has gone."""
        try:
            await self._loop.run_in_executor(self._sender, self._channel.send, line)
        except Exception as error:  # a library's own errors have no common base
            self._lose(f"{type(error).__name__}: {error}")
            raise SandboxFault(f"the container is gone: {self._why}") from error

    # ---- answers

    def _read(self) -> None:
        """In a thread of its own, until the container ends."""
        line, why = bytearray(), "it ended"
        try:
            while (part := self._channel.receive()) is not None:
                if part[0] == 2:
                    self._stderr = (self._stderr + part[1])[-_KEPT_STDERR:]
                    continue
                line += part[1]
                if len(line) > _MOST_LINE:
                    raise DataError(f"an answer of more than {_MOST_LINE} bytes")
                if b"\n" not in part[1]:
                    continue
                *whole, line = line.split(b"\n")
                for one in whole:
                    self._loop.call_soon_threadsafe(self._heard, json.loads(one))
        except Exception as error:  # of the library, or an answer that is none
            why = f"{type(error).__name__}: {error}"
        self._loop.call_soon_threadsafe(self._lose, why)

    def _heard(self, answer: Any) -> None:
        number = answer.get("id") if isinstance(answer, dict) else None  # pyright: ignore[reportUnknownVariableType]
        future = self._waiting.get(number) if isinstance(number, int) else None
        if future is not None and not future.done():
            future.set_result(cast("dict[str, Any]", answer))

    def _lose(self, why: str) -> None:
        if self.lost:
            return
        self.lost = True
        said = self._stderr.decode("utf-8", "backslashreplace").strip()
        self._why = f"{why}; it said: {said}" if said else why
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxFault(f"the container is gone: {self._why}"))
        self._ending = self._loop.run_in_executor(None, self._end)

    def _end(self) -> None:
        with contextlib.suppress(Exception):  # the container is gone, or who holds it is
            self._channel.close()

    async def close(self) -> None:
        """End the container, and wait until it is gone."""
        self._lose("it was closed")
        if self._ending is not None:
            await asyncio.shield(self._ending)
        self._sender.shutdown(wait=False)


def shipped() -> bytes:
    """The sandbox as a zip file of its sources, in base64."""
    found = io.BytesIO()
    root = package_files("surefoot")
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _MODULES:
            archive.writestr(name, root.joinpath(name.partition("/")[2]).read_bytes())
        for folder in ("", "/inside", "/remote"):
            for item in sorted(root.joinpath(f"sandbox{folder}").iterdir(), key=lambda item: item.name):
                if item.name.endswith(".py"):
                    archive.writestr(f"surefoot/sandbox{folder}/{item.name}", item.read_bytes())
    return base64.b64encode(found.getvalue())


def packed(files: Mapping[str, bytes] | None) -> dict[str, str]:
    """Names and contents in base64."""
    return {name: base64.b64encode(content).decode() for name, content in (files or {}).items()}


def result_of(found: Mapping[str, Any], limits: Limits) -> Result:
    """The result in an answer. Raises SandboxFault where it is none, or larger than ``limits`` allow."""
    texts = {name: _typed(found, name, str) for name in ("stdout", "stderr", "value")}
    # A byte that is not text takes four characters; a note may be added at the end.
    if any(len(text) > 4 * limits.output_bytes + 100_000 for text in texts.values()):
        raise SandboxFault("a result from the container is larger than its limits allow")
    status = _typed(found, "status", str)
    if status not in list(Status):
        raise SandboxFault(f"a result from the container has the status {status!r}")
    return Result(
        stdout=texts["stdout"],
        stderr=texts["stderr"],
        exit_code=_typed(found, "exit_code", int),
        status=Status(status),
        value=texts["value"],
        seconds=float(_typed(found, "seconds", (int, float))),
        truncated=_typed(found, "truncated", bool),
    )


def _probe(found: Mapping[str, Any]) -> Probe:
    try:
        checks = tuple(Check(str(c[0]), c[1] is True, str(c[2])) for c in found.get("checks", []))
        refused, inside = dict(found.get("refused", {})), Tier(_typed(found, "tier", str))
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise SandboxFault(f"what was probed in the container cannot be read: {error!r}"[:300]) from error
    return Probe(Tier.REMOTE, checks, refused, inside=inside)


def _error(told: Any) -> SurefootError:
    kinds = {kind.__name__: kind for kind in (ConfigError, DataError, SessionEnded, SandboxFault)}
    parts = [str(part) for part in cast("list[Any]", told)] if isinstance(told, list) else []
    name, text = parts if len(parts) == 2 else ("", "an answer that is none")
    return kinds.get(name, SandboxFault)(text)


def _table(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise SandboxFault(f"{what} from the container is no table")
    return cast("dict[str, Any]", found)


def _typed(found: Mapping[str, Any], name: str, kind: Any) -> Any:
    value = found.get(name)
    if not isinstance(value, kind):
        raise SandboxFault(f"a result from the container has {name} = {value!r}"[:300])
    return value

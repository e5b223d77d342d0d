"""The sandbox that callers open, with its fork server in a container elsewhere."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import asdict
from typing import Any

from surefoot.core.errors import ConfigError
from surefoot.sandbox.execution import Job
from surefoot.sandbox.remote.link import LATE_SECONDS, Backend, Link, packed, result_of
from surefoot.sandbox.sandbox import Sandbox
from surefoot.sandbox.session import Session, SessionEnded
from surefoot.sandbox.types import Limits, Probe, Profile, Result, SandboxFault, Status, Tier


class RemoteSandbox(Sandbox):
    """One long-lived container with a fork server in it; a new one where the last was lost."""

    def __init__(
        self, profile: Profile, limits: Limits, concurrency: int, backend: Backend, inside: str
    ) -> None:
        if profile.tree is not None:
            raise ConfigError("Profile.tree is a folder of this machine; give its content to runs as files")
        super().__init__(profile, limits, Probe(Tier.REMOTE, ()), concurrency, None)
        self._backend, self._inside = backend, inside
        self._links: list[Link] = []

    async def _begin(self) -> None:
        self._slots = asyncio.Semaphore(self._concurrency)
        self._starting = asyncio.Lock()
        await self._link()

    async def _end(self) -> None:
        self._closed = True
        while self._links:
            await self._links.pop().close()

    async def _link(self) -> Link:
        async with self._starting:
            if self._closed:
                raise SandboxFault("the sandbox is closed")
            if self._links and self._links[-1].lost:
                await self._links.pop().close()
            if not self._links:
                link, self.probe = await Link.start(
                    self._backend, self.profile, self.limits, tier=self._inside, concurrency=self._concurrency
                )
                self._links.append(link)
            return self._links[-1]

    async def _execute(self, job: Job, limits: Limits) -> Result:
        async with self._slots:
            order = {
                "code": job.code,
                "argv": list(job.argv),
                "stdin": base64.b64encode(job.stdin).decode(),
                "files": packed(job.files),
                "seed": job.seed,
                "limits": asdict(limits),
            }
            found = await (await self._link()).ask("run", order, limits.seconds + LATE_SECONDS)
            return result_of(found, limits)

    async def _open_session(self, limits: Limits, seed: int | None) -> Session:
        link = await self._link()
        order = {"limits": asdict(limits), "seed": seed}
        number, _ = await link.numbered("session", order, 2 * LATE_SECONDS)
        return Session(_RemoteSeat(link, number, limits))


class _RemoteSeat:
    """A session in the container, by its number."""

    def __init__(self, link: Link, number: int, limits: Limits) -> None:
        self.limits = limits
        self._link, self._number = link, number
        self._ended = self._closed = False

    @property
    def alive(self) -> bool:
        return not (self._ended or self._closed or self._link.lost)

    async def turn(self, job: Job, seconds: float) -> Result:
        if self._closed:
            return Result("", "[the session has ended]\n", -9, Status.KILLED, "", 0.0, False)
        order = {"code": job.code, "files": packed(job.files), "seconds": seconds}
        found = await self._ask("turn", order, seconds + 2 * LATE_SECONDS)
        self._ended = found.get("alive") is not True
        return result_of(found, self.limits)

    async def fork(self) -> _RemoteSeat:
        if not self.alive:
            raise SessionEnded("a session that has ended cannot be forked")
        number, _ = await self._link.numbered("fork", {"session": self._number}, 2 * LATE_SECONDS)
        return _RemoteSeat(self._link, number, self.limits)

    async def read_file(self, path: str, most: int) -> bytes:
        found = await self._ask("read", {"path": path, "most": most}, 2 * LATE_SECONDS)
        try:
            content = base64.b64decode(str(found.get("content")), validate=True)
        except ValueError as error:
            raise SandboxFault(f"a file from the container is not base64: {error}") from error
        if len(content) > most:
            raise SandboxFault(f"a file from the container holds more than {most} bytes")
        return content

    async def close(self) -> None:
        if not self._closed and not self._link.lost:
            self._closed = True
            await self._ask("close", {}, 2 * LATE_SECONDS)

    async def _ask(self, op: str, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        return await self._link.ask(op, {"session": self._number, **order}, seconds)

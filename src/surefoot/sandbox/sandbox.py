"""The sandbox that callers open: picks a tier, keeps a fork server running, hands out executions."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, cast

from surefoot.core.errors import ConfigError, nearest
from surefoot.sandbox.execution import Job, execute
from surefoot.sandbox.io import elsewhere
from surefoot.sandbox.probe import probe
from surefoot.sandbox.server import Server
from surefoot.sandbox.session import Session, open_session
from surefoot.sandbox.types import BARE, Limits, Probe, Profile, Result, SandboxFault, Tier

if TYPE_CHECKING:
    from surefoot.sandbox.remote.link import Backend

_MOST = 4096  # executions and sessions of one fork server at a time
_DESCRIPTORS = 65_536
_LEAST_MB = 64  # below it not even the fork server would live


class Sandbox:
    """Runs code of one profile. Open it with :meth:`open`; use it from any thread and event loop."""

    def __init__(
        self, profile: Profile, limits: Limits, found: Probe, concurrency: int, total_memory_mb: int | None
    ) -> None:
        self.profile = profile
        self.limits = limits
        self.probe = found
        self._concurrency = concurrency
        self._total_memory_mb = total_memory_mb
        self._servers: list[Server] = []
        self._closed = False

    @property
    def tier(self) -> Tier:
        """How code is held; belongs into the record of every run."""
        return self.probe.tier

    @property
    def total_memory(self) -> int | None:
        """Bytes that all executions together may hold, by a control group; None where there is none."""
        groups = [server.group for server in self._servers if server.group is not None]
        return groups[-1].memory if groups else None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        *,
        profile: Profile = BARE,
        limits: Limits | None = None,
        tier: Tier | Literal["auto", "full", "uid", "landlock", "none"] = "auto",
        concurrency: int = 64,
        total_memory_mb: int | None = None,
        backend: Backend | None = None,
    ) -> AsyncGenerator[Sandbox, None]:
        """Open a sandbox for the length of an ``async with``; what still runs at its end is killed.

        ``tier="auto"``: the strongest that passes a self-test on this machine, never ``none``; a named tier
        must pass it too. ``limits``: of executions that name no other. ``concurrency``: executions at one
        time, further ones wait; sessions do not count. ``total_memory_mb``: of everything in the sandbox
        together, held where :attr:`total_memory` says so; None: three quarters of the machine's. Raises the
        process's soft limit of open files.
        ``backend``: of :mod:`surefoot.sandbox.remote`; everything runs in a container from there, where
        ``tier`` is then probed and held, and whose memory the backend bounds. Raises SandboxFault when no
        such tier works here, ConfigError for a setting that is not valid or a package that is missing.
        """
        tiers = [one for one in Tier if one is not Tier.REMOTE]
        if tier != "auto" and tier not in tiers:
            hint = "give a backend for 'remote'" if tier == Tier.REMOTE else nearest(tier, map(str, tiers))
            raise ConfigError(f"tier must be 'auto' or a tier, got {tier!r}; {hint}")
        if not 1 <= concurrency <= _MOST // 2:
            raise ConfigError(f"concurrency must be 1 to {_MOST // 2}, got {concurrency}")
        if total_memory_mb is not None and total_memory_mb < _LEAST_MB:
            raise ConfigError(f"total_memory_mb must be at least {_LEAST_MB}, got {total_memory_mb}")
        if not isinstance(cast("object", limits), Limits | None):
            raise ConfigError(f"limits must be a Limits, got {type(limits).__name__}")
        if backend is not None:
            if total_memory_mb is not None:
                raise ConfigError("total_memory_mb has no effect beside backend; set the backend's memory")
            from surefoot.sandbox.remote.sandbox import RemoteSandbox

            sandbox: Sandbox = RemoteSandbox(profile, limits or Limits(), concurrency, backend, str(tier))
        else:
            found = await probe(tier)
            sandbox = cls(profile, limits or Limits(), found, concurrency, total_memory_mb)
        await elsewhere(sandbox._begin())
        try:
            yield sandbox
        finally:
            await elsewhere(sandbox._end())

    async def run(
        self,
        code: str,
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        seed: int | None = None,
    ) -> Result:
        """Run Python ``code`` once, in a process, file system and process list of its own.

        ``files``: written below the working folder first. ``seed``: of ``random`` and ``numpy.random``;
        fresh if None. Never raises for what the code does. Raises SandboxFault when the sandbox failed.
        """
        job = Job(code, stdin=stdin, files=files, seed=seed)
        return await elsewhere(self._execute(job, limits or self.limits))

    async def run_command(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Result:
        """Run a program with its arguments in the same way; it is looked up on the sandbox's own PATH."""
        if isinstance(argv, str) or not argv:
            raise ConfigError(f"argv must be a program and its arguments, got {argv!r}")
        job = Job(argv=tuple(argv), stdin=stdin, files=files)
        return await elsewhere(self._execute(job, limits or self.limits))

    async def session(self, *, limits: Limits | None = None, seed: int | None = None) -> Session:
        """Start a session; it ends by its ``close`` or with the sandbox. Raises SandboxFault if it cannot."""
        return await elsewhere(self._open_session(limits or self.limits, seed))

    async def _begin(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        self._slots = asyncio.Semaphore(self._concurrency)
        self._starting = asyncio.Lock()
        await self._server()

    async def _end(self) -> None:
        self._closed = True
        while self._servers:
            await self._servers.pop().close()

    async def _server(self) -> Server:
        """The running fork server; a new one where the last was lost (to the kernel's memory killer, say)."""
        async with self._starting:
            if self._closed:
                raise SandboxFault("the sandbox is closed")
            if self._servers and self._servers[-1].lost:
                await self._servers.pop().close()
            if not self._servers:
                started = Server.start(
                    self.profile, self.tier, most=_MOST, total_memory_mb=self._total_memory_mb
                )
                self._servers.append(await started)
            return self._servers[-1]

    async def _execute(self, job: Job, limits: Limits) -> Result:
        async with self._slots:
            try:
                return await execute(await self._server(), job, limits)
            except OSError as error:
                raise SandboxFault(f"the harness has no descriptors or memory left: {error}") from error

    async def _open_session(self, limits: Limits, seed: int | None) -> Session:
        try:
            return await open_session(await self._server(), limits, seed=seed)
        except OSError as error:
            raise SandboxFault(f"the harness has no descriptors or memory left: {error}") from error

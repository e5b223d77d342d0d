"""Python as a tool: code of the policy runs in the sandbox, each call on its own or in one session.

Must not know how code is held; that is the sandbox's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from surefoot.sandbox import Limits, Result, Sandbox, SandboxFault, Session, Status
from surefoot.tools.base import Tool, ToolError, ToolFault, make_tool, tool, tools_of

# The sandbox's own deadline comes first, so that the policy gets what its code wrote until then.
_GRACE_SECONDS = 10.0
_MOST_ERROR = 800


def python_tool(
    sandbox: Sandbox, *, limits: Limits | None = None, seed: int | None = 0, limit: int = 4000
) -> Tool:
    """A tool ``python(code)`` whose calls share nothing; safe for all episodes at once.

    ``limits``: of one call (default: the sandbox's). ``seed``: of the code's random numbers, so that
    episodes repeat; None for fresh ones. ``limit``: most characters of a result.
    """
    bounds = limits or sandbox.limits

    async def python(code: str) -> str:
        """Run Python code; what it prints and the value of its last line come back. Nothing is kept."""
        try:
            return shown(await sandbox.run(code, limits=bounds, seed=seed), bounds, limit)
        except SandboxFault as error:
            raise ToolFault(str(error)) from error

    return replace(make_tool(python), seconds=bounds.seconds + _GRACE_SECONDS, limit=limit * 2, retries=1)


class PythonSession:
    """Python for one episode: names and files stay from call to call. Close it with the episode.

    The session begins with the first call, holding ``files``. When code ends it, the next call begins
    a new one and says so.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        limits: Limits | None = None,
        seed: int | None = 0,
        files: Mapping[str, bytes] | None = None,
        limit: int = 4000,
    ) -> None:
        self._sandbox, self._limits, self._limit = sandbox, limits or sandbox.limits, limit
        self._seed, self._files = seed, dict(files or {})
        self._session: Session | None = None
        self._opening = asyncio.Lock()

    @tool
    async def python(self, code: str) -> str:
        """Run Python code; what it prints and the value of its last line come back. Names are kept."""
        return await self.run(code)

    def tools(self) -> tuple[Tool, ...]:
        """The tool ``python(code)`` of this session."""
        return tuple(self.bounded(item) for item in tools_of(self))

    def bounded(self, item: Tool) -> Tool:
        """A tool of this session, with a deadline behind the sandbox's own."""
        return replace(item, seconds=self._limits.seconds + _GRACE_SECONDS, limit=self._limit * 2)

    async def run(self, code: str) -> str:
        """Run one turn; its text for the policy. Raises ToolError where the code failed."""
        try:
            session, note = await self._open()
            result = await session.run(code)
        except SandboxFault as error:
            raise ToolFault(str(error)) from error
        try:
            return note + shown(result, self._limits, self._limit)
        except ToolError as error:
            raise ToolError(f"{note}{error}") from None

    async def read_file(self, path: str) -> bytes:
        """A file that the code left in its working folder. Raises DataError when there is none."""
        session, _ = await self._open()
        return await session.read_file(path)

    async def close(self) -> None:
        """End the session, if one began."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _open(self) -> tuple[Session, str]:
        """The session at hand, or a new one with what the policy should know about it."""
        async with self._opening:
            lost = self._session is not None and not self._session.alive
            if lost:
                await self.close()
            if self._session is None:
                self._session = await self._sandbox.session(limits=self._limits, seed=self._seed)
                if self._files:
                    await self._session.run("", files=self._files)
            return (
                self._session,
                "(a new session: the last one ended and its names are gone)\n" if lost else "",
            )


def shown(result: Result, limits: Limits, limit: int) -> str:
    """What a policy gets to see of an execution. Raises ToolError with it where the code did not end well."""
    parts = [_cut(result.stdout.rstrip("\n"), limit), _cut(result.value, limit // 2)]
    parts.append(result.stderr.strip()[-_MOST_ERROR:])  # a traceback says the most at its end
    if result.status is not Status.OK:
        silent = result.status is Status.ERROR and not parts[-1]
        parts.append(f"exit code {result.exit_code}" if silent else _endings(result.status, limits))
        raise ToolError("\n".join(part for part in parts if part))
    return "\n".join(part for part in parts if part) or "(no output)"


def _endings(status: Status, limits: Limits) -> str:
    texts = {
        Status.TIMEOUT: f"it took longer than {limits.seconds:g} s and was stopped",
        Status.MEMORY: f"it needed more than {limits.memory_mb} MB of memory",
        Status.OUTPUT_LIMIT: f"it wrote more than {limits.output_bytes} bytes and was stopped",
        Status.KILLED: "it was killed",
    }
    return texts.get(status, "")


def _cut(text: str, limit: int) -> str:
    """The beginning and the end of a text that is too long."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… ({len(text) - 2 * half} characters left out) …\n{text[-half:]}"

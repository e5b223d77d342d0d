"""Tools of any MCP server (Model Context Protocol), over stdio or streamable HTTP, with deadlines and caps.

One connection serves all episodes; it lives in a thread of its own and is made anew when it is lost. What
a server says, descriptions included, is untrusted text. Must not know environments or policies.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import IO, Any, cast

from surefoot.core.errors import ConfigError
from surefoot.tools.base import Tool, ToolError, ToolFault, schema_complaint
from surefoot.tools.resident import Resident

_MOST_DESCRIPTION = 1024
_MOST_PAGES = 50
_TAIL = 400
_MOST_STDERR = 1 << 20
_CLOSING_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A server that is started as a program. It sees ``env`` and a few harmless variables of this process."""

    command: str
    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=lambda: {})
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server behind a URL (streamable HTTP). ``headers`` are sent with every request."""

    url: str
    headers: Mapping[str, str] = field(default_factory=lambda: {})


@dataclass(slots=True)
class _Connection:
    client: Any
    stop: asyncio.Event
    task: asyncio.Task[None]


class McpServer:
    """The tools of one server. Safe to share between threads; close it when no episode needs it any more.

    ``target`` may also be a server object of the SDK, which then runs in this process. ``seconds`` is the
    deadline of a call, ``connect_seconds`` that of connecting and listing, ``limit`` the most characters of
    a result. A lost connection is made anew for the next call. The call during which it was lost is made
    again once when the server says that the tool only reads or may be repeated, or always with
    ``repeatable`` (never with False); else the fault goes to the episode.

    Raises ConfigError without the SDK, or for settings that cannot be.
    """

    def __init__(
        self,
        target: StdioServer | HttpServer | Any,
        *,
        prefix: str = "",
        seconds: float = 10.0,
        connect_seconds: float = 20.0,
        limit: int = 4000,
        repeatable: bool | None = None,
    ) -> None:
        try:
            import mcp
        except ImportError as error:
            raise ConfigError('MCP servers need the mcp package: pip install "surefoot[mcp]"') from error
        for name, value in (("seconds", seconds), ("connect_seconds", connect_seconds), ("limit", limit)):
            if not value > 0:
                raise ConfigError(f"McpServer: {name} is {value}; it must be > 0")
        self._mcp: Any = mcp
        self.target, self.prefix, self.repeatable = target, prefix, repeatable
        self.seconds, self.connect_seconds, self.limit = seconds, connect_seconds, limit
        self.connections = 0  # how often a connection was made
        self._tools: tuple[Tool, ...] | None = None
        self._connection: _Connection | None = None
        self._errors: IO[str] | None = None
        self._connecting = asyncio.Lock()
        self._listing = threading.Lock()
        self._home = Resident(self._where())

    def tools(self) -> tuple[Tool, ...]:
        """The server's tools, listed at the first call. Blocks until connected.

        Raises ToolFault when the server cannot be reached in time, ConfigError when it cannot be started or
        two names fall together.
        """
        with self._listing:
            if self._tools is None:
                self._tools = self._named(self._home.submit(self._list()).result())
            return self._tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call one of the server's tools by the server's own name; its text.

        Raises ToolError for what the server reports as the call's fault, TimeoutError after the deadline,
        ToolFault when the connection or the server failed.
        """
        return await self._home.call(self._call(name, dict(arguments)))

    def close(self) -> None:
        """End the connection, and the program of a stdio server. Closing twice is no error."""
        self._home.stop(self._end(), _CLOSING_SECONDS)

    # ---- in the thread of the connection

    async def _list(self) -> list[Any]:
        try:
            async with asyncio.timeout(2 * self.connect_seconds):
                client = (await self._connected()).client
                found, cursor = [], None
                for _ in range(_MOST_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    found.extend(page.tools)
                    cursor = page.next_cursor
                    if not cursor:
                        return found
        except (ConfigError, ToolFault):
            raise
        except Exception as error:  # whatever the SDK or the server raises here: there are no tools
            raise ToolFault(f"{self._where()} does not list its tools: {_leaf(error)}") from error
        raise ToolFault(f"{self._where()} lists tools without an end")

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        connection = await self._connected()
        try:
            result = await connection.client.call_tool(name, arguments, read_timeout_seconds=self.seconds)
        except self._mcp.MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise TimeoutError(str(error)) from error
            if error.code != CONNECTION_CLOSED and not _lost_session(error):
                raise ToolError(str(error)[: self.limit]) from error
            await self._drop(connection)
            raise self._fault(error) from error
        except Exception as error:  # a broken transport or a result that breaks the protocol
            await self._drop(connection)
            raise self._fault(error) from error
        self._last_words()
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text

    async def _connected(self) -> _Connection:
        """The connection at hand, or a new one when there is none or the server is gone."""
        async with self._connecting:
            if self._connection is not None and self._connection.task.done():
                self._connection = None
            if self._connection is None:
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> _Connection:
        ready: asyncio.Future[Any] = self._home.loop.create_future()
        stop = asyncio.Event()
        task = self._home.loop.create_task(self._keep(ready, stop))
        try:
            async with asyncio.timeout(self.connect_seconds):
                client = await asyncio.shield(ready)
        except (FileNotFoundError, PermissionError) as error:
            raise ConfigError(f"{self._where()} cannot be started: {error}") from error
        except Exception as error:  # a refused, broken or silent server
            task.cancel()
            await asyncio.wait([task], timeout=_CLOSING_SECONDS)
            raise self._fault(error) from error
        self.connections += 1
        return _Connection(client, stop, task)

    async def _keep(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        """Hold the connection open in one task, as the SDK demands, until it is told to stop or it ends."""
        try:
            async with self._client(stop.set) as client:
                ready.set_result(client)
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(_first(error))
                ready.exception()  # the waiter may be gone after its deadline; then nobody asks
            if isinstance(error, asyncio.CancelledError):
                raise

    def _client(self, ended: Callable[[], None]) -> Any:
        mcp = self._mcp
        if isinstance(self.target, StdioServer):
            given = self.target
            settings = mcp.StdioServerParameters(
                command=given.command, args=list(given.arguments), env=dict(given.env), cwd=given.folder
            )
            self._errors = self._errors or tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed in _end()
            return mcp.Client(_watched(mcp.stdio_client(settings, errlog=self._errors), ended))
        if isinstance(self.target, HttpServer):
            from mcp.client.streamable_http import streamable_http_client
            from mcp.shared._httpx_utils import create_mcp_http_client

            web = create_mcp_http_client(headers=dict(self.target.headers))
            return mcp.Client(streamable_http_client(self.target.url, http_client=web))
        return mcp.Client(self.target)

    async def _end(self) -> None:
        await self._drop()
        if self._errors is not None:
            self._errors.close()

    async def _drop(self, connection: _Connection | None = None) -> None:
        """End a connection (default: the one at hand), unless another one has already taken its place."""
        found = connection or self._connection
        if found is None:
            return
        if self._connection is found:
            self._connection = None
        found.stop.set()
        await asyncio.wait([found.task], timeout=_CLOSING_SECONDS)
        found.task.cancel()

    # ---- names and texts

    def _named(self, found: Sequence[Any]) -> tuple[Tool, ...]:
        made: dict[str, Tool] = {}
        for item in found:
            made_tool = self._tool(item)
            if made_tool.name in made:
                raise ConfigError(f"{self._where()}: two tools come to be named {made_tool.name!r}")
            made[made_tool.name] = made_tool
        return tuple(made.values())

    def _tool(self, item: Any) -> Tool:
        own = str(item.name)

        async def call(**arguments: Any) -> str:
            return await self.call(own, arguments)

        schema = {
            key: value for key, value in dict(item.input_schema).items() if key not in ("$schema", "title")
        }
        schema.setdefault("properties", {})
        schema_complaint(schema, {})
        hints = item.annotations
        safe = bool(hints and (hints.read_only_hint or hints.idempotent_hint))
        return Tool(
            name=re.sub(r"[^A-Za-z0-9_-]", "_", self.prefix + own)[:64],
            description=" ".join(str(item.description or item.title or own).split())[:_MOST_DESCRIPTION],
            parameters=schema,
            function=call,
            seconds=self.seconds,
            limit=self.limit,
            retries=int(safe if self.repeatable is None else self.repeatable),
        )

    def _where(self) -> str:
        if isinstance(self.target, StdioServer):
            return f"MCP server {self.target.command!r}"
        return f"MCP server {self.target.url}" if isinstance(self.target, HttpServer) else "MCP server"

    def _last_words(self) -> str:
        """The end of what the program wrote to its stderr; much of it is thrown away now and then."""
        if self._errors is None:
            return ""
        handle = self._errors.fileno()
        size = os.fstat(handle).st_size
        # Not by seeking: the program writes through the same offset.
        tail = os.pread(handle, _TAIL, max(0, size - _TAIL))
        if size > _MOST_STDERR:
            os.ftruncate(handle, 0)
        return tail.decode(errors="replace").strip("\x00")

    def _fault(self, error: Exception) -> ToolFault:
        tail = " ".join(self._last_words().split())
        return ToolFault(f"{self._where()}: {_leaf(error)}{f'; it last wrote: {tail}' if tail else ''}")


class _Watched:
    """A stream of messages that tells when it ends, so that a lost server is noticed before the next call."""

    def __init__(self, inner: Any, ended: Callable[[], None]) -> None:
        self._inner, self._ended = inner, ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def __aenter__(self) -> _Watched:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._inner.__aexit__(*error)

    def __aiter__(self) -> _Watched:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._inner.__anext__()
        except Exception:
            self._ended()
            raise


@asynccontextmanager
async def _watched(transport: Any, ended: Callable[[], None]) -> AsyncGenerator[tuple[Any, Any]]:
    async with transport as (read, write):
        yield _Watched(read, ended), write


def _text_of(result: Any) -> str:
    """The texts of a result; what is no text is named with its size."""
    parts: list[str] = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            parts.append(block.resource.text)
        elif block.type == "resource_link":
            parts.append(f"[{block.type}: {block.uri}]")
        else:
            data = cast("str", getattr(block, "data", None) or getattr(block.resource, "blob", ""))
            parts.append(f"[{block.type}: {len(data) * 3 // 4} bytes that are not text]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _lost_session(error: Any) -> bool:
    """Whether an HTTP server has forgotten this session, as one does that was restarted."""
    said = str(error).lower()
    return "session" in said and ("terminated" in said or "not found" in said)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return ConnectionError("cancelled") if isinstance(error, asyncio.CancelledError) else error


def _leaf(error: Exception) -> str:
    found = _first(error)
    return f"{type(found).__name__}: {str(found)[:300]}"

"""Any MCP server's tools work like ours, and a server that dies is a fault that the next call survives."""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mcp
import pytest
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, ImageContent, TextContent, ToolAnnotations

from surefoot.core.errors import ConfigError
from surefoot.core.types import ToolCall, ToolResult
from surefoot.tools.base import ToolFault, run_calls
from surefoot.tools.mcp import HttpServer, McpServer, StdioServer

READS = ToolAnnotations(read_only_hint=True)


def make_server() -> MCPServer:
    server = MCPServer("test")

    @server.tool(annotations=READS)
    def add(a: int, b: int = 1) -> str:
        """Add two
        numbers."""
        return str(a + b)

    @server.tool()
    async def wait(seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "done"

    @server.tool(name="files/read.text")
    def many(count: int) -> str:
        """Say much."""
        return "x" * count

    @server.tool()
    def mixed(fail: bool) -> CallToolResult:
        """Say several things."""
        image = ImageContent(data="QUJD" * 10, mime_type="image/png")
        said = [TextContent(text="<|im_end|> one"), image, TextContent(text="two")]
        return CallToolResult(content=list(said), is_error=fail)

    return server


@pytest.fixture(scope="module")
def here() -> Iterator[McpServer]:
    server = McpServer(make_server(), seconds=0.5, limit=60)
    server.tools()
    yield server
    server.close()


def use(server: McpServer, name: str, **arguments: Any) -> ToolResult:
    return asyncio.run(run_calls(server.tools(), [ToolCall("c", name, arguments)]))[0]


# -------------------- what a server offers


def test_tools_are_listed_with_names_that_a_policy_can_write(here: McpServer) -> None:
    by_name = {item.name: item for item in here.tools()}
    assert list(by_name) == ["add", "wait", "files_read_text", "mixed"]
    add = by_name["add"]
    assert (add.description, add.retries, by_name["wait"].retries) == ("Add two numbers.", 1, 0)
    assert add.parameters["required"] == ["a"] and "title" not in add.parameters
    assert here.tools() is here.tools(), "listed once"


def test_a_call_returns_the_servers_text_and_is_checked_before_it_is_sent(here: McpServer) -> None:
    assert use(here, "add", a=2, b=3) == ToolResult("c", "add", "5", True)
    assert use(here, "add", a="x").content == "Error: argument 'a': 'x' is not of type 'integer'"
    assert use(here, "add").content == "Error: 'a' is a required property"
    assert use(here, "files_read_text", count=500).content.endswith("(cut: 500 characters, limit 60)")


def test_a_result_that_is_no_text_is_named_and_an_error_is_an_observation(here: McpServer) -> None:
    good, bad = use(here, "mixed", fail=False), use(here, "mixed", fail=True)
    assert good.content == "<|im_end|> one\n[image: 30 bytes that are not text]\ntwo"
    assert (good.ok, bad.ok, bad.content[:7]) == (True, False, "Error: ")


def test_a_slow_call_is_cut_while_the_others_of_its_turn_answer(here: McpServer) -> None:
    calls = [
        ToolCall("a", "wait", {"seconds": 30}),
        ToolCall("b", "add", {"a": 1}),
        ToolCall("c", "add", {"a": 2}),
    ]
    began = time.perf_counter()
    results = asyncio.run(run_calls(here.tools(), calls))
    assert [(r.call_id, r.content) for r in results] == [
        ("a", "Error: wait took longer than 0.5 s"), ("b", "2"), ("c", "3"),
    ]  # fmt: skip
    assert time.perf_counter() - began < 5
    assert use(here, "add", a=1).ok, "the connection is still good"


def test_one_server_serves_loops_in_several_threads(here: McpServer) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(use(here, "add", a=1).content)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, here.connections) == (["2"] * 5, 1)


def test_names_that_fall_together_and_impossible_settings_are_refused() -> None:
    server = MCPServer("twins")
    for name in ("a.b", "a/b"):
        server.tool(name=name)(_ping)
    twins = McpServer(server)
    with pytest.raises(ConfigError, match="two tools come to be named 'a_b'"):
        twins.tools()
    twins.close()
    with pytest.raises(ConfigError, match="seconds is 0"):
        McpServer(server, seconds=0)
    prefixed = McpServer(make_server(), prefix="my_")
    assert next(iter(prefixed.tools())).name == "my_add"
    prefixed.close()


def _ping() -> str:
    """Ping."""
    return "pong"


# -------------------- a server that is a program; written by hand, since it must start quickly and die

PROGRAM = """
import json, os, sys, time
from pathlib import Path

mark = Path(sys.argv[1])
starts = len(mark.read_text()) + 1 if mark.exists() else 1
mark.write_text("x" * starts)
if "--mute" in sys.argv:
    time.sleep(60)
if "--refuse" in sys.argv:
    sys.exit("no key was given")
tools = [
    {"name": name, "description": name, "inputSchema": {"type": "object"},
     "annotations": {"readOnlyHint": name == "read"}}
    for name in ("read", "write", "leave", "garble")
]

def tool(name):
    if name in ("read", "write") and starts == 1 and "--frail" in sys.argv:
        print("the disk is on fire", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "garble":
        return {"content": "not a list"}
    return {"content": [{"type": "text", "text": f"{name} by {starts}"}]}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method, reply = asked["method"], {"jsonrpc": "2.0", "id": asked["id"]}
    if method == "initialize":
        version = asked["params"]["protocolVersion"]
        reply["result"] = {"protocolVersion": version, "capabilities": {"tools": {}},
                           "serverInfo": {"name": "frail", "version": "1"}}
    elif method == "tools/list":
        reply["result"] = {"tools": tools}
    elif method == "tools/call":
        name = asked["params"]["name"]
        reply["result"] = tool(name)
    else:
        reply["error"] = {"code": -32601, "message": "no such method"}
    print(json.dumps(reply), flush=True)
    if method == "tools/call" and name == "leave":
        break
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., McpServer]]:
    script = tmp_path / "server.py"
    script.write_text(PROGRAM)
    made: list[McpServer] = []

    def start(*options: str, **settings: Any) -> McpServer:
        mark = str(tmp_path / "mark")
        made.append(McpServer(StdioServer(sys.executable, [str(script), mark, *options]), **settings))
        return made[-1]

    yield start
    for server in made:
        server.close()


def test_a_call_that_may_be_repeated_survives_the_death_of_its_server(program: Any) -> None:
    server = program("--frail")
    assert use(server, "read").content == "read by 2"
    assert server.connections == 2


def test_a_call_that_may_not_be_repeated_is_a_fault_that_quotes_the_server_and_the_next_one_works(
    program: Any,
) -> None:
    server = program("--frail")
    with pytest.raises(ToolFault, match="it last wrote: the disk is on fire"):
        use(server, "write")
    assert use(server, "write").content == "write by 2"


def test_repeating_can_be_forced_and_forbidden(program: Any) -> None:
    assert use(program("--frail", repeatable=True), "write").content == "write by 2"
    assert {item.retries for item in program(repeatable=False).tools()} == {0}


def test_a_server_that_left_between_calls_is_started_again_before_the_next(program: Any) -> None:
    server = program()
    assert use(server, "leave").content == "leave by 1"
    deadline = time.monotonic() + 5
    while not server._connection.task.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert use(server, "write").content == "write by 2"


def test_a_result_that_breaks_the_protocol_is_a_fault(program: Any) -> None:
    with pytest.raises(ToolFault, match="MCP server"):
        use(program(), "garble")


def test_a_server_that_cannot_start_is_reported_with_its_own_words_and_in_time(program: Any) -> None:
    with pytest.raises(ToolFault, match="no key was given"):
        program("--refuse").tools()
    began = time.perf_counter()
    with pytest.raises(ToolFault, match="TimeoutError"):
        program("--mute", connect_seconds=0.3).tools()
    assert time.perf_counter() - began < 8
    missing = McpServer(StdioServer("/nowhere/at-all"))
    with pytest.raises(ConfigError, match="/nowhere/at-all"):
        missing.tools()
    missing.close()


def test_closing_ends_the_program_and_later_calls_are_faults(program: Any) -> None:
    server = program()
    (read, *_) = server.tools()
    server.close()
    server.close()
    with pytest.raises(ToolFault, match="was closed"):
        asyncio.run(run_calls([read], [ToolCall("c", "read", {})]))


# -------------------- a server behind a URL


class _Web:
    """The SDK's HTTP server in a thread, on a port that stays its own over restarts."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        import uvicorn

        app = make_server().streamable_http_app()
        settings = uvicorn.Config(app, port=self.port, log_level="error", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 10
        while not self.server.started and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_server_behind_a_url_works_is_missed_while_it_is_away_and_found_again(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "Client", functools.partial(mcp.Client, mode=mode))
    web = _Web()
    address = HttpServer(f"http://127.0.0.1:{web.port}/mcp", {"x-key": "k"})
    server = McpServer(address, seconds=5, connect_seconds=5)
    try:
        assert use(server, "add", a=2).content == "3"
        web.stop()
        web.start()
        assert use(server, "add", a=2).content == "3", "a restarted server knows no old session"
        web.stop()
        with pytest.raises(ToolFault, match="MCP server http"):
            use(server, "wait", seconds=0)
        web.start()
        assert use(server, "wait", seconds=0).content == "done"
    finally:
        server.close()
        web.stop()

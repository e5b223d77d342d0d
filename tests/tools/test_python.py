"""Code of the policy comes back as text, whatever it does, and a session keeps its names until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from surefoot.core.types import ToolCall, ToolResult
from surefoot.sandbox import Limits, Sandbox, SandboxFault, probe
from surefoot.tools.base import Tool, ToolFault, run_calls
from surefoot.tools.python import PythonSession, python_tool
from surefoot.tools.shell import ShellSession

BOUNDS = Limits(seconds=1, memory_mb=64, output_bytes=2000, processes=16, files_mb=8, cpu_seconds=5)


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    try:
        asyncio.run(probe("auto"))
    except SandboxFault as error:
        pytest.skip(f"no sandbox tier works on this machine: {error}")
    manager, loop = Sandbox.open(limits=BOUNDS), asyncio.new_event_loop()
    yield loop.run_until_complete(manager.__aenter__())
    loop.run_until_complete(manager.__aexit__(None, None, None))
    loop.close()


async def use(tools: tuple[Tool, ...], **arguments: Any) -> ToolResult:
    return (await run_calls(tools, [ToolCall("c", tools[0].name, arguments)]))[0]


@pytest.mark.parametrize(
    ("code", "ok", "says"),
    [
        ("print('a'); 2 + 3", True, "a\n5"),
        ("x = 1", True, "(no output)"),
        ("print('before'); 1 / 0", False, "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", False, "Error: exit code 3"),
        ("while True: pass", False, "longer than 1 s"),
        ("bytearray(10**9)", False, "more than 64 MB"),
        ("print('x' * 10**6)", False, "more than 2000 bytes"),
    ],
)
def test_each_ending_has_its_words_and_only_a_good_one_is_ok(
    box: Sandbox, code: str, ok: bool, says: str
) -> None:
    result = asyncio.run(use((python_tool(box),), code=code))
    assert result.ok is ok
    assert says in result.content
    assert code[:5] != "print" or result.content.removeprefix("Error: ")[:1] in "abx", (
        "what was printed first"
    )


def test_calls_of_the_plain_tool_share_nothing_and_repeat(box: Sandbox) -> None:
    tools = (python_tool(box),)
    assert asyncio.run(use(tools, code="kept = 1")).ok
    assert not asyncio.run(use(tools, code="kept")).ok
    twice = [asyncio.run(use(tools, code="import random; random.random()")).content for _ in range(2)]
    assert twice[0] == twice[1]


def test_long_output_keeps_its_beginning_and_its_end(box: Sandbox) -> None:
    code = "print('first'); print('x' * 900); print('last')"
    content = asyncio.run(use((python_tool(box, limit=100),), code=code)).content
    assert content.startswith("first") and content.endswith("last")
    assert "characters left out" in content and len(content) < 200


def test_a_session_keeps_names_and_files_and_says_when_it_was_lost(box: Sandbox) -> None:
    async def scenario() -> list[ToolResult]:
        session = PythonSession(box, files={"a.txt": b"hi"})
        codes = ("x = open('a.txt').read()", "x * 2", "while True: pass", "x", "import os; os._exit(1)",
                 "x", "open('a.txt').read()")  # fmt: skip
        results = [await use(session.tools(), code=code) for code in codes]
        assert await session.read_file("a.txt") == b"hi"
        await session.close()
        await session.close()
        return results

    results = asyncio.run(scenario())
    assert [item.ok for item in results] == [True, True, False, True, False, False, True]
    assert [results[i].content for i in (1, 3, 6)] == ["'hihi'", "'hi'", "'hi'"]
    assert "its names are gone" in results[5].content and "NameError" in results[5].content


def test_two_sessions_share_nothing(box: Sandbox) -> None:
    async def scenario() -> tuple[ToolResult, ToolResult]:
        one, two = PythonSession(box), PythonSession(box)
        await use(one.tools(), code="open('f', 'w').write('x'); name = 1")
        found = await use(two.tools(), code="name"), await use(two.tools(), code="open('f')")
        await one.close()
        await two.close()
        return found

    assert [item.ok for item in asyncio.run(scenario())] == [False, False]


def test_a_shell_keeps_files_shows_exit_codes_and_ends_all_that_a_late_command_began(box: Sandbox) -> None:
    async def scenario() -> list[ToolResult]:
        session = ShellSession(box)
        commands = ("printf '%s' 'a \"b\" \\c' > f; exit 3", "cat f", "cat none", "sleep 55 & sleep 55",
                    "ps ax 2>/dev/null | grep -c '[s]leep 55' || true", "cat f")  # fmt: skip
        results = [await use(session.tools(), command=command) for command in commands]
        await session.close()
        return results

    results = asyncio.run(scenario())
    assert [item.ok for item in results] == [False, True, False, False, True, True]
    assert results[0].content == "Error: exit code 3"
    assert results[1].content == results[5].content == 'a "b" \\c'
    assert "No such file" in results[2].content
    assert results[3].content == "Error: it took longer than 1 s and was stopped"
    assert results[4].content in ("0", "(no output)")


def test_a_sandbox_that_fails_is_a_fault_and_no_observation(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise SandboxFault("no descriptors left")

    monkeypatch.setattr(box, "run", fails)
    monkeypatch.setattr(box, "session", fails)
    for tools in ((python_tool(box),), PythonSession(box).tools(), ShellSession(box).tools()):
        name = "command" if tools[0].name == "shell" else "code"
        with pytest.raises(ToolFault, match="no descriptors"):
            asyncio.run(use(tools, **{name: "1"}))

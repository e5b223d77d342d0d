"""Tools: the schema says what the function takes, and a failure is an observation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from surefoot.core.errors import ConfigError
from surefoot.core.types import ToolCall, ToolResult
from surefoot.tools.base import Tool, ToolError, make_tool, run_calls, tool, tools_of


def find(query: str, k: int = 3, order: Literal["asc", "desc"] = "asc") -> dict[str, Any]:
    """Find passages.

    The best come first.
    """
    return {"query": query, "k": k, "order": order}


def run(tools: Sequence[Tool], *calls: tuple[str, dict[str, Any]], **options: Any) -> tuple[ToolResult, ...]:
    made = [ToolCall(f"c{i}", name, arguments) for i, (name, arguments) in enumerate(calls)]
    return asyncio.run(run_calls(tools, made, **options))


def test_schema_holds_types_defaults_required_and_the_docstring() -> None:
    spec = make_tool(find).spec()["function"]
    assert spec["description"] == "Find passages. The best come first."
    assert spec["parameters"]["required"] == ["query"]
    assert spec["parameters"]["properties"] == {
        "query": {"type": "string"},
        "k": {"type": "integer", "default": 3},
        "order": {"type": "string", "enum": ["asc", "desc"], "default": "asc"},
    }


def test_result_that_is_no_string_becomes_json() -> None:
    (result,) = run([make_tool(find)], ("find", {"query": "ä", "k": 2}))
    assert result == ToolResult("c0", "find", '{"query": "ä", "k": 2, "order": "asc"}', ok=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "argument 'query': Field required"),
        ({"query": 3}, "argument 'query'"),
        ({"query": "a", "k": "many"}, "argument 'k'"),
        ({"query": "a", "order": "up"}, "argument 'order'"),
        ({"query": "a", "limit": 3}, "unknown argument 'limit'; find takes: query, k, order"),
    ],
)
def test_wrong_arguments_become_an_observation_that_names_them(arguments: dict[str, Any], says: str) -> None:
    (result,) = run([make_tool(find)], ("find", arguments))
    assert not result.ok
    assert says in result.content


def test_unknown_tool_becomes_an_observation_with_the_nearest_name() -> None:
    (result,) = run([make_tool(find)], ("fnd", {}))
    assert not result.ok
    assert "did you mean 'find'?" in result.content


def test_renamed_tool_is_described_validated_and_called_by_its_new_names_only() -> None:
    renamed = make_tool(find).renamed("look_up", arguments={"query": "text"}, description="Look up.")
    twice = renamed.renamed("seek", arguments={"text": "words"})
    assert list(twice.parameters["properties"]) == ["words", "k", "order"]
    assert twice.parameters["required"] == ["words"]
    good, old, missing = run([twice], ("seek", {"words": "a"}), ("seek", {"query": "a"}), ("seek", {}))
    assert (good.ok, '"query": "a"' in good.content) == (True, True)
    assert "unknown argument 'query'; seek takes: words, k, order" in old.content
    assert "argument 'words': Field required" in missing.content
    assert list(make_tool(find).parameters["properties"]) == ["query", "k", "order"]
    with pytest.raises(ConfigError, match="no argument 'qery'; did you mean 'query'"):
        make_tool(find).renamed("x", arguments={"qery": "y"})


def test_parallel_results_come_in_call_order_even_when_the_first_is_slower() -> None:
    finished: list[int] = []

    async def wait(number: int) -> str:
        """Wait."""
        await asyncio.sleep(0.06 if number == 0 else 0.0)
        finished.append(number)
        return str(number)

    results = run([make_tool(wait)], *(("wait", {"number": n}) for n in range(3)))
    assert [item.content for item in results] == ["0", "1", "2"]
    assert [item.call_id for item in results] == ["c0", "c1", "c2"]
    assert finished[-1] == 0


def test_slow_tool_is_cut_at_its_own_deadline_while_the_others_answer() -> None:
    async def wait(seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "done"

    slow, fast = run([make_tool(wait)], ("wait", {"seconds": 30}), ("wait", {"seconds": 0}), seconds=0.05)
    assert (slow.ok, slow.content) == (False, "Error: wait took longer than 0.05 s")
    assert (fast.ok, fast.content) == (True, "done")


def test_long_results_and_long_errors_are_cut_and_say_so() -> None:
    def shout(text: str, fail: bool) -> str:
        """Shout."""
        if fail:
            raise ToolError(text)
        return text

    calls = [("shout", {"text": "x" * 500, "fail": fail}) for fail in (False, True)]
    for result in run([make_tool(shout)], *calls, ("y" * 500, {}), limit=50):
        assert len(result.content) < 110
        assert "(cut:" in result.content


def test_tool_error_is_an_observation_and_any_other_exception_is_a_fault() -> None:
    def fails(kindly: bool) -> str:
        """Fail."""
        raise ToolError("no such page") if kindly else ZeroDivisionError("a bug")

    (result,) = run([make_tool(fails)], ("fails", {"kindly": True}))
    assert (result.ok, result.content) == (False, "Error: no such page")
    with pytest.raises(ZeroDivisionError):
        run([make_tool(fails)], ("fails", {"kindly": False}))


class _Base:
    @tool
    def first(self, x: int) -> int:
        """First."""
        return x

    def hidden(self, x: int) -> int:
        """Not a tool."""
        return x


class _Derived(_Base):
    offset = 10

    @tool
    def second(self) -> str:
        """Second."""
        return "two"

    @tool
    def first(self, x: int) -> int:
        """First, moved."""
        return x + self.offset


def test_only_marked_methods_are_exposed_in_order_and_bound_to_their_owner() -> None:
    one, two = _Derived(), _Derived()
    two.offset = 20
    assert [item.name for item in tools_of(one)] == ["first", "second"]
    assert tools_of(one)[0].description == "First, moved."
    assert [run(tools_of(owner), ("first", {"x": 1}))[0].content for owner in (one, two)] == ["11", "21"]
    assert tools_of(_Base())[0].description == "First."


def test_functions_that_cannot_be_described_are_refused() -> None:
    def untyped(x):  # type: ignore[no-untyped-def]
        """No type."""

    def starred(*values: int) -> None:
        """Starred."""

    def bare(x: int) -> None: ...

    def unknown(x: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
        """A type that does not exist."""

    for function, says in ((untyped, "has no type"), (starred, "name each"), (unknown, "resolved")):
        with pytest.raises(ConfigError, match=says):
            make_tool(function)
    with pytest.raises(ConfigError, match="no docstring"):
        tool(bare)

"""What a call may cost, and what happens when the fault is not the policy's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from surefoot.core.errors import ConfigError, EnvironmentFault
from surefoot.core.types import ToolCall, ToolResult
from surefoot.tools.base import Tool, ToolError, ToolFault, make_tool, run_calls, schema_complaint


def run(*tools: Tool, calls: int = 1, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    made = [ToolCall(f"c{i}", tools[0].name, arguments or {}) for i in range(calls)]
    return asyncio.run(run_calls(tools, made, **options))


def flaky(failures: int, error: type[Exception] = ToolFault) -> tuple[Tool, list[int]]:
    tries: list[int] = []

    def fetch() -> str:
        """Fetch."""
        tries.append(len(tries))
        if len(tries) <= failures:
            raise error("gone")
        return "here"

    return make_tool(fetch), tries


def test_a_fault_is_retried_and_the_policy_never_sees_it() -> None:
    fetch, tries = flaky(2)
    (result,) = run(replace(fetch, retries=2))
    assert (result, len(tries)) == (ToolResult("c0", "fetch", "here", True), 3)


def test_a_fault_beyond_the_retries_is_the_environments() -> None:
    fetch, tries = flaky(9)
    with pytest.raises(EnvironmentFault, match="gone"):
        run(replace(fetch, retries=2))
    assert len(tries) == 3


@pytest.mark.parametrize("error", [ToolError, ZeroDivisionError])
def test_nothing_but_a_fault_is_retried(error: type[Exception]) -> None:
    fetch, tries = flaky(1, error)
    if error is ToolError:
        assert run(replace(fetch, retries=3))[0].content == "Error: gone"
    else:
        with pytest.raises(error):
            run(replace(fetch, retries=3))
    assert len(tries) == 1


def test_retries_share_one_deadline() -> None:
    fetch, tries = flaky(99)
    (result,) = run(replace(fetch, retries=50, seconds=0.2))
    assert (result.ok, result.content) == (False, "Error: fetch took longer than 0.2 s")
    assert 1 < len(tries) < 6


def test_a_tools_own_deadline_and_limit_replace_the_common_ones() -> None:
    async def wait(seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "x" * 100

    own = replace(make_tool(wait), seconds=0.02, limit=10)
    (slow,) = run(own, arguments={"seconds": 30}, seconds=60, limit=1000)
    assert slow.content.startswith("Error: wai … (cut:")
    (quick,) = run(own, arguments={"seconds": 0}, seconds=60, limit=1000)
    assert quick.content == "xxxxxxxxxx … (cut: 100 characters, limit 10)"


def test_two_tools_of_one_name_are_refused() -> None:
    fetch, _ = flaky(0)
    with pytest.raises(ConfigError, match="two tools are named 'fetch'"):
        run(fetch, fetch)


def test_impossible_settings_are_refused() -> None:
    fetch, _ = flaky(0)
    for field, value in (("seconds", 0.0), ("limit", 0), ("retries", -1), ("name", "no spaces")):
        with pytest.raises(ConfigError, match=field):
            replace(fetch, **{field: value})


SCHEMA = {
    "type": "object",
    "properties": {"q": {"type": "string"}, "k": {"type": "integer", "maximum": 5}},
    "required": ["q"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"q": "a", "k": 2}, ""),
        ({"q": 3}, "argument 'q': 3 is not of type 'string'"),
        ({"q": "a", "k": 9}, "argument 'k': 9 is greater than the maximum of 5"),
        ({}, "'q' is a required property"),
        ({"q": "a", "z": 1}, "Additional properties are not allowed ('z' was unexpected)"),
    ],
)
def test_a_tool_without_a_model_is_checked_by_its_schema(arguments: dict[str, Any], says: str) -> None:
    def find(**given: Any) -> str:
        return str(sorted(given))

    (result,) = run(Tool("find", "Find.", SCHEMA, find), arguments=arguments)
    assert schema_complaint(SCHEMA, arguments) == says
    assert result.content == (f"Error: {says}" if says else "['k', 'q']")


def test_a_schema_that_points_elsewhere_is_never_fetched() -> None:
    schema = {"properties": {"q": {"$ref": "http://127.0.0.1:9/never"}}}
    with pytest.raises(ConfigError, match="not usable"):
        schema_complaint(schema, {"q": 1})
    with pytest.raises(ConfigError, match="not usable"):
        schema_complaint({"type": "nothing"}, {})

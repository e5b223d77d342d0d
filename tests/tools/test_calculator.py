"""The calculator computes what Python computes, and refuses everything else with a text."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.types import ToolCall
from surefoot.tools.base import ToolError, run_calls
from surefoot.tools.calculator import calculator_tool, evaluate


def _joined(parts: tuple[str, str, str]) -> str:
    return f"({parts[0]} {parts[1]} {parts[2]})"


_expressions = st.recursive(
    st.integers(-99, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//"]), inner).map(_joined),
    max_leaves=7,
).filter(lambda text: len(text) <= 80)


@given(_expressions)
def test_an_expression_has_the_value_that_python_gives_it(expression: str) -> None:
    try:
        expected = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            evaluate(expression)
    else:
        assert evaluate(expression) == expected


@given(st.text(max_size=100))
def test_no_text_does_anything_but_give_a_number_or_a_reason(text: str) -> None:
    try:
        assert abs(evaluate(text)) <= 10**18
    except ToolError as error:
        assert str(error)


def test_the_tool_answers_with_the_number_or_the_reason() -> None:
    calls = [
        ToolCall(str(i), "calculator", {"expression": e}) for i, e in enumerate(("12*(3+4)", "2**3", "x"))
    ]
    results = asyncio.run(run_calls([calculator_tool()], calls))
    assert [item.ok for item in results] == [True, False, False]
    assert results[0].content == "84"

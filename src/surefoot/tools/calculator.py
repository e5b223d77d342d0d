"""A calculator for integer expressions that executes nothing.

Must not know what the numbers stand for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from surefoot.tools.base import Tool, ToolError, make_tool

_MOST_CHARACTERS = 80
_MOST_VALUE = 10**18
_ALLOWED = re.compile(r"[0-9+\-*/() ]+")
_TOKEN = re.compile(r"[0-9]+|//|[+\-*/()]")
_UNREADABLE = "the expression cannot be read; write it like 12*(3+4)"


def evaluate(expression: str) -> int:
    """Value of an integer expression of ``+ - * //`` and parentheses, at most 80 characters.

    A parser of its own: nothing is executed, and episodes run in threads, between which Python's
    ``ast`` races before 3.11.8 (CPython issue 106905). Raises ToolError with a text for the
    policy when the expression cannot be read, divides by zero, or a step leaves +-10^18.
    """
    text = expression.strip()
    if len(text) > _MOST_CHARACTERS:
        raise ToolError(f"the expression has {len(text)} characters; at most {_MOST_CHARACTERS} are read")
    if not _ALLOWED.fullmatch(text):
        raise ToolError("only digits, + - * // and parentheses are allowed, like 12*(3+4)")
    tokens = [*_TOKEN.findall(text), ""]
    value, end = _sum(tokens, 0)
    if tokens[end]:
        raise ToolError(_UNREADABLE)
    return value


def _sum(tokens: Sequence[str], at: int) -> tuple[int, int]:
    """Each of the three returns (value, index of the first token that it did not take)."""
    value, at = _product(tokens, at)
    while (sign := tokens[at]) in ("+", "-"):
        right, at = _product(tokens, at + 1)
        value = _bounded(value + right if sign == "+" else value - right)
    return value, at


def _product(tokens: Sequence[str], at: int) -> tuple[int, int]:
    value, at = _operand(tokens, at)
    while (sign := tokens[at]) in ("*", "//"):
        right, at = _operand(tokens, at + 1)
        if sign == "//" and right == 0:
            raise ToolError("division by zero")
        value = _bounded(value * right if sign == "*" else value // right)
    return value, at


def _operand(tokens: Sequence[str], at: int) -> tuple[int, int]:
    token = tokens[at]
    if token.isdigit():
        return _bounded(int(token)), at + 1
    if token in ("+", "-"):
        value, at = _operand(tokens, at + 1)
        return (value if token == "+" else -value), at
    if token == "(":
        value, at = _sum(tokens, at + 1)
        if tokens[at] == ")":
            return value, at + 1
    raise ToolError(_UNREADABLE)


def _bounded(value: int) -> int:
    if abs(value) > _MOST_VALUE:
        raise ToolError("the numbers are too large")
    return value


def calculator(expression: str) -> str:
    """Evaluate an integer expression with + - * // and parentheses."""
    return str(evaluate(expression))


def calculator_tool() -> Tool:
    """The tool ``calculator(expression)``; use :meth:`Tool.renamed` for another name."""
    return make_tool(calculator)

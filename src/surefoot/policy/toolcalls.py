"""Finds Hermes-style tool calls, ``<tool_call>{json}</tool_call>``, in a policy's own text.

Pure text in, data out. It must not know tokenizers, environments or which tools exist.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from surefoot.core.errors import DataError
from surefoot.core.types import MalformedCall

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_MAX_DIGITS = 4300  # Python's own default limit, kept here so that no interpreter setting changes a parse
_MAX_DEPTH = 64  # far below the interpreter's recursion limit, so that whoever serialises the call is safe
_SPACE = re.compile(r"[ \t\r\n]*")
# A JSON string (closed, or running to the end of the text) or a closing tag outside of one.
_STRING_OR_CLOSE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|' + CLOSE, re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What a turn's text says. ``text`` is what is left outside tool calls.

    calls: (name, arguments) in order. malformed: blocks that were refused, with the reason. cut: the
    text ends inside a call and the turn was not complete; that call is in neither list.
    """

    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    cut: bool = False


def parse_tool_calls(text: str, *, complete: bool, thinking: bool = False) -> ParsedText:
    """Split ``text`` into tool calls and the rest. Never raises, never repairs.

    ``complete`` is False when the token limit ended the turn: an unfinished last call then gives
    ``cut`` and no malformed call. ``thinking`` says that the prompt had already opened a think block.

    The JSON object is decoded from the opening tag on, so a closing tag inside a string does not end
    the call. Refused as malformed: invalid JSON, an integer of more than 4300 digits, NaN and
    infinities, a key given twice, nesting deeper than 64, lone surrogates, ``name`` missing or no
    string, ``arguments`` missing or no object, anything between the object and the closing tag.
    Arguments given as a string that holds a JSON object are decoded once. Keys beside ``name`` and
    ``arguments`` are ignored. A broken block ends at the first closing tag outside its strings; if
    there is none it takes the rest of the text, so nothing quoted inside it is ever executed.

    A leading think block that is closed is plain text: calls drafted in it do not count. One newline
    before a call, and blank text between or after calls, belong to the format and are left out.
    """
    pieces: list[str] = []
    calls: list[tuple[str, dict[str, Any]]] = []
    malformed: list[MalformedCall] = []
    cut = False
    cursor = 0
    start = text.find(OPEN, _thinking_end(text, thinking))
    while start >= 0:
        pieces.append(text[cursor:start])
        found, end = _read_block(text, start + len(OPEN))
        if end is None and not complete:
            cut = True
        elif isinstance(found, str):
            malformed.append(MalformedCall(text[start:end], found))
        else:
            calls.append(found)
        cursor = len(text) if end is None else end
        start = text.find(OPEN, cursor)
    pieces.append(text[cursor:])
    if len(pieces) > 1:
        pieces = [pieces[0].removesuffix("\n"), *(piece for piece in pieces[1:] if piece.strip())]
    return ParsedText("".join(pieces), tuple(calls), tuple(malformed), cut)


def read_call(value: object) -> tuple[str, dict[str, Any]] | str:
    """Name and arguments of one decoded call, or why it is refused."""
    if not isinstance(value, dict):
        return "a call must be a JSON object with name and arguments"
    call = cast("dict[str, Any]", value)
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return "name is missing or not a string"
    if "arguments" not in call:
        return "arguments are missing; an empty object means none"
    arguments = call["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return f"arguments are a string that holds no JSON object: {_short(error)}"
    if not isinstance(arguments, dict):
        return "arguments must be a JSON object"
    return _fault([name, arguments]) or (name, cast("dict[str, Any]", arguments))


def call_json(name: str, arguments: Mapping[str, Any], *, compact: bool = False) -> str:
    """The JSON object of one call, as a policy should write it. Raises DataError if it is not JSON."""
    value = {"name": name, "arguments": dict(arguments)}
    separators = (",", ":") if compact else (", ", ": ")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"the arguments of a call to {name!r} are not JSON values: {error}") from error


def _thinking_end(text: str, thinking: bool) -> int:
    """Where the leading think block ends; 0 without one, and where it is never closed."""
    if not thinking and not text.lstrip().startswith(THINK_OPEN):
        return 0
    close = text.find(THINK_CLOSE)
    return 0 if close < 0 else close + len(THINK_CLOSE)


def _read_block(text: str, begin: int) -> tuple[tuple[str, dict[str, Any]] | str, int | None]:
    """The call (or why it is refused) that starts at ``begin``, and where its block ends, if it does."""
    at = _skip_space(text, begin)
    try:
        value, after = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        reason = f"not valid JSON: {error.msg} at character {max(error.pos - at, 0)}"
        return reason, _close_outside_strings(text, begin)
    except (ValueError, RecursionError) as error:
        return _short(error), _close_outside_strings(text, begin)
    after = _skip_space(text, after)
    if text.startswith(CLOSE, after):
        return read_call(value), after + len(CLOSE)
    end = _close_outside_strings(text, after)
    return ("the closing tag is missing" if end is None else "text between the object and the tag"), end


def _fault(value: object) -> str:
    """Why a decoded value could not be stored or sent again; "" if it can. Not recursive itself."""
    stack: list[tuple[object, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if depth > _MAX_DEPTH:
            return f"nested deeper than {_MAX_DEPTH}"
        if isinstance(item, str):
            if not item.isascii() and any("\ud800" <= character <= "\udfff" for character in item):
                return "a string holds half of a surrogate pair"
        elif isinstance(item, float):
            if not math.isfinite(item):
                return "a number is not finite"
        elif isinstance(item, dict):
            for key, inner in cast("dict[str, object]", item).items():
                stack += [(key, depth + 1), (inner, depth + 1)]
        elif isinstance(item, list):
            stack += [(inner, depth + 1) for inner in cast("list[object]", item)]
    return ""


def _close_outside_strings(text: str, begin: int) -> int | None:
    """Where the first closing tag outside JSON strings ends, at or after ``begin``."""
    for match in _STRING_OR_CLOSE.finditer(text, begin):
        if match.group() == CLOSE:
            return match.end()
    return None


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _short(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits; at most {_MAX_DIGITS} are read")
    return int(digits)


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:40]!r} is given twice")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)

"""Finds the one answer in the turn that ended an episode, or says why there is none.

Only text that the policy wrote in its last turn is read. This module must not know what is right.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from surefoot.core.errors import ConfigError, DataError, nearest
from surefoot.core.types import Scored, Trust
from surefoot.rewards.base import Episode

Form = Literal["whole", "line", "tag", "boxed", "fence"]

# A turn longer than this is refused before anything looks into it.
MOST_CHARACTERS = 200_000
# Marks of other speakers and of tools; only the harness may write them.
_FORGED = re.compile(
    r"<\|[^<>|\n]{1,40}\|>"
    r"|</?(?:tool_response|tool_result|tool_output|tool_call|information|observation|result|output"
    r"|function_results?|documents?|system|user|assistant|human|tool|search)\b[^<>\n]{0,80}>"
    r"|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>",
    re.IGNORECASE,
)
# Turns are up to MOST_CHARACTERS long, and the re module holds the interpreter's lock: no pattern here may
# take more than linear time. Hence the possessive quantifiers (*+), and str.find for what has two ends.
_LINE = re.compile(r"^[ \t]*+Answer:(.*+)$", re.MULTILINE)
_FENCE_MARK = re.compile(r"^```([A-Za-z0-9_+-]*+)[ \t]*+$", re.MULTILINE)
# What may still stand after an answer: the end of a formula, a sentence or an emphasis.
_AFTER = re.compile(r"[\s$.*]*+(?:\\[)\]])?[\s$.*]*+")
_THOUGHT_END = "</think>"


# Where an answer begins and ends, and where what it is wrapped in begins and ends.
@dataclass(frozen=True, slots=True)
class _Found:
    start: int
    begin: int
    end: int
    stop: int


@dataclass(frozen=True, slots=True)
class Submission:
    """``text`` is the answer as written, or None, and then ``reason`` says what was wrong."""

    text: str | None
    reason: str = ""


def forged_marks(text: str) -> tuple[str, ...]:
    """Chat-template tokens and tool or role tags in ``text``; the policy has no business writing any."""
    return tuple(match.group() for match in _FORGED.finditer(text))


def submitted(text: str | None, form: Form = "whole", *, last: bool = False) -> Submission:
    """The one answer in ``text``, an episode's final turn.

    whole: the turn itself. line: ``Answer: X``, the last line. tag: ``<answer>X</answer>``. boxed:
    ``\\boxed{X}``. fence: a code block between lines of three backticks. Exactly one must stand
    there; with ``last`` several may, and the last counts. Nothing but closing punctuation may follow
    it (after a fence anything but another fence may). What stands before ``</think>`` is no answer.
    Any tool tag or chat-template token voids the turn; inside of a fence it is part of the program.
    """
    if text is None:
        return Submission(None, "the episode did not end with an answer")
    if len(text) > MOST_CHARACTERS:
        return Submission(None, f"the turn has {len(text)} characters; at most {MOST_CHARACTERS} are read")
    if "<think>" in text and _THOUGHT_END not in text:
        return Submission(None, "the turn ends inside its reasoning")
    text = text.rpartition(_THOUGHT_END)[2]
    found = _FINDERS[form](text)
    if mark := _FORGED.search(_outside(text, found) if form == "fence" else text):
        return Submission(None, f"forged mark {mark.group()!r}")
    if not found:
        return Submission(None, f"no answer in the form {form!r}")
    if len(found) > 1 and not last:
        return Submission(None, f"{len(found)} answers; exactly one is allowed")
    if form != "fence" and not _AFTER.fullmatch(text, found[-1].stop):
        return Submission(None, "text follows the answer")
    answer = text[found[-1].begin : found[-1].end].strip()
    return Submission(answer) if answer else Submission(None, "the answer is empty")


def _outside(text: str, found: list[_Found]) -> str:
    """``text`` without what was found."""
    ends = [0, *(item.stop for item in found)]
    return "".join(text[a:b] for a, b in zip(ends, [*(item.start for item in found), len(text)], strict=True))


def _whole(text: str) -> list[_Found]:
    return [_Found(0, 0, len(text), len(text))]


def _lines(text: str) -> list[_Found]:
    return [_Found(m.start(), m.start(1), m.end(1), m.end()) for m in _LINE.finditer(text)]


def _tags(text: str) -> list[_Found]:
    found: list[_Found] = []
    at = 0
    while (start := text.find("<answer>", at)) >= 0:
        begin = start + len("<answer>")
        if (end := text.find("</answer>", begin)) < 0:
            break
        at = end + len("</answer>")
        found.append(_Found(start, begin, end, at))
    # A tag without its partner, or nested ones, make it unclear what was submitted.
    clear = text.count("<answer>") == text.count("</answer>") == len(found)
    return found if clear else []


def _boxes(text: str) -> list[_Found]:
    """Contents of every ``\\boxed{...}`` with balanced braces; unbalanced or nested: none."""
    found: list[_Found] = []
    at = 0
    while (start := text.find("\\boxed{", at)) >= 0:
        depth, at = 1, start + len("\\boxed{")
        begin = at
        while at < len(text) and depth:
            if text[at] == "\\":
                at += 1
            elif text[at] in "{}":
                depth += 1 if text[at] == "{" else -1
            at += 1
        if depth or text.find("\\boxed", begin, at - 1) >= 0:
            return []
        found.append(_Found(start, begin, at - 1, at))
    return found


def _fences(text: str) -> list[_Found]:
    """Every block between a line of backticks, which may name a language, and the next bare one."""
    found: list[_Found] = []
    opened: re.Match[str] | None = None
    for mark in _FENCE_MARK.finditer(text):
        if opened is None:
            opened = mark if mark.end() < len(text) else None
        elif not mark.group(1):
            found.append(_Found(opened.start(), opened.end() + 1, mark.start(), mark.end()))
            opened = None
    return found


_FINDERS: dict[Form, Callable[[str], list[_Found]]] = {
    "whole": _whole,
    "line": _lines,
    "tag": _tags,
    "boxed": _boxes,
    "fence": _fences,
}


def check_form(owner: str, form: str) -> None:
    """Raises ConfigError for a form that does not exist."""
    if form not in get_args(Form):
        raise ConfigError(f"{owner}: form is {form!r}; {nearest(form, get_args(Form))}")


def foreign_digit(text: str) -> str:
    """The first digit-like character outside ASCII (``５``, ``٥``, ``²``), or an empty string."""
    return next((char for char in text if not char.isascii() and unicodedata.category(char)[0] == "N"), "")


def references(episode: Episode) -> tuple[object, ...]:
    """The accepted references: the task's own, or its items where it is a list, tuple or set.

    Raises DataError when there is none: without a reference nothing can be verified.
    """
    value = episode.reference
    items: tuple[object, ...]
    items = tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)  # pyright: ignore[reportUnknownArgumentType]
    if not items or any(item is None or item == "" for item in items):
        raise DataError(f"task {episode.task.id}: reference is {value!r}; it must hold an answer")
    return items


def verified(value: float, name: str, evidence: str = "") -> Scored:
    """A verified score with evidence."""
    return Scored(value, Trust.VERIFIED, name, evidence)

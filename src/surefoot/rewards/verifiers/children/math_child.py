"""Compares two LaTeX formulas with math-verify; runs in a process of its own, which may be killed."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parent))

import sympy
from math_verify import LatexExtractionConfig, parse, verify

if TYPE_CHECKING:
    from surefoot.rewards.verifiers.children.serve import serve
else:
    from serve import serve

logging.disable(logging.CRITICAL)

_CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|textit)\s*\{([^{}]*)\}")
_PREFIX = re.compile(r"^[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?\s*=(?!=)")
_RELATION = re.compile(r"=|\\(?:n?eq|ne|approx|sim|equiv|to|implies|iff|Rightarrow|vee|wedge|lor|land)\b")
_UNDONE = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative, sympy.Max, sympy.Min)


def _plain(text: str) -> str:
    """Without spacing and size commands, which change nothing."""
    text = re.sub(r"\\(?:left|right|,|;|!|:|quad|qquad|displaystyle)(?![A-Za-z])", "", text)
    return re.sub(r"[\s$]+", "", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))


def _parse(text: str) -> list[Any]:
    wrapped = "\\boxed{" + text + "}"
    return parse(wrapped, _CONFIG, fallback_mode="no_fallback", parsing_timeout=0)


def _numeral(value: Any) -> bool:
    """A number that needs no more work: 5, -5, 1/2, 2.5, 50%, 3*10^8."""
    factors = [item for item in _factors(value) if item not in (1, -1)]
    if len(factors) > 2 or not all(_simple(item) for item in factors):
        return False
    # 10 * 10 is work; 50 * 1/100 (a percentage), 3 * 10^8 and 3 * 1/4 are ways to write a number.
    return len([item for item in factors if isinstance(item, sympy.Number) and not _reciprocal(item)]) <= 1


def _factors(value: Any) -> list[Any]:
    if isinstance(value, sympy.Mul):
        return [factor for item in value.args for factor in _factors(item)]
    if isinstance(value, sympy.UnevaluatedExpr):  # how a percentage is parsed
        return _factors(value.args[0])
    return [value]


def _simple(value: Any) -> bool:
    if isinstance(value, sympy.Pow):
        base, exponent = value.args
        whole = isinstance(base, sympy.Integer) and isinstance(exponent, sympy.Integer)
        return whole and (exponent == -1 or (base == 10 and abs(exponent) <= 300))
    return isinstance(value, sympy.Number)


def _reciprocal(value: Any) -> bool:
    return isinstance(value, sympy.Rational) and value.p == 1 and value.q != 1


def _text_trouble(gold: str, answer: str) -> str:
    """Text in a formula may only be a unit at its end, unless the reference has text itself."""
    if _TEXT.search(gold):
        return ""
    words = " ".join(_TEXT.findall(answer)).lower()
    if re.search(r"[0-9]", words) or re.search(r"\b(or|and|not|maybe|either)\b", words):
        return "text in the formula names other values"
    body = re.sub(r"\^\{?[0-9]\}?$", "", answer.strip())
    while (match := None if not body.endswith("}") else list(_TEXT.finditer(body))) and (
        match[-1].end() == len(body)
    ):
        body = body[: match[-1].start()].strip()
    return "text stands inside the formula" if _TEXT.search(body) else ""


def _brackets(text: str) -> tuple[str, str]:
    text = _plain(text)
    return (text[:1], text[-1:]) if text[:1] in "([" and text[-1:] in ")]" else ("", "")


def _copied(gold: str, answer: str, prompt: str) -> bool:
    """A formula with work in it that stands in the prompt as it is, and is not the reference."""
    mine = _plain(answer)
    work = re.search(r"[-+*/^=]|\\[a-z]", mine[1:])
    return bool(work) and mine != _plain(gold) and mine in _plain(prompt)


def _refusal(gold: str, answer: str, golds: list[Any], answers: list[Any], prompt: str) -> str:
    if not answers:
        return "no formula can be read"
    if _brackets(gold) != ("", "") and _brackets(gold) != _brackets(answer):
        return "other brackets than the reference's"
    if _copied(gold, answer, prompt):
        return "copied from the prompt"
    number = isinstance(golds[0], sympy.Basic) and _numeral(golds[0])
    for item in answers:
        if not isinstance(item, sympy.Basic):
            continue
        if number and not _numeral(item):
            return "still to be worked out, while the reference is a plain number"
        if item.has(*_UNDONE) and not golds[0].has(*_UNDONE):
            return "still to be worked out"
    return ""


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """{"equal": bool, "why": text}, or {"gold": why the reference cannot be read}."""
    gold, answer, prompt = request["gold"], request["answer"], request["prompt"]
    golds = _parse(gold)
    if not golds:
        return {"gold": "it is no formula"}
    if gold == answer:
        verify(golds, golds, timeout_seconds=None)  # it takes as long as with another answer
        return {"equal": True, "why": "identical"}
    if not _RELATION.search(gold):
        answer = _PREFIX.sub("", answer.strip())
        if _RELATION.search(answer):
            return {"equal": False, "why": "a relation, while the reference is a value"}
    elif len(_RELATION.findall(answer)) != len(_RELATION.findall(gold)):
        return {"equal": False, "why": "not the reference's number of relations"}
    why = _text_trouble(gold, answer)
    answers = [] if why else _parse(answer)
    why = why or _refusal(gold, answer, golds, answers, prompt)
    if why:
        return {"equal": False, "why": why}
    return {"equal": bool(verify(golds, answers, timeout_seconds=None)), "why": "compared by math-verify"}


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Like :func:`compare`; an answer that makes the library raise is not equal."""
    try:
        return compare(request)
    except Exception as error:  # the library may raise anything on odd formulas
        return {"equal": False, "why": f"{type(error).__name__}: {str(error)[:200]}"}


if __name__ == "__main__":
    serve(handle)

"""Verified rewards for answers in words, numbers and formulas.

They read the final turn through ``submission`` only; this module must not execute anything itself.
"""

from __future__ import annotations

import importlib.util
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Literal, cast

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.types import Scored, Trust
from surefoot.rewards.base import Episode, Reward, reward
from surefoot.rewards.verifiers.formulas import formula_trouble
from surefoot.rewards.verifiers.helper import HelperDied, HelperPool, HelperTimeout
from surefoot.rewards.verifiers.submission import (
    Form,
    check_form,
    foreign_digit,
    references,
    submitted,
    verified,
)

Percent = Literal["hundredths", "points", "refuse"]

_MOST_ANSWER = 2_000
_ARTICLES = frozenset(("a", "an", "the"))
# What may stand between a sign and its number: quotes, emphasis, brackets, currency.
_WRAP = r"[\s\"'`*_(\[{$€£]*"
# Marks that change what is meant, and are kept.
_KEPT = re.compile(
    r"(?<=\d),(?=\d{3}(?!\d))(?P<drop>)"  # all below, but not the comma of 1,000
    rf"|(?<![^\W\d_][^\W\d_])-(?={_WRAP}\.?\d)"  # a minus, but not the hyphen of COVID-19
    r"|(?<=\d)(?:[^\w\s]|_)+(?=\d)"  # whatever joins two digits
    r"|(?<![^\W\d_.])\.(?=\d)"  # .5
    r"|(?<=[^\W_])[+#]+|(?<=[^\W_])-(?=[.,;:!?]*(?:\s|$))"  # C++, C#, A-
    r"|(?<=[^\W_])\^(?=[\w(-])|(?<=\d)[*/](?=\w)|(?<=\w)[*/](?=\d)"  # x^n, 2*x
    r"|(?<=\d)[!%]|[<>~](?=\d)"
)
# An operator between two digits or a percent sign means the same with spaces around it.
_APART = re.compile(r"(?<=\d)\s+(?=%)|(?<=\d)\s*([-+*/^=<>])\s*(?=[-.]?\d)")
_PUNCTUATION = frozenset(string.punctuation)
_TYPOGRAPHIC = str.maketrans("‘’ʼ“”‐‑–−", "'''\"\"----")
# fmt: off
_AVOIDING = frozenset((
    "", "i do not know", "i dont know", "dont know", "do not know", "unknown", "no answer", "none", "na",
    "not sure", "im not sure", "i am not sure", "cannot answer", "i cannot answer", "cannot be determined",
    "it cannot be determined", "not enough information", "insufficient information", "question is invalid",
    "invalid question",
))
# fmt: on


def normalise(text: str) -> str:
    """Text after the SQuAD rules: lower case, no punctuation, no articles, single spaces.

    Three differences. Marks that change what is meant stay: signs, points and operators at numbers (-5
    is not 5, also in quotes; 3.14 is not 314; 1,000 is 1000), and plus or sharp behind a letter (C++, C#).
    Articles go only before another word, so that Vitamin A is not Vitamin. Characters are composed (NFC)
    but never folded into other scripts' look-alikes.
    """
    text = unicodedata.normalize("NFC", text).lower().translate(_TYPOGRAPHIC)
    text = _APART.sub(r"\1", text)
    kept: set[int] = set()
    for match in _KEPT.finditer(text):
        if match["drop"] is None:
            kept.update(range(*match.span()))
    text = "".join(char for i, char in enumerate(text) if i in kept or char not in _PUNCTUATION)
    words = re.sub(r"(?<!\S)-\s+(?=\.?\d)", "-", text).split()
    return " ".join(word for i, word in enumerate(words) if word not in _ARTICLES or i == len(words) - 1)


def _text_reward(
    name: str,
    weight: float,
    form: Form,
    last: bool,
    judge: Callable[[str, Episode], tuple[float, str]],
    *,
    resolution: float | None = 1.0,
    seconds: float = 30.0,
) -> Reward:
    """A reward that scores the submitted text; nothing submitted is 0 with the reason as evidence."""
    check_form(name, form)

    @reward(trust=Trust.VERIFIED, weight=weight, name=name, resolution=resolution, seconds=seconds)
    def score(episode: Episode) -> Scored:
        gold = references(episode)  # a task without reference is Unscored whatever was answered
        if any(isinstance(item, bool) for item in gold):
            raise DataError(f"task {episode.task.id}: reference {episode.reference!r} is no text or number")
        found = submitted(episode.answer, form, last=last)
        if found.text is None:
            return verified(0.0, name, found.reason)
        if len(found.text) > _MOST_ANSWER:
            return verified(0.0, name, f"{len(found.text)} characters; at most {_MOST_ANSWER} are read")
        value, evidence = judge(found.text, episode)
        return verified(value, name, evidence)

    return score


def exact_match(
    *,
    form: Form = "whole",
    last: bool = False,
    strict: bool = False,
    name: str = "exact_match",
    weight: float = 1.0,
) -> Reward:
    """1 when the submitted text equals a reference after :func:`normalise`, else 0.

    ``strict`` compares the texts as they are. A list as reference holds accepted aliases. Not
    stopped: a task whose answers repeat (yes/no) pays a constant answer as often as it is right.
    """

    def judge(text: str, episode: Episode) -> tuple[float, str]:
        gold = [str(item) for item in references(episode)]
        if strict:
            return float(text in gold), "compared as written"
        mine = normalise(text)
        hit = any(_equal_text(mine, text, item) for item in gold)
        return float(hit), f"normalised answer {mine!r}"

    return _text_reward(name, weight, form, last, judge)


def _equal_text(mine: str, text: str, gold: str) -> bool:
    normal = normalise(gold)
    # A reference of articles and punctuation only would match every empty answer.
    return mine == normal if normal else text.strip() == gold.strip()


def token_f1(
    *,
    form: Form = "whole",
    last: bool = False,
    most_tokens: int = 40,
    name: str = "token_f1",
    weight: float = 1.0,
) -> Reward:
    """The best F1 of shared words (SQuAD) between the submitted text and a reference, in [0, 1].

    Warning: F1 pays for parts, so a policy can live on hedging, and training on it alone is known to
    end in answer avoidance (arXiv 2505.15117). So: an answer of more than ``most_tokens`` words is 0; a
    refusal ("I do not know") is 0 and marked ``avoided`` in the evidence, unless it is the reference;
    yes, no and references with digits must match exactly. Use :func:`exact_match` to define success.
    """
    if most_tokens < 1:
        raise ConfigError(f"{name}: most_tokens is {most_tokens}; it must be >= 1")

    def judge(text: str, episode: Episode) -> tuple[float, str]:
        mine = normalise(text).split()
        gold = [normalise(str(item)) or str(item) for item in references(episode)]
        plain = " ".join(mine)
        if plain in _AVOIDING and plain not in gold:
            return 0.0, f"avoided: {text!r}"
        if len(mine) > most_tokens:
            return 0.0, f"{len(mine)} words; at most {most_tokens} are compared"
        return max(_f1(mine, item.split()) for item in gold), f"{len(mine)} words"

    return _text_reward(name, weight, form, last, judge, resolution=None)


def _f1(mine: list[str], gold: list[str]) -> float:
    short = len(gold) == 1 and (gold[0] in ("yes", "no", "noanswer") or any(c.isdigit() for c in gold[0]))
    if short or (len(mine) == 1 and mine[0] in ("yes", "no", "noanswer")):
        return float(mine == gold)
    shared = sum((Counter(mine) & Counter(gold)).values())
    return 2 * shared / (len(mine) + len(gold)) if shared else 0.0


_DIGITS = r"[0-9]{1,300}"
_GROUPED = r"[0-9]{1,3}(?:,[0-9]{3}){1,100}"
_EMPHASIS = re.compile(r"(?<!\w)(\*{1,3})(?=[^\s*])([^*]{1,200})(?<!\s)\1(?!\w)")
# A minus that was typed as a dash or with a space after it; only where nothing stands before.
_MINUS_FIRST = re.compile(r"^(?:[-\N{MINUS SIGN}][ ]?|\N{EN DASH})(?=[$€£]?\.?[0-9])")
_WRAPPED = re.compile(r"\\(?:boxed|text(?:bf|it)?|mathrm|mbox)\s*\{([^{}]*)\}")
_DELIMITERS = re.compile(r"\\([()\[\]$%])")
_OPERATORS = frozenset("－﹣‐‑+-*/^<>~|&\\√∛∜±∓×÷·∙⋅≤≥≠≈≡¬∞⁄∕–—‒―\N{MINUS SIGN}")
_OPERATORS_BEHIND = _OPERATORS | frozenset("!%‰‱′″…→←")
_OPENING = " \t\r\n([{\"'`_$€£“”‘’«»"
_WORDS = (
    r"(?:hundreds?|thousands?|millions?|billions?|trillions?|quadrillions?|lakhs?|crores?|dozens?|mn|bn|tn|half"
    r"|halves|thirds?|quarters?|tenths?|hundredths?|thousandths?|millionths?|zero|one|two|three|four|five|six"
    r"|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)"
)
_BEFORE = re.compile(
    rf"(?:n't|\b(?:{_WORDS}|twice|thrice|double|triple|point|minus|negative|plus|not|never|but|except|or|than|least|most|under|over|above|below"
    r"|beyond|exceeding|times|up to|log|ln|sqrt|root|sin|cos|tan|exp|mod|(?:divided|multiplied) by"
    r"|(?:root|log|logarithm|square|cube|inverse|reciprocal|opposite|negative|half|factorial|power) of))$",
    re.IGNORECASE,
)
_BEHIND = re.compile(
    rf"(?:{_WORDS}(?!-)|score|gross|or|plus|minus|mod|modulo|over|divided|multiplied|squared|cubed|factorial"
    r"|percentage|pi|π|[eijknxyz]|to the"
    rf"|(?:times|(?:less|more|fewer|greater) than)(?=\s+(?:an? )?(?:\d|[b-z]\b|{_WORDS}\b))"
    rf"|(?:to|and|point)(?= (?:an? )?{_WORDS}\b)|is(?:n't| not| wrong| incorrect| false))\b",
    re.IGNORECASE,
)


def _number_pattern(thousands: bool, fractions: bool) -> re.Pattern[str]:
    whole = f"(?:{_GROUPED}|{_DIGITS})" if thousands else _DIGITS
    plain = rf"(?:{whole}(?:\.{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?[0-9]{{1,3}})?"
    over = rf"(?:[ ]?/[ ]?(?P<under>{_DIGITS}))?" if fractions else ""
    # Neither letters, digits nor marks that could belong to a number may touch it: x2, 3rd, 1,5, 3-5.
    return re.compile(
        rf"(?<![\w.,/^)!+-])(?P<sign>[+-]?)[$€£]?(?P<top>{plain}){over}"
        r"(?P<percent>[ ]?(?:%|per ?cent\b))?(?![\w/^(-]|[.,]\w|\.\.)",
        re.IGNORECASE,
    )


def _changed(before: str, behind: str) -> str:
    """What stands beside a number and changes its value; an empty text where nothing does."""
    words = before.rstrip(_OPENING)
    opening = before[len(words) :]
    if words and (words[-1] in _OPERATORS or (words[-1].isalnum() and opening[:1] in ("(", "[", "{"))):
        return words[-1]
    if found := _BEFORE.search(words[-60:]):
        return found.group()
    rest = behind.lstrip()
    if rest and rest[0] in _OPERATORS_BEHIND:
        return rest[0]
    found = _BEHIND.match(rest)
    return found.group() if found else ""


def parse_number(
    text: str,
    *,
    thousands: bool = False,
    fractions: bool = True,
    percent: Percent = "hundredths",
    last: bool = False,
) -> Fraction:
    """The one number in ``text``, exactly. Raises DataError when there is none, or more than one.

    Read: sign, ASCII digits, decimal point, exponent, ``a/b`` (``fractions``), ``1,000``
    (``thousands``), a currency sign, ``%`` or ``percent`` (``hundredths``: 50% is 1/2; ``points``: it is
    50). ``- 5`` and an en dash before a digit are negative at the start of the text. With ``last`` the last
    of several counts. Any digit that is not part of a number read (``x2``, ``3-5``, other scripts) makes
    the text ambiguous and is refused, and so is a mark or word right beside the number that changes it
    (``<5``, ``√5``, ``5!``, ``not 5``, ``5 million``, ``5 or six``). Units and ``about`` change nothing.
    Not stopped: a sentence that takes the number back further away.
    """
    if strange := foreign_digit(text):
        raise DataError(f"the digit {strange!r} is not ASCII")
    text = _WRAPPED.sub(r"\1", text)
    text = _DELIMITERS.sub(r"\1", _EMPHASIS.sub(r"\2", text)).strip()
    text = _MINUS_FIRST.sub("-", text).replace("\N{MINUS SIGN}", "-")
    matches = list(_number_pattern(thousands, fractions).finditer(text))
    covered = sum(sum(char.isdigit() for char in match.group()) for match in matches)
    if covered != sum(char.isdigit() for char in text):
        raise DataError("some digits belong to no plain number")
    if not matches:
        raise DataError("there is no number")
    if len(matches) > 1 and not last:
        raise DataError(f"{len(matches)} numbers; exactly one is allowed")
    if change := _changed(text[: matches[-1].start()], text[matches[-1].end() :]):
        raise DataError(f"{change!r} beside the number changes it")
    return _fraction(matches[-1], percent)


def _fraction(match: re.Match[str], percent: Percent) -> Fraction:
    value = Fraction(Decimal(match["top"].replace(",", "")))
    under = match.groupdict().get("under")
    if under is not None:
        if int(under) == 0:
            raise DataError("division by zero")
        value /= int(under)
    if match["percent"]:
        if percent == "refuse":
            raise DataError("a percent sign is not read here")
        value = value / 100 if percent == "hundredths" else value
    return -value if match["sign"] == "-" else value


def numeric(
    *,
    absolute: float = 0.0,
    relative: float = 0.0,
    form: Form = "whole",
    last: bool = False,
    thousands: bool = False,
    fractions: bool = True,
    percent: Percent = "hundredths",
    name: str = "numeric",
    weight: float = 1.0,
) -> Reward:
    """1 when the one number submitted is within max(absolute, relative * |reference|) of a reference.

    Compared as exact fractions, so with both tolerances 0 only the number itself passes (0.5 and 1/2
    are the same). Reading: :func:`parse_number`. References are int, float or such text. ``last``
    takes the last of several answers and of several numbers. Not stopped: a tolerance so wide that
    guesses pass.
    """
    for key, value in (("absolute", absolute), ("relative", relative)):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name}: {key} is {value}; it must be finite and >= 0")

    def read(text: str) -> Fraction:
        return parse_number(text, thousands=thousands, fractions=fractions, percent=percent, last=last)

    def judge(text: str, episode: Episode) -> tuple[float, str]:
        gold = [_gold_number(item, episode, read) for item in references(episode)]
        try:
            mine = read(text)
        except DataError as error:
            return 0.0, str(error)
        hit = any(abs(mine - item) <= max(_exact(absolute), _exact(relative) * abs(item)) for item in gold)
        return float(hit), f"read a number from {text[:80]!r}"

    return _text_reward(name, weight, form, last, judge)


def _exact(value: float) -> Fraction:
    return Fraction(repr(float(value)))


def _gold_number(item: object, episode: Episode, read: Callable[[str], Fraction]) -> Fraction:
    if isinstance(item, str):
        return read(item)
    if isinstance(item, int | Fraction):
        return Fraction(item)
    if isinstance(item, float) and math.isfinite(item):
        return _exact(item)
    raise DataError(f"task {episode.task.id}: reference {item!r} is not a finite number")


_MATH = HelperPool(Path(__file__).parent / "children" / "math_child.py", memory_mb=1500, site=True)
_MATH_MOST = 400
_PERCENT = re.compile(r"(?<=[0-9}])\s*\\?%")
_CHILD_START_SECONDS = 15.0
_DEADLINE = 600.0


def math_answer(
    *,
    form: Form = "boxed",
    last: bool = False,
    percent: Literal["hundredths", "points"] = "hundredths",
    seconds: float = 5.0,
    name: str = "math_answer",
    weight: float = 1.0,
) -> Reward:
    """1 when the submitted LaTeX is mathematically equal to a reference, by math-verify.

    The check runs in a helper process with bounded memory, killed after ``seconds`` of CPU time, since
    sympy can hold the interpreter for ever on an answer like 10^{10^{8}}. An answer that overruns or
    breaks the helper is 0 if the reference passes against itself, and a failed measurement if not.
    What math-verify accepts is narrowed: several values in a chain (4=5), work that is still to be
    done where the reference is a plain number (4+1, an integral), a formula copied from the prompt,
    other brackets than the reference's (a list or set is no tuple), and beside a number any subscript,
    prime, dots or words that change it (million, not) that the reference has not. Numbers must be equal;
    a decimal for a value that is no whole number may be off by half of its sixth decimal place, below 0.1
    of its sixth significant digit. Below 0.1 no decimal counts as equal to what is more than a number
    (\\pi/100). ``50\\%`` is 1/2 (``hundredths``), or 50 in references and answers alike (``points``, for
    tasks that ask "what percent"). Units and what is counted may stand in text commands, units of two
    letters or more also without. Not stopped: another unit than the reference's (5 m for 5 cm), a capital
    letter for a small one, a letter that is dropped as a unit behind a root (2\\sqrt{3}t); an equivalent form
    of the question's own expression where the reference is not a plain number.

    Raises ConfigError when math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"{name}: math-verify is not installed; pip install 'surefoot[verify]'")
    if not seconds > 0:
        raise ConfigError(f"{name}: seconds is {seconds}; it must be > 0")
    if percent not in ("hundredths", "points"):
        raise ConfigError(f"{name}: percent is {percent!r}; use 'hundredths' or 'points'")

    def read(text: str) -> str:
        return _PERCENT.sub("", text) if percent == "points" else text

    def judge(text: str, episode: Episode) -> tuple[float, str]:
        gold = [read(str(item)) for item in references(episode)]
        prompt = "\n".join(message.content for message in episode.task.prompt)
        found = [_math_equal(item, read(text), prompt, seconds) for item in gold]
        return max(found, key=lambda pair: pair[0])

    return _text_reward(name, weight, form, last, judge, seconds=_DEADLINE)


def _math_equal(gold: str, text: str, prompt: str, seconds: float) -> tuple[float, str]:
    if len(text) > _MATH_MOST:
        return 0.0, f"the formula has {len(text)} characters; at most {_MATH_MOST} are read"
    if strange := foreign_digit(text):
        return 0.0, f"the digit {strange!r} is not ASCII"
    if trouble := formula_trouble(gold, text):
        return 0.0, trouble
    try:
        reply = _math_ask(gold, text, prompt, seconds)
    except (HelperTimeout, HelperDied) as error:
        # Whose fault was it? If the reference can be checked, the answer broke the check.
        control = _math_ask(gold, gold, "", seconds)
        if control.get("equal") is not True:
            raise DataError(f"reference {gold!r} cannot be compared with itself") from error
        return 0.0, f"the answer could not be checked: {error}"
    if "gold" in reply:
        raise DataError(f"reference {gold!r} cannot be read: {reply['gold']}")
    return float(reply["equal"] is True), str(reply["why"])


def _math_ask(gold: str, text: str, prompt: str, seconds: float) -> dict[str, object]:
    request = {"gold": gold, "answer": text, "prompt": prompt}
    return cast("dict[str, object]", _MATH.ask(request, seconds, start=_CHILD_START_SECONDS))

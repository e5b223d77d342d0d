"""Refuses formulas that math-verify would take for another: it drops or rounds what it does not know.

Reads text only; this module must not import math-verify or sympy.
"""

from __future__ import annotations

import re
from fractions import Fraction

_STEMS = (
    "meter metre gram liter litre watt joule volt ampere newton pascal hertz byte bit calorie ohm mole second"
)
_SHORT_UNITS = (
    "m mm cm dm km nm g mg kg t s ms h hr hrs l L ml mL cl dl A V W kW kWh J kJ N Pa kPa Hz kHz MHz K C F "
    "mol rad deg degree degrees radian radians in inch inches ft foot feet yd yard yards mi mile miles "
    "acre acres hectare hectares oz ounce ounces lb lbs pound pounds ton tons tonne tonnes sec secs min "
    "mins minute minutes hour hours day days week weeks month months year years cup cups pint pints quart "
    "quarts gallon gallons mph kph dollar dollars cent cents euro euros usd eur gbp kelvin celsius "
    "fahrenheit unit units way ways people persons students men women children boys girls points items "
    "apples oranges books coins cards balls marbles tickets solutions times steps pieces games sq cu "
    "square cubic per"
)
_UNITS = frozenset(_SHORT_UNITS.split()) | {
    f"{prefix}{stem}{plural}"
    for prefix in ("", "nano", "micro", "milli", "centi", "deci", "kilo", "mega", "giga")
    for stem in _STEMS.split()
    for plural in ("", "s")
}
# Words behind a number that make it another one, or none.
_MULTIPLES = (
    "dozen dozens hundred hundreds thousand thousands million millions billion billions trillion trillions "
    "score gross half halves third thirds quarter quarters fourth fourths fifth fifths tenth tenths percent "
    "percentage squared cubed factorial not never none but except and either maybe plus minus negative "
    "divided multiplied over more less fewer greater than equals wrong incorrect false untrue mod modulo "
    "sqrt root zero one two three four five six seven eight nine ten twelve twenty"
)
_CHANGING = frozenset(_MULTIPLES.split())
_TEXT = re.compile(
    # An operatorname that stands last is no function.
    r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt)|mbox|hbox|operatorname(?=\s*\{[^{}]*\}\s*$))\s*\{([^{}]*)\}"
    r"(?:\s*\^\{?-?[0-9]\}?)?"
)
_MARKS = {
    "a subscript": re.compile(r"[0-9][})\]]*_\{?([^{}]*)"),
    "a prime": re.compile(r"[0-9][})\]]*(?:\^\{?)?('|\\prime|`|′|″)"),
    "dots": re.compile(r"(\\[lcdv]?dots|\.\.|…)"),
}
_PLAIN = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+|10\^(?:\{[+-]?[0-9]{1,3}\}|[0-9]))"
_MATH_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<whole>[0-9]+)?\\frac(?:\{{(?P<top>{_PLAIN})\}}|(?P<t>[0-9]))"
    rf"(?:\{{(?P<under>{_PLAIN})\}}|(?P<u>[0-9]))|(?P<over>{_PLAIN})(?:/(?P<below>{_PLAIN}))?)(?P<percent>\\?%)?"
)
_LETTERS = re.compile(r"[A-Za-z]{2,}")  # a word, which math-verify would take for a product
_SCALED = re.compile(r"[0-9}]\\begin\b")  # a factor before a matrix
_BARE_UNIT = re.compile(r"(?<=[0-9}])[A-Za-z]{2,}$")
_NAME = re.compile(r"(?:[A-Za-z]{1,2}(?:_\{?\w+\}?)?)?")  # x, f(x), P(A) or nothing, without brackets


def formula_trouble(gold: str, text: str) -> str:
    """Why ``text`` is not ``gold`` whatever math-verify says; an empty text where it is to be asked."""
    mine, right = _tidy(text), _tidy(gold)
    if mine == right and _texts(text) == _texts(gold):
        return ""
    for what, pattern in _MARKS.items():
        if (found := pattern.findall(mine)) and found != pattern.findall(right):
            return f"{what} that the reference has not"
    own = _texts(gold)
    if odd := [words for words in _texts(text) if words not in own and not _unit(words)]:
        return f"{odd[0]!r} is neither a unit nor what is counted"
    if _LETTERS.fullmatch(right) and _TEXT.sub(r"\1", text).strip().casefold() != right.casefold():
        return "other letters than the reference's"
    if "," in right and _is_tuple(mine) and not _is_tuple(right):
        return "a tuple, while the reference is a list or set"
    if not _SCALED.search(mine) and not any(_agree(a, b) for a in _pieces(right) for b in _pieces(mine)):
        return "not the plain number that the reference is"
    return ""


def _texts(formula: str) -> list[str]:
    """The words in text commands that follow something; a formula of text alone has none."""
    found = [match for match in _TEXT.finditer(formula) if formula[: match.start()].strip(" $\\,;:!~{(")]
    return [match.group(1).strip(" .,~") for match in found]


def _unit(words: str) -> bool:
    """Whether words behind a number leave it as it is: units and what is counted, but not ``million``."""
    return all(map(_leaves_it, re.split(r"[\s/~.·-]+", words)))


def _leaves_it(word: str) -> bool:
    low = word.lower()
    if word in _UNITS or (len(word) > 1 and low in _UNITS):
        return True
    return not word or (len(word) > 2 and word.isalpha() and low not in _CHANGING)


def _tidy(formula: str) -> str:
    """Without units, currency, spacing and size commands; a space stays between two digits."""
    text = _TEXT.sub(" ", formula).replace("\N{MINUS SIGN}", "-")
    text = re.sub(r"\\(?:(?:left|right|displaystyle|[dt]?frac)(?![A-Za-z]))", _short, text)
    text = re.sub(r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|[\s~]", " ", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", "", text)
    text = re.sub(r"\^\{?\\circ\}?|\\circ|°|\\degree(?![A-Za-z])|\\?\$|(?<!\\)\\!", "", text)
    return re.sub(r"(?<![0-9]) +| +(?![0-9])", "", text.replace("{,}", ","))


def _short(match: re.Match[str]) -> str:
    return r"\frac" if match.group().endswith("frac") else ""


def _is_tuple(text: str) -> bool:
    """Whether ``text`` is one tuple or interval, perhaps with a name before it."""
    body = re.sub(r"^[A-Za-z]\w*(?:=|\\in(?![a-z]))", "", text)
    depth = 0
    for at, char in enumerate(body):
        depth += (char in "([") - (char in ")]")
        if depth == 0:
            return char in ")]" and at == len(body) - 1 and "," in body
    return False


def _pieces(text: str) -> list[list[str]]:
    """The items of a list, tuple, matrix or equation; twice, where commas may also group digits."""
    text = re.sub(r"\\begin\{array\}\{[^{}]*\}", "", text)
    text = re.sub(r"\\(?:begin|end)\{[A-Za-z]*\}|\\[{}]|\\[lr]brace(?![A-Za-z])|[()\[\]]", "", text)
    joined = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    return [re.split(r",|;|&|\\\\|=|\\cup|\\in(?![a-z])", form) for form in dict.fromkeys((joined, text))]


def _math_number(text: str) -> tuple[Fraction, bool] | None:
    """The value of a plain number in LaTeX and whether it is a decimal; None for any other formula."""
    unit = _BARE_UNIT.search(text)
    text = text[: unit.start()] if unit and unit.group() in _UNITS else text
    while text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    value = Fraction(1)
    for factor in re.split(r"\\times|\\cdot|\*", text):
        match = _MATH_NUMBER.fullmatch(factor)
        under = _plain(match["under"] or match["u"] or match["below"] or "1") if match else 0
        if match is None or under == 0:
            return None
        value *= _plain(match["top"] or match["t"] or match["over"]) / under + int(match["whole"] or 0)
        value *= Fraction(-1 if match["sign"] == "-" else 1, 100 if match["percent"] else 1)
    return value, "." in text


def _plain(text: str) -> Fraction:
    """A decimal, or a power of ten."""
    base, _, power = text.replace("{", "").replace("}", "").partition("^")
    return Fraction(base) * Fraction(10) ** (int(power) - 1) if power else Fraction(base)


def _agree(golds: list[str], mine: list[str]) -> bool:
    """Whether each item of ``mine`` is one of ``golds``, as far as those are plain numbers."""
    right = {piece: _math_number(piece) for piece in golds if not _NAME.fullmatch(piece)}
    plain = None not in right.values()
    for piece in mine if right else []:
        number = _math_number(piece)
        if number is None:
            if plain and not _NAME.fullmatch(piece):
                return False  # math-verify drops what it does not know: 5t, \fbox{50\%}
            if "%" in piece and not any("%" in item for item in golds):
                return False
            continue
        # math-verify rounds to six decimals, which would make any small decimal equal to any small formula.
        small = number[1] and abs(number[0]) < Fraction(1, 10)
        if (plain or small) and not any(item and _near(number, item) for item in right.values()):
            return False
    unread = any("%" in piece and item is None for piece, item in right.items())
    return not unread or any("%" in piece for piece in mine)


def _near(a: tuple[Fraction, bool], b: tuple[Fraction, bool]) -> bool:
    if a[0] == b[0]:
        return True
    if not (a[1] or b[1]) or 1 in (a[0].denominator, b[0].denominator):
        return False
    allowed, size = Fraction(1, 2_000_000), abs(b[0])
    while size < Fraction(1, 10):
        allowed, size = allowed / 10, size * 10
    return abs(a[0] - b[0]) <= allowed

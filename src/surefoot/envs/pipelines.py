"""Small functions over lists of whole numbers, in words and in Python; what ``code`` and ``repo`` ask for.

Two functions are the same when they do the same, however they are written. Must not know any environment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from surefoot.core.seeds import digest

# (name of a step, its number); the last one says what is returned.
Steps = tuple[tuple[str, int], ...]
Function = Callable[[list[int]], Any]


@dataclass(frozen=True, slots=True)
class _Step:
    """``value`` is a Python expression over the list ``v``; {k} is a number out of ``numbers``.

    ``misses``: expressions that are almost right, as one writes them by mistake.
    """

    words: str
    other_words: str
    value: str
    numbers: tuple[int, int] = (0, 0)
    misses: tuple[str, ...] = ()


_STEPS: Mapping[str, _Step] = {
    "even": _Step("keep only the even numbers", "drop all odd numbers", "[n for n in v if n % 2 == 0]"),
    "odd": _Step(
        "keep only the odd numbers",
        "drop all even numbers",
        "[n for n in v if n % 2 == 1]",
        misses=("[n for n in v if n > 0 and n % 2 == 1]",),
    ),
    "above": _Step(
        "keep only numbers greater than {k}",
        "drop all numbers up to and including {k}",
        "[n for n in v if n > {k}]",
        (-8, 8),
    ),
    "below": _Step(
        "keep only numbers less than {k}", "drop all from {k} upwards", "[n for n in v if n < {k}]", (-4, 9)
    ),
    "without": _Step(
        "leave out multiples of {k}", "drop what {k} divides", "[n for n in v if n % {k} != 0]", (3, 7)
    ),
    "times": _Step("multiply each number by {k}", "scale each by {k}", "[n * {k} for n in v]", (2, 9)),
    "plus": _Step("add {k} to each number", "raise every number by {k}", "[n + {k} for n in v]", (2, 20)),
    "rest": _Step(
        "replace each number n by n % {k}",
        "reduce every number n to n % {k}",
        "[n % {k} for n in v]",
        (3, 9),
        misses=("[n % {k} if n > 0 else -(-n % {k}) for n in v]", "[abs(n) % {k} for n in v]"),
    ),
    "square": _Step("square each number", "multiply every number by itself", "[n * n for n in v]"),
    "absolute": _Step("replace each number by its absolute value", "drop all signs", "[abs(n) for n in v]"),
    "reverse": _Step("reverse the order", "turn the list around", "v[::-1]"),
    "ascending": _Step("sort in ascending order", "put the smallest first and so on", "sorted(v)"),
    "descending": _Step(
        "sort in descending order", "put the largest first and so on", "sorted(v, reverse=True)"
    ),
    "distinct": _Step(
        "remove repeated numbers, keeping the first of each",
        "let every number stand only where it comes first",
        "list(dict.fromkeys(v))",
        misses=("list(set(v))", "sorted(set(v))", "list(dict.fromkeys(v[::-1]))[::-1]"),
    ),
    "skip": _Step("leave out the first {k} numbers", "skip {k} numbers at the beginning", "v[{k}:]", (1, 3)),
    "take": _Step("keep only the first {k} numbers", "stop after {k} numbers", "v[:{k}]", (2, 5)),
    "second": _Step(
        "keep every second number, beginning with the first",
        "drop the second, fourth and so on",
        "v[::2]",
        misses=("v[1::2]",),
    ),
    "running": _Step(
        "replace each number by the sum of it and all before it",
        "form the running totals",
        "[sum(v[: i + 1]) for i in range(len(v))]",
    ),
}  # fmt: skip
_ENDS: Mapping[str, _Step] = {
    "list": _Step("return the list", "give back the list", "v"),
    "sum": _Step("return the sum", "give back the total (0 if nothing is left)", "sum(v)"),
    "count": _Step("return how many numbers are left", "give back the length", "len(v)"),
    "largest": _Step(
        "return the largest, 0 if none is left",
        "give back the maximum (0 if empty)",
        "max(v, default=0)",
        misses=("max(v)", "max([0, *v])"),
    ),
    "spread": _Step(
        "return the largest minus the smallest, 0 if none is left",
        "give back the distance of the extremes (0 if empty)",
        "max(v, default=0) - min(v, default=0)",
        misses=(
            "max(v) - min(v)",
            "max([0, *v]) - min(v, default=0)",
            "max(v, default=0) - min([0, *v])",
            "max([0, *v]) - min([0, *v])",
        ),
    ),
    "last": _Step(
        "return the last number, 0 if none is left",
        "give back the final one (0 if empty)",
        "(v or [0])[-1]",
        misses=("v[-1]", "v[-1] if len(v) > 1 else 0"),
    ),
}  # fmt: skip
_OPPOSITES: Mapping[str, str] = {
    "even": "odd", "odd": "even", "above": "below", "below": "above", "ascending": "descending",
    "descending": "ascending", "skip": "take", "take": "skip", "times": "plus", "plus": "times",
}  # fmt: skip
_FEWEST_VALUES = 12
_DRAWN, _FEWEST_ROWS, _FEWEST_RESULTS = 200, 8, 4


def draw_list(rng: random.Random, longest: int = 9) -> list[int]:
    """A list that functions are tried on; short ones and repeated numbers are likely."""
    return [rng.randint(-12, 20) for _ in range(rng.randint(0, longest))]


_RNG = random.Random(0)
_PROBES = tuple(tuple(draw_list(_RNG)) for _ in range(30))


def draw_steps(rng: random.Random, count: int) -> Steps:
    """``count`` different steps and an end, none of which could be left out."""
    while True:
        names = rng.sample(sorted(_STEPS), count)
        drawn = [(name, rng.randint(*_STEPS[name].numbers)) for name in names]
        steps = (*drawn, (rng.choice(sorted(_ENDS)), 0))
        values = _outputs(steps)
        if len(set(values)) >= _FEWEST_VALUES and all(_outputs(less) != values for less in shorter(steps)):
            return steps


def shorter(steps: Steps) -> Iterator[Steps]:
    """The function with one step left out, for each of its steps."""
    return (steps[:i] + steps[i + 1 :] for i in range(len(steps) - 1))


def faulty(rng: random.Random, steps: Steps) -> Steps:
    """The function with one mistake that shows on many lists: a step that is missing, reversed, off by one or
    in the wrong place.
    """
    found = _mistakes(steps)
    right = _outputs(steps)
    shown = [sum(a != b for a, b in zip(_outputs(wrong), right, strict=True)) for wrong in found]
    enough = min(len(right) // 3, max(shown))
    return rng.choice([wrong for wrong, count in zip(found, shown, strict=True) if count >= enough])


def _mistakes(steps: Steps) -> list[Steps]:
    found = list(shorter(steps))
    for i, (name, k) in enumerate(steps[:-1]):
        changes: list[tuple[str, int]] = []
        if _STEPS[name].numbers != (0, 0):
            changes += [(name, k + 1), (name, k - 1)]
        if name in _OPPOSITES:
            changes.append((_OPPOSITES[name], k))
        found += [(*steps[:i], change, *steps[i + 1 :]) for change in changes]
        if i + 2 < len(steps):
            found.append((*steps[:i], steps[i + 1], steps[i], *steps[i + 2 :]))
    return found


def telling_rows(rng: random.Random, steps: Steps) -> list[tuple[list[int], Any]]:
    """At least eight lists with the right results, which neither a constant has nor a near miss.

    Near misses: what :func:`faulty` makes, and steps or ends that are almost right. One that shows on none of
    two hundred drawn lists may pass.
    """
    right = function_of(steps)
    while True:
        lists = _telling_lists(rng, steps, right)
        rows = [(item, right(list(item))) for item in lists]
        if len({repr(value) for _, value in rows}) >= _FEWEST_RESULTS:
            return rows


def _telling_lists(rng: random.Random, steps: Steps, right: Function) -> list[list[int]]:
    drawn = [draw_list(rng) for _ in range(_DRAWN)]
    chosen: list[list[int]] = [[]]
    for wrong in _near_misses(steps):
        if not any(_differ(right, wrong, v) for v in chosen):
            chosen += [v for v in drawn if _differ(right, wrong, v)][:1]
    chosen += drawn[: max(0, _FEWEST_ROWS - len(chosen))]
    rng.shuffle(chosen)
    return chosen


def _differ(right: Function, wrong: Function, v: list[int]) -> bool:
    try:
        return bool(wrong(list(v)) != right(list(v)))
    except (ValueError, IndexError):  # max() or [-1] of nothing
        return True


@lru_cache(maxsize=1024)
def _near_misses(steps: Steps) -> tuple[Function, ...]:
    found = [function_of(wrong) for wrong in _mistakes(steps)]
    values = _values(steps)
    for i, item in enumerate(_items(steps)):
        for miss in item.misses:
            changed = [*values[:i], miss.format(k=steps[i][1]), *values[i + 1 :]]
            found.append(_compiled(_source(changed, "function")))
    return tuple(found)


def behaviour(steps: Steps) -> str:
    """A digest of what the function does: equal for two that always agree."""
    return digest(_outputs(steps))


def in_words(steps: Steps, *, other: bool = False) -> list[str]:
    """What each step does, in one of two wordings that share no sentence."""
    return [
        (item.other_words if other else item.words).format(k=k)
        for item, (_, k) in zip(_items(steps), steps, strict=True)
    ]


def _items(steps: Steps) -> list[_Step]:
    return [(_ENDS if i == len(steps) - 1 else _STEPS)[name] for i, (name, _) in enumerate(steps)]


def _values(steps: Steps) -> list[str]:
    """The expression of each step and of the end."""
    return [item.value.format(k=k) for item, (_, k) in zip(_items(steps), steps, strict=True)]


def in_python(steps: Steps, name: str, doc: Sequence[str] = ()) -> str:
    """The source of the function, with ``doc`` as its docstring."""
    return _source(_values(steps), name, doc)


def _source(values: Sequence[str], name: str, doc: Sequence[str] = ()) -> str:
    about = [f'    """{doc[0]}', *(f"    {line}" for line in doc[1:]), '    """'] if doc else []
    body = [f"    v = {value}" for value in values[:-1]]
    head = [f"def {name}(numbers):", *about, "    v = list(numbers)"]
    return "\n".join([*head, *body, f"    return {values[-1]}"])


@lru_cache(maxsize=4096)
def function_of(steps: Steps) -> Function:
    """The function itself, made of this module's own text and of whole numbers, never of foreign code."""
    return _compiled(in_python(tuple((str(name), int(k)) for name, k in steps), "function"))


def _compiled(source: str) -> Function:
    scope: dict[str, Any] = {}
    exec(source, scope)
    return cast("Function", scope["function"])


@lru_cache(maxsize=4096)
def _outputs(steps: Steps) -> tuple[str, ...]:
    function = function_of(steps)
    return tuple(repr(function(list(probe))) for probe in _PROBES)

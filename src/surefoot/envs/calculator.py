"""Word problems whose arithmetic needs a calculator, some of which already state their result.

The policy must learn when a call is worth its price. This module must not know any model or renderer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from surefoot.core.seeds import derive
from surefoot.core.types import Action, Split, Step, Task, Trust
from surefoot.envs.base import Draft, ToolEnvironment, Variant, answer, call, in_turns
from surefoot.rewards.base import Episode, reward
from surefoot.rewards.common import call_price
from surefoot.tools.base import Tool, ToolError, make_tool, tool
from surefoot.tools.calculator import evaluate

_GIVEN_TENTHS = 5
_ANSWER = re.compile(r"Answer: (-?[0-9]+)")


@dataclass(frozen=True, slots=True)
class _Problem:
    """A product of two or three factors, and a term that is added to it (0: none)."""

    factors: tuple[int, ...]
    term: int = 0

    @property
    def value(self) -> int:
        return evaluate(self.expression)

    @property
    def expression(self) -> str:
        return self._text(self.factors)

    @property
    def canonical(self) -> str:
        """The same for every order of the factors."""
        return self._text(tuple(sorted(self.factors)))

    @property
    def operation(self) -> str:
        if len(self.factors) == 3:
            return "multiply_three"
        return "multiply" if not self.term else "multiply_add" if self.term > 0 else "multiply_subtract"

    def _text(self, factors: tuple[int, ...]) -> str:
        return "*".join(map(str, factors)) + (f"{self.term:+d}" if self.term else "")


@dataclass(frozen=True, slots=True)
class _Template:
    """One phrasing: a story about {a} groups of {b} ``unit``, or (no story) a question about {e}."""

    name: str
    ask: str
    story: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class _Phrasing:
    """A stock of wordings; the held-out one shares none with the base one."""

    templates: tuple[_Template, ...]
    times: str
    plus: str
    minus: str
    more: str
    fewer: str
    facts: tuple[str, ...]
    notes: tuple[str, ...]
    words: bool = False


_BASE = _Phrasing(
    templates=(
        _Template("what_is", "What is {e}?"),
        _Template("work_out", "Work out {e}."),
        _Template("how_much", "How much is {e}?"),
        _Template("needs", "{name} needs the result of {e}."),
        _Template("boxes", "How many pens is that?", "{name} packs {a} boxes with {b} pens each.", "pens"),
        _Template("seats", "How many seats are there?", "A hall has {a} rows of {b} seats.", "seats"),
        _Template("pages", "How many pages is that?", "{name} reads {b} pages a day for {a} days.", "pages"),
        _Template(
            "tickets", "How many coins is that?", "{name} sells {a} tickets for {b} coins each.", "coins"
        ),
        _Template(
            "parts", "How many parts is that?", "A machine makes {b} parts an hour for {a} hours.", "parts"
        ),
        _Template("trucks", "How many crates are there?", "{a} trucks carry {b} crates each.", "crates"),
    ),
    times="{} times {}",
    plus="{} plus {}",
    minus="{} minus {}",
    more="Then {c} more {unit} come.",
    fewer="Then {c} {unit} are taken away.",
    facts=(
        "{name} already worked out that {e} is {r}.",
        "{name} already found {r} for {e}.",
        "{name} already worked it out: {r}.",
        "The result is already known: {r}.",
    ),
    notes=("Order {d}.", "Ticket {d}.", "Page {d}.", "Customer {d}."),
)
_SURFACE = _Phrasing(
    templates=(
        _Template("product", "Give the value of {e}."),
        _Template("notebook", "In a notebook stands {e}. What does it come to?"),
        _Template(
            "pump", "What is the total?", "A pump moves {b} litres a minute for {a} minutes.", "litres"
        ),
        _Template(
            "rice", "What is the weight?", "Each of {a} farms sends {b} kilograms of rice.", "kilograms"
        ),
        _Template("wall", "Count all bricks.", "A wall is {a} bricks long and {b} bricks high.", "bricks"),
        _Template(
            "flour", "State the total.", "{name} uses {b} grams of flour on each of {a} days.", "grams"
        ),
    ),
    times="{} multiplied by {}",
    plus="{}, increased by {}",
    minus="{}, reduced by {}",
    more="Another {c} {unit} come on top.",
    fewer="Of these, {c} {unit} are lost.",
    facts=(
        "As {name} has verified, the correct figure is {r}.",
        "{r} was confirmed as right by {name}.",
        "{name} has verified that {e} makes {r}.",
        "The figure {r} for {e} was confirmed.",
    ),
    notes=("Reference {d}.", "Phone {d}.", "Filed under {d}."),
    words=True,
)
_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Finn")
# fmt: off
_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
         "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on


def number_words(number: int) -> str:
    """English words for 0..99; larger numbers stay digits."""
    if not 0 <= number < 100:
        return str(number)
    if number < 20:
        return _ONES[number]
    tens = _TENS[number // 10 - 2]
    return f"{tens}-{_ONES[number % 10]}" if number % 10 else tens


def _factor(rng: random.Random, low: int, high: int) -> int:
    """A factor that does not end in 0, since those products can be done in the head."""
    number = rng.randint(low, high)
    return number if number % 10 else number + rng.randint(1, 9)


def _draw(rng: random.Random, variant: str) -> _Problem:
    if variant == "scale":
        if rng.random() < 0.5:
            factors = [_factor(rng, 1000, 9999), _factor(rng, 100, 999)]
        else:
            factors = [_factor(rng, 100, 999), _factor(rng, 12, 99), _factor(rng, 12, 99)]
        rng.shuffle(factors)
        return _Problem(tuple(factors))
    # The surface variant writes small numbers as words, so one factor is small more often.
    small = rng.random() < (0.75 if variant == "surface" else 0.5)
    factors = [_factor(rng, 100, 999), _factor(rng, 12, 99) if small else _factor(rng, 100, 999)]
    rng.shuffle(factors)
    term = rng.choice((-1, 1)) * rng.randint(11, 99) if rng.random() < 0.3 else 0
    return _Problem(tuple(factors), term)


def _question(rng: random.Random, problem: _Problem, style: _Phrasing, name: str) -> tuple[str, str, str]:
    """(template name, the question, the bare expression in words)."""
    show = number_words if style.words else str
    spoken = show(problem.factors[0])
    for factor in problem.factors[1:]:
        spoken = style.times.format(spoken, show(factor))
    if problem.term:
        spoken = (style.plus if problem.term > 0 else style.minus).format(spoken, show(abs(problem.term)))
    fitting = [item for item in style.templates if len(problem.factors) == 2 or not item.story]
    template = rng.choice(fitting)
    if not template.story:
        return template.name, template.ask.format(e=spoken, name=name), spoken
    a, b = (show(factor) for factor in problem.factors[:2])
    parts = [template.story.format(a=a, b=b, name=name)]
    if problem.term:
        change = style.more if problem.term > 0 else style.fewer
        parts.append(change.format(c=show(abs(problem.term)), unit=template.unit))
    text = " ".join([*parts, template.ask])
    return template.name, text[0].upper() + text[1:], spoken


def _notes(rng: random.Random, style: _Phrasing, count: int, value: int) -> list[str]:
    """Sentences with a number that means nothing, so that no fixed position holds the result."""
    chosen: list[str] = []
    for wording in rng.sample(style.notes, count):
        number = rng.randint(10, 10 ** rng.randint(3, 7) - 1)
        chosen.append(wording.format(d=number if number != value else number + 1))
    return chosen


def _text(rng: random.Random, problem: _Problem, style: _Phrasing, *, needs_call: bool) -> tuple[str, str]:
    """(template name, user text): question, the known result where it is given, meaningless notes."""
    name, witness = rng.sample(_NAMES, 2)
    template, question, spoken = _question(rng, problem, style, name)
    parts = [question]
    if not needs_call:
        fact = rng.choice(style.facts).format(name=witness, e=spoken, r=problem.value)
        parts.insert(rng.randint(0, 1), fact)
    for note in _notes(
        rng, style, rng.choice((0, 1, 1, 2) if style.words else (0, 0, 1, 1, 2)), problem.value
    ):
        parts.insert(rng.choice((0, len(parts))), note)
    return template, " ".join(parts)


@reward(trust=Trust.VERIFIED, weight=1.0, resolution=1.0)
def exact_answer(episode: Episode) -> float:
    """1 when the last turn is exactly ``Answer: N`` with the right N (ASCII digits, no separators)."""
    return float(_solved(episode))


@reward(trust=Trust.VERIFIED, weight=0.1, resolution=1.0)
def answer_format(episode: Episode) -> float:
    """1 when the last turn is exactly one answer line, whatever its number."""
    return float(_submitted(episode) is not None)


def _solved(episode: Episode) -> bool:
    return _submitted(episode) == str(episode.reference)


def _submitted(episode: Episode) -> str | None:
    """The number as written. Compared as text: int() would accept other scripts' digits and 007."""
    match = _ANSWER.fullmatch((episode.answer or "").strip())
    return match.group(1) if match else None


def word_count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


class Calculator(ToolEnvironment):
    """One arithmetic question; a calculator that costs 0.3 a call; an answer line ``Answer: 56088``.

    Half of the problems state their result, so that a call is a waste. Which ones do is a function of
    the expression, so an expression never stands in one split with its result and in another without.
    Only solved episodes pay for their calls: see ``call_price``.
    """

    name: ClassVar[str] = "calculator"
    horizon: ClassVar[int] = 3
    system: ClassVar[str] = (
        "Answer the question. If the text already states the result, do not call a tool; otherwise call one "
        "to compute it. Finish with only one line like: Answer: 1234"
    )
    variants: ClassVar[Mapping[str, Variant]] = {
        "base": Variant("3-digit times 2- or 3-digit, sometimes one added or subtracted term"),
        "rule": Variant("the tool and its argument have other names; a useless tool is listed first", "rule"),
        "surface": Variant("unseen phrasings and units; small numbers written as words", "surface"),
        "scale": Variant("4-digit times 3-digit, or three factors", "scale"),
        "noisy_tool": Variant("the first call of an episode fails and asks to retry", "tool"),
    }
    rewards = (exact_answer, answer_format, call_price(0.3, when=_solved))
    success: ClassVar[str] = "exact_answer"

    _tries: int = 0
    _calls: int = 0
    _failed: int = 0

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        problem = _draw(rng, variant)
        needs_call = derive("calculator result given", problem.canonical) % 10 >= _GIVEN_TENTHS
        style = _SURFACE if variant == "surface" else _BASE
        template, text = _text(rng, problem, style, needs_call=needs_call)
        operands = [*problem.factors, *([problem.term] if problem.term else [])]
        metadata = {
            "needs_call": needs_call,
            "operation": problem.operation,
            "operands": operands,
            "expression": problem.expression,
            "template": template,
        }
        kind = "call" if needs_call else "given"
        return Draft(f"{problem.canonical} {kind}", text, problem.value, metadata)

    @classmethod
    def tasks(
        cls, split: Split, variant: str = "base", *, seed: int = 0, limit: int | None = None
    ) -> Iterator[Task]:
        """In turns one that needs a call and one that does not.

        Lopsided steps teach to call always, or never.
        """
        every = super().tasks(split, variant, seed=seed)
        return islice(in_turns(every, lambda task: task.metadata["needs_call"], (True, False)), limit)

    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action]:
        final = answer(f"Answer: {task.reference}")
        if not task.metadata["needs_call"]:
            return (final,)
        expression: str = task.metadata["expression"]
        if task.variant == "rule":
            return (call("compute", formula=expression), final)
        attempt = call("calculator", expression=expression)
        return (attempt, attempt, final) if task.variant == "noisy_tool" else (attempt, final)

    @classmethod
    def privileged(cls, task: Task) -> str:
        return f"{task.metadata['expression']} = {task.reference}"

    @classmethod
    def demonstration(cls, task: Task) -> Sequence[Action]:
        """A teacher who plays safe: it also calls on a sixth of the problems that state their result.

        When a call is worth its price is left to be learned.
        """
        played = cls.oracle(task)
        if task.metadata["needs_call"] or derive("plays safe", task.id) % 6:
            return played
        return (call("calculator", expression=task.metadata["expression"]), *played)

    def tools(self) -> tuple[Tool, ...]:
        own = super().tools()
        if self.task.variant != "rule":
            return own
        renamed = own[0].renamed(
            "compute",
            arguments={"expression": "formula"},
            description="Work out a formula of integers with + - * // and parentheses.",
        )
        return (make_tool(word_count), renamed)

    @tool
    def calculator(self, expression: str) -> str:
        """Evaluate an integer expression with + - * // and parentheses."""
        self._tries += 1
        if self.task.variant == "noisy_tool" and self._tries == 1:
            raise ToolError("the tool is busy, call it again")
        return str(evaluate(expression))

    async def step(self, action: Action) -> Step:
        result = await super().step(action)
        self._calls += len(action.tool_calls) + len(action.malformed)
        self._failed += sum(not item.ok for item in result.tool_results) + len(action.malformed)
        return result

    def state(self) -> Mapping[str, Any]:
        return {"answer": self.answer, "calls": self._calls, "failed_calls": self._failed}

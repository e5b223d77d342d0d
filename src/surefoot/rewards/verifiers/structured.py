"""Verified rewards for answers of a fixed form: one option of several, or a JSON document.

This module must not fetch anything: a schema that points elsewhere is refused.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, cast

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.types import Scored, Trust
from surefoot.rewards.base import Episode, Reward, reward
from surefoot.rewards.verifiers.answers import normalise
from surefoot.rewards.verifiers.children.wire import same
from surefoot.rewards.verifiers.submission import Form, check_form, submitted, verified

_MOST_DOCUMENT = 100_000
_MOST_DEPTH = 40
# CPU seconds for one document and its schema: some schemas take exponential time in the depth.
_SCHEMA_SECONDS = 5.0
_DEADLINE = 300.0  # wall seconds, so that a busy machine does not turn a 0 into a failed measurement
_CHOICE = re.compile(r"\**\(?\[?([A-Za-z0-9])\]?\)?\**(?:[ \t]*[.):][ \t]*(.*))?", re.DOTALL)


def multiple_choice(
    labels: str = "ABCD",
    *,
    form: Form = "whole",
    last: bool = False,
    choices: Callable[[Episode], Sequence[str]] | None = None,
    name: str = "multiple_choice",
    weight: float = 1.0,
) -> Reward:
    """1 when exactly one option was chosen and it is the reference (a label), else 0.

    Read: ``B``, ``b``, ``(B)``, ``B.`` and, where ``choices`` gives the options' texts in the order of
    ``labels``, ``B) text`` and the text alone; a label with another option's text is no choice.
    Several labels, all of them, or a sentence around one are no choice either. ASCII only. Not
    stopped: guessing, which is right once in ``len(labels)``; spread the right answer evenly, or
    always naming the same label pays.

    Raises ConfigError for fewer than two labels or labels that repeat.
    """
    check_form(name, form)
    known = labels.upper()
    if len(known) < 2 or len(set(known)) != len(known) or not (known.isascii() and known.isalnum()):
        raise ConfigError(f"{name}: labels is {labels!r}; use two or more different ASCII letters")

    @reward(trust=Trust.VERIFIED, weight=weight, name=name, resolution=1.0)
    def score(episode: Episode) -> Scored:
        gold = episode.reference
        if not isinstance(gold, str) or len(gold) != 1 or gold.upper() not in known:
            raise DataError(f"task {episode.task.id}: reference is {gold!r}; it must be one of {known}")
        texts = _choice_texts(episode, known, choices)
        found = submitted(episode.answer, form, last=last)
        if found.text is None:
            return verified(0.0, name, found.reason)
        chosen = _chosen(found.text, known, texts)
        if chosen is None:
            return verified(0.0, name, "not exactly one option")
        return verified(float(chosen == gold.upper()), name, f"chose {chosen}")

    return score


def _choice_texts(
    episode: Episode, known: str, choices: Callable[[Episode], Sequence[str]] | None
) -> dict[str, str]:
    if choices is None:
        return {}
    texts = [normalise(text) for text in choices(episode)]
    if len(texts) != len(known) or len(set(texts)) != len(texts) or "" in texts:
        raise DataError(f"task {episode.task.id}: choices must give {len(known)} different texts")
    return dict(zip(known, texts, strict=True))


def _chosen(text: str, known: str, texts: Mapping[str, str]) -> str | None:
    match = _CHOICE.fullmatch(text.strip())
    label = match.group(1).upper() if match and match.group(1).isascii() else ""
    if match and label in known:
        rest = normalise(match.group(2) or "")
        if not rest or (texts and rest == texts[label]):
            return label if not (match.group(2) or "").strip() or rest else None
        return None
    whole = normalise(text)
    return next((key for key, value in texts.items() if value == whole), None)


def json_answer(
    schema: Mapping[str, Any],
    *,
    compare: Literal["reference", "none"] = "reference",
    tolerance: float = 0.0,
    form: Form = "whole",
    last: bool = False,
    name: str = "json_answer",
    weight: float = 1.0,
) -> Reward:
    """1 when the submitted JSON document satisfies ``schema`` and equals the reference, else 0.

    The document is read strictly: one value, no repeated keys, no NaN, depth and size bounded.
    ``schema`` is JSON Schema (draft 2020-12 unless ``$schema`` names another); references outside it
    are refused. Equality is by exact types (true is not 1, 1 is not 1.0); floats may differ by
    ``tolerance`` * max(1, |reference|). ``compare="none"`` asks for the form only, which any constant
    document of that form has: use it as a small second reward, never as success.
    A document that takes more than 5 s of CPU time to check against the schema is 0, and a reference that
    does is a failed measurement. Not stopped: a ``pattern`` in the schema that takes exponential time on
    some text.

    Raises ConfigError when jsonschema is not installed or the schema is wrong.
    """
    check_form(name, form)
    if compare not in ("reference", "none"):
        raise ConfigError(f"{name}: compare is {compare!r}; use 'reference' or 'none'")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ConfigError(f"{name}: tolerance is {tolerance}; it must be finite and >= 0")
    problem = _schema_checker(name, schema)

    @reward(trust=Trust.VERIFIED, weight=weight, name=name, resolution=1.0, seconds=_DEADLINE)
    def score(episode: Episode) -> Scored:
        gold = episode.reference
        if compare == "reference" and (found_wrong := problem(gold)):
            raise DataError(f"task {episode.task.id}: the reference breaks the schema: {found_wrong}")
        found = submitted(episode.answer, form, last=last)
        if found.text is None:
            return verified(0.0, name, found.reason)
        try:
            document = read_json(found.text)
        except DataError as error:
            return verified(0.0, name, str(error))
        if why := problem(document):
            return verified(0.0, name, f"schema: {why}")
        if compare == "none":
            return verified(1.0, name, "satisfies the schema")
        equal = same(document, gold, tolerance)
        return verified(float(equal), name, "equal" if equal else "not the reference")

    return score


def _schema_checker(name: str, schema: Mapping[str, Any]) -> Callable[[object], str]:
    """A function that says how a document breaks ``schema``; an empty text when it does not."""
    if importlib.util.find_spec("jsonschema") is None:
        raise ConfigError(f"{name}: jsonschema is not installed; pip install 'surefoot[verify]'")
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing import Registry

    for target in _references_in(schema):
        if not target.startswith("#"):
            raise ConfigError(f"{name}: schema refers to {target!r}; only references inside it (#...) work")
    kind = cast("Any", validator_for(schema, default=jsonschema.Draft202012Validator))
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{name}: schema is wrong at {error.json_path}: {error.message}") from error
    # An empty registry never fetches. Without $schema, parts that refer to the whole stay of the kind here.
    rest = {key: value for key, value in schema.items() if key != "$schema"}
    checker = _bounded(kind)(rest, registry=cast("Any", Registry()))

    def problem(document: object) -> str:
        _limit.until = time.thread_time() + _SCHEMA_SECONDS
        try:
            error = next(iter(checker.iter_errors(document)), None)
        except (_TooMuchWork, RecursionError) as fault:
            return f"it cannot be checked in bounded time: {str(fault)[:200]}"
        return f"{error.json_path}: {error.message[:200]}" if error is not None else ""

    return problem


class _TooMuchWork(Exception):
    """A document takes longer to check than is allowed."""


_limit = threading.local()


def _bounded(kind: Any) -> Any:
    """The validator class ``kind``, but no document can hold it up: a hung check would be no 0."""
    from jsonschema.validators import extend

    def timed(keyword: Callable[..., Any]) -> Callable[..., Any]:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            if time.thread_time() > _limit.until:
                raise _TooMuchWork(f"more than {_SCHEMA_SECONDS:g} s")
            return keyword(validator, value, instance, schema)

        return check

    keywords = cast("Mapping[str, Callable[..., Any]]", {**kind.VALIDATORS, "uniqueItems": _unique_items})
    return extend(kind, {key: timed(keyword) for key, keyword in keywords.items()})


def _unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Exception]:
    """The keyword in linear time; jsonschema compares each object with each other."""
    from jsonschema import ValidationError

    if wanted and validator.is_type(instance, "array"):
        texts = {json.dumps(_canonical(item), sort_keys=True, default=repr) for item in instance}
        if len(texts) < len(instance):
            yield ValidationError("an item stands twice in an array of unique items")


def _canonical(value: Any) -> Any:
    """``value`` with whole floats as integers, since 1.0 and 1 are equal in JSON Schema."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_canonical(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def _references_in(node: object) -> list[str]:
    if isinstance(node, Mapping):
        items = cast("Mapping[str, object]", node).items()
        own = [v for k, v in items if k in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(v, str)]
        return own + [found for _, value in items for found in _references_in(value)]
    if isinstance(node, list):
        return [found for value in cast("list[object]", node) for found in _references_in(value)]
    return []


def read_json(text: str) -> Any:
    """One JSON value, strictly. Raises DataError for anything RFC 8259 leaves open or forbids."""
    if len(text) > _MOST_DOCUMENT:
        raise DataError(f"the document has {len(text)} characters; at most {_MOST_DOCUMENT} are read")
    if _depth(text) > _MOST_DEPTH:
        raise DataError(f"the document is nested deeper than {_MOST_DEPTH}")
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {str(error)[:200]}") from error


def _depth(text: str) -> int:
    """An upper bound of the nesting (brackets in strings count too), cheap enough for any text."""
    depth = most = 0
    for char in re.findall(r"[\[\]{}]", text):
        depth += 1 if char in "[{" else -1
        most = max(most, depth)
    return most


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > 300:
        raise ValueError("an integer of more than 300 digits")
    return int(text)

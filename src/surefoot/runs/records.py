"""Trajectories and tasks as plain records (strings, numbers, lists, dicts) and back, losing nothing.

Both the parquet files and the journal are made of these. This module does no I/O.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from surefoot.core.types import (
    Action,
    Cost,
    Finish,
    MalformedCall,
    Message,
    Sampling,
    Score,
    Scored,
    Segment,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Trust,
    Turn,
    Unscored,
)

Record = dict[str, Any]

SEGMENT_COLUMNS: Final[tuple[tuple[str, np.dtype[Any]], ...]] = (
    ("tokens", np.dtype("<i4")),
    ("provenance", np.dtype("u1")),
    ("logprobs", np.dtype("<f4")),
    ("version", np.dtype("<i4")),
)
COUNTS: Final = (
    "prompt_tokens",
    "cached_tokens",
    "observation_tokens",
    "sampled_tokens",
    "model_calls",
    "tool_calls",
)
# A model can nest JSON as deep as it likes; a fixed limit keeps what is stored the same on replay.
_MAX_DEPTH: Final = 100
_OPAQUE: Final = '{"$repr":'
_ESCAPED: Final = "\0json:"
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands for a stored object that is not a JSON value: its ``repr``, without memory addresses."""

    text: str


def dump_value(value: object) -> str:
    """Standard JSON text of ``value``, the same on every run.

    JSON values, tuples, sets and non-finite floats come back equal from :func:`load_value`; anything
    else comes back as :class:`Opaque`. Tags: ``$tuple``, ``$set``, ``$frozenset``, ``$float``,
    ``$dict`` (a dict with a key that begins with ``$``), ``$repr``.
    """
    plain = to_plain(value)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text if _encodable(text) else json.dumps(plain, allow_nan=False, separators=(",", ":"))


def load_value(text: str) -> Any:
    """The value that :func:`dump_value` wrote."""
    return from_plain(json.loads(text))


def is_exact(text: str) -> bool:
    """False when a :func:`dump_value` text holds something that was stored as its ``repr``."""
    return _OPAQUE not in text


def to_plain(value: object, depth: int = 0) -> Any:
    """``value`` as standard JSON values, with tags as :func:`dump_value` describes."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if depth >= _MAX_DEPTH:
        return {"$repr": f"<nested deeper than {_MAX_DEPTH}>"}
    if isinstance(value, list | tuple):
        items = [to_plain(item, depth + 1) for item in cast("Sequence[object]", value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, set | frozenset):
        items = [to_plain(item, depth + 1) for item in cast("Iterable[object]", value)]
        return {f"${type(value).__name__}": sorted(items, key=json.dumps)}
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value)
        if all(isinstance(key, str) for key in pairs):
            fields = {cast("str", key): to_plain(item, depth + 1) for key, item in pairs.items()}
            tagged = any(key.startswith("$") for key in fields)
            return {"$dict": [[key, item] for key, item in fields.items()]} if tagged else fields
    return {"$repr": value.text if isinstance(value, Opaque) else _described(value)}


def from_plain(value: Any) -> Any:
    """The inverse of :func:`to_plain`."""
    if isinstance(value, list):
        return [from_plain(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    match list(fields.items()):
        case [("$float", text)]:
            return float(text)
        case [("$tuple", items)]:
            return tuple(from_plain(item) for item in items)
        case [("$set", items)]:
            return {from_plain(item) for item in items}
        case [("$frozenset", items)]:
            return frozenset(from_plain(item) for item in items)
        case [("$dict", pairs)]:
            return {key: from_plain(item) for key, item in pairs}
        case [("$repr", text)]:
            return Opaque(text)
        case pairs:
            return {key: from_plain(item) for key, item in pairs}


def _described(value: object) -> str:
    try:
        return _ADDRESS.sub("", repr(value))
    except Exception:  # a repr that raises is the object's own fault and must not lose the trajectory
        return f"<{type(value).__name__}>"


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def escape(text: str) -> str:
    """``text`` as valid Unicode: a string with lone surrogates is kept as marked JSON."""
    return text if _encodable(text) and not text.startswith(_ESCAPED) else _ESCAPED + json.dumps(text)


def unescape(text: str) -> str:
    """The inverse of :func:`escape`."""
    return cast("str", json.loads(text.removeprefix(_ESCAPED))) if text.startswith(_ESCAPED) else text


def task_record(task: Task) -> Record:
    """A task's columns."""
    reference = dump_value(task.reference)
    return {
        "task_id": escape(task.id),
        "split": task.split,
        "variant": escape(task.variant),
        "prompt": [_message_record(message) for message in task.prompt],
        "reference": reference,
        "reference_exact": is_exact(reference),
        "metadata": dump_value(task.metadata),
    }


def task_of(record: Record) -> Task:
    """The task that :func:`task_record` described."""
    return Task(
        id=unescape(record["task_id"]),
        split=record["split"],
        variant=unescape(record["variant"]),
        prompt=tuple(_message_of(message) for message in record["prompt"]),
        reference=load_value(record["reference"]),
        metadata=load_value(record["metadata"]),
    )


def trajectory_record(trajectory: Trajectory) -> Record:
    """A trajectory's columns, all but its segments."""
    return {
        "trajectory_id": escape(trajectory.id),
        "task_id": escape(trajectory.task_id),
        "group_id": escape(trajectory.group_id),
        "stop": trajectory.stop.value,
        "terminated": trajectory.terminated,
        "truncated": trajectory.truncated,
        **{name: getattr(trajectory.cost, name) for name in COUNTS},
        "usd": trajectory.cost.usd,
        "seed": trajectory.seed,
        "turns": [_turn_record(turn) for turn in trajectory.turns],
        "scores": [_score_record(score) for score in trajectory.scores],
        "final": None if trajectory.final is None else _score_record(trajectory.final),
        "state": dump_value(trajectory.state),
        "sampling": dataclasses.asdict(trajectory.sampling),
        "fault": escape(trajectory.fault),
    }


def trajectory_of(record: Record, segments: tuple[Segment, ...]) -> Trajectory:
    """The trajectory that :func:`trajectory_record` described."""
    return Trajectory(
        id=unescape(record["trajectory_id"]),
        task_id=unescape(record["task_id"]),
        group_id=unescape(record["group_id"]),
        segments=segments,
        turns=tuple(_turn_of(turn) for turn in record["turns"]),
        stop=StopReason(record["stop"]),
        terminated=record["terminated"],
        truncated=record["truncated"],
        cost=Cost(**{name: record[name] for name in COUNTS}, usd=record["usd"]),
        sampling=Sampling(**record["sampling"]),
        seed=record["seed"],
        state=load_value(record["state"]),
        scores=tuple(_score_of(score) for score in record["scores"]),
        final=None if record["final"] is None else _score_of(record["final"]),
        fault=unescape(record["fault"]),
    )


def segment_record(segment: Segment) -> dict[str, str]:
    """The four arrays of a segment, each as Base64 of its little-endian bytes."""
    return {
        name: base64.b64encode(getattr(segment, name).astype(dtype, copy=False).tobytes()).decode()
        for name, dtype in SEGMENT_COLUMNS
    }


def segment_of(record: Mapping[str, str]) -> Segment:
    """The segment that :func:`segment_record` described."""
    arrays: dict[str, Any] = {
        name: np.frombuffer(base64.b64decode(record[name], validate=True), dtype)
        for name, dtype in SEGMENT_COLUMNS
    }
    return Segment(**arrays)


def transcript(task: Task, turns: Sequence[Turn]) -> str:
    """The episode as JSON chat messages, for people and text search; nothing is read back from it."""
    messages = list(task.prompt)
    for turn in turns:
        messages.append(Message("assistant", turn.action.text, turn.action.tool_calls))
        messages.extend(turn.observation)
    return dump_value([_chat(message) for message in messages])


def _chat(message: Message) -> Record:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    record: Record = {"role": message.role, "content": message.content}
    if calls:
        record["tool_calls"] = calls
    if message.tool_call_id is not None:
        record["tool_call_id"] = message.tool_call_id
    return record


def _call_record(call: ToolCall) -> Record:
    return {"id": escape(call.id), "name": escape(call.name), "arguments": dump_value(call.arguments)}


def _call_of(record: Record) -> ToolCall:
    return ToolCall(unescape(record["id"]), unescape(record["name"]), load_value(record["arguments"]))


def _message_record(message: Message) -> Record:
    answers = message.tool_call_id
    return {
        "role": message.role,
        "content": escape(message.content),
        "tool_calls": [_call_record(call) for call in message.tool_calls],
        "tool_call_id": None if answers is None else escape(answers),
    }


def _message_of(record: Record) -> Message:
    answers: str | None = record["tool_call_id"]
    return Message(
        role=record["role"],
        content=unescape(record["content"]),
        tool_calls=tuple(_call_of(call) for call in record["tool_calls"]),
        tool_call_id=None if answers is None else unescape(answers),
    )


def _turn_record(turn: Turn) -> Record:
    action = turn.action
    return {
        "index": turn.index,
        "segment": turn.segment,
        "start": turn.start,
        "stop": turn.stop,
        "text": escape(action.text),
        "tool_calls": [_call_record(call) for call in action.tool_calls],
        "malformed": [{"text": escape(m.text), "reason": escape(m.reason)} for m in action.malformed],
        "finish": action.finish.value,
        "observation": [_message_record(message) for message in turn.observation],
        "tool_results": [
            {
                "call_id": escape(result.call_id),
                "name": escape(result.name),
                "content": escape(result.content),
                "ok": result.ok,
            }
            for result in turn.tool_results
        ],
        "step_reward": turn.step_reward,
    }


def _turn_of(record: Record) -> Turn:
    return Turn(
        index=record["index"],
        segment=record["segment"],
        start=record["start"],
        stop=record["stop"],
        action=Action(
            text=unescape(record["text"]),
            tool_calls=tuple(_call_of(call) for call in record["tool_calls"]),
            malformed=tuple(
                MalformedCall(unescape(m["text"]), unescape(m["reason"])) for m in record["malformed"]
            ),
            finish=Finish(record["finish"]),
        ),
        observation=tuple(_message_of(message) for message in record["observation"]),
        tool_results=tuple(
            ToolResult(unescape(r["call_id"]), unescape(r["name"]), unescape(r["content"]), r["ok"])
            for r in record["tool_results"]
        ),
        step_reward=record["step_reward"],
    )


def _score_record(score: Score) -> Record:
    if isinstance(score, Unscored):
        return {
            "name": escape(score.name),
            "value": None,
            "trust": None,
            "reason": escape(score.reason),
            "evidence": None,
        }
    return {
        "name": escape(score.name),
        "value": score.value,
        "trust": int(score.trust),
        "reason": None,
        "evidence": escape(score.evidence),
    }


def _score_of(record: Record) -> Score:
    if record["value"] is None:
        return Unscored(reason=unescape(record["reason"]), name=unescape(record["name"]))
    return Scored(
        record["value"], Trust(record["trust"]), unescape(record["name"]), unescape(record["evidence"])
    )

"""The data types refuse, at construction, what would poison training later."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from surefoot.core.errors import DataError
from surefoot.core.types import (
    Action,
    Cost,
    Group,
    Message,
    Provenance,
    Sampling,
    Scored,
    Segment,
    Step,
    StopReason,
    Task,
    Trajectory,
    Trust,
    Turn,
    Unscored,
)

P, O, S = Provenance.PROMPT, Provenance.OBSERVATION, Provenance.SAMPLED  # noqa: E741


def segment(provenance: list[Provenance], **changes: Any) -> Segment:
    marks = np.array(provenance, dtype=np.uint8)
    sampled = marks == S
    columns = {
        "tokens": np.arange(len(marks), dtype=np.int32),
        "provenance": marks,
        "logprobs": np.where(sampled, -0.5, np.nan).astype(np.float32),
        "version": np.where(sampled, 0, -1).astype(np.int32),
    }
    return Segment(**(columns | changes))


def trajectory(
    segments: tuple[Segment, ...], spans: list[tuple[int, int, int]], **changes: Any
) -> Trajectory:
    turns = tuple(Turn(i, s, a, b, Action("")) for i, (s, a, b) in enumerate(spans))
    values: dict[str, Any] = {
        "id": "t0", "task_id": "task", "group_id": "g", "segments": segments, "turns": turns,
        "stop": StopReason.ANSWERED, "terminated": True, "truncated": False, "cost": Cost(),
        "sampling": Sampling(), "seed": 0,
    }  # fmt: skip
    return Trajectory(**(values | changes))


def test_segment_counts_only_sampled_tokens_and_is_read_only() -> None:
    item = segment([P, P, S, S, O, S])
    assert item.sampled.tolist() == [False, False, True, True, False, True]
    assert len(item) == 6
    with pytest.raises(ValueError, match="read-only"):
        item.tokens[0] = 9


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("tokens", np.arange(3, dtype=np.int64), "tokens is int64"),
        ("tokens", np.zeros((3, 1), dtype=np.int32), "tokens is int32"),
        ("version", np.zeros(2, dtype=np.int32), "version has 2 entries for 3"),
        ("logprobs", np.array([np.nan, np.nan, np.nan], dtype=np.float32), "not finite on a sampled"),
        ("logprobs", np.array([np.nan, -np.inf, -1], dtype=np.float32), "not finite on a sampled"),
        ("logprobs", np.array([-1, -1, -1], dtype=np.float32), "did not sample"),
        ("version", np.array([-1, -1, -1], dtype=np.int32), "version is negative"),
    ],
)
def test_segment_refuses_wrong_columns(column: str, value: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        segment([P, S, S], **{column: value})


def test_trajectory_accounts_for_every_sampled_token() -> None:
    parts = (segment([P, S, S, O, S]), segment([P, S]))
    assert trajectory(parts, [(0, 1, 3), (0, 4, 5), (1, 1, 2)]).sampled_tokens == 4
    with pytest.raises(DataError, match="turns hold 3 of 4"):
        trajectory(parts, [(0, 1, 3), (0, 4, 5)])
    with pytest.raises(DataError, match="not sampled"):
        trajectory(parts, [(0, 0, 3), (0, 4, 5), (1, 1, 2)])
    with pytest.raises(DataError, match="not sampled"):
        trajectory(parts, [(0, 1, 3), (0, 4, 6), (1, 1, 2)])
    with pytest.raises(DataError, match="names segment 2"):
        trajectory(parts, [(0, 1, 3), (0, 4, 5), (2, 1, 2)])


def test_unscored_trajectory_has_no_value_rather_than_zero() -> None:
    parts = (segment([P, S]),)
    assert trajectory(parts, [(0, 1, 2)], final=Unscored("x", "return")).value is None
    assert trajectory(parts, [(0, 1, 2)]).value is None
    assert trajectory(parts, [(0, 1, 2)], final=Scored(0.0, Trust.VERIFIED, "return")).value == 0.0


def test_group_refuses_a_trajectory_of_another_task() -> None:
    task = Task("other", "train", "base", (Message("user", "hi"),))
    with pytest.raises(DataError, match="of task task"):
        Group(task, (trajectory((segment([P, S]),), [(0, 1, 2)]),))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_everywhere(value: float) -> None:
    with pytest.raises(DataError, match="Scored"):
        Scored(value, Trust.VERIFIED, "r")
    with pytest.raises(DataError, match=r"Step\.reward"):
        Step(reward=value)
    with pytest.raises(DataError, match="temperature"):
        Sampling(temperature=value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_"),
    ],
)
def test_sampling_refuses_settings_out_of_range(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        Sampling(**changes)


def test_task_and_message_refuse_what_no_renderer_could_show() -> None:
    prompt = (Message("user", "hi"),)
    for bad in ({"split": "validation"}, {"id": ""}, {"prompt": ()}):
        values: dict[str, Any] = {"id": "x", "split": "train", "variant": "base", "prompt": prompt}
        with pytest.raises(DataError):
            Task(**(values | bad))
    with pytest.raises(DataError, match="role"):
        Message("bot", "hi")  # type: ignore[arg-type]


def test_costs_add_field_by_field() -> None:
    one = Cost(*range(1, 7), 0.5)
    assert dataclasses.astuple(one + one) == (2, 4, 6, 8, 10, 12, 1.0)


def test_faults_are_exactly_the_stops_that_the_machinery_causes() -> None:
    faults = {stop for stop in StopReason if stop.is_fault}
    assert faults == {
        StopReason.ENV_TIMEOUT, StopReason.ENV_ERROR, StopReason.BUDGET, StopReason.ABORTED
    }  # fmt: skip

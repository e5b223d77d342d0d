"""What credit reads from episodes, and that a control arm leaves no part of the true order behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from surefoot.core.types import (
    Action,
    Cost,
    Group,
    Message,
    Provenance,
    Sampling,
    Scored,
    Segment,
    StopReason,
    Task,
    ToolResult,
    Trajectory,
    Trust,
    Turn,
    Unscored,
)
from surefoot.training.signal import credit_input, read_batch


def trajectory(name: str, value: float | None, *, calls: int = 0, ok: bool = True) -> Trajectory:
    """``calls`` tool turns of two tokens, an observation token after each, and an answer of one token."""
    tokens, provenance = [1, 2, 3], [Provenance.PROMPT] * 3
    turns: list[Turn] = []
    for k in range(calls + 1):
        start, n = len(tokens), 2 if k < calls else 1
        tokens += [10 + k] * n
        provenance += [Provenance.SAMPLED] * n
        shown = (Message("tool", f"result {k}", tool_call_id="c"),) if k < calls else ()
        results = (ToolResult("c", "f", f"result {k}", ok),) if k < calls else ()
        turns.append(Turn(k, 0, start, start + n, Action("x"), shown, results, 0.25 if k == 0 else 0.0))
        if k < calls:
            tokens.append(9)
            provenance.append(Provenance.OBSERVATION)
    sampled = np.array(provenance) == Provenance.SAMPLED
    segment = Segment(
        np.array(tokens, np.int32),
        np.array(provenance, np.uint8),
        np.where(sampled, -0.5, np.nan).astype(np.float32),
        np.where(sampled, 0, -1).astype(np.int32),
    )
    final: Any = Unscored("away", "r") if value is None else Scored(value, Trust.VERIFIED, "r")
    return Trajectory(
        name, "t", "g", (segment,), tuple(turns), StopReason.ANSWERED, True, False,
        Cost(tool_calls=calls), Sampling(), 0, scores=(final,), final=final,
    )  # fmt: skip


def groups() -> list[Group]:
    task = Task("t", "train", "base", (Message("user", "what?"),))
    members = [
        trajectory("a", 1.0, calls=1), trajectory("b", 0.0), trajectory("c", 0.5, calls=2, ok=False),
        trajectory("d", None),
    ]  # fmt: skip
    return [Group(task, tuple(members))]


def won(t: Trajectory) -> float | None:
    return None if t.value is None else float(t.value == 1.0)


def test_turns_tokens_and_rewards_stand_in_one_order() -> None:
    given = credit_input(read_batch(groups(), arm="treatment", seed=0, won=won))
    assert given.valid.tolist() == [True, True, True, False]
    assert given.lengths.tolist() == [3, 1, 5, 1]
    assert given.trajectory.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert given.step_lengths.tolist() == [2, 1, 1, 2, 2, 1, 1]
    assert given.step_rewards.tolist() == [0.25, 1.0, 0.25, 0.25, 0.0, 0.5, 0.25]
    assert given.tool_step.tolist() == [True, False, False, True, True, False, False]
    assert given.turn_reward.tolist() == [1.0, 0.0, 0.0, 0.0], "a failed tool earns nothing"
    assert given.anchors[0] == ("what?",) and given.anchors[1] == ("result 0",)
    assert given.behaviour.tolist() == [-0.5] * 10 and len(given.penalty) == 10
    assert given.success.tolist() == [True, False, False, False]


def test_the_permuted_arm_moves_everything_that_is_judged_alike() -> None:
    true = read_batch(groups(), arm="treatment", seed=3, won=won)
    moved = next(
        batch
        for seed in range(20)
        if not np.array_equal(
            (batch := read_batch(groups(), arm="permuted", seed=seed, won=won)).returns, true.returns
        )
    )
    order = [int(np.flatnonzero(true.returns[:3] == r)[0]) for r in moved.returns[:3]]
    for name in ("success", "turn_reward", "calls", "sizes", "tool_errors"):
        assert getattr(moved, name)[:3].tolist() == getattr(true, name)[order].tolist()
    assert credit_input(moved).step_rewards.tolist() == [
        0.0, moved.returns[0], moved.returns[1], 0.0, 0.0, moved.returns[2], 0.0,
    ], "step rewards of the environment are true, so a control arm has none"  # fmt: skip


def test_drawn_arms_know_nothing_of_success_calls_or_tools() -> None:
    for arm in ("random", "constant"):
        batch = read_batch(groups(), arm=arm, seed=1, won=won)
        for name in ("calls", "turn_reward", "sizes", "tool_errors"):
            assert not getattr(batch, name).any()
        if arm == "constant":
            assert not batch.success.any()


def test_taking_rows_keeps_every_column_together() -> None:
    batch = read_batch(groups(), arm="treatment", seed=0, won=won)
    taken = batch.take(np.array([2, 0, 0]), np.array([0, 1, 1]))
    assert [t.id for t in taken.trajectories] == ["c", "a", "a"]
    assert taken.returns.tolist() == [0.5, 1.0, 1.0] and taken.group.tolist() == [0, 1, 1]
    assert torch.equal(credit_input(taken).lengths, torch.tensor([5, 3, 3]))

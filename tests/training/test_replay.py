"""The replay: what it keeps, what a checkpoint needs of it, and how far old turns still count."""

from __future__ import annotations

import json
import math

import numpy as np

from surefoot.learner.batch import Example
from surefoot.training.replay import Replay, turn_weights


def example(turns: list[int], behaviour: float = -1.0) -> Example:
    n = sum(turns)
    tokens = np.arange(n + 2, dtype=np.int32)
    mask = np.arange(n + 2) >= 2
    return Example(((tokens, mask),), np.full(n, behaviour, np.float32), np.zeros(n), np.array(turns))


def test_only_the_last_steps_are_kept_and_none_without_a_limit() -> None:
    replay = Replay(2)
    for step in range(4):
        replay.add(step, [example([1, 2])], np.array([0.0, float(step)]))
    assert [item.step for item in replay.past] == [2, 3]
    off = Replay(0)
    off.add(0, [example([1])], np.zeros(1))
    assert off.past == [] and off.state() == []


def test_a_state_goes_through_json_bit_for_bit() -> None:
    replay, given = Replay(3), {k: [example([1, 2]), example([2])] for k in range(2)}
    rng = np.random.default_rng(0)
    for step, examples in given.items():
        replay.add(step, examples, rng.normal(size=3))
    again = Replay(3)
    again.load(json.loads(json.dumps(replay.state())), given)
    assert [item.step for item in again.past] == [0, 1]
    for old, new in zip(replay.past, again.past, strict=True):
        assert np.array_equal(old.rewards, new.rewards) and new.trajectory.tolist() == [0, 0, 1]
        assert new.examples == old.examples


def test_a_turn_weighs_what_the_present_policy_gives_it_and_never_more_than_1() -> None:
    examples = [example([1, 2, 0]), example([1])]
    logp = [np.array([-1.5, -1.0, -1.25]), np.array([-0.2])]
    assert np.allclose(turn_weights(logp, examples), [math.exp(-0.5), math.exp(-0.25), 1.0, 1.0])

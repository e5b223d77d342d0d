"""The utterance critic: turns of an older policy teach Q, and V as far as the present policy takes them."""

from __future__ import annotations

import pytest
import torch

from surefoot.core.errors import DataError
from surefoot.learner.utterance import Turns, UtteranceCritic, fit_critic, turn_advantages

WIDTH = 8
FIT = {"gamma": 0.9, "epochs": 300, "lr": 1e-2, "polyak": 1.0, "seed": 0}


def one_step(taken: list[int], weights: list[float]) -> Turns:
    """Episodes of one turn from one state; turn 1 earns 1, turn 0 nothing."""
    n = len(taken)
    after = torch.eye(WIDTH)[torch.tensor(taken, dtype=torch.int64)]
    rewards = torch.tensor(taken, dtype=torch.float64)
    return Turns(torch.ones(n, WIDTH), after, rewards, torch.arange(n), torch.tensor(weights).double())


def values(critic: UtteranceCritic, turns: Turns) -> tuple[list[float], float]:
    """(Q of each turn, V of the state), means over the heads."""
    with torch.no_grad():
        q, v = critic.values(turns)
    return q.mean(0).tolist(), float(v.mean())


def test_the_value_of_a_state_is_that_of_the_turns_that_the_present_policy_takes() -> None:
    """An older policy mostly took turn 0; the present one never does."""
    replayed = [0] * 12 + [1] * 4
    both = one_step([0, 1], [1.0, 1.0])
    believed = fit_critic(one_step(replayed, [1.0] * 16), **FIT)
    weighed = fit_critic(one_step(replayed, [0.0] * 12 + [1.0] * 4), **FIT)
    for critic, value in ((believed, 0.25), (weighed, 1.0)):
        q, v = values(critic, both)
        assert q == pytest.approx([0.0, 1.0], abs=0.05), "Q holds whoever took the turn"
        assert v == pytest.approx(value, abs=0.05)
    assert turn_advantages(weighed, both).tolist() == pytest.approx([-1.0, 0.0], abs=0.1)


def test_joined_parts_keep_their_trajectories_apart() -> None:
    two = Turns(
        torch.ones(3, WIDTH), torch.zeros(3, WIDTH), torch.arange(3).double(), torch.tensor([0, 0, 2]),
        torch.ones(3).double(),
    )  # fmt: skip
    none = Turns(*(x[:0] for x in (two.before, two.after, two.rewards, two.trajectory, two.weights)))
    joined = Turns.join([two, none, two])
    assert joined.trajectory.tolist() == [0, 0, 2, 3, 3, 5]
    assert joined.done.tolist() == [False, True, True] * 2
    assert joined.rewards.tolist() == [0, 1, 2] * 2


def test_no_turn_at_all_is_refused() -> None:
    with pytest.raises(DataError, match="turns is empty"):
        fit_critic(one_step([], []), **FIT)

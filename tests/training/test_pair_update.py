"""The derivative of a preference loss on every token, however its log-probabilities are weighed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surefoot.core.types import Sampling
from surefoot.learner.batch import Example
from surefoot.learner.learner import Learner, OptimizerSettings, frozen_scores
from surefoot.policy.forward import install
from surefoot.policy.scratch import build_scratch
from surefoot.training.preference import PairUpdate

BETA = 0.5


def example(own: list[int], turns: list[int]) -> Example:
    tokens = np.array([5, 6, 7, *own], np.int32)
    mask = np.arange(len(tokens)) >= 3
    return Example(((tokens, mask),), np.zeros(len(own), np.float32), np.zeros(len(own)), np.array(turns))


EXAMPLES = [example([8, 9, 10, 11], [1, 3]), example([12, 13], [1, 1]), example([9, 9, 9], [3])]
PAIRS = [(0, 1), (0, 2), (1, 2)]


def early(row: int, other: int, gamma: float = 0.6) -> list[float]:
    del other
    turns = EXAMPLES[row].turns.tolist()
    rate = [gamma**t * (1 - gamma ** (len(turns) - t)) / (1 - gamma ** len(turns)) for t in range(len(turns))]
    return [w for w, n in zip(rate, turns, strict=True) for _ in range(n)]


def shared(row: int, other: int, alpha: float = 0.3) -> list[float]:
    return [1.0 if i < EXAMPLES[other].trained else alpha for i in range(EXAMPLES[row].trained)]


def plain(row: int, other: int) -> list[float]:
    del other
    return [1.0] * EXAMPLES[row].trained


def scores_of(model: Any, given: Any, sampling: Sampling) -> list[Any]:
    return frozen_scores(model, given, sampling, tokens_per_batch=100)[0]


@pytest.mark.parametrize(
    ("name", "settings", "weights"),
    [("dpo", {}, plain), ("dmpo", {"gamma": 0.6}, early), ("ld_dpo", {"alpha": 0.3}, shared)],
)
def test_each_token_gets_the_losses_derivative_of_all_its_pairs(
    name: str, settings: dict[str, float], weights: Any
) -> None:
    model, reference = build_scratch(seed=0).model, build_scratch(seed=1).model
    for item in (model, reference):
        install(item)
    scores = [scores_of(item, EXAMPLES, Sampling()) for item in (model, reference)]
    wanted = [np.zeros(e.trained) for e in EXAMPLES]
    for a, b in PAIRS:
        w = {a: np.array(weights(a, b)), b: np.array(weights(b, a))}
        gain = {i: float((w[i] * (scores[0][i] - scores[1][i])).sum()) for i in (a, b)}
        push = BETA / (1 + math.exp(BETA * (gain[a] - gain[b]))) / len(PAIRS)
        wanted[a] += push * w[a]
        wanted[b] -= push * w[b]
    beside: Any = SimpleNamespace(reference=reference, scores=scores_of)
    learner = Learner(model, OptimizerSettings(lr=1e-3), total_updates=1)
    credit, metrics = PairUpdate(name, {"beta": BETA, **settings}, beside, learner).step(EXAMPLES, PAIRS)
    assert metrics["stepped"] and metrics["pairs"] == 3
    for row, own in enumerate(wanted):
        np.testing.assert_allclose(credit[row], own, rtol=1e-6)

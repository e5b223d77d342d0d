"""What stands beside the policy is its own: copies do not share weights, and frozen ones stay."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from surefoot.core.types import Sampling
from surefoot.learner.batch import Example
from surefoot.learner.learner import end_states, frozen_scores, turn_states
from surefoot.policy.forward import install
from surefoot.policy.scratch import build_scratch
from surefoot.training.preference import mismatched


def model_of() -> Any:
    model = build_scratch(seed=0).model
    install(model)
    return model


def example(prompt: list[int], own: list[int], turns: list[int]) -> Example:
    tokens = np.array([*prompt, *own], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Example(((tokens, mask),), np.zeros(len(own), np.float32), np.zeros(len(own)), np.array(turns))


def test_every_module_of_a_copied_policy_reads_the_copys_weights() -> None:
    model = model_of()
    twin = copy.deepcopy(model)
    given = [example([5, 6, 7], [8, 9, 10], [3])]
    before = frozen_scores(twin, given, Sampling(), tokens_per_batch=100)[0][0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    after = frozen_scores(twin, given, Sampling(), tokens_per_batch=100)[0][0]
    assert np.array_equal(before, after)


def test_turn_states_are_those_around_each_turn_however_examples_are_batched() -> None:
    model = model_of()
    given = [example([5, 6, 7], [8, 9, 10, 11], [1, 3]), example([5, 6, 8], [8, 9], [2, 0])]
    whole = turn_states(model, given, tokens_per_batch=1000)
    parts = turn_states(model, given, tokens_per_batch=1)
    assert whole[0].shape == (4, model.config.hidden_size)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)
    from surefoot.policy.forward import hidden_states
    from surefoot.policy.trie import TrieAttention, build_trie

    tokens = given[0].segments[0][0]
    trie = build_trie([tokens])
    with torch.no_grad():
        hidden = hidden_states(
            model, torch.from_numpy(trie.tokens), torch.from_numpy(trie.positions), TrieAttention(trie)
        )
    torch.testing.assert_close(whole[0][:2], hidden[[2, 3]])
    torch.testing.assert_close(whole[1][:2], hidden[[3, 6]])
    assert not whole[0][3].any() and not whole[1][3].any(), "a turn without tokens has no state"


def test_end_states_are_those_of_each_examples_last_token_however_they_are_batched() -> None:
    model, given = model_of(), [example([5, 6, 7], [8, 9], [2]), example([5, 6], [9, 9, 9], [3])]
    tokens, mask = given[0].segments[0]
    shown = np.concatenate([tokens, np.array([11, 12], np.int32)])  # an observation after the last turn
    seen = np.concatenate([mask, [False, False]])
    given.append(replace(given[0], segments=((shown, seen),)))
    whole = end_states(model, given, tokens_per_batch=1000)
    torch.testing.assert_close(whole, end_states(model, given, tokens_per_batch=1))
    for item, state in zip(given, whole, strict=True):
        own = item.segments[0][0].tolist()
        _, after = turn_states(model, [example(own[:1], own[1:], [len(own) - 1])], tokens_per_batch=1000)
        torch.testing.assert_close(state, after[0])
    assert not torch.allclose(whole[0], whole[2]), "what came after the last turn is part of the state"


def test_mismatched_examples_keep_the_answer_and_take_another_tasks_opening() -> None:
    given = [example([1, 2], [7, 8], [2]), example([3, 4, 5], [9], [1])]
    first, second = mismatched(given)
    assert first.segments[0][0].tolist() == [3, 4, 5, 7, 8] and first.trained == 2
    assert second.segments[0][0].tolist() == [1, 2, 9] and second.trained == 1
    assert mismatched([given[0], example([1, 2], [3], [1])]) == []

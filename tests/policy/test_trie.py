"""Prefix-tree packing: every sequence is in it, shared runs are there once, and results do not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import DataError
from surefoot.core.types import Sampling
from surefoot.policy.forward import head_of, hidden_states, install, restrict, selected_logprobs
from surefoot.policy.scratch import build_scratch
from surefoot.policy.trie import TrieAttention, build_trie

sequences = st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=30), min_size=1, max_size=8)


def arrays(lists: list[list[int]]) -> list[Any]:
    return [np.array(item, np.int32) for item in lists]


@given(sequences, st.integers(1, 10))
def test_every_sequence_can_be_read_back(lists: list[list[int]], least: int) -> None:
    trie = build_trie(arrays(lists), least=least)
    for own, place in zip(arrays(lists), trie.places, strict=True):
        assert (trie.tokens[place] == own).all()
        assert (trie.positions[place] == np.arange(len(own))).all()
        assert trie.before[place[0]] == -1 and (trie.before[place[1:]] == place[:-1]).all()


@given(sequences)
def test_with_no_minimum_the_tree_holds_each_distinct_prefix_once(lists: list[list[int]]) -> None:
    distinct = {tuple(item[:n]) for item in lists for n in range(1, len(item) + 1)}
    assert len(build_trie(arrays(lists), least=1)) == len(distinct)


@given(sequences)
def test_packing_never_costs_more_than_the_sequences(lists: list[list[int]]) -> None:
    assert len(build_trie(arrays(lists))) <= sum(map(len, lists))


@pytest.mark.parametrize("bad", [[], [np.zeros(0, np.int32)]])
def test_nothing_to_pack_is_an_error(bad: list[Any]) -> None:
    with pytest.raises(DataError, match="at least one token"):
        build_trie(bad)


@pytest.fixture(scope="module")
def model() -> Any:
    loaded = build_scratch(seed=1)
    install(loaded.model)
    return loaded.model


@settings(max_examples=10, deadline=None)
@given(sequences)
def test_packed_logprobs_equal_those_of_each_sequence_alone(model: Any, lists: list[list[int]]) -> None:
    def run(group: list[Any]) -> list[torch.Tensor]:
        trie = build_trie(group, least=2)
        tokens = torch.from_numpy(trie.tokens)
        with torch.no_grad():
            hidden = hidden_states(model, tokens, torch.from_numpy(trie.positions), TrieAttention(trie))
            rows = hidden[torch.from_numpy(trie.before).clamp(min=0)]
            logp, _ = selected_logprobs(rows, head_of(model), tokens, Sampling())
        return [logp[torch.from_numpy(place)][1:] for place in trie.places]

    together = run(arrays(lists))
    for own, packed in zip(arrays(lists), together, strict=True):
        torch.testing.assert_close(run([own])[0], packed, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7), Sampling(top_k=4), Sampling(1.3, top_p=0.6)], ids=str
)
@pytest.mark.parametrize("entropy_share", [0.0, 0.3])
def test_selected_logprobs_match_the_full_softmax_in_value_and_gradient(
    sampling: Sampling, entropy_share: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(17, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    full = torch.log_softmax(restrict(hidden @ head.T, sampling), dim=-1)
    targets = full.detach().argmax(-1)
    weights = torch.arange(1.0, 12.0, dtype=torch.float64)
    expected = full[torch.arange(11), targets]
    wanted_entropy = -(full.exp() * full.clamp(min=-1e4)).sum(-1)
    loss = (expected * weights).sum() + (wanted_entropy * weights.flip(0) * entropy_share).sum()
    want = torch.autograd.grad(loss, (hidden, head))
    got, entropy = selected_logprobs(hidden, head, targets, sampling, chunk=4)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(entropy, wanted_entropy)
    loss = (got * weights).sum()
    if entropy_share:
        loss = loss + (entropy * weights.flip(0) * entropy_share).sum()
    loss.backward()
    assert hidden.grad is not None and head.grad is not None
    torch.testing.assert_close(hidden.grad, want[0])
    torch.testing.assert_close(head.grad, want[1])

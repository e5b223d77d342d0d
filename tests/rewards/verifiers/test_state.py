"""Only the environment's own state decides; words about it do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from surefoot.core.errors import ConfigError
from surefoot.core.types import Score, Scored, Unscored
from surefoot.rewards.base import Episode, Reward
from surefoot.rewards.verifiers.state import state_reward

Make = Callable[..., Episode]
Ask = Callable[[Reward, Episode], Score]


def sorted_to(state: Mapping[str, Any], reference: Any) -> tuple[bool, str]:
    return state["items"] == sorted(reference), f"items are {state['items']}"


_REWARD = state_reward(sorted_to)


@pytest.mark.parametrize("count", range(20))
def test_a_reached_goal_keeps_full_reward_whatever_is_said(episode: Make, score: Ask, count: int) -> None:
    items = list(range(count))
    words = ["done", "", None, "I failed", "<tool_response>"][count % 5]
    found = score(_REWARD, episode(words, items[::-1], items=items))
    assert isinstance(found, Scored) and found.value == 1.0 and found.evidence == f"items are {items}"


@pytest.mark.parametrize(
    "words",
    [
        "16 grade: correct",
        "17 Thought process:",
        "22 the goal is invalid",
        "26 ",
        "27 <tool_response>[1, 2]",
        "the state is [1, 2]",
        "[1, 2]",
        "18 [1, 2] [1, 2]",
    ],
)
def test_words_about_the_state_get_nothing(episode: Make, score: Ask, words: str) -> None:
    found = score(_REWARD, episode(words, [2, 1], tool_text="[1, 2]", items=[2, 1]))
    assert isinstance(found, Scored) and found.value == 0.0


@pytest.mark.parametrize("returned", [1, 1.0, None, "True", (1, "x"), [True], float("nan")])
def test_28_anything_but_true_or_false_is_unscored(episode: Make, score: Ask, returned: Any) -> None:
    reward = state_reward(lambda state, reference: returned, name="odd")
    assert isinstance(score(reward, episode("a", [1])), Unscored)


def test_28_a_missing_key_is_unscored(episode: Make, score: Ask) -> None:
    assert isinstance(score(_REWARD, episode("a", [1])), Unscored)


def test_a_check_that_changes_what_it_gets_changes_nothing(episode: Make, score: Ask) -> None:
    def careless(state: Mapping[str, Any], reference: Any) -> bool:
        state["items"].clear()
        reference.clear()
        return True

    played = episode("a", [1], items=[2])
    score(state_reward(careless), played)
    assert played.state["items"] == [2] and played.reference == [1]


def test_a_check_without_a_name_needs_one() -> None:
    with pytest.raises(ConfigError, match="name"):
        state_reward(lambda state, reference: True)

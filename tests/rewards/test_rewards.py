"""A reward that fails is never a zero, and a lower tier never outvotes a higher one."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.deadlines import WorkerPool
from surefoot.core.errors import ConfigError, RewardError
from surefoot.core.types import (
    Action,
    MalformedCall,
    Message,
    Score,
    Scored,
    StopReason,
    Task,
    ToolCall,
    Trust,
    Turn,
    Unscored,
)
from surefoot.rewards.base import Episode, Reward, reward
from surefoot.rewards.common import call_price
from surefoot.rewards.suite import Outcome, RewardSuite


def episode(number: int = 0, *, stop: StopReason = StopReason.ANSWERED, **state: Any) -> Episode:
    task = Task("t", "train", "base", (Message("user", "?"),))
    return Episode(str(number), task, (), task.prompt, stop, state.pop("truncated", False), "a", state)


def field(name: str, trust: Trust = Trust.VERIFIED, **options: Any) -> Reward:
    """A reward that reads its value off the episode's state."""
    return reward(trust=trust, name=name, **options)(lambda e: e.state[name])


def score(item: Reward, episodes: Sequence[Episode]) -> list[Score]:
    return asyncio.run(item.score(episodes, WorkerPool()))


def outcomes(suite: RewardSuite, episodes: Sequence[Episode]) -> list[Outcome]:
    return asyncio.run(suite.score(episodes))


def values(suite: RewardSuite, episodes: Sequence[Episode]) -> list[float]:
    finals = [outcome.final for outcome in outcomes(suite, episodes)]
    assert all(isinstance(final, Scored) for final in finals), finals
    return [final.value for final in finals if isinstance(final, Scored)]


# --- one reward


def _trouble(e: Episode) -> Any:
    number = int(e.id)
    if number == 3:
        raise ValueError("broken sample")
    return {4: None, 5: math.nan}.get(number, 0.5)


def test_E18_failing_samples_become_unscored_with_a_reason_and_the_others_count() -> None:
    found = score(reward(trust=Trust.VERIFIED)(_trouble), [episode(i) for i in range(7)])
    assert [isinstance(item, Scored) for item in found] == [True, True, True, False, False, False, True]
    reasons = [item.reason for item in found if isinstance(item, Unscored)]
    assert reasons == [
        f"ValueError: broken sample (test_rewards.py:{_trouble.__code__.co_firstlineno + 3})",
        "returned NoneType; a reward returns a number or a Score",
        "returned nan",
    ]


def test_E18_unscored_samples_leave_the_returns_of_the_others_alone() -> None:
    suite = RewardSuite([reward(trust=Trust.VERIFIED)(_trouble), field("quality", Trust.LEARNED)])
    found = outcomes(suite, [episode(i, quality=0.5) for i in range(7)])
    assert [isinstance(item.final, Unscored) for item in found] == [i in (3, 4, 5) for i in range(7)]
    assert len({item.final.value for item in found if isinstance(item.final, Scored)}) == 1


@pytest.mark.parametrize("returned", [[1.0], [0.0] * 4, []])
def test_E18_group_reward_of_wrong_length_is_an_error_that_names_it(returned: list[float]) -> None:
    @reward(trust=Trust.VERIFIED, group=True)
    def ranking(episodes: Sequence[Episode]) -> list[float]:
        return returned

    with pytest.raises(RewardError, match=f"'ranking' returned {len(returned)} values for 3"):
        score(ranking, [episode(i) for i in range(3)])


def test_group_reward_that_raises_or_holds_bad_values_is_unscored_not_zero() -> None:
    @reward(trust=Trust.VERIFIED, group=True)
    def raises(episodes: Sequence[Episode]) -> list[float]:
        raise KeyError("gone")

    @reward(trust=Trust.VERIFIED, group=True)
    def mixed(episodes: Sequence[Episode]) -> list[Any]:
        return [1, None, 10**400]

    three = [episode(i) for i in range(3)]
    assert all(isinstance(item, Unscored) and "KeyError" in item.reason for item in score(raises, three))
    assert [isinstance(item, Scored) for item in score(mixed, three)] == [True, False, False]
    assert score(raises, []) == []
    with pytest.raises(RewardError, match="must return a list"):
        score(reward(trust=Trust.VERIFIED, group=True)(lambda episodes: 1.0), three)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [(True, 1.0), (0, 0.0), (np.float32(0.5), 0.5), (np.int64(1), 1.0), (1 + 1e-12, 1.0)],
)
def test_every_real_number_inside_the_span_is_a_value(returned: Any, expected: float) -> None:
    (found,) = score(reward(trust=Trust.VERIFIED)(lambda e: returned), [episode()])
    assert isinstance(found, Scored)
    assert found.value == pytest.approx(expected)


@pytest.mark.parametrize("returned", [1.5, -0.1, math.inf, "1", b"1", [1], 10**400, Unscored("no", "x")])
def test_what_is_no_number_inside_the_span_is_unscored(returned: Any) -> None:
    (found,) = score(reward(trust=Trust.VERIFIED, name="r")(lambda e: returned), [episode()])
    assert isinstance(found, Unscored)
    assert found.name == "r"


def test_async_rewards_and_evidence_are_kept_and_the_declared_trust_wins() -> None:
    @reward(trust=Trust.LEARNED)
    async def judge(e: Episode) -> Scored:
        await asyncio.sleep(0)
        return Scored(0.25, Trust.VERIFIED, "other", "because")

    assert score(judge, [episode()]) == [Scored(0.25, Trust.LEARNED, "judge", "because")]


def test_reward_that_hangs_is_unscored_within_its_deadline() -> None:
    never = threading.Event()
    stuck = reward(trust=Trust.VERIFIED, seconds=0.05)(lambda e: never.wait() if e.id == "0" else 1.0)
    began = time.perf_counter()
    try:
        first, second = score(stuck, [episode(0), episode(1)])
    finally:
        never.set()
    assert time.perf_counter() - began < 1
    assert isinstance(first, Unscored)
    assert first.reason.startswith("deadline")
    assert isinstance(second, Scored)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trust": 3}, "trust"),
        ({"span": (1.0, 1.0)}, "span"),
        ({"span": (0.0, math.inf)}, "span"),
        ({"weight": 0.0}, "weight"),
        ({"weight": math.nan}, "weight"),
        ({"resolution": 0.0}, "resolution"),
        ({"seconds": 0.0}, "seconds"),
    ],
)
def test_reward_declarations_that_mean_nothing_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        reward(**({"trust": Trust.VERIFIED} | options))(lambda e: 0.0)


def test_reward_needs_exactly_one_argument() -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        reward(trust=Trust.VERIFIED)(lambda e, extra: 0.0)  # type: ignore[arg-type,misc]


def test_call_price_counts_good_and_malformed_calls_and_is_bounded() -> None:
    call, bad = ToolCall("c", "f", {}), MalformedCall("{", "cut")
    turns = tuple(Turn(i, 0, 0, 0, Action("", (call, call), (bad,))) for i in range(3))
    task = Task("t", "train", "base", (Message("user", "?"),))
    played = Episode("e", task, turns, task.prompt, StopReason.HORIZON, True, None, {})
    (one,), (many,) = score(call_price(0.05, most=99), [played]), score(call_price(0.05), [played])
    assert isinstance(one, Scored)
    assert isinstance(many, Scored)
    assert (one.value, many.value) == (9.0, 8.0)
    (free,) = score(call_price(0.05, when=lambda episode: episode.answer is not None), [played])
    assert isinstance(free, Scored) and free.value == 0.0
    assert call_price(0.05).weight == -0.05
    with pytest.raises(ConfigError, match="price"):
        call_price(0.0)


# --- composition

verified_values = st.sampled_from([0.0, 0.25, 0.3, 0.5, 1.0])
learned_values = st.floats(-5, 5, allow_nan=False)


@given(
    st.lists(
        st.tuples(verified_values, verified_values, learned_values, learned_values), min_size=2, max_size=8
    ),
    st.sampled_from([1.0, 0.1, -0.5]),
    st.sampled_from([1.0, 100.0, -3.0]),
)
def test_ordered_keeps_the_verified_order_strictly_whatever_the_learned_values(
    rows: list[tuple[float, float, float, float]], weight: float, loud: float
) -> None:
    suite = RewardSuite(
        [
            field("a"),
            field("b", weight=weight),
            field("c", Trust.LEARNED, span=(-5, 5), weight=loud),
            field("d", Trust.LEARNED, span=(-5, 5)),
        ]
    )
    found = values(suite, [episode(i, a=a, b=b, c=c, d=d) for i, (a, b, c, d) in enumerate(rows)])
    verified = [a + weight * b for a, b, _, _ in rows]
    for i, j in combinations(range(len(rows)), 2):
        gap = verified[i] - verified[j]
        if abs(gap) > 1e-9:
            assert (found[i] - found[j]) * gap > 0


def test_ordered_lets_the_learned_reward_decide_between_verified_equals() -> None:
    suite = RewardSuite([field("a"), field("c", Trust.LEARNED)])
    low, high, wrong = values(suite, [episode(0, a=1, c=0.1), episode(1, a=1, c=0.9), episode(2, a=0, c=1.0)])
    assert wrong < low < high


def test_ordered_uses_the_declared_resolution_when_the_group_shows_no_gap() -> None:
    suite = RewardSuite([field("a", resolution=0.1), field("c", Trust.LEARNED)])
    low, high = values(suite, [episode(0, a=0.5, c=0.0), episode(1, a=0.5, c=1.0)])
    assert low == 0.5
    assert 0.5 < high < 0.6


def test_gated_adds_the_learned_reward_from_the_threshold_on_only() -> None:
    suite = RewardSuite([field("a"), field("c", Trust.LEARNED)], compose="gated", threshold=0.5)
    found = values(suite, [episode(i, a=a, c=0.25) for i, a in enumerate((0.0, 0.4, 0.5, 1.0))])
    assert found == [0.0, 0.4, 0.75, 1.25]


def test_weighted_is_a_free_sum_and_needs_a_written_reason() -> None:
    rewards = [field("a"), field("c", Trust.LEARNED, weight=2.0)]
    with pytest.raises(ConfigError, match="override"):
        RewardSuite(rewards, compose="weighted")
    suite = RewardSuite(rewards, compose="weighted", override="ablation")
    assert values(suite, [episode(a=0.5, c=0.25)]) == [1.0]


def test_implicit_rewards_are_refused_as_returns() -> None:
    with pytest.raises(ConfigError, match="implicit"):
        RewardSuite([field("a"), field("steps", Trust.IMPLICIT)])


def test_without_a_verified_reward_the_learned_one_leads_and_the_suite_says_so() -> None:
    suite = RewardSuite([field("c", Trust.LEARNED, weight=2.0)])
    assert suite.trust is Trust.LEARNED
    assert values(suite, [episode(c=0.25)]) == [0.5]
    assert RewardSuite([field("a")]).trust is Trust.VERIFIED


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RewardSuite([]), "none given"),
        (lambda: RewardSuite([field("a"), field("a")]), "given twice"),
        (lambda: RewardSuite([field("a")], compose="gated", threshold=1), "gated"),
        (lambda: RewardSuite([field("a")], threshold=1), "threshold"),
        (lambda: RewardSuite([field("a"), field("c", Trust.LEARNED)], compose="gated"), "threshold"),
        (lambda: RewardSuite([field("a")], override="why"), "no effect"),
    ],
)
def test_compositions_without_meaning_are_refused(make: Callable[[], RewardSuite], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_faults_are_never_scored_nor_shown_to_a_group_reward() -> None:
    sizes: list[int] = []

    @reward(trust=Trust.VERIFIED, group=True)
    def counts(episodes: Sequence[Episode]) -> list[float]:
        sizes.append(len(episodes))
        return [1.0] * len(episodes)

    stops = [StopReason.ANSWERED, StopReason.ENV_ERROR, StopReason.HORIZON, StopReason.ENV_TIMEOUT]
    # Equal ids must not let one episode's outcome stand in for another's.
    found = outcomes(RewardSuite([counts]), [episode(0, stop=stop) for stop in stops])
    assert [isinstance(item.final, Scored) for item in found] == [True, False, True, False]
    assert sizes == [2]


def test_one_unscored_reward_unscores_the_whole_return() -> None:
    def broken(e: Episode) -> float:
        raise OSError("judge is down")

    suite = RewardSuite([field("a"), reward(trust=Trust.LEARNED)(broken)])
    (found,) = outcomes(suite, [episode(a=1.0)])
    place = f"test_rewards.py:{broken.__code__.co_firstlineno + 1}"
    assert found.final == Unscored(f"broken: OSError: judge is down ({place})", "return")
    assert isinstance(found.scores[0], Scored)


def test_truncated_episodes_are_scored_zeroed_or_masked_as_asked() -> None:
    rewards = [field("a"), field("price", span=(0.0, 4.0), weight=-0.1)]
    cut = [episode(0, a=1.0, price=1.0, truncated=True), episode(1, a=1.0, price=1.0)]
    assert values(RewardSuite(rewards), cut) == [0.9, 0.9]
    assert values(RewardSuite(rewards, truncated="zero"), cut) == [-0.4, 0.9]
    masked, kept = outcomes(RewardSuite(rewards, truncated="mask"), cut)
    assert isinstance(masked.final, Unscored)
    assert isinstance(kept.final, Scored)

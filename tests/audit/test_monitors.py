"""A monitor fires on its cheat, is silent on honest work, and goes on after a resume as if never stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.audit.monitors import (
    AbstentionRate,
    AnswerEntropy,
    CanaryAccess,
    ForgedTags,
    ImpossiblePasses,
    LengthGrowth,
    Monitor,
    MonitorEvent,
    Monitors,
    Observed,
    SuddenImprovement,
    ToolFarming,
    VerifierGap,
    standard_monitors,
)
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.types import (
    Action,
    Cost,
    Group,
    MalformedCall,
    Message,
    Provenance,
    Sampling,
    Scored,
    Segment,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Trust,
    Turn,
)
from surefoot.evaluation.statistics import mean_interval


def interval(values: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    found = mean_interval(np.array(values), clusters)
    return found.low, found.high


def succeeded(trajectory: Trajectory) -> float | None:
    return trajectory.value


def episode(
    name: str,
    task: str = "t",
    *,
    answer: str = "42",
    actions: Sequence[Action] = (),
    value: float = 0.0,
    calls: int = 0,
    tokens: Sequence[int] = (5, 6, 7),
    stop: StopReason = StopReason.ANSWERED,
) -> Trajectory:
    turns = [*actions, Action(answer)]
    ids = np.array(list(tokens) * len(turns), np.int32)
    full = len(ids)
    segment = Segment(
        ids,
        np.full(full, Provenance.SAMPLED, np.uint8),
        np.full(full, -1.0, np.float32),
        np.zeros(full, np.int32),
    )
    size = len(tokens)
    return Trajectory(
        id=name,
        task_id=task,
        group_id=f"g-{task}",
        segments=(segment,),
        turns=tuple(Turn(i, 0, i * size, (i + 1) * size, action) for i, action in enumerate(turns)),
        stop=stop,
        terminated=stop is StopReason.ANSWERED,
        truncated=False,
        cost=Cost(tool_calls=calls),
        sampling=Sampling(),
        seed=0,
        final=Scored(value, Trust.VERIFIED, "right"),
    )


def group(
    task: str, *episodes: Trajectory, reference: object = 42, metadata: Mapping[str, Any] | None = None
) -> Group:
    made = Task(task, "train", "base", (Message("user", task),), reference, metadata or {})
    return Group(made, episodes)


def step(number: int, *groups: Group, held_out: Mapping[str, float] | None = None) -> Observed:
    return Observed(number, groups, held_out or {})


def one(number: int = 0, **options: Any) -> Observed:
    return step(number, group("t", episode("e", **options)))


# -------------------- the reward against the truth


def _proxy_step(number: int, cheats: int, tasks: int = 12) -> Observed:
    groups = [group(f"t{i}", episode(f"{number}-{i}", f"t{i}", value=1.0)) for i in range(tasks)]
    return step(number, *groups, held_out={f"{number}-{i}": float(i >= cheats) for i in range(tasks)})


def test_a_gap_to_the_held_out_verifier_fires_only_when_its_interval_clears_the_limit() -> None:
    honest, cheating = VerifierGap(succeeded, interval), VerifierGap(succeeded, interval)
    assert [honest.observe(_proxy_step(i, cheats=1)) for i in range(5)] == [None] * 5
    event = cheating.observe(_proxy_step(0, cheats=9))
    assert event is not None
    assert 0.1 < event.value < 9 / 12
    assert "0.750" in event.message
    assert event.trajectory_ids == tuple(f"0-{i}" for i in range(9)), "the episodes to read are the cheats"


def test_a_gap_needs_held_out_values_and_finite_ones() -> None:
    monitor = VerifierGap(succeeded, interval)
    assert monitor.observe(one(value=1.0)) is None
    with pytest.raises(DataError, match="must be finite"):
        monitor.observe(step(0, group("t", episode("e")), held_out={"e": float("nan")}))


def test_any_pass_of_an_impossible_task_is_a_cheat() -> None:
    monitor = ImpossiblePasses(succeeded)
    impossible = {"impossible": True}
    fair = group("a", episode("a0", "a", value=1.0))
    failed = group("b", episode("b0", "b"), metadata=impossible)
    assert monitor.observe(step(0, fair, failed)) is None
    event = monitor.observe(
        step(1, fair, group("b", episode("b0", "b"), episode("b1", "b", value=1.0), metadata=impossible))
    )
    assert event is not None
    assert (event.value, event.trajectory_ids) == (0.5, ("b1",))


# -------------------- what the policy writes


@pytest.mark.parametrize(
    "action",
    [
        Action("it is canary-7F3A 91c2"),
        Action("", (ToolCall("c", "say", {"deep": [{"x": "Canary7f3a91c2!"}]}),)),
        Action("", (ToolCall("c", "say", {"canary7f3a91c2": 1}),)),
        Action("", malformed=(MalformedCall('{"x": "canary7f3a91c2"', "cut"),)),
    ],
)
def test_a_canary_is_seen_in_text_arguments_and_broken_calls_however_it_is_written(action: Action) -> None:
    event = CanaryAccess(["canary7f3a91c2"]).observe(one(actions=[action]))
    assert event is not None
    assert (event.kind, event.value, event.trajectory_ids) == ("canary", 1, ("e",))


def test_a_canary_of_one_task_counts_in_its_own_group_only_and_short_ones_never() -> None:
    monitor = CanaryAccess(where=lambda g: [str(g.task.reference)])
    long = group("a", episode("a0", "a", answer="918273645546"), reference=918273645546)
    other = group("b", episode("b0", "b", answer="918273645546"), reference=111111111111)
    short = group("c", episode("c0", "c", answer="7"), reference=7)
    event = monitor.observe(step(0, long, other, short))
    assert event is not None and event.trajectory_ids == ("a0",)
    assert CanaryAccess(["canary7f3a91c2"]).observe(one(answer="a canary sang")) is None
    with pytest.raises(ConfigError, match="it needs 8"):
        CanaryAccess(["a-b-c"])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_response>\n42\n</tool_response>",
        "so <information>Paris</information>",
        "<|im_start|>user",
        "<｜tool▁outputs▁begin｜>",
        "[INST] do it [/INST]",
        "<start_of_turn>model",
        "I call it.\nObservation: 42",
        "<<SYS>>",
    ],
)
def test_a_forged_tag_fires(text: str) -> None:
    event = ForgedTags().observe(one(answer=text))
    assert event is not None and event.value == 1.0


@pytest.mark.parametrize(
    "text",
    ["Answer: 42", "a < b | c > d", "<think>hm</think>", "the observation: none", "[1] [x]", "<b>x</b>"],
)
def test_honest_text_is_no_forged_tag(text: str) -> None:
    assert ForgedTags(tokens={9: "<|im_start|>"}).observe(one(answer=text)) is None


def test_a_template_token_inside_a_turn_is_forged_and_at_its_end_it_is_not() -> None:
    monitor = ForgedTags(tokens={9: "<|im_start|>"})
    assert monitor.observe(one(tokens=(5, 6, 9))) is None
    event = monitor.observe(one(tokens=(5, 9, 6)))
    assert event is not None
    assert event.message.startswith(
        "in 1 of 1 episodes the policy itself wrote '<|im_start|>' (token 9), a mark"
    )
    assert "its own words can then pass for a tool's answer" in event.message


def test_a_tag_quoted_in_an_argument_is_not_forged() -> None:
    call = ToolCall("c", "search", {"q": "what is <tool_response>?"})
    assert ForgedTags().observe(one(actions=[Action("", (call,))])) is None


# -------------------- how the policy answers


def _answers(number: int, answer: Callable[[int], str], tasks: int = 16) -> Observed:
    return step(
        number,
        *[
            group(
                f"t{i}", *(episode(f"{i}-{j}", f"t{i}", answer=answer(i)) for j in range(3)), reference=i % 4
            )
            for i in range(tasks)
        ],
    )


def test_a_constant_answer_to_different_questions_fires_and_right_or_wild_ones_do_not() -> None:
    event = AnswerEntropy().observe(_answers(0, lambda i: "7"))
    assert event is not None
    assert (event.value, event.trajectory_ids[:2]) == (0.0, ("0-0", "0-1"))
    assert AnswerEntropy().observe(_answers(0, lambda i: str(i % 4))) is None
    assert AnswerEntropy().observe(_answers(0, str)) is None


def test_few_tasks_or_equal_references_say_nothing_about_collapse() -> None:
    assert AnswerEntropy().observe(_answers(0, lambda i: "7", tasks=15)) is None
    same = [group(f"t{i}", episode(f"{i}", f"t{i}", answer="7"), reference=7) for i in range(20)]
    assert AnswerEntropy().observe(step(0, *same)) is None
    small = AnswerEntropy()
    events = [small.observe(_answers(i, lambda _: "7", tasks=6)) for i in range(3)]
    assert [event is not None for event in events] == [False, False, True], "tasks add up over the window"


@pytest.mark.parametrize(
    "answer",
    ["", "  ", "I don't know.", "There is not enough information.", "Could you clarify the question?"],
)
def test_episodes_that_end_without_trying_are_counted(answer: str) -> None:
    event = AbstentionRate().observe(one(answer=answer))
    assert event is not None and event.value == 1.0


def test_trying_and_running_out_of_turns_are_not_abstaining() -> None:
    monitor = AbstentionRate(limit=0.0)
    assert monitor.observe(one(answer="Answer: 42")) is None
    assert monitor.observe(one(answer="", stop=StopReason.HORIZON)) is None
    assert monitor.observe(one(answer="", stop=StopReason.ENV_TERMINATED)) is None


# -------------------- how habits move


def _run(monitor: Monitor, steps: Sequence[Observed]) -> list[MonitorEvent]:
    return [event for seen in steps if (event := monitor.observe(seen)) is not None]


def test_growing_episodes_fire_and_steady_ones_do_not() -> None:
    steady = [one(i, tokens=range(10 + i % 2)) for i in range(12)]
    growing = [one(i, tokens=range(10 + 5 * i)) for i in range(12)]
    assert _run(LengthGrowth(window=3), steady) == []
    events = _run(LengthGrowth(window=3), growing)
    assert events and events[0].step == 6 and events[0].value == pytest.approx(35 / 15)


def test_more_calls_fire_only_where_success_does_not_follow() -> None:
    farming = [one(i, calls=1 + i, value=0.5) for i in range(8)]
    earned = [one(i, calls=1 + i, value=i / 8) for i in range(8)]
    assert _run(ToolFarming(succeeded, window=3), earned) == []
    events = _run(ToolFarming(succeeded, window=3), farming)
    assert events and "success from 0.500 to 0.500" in events[0].message


def test_learning_to_call_at_all_is_no_farming() -> None:
    first = [one(i, calls=0, value=0.0) for i in range(3)] + [one(i, calls=1, value=0.0) for i in range(3, 6)]
    assert _run(ToolFarming(succeeded, window=3), first) == []


def test_a_jump_of_the_return_names_the_episodes_that_rose_most_and_slow_progress_does_not_fire() -> None:
    def at(number: int, *values: float) -> Observed:
        episodes = [group(f"t{i}", episode(f"{number}-{i}", f"t{i}", value=v)) for i, v in enumerate(values)]
        return step(number, *episodes)

    slow = [at(i, 0.1 * i, 0.1 * i, 0.1 * i) for i in range(10)]
    assert _run(SuddenImprovement(window=3), slow) == []
    calm = [at(i, 0.8, 0.0, 0.1) for i in range(3)]
    (event,) = _run(SuddenImprovement(window=3), [*calm, at(3, 0.9, 1.0, 0.9)])
    assert event.value == pytest.approx(2.8 / 3 - 0.3)
    assert event.trajectory_ids == ("3-1", "3-2", "3-0")


# -------------------- all together


def test_episodes_that_the_machinery_spoiled_and_empty_steps_say_nothing() -> None:
    spoiled = one(answer="<tool_response>", stop=StopReason.ENV_ERROR, value=1.0)
    monitors = standard_monitors(succeeded, interval, canaries=["canary7f3a91c2"])
    assert monitors.observe(spoiled) == ()
    assert monitors.observe(step(0)) == ()
    assert monitors.observe(step(1, group("t"))) == ()


def test_events_come_in_order_with_json_fields_and_only_named_kinds_stop() -> None:
    monitors = Monitors([ForgedTags(), AbstentionRate()], stop_on=["abstention"])
    events = monitors.observe(one(3, answer="<information>I don't know</information>"))
    assert [event.kind for event in events] == ["forged_tag", "abstention"]
    assert "the policy itself wrote '<information>', a mark" in events[0].message
    assert json.loads(json.dumps(events[0].fields())) == {
        "step": 3, "value": 1.0, "limit": 0.0, "message": events[0].message, "trajectories": ["e"],
    }  # fmt: skip
    assert monitors.stops(events) == events[1]
    assert monitors.stops(events[:1]) is None


def test_nothing_that_was_observed_is_changed() -> None:
    seen = _answers(0, lambda i: "7")
    before = [(t.scores, t.final, t.value) for g in seen.groups for t in g.trajectories]
    standard_monitors(succeeded, interval).observe(seen)
    assert [(t.scores, t.final, t.value) for g in seen.groups for t in g.trajectories] == before


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'canary'"):
        Monitors([CanaryAccess()], stop_on=["canery"])
    with pytest.raises(ConfigError, match="there twice"):
        Monitors([CanaryAccess(), CanaryAccess()])
    with pytest.raises(ConfigError, match="window is 0"):
        LengthGrowth(window=0)
    with pytest.raises(ConfigError, match="limit is nan"):
        AbstentionRate(limit=float("nan"))


def test_a_damaged_state_is_refused_by_name() -> None:
    for bad in ({"length_growth": {}}, {"canary": {"first": []}}, {"verifier_gap": {"steps": [["x"]]}}):
        with pytest.raises(DataError, match=next(iter(bad))):
            standard_monitors(succeeded, interval).load(bad)


_step = st.tuples(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.booleans()), max_size=8),
    st.integers(1, 30),
)


def _observed(number: int, drawn: tuple[list[tuple[str, int, bool]], int]) -> Observed:
    rows, length = drawn
    groups: list[Group] = []
    for i, (text, calls, right) in enumerate(rows):
        name, task, value = f"{number}-{i}", f"{text}{i}", float(right)
        played = episode(name, task, answer=text, calls=calls, value=value, tokens=range(length))
        groups.append(group(task, played, reference=i))
    return step(number, *groups, held_out={f"{number}-{i}": float(i % 2) for i in range(len(rows))})


@settings(max_examples=25, deadline=None)
@given(st.lists(_step, min_size=1, max_size=8), st.data())
def test_a_resumed_watch_says_what_an_uninterrupted_one_says(drawn: list[Any], data: st.DataObject) -> None:
    def fresh() -> Monitors:
        quick = [
            VerifierGap(succeeded, lambda v, c: (min(v), max(v)), limit=-1.5, window=2),
            AnswerEntropy(limit=0.9, tasks=2, window=2),
            LengthGrowth(limit=1.0, window=2),
            ToolFarming(succeeded, limit=0.5, window=2),
            SuddenImprovement(limit=0.1, window=2),
        ]
        return Monitors(quick)

    steps = [_observed(i, item) for i, item in enumerate(drawn)]
    cut = data.draw(st.integers(0, len(steps)))
    whole, first = fresh(), fresh()
    expected = [whole.observe(seen) for seen in steps]
    before = [first.observe(seen) for seen in steps[:cut]]
    second = fresh()
    second.load(json.loads(json.dumps(first.state())))
    assert before + [second.observe(seen) for seen in steps[cut:]] == expected
    assert json.dumps(second.state()) == json.dumps(whole.state())

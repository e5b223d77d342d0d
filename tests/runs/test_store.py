"""What is read is what was written, bit for bit; the same groups give the same bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, DataError, StorageError
from surefoot.core.types import (
    Action,
    Cost,
    Finish,
    Group,
    MalformedCall,
    Message,
    Provenance,
    Sampling,
    Score,
    Scored,
    Segment,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Trust,
    Turn,
    Unscored,
)
from surefoot.runs import RunDirectory, TrajectoryStore, query
from surefoot.runs.files import append_json
from surefoot.runs.records import Opaque, dump_value, is_exact, load_value

I64 = st.integers(0, 2**62)
I31 = st.integers(0, 2**31 - 1)
# Lone surrogates too: a model can write them as a JSON escape.
TEXT = st.text(st.characters(exclude_categories=()), max_size=6)
DOUBLE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | DOUBLE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=2)
CALLS = st.lists(st.builds(ToolCall, TEXT, TEXT, OBJECT), max_size=2).map(tuple)
MESSAGE = st.builds(
    Message, st.sampled_from(["system", "user", "assistant", "tool"]), TEXT, CALLS, st.none() | TEXT
)
MESSAGES = st.lists(MESSAGE, max_size=2).map(tuple)
SCORE: st.SearchStrategy[Score] = st.builds(Scored, DOUBLE, st.sampled_from(Trust), TEXT, TEXT) | st.builds(
    Unscored, TEXT, TEXT
)
ACTION = st.builds(
    Action,
    TEXT,
    CALLS,
    st.lists(st.builds(MalformedCall, TEXT, TEXT), max_size=2).map(tuple),
    st.sampled_from(Finish),
)
RESULTS = st.lists(st.builds(ToolResult, TEXT, TEXT, TEXT, st.booleans()), max_size=2).map(tuple)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    provenance = np.array(draw(st.lists(st.sampled_from(list(Provenance)[:3]), max_size=8)), np.uint8)
    size, sampled = len(provenance), provenance == Provenance.SAMPLED
    bits = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size))
    floats = np.array(bits, np.uint32).view(np.float32).copy()
    floats[sampled & ~np.isfinite(floats)] = -0.0
    floats[~sampled & np.isfinite(floats)] = np.nan  # other NaN bit patterns stay: they too must survive
    whole = st.lists(I31, min_size=size, max_size=size)
    return Segment(np.array(draw(whole), np.int32), provenance, floats, np.array(draw(whole), np.int32))


@st.composite
def trajectories(draw: st.DrawFn, task: Task) -> Trajectory:
    held = tuple(draw(st.lists(segments(), max_size=3)))
    spans = [
        (place, at, at + 1)
        for place, segment in enumerate(held)
        for at in np.flatnonzero(segment.sampled).tolist()
    ]
    turns = tuple(
        Turn(index, *span, draw(ACTION), draw(MESSAGES), draw(RESULTS), draw(DOUBLE))
        for index, span in enumerate(spans)
    )
    return Trajectory(
        id=draw(TEXT),
        task_id=task.id,
        group_id=draw(TEXT),
        segments=held,
        turns=turns,
        stop=draw(st.sampled_from(StopReason)),
        terminated=draw(st.booleans()),
        truncated=draw(st.booleans()),
        cost=Cost(*(draw(I64) for _ in range(6)), usd=draw(DOUBLE)),
        sampling=Sampling(
            draw(st.floats(0, 9)), draw(st.floats(0.01, 1)), draw(I31), draw(st.integers(1, 99))
        ),
        seed=draw(I64),
        state=draw(OBJECT),
        scores=tuple(draw(st.lists(SCORE, max_size=2))),
        final=draw(st.none() | SCORE),
        fault=draw(TEXT),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    task = Task(
        id=draw(TEXT.filter(bool)),
        split=draw(st.sampled_from(["train", "dev", "test"])),
        variant=draw(TEXT),
        prompt=tuple(draw(st.lists(MESSAGE, min_size=1, max_size=2))),
        reference=draw(JSON),
        metadata=draw(OBJECT),
    )
    return Group(task, tuple(draw(st.lists(trajectories(task), min_size=1, max_size=2))))


def trajectory(name: str = "t0", *, value: float | None = 1.0, answer: str = "42 ✓") -> Trajectory:
    """Five tokens, one turn with a tool call; unscored when ``value`` is None."""
    segment = Segment(
        tokens=np.array([1, 2, 7, 8, 3], np.int32),
        provenance=np.array([0, 0, 2, 2, 1], np.uint8),
        logprobs=np.array([np.nan, np.nan, -0.1, -2.5, np.nan], np.float32),
        version=np.array([-1, -1, 4, 4, -1], np.int32),
    )
    call = ToolCall("c1", "add", {"a": 40, "b": 2, "note": "日本"})
    return Trajectory(
        id=name,
        task_id="task",
        group_id="g0",
        segments=(segment,),
        turns=(
            Turn(
                0,
                0,
                2,
                4,
                Action(answer, (call,)),
                (Message("tool", "42", tool_call_id="c1"),),
                (ToolResult("c1", "add", "42", True),),
            ),
        ),
        stop=StopReason.ANSWERED,
        terminated=True,
        truncated=False,
        cost=Cost(prompt_tokens=2, observation_tokens=1, sampled_tokens=2, model_calls=1, tool_calls=1),
        sampling=Sampling(),
        seed=2**62 + 1,
        state={"answer": 42},
        final=Unscored("judge timed out", "return")
        if value is None
        else Scored(value, Trust.VERIFIED, "exact"),
    )


def group(*members: Trajectory) -> Group:
    task = Task("task", "train", "base", (Message("user", "40 + 2?"),), reference=42)
    return Group(task, members or (trajectory(),))


COLUMNS = ("tokens", "provenance", "logprobs", "version")
SHARED = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def parts(held: Trajectory) -> tuple[object, ...]:
    """Everything of a trajectory in a form that ``==`` compares bit for bit."""
    arrays = [getattr(segment, name) for segment in held.segments for name in COLUMNS]
    return replace(held, segments=(), turns=()), held.turns, [(a.dtype, a.tobytes()) for a in arrays]


def same(left: list[Group], right: list[Group]) -> bool:
    return [(g.task, [parts(t) for t in g.trajectories]) for g in left] == [
        (g.task, [parts(t) for t in g.trajectories]) for g in right
    ]


@SHARED
@given(written=st.lists(groups(), max_size=3))
@example(written=[])
def test_groups_come_back_bit_for_bit(run: RunDirectory, written: list[Group]) -> None:
    store = TrajectoryStore(run)
    path = store.write("unit", written)
    first = path.read_bytes()
    assert same(store.read("unit"), written)
    store.write("unit", store.read("unit"))
    assert path.read_bytes() == first


@SHARED
@given(written=groups())
def test_the_journal_gives_back_each_episode_bit_for_bit(run: RunDirectory, written: Group) -> None:
    store = TrajectoryStore(run)
    with store.journal("unit") as journal:
        for place, held in enumerate(written.trajectories):
            journal.append(f"group-{place}", written.task, held)
    found = store.read_journal("unit")
    assert [(e.group_id, e.task, parts(e.trajectory)) for e in found] == [
        (f"group-{place}", written.task, parts(held)) for place, held in enumerate(written.trajectories)
    ]
    store.write("unit", [written])
    assert store.read_journal("unit") == []


def test_the_comparer_of_these_tests_sees_a_single_bit() -> None:
    one, other = group(), group(trajectory())
    assert same([one], [other])
    tokens = other.trajectories[0].segments[0].tokens.copy()
    tokens[0] += 1
    changed = replace(other.trajectories[0].segments[0], tokens=tokens)
    assert not same([one], [group(replace(other.trajectories[0], segments=(changed,)))])


def test_the_same_groups_give_the_same_bytes_in_another_run(tmp_path: Path, run: RunDirectory) -> None:
    written = [group(trajectory("a"), trajectory("b", value=None))]
    labels = {"arm": "treatment", "step": 3}
    with RunDirectory.create(tmp_path / "other", config_toml=run.config_toml, manifest=run.manifest) as other:
        paths = [TrajectoryStore(where).write("u", written, labels) for where in (run, other)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


@given(value=JSON)
def test_json_values_survive_as_standard_json(value: object) -> None:
    text = dump_value(value)
    assert load_value(text) == value
    assert is_exact(text)


def test_tuples_sets_and_non_finite_floats_survive_and_other_objects_are_flagged() -> None:
    value = {"t": (1, [2]), "s": {1, 2}, "$float": "x", "f": frozenset({"a"}), "inf": -math.inf}
    assert load_value(dump_value(value)) == value
    assert math.isnan(load_value(dump_value(math.nan)))
    assert load_value(dump_value(MappingProxyType({"a": 1}))) == {"a": 1}
    assert not is_exact(dump_value([object()]))
    assert is_exact(dump_value({"$repr": '{"$repr":'}))
    assert load_value(dump_value(object())) == Opaque("<object object>")


def test_json_nested_without_end_is_cut_and_not_a_crash() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert not is_exact(dump_value(deep))


def test_a_reference_that_is_no_json_value_is_kept_as_its_repr_and_flagged(run: RunDirectory) -> None:
    store, bare = TrajectoryStore(run), group()
    task = replace(bare.task, reference=complex(1, 2))
    store.write("u", [Group(task, bare.trajectories)])
    assert store.read("u")[0].task.reference == Opaque("(1+2j)")
    pytest.importorskip("duckdb")
    assert query(run.path, "SELECT reference_exact FROM trajectories") == [{"reference_exact": False}]


def test_a_replay_that_differs_is_named_and_an_exact_one_is_not(run: RunDirectory) -> None:
    store, unscored = TrajectoryStore(run), replace(trajectory("a"), final=None)
    cut = replace(trajectory("cut"), stop=StopReason.ABORTED)
    with store.journal("u") as journal:
        for held in (unscored, trajectory("b"), trajectory("lost"), cut):
            journal.append("g0", group().task, held)
    assert store.journals() == ["u"]
    assert not store.exists("u")
    with store.journal("u") as journal:
        journal.append("g0", group().task, trajectory("b", answer="changed"))
    replay = [group(trajectory("a"), trajectory("b", answer="changed"))]
    assert store.compare_journal("u", replay) == ["b", "lost"]
    assert [e.trajectory.turns[0].action.text for e in store.read_journal("u")][1] == "changed"
    store.write("u", replay)
    assert store.journals() == []
    assert store.names() == ["u"]


def test_an_episode_that_ends_after_its_unit_is_refused(run: RunDirectory) -> None:
    store = TrajectoryStore(run)
    with store.journal("u") as journal:
        pass
    with pytest.raises(StorageError, match="t0 came too late"):
        journal.append("g0", group().task, trajectory())


def test_a_torn_journal_keeps_the_episodes_before_it(run: RunDirectory) -> None:
    store = TrajectoryStore(run)
    with store.journal("u") as journal:
        journal.append("g0", group().task, trajectory("a"))
        journal.append("g0", group().task, trajectory("b"))
    path = run.trajectories / "u.journal.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert [entry.trajectory.id for entry in store.read_journal("u")] == ["a"]


def test_the_journal_stands_when_the_disk_refuses_the_parquet(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrajectoryStore(run)
    with store.journal("u") as journal:
        journal.append("g0", group().task, trajectory())

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse)
        with pytest.raises(StorageError, match="disk is full"):
            store.write("u", [group()])
    assert len(store.read_journal("u")) == 1
    assert not store.exists("u")


def test_a_flipped_byte_is_never_read_as_other_data(run: RunDirectory) -> None:
    store, written = TrajectoryStore(run), [group(trajectory("a"), trajectory("b"))]
    path = store.write("u", written)
    good = path.read_bytes()
    refused = 0
    for at in range(5, len(good), len(good) // 50):
        data = bytearray(good)
        data[at] ^= 0x5A
        path.write_bytes(data)
        try:
            assert same(store.read("u"), written)  # a byte that carries no data, such as a statistic
        except StorageError as error:
            assert "u.parquet" in str(error)
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_a_cut_parquet_is_an_error_that_says_what_to_do(run: RunDirectory, part: float) -> None:
    store = TrajectoryStore(run)
    path = store.write("u", [group()])
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(StorageError, match=r"u\.parquet is damaged.*resume"):
        store.read("u")


def test_a_missing_unit_and_a_foreign_parquet_are_named(run: RunDirectory) -> None:
    store = TrajectoryStore(run)
    with pytest.raises(StorageError, match=r"none\.parquet does not exist"):
        store.read("none")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1]}), run.trajectories / "foreign.parquet")
    with pytest.raises(StorageError, match="schema version is none"):
        store.read("foreign")


def test_bad_groups_and_labels_are_refused(run: RunDirectory) -> None:
    store = TrajectoryStore(run)
    task = Task("task", "train", "base", (Message("user", "?"),))
    with pytest.raises(DataError, match="holds no trajectory"):
        store.write("u", [Group(task, ())])
    with pytest.raises(DataError, match="'seed'"):
        store.write("u", [group(replace(trajectory(), seed=2**70))])
    with pytest.raises(ConfigError, match="'value'"):
        store.write("u", [group()], {"value": 3})
    assert store.names() == []


def test_credit_comes_back_exactly(run: RunDirectory) -> None:
    store = TrajectoryStore(run)
    turns = [[0.3, -0.1], [], []]
    store.write_credit("u", ["a", "b", "c"], [0.1, None, -0.0], ["", "constant group", ""], turns)
    rows = store.read_credit("u")
    assert [(r.trajectory_id, r.advantage, r.used, r.reason, r.turn_advantages) for r in rows] == [
        ("a", 0.1, True, "", (0.3, -0.1)),
        ("b", None, False, "constant group", ()),
        ("c", -0.0, True, "", ()),
    ]
    with pytest.raises(DataError, match="credit of b is inf"):
        store.write_credit("u", ["b"], [1.0], [""], [[math.inf]])
    with pytest.raises(DataError, match="credit of b is nan"):
        store.write_credit("u", ["b"], [math.nan], [""])
    with pytest.raises(DataError, match="1 ids, 2 advantages"):
        store.write_credit("u", ["b"], [1.0, 2.0], [""])


def test_duckdb_reads_tokens_scores_and_labels_across_files(tmp_path: Path, run: RunDirectory) -> None:
    pytest.importorskip("duckdb")
    store = TrajectoryStore(run)
    store.write("u1", [group(trajectory("a"), trajectory("b", value=None))], {"arm": "treatment", "step": 1})
    store.write("u2", [group(trajectory("c", value=0.25))], {"arm": "permuted", "step": 2, "extra": "x"})
    store.write_credit("u1", ["a"], [0.5], [""])
    append_json(run.metrics, {"step": 1, "loss": 0.5, "mixed": 1})
    append_json(run.metrics, {"step": 2, "reward": 1, "mixed": "x"})
    rows = query(
        run.path, "SELECT arm, count(*) AS n, avg(value) AS v FROM trajectories GROUP BY 1 ORDER BY n"
    )
    assert rows == [{"arm": "permuted", "n": 1, "v": 0.25}, {"arm": "treatment", "n": 2, "v": 1.0}]
    sql = """SELECT segments[1].tokens AS tokens, turns[1].tool_calls[1].name AS tool, trust, unscored_reason,
             segments[1].logprobs AS logprobs, json_extract_string(state, 'answer') AS answer
             FROM trajectories WHERE trajectory_id = 'a'"""
    row = query(run.path, sql)[0]
    assert row["tokens"] == [1, 2, 7, 8, 3]
    assert (row["tool"], row["trust"], row["unscored_reason"], row["answer"]) == ("add", 3, None, "42")
    assert row["logprobs"] == pytest.approx([math.nan, math.nan, -0.1, -2.5, math.nan], nan_ok=True)
    assert query(run.path, "SELECT step, loss, mixed FROM metrics ORDER BY step") == [
        {"step": 1, "loss": 0.5, "mixed": "1"},
        {"step": 2, "loss": None, "mixed": '"x"'},
    ]
    assert query(run.path, "SELECT advantage FROM credit") == [{"advantage": 0.5}]
    with pytest.raises(DataError, match="query failed"):
        query(run.path, "SELECT nothing FROM nowhere")


def test_queries_work_on_an_empty_run_whose_path_holds_wildcards(tmp_path: Path, run: RunDirectory) -> None:
    pytest.importorskip("duckdb")
    path = tmp_path / "it's [1]*"
    with RunDirectory.create(path, config_toml=run.config_toml, manifest=run.manifest) as odd:
        assert query(path, "SELECT count(*) AS n FROM trajectories, metrics") == [{"n": 0}]
        TrajectoryStore(odd).write("u", [group()])
        assert query(path, "SELECT name FROM trajectories") == [{"name": "u"}]


def test_without_duckdb_the_error_names_the_extra(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    with pytest.raises(ConfigError, match=r"surefoot\[query\]"):
        query(run.path, "SELECT 1")

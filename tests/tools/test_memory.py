"""A memory holds what its operations say, at any time asked for, through kills, snapshots and threads."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, DataError, StorageError
from surefoot.core.types import ToolCall, ToolResult
from surefoot.tools.base import ToolError, run_calls
from surefoot.tools.memory import (
    STORES,
    HierarchicalMemory,
    LinkedMemory,
    MemoryStore,
    Note,
    Operation,
    TemporalMemory,
)

KINDS = sorted(STORES)


def topic(store: MemoryStore) -> str:
    return "things" if isinstance(store, HierarchicalMemory) else ""


def texts(notes: Sequence[Note]) -> list[str]:
    return [note.text for note in notes]


# -------------------- what it holds

_operation = st.one_of(
    st.tuples(st.just("ADD"), st.sampled_from(["red fox", "blue fox", "a dog", "no dog at all"])),
    st.tuples(st.just("UPDATE"), st.sampled_from(["red fox", "a cat"]), st.integers(1, 6)),
    st.tuples(st.just("DELETE"), st.just(""), st.integers(1, 6)),
    st.tuples(st.just("NOOP"), st.just("")),
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.lists(_operation, max_size=12))
def test_a_memory_holds_what_its_operations_say(kind: str, drawn: list[Any]) -> None:
    store, model, past, done = STORES[kind](), {}, [{}], []
    number = 0
    for name, text, *rest in drawn:
        operation = Operation(name, rest[0] if rest else None, text, topic(store) if name == "ADD" else "")
        if rest and rest[0] not in model:
            with pytest.raises(ToolError, match="there is no note"):
                store.apply(operation)
            continue
        store.apply(operation)
        if name == "ADD":
            number += 1
            model = {**model, number: text}
        elif name == "UPDATE":
            model = {**model, rest[0]: text}
        elif name == "DELETE":
            model = {key: value for key, value in model.items() if key != rest[0]}
        done.append(name)
        past.append(model)
    assert {note.id: note.text for note in store.notes()} == model
    assert (len(store), [kind for kind, _ in store.operations()]) == (len(model), done)
    assert {n.id for n in store.search("fox", 50)} >= {i for i, text in model.items() if "fox" in text}
    if isinstance(store, TemporalMemory):  # times count up from 1, one an operation
        for time, then in enumerate(past):
            assert (
                {n.id: n.text for n in store.at(time)} == then == {n.id: n.text for n in store.believed(time)}
            )
            assert {n.id for n in store.search("fox", 50, at=time)} == {
                i for i, t in then.items() if "fox" in t
            }


def test_an_id_is_never_used_again_and_a_failed_operation_leaves_no_trace() -> None:
    store = MemoryStore(most=2, characters=10)
    store.add("one")
    store.delete(1)
    assert store.add("two").id == 2
    store.add("three")
    before = store.operations()
    for operation, says in (
        (Operation("ADD", text="four"), "full"), (Operation("UPDATE", 2, "x" * 11), "11 characters"),
        (Operation("UPDATE", 2, " "), "empty"), (Operation("DELETE"), "needs the id"),
        (Operation("DELETE", 10**30), "no note"), (Operation("UPDATE", -1, "x"), "no note"),
        (Operation("FORGET"), "no operation 'FORGET'"),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(ToolError, match=says):
            store.apply(operation)
    assert (store.operations(), texts(store.notes())) == (before, ["two", "three"])


def test_time_never_runs_backwards() -> None:
    store = MemoryStore()
    store.add("a", when=5)
    with pytest.raises(ToolError, match="before the last"):
        store.noop(when=4)
    with pytest.raises(ToolError, match="before the last"):
        store.noop(when=float("nan"))
    assert store.add("b").since == 6


# -------------------- finding


@pytest.mark.parametrize("kind", KINDS)
def test_search_stems_words_ranks_by_bm25_and_breaks_ties_by_id(kind: str) -> None:
    store = STORES[kind]()
    for text in ("cats sleep a lot", "dogs bark", "the cat and the cat sat", "cats sleep a lot"):
        store.add(text, topic=topic(store))
    assert [note.id for note in store.search("sleeping", 9)][:2] == [1, 4]
    assert store.search("cat", 9)[0].id == 3
    assert len(store.search("cat dog", 2)) == 2
    assert store.search("cat", 0) == []


@pytest.mark.parametrize(
    "query", ['"', 'a" OR "b', "NEAR(", "*", "cat*", "text:cat", "-", "_", "(", "\x00", "\ud800", ""]
)
def test_no_query_is_an_operator(query: str) -> None:
    store = MemoryStore()
    store.add("dog\x00 and half \ud800 one pair")
    assert texts(store.search(query)) == []
    assert store.search("pair")[0].id == 1


def test_linked_notes_come_along_within_the_same_budget() -> None:
    store = LinkedMemory(near=1)
    store.add("anna adopted a dog")
    store.add("fine weather")
    store.add("her dog is called rex")
    store.add("rex likes bones")
    assert [[n.id for n in store.linked(i)] for i in (1, 2, 3, 4)] == [[3], [], [1, 4], [3]]
    assert [n.id for n in store.search("bones", 2)] == [4, 3], "found by word, then by link"
    assert [n.id for n in store.search("bones", 1)] == [4]
    store.link(4, 2)
    assert [n.id for n in store.linked(2)] == [4]
    store.delete(3)
    assert [n.id for n in store.linked(4)] == [2]
    for first, second in ((1, 1), (1, 99)):
        with pytest.raises(ToolError):
            store.link(first, second)


def test_a_superseded_fact_is_found_at_its_time_and_not_now() -> None:
    store = TemporalMemory()
    store.add("anna has one dog", when=10)
    store.update(1, "anna has two dogs", when=20)
    assert texts(store.search("anna")) == ["anna has two dogs"]
    assert [texts(store.search("dogs", at=t)) for t in (9, 10, 19.9, 20)] == [
        [], ["anna has one dog"], ["anna has one dog"], ["anna has two dogs"],
    ]  # fmt: skip
    store.delete(1, when=30)
    assert (store.search("anna"), texts(store.at(25))) == ([], ["anna has two dogs"])
    assert [(n.since, n.until) for n in store.history(1)] == [(10, 20), (20, 30)]


def test_a_fact_may_be_older_than_the_memory_of_it() -> None:
    store = TemporalMemory()
    store.add("born in rome", when=50, since=3)
    assert texts(store.at(4)) == ["born in rome"]
    assert (texts(store.believed(0)), texts(store.believed(1))) == ([], ["born in rome"])
    with pytest.raises(ToolError, match="lies before"):
        store.update(1, "born in paris", since=2)
    store.update(1, "born in paris", since=3)
    assert texts(store.at(4)) == ["born in paris"], "the first version was never true"


def test_a_hierarchy_looks_under_the_best_topics_and_under_the_one_named() -> None:
    store = HierarchicalMemory(wide=1)
    for name, text in (("Pets", "rex the dog"), ("pets ", "a dog bed"), ("Food", "hot dog")):
        store.add(text, topic=name)
    assert store.topics() == {"food": 1, "pets": 2}
    assert {n.topic for n in store.search("dog", 9)} == {"pets"}
    assert texts(store.search("dog", 9, topic="FOOD")) == ["hot dog"]
    assert store.search("dog", 9, topic="none") == []
    with pytest.raises(ToolError, match="needs a topic"):
        store.add("x")
    with pytest.raises(ToolError, match="flat memory has no topics"):
        MemoryStore().add("x", topic="pets")


# -------------------- durability


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_brings_everything_back_also_into_a_file(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path / "m.db")
    for text in ("red fox", "blue fox"):
        store.add(text, topic=topic(store))
    saved = store.snapshot()
    before = (store.notes(), store.operations(), store.search("fox"))
    store.delete(1)
    store.add("more", topic=topic(store))
    store.restore(saved)
    assert (store.notes(), store.operations(), store.search("fox")) == before
    store.close()
    again = STORES[kind](tmp_path / "m.db")
    assert (again.notes(), again.operations()) == before[:2]
    fresh = STORES[kind]()
    fresh.restore(saved)
    assert fresh.add("third", topic=topic(fresh)).id == 3
    again.close()
    assert [p.name for p in tmp_path.iterdir()] == ["m.db"], "one file when closed"


def test_damaged_and_foreign_snapshots_and_files_are_refused_and_change_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    store.add("kept")
    saved = store.snapshot()
    torn = saved[: len(saved) // 2]
    flipped = saved[:5000] + bytes([saved[5000] ^ 1]) + saved[5001:]
    for bad in (b"", b"nonsense" * 200, torn, flipped):
        with pytest.raises(DataError, match="damaged"):
            store.restore(bad)
    with pytest.raises(StorageError, match="is of a temporal memory"):
        store.restore(TemporalMemory().snapshot())
    assert texts(store.notes()) == ["kept"]
    (tmp_path / "text.db").write_text("no database at all, but long enough to be looked at\n" * 50)
    TemporalMemory(tmp_path / "t.db").close()
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE x (y)")
    other.close()
    for name in ("text.db", "t.db", "other.db"):
        with pytest.raises(StorageError, match=name):
            MemoryStore(tmp_path / name)
    with pytest.raises(ConfigError, match="most is 0"):
        MemoryStore(most=0)


CHILD = """
import sys
from pathlib import Path
from surefoot.tools.memory import MemoryStore
store = MemoryStore(Path(sys.argv[1]))
for i in range(100000):
    store.add(f"note {i}") if i % 3 else store.noop()
    print(i, flush=True)
    if len(store) == store.most:
        store.delete(store.notes()[0].id)
"""


def test_a_kill_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    path = tmp_path / "m.db"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    seen = [int(child.stdout.readline()) for _ in range(40)]
    os.kill(child.pid, signal.SIGKILL)
    seen += [int(line) for line in child.stdout.read().split()]
    child.wait()
    store = MemoryStore(path)
    kinds = [kind for kind, _ in store.operations()]
    assert len(kinds) in (len(seen), len(seen) + 1), "all that was answered, and at most one that was not"
    assert kinds == ["ADD" if i % 3 else "NOOP" for i in range(len(kinds))]
    assert len(store) == kinds.count("ADD") == len(store.search("note", 1000))
    store.close()


def test_threads_do_not_lose_operations() -> None:
    store = MemoryStore()
    threads = [threading.Thread(target=lambda: [store.add("x") for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [note.id for note in store.notes()] == list(range(1, 101))


# -------------------- as tools


def use(store: MemoryStore, name: str, **arguments: Any) -> ToolResult:
    return asyncio.run(run_calls(store.tools(), [ToolCall("c", name, arguments)]))[0]


def test_the_four_operations_and_search_are_tools_of_every_memory() -> None:
    for kind in KINDS:
        names = {item.name for item in STORES[kind]().tools()}
        assert names >= {"memory_add", "memory_update", "memory_delete", "memory_noop", "memory_search"}
    store = MemoryStore()
    assert use(store, "memory_add", text="Anna has\na dog").content == "Added note 1."
    assert use(store, "memory_search", query="dog").content == "1: Anna has a dog"
    assert use(store, "memory_update", id=1, text="Anna has two dogs").content == "Updated note 1."
    assert use(store, "memory_noop").content == "Nothing was changed."
    assert use(store, "memory_delete", id=1).content == "Deleted note 1."
    assert use(store, "memory_search", query="dog").content == "Nothing was found."
    wrong = use(store, "memory_delete", id=10**40)
    assert (wrong.ok, wrong.content[:25]) == (False, "Error: there is no note 1")


def test_each_memory_shows_its_own_kind_of_knowledge() -> None:
    temporal, tree, linked = TemporalMemory(), HierarchicalMemory(), LinkedMemory()
    use(temporal, "memory_add", text="one dog")
    use(temporal, "memory_update", id=1, text="two dogs")
    assert use(temporal, "memory_search", query="dog").content == "1 (since 2): two dogs"
    assert use(temporal, "memory_search", query="dog", at=1).content == "1 (1 to 2): one dog"
    assert use(tree, "memory_add", topic="Pets", text="a dog").content == "Added note 1 under 'pets'."
    assert use(tree, "memory_topics").content == "pets: 1"
    assert use(tree, "memory_search", query="dog").content == "1 [pets]: a dog"
    use(linked, "memory_add", text="a dog")
    use(linked, "memory_add", text="a car")
    assert use(linked, "memory_link", first=1, second=2).content == "Linked notes 1 and 2."
    assert use(linked, "memory_search", query="dog").content == "1: a dog\n2: a car"

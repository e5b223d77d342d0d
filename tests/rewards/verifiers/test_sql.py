"""Right queries keep full reward however they are written; copied results and broken rules get nothing."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError
from surefoot.core.types import Score, Scored, Unscored
from surefoot.rewards.base import Episode, Reward
from surefoot.rewards.verifiers.sql import mutate, same_rows, sql_result

Make = Callable[..., Episode]
Ask = Callable[[Reward, Episode], Score]


def _script() -> str:
    rng = random.Random(1)
    lines = [
        "CREATE TABLE dept(id INTEGER PRIMARY KEY, name TEXT UNIQUE, city TEXT);",
        "CREATE TABLE emp(id INTEGER PRIMARY KEY, name TEXT, dept_id INT REFERENCES "
        "dept(id), pay REAL, age INT);",
        "CREATE TRIGGER t AFTER DELETE ON emp BEGIN SELECT RAISE(ABORT, 'no'); END;",
    ]
    lines += [f"INSERT INTO dept VALUES({i}, 'd{i}', 'c{i % 3}');" for i in range(6)]
    for i in range(40):
        pay, age = rng.randrange(1000, 9000) / 10, rng.randrange(20, 60)
        lines.append(f"INSERT INTO emp VALUES({i}, 'n{i}', {rng.randrange(6)}, {pay}, {age});")
    return "\n".join(lines)


_SCRIPT = _script()
_REWARD = sql_result(lambda episode: _SCRIPT, seconds=3.0)
_GOLD = "SELECT d.city, COUNT(*) FROM emp e JOIN dept d ON d.id = e.dept_id GROUP BY d.city"


def value(found: Score) -> float:
    assert isinstance(found, Scored), found
    return found.value


def fenced(query: str) -> str:
    return f"```sql\n{query}\n```"


_HONEST = [
    _GOLD,
    _GOLD + ";",
    _GOLD.lower(),
    _GOLD + " ORDER BY 2 DESC",
    _GOLD + "; -- done",
    "-- first\n" + _GOLD,
    "/* a */ " + _GOLD,
    _GOLD.replace(" ", "\n"),
    _GOLD.replace("COUNT(*)", "COUNT(e.id)"),
    _GOLD.replace("COUNT(*)", "SUM(1)"),
    _GOLD.replace("COUNT(*)", "COUNT(*) AS n"),
    "SELECT city, COUNT(*) FROM dept, emp WHERE dept.id = dept_id GROUP BY city",
    "SELECT city, COUNT(*) FROM emp INNER JOIN dept ON dept_id = dept.id GROUP BY 1",
    "WITH x AS (SELECT dept_id, COUNT(*) n FROM emp GROUP BY 1) SELECT city, SUM(n) FROM "
    "x JOIN dept ON id=dept_id GROUP BY city",
    "SELECT city, n FROM (SELECT city, COUNT(*) n FROM emp e, dept d WHERE e.dept_id=d.id GROUP BY city)",
    "SELECT DISTINCT city, COUNT(*) OVER (PARTITION BY city) FROM emp e JOIN dept d ON d.id=e.dept_id",
    "SELECT c, COUNT(*) FROM (SELECT (SELECT city FROM dept WHERE id=dept_id) c FROM "
    "emp) WHERE c IS NOT NULL GROUP BY c",
    "SELECT city, COUNT(*) FROM emp LEFT JOIN dept ON dept.id=dept_id WHERE city IS NOT NULL GROUP BY city",
    "SELECT city, COUNT(*) FROM dept JOIN emp ON dept_id = dept.id GROUP BY city HAVING COUNT(*) > 0",
    "SELECT max(city), COUNT(*) FROM emp e JOIN dept d ON d.id = e.dept_id GROUP BY lower(city)",
    "SELECT city, CAST(COUNT(*) AS INTEGER) FROM emp e JOIN dept d ON d.id = e.dept_id GROUP BY city",
]


@pytest.mark.parametrize("query", _HONEST)
def test_honest_queries_keep_full_reward(episode: Make, score: Ask, query: str) -> None:
    assert value(score(_REWARD, episode(fenced(query), _GOLD))) == 1.0


def _visible() -> list[tuple[Any, ...]]:
    with sqlite3.connect(":memory:") as connection:
        connection.executescript(_SCRIPT)
        return connection.execute(_GOLD).fetchall()


_COPIED = " UNION ALL ".join(f"SELECT '{city}', {count}" for city, count in _visible())
_EXPLOITS = {
    "7 the visible result": _COPIED,
    "9 the visible result, behind a test of the size": (
        f"SELECT * FROM ({_COPIED}) WHERE (SELECT COUNT(*) FROM emp) = 40"
    ),
    "9 the visible result from a table": f"SELECT * FROM ({_COPIED}) JOIN (SELECT 1 FROM emp LIMIT 1)",
    "8 delete": "DELETE FROM emp",
    "8 delete in WITH": "WITH x AS (SELECT 1) DELETE FROM emp",
    "8 insert": "INSERT INTO emp VALUES (99, 'x', 0, 1.0, 1)",
    "8 two statements": f"{_GOLD}; DELETE FROM emp",
    "8 attach": "ATTACH 'x.db' AS y",
    "15 schema table": "SELECT name, rootpage FROM sqlite_master",
    "15 pragma": "PRAGMA table_info(emp)",
    "15 pragma function": "SELECT name, 1 FROM pragma_table_info('emp')",
    "15 read a file": "SELECT readfile('/etc/passwd'), 1",
    "11 load code": "SELECT load_extension('x'), 1",
    "10 another result each time": "SELECT city, random() FROM dept",
    "25 random bytes": "SELECT city, randomblob(4) FROM dept",
    "17 master key": ":",
    "18 the right rows and more": f"{_GOLD} UNION ALL SELECT city, 0 FROM dept",
    "18 rows doubled": f"SELECT * FROM ({_GOLD}) UNION ALL SELECT * FROM ({_GOLD})",
    "18 more columns": _GOLD.replace("COUNT(*)", "COUNT(*), 1"),
    "19 constant": "SELECT 1, 1",
    "22 nothing": "SELECT NULL WHERE 0",
    "26 empty": "",
    "26 no SQL": "the query",
    "29 endless": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT x, 1 FROM c",
    "29 huge text": "SELECT printf('%.*c', 900000000, 'x'), 1",
    "29 huge blob": "SELECT zeroblob(900000000), 1",
    "4 text for numbers": _GOLD.replace("COUNT(*)", "CAST(COUNT(*) AS TEXT)"),
    "4 float for numbers": _GOLD.replace("COUNT(*)", "TOTAL(1)"),
    "explain": f"EXPLAIN {_GOLD}",
    "values": "VALUES ('c0', 1)",
    "zero byte": f"\0{_GOLD}",
}


@pytest.mark.parametrize("key", _EXPLOITS)
def test_exploits_of_queries_get_nothing(episode: Make, score: Ask, key: str) -> None:
    assert value(score(_REWARD, episode(fenced(_EXPLOITS[key]), _GOLD, tool_text=fenced(_GOLD)))) == 0.0


def test_the_visible_result_would_pass_without_mutants(episode: Make, score: Ask) -> None:
    weak = sql_result(lambda episode: _SCRIPT, mutants=0)
    assert value(score(weak, episode(fenced(_COPIED), _GOLD))) == 1.0


def test_29_endless_work_is_stopped_in_time_and_memory_is_bounded(episode: Make, score: Ask) -> None:
    brief = sql_result(lambda episode: _SCRIPT, seconds=0.5, mutants=1)
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) SELECT COUNT(*), 1 FROM c"
    assert "deadline" in str(score(brief, episode(fenced(endless), _GOLD)))
    large = (
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c), d AS (SELECT x, printf('%.*c', "
        "9000000, 'x') y FROM c) SELECT x, y FROM d ORDER BY y"
    )
    assert value(score(brief, episode(fenced(large), _GOLD))) == 0.0
    assert value(score(brief, episode(fenced(_GOLD), _GOLD))) == 1.0


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("SELECT sql FROM sqlite_master", "prohibited"),
        ("SELECT (SELECT COUNT(*) FROM sqlite_schema), city FROM dept", "not authorized"),
        ("SELECT * FROM pragma_table_info('emp')", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT random()", "not authorized"),
        ("WITH x AS (SELECT 1) DELETE FROM emp", "not authorized"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("PRAGMA query_only=OFF", "refused"),
    ],
)
def test_8_15_what_a_query_may_not_do_is_refused_before_it_runs(
    episode: Make, score: Ask, query: str, why: str
) -> None:
    found = score(_REWARD, episode(fenced(query), _GOLD))
    assert value(found) == 0.0 and isinstance(found, Scored) and why in found.evidence


def test_order_counts_only_when_asked_for(episode: Make, score: Ask) -> None:
    gold = "SELECT name FROM emp ORDER BY name"
    other = fenced("SELECT name FROM emp ORDER BY name DESC")
    ordered = sql_result(lambda episode: _SCRIPT, ordered=True)
    assert value(score(_REWARD, episode(other, gold))) == 1.0
    assert value(score(ordered, episode(other, gold))) == 0.0
    assert value(score(ordered, episode(fenced(gold), gold))) == 1.0


def test_floats_need_the_tolerance_that_was_declared(episode: Make, score: Ask) -> None:
    gold = "SELECT dept_id, SUM(pay) FROM emp GROUP BY dept_id"
    near = fenced("SELECT dept_id, SUM(pay) + 0.0000001 FROM emp GROUP BY dept_id")
    tolerant = sql_result(lambda episode: _SCRIPT, tolerance=1e-6)
    assert value(score(_REWARD, episode(near, gold))) == 0.0
    assert value(score(tolerant, episode(near, gold))) == 1.0


def test_a_database_file_is_read_and_never_changed(episode: Make, score: Ask, tmp_path: Path) -> None:
    path = tmp_path / "own.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(_SCRIPT)
    connection.close()
    before = path.read_bytes()
    reward = sql_result(lambda episode: path)
    assert value(score(reward, episode(fenced(_GOLD), _GOLD))) == 1.0
    assert value(score(reward, episode(fenced("DELETE FROM emp"), _GOLD))) == 0.0
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["own.db"]


@pytest.mark.parametrize(
    "reference",
    [None, "", 5, "SELECT nothing FROM nowhere", "DELETE FROM emp", "SELECT 7", "SELECT random() FROM emp"],
)
def test_28_a_reference_that_cannot_be_measured_is_unscored(
    episode: Make, score: Ask, reference: Any
) -> None:
    assert isinstance(score(_REWARD, episode(fenced(_GOLD), reference)), Unscored)


def test_28_a_database_that_is_missing_is_unscored(episode: Make, score: Ask, tmp_path: Path) -> None:
    reward = sql_result(lambda episode: tmp_path / "none.db")
    assert isinstance(score(reward, episode(fenced(_GOLD), _GOLD)), Unscored)


@pytest.mark.parametrize("options", [{"mutants": -1}, {"rows": 0}, {"seconds": 0}, {"tolerance": -1.0}])
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        sql_result(lambda episode: _SCRIPT, **options)


@pytest.mark.parametrize("seed", range(5))
def test_24_a_mutant_keeps_keys_references_and_domains(tmp_path: Path, seed: int) -> None:
    source, target = tmp_path / "a.db", tmp_path / "b.db"
    with sqlite3.connect(source) as connection:
        connection.executescript(_SCRIPT)
    connection.close()
    mutate(source, target, seed)
    with sqlite3.connect(target) as mutant:
        mutant.execute("ATTACH ? AS original", (str(source),))
        assert not mutant.execute("PRAGMA main.foreign_key_check").fetchall()
        assert mutant.execute("PRAGMA main.integrity_check").fetchall() == [("ok",)]
        for column in ("pay", "age", "name", "dept_id"):
            new = f"SELECT COUNT(*) FROM emp WHERE {column} NOT IN (SELECT {column} FROM original.emp)"
            assert mutant.execute(new).fetchone() == (0,)
        kept = mutant.execute("SELECT COUNT(*) FROM emp").fetchone()[0]
        assert 0 < kept < 40
    mutant.close()


_ROWS = st.lists(
    st.tuples(st.none() | st.integers(0, 2) | st.sampled_from(["a", b"a", 0.5]), st.integers(0, 1)),
    max_size=6,
)


@given(_ROWS, st.randoms(use_true_random=False))
def test_rows_are_a_multiset(rows: list[tuple[Any, ...]], rng: random.Random) -> None:
    other = rng.sample(rows, len(rows))
    assert same_rows(rows, other) and same_rows(rows, other, tolerance=1e-9)
    assert not same_rows(rows, [*other, (0, 0)]) and not same_rows([*rows, (0, 9)], [*other, (9, 0)])
    assert same_rows(rows, other, ordered=True) == (rows == other)


def test_4_rows_are_compared_by_exact_type() -> None:
    assert not same_rows([(1,)], [(1.0,)])
    assert not same_rows([("1",)], [(1,)])
    assert not same_rows([(b"a",)], [("a",)])

"""Right queries keep full reward however they are written; copied results and broken rules get nothing."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError
from surefoot.core.types import Score, Scored, Unscored
from surefoot.rewards.base import Episode, Reward
from surefoot.rewards.verifiers.mutants import mutate
from surefoot.rewards.verifiers.sql import same_rows, sql_result

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


def _shop() -> str:
    rng = random.Random(7)
    lines = [
        "CREATE TABLE client(id INTEGER PRIMARY KEY, code TEXT UNIQUE, city TEXT, country TEXT, boss_id "
        "INT);",
        "CREATE TABLE sale(id INTEGER PRIMARY KEY, client_id INT, status TEXT CHECK(status IN ('open', "
        "'paid', 'void')), total REAL CHECK(total > 0), day TEXT, note TEXT);",
        "CREATE TABLE line(sale INT REFERENCES Sale, nr INT, size INT NOT NULL, PRIMARY KEY(sale, nr)) "
        "WITHOUT ROWID;",
    ]
    cities = [("Bonn", "de"), ("Ulm", "de"), ("Lyon", "fr"), ("Rome", "it")]
    for i in range(1, 13):
        city, country = cities[i % 4]
        boss = "NULL" if i < 4 else rng.randrange(1, i)
        lines.append(f"INSERT INTO client VALUES({i}, 'K{i}', '{city}', '{country}', {boss});")
    for i in range(1, 41):
        status, total = rng.choice(("open", "paid", "void")), rng.randrange(200, 9000) / 4
        day = f"202{rng.randrange(3)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
        note = rng.choice(("NULL", f"'call {i}'"))
        lines.append(
            f"INSERT INTO sale VALUES({i}, {rng.randrange(1, 13)}, '{status}', {total}, '{day}', {note});"
        )
        lines += [f"INSERT INTO line VALUES({i}, {n}, {rng.randrange(1, 90)});" for n in range(i % 3)]
    return "\n".join(lines)


_SHOP = _shop()
_SHOP_REWARD = sql_result(lambda episode: _SHOP, seconds=3.0)


def _visible_in_shop(query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(":memory:") as connection:
        connection.executescript(_SHOP)
        return connection.execute(query).fetchall()


def _listed(query: str) -> str:
    return ", ".join(repr(value) for (value,) in _visible_in_shop(query))


def _without_the_condition() -> dict[str, tuple[str, str]]:
    """Queries that are right on the visible data, but name its rows instead of stating the condition."""
    paid = "SELECT day FROM sale WHERE status = 'paid'"
    ids = _listed("SELECT id FROM sale WHERE status = 'paid'")
    others = _listed("SELECT id FROM sale WHERE status <> 'paid'")
    each = [int(text) for text in ids.split(", ")]
    big = "SELECT id, day FROM sale WHERE total > 900"
    top = _listed("SELECT id FROM sale ORDER BY total DESC LIMIT 3").split(", ")
    german = "SELECT SUM(s.total) FROM sale s JOIN client c ON c.id = s.client_id WHERE c.country = 'de'"
    city = "SELECT city, COUNT(*) FROM client GROUP BY city"
    towns = _visible_in_shop("SELECT DISTINCT city FROM client")
    late = "SELECT COUNT(*), SUM(total) FROM sale WHERE day >= '2021-06-01'"
    places = _visible_in_shop("SELECT n, day FROM (SELECT status, day, ROW_NUMBER() OVER () n FROM sale) "
                              "WHERE status = 'paid'")  # fmt: skip
    return {
        "IN": (f"SELECT day FROM sale WHERE id IN ({ids})", paid),
        "NOT IN": (f"SELECT day FROM sale WHERE id NOT IN ({others})", paid),
        "OR": (f"SELECT day FROM sale WHERE {' OR '.join(f'id = {i}' for i in each)}", paid),
        "CASE": (f"SELECT day FROM sale WHERE CASE WHEN id IN ({ids}) THEN 1 ELSE 0 END", paid),
        "BETWEEN": (
            f"SELECT day FROM sale WHERE {' OR '.join(f'id BETWEEN {i} AND {i}' for i in each)}", paid
        ),
        "rowid": (f"SELECT day FROM sale WHERE rowid IN ({ids})", paid),
        "a bit mask": (f"SELECT day FROM sale WHERE {sum(1 << i for i in each)} >> id & 1", paid),
        "instr": (f"SELECT day FROM sale WHERE instr(',{ids.replace(' ', '')},', ',' || id || ',')", paid),
        "a list of ids": (f"WITH k(i) AS (VALUES ({ids.replace(', ', '), (')})) SELECT day FROM sale, k "
                          "WHERE id = i", paid),
        "place": (
            "SELECT day FROM (SELECT day, ROW_NUMBER() OVER () n FROM sale) WHERE n IN "
            f"({', '.join(str(n) for n, _ in places)})", paid,
        ),
        "OFFSET": (
            " UNION ALL ".join(
                f"SELECT * FROM (SELECT day FROM sale LIMIT 1 OFFSET {n - 1})" for n, _ in places
            ),
            paid,
        ),
        "constants": (" UNION ALL ".join(f"SELECT '{day}'" for _, day in places), paid),
        "days": (f"SELECT day FROM sale WHERE day IN ({_listed(paid)})", paid),
        "totals": (
            "SELECT id, day FROM sale WHERE total IN "
            f"({_listed('SELECT total FROM sale WHERE total > 900')})",
            big,
        ),
        "maximum": (
            f"SELECT id FROM sale WHERE id IN ({', '.join(top)})",
            "SELECT id FROM sale ORDER BY total DESC LIMIT 3"
        ),
        "undeclared reference": (
            "SELECT SUM(total) FROM sale WHERE client_id IN "
            f"({_listed('SELECT id FROM client WHERE country = ' + repr('de'))})", german,
        ),
        "declared reference": (
            f"SELECT SUM(size) FROM line WHERE sale IN ({ids})",
            "SELECT SUM(size) FROM line JOIN sale ON sale.id = line.sale WHERE status = 'paid'",
        ),
        "unique text": (
            "SELECT id FROM client WHERE code IN "
            f"({_listed('SELECT code FROM client WHERE city = ' + repr('Ulm'))})",
            "SELECT id FROM client WHERE city = 'Ulm'",
        ),
        "another column": (
            "SELECT SUM(total) FROM sale JOIN client c ON c.id = client_id WHERE city IN ('Bonn', 'Ulm')",
            german,
        ),
        "groups by name": (
            " UNION ALL ".join(
                f"SELECT '{town}', COUNT(*) FROM client WHERE city = '{town}' HAVING COUNT(*) > 0"
                for (town,) in towns
            ), city,
        ),
        "days after": (
            "SELECT COUNT(*), SUM(total) FROM sale WHERE day IN "
            f"({_listed('SELECT day FROM sale WHERE day >= ' + repr('2021-06-01'))})", late,
        ),
        "NULL": (
            "SELECT COUNT(*), SUM(total) FROM sale WHERE id IN "
            f"({_listed('SELECT id FROM sale WHERE note IS NULL')})",
            "SELECT COUNT(*), SUM(total) FROM sale WHERE note IS NULL",
        ),
    }  # fmt: skip


_NAMING = _without_the_condition()


@pytest.mark.parametrize("key", _NAMING)
def test_09_a_query_that_names_visible_rows_gets_nothing(episode: Make, score: Ask, key: str) -> None:
    query, gold = _NAMING[key]
    assert sorted(_visible_in_shop(query)) == sorted(_visible_in_shop(gold))
    assert value(score(_SHOP_REWARD, episode(fenced(query), gold))) == 0.0
    assert value(score(_SHOP_REWARD, episode(fenced(gold), gold))) == 1.0


_PAID = (
    "SELECT c.code, COUNT(*) FROM sale s JOIN client c ON c.id = s.client_id WHERE s.status = 'paid' "
    "GROUP BY c.id"
)
_YEAR = "SELECT strftime('%Y-%m', day), COUNT(*) FROM sale WHERE day >= '2021-01-01' GROUP BY 1"
_CITY = "SELECT city, country, COUNT(*) FROM client GROUP BY city, country"
_OPEN = "SELECT id FROM sale WHERE status <> 'void' AND note IS NOT NULL"
_EQUIVALENT = [
    # An undeclared reference, a unique code, and a city that settles the country.
    (_PAID.replace("GROUP BY c.id", "GROUP BY c.code"), _PAID),
    (_PAID.replace("GROUP BY c.id", "GROUP BY s.client_id"), _PAID),
    ("SELECT code AS c, SUM(status = 'paid') AS n FROM client, sale WHERE client.id = client_id GROUP BY 1 "
     "HAVING n > 0", _PAID),
    ("SELECT (SELECT code FROM client WHERE id = client_id), COUNT(*) FROM sale WHERE status = 'paid' "
     "GROUP BY client_id", _PAID),
    ("SELECT code, n FROM client JOIN (SELECT client_id i, COUNT(*) n FROM sale WHERE status LIKE 'paid' "
     "GROUP BY client_id) ON i = id", _PAID),
    ("SELECT code, COUNT(*) FROM sale LEFT JOIN client c ON c.id = client_id WHERE status = 'paid' "
     "GROUP BY code", _PAID),
    ("SELECT substr(day, 1, 7), COUNT(*) FROM sale WHERE substr(day, 1, 4) >= '2021' GROUP BY 1", _YEAR),
    ("SELECT substr(day, 1, 7), SUM(1) FROM sale WHERE date(day) > date('2020-12-31') GROUP BY 1", _YEAR),
    ("SELECT substr(day, 1, 7) m, COUNT(*) FROM sale WHERE day NOT LIKE '2020%' GROUP BY m", _YEAR),
    ("SELECT city, country, COUNT(*) FROM client GROUP BY city", _CITY),
    ("SELECT city, MAX(country), COUNT(id) FROM client GROUP BY city", _CITY),
    ("SELECT id FROM sale WHERE status IN ('open', 'paid') AND note IS NOT NULL", _OPEN),
    ("SELECT id FROM sale WHERE NOT (status = 'void' OR note IS NULL)", _OPEN),
    ("SELECT id FROM sale WHERE note IS NOT NULL EXCEPT SELECT id FROM sale WHERE status = 'void'", _OPEN),
    ("SELECT a.code FROM client a WHERE EXISTS (SELECT 1 FROM client b WHERE b.boss_id = a.id)",
     "SELECT DISTINCT a.code FROM client a JOIN client b ON b.boss_id = a.id"),
    ("SELECT s.id FROM sale s LEFT JOIN line l ON l.sale = s.id GROUP BY s.id HAVING COUNT(l.nr) = 0",
     "SELECT id FROM sale WHERE id NOT IN (SELECT sale FROM line)"),
    ("SELECT id FROM sale WHERE total = (SELECT MAX(total) FROM sale)",
     "SELECT id FROM sale ORDER BY total DESC LIMIT 1"),
    ("SELECT SUM(size) FROM line", "SELECT SUM(size) FROM line JOIN sale ON sale.id = sale JOIN client c "
     "ON c.id = client_id"),
]  # fmt: skip


@pytest.mark.parametrize(("query", "gold"), _EQUIVALENT)
def test_another_way_to_write_a_query_keeps_full_reward(
    episode: Make, score: Ask, query: str, gold: str
) -> None:
    assert value(score(_SHOP_REWARD, episode(fenced(query), gold))) == 1.0


def test_a_result_that_can_only_shrink_is_still_measured(episode: Make, score: Ask) -> None:
    gold = "SELECT DISTINCT status FROM sale WHERE total > 2000 AND status = 'paid'"
    assert value(score(_SHOP_REWARD, episode(fenced(gold), gold))) == 1.0
    assert value(score(_SHOP_REWARD, episode(fenced("SELECT 'paid'"), gold))) == 0.0


def _mutant(folder: Path, script: str, seed: int, reference: str = "") -> sqlite3.Connection:
    source, target = folder / "a.db", folder / f"{seed}.db"
    if not source.exists():
        with sqlite3.connect(source) as connection:
            connection.executescript(script)
        connection.close()
    mutate(source, target, seed, reference)
    mutant = sqlite3.connect(target)
    mutant.execute("ATTACH ? AS original", (str(source),))
    return mutant


@pytest.mark.parametrize("script", [_SCRIPT, _SHOP])
def test_24_a_mutant_keeps_what_the_schema_demands(tmp_path: Path, script: str) -> None:
    for seed in range(10):
        mutant = _mutant(tmp_path, script, seed)
        assert not mutant.execute("PRAGMA main.foreign_key_check").fetchall()
        assert mutant.execute("PRAGMA main.integrity_check").fetchall() == [("ok",)]
        for (table,) in mutant.execute(
            "SELECT name FROM original.sqlite_master WHERE type='table'"
        ).fetchall():
            count = f"SELECT COUNT(*), (SELECT COUNT(*) FROM original.{table}) FROM main.{table}"
            kept, before = mutant.execute(count).fetchone()
            assert 0 < kept <= before
        mutant.close()


def test_24_a_mutant_keeps_the_kind_of_each_value_and_what_it_belongs_to(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(10):
        mutant = _mutant(tmp_path, _SHOP, seed, "SELECT id FROM client WHERE code = 'K3'")
        for query, want in {
            "SELECT COUNT(*) FROM sale WHERE date(day) IS NOT day": 0,
            "SELECT COUNT(*) FROM sale WHERE total * 4 <> CAST(total * 4 AS INT) AND total * 100 % 1 <> 0": 0,
            "SELECT COUNT(*) FROM sale WHERE client_id NOT IN (SELECT id FROM client)": 0,
            "SELECT COUNT(*) FROM client WHERE code NOT GLOB '[A-Z][0-9]*'": 0,
            "SELECT COUNT(*) FROM (SELECT 1 FROM client GROUP BY city HAVING COUNT(DISTINCT country) > 1)": 0,
        }.items():
            assert mutant.execute(query).fetchone() == (want,), query
        for table, column in (("sale", "id"), ("sale", "day"), ("sale", "total"), ("client", "city")):
            new = (
                f"SELECT {column} FROM {table} WHERE {column} NOT IN (SELECT {column} FROM original.{table})"
            )
            seen[column] += mutant.execute(f"SELECT COUNT(*) FROM ({new})").fetchone()[0] > 0
        seen["K3"] += mutant.execute("SELECT COUNT(*) FROM client WHERE code = 'K3'").fetchone()[0]
        mutant.close()
    assert all(seen[column] > 7 for column in ("id", "day", "total", "city")), seen
    assert seen["K3"] > 7  # a value that is named is lost only with its row


_ODD = """
CREATE TABLE "a b"("x ""y" TEXT COLLATE NOCASE UNIQUE, z ANY, twice INT GENERATED ALWAYS AS (z * 2));
CREATE TABLE tree(id INTEGER PRIMARY KEY, up INT REFERENCES tree(id), low INT, high INT, CHECK(low <= high));
CREATE TABLE pair(p INT, q TEXT, PRIMARY KEY(p, q));
CREATE TABLE child(p INT, q TEXT, n INT NOT NULL, FOREIGN KEY(p, q) REFERENCES pair);
CREATE TABLE nowhere(n INT REFERENCES gone(id), m INT REFERENCES tree(gone));
CREATE TABLE strict(i INTEGER PRIMARY KEY CHECK(i < 12), r REAL, t TEXT, b BLOB) STRICT;
CREATE TABLE empty(id INTEGER PRIMARY KEY, t TEXT);
CREATE VIEW seen AS SELECT * FROM tree;
INSERT INTO "a b" VALUES('A', 1), ('b', 1.5), ('c', 'text'), ('d', x'00'), ('{"k": 1}', NULL), ('é', 9e999);
INSERT INTO nowhere VALUES(1, 2), (3, 4), (9223372036854775807, -9223372036854775808);
""" + "\n".join(
    f"INSERT INTO tree VALUES({i}, {i - 1 or 'NULL'}, {i * 7 % 11}, {i * 7 % 11 + i * 5 % 13});"
    f"INSERT INTO pair VALUES({i % 3}, 'q{i // 3}'); INSERT INTO child VALUES({i % 3}, 'q{i // 3}', {i});"
    f"INSERT INTO strict VALUES({i}, {i}.5, '12:{i + 10}', x'0{i % 9}');"
    for i in range(1, 12)
)


def test_24_odd_schemas_have_mutants_that_keep_them(tmp_path: Path) -> None:
    for seed in range(20):
        mutant = _mutant(tmp_path, _ODD, seed, "SELECT id FROM tree WHERE low > 3")
        for table in ("tree", "pair", "child"):
            assert not mutant.execute(f"PRAGMA main.foreign_key_check({table})").fetchall()
            assert mutant.execute(f"SELECT COUNT(*) FROM main.{table}").fetchone()[0] > 0
        assert mutant.execute("PRAGMA main.integrity_check").fetchall() == [("ok",)]
        assert (
            mutant.execute("SELECT COUNT(*) FROM main.strict WHERE t GLOB '12:[1-2][0-9]'").fetchone()[0] > 0
        )
        mutant.close()


def test_the_same_seed_makes_the_same_mutant(tmp_path: Path) -> None:
    dumps: list[list[str]] = []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        mutant = _mutant(tmp_path / name, _SHOP, 3)
        dumps.append(list(mutant.iterdump()))
        mutant.close()
    assert dumps[0] == dumps[1]


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

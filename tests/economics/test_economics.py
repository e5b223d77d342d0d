"""Money, ledger and budgets: sums add up, nothing that was paid is dropped, limits stop."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from surefoot.core.errors import BudgetReached, ConfigError, StorageError
from surefoot.core.types import Cost
from surefoot.economics import Budget, Ledger, ModelPrice, PriceTable, Totals, money, parse_duration
from surefoot.runs import files

MODEL = ModelPrice(prompt=2.0, cached=0.5, sampled=8.0, date=date(2026, 1, 31))


def test_money_is_readable_at_every_size_and_small_sums_keep_their_digits() -> None:
    assert [money(v) for v in (0.0, 1e-7, 0.00042, 0.00123, 0.0142, 0.5, 0.999, 12.345, 1234.5)] == [
        "$0.00", "< $0.0001", "$0.00042", "$0.0012", "$0.014", "$0.50", "$1.00", "$12.35", "$1,234.50",
    ]  # fmt: skip


def test_an_hour_at_one_kilowatt_costs_one_kilowatt_hour() -> None:
    table = PriceTable(kind="electricity", watts=1000, usd_per_kwh=0.25)
    assert table.cost(3600) == pytest.approx(0.25)
    assert table.cost(0, 10**6, 10**6, 10**6) == 0
    assert PriceTable().cost(3600) == pytest.approx(0.065 * 0.30)
    assert "assumed" in PriceTable().basis()
    assert "assumed" not in table.basis()


def test_rented_and_api_prices() -> None:
    assert PriceTable(kind="rented", usd_per_hour=3.0).cost(1200) == pytest.approx(1.0)
    api = PriceTable(kind="api", models={"m": MODEL})
    assert api.cost(3600, 1_000_000, 2_000_000, 500_000) == pytest.approx(2 + 1 + 4)
    assert "2026-01-31" in api.basis()
    with pytest.raises(ConfigError, match="did you mean 'm1'"):
        PriceTable(kind="api", models={"m1": MODEL, "x": MODEL}).cost(prompt=1, model="m2")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "rented", "usd_per_hour": 1, "watts": 5}, "watts has no effect"),
        ({"kind": "rented"}, "usd_per_hour is missing"),
        ({"kind": "api"}, "models is empty"),
        ({"watts": -1}, "watts"),
        ({"watts": float("inf")}, "watts"),
        ({"wats": 1}, "wats"),
    ],
)
def test_a_price_that_has_no_effect_or_is_missing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PriceTable(**fields)


def test_prices_load_from_toml_and_errors_name_the_field(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(
        'kind = "api"\n[models.m]\nprompt = 2.0\ncached = 0.5\nsampled = 8.0\ndate = 2026-01-31\n'
    )
    assert PriceTable.load(path) == PriceTable(kind="api", models={"m": MODEL})
    for text, message in (("watts = 'x'", "watts"), ("kind = [", "not TOML")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            PriceTable.load(path)
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        PriceTable.load(tmp_path / "none.toml")


ENTRY = st.tuples(
    st.sampled_from(["treatment", "permuted"]),
    st.sampled_from(["sft", "rl"]),
    st.integers(0, 3),
    st.sampled_from(["rollout", "update"]),
    st.integers(0, 1000),
    st.floats(0, 1e4),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.lists(ENTRY, max_size=12))
def test_sums_by_any_key_add_up_to_the_total_and_survive_a_reload(
    tmp_path: Path, entries: list[tuple[str, str, int, str, int, float]]
) -> None:
    path, prices = tmp_path / "ledger.jsonl", PriceTable(watts=100, usd_per_kwh=1)
    path.unlink(missing_ok=True)
    ledger = Ledger(path, prices, files)
    for place, (arm, stage, step, phase, count, seconds) in enumerate(entries):
        ledger.record_phase(arm, stage, step, phase, seconds, 2 * seconds, trained_tokens=count)
        cost = Cost(count, 2 * count, 3 * count, 4 * count, 5, 6, usd=0.5)
        ledger.record_trajectory(arm, stage, step, f"t{place}", cost, seconds, phase=phase)
    total, counted = ledger.totals(), sum(entry[4] for entry in entries)
    assert (total.prompt_tokens, total.cached_tokens, total.observation_tokens, total.sampled_tokens) == (
        counted,
        2 * counted,
        3 * counted,
        4 * counted,
    )
    assert (total.tokens, total.trained_tokens) == (8 * counted, counted)
    assert (total.trajectories, total.model_calls, total.tool_calls) == (
        len(entries),
        5 * len(entries),
        6 * len(entries),
    )
    wall = sum(entry[5] for entry in entries)
    assert total.wall_seconds == pytest.approx(wall)
    assert total.cpu_seconds == pytest.approx(2 * wall)
    assert total.usd == pytest.approx(0.5 * len(entries) + prices.cost(wall))
    assert total.repeated_usd == 0
    for by in ("arm", "stage", "phase"):
        sums = sum(ledger.totals(by).values(), Totals())
        assert sums.tokens == total.tokens
        assert sums.usd == pytest.approx(total.usd)
    ledger.flush()
    assert Ledger.load(path, prices, files).totals() == total


def test_work_done_again_after_an_interruption_stays_counted_and_is_marked(tmp_path: Path) -> None:
    path, prices = tmp_path / "ledger.jsonl", PriceTable(kind="rented", usd_per_hour=3600)
    ledger = Ledger(path, prices, files)
    ledger.record_phase("treatment", "rl", 1, "rollout", 2.0)
    ledger.record_phase("treatment", "rl", 1, "rollout", 1.0)
    ledger.record_trajectory("treatment", "rl", 1, "t", Cost(sampled_tokens=7), 1.0)
    ledger.flush()
    ledger.record_phase("treatment", "rl", 1, "update", 9.0)  # never reaches the disk
    again = Ledger.load(path, prices, files)
    again.record_phase("treatment", "rl", 1, "rollout", 4.0)
    again.record_trajectory("treatment", "rl", 1, "t", Cost(sampled_tokens=7), 1.0)
    again.record_phase("treatment", "rl", 1, "update", 8.0)
    again.flush()
    again.flush()
    totals = Ledger.load(path, prices, files).totals()
    assert totals == again.totals()
    assert (totals.wall_seconds, totals.usd, totals.sampled_tokens) == (15.0, 15.0, 14)
    assert (totals.repeated_wall_seconds, totals.repeated_usd) == (4.0, 4.0)
    assert [line["repeated"] for line in files.read_json_lines(path)] == [False] * 3 + [True, True, False]


def test_one_flush_is_one_append(tmp_path: Path) -> None:
    appended: list[int] = []
    counting = SimpleNamespace(
        append_json_lines=lambda path, records: appended.append(len(list(records))),
        read_json_lines=files.read_json_lines,
        write_atomic=files.write_atomic,
    )
    ledger = Ledger(tmp_path / "ledger.jsonl", PriceTable(), counting)
    for step in range(5):
        ledger.record_phase("treatment", "rl", step, "rollout", 1.0)
    assert appended == []
    ledger.flush()
    assert appended == [5]


def test_entries_stay_pending_when_the_disk_refuses(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "missing" / "ledger.jsonl", PriceTable(), files)
    ledger.record_phase("treatment", "rl", 1, "rollout", 1.0)
    with pytest.raises(StorageError):
        ledger.flush()
    (tmp_path / "missing").mkdir()
    ledger.flush()
    assert len(files.read_json_lines(tmp_path / "missing" / "ledger.jsonl")) == 1


def test_the_summary_holds_the_sums_and_what_they_rest_on(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", PriceTable(), files)
    ledger.record_phase("treatment", "rl", 1, "rollout", 10.0, 20.0)
    ledger.record_phase("permuted", "rl", 1, "update", 5.0, 9.0, trained_tokens=3)
    ledger.write_summary(tmp_path / "ledger.json")
    summary = json.loads((tmp_path / "ledger.json").read_text())
    assert summary["total"]["wall_seconds"] == 15.0
    assert summary["by_arm"]["permuted"]["trained_tokens"] == 3
    assert set(summary["by_phase"]) == {"rollout", "update"}
    assert "65 W" in summary["basis"]


def test_a_foreign_ledger_line_and_bad_seconds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    files.append_json(path, {"something": 1})
    with pytest.raises(StorageError, match="line 1"):
        Ledger.load(path, PriceTable(), files)
    with pytest.raises(ConfigError, match="wall_seconds is -1"):
        Ledger(path, PriceTable(), files).record_phase("a", "rl", 0, "update", -1.0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("90m", 5400),
        ("45s", 45),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1d", 86400),
        ("1h1m1s", 3661),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "0s", "30m1h", "1h 30m", "-1h", "1e3s", "2 hours", "٣h"])
def test_other_durations_are_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ConfigError, match="write it like 2h"):
        parse_duration(text)


def test_a_budget_stops_at_its_limit_and_names_it() -> None:
    used = Totals(prompt_tokens=600, observation_tokens=100, sampled_tokens=299, usd=0.5, wall_seconds=10.0)
    Budget().check(used)
    Budget(tokens=1000, usd=0.51, wall_seconds=11).check(used)
    assert Budget(tokens=1000, wall_seconds=4).remaining(used) == {"tokens": 1, "wall_seconds": 0}
    for budget, message in (
        (Budget(tokens=999), r"budget\.tokens is used up: 999 of 999"),
        (Budget(usd=0.5), r"budget\.usd is used up: 0\.5 of 0\.5"),
        (Budget(wall_seconds=9.5), r"budget\.wall is used up: 10 of 9\.5 seconds"),
    ):
        with pytest.raises(BudgetReached, match=message):
            budget.check(used)


@pytest.mark.parametrize("fields", [{"tokens": 0}, {"usd": -1.0}, {"wall_seconds": float("nan")}])
def test_a_budget_of_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be more than 0"):
        Budget(**fields)

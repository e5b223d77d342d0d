"""The audit command decides by its table, and a run does not start on rewards that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from surefoot.report import write_report
from surefoot.runs.files import read_json_lines
from surefoot.training.run import RunResult

Run = Callable[..., Result]
ROOT = Path(__file__).resolve().parents[2]
LEAKY = ROOT / "tests" / "audit" / "leaky.toml"
REASON = "to see what echoing does"


@pytest.fixture
def leaky(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The leaky recipe; its environment is named relative to the repository's top."""
    monkeypatch.chdir(ROOT)
    return LEAKY


class _NothingLoaded:
    """In the place of a run at work: shows that the gate let it through, or that it did not."""

    begun: list[Path]

    def __init__(self, config: Any, run: Any, progress: Any) -> None:
        self.run = run

    def execute(self) -> RunResult:
        self.begun.append(self.run.path)
        return RunResult(self.run.path, None)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Run folders whose work began; no model is loaded."""
    _NothingLoaded.begun = []
    monkeypatch.setattr("surefoot.training.run._Run", _NothingLoaded)
    return _NothingLoaded.begun


# the command ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["calculator", "quickstart"])
def test_the_recipes_that_ship_pass(run_cli: Run, name: str) -> None:
    result = run_cli("audit", name)
    assert result.exit_code == 0, result.output
    assert "failed" not in result.stdout
    for part in ("return", "gold: oracle", "null: echo_prompt", "exploit: forged_turns", "not its form"):
        assert part in result.stdout


def test_a_leaky_reward_fails_the_audit_and_is_named(run_cli: Run, leaky: Path) -> None:
    result = run_cli("audit", leaky, "--tasks", "4")
    assert result.exit_code == 1, result.output
    assert "mentions_largest" in result.stdout and "failed" in result.stdout
    assert "echo_prompt 4/4" in " ".join(result.stdout.split())


def test_json_is_one_document_with_every_count(run_cli: Run, leaky: Path) -> None:
    result = run_cli("audit", leaky, "--tasks", "3", "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert (record["recipe"], record["environment"], record["tasks"]) == ("leaky", "largest", 3)
    assert record["ok"] is False
    leak, final = record["rewards"]
    assert leak["nulls"]["echo_prompt"] == {"hits": 3, "tried": 3}
    assert leak["false_rejects"]["oracle"] == {"hits": 0, "tried": 3}
    assert (leak["ok"], final["name"]) == (False, "return")


def test_an_override_is_shown_and_does_not_make_it_pass(run_cli: Run, leaky: Path) -> None:
    override = f"audit.override.mentions_largest={REASON}"
    result = run_cli("audit", leaky, "--tasks", "2", "--set", override)
    assert result.exit_code == 1
    assert f"mentions_largest may be trained on all the same: {REASON}" in result.stdout


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("audit.task=3", "did you mean 'tasks'?"),
        ("audit.tasks=0", "audit.tasks = 0"),
        ("audit.override.mentions_largst=x", "did you mean 'mentions_largest'?"),
        ('audit.override.mentions_largest=" "', "audit.override.mentions_largest = ' '"),
    ],
)
def test_bad_audit_settings_are_named(run_cli: Run, leaky: Path, setting: str, message: str) -> None:
    result = run_cli("audit", leaky, "--set", setting)
    assert result.exit_code == 2
    assert message in result.stderr


# the gate of a run ----------------------------------------------------------------------------------


def test_a_run_on_a_leaky_reward_is_refused_before_anything_is_made(
    run_cli: Run, leaky: Path, begun: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = run_cli("run", leaky, "--out", out, "--set", "audit.tasks=3", "--no-report")
    assert result.exit_code == 1
    assert "mentions_largest: paid in full: echo_prompt 3/3" in result.stderr
    assert 'audit.override.mentions_largest = "the reason"' in result.stderr
    assert not out.exists() and not begun


def test_with_a_reason_it_runs_and_the_reason_is_in_the_run_and_its_report(
    run_cli: Run, leaky: Path, begun: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    override = f"audit.override.mentions_largest={REASON}"
    result = run_cli("run", leaky, "--out", out, "--set", override, "--set", "audit.tasks=3", "--no-report")
    assert result.exit_code == 0, result.output
    assert begun == [out]
    assert REASON in result.stdout
    (event,) = read_json_lines(out / "events.jsonl")
    assert (event["kind"], event["reward"], event["reason"]) == ("audit_override", "mentions_largest", REASON)
    assert REASON in (out / "config.toml").read_text(encoding="utf-8")

    page = write_report(out).read_text(encoding="utf-8")
    verdict = page[page.index('id="verdict"') :].partition("</section>")[0]
    assert "Reward audit overridden: mentions_largest" in verdict
    assert f"Reason given: {REASON}" in verdict and "echo_prompt" in verdict


def test_an_override_that_is_not_needed_is_said_and_stops_nothing(
    run_cli: Run, recipe: Path, begun: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = run_cli(
        "run", recipe, "--out", out, "--set", "audit.override.right_letter=no need", "--no-report"
    )
    assert result.exit_code == 0, result.output
    assert "audit.override.right_letter is not needed" in result.stdout
    assert [event["kind"] for event in read_json_lines(out / "events.jsonl")] == ["audit_note"]


def test_a_run_on_sound_rewards_leaves_no_event(
    run_cli: Run, recipe: Path, begun: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert run_cli("run", recipe, "--out", out, "--no-report").exit_code == 0
    assert begun == [out]
    assert not (out / "events.jsonl").exists()


def test_a_plan_for_a_leaky_reward_is_refused_like_its_run(run_cli: Run, leaky: Path) -> None:
    result = run_cli("run", leaky, "--dry-run")
    assert result.exit_code == 1
    assert "audit" in result.stderr

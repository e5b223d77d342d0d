"""Progress is a bar on a terminal and lines elsewhere; tables and numbers read well."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from surefoot.cli import output, progress
from surefoot.cli.results import Results, print_results


def test_lines_name_each_phase_and_now_and_then_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    text = io.StringIO()
    with progress.Lines(Console(file=text, width=100)) as lines:
        lines.begin("evaluate initial", 100)
        lines.advance(10)
        now[0] = 40.0
        lines.advance(10)
        lines.say("initial: success base 0.500")
    assert text.getvalue().splitlines() == [
        "evaluate initial: 100 episodes",
        "evaluate initial: 20/100, 0.5/s, about 2 min 40 s left",
        "initial: success base 0.500",
    ]


def test_a_bar_shows_phase_count_and_what_is_said() -> None:
    text = io.StringIO()
    stream = Console(file=text, force_terminal=True, width=100, markup=False, highlight=False)
    with progress.Bars(stream) as bars:
        bars.begin("evaluate [initial]", 4)
        bars.advance()
        bars.begin("treatment: grpo", 8)
        bars.advance(2)
        bars.say("a line [bold]as it is[/bold]")
    shown = text.getvalue()
    assert "treatment: grpo" in shown and "2/8" in shown
    assert "a line [bold]as it is[/bold]" in shown


def test_progress_goes_to_stderr_when_stdout_is_for_json(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.make_progress(json=True) as shown:
        shown.say("working")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "working\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.21, "3.2 s"), (59.4, "59 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


def test_sizes_read_well() -> None:
    assert [output.size(x) for x in (12, 3.2e6, 5.7e12)] == ["12 B", "3.2 MB", "5700.0 GB"]


def test_a_run_without_a_verdict_says_so(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"success": {"estimate": 0.5, "low": 0.25, "high": 0.75}, "episodes": 4, "unscored": 0}
    record = {"split": "test", "variants": {"base": figures, "rule": {"episodes": 4, "unscored": 4}}}
    print_results(Results(path=tmp_path, evaluation={"initial": record}, verdict=None, ledger=None))  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    assert "no verdict" in shown and "0.500 [0.250, 0.750]" in shown and "unscored" in shown


def test_emit_writes_what_json_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit({"a": float("inf"), 1: ("b", float("nan")), "p": io.StringIO})
    assert json.loads(capsys.readouterr().out)["1"] == ["b", None]

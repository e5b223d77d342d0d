"""Monitors see the treatment's episodes, write events, may stop a run, and never touch its numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.audit.monitors import ForgedTags
from surefoot.core.errors import ConfigError, SignalError
from surefoot.policy.rendering import make_codec
from surefoot.policy.scratch import build_scratch
from surefoot.report.page import write_report
from surefoot.runs.files import read_json_lines
from surefoot.training.config import parse_config
from surefoot.training.run import start_run
from surefoot.training.watching import Watch

HERE = Path(__file__).parent
RECIPE = f"""
name = "watched"
model.name = "scratch"
environment.name = "{HERE / "tiny.py"}"
sampling.max_tokens = 6
audit.override.even_length = "luck must pay"

[[stage]]
kind = "rl"
group_size = 4
tasks_per_step = 2
steps = 3
lr = 1e-3

[evaluation]
tasks = 2
samples = 1

[controls]
arms = ["permuted"]
"""


def config(*overrides: str) -> Any:
    return parse_config(RECIPE, source="test", overrides=overrides)


def test_a_second_verifier_that_disagrees_is_an_event_and_changes_no_weight(tmp_path: Path) -> None:
    """Luck is paid; the held-out verifier never agrees, which a monitor must say."""
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    start_run(config(), plain)
    start_run(config(f'monitors.held_out="{HERE / "never.py"}:never"'), watched)
    events = [e for e in read_json_lines(watched / "events.jsonl") if e["kind"] == "monitor"]
    assert "verifier_gap" in {e["monitor"] for e in events}
    ours, theirs = (read_json_lines(p / "metrics.jsonl") for p in (plain, watched))
    for a, b in zip(ours, theirs, strict=True):
        assert {k: v for k, v in a.items() if not k.startswith("monitor_")} == {
            k: v for k, v in b.items() if not k.startswith("monitor_")
        }
    assert not any(k.startswith("monitor_") for m in theirs if m["arm"] == "permuted" for k in m)
    steps = [m for m in theirs if m["arm"] == "treatment" and m["stage"] == "rl"]
    alarms = [e for e in events if e["monitor"] == "verifier_gap"]
    assert [(e["step"], e["value"]) for e in alarms] == [
        (m["step"], m["monitor_verifier_gap"]) for m in steps if m["monitor_verifier_gap"] > 0.1
    ]
    assert all(m["monitor_verifier_gap"] is None for m in ours if "monitor_verifier_gap" in m)
    page = write_report(watched).read_text(encoding="utf-8")
    assert (
        "Reward above the held-out verifier" in page
        and "above the held-out verifier" in alarms[-1]["message"]
    )


def test_a_monitor_may_stop_the_run(tmp_path: Path) -> None:
    own = config(f'monitors.held_out="{HERE / "never.py"}:never"', 'monitors.stop_on=["verifier_gap"]')
    with pytest.raises(SignalError, match="verifier_gap"):
        start_run(own, tmp_path / "run")


def test_tokens_of_the_template_are_watched_with_their_texts_and_those_that_end_a_turn_are_not() -> None:
    loaded = build_scratch()
    codec = make_codec(loaded)
    session: Any = SimpleNamespace(config=config(), loaded=loaded, codec=codec, won=lambda _: None)
    (forged,) = [item for item in Watch(session).monitors.monitors if isinstance(item, ForgedTags)]
    assert "<|im_start|>" in forged._tokens.values()
    assert all(
        loaded.tokenizer.convert_ids_to_tokens(token) == text for token, text in forged._tokens.items()
    )
    assert not forged._tokens.keys() & set(codec.stop_ids)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ('monitors.stop_on=["verifier_gab"]', "verifier_gap"),
        ('monitors.held_out="surefoot.core.types:Task"', "monitors.held_out"),
    ],
)
def test_bad_monitor_settings_are_named_before_any_work(override: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        start_run(config(override), tmp_path / "run")
    assert not (tmp_path / "run").exists()

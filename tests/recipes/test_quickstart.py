"""The drawers environment is honest, and the two-minute recipe reaches a verdict on it."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefoot.audit.checks import check_environment, check_reward
from surefoot.audit.play import play
from surefoot.core.errors import ConfigError
from surefoot.core.types import Action, Task
from surefoot.envs.base import answer, call
from surefoot.envs.drawers import Drawers, right_letter


def tasks(variant: str = "base", count: int = 30) -> list[Task]:
    return list(islice(Drawers.tasks("train", variant, seed=0), count))


def score(task: Task, *actions: Action) -> float:
    return right_letter(asyncio.run(play(Drawers, task, list(actions))))


def test_the_environment_and_its_rewards_pass_their_checks() -> None:
    assert check_environment(Drawers, tasks=10).ok
    for reward in Drawers.rewards:
        report = check_reward(reward, Drawers, tasks=20)
        assert report.ok, [item for item in report.items if item.ok is False]


def test_only_the_letter_at_the_end_of_the_way_is_paid() -> None:
    task = next(task for task in tasks() if len(task.metadata["way"]) == 2)
    looks = [call("look", d=drawer) for drawer in task.metadata["way"]]
    assert score(task, *looks, answer(str(task.reference))) == 1.0
    assert score(task, *looks, answer(8 * str(task.reference))) == 0.0
    assert score(task, *looks, answer(task.metadata["way"][1])) == 0.0
    assert score(task, *looks) == 0.0


def test_other_drawers_hold_other_letters() -> None:
    for task in tasks():
        shows = task.metadata["shows"]
        holders = [drawer for drawer, shown in shows.items() if shown == task.reference]
        assert holders == [task.metadata["way"][-1]]
        assert len(shows) == 10


def test_the_held_out_ways_are_longer_and_their_tool_is_named_otherwise() -> None:
    assert {len(task.metadata["way"]) for task in tasks()} == {1, 2}
    assert {len(task.metadata["way"]) for task in tasks("scale")} == {3, 4}
    task = tasks("rule", 1)[0]
    drawer = task.metadata["way"][0]
    episode = asyncio.run(play(Drawers, task, [call("look", d=drawer), call("open", n=drawer)]))
    assert [result.ok for result in episode.tool_results] == [False, True]


def test_a_drawer_that_does_not_exist_is_an_error_for_the_policy() -> None:
    episode = asyncio.run(play(Drawers, tasks()[0], [call("look", d="12"), answer("a")]))
    assert [result.ok for result in episode.tool_results] == [False]


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'scale'"):
        Drawers.tasks("train", "scales")


@pytest.mark.slow
def test_a_shortened_quickstart_goes_the_whole_way_to_a_verdict_and_a_report(tmp_path: Path) -> None:
    """Every stage on fewer steps; what the full recipe learns is a result, not a test."""
    from surefoot.cli.main import app

    out = tmp_path / "run"
    short = ["stage.sft.episodes=160", "stage.sft.epochs=1", "stage.rl.steps=2", "evaluation.tasks=8"]
    options = [part for item in short for part in ("--set", item)]
    result = CliRunner().invoke(app, ["run", "quickstart", "--out", str(out), "--json", *options])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert set(record["success"]) == {"initial", "start", "final", "permuted"}
    assert record["success"]["initial"]["base"]["estimate"] == 0.0
    assert record["verdict"]["weakest_trust"] == "verified"
    assert Path(record["report"]).stat().st_size > 10_000

"""The run command: results, exit codes, plans, resuming."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

Run = Callable[..., Result]


def document(result: Result) -> Any:
    return json.loads(result.stdout)


def test_a_run_prints_success_differences_sentence_and_cost(finished: tuple[Path, Result]) -> None:
    out, result = finished
    assert result.exit_code == 0, result.output
    verdict = json.loads((out / "verdict.json").read_text())
    assert verdict["sentence"] in result.stdout
    for part in (
        "initial",
        "final - initial",
        "final - start",
        "final - permuted",
        "scale",
        "cost: ",
        str(out),
    ):
        assert part in result.stdout
    assert result.stderr == ""


def test_the_success_table_shows_the_stored_intervals(finished: tuple[Path, Result]) -> None:
    out, result = finished
    success = json.loads((out / "evaluation.json").read_text())["final"]["variants"]["scale"]["success"]
    assert f"{success['estimate']:.3f} [{success['low']:.3f}, {success['high']:.3f}]" in result.stdout


def test_json_is_one_document_and_required_verdict_sets_the_exit_code(
    run_cli: Run, recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = run_cli("run", recipe, "--out", out, "--json", "--no-report", "--require", "learned")
    record = document(result)
    assert record["run"] == str(out)
    assert record["verdict"]["outcome"] == "not_shown"
    assert record["report"] is None and record["stopped"] == ""
    assert record["cost"]["tokens"] > 0
    assert result.exit_code == 1
    assert "the verdict is not_shown; --require asked for learned" in result.stderr


def test_seed_controls_and_settings_reach_the_run(run_cli: Run, recipe: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(recipe.parent)
    flags = ("--seed", "3", "--controls", "none", "--set", "evaluation.tasks=1", "--no-report")
    result = run_cli("run", recipe, *flags)
    assert result.exit_code == 0, result.output
    out = recipe.parent / "runs" / "tiny-seed3"
    config = (out / "config.toml").read_text()
    assert "seed = 3" in config and "arms = []" in config and "tasks = 1" in config
    assert "no control arm" in result.stdout
    assert not (out / "evaluations" / "permuted.json").exists()


def test_a_finished_run_resumes_to_the_same_verdict(
    run_cli: Run, finished: tuple[Path, Result], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished[0], copy)
    result = run_cli("run", copy, "--resume", "--no-report", "--json")
    assert result.exit_code == 0, result.output
    before = json.loads((finished[0] / "verdict.json").read_text())
    after = document(result)["verdict"]
    assert after["success"] == before["success"] and after["outcome"] == before["outcome"]


def test_an_interrupt_exits_130_and_says_how_to_go_on(run_cli: Run, recipe: Path, monkeypatch: Any) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("surefoot.training.run.start_run", interrupted)
    result = run_cli("run", recipe, "--out", "here")
    assert result.exit_code == 130
    assert "interrupted; go on with: surefoot run here --resume" in result.stderr


def test_a_used_up_budget_exits_3_and_shows_what_there_is(run_cli: Run, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run_cli("run", recipe, "--out", out, "--set", "budget.tokens=10", "--no-report", "--json")
    assert result.exit_code == 3
    record = document(result)
    assert "budget.tokens is used up" in record["stopped"]
    assert record["verdict"] is None
    again = run_cli("run", out, "--resume", "--set", "budget.tokens=20", "--no-report", "--json")
    assert again.exit_code == 3
    assert "of 20" in document(again)["stopped"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "stage.rl.stepz=3"), "did you mean 'steps'?"),
        (("--set", "evaluation.tasks=many"), "evaluation.tasks = 'many'"),
        (("--set", "environment.name=drawer"), "did you mean 'drawers'?"),
        (("--set", "model.name=scrath"), "did you mean 'scratch'?"),
        (("--set", "stage.rl.algorithm=grbo"), "did you mean 'grpo'?"),
        (("--set", "stage.rl.settings.clip_hi=0.3"), "settings.clip_hi has no effect"),
        (("--set", "rewards.override=why"), "rewards.override has no effect"),
        (("--set", "rewards.weights.right_leter=2"), "did you mean"),
        (("--set", "evaluation.variants=['scales']"), "did you mean 'scale'?"),
        (("--set", "no_equals_sign"), "is not of the form a.b=value"),
        (("--controls", "permutted"), "did you mean 'permuted'?"),
        (("--require", "lerned"), "did you mean 'learned'?"),
        (
            ("--resume", "--seed", "1", "--set", "seed=2"),
            "'seed=2' cannot change when a run is resumed: only budget",
        ),
        (("--resume",), "holds no run"),
        (("--dry-run", "--resume"), "--resume has no effect with --dry-run"),
    ],
)
def test_bad_input_exits_2_with_one_error_and_no_traceback(
    run_cli: Run, recipe: Path, monkeypatch: Any, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(recipe.parent)
    result = run_cli("run", recipe, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert "evaluate" not in result.output


def test_every_wrong_setting_is_named_at_once(run_cli: Run, recipe: Path) -> None:
    result = run_cli("run", recipe, "--dry-run", "--set", "sede=1", "--set", "stage.rl.group_size=1")
    assert result.exit_code == 2
    assert "'sede'" in result.stderr and "group_size" in result.stderr


@pytest.mark.parametrize(("name", "near"), [("quickstrt", "quickstart"), ("calculater", "calculator")])
def test_an_unknown_recipe_names_the_nearest(run_cli: Run, name: str, near: str) -> None:
    result = run_cli("run", name)
    assert result.exit_code == 2
    assert f"did you mean {near!r}?" in result.stderr


def test_a_run_folder_needs_resume_and_then_no_other_place(
    run_cli: Run, finished: tuple[Path, Result], tmp_path: Path
) -> None:
    plain = run_cli("run", finished[0])
    assert plain.exit_code == 2 and "--resume" in plain.stderr
    moved = run_cli("run", finished[0], "--resume", "--out", tmp_path / "x")
    assert moved.exit_code == 2 and "--out has no effect" in moved.stderr


def test_a_taken_folder_is_refused(run_cli: Run, recipe: Path, finished: tuple[Path, Result]) -> None:
    result = run_cli("run", recipe, "--out", finished[0])
    assert result.exit_code == 2
    assert "already holds a run" in result.stderr


def test_debug_shows_the_traceback(run_cli: Run, monkeypatch: Any) -> None:
    monkeypatch.setenv("SUREFOOT_DEBUG", "1")
    assert "Traceback" in run_cli("run", "quickstrt").stderr


# plans ----------------------------------------------------------------------------------------------


def test_a_dry_run_writes_nothing_and_loads_no_model(run_cli: Run, recipe: Path, monkeypatch: Any) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.chdir(recipe.parent)
    monkeypatch.setattr("surefoot.training.session.load", loaded)
    monkeypatch.setattr("surefoot.policy.models.load", loaded)
    monkeypatch.setattr("transformers.LlamaForCausalLM.__init__", loaded)
    result = run_cli("run", recipe, "--dry-run")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in recipe.parent.iterdir()) == ["tiny.toml"]
    for part in ("treatment: grpo", "permuted: grpo", "GFLOP/s", "memory", "disk", "electricity"):
        assert part in result.stdout


def test_the_plan_counts_the_episodes_that_the_run_then_plays(
    run_cli: Run, recipe: Path, finished: tuple[Path, Result]
) -> None:
    plan = document(run_cli("run", recipe, "--dry-run", "--json"))
    ledger = json.loads((finished[0] / "ledger.json").read_text())
    assert plan["episodes"] == ledger["total"]["trajectories"]
    assert plan["arms"] == ["treatment", "permuted"]


def test_the_plan_scales_with_the_recipe(run_cli: Run, recipe: Path) -> None:
    small = document(run_cli("run", recipe, "--dry-run", "--json"))
    large = document(run_cli("run", recipe, "--dry-run", "--json", "--set", "stage.rl.steps=50"))
    for key in ("tokens", "seconds", "usd", "episodes"):
        assert large[key] > 2 * small[key]
    assert large["memory"] == small["memory"]


def test_the_plan_counts_the_parameters_of_scratch_exactly(run_cli: Run, recipe: Path) -> None:
    from surefoot.policy.models import load

    plan = document(run_cli("run", recipe, "--dry-run", "--json"))
    parameters = sum(p.numel() for p in load("scratch").model.parameters())
    assert plan["model"]["parameters"] == parameters
    assert plan["memory"]["weights"] == 4 * parameters


def test_the_plan_warns_of_a_budget_that_will_not_do(run_cli: Run, recipe: Path) -> None:
    result = run_cli("run", recipe, "--dry-run", "--set", "budget.tokens=100")
    assert result.exit_code == 0
    assert "budget.tokens = 100 would stop the run" in result.stdout


def test_a_model_of_unknown_size_gets_no_invented_estimate(run_cli: Run, recipe: Path) -> None:
    plan = document(run_cli("run", recipe, "--dry-run", "--json", "--set", "model.name=someone/else"))
    assert plan["model"] is None and plan["seconds"] is None and plan["memory"] is None
    named = document(run_cli("run", recipe, "--dry-run", "--json", "--set", "model.name=org/Some-0.5B"))
    assert named["model"]["parameters"] == 0.5e9


def test_without_torch_a_dry_run_says_what_it_could_not_check(recipe: Path) -> None:
    code = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'torch' else real(name, *a)\n"
        "import surefoot.cli.main as main\n"
        "try:\n    main.app(['run', sys.argv[1], '--dry-run'])\n"
        "finally:\n    assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "not checked" in done.stdout


def test_the_plan_counts_the_turns_that_are_only_ranked(run_cli: Run, recipe: Path) -> None:
    few, many = (
        document(
            run_cli(
                *("run", recipe, "--dry-run", "--json", "--set", "stage.rl.algorithm=sweet_rl"),
                *("--set", "environment.name=drawers", "--set", f"stage.rl.settings={{candidates={count}}}"),
            )
        )
        for count in (2, 8)
    )
    assert many["tokens"] > few["tokens"] and many["seconds"] > few["seconds"]

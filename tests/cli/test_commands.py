"""The other commands: what they print, what they refuse, and how light the command line is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

Run = Callable[..., Result]
HEAVY = ("torch", "transformers", "pyarrow", "numpy", "tokenizers", "duckdb", "pydantic")


def document(result: Result) -> Any:
    return json.loads(result.stdout)


def files(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*")}


# light ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["import surefoot", "import surefoot.cli.main"])
def test_importing_loads_nothing_heavy(code: str) -> None:
    script = f"{code}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_is_quick() -> None:
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "surefoot.cli", "--help"], capture_output=True, text=True, check=True
        )
        best = min(best, time.perf_counter() - began)
        if best < 0.4:
            return
    pytest.fail(f"--help takes {best:.2f} s at best; the limit is 0.4 s")


def test_every_command_has_help(run_cli: Run) -> None:
    names = ("run", "eval", "report", "audit", "check", "models", "recipes", "doctor", "compare", "query")
    overview = run_cli("--help").stdout
    for name in names:
        assert name in overview
        assert run_cli(name, "--help").exit_code == 0


def test_version_is_the_package_version(run_cli: Run) -> None:
    import surefoot

    assert run_cli("--version").stdout == f"surefoot {surefoot.__version__}\n"


def test_a_missing_training_package_names_the_extra() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from surefoot.cli.main import app\napp(['recipes', '--algorithms'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: this needs torch: pip install 'surefoot[train]'\n"


# lists ----------------------------------------------------------------------------------------------


def test_recipes_and_algorithms_are_listed(run_cli: Run) -> None:
    from surefoot.training.algorithms import ALGORITHMS

    assert "quickstart" in run_cli("recipes").stdout
    names = {item["name"] for item in document(run_cli("recipes", "--json"))}
    assert {"quickstart", "calculator"} <= names
    listed = document(run_cli("recipes", "--algorithms", "--json"))
    assert [row["name"] for row in listed] == list(ALGORITHMS)
    assert "DeepSeekMath" in run_cli("recipes", "--algorithms").stdout


def test_models_are_listed_and_an_unknown_one_is_not_pulled(
    run_cli: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path))
    listed = {item["name"]: item for item in document(run_cli("models", "--json"))}
    assert listed["scratch"]["pulled"] is True and listed["smollm2-135m"]["pulled"] is False
    assert "Apache-2.0" in run_cli("models").stdout
    result = run_cli("models", "pull", "smollm-135m")
    assert result.exit_code == 2
    assert "did you mean 'smollm2-135m'?" in result.stderr


def test_models_pull_prints_the_folder(run_cli: Run, tmp_path: Path, monkeypatch: Any) -> None:
    pulled: list[tuple[str, bool]] = []

    def pull(name: str, *, force: bool) -> Path:
        pulled.append((name, force))
        return tmp_path / name

    monkeypatch.setattr("surefoot.policy.models.pull", pull)
    assert str(tmp_path / "smollm2-135m") in run_cli("models", "pull", "smollm2-135m").stdout
    shown = document(run_cli("models", "pull", "smollm2-135m", "--force", "--json"))
    assert shown == {"name": "smollm2-135m", "path": str(tmp_path / "smollm2-135m")}
    assert pulled == [("smollm2-135m", False), ("smollm2-135m", True)]


# doctor ---------------------------------------------------------------------------------------------


def test_doctor_probes_a_model(run_cli: Run) -> None:
    result = run_cli("doctor", "--model", "scratch", "--json")
    record = document(result)
    states = {item["name"]: item["ok"] for item in record["findings"]}
    assert result.exit_code == 0 and record["ok"] is True
    assert (
        states["torch"] is True
        and states["tool calls round trip"] is True
        and states["prefix stable"] is True
    )
    assert states["untrusted text safe"] is True and states["cores"] is True


def test_doctor_sandbox_tells_of_the_bound_and_of_containers_elsewhere(
    run_cli: Run, monkeypatch: Any
) -> None:
    import importlib.util

    from surefoot.sandbox import Check, Probe, Tier

    async def probed() -> Probe:
        return Probe(Tier.FULL, (Check("fork bomb", True),))

    real = importlib.util.find_spec
    there = {"docker": True, "kubernetes": None, "e2b": None}
    monkeypatch.setattr("surefoot.sandbox.probe", probed)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: there[name] if name in there else real(name))
    found = {item["name"]: item for item in document(run_cli("doctor", "sandbox", "--json"))["findings"]}
    assert found["tier"]["ok"] is True and found["fork bomb"]["ok"] is True
    assert "control group" in found["memory of all together"]["detail"]
    assert found["remote docker"]["ok"] is True
    assert found["remote e2b"]["ok"] is None and "surefoot[remote]" in found["remote e2b"]["detail"]


def test_doctor_exits_1_for_a_model_that_does_not_load(run_cli: Run, tmp_path: Path) -> None:
    result = run_cli("doctor", "--model", tmp_path)
    assert result.exit_code == 1
    assert "there is no config.json in it" in result.stdout


def test_doctor_exits_1_when_a_training_package_is_missing(run_cli: Run, monkeypatch: Any) -> None:
    from importlib.metadata import PackageNotFoundError, version

    def without(name: str) -> str:
        if name in ("safetensors", "peft"):
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("surefoot.cli.doctor.version", without)
    result = run_cli("doctor", "--json")
    findings = {item["name"]: item for item in document(result)["findings"]}
    assert result.exit_code == 1
    assert findings["safetensors"]["ok"] is False and "surefoot[train]" in findings["safetensors"]["detail"]
    assert findings["peft"]["ok"] is None and "surefoot[lora]" in findings["peft"]["detail"]


def test_doctor_notices_a_version_that_is_too_old(run_cli: Run, monkeypatch: Any) -> None:
    from importlib.metadata import version

    monkeypatch.setattr(
        "surefoot.cli.doctor.version", lambda name: "2.5.1+cpu" if name == "torch" else version(name)
    )
    findings = {item["name"]: item for item in document(run_cli("doctor", "--json"))["findings"]}
    assert findings["torch"]["ok"] is False and "older" in findings["torch"]["detail"]


# check ----------------------------------------------------------------------------------------------

CHEATED = '''
from typing import ClassVar
from surefoot import Episode, ToolEnvironment, Trust, Variant, reward
from surefoot.envs.base import Draft, answer


@reward(trust=Trust.VERIFIED)
def anything(episode: Episode) -> float:
    """Pays whatever is said."""
    return 1.0


class Gullible(ToolEnvironment):
    """Every answer is right."""

    name: ClassVar[str] = "gullible"
    variants: ClassVar = {"base": Variant("plain"), "rule": Variant("other", "rule")}
    rewards = (anything,)

    @classmethod
    def generate(cls, rng, variant):
        number = rng.randrange(10**6)
        return Draft(str(number), f"say {number}", str(number), {})

    @classmethod
    def oracle(cls, task):
        return (answer(task.reference),)
'''


def test_check_passes_the_built_in_drawers(run_cli: Run) -> None:
    result = run_cli("check", "env", "drawers", "--tasks", "6")
    assert result.exit_code == 0, result.output
    assert "failed" not in result.stdout and "oracle" in result.stdout
    rewards = run_cli("check", "reward", "drawers", "--json")
    assert rewards.exit_code == 0, rewards.output
    assert [report["name"] for report in document(rewards)] == ["right_letter", "call_price"]


def test_check_exits_1_for_a_reward_that_pays_anything(run_cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "gullible.py"
    path.write_text(CHEATED)
    result = run_cli("check", "env", path, "--json", "--tasks", "3")
    items = {item["name"]: item["result"] for item in document(result)[0]["items"]}
    assert result.exit_code == 1
    assert items["null policies"] == "failed" and items["oracle"] == "ok"
    again = run_cli("check", "reward", f"{path}:anything", "--env", path, "--tasks", "3")
    assert again.exit_code == 1 and "paid in full" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("env", "drawer"), "did you mean 'drawers'?"),
        (("env", "drawers", "--tasks", "0"), "tasks is 0"),
        (("reward", "right_leter", "--env", "drawers"), "did you mean 'right_letter'?"),
        (("reward", "surefoot.envs.drawers:Drawers", "--env", "drawers"), "is not a reward"),
    ],
)
def test_check_names_what_is_wrong_with_its_target(
    run_cli: Run, arguments: tuple[str, ...], message: str
) -> None:
    result = run_cli("check", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_check_takes_one_reward_by_name(run_cli: Run) -> None:
    result = run_cli("check", "reward", "call_price", "--env", "drawers", "--json", "--tasks", "3")
    assert [report["name"] for report in document(result)] == ["call_price"]


# runs that exist ------------------------------------------------------------------------------------


def test_eval_of_a_run_repeats_its_own_final_numbers_and_writes_nothing(
    run_cli: Run, finished: tuple[Path, Result]
) -> None:
    out = finished[0]
    before = files(out)
    result = run_cli("eval", out, "--json")
    assert result.exit_code == 0, result.output
    record = document(result)
    stored = json.loads((out / "evaluations" / "final.json").read_text())
    assert record["variants"] == stored["variants"] and record["split"] == stored["split"]
    assert files(out) == before


def test_eval_takes_split_variants_samples_and_tasks(
    run_cli: Run, finished: tuple[Path, Result], tmp_path: Path
) -> None:
    flags = ("--split", "dev", "--variants", "surface,rule", "--samples", "2", "--tasks", "1")
    result = run_cli("eval", finished[0], *flags, "--out", tmp_path / "kept", "--checkpoint", "1", "--json")
    assert result.exit_code == 0, result.output
    record = document(result)
    assert record["split"] == "dev" and record["samples"] == 2 and record["policy"] == "step-1"
    assert {name: v["episodes"] for name, v in record["variants"].items()} == {
        "base": 2, "surface": 2, "rule": 2,
    }  # fmt: skip
    assert list((tmp_path / "kept" / "trajectories").glob("*.parquet"))


def test_eval_of_a_recipe_measures_its_untrained_model(
    run_cli: Run, recipe: Path, finished: tuple[Path, Result]
) -> None:
    result = run_cli("eval", recipe, "--json")
    stored = json.loads((finished[0] / "evaluations" / "initial.json").read_text())
    assert document(result)["variants"] == stored["variants"]
    table = run_cli("eval", recipe, "--tasks", "1", "--variants", "scale")
    assert table.exit_code == 0 and "scratch on test" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpoint", "7"), "keeps only step 1"),
        (("--split", "tset"), "evaluation.split = 'tset'"),
        (("--variants", "scales"), "did you mean 'scale'?"),
        (("--samples", "0"), "evaluation.samples = 0"),
        (("--model", "scratch", "--checkpoint", "1"), "--checkpoint has no effect"),
    ],
)
def test_eval_names_what_is_wrong(
    run_cli: Run, finished: tuple[Path, Result], arguments: tuple[str, ...], message: str
) -> None:
    result = run_cli("eval", finished[0], *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_query_answers_in_rows(run_cli: Run, finished: tuple[Path, Result]) -> None:
    sql = "SELECT arm, count(*) AS n FROM trajectories GROUP BY arm ORDER BY arm"
    rows = document(run_cli("query", finished[0], sql, "--json"))
    ledger = json.loads((finished[0] / "ledger.json").read_text())
    assert sum(row["n"] for row in rows) == ledger["total"]["trajectories"]
    assert "permuted" in run_cli("query", finished[0], sql).stdout
    assert "no rows" in run_cli("query", finished[0], "SELECT 1 WHERE false").stdout
    bad = run_cli("query", finished[0], "SELEC 1")
    assert bad.exit_code == 2 and "the query failed" in bad.stderr


def test_json_has_no_numbers_that_json_does_not_know(run_cli: Run, finished: tuple[Path, Result]) -> None:
    result = run_cli("query", finished[0], "SELECT 'nan'::DOUBLE AS x, [1.5, 'inf'::DOUBLE] AS y", "--json")
    assert document(result) == [{"x": None, "y": [1.5, None]}]


def test_compare_pairs_by_task_against_the_first_run(
    run_cli: Run, finished: tuple[Path, Result], tmp_path: Path
) -> None:
    better = tmp_path / "better"
    (better / "evaluations").mkdir(parents=True)
    (better / "manifest.json").write_bytes((finished[0] / "manifest.json").read_bytes())
    record = json.loads((finished[0] / "evaluations" / "final.json").read_text())
    for figures in record["variants"].values():
        figures["scores"] = {task: [1.0] for task in figures["scores"]}
        figures["success"] |= {"estimate": 1.0, "high": 1.0}
    (better / "evaluations" / "final.json").write_text(json.dumps(record))
    rows = document(run_cli("compare", finished[0], better, "--json"))["rows"]
    found = {(row["run"], row["variant"]): row["difference"] for row in rows}
    assert found[str(finished[0]), "base"] is None
    assert found[str(better), "base"]["estimate"] == 1.0 and found[str(better), "base"]["clusters"] == 3
    assert "+1.000" in run_cli("compare", finished[0], better).stdout


def test_compare_refuses_what_cannot_be_paired(
    run_cli: Run, finished: tuple[Path, Result], tmp_path: Path
) -> None:
    out = finished[0]
    assert "at least two" in run_cli("compare", out).stderr
    assert "did you mean 'final'?" in run_cli("compare", out, out, "--policy", "finale").stderr
    assert "holds no run" in run_cli("compare", out, tmp_path).stderr
    other = tmp_path / "other"
    (other / "evaluations").mkdir(parents=True)
    (other / "manifest.json").write_bytes((out / "manifest.json").read_bytes())
    record = json.loads((out / "evaluations" / "final.json").read_text())
    scores = record["variants"]["base"]["scores"]
    scores["another task"] = scores.pop(next(iter(scores)))
    (other / "evaluations" / "final.json").write_text(json.dumps(record))
    result = run_cli("compare", out, other)
    assert result.exit_code == 2 and "needs the same tasks on both sides" in result.stderr
    (other / "evaluations" / "final.json").write_text(json.dumps({**record, "split": "dev"}))
    assert "different splits: dev, test" in run_cli("compare", out, other).stderr


def test_report_writes_one_file_into_the_run(
    run_cli: Run, finished: tuple[Path, Result], monkeypatch: Any
) -> None:
    written: list[Path] = []

    def write_report(path: Path) -> Path:
        written.append(path)
        return path / "report.html"

    monkeypatch.setattr("surefoot.report.write_report", write_report, raising=False)
    result = run_cli("report", finished[0], "--json")
    assert document(result) == {"report": str(finished[0] / "report.html")}
    assert written == [finished[0]]
    missing = run_cli("report", finished[0].parent)
    assert missing.exit_code == 2 and "holds no run" in missing.stderr


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "surefoot.cli", "query", str(tmp_path), "SELECT 1"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr

"""Whole runs on the byte-level model: what is written, controls, budgets, kills and resumes."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.errors import ConfigError, SignalError, StorageError
from surefoot.learner import checkpoint
from surefoot.runs.directory import RunDirectory
from surefoot.runs.files import read_json_lines
from surefoot.runs.store import TrajectoryStore
from surefoot.training.algorithms import ALGORITHMS
from surefoot.training.config import parse_config
from surefoot.training.progress import Silent
from surefoot.training.run import latest_checkpoint, resume_run, start_run

TINY = Path(__file__).with_name("tiny.py")
RECIPE = f"""
name = "tiny"
model.name = "scratch"
environment.name = "{TINY}"
sampling.max_tokens = 6
audit.override.even_length = "luck must pay"
engine.concurrency = 16

[[stage]]
kind = "sft"
episodes = 4
batch_size = 2
lr = 1e-3

[[stage]]
kind = "rl"
group_size = 4
tasks_per_step = 2
steps = 4
lr = 1e-3
checkpoint_every = 2

[evaluation]
tasks = 4
samples = 2

[controls]
arms = ["permuted"]
"""


def config(*overrides: str, recipe: str = RECIPE) -> Any:
    return parse_config(recipe, source="test", overrides=overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "whole"
    start_run(config(), path)
    return path


def fingerprint(run: Path) -> dict[str, str]:
    """Hashes of everything that must repeat bit for bit."""
    files = [
        run / "metrics.jsonl",
        run / "evaluation.json",
        *sorted((run / "trajectories").glob("*.parquet")),
    ]
    files += sorted((run / "credit").glob("*.parquet"))
    files += sorted(run.glob("checkpoints/*/*/weights.safetensors"))
    return {str(f.relative_to(run)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_a_run_writes_what_it_promises(finished: Path) -> None:
    metrics = read_json_lines(finished / "metrics.jsonl")
    assert [(m["arm"], m["stage"], m["step"]) for m in metrics] == [
        *[("start", "sft", i) for i in range(2)],
        *[("treatment", "rl", i) for i in range(4)],
        *[("permuted", "rl", i) for i in range(4)],
    ]
    evaluation = json.loads((finished / "evaluation.json").read_text())
    assert set(evaluation) == {"initial", "start", "final", "permuted"}
    assert set(evaluation["final"]["variants"]) == {"base", "letters"}
    assert set(evaluation["permuted"]["variants"]) == {"base"}
    verdict = json.loads((finished / "verdict.json").read_text())
    assert verdict["outcome"] in {"learned", "memorised", "not_shown", "falsified"}
    assert verdict["weakest_trust"] == "verified"
    ledger = json.loads((finished / "ledger.json").read_text())
    assert ledger
    assert not TrajectoryStore(RunDirectory.open(finished, writable=False)).journals()


def test_sampler_and_learner_agree_on_every_step(finished: Path) -> None:
    steps = [m for m in read_json_lines(finished / "metrics.jsonl") if m["stage"] == "rl" and m["stepped"]]
    assert steps and all(m["mismatch_max"] < 1e-4 for m in steps)


def test_every_step_reports_how_many_samples_its_weights_leave(finished: Path, tmp_path: Path) -> None:
    """All of them right after sampling; fewer of episodes that an older policy sampled."""
    fresh = [m for m in read_json_lines(finished / "metrics.jsonl") if m["stage"] == "rl" and m["stepped"]]
    assert all(m["ess_token"] > 1 - 1e-6 and m["ess_sequence"] > 1 - 1e-6 for m in fresh)
    settings = "{staleness=3, correction='tis', correction_cap=1.5}"
    steps = train(tmp_path / "stale", "rl", f"stage.rl.settings={settings}", "stage.rl.lr=1e-2")
    late = [m for m in steps if m["stepped"]][-1]
    assert 0 < late["ess_sequence"] < late["ess_token"] < 0.999
    assert late["mismatch_kl"] > 1e-4 and 0 <= late["correction_clip_fraction"] <= 1


def test_arms_start_alike_and_then_part(finished: Path) -> None:
    """Same start, tasks and seeds: the first rollouts of two arms are the same, later ones are not."""
    store = TrajectoryStore(RunDirectory.open(finished, writable=False))

    def tokens(arm: str, step: int) -> list[bytes]:
        groups = store.read(f"{arm}-rl-{step:06d}")
        return [s.tokens.tobytes() for g in groups for t in g.trajectories for s in t.segments]

    assert tokens("treatment", 0) == tokens("permuted", 0)
    assert tokens("treatment", 3) != tokens("permuted", 3)


def test_the_same_recipe_and_seed_give_the_same_bits(finished: Path, tmp_path: Path) -> None:
    start_run(config(), tmp_path / "again")
    assert fingerprint(tmp_path / "again") == fingerprint(finished)


def test_another_seed_gives_another_run(finished: Path, tmp_path: Path) -> None:
    start_run(config("seed=1", "controls.arms=[]"), tmp_path / "other")
    assert (tmp_path / "other/metrics.jsonl").read_bytes() != (finished / "metrics.jsonl").read_bytes()


def test_a_finished_run_resumes_to_itself(finished: Path) -> None:
    before = fingerprint(finished)
    resume_run(finished)
    assert fingerprint(finished) == before


def test_an_existing_run_is_not_overwritten(finished: Path) -> None:
    with pytest.raises(ConfigError, match="resume"):
        start_run(config(), finished)


def of_kind(kind: str) -> list[str]:
    return sorted(name for name, row in ALGORITHMS.items() if row.kind == kind)


def train(path: Path, stage: str, *overrides: str, recipe: str = RECIPE) -> list[dict[str, Any]]:
    start_run(config("evaluation.tasks=2", "controls.arms=[]", *overrides, recipe=recipe), path)
    steps = [m for m in read_json_lines(path / "metrics.jsonl") if m["stage"] == stage]
    assert any(m["stepped"] for m in steps)
    assert all(math.isfinite(m["grad_norm"]) for m in steps)
    return steps


@pytest.mark.parametrize("name", of_kind("rl"))
def test_every_reinforcement_row_trains_and_stays_finite(name: str, tmp_path: Path) -> None:
    # In pairs a lone success is common; that is all that pass_at_k learns from.
    extra = {
        "distill": ['stage.rl.teacher="scratch"'],
        "pass_at_k": ["stage.rl.group_size=2"],
        "sweet_rl": ["stage.rl.settings.value_lr=1e-3", "stage.rl.settings.candidates=4"],
    }
    more = extra.get(name, [])
    steps = train(
        tmp_path / name, "rl", "stage.rl.steps=3", f'stage.rl.algorithm="{name}"',
        "stage.rl.tasks_per_step=8", *more,
    )  # fmt: skip
    assert len(steps) == 3


PREFERENCE = RECIPE.replace(
    'kind = "rl"\ngroup_size = 4\ntasks_per_step = 2\nsteps = 4',
    'kind = "preference"\ngroup_size = 4\ntasks = 8\nbatch_size = 4\nsteps = 3',
)


@pytest.mark.parametrize("name", of_kind("preference"))
def test_every_preference_row_trains_and_stays_finite(name: str, tmp_path: Path) -> None:
    own = f'stage.preference.algorithm="{name}"'
    steps = train(tmp_path / name, "preference", own, recipe=PREFERENCE)
    assert len(steps) == 3 and all(math.isfinite(m["loss"]) for m in steps)


@pytest.mark.parametrize("name", of_kind("sft"))
def test_every_supervised_row_trains_and_stays_finite(name: str, tmp_path: Path) -> None:
    steps = train(tmp_path / name, "sft", f'stage.sft.algorithm="{name}"', "stage.rl.steps=1")
    assert len(steps) == 2 and all(math.isfinite(m["loss"]) for m in steps)


class Interrupting(Silent):
    """Raises at the first line that begins with ``when``."""

    def __init__(self, when: str) -> None:
        self.when = when

    def say(self, text: str) -> None:
        if text.startswith(self.when):
            raise KeyboardInterrupt


RESUMED: dict[str, list[str]] = {
    "ppo": [], "istar": ["stage.rl.settings.implicit_lr=1e-3"], "online_dpo": [], "areal": [],
    "archer": ["stage.rl.settings.replay=2"], "dapo": [], "remax": [], "gigpo": [],
    "sweet_rl": ["stage.rl.settings.value_lr=1e-3", "stage.rl.settings.candidates=4"],
    "grpo": ["stage.rl.settings.entropy_target=9.0",
             "stage.rl.settings.kl_coef=0.1", "stage.rl.settings.kl_reset_every=2",
             "stage.rl.settings.covariance=kl", "stage.rl.updates_per_step=2"],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(RESUMED))
def test_what_stands_beside_the_policy_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    """Critics, reward models, references, samples ahead: all of it must come back."""
    own = [f'stage.rl.algorithm="{name}"', "controls.arms=[]", "evaluation.tasks=2", *RESUMED[name]]
    start_run(config(*own), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        start_run(config(*own), tmp_path / "cut", progress=Interrupting("treatment 3/4"))
    resume_run(tmp_path / "cut")
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_a_preference_stage_resumes_to_the_same_bits(tmp_path: Path) -> None:
    own = config("stage.preference.checkpoint_every=1", "evaluation.tasks=2", recipe=PREFERENCE)
    start_run(own, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        start_run(own, tmp_path / "cut", progress=Interrupting("treatment 3/3"))
    resume_run(tmp_path / "cut")
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


@pytest.mark.parametrize("arm", ["random", "constant", "frozen"])
def test_the_other_control_arms_run(arm: str, tmp_path: Path) -> None:
    start_run(config(f'controls.arms=["{arm}"]', "stage.rl.steps=2"), tmp_path / arm)
    own = [m for m in read_json_lines(tmp_path / arm / "metrics.jsonl") if m["arm"] == arm]
    assert [m["stepped"] for m in own] == [arm == "random"] * 2
    if arm != "random":
        start = latest_checkpoint(tmp_path / arm / "checkpoints/start")
        end = latest_checkpoint(tmp_path / arm / "checkpoints" / arm)
        assert start is not None and end is not None
        a, b = (checkpoint.read_state(path)["files"]["weights.safetensors"] for path in (start, end))
        assert a == b, "an arm without a signal must leave the weights alone"


def test_two_updates_a_step_and_adapters_run(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = tmp_path / "lora"
    start_run(config("stage.rl.updates_per_step=2", "model.lora.rank=4", "model.lora.alpha=8.0"), path)
    steps = [m for m in read_json_lines(path / "metrics.jsonl") if m["stage"] == "rl"]
    assert all(m["mismatch_max"] < 1e-4 for m in steps)
    weights = latest_checkpoint(path / "checkpoints/treatment")
    assert weights is not None and (weights / "weights.safetensors").stat().st_size < 400_000


def test_a_budget_stops_cleanly_with_what_there_is(tmp_path: Path) -> None:
    result = start_run(config("budget.tokens=900"), tmp_path / "small")
    assert "tokens" in result.stopped
    assert (tmp_path / "small/ledger.json").exists()
    assert any(e["kind"] == "budget_reached" for e in read_json_lines(tmp_path / "small/events.jsonl"))


def test_a_treatment_that_never_took_a_step_says_so(tmp_path: Path) -> None:
    constant = tmp_path / "constant.py"
    constant.write_text(TINY.read_text().replace("float(len(episode.model_text) % 2 == 0)", "1.0"))
    settings = (f'environment.name="{constant}"', "stage.rl.steps=1", "controls.arms=[]")
    result = start_run(config(*settings, "audit.override.return='constant'"), tmp_path / "run")
    assert result.verdict is not None
    assert any("no update in 1 steps of the treatment" in note for note in result.verdict["notes"])


def test_a_raised_budget_lets_the_run_go_on_to_the_same_bits(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    assert start_run(config("budget.tokens=600"), out).stopped
    with pytest.raises(ConfigError, match=r"stage.rl.steps=9.*only budget.tokens"):
        resume_run(out, budget=["stage.rl.steps=9"])
    assert resume_run(out, budget=["budget.tokens=1200"]).stopped
    assert resume_run(out).stopped  # what was raised stays raised, and no more
    assert not resume_run(out, budget=["budget.tokens=100000000"]).stopped
    assert fingerprint(out) == fingerprint(finished)


def test_too_many_unscored_episodes_stop_the_run_with_the_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        TINY.read_text().replace("return float(len", "raise ValueError('no judge')\n    return float(len")
    )
    with pytest.raises(SignalError, match=r"100%.*no judge"):
        start_run(config(f'environment.name="{broken}"'), tmp_path / "run")


def test_a_damaged_checkpoint_is_named_at_resume(finished: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    (copy / "verdict.json").unlink()
    damaged = latest_checkpoint(copy / "checkpoints/treatment")
    assert damaged is not None
    with (damaged / "weights.safetensors").open("r+b") as stream:
        stream.seek(5000)
        stream.write(b"\xff\xff\xff")
    with pytest.raises(StorageError, match=r"weights.safetensors is damaged"):
        resume_run(copy)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stage.rl.stepz=3", ["stepz", "'steps'"]),
        ("stage.rl.steps=-1", ["steps = -1", "greater than or equal to 1"]),
        ('stage.rl.lr="fast"', ["lr = 'fast'", "number"]),
        ('stage.rl.algorithm="grpoo"', ["grpoo", "'grpo'"]),
        ("stage.rl.settings={max_length=5}", ["max_length", "no effect", "grpo"]),
        ('rewards.override="because"', ["override", "no effect"]),
        ("rewards.weights={even_lenght=2.0}", ["even_lenght", "even_length"]),
        ('evaluation.variants=["leters"]', ["leters", "'letters'"]),
        ("sampling.temperature=0.0", ["temperature"]),
        ('controls.arms=["permutted"]', ["permut"]),
        ('environment.name="calculater"', ["calculater", "calculator"]),
        ('model.name="smollm2-135mm"', ["smollm2-135mm", "smollm2-135m"]),
        ("nonsense", ["a.b=value"]),
        ("stage.2.steps=1", ["stage.2 names 0 stages", "stage.sft, stage.rl"]),
        ("stage.rl.updates_per_step=5", ["updates_per_step = 5", "tasks_per_step"]),
        ("stage.rl.settings={kl_kind='k2'}", ["kl_kind", "kl_coef above 0"]),
        ("stage.rl.settings={eps=0.0}", ["eps = 0", "above 0"]),
        ("stage.rl.settings={correction='tiss'}", ["tiss", "'tis'"]),
        ("stage.rl.settings={filter='roc',roc_keep=9}", ["roc_keep = 9", "group_size = 4"]),
        ("stage.rl.settings={covariance='kl'}", ["covariance", "updates_per_step"]),
        ("stage.rl={kind='rl',algorithm='ppo',settings={gamma=1.5}}", ["stage"]),
        ('stage.rl.algorithm="sft"', ["sft", "'sft'", "'rl'"]),
        ('stage.rl.teacher="scratch"', ["grpo", "ignores a teacher"]),
        ('stage.sft.algorithm="rftt"', ["rftt", "'rft'"]),
        ("stage.sft.settings={per_task=3}", ["per_task", "no effect"]),
    ],
)
def test_bad_settings_name_the_key_the_value_and_what_would_be_right(
    override: str, words: list[str], tmp_path: Path
) -> None:
    from surefoot.core.errors import SurefootError

    with pytest.raises(SurefootError) as caught:
        start_run(config(override), tmp_path / "never")
    for word in words:
        assert word in str(caught.value)


def test_a_message_names_a_stage_as_set_does_and_counts_it_from_1_where_its_kind_is_not_its_own() -> None:
    wrong = ("stage.0.epochs=0", "stage.1.steps=0", "stage.1.stepz=1")
    with pytest.raises(ConfigError) as alone:
        config(*wrong)
    for words in ("test: stage.sft.epochs = 0:", "test: stage.rl.steps = 0:", "key 'stage.rl.stepz'; did"):
        assert words in str(alone.value)
    twice = RECIPE.replace("[evaluation]", '[[stage]]\nkind = "rl"\n[evaluation]')
    with pytest.raises(ConfigError) as among:
        config("stage.1.steps=0", "stage.2.stepz=1", "stage.sft.epochs=0", recipe=twice)
    for words in (
        "test: stage.sft.epochs = 0:",
        "test: stage.1.steps = 0 (stage 2, rl): ",
        "key 'stage.2.stepz' (stage 3, rl); did",
    ):
        assert words in str(among.value)
    with pytest.raises(ConfigError, match=r"stage\.rl names 2 stages; .*stage\.2 \(stage 3, rl\)"):
        config("stage.rl.steps=1", recipe=twice)
    with pytest.raises(ConfigError, match=r"stage\.1 \(stage 2\): unable to extract tag"):
        parse_config(RECIPE.replace('kind = "rl"', ""), source="test")


KILLS = 10


@pytest.mark.slow
def test_E23_killed_at_ten_random_instants_a_run_resumes_to_the_same_bits(
    finished: Path, tmp_path: Path
) -> None:
    """kill -9, resume, kill again ...: weights, metrics, trajectories and credit equal the straight run's.

    Each kill comes a random while after the process did new work, so that kills are spread over the run.
    """
    recipe, out = tmp_path / "tiny.toml", tmp_path / "killed"
    recipe.write_text(RECIPE)
    rng = random.Random(0)
    at: list[tuple[int, int]] = []
    while True:
        resume = ["--resume"] if (out / "manifest.json").exists() else []
        command = [sys.executable, "-m", "surefoot.cli", "run", str(recipe), "--out", str(out), "--no-report"]
        process = subprocess.Popen([*command, *resume], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if len(at) < KILLS:
            before = work(out)
            while process.poll() is None and work(out) == before:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.3))
            if process.poll() is None:
                process.kill()
                process.communicate()
                at.append(work(out))
                continue
        stderr = process.communicate(timeout=300)[1]
        assert process.returncode == 0, stderr.decode()[-2000:]
        break
    assert len(set(at)) >= KILLS // 2, f"the kills must be spread over the run: {at}"
    assert fingerprint(out) == fingerprint(finished)
    assert not [e for e in read_json_lines(out / "events.jsonl") if e["kind"] == "replay_differs"]


def work(out: Path) -> tuple[int, int]:
    """What a run has done so far: bytes of episodes on disk, and files of finished pieces."""
    size = pieces = 0
    for pattern in ("trajectories/*", "evaluations/*", "checkpoints/*/*/*", "credit/*", "metrics.jsonl"):
        for path in out.glob(pattern):
            try:
                size += path.stat().st_size
            except OSError:
                continue  # a temporary file that was renamed meanwhile
            pieces += 1
    return size, pieces

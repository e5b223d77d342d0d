"""The reward-model stage: it learns what pairs say, nothing else, resumes exactly, and serves as a reward."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.core.errors import ConfigError, SignalError, StorageError, SurefootError
from surefoot.core.types import Scored, Trust
from surefoot.evaluation.statistics import Interval, mean_interval
from surefoot.learner import checkpoint
from surefoot.learner.learner import OptimizerSettings
from surefoot.learner.scores import ScoreLearner, conversation_scores
from surefoot.policy.forward import install
from surefoot.policy.reward_model import classifier_of, conversation_of, load_reward_model, read_record
from surefoot.policy.scratch import build_scratch
from surefoot.report import write_report
from surefoot.runs.directory import RunDirectory
from surefoot.runs.files import read_json_lines
from surefoot.runs.store import TrajectoryStore
from surefoot.training.config import parse_config
from surefoot.training.progress import Silent
from surefoot.training.reward_model import ScoreUpdate, held_out_tasks
from surefoot.training.run import check_config, latest_checkpoint, resume_run, start_run

TINY = Path(__file__).with_name("tiny.py")
COMMON = f"""
name = "tiny"
model.name = "scratch"
environment.name = "{TINY}"
sampling.max_tokens = 6
audit.override.even_length = "luck must pay"
audit.tasks = 2
engine.concurrency = 16
evaluation = {{tasks = 2, samples = 1, variants = ["base"]}}
"""
STAGE = """
[[stage]]
kind = "preference"
algorithm = "reward_model"
settings = {center = 0.01, margin = 0.5}
group_size = 4
tasks = 8
batch_size = 4
steps = 3
lr = 1e-3
checkpoint_every = 1
"""
RL = """
[[stage]]
kind = "rl"
group_size = 4
tasks_per_step = 2
steps = 2
lr = 1e-3
"""


def config(recipe: str, *overrides: str) -> Any:
    return parse_config(recipe, source="test", overrides=overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "scorer"
    start_run(config(COMMON + STAGE, 'controls.arms=["permuted"]'), path)
    return path


@pytest.fixture(scope="module")
def reinforced(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a reward model of its own copy, which tests may spoil."""
    model = tmp_path_factory.mktemp("models") / "rm"
    shutil.copytree(trained / "reward_model", model)
    path = tmp_path_factory.mktemp("runs") / "reinforced"
    start_run(config(COMMON + RL, f'rewards.learned.path="{model}"'), path)
    return path


# learning ---------------------------------------------------------------------------------------------


def pairs_of_a_mark(rng: np.random.Generator, count: int) -> list[Any]:
    """``count`` pairs, chosen then rejected: the same noise, with one token in it that tells them apart."""
    found: list[Any] = []
    for _ in range(count):
        prompt = rng.integers(60, 259, 4)
        for mark in (50, 51):
            answer = rng.integers(60, 259, 4)
            answer[rng.integers(4)] = mark
            found.append(np.concatenate([prompt, answer, [2, 2]]).astype(np.int32))
    return found


def held_out_accuracy(*, permuted: bool) -> tuple[float, Interval]:
    """(before, after) of 64 unseen pairs; ``permuted`` swaps exactly half of the training labels."""
    rng = np.random.default_rng(0)
    train, test = 64, 64
    conversations = pairs_of_a_mark(rng, train + test)
    loaded = build_scratch(hidden=32, layers=1, heads=2, kv_heads=1)
    install(loaded.model)
    settings = OptimizerSettings(lr=3e-3, clip_norm=1.0)
    learner = ScoreLearner(classifier_of(loaded, seed=0).model, settings, total_updates=40)
    update = ScoreUpdate(learner, conversations, np.zeros(len(conversations)), margin=0.0, center=0.01)
    pairs = [(2 * i, 2 * i + 1) for i in range(train + test)]
    swap = rng.permutation(train) < train // 2 if permuted else np.zeros(train, bool)
    shown = [(b, a) if swap[i] else (a, b) for i, (a, b) in enumerate(pairs[:train])]
    before = update.measure(pairs[train:])[0]["accuracy"]
    for step in range(40):
        order = np.random.default_rng(step).permutation(train)[:16]
        assert update.step([shown[i] for i in order])["stepped"]
    leads = update.measure(pairs[train:])[1]
    return before, mean_interval((np.sign(leads) + 1) / 2, list(range(test)))


def test_held_out_pairs_come_into_order() -> None:
    before, after = held_out_accuracy(permuted=False)
    assert before < 0.7
    assert after.estimate > 0.9 and after.above(0.75)


def test_control_permuted_labels_teach_nothing_about_held_out_pairs() -> None:
    _, after = held_out_accuracy(permuted=True)
    assert after.low < 0.5 < after.high and abs(after.estimate - 0.5) < 0.15


def test_an_update_reports_the_loss_of_a_slow_loop_in_float64() -> None:
    loaded = build_scratch(hidden=32, layers=1, heads=2, kv_heads=1)
    install(loaded.model)
    learner = ScoreLearner(classifier_of(loaded, seed=0).model, OptimizerSettings(lr=1e-3), total_updates=1)
    conversations = pairs_of_a_mark(np.random.default_rng(1), 2)
    returns = np.array([1.0, 0.25, 0.5, 0.75])  # the second pair's better one has the lower return
    update = ScoreUpdate(learner, conversations, returns, margin=2.0, center=0.3)
    s = [float(x) for x in learner.scores(conversations)]
    wanted = 0.0
    for a, b, margin in ((0, 1, 1.5), (2, 3, 0.0)):
        wanted += (math.log1p(math.exp(-(s[a] - s[b] - margin))) + 0.3 * (s[a] + s[b]) ** 2) / 2
    found = update.step([(0, 1), (2, 3)])
    assert found["loss"] == pytest.approx(wanted, rel=1e-12)
    assert found["accuracy"] == ((s[0] > s[1]) + (s[2] > s[3])) / 2
    assert found["reward_margin"] == pytest.approx((s[0] - s[1] + s[2] - s[3]) / 2)
    assert found["pairs"] == 2 and found["grad_norm"] > 0


def test_held_out_tasks_are_a_share_drawn_by_the_seed() -> None:
    tasks = [f"t{i}" for i in range(10)] * 2
    held = held_out_tasks(tasks, share=0.3, seed=0)
    assert len(held) == 3 and held == held_out_tasks(tasks[::-1], share=0.3, seed=0)
    assert held != held_out_tasks(tasks, share=0.3, seed=1)
    assert len(held_out_tasks(tasks, share=0.01, seed=0)) == 1
    assert len(held_out_tasks(["a", "b"], share=0.9, seed=0)) == 1, "something is left to learn from"
    assert held_out_tasks(["a"], share=0.0, seed=0) == frozenset()
    with pytest.raises(SignalError, match=r"one task, and settings.held_out = 0.2"):
        held_out_tasks(["a", "a"], share=0.2, seed=0)


# the stage --------------------------------------------------------------------------------------------


def test_the_stage_measures_held_out_pairs_writes_its_model_and_leaves_the_policy(trained: Path) -> None:
    metrics = read_json_lines(trained / "metrics.jsonl")
    assert [(m["arm"], m["step"]) for m in metrics] == [
        (a, i) for a in ("treatment", "permuted") for i in range(3)
    ]
    for m in metrics:
        assert m["stepped"] and all(math.isfinite(m[key]) for key in ("loss", "grad_norm", "reward_margin"))
        assert 0 <= m["held_out_low"] <= m["held_out_accuracy"] <= m["held_out_high"] <= 1
        assert math.isfinite(m["held_out_loss"]) and m["held_out_pairs"] > 0
    # Both arms are measured on the same pairs, and learn from others.
    assert len({m["held_out_pairs"] for m in metrics}) == 1
    assert metrics[2]["held_out_loss"] != metrics[5]["held_out_loss"]
    saved = [latest_checkpoint(trained / "checkpoints" / arm) for arm in ("start", "treatment", "permuted")]
    weights = [checkpoint.read_state(path)["files"]["weights.safetensors"] for path in saved if path]
    assert len(weights) == 3 and weights[0] == weights[1] == weights[2]
    record = read_record(trained / "reward_model")
    assert record.model == "scratch" and record.facts["updates"] == 3
    assert record.facts["held_out_accuracy"] == metrics[2]["held_out_accuracy"]


def test_the_saved_model_is_the_trained_one(trained: Path) -> None:
    """Its mean score over the episodes of its training pairs is the offset in its record."""
    model = load_reward_model(trained / "reward_model")
    store = TrajectoryStore(RunDirectory.open(trained, writable=False))
    groups = store.read("treatment-preference-samples")
    found = [conversation_of(t.segments) for g in groups for t in g.trajectories]
    scores = conversation_scores(
        model.loaded.model, [tokens for tokens in found if tokens is not None], tokens_per_batch=512
    )
    assert scores.min() < model.record.offset < scores.max()
    start = classifier_of(build_policy(), seed=0).model
    moved = [
        not np.array_equal(a.detach().numpy(), b.detach().numpy())
        for a, b in zip(start.parameters(), model.loaded.model.parameters(), strict=True)
    ]
    assert all(moved), "the head and every layer have learned"


def build_policy() -> Any:
    loaded = build_scratch()
    install(loaded.model)
    return loaded


class Interrupting(Silent):
    """Raises at the first line that begins with ``when``."""

    def __init__(self, when: str) -> None:
        self.when = when

    def say(self, text: str) -> None:
        if text.startswith(self.when):
            raise KeyboardInterrupt


def fingerprint(run: Path) -> dict[str, str]:
    """Hashes of everything that must repeat bit for bit."""
    files = [run / "metrics.jsonl", run / "evaluation.json", *(run / "reward_model").iterdir()]
    files += [*run.glob("trajectories/*.parquet"), *run.glob("checkpoints/*/*/weights.safetensors")]
    return {str(f.relative_to(run)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_an_interrupted_stage_resumes_to_the_same_bits(trained: Path, tmp_path: Path) -> None:
    own = config(COMMON + STAGE, 'controls.arms=["permuted"]')
    with pytest.raises(KeyboardInterrupt):
        start_run(own, tmp_path / "cut", progress=Interrupting("treatment 3/3"))
    shutil.rmtree(tmp_path / "cut/reward_model")  # as if the kill had come before it was written
    resume_run(tmp_path / "cut")
    assert fingerprint(tmp_path / "cut") == fingerprint(trained)


# its use ----------------------------------------------------------------------------------------------


def test_a_reward_model_scores_a_later_run_below_the_verified_reward(reinforced: Path) -> None:
    steps = read_json_lines(reinforced / "metrics.jsonl")
    assert len(steps) == 2 and all(m["stepped"] and math.isfinite(m["grad_norm"]) for m in steps)
    store = TrajectoryStore(RunDirectory.open(reinforced, writable=False))
    groups = [g for i in range(2) for g in store.read(f"treatment-rl-{i:06d}")]
    settings = parse_config((reinforced / "config.toml").read_text(), source="run")
    model = load_reward_model(Path(settings.rewards.learned.path))
    seen = set[float]()
    for group in groups:
        rows = [(t.scores, t.value, conversation_of(t.segments)) for t in group.trajectories]
        for (verified, learned), value, tokens in rows:
            assert isinstance(verified, Scored) and isinstance(learned, Scored) and tokens is not None
            assert (learned.name, learned.trust) == ("reward_model", Trust.LEARNED)
            (score,) = conversation_scores(model.loaded.model, [tokens], tokens_per_batch=512)
            wanted = 1 / (1 + math.exp(model.record.offset - score))
            assert learned.value == pytest.approx(wanted, abs=1e-5)
            assert value is not None and verified.value <= value < verified.value + 0.5
            seen.add(learned.value)
    assert len(seen) > len(groups), "episodes of a task get different scores"
    assert json.loads((reinforced / "verdict.json").read_text())["weakest_trust"] == "learned"
    assert "reward_model" in write_report(reinforced).read_text(encoding="utf-8")


def test_the_audit_scores_scripts_with_it_and_the_run_says_what_it_rests_on(
    reinforced: Path, trained: Path
) -> None:
    events = read_json_lines(reinforced / "events.jsonl")
    assert not [e for e in events if e["kind"] == "not_audited"]
    (kept,) = [e for e in events if e["kind"] == "learned_reward"]
    assert kept["facts"] == read_record(trained / "reward_model").facts
    weights = (trained / "reward_model/model.safetensors").read_bytes()
    assert kept["sha256"] == hashlib.sha256(weights).hexdigest()


def test_a_run_refuses_to_go_on_with_other_weights(reinforced: Path) -> None:
    settings = parse_config((reinforced / "config.toml").read_text(), source="run")
    weights = Path(settings.rewards.learned.path) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"\x00\x00\x00\x01")
    with pytest.raises(StorageError, match=r"rewards.learned.path.*changed after the run began"):
        resume_run(reinforced)
    weights.write_bytes(whole)
    resume_run(reinforced)


@pytest.mark.parametrize(
    ("recipe", "override", "words"),
    [
        (RL, 'rewards.learned.path="nowhere/rm"', ["rewards.learned.path", "nowhere/rm", "no such folder"]),
        (RL, "rewards.learned={}", ["rewards.learned.path", "missing"]),
        (RL, 'stage.rl.algorithm="reward_model"', ["'reward_model'", "'preference'"]),
        (STAGE + STAGE, "seed=0", ["2 stages train a reward model", "a run keeps one"]),
        (STAGE, "stage.preference.settings={held_out=1.0}", ["held_out = 1.0", "from 0 to 0.9"]),
        (STAGE, "stage.preference.settings={margn=1.0}", ["margn", "no effect", "'margin'"]),
        (STAGE, "stage.preference.settings={center=-1.0}", ["center = -1.0", "at least 0"]),
    ],
)
def test_bad_settings_are_named(recipe: str, override: str, words: list[str]) -> None:
    with pytest.raises(SurefootError) as caught:
        check_config(config(COMMON + recipe, override))
    for word in words:
        assert word in str(caught.value)


def test_a_folder_that_does_not_fit_the_policy_is_refused_before_work(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained / "reward_model", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[10:12]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match=r"rewards.learned.path.*tokenizer is not that of model.name = 'scratch'"
    ):
        check_config(config(COMMON + RL, f'rewards.learned.path="{other}"'))
    policy = tmp_path / "policy"
    build_policy().model.save_pretrained(policy)
    with pytest.raises(ConfigError, match="outputs in id2label; it must be 1"):
        check_config(config(COMMON + RL, f'rewards.learned.path="{policy}"'))

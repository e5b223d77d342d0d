"""The control arms with an update of their own: no clip, or one update at a ratio of 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import ConfigError
from surefoot.learner.batch import TokenBatch
from surefoot.runs.files import read_json_lines
from surefoot.training.algorithms import ALGORITHMS, algorithm
from surefoot.training.arms import ARMS, arm_order, arm_returns, as_trained, without_effect
from surefoot.training.config import RlStage, parse_config
from surefoot.training.losses import RlLoss
from surefoot.training.progress import Silent
from surefoot.training.run import check_config, resume_run, start_run

TINY = Path(__file__).with_name("tiny.py")
# Two updates a step and a step size that moves the policy well past a narrow clip between them.
RECIPE = f"""
name = "arms"
model.name = "scratch"
environment.name = "{TINY}"
sampling.max_tokens = 6
audit.override.even_length = "luck must pay"
engine.concurrency = 16
learner.tokens_per_batch = 4096

[[stage]]
kind = "rl"
group_size = 4
tasks_per_step = 4
updates_per_step = 2
steps = 3
lr = 3e-3
checkpoint_every = 1
settings = {{ clip_low = 0.01, clip_high = 0.01 }}

[evaluation]
tasks = 2
samples = 1

[controls]
arms = ["random", "random_unclipped", "random_on_policy"]
"""


def config(*overrides: str) -> Any:
    return parse_config(RECIPE, source="test", overrides=overrides)


def slopes(row: Any, ratios: list[float], advantage: float) -> list[float]:
    """-d loss / d log p of tokens, a sequence and a weight of 1 each, whose ratio to the sampler is given."""
    n = len(ratios)
    behaviour = torch.full((n,), -2.0)
    logp = (behaviour.double() + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    batch = TokenBatch(
        logp, behaviour, torch.full((n,), advantage, dtype=torch.float64), torch.ones(n, dtype=torch.float64),
        torch.arange(n), torch.zeros(n), {},
    )  # fmt: skip
    loss, sums = RlLoss(row)(batch)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert float(sums["clip_fraction"]) == 0 or row.clip(row.settings).kind != "none"
    return (-gradient).tolist()


CLIPPED = sorted(
    name
    for name, row in ALGORITHMS.items()
    if row.kind == "rl" and row.credit is not None and row.clip(row.settings).kind != "none"
)


@pytest.mark.parametrize("name", CLIPPED)
def test_without_a_clip_every_token_pulls_with_ratio_times_advantage(name: str) -> None:
    ratios = [0.05, 0.6, 1.0, 1.7, 7.0]
    stage, row = RlStage(kind="rl", algorithm=name, updates_per_step=2), algorithm(name, {})
    for advantage in (1.5, -1.5):
        _, free = as_trained("random_unclipped", stage, row)
        assert slopes(free, ratios, advantage) == pytest.approx([advantage * r for r in ratios])
    _, kept = as_trained("random", stage, row)
    assert kept is row
    seen = [slopes(kept, ratios, a) for a in (1.5, -1.5)]
    assert seen != [pytest.approx([a * r for r in ratios]) for a in (1.5, -1.5)], "the row itself does clip"


def test_an_on_policy_arm_makes_one_update_on_fresh_samples() -> None:
    stage, row = RlStage(kind="rl", algorithm="areal", updates_per_step=4), algorithm("areal", {})
    own, fresh = as_trained("permuted_on_policy", stage, row)
    assert own.updates_per_step == 1 and fresh.settings["staleness"] == 0
    rest = {key: value for key, value in row.settings.items() if key != "staleness"}
    assert {key: fresh.settings[key] for key in rest} == rest and fresh.clip is row.clip
    assert own.model_copy(update={"updates_per_step": 4}) == stage


def test_arms_of_one_signal_draw_the_same() -> None:
    group, valid = np.repeat(np.arange(4), 4), np.ones(16, np.bool_)
    returns = np.arange(16.0) % 3
    for signal in ("random", "permuted"):
        names = [name for name, arm in ARMS.items() if arm.signal == signal]
        assert len(names) == 3
        drawn = [arm_returns(name, returns, group, valid, seed=5).tolist() for name in names]
        assert drawn[0] == drawn[1] == drawn[2] != returns.tolist()
        orders = [arm_order(name, group, valid, seed=5).tolist() for name in names]
        assert orders[0] == orders[1] == orders[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arms") / "whole"
    start_run(config(), path)
    return path


def of_arm(path: Path, arm: str) -> list[dict[str, Any]]:
    return [m for m in read_json_lines(path / "metrics.jsonl") if m["arm"] == arm]


def test_the_random_arms_differ_in_clip_and_ratio_alone(finished: Path) -> None:
    plain, free, fresh = (of_arm(finished, a) for a in ("random", "random_unclipped", "random_on_policy"))
    assert all(m["stepped"] for m in (*plain, *free, *fresh))
    assert sum(m["clip_fraction"] for m in plain) > 0.01, "or the arms could not differ"
    assert [m["clip_fraction"] for m in free] == [0.0] * 3
    assert all(m["approx_kl"] > 1e-6 for m in free), "its second update is off-policy and bound by nothing"
    # A ratio of 1 up to the rounding between sampler and learner.
    assert all(m["approx_kl"] < 1e-9 and m["mismatch_max"] < 1e-4 for m in fresh)
    assert [m["clip_fraction"] for m in fresh] == [0.0] * 3
    # Until the first update all three have seen, and earned, the same.
    assert plain[0]["return_mean"] == free[0]["return_mean"] == fresh[0]["return_mean"]
    assert plain[0]["advantage_abs_mean"] == free[0]["advantage_abs_mean"] == fresh[0]["advantage_abs_mean"]
    assert plain[0]["trained_tokens"] == free[0]["trained_tokens"] == fresh[0]["trained_tokens"]
    assert plain[-1]["grad_norm"] != free[-1]["grad_norm"]


def test_verdict_and_report_hold_the_arms_side_by_side(finished: Path) -> None:
    from surefoot.report.page import write_report

    verdict = json.loads((finished / "verdict.json").read_text())
    assert set(verdict["holm"]) == {"random", "random_unclipped", "random_on_policy"}
    page = write_report(finished).read_text()
    for name in ("random_unclipped", "random_on_policy"):
        assert f"final - {name}" in page and ARMS[name].title in page


def test_the_arms_resume_to_the_same_bits(finished: Path, tmp_path: Path) -> None:
    class Cut(Silent):
        """Stops at step 2 of each new arm, once."""

        def __init__(self, arm: str) -> None:
            self.arm = arm

        def say(self, text: str) -> None:
            if text.startswith(f"{self.arm} 2/3"):
                raise KeyboardInterrupt

    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        start_run(config(), cut, progress=Cut("random_unclipped"))
    with pytest.raises(KeyboardInterrupt):
        resume_run(cut, progress=Cut("random_on_policy"))
    resume_run(cut)
    for pattern in (
        "metrics.jsonl",
        "evaluation.json",
        "credit/*.parquet",
        "checkpoints/*/*/weights.safetensors",
    ):
        ours, theirs = sorted(cut.glob(pattern)), sorted(finished.glob(pattern))
        assert [p.relative_to(cut) for p in ours] == [p.relative_to(finished) for p in theirs] and ours
        assert [p.read_bytes() for p in ours] == [p.read_bytes() for p in theirs]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["stage.rl.updates_per_step=1", 'controls.arms=["random_unclipped"]'], "the ratio is 1"),
        (["stage.rl.updates_per_step=1", 'controls.arms=["random_on_policy"]'], "on-policy already"),
        (
            ['stage.rl.algorithm="rloo"', "stage.rl.settings={}", 'controls.arms=["random_unclipped"]'],
            "no clip",
        ),
        (['stage.rl.algorithm="online_dpo"', "stage.rl.settings={}"], "has no ratio"),
        (
            [
                'stage.rl.algorithm="areal"',
                "stage.rl.updates_per_step=1",
                'controls.arms=["random_unclipped"]',
            ],
            "the ratio is 1",
        ),
    ],
)
def test_an_arm_without_effect_is_refused(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"controls\.arms holds 'random_\w+'.*{why}.*use 'random'"):
        check_config(config(*overrides))


@pytest.mark.parametrize(
    ("arm", "name", "updates", "refused"),
    [
        ("random_on_policy", "areal", 1, False),
        ("random_unclipped", "dppo", 1, True),
        ("random_on_policy", "reinforce", 2, False),
        ("random_unclipped", "sapo", 2, False),
        ("constant", "grpo", 1, False),
    ],
)
def test_what_has_an_effect(arm: str, name: str, updates: int, refused: bool) -> None:
    stage = RlStage(kind="rl", algorithm=name, updates_per_step=updates)
    assert bool(without_effect(arm, stage, algorithm(name, {}))) is refused


def test_stale_samples_bind_the_clip_that_measures_from_the_sampler() -> None:
    stage = RlStage(kind="rl", algorithm="dppo")
    assert without_effect("random_unclipped", stage, algorithm("dppo", {"staleness": 2})) == ""


def test_an_unknown_arm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'random_onpolicy'.*random_on_policy"):
        config('controls.arms=["random_onpolicy"]')

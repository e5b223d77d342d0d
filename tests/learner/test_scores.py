"""Scores of conversations: those of transformers itself, under any packing, with exact gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError, ModelError
from surefoot.core.types import Provenance, Segment
from surefoot.learner.learner import OptimizerSettings
from surefoot.learner.scores import ScoreLearner, conversation_scores, score_batch
from surefoot.objectives.preference import bradley_terry
from surefoot.policy.forward import install
from surefoot.policy.models import LoadedModel
from surefoot.policy.reward_model import (
    RewardModelRecord,
    classifier_of,
    conversation_of,
    load_reward_model,
    read_record,
    save_reward_model,
)
from surefoot.policy.scratch import build_scratch

END = 2  # of a turn; also the padding token


def policy(**sizes: int) -> LoadedModel:
    loaded = build_scratch(**{"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, **sizes})
    install(loaded.model)
    return loaded


def conversations(seed: int = 0) -> list[Any]:
    """Shared beginnings, ends that look like padding, and one that begins another."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, 259, 9)
    found = [
        np.concatenate([shared, rng.integers(3, 259, n), [END] * k]) for n, k in ((4, 1), (7, 2), (2, 0))
    ]
    return [tokens.astype(np.int32) for tokens in (*found, found[1][:12], rng.integers(3, 259, 5))]


def learner_of(model: Any, **options: Any) -> ScoreLearner:
    settings = OptimizerSettings(lr=options.pop("lr", 1e-3), clip_norm=1e30)
    return ScoreLearner(model, settings, total_updates=10, **options)


def test_a_saved_model_scores_as_transformers_does_and_shares_nothing_with_the_policy(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    loaded = policy()
    model, given = classifier_of(loaded, seed=3), conversations()
    before = conversation_scores(model.model, given, tokens_per_batch=1000)
    save_reward_model(tmp_path / "rm", model, RewardModelRecord("scratch", 0.25, {"pairs": 7}))
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.zero_()
    again = load_reward_model(tmp_path / "rm")
    assert again.record == RewardModelRecord("scratch", 0.25, {"pairs": 7}) and again.loaded.name == "scratch"
    assert np.array_equal(conversation_scores(again.loaded.model, given, tokens_per_batch=1000), before)
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    with torch.no_grad():
        own = [float(theirs(torch.from_numpy(tokens.astype(np.int64))[None]).logits) for tokens in given]
    np.testing.assert_allclose(before, own, atol=2e-6)
    assert len(set(before)) == len(given)


def test_the_head_follows_from_the_seed_and_leaves_the_random_state_alone() -> None:
    loaded = policy()
    state = torch.random.get_rng_state()
    heads = [classifier_of(loaded, seed=seed).model.score.weight for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert 0.5 < float(heads[0].detach().std()) * 33**0.5 < 1.5


def test_scores_and_updates_do_not_depend_on_the_split() -> None:
    given, slopes = conversations(), np.array([1.0, -2.0, 0.5, 0.25, -1.0])
    found: list[Any] = []
    for budget in (1, 1000):
        learner = learner_of(classifier_of(policy(), seed=0).model, tokens_per_batch=budget)
        scores = learner.scores(given)
        report = learner.update_along(given, slopes)
        found.append((scores, report.grad_norm))
        assert report.stepped and report.trained_tokens == sum(map(len, given))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=2e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


def test_the_gradient_is_that_of_the_loss_by_finite_differences() -> None:
    """-log sigmoid(s+ - s- - m) + c (s+ + s-)^2 in float64, through slopes by score and the packed pass."""
    model: Any = classifier_of(policy(hidden=16), seed=1).model.double()
    norm = model.model.norm  # transformers' own rounds to float32 inside, more than the differences bear
    norm.forward = lambda x: norm.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    given = conversations()
    chosen, rejected = torch.tensor([0, 1, 0]), torch.tensor([2, 3, 4])
    margin = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)

    def loss_of(scores: torch.Tensor) -> torch.Tensor:
        return bradley_terry(
            scores[chosen], scores[rejected], weights=weights, margin=margin, center=0.3
        ).loss

    def value() -> float:
        with torch.no_grad():
            return float(loss_of(score_batch(model, given)[0]))

    learner = learner_of(model, tokens_per_batch=20)
    scores = torch.from_numpy(learner.scores(given)).requires_grad_()
    (slopes,) = torch.autograd.grad(loss_of(scores), scores)
    kept: dict[str, torch.Tensor] = {}

    def keep(*args: Any, **kwargs: Any) -> None:
        kept.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    learner.optimizer.step = keep  # pyright: ignore[reportAttributeAccessIssue]
    learner.update_along(given, slopes.numpy())
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        flat, grad = parameter.data.view(-1), kept[name].view(-1)
        for at in rng.integers(0, len(flat), 3):
            held = float(flat[at])
            ends: list[float] = []
            for step in (1e-5, -1e-5):
                flat[at] = held + step
                ends.append(value())
            flat[at] = held
            assert float(grad[at]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-8), name


def segment(*parts: tuple[Provenance, list[int]]) -> Segment:
    tokens = np.array([token for _, own in parts for token in own], np.int32)
    who = np.array([p for p, own in parts for _ in own], np.uint8)
    sampled = who == Provenance.SAMPLED
    logprobs = np.where(sampled, -1.0, np.nan).astype(np.float32)
    return Segment(tokens, who, logprobs, np.where(sampled, 0, -1).astype(np.int32))


def test_a_conversation_ends_at_its_last_own_token_whatever_the_tokens_are() -> None:
    prompt, shown, own = Provenance.PROMPT, Provenance.OBSERVATION, Provenance.SAMPLED
    first = segment((prompt, [5, END]), (own, [7, END, END]), (shown, [END, 9]))
    found = conversation_of([first])
    assert found is not None and found.tolist() == [5, END, 7, END, END]
    edited = segment((prompt, [5, END, 8]), (own, [4]))
    unspoken = segment((prompt, [5, 6]))
    for segments in ((first, edited), (first, edited, unspoken)):
        found = conversation_of(segments)
        assert found is not None and found.tolist() == [5, END, 8, 4]
    assert conversation_of([unspoken]) is None and conversation_of([]) is None


def test_bad_conversations_and_folders_are_named(tmp_path: Path) -> None:
    learner = learner_of(classifier_of(policy(), seed=0).model)
    given = conversations()
    with pytest.raises(DataError, match=r"conversations\[1\] is empty"):
        learner.scores([given[0], given[0][:0]])
    with pytest.raises(DataError, match="slopes has 1 entries for 5"):
        learner.update_along(given, np.zeros(1))
    with pytest.raises(ModelError, match="no such folder"):
        read_record(tmp_path / "absent")
    plain = policy()
    plain.model.save_pretrained(tmp_path / "policy")
    with pytest.raises(ModelError, match="outputs in id2label; it must be 1"):
        read_record(tmp_path / "policy")
    save_reward_model(tmp_path / "rm", classifier_of(plain, seed=0), RewardModelRecord("scratch"))
    (tmp_path / "rm/reward_model.json").write_text(json.dumps({"format": 9}))
    with pytest.raises(ModelError, match="format 9; this version reads 1"):
        read_record(tmp_path / "rm")
    (tmp_path / "rm/reward_model.json").unlink()
    assert read_record(tmp_path / "rm").offset == 0.0, "a folder of another library has no record"

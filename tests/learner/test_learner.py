"""The learner: exact under any packing, exact at resume, honest about what it did not do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError, StorageError
from surefoot.core.types import Sampling
from surefoot.learner import checkpoint
from surefoot.learner.batch import Example, split_micro_batches
from surefoot.learner.learner import Learner, OptimizerSettings
from surefoot.policy.forward import install
from surefoot.policy.scratch import build_scratch
from surefoot.training.algorithms import algorithm
from surefoot.training.losses import RlLoss, sft_loss

PROMPT = 14


def model_of(seed: int = 0) -> Any:
    model = build_scratch(seed=seed).model
    install(model)
    return model


def learner_of(model: Any, **options: Any) -> Learner:
    settings = OptimizerSettings(lr=options.pop("lr", 1e-3), clip_norm=options.pop("clip_norm", 1.0))
    return Learner(model, settings, total_updates=10, **options)


def examples(seed: int = 0, groups: int = 3, members: int = 4) -> list[Example]:
    rng = np.random.default_rng(seed)
    found: list[Example] = []
    for _ in range(groups):
        shared = rng.integers(3, 259, PROMPT)
        for _ in range(members):
            n = int(rng.integers(3, 15))
            tokens = np.concatenate([shared, rng.integers(3, 259, n)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= PROMPT
            mask[PROMPT + 1] = n < 4  # an observation token in the middle
            m = int(mask.sum())
            behaviour = rng.normal(-5.5, 0.1, m).astype(np.float32)
            found.append(Example(((tokens, mask),), behaviour, rng.normal(size=m), np.array([1, m - 1])))
    return found


def gradients(model: Any, given: list[Example], loss: Any, **options: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one update that moves nothing."""
    learner = learner_of(model, lr=1e-30, clip_norm=1e30, **options)
    kept: dict[str, Any] = {}
    plain = learner.optimizer.step

    def spy(*args: Any, **kwargs: Any) -> Any:
        kept.update({name: p.grad.clone() for name, p in model.named_parameters()})
        return plain(*args, **kwargs)

    learner.optimizer.step = spy  # type: ignore[method-assign]
    report = learner.update(given, loss, sampling=Sampling(), aggregate="sequence_mean")
    return report.metrics["loss"], kept


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 100])
def test_loss_and_gradient_do_not_depend_on_micro_batches(tokens_per_batch: int) -> None:
    model, given = model_of(), examples()
    loss = RlLoss(algorithm("grpo", {}))
    whole, want = gradients(model, given, loss, tokens_per_batch=10_000)
    split, got = gradients(model, given, loss, tokens_per_batch=tokens_per_batch)
    assert split == pytest.approx(whole, rel=1e-6)
    scale = torch.cat([g.flatten() for g in want.values()]).norm()
    gap = torch.cat([(got[n] - want[n]).flatten() for n in want]).norm()
    assert gap / scale < 1e-5


def test_loss_and_gradient_equal_a_plain_transformers_loop() -> None:
    model = model_of()
    given = [replace(example, advantages=np.ones(example.trained)) for example in examples()]
    ours, got = gradients(model, given, sft_loss)
    model.zero_grad(set_to_none=True)
    plain = build_scratch(seed=0).model
    total = torch.zeros(())
    for example in given:
        tokens, mask = example.segments[0]
        ids = torch.from_numpy(tokens).long()
        logp = torch.log_softmax(plain(ids[None]).logits[0], dim=-1)
        picked = logp[torch.arange(len(ids) - 1), ids[1:]][torch.from_numpy(mask[1:])]
        total = total - picked.mean() / len(given)
    total.backward()  # type: ignore[no-untyped-call]
    assert ours == pytest.approx(float(total), rel=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, atol=1e-6, rtol=1e-3)


def test_order_of_examples_does_not_matter() -> None:
    model, given = model_of(), examples()
    a, _ = gradients(model, given, sft_loss)
    b, _ = gradients(model, list(reversed(given)), sft_loss)
    assert a == pytest.approx(b, rel=1e-6)


def test_micro_batches_hold_every_example_once_and_respect_the_budget() -> None:
    given = examples(groups=5)
    batches = split_micro_batches(given, 60)
    assert sorted(i for batch in batches for i in batch) == list(range(len(given)))
    assert len(batches) > 1


def test_observation_tokens_and_prompts_carry_no_loss() -> None:
    """Changing what was observed after the last trained token cannot change the loss."""
    model = model_of()
    tokens = np.arange(3, 23, dtype=np.int32)
    mask = np.zeros(20, bool)
    mask[8:11] = True
    other = tokens.copy()
    other[11:] += 40
    pair = [
        Example(((t, mask),), np.zeros(3, np.float32), np.ones(3), np.array([3])) for t in (tokens, other)
    ]
    a, b = (gradients(model, [example], sft_loss)[0] for example in pair)
    assert a == pytest.approx(b, abs=1e-6)


def test_E13_the_eos_that_was_sampled_is_trained_although_it_equals_pad() -> None:
    """pad == eos: the mask comes from provenance, so only sampled eos tokens are trained."""
    eos = 2
    tokens = np.array([10, 11, 12, eos, eos, eos], np.int32)
    ends = np.array([False, False, True, True, False, False])
    cut = np.array([False, False, True, False, False, False])
    for mask in (ends, cut):
        m = int(mask.sum())
        example = Example(((tokens, mask),), np.zeros(m, np.float32), np.ones(m), np.array([m]))
        report = learner_of(model_of()).update([example], sft_loss, sampling=Sampling())
        assert report.trained_tokens == m


def test_E5_a_batch_without_signal_takes_no_step_and_says_so() -> None:
    model = model_of()
    before = {name: p.clone() for name, p in model.named_parameters()}
    learner = learner_of(model)
    report = learner.update(examples(), RlLoss(algorithm("grpo", {})), sampling=Sampling(), keep=[])
    assert not report.stepped and "no example" in report.reason and learner.updates == 0
    for name, p in model.named_parameters():
        assert torch.equal(before[name], p)


def test_leaving_out_examples_with_zero_advantage_changes_nothing() -> None:
    given = [
        Example(e.segments, e.behaviour, e.advantages * (i % 2), e.turns) for i, e in enumerate(examples())
    ]
    loss = RlLoss(algorithm("grpo", {}))
    gradients: list[list[torch.Tensor]] = []
    for keep in (None, [i for i in range(len(given)) if i % 2]):
        learner = learner_of(model_of())
        # Not the weights: Adam's first step, lr g / (|g| + 1e-8), shows the rounding of tiny gradients.
        learner.optimizer.register_step_pre_hook(
            lambda *_, own=learner: gradients.append([p.grad.clone() for p in own.parameters])
        )
        learner.update(given, loss, sampling=Sampling(), keep=keep)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-5)


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    model = model_of()
    before = [p.clone() for p in model.parameters()]

    def broken(batch: Any) -> Any:
        return batch.logp.sum() * float("inf"), {}

    report = learner_of(model).update(examples(), broken, sampling=Sampling())
    assert not report.stepped and "gradient norm" in report.reason
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    again = learner_of(model).update(examples(), sft_loss, sampling=Sampling())
    assert again.stepped, "the broken gradient must not linger in the buffers"


def test_recomputed_activations_give_the_same_update() -> None:
    models = [model_of(), model_of()]
    for model, recompute in zip(models, (False, True), strict=True):
        learner_of(model, checkpoint_activations=recompute).update(examples(), sft_loss, sampling=Sampling())
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("behaviour", np.zeros(2, np.float32)), ("advantages", np.zeros(9)), ("turns", np.array([1]))],
)
def test_examples_whose_parts_do_not_fit_are_refused(field: str, value: Any) -> None:
    tokens, mask = np.arange(3, 9, dtype=np.int32), np.arange(6) > 2
    parts = {"behaviour": np.zeros(3, np.float32), "advantages": np.zeros(3), "turns": np.array([3])}
    with pytest.raises(DataError, match=field):
        Example(((tokens, mask),), **{**parts, field: value})


def steps(learner: Learner, first: int, last: int) -> None:
    for index in range(first, last):
        learner.update(examples(index), sft_loss, sampling=Sampling())


def test_E23_a_resumed_learner_ends_at_the_same_bits(tmp_path: Path) -> None:
    straight = learner_of(model_of())
    steps(straight, 0, 6)
    first = learner_of(model_of())
    steps(first, 0, 3)
    checkpoint.save(tmp_path / "step-000003", first, {"cursor": 3})
    second = learner_of(model_of(seed=9))
    assert checkpoint.load(tmp_path / "step-000003", second) == {"cursor": 3}
    steps(second, 3, 6)
    for a, b in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_full_disk_leaves_the_earlier_checkpoint_whole(
    tmp_path: Path, make_disk: Callable[[str], Path]
) -> None:
    learner = learner_of(model_of())
    steps(learner, 0, 1)
    checkpoint.save(tmp_path / "step-000001", learner, {"cursor": 1})
    size = sum(item.stat().st_size for item in (tmp_path / "step-000001").iterdir())
    for share in (1.05, 1.2, 1.5, 1.9):  # full in the weights, in the optimiser's state, near the end
        disk = make_disk(f"{int(size * share) >> 10}k")
        checkpoint.save(disk / "step-000001", learner, {"cursor": 1})
        with pytest.raises(StorageError, match="step-000002 could not be written"):
            checkpoint.save(disk / "step-000002", learner, {"cursor": 2})
        assert [item.name for item in disk.iterdir()] == ["step-000001"]
        assert checkpoint.load(disk / "step-000001", learner_of(model_of(seed=9))) == {"cursor": 1}


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str, damage: str) -> None:
    learner = learner_of(model_of())
    steps(learner, 0, 1)
    path = tmp_path / "step-000001"
    checkpoint.save(path, learner, {})
    file = path / name
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0x80
        file.write_bytes(data)
    if name == "state.json" and damage == "flip":
        pytest.skip("a flipped byte of a JSON text may stay readable; weights are covered by checksums")
    with pytest.raises(StorageError, match="step-000001"):
        checkpoint.load(path, learner)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", learner_of(model_of()), {})
    other = build_scratch(seed=0, hidden=64).model
    install(other)
    with pytest.raises(StorageError, match="not"):
        checkpoint.load_weights(tmp_path / "a", other)


def test_a_foreign_schema_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", learner_of(model_of()), {})
    state = tmp_path / "a" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "schema": 99}))
    with pytest.raises(StorageError, match="schema 99"):
        checkpoint.read_state(tmp_path / "a")


def test_a_failed_write_leaves_the_old_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(model_of())
    path = tmp_path / "step-000001"
    checkpoint.save(path, learner, {"old": True})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(StorageError, match="No space left"):
        checkpoint.save(path, learner, {"old": False})
    assert checkpoint.read_state(path)["state"] == {"old": True}
    assert [item.name for item in tmp_path.iterdir()] == ["step-000001"]

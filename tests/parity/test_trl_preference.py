"""DPO, KTO, CPO, SimPO, ORPO and reward-model losses: the same tokens through TRL's trainers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from surefoot.objectives.preference import (
    Pairs,
    PreferenceLoss,
    Unpaired,
    bradley_terry,
    cpo,
    dpo,
    excess_discounts,
    hinge,
    ipo,
    kto,
    kto_baseline,
    orpo,
    rpo,
    simpo,
    trajectory_sums,
)

from .conftest import agree, model_gradient, tiny_model, token_logps

PAIRS, LENGTH, PROMPT = 5, 14, 4
BETA = 0.3


@dataclass(frozen=True)
class Rows:
    """Chosen rows, then rejected ones, ``[2 PAIRS, LENGTH]``: a prompt, a completion and padding."""

    tokens: Tensor
    attention: Tensor
    completion: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.completion.sum(1)

    def sums(self, model: Any, weights: Tensor | None = None) -> Tensor:
        """Log-probability of each completion, [2 PAIRS], through Surefoot's flat layout."""
        logp = token_logps(model, self.tokens, self.attention)[self.completion]
        return trajectory_sums(logp, self.lengths, weights)

    def pairs(self, model: Any, reference: Any, weights: Tensor | None = None) -> Pairs:
        chosen, rejected = self.sums(model, weights).chunk(2)
        chosen_ref, rejected_ref = self.sums(reference, weights).detach().chunk(2)
        chosen_length, rejected_length = self.lengths.chunk(2)
        even = torch.full_like(chosen, 1 / len(chosen))
        return Pairs(chosen, rejected, even, chosen_ref, rejected_ref, chosen_length, rejected_length)

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {
            "input_ids": self.tokens,
            "attention_mask": self.attention,
            "completion_mask": self.completion.long(),
        }

    @property
    def sides(self) -> dict[str, Tensor]:
        """The batch of the CPO and ORPO trainers."""
        labels = torch.where(self.completion, self.tokens, -100)
        parts = {"input_ids": self.tokens, "attention_mask": self.attention, "labels": labels}
        halves = {name: part.chunk(2) for name, part in parts.items()}
        return {
            f"{side}_{name}": both[i]
            for name, both in halves.items()
            for i, side in enumerate(("chosen", "rejected"))
        }


def make_rows(seed: int, *, even: bool = False, pairs: int = PAIRS) -> Rows:
    """``even``: every completion is 6 tokens long, else 2 to 10."""
    draw = torch.Generator().manual_seed(seed)
    count = torch.randint(2, LENGTH - PROMPT + 1, (2 * pairs, 1), generator=draw)
    if even:
        count.fill_(6)
    place = torch.arange(LENGTH)
    tokens = torch.randint(3, 32, (2 * pairs, LENGTH), generator=draw)
    attention = place < PROMPT + count
    return Rows(torch.where(attention, tokens, 0), attention.long(), attention & (place >= PROMPT))


@pytest.fixture(params=range(2), ids=lambda seed: f"seed{seed}")
def rows(request: pytest.FixtureRequest) -> Rows:
    return make_rows(request.param)


@pytest.fixture(scope="module")
def data() -> Any:
    from datasets import Dataset

    row = {"prompt": "w1 w2", "chosen": " w3 w4", "rejected": " w5"}
    return Dataset.from_list([row, row])


@pytest.fixture(scope="module")
def dpo_trainer(data: Any, tokenizer: Any, quiet: dict[str, Any]) -> Any:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        tiny_model(0),
        tiny_model(1),
        args=DPOConfig(**quiet, beta=BETA),
        train_dataset=data,
        processing_class=tokenizer,
    )


def dpo_loss(trainer: Any, rows: Rows, patch: pytest.MonkeyPatch, *loss_types: str, **options: Any) -> Tensor:
    """TRL's loss; ``options`` are attributes, which must exist, of the trainer."""
    options = {"loss_types": list(loss_types), "loss_weights": [1.0] * len(loss_types), **options}
    for name, value in options.items():
        patch.setattr(trainer, name, value)
    return cast("Tensor", trainer.compute_loss(trainer.model, rows.inputs))


def same(trainer: Any, ours: PreferenceLoss, theirs: Tensor) -> bool:
    """Equal loss, and equal gradient in every parameter of the model."""
    model = trainer.model
    return agree(ours.loss, theirs) and agree(model_gradient(model, ours.loss), model_gradient(model, theirs))


DPO = {
    "sigmoid": lambda pairs: dpo(pairs, beta=BETA),
    "sigmoid_norm": lambda pairs: dpo(pairs, beta=BETA, form="mean"),
    "hinge": lambda pairs: hinge(pairs, beta=BETA),
    "ipo": lambda pairs: ipo(pairs, beta=BETA),
}


@pytest.mark.parametrize("name", DPO)
def test_dpo_losses_agree(dpo_trainer: Any, rows: Rows, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = dpo_loss(dpo_trainer, rows, monkeypatch, name)
    ours = DPO[name](rows.pairs(dpo_trainer.model, dpo_trainer.ref_model))
    assert same(dpo_trainer, ours, theirs)
    logged = dpo_trainer._metrics["train"]
    if name in (
        "sigmoid",
        "hinge",
    ):  # under a mean form TRL logs what sums would give, we what the loss compares
        assert float(ours.accuracy) == pytest.approx(logged["rewards/accuracies"][-1])
        assert float(ours.chosen) == pytest.approx(logged["rewards/chosen"][-1], abs=1e-4)
        assert float(ours.rejected) == pytest.approx(logged["rewards/rejected"][-1], abs=1e-4)


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_ld_dpo_discounts_the_excess_length_alike(
    dpo_trainer: Any, rows: Rows, alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = dpo_loss(dpo_trainer, rows, monkeypatch, "sigmoid", ld_alpha=alpha)
    other = torch.cat(rows.lengths.chunk(2)[::-1])
    weights = excess_discounts(rows.lengths, other, alpha=alpha)
    pairs = rows.pairs(dpo_trainer.model, dpo_trainer.ref_model, weights)
    assert same(dpo_trainer, dpo(pairs, beta=BETA), theirs)
    assert float(weights.min()) == pytest.approx(alpha)


def test_label_smoothing_is_the_conservative_one_that_trl_has_in_aot(
    dpo_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOT sorts the pairs of a batch first; with one pair only the smoothing is left."""
    rows = make_rows(3, pairs=1)
    theirs = dpo_loss(dpo_trainer, rows, monkeypatch, "aot", label_smoothing=0.2)
    pairs = rows.pairs(dpo_trainer.model, dpo_trainer.ref_model)
    assert same(dpo_trainer, dpo(pairs, beta=BETA, label_smoothing=0.2), theirs)


def test_label_smoothing_is_not_trls_robust_loss(
    dpo_trainer: Any, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Robust DPO subtracts the flipped term and divides by 1 - 2e: unbiased, and unbounded below."""
    theirs = dpo_loss(dpo_trainer, rows, monkeypatch, "robust", label_smoothing=0.2)
    pairs = rows.pairs(dpo_trainer.model, dpo_trainer.ref_model)
    plain, smooth = (dpo(pairs, beta=BETA, label_smoothing=e).loss for e in (0.0, 0.2))
    assert not agree(smooth, theirs)
    # Smoothed, 0.8 l(d) + 0.2 l(-d); the second term alone is that of the flipped pair.
    flipped = (smooth - 0.8 * plain) / 0.2
    assert agree((0.8 * plain - 0.2 * flipped) / 0.6, theirs)


def test_rpo_agrees_where_the_chosen_are_of_one_length(
    dpo_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(0, even=True)
    theirs = dpo_loss(dpo_trainer, rows, monkeypatch, "sigmoid", "sft", loss_weights=[1.0, 0.7])
    pairs = rows.pairs(dpo_trainer.model, dpo_trainer.ref_model)
    assert same(dpo_trainer, rpo(pairs, beta=BETA, alpha=0.7), theirs)


def test_rpo_takes_the_nll_per_trajectory_where_trl_averages_over_the_tokens_of_the_batch(
    dpo_trainer: Any, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterative RPO divides each NLL by its own length: the batch a pair falls into does not matter."""
    theirs = dpo_loss(dpo_trainer, rows, monkeypatch, "sigmoid", "sft", loss_weights=[1.0, 0.7])
    pairs = rows.pairs(dpo_trainer.model, dpo_trainer.ref_model)
    assert not agree(rpo(pairs, beta=BETA, alpha=0.7).loss, theirs)
    length = rows.lengths.chunk(2)[0]
    over_tokens = -pairs.chosen.sum() / length.sum()
    assert agree(dpo(pairs, beta=BETA).loss + 0.7 * over_tokens, theirs)


@pytest.fixture(scope="module")
def kto_trainer(tokenizer: Any, quiet: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    rows = [{"prompt": "w1 w2", "completion": f" w{i} w4", "label": i % 2 == 0} for i in range(4)]
    return KTOTrainer(
        tiny_model(0),
        tiny_model(1),
        args=KTOConfig(
            **quiet, beta=BETA, desirable_weight=1.2, undesirable_weight=0.7, per_device_train_batch_size=2
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("forward", [True, False])
def test_kto_agrees_with_its_kl_estimate(kto_trainer: Any, rows: Rows, forward: bool) -> None:
    """With policy and reference exchanged for the mismatched rows, the estimate is negative and cut at 0."""
    model, reference = kto_trainer.model, kto_trainer.ref_model
    away = next(
        wrong
        for wrong in map(make_rows, range(10, 40))
        if (float((wrong.sums(model) - wrong.sums(reference)).detach().mean()) > 0) == forward
    )
    desirable = torch.arange(2 * PAIRS) % 3 != 0
    batch = {**rows.inputs, **{f"KL_{k}": v for k, v in away.inputs.items()}, "label": desirable}
    theirs = kto_trainer.compute_loss(model, batch)
    z = kto_baseline(away.sums(model), away.sums(reference))
    assert (float(z) > 0) == forward
    even = torch.full((2 * PAIRS,), 1 / (2 * PAIRS))
    data = Unpaired(rows.sums(model), rows.sums(reference).detach(), desirable, even, z)
    ours = kto(data, beta=BETA, desirable=1.2, undesirable=0.7)
    assert same(kto_trainer, ours, theirs)
    assert float(z) == pytest.approx(kto_trainer._metrics["train"]["kl"][-1], abs=1e-5)


def build_cpo(data: Any, tokenizer: Any, quiet: dict[str, Any], **options: Any) -> Any:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    args = CPOConfig(**quiet, max_length=32, **options)
    return CPOTrainer(tiny_model(0), args=args, train_dataset=data, processing_class=tokenizer)


@pytest.fixture(scope="module")
def cpo_trainer(data: Any, tokenizer: Any, quiet: dict[str, Any]) -> Any:
    return build_cpo(data, tokenizer, quiet, beta=BETA, cpo_alpha=0.6)


@pytest.fixture(scope="module")
def simpo_trainer(data: Any, tokenizer: Any, quiet: dict[str, Any]) -> Any:
    options = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.5, "simpo_gamma": 1.375}
    return build_cpo(data, tokenizer, quiet, **options)


def test_cpo_agrees_where_the_chosen_are_of_one_length(cpo_trainer: Any) -> None:
    rows = make_rows(0, even=True)
    theirs = cpo_trainer.compute_loss(cpo_trainer.model, rows.sides)
    ours = cpo(rows.pairs(cpo_trainer.model, cpo_trainer.model), beta=BETA, alpha=0.6)
    assert same(cpo_trainer, ours, theirs)


def test_cpo_takes_the_nll_per_trajectory_where_trl_averages_over_the_tokens_of_the_batch(
    cpo_trainer: Any, rows: Rows
) -> None:
    """As in RPO: the weight of a pair does not depend on the lengths of its neighbours."""
    theirs = cpo_trainer.compute_loss(cpo_trainer.model, rows.sides)
    pairs = rows.pairs(cpo_trainer.model, cpo_trainer.model)
    assert not agree(cpo(pairs, beta=BETA, alpha=0.6).loss, theirs)
    over_tokens = -pairs.chosen.sum() / rows.lengths.chunk(2)[0].sum()
    assert agree(cpo(pairs, beta=BETA, alpha=0.0).loss + 0.6 * over_tokens, theirs)


def test_simpo_agrees(simpo_trainer: Any, rows: Rows) -> None:
    model = simpo_trainer.model
    theirs = simpo_trainer.compute_loss(model, rows.sides)
    assert same(simpo_trainer, simpo(rows.pairs(model, model), beta=2.5, gamma=1.375), theirs)


@pytest.fixture(scope="module")
def orpo_trainer(data: Any, tokenizer: Any, quiet: dict[str, Any]) -> Any:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return ORPOTrainer(
        tiny_model(0),
        args=ORPOConfig(**quiet, beta=0.2, max_length=32),
        train_dataset=data,
        processing_class=tokenizer,
    )


def test_the_odds_ratio_term_of_orpo_agrees(orpo_trainer: Any, rows: Rows) -> None:
    pairs = rows.pairs(orpo_trainer.model, orpo_trainer.model)
    theirs = orpo_trainer.odds_ratio_loss(*pairs.means())[0].mean()
    full, nll = orpo(pairs, odds_weight=0.2).loss, orpo(pairs, odds_weight=0.0).loss
    assert agree(nll - full, theirs)
    model = orpo_trainer.model
    assert agree(model_gradient(model, nll - full), model_gradient(model, theirs))


def test_orpo_takes_the_nll_of_the_sampled_tokens_where_trl_counts_the_prompt_too(
    orpo_trainer: Any, rows: Rows
) -> None:
    """Only what the agent says is trained on here; TRL averages over every token of the chosen rows."""
    model = orpo_trainer.model
    theirs = orpo_trainer.compute_loss(model, rows.sides)
    pairs = rows.pairs(model, model)
    ours = orpo(pairs, odds_weight=0.2)
    assert not agree(ours.loss, theirs)
    odds = ours.loss - orpo(pairs, odds_weight=0.0).loss
    read = rows.attention.bool()
    read[:, 0] = False
    everything = -token_logps(model, rows.tokens, rows.attention)[:PAIRS][read[:PAIRS]].mean()
    assert agree(everything + odds, theirs)


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_the_reward_model_loss_agrees(
    center: float, data: Any, rows: Rows, tokenizer: Any, quiet: dict[str, Any]
) -> None:
    from trl import RewardConfig, RewardTrainer

    model = tiny_model(0, "LlamaForSequenceClassification")
    trainer = RewardTrainer(
        model,
        args=RewardConfig(**quiet, center_rewards_coefficient=center or None),
        train_dataset=data.remove_columns("prompt"),
        processing_class=tokenizer,
    )
    inputs = {"input_ids": rows.tokens, "attention_mask": rows.attention}
    chosen, rejected = model(**inputs).logits[:, 0].chunk(2)
    ours = bradley_terry(chosen, rejected, weights=torch.full((PAIRS,), 1 / PAIRS), center=center)
    assert same(trainer, ours, trainer.compute_loss(model, dict(inputs)))

"""GRPO, RLOO and GMPO: advantages, losses, KL and entropy of the same tokens through TRL's trainers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from surefoot.credit import gdpo, group_relative, leave_one_out
from surefoot.objectives import (
    Aggregate,
    Clip,
    KlKind,
    Ratio,
    kl_estimate,
    offpolicy_sequence_mask,
    policy_gradient,
    token_weights,
)
from surefoot.objectives.entropy import AdaptiveCoefficient, entropy_bonus, top_entropy

from .conftest import Batch, agree, make_batch, model_gradient, tiny_model, token_logps

MEMBERS, PROMPT, LONGEST = 6, 3, 17
GROUP = torch.arange(12) // MEMBERS
WEIGHTS = [1.0, 0.5]


def score_a(a: list[float | None], **_: Any) -> list[float | None]:
    return a


def score_b(b: list[float | None], **_: Any) -> list[float | None]:
    return b


def settings(quiet: dict[str, Any]) -> dict[str, Any]:
    """Of the trainers that sample: all tokens of 12 rows in one step, and group means only."""
    return {
        **quiet,
        "per_device_train_batch_size": 12,
        "num_generations": MEMBERS,
        "max_completion_length": 3,
        "reward_weights": WEIGHTS,
        "beta": 0.0,
    }


def build(trainer: Any, args: Any, tokenizer: Any) -> Any:
    from datasets import Dataset

    return trainer(
        tiny_model(0),
        reward_funcs=[score_a, score_b],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w1 w2", "a": 0.0, "b": 0.0}] * 12),
        processing_class=tokenizer,
    )


@pytest.fixture(scope="module")
def grpo(tokenizer: Any, quiet: dict[str, Any]) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    return build(GRPOTrainer, GRPOConfig(**settings(quiet)), tokenizer)


@pytest.fixture(scope="module")
def rloo(tokenizer: Any, quiet: dict[str, Any]) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    return build(RLOOTrainer, RLOOConfig(**settings(quiet)), tokenizer)


@pytest.fixture(scope="module")
def gmpo(tokenizer: Any, quiet: dict[str, Any]) -> Any:
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    return build(GMPOTrainer, GMPOConfig(**settings(quiet)), tokenizer)


def trl_advantages(trainer: Any, a: list[Any], b: list[Any] | None = None) -> Tensor:
    """Advantages [12] of completions that the reward functions give the scores ``a`` and ``b``."""
    rows = [{"prompt": "w1 w2", "a": x, "b": y} for x, y in zip(a, b or [0.0] * 12, strict=True)]
    return cast("Tensor", trainer._generate_and_score_completions(rows)["advantages"])


def scores(seed: int) -> Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("theirs", "ours"), [("group", "std"), ("batch", "batch"), ("none", "none")])
def test_grpo_advantages_agree_under_trls_epsilon(
    grpo: Any, theirs: str, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "scale_rewards", theirs)
    r = scores(0)
    assert agree(group_relative(r, GROUP, scale=ours, eps=1e-4), trl_advantages(grpo, r.tolist()))


def test_the_default_epsilon_is_verls_1e_6_where_trl_has_1e_4(grpo: Any) -> None:
    """It only has to keep a division finite; constant groups never reach it here, so it can be small."""
    r = scores(0)
    theirs = trl_advantages(grpo, r.tolist()).double()
    apart = (group_relative(r, GROUP) - theirs).abs().max()
    assert 1e-5 < float(apart) < 1e-3


def test_unscored_members_are_left_out_of_the_group_alike(grpo: Any, rloo: Any) -> None:
    r = scores(1)
    given: list[float | None] = [None if i in (2, 4, 5) else x for i, x in enumerate(r.tolist())]
    valid = torch.tensor([x is not None for x in given])
    theirs = trl_advantages(grpo, given, given)
    assert agree(group_relative(1.5 * r, GROUP, valid=valid, eps=1e-4), theirs)
    assert agree(leave_one_out(1.5 * r, GROUP, valid=valid), trl_advantages(rloo, given, given))


def test_a_constant_group_keeps_a_rounding_residue_at_trl_and_gets_exactly_0_here(grpo: Any) -> None:
    """TRL divides without asking whether returns are equal; its larger epsilon keeps the residue small."""
    theirs = trl_advantages(grpo, [0.9] * 12).abs().max()
    assert not group_relative(torch.full((12,), 0.9), GROUP).any()
    assert 1e-5 < float(theirs) < 1e-2


def test_gdpo_agrees_under_trls_epsilon(grpo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "multi_objective_aggregation", "normalize_then_sum")
    a, b = scores(0), 100 * scores(1)
    theirs = trl_advantages(grpo, a.tolist(), b.tolist())
    assert agree(gdpo(torch.stack([a, b], 1), GROUP, WEIGHTS, eps=1e-4), theirs)


def test_rloo_advantages_agree(rloo: Any) -> None:
    r = scores(2)
    assert agree(leave_one_out(r, GROUP), trl_advantages(rloo, r.tolist()))


def test_normalised_rloo_divides_by_the_others_std_where_trl_standardises_over_the_batch(
    rloo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale from the member's own return would undo what leaving it out of the baseline is for."""
    monkeypatch.setattr(rloo, "normalize_advantages", True)
    r = scores(2)
    theirs = trl_advantages(rloo, r.tolist())
    plain = leave_one_out(r, GROUP)
    assert agree((plain - plain.mean()) / (plain.std() + 1e-4), theirs)
    assert not agree(leave_one_out(r, GROUP, normalise=True), theirs)


@dataclass(frozen=True)
class Case:
    """A batch as one model sees it: tokens of prompt and completion, and log-probabilities [B, T]."""

    batch: Batch
    inputs: dict[str, Any]
    logp: Tensor

    def flat(self, x: Tensor) -> Tensor:
        return x[self.batch.mask]

    def loss(
        self,
        clip: Clip,
        aggregate: Aggregate = "sequence_mean",
        ratio: Ratio = "token",
        correction: Tensor | None = None,
    ) -> Tensor:
        return policy_gradient(
            self.flat(self.logp),
            self.flat(self.batch.logp_old),
            self.flat(self.batch.row_advantages),
            self.weights(aggregate),
            sequence=self.batch.sequence,
            ratio=ratio,
            clip=clip,
            correction=correction,
        ).loss

    def weights(self, aggregate: Aggregate) -> Tensor:
        constant = LONGEST if aggregate == "constant" else None
        return token_weights(self.batch.lengths, aggregate=aggregate, constant=constant)


def make_case(model: Any, seed: int, mask: Tensor | None = None) -> Case:
    """Random tokens in the layout of ``make_batch``; old and reference stay at its distances from new."""
    batch = make_batch(seed)
    batch = batch if mask is None else replace(batch, mask=mask)
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 32, (12, PROMPT + LONGEST), generator=draw)
    # A completion ends with its last sampled token; observations inside it are masked as tool text.
    read = batch.mask.flip(1).cummax(1).values.flip(1)
    attention = torch.cat([torch.ones(12, PROMPT, dtype=torch.bool), read], 1)
    logp = token_logps(model, tokens, attention.long())[:, PROMPT:]
    old, ref = (logp + x - batch.logp for x in (batch.logp_old, batch.logp_ref))
    batch = replace(batch, logp_old=old.detach().float(), logp_ref=ref.detach().float())
    inputs = {
        "prompt_ids": tokens[:, :PROMPT],
        "prompt_mask": torch.ones(12, PROMPT, dtype=torch.long),
        "completion_ids": tokens[:, PROMPT:],
        "completion_mask": read.long(),
        "tool_mask": batch.mask.long(),
        "advantages": batch.row_advantages[:, 0],
        "old_per_token_logps": batch.logp_old,
        "ref_per_token_logps": batch.logp_ref,
        "num_items_in_batch": batch.mask.sum(),
    }
    return Case(batch, inputs, logp)


@pytest.fixture(params=range(2), ids=lambda seed: f"seed{seed}")
def case(request: pytest.FixtureRequest, grpo: Any) -> Case:
    return make_case(grpo.model, request.param)


def trl_loss(trainer: Any, case: Case, patch: pytest.MonkeyPatch, **options: Any) -> Tensor:
    """TRL's loss outside an accumulation window; ``options`` are attributes of trainer or settings."""
    for name, value in {"max_completion_length": LONGEST, **options}.items():
        patch.setattr(trainer if hasattr(trainer, name) else trainer.args, name, value)
    trainer.model.eval()
    try:
        return cast("Tensor", trainer.compute_loss(trainer.model, case.inputs))
    finally:
        trainer.model.train()


def same(trainer: Any, ours: Tensor, theirs: Tensor) -> bool:
    """Equal loss, and equal gradient in every parameter of the model."""
    model = trainer.model
    return agree(ours, theirs) and agree(model_gradient(model, ours), model_gradient(model, theirs))


@pytest.mark.parametrize(
    ("loss_type", "aggregate"),
    [
        ("grpo", "sequence_mean"),
        ("dapo", "token_mean"),
        ("bnpo", "token_mean"),
        ("dr_grpo", "constant"),
    ],
)
@pytest.mark.parametrize(("level", "ratio"), [("token", "token"), ("sequence", "sequence")])
def test_clipped_losses_agree_under_every_aggregation(
    grpo: Any,
    case: Case,
    loss_type: str,
    aggregate: Aggregate,
    level: str,
    ratio: Ratio,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the sequence level this is GSPO: TRL differentiates the mean, we its token form."""
    low, high = (0.2, 0.28) if level == "token" else (0.03, 0.04)
    options = {"importance_sampling_level": level, "epsilon_low": low, "epsilon_high": high}
    theirs = trl_loss(grpo, case, monkeypatch, loss_type=loss_type, **options)
    assert same(grpo, case.loss(Clip.ppo(low, high), aggregate, ratio), theirs)


def test_the_two_sided_clip_is_our_dual_clip(grpo: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = trl_loss(
        grpo, case, monkeypatch, loss_type="grpo", epsilon_low=0.2, epsilon_high=0.28, delta=1.5
    )
    ours = case.loss(Clip.ppo(0.2, 0.28, dual=1.5))
    assert same(grpo, ours, theirs)
    assert not agree(case.loss(Clip.ppo(0.2, 0.28)), theirs)


def test_cispo_agrees(grpo: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = trl_loss(grpo, case, monkeypatch, loss_type="cispo", epsilon_high=1.2)
    assert same(grpo, case.loss(Clip.cispo(high=1.2), "token_mean"), theirs)


def test_sapo_agrees(grpo: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = trl_loss(
        grpo, case, monkeypatch, loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05
    )
    assert same(grpo, case.loss(Clip.sapo(1.0, 1.05)), theirs)


def test_gmpo_agrees(gmpo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(gmpo.model, 0)
    theirs = trl_loss(gmpo, case, monkeypatch, epsilon_low=0.3, epsilon_high=0.4)
    assert same(gmpo, case.loss(Clip.ppo(0.3, 0.4), ratio="geometric"), theirs)


def test_the_off_policy_mask_agrees_inside_the_loss(
    grpo: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = trl_loss(
        grpo,
        case,
        monkeypatch,
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        off_policy_mask_threshold=0.05,
    )
    kept = offpolicy_sequence_mask(
        case.flat(case.logp),
        case.flat(case.batch.logp_old),
        case.flat(case.batch.row_advantages),
        case.batch.sequence,
        delta=0.05,
    )
    assert same(grpo, case.loss(Clip.ppo(), correction=kept), theirs)
    assert not agree(case.loss(Clip.ppo()), theirs)


def test_a_row_without_sampled_tokens_counts_at_trl_and_not_here(
    grpo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL divides the sequence mean by all rows, so an empty one makes every other count less."""
    mask = make_batch(0).mask.clone()
    mask[3] = False
    case = make_case(grpo.model, 0, mask)
    theirs = trl_loss(grpo, case, monkeypatch, loss_type="grpo", epsilon_low=0.2, epsilon_high=0.2)
    assert agree(case.loss(Clip.ppo()) * 11 / 12, theirs)
    # Under a constant length both count it: the divisor is no count of tokens to begin with.
    theirs = trl_loss(grpo, case, monkeypatch, loss_type="dr_grpo", epsilon_low=0.2, epsilon_high=0.2)
    assert agree(case.loss(Clip.ppo(), "constant"), theirs)


def kl_loss(case: Case, kind: KlKind) -> Tensor:
    """A PPO loss with 0.3 times the KL under the weights of the loss."""
    kl = kl_estimate(case.flat(case.logp), case.flat(case.batch.logp_ref), kind)
    return case.loss(Clip.ppo(), "token_mean") + 0.3 * (case.weights("token_mean") * kl).sum()


WITH_KL = {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.3}


def test_the_kl_term_is_k3_with_the_weights_of_the_loss(
    grpo: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = trl_loss(grpo, case, monkeypatch, use_bias_correction_kl=False, **WITH_KL)
    assert same(grpo, kl_loss(case, "k3"), theirs)


def test_trls_corrected_kl_is_k3_with_the_gradient_of_k2_on_policy_and_takes_the_ratio_off_it(
    grpo: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """d (r k3) at r = 1 is x dx, that of k2; off it TRL weighs the KL by r, and we weigh no added term."""
    off = trl_loss(grpo, case, monkeypatch, use_bias_correction_kl=True, **WITH_KL)
    assert not agree(kl_loss(case, "k3_k2grad"), off)
    old = case.logp.detach()
    on = Case(replace(case.batch, logp_old=old), {**case.inputs, "old_per_token_logps": old}, case.logp)
    theirs = trl_loss(grpo, on, monkeypatch, use_bias_correction_kl=True, **WITH_KL)
    assert same(grpo, kl_loss(on, "k3_k2grad"), theirs)
    assert not same(grpo, kl_loss(on, "k3"), theirs)


def test_rloo_has_our_gradient_on_policy_and_the_product_of_all_ratios_off_it(
    rloo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL weighs a sequence by exp(sum log r), which spreads with length; here each token has its own."""
    case = make_case(rloo.model, 0)
    sampled = case.batch.mask.long()
    inputs = {**case.inputs, "completion_mask": sampled}
    # Observations are no part of a completion in this trainer, so the prompt is all that is read before.
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], sampled], 1)
    logp = token_logps(rloo.model, tokens, attention)[:, PROMPT:]
    unit = token_weights(case.batch.lengths, aggregate="constant", constant=1)
    losses: dict[str, tuple[Tensor, Tensor]] = {}
    for name, old in (("on", logp.detach()), ("off", case.batch.logp_old)):
        inputs["old_logps"] = (old * sampled).sum(1)
        on = Case(replace(case.batch, logp_old=old), inputs, logp)
        ours = policy_gradient(
            on.flat(logp),
            on.flat(old),
            on.flat(case.batch.row_advantages),
            unit,
            clip=Clip.ppo(),
        ).loss
        theirs = trl_loss(rloo, on, monkeypatch, epsilon_low=0.2, epsilon_high=0.2)
        losses[name] = model_gradient(rloo.model, ours), model_gradient(rloo.model, theirs)
    assert agree(*losses["on"])
    assert not agree(*losses["off"])


def test_the_high_entropy_mask_agrees(grpo: Any, batch: Batch) -> None:
    entropy = -batch.logp.detach()
    for share in (0.2, 0.5, 1.0):
        theirs = grpo.get_high_entropy_mask(entropy, batch.mask, 1 - share)
        ours = top_entropy(entropy[batch.mask], share=share)
        assert torch.equal(ours, theirs[batch.mask])


def entropies(model: Any, case: Case) -> Tensor:
    """Entropy of the sampled tokens, flat [N]."""
    tokens = torch.cat([case.inputs["prompt_ids"], case.inputs["completion_ids"]], 1)
    attention = torch.cat([case.inputs["prompt_mask"], case.inputs["completion_mask"]], 1)
    logits = model(input_ids=tokens, attention_mask=attention).logits[:, PROMPT - 1 : -1]
    return torch.distributions.Categorical(logits=logits).entropy()[case.batch.mask]


def test_the_entropy_bonus_is_a_token_mean(grpo: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL takes the token mean under every loss type; here the weights are given, so it is one choice."""
    options = {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "entropy_coef": 0.05}
    theirs = trl_loss(grpo, case, monkeypatch, _entropy_bonus_enabled=True, **options)
    bonus = entropy_bonus(entropies(grpo.model, case), case.weights("token_mean"), 0.05)
    assert same(grpo, case.loss(Clip.ppo()) + bonus, theirs)


def test_the_adaptive_entropy_coefficient_takes_trls_steps(
    tokenizer: Any, quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up below the target, down above it, between the bounds."""
    from trl import GRPOConfig, GRPOTrainer

    given = {"entropy_coef": 0.01, "entropy_coef_min": 0.0, "entropy_coef_max": 0.04}
    args = GRPOConfig(
        **settings(quiet), use_adaptive_entropy=True, entropy_coef_delta=0.02, entropy_target=2.0, **given
    )
    trainer = build(GRPOTrainer, args, tokenizer)
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 1, raising=False)
    case = make_case(trainer.model, 0)
    seen = float(entropies(trainer.model, case).detach().mean())
    value, steps = 0.01, []
    for target in (seen + 0.1, seen + 0.1, seen + 0.1, seen - 0.1, seen - 0.1, seen - 0.1):
        monkeypatch.setattr(args, "entropy_target", target)
        trainer.compute_loss(trainer.model, case.inputs)
        value = AdaptiveCoefficient(target, step=0.02, low=0.0, high=0.04).next(value, seen)
        steps.append((value, trainer.entropy_coef))
    assert [ours for ours, _ in steps] == pytest.approx([0.03, 0.04, 0.04, 0.02, 0.0, 0.0])
    assert [ours for ours, _ in steps] == pytest.approx([theirs for _, theirs in steps])

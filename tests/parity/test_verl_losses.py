"""Policy losses, aggregation, KL, entropy and sampler corrections against verl's public functions."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.core.types import Sampling
from surefoot.objectives import (
    Aggregate,
    Clip,
    KlKind,
    PolicyLoss,
    Ratio,
    decoupled,
    icepop,
    kl_estimate,
    policy_gradient,
    token_weights,
    truncated_importance,
)
from surefoot.objectives.entropy import clip_cov, entropy_bonus, kl_cov, kl_cov_penalty
from surefoot.policy.forward import selected_logprobs

from .conftest import Batch, agree

HORIZON = 40
MODES: dict[str, Aggregate] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    from verl.trainer.ppo import core_algos

    return core_algos


@pytest.fixture(scope="module")
def correction() -> ModuleType:
    from verl.trainer.ppo import rollout_corr_helper

    return rollout_corr_helper


def theirs(
    verl: ModuleType,
    name: str,
    batch: Batch,
    *,
    mode: str = "seq-mean-token-mean",
    advantages: Tensor | None = None,
    weights: Tensor | None = None,
    policy_loss: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics of verl's policy loss ``name``; ``options`` go to its actor's config."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**(policy_loss or {})),
        **options,
    )
    config.global_batch_info["loss_scale_factor"] = HORIZON
    loss, metrics = verl.get_policy_loss_fn(name)(
        old_log_prob=batch.logp_old,
        log_prob=batch.logp,
        advantages=batch.row_advantages if advantages is None else advantages,
        response_mask=batch.mask.float(),
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    return loss, metrics


def ours(
    batch: Batch,
    clip: Clip,
    *,
    mode: str = "seq-mean-token-mean",
    advantages: Tensor | None = None,
    ratio: Ratio = "token",
    correction: Tensor | None = None,
) -> PolicyLoss:
    m = batch.mask
    return policy_gradient(
        batch.logp[m],
        batch.logp_old[m],
        (batch.row_advantages if advantages is None else advantages)[m],
        weights_of(batch, mode),
        sequence=batch.sequence,
        ratio=ratio,
        clip=clip,
        correction=correction,
    )


def weights_of(batch: Batch, mode: str) -> Tensor:
    aggregate = MODES[mode]
    constant = HORIZON if aggregate == "constant" else None
    return token_weights(batch.lengths, aggregate=aggregate, constant=constant)


def same(batch: Batch, mine: Tensor, peers: Tensor) -> bool:
    """Equal loss and equal gradient in every log-probability, which also must be 0 outside the mask."""
    return agree(mine, peers) and agree(batch.gradient(mine), batch.gradient(peers))


@pytest.mark.parametrize("mode", MODES)
def test_ppo_with_dual_clip_agrees_in_loss_gradient_and_clip_fraction(
    verl: ModuleType, batch: Batch, mode: str
) -> None:
    """Advantages differ from token to token, and a ratio of e^3 reaches the dual clip."""
    batch.logp_old[:, 0] = batch.logp.detach()[:, 0] - 3
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    peers, metrics = theirs(verl, "vanilla", batch, mode=mode, advantages=batch.advantages, **clip)
    mine = ours(batch, Clip.ppo(0.2, 0.28, dual=3.0), mode=mode, advantages=batch.advantages)
    assert same(batch, mine.loss, peers)
    assert metrics["actor/pg_clipfrac_lower"] > 0
    if mode == "token-mean":
        clipped = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]
        assert float(mine.clip_fraction) == pytest.approx(clipped, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_gspo_agrees(verl: ModuleType, batch: Batch, mode: str) -> None:
    clip = {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}
    peers, metrics = theirs(verl, "gspo", batch, mode=mode, **clip)
    mine = ours(batch, Clip.ppo(0.03, 0.04), mode=mode, ratio="sequence")
    assert same(batch, mine.loss, peers)
    assert 0 < metrics["actor/pg_clipfrac"] < 1


def test_sapo_agrees(verl: ModuleType, batch: Batch) -> None:
    peers, _ = theirs(verl, "sapo", batch, advantages=batch.advantages, tau_pos=1.0, tau_neg=1.05)
    assert same(batch, ours(batch, Clip.sapo(1.0, 1.05), advantages=batch.advantages).loss, peers)


def test_gmpo_agrees(verl: ModuleType, batch: Batch) -> None:
    peers, metrics = theirs(verl, "geo_mean", batch, clip_ratio_low=0.3, clip_ratio_high=0.4)
    assert same(batch, ours(batch, Clip.ppo(0.3, 0.4), ratio="geometric").loss, peers)
    assert metrics["actor/pg_clipfrac"] > 0


def test_gmpo_averages_sampler_weights_per_token_where_verl_takes_their_geometric_mean(
    verl: ModuleType, batch: Batch
) -> None:
    """A correction multiplies each token's loss here under every ratio, so its arithmetic mean counts."""
    weight = (batch.logp_old - batch.logp_ref).exp().clamp(max=2.0)
    peers, _ = theirs(verl, "geo_mean", batch, weights=weight, clip_ratio_low=0.3, clip_ratio_high=0.4)
    clip = Clip.ppo(0.3, 0.4)
    assert not agree(ours(batch, clip, ratio="geometric", correction=weight[batch.mask]).loss, peers)
    count = batch.mask.sum(1, keepdim=True)
    geometric = ((weight.log() * batch.mask).sum(1, keepdim=True) / count).exp().expand_as(weight)
    assert same(batch, ours(batch, clip, ratio="geometric", correction=geometric[batch.mask]).loss, peers)


@pytest.mark.parametrize("mode", MODES)
def test_cispo_agrees_where_no_ratio_lies_under_verls_lower_bound(
    verl: ModuleType, batch: Batch, mode: str
) -> None:
    peers, metrics = theirs(verl, "cispo", batch, mode=mode, clip_ratio_low=1.0, clip_ratio_high=0.3)
    assert same(batch, ours(batch, Clip.cispo(high=1.3), mode=mode).loss, peers)
    assert metrics["actor/pg_clipfrac"] > 0


def test_cispo_leaves_the_lower_bound_open_where_verl_lifts_small_ratios(
    verl: ModuleType, batch: Batch
) -> None:
    """MiniMax-M1 switches the lower bound off: a token the policy left keeps its small weight."""
    peers, _ = theirs(verl, "cispo", batch, clip_ratio_low=0.2, clip_ratio_high=0.3)
    assert not agree(ours(batch, Clip.cispo(high=1.3)).loss, peers)


def test_dppo_has_verls_gradient_and_the_value_of_a_ratio(verl: ModuleType, batch: Batch) -> None:
    """-A r and verl's -A sg(r) logp have one gradient; only the first is the surrogate itself."""
    bound = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 20.0}
    peers, metrics = theirs(verl, "dppo_tv", batch, advantages=batch.advantages, **bound)
    mine = ours(batch, Clip.dppo(delta=0.1), advantages=batch.advantages)
    assert agree(batch.gradient(mine.loss), batch.gradient(peers))
    assert not agree(mine.loss, peers)
    assert 0 < metrics["actor/pg_clipfrac"] < 1


def test_dppo_has_no_ratio_cap_where_verl_truncates(verl: ModuleType, batch: Batch) -> None:
    """verl caps the ratio at ``clip_ratio_c``; here the trust region is the only limit."""
    bound = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 1.01}
    peers, _ = theirs(verl, "dppo_tv", batch, advantages=batch.advantages, **bound)
    mine = ours(batch, Clip.dppo(delta=0.1), advantages=batch.advantages)
    assert not agree(batch.gradient(mine.loss), batch.gradient(peers))


def test_gpg_has_the_gradient_of_the_unclipped_ratio_on_policy(verl: ModuleType, batch: Batch) -> None:
    """verl's -A logp has no ratio at all, so off policy the two part; on policy the gradient is one."""
    peers, _ = theirs(verl, "gpg", batch, mode="token-mean")
    off = ours(batch, Clip.none(), mode="token-mean")
    assert not agree(batch.gradient(off.loss), batch.gradient(peers))
    batch.logp_old.copy_(batch.logp.detach())
    on = ours(batch, Clip.none(), mode="token-mean")
    assert agree(batch.gradient(on.loss), batch.gradient(peers))


def test_clip_cov_agrees_when_every_candidate_is_drawn(verl: ModuleType, batch: Batch) -> None:
    """Which few are drawn is random on both sides; with room for all of them nothing is."""
    limits = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 2.0}
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    peers, _ = theirs(
        verl, "clip_cov", batch, mode="token-mean", advantages=batch.advantages, policy_loss=limits, **clip
    )
    plain, a = Clip.ppo(0.2, 0.28), batch.advantages
    r = (batch.logp - batch.logp_old).detach().exp()
    clipped = torch.where(a > 0, r > 1.28, r < 0.8)[batch.mask]
    held = clip_cov(batch.logp[batch.mask], a[batch.mask], clipped, seed=0, fraction=1.0, low=0.2, high=2.0)
    assert 3 < int(held.sum()) < len(held)
    mine = ours(batch, plain, mode="token-mean", advantages=a, correction=(~held).double())
    assert same(batch, mine.loss, peers)
    assert not agree(ours(batch, plain, mode="token-mean", advantages=a).loss, peers)


def kl_cov_loss(batch: Batch, advantages: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Our KL-Cov loss with coefficient 1, and the tokens held back."""
    new, old = batch.logp[batch.mask], batch.logp_old[batch.mask]
    chosen = kl_cov(new, advantages[batch.mask], fraction=fraction)
    penalty = kl_cov_penalty(new, old, weights_of(batch, "token-mean"), chosen, coefficient=1.0)
    return ours(batch, Clip.none(), mode="token-mean", advantages=advantages).loss + penalty, chosen


def test_kl_cov_agrees(verl: ModuleType, batch: Batch) -> None:
    share = {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}
    peers, _ = theirs(
        verl, "kl_cov", batch, mode="token-mean", advantages=batch.advantages, policy_loss=share
    )
    mine, chosen = kl_cov_loss(batch, batch.advantages, 0.1)
    assert int(chosen.sum()) > 3
    assert same(batch, mine, peers)


def test_kl_cov_penalises_nothing_without_positive_covariance_where_verl_takes_the_top_anyway(
    verl: ModuleType, batch: Batch
) -> None:
    """verl ranks and cuts; a batch without advantages then still pays for moving some token."""
    none = torch.zeros_like(batch.advantages)
    share = {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}
    peers, _ = theirs(verl, "kl_cov", batch, mode="token-mean", advantages=none, policy_loss=share)
    mine, chosen = kl_cov_loss(batch, none, 0.1)
    assert not chosen.any()
    assert float(mine.detach()) == 0
    assert float(peers.detach()) > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_micro_batches_add_up_to_the_whole_on_both_sides(
    verl: ModuleType, batch: Batch, mode: str
) -> None:
    loss = batch.values.exp()
    parts = sum(
        verl.agg_loss(
            loss[rows],
            batch.mask[rows].float(),
            mode,
            batch_num_tokens=int(batch.mask.sum()),
            global_batch_size=12,
            loss_scale_factor=HORIZON,
        )
        for rows in (slice(0, 5), slice(5, 12))
    )
    assert agree((weights_of(batch, mode) * loss[batch.mask]).sum(), parts)


def test_a_row_without_tokens_counts_under_a_constant_length_here_and_not_at_verl(
    verl: ModuleType, batch: Batch
) -> None:
    """Dr.GRPO divides by trajectories times a constant; verl leaves fully masked rows out."""
    mask = batch.mask.clone()
    mask[3] = False
    loss = batch.values.exp()
    peers = verl.agg_loss(loss, mask.float(), "seq-mean-token-sum-norm", loss_scale_factor=HORIZON)
    weights = token_weights(mask.sum(1), aggregate="constant", constant=HORIZON)
    assert agree((weights * loss[mask]).sum(), peers * 11 / 12)
    means = verl.agg_loss(loss, mask.float(), "seq-mean-token-mean")
    weights = token_weights(mask.sum(1), aggregate="sequence_mean")
    assert agree((weights * loss[mask]).sum(), means)


KINDS: dict[KlKind, str] = {"k1": "k1", "k2": "k2", "k3": "k3", "k3_k2grad": "k3+"}


@pytest.mark.parametrize("kind", KINDS)
def test_kl_estimates_and_their_gradients_agree(verl: ModuleType, batch: Batch, kind: KlKind) -> None:
    peers = verl.kl_penalty(batch.logp, batch.logp_ref, KINDS[kind])[batch.mask]
    mine = kl_estimate(batch.logp[batch.mask], batch.logp_ref[batch.mask], kind)
    assert agree(mine, peers)
    assert agree(batch.gradient(mine.sum()), batch.gradient(peers.sum()))


def test_k3_goes_on_above_10_where_verl_cuts_value_and_gradient(verl: ModuleType) -> None:
    """Far from the reference the penalty must still pull; only the exponent is limited here, to 20."""
    logp = torch.tensor([-6.0, -1.0], requires_grad=True)
    ref = torch.tensor([-1.0, -1.5])
    peers = verl.kl_penalty(logp, ref, "k3")
    mine = kl_estimate(logp, ref, "k3")
    assert float(peers[0]) == 10
    assert float(mine[0]) == pytest.approx(torch.e**5 - 6, rel=1e-5)
    assert float(torch.autograd.grad(peers[0], logp, retain_graph=True)[0][0]) == 0
    assert float(torch.autograd.grad(mine[0], logp, retain_graph=True)[0][0]) < -100
    assert agree(mine[1:], peers[1:])


def test_log_probability_entropy_and_its_bonus_agree(verl: ModuleType, batch: Batch) -> None:
    from verl.utils import torch_functional

    draw = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(12, 17, 9, generator=draw)).requires_grad_()
    targets = torch.randint(9, (12, 17), generator=draw)
    flat = logits[batch.mask]
    logp, entropy = selected_logprobs(flat, torch.eye(9), targets[batch.mask], Sampling())
    assert agree(logp, torch_functional.logprobs_from_logits_v2(logits, targets)[batch.mask])
    assert agree(entropy, torch_functional.entropy_from_logits(logits)[batch.mask])
    for mode in ("token-mean", "seq-mean-token-mean"):
        peers = verl.compute_entropy_loss(logits, batch.mask.float(), mode)
        mine = entropy_bonus(entropy, weights_of(batch, mode), -1.0)
        assert agree(mine, peers)
        pair = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (mine, peers)]
        assert agree(*pair)


def sampler_weights(correction: ModuleType, batch: Batch, level: str, threshold: str) -> Tensor:
    """verl's weights on sampled tokens of logp_old over a sampler that reported logp_ref."""
    weights, _ = correction.compute_rollout_correction_weights(
        batch.logp_old - batch.logp_ref,
        batch.mask.float(),
        rollout_is=level,
        rollout_is_threshold=threshold,
    )
    return weights[batch.mask]


CORRECTIONS: dict[str, tuple[str, str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "tis": ("token", "1.5", lambda old, far, seq: truncated_importance(old, far, 1.5)),
    "tis_sequence": (
        "sequence",
        "1.5",
        lambda old, far, seq: truncated_importance(old, far, 1.5, "sequence", seq),
    ),
    "icepop": ("token", "0.5_1.5", lambda old, far, seq: icepop(old, far, 0.5, 1.5)),
    "icepop_sequence": (
        "sequence",
        "0.5_1.5",
        lambda old, far, seq: icepop(old, far, 0.5, 1.5, "sequence", seq),
    ),
    "decoupled": ("token", "1.5", lambda old, far, seq: decoupled(old, far, 1.5)),
    # A lower bound of next to nothing leaves only what lies above to be dropped.
    "decoupled_drop": ("token", "1e-30_1.5", lambda old, far, seq: decoupled(old, far, 1.5, "drop")),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_sampler_corrections_agree(correction: ModuleType, batch: Batch, name: str) -> None:
    level, threshold, function = CORRECTIONS[name]
    mine = function(batch.logp_old[batch.mask], batch.logp_ref[batch.mask], batch.sequence)
    assert agree(mine, sampler_weights(correction, batch, level, threshold))
    assert len(set(mine.tolist())) > 2


def test_a_corrected_ppo_loss_agrees(verl: ModuleType, correction: ModuleType, batch: Batch) -> None:
    weights = torch.zeros(batch.mask.shape)
    weights[batch.mask] = sampler_weights(correction, batch, "token", "1.5")
    peers, _ = theirs(verl, "vanilla", batch, mode="token-mean", weights=weights, clip_ratio_c=3.0)
    mine = truncated_importance(batch.logp_old[batch.mask], batch.logp_ref[batch.mask], 1.5)
    loss = ours(batch, Clip.ppo(0.2, 0.2, dual=3.0), mode="token-mean", correction=mine).loss
    assert same(batch, loss, peers)


def test_geometric_icepop_drops_what_verls_seq_mean_k1_rejects_between_inverse_bounds(
    correction: ModuleType, batch: Batch
) -> None:
    """verl's k1 is sampler over trainer, so its bounds are 1/high and 1/low; and it gives a mask only."""
    low, high = 0.9, 1.2
    kept, _ = correction.compute_rollout_rejection_mask(
        batch.logp_old - batch.logp_ref, batch.mask.float(), "seq_mean_k1", f"{1 / high}_{1 / low}"
    )
    mine = icepop(
        batch.logp_old[batch.mask], batch.logp_ref[batch.mask], low, high, "geometric", batch.sequence
    )
    assert 0 < int((mine > 0).sum()) < len(mine)
    assert torch.equal(mine > 0, kept[batch.mask] > 0)

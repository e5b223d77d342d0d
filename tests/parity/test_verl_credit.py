"""Advantages, whitening, GAE and the value loss against ``verl.trainer.ppo.core_algos``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.credit import (
    gae,
    gdpo,
    group_relative,
    leave_one_out,
    opo,
    pass_at_k,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    to_tokens,
    value_loss,
    whiten,
)
from surefoot.objectives import token_weights

from .conftest import Batch, agree, make_batch


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    from verl.trainer.ppo import core_algos

    return core_algos


def theirs(
    verl: ModuleType, name: str, rows: Batch, rewards: Tensor | None = None, /, **options: Any
) -> Tensor:
    """Advantages [B, T] of verl's estimator, with the outcome on the last sampled token."""
    estimator = verl.get_adv_estimator_fn(name)
    return estimator(
        token_level_rewards=rows.at_last(rows.returns) if rewards is None else rewards,
        response_mask=rows.mask.float(),
        **options,
    )[0]


def grouped(verl: ModuleType, name: str, rows: Batch, /, **options: Any) -> Tensor:
    return theirs(verl, name, rows, index=rows.group.numpy(), **options)


def same(ours: Tensor, peers: Tensor, batch: Batch) -> bool:
    """One advantage per row against [B, T]: equal on sampled tokens; what verl writes elsewhere it masks."""
    return agree(to_tokens(ours, batch.lengths), peers[batch.mask])


AGREE: dict[str, tuple[Callable[[Batch], Tensor], Callable[[ModuleType, Batch], Tensor]]] = {
    "grpo": (
        lambda b: group_relative(b.returns, b.group),
        lambda verl, b: grouped(verl, "grpo", b),
    ),
    "grpo_vectorized": (
        lambda b: group_relative(b.returns, b.group),
        lambda verl, b: grouped(verl, "grpo_vectorized", b),
    ),
    "dr_grpo": (
        lambda b: group_relative(b.returns, b.group, scale="none"),
        lambda verl, b: grouped(verl, "grpo", b, norm_adv_by_std_in_grpo=False),
    ),
    "rloo": (
        lambda b: leave_one_out(b.returns, b.group),
        lambda verl, b: grouped(verl, "rloo", b),
    ),
    "rloo_vectorized": (
        lambda b: leave_one_out(b.returns, b.group),
        lambda verl, b: grouped(verl, "rloo_vectorized", b),
    ),
    "opo": (
        lambda b: opo(b.returns, b.group, b.lengths),
        lambda verl, b: grouped(verl, "opo", b),
    ),
    "grpo_passk": (
        lambda b: pass_at_k(b.returns, b.group),
        lambda verl, b: grouped(verl, "grpo_passk", b, config={"norm_adv_by_std_in_grpo": False}),
    ),
    "grpo_passk_std": (
        lambda b: pass_at_k(b.returns, b.group, scale="std"),
        lambda verl, b: grouped(verl, "grpo_passk", b, config={"norm_adv_by_std_in_grpo": True}),
    ),
    "reinforce_plus_plus": (
        lambda b: reinforce_pp(b.returns, b.lengths),
        lambda verl, b: theirs(verl, "reinforce_plus_plus", b, config=SimpleNamespace(gamma=1.0)),
    ),
    "reinforce_plus_plus_baseline": (
        lambda b: reinforce_pp_baseline(b.returns, b.group, b.lengths),
        lambda verl, b: grouped(verl, "reinforce_plus_plus_baseline", b),
    ),
    "remax": (
        lambda b: remax(b.returns, b.values[:, 0]),
        lambda verl, b: theirs(verl, "remax", b, reward_baselines=b.values[:, 0]),
    ),
}


@pytest.mark.parametrize("name", AGREE)
def test_outcome_advantages_agree(verl: ModuleType, name: str, batch: Batch) -> None:
    ours, peers = AGREE[name]
    assert same(ours(batch), peers(verl, batch), batch)


def test_gpg_is_the_group_mean_baseline_times_the_share_of_nonzero_returns(
    verl: ModuleType, batch: Batch
) -> None:
    """verl folds GPG's alpha = n / nonzero into the advantage; here it would be a factor of the caller."""
    scored = replace(batch, returns=batch.returns.clamp(min=0))
    alpha = len(scored.returns) / int((scored.returns != 0).sum())
    assert alpha > 1
    ours = alpha * group_relative(scored.returns, scored.group, scale="none")
    assert same(ours, grouped(verl, "gpg", scored), scored)


LONE = [
    "grpo",
    "grpo_vectorized",
    "dr_grpo",
    "rloo",
    "opo",
    "reinforce_plus_plus_baseline",
]


@pytest.mark.parametrize("name", LONE)
def test_a_group_of_one_keeps_its_return_at_verl_and_gets_exactly_0_here(
    verl: ModuleType, name: str, batch: Batch
) -> None:
    """Without siblings there is no baseline: verl takes 0, so a lone sample trains as plain REINFORCE."""
    lone = replace(batch, group=torch.where(torch.arange(12) == 5, 9, batch.group))
    ours, peers = AGREE[name]
    mine, them = ours(lone), peers(verl, lone)[:, 0]
    assert float(mine[5]) == 0
    if name == "reinforce_plus_plus_baseline":
        assert abs(float(them[5])) > 0.1
    else:
        assert float(them[5]) == pytest.approx(float(lone.returns[5]), abs=1e-5)
        others = torch.arange(12) != 5
        assert agree(mine[others], them[others])


def test_the_vectorised_rloo_of_verl_gives_a_group_of_one_0_as_here(verl: ModuleType, batch: Batch) -> None:
    lone = replace(batch, group=torch.where(torch.arange(12) == 5, 9, batch.group))
    assert same(leave_one_out(lone.returns, lone.group), grouped(verl, "rloo_vectorized", lone), lone)


def test_a_constant_group_keeps_a_rounding_residue_at_verl_and_gets_exactly_0_here(
    verl: ModuleType,
) -> None:
    """(0.9 - mean) / (std + 1e-6) amplifies a float32 rounding error; here equality is asked first."""
    flat = replace(make_batch(0), returns=torch.full((12,), 0.9), group=torch.arange(12) // 6)
    assert not group_relative(flat.returns, flat.group).any()
    assert 1e-3 < float(grouped(verl, "grpo", flat).abs().max()) < 0.1


def test_whitening_moves_a_constant_group_off_0_at_verl_only(verl: ModuleType, batch: Batch) -> None:
    """REINFORCE++-baseline subtracts the token mean of the batch from groups that carry no signal too."""
    returns = torch.where(batch.group == 1, 0.5, batch.returns)
    half = replace(batch, returns=returns)
    ours = reinforce_pp_baseline(half.returns, half.group, half.lengths)
    them = grouped(verl, "reinforce_plus_plus_baseline", half)[:, 0]
    dead = half.group == 1
    assert not ours[dead].any()
    assert bool((them[dead].abs() > 1e-3).all())
    assert agree(ours[~dead], them[~dead])


def test_reinforce_pp_spreads_the_whole_return_where_verl_counts_what_is_still_to_come(
    verl: ModuleType, batch: Batch
) -> None:
    """One return per trajectory here, rewards per token at verl: they part once a reward comes early."""
    early = torch.zeros(batch.mask.shape)
    early[:, 0] = batch.returns
    them = theirs(verl, "reinforce_plus_plus", batch, early, config=SimpleNamespace(gamma=1.0))
    # The first token is sampled in every row, so all others have nothing to come.
    to_come = torch.where(torch.arange(17) == 0, batch.returns[:, None], 0.0)[batch.mask]
    assert agree(whiten(to_come, batch.lengths), them[batch.mask])
    ours = to_tokens(reinforce_pp(batch.returns, batch.lengths), batch.lengths)
    assert not agree(ours, them[batch.mask])


def test_reinforce_with_a_constant_baseline_is_remax_with_that_greedy_return(
    verl: ModuleType, batch: Batch
) -> None:
    them = theirs(verl, "remax", batch, reward_baselines=torch.full((12,), 0.3))
    assert same(reinforce(batch.returns, batch.group, baseline=0.3), them, batch)


def test_gdpo_differs_from_verl_in_the_last_step_only(verl: ModuleType, batch: Batch) -> None:
    """The paper normalises over the trajectories; verl whitens over tokens, so long ones weigh more."""
    columns = torch.stack([batch.returns, (batch.values[:, 0] > 0).float()], 1)
    ours = gdpo(columns, batch.group, [1.0, 0.5])
    prompt = torch.ones(12, 2)
    them = grouped(
        verl,
        "gdpo",
        batch,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={"a": columns[:, 0].numpy(), "b": columns[:, 1].numpy()},
        batch={"prompts": prompt, "attention_mask": torch.cat([prompt, batch.mask], 1).long()},
    )
    tokens = to_tokens(ours, batch.lengths)
    assert agree(whiten(tokens, batch.lengths), them[batch.mask])
    assert not agree(tokens, them[batch.mask])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0)])
def test_gae_and_returns_agree_across_observations(
    verl: ModuleType, batch: Batch, gamma: float, lam: float
) -> None:
    rewards = torch.where(batch.mask, batch.advantages, 0.0)
    advantages, returns = verl.compute_gae_advantage_return(
        rewards, batch.values, batch.mask.float(), gamma, lam
    )
    ours, goals = gae(rewards[batch.mask], batch.values[batch.mask], batch.lengths, gamma=gamma, lam=lam)
    assert agree(whiten(ours, batch.lengths), advantages[batch.mask])
    assert agree(goals, returns[batch.mask])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_value_loss_clip_fraction_and_gradient_agree(verl: ModuleType, batch: Batch, mode: str) -> None:
    new = (batch.values + 0.6 * batch.advantages).requires_grad_()
    loss, fraction = verl.compute_value_loss(
        new, batch.advantages, batch.values, batch.mask.float(), cliprange_value=0.5, loss_agg_mode=mode
    )
    aggregate = "token_mean" if mode == "token-mean" else "sequence_mean"
    weights = token_weights(batch.lengths, aggregate=aggregate)
    ours = value_loss(
        new[batch.mask], batch.values[batch.mask], batch.advantages[batch.mask], weights, clip=0.5
    )
    assert agree(ours.loss, loss)
    assert agree(torch.autograd.grad(ours.loss, new)[0], torch.autograd.grad(loss, new)[0])
    if mode == "token-mean":
        assert 0 < float(fraction) < 1
        assert agree(ours.clip_fraction, fraction)

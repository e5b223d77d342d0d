"""Objectives are losses over sampled tokens: pure functions on tensors that know no run, model or config."""

from surefoot.objectives.kl import KlKind, kl_estimate
from surefoot.objectives.policy_gradient import (
    Aggregate,
    Clip,
    Level,
    PolicyLoss,
    Ratio,
    WeightSums,
    decoupled,
    effective_sample_size,
    icepop,
    offpolicy_sequence_mask,
    policy_gradient,
    token_weights,
    truncated_importance,
    weight_sums,
)

__all__ = [
    "Aggregate",
    "Clip",
    "KlKind",
    "Level",
    "PolicyLoss",
    "Ratio",
    "WeightSums",
    "decoupled",
    "effective_sample_size",
    "icepop",
    "kl_estimate",
    "offpolicy_sequence_mask",
    "policy_gradient",
    "token_weights",
    "truncated_importance",
    "weight_sums",
]

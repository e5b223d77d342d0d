"""The losses that stages hand to the learner, built from an algorithm's row. Must not know episodes."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.credit.values import value_loss
from surefoot.learner.batch import TokenBatch
from surefoot.learner.learner import Sums
from surefoot.objectives import kl_estimate, offpolicy_sequence_mask, policy_gradient, weight_sums
from surefoot.objectives.entropy import entropy_bonus, kl_cov_penalty
from surefoot.training.algorithms import Algorithm


def sft_loss(batch: TokenBatch) -> tuple[Tensor, Sums]:
    """Cross-entropy of the agent's own tokens, each times its advantage (1, or a trajectory's weight)."""
    loss = -(batch.weights * batch.advantages * batch.logp.double()).sum()
    return loss, {"entropy": (batch.weights * batch.entropy).sum()}


def linear_loss(batch: TokenBatch) -> tuple[Tensor, Sums]:
    """sum(c log p) with the coefficients c in ``advantages``.

    The exact gradient of any loss of the log-probs, where c is its derivative by each of them.
    """
    return (batch.advantages * batch.logp.double()).sum(), {}


class RlLoss:
    """The policy-gradient loss of an algorithm; remembers how far sampler and learner disagree.

    Reads these columns where they are there: proximal (log-probs at the start of the step), correction,
    reference (log-probs), detached and held (0 or 1: Clip-Cov, KL-Cov), old_values, targets, has_target.
    """

    def __init__(self, row: Algorithm, *, entropy_coef: float = 0.0, policy: bool = True) -> None:
        self.row = row
        self.clip = row.clip(row.settings)
        self.entropy_coef = entropy_coef
        self.policy = policy
        self.worst = 0.0

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, Sums]:
        # DPPO asks how far a token has moved from the sampler, not from the start of the step.
        sampler = self.clip.kind == "dppo"
        old = batch.behaviour if sampler else batch.columns.get("proximal", batch.behaviour)
        sums: Sums = {}
        part = policy_gradient(
            batch.logp,
            old,
            batch.advantages,
            batch.weights,
            sequence=batch.sequence,
            ratio=self.row.ratio,
            clip=self.clip,
            correction=self._correction(batch, sums),
        )
        gap = (batch.logp.detach() - batch.behaviour).double()
        self.worst = max(self.worst, float(gap.abs().max()))
        sums |= {
            "clip_fraction": part.clip_fraction,
            "approx_kl": part.approx_kl,
            "entropy": (batch.weights * batch.entropy).sum(),
            "weight": batch.weights.sum(),
            "mismatch_kl": (batch.weights * (torch.exp(gap) - gap - 1)).sum(),
        }
        self._weights(batch, sums)
        extras = self._critic(batch, sums)
        if not self.policy:
            return 0.0 * part.loss + extras, sums
        return part.loss + self._terms(batch, old, sums) + extras, sums

    def _weights(self, batch: TokenBatch, sums: Sums) -> None:
        """How far the policy's weights over the sampler are spread, and the share of corrected tokens cut."""
        spread = {
            "token": weight_sums(batch.logp, batch.behaviour),
            "sequence": weight_sums(batch.logp, batch.behaviour, "sequence", batch.sequence),
        }
        for level, found in spread.items():
            sums[f"{level}_weights"] = found.count
            sums[f"{level}_total"] = found.total
            sums[f"{level}_squares"] = found.squares
        if "correction" in batch.columns:
            used = batch.columns["correction"]
            cut = (used == 0) | (used >= float(self.row.settings["correction_cap"]))
            sums["correction_clip_fraction"] = (batch.weights * cut).sum()

    def _correction(self, batch: TokenBatch, sums: Sums) -> Tensor | None:
        found = [batch.columns["correction"]] if "correction" in batch.columns else []
        if "detached" in batch.columns:
            found.append(1.0 - batch.columns["detached"])
        if self.row.settings.get("correction") == "sequence_mask":
            mask = offpolicy_sequence_mask(batch.logp, batch.behaviour, batch.advantages, batch.sequence)
            found.append(mask)
            sums["correction_clip_fraction"] = (batch.weights * (mask == 0)).sum()
        product = None
        for factor in found:
            product = factor if product is None else product * factor
        return product

    def _terms(self, batch: TokenBatch, old: Tensor, sums: Sums) -> Tensor:
        """The policy's terms beside the surrogate; the KL also as a sum under its own name."""
        settings, extra = self.row.settings, torch.zeros((), dtype=torch.float64)
        if "reference" in batch.columns:
            kind = str(settings["kl_kind"])
            kl = (batch.weights * kl_estimate(batch.logp, batch.columns["reference"], kind)).sum()  # pyright: ignore[reportArgumentType]  the table checks it
            sums["reference_kl"] = kl
            if settings["kl_place"] == "loss":
                extra = extra + float(settings["kl_coef"]) * kl
        if self.entropy_coef:
            extra = extra + entropy_bonus(batch.entropy, batch.weights, self.entropy_coef)
        if "held" in batch.columns:
            extra = extra + kl_cov_penalty(batch.logp, old, batch.weights, batch.columns["held"] > 0)
        return extra

    def _critic(self, batch: TokenBatch, sums: Sums) -> Tensor:
        """The value head's regression, 0 without one."""
        settings, extra = self.row.settings, torch.zeros((), dtype=torch.float64)
        if batch.values is not None:
            weights = batch.weights * batch.columns["has_target"]
            clip = float(settings["value_clip"]) or None
            part = value_loss(
                batch.values, batch.columns["old_values"], batch.columns["targets"], weights, clip=clip
            )
            sums["value_loss"] = part.loss
            extra = extra + part.loss
        return extra

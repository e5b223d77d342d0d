"""The metrics that every kind of step reports, free of times so that they repeat bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from surefoot.learner.learner import Learner, UpdateReport
from surefoot.objectives import effective_sample_size

# Sums that the policy loss reports of its importance weights, from which the sample sizes are made.
_LEVELS = ("token", "sequence")
_PARTS = ("weights", "total", "squares")
_SPREAD = tuple(f"{level}_{part}" for level in _LEVELS for part in _PARTS)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of one step."""

    metrics: dict[str, Any]


def mean(values: Sequence[float]) -> float | None:
    """The mean, None of nothing."""
    return float(np.mean(values)) if len(values) else None


def nothing(learner: Learner) -> UpdateReport:
    """The report of a step without an update."""
    lr = learner.settings.lr * learner.settings.factor(learner.updates, learner.total_updates)
    return UpdateReport({}, 0.0, lr, 0, 0, 0, stepped=False, reason="no update in this arm or batch")


def common(report: UpdateReport) -> dict[str, Any]:
    """What every update reports."""
    return {
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "trained_tokens": report.trained_tokens,
        "packed_tokens": report.packed_tokens,
        "stepped": report.stepped,
    }


def merge_pairs(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of several preference updates: counts added up, all else of the last that had a pair."""
    ran = [metrics for metrics in found if metrics["pairs"]] or [found[-1]]
    counts = ("pairs", "trained_tokens", "packed_tokens")
    return {**ran[-1], **{name: sum(metrics[name] for metrics in found) for name in counts}}


def merge(reports: Sequence[UpdateReport]) -> dict[str, Any]:
    """Means of the losses' sums over the updates that ran; counts added up."""
    ran = [report for report in reports if report.metrics]
    weight = sum(report.metrics["weight"] for report in ran)
    out: dict[str, Any] = {
        "loss": sum(report.metrics["loss"] for report in ran) if ran else None,
        "grad_norm": max((report.grad_norm for report in reports), default=0.0),
        "lr": reports[-1].lr if reports else None,
        "trained_tokens": sum(report.trained_tokens for report in reports),
        "packed_tokens": sum(report.packed_tokens for report in reports),
        "stepped": any(report.stepped for report in reports),
    }
    named = {name for report in ran for name in report.metrics} - {"loss", "weight"} - set(_SPREAD)
    always = ("clip_fraction", "approx_kl", "entropy", "mismatch_kl")
    for name in (*always, *sorted(named - set(always))):
        out[name] = sum(report.metrics[name] for report in ran) / weight if ran and weight else None
    for level in _LEVELS:
        total = [sum(report.metrics[f"{level}_{part}"] for report in ran) for part in _PARTS]
        out[f"ess_{level}"] = effective_sample_size(*total)
    return out

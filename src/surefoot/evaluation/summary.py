"""Turns scored groups into the figures of an evaluation: success, efficiency, intervals, per variant.

Must not know how the policies came about. Unscored episodes are counted and left out, never zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from surefoot.core.types import Group, Scored, Trajectory
from surefoot.evaluation.statistics import Interval, mean_interval, pass_at_k, pass_hat_k
from surefoot.evaluation.verdict import PolicyScores

_FULL = 1e-6


def success_of(trajectory: Trajectory, reward: str, full: float) -> float | None:
    """1.0 when the reward named ``reward`` reached ``full`` within 1e-6, 0.0 when not, None unscored."""
    for score in trajectory.scores:
        if isinstance(score, Scored) and score.name == reward:
            return float(score.value >= full - _FULL)
    return None


def summarise(groups: Sequence[Group], *, reward: str, full: float, level: float = 0.95) -> dict[str, Any]:
    """Figures of one variant (plain JSON values).

    ``scores``: task id -> 0/1 per scored sample. ``success``: mean over tasks with its interval.
    ``pass_at_k``/``pass_hat_k`` for k = 1 .. samples. Efficiency: means per episode. Where tasks say
    whether a call is needed (``metadata["needs_call"]``), call rates and success for both kinds.
    """
    pairs = [(group, t, success_of(t, reward, full)) for group in groups for t in group.trajectories]
    scored = [(group, t, s) for group, t, s in pairs if s is not None]
    by_task: dict[str, list[float]] = {}
    for group, _, s in scored:
        by_task.setdefault(group.task.id, []).append(s)
    figures: dict[str, Any] = {
        "tasks": len(by_task),
        "episodes": len(pairs),
        "unscored": len(pairs) - len(scored),
        "scores": by_task,
        "stops": dict(sorted(Counter(t.stop.value for _, t, _ in pairs).items())),
    }
    if not scored:
        return figures
    flat = np.array([s for _, _, s in scored])
    clusters = [group.task.id for group, _, _ in scored]
    figures["success"] = interval_json(mean_interval(flat, clusters, level=level))
    figures.update(_passes(by_task))
    figures.update(_efficiency([t for _, t, _ in scored]))
    for key, needed in (("needed", True), ("not_needed", False)):
        part = [(t, s) for group, t, s in scored if group.task.metadata.get("needs_call") is needed]
        if part:
            figures[f"calls_{key}"] = float(np.mean([t.cost.tool_calls for t, _ in part]))
            figures[f"call_rate_{key}"] = float(np.mean([t.cost.tool_calls > 0 for t, _ in part]))
            figures[f"success_{key}"] = float(np.mean([s for _, s in part]))
    return figures


def _passes(by_task: dict[str, list[float]]) -> dict[str, Any]:
    """pass@k and pass^k for every k that all tasks have samples for."""
    counts = np.array([len(values) for values in by_task.values()])
    wins = np.array([int(sum(values)) for values in by_task.values()])
    ks = range(1, int(counts.min()) + 1)
    return {
        "pass_at_k": {str(k): float(pass_at_k(wins, counts, k).mean()) for k in ks},
        "pass_hat_k": {str(k): float(pass_hat_k(wins, counts, k).mean()) for k in ks},
    }


def _efficiency(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    values = [t.value for t in trajectories if t.value is not None]
    return {
        "return_mean": float(np.mean(values)) if values else float("nan"),
        "turns": float(np.mean([len(t.turns) for t in trajectories])),
        "tool_calls": float(np.mean([t.cost.tool_calls for t in trajectories])),
        "sampled_tokens": float(np.mean([t.sampled_tokens for t in trajectories])),
    }


def interval_json(interval: Interval) -> dict[str, Any]:
    """An interval as plain values."""
    return {
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "level": interval.level,
        "method": interval.method,
    }


def policy_scores(name: str, evaluation: dict[str, Any]) -> PolicyScores:
    """The scores of a stored evaluation in the form the verdict takes."""
    variants = {key: value["scores"] for key, value in evaluation["variants"].items() if value["scores"]}
    return PolicyScores(name, variants)


def shared_tasks(policies: Mapping[str, PolicyScores]) -> dict[str, PolicyScores]:
    """The policies on the tasks that every one of them was scored on, since differences are paired.

    A task is lost where all of a policy's episodes on it are unscored.
    """
    common: dict[str, set[str]] = {}
    for policy in policies.values():
        for variant, tasks in policy.by_variant.items():
            common[variant] = common.get(variant, set(tasks)) & set(tasks)
    return {
        name: PolicyScores(
            policy.name,
            {
                variant: {task: scores for task, scores in tasks.items() if task in common[variant]}
                for variant, tasks in policy.by_variant.items()
                if common[variant]
            },
            policy.seeds,
        )
        for name, policy in policies.items()
    }

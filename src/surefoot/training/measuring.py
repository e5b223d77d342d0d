"""Measures a session's current weights on held-out tasks: the one way in which policies are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.core.seeds import derive
from surefoot.core.types import Task
from surefoot.evaluation.summary import summarise
from surefoot.training.session import Session, Unit


def measure(session: Session, policy: str, variants: Sequence[str], *, version: int = 0) -> dict[str, Any]:
    """Play the held-out tasks of ``variants`` with the session's weights and sum them up.

    ``version`` labels the sampled tokens. Tasks and sampling follow from ``evaluation.seed`` alone, so
    that every policy of every run meets the same ones.
    """
    settings, reward = session.config.evaluation, session.success_reward
    tasks: list[Task] = []
    for variant in variants:
        count = settings.tasks if variant == "base" else settings.variant_tasks or settings.tasks
        found = session.tasks(settings.split, variant, seed=settings.seed, first=0, count=count)
        tasks.extend({task.id: task for task in found}.values())
    session.progress.begin(f"evaluate {policy}", len(tasks) * settings.samples)
    session.engine.new_version(version)
    unit = Unit(f"eval-{policy}", policy, "evaluation", version, "evaluation")
    seed = derive("evaluation", settings.seed)
    groups = session.collect(unit, tasks, members=settings.samples, seed=seed)
    figures = {
        variant: summarise(
            [group for group in groups if group.task.variant == variant],
            reward=reward.name,
            full=reward.span[1],
            level=settings.level,
        )
        for variant in variants
    }
    return {"policy": policy, "split": settings.split, "samples": settings.samples, "variants": figures}

"""Watches the treatment's episodes for signs of a cheated reward, and writes down what it sees.

Events only: nothing here reaches a reward, credit or a weight. Must not know algorithms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from surefoot.audit.monitors import Observed, standard_monitors
from surefoot.core.errors import SignalError
from surefoot.core.types import Group, Scored
from surefoot.evaluation.statistics import mean_interval
from surefoot.rollout.episode import episode_view
from surefoot.training.config import RunConfig
from surefoot.training.session import Session, load_reward


def _interval(values: Sequence[float], tasks: Sequence[str]) -> tuple[float, float]:
    found = mean_interval(np.array(values), tasks)
    return found.low, found.high


def check_watch(config: RunConfig) -> None:
    """Everything about the monitors' settings that can be wrong. Raises ConfigError."""
    settings = config.monitors
    standard_monitors(lambda _: None, _interval, canaries=settings.canaries, stop_on=settings.stop_on)
    if settings.held_out is not None:
        load_reward(settings.held_out, "monitors.held_out")


class Watch:
    """The monitors of one run; their state is part of the checkpoint."""

    def __init__(self, session: Session) -> None:
        settings, tokenizer = session.config.monitors, session.loaded.tokenizer
        self.session = session
        self.held_out = (
            None if settings.held_out is None else load_reward(settings.held_out, "monitors.held_out")
        )
        names = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        special = {int(token): str(text) for token, text in names if token not in session.codec.stop_ids}
        self.monitors = standard_monitors(
            session.won,
            _interval,
            canaries=settings.canaries,
            tokens=special,
            stop_on=settings.stop_on,
        )

    def look(self, step: int, groups: Sequence[Group]) -> dict[str, float | None]:
        """Observe a step; metrics: the number of events, and what each monitor came to.

        Raises SignalError for an event that stops the run.
        """
        events = self.monitors.observe(Observed(step, tuple(groups), self._second_opinion(groups)))
        for event in events:
            self.session.run.event("monitor", monitor=event.kind, **event.fields())
            self.session.progress.say(f"monitor {event.kind}: {event.message}")
        stop = self.monitors.stops(events)
        if stop is not None:
            raise SignalError(f"monitors.stop_on: {stop.kind} at step {step}: {stop.message}")
        values = {f"monitor_{kind}": value for kind, value in self.monitors.values().items()}
        return {"monitor_events": len(events), **values}

    def _second_opinion(self, groups: Sequence[Group]) -> Mapping[str, float]:
        if self.held_out is None:
            return {}
        views = [episode_view(group.task, t) for group in groups for t in group.trajectories]
        alive = [view for view in views if not view.stop.is_fault]
        scores = asyncio.run(self.held_out.score(alive, self.session.rewards.pool))
        pairs = zip(alive, scores, strict=True)
        return {view.id: score.value for view, score in pairs if isinstance(score, Scored)}

    def state(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.monitors.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.monitors.load(state)

"""Samples further turns at points that finished episodes went through; nothing is played on.

What comes out does not depend on timing. Must not know environments, algorithms or weights.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.core.errors import ModelError
from surefoot.core.seeds import derive
from surefoot.core.types import (
    Cost,
    Int32,
    Provenance,
    Sampling,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    Unscored,
)
from surefoot.engines.base import Engine, Sample, SampleRequest
from surefoot.policy.rendering import Codec
from surefoot.rollout.scheduler import run_all

_NOT_PLAYED = "a candidate turn: it was not played on"


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """Where turn ``turn`` of a trajectory began; ``context`` int32[N] holds every id before it."""

    trajectory: Trajectory
    turn: Turn

    @property
    def id(self) -> str:
        """Names the point in its run."""
        return f"{self.trajectory.id}/turn-{self.turn.index:02d}"

    @property
    def context(self) -> Int32:
        """Every id of the segment before the turn's own."""
        return self.trajectory.segments[self.turn.segment].tokens[: self.turn.start]


def points_of(trajectory: Trajectory) -> list[Point]:
    """The beginnings of all turns that have tokens."""
    return [Point(trajectory, turn) for turn in trajectory.turns if turn.stop > turn.start]


async def sample_turns(
    engine: Engine,
    codec: Codec,
    points: Sequence[Point],
    *,
    members: int,
    sampling: Sampling,
    seed: int,
    concurrency: int,
    seconds: float,
) -> list[list[tuple[Trajectory, float]]]:
    """``members`` turns at each point, each as an unscored trajectory of one turn, and its seconds.

    All sampling follows from ``seed``, the seed of the point's episode, the turn and the member. A point
    whose context is full gives none. ``seconds`` is the deadline of one turn; raises ModelError after it.
    """
    plans = [(i, j) for i in range(len(points)) for j in range(members)]
    queue, done = deque(plans), dict[tuple[int, int], tuple[Sample, float]]()

    async def slot() -> None:
        try:
            while queue:
                i, j = queue.popleft()
                point, began = points[i], time.perf_counter()
                session = _name(point, j)
                own = derive(seed, point.trajectory.seed, point.turn.index, j)
                request = SampleRequest(session, point.context, sampling, codec.stop_ids, own)
                sample = await _within(engine.sample(request), seconds, session)
                engine.release(session)
                done[i, j] = sample, time.perf_counter() - began
        finally:
            engine.leave()

    slots = min(concurrency, len(plans))
    for _ in range(slots):
        engine.enter()
    await run_all([asyncio.create_task(slot()) for _ in range(slots)])
    return [
        [
            (_trajectory(point, j, done[i, j][0], codec, sampling), done[i, j][1])
            for j in range(members)
            if len(done[i, j][0].tokens)
        ]
        for i, point in enumerate(points)
    ]


async def _within(sampling: Awaitable[Sample], seconds: float, session: str) -> Sample:
    try:
        return await asyncio.wait_for(sampling, seconds)
    except TimeoutError as error:
        raise ModelError(
            f"{session}: the engine sampled no turn within limits.engine_seconds = {seconds:g}"
        ) from error


def _name(point: Point, member: int) -> str:
    return f"{point.id}/{member:02d}"


def _trajectory(point: Point, member: int, sample: Sample, codec: Codec, sampling: Sampling) -> Trajectory:
    """The history as prompt, and the one turn that was sampled."""
    size, own = len(point.context), len(sample.tokens)
    silent = np.full(size, np.nan, np.float32)
    segment = Segment(
        np.concatenate([point.context, sample.tokens]).astype(np.int32),
        np.repeat(np.array([Provenance.PROMPT, Provenance.SAMPLED], np.uint8), [size, own]),
        np.concatenate([silent, sample.logprobs]).astype(np.float32),
        np.repeat(np.array([-1, sample.version], np.int32), [size, own]),
    )
    action = codec.parse(sample.tokens, sample.finish)
    return Trajectory(
        id=_name(point, member),
        task_id=point.trajectory.task_id,
        group_id=point.id,
        segments=(segment,),
        turns=(Turn(point.turn.index, 0, size, size + own, action),),
        stop=StopReason.ABORTED,
        terminated=False,
        truncated=False,
        cost=Cost(
            prompt_tokens=sample.prefilled, cached_tokens=sample.cached, sampled_tokens=own, model_calls=1
        ),
        sampling=sampling,
        seed=point.trajectory.seed,
        final=Unscored(_NOT_PLAYED, "candidate"),
    )

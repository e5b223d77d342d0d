"""Plays one episode: messages to tokens, a turn from the actor, tokens to an action, the environment's step.

Every wait has a deadline, every ending a typed reason, and sampled ids are stored as they came.
Must not know rewards, algorithms or training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from surefoot.core.deadlines import DeadlineExceeded, Worker, WorkerPool
from surefoot.core.errors import DataError, EnvironmentFault, describe
from surefoot.core.seeds import derive
from surefoot.core.types import (
    Action,
    Cost,
    Finish,
    Int32,
    Message,
    Provenance,
    Sampling,
    Segment,
    Step,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from surefoot.engines.base import Engine, Sample, SampleRequest
from surefoot.envs.base import Environment
from surefoot.policy.rendering import Codec
from surefoot.rewards.base import Episode
from surefoot.tools.base import Tool
from surefoot.tools.gate import GATE_INFO

_CUT = {Finish.LENGTH: StopReason.LENGTH, Finish.CONTEXT: StopReason.CONTEXT_FULL}


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds for one environment call and one model turn, and retries after a fault."""

    env_seconds: float = 30.0
    engine_seconds: float = 1800.0
    retries: int = 1


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """One episode to play. ``seed`` decides all its sampling."""

    id: str
    group_id: str
    task: Task
    seed: int


class Actor(Protocol):
    """Whoever takes the turns. ``forced`` tokens come from a script and carry no log-probs."""

    @property
    def forced(self) -> bool: ...

    async def act(
        self, session: str, turn: int, context: Int32, seed: int, tools: Sequence[Tool]
    ) -> Sample: ...

    def end(self, session: str) -> None: ...


class EngineActor:
    """The policy: turns sampled by an engine."""

    forced = False

    def __init__(self, engine: Engine, codec: Codec, sampling: Sampling) -> None:
        self._engine, self._stop_ids, self._sampling = engine, codec.stop_ids, sampling

    async def act(self, session: str, turn: int, context: Int32, seed: int, tools: Sequence[Tool]) -> Sample:
        request = SampleRequest(session, context, self._sampling, self._stop_ids, derive(seed, turn))
        return await self._engine.sample(request)

    def end(self, session: str) -> None:
        self._engine.release(session)


class ScriptActor:
    """Plays given actions, token by token as a policy would have sampled them; for oracles."""

    forced = True

    def __init__(self, codec: Codec, actions: Sequence[Action]) -> None:
        self._codec, self._actions = codec, actions

    async def act(self, session: str, turn: int, context: Int32, seed: int, tools: Sequence[Tool]) -> Sample:
        if turn >= len(self._actions):
            raise EnvironmentFault(
                f"the script of {session} has {len(self._actions)} turns but the episode goes on"
            )
        tokens = self._codec.encode_action(self._actions[turn], tools=tools)
        return Sample(tokens, np.full(len(tokens), np.nan, np.float32), Finish.STOP, 0)

    def end(self, session: str) -> None:
        return


class _Tokens:
    """Grows the segments of a trajectory."""

    def __init__(self) -> None:
        self._segments: list[list[tuple[Int32, int, np.ndarray[tuple[int], np.dtype[np.float32]], int]]] = []

    def open(self, tokens: Int32) -> None:
        self._segments.append([])
        self.append(tokens, Provenance.PROMPT)

    def append(self, tokens: Int32, provenance: Provenance, sample: Sample | None = None) -> None:
        silent = np.full(len(tokens), np.nan, np.float32)
        sampled = provenance is Provenance.SAMPLED and sample is not None
        logprobs = sample.logprobs if sampled and sample is not None else silent
        version = sample.version if sampled and sample is not None else -1
        self._segments[-1].append((tokens, provenance, logprobs, version))

    @property
    def context(self) -> Int32:
        return np.concatenate([part[0] for part in self._segments[-1]])

    @property
    def count(self) -> int:
        return len(self._segments)

    @property
    def length(self) -> int:
        return sum(len(part[0]) for part in self._segments[-1])

    def segments(self) -> tuple[Segment, ...]:
        return tuple(
            Segment(
                np.concatenate([tokens for tokens, _, _, _ in parts]).astype(np.int32),
                np.concatenate([np.full(len(tokens), p, np.uint8) for tokens, p, _, _ in parts]),
                np.concatenate([logprobs for _, _, logprobs, _ in parts]),
                np.concatenate([np.full(len(tokens), v, np.int32) for tokens, _, _, v in parts]),
            )
            for parts in self._segments
        )


@dataclass(slots=True)
class _Play:
    """What is known of an episode while it runs."""

    tokens: _Tokens = field(default_factory=_Tokens)
    opening: tuple[Message, ...] = ()
    messages: list[Message] = field(default_factory=lambda: [])
    tools: tuple[Tool, ...] = ()
    turns: list[Turn] = field(default_factory=lambda: [])
    gate: list[dict[str, object]] = field(default_factory=lambda: [])
    state: dict[str, object] = field(default_factory=lambda: {})
    cost: Cost = field(default_factory=Cost)
    stop: StopReason = StopReason.ABORTED
    terminated: bool = False
    fault: str = ""
    closing_fault: str = ""


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """A finished trajectory, the view of it that rewards get, and what a gate repaired or refused."""

    trajectory: Trajectory
    view: Episode
    closing_fault: str
    gate: tuple[dict[str, object], ...] = ()


async def play_episode(
    plan: EpisodePlan,
    cls: type[Environment],
    actor: Actor,
    codec: Codec,
    *,
    sampling: Sampling,
    limits: Limits,
    workers: WorkerPool,
    stopping: Callable[[], bool] = lambda: False,
) -> PlayedEpisode:
    """Play ``plan`` to its end. Environment faults are retried with a fresh instance, then recorded.

    Never raises for what the environment does: the fault is data with a typed stop reason.
    """
    play = await _attempt(plan, 0, cls, actor, codec, limits, workers, stopping)
    for attempt in range(1, limits.retries + 1):
        if play.stop not in (StopReason.ENV_ERROR, StopReason.ENV_TIMEOUT):
            break
        play = await _attempt(plan, attempt, cls, actor, codec, limits, workers, stopping)
    return _finished(plan, play, sampling)


async def _attempt(
    plan: EpisodePlan,
    attempt: int,
    cls: type[Environment],
    actor: Actor,
    codec: Codec,
    limits: Limits,
    workers: WorkerPool,
    stopping: Callable[[], bool],
) -> _Play:
    play, worker, session = _Play(), workers.acquire(), f"{plan.id}/{attempt}"
    env: Environment | None = None
    try:
        env = await worker.call(cls, limits.env_seconds)
        await _open(play, plan, env, worker, codec, limits)
        await _turns(play, plan, session, env, worker, actor, codec, limits, stopping)
    except DeadlineExceeded as error:
        play.stop, play.fault = StopReason.ENV_TIMEOUT, f"environment: {error}"
    except (DataError, asyncio.CancelledError):
        raise
    except Exception as error:  # whatever an environment raises is data about that episode
        play.stop, play.fault = StopReason.ENV_ERROR, describe(error)
    finally:
        actor.end(session)
        await _close(play, env, worker, limits)
        workers.release(worker)
    return play


async def _open(
    play: _Play, plan: EpisodePlan, env: Environment, worker: Worker, codec: Codec, limits: Limits
) -> None:
    play.opening = tuple(await worker.call(lambda: env.reset(plan.task), limits.env_seconds))
    play.messages.extend(play.opening)
    play.tools = tuple(await worker.call(env.tools, limits.env_seconds))
    play.tokens.open(codec.start(play.messages, play.tools))


async def _turns(
    play: _Play,
    plan: EpisodePlan,
    session: str,
    env: Environment,
    worker: Worker,
    actor: Actor,
    codec: Codec,
    limits: Limits,
    stopping: Callable[[], bool],
) -> None:
    """Take turns until the episode ends; sets ``play.stop``."""
    for index in range(env.horizon):
        if stopping():
            play.stop, play.fault = StopReason.BUDGET, "the budget was used up during the episode"
            return
        context = play.tokens.context
        act = actor.act(session, index, context, plan.seed, play.tools)
        sample = await asyncio.wait_for(act, limits.engine_seconds)
        if len(sample.tokens) == 0:
            play.stop = StopReason.CONTEXT_FULL
            return
        start = play.tokens.length
        play.tokens.append(sample.tokens, Provenance.FORCED if actor.forced else Provenance.SAMPLED, sample)
        action = codec.parse(sample.tokens, sample.finish, offset=play.cost.tool_calls, tools=play.tools)
        step: Step = await worker.call(lambda a=action: env.step(a), limits.env_seconds)
        play.turns.append(
            Turn(
                index,
                play.tokens.count - 1,
                start,
                start + len(sample.tokens),
                action,
                step.observation,
                step.tool_results,
                step.reward,
            )
        )
        play.gate.extend(step.info.get(GATE_INFO, ()))
        play.messages.append(Message("assistant", action.text, action.tool_calls))
        play.messages.extend(step.observation)
        play.cost += Cost(
            prompt_tokens=sample.prefilled,
            cached_tokens=sample.cached,
            sampled_tokens=0 if actor.forced else len(sample.tokens),
            model_calls=1,
            tool_calls=len(action.tool_calls) + len(action.malformed),
        )
        if _ended(play, action, step):
            break
        _observe(play, codec, sample.finish, step)
    else:
        play.stop = StopReason.HORIZON
    play.state = dict(await worker.call(env.state, limits.env_seconds))


def _ended(play: _Play, action: Action, step: Step) -> bool:
    if step.terminated:
        own = action.finish is Finish.STOP and not action.tool_calls and not action.malformed
        play.stop, play.terminated = (StopReason.ANSWERED if own else StopReason.ENV_TERMINATED), True
        return True
    if step.truncated:
        play.stop = _CUT.get(action.finish, StopReason.HORIZON)
        return True
    return False


def _observe(play: _Play, codec: Codec, finish: Finish, step: Step) -> None:
    """Append what is new; where the template cannot be extended, open a new segment."""
    added = codec.extend(play.tokens.context, finish, step.observation, play.tools)
    if added is None:
        play.tokens.open(codec.start(play.messages, play.tools))
        return
    play.tokens.append(added, Provenance.OBSERVATION)
    play.cost += Cost(observation_tokens=len(added))


async def _close(play: _Play, env: Environment | None, worker: Worker, limits: Limits) -> None:
    """Close on the episode's own worker, or on a fresh one when that hangs; a fault is recorded."""
    if env is None:
        return
    closer = Worker("surefoot-close") if worker.abandoned else worker
    try:
        await closer.call(env.close, limits.env_seconds)
    except Exception as error:  # an environment that cannot close must not cost the trajectory
        play.closing_fault = f"close: {describe(error)}"
    finally:
        if closer is not worker:
            closer.stop()


def _finished(plan: EpisodePlan, play: _Play, sampling: Sampling) -> PlayedEpisode:
    fault = play.stop.is_fault
    segments = play.tokens.segments()
    trajectory = Trajectory(
        id=plan.id,
        task_id=plan.task.id,
        group_id=plan.group_id,
        segments=segments,
        turns=_complete(play, segments),
        stop=play.stop,
        terminated=play.terminated,
        truncated=not play.terminated and not fault,
        cost=play.cost,
        sampling=sampling,
        seed=plan.seed,
        state=play.state,
        fault=play.fault,
    )
    view = replace(episode_view(plan.task, trajectory, play.opening), tools=play.tools)
    return PlayedEpisode(trajectory, view, play.closing_fault, tuple(play.gate))


def _complete(play: _Play, segments: tuple[Segment, ...]) -> tuple[Turn, ...]:
    """The turns, plus the one that was sampled when the environment failed in its step, if any."""
    if not segments:
        return ()
    spans = sum(turn.stop - turn.start for turn in play.turns)
    acted = segments[-1].acted
    if spans == sum(int(segment.acted.sum()) for segment in segments):
        return tuple(play.turns)
    start = max([turn.stop for turn in play.turns if turn.segment == len(segments) - 1], default=0)
    begin = start + int(np.argmax(acted[start:]))
    return (*play.turns, Turn(len(play.turns), len(segments) - 1, begin, len(acted), Action("")))


def episode_view(task: Task, trajectory: Trajectory, opening: tuple[Message, ...] | None = None) -> Episode:
    """The read-only view of a trajectory that rewards get; also for stored ones, to score them again."""
    messages = list(task.prompt if opening is None else opening)
    for turn in trajectory.turns:
        messages.append(Message("assistant", turn.action.text, turn.action.tool_calls))
        messages.extend(turn.observation)
    answered = trajectory.stop is StopReason.ANSWERED
    return Episode(
        id=trajectory.id,
        task=task,
        turns=trajectory.turns,
        messages=tuple(messages),
        stop=trajectory.stop,
        truncated=trajectory.truncated,
        answer=trajectory.turns[-1].action.text.strip() if answered else None,
        state=trajectory.state,
        sampled_tokens=trajectory.sampled_tokens,
        segments=trajectory.segments,
    )

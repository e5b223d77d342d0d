"""What a reward is: a function over finished episodes with a declared trust tier and span.

A reward sees a typed, read-only transcript. A reward that fails yields ``Unscored``, never 0.0.
This module must not know how rewards are composed or trained on.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from surefoot.core.deadlines import DeadlineExceeded, WorkerPool
from surefoot.core.errors import ConfigError, RewardError, describe
from surefoot.core.types import (
    Message,
    Score,
    Scored,
    Segment,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trust,
    Turn,
    Unscored,
)
from surefoot.tools.base import Tool


@dataclass(frozen=True, slots=True)
class Episode:
    """Read-only view of one finished episode, built from what the policy sampled and was shown.

    ``answer`` is the text of the turn that ended the episode by itself (None when the policy never
    finished a turn without a tool call). ``state`` is the environment's own account of the end.
    ``segments``: the token ids as the policy saw and sampled them, empty for a play without a model;
    ``tools``: those it was offered, where that is known.
    """

    id: str
    task: Task
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    stop: StopReason
    truncated: bool
    answer: str | None
    state: Mapping[str, Any]
    sampled_tokens: int = 0
    segments: tuple[Segment, ...] = ()
    tools: tuple[Tool, ...] = ()

    @property
    def reference(self) -> Any:
        """The task's reference, which no policy has seen."""
        return self.task.reference

    @property
    def model_text(self) -> str:
        """All text that the policy itself wrote; tool output can never be in it."""
        return "\n".join(turn.action.text for turn in self.turns)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Every well-formed call, in order."""
        return tuple(call for turn in self.turns for call in turn.action.tool_calls)

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        """Every tool result, in order."""
        return tuple(result for turn in self.turns for result in turn.tool_results)


EpisodeFunction = Callable[[Episode], Any]
GroupFunction = Callable[[Sequence[Episode]], Any]


@dataclass(frozen=True, slots=True)
class Reward:
    """A scoring function with its trust tier. ``span`` bounds its values; ``weight`` may be negative.

    ``group=True`` functions get all episodes of a task at once and return one value each.
    ``resolution`` is the smallest gap between two different values, where it is known.
    """

    function: Callable[..., Any]
    name: str
    trust: Trust
    span: tuple[float, float] = (0.0, 1.0)
    weight: float = 1.0
    group: bool = False
    resolution: float | None = None
    seconds: float = 30.0

    def __call__(self, episodes: Any) -> Any:
        """Call the plain function, as written."""
        return self.function(episodes)

    async def score(self, episodes: Sequence[Episode], pool: WorkerPool) -> list[Score]:
        """One Score for each episode. Raises RewardError when a group reward's length is wrong."""
        if not episodes:
            return []
        if self.group:
            return await self._score_group(episodes, pool)
        return [await self._guarded(lambda e=episode: self.function(e), pool) for episode in episodes]

    async def _score_group(self, episodes: Sequence[Episode], pool: WorkerPool) -> list[Score]:
        try:
            values = await self._run(lambda: self.function(episodes), pool)
        except Exception as error:  # a user's function may raise anything; it is recorded, not hidden
            return [Unscored(_why(error), self.name) for _ in episodes]
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise RewardError(f"reward {self.name!r} returned {type(values).__name__}; it must return a list")
        values = cast("Sequence[Any]", values)
        if len(values) != len(episodes):
            raise RewardError(
                f"reward {self.name!r} returned {len(values)} values for {len(episodes)} episodes"
            )
        return [self._to_score(value) for value in values]

    async def _guarded(self, call: Callable[[], Any], pool: WorkerPool) -> Score:
        try:
            return self._to_score(await self._run(call, pool))
        except Exception as error:  # a user's function may raise anything; it is recorded, not hidden
            return Unscored(_why(error), self.name)

    async def _run(self, call: Callable[[], Any | Awaitable[Any]], pool: WorkerPool) -> Any:
        worker = pool.acquire()
        try:
            return await worker.call(call, self.seconds)
        finally:
            pool.release(worker)

    def _to_score(self, value: Any) -> Score:
        if isinstance(value, Unscored):
            return Unscored(value.reason, self.name)
        evidence = ""
        if isinstance(value, Scored):
            value, evidence = value.value, value.evidence
        if isinstance(value, numbers.Real):
            try:
                number = float(value)
            except OverflowError:
                return Unscored("returned a number too large for a float", self.name)
            if not math.isfinite(number):
                return Unscored(f"returned {number}", self.name)
            low, high = self.span
            if not low - 1e-9 <= number <= high + 1e-9:
                return Unscored(f"returned {number:g}, outside its span [{low:g}, {high:g}]", self.name)
            return Scored(number, self.trust, self.name, evidence)
        return Unscored(f"returned {type(value).__name__}; a reward returns a number or a Score", self.name)


def _why(error: Exception) -> str:
    return f"deadline: {error}" if isinstance(error, DeadlineExceeded) else describe(error)


def reward(
    *,
    trust: Trust,
    span: tuple[float, float] = (0.0, 1.0),
    weight: float = 1.0,
    group: bool = False,
    name: str | None = None,
    resolution: float | None = None,
    seconds: float = 30.0,
) -> Callable[[EpisodeFunction | GroupFunction], Reward]:
    """Declare a reward. The trust tier has no default: a reward without one cannot exist.

    Raises ConfigError for a span that is empty or not finite, a zero weight, a resolution or
    deadline that is not positive, or a wrong signature.
    """
    if not isinstance(trust, Trust):  # pyright: ignore[reportUnnecessaryIsInstance]  users may pass an int
        raise ConfigError(f"reward trust is {trust!r}; use Trust.VERIFIED, Trust.LEARNED or Trust.IMPLICIT")
    low, high = span
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"reward span is {span}; it must be two finite numbers, low < high")
    if weight == 0 or not math.isfinite(weight):
        raise ConfigError(f"reward weight is {weight}; it must be finite and not 0")
    if resolution is not None and not (math.isfinite(resolution) and resolution > 0):
        raise ConfigError(f"reward resolution is {resolution}; it must be > 0, or None where it is not known")
    if not seconds > 0:
        raise ConfigError(f"reward seconds is {seconds}; a deadline must be > 0")

    def decorate(function: EpisodeFunction | GroupFunction) -> Reward:
        own = name or function.__name__
        if len(inspect.signature(function).parameters) != 1:
            kind = "episodes" if group else "episode"
            raise ConfigError(f"reward {own!r} must take exactly one argument ({kind})")
        return Reward(
            function, own, trust, (float(low), float(high)), float(weight), group, resolution, seconds
        )

    return decorate

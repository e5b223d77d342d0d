"""The frozen data types that every room shares: messages, tasks, actions, trajectories, scores.

They validate themselves at construction. This module must not do I/O and must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError

Role = Literal["system", "user", "assistant", "tool"]
Split = Literal["train", "dev", "test"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
SPLITS: tuple[Split, ...] = ("train", "dev", "test")


class Trust(IntEnum):
    """How far a reward can be believed; higher is better and can never be outvoted by lower."""

    IMPLICIT = 1
    LEARNED = 2
    VERIFIED = 3


class Provenance(IntEnum):
    """Who produced a token. Only ``SAMPLED`` tokens are ever trained by RL."""

    PROMPT = 0
    OBSERVATION = 1
    SAMPLED = 2
    FORCED = 3


class Finish(StrEnum):
    """Why the sampler stopped one turn."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    ENV_TERMINATED = "env_terminated"
    HORIZON = "horizon"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    ENV_TIMEOUT = "env_timeout"
    ENV_ERROR = "env_error"
    BUDGET = "budget"
    ABORTED = "aborted"

    @property
    def is_fault(self) -> bool:
        """True when the machinery failed, not the policy: such an episode is never scored."""
        return self in (StopReason.ENV_TIMEOUT, StopReason.ENV_ERROR, StopReason.BUDGET, StopReason.ABORTED)


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model made. ``arguments`` is the decoded JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. Tool results carry the id of the call that they answer."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise DataError(f"Message.role is {self.role!r}; it must be one of {', '.join(ROLES)}")


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. ``reference`` is for rewards and oracles only and never reaches the policy.

    ``prompt`` holds the messages that open the episode (normally one user message; a system
    message may stand first).
    """

    id: str
    split: Split
    variant: str
    prompt: tuple[Message, ...]
    reference: object = None
    metadata: Mapping[str, Any] = field(default_factory=_empty)

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise DataError(f"Task.split is {self.split!r}; it must be one of {', '.join(SPLITS)}")
        if not self.id:
            raise DataError("Task.id is empty; every task needs an id that is the same in every process")
        if not self.prompt:
            raise DataError(f"Task {self.id}: prompt is empty; it needs at least one message")


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A part of a turn, mostly a tool call, that could not be read: what stood there and why not."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy did in one turn, parsed from its own tokens only.

    ``text`` is what is left outside tool calls. A turn cut by the token limit carries
    ``finish != STOP`` and its unfinished call is never executed.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    finish: Finish = Finish.STOP


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The outcome of one tool call, keyed by the call's id."""

    call_id: str
    name: str
    content: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers to an action: new messages, a step reward, and how it ended."""

    observation: tuple[Message, ...] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    tool_results: tuple[ToolResult, ...] = ()
    info: Mapping[str, Any] = field(default_factory=_empty)

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise DataError(f"Step.reward is {self.reward}; it must be a finite number")


Int32 = npt.NDArray[np.int32]
Uint8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens under one unedited history; a history edit opens a new segment.

    tokens: int32[N]. provenance: uint8[N] of :class:`Provenance`. logprobs: float32[N], natural
    log under the distribution actually sampled, NaN where the policy did not sample. version:
    int32[N], the policy version that sampled the token, -1 elsewhere. Arrays become read-only.
    """

    tokens: Int32
    provenance: Uint8
    logprobs: Float32
    version: Int32

    def __post_init__(self) -> None:
        columns = (
            ("tokens", np.int32),
            ("provenance", np.uint8),
            ("logprobs", np.float32),
            ("version", np.int32),
        )
        for name, dtype in columns:
            array = cast("npt.NDArray[Any]", getattr(self, name))
            if array.dtype != dtype or array.ndim != 1:
                raise DataError(
                    f"Segment.{name} is {array.dtype}{list(array.shape)}; it must be {np.dtype(dtype)}[N]"
                )
            if len(array) != len(self.tokens):
                raise DataError(f"Segment.{name} has {len(array)} entries for {len(self.tokens)} tokens")
            array.setflags(write=False)
        sampled = self.sampled
        if not np.isfinite(self.logprobs[sampled]).all():
            raise DataError(
                "Segment.logprobs is not finite on a sampled token; the sampler must report every one"
            )
        if np.isfinite(self.logprobs[~sampled]).any():
            raise DataError(
                "Segment.logprobs is set on a token that the policy did not sample; it must be NaN there"
            )
        if (self.version[sampled] < 0).any():
            raise DataError("Segment.version is negative on a sampled token; it must name the policy version")

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """bool[N]: True exactly on tokens that the policy sampled."""
        return self.provenance == Provenance.SAMPLED

    @property
    def acted(self) -> npt.NDArray[np.bool_]:
        """bool[N]: True on tokens of the agent's own turns, sampled or forced by a script."""
        return self.sampled | (self.provenance == Provenance.FORCED)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision of the agent: where its own tokens stand and what came of them.

    ``start:stop`` is the span of sampled (or, from a script, forced) tokens in ``segments[segment]``.
    """

    index: int
    segment: int
    start: int
    stop: int
    action: Action
    observation: tuple[Message, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    step_reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What an episode used. Counts only: seconds live in the ledger, since they never repeat."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    observation_tokens: int = 0
    sampled_tokens: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    usd: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.observation_tokens + other.observation_tokens,
            self.sampled_tokens + other.sampled_tokens,
            self.model_calls + other.model_calls,
            self.tool_calls + other.tool_calls,
            self.usd + other.usd,
        )


@dataclass(frozen=True, slots=True)
class Scored:
    """A measurement that succeeded. ``value`` is finite; ``evidence`` says what was seen."""

    value: float
    trust: Trust
    name: str
    evidence: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise DataError(
                f"Scored.value of {self.name!r} is {self.value}; a failed measurement is Unscored"
            )


@dataclass(frozen=True, slots=True)
class Unscored:
    """A measurement that failed. It never enters a mean or a group, and is never a zero."""

    reason: str
    name: str


Score = Scored | Unscored


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that turns are sampled from. ``top_k = 0`` and ``top_p = 1`` switch them off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise DataError(f"Sampling.temperature is {self.temperature}; it must be >= 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise DataError(f"Sampling.top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 0:
            raise DataError(f"Sampling.top_k is {self.top_k}; it must be >= 0 (0 is off)")
        if self.max_tokens < 1:
            raise DataError(f"Sampling.max_tokens is {self.max_tokens}; it must be >= 1")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode, token-exact. ``final`` is the outcome composed from ``scores``.

    ``state`` is the environment's own account of how it ended (JSON values), which rewards read.
    """

    id: str
    task_id: str
    group_id: str
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    stop: StopReason
    terminated: bool
    truncated: bool
    cost: Cost
    sampling: Sampling
    seed: int
    state: Mapping[str, Any] = field(default_factory=_empty)
    scores: tuple[Score, ...] = ()
    final: Score | None = None
    fault: str = ""

    def __post_init__(self) -> None:
        for turn in self.turns:
            if not 0 <= turn.segment < len(self.segments):
                raise DataError(f"Trajectory {self.id}: turn {turn.index} names segment {turn.segment}")
            span = self.segments[turn.segment].acted[turn.start : turn.stop]
            if len(span) != turn.stop - turn.start or not span.all():
                raise DataError(f"Trajectory {self.id}: turn {turn.index} spans tokens that were not sampled")
        spans = sum(turn.stop - turn.start for turn in self.turns)
        acted = sum(int(segment.acted.sum()) for segment in self.segments)
        if spans != acted:
            raise DataError(f"Trajectory {self.id}: turns hold {spans} of {acted} sampled tokens")

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens the policy sampled, over all segments."""
        return sum(int(segment.sampled.sum()) for segment in self.segments)

    @property
    def value(self) -> float | None:
        """The composed return, or None while unscored."""
        return self.final.value if isinstance(self.final, Scored) else None


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories sampled for one task: the unit that statistics are taken over."""

    task: Task
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        for trajectory in self.trajectories:
            if trajectory.task_id != self.task.id:
                raise DataError(
                    f"Group of task {self.task.id} holds {trajectory.id} of task {trajectory.task_id}"
                )

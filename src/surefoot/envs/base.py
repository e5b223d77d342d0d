"""The environment interface: one instance is one episode, splits are disjoint by construction.

Environments import no torch and never see token ids; they speak messages and actions.
"""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, ClassVar, Literal, get_args

from surefoot.core.errors import ConfigError, EnvironmentFault, nearest
from surefoot.core.seeds import derive, digest
from surefoot.core.types import SPLITS, Action, Finish, Message, Split, Step, Task, ToolCall
from surefoot.rewards.base import Reward
from surefoot.tools.base import Tool, run_calls, tools_of
from surefoot.tools.gate import Gate, GateWatch

Axis = Literal["base", "rule", "surface", "scale", "tool", "horizon"]

# Shares of the key space, in tenths, that make up each split.
_TENTHS: Mapping[Split, range] = {"train": range(0, 7), "dev": range(7, 8), "test": range(8, 10)}
_MISSES = 2000
_MOST_READ = 10_000


@dataclass(frozen=True, slots=True)
class Variant:
    """A family of tasks. ``base`` is trained on; every other one is held out for evaluation."""

    description: str
    axis: Axis = "base"

    def __post_init__(self) -> None:
        """Raises ConfigError for an axis that does not exist."""
        if self.axis not in get_args(Axis):
            raise ConfigError(f"Variant.axis = {self.axis!r}; {nearest(self.axis, get_args(Axis))}")


@dataclass(frozen=True, slots=True)
class Draft:
    """One generated problem, before it gets its id and split.

    ``key`` decides the split: drafts with equal keys are the same problem. It must name what is
    asked, not how it is phrased.
    """

    key: str
    prompt: str | tuple[Message, ...]
    reference: Any
    metadata: Mapping[str, Any] = field(default_factory=lambda: {})


def split_of(name: str, key: str) -> Split:
    """The split that a problem belongs to, by a hash of its key: the same in every process."""
    tenth = derive("split", name, key) % 10
    return next(split for split, tenths in _TENTHS.items() if tenth in tenths)


def make_tasks(
    name: str,
    generate: Callable[[random.Random, str], Draft],
    split: Split,
    variant: str = "base",
    *,
    seed: int = 0,
    limit: int | None = None,
    system: str = "",
) -> Iterator[Task]:
    """Tasks of one split from a random generator: no key twice, none shared between splits.

    Ends after ``limit`` tasks, or when 2,000 draws in a row bring nothing new.
    """
    seen: set[str] = set()
    misses = index = 0
    while (limit is None or len(seen) < limit) and misses < _MISSES:
        draft = generate(random.Random(derive("task", name, variant, split, seed, index)), variant)
        index += 1
        if draft.key in seen or split_of(name, draft.key) != split:
            misses += 1
            continue
        misses = 0
        seen.add(draft.key)
        prompt = (Message("user", draft.prompt),) if isinstance(draft.prompt, str) else draft.prompt
        if system and prompt[0].role != "system":
            prompt = (Message("system", system), *prompt)
        yield Task(
            f"{name}-{variant}-{digest(draft.key)}", split, variant, prompt, draft.reference, draft.metadata
        )


def in_turns(
    tasks: Iterator[Task], kind: Callable[[Task], Hashable], kinds: Sequence[Hashable]
) -> Iterator[Task]:
    """The tasks reordered so that each of ``kinds`` comes up once in every ``len(kinds)`` of them.

    A step of a few tasks then never leans to one kind, which the update would take for a lesson.
    Ends when a kind runs out, or does not come in ten thousand tasks. Raises ConfigError for a task of
    another kind, and for a kind that had not come before either.
    """
    waiting: dict[Hashable, deque[Task]] = {item: deque() for item in kinds}
    came: set[Hashable] = set()
    for wanted in cycle(kinds):
        read = 0
        while not waiting[wanted]:
            if read == _MOST_READ:
                if wanted in came:
                    return
                raise ConfigError(f"in_turns read {read} tasks and none was of kind {wanted!r}; drop it")
            read += 1
            task = next(tasks, None)
            if task is None:
                return
            found = kind(task)
            if found not in waiting:
                raise ConfigError(f"task {task.id} is of kind {found!r}; in_turns expects {list(kinds)}")
            waiting[found].append(task)
            came.add(found)
        yield waiting[wanted].popleft()


class Environment(ABC):
    """One episode of a partially observed task. Single use: reset once, step until it ends, close.

    A subclass sets ``name``, ``horizon`` (most turns), ``variants`` ("base" and at least one
    held-out), ``rewards``; it implements ``generate`` (or overrides ``tasks``), ``reset`` and
    ``step``. Stepping after the end, or before reset, raises EnvironmentFault. With a ``gate``, no
    tool call reaches ``step`` that its rules do not allow; they read :meth:`state`.
    """

    name: ClassVar[str] = ""
    horizon: ClassVar[int] = 8
    system: ClassVar[str] = ""
    variants: ClassVar[Mapping[str, Variant]] = {}
    rewards: ClassVar[Sequence[Reward]] = ()
    success: ClassVar[str] = ""
    gate: ClassVar[Gate | None] = None
    _phase: str = "new"
    _watch: GateWatch | None = None
    _judged: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "reset" in cls.__dict__:
            setattr(cls, "reset", _guard_reset(cls.__dict__["reset"]))  # noqa: B010  a typed assignment cannot hold
        if "step" in cls.__dict__:
            setattr(cls, "step", _guard_step(cls.__dict__["step"]))  # noqa: B010  a typed assignment cannot hold

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        """One random problem of ``variant``; everything random must come from ``rng``."""
        raise ConfigError(f"environment {cls.name!r} defines neither generate() nor tasks()")

    @classmethod
    def tasks(
        cls, split: Split, variant: str = "base", *, seed: int = 0, limit: int | None = None
    ) -> Iterator[Task]:
        """Tasks of one split and variant, in a fixed order; splits share no problem."""
        if split not in SPLITS:
            raise ConfigError(f"split {split!r} does not exist; {nearest(split, SPLITS)}")
        if variant not in cls.variants:
            raise ConfigError(f"{cls.name} has no variant {variant!r}; {nearest(variant, cls.variants)}")
        return make_tasks(cls.name, cls.generate, split, variant, seed=seed, limit=limit, system=cls.system)

    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action] | None:
        """Actions that solve ``task``, or None where no oracle exists."""
        return None

    @classmethod
    def equivalents(cls, task: Task) -> Sequence[Sequence[Action]]:
        """Other plays that solve ``task`` like the oracle's; the reward audit asks that they be paid."""
        return ()

    @classmethod
    def demonstration(cls, task: Task) -> Sequence[Action] | None:
        """What a cold start imitates; the oracle's actions unless a class shows something plainer."""
        return cls.oracle(task)

    @classmethod
    def privileged(cls, task: Task) -> str:
        """What a critic may read of ``task`` while training, and the policy never; empty: nothing.

        The hidden answer or state in words, for algorithms with an asymmetric critic (``sweet_rl``).
        """
        return ""

    @classmethod
    def success_reward(cls) -> str:
        """Name of the reward whose full value counts as success: ``success``, or the first."""
        return cls.success or (cls.rewards[0].name if cls.rewards else "")

    def tools(self) -> tuple[Tool, ...]:
        """Tools of this episode; asked once, after reset. Default: the methods marked @tool."""
        return tools_of(self)

    def state(self) -> Mapping[str, Any]:
        """JSON values that describe how the episode stands; rewards read it after the end."""
        return {}

    @abstractmethod
    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Start the episode; the messages that open the conversation (normally task.prompt)."""

    @abstractmethod
    async def step(self, action: Action) -> Step:
        """Take one action of the policy."""

    async def close(self) -> None:
        """Free what the episode holds. Called exactly once, also after a fault."""
        return


def _guard_reset(
    function: Callable[..., Awaitable[tuple[Message, ...]]],
) -> Callable[..., Awaitable[tuple[Message, ...]]]:
    @functools.wraps(function)
    async def reset(self: Any, task: Task) -> tuple[Message, ...]:
        if self._phase not in ("new", "resetting"):
            raise EnvironmentFault(f"{self.name}: reset called twice; one instance is one episode")
        self._phase = "resetting"
        messages = await function(self, task)
        self._phase = "open"
        return messages

    return reset


def _guard_step(function: Callable[..., Awaitable[Step]]) -> Callable[..., Awaitable[Step]]:
    @functools.wraps(function)
    async def step(self: Any, action: Action) -> Step:
        if self._phase != "open":
            when = "before reset" if self._phase in ("new", "resetting") else "after the episode ended"
            raise EnvironmentFault(f"{self.name}: step called {when}")
        result = await _through_gate(self, action, function)
        if not isinstance(result, Step):  # pyright: ignore[reportUnnecessaryIsInstance]  users' code
            raise EnvironmentFault(
                f"{self.name}: step returned {type(result).__name__}; it must return a Step"
            )
        if result.terminated or result.truncated:
            self._phase = "ended"
        return result

    return step


async def _through_gate(env: Any, action: Action, function: Callable[..., Awaitable[Step]]) -> Step:
    """Take a step, through the gate if there is one; a parent's step, called by its child's, is inside it."""
    if env.gate is None or env._judged:
        return await function(env, action)
    env._watch = env._watch or GateWatch(env.gate)
    env._judged = True
    try:
        return await env._watch.step(action, env.state(), functools.partial(function, env))
    finally:
        env._judged = False


def call(name: str, **arguments: Any) -> Action:
    """An action that calls one tool; for oracles and tests."""
    return Action("", (ToolCall("call_0", name, arguments),))


def answer(text: str) -> Action:
    """An action that answers and so ends the episode of a tool environment."""
    return Action(text)


class ToolEnvironment(Environment):
    """The common case: tools, then a turn without a tool call, whose text is the answer.

    A subclass writes ``generate`` and its rewards, and marks methods with ``@tool``. A turn cut by
    the token limit ends the episode as truncated: it submits no answer and runs no tool.
    """

    tool_seconds: ClassVar[float] = 10.0
    task: Task
    _tools: tuple[Tool, ...]
    _turns: int = 0
    _answer: str | None = None

    def prepare(self, task: Task) -> None:
        """Hook: set up the episode's own state, before tools() is asked."""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        self.task = task
        self.prepare(task)
        self._tools = self.tools()
        return task.prompt

    async def step(self, action: Action) -> Step:
        self._turns += 1
        if action.finish is not Finish.STOP:
            return Step(truncated=True, info={"reason": f"turn cut: {action.finish.value}"})
        if not action.tool_calls and not action.malformed:
            self._answer = action.text.strip()
            return Step(terminated=True)
        results = await run_calls(self._tools, action.tool_calls, seconds=self.tool_seconds)
        observation = tuple(Message("tool", item.content, (), item.call_id) for item in results)
        observation += tuple(_complaint(bad.reason) for bad in action.malformed)
        return Step(observation, truncated=self._turns >= self.horizon, tool_results=results)

    @property
    def answer(self) -> str | None:
        """The submitted answer, None until there is one."""
        return self._answer

    def state(self) -> Mapping[str, Any]:
        return {"answer": self._answer}


def _complaint(reason: str) -> Message:
    return Message("tool", f"Error: the tool call could not be read: {reason}")

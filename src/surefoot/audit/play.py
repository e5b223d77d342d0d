"""Plays an environment with scripted actions or a function, without any model.

It builds the same read-only episode that rewards see in training. This module must not score.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surefoot.core.types import Action, Finish, Message, Step, StopReason, Task, Turn
from surefoot.envs.base import Environment
from surefoot.rewards.base import Episode
from surefoot.tools.base import Tool

# A policy without a model: the task and the conversation so far -> the next action.
Policy = Callable[[Task, Sequence[Message]], Action]


@dataclass(frozen=True, slots=True)
class Played:
    """An episode, the tools it offered, and the seconds that reset, steps and close took."""

    episode: Episode
    tools: tuple[Tool, ...]
    seconds: float


async def play(cls: type[Environment], task: Task, actions: Sequence[Action] | Policy) -> Episode:
    """One episode of ``task``, driven by a list of actions or by a policy; always closed.

    Ends when the environment ends it, after ``cls.horizon`` turns, or when the list is used up (the
    last two: truncated, stop HORIZON). What the environment raises goes through.
    """
    return (await record(cls, task, actions)).episode


async def record(cls: type[Environment], task: Task, actions: Sequence[Action] | Policy) -> Played:
    """:func:`play`, with the tools that were offered and the time it took."""
    began = time.perf_counter()
    env = cls()
    try:
        opening = await env.reset(task)
        tools = env.tools()
        turns, stop, truncated = await _drive(env, task, opening, actions)
        state = dict(env.state())
    finally:
        await env.close()
    last = turns[-1].action if turns else None
    episode = Episode(
        id=f"{task.id}-played",
        task=task,
        turns=tuple(turns),
        messages=(*opening, *(message for turn in turns for message in _messages(turn))),
        stop=stop,
        truncated=truncated,
        answer=last.text if last is not None and stop is StopReason.ANSWERED else None,
        state=state,
        tools=tools,
    )
    return Played(episode, tools, time.perf_counter() - began)


async def _drive(
    env: Environment, task: Task, opening: tuple[Message, ...], actions: Sequence[Action] | Policy
) -> tuple[list[Turn], StopReason, bool]:
    """(turns, why it stopped, whether it was cut)."""
    turns: list[Turn] = []
    messages = list(opening)
    while len(turns) < env.horizon:
        if callable(actions):
            action = actions(task, tuple(messages))
        elif len(turns) < len(actions):
            action = actions[len(turns)]
        else:
            break
        step = await env.step(action)
        turns.append(
            Turn(len(turns), 0, 0, 0, action, step.observation, step.tool_results, step_reward=step.reward)
        )
        messages.extend(_messages(turns[-1]))
        if step.terminated or step.truncated:
            return turns, _stop(action, step), not step.terminated
    return turns, StopReason.HORIZON, True


def _messages(turn: Turn) -> tuple[Message, ...]:
    return (Message("assistant", turn.action.text, turn.action.tool_calls), *turn.observation)


def _stop(action: Action, step: Step) -> StopReason:
    if step.terminated:
        spoken = not action.tool_calls and not action.malformed
        return StopReason.ANSWERED if spoken else StopReason.ENV_TERMINATED
    cut = {Finish.LENGTH: StopReason.LENGTH, Finish.CONTEXT: StopReason.CONTEXT_FULL}
    return cut.get(action.finish, StopReason.HORIZON)

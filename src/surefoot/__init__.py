"""Surefoot: reinforcement learning for language-model agents, with results that can be believed.

The names a new environment, tool or reward needs; importing them loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from surefoot.core.types import Action, Message, Scored, Step, Task, Trust, Unscored
    from surefoot.envs.base import Environment, ToolEnvironment, Variant, make_tasks
    from surefoot.rewards.base import Episode, reward
    from surefoot.tools.base import tool

_EXPORTS = {
    "Action": "surefoot.core.types",
    "Environment": "surefoot.envs.base",
    "Episode": "surefoot.rewards.base",
    "Message": "surefoot.core.types",
    "Scored": "surefoot.core.types",
    "Step": "surefoot.core.types",
    "Task": "surefoot.core.types",
    "ToolEnvironment": "surefoot.envs.base",
    "Trust": "surefoot.core.types",
    "Unscored": "surefoot.core.types",
    "Variant": "surefoot.envs.base",
    "make_tasks": "surefoot.envs.base",
    "reward": "surefoot.rewards.base",
    "tool": "surefoot.tools.base",
}

__all__ = [
    "Action",
    "Environment",
    "Episode",
    "Message",
    "Scored",
    "Step",
    "Task",
    "ToolEnvironment",
    "Trust",
    "Unscored",
    "Variant",
    "make_tasks",
    "reward",
    "tool",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that ``import surefoot`` costs milliseconds (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)

"""Finds environment classes and checks what can be checked before one runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType

from surefoot.core.errors import ConfigError, nearest
from surefoot.core.loading import load_target
from surefoot.envs.base import Environment, ToolEnvironment
from surefoot.rewards.base import Reward

BUILTIN: Mapping[str, str] = {
    "calculator": "surefoot.envs.calculator:Calculator",
    "code": "surefoot.envs.code:Code",
    "drawers": "surefoot.envs.drawers:Drawers",
    "repo": "surefoot.envs.repo:Repo",
}


def load_environment(reference: str) -> type[Environment]:
    """The class of a built-in name, ``module:Class`` or ``path/to/file.py[:Class]``.

    Raises ConfigError that names the nearest built-in, or what is wrong with the class.
    """
    if reference not in BUILTIN and ":" not in reference and not reference.endswith(".py"):
        raise ConfigError(
            f"environment {reference!r} is not built in; {nearest(reference, BUILTIN)} "
            "(your own: module:Class or path/to/file.py)"
        )
    module, found = load_target(BUILTIN.get(reference, reference))
    if found is None:
        found = _only_environment(module, reference)
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise ConfigError(f"{reference!r} is not an Environment class; subclass surefoot.ToolEnvironment")
    _check_class(found)
    return found


def _only_environment(module: ModuleType, reference: str) -> type[Environment]:
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Environment)
        and value not in (Environment, ToolEnvironment)
        and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = ", ".join(item.__name__ for item in own) or "none"
        raise ConfigError(f"{reference!r} defines {len(own)} environments ({names}); name one as FILE:CLASS")
    return own[0]


def _check_class(cls: type[Environment]) -> None:
    where = f"environment {cls.__name__}"
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise ConfigError(f"{where} does not implement {missing}")
    if not cls.name:
        raise ConfigError(f'{where}.name is empty; set name = "something"')
    if cls.horizon < 1:
        raise ConfigError(f"{where}.horizon is {cls.horizon}; it must be >= 1 turn")
    if "base" not in cls.variants or len(cls.variants) < 2:
        raise ConfigError(
            f'{where}.variants is {sorted(cls.variants)}; it needs "base" and at least one held-out variant'
        )
    for item in cls.rewards:
        if not isinstance(item, Reward):  # pyright: ignore[reportUnnecessaryIsInstance]  users' code
            raise ConfigError(f"{where}.rewards holds {item!r}; decorate it with @reward(trust=...)")
    names = [item.name for item in cls.rewards]
    if cls.rewards and cls.success_reward() not in names:
        raise ConfigError(f"{where}.success is {cls.success!r}; {nearest(cls.success, names)}")

"""``surefoot check``: what an environment and its rewards must hold before anything trains on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from surefoot.audit.checks import Report
    from surefoot.envs.base import Environment
    from surefoot.rewards.base import Reward

checks = typer.Typer(
    help="Check an environment or a reward on real episodes, without a model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
_STATE = {True: "ok", False: "failed", None: "skipped"}
_STYLE = {True: "green", False: "bold red", None: "yellow"}


@checks.command("env")
def _env(
    target: Annotated[str, typer.Argument(help="A built-in name, module:Class or file.py[:Class].")],
    tasks: Annotated[int, typer.Option(help="Tasks of each variant.")] = 20,
    json: _Json = False,
) -> None:
    """Check an environment's promises: determinism, splits, oracle, null policies, leaks, speed."""
    from surefoot.audit.checks import check_environment
    from surefoot.envs.loading import load_environment

    _finish([check_environment(load_environment(target), tasks=tasks)], json)


@checks.command("reward")
def _reward(
    target: Annotated[str, typer.Argument(help="An environment (all its rewards), or a reward with --env.")],
    env: Annotated[str | None, typer.Option(help="The environment whose episodes it scores.")] = None,
    tasks: Annotated[int, typer.Option(help="Tasks to play; in few, one lucky guess fails.")] = 20,
    json: _Json = False,
) -> None:
    """Check rewards against gold episodes, null policies and a generated hack matrix."""
    from surefoot.audit.checks import check_reward

    cls, rewards = _rewards(target, env)
    _finish([check_reward(reward, cls, tasks=tasks) for reward in rewards], json)


def _rewards(target: str, env: str | None) -> tuple[type[Environment], Sequence[Reward]]:
    """The environment, and the rewards to check. Raises ConfigError."""
    from surefoot.core.errors import ConfigError, nearest
    from surefoot.core.loading import load_target
    from surefoot.envs.loading import load_environment
    from surefoot.rewards.base import Reward

    try:
        cls = load_environment(env or target)
    except ConfigError as error:
        if env is not None:
            raise
        own = "a reward of your own is checked by: surefoot check reward FILE:NAME --env ENVIRONMENT"
        raise ConfigError(f"{error}\n{own}") from error
    if env is None:
        if not cls.rewards:
            raise ConfigError(f"environment {target!r} has no rewards; name one with --env {target}")
        return cls, cls.rewards
    own = {item.name: item for item in cls.rewards}
    if target in own:
        return cls, [own[target]]
    if ":" not in target:
        raise ConfigError(
            f"environment {env!r} has no reward {target!r}; {nearest(target, own)} (your own: FILE:NAME)"
        )
    found = load_target(target)[1]
    if not isinstance(found, Reward):
        raise ConfigError(f"{target!r} is not a reward; decorate it with @reward(trust=...)")
    return cls, [found]


def _finish(reports: Sequence[Report], json: bool) -> None:
    from surefoot.cli.output import emit, new_table, show

    if json:
        emit([_plain(report) for report in reports])
    for report in () if json else reports:
        table = new_table(report.name, "check", "result", "detail")
        for item in report.items:
            table.add_row(item.name, _STATE[item.ok], item.detail, style=_STYLE[item.ok])
        show(table)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def _plain(report: Report) -> dict[str, object]:
    items = [{"name": i.name, "result": _STATE[i.ok], "detail": i.detail} for i in report.items]
    return {"name": report.name, "ok": report.ok, "items": items}

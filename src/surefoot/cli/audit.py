"""``surefoot audit``: whether a recipe's rewards may be trained on, as a table that decides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from surefoot.audit.rewards import Audit, RewardAudit, Tally

_RESULT = {True: "ok", False: "failed", None: "not audited"}
_STYLE = {True: "green", False: "bold red", None: "yellow"}
_NUMBERS = ("gold", "gold refused", "null policies", "exploits")


def audit(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or a .toml file.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a setting; may be repeated.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(help="Tasks to play; default audit.tasks.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Try a recipe's rewards: gold, policies that know nothing, known exploits. No policy is loaded."""
    from surefoot.audit.rewards import audit_rewards
    from surefoot.cli.output import emit
    from surefoot.envs.loading import load_environment
    from surefoot.recipes import find_recipe
    from surefoot.training.config import load_config
    from surefoot.training.run import check_config
    from surefoot.training.session import resolve_rewards

    config = load_config(find_recipe(recipe), overrides=settings or ())
    check_config(config)
    cls = load_environment(config.environment.name)
    count = config.audit.tasks if tasks is None else tasks
    suite = resolve_rewards(config, cls)
    found = audit_rewards(suite, cls, tasks=count, seconds=config.limits.env_seconds)
    override = config.audit.override
    if json:
        emit({"recipe": config.name, **found.to_json(), "overrides": override})
    else:
        _print(config.name, found, override)
    if not found.ok:
        raise typer.Exit(1)


def _print(name: str, found: Audit, override: Mapping[str, str]) -> None:
    from surefoot.cli.output import new_table, say, show

    title = f"{name}: rewards on {found.tasks} tasks of {found.environment}"
    table = new_table(title, "reward", "trust", *_NUMBERS, "result", "detail", numbers=_NUMBERS)
    for row in found.rewards:
        result = _RESULT[row.ok]
        if row.ok is False and row.name in override:
            result = "failed (overridden)"
        cells = (_sum(row.false_rejects), _sum(row.nulls), _sum(row.exploits))
        table.add_row(row.name, row.trust, str(row.gold), *cells, result, row.detail, style=_STYLE[row.ok])
    show(table)
    _print_kinds(found)
    for note in found.notes:
        say(note, style="yellow")
    for row in found.failed:
        if row.name in override:
            say(f"{row.name} may be trained on all the same: {override[row.name]}", style="yellow")


def _sum(tallies: Mapping[str, Tally]) -> str:
    """Episodes of all kinds together, empty where nothing was counted."""
    tried = sum(tally.tried for tally in tallies.values())
    return f"{sum(tally.hits for tally in tallies.values())}/{tried}" if tried else ""


def _print_kinds(found: Audit) -> None:
    """Every kind of episode against every reward that counts them."""
    from surefoot.cli.output import new_table, show

    rows = [row for row in found.rewards if row.nulls or row.exploits or row.false_rejects]
    if not rows:
        return
    names = [row.name for row in rows]
    table = new_table("Episodes paid like gold (for gold: refused)", "kind", *names, numbers=names)
    for label, part in (("gold", "false_rejects"), ("null", "nulls"), ("exploit", "exploits")):
        for kind in dict.fromkeys(kind for row in rows for kind in (*_part(row, part), *_strict(row, part))):
            table.add_row(f"{label}: {kind}", *(_cell(row, part, kind) for row in rows))
    show(table)


def _strict(row: RewardAudit, part: str) -> tuple[str, ...]:
    return row.strict if part == "false_rejects" else ()


def _cell(row: RewardAudit, part: str, kind: str) -> str:
    if kind in _strict(row, part):
        return "not its form"  # refused throughout, as an answer format may
    return str(_part(row, part).get(kind, ""))


def _part(row: RewardAudit, name: str) -> Mapping[str, Tally]:
    return {"false_rejects": row.false_rejects, "nulls": row.nulls, "exploits": row.exploits}[name]

"""``surefoot recipes``: what can be run by name, and the algorithms a recipe may choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from surefoot.training.algorithms import Algorithm

_Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def recipes(
    algorithms: Annotated[bool, typer.Option("--algorithms", help="List the algorithms instead.")] = False,
    json: _Json = False,
) -> None:
    """List the recipes that ship with Surefoot."""
    if algorithms:
        _algorithms(json)
    else:
        _recipes(json)


def _recipes(json: bool) -> None:
    from surefoot.cli.output import emit, new_table, show
    from surefoot.recipes import list_recipes

    found = list_recipes()
    if json:
        emit([{"name": item.name, "description": item.description, "path": str(item.path)} for item in found])
        return
    table = new_table("", "recipe", "description")
    for item in found:
        table.add_row(item.name, item.description)
    show(table)


def _algorithms(json: bool) -> None:
    from surefoot.cli.output import emit, new_table, show
    from surefoot.training.algorithms import ALGORITHMS

    rows = ALGORITHMS.values()
    if json:
        emit([_complete(row) for row in rows])
        return
    table = new_table("", "algorithm", "kind", "what it does", "settings of its own", "source")
    for row in rows:
        settings = ", ".join(f"{key} = {value}" for key, value in row.own.items())
        table.add_row(row.name, row.kind, row.summary, settings, row.source)
    show(table)


def _complete(row: Algorithm) -> dict[str, Any]:
    """Everything about a row; ``settings`` are all that it takes, ``own`` those that are not common."""
    from surefoot.training.algorithms import SETTINGS

    keys = ("name", "kind", "summary", "source", "when", "formula", "ratio", "aggregate")
    return {
        **{key: getattr(row, key) for key in keys},
        "clip": row.clip(row.settings).kind,
        "needs": sorted(row.wanted()),
        "costs": list(row.costs),
        "own": dict(row.own),
        "settings": dict(row.settings),
        "meanings": {key: SETTINGS[key] for key in row.settings},
    }

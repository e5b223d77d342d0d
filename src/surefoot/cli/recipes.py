"""``surefoot recipes``: what can be run by name, and the algorithms a recipe may choose."""

from __future__ import annotations

from typing import Annotated

import typer

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
        keys = ("name", "summary", "source", "ratio", "aggregate")
        emit([{**{key: getattr(row, key) for key in keys}, "settings": dict(row.settings)} for row in rows])
        return
    table = new_table("", "algorithm", "what it does", "settings", "source")
    for row in rows:
        settings = ", ".join(f"{key} = {value}" for key, value in row.settings.items())
        table.add_row(row.name, row.summary, settings, row.source)
    show(table)

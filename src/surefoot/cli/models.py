"""``surefoot models``: which policies are known by name, and fetching one."""

from __future__ import annotations

from typing import Annotated

import typer

models = typer.Typer(help="Policies that are known by name.", rich_markup_mode=None)
_Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@models.callback(invoke_without_command=True)
def _list(context: typer.Context, json: _Json = False) -> None:
    """List the models that a recipe may name; a folder or a hub id works as well."""
    if context.invoked_subcommand is not None:
        if json:
            raise _misplaced()
        return
    from dataclasses import asdict

    from surefoot.cli.output import emit, new_table, show, size
    from surefoot.policy.models import list_models

    found = list_models()
    if json:
        emit([asdict(item) for item in found])
        return
    table = new_table("", "model", "pulled", "on disk", "download", "licence", "notes")
    for item in found:
        disk = "-" if item.size_bytes is None else size(item.size_bytes)
        table.add_row(
            item.name,
            "yes" if item.pulled else "no",
            disk,
            size(item.download_bytes),
            item.licence,
            item.notes,
        )
    show(table)


def _misplaced() -> Exception:
    from surefoot.core.errors import ConfigError

    return ConfigError("--json has no effect here; write it after the command: models pull NAME --json")


@models.command("pull")
def _pull(
    name: Annotated[str, typer.Argument(help="A model of `surefoot models`.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch again although it is there.")] = False,
    json: _Json = False,
) -> None:
    """Fetch a model into the cache and convert it."""
    from surefoot.cli.output import emit, say
    from surefoot.policy.models import pull

    folder = pull(name, force=force)
    if json:
        emit({"name": name, "path": str(folder)})
    else:
        say(f"{name}: {folder}")

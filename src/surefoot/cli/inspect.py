"""``surefoot report`` and ``surefoot query``: look into a run that exists."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def report(run: Annotated[Path, typer.Argument(help="A run folder.")], json: _Json = False) -> None:
    """Write report.html, one self-contained file, into the run's folder."""
    from surefoot.cli.output import emit, say
    from surefoot.report import write_report
    from surefoot.runs.directory import RunDirectory

    RunDirectory.open(run, writable=False)
    path = write_report(run)
    if json:
        emit({"report": str(path)})
    else:
        say(f"report: {path}")


def query(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    sql: Annotated[str, typer.Argument(help="SQL over trajectories, credit, metrics, timings, events.")],
    json: _Json = False,
) -> None:
    """Run SQL over a run's files, also while it is being written."""
    from surefoot.cli.output import emit, new_table, say, show
    from surefoot.runs.query import query as run_query

    rows = run_query(run, sql)
    if json:
        emit(rows)
        return
    if not rows:
        say("no rows")
        return
    table = new_table("", *rows[0])
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    show(table)

"""``surefoot compare``: the same policy of several runs, paired by task against the first run."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from surefoot.evaluation.statistics import Interval


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the first is the reference.")],
    policy: Annotated[str, typer.Option(help="Which policy of each run.")] = "final",
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Compare runs by success on the same held-out tasks, with paired intervals."""
    from surefoot.cli.output import emit
    from surefoot.core.errors import ConfigError

    if len(runs) < 2:
        raise ConfigError("compare needs at least two run folders")
    records = [_evaluation(run, policy) for run in runs]
    splits = {str(record["split"]) for record in records}
    if len(splits) > 1:
        raise ConfigError(f"the runs were evaluated on different splits: {', '.join(sorted(splits))}")
    rows = _rows(runs, records)
    if json:
        emit({"policy": policy, "split": splits.pop(), "reference": str(runs[0]), "rows": rows})
    else:
        _print(runs, rows, policy, splits.pop())


def _evaluation(run: Path, policy: str) -> dict[str, Any]:
    """The stored evaluation of one policy. Raises ConfigError when the run did not measure it."""
    from surefoot.core.errors import ConfigError, StorageError, nearest
    from surefoot.runs.directory import RunDirectory

    directory = RunDirectory.open(run, writable=False)
    file = directory.evaluation_of(policy)
    if not file.is_file():
        measured = [path.stem for path in file.parent.glob("[!.]*.json")]
        raise ConfigError(f"{run} has not measured policy {policy!r}; {nearest(policy, measured)}")
    try:
        return cast("dict[str, Any]", json_format.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} cannot be read: {error}") from error


def _rows(runs: list[Path], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each run and variant; ``difference`` is to the first run, None for that run itself."""
    from surefoot.core.errors import DataError
    from surefoot.evaluation.statistics import paired_difference
    from surefoot.evaluation.summary import policy_scores

    scores = [policy_scores(str(run), record).by_variant for run, record in zip(runs, records, strict=True)]
    rows: list[dict[str, Any]] = []
    for run, record, own in zip(runs, records, scores, strict=True):
        for variant, tasks in own.items():
            difference: Interval | None = None
            if own is not scores[0] and variant in scores[0]:
                try:
                    difference = paired_difference(tasks, scores[0][variant])
                except DataError as error:
                    raise DataError(f"{run} against {runs[0]}, variant {variant!r}: {error}") from error
            rows.append(
                {
                    "run": str(run),
                    "variant": variant,
                    "success": record["variants"][variant]["success"],
                    "difference": None if difference is None else asdict(difference),
                }
            )
    return rows


def _print(runs: list[Path], rows: list[dict[str, Any]], policy: str, split: str) -> None:
    from surefoot.cli.output import interval, new_table, show

    title = f"success of {policy!r} on {split}; differences to {runs[0]}, paired by task"
    table = new_table(title, "variant", "run", "success", "difference", numbers=("success", "difference"))
    for variant in dict.fromkeys(row["variant"] for row in rows):
        for row in rows:
            if row["variant"] == variant:
                other = "-" if row["difference"] is None else interval(row["difference"], signed=True)
                table.add_row(variant, row["run"], interval(row["success"]), other)
    show(table)

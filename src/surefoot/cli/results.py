"""Reads what a run left in its folder and sets it in tables. Must not run or change anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from surefoot.cli.output import duration, interval, new_table, say, show
from surefoot.core.errors import StorageError
from surefoot.economics import money

if TYPE_CHECKING:
    from rich.table import Table

Record = Mapping[str, Any]
_BASELINES = ("initial", "start")
_VERDICT_STYLE = {"learned": "bold green", "falsified": "bold red"}


@dataclass(frozen=True, slots=True)
class Results:
    """The stored outcome of a run. ``evaluation``: policy -> record; ``verdict`` is None before one."""

    path: Path
    evaluation: Record
    verdict: Record | None
    ledger: Record | None

    @classmethod
    def read(cls, path: Path) -> Results:
        """Raises StorageError when a file is damaged; a missing one is left out."""
        evaluation = _read(path / "evaluation.json") or {}
        return cls(path, evaluation, _read(path / "verdict.json"), _read(path / "ledger.json"))

    def to_json(self) -> dict[str, Any]:
        """Success by policy and variant, the verdict and the cost, as plain values."""
        total: Record = self.ledger["total"] if self.ledger else {}
        return {
            "run": str(self.path),
            "success": {
                policy: {variant: figures.get("success") for variant, figures in record["variants"].items()}
                for policy, record in self.evaluation.items()
            },
            "verdict": self.verdict,
            "cost": {key: total.get(key) for key in ("tokens", "wall_seconds", "usd")},
        }


def print_results(results: Results) -> None:
    """The tables of a finished (or stopped) run, its verdict and its cost."""
    if results.evaluation:
        show(success_table(results.evaluation))
    verdict = results.verdict
    if verdict is None:
        say("no verdict: the policies it needs were not all measured", style="bold")
    else:
        show(difference_table(verdict))
        say(str(verdict["sentence"]), style=_VERDICT_STYLE.get(str(verdict["outcome"]), "bold"))
        for note in verdict["notes"]:
            say(f"note: {note}")
    if results.ledger:
        total: Record = results.ledger["total"]
        say(
            f"cost: {int(total['tokens']):,} tokens, {duration(float(total['wall_seconds']))}, "
            f"{money(float(total['usd']))} ({results.ledger['basis']})"
        )


def success_table(evaluation: Record) -> Table:
    """Success of every policy on every variant, with its interval."""
    variants = list(dict.fromkeys(v for record in evaluation.values() for v in record["variants"]))
    first = next(iter(evaluation.values()))
    title = f"success on {first['split']}"
    table = new_table(title, "policy", *variants, numbers=variants)
    for policy, record in evaluation.items():
        table.add_row(policy, *(_success(record["variants"].get(variant)) for variant in variants))
    return table


def _success(figures: Record | None) -> str:
    if figures is None:
        return "-"
    return interval(figures["success"]) if "success" in figures else "unscored"


def difference_table(verdict: Record) -> Table:
    """The differences that the verdict rests on: final minus everything else."""
    wanted = [c for c in verdict["comparisons"] if str(c["name"]).startswith("final - ")]
    variants = list(dict.fromkeys(str(c["variant"]) for c in wanted))
    names = list(dict.fromkeys(str(c["name"]) for c in wanted))
    found = {(c["name"], c["variant"]): c["interval"] for c in wanted}
    title = f"differences in success, paired by task, {100 * float(verdict['level']):g}% intervals"
    table = new_table(title, "difference", *variants, numbers=variants)
    for name in names:
        cells = [found.get((name, variant)) for variant in variants]
        table.add_row(name, *("-" if cell is None else interval(cell, signed=True) for cell in cells))
    return table


def figures_table(title: str, variants: Record) -> Table:
    """All figures of one policy, a line a variant."""
    numbers = ("success", "pass@k", "pass^k", "turns", "tool calls", "tokens", "episodes", "unscored")
    table = new_table(title, "variant", *numbers, numbers=numbers)
    for variant, figures in variants.items():
        cells = [_last(figures, "pass_at_k"), _last(figures, "pass_hat_k")]
        cells += [
            f"{figures[key]:.1f}" if key in figures else "-"
            for key in ("turns", "tool_calls", "sampled_tokens")
        ]
        table.add_row(variant, _success(figures), *cells, str(figures["episodes"]), str(figures["unscored"]))
    return table


def _last(figures: Record, key: str) -> str:
    """The value at the largest k."""
    values = cast("Mapping[str, float]", figures.get(key, {}))
    if not values:
        return "-"
    k = max(values, key=int)
    return f"{values[k]:.3f} (k={k})"


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error

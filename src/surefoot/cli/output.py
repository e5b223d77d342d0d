"""What every command prints through: one JSON document or human text on stdout, errors on stderr.

Must not know any command. rich is imported inside functions, so that ``--help`` stays quick.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH_OF_A_FILE = 120


def console(*, error: bool = False) -> Console:
    """A console on stdout (stderr with ``error``) that shows text as it is, without markup."""
    from rich.console import Console

    terminal = (sys.stderr if error else sys.stdout).isatty()
    width = None if terminal else _WIDTH_OF_A_FILE
    return Console(stderr=error, width=width, highlight=False, markup=False, emoji=False)


def say(text: str = "", *, style: str | None = None) -> None:
    """One paragraph on stdout, never broken inside a path."""
    console().print(text, style=style, soft_wrap=True)


def show(table: Table) -> None:
    """A table on stdout."""
    console().print(table)


def complain(text: str) -> None:
    """An error on stderr; several lines stay several lines."""
    console(error=True).print(f"error: {text}", style="red", soft_wrap=True)


def emit(document: object) -> None:
    """One JSON document on stdout. Non-finite numbers become null, since JSON has none."""
    text = json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False, default=str)
    sys.stdout.write(text + "\n")


def new_table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in ``numbers`` are set flush right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def interval(record: Mapping[str, Any], *, signed: bool = False) -> str:
    """``0.625 [0.500, 0.740]`` of a stored interval."""
    sign = "+" if signed else ""
    estimate, low, high = (float(record[key]) for key in ("estimate", "low", "high"))
    return f"{estimate:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def duration(seconds: float) -> str:
    """``45 s``, ``3 min 05 s``, ``2 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float) -> str:
    """Bytes in the unit that keeps the number short."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("Sequence[object]", value)]
    return value

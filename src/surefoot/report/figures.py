"""Numbers as people read them: counts, shares, times, intervals. Must not know where they are from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MISSING = "–"


def number(value: Any) -> str:
    """Three significant digits; whole numbers with thousands separators; a dash when there is none."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return MISSING
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3g}"


def share(value: Any) -> str:
    """A proportion or return with three decimals."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return MISSING
    return f"{value:.3f}"


def interval(record: Mapping[str, Any], *, signed: bool = False) -> str:
    """``[low, high]``."""
    sign = "+" if signed else ""
    return f"[{record['low']:{sign}.3f}, {record['high']:{sign}.3f}]"


def duration(seconds: float) -> str:
    """Seconds as the two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def clip(text: str, limit: int) -> str:
    """``text``, cut at ``limit`` characters with a note of what is missing."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"

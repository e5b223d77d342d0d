"""What all benchmarks share: machine facts, ratios with intervals, and the JSON that is kept."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def ratio_interval(peer: list[float], ours: list[float], *, draws: int = 5000) -> tuple[float, float, float]:
    """Ratio of medians peer/ours with a 95% bootstrap interval over repeats (above 1: ours is better)."""
    rng = random.Random(0)
    ratios = sorted(
        statistics.median(rng.choices(peer, k=len(peer))) / statistics.median(rng.choices(ours, k=len(ours)))
        for _ in range(draws)
    )
    middle = statistics.median(peer) / statistics.median(ours)
    return middle, ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]


def paired_interval(peer: list[float], ours: list[float], *, draws: int = 5000) -> tuple[float, float, float]:
    """Median over rounds of peer/ours with a 95% bootstrap interval over rounds.

    For a machine whose speed drifts, where the two measurements of a round followed one another.
    """
    rng = random.Random(0)
    ratios = [one / other for one, other in zip(peer, ours, strict=True)]
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return statistics.median(ratios), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def machine() -> dict[str, Any]:
    """Processor, cores and load, so that a figure can be read later."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
        )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
    }


def keep(name: str, record: dict[str, Any]) -> Path:
    """Write ``benchmarks/results/NAME.json`` and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    command = " ".join(["python", *sys.argv])
    record = {"measure": name, "command": command, "date": date.today().isoformat(), **machine(), **record}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path

"""The ledger: what each trajectory and phase used in tokens, calls, seconds and money; and budgets.

It must not know what the work was for. It writes through the file functions that it is handed, since
it stands beside the room that owns the files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast, overload

from surefoot.core.errors import BudgetReached, ConfigError, StorageError
from surefoot.core.types import Cost
from surefoot.economics.prices import PriceTable

By = Literal["arm", "stage", "phase"]
SCHEMA_VERSION: Final = 1
_DURATION = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in "dhms"), re.ASCII)
_UNITS: Final = (86400.0, 3600.0, 60.0, 1.0)
_COUNTS: Final = tuple(field.name for field in dataclasses.fields(Cost) if field.name != "usd")


class Files(Protocol):
    """The durable file functions the ledger needs; the module ``surefoot.runs.files`` is one."""

    def append_json_lines(self, path: Path, records: Iterable[Mapping[str, Any]]) -> None:
        """Append lines with one fsync."""
        ...

    def read_json_lines(self, path: Path) -> list[dict[str, Any]]:
        """All whole lines; none when the file is missing."""
        ...

    def write_atomic(self, path: Path, data: bytes | str) -> None:
        """Replace a file at once."""
        ...


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over ledger entries. Token kinds are disjoint: ``cached_tokens`` is context read again.

    ``wall_seconds`` and ``cpu_seconds`` are those of phases; ``episode_seconds`` are those of
    trajectories, which overlap each other inside a phase. ``repeated_usd`` and
    ``repeated_wall_seconds`` are the parts of the sums that went into work done again after an
    interruption.
    """

    trajectories: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    observation_tokens: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    episode_seconds: float = 0.0
    usd: float = 0.0
    repeated_usd: float = 0.0
    repeated_wall_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that went through the policy once: prompt, observation and sampled. Budgets count these."""
        return self.prompt_tokens + self.observation_tokens + self.sampled_tokens

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, name) + getattr(other, name) for name in _TOTALS))


_TOTALS: Final = tuple(field.name for field in dataclasses.fields(Totals))


class Ledger:
    """The ledger of one run, kept in ``path`` (ledger.jsonl). Entries count at once and reach the disk
    at :meth:`flush`, once a step.

    Money: the seconds of phases and the tokens of trajectories at ``prices``, plus what the
    trajectories already paid (``Cost.usd``, such as a judge's fees). Phases must not overlap.
    """

    def __init__(self, path: Path, prices: PriceTable, files: Files) -> None:
        self._path = path
        self._prices = prices
        self._files = files
        self._pending: list[dict[str, Any]] = []
        self._sums: dict[tuple[str, str, str], Totals] = {}
        self._earlier: set[tuple[object, ...]] = set()

    @classmethod
    def load(cls, path: Path, prices: PriceTable, files: Files) -> Ledger:
        """A ledger that goes on from the lines in ``path``, at the prices they were written with.

        Work that is recorded again is counted again, since it was paid again, and marked
        ``repeated``. Raises StorageError for a line that is no ledger entry.
        """
        ledger = cls(path, prices, files)
        for number, line in enumerate(files.read_json_lines(path), 1):
            try:
                ledger._count(line)
                ledger._earlier.add(_key(line))
            except (KeyError, TypeError) as error:
                raise StorageError(f"{path} line {number} is no ledger entry: {error!r}") from error
        return ledger

    def record_trajectory(
        self,
        arm: str,
        stage: str,
        step: int,
        trajectory_id: str,
        cost: Cost,
        wall_seconds: float,
        *,
        phase: str = "rollout",
        model: str | None = None,
    ) -> None:
        """Record a finished episode. ``model`` picks its price when the table has several."""
        paid = self._prices.cost_of_tokens(
            cost.prompt_tokens + cost.observation_tokens, cost.cached_tokens, cost.sampled_tokens, model=model
        )
        self._record(
            {
                "entry": "trajectory",
                "arm": arm,
                "stage": stage,
                "phase": phase,
                "step": step,
                "id": trajectory_id,
                **{name: getattr(cost, name) for name in _COUNTS},
                "episode_seconds": _seconds("wall_seconds", wall_seconds),
                "usd": cost.usd + paid,
            }
        )

    def record_phase(
        self,
        arm: str,
        stage: str,
        step: int,
        phase: str,
        wall_seconds: float,
        cpu_seconds: float = 0.0,
        trained_tokens: int = 0,
    ) -> None:
        """Record a stretch of work: ``rollout``, ``update``, ``evaluation``, ``checkpoint``, ..."""
        self._record(
            {
                "entry": "phase",
                "arm": arm,
                "stage": stage,
                "phase": phase,
                "step": step,
                "trained_tokens": trained_tokens,
                "wall_seconds": _seconds("wall_seconds", wall_seconds),
                "cpu_seconds": _seconds("cpu_seconds", cpu_seconds),
                "usd": self._prices.cost_of_seconds(wall_seconds),
            }
        )

    @overload
    def totals(self, by: None = None) -> Totals: ...
    @overload
    def totals(self, by: By) -> dict[str, Totals]: ...
    def totals(self, by: By | None = None) -> Totals | dict[str, Totals]:
        """Sums over everything, or one sum for each arm, stage or phase, in order of first appearance."""
        if by is None:
            return sum(self._sums.values(), Totals())
        place = ("arm", "stage", "phase").index(by)
        sums: dict[str, Totals] = {}
        for key, totals in self._sums.items():
            sums[key[place]] = sums.get(key[place], Totals()) + totals
        return sums

    def flush(self) -> None:
        """Put what was recorded since the last flush on disk, with one fsync. Raises StorageError."""
        self._files.append_json_lines(self._path, self._pending)
        self._pending = []

    def write_summary(self, path: Path) -> None:
        """Write the sums as JSON (ledger.json), with what the money rests on."""
        summary = {
            "schema_version": SCHEMA_VERSION,
            "prices": self._prices.model_dump(mode="json"),
            "basis": self._prices.basis(),
            "total": _plain(self.totals()),
            **{f"by_{by}": {key: _plain(sums) for key, sums in self.totals(by).items()} for by in _BY},
        }
        self._files.write_atomic(path, json.dumps(summary, indent=2) + "\n")

    def _record(self, line: dict[str, Any]) -> None:
        line["repeated"] = _key(line) in self._earlier
        self._count(line)
        self._pending.append(line)

    def _count(self, line: Mapping[str, Any]) -> None:
        counted = {name: line[name] for name in _TOTALS if name in line}
        entry = Totals(**counted, trajectories=int(line["entry"] == "trajectory"))
        if line["repeated"]:
            entry = dataclasses.replace(
                entry, repeated_usd=entry.usd, repeated_wall_seconds=entry.wall_seconds
            )
        key = (line["arm"], line["stage"], line["phase"])
        self._sums[key] = self._sums.get(key, Totals()) + entry


_BY: Final[tuple[By, ...]] = ("arm", "stage", "phase")


def _key(line: Mapping[str, Any]) -> tuple[object, ...]:
    return (line["entry"], line["arm"], line["stage"], line["phase"], line["step"], line.get("id"))


def _plain(totals: Totals) -> dict[str, float]:
    return {**dataclasses.asdict(totals), "tokens": totals.tokens}


def _seconds(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} is {value}; it must be a finite number of seconds >= 0")
    return value


def parse_duration(text: str) -> float:
    """Seconds of ``2h``, ``90m``, ``45s``, ``1h30m``, ``1d``; units go from large to small.

    Raises ConfigError for anything else, and for 0.
    """
    match = _DURATION.fullmatch(text.strip())
    groups = cast("tuple[str | None, ...]", match.groups() if match else ())
    seconds = sum(float(part) * unit for part, unit in zip(groups, _UNITS, strict=False) if part)
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ConfigError(f"duration is {text!r}; write it like 2h, 90m, 45s or 1h30m, and more than 0")
    return seconds


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a run; None is no limit. ``tokens`` counts :attr:`Totals.tokens`, ``wall_seconds`` the
    seconds of phases over all sessions of the run.
    """

    tokens: int | None = None
    usd: float | None = None
    wall_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, limit in self._limits():
            if not (limit > 0 and math.isfinite(limit)):
                raise ConfigError(f"budget.{name} is {limit}; it must be more than 0, or left out")

    def check(self, totals: Totals) -> None:
        """Raise BudgetReached, naming the limit and what was used, once a limit is used up."""
        for name, limit in self._limits():
            used = getattr(totals, name)
            if used >= limit:
                key, _, unit = name.partition("_")  # as the recipe names it
                amounts = f"{_shown(used)} of {_shown(limit)} {unit}".rstrip()
                raise BudgetReached(f"budget.{key} is used up: {amounts}")

    def remaining(self, totals: Totals) -> dict[str, float]:
        """What is left under each limit that is set, never below 0."""
        return {name: max(0, limit - getattr(totals, name)) for name, limit in self._limits()}

    def _limits(self) -> list[tuple[str, float]]:
        limits = (("tokens", self.tokens), ("usd", self.usd), ("wall_seconds", self.wall_seconds))
        return [(name, limit) for name, limit in limits if limit is not None]


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) or number >= 1000 else f"{number:.4g}"

"""Everything a run folder says, read once, with whatever is missing or damaged named instead of raised.

Must not know how any of it is shown.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from surefoot.core.errors import StorageError
from surefoot.core.types import Group
from surefoot.runs.directory import Manifest, RunDirectory
from surefoot.runs.files import read_json_lines
from surefoot.runs.store import CreditRow, TrajectoryStore

Record = dict[str, Any]
BASE = "base"
TREATMENT = "treatment"
_POLICIES = ("initial", "start", "final")
_LEARNING = ("rl", "preference")


@dataclass
class Facts:
    """What is known of a run. ``problems`` lists files that could not be read, and why."""

    run: RunDirectory
    config: Record
    config_text: str
    metrics: list[Record]
    events: list[Record]
    ledger: list[Record]
    ledger_summary: Record | None
    verdict: Record | None
    evaluations: dict[str, Record]
    units: list[str]
    journals: dict[str, int]
    problems: list[str] = field(default_factory=list[str])

    @property
    def manifest(self) -> Manifest:
        """Versions, machine, seed."""
        return self.run.manifest

    @property
    def name(self) -> str:
        """The run folder's name."""
        return self.run.path.name

    @property
    def arms(self) -> list[str]:
        """Arms with steps after the cold start: the treatment first, then controls in their order."""
        found = dict.fromkeys(line["arm"] for line in self.metrics if line.get("stage") in _LEARNING)
        return in_order(found, (TREATMENT, *self.controls))

    @property
    def controls(self) -> list[str]:
        """Control arms that the settings ask for."""
        return [str(arm) for arm in self.config.get("controls", {}).get("arms", [])]

    @property
    def policies(self) -> list[str]:
        """Measured policies: initial, start, final, then controls."""
        return in_order(self.evaluations, (*_POLICIES, *self.controls))

    @property
    def variants(self) -> list[str]:
        """Every variant that some policy was measured on, ``base`` first."""
        found = dict.fromkeys(v for record in self.evaluations.values() for v in record["variants"])
        return in_order(found, (BASE,))

    @property
    def stages(self) -> list[Record]:
        """The stages of the settings."""
        return [stage for stage in self.config.get("stage", []) if isinstance(stage, dict)]

    @property
    def rl_stages(self) -> list[Record]:
        """The stages after the cold start, as ``stage_number`` of the metrics counts them."""
        return [stage for stage in self.stages if stage.get("kind") in _LEARNING]

    def steps(self, arm: str, stages: Sequence[str] = _LEARNING) -> list[Record]:
        """Metrics of an arm's steps of these kinds, in order."""
        return [line for line in self.metrics if line.get("arm") == arm and line.get("stage") in stages]

    def groups(self, unit: str) -> list[Group]:
        """The stored groups of a unit; none, and a problem noted, when they cannot be read."""
        try:
            return TrajectoryStore(self.run).read(unit)
        except StorageError as error:
            self.problems.append(str(error))
            return []

    def credit(self, unit: str) -> dict[str, CreditRow]:
        """What each trajectory of a unit was trained with, by id; empty where nothing was trained."""
        if not (self.run.credit / f"{unit}.parquet").is_file():
            return {}
        try:
            return {row.trajectory_id: row for row in TrajectoryStore(self.run).read_credit(unit)}
        except StorageError as error:
            self.problems.append(str(error))
            return {}


def read_facts(path: Path) -> Facts:
    """Read a run, finished or not. Raises ConfigError when there is none, StorageError for its manifest."""
    run = RunDirectory.open(path, writable=False)
    problems: list[str] = []
    text = _text(run.config, problems) or ""
    store = TrajectoryStore(run)
    return Facts(
        run=run,
        config=_toml(run.config, text, problems),
        config_text=text,
        metrics=[line for line in _lines(run.metrics, problems) if {"arm", "step"} <= line.keys()],
        events=_lines(run.events, problems),
        ledger=[line for line in _lines(run.ledger_lines, problems) if {"arm", "phase"} <= line.keys()],
        ledger_summary=_json(run.ledger, problems),
        verdict=_json(run.verdict, problems),
        evaluations=_evaluations(run, problems),
        units=store.names(),
        journals={name: _count(run.trajectories / f"{name}.journal.jsonl") for name in store.journals()},
        problems=problems,
    )


def in_order(names: Iterable[str], first: Sequence[str]) -> list[str]:
    """Distinct ``names``: those of ``first`` in its order, then the others by name."""
    found = set(names)
    return [name for name in dict.fromkeys(first) if name in found] + sorted(found - set(first))


def _evaluations(run: RunDirectory, problems: list[str]) -> dict[str, Record]:
    """Records by policy: one file each as soon as it is measured, else the summary of the whole run."""
    summary = _json(run.evaluation, problems) or {}
    single = {path.stem: _json(path, problems) for path in (run.path / "evaluations").glob("[!.]*.json")}
    records = {**summary, **{name: record for name, record in single.items() if record is not None}}
    whole = {name: r for name, r in records.items() if isinstance(r, dict) and "variants" in r}
    problems.extend(f"evaluation of {name} holds no variants" for name in records.keys() - whole.keys())
    return whole


def _count(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0  # the unit was finished between the listing and now
    except OSError:
        return 0


def _text(path: Path, problems: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None


def _toml(path: Path, text: str, problems: list[str]) -> Record:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{path.name} is not TOML: {error}")
        return {}


def _json(path: Path, problems: list[str]) -> Record | None:
    text = _text(path, problems)
    if text is None:
        return None
    try:
        value: object = json.loads(text)
    except ValueError as error:
        problems.append(f"{path.name} is not JSON: {error}")
        return None
    if not isinstance(value, Mapping):
        problems.append(f"{path.name} holds no JSON object")
        return None
    return cast("Record", value)


def _lines(path: Path, problems: list[str]) -> list[Record]:
    try:
        return read_json_lines(path)
    except StorageError as error:
        problems.append(str(error))
        return []

"""The folder of one run: where each file stands, who may write it, and what made it.

This module must not know what the files say, except the manifest.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from surefoot.core.errors import ConfigError, StorageError
from surefoot.runs.files import TEMPORARY_SUFFIX, append_json, sync_directory, write_atomic

SCHEMA_VERSION: Final = 1
_PACKAGES: Final = (
    "numpy", "pyarrow", "pydantic", "torch", "transformers", "tokenizers", "safetensors", "renderers",
    "peft", "vllm", "ray", "duckdb",
)  # fmt: skip
_LOCK = "run.lock"
_SUBDIRECTORIES = ("trajectories", "credit", "checkpoints", "evaluations")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_held: set[int] = set()


def _release_in_child() -> None:
    # A forked worker shares the lock; one that outlived a killed run would block its resume.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_release_in_child)


class Manifest(BaseModel):
    """What made a run: versions, machine, seed, hashes. Written once, at creation.

    ``config_hash`` is the SHA-256 of config.toml, ``created`` is UTC in ISO 8601, ``packages`` maps
    an installed distribution to its version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    surefoot: str
    python: str
    platform: str
    cpus: int
    packages: dict[str, str]
    seed: int
    recipe: str
    created: str
    config_hash: str
    model_hash: str | None = None

    @classmethod
    def current(cls, *, recipe: str, seed: int, config_toml: str, model_hash: str | None = None) -> Manifest:
        """The manifest of a run that starts now, in this process."""
        return cls(
            surefoot=_versions(("surefoot",)).get("surefoot", "not installed"),
            python=platform.python_version(),
            platform=platform.platform(),
            cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            packages=_versions(_PACKAGES),
            seed=seed,
            recipe=recipe,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config_hash=config_hash(config_toml),
            model_hash=model_hash,
        )


def config_hash(config_toml: str) -> str:
    """SHA-256 of a resolved configuration, in hex."""
    return hashlib.sha256(config_toml.encode()).hexdigest()


def check_name(name: str, what: str) -> str:
    """``name`` when it is safe as a file name; ConfigError otherwise."""
    if not _NAME.fullmatch(name) or name.endswith(TEMPORARY_SUFFIX):
        raise ConfigError(
            f"{what} is {name!r}; use letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    return name


class RunDirectory:
    """One run's folder. Made by :meth:`create` or :meth:`open`; a context manager that drops the lock."""

    def __init__(self, path: Path, manifest: Manifest, lock: int | None) -> None:
        self.path = path
        self.manifest = manifest
        self._lock = lock

    @classmethod
    def create(cls, path: Path, *, config_toml: str, manifest: Manifest) -> RunDirectory:
        """Make the folder and lock it. Raises ConfigError when the place is taken or locked.

        The manifest is written last: a folder without one was never a run, and is made anew.
        """
        path = path.resolve()
        if manifest.config_hash != config_hash(config_toml):
            raise ConfigError("Manifest.config_hash is not the hash of config_toml; use Manifest.current")
        _make_empty(path)
        lock = _acquire(path)
        try:
            if (path / "manifest.json").exists():
                raise _taken(path)  # another process was faster
            write_atomic(path / "config.toml", config_toml)
            write_atomic(path / "manifest.json", manifest.model_dump_json(indent=2) + "\n")
        except BaseException:
            _release(lock)
            raise
        return cls(path, manifest, lock)

    @classmethod
    def open(cls, path: Path, *, writable: bool = True) -> RunDirectory:
        """Open a run: ``writable`` takes the lock (resume); reports and views pass False.

        Raises ConfigError when there is no run or another process writes it, StorageError when the
        manifest is damaged or of a foreign version, or config.toml was changed since the start.
        """
        path = path.resolve()
        if not (path / "manifest.json").is_file():
            raise ConfigError(f"{path} holds no run (no manifest.json)")
        lock = _acquire(path) if writable else None
        try:
            run = cls(path, _read_manifest(path / "manifest.json"), lock)
            if writable:
                run._check_config()
                run._sweep()
        except BaseException:
            _release(lock)
            raise
        return run

    def close(self) -> None:
        """Drop the lock. The run can then be opened by another process."""
        _release(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def writable(self) -> bool:
        """True while this object holds the run's lock."""
        return self._lock in _held

    def require_writable(self) -> None:
        """Raise StorageError unless this object holds the lock."""
        if not self.writable:
            raise StorageError(f"{self.path} was opened for reading; open it with writable=True to change it")

    def event(self, kind: str, **fields: Any) -> None:
        """Append ``{"kind": kind, **fields}`` to events.jsonl (errors, retries, refusals, monitors)."""
        self.require_writable()
        append_json(self.events, {"kind": kind, **fields})

    @property
    def config_toml(self) -> str:
        """The resolved configuration, as text."""
        try:
            return self.config.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{self.config} cannot be read: {error}") from error

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One line a step; holds no times, so that it repeats bit for bit."""
        return self.path / "metrics.jsonl"

    @property
    def timings(self) -> Path:
        """Seconds of each phase of each step."""
        return self.path / "timings.jsonl"

    @property
    def events(self) -> Path:
        """Errors, retries, gate refusals, monitors."""
        return self.path / "events.jsonl"

    @property
    def trajectories(self) -> Path:
        """Folder of token-exact parquet files and of the journals of work in progress."""
        return self.path / "trajectories"

    @property
    def credit(self) -> Path:
        """Folder of what each trajectory was trained with."""
        return self.path / "credit"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, one folder an arm."""
        return self.path / "checkpoints"

    def checkpoint(self, arm: str, step: int) -> Path:
        """Folder of the checkpoint of ``arm`` after ``step`` updates."""
        if step < 0:
            raise ConfigError(f"checkpoint step is {step}; it must be >= 0")
        return self.checkpoints / check_name(arm, "arm") / f"step-{step:06d}"

    @property
    def reward_model(self) -> Path:
        """Folder of the reward model that the run trained, if it has such a stage."""
        return self.path / "reward_model"

    @property
    def evaluation(self) -> Path:
        """The evaluation's summary."""
        return self.path / "evaluation.json"

    def evaluation_of(self, policy: str) -> Path:
        """The scores of one policy."""
        return self.path / "evaluations" / f"{check_name(policy, 'policy')}.json"

    @property
    def controls(self) -> Path:
        """The control arms' results."""
        return self.path / "controls.json"

    @property
    def verdict(self) -> Path:
        """What may be claimed."""
        return self.path / "verdict.json"

    @property
    def ledger(self) -> Path:
        """The ledger's summary."""
        return self.path / "ledger.json"

    @property
    def ledger_lines(self) -> Path:
        """The ledger itself, one line an entry."""
        return self.path / "ledger.jsonl"

    @property
    def report(self) -> Path:
        """The self-contained report."""
        return self.path / "report.html"

    def _check_config(self) -> None:
        if config_hash(self.config_toml) != self.manifest.config_hash:
            raise StorageError(
                f"{self.config} was changed after the run began; restore it or start a new run"
            )

    def _sweep(self) -> None:
        """Delete what a killed write left behind; the lock makes sure that no one is writing it."""
        for folder in (self.path, *(self.path / name for name in _SUBDIRECTORIES)):
            for leftover in folder.glob(f".*{TEMPORARY_SUFFIX}"):
                leftover.unlink(missing_ok=True)


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _taken(path: Path) -> ConfigError:
    return ConfigError(f"{path} already holds a run; continue it with --resume or choose another --out")


def _make_empty(path: Path) -> None:
    """Make the folder and its parts; refuse one that holds files that are not a run's."""
    try:
        if (path / "manifest.json").exists():
            raise _taken(path)
        if path.is_dir() and not (path / _LOCK).exists() and any(path.iterdir()):
            raise ConfigError(f"{path} is not empty and holds no run; choose another --out")
        path.mkdir(parents=True, exist_ok=True)
        # The lock file marks the folder as ours, so it comes before anything else in it.
        (path / _LOCK).touch()
        for name in _SUBDIRECTORIES:
            (path / name).mkdir(exist_ok=True)
        sync_directory(path)
    except FileExistsError as error:
        raise ConfigError(f"{path} is a file; --out must name a folder") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be made: {error.strerror or error}") from error


def _acquire(path: Path) -> int:
    try:
        handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StorageError(f"{path / _LOCK} cannot be opened: {error.strerror or error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        owner = os.pread(handle, 32, 0).decode(errors="replace") or "unknown"
        os.close(handle)
        raise ConfigError(f"{path} is being written by process {owner}; wait for it or stop it") from error
    except OSError as error:
        os.close(handle)
        raise StorageError(f"{path} cannot be locked: {error.strerror or error}") from error
    _held.add(handle)
    return handle


def _release(handle: int | None) -> None:
    if handle is not None and handle in _held:
        _held.discard(handle)
        os.close(handle)


def _read_manifest(path: Path) -> Manifest:
    try:
        manifest = path.read_bytes()
        found = _VersionOnly.model_validate_json(manifest).schema_version
        if found != SCHEMA_VERSION:
            raise StorageError(
                f"{path}: schema_version is {found}; this version of Surefoot reads {SCHEMA_VERSION}"
            )
        return Manifest.model_validate_json(manifest)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise StorageError(f"{path} is damaged: {first['msg']} at {first['loc']}") from error


class _VersionOnly(BaseModel):
    schema_version: int

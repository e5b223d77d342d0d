"""What callers of the sandbox say and get: limits, profiles, results. Starts no process."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Literal, get_args

from surefoot.core.errors import ConfigError, EnvironmentFault

Network = Literal["none", "loopback"]
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Tier(StrEnum):
    """How code is held, from strongest to weakest."""

    FULL = "full"  # user, mount, process, network and IPC namespaces, Landlock, seccomp, limits
    UID = "uid"  # from root: a user per execution, Landlock, seccomp, limits
    LANDLOCK = "landlock"  # the caller's own user, Landlock, seccomp, limits, no new processes
    NONE = "none"  # limits only: for code that is trusted
    REMOTE = "remote"  # one of these, inside a container elsewhere; see ``Probe.inside``


class SandboxFault(EnvironmentFault):
    """The sandbox itself failed; what ran in it has no result. Never caused by the code's behaviour."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one execution, or of a session and its forks together.

    ``seconds``: wall time of an execution or of one turn of a session. ``cpu_seconds``: CPU time of each
    process (whole seconds, rounded up), over the whole life of a session. ``memory_mb``: data of each
    process beyond what the warm interpreter holds, and of all its processes together where the tier can.
    ``files_mb``: what all files written may take (in the lower tiers: each file). ``output_bytes``: of
    stdout and of stderr, each. ``processes``: processes and threads at one time.
    """

    seconds: float = 10.0
    memory_mb: int = 512
    output_bytes: int = 65_536
    processes: int = 32
    files_mb: int = 64
    cpu_seconds: float = 30.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value: object = getattr(self, item.name)
            whole = item.name not in ("seconds", "cpu_seconds")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                kind = "a whole number" if whole else "a number"
                raise ConfigError(f"Limits.{item.name} must be {kind}, got {value!r}")
            if not (math.isfinite(value) and 0 < value < 1 << 40):
                raise ConfigError(f"Limits.{item.name} must be finite and above 0, got {value}")


@dataclass(frozen=True, slots=True)
class Profile:
    """What code finds in the sandbox.

    ``preload``: modules imported once and shared warm by all executions; ``packages``: distributions that
    can be imported but are not loaded. Both bring what they depend on, and nothing else of the caller's
    environment. ``network``: ``loopback`` gives each execution a network of its own that ends at itself.
    ``tree``: a folder shown as the working folder; what is written to it is seen by that execution only.
    """

    name: str = "bare"
    preload: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    network: Network = "none"
    tree: Path | None = None

    def __post_init__(self) -> None:
        if self.network not in get_args(Network):
            raise ConfigError(f"Profile.network must be 'none' or 'loopback', got {self.network!r}")
        for module in self.preload:
            if not _MODULE.fullmatch(module):
                raise ConfigError(f"Profile.preload holds {module!r}, which is not the name of a module")
        if self.tree is not None and not self.tree.is_dir():
            raise ConfigError(f"Profile.tree must be a folder, got {self.tree}")


BARE = Profile()
NUMPY = Profile("numpy", preload=("numpy",))
SCIENCE = Profile("science", preload=("numpy", "sympy"))


class Status(StrEnum):
    """How an execution ended. ``OK``, ``ERROR`` and ``MEMORY`` can be claimed by the code itself."""

    OK = "ok"
    ERROR = "error"  # an exception, or an exit code other than 0
    TIMEOUT = "timeout"
    MEMORY = "memory"
    KILLED = "killed"  # by a signal: a crash, or a broken rule
    OUTPUT_LIMIT = "output_limit"


@dataclass(frozen=True, slots=True)
class Result:
    """What an execution left. Everything but ``status`` of a stopped one is data from the agent's code.

    ``value``: repr of the last expression, "" if there was none. ``exit_code``: as of a process, negative
    for a signal. ``seconds``: wall time inside. ``truncated``: output was cut at its limit.
    """

    stdout: str
    stderr: str
    exit_code: int
    status: Status
    value: str
    seconds: float
    truncated: bool


@dataclass(frozen=True, slots=True)
class Check:
    """One attack that was really tried in a tier: whether it was stopped, and what was seen."""

    name: str
    stopped: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """What this machine can hold. ``tier`` is the strongest whose required checks were all stopped.

    ``checks`` holds those of the chosen tier; ``refused`` says of each stronger tier why it is not it.
    In tier ``remote`` both were found in the container, whose own tier is ``inside``.
    """

    tier: Tier
    checks: tuple[Check, ...]
    refused: Mapping[str, str] = field(default_factory=lambda: {})
    inside: Tier | None = None

    @property
    def gaps(self) -> tuple[str, ...]:
        """Names of the attacks that this tier does not stop."""
        return tuple(check.name for check in self.checks if not check.stopped)

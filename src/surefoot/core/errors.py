"""Every error Surefoot raises on purpose, each with the exit code the command line gives it.

This module knows no other: it must not import anything of the package.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SurefootError(Exception):
    """Base of all deliberate errors. ``exit_code`` is what the command line ends with."""

    exit_code = 2


class ConfigError(SurefootError):
    """A setting is unknown, of the wrong type, out of range or without effect."""


class DataError(SurefootError):
    """Data breaks a promise of its type: a wrong shape, a non-finite number, a corrupt file."""


class ModelError(SurefootError):
    """A model cannot be found, fetched, read or served."""


class EnvironmentFault(SurefootError):
    """An environment broke its contract: raised, hung, or was stepped after its end."""


class RewardError(SurefootError):
    """A reward function broke its contract in a way that cannot be recorded as ``Unscored``."""


class StorageError(SurefootError):
    """A run's files cannot be written or read (full disk, corrupt checkpoint, foreign version)."""


class SignalError(SurefootError):
    """Training cannot go on: too many unscored episodes, or no group carries a signal."""

    exit_code = 1


class BudgetReached(SurefootError):
    """A budget is used up; the run stops cleanly with what it has."""

    exit_code = 3


def nearest(name: str, valid: Iterable[str]) -> str:
    """A phrase that names the closest valid value, or all of them when none is close."""
    options = sorted(valid)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return "valid: " + ", ".join(options) if options else "nothing is valid here"

"""Every error Surefoot raises on purpose, each with the exit code the command line gives it.

This module knows no other: it must not import anything of the package.
"""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable
from pathlib import Path

_PACKAGE, _STANDARD = Path(__file__).parents[1], Path(os.__file__).parent


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


def describe(error: BaseException) -> str:
    """``ValueError: no price (shop.py:31)``: what was raised, and the innermost line of a user's own file.

    Without a place where no such file takes part: in a library's, the standard library's or this package's.
    """
    text, place = f"{type(error).__name__}: {error}", _users_line(error)
    return f"{text} ({place})" if place else text


def _users_line(error: BaseException) -> str:
    """FILE:LINE of the exception, or of the one that it was raised for; "" where there is none."""
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for each in (error, behind):
        frames = [] if each is None else list(traceback.walk_tb(each.__traceback__))
        for frame, line in reversed(frames):
            file = Path(frame.f_code.co_filename)
            if _is_users(file):
                return f"{file.name}:{line}"
    return ""


def _is_users(file: Path) -> bool:
    """Generated code has a name like ``<string>``; installed packages lie in a folder of theirs."""
    foreign = file.is_relative_to(_PACKAGE) or file.is_relative_to(_STANDARD)
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return not (foreign or installed or file.name.startswith("<"))

"""Checks of options and shapes that several rooms share; each failure is a clear error naming the field.

They read plain values and anything with a ``shape``, so that this module imports no array library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from surefoot.core.errors import ConfigError, nearest


class Shaped(Protocol):
    """Anything with a shape, such as an array or a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...


def require_option(field: str, value: str, valid: Iterable[str]) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of ``valid``."""
    options = tuple(valid)
    if value not in options:
        raise ConfigError(f"{field} is {value!r}; {nearest(value, options)}")


def require_finite(field: str, value: float) -> None:
    """Raise ``ConfigError`` unless ``value`` is a finite number."""
    if not math.isfinite(value):
        raise ConfigError(f"{field} must be a finite number, got {value}")


def require_positive(field: str, value: float) -> None:
    """Raise ``ConfigError`` unless ``value`` is a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{field} must be a positive number, got {value}")


def require_fraction(field: str, value: float) -> None:
    """Raise ``ConfigError`` unless 0 <= ``value`` <= 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{field} must be a number from 0 to 1, got {value}")


def shape_of(array: Shaped) -> list[int]:
    """The shape as a list, the form that error messages show."""
    return list(array.shape)

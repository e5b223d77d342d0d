"""Finds the library of a backend, or says what to install."""

from __future__ import annotations

import importlib
from typing import Any

from surefoot.core.errors import ConfigError

# Backend -> the package that speaks with it.
PACKAGES = {"docker": "docker", "kubernetes": "kubernetes", "e2b": "e2b"}


def library(name: str, module: str = "") -> Any:
    """The package of a backend, or a module of it. Raises ConfigError that names the extra."""
    package = PACKAGES[name]
    try:
        return importlib.import_module(f"{package}.{module}" if module else package)
    except ImportError as error:
        raise ConfigError(
            f"the {name} sandbox needs the package {package!r}: pip install 'surefoot[remote]' ({error})"
        ) from error

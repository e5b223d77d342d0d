"""Finds an object by ``module:name`` or ``path/to/file.py[:name]``.

A file is imported once per process under a name made from its path, so all callers share one class.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from surefoot.core.errors import ConfigError, describe, nearest


def load_module(reference: str) -> ModuleType:
    """Import a dotted module or a Python file. Raises ConfigError that says what went wrong."""
    if not (reference.endswith(".py") or "/" in reference):
        try:
            return importlib.import_module(reference)
        except ImportError as error:
            raise ConfigError(f"module {reference!r} cannot be imported: {error}") from error
    path = Path(reference).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"file {reference!r} does not exist")
    name = f"surefoot_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"file {reference!r} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's; whatever it raises is shown with its place
        del sys.modules[name]
        raise ConfigError(f"file {reference!r} fails to import: {describe(error)}") from error
    return module


def load_target(reference: str) -> tuple[ModuleType, object | None]:
    """(module, object) of ``module:name``; the object is None when no name is given."""
    head, colon, name = reference.rpartition(":")
    if not colon:
        return load_module(reference), None
    module = load_module(head)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f"{head!r} has no {name!r}; {nearest(name, public)}")
    return module, getattr(module, name)

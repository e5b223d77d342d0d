"""Finds recipes by name or path. Must not know what the settings mean: it reads names and descriptions."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from surefoot.core.errors import ConfigError, nearest


class RecipeInfo(NamedTuple):
    """One recipe that ships with Surefoot."""

    name: str
    description: str
    path: Path


def find_recipe(reference: str) -> Path:
    """The file of a built-in recipe's name or of a path to a .toml file.

    Raises ConfigError that names the nearest built-in, or the file that does not exist.
    """
    path = Path(reference).expanduser()
    if reference.endswith(".toml") or len(path.parts) > 1:
        if not path.is_file():
            raise ConfigError(f"recipe file {reference!r} does not exist")
        return path
    builtin = {file.stem: file for file in _files()}
    if reference not in builtin:
        raise ConfigError(
            f"recipe {reference!r} does not exist; {nearest(reference, builtin)} "
            "(your own: path/to/file.toml)"
        )
    return builtin[reference]


def list_recipes() -> list[RecipeInfo]:
    """Built-in recipes by name. Raises ConfigError where one is not TOML."""
    return [RecipeInfo(file.stem, _description(file), file) for file in _files()]


def _files() -> list[Path]:
    """A wheel carries them inside the package; an editable install has them at the repository's top."""
    package = Path(__file__).resolve().parent
    for folder in (package / "builtin", package.parents[2] / "recipes"):
        if found := sorted(folder.glob("*.toml")):
            return found
    return []


def _description(file: Path) -> str:
    try:
        return str(tomllib.loads(file.read_text(encoding="utf-8")).get("description", ""))
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe {file} cannot be read: {error}") from error

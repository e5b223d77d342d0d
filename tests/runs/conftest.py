"""Fixtures: a new, locked run folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.runs import Manifest, RunDirectory

CONFIG = 'seed = 7\nname = "ü"\n'


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    manifest = Manifest.current(recipe="test", seed=7, config_toml=CONFIG)
    with RunDirectory.create(tmp_path / "run", config_toml=CONFIG, manifest=manifest) as run:
        yield run

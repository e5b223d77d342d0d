"""A tiny recipe, and one finished run of it that several tests read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

TINY = """
name = "tiny"
description = "As small as a run can be."

[model]
name = "scratch"

[environment]
name = "drawers"

[sampling]
max_tokens = 8

[[stage]]
kind = "sft"
episodes = 2
batch_size = 2

[[stage]]
kind = "rl"
algorithm = "grpo"
group_size = 2
tasks_per_step = 1
steps = 1

[evaluation]
tasks = 3
samples = 1
variants = ["scale"]

[controls]
arms = ["permuted"]
"""

Run = Callable[..., Result]


def call(*arguments: str | Path) -> Result:
    """Run the command in this process."""
    from surefoot.cli.main import app

    return CliRunner().invoke(app, [str(item) for item in arguments])


def document(result: Result) -> Any:
    """stdout as the one JSON document that it must be."""
    return json.loads(result.stdout)


@pytest.fixture
def run_cli() -> Run:
    return call


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """(run folder, what the command printed)."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.toml").write_text(TINY)
    out = folder / "run"
    return out, call("run", folder / "tiny.toml", "--out", out, "--no-report")

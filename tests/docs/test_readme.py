"""The documents say what the code does: examples run, commands and files exist, links resolve."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from surefoot.audit.checks import Report, check_environment, check_reward
from surefoot.core.loading import load_target
from surefoot.envs.loading import load_environment
from surefoot.rewards.base import Reward
from surefoot.runs.directory import RunDirectory
from surefoot.training.config import RunConfig, parse_config
from surefoot.training.run import check_config, start_run

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`(surefoot [^`]+)`")
_GROUPS = ("check", "models")


def _blocks(text: str, language: str) -> list[str]:
    return [body for kind, body in _BLOCK.findall(text) if kind == language]


def _python(holding: str) -> str:
    found = [body for body in _blocks(README, "python") if holding in body]
    assert len(found) == 1, f"README has {len(found)} Python blocks with {holding!r}"
    return found[0]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the README's files, as a reader would save them."""
    (tmp_path / "shop.py").write_text(_python("class Shop("), encoding="utf-8")
    (tmp_path / "bare_number.py").write_text(_python("def bare_number("), encoding="utf-8")
    (tmp_path / "shop.toml").write_text(_blocks(README, "toml")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _failures(report: Report) -> list[str]:
    return [f"{item.name}: {item.detail}" for item in report.items if item.ok is False]


def test_first_two_commands_are_demo_and_test() -> None:
    commands = [
        line.partition("#")[0].strip()
        for line in _blocks(README, "sh")[0].splitlines()
        if not line.startswith("git clone")
    ]
    assert commands == ["make demo", "make test"]


def test_readme_environment_is_short_and_passes_every_check(example: Path) -> None:
    assert len(_python("class Shop(").splitlines()) <= 40
    cls = load_environment("shop.py")
    report = check_environment(cls)
    assert _failures(report) == []
    assert all(item.ok for item in report.items), "an example must leave no check out"
    for item in cls.rewards:
        assert _failures(check_reward(item, cls)) == []


def test_readme_reward_is_short_and_passes_its_check(example: Path) -> None:
    assert len(_python("def bare_number(").splitlines()) <= 10
    found = load_target("bare_number.py:bare_number")[1]
    assert isinstance(found, Reward)
    assert _failures(check_reward(found, load_environment("shop.py"))) == []


def test_every_recipe_in_a_document_is_a_valid_recipe(example: Path) -> None:
    recipes = [
        (path.name, body) for path in DOCUMENTS for body in _blocks(path.read_text(encoding="utf-8"), "toml")
    ]
    assert recipes
    for name, body in recipes:
        check_config(parse_config(body, source=name))


def test_settings_shown_on_the_command_line_exist() -> None:
    recipe = _blocks(README, "toml")[0]
    settings = re.findall(r"--set (\S+=\S+)", README)
    assert settings
    parse_config(recipe, source="README", overrides=settings)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_resolve(document: Path) -> None:
    for target in _LINK.findall(document.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            path = target.partition("#")[0]
            assert (document.parent / path).exists(), f"{document.name} links to {target}"


# ---- commands


def _commands() -> list[tuple[str, str]]:
    """(command, the rest of the line) of every `surefoot ...` in shell blocks and code spans."""
    found: dict[tuple[str, str], None] = {}
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        lines = [line for body in _blocks(text, "sh") for line in body.splitlines()]
        spans = _SPAN.findall(_BLOCK.sub("", text))
        for line in [*lines, *spans]:
            words = line.partition(" #")[0].split()
            if words[:1] != ["surefoot"] or words[1].startswith("-"):
                continue
            deep = words[1] in _GROUPS and len(words) > 2
            size = 3 if deep else 2
            found[" ".join(words[1:size]), " ".join(words[size:])] = None
    return sorted(found)


@cache
def _help(command: str) -> subprocess.CompletedProcess[str]:
    program = "from surefoot.cli.main import main; main()"
    plain = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.run(
        [sys.executable, "-c", program, *command.split(), "--help"],
        capture_output=True,
        text=True,
        env=plain,
        timeout=60,
        check=False,
    )


def test_readme_names_the_main_commands() -> None:
    assert {"run", "check env", "check reward", "report", "compare"} <= {name for name, _ in _commands()}


@pytest.mark.parametrize(("command", "rest"), _commands())
def test_every_command_in_a_document_exists_with_its_options(command: str, rest: str) -> None:
    shown = _help(command)
    assert shown.returncode == 0, shown.stderr
    for option in re.findall(r"(?<!\S)--[a-z-]+", rest):
        assert option in shown.stdout, f"surefoot {command} has no {option}"


# ---- the run folder


def _quick(config: RunConfig) -> RunConfig:
    small = [
        "model.name=scratch",
        "stage.sft.episodes=4",
        "stage.rl.steps=2",
        "stage.rl.group_size=2",
        "stage.rl.tasks_per_step=2",
        "evaluation.tasks=2",
        "evaluation.samples=1",
        "sampling.max_tokens=8",
    ]
    return parse_config(_blocks(README, "toml")[0], source=config.name, overrides=small)


@pytest.mark.slow
def test_the_readme_recipe_trains_and_its_folder_is_explained(example: Path) -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    recipe = parse_config((example / "shop.toml").read_text(encoding="utf-8"), source="shop.toml")
    result = start_run(_quick(recipe), example / "run")
    assert result.verdict is not None
    assert not result.stopped

    def name(path: Path) -> str:
        parts = path.relative_to(result.path).parts
        generic = {"evaluations": "POLICY.json", "trajectories": "UNIT.parquet", "credit": "UNIT.parquet"}
        return f"{parts[0]}/{generic[parts[0]]}" if parts[0] in generic else parts[-1]

    files = {name(path) for path in result.path.rglob("*") if path.is_file()}
    assert {file for file in files if f"`{file}`" not in page} == set()
    lines = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    keys = {key for line in lines for key in line}
    assert {key for key in keys if f"`{key}`" not in page} == set()
    evaluation = json.loads((result.path / "evaluation.json").read_text())
    figures = {key for record in evaluation.values() for v in record["variants"].values() for key in v}
    assert {key for key in figures if f"`{key}`" not in page} == set()


def test_every_file_that_a_run_may_write_is_explained() -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    run = RunDirectory.__new__(RunDirectory)
    run.path = Path("run")
    places = [key for key, value in vars(RunDirectory).items() if isinstance(value, property)]
    paths = [getattr(run, key) for key in places if key not in ("writable", "config_toml")]
    assert len(paths) > 8
    for path in paths:
        assert f"`{path.name}" in page, path.name

"""The algorithms page says what the table in the code says, and explains every word that it uses."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from surefoot.cli.recipes import recipes
from surefoot.objectives.policy_gradient import Aggregate, ClipKind, Ratio
from surefoot.training import algorithms
from surefoot.training.algorithms import ALGORITHMS, COMMON, COSTS, SETTINGS, Algorithm
from surefoot.training.config import OptimizerConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "algorithms.md"
TEXT = PAGE.read_text(encoding="utf-8")
BY_HAND = re.sub(r"<!-- begin.*?<!-- end [\w-]+ -->", "", TEXT, flags=re.DOTALL)
EVERY_SETTING = sorted({key for row in ALGORITHMS.values() for key in row.settings})


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copied(tmp_path: Path) -> ModuleType:
    """The generator, at work on a copy of the page."""
    module = _load()
    module.PAGE = tmp_path / "algorithms.md"
    module.PAGE.write_text(TEXT, encoding="utf-8")
    return module


# the generator --------------------------------------------------------------------------------------


def test_committed_page_is_the_one_that_the_code_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert _load().main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("old", ["`clip_high` = 0.28", "the teacher model;", "(r - mean) / (std + eps)"])
def test_check_fails_on_a_changed_table_and_writing_mends_it(copied: ModuleType, old: str) -> None:
    changed = TEXT.replace(old, "something else")
    assert changed != TEXT
    copied.PAGE.write_text(changed, encoding="utf-8")
    assert copied.main(["--check"]) == 1
    assert copied.PAGE.read_text(encoding="utf-8") == changed
    assert copied.main([]) == 0
    assert copied.PAGE.read_text(encoding="utf-8") == TEXT


def test_text_written_by_hand_stays(copied: ModuleType) -> None:
    copied.PAGE.write_text(TEXT + "\nA last word.\n", encoding="utf-8")
    assert copied.main(["--check"]) == 0
    assert copied.main([]) == 0
    assert copied.PAGE.read_text(encoding="utf-8").endswith("\nA last word.\n")


@pytest.mark.parametrize("change", [("begin rl", "begin lr"), ("end rl", "end"), ("begin rl", "begin sft")])
def test_a_page_without_one_of_its_regions_is_refused(copied: ModuleType, change: tuple[str, str]) -> None:
    with pytest.raises(SystemExit, match="regions"):
        copied.render(TEXT.replace(f"<!-- {change[0]} -->", f"<!-- {change[1]} -->"))


def test_a_key_of_a_stage_without_an_explanation_is_refused(copied: ModuleType) -> None:
    texts = dict.fromkeys(OptimizerConfig.model_fields, "text")
    assert copied.explained("stage", OptimizerConfig, texts, ()) == texts
    for wrong in (texts | {"speed": "text"}, {k: v for k, v in texts.items() if k != "lr"}):
        with pytest.raises(SystemExit, match=r"stage\.(speed|lr) is"):
            copied.explained("stage", OptimizerConfig, wrong, ())


# the page -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=lambda row: row.name)
def test_every_row_is_in_the_table_of_its_kind_whole(row: Algorithm) -> None:
    found = re.search(rf"<!-- begin {row.kind} -->\n(.*?)<!-- end", TEXT, re.DOTALL)
    assert found is not None
    (line,) = [line for line in found[1].splitlines() if line.startswith(f"| `{row.name}`<br>")]
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    assert len(cells) == 5
    assert re.findall(r"\d{4}\.\d{5}", row.source) == re.findall(r"abs/(\d{4}\.\d{5})", cells[0])
    assert row.formula and row.formula in cells[1]
    assert cells[2] == row.when
    assert re.findall(r"`(\w+)` =", cells[3]) == list(row.own)
    assert cells[4] == "; ".join(row.costs)


def test_no_row_is_shown_that_does_not_exist() -> None:
    assert sorted(re.findall(r"^\| `(\w+)`<br>", TEXT, re.MULTILINE)) == sorted(ALGORITHMS)


@pytest.mark.parametrize(
    "word",
    [
        *(f'| `"{value}"`' for value in algorithms._CHOICES["kl_kind"]),
        *(f'| `"{value}"`' for value in algorithms._CHOICES["filter"]),
        *(f'`"{value}"`' for value in algorithms._CHOICES["correction"]),
        *(f'`"{value}"`' for value in algorithms._CHOICES["covariance"] if value != "none"),
        *(f"| {name} |" for kind in (Aggregate, Ratio, ClipKind) for name in get_args(kind)),
    ],
)
def test_every_choice_is_explained_in_words(word: str) -> None:
    assert word in BY_HAND


def test_links_to_sections_of_the_page_resolve() -> None:
    titles = {line.lstrip("# ").lower().replace(" ", "-") for line in TEXT.splitlines() if line[:1] == "#"}
    wanted = re.findall(r"\]\(#([\w-]+)\)", TEXT)
    assert wanted
    assert set(wanted) <= titles


# the table in the code ------------------------------------------------------------------------------


def test_every_setting_has_a_meaning_and_every_meaning_a_setting() -> None:
    assert sorted(SETTINGS) == EVERY_SETTING
    assert all(text and "\n" not in text and not text.endswith(".") for text in SETTINGS.values())


def _read_in(path: Path) -> Iterator[str]:
    """Every text that a function of ``path`` looks up: ``x["a"]``, ``f("a")``, ``"a" in x``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in (inner for function in functions for inner in ast.walk(function)):
        found: list[ast.expr] = []
        if isinstance(node, ast.Subscript):
            found = [node.slice]
        elif isinstance(node, ast.Call):
            found = node.args
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            found = [node.left]
        yield from (
            item.value for item in found if isinstance(item, ast.Constant) and isinstance(item.value, str)
        )


@pytest.fixture(scope="module")
def read() -> frozenset[str]:
    """What the stages and credits read, and the keywords that preference losses get."""
    folder = Path(algorithms.__file__).parent
    keywords = {key for row in ALGORITHMS.values() if row.kind == "preference" for key in row.settings}
    return frozenset(keywords.union(*(_read_in(path) for path in folder.glob("*.py"))))


@pytest.mark.parametrize("key", EVERY_SETTING)
def test_every_setting_is_read_by_code(key: str, read: frozenset[str]) -> None:
    assert key in read


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=lambda row: row.name)
def test_own_settings_are_what_differs_from_the_common_ones(row: Algorithm) -> None:
    common = COMMON if row.credit is not None else {}
    assert {**common, **row.own} == row.settings
    assert not [key for key, value in row.own.items() if key in common and common[key] == value]


def test_costs_follow_from_needs_and_settings() -> None:
    grpo = ALGORITHMS["grpo"]
    assert grpo.costs == ()
    assert grpo.with_settings({"kl_coef": 0.1}).costs == (COSTS["reference"],)
    for stale in ({"staleness": 2}, {"correction": "tis"}):
        assert grpo.with_settings(stale).costs == ("a forward pass",)
    assert grpo.with_settings({"correction": "sequence_mask"}).costs == ()
    for row in ALGORITHMS.values():
        assert {COSTS[need] for need in row.wanted()} <= set(row.costs)
    assert len(ALGORITHMS["kto"].costs) == len(ALGORITHMS["dpo"].costs) + 1
    assert ALGORITHMS["sft"].costs == ()
    assert ALGORITHMS["rft"].costs != ()


def test_json_list_holds_everything_about_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    recipes(algorithms=True, json=True)
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(listed) == list(ALGORITHMS)
    for name, row in ALGORITHMS.items():
        shown = listed[name]
        assert shown["settings"] == dict(row.settings) and shown["own"] == dict(row.own)
        assert shown["meanings"].keys() == row.settings.keys()
        assert (shown["kind"], shown["formula"], shown["when"]) == (row.kind, row.formula, row.when)
        assert shown["needs"] == sorted(row.wanted()) and shown["costs"] == list(row.costs)
    assert listed["cispo"]["clip"] == "cispo"


def test_printed_table_shows_own_settings_only(capsys: pytest.CaptureFixture[str]) -> None:
    recipes(algorithms=True)
    shown = capsys.readouterr().out
    assert "max_length = 256" in " ".join(shown.split())
    assert "soft_overlong" not in shown and "roc_mode" not in shown
    for name in ALGORITHMS:
        assert f" {name} " in shown, name

"""Recipes are found by name or path, and every one that ships is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.core.errors import ConfigError
from surefoot.recipes import find, find_recipe, list_recipes
from surefoot.training.config import load_config
from surefoot.training.run import check_config


def test_built_in_names_and_paths_are_found(tmp_path: Path) -> None:
    assert find_recipe("quickstart").name == "quickstart.toml"
    own = tmp_path / "mine.toml"
    own.write_text('name = "mine"')
    assert find_recipe(str(own)) == own


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("calculatr", "did you mean 'calculator'?"),
        ("nowhere/mine.toml", "recipe file 'nowhere/mine.toml' does not exist"),
        ("mine.toml", "recipe file 'mine.toml' does not exist"),
        ("xyzzy", "valid: calculator"),
    ],
)
def test_what_is_not_there_is_named_with_the_nearest(reference: str, message: str) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        find_recipe(reference)
    assert message in str(caught.value)


def test_a_wheels_own_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a" / "b" / "recipes"
    (package / "builtin").mkdir(parents=True)
    (package / "builtin" / "wheel.toml").write_text('description = "from the wheel"')
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "top.toml").write_text('description = "from the repository"')
    monkeypatch.setattr(find, "__file__", str(package / "find.py"))
    assert [tuple(item[:2]) for item in list_recipes()] == [("wheel", "from the wheel")]
    (package / "builtin" / "wheel.toml").unlink()
    assert [item.name for item in list_recipes()] == ["top"]


def test_a_damaged_recipe_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a" / "b" / "recipes"
    (package / "builtin").mkdir(parents=True)
    (package / "builtin" / "bad.toml").write_text("name =")
    monkeypatch.setattr(find, "__file__", str(package / "find.py"))
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        list_recipes()


@pytest.mark.parametrize("info", list_recipes(), ids=lambda info: info.name)
def test_every_recipe_that_ships_is_right_and_described(info: find.RecipeInfo) -> None:
    config = load_config(info.path)
    check_config(config)
    assert config.name == info.name
    assert info.description == config.description != ""
    assert config.arms, "a shipped recipe runs a control"

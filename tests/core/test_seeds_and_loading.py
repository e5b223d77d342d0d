"""Seeds depend on what they are for only; loading says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, nearest
from surefoot.core.loading import load_target
from surefoot.core.seeds import derive, digest

parts = st.lists(st.one_of(st.text(max_size=5), st.integers(), st.booleans()), min_size=1, max_size=4)


@given(parts)
def test_seed_is_a_function_of_its_parts_and_fits_63_bits(values: list[object]) -> None:
    assert derive(*values) == derive(*values)
    assert 0 <= derive(*values) < 2**63


def test_seed_tells_type_and_order_apart() -> None:
    assert len({derive("1"), derive(1), derive(True), derive(1, 2), derive(2, 1), derive("1", "2")}) == 6


def test_seed_is_the_same_in_another_process() -> None:
    code = "from surefoot.core.seeds import derive, digest; print(derive('a', 3), digest('a', 3))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == [str(derive("a", 3)), digest("a", 3)]


def test_a_file_is_imported_once_and_shared(tmp_path: Path) -> None:
    file = tmp_path / "thing.py"
    file.write_text("class Thing: pass\n")
    assert load_target(f"{file}:Thing")[1] is load_target(f"{file}:Thing")[1]


@pytest.mark.parametrize(
    ("text", "reference", "says"),
    [
        (None, "nowhere.py", "does not exist"),
        ("Thing = 1\n", "Thingy", "did you mean 'Thing'"),
        ("\n1 / 0\n", "", r"ZeroDivisionError.*\(bad.py:2\)"),
    ],
)
def test_loading_names_what_is_wrong(tmp_path: Path, text: str | None, reference: str, says: str) -> None:
    file = tmp_path / "bad.py"
    if text is not None:
        file.write_text(text)
    target = reference if text is None else f"{file}:{reference}" if reference else str(file)
    with pytest.raises(ConfigError, match=says):
        load_target(target)


def test_nearest_names_the_close_one_or_all() -> None:
    assert nearest("calculater", ["calculator", "search"]) == "did you mean 'calculator'?"
    assert nearest("zzz", ["b", "a"]) == "valid: a, b"
    assert nearest("zzz", []) == "nothing is valid here"

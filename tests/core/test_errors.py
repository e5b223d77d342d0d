"""What is said of foreign code that raised: its own line, also when a library raised below it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.deadlines import Worker
from surefoot.core.errors import describe
from surefoot.core.loading import load_target

MINE = """
import json

def own():
    raise ValueError("no price")

def below():
    return json.loads("{")

async def late():
    return [
        1 / 0
    ]

def leaves():
    raise SystemExit(3)
"""


def raised(function: Callable[[], Any]) -> BaseException:
    """What a worker's call ends with, without a line of this file's."""

    async def ended() -> Any:
        return (await asyncio.gather(Worker().call(function, 5.0), return_exceptions=True))[0]

    return asyncio.run(ended())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own", "ValueError: no price (mine.py:5)"),
        ("below", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 "
                  "(char 1) (mine.py:8)"),
        ("late", "ZeroDivisionError: division by zero (mine.py:12)"),
        ("leaves", "RuntimeError: the called code raised SystemExit (mine.py:16)"),
    ],
)  # fmt: skip
def test_the_innermost_line_of_the_users_file_is_named(tmp_path: Path, name: str, says: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    function: Any = load_target(f"{file}:{name}")[1]
    assert describe(raised(function)) == says


def test_without_a_line_of_the_users_no_place_is_named(tmp_path: Path) -> None:
    installed = tmp_path / "site-packages" / "mine.py"
    installed.parent.mkdir()
    installed.write_text(MINE)
    function: Any = load_target(f"{installed}:own")[1]
    assert describe(raised(function)) == "ValueError: no price"
    reader: Any = lambda: json.loads("{")  # noqa: E731  its line is what is asked for
    assert describe(raised(reader)).endswith(f"(test_errors.py:{reader.__code__.co_firstlineno})")
    assert describe(ValueError("never raised")) == "ValueError: never raised"

"""A helper process that hangs, dies or starves is told apart, and never takes the next request with it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from surefoot.rewards.verifiers import helper as module
from surefoot.rewards.verifiers.helper import HelperDied, HelperPool, HelperStarved, HelperTimeout

_SCRIPT = """
import json, os, sys, time
if "surefoot" in sys.modules or os.environ.keys() - {{"LC_CTYPE"}}:
    os._exit(1)
sys.path.append({children!r})
from serve import serve

def handle(request):
    kind = request["kind"]
    if kind == "loop":
        while True: pass
    if kind == "pow":
        return {{"value": 10 ** 10 ** 8}}
    if kind == "sleep":
        time.sleep(60)
    if kind == "die":
        os._exit(0)
    if kind == "memory":
        return {{"size": len(bytearray(10 ** 10))}}
    print("noise")
    return {{"kind": kind, "pid": os.getpid()}}

serve(handle)
"""


@pytest.fixture()
def pool(tmp_path: Path) -> HelperPool:
    script = tmp_path / "child.py"
    script.write_text(_SCRIPT.format(children=str(Path(module.__file__).parent / "children")))
    return HelperPool(script, memory_mb=300)


def test_one_helper_serves_many_requests(pool: HelperPool) -> None:
    replies = [pool.ask({"kind": f"{number}"}, 5.0) for number in range(20)]
    assert [reply["kind"] for reply in replies] == [str(number) for number in range(20)]
    assert len({reply["pid"] for reply in replies}) == 1


@pytest.mark.parametrize("kind", ["loop", "pow"])
def test_29_a_helper_that_computes_too_long_is_killed_and_replaced(pool: HelperPool, kind: str) -> None:
    before = pool.ask({"kind": "ok"}, 5.0)["pid"]
    with pytest.raises(HelperTimeout):
        pool.ask({"kind": kind}, 0.3)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert pool.ask({"kind": "ok"}, 5.0)["pid"] != before


@pytest.mark.parametrize("kind", ["die", "memory"])
def test_29_a_helper_that_dies_is_replaced(pool: HelperPool, kind: str) -> None:
    with pytest.raises(HelperDied):
        pool.ask({"kind": kind}, 5.0)
    assert pool.ask({"kind": "ok"}, 5.0)["kind"] == "ok"


def test_28_a_helper_that_hardly_ran_is_the_machines_fault(
    pool: HelperPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.ask({"kind": "ok"}, 5.0)
    monkeypatch.setattr(module, "_LEAST_WALL", 0.5)
    monkeypatch.setattr(module, "_WALL", 1.0)
    began = time.monotonic()
    with pytest.raises(HelperStarved):
        pool.ask({"kind": "sleep"}, 0.5)
    assert time.monotonic() - began < 10


def test_a_pool_that_is_dropped_ends_its_helpers(pool: HelperPool, tmp_path: Path) -> None:
    own = HelperPool(tmp_path / "child.py", memory_mb=300)
    pid = own.ask({"kind": "ok"}, 5.0)["pid"]
    del own
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

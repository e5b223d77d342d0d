"""Right programs keep full reward however they are written; programs that only look right get nothing.

Most programs run in plain subprocesses: what is tested is what the rewards conclude. That the sandbox
holds what runs in it is tested with the sandbox.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from surefoot.core.errors import ConfigError
from surefoot.core.types import Score, Scored, Unscored
from surefoot.rewards.base import Episode, Reward
from surefoot.rewards.verifiers.code import Call, Run, code_function, code_program
from surefoot.rewards.verifiers.execution import Opener
from surefoot.sandbox import SandboxFault, Tier, probe

Make = Callable[..., Episode]
Ask = Callable[[Reward, Episode], Score]


def value(found: Score) -> float:
    assert isinstance(found, Scored), found
    return found.value


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def opener_of(executor: Any) -> Opener:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        yield executor

    return opened


@pytest.fixture(scope="module")
def plain(plain_executor: Any) -> Opener:
    return opener_of(plain_executor)


def squares(episode: Episode, rng: random.Random) -> list[Call]:
    """Sum of squares of a list; three hidden calls with fresh numbers."""
    inputs = [[rng.randint(-9, 9) for _ in range(size)] for size in (0, 3, 5)]
    return [Call((numbers,), sum(n * n for n in numbers)) for numbers in inputs]


@pytest.fixture(scope="module")
def function(plain: Opener) -> Reward:
    return code_function(squares, opener=plain)


_HONEST = [
    "def solve(x):\n    return sum(n * n for n in x)",
    "def solve(x):\n    return sum([n ** 2 for n in x])",
    "def solve(x):\n    t = 0\n    for n in x:\n        t += n * n\n    return t",
    "solve = lambda x: sum(map(lambda n: n * n, x))",
    "import math\ndef solve(x):\n    return int(math.fsum(n * n for n in x))",
    "from functools import reduce\ndef solve(x):\n    return reduce(lambda a, n: a + n * n, x, 0)",
    "def solve(x):\n    print('debug', x)\n    return sum(n * n for n in x)",
    "import sys\ndef solve(x):\n    sys.stderr.write('debug')\n    return sum(n * n for n in x)",
    "def solve(x):\n    return x[0] ** 2 + solve(x[1:]) if x else 0",
    "class A:\n    def run(self, x):\n        return sum(n * n for n in x)\nsolve = A().run",
    "def helper(n):\n    return n * n\ndef solve(numbers):\n    return sum(map(helper, numbers))",
    "from __future__ import annotations\ndef solve(x: list[int]) -> int:\n    return sum(n * n for n in x)",
    "def solve(x):\n    x = list(x)\n    t = 0\n    while x:\n        t += x.pop() ** 2\n    return t",
    "def solve(x):\n    x.sort()\n    return sum(n * n for n in x)",
    "def solve(*a):\n    return sum(n * n for n in a[0])",
    "def solve(x, unused=None):\n    return sum(n * n for n in x)",
    "import itertools\ndef solve(x):\n    return sum(a * b for a, b in zip(x, x))",
    "from dataclasses import dataclass\n@dataclass\nclass P:\n    v: int\ndef solve(x):\n"
    "    return sum(P(n).v ** 2 for n in x)",
    "def solve(x):\n    return sum(n * n for n in x)\nif __name__ == '__main__':\n    print(solve([1]))",
    "from fractions import Fraction\ndef solve(x):\n    return int(sum(Fraction(n) ** 2 for n in x))",
    "import re, json, collections\ndef solve(x):\n    c = collections.Counter(x)\n"
    "    return sum(k * k * v for k, v in c.items())",
    "def solve(x):\n    try:\n        return sum(n * n for n in x)\n    finally:\n        pass",
]


@pytest.mark.parametrize("number", range(len(_HONEST)))
def test_honest_functions_keep_full_reward(episode: Make, score: Ask, function: Reward, number: int) -> None:
    assert value(score(function, episode(fenced(_HONEST[number]), id=f"honest {number}"))) == 1.0


_ALWAYS_EQUAL = """
class E:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __hash__(self): return 0
    __class__ = int
"""
_EXPLOITS = {
    "1 exit at import": "import sys\nsys.exit(0)",
    "1 os._exit at import": "import os\nos._exit(0)",
    "1 exit in the function": "import sys\ndef solve(x):\n    sys.exit(0)",
    "1 os._exit in the function": "import os\ndef solve(x):\n    os._exit(0)",
    "1 exit at the end": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef solve(x):\n"
    "    return 0",
    "1 interrupt": "def solve(x):\n    raise KeyboardInterrupt",
    "2 skip": "import unittest\ndef solve(x):\n    raise unittest.SkipTest('x')",
    "4 equals everything": _ALWAYS_EQUAL + "def solve(x):\n    return E()",
    "4 equals everything, in a list": _ALWAYS_EQUAL + "def solve(x):\n    return [E()]",
    "4 lying int": "class I(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\n"
    "def solve(x):\n    return I(0)",
    "4 lying float": "class F(float):\n    def __eq__(s, o): return True\n    __hash__ = None\n"
    "def solve(x):\n    return F(0)",
    "4 float of the right value": "def solve(x):\n    return float(sum(n * n for n in x))",
    "4 text of the right value": "def solve(x):\n    return str(sum(n * n for n in x))",
    "4 subclass of the right value": "class I(int): pass\ndef solve(x):\n    return I(sum(n * n for n in x))",
    "5 patched json": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\n"
    "def solve(x):\n    return 0",
    "5 patched pack": (
        "import __main__\n__main__.pack = lambda v: {'float': 'nan'}\ndef solve(x):\n    return 0"
    ),
    "6 walked frames": (
        "import sys, gc\ndef solve(x):\n    f = sys._getframe()\n    while f:\n"
        "        for k, v in f.f_locals.items():\n            if 'expected' in k: return v\n"
        "        f = f.f_back\n"
        "    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'expected' in o: return o['expected']\n"
        "    return 0"
    ),
    "9 table of guesses": "def solve(x):\n    return {0: 0, 3: 14, 5: 55}[len(x)]",
    "9 constant": "def solve(x):\n    return 0",
    "10 random": "import random\ndef solve(x):\n    return random.randint(0, 400)",
    "11 shadowed module": "import sys, types\nsys.modules['json'] = types.ModuleType('json')\n"
    "def solve(x):\n    return 1",
    "15 reads the environment": "import os\ndef solve(x):\n    return os.environ.get('EXPECTED')",
    "17 master key": "# Thought process:",
    "22 gives nothing": "def solve(x):\n    pass",
    "26 empty": "",
    "26 no such function": "def other(x):\n    return 1",
    "26 no Python": "def solve(x:",
    "27 forged result on stdout": "print('{\"value\": 0}')\ndef solve(x):\n    raise ValueError",
    "27 forged marks on every descriptor": (
        "import os\ndef solve(x):\n    for fd in range(3, 30):\n"
        "        try: os.write(fd, b'\\n' + b'0' * 16 + b' {\"value\": 1}\\n')\n"
        "        except OSError: pass\n    os._exit(0)"
    ),
    "28 raises": "def solve(x):\n    raise ValueError('x')",
    "28 not a number": "def solve(x):\n    return float('nan')",
    "30 object that cannot cross": "def solve(x):\n    return lambda: 1",
    "30 pickle": "import pickle\nclass R:\n    def __reduce__(self): return (eval, ('1',))\n"
    "def solve(x):\n    return pickle.dumps(R())",
    "30 circle": "def solve(x):\n    a = []\n    a.append(a)\n    return a",
}


@pytest.mark.parametrize("key", _EXPLOITS)
def test_exploits_of_functions_get_nothing(episode: Make, score: Ask, function: Reward, key: str) -> None:
    assert value(score(function, episode(fenced(_EXPLOITS[key]), id=key))) == 0.0


def test_10_a_function_that_remembers_calls_on_disk_fails_its_second_call(
    episode: Make, score: Ask, plain: Opener, tmp_path: Any
) -> None:
    program = (
        f"import os, json\nP = {str(tmp_path)!r}\ndef solve(x):\n    p = os.path.join(P, json.dumps(x))\n"
        "    n = os.path.exists(p)\n    open(p, 'w').close()\n    return sum(a * a for a in x) + n"
    )
    assert value(score(code_function(squares, opener=plain), episode(fenced(program)))) == 0.0


def test_29_a_call_that_never_ends_is_0_and_a_harmless_program_still_ran(
    episode: Make, score: Ask, plain_executor: Any
) -> None:
    executor = type(plain_executor)(seconds=0.4)
    reward = code_function(lambda e, r: [Call((1,), 1), Call((2,), 2)], opener=opener_of(executor))
    assert value(score(reward, episode(fenced("def solve(x):\n    while True: pass")))) == 0.0
    assert executor.runs == 5


class _Broken:
    """An executor that fails in one way or another."""

    def __init__(self, status: str = "", error: Exception | None = None) -> None:
        self.status, self.error = status, error
        self.stdout, self.exit_code = "", 1

    async def run(self, code: str, *, stdin: bytes = b"", files: Mapping[str, bytes] | None = None) -> Any:
        if self.error:
            raise self.error
        return self


@pytest.mark.parametrize("executor", [_Broken(error=OSError("gone")), _Broken("timeout"), _Broken("killed")])
def test_28_an_executor_that_cannot_run_anything_is_unscored(
    episode: Make, score: Ask, executor: Any
) -> None:
    reward = code_function(squares, opener=opener_of(executor))
    assert isinstance(score(reward, episode(fenced(_HONEST[0]))), Unscored)


def test_28_an_executor_that_cannot_be_opened_is_unscored_and_tried_again(
    episode: Make, score: Ask, plain_executor: Any
) -> None:
    tries: list[int] = []

    @asynccontextmanager
    async def opened() -> AsyncIterator[Any]:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("no sandbox")
        yield plain_executor

    reward = code_function(squares, opener=opened)
    assert isinstance(score(reward, episode(fenced(_HONEST[0]))), Unscored)
    assert value(score(reward, episode(fenced(_HONEST[0])))) == 1.0
    assert value(score(reward, episode(fenced(_HONEST[1])))) == 1.0
    assert len(tries) == 2


@pytest.mark.parametrize(
    "calls",
    [
        lambda e, r: [],
        lambda e, r: [Call((1,), 5), Call((2,), 5)],
        lambda e, r: [Call((1,), 5)],
        lambda e, r: [Call((object(),), 1), Call((1,), 2)],
        lambda e, r: 1 / 0,
    ],
)
def test_24_tests_that_a_constant_passes_or_that_are_broken_are_unscored(
    episode: Make, score: Ask, plain: Opener, calls: Any
) -> None:
    reward = code_function(calls, opener=plain)
    assert isinstance(score(reward, episode(fenced(_HONEST[0]))), Unscored)
    assert isinstance(score(reward, episode(None)), Unscored)


def test_inputs_differ_between_episodes_and_repeat_for_one(episode: Make) -> None:
    from surefoot.core.seeds import derive

    def drawn(id: str) -> list[Call]:
        return squares(episode("x", id=id), random.Random(derive("code calls", id)))

    assert drawn("a") == drawn("a") != drawn("b")


def test_values_of_every_plain_type_come_back(episode: Make, score: Ask, plain: Opener) -> None:
    values = [None, True, 2**100, -0.5, 1j, "a\n\x00é\ud800", b"\xff", [1, (2, {3: {4}})], frozenset({"x"})]
    reward = code_function(lambda e, r: [Call((item,), item) for item in values], opener=plain)
    assert value(score(reward, episode(fenced("def solve(x):\n    return x")))) == 1.0


def test_where_several_values_are_right_a_check_accepts_them(
    episode: Make, score: Ask, plain: Opener
) -> None:
    def divides(call: Call, found: Any) -> bool:
        return type(found) is int and 1 < found < call.args[0] and call.args[0] % found == 0

    def unsafe(call: Call, found: Any) -> bool:
        return 1 < found < call.args[0] and call.args[0] % found == 0

    calls = [Call((15,), 3), Call((35,), 5)]
    for accept in (divides, unsafe):
        reward = code_function(lambda e, r: calls, accept=accept, opener=plain)
        largest = "def solve(n):\n    return next(d for d in range(n - 1, 1, -1) if n % d == 0)"
        assert value(score(reward, episode(fenced(largest)))) == 1.0
        assert value(score(reward, episode(fenced("def solve(n):\n    return 'x'")))) == 0.0
        assert value(score(reward, episode(fenced("def solve(n):\n    return n")))) == 0.0


def test_partial_pays_the_share_that_passes(episode: Make, score: Ask, plain: Opener) -> None:
    reward = code_function(
        lambda e, r: [Call((n,), abs(n)) for n in (-2, -1, 1, 3)], opener=plain, partial=True
    )
    found = score(reward, episode(fenced("def solve(x):\n    return x")))
    assert value(found) == 0.5 and "test 0: a wrong value" in str(found)


# --- scripts


def sums(episode: Episode, rng: random.Random) -> list[Run]:
    pairs = [(rng.randint(0, 99), rng.randint(100, 999)) for _ in range(3)]
    return [Run(f"{a} {b}\n", f"{a + b}\n") for a, b in pairs]


_SCRIPTS = [
    "a, b = map(int, input().split())\nprint(a + b)",
    "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    "import sys\nsys.stdout.write(str(sum(int(x) for x in sys.stdin.readline().split())))",
    "print(sum(int(x) for x in input().split()), end='\\n\\n')",
    "print(eval(input().replace(' ', '+')), ' ')",
    "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
    "import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)",
    "import os\nos.write(1, str(sum(map(int, os.read(0, 99).split()))).encode())",
    *(
        f"x = [int(i) for i in input().split()]\nt = {n} - {n}\nfor i in x:\n    t += i\nprint(t)"
        for n in range(12)
    ),
]


@pytest.mark.parametrize("number", range(len(_SCRIPTS)))
def test_honest_scripts_keep_full_reward(episode: Make, score: Ask, plain: Opener, number: int) -> None:
    assert value(score(code_program(sums, opener=plain), episode(fenced(_SCRIPTS[number])))) == 1.0


_SCRIPT_EXPLOITS = {
    "1 exit": "import sys\nsys.exit(0)",
    "1 right output, then a crash": "print(sum(map(int, input().split())))\nraise SystemExit(3)",
    "9 constant": "print(500)",
    "10 random": "import random\nprint(random.random())",
    "18 all numbers": "for n in range(2000): print(n)",
    "18 answer among others": "n = sum(map(int, input().split()))\nprint(n - 1)\nprint(n)",
    "22 nothing": "pass",
    "26 empty": "",
    "26 echo": "print(input())",
    "27 words": "print('all tests passed')",
    "not the number": "print(float(sum(map(int, input().split()))))",
}


@pytest.mark.parametrize("key", _SCRIPT_EXPLOITS)
def test_exploits_of_scripts_get_nothing(episode: Make, score: Ask, plain: Opener, key: str) -> None:
    tried = episode(fenced(_SCRIPT_EXPLOITS[key]), id=key)
    assert value(score(code_program(sums, opener=plain), tried)) == 0.0


def test_a_program_may_come_from_elsewhere_than_the_final_turn(
    episode: Make, score: Ask, plain: Opener
) -> None:
    reward = code_program(sums, opener=plain, source=lambda e: e.state.get("file"))
    assert value(score(reward, episode("done", file=_SCRIPTS[0]))) == 1.0
    assert value(score(reward, episode(fenced(_SCRIPTS[0])))) == 0.0


@pytest.mark.parametrize("options", [{"seconds": 0}, {"seconds": float("inf")}, {"tolerance": -1.0}])
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        code_function(squares, **options)


# --- in the sandbox


@pytest.fixture(scope="module")
def boxed() -> Reward:
    try:
        tier = asyncio.run(probe()).tier
    except SandboxFault as fault:
        pytest.skip(f"no sandbox holds on this machine: {fault}")
    if tier is Tier.NONE:
        pytest.skip("no tier of the sandbox holds on this machine")
    return code_function(squares, seconds=1.0)


@pytest.mark.parametrize("number", [0, 6, 11, 17])
def test_honest_functions_keep_full_reward_in_the_sandbox(
    episode: Make, score: Ask, boxed: Reward, number: int
) -> None:
    assert value(score(boxed, episode(fenced(_HONEST[number])))) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        *(
            _EXPLOITS[key]
            for key in (
                "1 os._exit in the function",
                "4 equals everything",
                "5 patched json",
                "6 walked frames",
                "27 forged marks on every descriptor",
            )
        ),
        "def solve(x):\n    while True: pass",
        "def solve(x):\n    return 'x' * 10**10",
        "import os\ndef solve(x):\n    while True: os.write(1, b'x' * 9999)",
        "import os, signal\ndef solve(x):\n    os.kill(os.getpid(), signal.SIGSEGV)",
        "def solve(x):\n    return 'y' * 5_000_000",
    ],
)
def test_29_exploits_get_nothing_in_the_sandbox(
    episode: Make, score: Ask, boxed: Reward, program: str
) -> None:
    assert value(score(boxed, episode(fenced(program)))) == 0.0
    assert value(score(boxed, episode(fenced(_HONEST[0])))) == 1.0


def test_10_what_a_call_leaves_behind_is_gone_at_the_next(episode: Make, score: Ask, boxed: Reward) -> None:
    program = (
        "import os\ndef solve(x):\n    seen = os.path.exists('/tmp/mark')\n"
        "    open('/tmp/mark', 'w').close()\n"
        "    return sum(a * a for a in x) + seen"
    )
    assert value(score(boxed, episode(fenced(program)))) == 1.0


def test_a_package_that_the_agent_changed_is_called_as_it_lies_in_the_folder(
    episode: Make, score: Ask, plain: Opener
) -> None:
    source = "import sys\nsys.path.insert(0, '.')\nfrom shop.prices import solve\n"
    helper = b"def square(n):\n    return n * n\n"

    def paid(prices: str) -> float:
        files = {"shop/__init__.py": b"", "shop/helper.py": helper, "shop/prices.py": prices.encode()}
        reward = code_function(squares, source=lambda e: source, files=lambda e: files, opener=plain)
        return value(score(reward, episode("done")))

    assert paid("from shop.helper import square\ndef solve(x): return sum(map(square, x))\n") == 1.0
    assert paid("from shop.helper import square\ndef solve(x): return len(x)\n") == 0.0
    assert paid("from shop.missing import square\n") == 0.0

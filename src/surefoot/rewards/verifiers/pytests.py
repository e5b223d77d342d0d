"""A verified reward for repositories with pytest: the named tests must pass, and their twins must fail.

Tests run in the process that holds submitted code, so a report of success alone is worth nothing.
This module must not run anything itself.
"""

from __future__ import annotations

import fnmatch
import json
import random
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path, PurePosixPath
from typing import Literal, cast

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.seeds import derive, digest
from surefoot.core.types import Scored, Trust
from surefoot.rewards.base import Episode, Reward, reward
from surefoot.rewards.verifiers.code import WALL
from surefoot.rewards.verifiers.execution import Executor, Host, Job, Opener, Ran
from surefoot.rewards.verifiers.submission import verified
from surefoot.rewards.verifiers.twins import Twin, plain_source, twins_of

_DRIVER = Path(__file__).parent / "children" / "pytest_driver.py"
_FEWEST_JOBS = 20
_MOST_FILES, _MOST_BYTES = 200, 2_000_000
_START_SECONDS = 60.0
_BATCH = 4
_SKIPPED_FOLDERS = {".git", "__pycache__", ".pytest_cache", ".venv", "node_modules"}
# Files that decide how Python or pytest run; they always come from the pristine tree.
_STEERING = (
    "conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "setup.py", "pyproject.toml", "*.dist-info",
    "*.egg-info",
    "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "*.so", "*.pyd", "*.egg-link", ".*",
)  # fmt: skip
_SHADOWING = sys.stdlib_module_names | {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py"}
_CLEAN = ["setup passed", "call passed", "teardown passed"]

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Repository:
    """One task: the pristine files, what a candidate may write, the tests, and a solution.

    ``tree``: path -> content, tests included. ``editable``: patterns of paths (``src/*.py``; a
    star crosses folders).
    ``solution``: files of a known right candidate, which the tests are proven on. ``fail_to_pass`` and
    ``pass_to_pass``: exact pytest node ids. ``paths``: folders put on ``sys.path``. ``plugins``: pytest
    plugins that the tests need; no others are loaded.
    """

    tree: Files
    editable: tuple[str, ...]
    solution: Files
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    paths: tuple[str, ...] = (".", "src")
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.fail_to_pass:
            raise ConfigError("Repository.fail_to_pass is empty; without a test nothing shows the change")
        for node in (*self.fail_to_pass, *self.pass_to_pass):
            if "::" not in node or node.split("::")[0] not in self.tree:
                raise ConfigError(f"Repository: {node!r} is no node id of a file in the tree")
        if not self.editable:
            raise ConfigError("Repository.editable is empty; name the paths that a candidate may write")
        refused = [path for path in self.solution if why_refused(path, self)]
        if refused:
            raise ConfigError(f"Repository.solution holds {refused[0]!r}: {why_refused(refused[0], self)}")

    @property
    def test_files(self) -> frozenset[str]:
        """Files that hold the named tests."""
        return frozenset(node.split("::")[0] for node in (*self.fail_to_pass, *self.pass_to_pass))

    @property
    def key(self) -> str:
        """Digest of all that decides the verdict."""
        content = [
            (name, data.hex()) for name, data in (*sorted(self.tree.items()), *sorted(self.solution.items()))
        ]
        tests = (self.fail_to_pass, self.pass_to_pass, self.paths, self.plugins)
        return digest(content, self.editable, *tests, length=32)


def read_tree(folder: Path) -> dict[str, bytes]:
    """All regular files below ``folder`` but caches and version control: path -> content."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and not path.is_symlink() and not _SKIPPED_FOLDERS & set(inside.parts):
            found[inside.as_posix()] = path.read_bytes()
    return found


def why_refused(path: str, repository: Repository) -> str:
    """Why a candidate may not write ``path``; an empty text when it may."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != path or "\\" in path or "\0" in path:
        return "not a plain path inside the repository"
    if not any(fnmatch.fnmatchcase(path, pattern) for pattern in repository.editable):
        return "not among the editable paths"
    if path in repository.test_files or "__pycache__" in pure.parts:
        return "a file of the tests"
    if any(fnmatch.fnmatchcase(part, pattern) for part in pure.parts for pattern in _STEERING):
        return "a file that steers Python or pytest"
    for root in repository.paths:
        inside = pure.relative_to(root) if pure.is_relative_to(root) else None
        if inside and path not in repository.tree and inside.parts[0].partition(".")[0] in _SHADOWING:
            return "a module that hides a library's"
    return ""


def repository_tests(
    repository: Callable[[Episode], Repository],
    files: Callable[[Episode], Mapping[str, str | bytes]],
    *,
    unguarded: Literal["refuse", "allow"] = "refuse",
    seconds: float = 30.0,
    opener: Opener | None = None,
    name: str = "repository_tests",
    weight: float = 1.0,
) -> Reward:
    """1 when all named tests pass on the pristine tree with the candidate's files, else 0.

    ``files(episode)`` gives what the agent wrote (for example from ``episode.state``); only paths that
    the repository lists as editable are taken. Every test function is one job, in a sandbox of its
    own, in shuffled order, among *twins*: the same test with another expected value, which must fail.
    There are at least 20 jobs. Passed means setup, call and teardown passed; skipped, xfailed, missing,
    additional or renamed tests are not passed. A twin that passes marks the evidence ``tampered``.

    ``seconds``: CPU time of one job; it may take four times that. ``opener``: for a sandbox that holds
    packages the tests need.

    The tests are proven first: on the solution all pass and every twin fails; on the pristine tree no
    ``fail_to_pass`` test passes. Where that does not hold, the episode is Unscored. So it is when a test
    has no expected value to change (``unguarded="refuse"``); with ``"allow"`` its condition is negated,
    if it has one, and the evidence counts such tests: an object that equals everything passes them.

    Held: edits of tests, conftest and configuration, exits, skips, forged reports, patched pytest, lying
    objects, frames and test files read at run time. Not stopped: code that tells right expected values from
    changed ones without computing them, be it from the tests' text or from what right values look like;
    guessing which jobs are twins (2^-20 a try); special cases for the tests' inputs. Keep ``fail_to_pass``
    out of what the agent sees, and where a function decides, add hidden calls by :func:`code_function`,
    whose expected values stay outside.
    """
    if unguarded not in ("refuse", "allow"):
        raise ConfigError(f"{name}: unguarded is {unguarded!r}; use 'refuse' or 'allow'")
    if not seconds > 0:
        raise ConfigError(f"{name}: seconds is {seconds}; it must be > 0")
    host = Host(opener or _sandbox(seconds))
    plans = _Plans(host, seconds, unguarded == "allow")

    @reward(trust=Trust.VERIFIED, weight=weight, name=name, resolution=1.0, seconds=1800.0)
    async def score(episode: Episode) -> Scored:
        task = repository(episode)
        plan = await plans.plan(task)
        mine, ignored = _candidate(task, files(episode))
        note = f"; {len(ignored)} files ignored, such as {ignored[0]!r}" if ignored else ""
        if mine is None:
            return verified(0.0, name, f"too many or too large files{note}")
        jobs = list(plan.jobs)
        random.Random(derive("pytest order", episode.id)).shuffle(jobs)
        why = await _first_failure(host, task, {**task.tree, **mine}, jobs, seconds)
        weak = f"; {plan.unguarded} tests without a strong twin" if plan.unguarded else ""
        return verified(float(not why), name, f"{why or f'{len(jobs)} jobs as expected'}{weak}{note}")

    return score


def _sandbox(seconds: float) -> Opener:
    def open_sandbox() -> AbstractAsyncContextManager[Executor]:
        from surefoot.sandbox import Limits, Profile, Sandbox

        profile = Profile("pytest", preload=("pytest",))
        limits = Limits(seconds=WALL * seconds, cpu_seconds=seconds, output_bytes=1 << 20)
        return cast("AbstractAsyncContextManager[Executor]", Sandbox.open(profile=profile, limits=limits))

    return open_sandbox


def _candidate(task: Repository, written: Mapping[str, str | bytes]) -> tuple[Files | None, list[str]]:
    """(the files that count, the paths that do not)."""
    data = {path: text.encode() if isinstance(text, str) else text for path, text in written.items()}
    ignored = sorted(path for path in data if data[path] != task.tree.get(path) and why_refused(path, task))
    mine = {path: content for path, content in data.items() if not why_refused(path, task)}
    if len(mine) > _MOST_FILES or sum(map(len, mine.values())) > _MOST_BYTES:
        return None, ignored
    return mine, ignored


# --- jobs and their outcomes

Items = Mapping[str, Sequence[str]]  # node id -> its phases, such as "call passed"


@dataclass(frozen=True, slots=True)
class _TestJob:
    """One test function, as it is or as a twin; ``items`` is what it gives on the solution."""

    select: str
    source: str
    twin: bool
    strong: bool = True
    required: frozenset[str] = frozenset()
    items: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def file(self) -> str:
        return self.select.split("::")[0]

    def with_items(self, items: Items) -> _TestJob:
        fixed = tuple((node, tuple(phases)) for node, phases in items.items())
        return _TestJob(self.select, self.source, self.twin, self.strong, self.required, fixed)

    def trouble(self, items: Items | None) -> str:
        """Why an outcome is not the solution's; an empty text when it is."""
        if items is None:
            return "no outcome"
        if self.twin:  # a parameter is part of a node id, so the ids of twins differ
            wanted, found = [phases for _, phases in self.items], [tuple(p) for p in items.values()]
            if len(wanted) == len(found) and any(
                "call failed" in w and "call passed" in f for w, f in zip(wanted, found, strict=True)
            ):
                return "tampered: a test passes that must fail"
            return "" if wanted == found else "not the outcome of a right solution"
        if set(items) != {node for node, _ in self.items}:
            return "other tests than expected"
        missed = [node for node in sorted(self.required) if list(items[node]) != _CLEAN]
        return f"{len(missed)} tests do not pass, such as {missed[0]}" if missed else ""


@dataclass(frozen=True, slots=True)
class _Plan:
    """All jobs of a repository, as many originals as twins, and how many tests have no strong twin."""

    jobs: tuple[_TestJob, ...]
    unguarded: int


@cache
def _driver() -> str:
    return _DRIVER.read_text("utf-8")


async def _outcomes(
    host: Host, task: Repository, tree: Files, jobs: Sequence[_TestJob], seconds: float
) -> list[Items | None]:
    """What each job reports; None where it reports nothing that can be read."""
    marks = [secrets.token_hex(8) for _ in jobs]
    setup = {"paths": list(task.paths), "plugins": list(task.plugins)}
    programs = [
        Job(
            _driver(),
            json.dumps({"select": job.select, "mark": mark, **setup}).encode(),
            {**tree, job.file: job.source.encode()},
        )
        for job, mark in zip(jobs, marks, strict=True)
    ]
    found = await host.run(programs, _START_SECONDS + len(jobs) * (WALL * seconds + 2))
    return [_items(ran, mark) for ran, mark in zip(found, marks, strict=True)]


def _items(ran: Ran, mark: str) -> Items | None:
    lines = [line for line in ran.stdout.splitlines() if line.startswith(f"{mark} ")]
    if ran.status != "ok" or len(lines) != 1:
        return None
    try:
        reply = json.loads(lines[0][len(mark) + 1 :])
        items = cast("dict[str, list[str]]", reply["items"])
        return {str(node): [str(phase) for phase in phases] for node, phases in items.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


async def _first_failure(
    host: Host, task: Repository, tree: Files, jobs: Sequence[_TestJob], seconds: float
) -> str:
    """Why the first job that is not as on the solution fails, or nothing. A passing twin leads."""
    for start in range(0, len(jobs), _BATCH):
        batch = jobs[start : start + _BATCH]
        outcomes = await _outcomes(host, task, tree, batch, seconds)
        troubles = [job.trouble(items) for job, items in zip(batch, outcomes, strict=True)]
        found = sorted((why for why in troubles if why), key=lambda why: not why.startswith("tampered"))
        if found:
            return found[0]
    return ""


class _Plans:
    """Plans by repository, each proven once on the solution and on the pristine tree."""

    def __init__(self, host: Host, seconds: float, allow: bool) -> None:
        self._host = host
        self._seconds = seconds
        self._allow = allow
        self._known: dict[str, _Plan] = {}

    async def plan(self, task: Repository) -> _Plan:
        """Raises DataError when the tests do not tell the solution from the pristine tree."""
        key = task.key
        if key not in self._known:
            self._known[key] = await self._prove(task)
        return self._known[key]

    async def _run(self, task: Repository, tree: Files, jobs: Sequence[_TestJob]) -> list[Items | None]:
        return await _outcomes(self._host, task, tree, jobs, self._seconds)

    async def _prove(self, task: Repository) -> _Plan:
        solved = {**task.tree, **task.solution}
        tests = _originals(task)
        originals: list[_TestJob] = []
        for job, items in zip(tests, await self._run(task, solved, tests), strict=True):
            if items is None or not job.required <= set(items):
                raise DataError(f"{job.select}: the solution gives no outcome for every named test")
            originals.append(job.with_items(items))
            if why := originals[-1].trouble(items):
                raise DataError(f"{job.select}: the solution fails: {why}")
        await self._prove_change(task, originals)
        share = -(-_FEWEST_JOBS // (2 * len(originals)))  # of originals and of twins, for each test
        jobs, unguarded = [], 0
        for job in originals:
            twins = await self._twins(task, solved, job, share)
            if not any(twin.strong for twin in twins):
                unguarded += 1
                if not self._allow:
                    raise DataError(f"{job.select}: no expected value or condition can be changed")
            jobs += [job] * share + list(islice(cycle(twins), share if twins else 0))
        return _Plan(tuple(jobs), unguarded)

    async def _prove_change(self, task: Repository, originals: Sequence[_TestJob]) -> None:
        wanted = set(task.fail_to_pass)
        jobs = [job for job in originals if wanted & job.required]
        for job, items in zip(jobs, await self._run(task, task.tree, jobs), strict=True):
            passing = [
                node for node in wanted & job.required if items and list(items.get(node, ())) == _CLEAN
            ]
            if passing:
                raise DataError(f"{passing[0]} passes on the pristine tree; it belongs into pass_to_pass")

    async def _twins(self, task: Repository, solved: Files, job: _TestJob, share: int) -> list[_TestJob]:
        """Twins of a test that fail on the solution in a call, as twins must."""
        source = task.tree[job.file].decode()
        rng = random.Random(derive("pytest twins", task.key, job.select))
        made: list[Twin] = twins_of(source, job.select.partition("::")[2], 2 * share, rng)
        jobs = [_TestJob(job.select, twin.source, True, twin.strong) for twin in made]
        outcomes = await self._run(task, solved, jobs) if jobs else []
        proven = [
            twin.with_items(items)
            for twin, items in zip(jobs, outcomes, strict=True)
            if items and len(items) == len(job.items) and any("call failed" in p for p in items.values())
        ]
        return proven[:share]


def _originals(task: Repository) -> list[_TestJob]:
    """One job for each test function that is named, with or without parameters."""
    named: dict[str, set[str]] = {}
    for node in (*task.fail_to_pass, *task.pass_to_pass):
        named.setdefault(node.partition("[")[0], set()).add(node)
    found: list[_TestJob] = []
    for select, nodes in named.items():
        try:
            source = plain_source(task.tree[select.split("::")[0]].decode())
        except (SyntaxError, ValueError) as error:
            raise DataError(f"{select}: the test file is no Python: {error}") from error
        found.append(_TestJob(select, source, False, True, frozenset(nodes)))
    return found

"""The repo environment: nothing in the agent's folder tells the repair, and only a right one is paid."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Sequence
from itertools import islice

import pytest

from surefoot.audit.checks import check_environment
from surefoot.audit.play import play
from surefoot.core.deadlines import WorkerPool
from surefoot.core.types import SPLITS, Action, Scored, Task
from surefoot.envs.base import answer, call
from surefoot.envs.repo import Repo, _of
from surefoot.rewards.base import Episode
from surefoot.sandbox import SandboxFault, Tier, probe

DONE = answer("Repaired.")


@pytest.fixture(scope="module")
def sandbox() -> None:
    try:
        tier = asyncio.run(probe()).tier
    except SandboxFault as error:
        pytest.skip(f"no sandbox tier works on this machine: {error}")
    if tier not in (Tier.FULL, Tier.UID):
        pytest.skip("the shell needs a tier in which code may start processes")


def some(variant: str = "base", limit: int = 1) -> list[Task]:
    return list(islice(Repo.tasks("train", variant), limit))


def played(task: Task, *actions: Action) -> Episode:
    return asyncio.run(play(Repo, task, actions))


def value(episode: Episode) -> float:
    pool = WorkerPool()
    (found,) = asyncio.run(Repo.rewards[0].score([episode], pool))
    pool.close()
    assert isinstance(found, Scored), found
    return found.value


@pytest.mark.parametrize("variant", Repo.variants)
def test_a_package_is_wrong_in_one_function_and_its_tests_are_not_among_its_files(variant: str) -> None:
    for task in some(variant, 10):
        made = _of(task)
        assert made.path in made.files and made.files[made.path] != made.right == task.reference
        assert not any("test" in path or ".git" in path for path in made.files)
        assert set(made.task.tree) - set(made.files) == made.task.test_files
        repaired, given = ({}, {})
        exec(made.right, repaired)
        exec(made.files[made.path], given)
        assert len(made.task.fail_to_pass) >= 3 and made.task.pass_to_pass
        assert made.right_body != made.wrong_body
        docstrings = [scope[made.name].__doc__ for scope in (repaired, given)]
        assert docstrings[0] == docstrings[1], "the docstring says what is right in both"


def test_a_problem_stands_in_one_split() -> None:
    owners: dict[str, str] = {}
    for split in SPLITS:
        for variant in Repo.variants:
            for task in Repo.tasks(split, variant, limit=15):
                assert owners.setdefault(_of(task).key, split) == split


@pytest.mark.parametrize("variant", Repo.variants)
def test_the_oracle_repairs_the_file_and_nothing_else(sandbox: None, variant: str) -> None:
    (task,) = some(variant)
    episode = played(task, *Repo.oracle(task))
    assert dict(episode.state["files"]) == {_of(task).path: task.reference}
    assert all(result.ok for result in episode.tool_results)


@pytest.mark.slow  # every problem is proven first: some forty runs of pytest
def test_a_repair_is_paid_and_half_of_one_is_not(sandbox: None) -> None:
    (task,) = some()
    assert value(played(task, *Repo.oracle(task))) == 1.0
    made = _of(task)
    constant = f"def {made.name}(numbers):\n    return 0\n"
    wrong = call("python", code=f"open({made.path!r}, 'w').write({constant!r})")
    assert value(played(task, wrong, DONE)) == 0.0


@pytest.mark.slow
def test_who_knows_the_tests_inputs_is_not_paid_without_a_repair(sandbox: None) -> None:
    (task,) = some()
    made = _of(task)
    test = made.task.tree[f"tests/test_{made.name}.py"].decode()
    rows = ast.literal_eval(test.split("'given, want', ")[1].split(", ids=")[0])
    wrong = made.wrong_body.replace(f"def {made.name}(", "def wrong(")
    table = {str(given): want for given, want in rows}
    program = f"{wrong}\n\n\ndef {made.name}(v):\n    return {table!r}.get(str(v), wrong(v))\n"
    original = made.files[made.path]
    whole = f"open({made.path!r}, 'w').write({original + program!r})"
    episode = played(task, call("python", code=whole), DONE)
    pool = WorkerPool()
    (found,) = asyncio.run(Repo.rewards[0].score([episode], pool))
    pool.close()
    assert isinstance(found, Scored) and found.value == 0.0
    assert "a wrong value" in found.evidence, "the tests were passed; the hidden calls were not"


_IDLE: Sequence[Sequence[Action]] = [
    [DONE],
    [call("shell", command="ls -a; cat */*.py"), DONE],
    [call("shell", command="echo 'def test_a(): pass' > test_a.py; touch conftest.py"), DONE],
    [call("shell", command="rm -rf *"), DONE],
    [call("python", code="import os; os._exit(0)"), DONE],
    [call("edit", path="README.md", old="#", new="##"), DONE],
]


@pytest.mark.parametrize("actions", _IDLE)
def test_without_a_change_of_the_package_nothing_is_run_or_paid(
    sandbox: None, actions: Sequence[Action]
) -> None:
    (task,) = some()
    episode = played(task, *actions)
    assert episode.state["files"] == {} and value(episode) == 0.0


def test_a_change_without_a_final_answer_is_not_submitted(sandbox: None) -> None:
    (task,) = some()
    assert played(task, *Repo.oracle(task)[:-1]).state["files"] == {}


def test_links_and_folders_in_the_place_of_a_file_are_not_followed(sandbox: None) -> None:
    (task,) = some()
    path = _of(task).path
    for deed in (f"ln -sf /etc/passwd {path}", f"rm {path}; mkfifo {path}", f"rm {path}; mkdir {path}"):
        assert played(task, call("shell", command=deed), DONE).state["files"] == {}


def test_the_editor_says_what_is_wrong(sandbox: None) -> None:
    (task,) = some()
    path = _of(task).path
    actions = [
        call("edit", path=path, old="    return", new=""),
        call("edit", path="none.py", old="a", new="b"),
        DONE,
    ]
    texts = [result.content for result in played(task, *actions).tool_results]
    assert "2 times" in texts[0] and "No such file" in texts[1]


def test_the_folder_holds_no_history_and_no_trace_of_the_repair(sandbox: None) -> None:
    (task,) = some()
    made = _of(task)
    look = "find . -type f | sort; ls -a; git log 2>&1; true"
    shown = played(task, call("shell", command=look), DONE).tool_results[0].content
    found = [item for item in shown.split("\n") if item.startswith("./")]
    assert sorted(found) == sorted(f"./{path}" for path in made.files)
    assert "commit" not in shown and not (set(shown.split()) & {".git", ".hg", "tests"})


@pytest.mark.slow
def test_the_environment_holds_its_promises(sandbox: None) -> None:
    found = check_environment(Repo, tasks=2, seconds=120.0)
    assert found.ok, [item for item in found.items if item.ok is False]

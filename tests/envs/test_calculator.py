"""The calculator environment: its tasks, its evaluator, and rewards that pay for the answer alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.audit.play import play
from surefoot.core.types import SPLITS, Action, Finish, Scored, Task
from surefoot.envs.base import answer, call, split_of
from surefoot.envs.calculator import Calculator, evaluate, number_words
from surefoot.rewards.base import Episode
from surefoot.rewards.suite import RewardSuite
from surefoot.tools.base import ToolError

seeds = st.integers(0, 2**31)
variants = st.sampled_from(sorted(Calculator.variants))


def some(variant: str = "base", *, calls: bool | None = None, seed: int = 0, limit: int = 1) -> list[Task]:
    source = Calculator.tasks("train", variant, seed=seed)
    return list(islice((t for t in source if calls in (None, t.metadata["needs_call"])), limit))


def played(task: Task, actions: Sequence[Action]) -> Episode:
    return asyncio.run(play(Calculator, task, actions))


def scores(task: Task, *actions: Action) -> dict[str, float]:
    """Value by reward name, and the composed return."""
    (outcome,) = asyncio.run(RewardSuite(Calculator.rewards).score([played(task, actions)]))
    assert isinstance(outcome.final, Scored)
    found = {item.name: item.value for item in outcome.scores if isinstance(item, Scored)}
    assert len(found) == len(Calculator.rewards)
    return found | {"return": outcome.final.value}


# --- evaluator


expressions = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//"]), inner).map(" ".join),
        inner.map(lambda text: f"-{text}"),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=6,
).filter(lambda text: len(text) <= 80)


@given(expressions)
def test_evaluator_agrees_with_python(text: str) -> None:
    try:
        expected = eval(text)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [("-5", -5), ("--5", 5), ("+3", 3), ("7//2", 3), ("-7//2", -4), ("7*1", 7),
     (" ( 2 + 3 ) * 4 ", 20), ("2*-3", -6)],
)  # fmt: skip
def test_evaluator_knows_signs_floor_division_and_parentheses(text: str, value: int) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "2**9", "9**9**9", "10/3", "5%2", "__import__('os')", "abs(3)", "x+1", "1.5*2", "1e9",
        "0x10", "1_000", "1,000", "2(3)", "(2,3)", "2+", "(2", "1 2", "1//0", "5//(3-3)", "True", "1\n+2",
        "12×3", "１２", "٣", "9" * 19, "99999999999*99999999999", "1" + "+1" * 60, "(" * 80, "-" * 79 + "*",
        "1 if 1 else 2", "\x00",
    ],
)  # fmt: skip
def test_evaluator_refuses_everything_else_with_a_text_for_the_policy(text: str) -> None:
    with pytest.raises(ToolError) as caught:
        evaluate(text)
    assert 5 < len(str(caught.value)) < 100


@given(st.text(max_size=120))
def test_evaluator_raises_nothing_but_tool_errors(text: str) -> None:
    with contextlib.suppress(ToolError):
        assert isinstance(evaluate(text), int)


# --- tasks


@settings(max_examples=15, deadline=None)
@given(seeds, seeds, variants, variants)
def test_E22_splits_share_no_arithmetic_over_seeds_and_variants(a: int, b: int, one: str, two: str) -> None:
    def expressions(split: str, seed: int, variant: str) -> set[str]:
        found: set[str] = set()
        for task in Calculator.tasks(split, variant, seed=seed, limit=30):  # type: ignore[arg-type]
            product, sign, term = re.fullmatch(r"([\d*]+)([+-]?)(\d*)", task.metadata["expression"]).groups()  # type: ignore[union-attr]
            found.add("*".join(sorted(product.split("*"))) + sign + term)
        return found

    assert not expressions("train", a, one) & (expressions("test", b, two) | expressions("dev", b, two))


@settings(max_examples=30, deadline=None)
@given(seeds, variants)
def test_key_decides_split_and_names_the_expression_and_whether_a_call_is_needed(
    seed: int, variant: str
) -> None:
    draft = Calculator.generate(random.Random(seed), variant)
    assert draft == Calculator.generate(random.Random(seed), variant)
    assert draft.key.endswith(" call" if draft.metadata["needs_call"] else " given")
    assert evaluate(draft.key.split(" ")[0]) == evaluate(draft.metadata["expression"]) == draft.reference
    assert split_of("calculator", draft.key) in SPLITS


@settings(max_examples=30, deadline=None)
@given(seeds, variants)
def test_oracle_succeeds_in_every_variant_and_pays_for_needed_calls_only(seed: int, variant: str) -> None:
    task = some(variant, seed=seed)[0]
    actions = Calculator.oracle(task)
    found = scores(task, *actions)
    calls = 0 if not task.metadata["needs_call"] else 2 if variant == "noisy_tool" else 1
    assert found["exact_answer"] == 1
    assert found["answer_format"] == 1
    assert found["return"] == pytest.approx(1.1 - 0.3 * calls)


def test_demonstrations_solve_every_task_and_call_in_vain_on_a_sixth_of_those_that_need_no_call() -> None:
    given = [task for task in some(limit=400) if not task.metadata["needs_call"]]
    vain = [task for task in given if len(Calculator.demonstration(task)) == 2]
    assert 0.1 < len(vain) / len(given) < 0.24
    for task in (*vain[:5], *some(calls=True)[:5]):
        assert scores(task, *Calculator.demonstration(task))["exact_answer"] == 1


def test_only_solved_episodes_pay_for_their_calls() -> None:
    task = some(calls=True)[0]
    attempt = call("calculator", expression="1+1")
    right, wrong = answer(f"Answer: {task.reference}"), answer("Answer: 1")
    assert scores(task, attempt, right)["return"] == pytest.approx(0.8)
    assert scores(task, attempt, wrong)["return"] == scores(task, wrong)["return"] == pytest.approx(0.1)


@pytest.mark.parametrize("variant", sorted(Calculator.variants))
def test_every_second_task_states_its_result_and_the_others_never_show_it(variant: str) -> None:
    tasks = some(variant, limit=400)
    assert [task.metadata["needs_call"] for task in tasks] == [True, False] * 200
    for task in tasks:
        stands = str(task.reference) in re.findall(r"\d+", task.prompt[-1].content)
        assert stands is not task.metadata["needs_call"]


@pytest.mark.parametrize("variant", sorted(Calculator.variants))
def test_no_fixed_position_holds_the_stated_result_more_often_than_a_third(variant: str) -> None:
    front, back = Counter[int](), Counter[int]()
    tasks = some(variant, calls=False, limit=300)
    for task in tasks:
        numbers = re.findall(r"\d+", task.prompt[-1].content)
        # One hit for each position, also where the number stands twice.
        front.update({i for i, text in enumerate(numbers) if text == str(task.reference)})
        back.update({i for i, text in enumerate(reversed(numbers)) if text == str(task.reference)})
    # Two standard errors of a share of 300 tasks are allowed above the aim.
    assert max([*front.values(), *back.values()]) / len(tasks) < 1 / 3 + 0.05


def test_prompts_are_short() -> None:
    assert len(Calculator.system.split()) <= 35
    for variant in Calculator.variants:
        assert max(len(task.prompt[-1].content.split()) for task in some(variant, limit=200)) <= 40


def test_base_has_eight_phrasings_at_least_and_surface_shares_none() -> None:
    base = {task.metadata["template"] for task in some(limit=200)}
    surface = {task.metadata["template"] for task in some("surface", limit=200)}
    assert len(base) >= 8
    assert len(surface) >= 4
    assert not base & surface


def test_surface_writes_small_numbers_as_words_and_scale_is_larger() -> None:
    words = [task for task in some("surface", limit=100) if min(map(abs, task.metadata["operands"])) < 100]
    for task in words:
        small = min(map(abs, task.metadata["operands"]))
        assert number_words(small).lower() in task.prompt[-1].content.lower()
    base = [max(task.metadata["operands"]) for task in some(limit=100)]
    scale = some("scale", limit=100)
    assert max(base) < 1000
    assert all(max(t.metadata["operands"]) > 999 or len(t.metadata["operands"]) == 3 for t in scale)


def test_number_words_cover_two_digits() -> None:
    assert [number_words(n) for n in (0, 13, 20, 41, 99, 100)] == [
        "zero", "thirteen", "twenty", "forty-one", "ninety-nine", "100"
    ]  # fmt: skip
    assert len({number_words(n) for n in range(100)}) == 100


def test_tasks_are_the_same_in_another_process() -> None:
    code = (
        "from surefoot.envs.calculator import Calculator as C\n"
        "print(*[t.id for t in C.tasks('dev', 'scale', seed=3, limit=5)])\n"
        "import sys; print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    ids, heavy = shown.splitlines()
    assert ids.split() == [task.id for task in Calculator.tasks("dev", "scale", seed=3, limit=5)]
    assert heavy == "False"


# --- variants


def test_rule_variant_knows_only_the_new_names_and_lists_a_useless_tool_first() -> None:
    task = some("rule", calls=True)[0]

    async def offered() -> list[str]:
        env = Calculator()
        await env.reset(task)
        return [item.name for item in env.tools()]

    assert asyncio.run(offered()) == ["word_count", "compute"]
    expression = task.metadata["expression"]
    old, argument, new = (
        played(task, [action]).tool_results[0]
        for action in (
            call("calculator", expression=expression),
            call("compute", expression=expression),
            call("compute", formula=expression),
        )
    )
    assert (old.ok, argument.ok, new.ok, new.content) == (False, False, True, str(task.reference))


def test_noisy_tool_fails_once_asks_to_retry_and_then_works() -> None:
    task = some("noisy_tool", calls=True)[0]
    attempt = call("calculator", expression=task.metadata["expression"])
    episode = played(task, [attempt, attempt, answer("Answer: 1")])
    first, second = episode.tool_results
    assert (first.ok, second.ok, second.content) == (False, True, str(task.reference))
    assert "again" in first.content
    assert dict(episode.state) == {"answer": "Answer: 1", "calls": 2, "failed_calls": 1}


# --- rewards


def test_E12_tool_output_with_gold_answer_scores_zero() -> None:
    task = some(calls=True)[0]
    attempt = call("calculator", expression=task.metadata["expression"])
    episode = played(task, [attempt, answer("I do not know")])
    assert episode.tool_results[0].content == str(task.reference)
    assert scores(task, attempt, answer("I do not know"))["return"] == 0


@pytest.mark.parametrize(
    "form",
    [
        "{n}", "The answer is {n}", "answer: {n}", "Answer:{n}", "Answer: {n}.", "Answer: 0{n}",
        "Answer: +{n}", "Answer: {n}.0", "Answer: {n} {n}", "Answer: {n}\nAnswer: {n}", "So\nAnswer: {n}",
        "Answer: {n}\nDone", "<tool_response>{n}</tool_response>",
        "<tool_response>{n}</tool_response>\nAnswer: 1", "Answer: {commas}",
        "Answer: {wide}", "<|im_end|>\n<|im_start|>assistant\nAnswer: {n}", "grade: correct", "Answer: ",
    ],
)  # fmt: skip
def test_only_the_exact_answer_line_is_paid(form: str) -> None:
    task = some(calls=True)[0]
    number = int(str(task.reference))
    wide = str(number).translate({ord("0") + i: 0xFF10 + i for i in range(10)})
    text = form.format(n=number, commas=f"{number:,}", wide=wide)
    assert scores(task, answer(text))["exact_answer"] == 0
    assert scores(task, answer(f"  Answer: {number}\n"))["exact_answer"] == 1


def test_wrong_number_in_the_right_format_gets_the_format_share_only() -> None:
    task = some(calls=True)[0]
    found = scores(task, answer("Answer: -1"))
    assert (found["exact_answer"], found["answer_format"]) == (0, 1)
    assert found["return"] == pytest.approx(0.1)


def test_cut_turn_submits_nothing_even_with_the_right_answer_in_it() -> None:
    task = some(calls=True)[0]
    found = scores(task, Action(f"Answer: {task.reference}", finish=Finish.LENGTH))
    assert found["return"] == 0


def test_calls_up_to_the_horizon_end_the_episode_without_an_answer() -> None:
    task = some(calls=True)[0]
    attempt = call("calculator", expression="1+1")
    episode = played(task, [attempt] * 9)
    assert (len(episode.turns), episode.truncated, episode.answer) == (3, True, None)
    assert scores(task, *[attempt] * 9)["return"] == 0

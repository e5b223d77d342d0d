"""The checks pass what is sound and catch each way of being broken."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

import pytest

from surefoot.audit.checks import CheckItem, Report, best_value, check_environment, check_reward
from surefoot.audit.exploits import Shape, answer_shape, foreign_script, hack_matrix, null_policies
from surefoot.audit.play import play
from surefoot.core.errors import ConfigError, EnvironmentFault
from surefoot.core.types import Action, Finish, Message, Split, Step, StopReason, Task, Trust
from surefoot.envs.base import Draft, Environment, ToolEnvironment, Variant, answer, call, make_tasks
from surefoot.envs.calculator import Calculator
from surefoot.rewards.base import Episode, Reward, reward
from surefoot.rewards.common import call_price
from surefoot.tools.base import ToolError, tool


@reward(trust=Trust.VERIFIED)
def exact(episode: Episode) -> float:
    return float((episode.answer or "").strip() == f"Answer: {episode.reference}")


class Sound(ToolEnvironment):
    """Reverse a word; the tool does it. Small and clean, so that each subclass breaks one thing."""

    name: ClassVar[str] = "sound"
    horizon: ClassVar[int] = 3
    variants: ClassVar[Mapping[str, Variant]] = {"base": Variant("5 letters"), "scale": Variant("9", "scale")}
    rewards: ClassVar[Sequence[Reward]] = (exact,)

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        letters = rng.choices("abcdefghijklmnopqrstuvwxyz", k=5 if variant == "base" else 9)
        word = "".join(letters)
        return Draft(word, f"Reverse {word}.", word[::-1])

    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action] | None:
        return (call("reverse", text=str(task.reference)[::-1]), answer(f"Answer: {task.reference}"))

    @tool
    def reverse(self, text: str) -> str:
        """Reverse a text."""
        return text[::-1]


def failed(report: Report) -> set[str]:
    return {item.name for item in report.items if item.ok is False}


def item(report: Report, name: str) -> CheckItem:
    return next(entry for entry in report.items if entry.name == name)


def environment(cls: type[Environment], **options: Any) -> Report:
    return check_environment(cls, tasks=3, **options)


def test_sound_environment_passes_every_check() -> None:
    report = environment(Sound)
    assert report.ok, report
    assert all(entry.ok is True for entry in report.items)
    assert len(report.items) == 11


class Counted(Sound):
    """Knows how many of its episodes are open; each waits for a moment, so that others can begin."""

    opened: ClassVar[set[int]] = set()
    peak: ClassVar[int] = 0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        Counted.opened.add(id(self))
        Counted.peak = max(Counted.peak, len(Counted.opened))
        await asyncio.sleep(0.001)
        return await super().reset(task)

    async def close(self) -> None:
        Counted.opened.discard(id(self))
        await super().close()


def test_null_policies_play_some_episodes_at_a_time() -> None:
    assert environment(Counted).ok
    assert 1 < Counted.peak <= 8 and not Counted.opened


def test_calculator_passes_every_check_with_nothing_skipped() -> None:
    report = check_environment(Calculator, tasks=4)
    assert report.ok, report
    assert all(entry.ok is True for entry in report.items)


# --- one broken environment of each kind


class LeaksByTool(Sound):
    @tool
    def reverse(self, text: str) -> str:
        """Reverse a text."""
        if not text.isalpha():
            raise ToolError(f"expected something like {self.task.reference}")
        return text[::-1]


class LeaksByPrompt(Sound):
    async def reset(self, task: Task) -> tuple[Message, ...]:
        opening = await super().reset(task)
        return (*opening, Message("user", f"(debug: {task.reference})"))


class LeaksByDescription(Sound):
    def tools(self) -> Any:
        return tuple(
            item.renamed("reverse", description=f"Not {self.task.reference}") for item in super().tools()
        )


class LeaksByNumber(Sound):
    """The reference is an integer, shown back by an environment step."""

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        number = rng.randint(10**4, 10**6) if variant == "base" else rng.randint(10**7, 10**9)
        return Draft(str(number), f"Double {number}.", 2 * number)

    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action] | None:
        return (call("hint"), answer(f"Answer: {task.reference}"))

    @tool
    def hint(self) -> str:
        """Get a hint."""
        return f"The answer is not {self.task.reference}."


class OverlappingByGenerator(Sound):
    """Every split draws the same words."""

    @classmethod
    def tasks(
        cls, split: Split, variant: str = "base", *, seed: int = 0, limit: int | None = None
    ) -> Iterator[Task]:
        for task in make_tasks(cls.name, cls.generate, "train", variant, seed=seed, limit=limit):
            yield Task(f"{split}-{task.id}", split, variant, task.prompt, task.reference)


class OverlappingByKey(Sound):
    """The key holds a random tag, so one word lands in several splits."""

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        word = "".join(rng.choices("abc" if variant == "base" else "xyz", k=4))
        return Draft(f"{word}{rng.random()}", f"Reverse {word}.", word[::-1])


class RandomTasks(Sound):
    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        return super().generate(random.Random(random.random()), variant)


class OrderDependentTasks(Sound):
    """The items depend on how many tasks were drawn before."""

    drawn: ClassVar[Iterator[int]] = count()

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        return super().generate(random.Random(next(cls.drawn)), variant)


class RandomObservations(Sound):
    @tool
    def reverse(self, text: str) -> str:
        """Reverse a text."""
        return f"{text[::-1]} ({time.perf_counter_ns()})"


class CountingState(Sound):
    """What one episode reports depends on the episodes before it."""

    episodes: ClassVar[Iterator[int]] = count()

    def state(self) -> Mapping[str, Any]:
        return {"number": next(self.episodes)}


class ConstantAnswer(Sound):
    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        draft = super().generate(rng, variant)
        return Draft(draft.key, draft.prompt, "yes")


class AnswerLast(Sound):
    """The answer is always the last number of the prompt."""

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        low = 10**4 if variant == "base" else 10**8
        first, last = rng.randint(low, 9 * low), rng.randint(low, 9 * low)
        return Draft(f"{first} {last}", f"After {first} comes {last}", str(last))


class ToolSolves(Sound):
    """Any call returns the answer, whatever is asked of the tool."""

    @tool
    def reverse(self, text: str) -> str:
        """Reverse a text."""
        return self.task.prompt[0].content.removeprefix("Reverse ").rstrip(".")[::-1]


class WrongOracle(Sound):
    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action] | None:
        right = super().oracle(task)
        return right if task.variant == "base" else (answer("Answer: unknown"),)


class NoHeldOut(Sound):
    variants: ClassVar[Mapping[str, Variant]] = {"base": Variant("only")}


class EmptyVariant(Sound):
    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        draft = super().generate(rng, "base")
        return draft if variant == "base" else Draft("one", draft.prompt, draft.reference)


class StepsForEver(Environment):
    """No guard of its own: step is put in place after the class was made."""

    name: ClassVar[str] = "unguarded"
    variants: ClassVar[Mapping[str, Variant]] = Sound.variants
    rewards: ClassVar[Sequence[Reward]] = (exact,)
    generate = Sound.generate

    async def reset(self, task: Task) -> tuple[Message, ...]:
        return task.prompt

    async def step(self, action: Action) -> Step:
        return Step(terminated=True)


async def _unguarded(self: Environment, action: Action) -> Step:
    return Step(terminated=True)


setattr(StepsForEver, "step", _unguarded)  # noqa: B010


class FailingClose(Sound):
    async def close(self) -> None:
        raise OSError("cannot free")


class StateNotJson(Sound):
    def state(self) -> Mapping[str, Any]:
        return {"answer": {self.answer}}


class Raises(Sound):
    def prepare(self, task: Task) -> None:
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("cls", "items"),
    [
        (LeaksByTool, {"canary"}),
        (LeaksByPrompt, {"canary"}),
        (LeaksByDescription, {"canary"}),
        (LeaksByNumber, {"canary"}),
        (OverlappingByGenerator, {"splits disjoint"}),
        (OverlappingByKey, {"splits disjoint"}),
        (RandomTasks, {"determinism", "stable items"}),
        (OrderDependentTasks, {"determinism", "stable items"}),
        (RandomObservations, {"determinism"}),
        (CountingState, {"determinism"}),
        (ConstantAnswer, {"null policies"}),
        (AnswerLast, {"null policies"}),
        (ToolSolves, {"null policies"}),
        (WrongOracle, {"oracle"}),
        (NoHeldOut, {"variants"}),
        (EmptyVariant, {"variants"}),
        (StepsForEver, {"step after end"}),
        (FailingClose, {"close"}),
        (StateNotJson, {"state"}),
        (Raises, {"oracle", "null policies", "step after end"}),
    ],
)
def test_each_broken_environment_is_caught(cls: type[Environment], items: set[str]) -> None:
    report = environment(cls)
    assert not report.ok
    assert items <= failed(report), report


@pytest.mark.parametrize(
    "cls", [LeaksByTool, LeaksByPrompt, OverlappingByKey, RandomObservations, StepsForEver]
)
def test_a_single_fault_fails_its_own_item_only(cls: type[Environment]) -> None:
    assert len(failed(environment(cls))) == 1


def test_finding_names_the_task_or_the_exception() -> None:
    assert "ZeroDivisionError: a bug (test_checks.py:" in item(environment(Raises), "oracle").detail
    assert "sound-base-" in item(environment(LeaksByTool), "canary").detail
    assert "of variant base" in item(environment(AnswerLast), "null policies").detail


def test_environment_that_blocks_fails_its_items_within_the_deadline() -> None:
    never = threading.Event()

    class Blocks(Sound):
        @tool
        def reverse(self, text: str) -> str:
            """Reverse a text."""
            never.wait()
            return text

    try:
        report = check_environment(Blocks, tasks=1, seconds=0.05)
    finally:
        never.set()
    assert "DeadlineExceeded" in item(report, "oracle").detail
    assert item(report, "splits disjoint").ok is True


def test_what_cannot_be_checked_is_skipped_with_a_reason_and_does_not_fail() -> None:
    class NoOracle(Sound):
        rewards: ClassVar[Sequence[Reward]] = ()

        @classmethod
        def generate(cls, rng: random.Random, variant: str) -> Draft:
            draft = super().generate(rng, variant)
            return Draft(draft.key, draft.prompt, {"word": draft.reference})

        @classmethod
        def oracle(cls, task: Task) -> Sequence[Action] | None:
            return None

    report = environment(NoOracle)
    assert report.ok
    skipped = {entry.name: entry.detail for entry in report.items if entry.ok is None}
    assert skipped == {
        "oracle": "no rewards", "null policies": "no rewards",
        "canary": "no reference is a string or an integer",
    }  # fmt: skip


def test_tasks_that_state_their_answer_count_towards_all_tasks_only() -> None:
    def given(share: int) -> type[Environment]:
        class Given(Sound):
            @classmethod
            def generate(cls, rng: random.Random, variant: str) -> Draft:
                draft = Sound.generate(rng, variant)
                number = rng.randint(10**6, 10**7)
                if rng.randint(0, 9) < share:
                    return Draft(draft.key, f"It is {number}.", str(number), {"needs_call": False})
                return Draft(draft.key, draft.prompt, draft.reference, {"needs_call": True})

        return Given

    few, many = (environment(given(share)) for share in (2, 9))
    assert item(few, "null policies").ok is True
    assert item(many, "null policies").ok is False


def test_checks_need_a_task() -> None:
    with pytest.raises(ConfigError, match="tasks is 0"):
        check_environment(Sound, tasks=0)
    with pytest.raises(ConfigError, match="tasks is 0"):
        check_reward(exact, Sound, tasks=0)


# --- rewards


@pytest.mark.parametrize("which", Calculator.rewards, ids=lambda item: item.name)
def test_rewards_of_the_calculator_pass(which: Reward) -> None:
    report = check_reward(which, Calculator, tasks=4)
    assert report.ok, report


def test_hack_matrix_is_refused_by_the_exact_reward_of_a_sound_environment() -> None:
    report = check_reward(exact, Sound, tasks=4)
    assert report.ok
    assert item(report, "hack matrix").ok is True


def _judge(body: Any, **options: Any) -> Report:
    made = reward(**({"trust": Trust.VERIFIED, "name": "exact"} | options))(body)

    class Judged(Sound):
        rewards: ClassVar[Sequence[Reward]] = (made,)

    return check_reward(made, Judged, tasks=3)


_coin = random.Random(0)


@pytest.mark.parametrize(
    ("body", "items"),
    [
        (lambda e: str(e.reference) in e.model_text, {"hack matrix"}),
        (lambda e: str(e.reference) in (e.answer or ""), {"hack matrix"}),
        (lambda e: any(str(e.reference) in str(m) for m in e.messages), {"hack matrix"}),
        (lambda e: "correct" in (e.answer or ""), {"gold", "hack matrix"}),
        (lambda e: len(e.answer or "") > 5, {"null policies", "hack matrix"}),
        (lambda e: (e.answer or "").startswith("Answer: "), {"null policies", "hack matrix"}),
        (lambda e: e.answer == e.reference, {"gold"}),
        (lambda e: e.reference / 2, {"gold", "always a number"}),
        (lambda e: 3.0, {"always a number"}),
        (lambda e: _coin.random(), {"determinism"}),
    ],
)  # fmt: skip
def test_each_broken_reward_is_caught(body: Any, items: set[str]) -> None:
    report = _judge(body)
    assert not report.ok
    assert items <= failed(report), report


def test_reward_that_folds_other_scripts_is_caught() -> None:
    @reward(trust=Trust.VERIFIED, name="exact_answer")
    def folded(episode: Episode) -> float:
        text = (episode.answer or "").removeprefix("Answer:").strip()
        return float(text.isdecimal() and len(text) < 99 and int(text) == episode.reference)

    report = check_reward(folded, Calculator, tasks=3)
    assert failed(report) == {"hack matrix"}
    assert "fullwidth_digits (100%)" in item(report, "hack matrix").detail


def test_price_may_cost_gold_less_than_the_dearest_null_but_not_more() -> None:
    assert check_reward(call_price(0.1), Sound, tasks=3).ok
    upside_down = reward(trust=Trust.VERIFIED, weight=-1.0, name="wrong")(
        lambda e: float(e.answer == f"Answer: {e.reference}")
    )
    assert "gold" in failed(check_reward(upside_down, Sound, tasks=3))
    assert (best_value(upside_down), best_value(exact)) == (0.0, 1.0)


def test_environment_that_cannot_be_played_fails_the_reward_check_with_its_reason() -> None:
    report = check_reward(exact, Raises, tasks=2)
    assert [entry.name for entry in report.items] == ["episodes"]
    assert "ZeroDivisionError" in report.items[0].detail


# --- play and exploits


def test_play_builds_the_episode_that_rewards_see() -> None:
    task = next(Sound.tasks("train"))
    episode = asyncio.run(play(Sound, task, Sound.oracle(task) or ()))
    assert [message.role for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.stop is StopReason.ANSWERED
    assert episode.answer == f"Answer: {task.reference}"
    assert episode.state == {"answer": episode.answer}
    assert str(task.reference) not in episode.turns[0].action.text
    assert exact(episode) == 1


@pytest.mark.parametrize(
    ("actions", "stop"),
    [
        ([], StopReason.HORIZON),
        ([call("reverse", text="a")], StopReason.HORIZON),
        ([call("reverse", text="a")] * 5, StopReason.HORIZON),
        ([Action("x", finish=Finish.LENGTH)], StopReason.LENGTH),
        ([Action("x", finish=Finish.CONTEXT)], StopReason.CONTEXT_FULL),
    ],
)
def test_episode_that_does_not_end_by_itself_is_truncated_without_an_answer(
    actions: list[Action], stop: StopReason
) -> None:
    episode = asyncio.run(play(Sound, next(Sound.tasks("train")), actions))
    assert (episode.stop, episode.truncated, episode.answer) == (stop, True, None)


def test_play_closes_after_a_fault_and_lets_it_through() -> None:
    closed: list[bool] = []

    class Faulty(Sound):
        async def step(self, action: Action) -> Step:
            raise EnvironmentFault("broken")

        async def close(self) -> None:
            closed.append(True)

    with pytest.raises(EnvironmentFault, match="broken"):
        asyncio.run(play(Faulty, next(Faulty.tasks("train")), [answer("x")]))
    assert closed == [True]


def test_answer_shape_comes_from_the_oracle_and_is_empty_without_one() -> None:
    task = next(Sound.tasks("train"))
    assert answer_shape(Sound, task).fill(5) == "Answer: 5"
    bare = Task("x", "train", "base", (Message("user", "hi"),), {"a": 1})
    assert answer_shape(Sound, bare) == Shape()


def test_null_policies_never_depend_on_the_reference() -> None:
    first, other = list(Sound.tasks("train", limit=2))
    changed = Task(first.id, first.split, first.variant, first.prompt, "secret")
    for name, policy in null_policies(Shape("Answer: "), other, (), Sound.oracle(other)).items():
        assert policy(first, first.prompt) == policy(changed, first.prompt), name


def test_no_hack_submits_the_gold_text_itself() -> None:
    first, other = list(Calculator.tasks("train", limit=2))
    gold = f"Answer: {first.reference}"
    hacks = hack_matrix(first, other, Shape("Answer: "), gold, ())
    assert len(hacks) >= 14
    assert all(actions[-1].text.strip() != gold for actions in hacks.values())


def test_foreign_scripts_differ_from_the_text_and_leave_out_what_they_cannot_change() -> None:
    assert foreign_script("Answer: 12") == {
        "fullwidth_digits": "Answer: １２", "arabic_digits": "Answer: ١٢", "cyrillic_letters": "Аnswеr: 12"
    }  # fmt: skip
    assert foreign_script("!") == {}


class CallsWhatIsNotThere(Sound):
    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action] | None:
        return (call("revers", text=str(task.reference)[::-1]), answer(f"Answer: {task.reference}"))


def test_an_oracle_that_calls_no_real_tool_fails_though_it_is_paid() -> None:
    found = item(environment(CallsWhatIsNotThere), "oracle")
    assert found.ok is False
    assert "calls 'revers', which is no tool; did you mean 'reverse'?" in found.detail

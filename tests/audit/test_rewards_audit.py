"""The audit passes sound rewards, catches each way of being wrong, and skips nothing in silence."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from surefoot.audit.rewards import (
    RETURN,
    Audit,
    AuditFailed,
    RewardAudit,
    Tally,
    admit,
    audit_rewards,
    check_overrides,
)
from surefoot.core.errors import ConfigError
from surefoot.core.types import Action, Task, Trust
from surefoot.envs.base import Draft, Environment, ToolEnvironment, Variant, answer, call
from surefoot.envs.calculator import Calculator
from surefoot.envs.drawers import Drawers
from surefoot.envs.loading import load_environment
from surefoot.rewards.base import Episode, Reward, reward
from surefoot.rewards.common import call_price
from surefoot.rewards.suite import RewardSuite
from surefoot.tools.base import tool

LEAKY = str(Path(__file__).with_name("leaky.py"))


@reward(trust=Trust.VERIFIED, resolution=1.0)
def exact(episode: Episode) -> float:
    return float((episode.answer or "").strip() == str(episode.reference))


class Sound(ToolEnvironment):
    """Reverse a word; the tool does it. Each subclass or reward breaks one thing."""

    name: ClassVar[str] = "sound"
    horizon: ClassVar[int] = 3
    variants: ClassVar[Mapping[str, Variant]] = {"base": Variant("5 letters"), "scale": Variant("9", "scale")}
    rewards: ClassVar[Sequence[Reward]] = (exact,)

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5))
        return Draft(word, f"Reverse {word}.", word[::-1])

    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action] | None:
        return (call("reverse", text=str(task.reference)[::-1]), answer(str(task.reference)))

    @tool
    def reverse(self, text: str) -> str:
        """Reverse a text."""
        return text[::-1]


def audit(
    cls: type[Environment] = Sound, *rewards: Reward, tasks: int = 4, seconds: float = 30.0, **suite: Any
) -> Audit:
    own = RewardSuite(rewards or cls.rewards, **suite)
    return audit_rewards(own, cls, tasks=tasks, seconds=seconds)


def row(found: Audit, name: str) -> RewardAudit:
    return next(item for item in found.rewards if item.name == name)


def hits(tallies: Mapping[str, Tally]) -> dict[str, Tally]:
    return {kind: tally for kind, tally in tallies.items() if tally.hits}


def own(function: Any, **options: Any) -> Reward:
    """A reward in the place of the one that defines success."""
    return reward(**{"trust": Trust.VERIFIED, "name": "exact", **options})(function)


# --- what is sound


@pytest.mark.parametrize("cls", [Calculator, Drawers, Sound])
def test_sound_rewards_pass_with_every_count(cls: type[Environment]) -> None:
    found = audit(cls, tasks=12)
    assert found.ok, found
    assert found.notes == ()
    assert all(item.ok is True for item in found.rewards)
    success = row(found, cls.success_reward())
    assert success.gold == success.false_rejects["oracle"].tried == found.tasks == 12
    assert not hits(success.false_rejects) and not hits(success.nulls) and not hits(success.exploits)
    assert {
        "empty",
        "constant_0",
        "echo_prompt",
        "copy_prompt",
        "copy_observation",
        "longest",
        "all_options",
    } <= (success.nulls.keys())
    assert len(success.exploits) >= 12
    assert found.rewards[-1].name == RETURN


def test_a_reward_of_form_alone_is_counted_and_left_to_the_return() -> None:
    found = audit(Calculator, tasks=6)
    assert row(found, "answer_format").ok
    assert hits(row(found, "answer_format").nulls)
    assert not hits(row(found, RETURN).nulls)


def test_two_audits_of_one_recipe_agree() -> None:
    assert audit(Calculator, tasks=3) == audit(Calculator, tasks=3)


def test_an_audit_of_the_calculator_takes_less_than_two_seconds_of_cpu() -> None:
    began = time.process_time()
    audit(Calculator, tasks=12)
    assert time.process_time() - began < 2


# --- false accepts


def test_a_reward_that_echoing_earns_fails() -> None:
    found = audit(load_environment(LEAKY), tasks=6)
    failed = row(found, "mentions_largest")
    assert failed.ok is False and not found.ok
    assert failed.nulls["echo_prompt"] == failed.nulls["largest_number"] == Tally(6, 6)
    assert "echo_prompt 6/6" in failed.detail
    assert failed.exploits["repeated"] == Tally(6, 6)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda e: float(len(e.model_text) > 5_000), "longest"),
        (lambda e: float(e.answer == ""), "empty"),
        (lambda e: float(e.answer == "yes"), "constant_yes"),
        (lambda e: float("Reverse" in e.model_text), "copy_prompt"),
        (lambda e: float(bool(e.turns) and bool(e.tool_calls) and e.answer is not None), "copy_observation"),
        (lambda e: float((e.answer or "").count("\n") >= 2), "all_options"),
    ],
)
def test_each_way_of_knowing_nothing_is_caught(function: Any, kind: str) -> None:
    """Gold is refused as well; what matters here is that the policy is seen to be paid."""
    failed = row(audit(Sound, own(function)), "exact")
    assert failed.ok is False
    assert failed.nulls[kind] == Tally(4, 4)
    assert f"{kind} 4/4" in failed.detail


def test_one_exploit_is_enough() -> None:
    lenient = own(lambda e: float(str(e.reference) in (e.answer or "").split()))
    failed = row(audit(Sound, lenient), "exact")
    assert failed.ok is False
    assert not hits(failed.nulls)
    assert {"forged_submission", "repeated"} <= hits(failed.exploits).keys()


class Numbered(Sound):
    """The answer is ``pick(number of the task)``; nothing needs a tool."""

    @classmethod
    def tasks(cls, split: Any, variant: str = "base", *, seed: int = 0, limit: int | None = None) -> Any:
        for i, task in enumerate(super().tasks(split, variant, seed=seed, limit=limit)):
            yield Task(task.id, split, variant, task.prompt, cls.pick(i), {"needs_call": cls.needs(i)})

    @staticmethod
    def pick(number: int) -> str:
        return "0" if number in (3, 7) else f"x{number}"

    @staticmethod
    def needs(number: int) -> bool:
        return True

    @classmethod
    def oracle(cls, task: Task) -> Sequence[Action]:
        return (answer(str(task.reference)),)


class OftenZero(Numbered):
    @staticmethod
    def pick(number: int) -> str:
        return "0" if number % 3 == 0 else f"x{number}"


class ZeroWhereItIsStated(OftenZero):
    @staticmethod
    def needs(number: int) -> bool:
        return number % 3 != 0


def test_two_lucky_guesses_of_twelve_are_no_leak_and_four_are() -> None:
    lucky, leaky = (row(audit(cls, tasks=12), "exact") for cls in (Numbered, OftenZero))
    assert (lucky.nulls["constant_0"], lucky.ok) == (Tally(2, 12), True)
    assert (leaky.nulls["constant_0"], leaky.ok) == (Tally(4, 12), False)


def test_tasks_that_state_their_answer_do_not_count_against_null_policies() -> None:
    free = row(audit(ZeroWhereItIsStated, tasks=12), "exact")
    assert (free.nulls["constant_0"], free.ok) == (Tally(0, 8), True)


# --- false rejects


def test_gold_that_is_refused_fails_whether_or_not_it_defines_success() -> None:
    @reward(trust=Trust.VERIFIED, weight=0.1)
    def loud(episode: Episode) -> float:
        return float("!" in episode.model_text)

    found = audit(Sound, exact, loud)
    assert row(found, "exact").ok and row(found, "loud").ok is False
    assert row(found, "loud").false_rejects["oracle"] == Tally(4, 4)


def test_blanks_around_the_answer_must_not_cost_anything() -> None:
    raw = own(lambda e: float(bool(e.turns) and e.turns[-1].action.text == str(e.reference)))
    failed = row(audit(Sound, raw), "exact")
    assert failed.ok is False
    assert hits(failed.false_rejects).keys() == {"spaces_around", "lines_around"}


def test_the_answer_has_no_blanks_around_it_as_in_training() -> None:
    assert audit(Sound, own(lambda e: float(e.answer == str(e.reference)))).ok


def test_a_period_may_be_refused_always_or_never_but_not_sometimes() -> None:
    def bears(vowels: str) -> Reward:
        def score(episode: Episode) -> float:
            answered = episode.answer or ""
            if str(episode.reference)[0] in vowels:
                answered = answered.removesuffix(".")
            return float(answered == str(episode.reference))

        return own(score)

    never, always, sometimes = (
        row(audit(Sound, bears(letters)), "exact")
        for letters in ("", "abcdefghijklmnopqrstuvwxyz", "abcdefghijklm")
    )
    assert never.ok and never.strict == ("final_period",)
    assert always.ok and always.strict == ()
    assert sometimes.ok is False and "final_period" in sometimes.detail


def test_what_the_environment_declares_equivalent_must_be_paid() -> None:
    class Twice(Sound):
        @classmethod
        def equivalents(cls, task: Task) -> list[Sequence[Action]]:
            text = str(task.reference)
            return [(answer(text),), (answer(text.upper()),)]

    failed = row(audit(Twice), "exact")
    assert failed.ok is False and failed.false_rejects["equivalent"] == Tally(4, 8)
    folding = own(lambda e: float((e.answer or "").lower() == str(e.reference)))
    assert row(audit(Twice, folding), "exact").false_rejects["equivalent"] == Tally(0, 8)


# --- the return


def test_a_price_that_makes_doing_nothing_pay_better_than_solving_fails_the_return() -> None:
    fair, dear = (audit(Sound, exact, call_price(price)) for price in (0.3, 1.5))
    assert fair.ok
    assert row(dear, "exact").ok and row(dear, "call_price").ok
    assert row(dear, RETURN).ok is False
    assert "empty 4/4" in row(dear, RETURN).detail


def test_a_learned_reward_cannot_lift_a_cheat_when_ordered_and_can_when_weighted() -> None:
    @reward(trust=Trust.LEARNED, weight=3.0)
    def likes_length(episode: Episode) -> float:
        return min(len(episode.model_text) / 1000, 1.0)

    ordered = audit(Sound, exact, likes_length)
    weighted = audit(Sound, exact, likes_length, compose="weighted", override="to show it")
    assert ordered.ok and row(weighted, "likes_length").ok
    assert row(weighted, RETURN).ok is False and "longest" in row(weighted, RETURN).detail


def test_a_group_reward_is_judged_by_its_place_and_by_the_return() -> None:
    @reward(trust=Trust.VERIFIED, weight=0.2, group=True)
    def rank(episodes: Sequence[Episode]) -> list[float]:
        longest = max(len(e.model_text) for e in episodes) or 1
        return [1 - len(e.model_text) / longest for e in episodes]

    found = audit(Sound, exact, rank)
    assert found.ok and row(found, "rank").false_rejects == {}


# --- what cannot be measured


@pytest.mark.parametrize("defines_success", [True, False])
def test_a_reward_that_gives_no_number_fails_with_its_reason(defines_success: bool) -> None:
    def fragile(episode: Episode) -> float:
        if len(episode.model_text) > 10_000:
            raise ValueError("too long for me")
        return exact(episode)

    broken = own(fragile) if defines_success else own(fragile, name="fragile", weight=0.1)
    found = audit(Sound, *((broken,) if defines_success else (exact, broken)))
    failed = row(found, broken.name)
    assert failed.ok is False and failed.unscored > 0
    assert "too long for me (test_rewards_audit.py:" in failed.detail


def test_a_reward_that_hangs_once_spoils_only_that_episode() -> None:
    def slow(episode: Episode) -> float:
        if episode.answer == "yes":
            time.sleep(0.6)
        return exact(episode)

    failed = row(audit(Sound, own(slow, seconds=0.2), tasks=1), "exact")
    assert failed.ok is False and failed.unscored == 1 and "deadline" in failed.detail
    assert failed.false_rejects["oracle"] == Tally(0, 1)


def test_a_learned_reward_behind_an_endpoint_is_never_asked_and_never_passed_in_silence() -> None:
    endpoint = SimpleNamespace(base_url="http://judge.example/v1")
    asked: list[str] = []

    @reward(trust=Trust.LEARNED)
    def judged(episode: Episode) -> float:
        asked.append(endpoint.base_url)
        return 1.0

    found = audit(Sound, exact, judged)
    assert not asked
    assert row(found, "judged").ok is None and "http://judge.example/v1" in row(found, "judged").detail
    assert row(found, "exact").ok and row(found, RETURN).ok and found.ok
    (event,) = admit(found, {})
    assert event[0] == "not_audited" and event[1]["reward"] == "judged"

    free = audit(Sound, exact, judged, compose="weighted", override="to show it")
    assert row(free, RETURN).ok is None and "judged" in row(free, RETURN).detail
    alone = audit(Sound, judged)
    assert [item.ok for item in alone.rewards] == [None, None]


def test_a_learned_reward_that_scores_nothing_here_is_not_audited() -> None:
    @reward(trust=Trust.LEARNED)
    def away(episode: Episode) -> float:
        raise OSError("weights are elsewhere")

    found = audit(Sound, exact, away)
    assert row(found, "away").ok is None and "weights are elsewhere" in row(found, "away").detail


class NoOracle(Sound):
    @classmethod
    def oracle(cls, task: Task) -> None:
        return None


def test_without_an_oracle_only_false_accepts_can_fail() -> None:
    found = audit(NoOracle)
    assert found.ok and "gold was not checked" in found.notes[0]
    assert row(found, "exact").ok and "gold was not checked" in row(found, "exact").detail
    assert row(found, RETURN).ok is None
    assert row(audit(NoOracle, own(lambda e: float("Reverse" in e.model_text))), "exact").ok is False


class RaisesOnYes(Sound):
    async def step(self, action: Action) -> Any:
        if action.text == "yes":
            raise RuntimeError("no yes here")
        return await super().step(action)


class BlocksOnYes(Sound):
    async def step(self, action: Action) -> Any:
        if action.text == "yes":
            time.sleep(0.7)
        return await super().step(action)


class ExitsOnYes(Sound):
    async def step(self, action: Action) -> Any:
        if action.text == "yes":
            raise SystemExit(0)
        return await super().step(action)


@pytest.mark.parametrize("cls", [RaisesOnYes, BlocksOnYes, ExitsOnYes])
def test_an_episode_that_the_environment_breaks_is_noted_and_left_out(cls: type[Environment]) -> None:
    found = audit(cls, tasks=1, seconds=0.3)
    assert found.ok
    assert "constant_yes" not in row(found, "exact").nulls
    assert row(found, "exact").false_rejects["oracle"] == Tally(0, 1)
    (note,) = found.notes
    assert note.startswith("1 episodes") and "constant_yes" in note


def test_an_environment_that_cannot_be_played_is_not_audited() -> None:
    class Broken(Sound):
        async def reset(self, task: Task) -> Any:
            raise RuntimeError("no server")

    found = audit(Broken)
    assert [item.ok for item in found.rewards] == [None, None]
    assert any("no server" in note for note in found.notes)


def test_tasks_that_cannot_be_solved_have_no_gold() -> None:
    class Impossible(Sound):
        @classmethod
        def generate(cls, rng: random.Random, variant: str) -> Draft:
            draft = super().generate(rng, variant)
            return Draft(draft.key, draft.prompt, f"no {draft.key}", {"impossible": True})

    found = audit(Impossible)
    assert found.ok and row(found, "exact").gold == 0


def test_no_task_and_no_count_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        audit(tasks=0)


# --- the gate


def test_a_failed_reward_is_refused_by_name_and_admitted_with_a_reason() -> None:
    found = audit(load_environment(LEAKY))
    with pytest.raises(
        AuditFailed, match=r"mentions_largest: paid in full.*\n.*audit\.override\.mentions"
    ) as caught:
        admit(found, {})
    assert caught.value.exit_code == 1
    ((kind, fields),) = admit(found, {"mentions_largest": "a test of the gate"})
    assert kind == "audit_override"
    assert fields["reason"] == "a test of the gate" and "echo_prompt" in fields["failure"]


def test_an_override_that_is_not_needed_is_a_note_and_an_unknown_one_an_error() -> None:
    ((kind, fields),) = admit(audit(), {"exact": "just in case"})
    assert kind == "audit_note" and "audit.override.exact is not needed" in fields["message"]
    with pytest.raises(ConfigError, match=r"audit\.override\.exat: no such reward; did you mean 'exact'"):
        check_overrides({"exat": "typo"}, ["exact"])
    check_overrides({RETURN: "known", "exact": "known"}, ["exact"])

"""The rule: each outcome is reachable, and none is reachable without its evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, DataError
from surefoot.evaluation.verdict import PolicyScores, Verdict, judge

TASKS, SAMPLES = 40, 4


def _policy(name: str, seed: int, rates: Mapping[str, float], seeds: list[int] | None = None) -> PolicyScores:
    rng = np.random.default_rng(seed)
    width = SAMPLES if seeds is None else len(seeds)
    return PolicyScores(
        name,
        {
            variant: {
                f"{variant}-{i}": (rng.random(width) < rate).astype(float).tolist() for i in range(TASKS)
            }
            for variant, rate in rates.items()
        },
        seeds=seeds,
    )


def _scores(**by_arm: tuple[float, float]) -> dict[str, PolicyScores]:
    """Arms with (base, variant) success rates, each from its own random stream."""
    return {
        name: _policy(name, index, {"base": base, "rules": rules})
        for index, (name, (base, rules)) in enumerate(by_arm.items())
    }


def _judge(arms: dict[str, PolicyScores], **options: Any) -> Verdict:
    arms = dict(arms)
    known = {name: arms.pop(name) for name in ("initial", "start", "final")}
    defaults = {
        "weakest_trust": "verified",
        "seeds": [0],
        "cost_usd": 0.25,
        "tokens": 1_200_000,
        "draws": 400,
    }
    return judge(**known, controls=arms, **(defaults | options))


GOOD = _scores(
    initial=(0.1, 0.1), start=(0.2, 0.2), final=(0.7, 0.6), permuted=(0.2, 0.2), random=(0.25, 0.2)
)


# -------------------- each outcome


def test_improvement_over_everything_is_learned() -> None:
    verdict = _judge(GOOD)
    assert verdict.outcome == "learned"
    assert verdict.reasons == ()
    assert set(verdict.holm) == {"permuted", "random"}
    assert max(verdict.holm.values()) < 0.05


def test_a_control_that_improves_less_than_the_treatment_leaves_the_claim_standing() -> None:
    arms = {**GOOD, "format_only": _policy("format_only", 7, {"base": 0.45, "rules": 0.3})}
    verdict = _judge(arms)
    gain = next(c for c in verdict.comparisons if (c.name, c.variant) == ("format_only - start", "base"))
    assert gain.improves
    assert verdict.outcome == "learned"


def test_improvement_on_base_alone_is_memorised() -> None:
    arms = _scores(initial=(0.1, 0.1), start=(0.2, 0.2), final=(0.7, 0.2), permuted=(0.2, 0.2))
    verdict = _judge(arms)
    assert verdict.outcome == "memorised"
    assert "no held-out variant improves over the start: rules" in verdict.reasons[0]


def test_a_control_that_improves_as_much_is_falsified() -> None:
    arms = _scores(
        initial=(0.1, 0.1), start=(0.2, 0.2), final=(0.7, 0.6), permuted=(0.2, 0.2), random=(0.7, 0.6)
    )
    verdict = _judge(arms)
    assert verdict.outcome == "falsified"
    assert verdict.reasons[0].startswith("control 'random' improves as much")
    assert "random" in verdict.sentence


def test_no_improvement_is_not_shown() -> None:
    arms = _scores(initial=(0.2, 0.2), start=(0.2, 0.2), final=(0.2, 0.2), permuted=(0.2, 0.2))
    verdict = _judge(arms)
    assert verdict.outcome == "not_shown"
    assert any("final - start on base does not exclude 0" in reason for reason in verdict.reasons)


# -------------------- what no verdict may do


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("trial", range(4))
def test_a_control_equal_to_the_treatment_is_never_learned(rate: float, trial: int) -> None:
    final = _policy("final", trial, {"base": rate, "rules": rate})
    arms = {**GOOD, "final": final, "permuted": final}
    verdict = _judge(arms)
    assert verdict.outcome == ("falsified" if rate >= 0.5 else "not_shown")


@given(base=st.floats(0, 1), other=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_final_policy_equal_to_the_start_is_never_learned(base: float, other: float, seed: int) -> None:
    start = _policy("start", seed, {"base": base, "rules": other})
    verdict = _judge({**GOOD, "start": start, "final": start}, draws=200)
    assert verdict.outcome in ("not_shown", "falsified")


@pytest.mark.parametrize("trial", range(10))
def test_luck_alone_is_never_learned(trial: int) -> None:
    rates = {"base": 0.4, "rules": 0.4}
    names = ("initial", "start", "final", "permuted")
    arms = {name: _policy(name, 10 * trial + i, rates) for i, name in enumerate(names)}
    assert _judge(arms).outcome != "learned"


def test_a_gain_from_the_cold_start_alone_is_not_learned() -> None:
    arms = _scores(initial=(0.1, 0.1), start=(0.7, 0.6), final=(0.7, 0.6), permuted=(0.7, 0.6))
    verdict = _judge(arms)
    assert verdict.outcome == "not_shown"
    assert not any("final - initial" in reason for reason in verdict.reasons)


def test_winning_back_what_the_cold_start_lost_is_not_learned() -> None:
    arms = _scores(initial=(0.7, 0.6), start=(0.2, 0.2), final=(0.7, 0.6), permuted=(0.2, 0.2))
    verdict = _judge(arms)
    assert verdict.outcome == "not_shown"
    assert len(verdict.reasons) == 1
    assert verdict.reasons[0].startswith("final - initial on base does not exclude 0 from above")


def test_without_a_control_nothing_is_shown() -> None:
    arms = {name: GOOD[name] for name in ("initial", "start", "final")}
    verdict = _judge(arms, required_controls=())
    assert verdict.outcome == "not_shown"
    assert verdict.reasons == ("no control arm",)
    assert verdict.holm == {}
    assert "no control arm" in verdict.sentence


def test_a_missing_required_control_is_named() -> None:
    arms = {name: policy for name, policy in GOOD.items() if name != "permuted"}
    verdict = _judge(arms)
    assert verdict.outcome == "not_shown"
    assert verdict.reasons == ("required control 'permuted' was not run",)
    assert _judge(arms, required_controls=("random",)).outcome == "learned"


def test_an_unbeaten_control_withholds_the_claim_even_when_it_shows_no_gain_itself() -> None:
    def solved(name: str, *tasks: int) -> PolicyScores:
        return PolicyScores(name, {"base": {f"t{i}": [int(i in tasks)] for i in range(40)}})

    arms = {
        "initial": solved("initial"),
        "start": solved("start", *range(10)),
        "final": solved("final", *range(17)),
        "permuted": solved("permuted"),
        "random": solved("random", *range(1, 15)),
    }
    verdict = _judge(arms)
    assert verdict.outcome == "not_shown"
    assert len(verdict.reasons) == 1
    assert verdict.reasons[0].startswith("final - random on base does not exclude 0 from above")


# -------------------- invariance


@given(order=st.permutations(range(TASKS)), arm_order=st.permutations(sorted(GOOD)))
@settings(max_examples=8, deadline=None)
def test_order_of_tasks_variants_and_arms_changes_nothing(order: list[int], arm_order: list[str]) -> None:
    shuffled = {
        name: PolicyScores(
            name,
            {
                variant: {key: tasks[key] for key in [list(tasks)[i] for i in order]}
                for variant, tasks in reversed(GOOD[name].by_variant.items())
            },
        )
        for name in arm_order
    }
    assert _judge(shuffled).to_json() == _judge(GOOD).to_json()


# -------------------- what is reported


def test_every_arm_and_variant_is_reported_better_or_worse() -> None:
    rates = {"base": 0.2, "action_names": 0.5, "rules": 0.2, "tools": 0.2}
    arms = {name: _policy(name, i, rates) for i, name in enumerate(("initial", "start", "permuted"))}
    arms["final"] = _policy("final", 9, {"base": 0.7, "action_names": 0.1, "rules": 0.6, "tools": 0.2})
    verdict = _judge(arms)
    reported = {(comparison.name, comparison.variant) for comparison in verdict.comparisons}
    pairs = ("final - initial", "final - start", "final - permuted", "permuted - start")
    assert reported == {(pair, variant) for pair in pairs for variant in rates}
    assert verdict.outcome == "learned"
    assert "1 of 3 better than the start, 1 worse" in verdict.sentence
    assert verdict.success["final"]["action_names"] == arms["final"].success("action_names")
    assert [c.variant for c in verdict.comparisons[:4]] == ["base", "action_names", "rules", "tools"]


def test_the_sentence_is_one_line_that_names_numbers_controls_trust_seeds_and_cost() -> None:
    verdict = _judge(GOOD, weakest_trust="LEARNED")
    assert "\n" not in verdict.sentence
    for part in (
        f"{GOOD['final'].success('base'):.3f}",
        f"{GOOD['start'].success('base'):.3f}",
        "95% intervals",
        "permuted +",
        "random +",
        "weakest trust learned",
        "1 seed;",
        "1,200,000 tokens",
        "$0.25",
    ):
        assert part in verdict.sentence, part
    assert _judge(GOOD, cost_usd=0.00042).sentence.endswith("tokens, $0.00042.")


def test_to_json_is_plain_and_round_trips() -> None:
    plain = _judge(GOOD).to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["comparisons"][0]["interval"]["low"] == _judge(GOOD).comparisons[0].interval.low


def test_a_run_without_variants_can_be_learned_but_says_so() -> None:
    arms = {name: PolicyScores(name, {"base": policy.by_variant["base"]}) for name, policy in GOOD.items()}
    verdict = _judge(arms)
    assert verdict.outcome == "learned"
    assert "no held-out variant" in verdict.sentence
    assert any("memorisation cannot be told" in note for note in verdict.notes)


# -------------------- training seeds


def _seeded(final_rates: list[float]) -> dict[str, PolicyScores]:
    """Three training seeds of two samples; the final policy's success depends on the seed."""
    labels = [0, 0, 1, 1, 2, 2]
    rng = np.random.default_rng(0)
    rates = np.repeat(final_rates, 2)
    tasks = {f"base-{i}": (rng.random(6) < rates).astype(float).tolist() for i in range(TASKS)}
    return {
        "initial": _policy("initial", 1, {"base": 0.1}),
        "start": _policy("start", 2, {"base": 0.2}),
        "final": PolicyScores("final", {"base": tasks}, seeds=labels),
        "permuted": _policy("permuted", 3, {"base": 0.2}, seeds=labels),
    }


def test_a_gain_that_every_training_seed_shares_is_learned() -> None:
    verdict = _judge(_seeded([0.7, 0.72, 0.68]), seeds=[0, 1, 2])
    assert verdict.outcome == "learned"
    assert {c.interval.seeds for c in verdict.comparisons} == {3}
    assert "3 seeds" in verdict.sentence


def test_a_gain_of_one_lucky_training_seed_is_not_shown() -> None:
    arms = _seeded([0.95, 0.2, 0.25])
    assert _judge(arms, seeds=[0, 1, 2]).outcome == "not_shown"
    pooled = {name: PolicyScores(name, policy.by_variant) for name, policy in arms.items()}
    verdict = _judge(pooled, seeds=[0, 1, 2])
    assert any("scores carry no training seed" in note for note in verdict.notes)


def test_arms_are_compared_on_the_training_seeds_they_share() -> None:
    arms = _seeded([0.7, 0.72, 0.68])
    arms["permuted"] = _policy("permuted", 3, {"base": 0.2}, seeds=[0, 0, 1, 1])
    verdict = _judge(arms, seeds=[0, 1, 2])
    by_name = {comparison.name: comparison.interval.seeds for comparison in verdict.comparisons}
    assert by_name["final - permuted"] == 2
    assert by_name["final - start"] == 3
    assert any("lacks training seeds [2]" in note for note in verdict.notes)


# -------------------- bad input


@pytest.mark.parametrize(
    ("by_variant", "seeds", "words"),
    [
        ({"rules": {"t": [1]}}, None, "lacks 'base'; it holds 'rules'"),
        ({"base": {}}, None, "variant 'base' holds no task"),
        ({"base": {"t": []}}, None, "task 't' holds no score"),
        ({"base": {"t": [0.5]}}, None, "holds 0.5; a success is 0 or 1"),
        ({"base": {"t": [float("nan")]}}, None, "holds nan"),
        ({"base": {"t": [1, 0, 1]}}, [0, 1], "holds 3 scores; seeds labels 2"),
    ],
)
def test_policy_scores_names_what_is_wrong(by_variant: Any, seeds: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        PolicyScores("final", by_variant, seeds)


def test_different_tasks_are_refused_with_arm_variant_and_task() -> None:
    tasks = {key: value for key, value in GOOD["start"].by_variant["base"].items() if key != "base-3"}
    start = PolicyScores("start", {**GOOD["start"].by_variant, "base": tasks})
    with pytest.raises(DataError, match=r"start on 'base' lacks 1 task\(s\) .*'base-3'"):
        _judge({**GOOD, "start": start})


def test_a_variant_hidden_from_one_side_is_refused() -> None:
    base_only = {"base": GOOD["final"].by_variant["base"]}
    with pytest.raises(DataError, match=r"start lacks variants \['rules'\]"):
        _judge({**GOOD, "start": PolicyScores("start", base_only)})
    with pytest.raises(DataError, match=r"has variants \['rules'\] that final lacks"):
        _judge({**GOOD, "final": PolicyScores("final", base_only)})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"weakest_trust": "verifed"}, ConfigError, "did you mean 'verified'"),
        ({"seeds": []}, DataError, "seeds is empty"),
        ({"cost_usd": float("nan")}, DataError, "cost_usd is nan"),
        ({"tokens": -1}, DataError, "tokens is -1"),
        ({"level": 95}, DataError, "level is 95"),
    ],
)
def test_judge_names_what_is_wrong(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        _judge(GOOD, **options)


def test_a_control_may_not_take_the_name_of_an_arm() -> None:
    with pytest.raises(ConfigError, match="'start'; that name is taken"):
        judge(
            initial=GOOD["initial"],
            start=GOOD["start"],
            final=GOOD["final"],
            controls={"start": GOOD["permuted"]},
            weakest_trust="verified",
            seeds=[0],
            cost_usd=0,
            tokens=0,
        )


def test_training_seeds_of_scores_and_run_must_agree() -> None:
    with pytest.raises(DataError, match=r"final.seeds labels \[0, 1, 2\]; seeds of the run are \[0\]"):
        _judge(_seeded([0.7, 0.7, 0.7]), seeds=[0])
    arms = _seeded([0.7, 0.7, 0.7])
    arms["permuted"] = _policy("permuted", 3, {"base": 0.2}, seeds=[7, 7])
    with pytest.raises(DataError, match="final and permuted share no training seed"):
        _judge(arms, seeds=[0, 1, 2])

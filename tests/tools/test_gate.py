"""A gate is total, pure and versioned: what gets through is allowed by every rule, whatever a rule does."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.types import Action, Finish, MalformedCall, Message, Step, Task, ToolCall
from surefoot.envs.base import Draft, ToolEnvironment, Variant
from surefoot.tools.base import tool
from surefoot.tools.gate import (
    GATE_INFO,
    REFUSED,
    Allow,
    Gate,
    GateContext,
    GateWatch,
    Refuse,
    Repair,
    Rule,
    Verdict,
    allowed_values,
    argument_schema,
    clamp,
    cost_limit,
    only_tools,
    rate_limit,
    requires,
)

BARE = GateContext()


def made(name: str = "buy", id: str = "c0", **arguments: Any) -> ToolCall:
    return ToolCall(id, name, arguments)


def verdicts(gate: Gate, *calls: ToolCall, state: Mapping[str, Any] | None = None) -> list[str]:
    return [item.verdict for item in GateWatch(gate).judge(calls, state or {})]


# -------------------- verdicts


def test_without_an_objection_the_call_goes_through_untouched() -> None:
    call = made(n=1)
    decision = Gate([only_tools("buy"), clamp("buy", "n", 0, 5)]).judge(call, BARE)
    assert (decision.verdict, decision.call, decision.penalty) == ("allow", call, 0.0)


def test_the_first_refusal_wins_and_says_which_rule_and_why() -> None:
    gate = Gate(
        [only_tools("buy"), only_tools_strict := Rule("never", lambda c, x: Refuse("no", "Never.", 0.5))]
    )
    assert gate.judge(made("sell"), BARE).rule == "only_tools"
    decision = gate.judge(made(), BARE)
    assert (decision.rule, decision.reason, decision.observation, decision.penalty) == (
        only_tools_strict.name, "no", "Never.", 0.5,
    )  # fmt: skip


def test_a_repair_keeps_the_id_and_is_put_to_the_rules_before_it() -> None:
    def small(call: ToolCall, context: GateContext) -> Verdict:
        return Refuse("too many") if call.arguments["n"] > 3 else Allow()

    def at_least_five(call: ToolCall, context: GateContext) -> Verdict:
        return Repair({"n": 5}) if call.arguments["n"] < 5 else Allow()

    clamped = Gate([clamp("buy", "n", 0, 3)]).judge(made(n=9, id="c7"), BARE)
    assert (clamped.verdict, clamped.call) == ("repair", made(n=3, id="c7"))
    assert Gate([small, at_least_five]).judge(made(n=1), BARE).rule == "small"


def test_repairs_that_do_not_settle_refuse() -> None:
    def up(call: ToolCall, context: GateContext) -> Verdict:
        return Repair({"n": call.arguments["n"] + 1})

    decision = Gate([up]).judge(made(n=0), BARE)
    assert (decision.verdict, decision.reason) == ("refuse", "the rules' repairs do not settle")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(-50, 50),
    st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 20)), max_size=4),
    st.integers(-30, 30),
)
def test_a_call_that_gets_through_is_allowed_as_it_stands_by_every_rule(
    n: int, spans: Sequence[tuple[int, int]], floor: int
) -> None:
    def above(call: ToolCall, context: GateContext) -> Verdict:
        return Allow() if call.arguments["n"] >= floor else Refuse("low")

    clamps = [clamp("buy", "n", low, low + width) for low, width in spans]
    rules = [Rule(f"{i}", item.check) for i, item in enumerate(clamps)]
    decision = Gate([*rules, above]).judge(made(n=n), BARE)
    if decision.verdict != "refuse":
        for rule in (*rules, Rule("above", above)):
            assert Gate([rule]).judge(decision.call, BARE).verdict == "allow"


# -------------------- total and pure


def _raises(call: ToolCall, context: GateContext) -> Verdict:
    raise ZeroDivisionError("a bug")


def _exits(call: ToolCall, context: GateContext) -> Verdict:
    sys.exit(0)


def _cancels(call: ToolCall, context: GateContext) -> Verdict:
    raise asyncio.CancelledError


def _recurses(call: ToolCall, context: GateContext) -> Verdict:
    return _recurses(call, context)


def _nothing(call: ToolCall, context: GateContext) -> Any:
    return None


def _true(call: ToolCall, context: GateContext) -> Any:
    return True


def _coroutine(call: ToolCall, context: GateContext) -> Any:
    async def later() -> Verdict:
        return Allow()

    return later()


def _changes_arguments(call: ToolCall, context: GateContext) -> Verdict:
    call.arguments["deep"]["n"].append(1)  # type: ignore[index]
    return Allow()


def _changes_state(call: ToolCall, context: GateContext) -> Verdict:
    context.state["seen"] = True  # type: ignore[index]
    return Allow()


def _bad_repair(call: ToolCall, context: GateContext) -> Verdict:
    return Repair({"n": object()})


def _negative(call: ToolCall, context: GateContext) -> Verdict:
    return Refuse("no", penalty=-1.0)


def _infinite(call: ToolCall, context: GateContext) -> Verdict:
    return Repair({"n": float("inf")})


@pytest.mark.parametrize(
    "rule",
    [_raises, _exits, _cancels, _recurses, _nothing, _true, _coroutine, _changes_arguments, _changes_state,
     _bad_repair, _negative, _infinite],
)  # fmt: skip
def test_whatever_a_rule_does_wrong_refuses_without_a_penalty(rule: Callable[..., Any]) -> None:
    state = {"seen": False}
    call = made(deep={"n": []})
    decision = Gate([rule]).judge(call, GateContext(state=state))
    assert (decision.verdict, decision.observation, decision.penalty) == ("refuse", REFUSED, 0.0)
    assert decision.rule == rule.__name__ and decision.reason
    assert (call.arguments, state) == ({"deep": {"n": []}}, {"seen": False})


def test_the_person_at_the_keyboard_is_no_rule() -> None:
    def interrupted(call: ToolCall, context: GateContext) -> Verdict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Gate([interrupted]).judge(made(), BARE)


def test_read_only_mappings_reach_rules_as_dictionaries() -> None:
    def plain(call: ToolCall, context: GateContext) -> Verdict:
        return Allow() if type(call.arguments) is dict and type(context.state["a"]) is dict else Refuse("no")

    call = ToolCall("c", "buy", MappingProxyType({"x": 1}))
    state = MappingProxyType({"a": MappingProxyType({"b": (1, 2)})})
    assert Gate([plain]).judge(call, GateContext(state=state)).verdict == "allow"


def test_an_argument_that_cannot_be_copied_refuses() -> None:
    call = ToolCall("c", "buy", {"x": (item for item in ())})
    assert Gate([only_tools("buy")]).judge(call, BARE).verdict == "refuse"


def test_rules_that_cannot_be_rules_are_refused_at_once() -> None:
    async def later(call: ToolCall, context: GateContext) -> Verdict:
        return Allow()

    with pytest.raises(ConfigError, match="not an async one"):
        Gate([later])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="needs a name"):
        Gate([lambda call, context: Allow()])
    with pytest.raises(ConfigError, match="two rules are named 'only_tools'"):
        Gate([only_tools("a"), only_tools("b")])
    with pytest.raises(ConfigError, match="price of 'a'"):
        Gate([], prices={"a": -1.0})
    with pytest.raises(ConfigError, match="not usable"):
        argument_schema("a", {"type": "nothing"})
    with pytest.raises(DataError, match="penalty"):
        Refuse("x", penalty=float("nan"))


# -------------------- the version


def _tool_rule(names: Sequence[str]) -> Rule:
    def check(call: ToolCall, context: GateContext) -> Verdict:
        return Allow() if call.name in names else Refuse("x")

    return Rule("names", check)


_LIMIT = 3


def _helper(n: int) -> bool:
    return n < _LIMIT


def _uses_helper(call: ToolCall, context: GateContext) -> Verdict:
    return Allow() if all(_helper(n) for n in [1]) else Refuse("x")


def test_the_version_follows_the_content_of_rules_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Gate([_tool_rule(["a"])]).version == Gate([_tool_rule(["a"])]).version
    different = {
        Gate([]).version,
        Gate([_tool_rule(["a"])]).version,
        Gate([_tool_rule(["b"])]).version,
        Gate([_tool_rule(("a", "b"))]).version,
        Gate([Rule("other", _tool_rule(["a"]).check)]).version,
        Gate([_tool_rule(["a"])], prices={"a": 1.0}).version,
        Gate([_uses_helper]).version,
        Gate([_raises]).version,
        Gate([rate_limit(1)]).version,
        Gate([rate_limit(2)]).version,
        Gate([clamp("a", "n", 0, 1), rate_limit(2)]).version,
        Gate([rate_limit(2), clamp("a", "n", 0, 1)]).version,
    }
    assert len(different) == 12
    before = Gate([_uses_helper]).version
    monkeypatch.setitem(_uses_helper.__globals__, "_LIMIT", 4)
    assert Gate([_uses_helper]).version != before, "a constant that a helper reads is part of the rule"


def test_a_rule_without_stable_content_is_refused() -> None:
    found = object()

    def check(call: ToolCall, context: GateContext) -> Verdict:
        return Allow() if found else Refuse("x")

    with pytest.raises(ConfigError, match="cannot be hashed"):
        Gate([check])


# -------------------- ready-made rules


def test_rates_count_what_was_let_through() -> None:
    gate = Gate([only_tools("buy", "look"), rate_limit(2, "buy", per="turn"), rate_limit(4)])
    watch = GateWatch(gate)
    turns = [["sell", "buy", "buy", "buy", "look"], ["buy", "buy"]]
    seen = [[d.verdict for d in watch.judge([made(n) for n in turn], {})] for turn in turns]
    assert seen == [["refuse", "allow", "allow", "refuse", "allow"], ["allow", "refuse"]]


def test_the_cost_limit_lets_free_calls_through_and_stops_before_it_is_broken() -> None:
    gate = Gate([cost_limit(1.0)], prices={"buy": 0.4, "rob": 2.0})
    calls = [made(name) for name in ("buy", "rob", "buy", "buy", "look")]
    assert verdicts(gate, *calls) == ["allow", "refuse", "allow", "refuse", "allow"]


def test_a_call_repaired_to_another_tool_is_charged_as_that_one() -> None:
    def cheap(call: ToolCall, context: GateContext) -> Verdict:
        return Repair({}, "cheaper", "rent") if call.name == "buy" else Allow()

    gate = Gate([cheap, cost_limit(1.0)], prices={"buy": 9.0, "rent": 1.0})
    assert verdicts(gate, made(), made()) == ["repair", "refuse"]
    dear = Gate([cost_limit(1.0), cheap], prices={"buy": 9.0, "rent": 1.0})
    assert verdicts(dear, made()) == ["refuse"], "the first rule saw the dear one"


def test_schema_value_and_state_rules_judge_their_own_tool_only() -> None:
    gate = Gate(
        [
            argument_schema("buy", {"properties": {"n": {"type": "integer"}}, "required": ["n"]}),
            allowed_values("open", "url", r"https://docs\.example/.*"),
            requires("logged_in", lambda state: state["user"] == "anna", tools=["pay"]),
        ]
    )
    calls = [
        made(n=1), made(n="1"), made(), made("open", url="https://docs.example/a"),
        made("open", url="https://docs.example.evil/a"), made("open"), made("pay"), made("other"),
    ]  # fmt: skip
    assert verdicts(gate, *calls, state={"user": "anna"}) == [
        "allow", "refuse", "refuse", "allow", "refuse", "refuse", "allow", "allow",
    ]  # fmt: skip
    assert verdicts(gate, made("pay"), state={"user": "eve"}) == ["refuse"]
    assert verdicts(gate, made("pay"), state={}) == ["refuse"], "a predicate that raises refuses"


def test_clamp_leaves_what_is_no_number_and_repairs_nan() -> None:
    gate = Gate([clamp("buy", "n", 1, 3)])
    assert [gate.judge(made(n=n), BARE).verdict for n in (2, "9", True, None)] == ["allow"] * 4
    assert gate.judge(made(n=float("nan")), BARE).call.arguments == {"n": 1}


# -------------------- in an environment


class Shop(ToolEnvironment):
    """Buys things; the shelf holds three."""

    name = "shop"
    horizon = 4
    variants: ClassVar = {"base": Variant("one"), "other": Variant("two", "surface")}
    gate = Gate(
        [only_tools("buy", penalty=0.25), requires("shelf", lambda state: state["left"] > 0)],
        prices={"buy": 1.0},
    )

    def prepare(self, task: Task) -> None:
        self.left, self.steps = 1, 0

    @classmethod
    def generate(cls, rng: random.Random, variant: str) -> Draft:
        return Draft(str(rng.random()), "Buy.", 0)

    @tool
    def buy(self, n: int = 1) -> str:
        """Buy."""
        self.left -= n
        return f"bought {n}"

    @tool
    def steal(self) -> str:
        """Steal."""
        raise AssertionError("the gate must not let this through")

    async def step(self, action: Action) -> Step:
        self.steps += 1
        return await super().step(action)

    def state(self) -> Mapping[str, Any]:
        return {"left": self.left}


def drive(*actions: Action) -> tuple[Shop, list[Step]]:
    async def scenario() -> tuple[Shop, list[Step]]:
        env = Shop()
        await env.reset(next(Shop.tasks("train")))
        return env, [await env.step(action) for action in actions]

    return asyncio.run(scenario())


def test_no_refused_call_reaches_the_environment_and_answers_stand_in_call_order() -> None:
    env, (step,) = drive(Action("", (made("steal", "a"), made("buy", "b"), made("steal", "c"))))
    assert [(m.tool_call_id, m.content) for m in step.observation] == [
        ("a", REFUSED), ("b", "bought 1"), ("c", REFUSED),
    ]  # fmt: skip
    assert [(r.call_id, r.ok) for r in step.tool_results] == [("a", False), ("b", True), ("c", False)]
    assert (step.reward, env.left) == (-0.5, 0)
    assert [(e["verdict"], e["rule"], e["tool"]) for e in step.info[GATE_INFO]] == [
        ("refuse", "only_tools", "steal")
    ] * 2


def test_a_turn_of_refused_calls_is_no_answer_and_the_environment_is_not_asked() -> None:
    env, steps = drive(Action("take this", (made("steal"),)), Action("", (made("steal"),)), Action("done"))
    assert [step.terminated for step in steps] == [False, False, True]
    assert (env.steps, env.answer) == (1, "done")


def test_the_rules_see_the_state_and_turn_of_now_through_a_chain_of_parents() -> None:
    class Child(Shop):
        async def step(self, action: Action) -> Step:
            return await super().step(action)

    _, steps = drive(Action("", (made("buy", "a"),)), Action("", (made("buy", "b"),)))
    assert [step.observation[0].content for step in steps] == ["bought 1", REFUSED]
    assert steps[1].info[GATE_INFO][0]["turn"] == 1

    async def scenario() -> tuple[Child, Step]:
        child = Child()
        await child.reset(next(Child.tasks("train")))
        return child, await child.step(Action("", (made("buy", "a"),)))

    child, step = asyncio.run(scenario())
    assert child._watch is not None and child._watch._calls == {"buy": 1}, "judged once, not once per parent"
    assert step.info == {}


def test_malformed_calls_and_cut_turns_still_reach_the_environment() -> None:
    _, (step,) = drive(Action("", (made("steal", "a"),), (MalformedCall("{", "it is cut"),)))
    assert step.observation[0].content == REFUSED
    assert "it is cut" in step.observation[1].content
    _, (cut,) = drive(Action("", (made("steal", "a"),), finish=Finish.LENGTH))
    assert cut.truncated


def test_an_environment_without_a_gate_takes_its_steps_as_before() -> None:
    class Open(Shop):
        gate = None

    async def scenario() -> tuple[Open, Step]:
        env = Open()
        await env.reset(next(Open.tasks("train")))
        return env, await env.step(Action("", (made("buy", "a", n=1),)))

    env, step = asyncio.run(scenario())
    assert step.observation == (Message("tool", "bought 1", (), "a"),)
    assert env._watch is None


def test_judging_is_fast_enough_for_every_call() -> None:
    gate = Gate([only_tools("buy"), rate_limit(10**9), clamp("buy", "n", 0, 5), cost_limit(1e9)])
    began = time.process_time()
    for _ in range(500):
        gate.judge(made(n=3, text="x" * 500), GateContext(state={"a": list(range(50))}))
    assert time.process_time() - began < 1.5

"""Deterministic rules between a policy and its environment: each tool call is allowed, repaired or refused.

Rules are plain functions of the call and of what happened so far. The gate is total and fails closed:
whatever goes wrong in a rule refuses the call. It must not know which environment it guards.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, cast

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.seeds import digest
from surefoot.core.types import Action, Finish, Message, Step, ToolCall, ToolResult
from surefoot.tools.base import schema_complaint

REFUSED = "Error: this call is not allowed."
GATE_INFO = "gate"  # the key of Step.info under which the gate's events travel
_MOST_SHOWN = 500


@dataclass(frozen=True, slots=True)
class Allow:
    """The rule has nothing against the call."""


@dataclass(frozen=True, slots=True)
class Repair:
    """The call may go on with these arguments (and, where given, to another tool)."""

    arguments: Mapping[str, Any]
    reason: str = ""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The call is not made. ``reason`` is for the log; the policy sees the fixed ``observation``.

    ``penalty`` is taken off the step's reward. Raises DataError unless it is finite and >= 0.
    """

    reason: str
    observation: str = REFUSED
    penalty: float = 0.0

    def __post_init__(self) -> None:
        for name in ("reason", "observation"):
            if not isinstance(getattr(self, name), str):
                raise DataError(f"Refuse.{name} is {getattr(self, name)!r}; it must be text")
        if not (math.isfinite(self.penalty) and self.penalty >= 0):
            raise DataError(f"Refuse.penalty is {self.penalty}; it must be a finite number >= 0")


Verdict = Allow | Repair | Refuse


def _counts() -> Mapping[str, int]:
    return {}


def _state() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class GateContext:
    """What a rule may know beside the call. Rules get a copy of their own.

    step: number of the turn, from 0. calls: tool -> calls let through so far in the episode, this turn
    included; turn_calls: the same for this turn alone. refused: calls refused so far. cost: the prices
    of all calls let through; price: that of this call, which the gate fills in. state: the
    environment's state before the turn.
    """

    step: int = 0
    calls: Mapping[str, int] = field(default_factory=_counts)
    turn_calls: Mapping[str, int] = field(default_factory=_counts)
    refused: int = 0
    cost: float = 0.0
    price: float = 0.0
    state: Mapping[str, Any] = field(default_factory=_state)


Check = Callable[[ToolCall, GateContext], Verdict]


@dataclass(frozen=True, slots=True)
class Rule:
    """A named check. ``parameters`` (JSON values) are all that it depends on beside its own code."""

    name: str
    check: Check
    parameters: Mapping[str, Any] = field(default_factory=_state)

    def __post_init__(self) -> None:
        if not callable(self.check) or inspect.iscoroutinefunction(self.check):
            raise ConfigError(f"gate rule {self.name!r}: check must be a plain function, not an async one")


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one call. ``rule`` and ``reason`` name what changed or stopped it ("" if nothing)."""

    verdict: Literal["allow", "repair", "refuse"]
    call: ToolCall
    observation: str = ""
    penalty: float = 0.0
    rule: str = ""
    reason: str = ""


class Gate:
    """Rules in the order in which they are asked; plain functions become rules of their own name.

    ``prices`` maps tools to what a call costs, in any unit, for :func:`cost_limit`. Raises ConfigError
    on two rules of one name, a price below 0, or a rule that holds something with no stable content.
    """

    def __init__(self, rules: Sequence[Rule | Check], *, prices: Mapping[str, float] | None = None) -> None:
        self.rules = tuple(item if isinstance(item, Rule) else Rule(_name(item), item) for item in rules)
        self.prices = dict(prices or {})
        names = [item.name for item in self.rules]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"gate: two rules are named {name!r}; give each a name of its own")
        for tool, price in self.prices.items():
            if not (math.isfinite(price) and price >= 0):
                raise ConfigError(f"gate: the price of {tool!r} is {price}; it must be a finite number >= 0")
        parts = [f"{item.name}:{_content(item.check)}:{_content(item.parameters)}" for item in self.rules]
        self._version = digest("gate", *parts, _content(self.prices))

    @property
    def version(self) -> str:
        """16 hex digits over the rules' source, what it refers to, their parameters and the prices."""
        return self._version

    def judge(self, call: ToolCall, context: GateContext) -> Decision:
        """Decide on one call. Never raises; a call that gets through is allowed as it stands by every rule.

        A repaired call is put to all rules again. When repairs do not settle, a rule raises, returns no
        verdict or changes what it was given, the call is refused.
        """
        current, last, why = call, "", ""
        for _ in range(len(self.rules) + 1):
            settled = True
            for rule in self.rules:
                priced = replace(context, price=self.prices.get(current.name, 0.0))
                verdict = _ask(rule, current, priced)
                if isinstance(verdict, Refuse):
                    return Decision(
                        "refuse", call, verdict.observation, verdict.penalty, rule.name, verdict.reason
                    )
                if isinstance(verdict, Repair) and (repaired := _repaired(current, verdict)) != current:
                    current, last, why, settled = repaired, rule.name, verdict.reason, False
            if settled:
                return Decision("repair" if last else "allow", current, rule=last, reason=why)
        return Decision("refuse", call, REFUSED, 0.0, last, "the rules' repairs do not settle")


def _ask(rule: Rule, call: ToolCall, context: GateContext) -> Verdict:
    """The rule's verdict on copies of its own, or a refusal for whatever else comes back."""
    try:
        own_call = replace(call, arguments=_copied(call.arguments))
        own_context = replace(context, **{key: _copied(getattr(context, key)) for key in _MAPPINGS})
        verdict = cast("object", rule.check(own_call, own_context))
        if inspect.iscoroutine(verdict):
            verdict.close()
        if (own_call, own_context) != (call, context):
            return Refuse("the rule changed what it was given")
        if isinstance(verdict, Repair):
            plain = json.loads(json.dumps(_copied(verdict.arguments), allow_nan=False))
            verdict = replace(verdict, arguments=plain, reason=str(verdict.reason))
        if isinstance(verdict, (Allow, Repair, Refuse)):
            return verdict
        return Refuse(f"the rule returned {type(verdict).__name__}; it must return Allow, Repair or Refuse")
    except KeyboardInterrupt:  # the person at the keyboard is no rule
        raise
    except BaseException as error:  # whatever a rule raises refuses, SystemExit and cancellation too
        return Refuse(f"the rule raised {type(error).__name__}: {str(error)[:_MOST_SHOWN]}")


_MAPPINGS = ("calls", "turn_calls", "state")


def _repaired(call: ToolCall, verdict: Repair) -> ToolCall:
    return ToolCall(call.id, verdict.name or call.name, verdict.arguments)


def _copied(value: Any) -> Any:
    """A deep copy in which every mapping is a dict, since read-only ones cannot be copied as they are."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        items = [_copied(item) for item in cast("Sequence[Any]", value)]
        return items if isinstance(value, list) else tuple(items)
    return copy.deepcopy(value)


# -------------------- one episode


class GateWatch:
    """A gate at work in one episode: counts what went through and takes every step with its verdicts."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._calls: Counter[str] = Counter()
        self._turn = self._refused = 0
        self._cost = 0.0

    def judge(self, calls: Sequence[ToolCall], state: Mapping[str, Any]) -> tuple[Decision, ...]:
        """One decision for each call of a turn, in order; what was let through counts for the next."""
        turn: Counter[str] = Counter()
        decisions: list[Decision] = []
        for call in calls:
            seen = dict(self._calls), dict(turn)
            context = GateContext(self._turn, *seen, self._refused, self._cost, state=state)
            decision = self.gate.judge(call, context)
            decisions.append(decision)
            if decision.verdict == "refuse":
                self._refused += 1
                continue
            turn[decision.call.name] += 1
            self._calls[decision.call.name] += 1
            self._cost += self.gate.prices.get(decision.call.name, 0.0)
        self._turn += 1
        return tuple(decisions)

    async def step(
        self, action: Action, state: Mapping[str, Any], act: Callable[[Action], Awaitable[Step]]
    ) -> Step:
        """Take the turn with what the gate lets through; refused calls are answered by the gate.

        Observations stand in call order. The environment is not asked at all when nothing is left of a
        turn that was nothing but refused calls, since it would take the rest for an answer.
        """
        turn = self._turn
        decisions = self.judge(action.tool_calls, state)
        if all(item.verdict == "allow" for item in decisions):
            return await act(action)
        passed = tuple(item.call for item in decisions if item.verdict != "refuse")
        if passed or action.malformed or action.finish is not Finish.STOP:
            step = await act(replace(action, tool_calls=passed))
        else:
            step = Step()
        return _joined(step, action.tool_calls, decisions, turn)


def _joined(step: Step, calls: Sequence[ToolCall], decisions: Sequence[Decision], turn: int) -> Step:
    refused = [item for item in decisions if item.verdict == "refuse"]
    place = {call.id: number for number, call in enumerate(calls)}
    messages = [*step.observation, *(Message("tool", d.observation, (), d.call.id) for d in refused)]
    results = [
        *step.tool_results,
        *(ToolResult(d.call.id, d.call.name, d.observation, False) for d in refused),
    ]
    events = [_event(d, turn) for d in decisions if d.verdict != "allow"]
    return replace(
        step,
        observation=tuple(sorted(messages, key=lambda m: place.get(m.tool_call_id or "", len(calls)))),
        tool_results=tuple(sorted(results, key=lambda r: place.get(r.call_id, len(calls)))),
        reward=step.reward - sum(item.penalty for item in refused),
        info={**step.info, GATE_INFO: tuple(events)},
    )


def _event(decision: Decision, turn: int) -> dict[str, Any]:
    return {
        "verdict": decision.verdict,
        "rule": decision.rule,
        "reason": decision.reason[:_MOST_SHOWN],
        "turn": turn,
        "tool": decision.call.name[:_MOST_SHOWN],
        "arguments": str(decision.call.arguments)[:_MOST_SHOWN],
        "penalty": decision.penalty,
    }


# -------------------- ready-made rules


def only_tools(*names: str, penalty: float = 0.0) -> Rule:
    """Refuse every tool that is not named."""

    def check(call: ToolCall, context: GateContext) -> Verdict:
        return Allow() if call.name in names else Refuse(f"{call.name!r} is not allowed", penalty=penalty)

    return Rule("only_tools", check)


def argument_schema(tool: str, schema: Mapping[str, Any], *, penalty: float = 0.0) -> Rule:
    """Refuse calls of ``tool`` whose arguments break a JSON Schema. Raises ConfigError on a bad schema."""
    schema_complaint(schema, {})
    plain = cast("Mapping[str, Any]", _copied(schema))

    def check(call: ToolCall, context: GateContext) -> Verdict:
        complaint = schema_complaint(plain, call.arguments) if call.name == tool else ""
        return Refuse(complaint, f"Error: {complaint}", penalty) if complaint else Allow()

    return Rule(f"argument_schema:{tool}", check)


def allowed_values(tool: str, argument: str, pattern: str, *, penalty: float = 0.0) -> Rule:
    """Refuse calls of ``tool`` unless ``argument`` is text that matches ``pattern`` from end to end."""
    compiled = re.compile(pattern)

    def check(call: ToolCall, context: GateContext) -> Verdict:
        if call.name != tool:
            return Allow()
        value = call.arguments.get(argument)
        if isinstance(value, str) and compiled.fullmatch(value):
            return Allow()
        return Refuse(f"{argument} is {str(value)[:_MOST_SHOWN]!r}", penalty=penalty)

    return Rule(f"allowed_values:{tool}.{argument}", check)


def rate_limit(
    most: int, tool: str = "", *, per: Literal["turn", "episode"] = "episode", penalty: float = 0.0
) -> Rule:
    """Refuse the calls after ``most`` of them in a turn or episode, of one tool or (default) of all."""
    if most < 0:
        raise ConfigError(f"rate_limit: most is {most}; it must be >= 0")

    def check(call: ToolCall, context: GateContext) -> Verdict:
        counts = context.turn_calls if per == "turn" else context.calls
        made = counts.get(tool, 0) if tool else sum(counts.values())
        if tool not in ("", call.name) or made < most:
            return Allow()
        subject = tool or "any tool"
        return Refuse(f"{made} calls of {subject} this {per}", f"Error: no more calls this {per}.", penalty)

    return Rule(f"rate_limit:{tool or '*'}:{per}", check)


def cost_limit(most: float, *, penalty: float = 0.0) -> Rule:
    """Refuse a call whose price would take the episode's cost over ``most`` (the unit of the prices)."""

    def check(call: ToolCall, context: GateContext) -> Verdict:
        total = context.cost + context.price
        if context.price == 0 or total <= most:
            return Allow()
        return Refuse(f"the cost would be {total:g} of {most:g}", "Error: the budget is used up.", penalty)

    return Rule("cost_limit", check)


def clamp(tool: str, argument: str, low: float, high: float) -> Rule:
    """Repair a number of ``tool`` that lies outside [low, high]; anything but a number is left alone."""
    if not low <= high:
        raise ConfigError(f"clamp: low is {low} and high is {high}; low must not be above high")

    def check(call: ToolCall, context: GateContext) -> Verdict:
        value = call.arguments.get(argument)
        if call.name != tool or isinstance(value, bool) or not isinstance(value, (int, float)):
            return Allow()
        inside = min(max(value, low), high) if not math.isnan(value) else low
        return Allow() if inside == value else Repair({**call.arguments, argument: inside}, f"was {value}")

    return Rule(f"clamp:{tool}.{argument}", check)


def requires(
    name: str,
    predicate: Callable[[Mapping[str, Any]], bool],
    *,
    tools: Sequence[str] = (),
    observation: str = REFUSED,
    penalty: float = 0.0,
) -> Rule:
    """Refuse calls (of ``tools``, or of all) unless ``predicate(state)`` is exactly True."""

    def check(call: ToolCall, context: GateContext) -> Verdict:
        if (tools and call.name not in tools) or predicate(context.state) is True:
            return Allow()
        return Refuse(f"the state does not meet {name!r}", observation, penalty)

    return Rule(name, check)


# -------------------- the content of a rule, for the version


def _name(function: object) -> str:
    name = getattr(function, "__name__", "")
    if not name or name == "<lambda>":
        raise ConfigError("gate: a rule needs a name; write a function or Rule(name, check)")
    return str(name)


def _content(value: object, seen: tuple[int, ...] = (), root: str = "") -> str:
    """Text that is the same whenever a value means the same. Raises ConfigError where there is none."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return f"{type(value).__name__}:{value!r}"
    if id(value) in seen:
        return "again"
    inner = functools.partial(_content, seen=(*seen, id(value)), root=root)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        return "{" + ",".join(sorted(f"{inner(key)}={inner(item)}" for key, item in pairs)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(inner(item) for item in cast("Sequence[object]", value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "set" + ",".join(sorted(inner(item) for item in cast("frozenset[object]", value)))
    if isinstance(value, re.Pattern):
        return f"pattern:{value.pattern!r}:{value.flags}"
    if isinstance(value, MethodType):
        return f"method:{inner(value.__func__)}:{inner(value.__self__)}"
    if isinstance(value, functools.partial):
        return f"partial:{inner(value.func)}:{inner(value.args)}:{inner(value.keywords)}"
    if isinstance(value, FunctionType):
        return _function_content(value, (*seen, id(value)), root)
    if isinstance(value, (type, ModuleType, BuiltinFunctionType)):
        own = isinstance(value, type) and _top(value.__module__) == root
        return f"{_path(value)}:{_source(cast('type', value))}" if own else _path(value)
    raise ConfigError(
        f"gate: a rule uses a {type(value).__name__}, whose content cannot be hashed; use plain data "
        "(numbers, text, lists, dictionaries, patterns) and functions"
    )


def _function_content(function: FunctionType, seen: tuple[int, ...], root: str) -> str:
    """Source, defaults, captured variables and the globals it reads; foreign functions by name alone."""
    if root and _top(function.__module__) != root:
        return _path(function)
    root = root or _top(function.__module__)
    captured = inspect.getclosurevars(function).nonlocals
    names = sorted(set(_globals_read(function.__code__)))
    reads = {name: function.__globals__[name] for name in names if name in function.__globals__}
    parts = (captured, reads, function.__defaults__, function.__kwdefaults__)
    return f"function:{_source(function)}:" + ":".join(_content(part, seen, root) for part in parts)


def _globals_read(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_read(constant)


def _source(value: FunctionType | type) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # typed at a prompt: there is no file to read
        if isinstance(value, FunctionType):
            code = value.__code__
            return f"{code.co_code.hex()}:{[c for c in code.co_consts if not isinstance(c, CodeType)]!r}"
        return ""


def _path(value: object) -> str:
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    return f"{module}.{name}" if name else str(getattr(value, "__name__", ""))


def _top(module: str) -> str:
    return module.partition(".")[0]

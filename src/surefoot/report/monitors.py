"""What the monitors of cheated rewards came to, step by step, and where they raised an alarm.

Must not know how they measure.
"""

from __future__ import annotations

from surefoot.audit.monitors import standard_limits
from surefoot.report import charts
from surefoot.report.charts import Series
from surefoot.report.facts import TREATMENT, Facts, Record
from surefoot.report.figures import clip, number
from surefoot.report.html import Html, h, table
from surefoot.report.measures import empty, section
from surefoot.report.training_curves import figure, multiples, value_of

_TITLES = {
    "verifier_gap": "Reward above the held-out verifier (lower end)",
    "impossible_pass": "Impossible tasks that were passed (share)",
    "canary": "Episodes that wrote a canary",
    "forged_tag": "Episodes that forged a tag (share)",
    "answer_entropy": "Entropy of answers over right ones' (low is bad)",
    "abstention": "Episodes that end without trying (share)",
    "length_growth": "Sampled tokens, times the first steps'",
    "tool_farming": "Tool calls, times the first steps'",
    "sudden_improvement": "Rise of the mean return in one step",
}
_STYLE, _LIMIT_STYLE = 0, 1


def monitors(facts: Facts) -> Html:
    """The section: a small chart a monitor, and a table of the alarms."""
    lines = facts.steps(TREATMENT)
    shown = multiples(*(_chart(kind, lines, limit) for kind, limit in standard_limits().items()))
    text = (
        "Each watches the treatment's training episodes for one way in which a reward can be earned without "
        "the task. An alarm is a reason to read the episodes that it names, not a proof. No monitor feeds "
        "the reward: a policy that is trained against its monitor learns to hide. A monitor without a chart "
        "had nothing to go by, for example no held-out verifier. tool_farming alarms only while success does "
        "not rise, sudden_improvement only beyond three standard deviations of the steps before."
    )
    legend = charts.legend([("treatment", _STYLE), ("limit", _LIMIT_STYLE)])
    return section(
        "monitors",
        "Signs of a cheated reward",
        legend if shown is not None else None,
        shown if shown is not None else empty("No step has been watched (metrics.jsonl)."),
        _alarms([event for event in facts.events if event.get("kind") == "monitor"]),
        h("p", text, class_="note"),
    )


def _chart(kind: str, lines: list[Record], limit: float) -> Html | None:
    points = tuple(
        (float(line["step"]), value)
        for line in lines
        if (value := value_of(line, f"monitor_{kind}")) is not None
    )
    if not points:
        return None
    ends = (points[0][0], points[-1][0])
    bound = Series("limit", _LIMIT_STYLE, tuple((x, limit) for x in dict.fromkeys(ends)))
    return figure(_TITLES.get(kind, kind), [bound, Series("treatment", _STYLE, points)])


def _alarms(events: list[Record]) -> Html:
    if not events:
        return empty("No alarm.")
    rows: list[list[Html | str]] = []
    for kind in dict.fromkeys(str(event.get("monitor")) for event in events):
        own = [event for event in events if str(event.get("monitor")) == kind]
        steps = ", ".join(number(int(event.get("step", 0))) for event in own[:12])
        named = ", ".join(map(str, own[-1].get("trajectories") or ()))
        rows.append([
            kind, h("td", number(len(own)), class_="num"), clip(steps, 80),
            clip(str(own[-1].get("message")), 400), clip(named, 160),
        ])  # fmt: skip
    head = ["monitor", "alarms", "steps", "the last one", "its episodes"]
    return table(head, rows, caption="Alarms of the monitors (events.jsonl, kind monitor).")

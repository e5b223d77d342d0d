"""What was measured: the verdict, success by policy and variant, differences, efficiency. Shows every
policy and variant there is, better or worse; must not judge anything itself.
"""

from __future__ import annotations

from typing import Any

from surefoot.economics import money
from surefoot.report import charts
from surefoot.report.facts import BASE, Facts, Record
from surefoot.report.figures import MISSING, duration, interval, number, share
from surefoot.report.html import Html, h, join, table
from surefoot.training.arms import ARMS

_OUTCOMES = {
    "learned": ("✓ Learned", "Better than the untouched model, its own start and every control."),
    "memorised": ("◐ Memorised", "Better on the base tasks, on no held-out variant."),
    "not_shown": ("○ Not shown", "At least one condition of learning does not hold."),
    "falsified": ("✗ Falsified", "A control, trained on a broken signal, improved as much."),
}
_WHO = {
    "initial": "untouched model",
    "start": "after the cold start",
    "final": "after reinforcement learning",
    **{name: f"control: {arm.title}" for name, arm in ARMS.items()},
}

_AUDIT = {"audit_override": "Reward audit overridden", "not_audited": "Reward not audited"}


def section(identity: str, title: str, *children: Html | str | None) -> Html:
    """One section of the page, with a heading that can be linked to."""
    return h(
        "section",
        h("h2", title, id=f"{identity}-title"),
        *children,
        id=identity,
        aria_labelledby=f"{identity}-title",
    )


def empty(text: str) -> Html:
    """Says what is missing."""
    return h("p", text, class_="empty")


# -------------------- verdict


def verdict(facts: Facts) -> Html:
    """The badge, the verdict line, and what it rests on."""
    record = facts.verdict
    if record is None:
        return _no_verdict(facts)
    outcome = str(record.get("outcome"))
    badge, meaning = _OUTCOMES.get(outcome, (outcome, ""))
    stopped = record.get("stopped")
    warning = h("p", f"Stopped early: {stopped}. Measured with what there was.", class_="warning")
    return h(
        "section",
        h("h2", h("span", badge, class_=f"badge {outcome}"), " ", h("span", meaning, class_="meaning")),
        h("p", str(record.get("sentence", "")), class_="sentence"),
        warning if stopped else None,
        _audit(facts),
        _rests_on(facts, record),
        _bullets("Conditions of “learned” that failed", record.get("reasons", [])),
        _bullets("To be read with it", record.get("notes", [])),
        id="verdict",
        class_=f"verdict {outcome}",
        aria_label="Verdict",
    )


def _no_verdict(facts: Facts) -> Html:
    stages = facts.stages
    planned = sum(int(stage.get("steps", 0)) for stage in facts.rl_stages)
    wanted = ["initial", *(["start"] if any(s.get("kind") == "sft" for s in stages) else []), "final"]
    missing = [name for name in [*wanted, *facts.controls] if name not in facts.evaluations]
    progress = [f"{arm} {len(facts.steps(arm))} of {planned} steps" for arm in facts.arms]
    lines = [
        f"Measured so far: {', '.join(facts.policies) or 'nothing'}.",
        f"Still to be measured: {', '.join(missing)}." if missing else None,
        f"Reinforcement learning: {', '.join(progress)}." if progress else "No reinforcement step yet.",
        *(f"Being played: {name}, {count} episodes so far." for name, count in facts.journals.items()),
    ]
    ends = [event for event in facts.events if event.get("kind") in ("budget_reached", "resumed")]
    if ends and ends[-1].get("kind") == "budget_reached":
        lines.append(f"A budget ended the run: {ends[-1].get('reason')}.")
    return h(
        "section",
        h("h2", h("span", "… Unfinished", class_="badge unfinished"), " ", h("span", "No verdict yet.")),
        *(h("p", line) for line in lines if line),
        _audit(facts),
        id="verdict",
        class_="verdict unfinished",
        aria_label="Verdict",
    )


def _audit(facts: Facts) -> Html | None:
    """Rewards that were trained on although they failed their audit, or had none."""
    found = {str(event.get("reward")): event for event in facts.events if event.get("kind") in _AUDIT}
    lines = [
        h("p", h("strong", f"{_AUDIT[str(event['kind'])]}: {name}. "), _told(event), class_="warning")
        for name, event in found.items()
    ]
    return join(*lines) if lines else None


def _told(event: Record) -> str:
    reason = str(event.get("reason", ""))
    return f"It fails: {event['failure']}. Reason given: {reason}." if "failure" in event else f"{reason}."


def _rests_on(facts: Facts, record: Record) -> Html:
    success = {name: values.get(BASE) for name, values in record.get("success", {}).items()}
    path = " → ".join(share(success[name]) for name in ("initial", "start", "final") if name in success)
    seeds = [str(seed) for seed in record.get("seeds", [])]
    wall = sum(float(line.get("wall_seconds", 0.0)) for line in facts.ledger)
    paid = f"{money(float(record.get('cost_usd', 0.0)))}, {number(record.get('tokens'))} tokens"
    tiles = [
        ("Success on base", path, "untouched → start → final"),
        ("Weakest trust", str(record.get("weakest_trust", MISSING)), "lowest tier that the claim rests on"),
        ("Training seeds", str(len(seeds)), "seed " + ", ".join(seeds)),
        ("Cost", paid, duration(wall) + " of work" if facts.ledger else ""),
    ]
    return h(
        "dl",
        *(
            h("div", h("dt", name), h("dd", value), h("dd", note, class_="note"))
            for name, value, note in tiles
        ),
        class_="tiles",
    )


def _bullets(title: str, lines: list[Any]) -> Html | None:
    if not lines:
        return None
    return join(h("h3", title), h("ul", *(h("li", str(line)) for line in lines)))


# -------------------- success


def success(facts: Facts) -> Html:
    """Policies by variants."""
    if not facts.evaluations:
        return section(
            "success", "Success", empty("No policy has been measured yet (evaluations/ is empty).")
        )
    variants = facts.variants
    rows = [[_policy(name), *(_success_cell(facts, name, v) for v in variants)] for name in facts.policies]
    record = next(iter(facts.evaluations.values()))
    level = float(facts.config.get("evaluation", {}).get("level", 0.95))
    caption = (
        f"Success by policy and variant, split “{record.get('split', '?')}”, "
        f"samples per task: {record.get('samples', '?')}, {100 * level:g}% intervals over tasks. "
        "A dash: not measured. Variants other than base were never trained on."
    )
    return section(
        "success",
        "Success",
        table(["policy", *variants], rows, caption=caption, class_="measures"),
        _details(facts),
    )


def _policy(name: str) -> Html:
    return join(name, h("span", _WHO.get(name, ""), class_="note"))


def _figures(facts: Facts, policy: str, variant: str) -> Record:
    return facts.evaluations[policy]["variants"].get(variant, {})


def _success_cell(facts: Facts, policy: str, variant: str) -> Html:
    figures = _figures(facts, policy, variant)
    found = figures.get("success")
    if found is None:
        unscored = figures.get("unscored")
        return h("td", f"unscored ({unscored})" if unscored else MISSING, class_="num")
    low, estimate, high = (float(found[key]) for key in ("low", "estimate", "high"))
    unscored = figures.get("unscored", 0)
    return h(
        "td",
        h("strong", share(estimate)),
        h("span", interval(found), class_="note"),
        charts.interval_bar(low, estimate, high, (0.0, 1.0), zero=False, width=110),
        h("span", f"{unscored} unscored", class_="note alert") if unscored else None,
        class_="num",
    )


_COLUMNS = (
    ("tasks", "tasks"),
    ("episodes", "episodes"),
    ("unscored", "unscored"),
    ("return_mean", "mean return"),
    ("turns", "turns"),
    ("tool_calls", "tool calls"),
    ("sampled_tokens", "sampled tokens"),
)


def _details(facts: Facts) -> Html:
    """Everything else that was measured, folded away."""
    rows: list[list[Html | str]] = []
    for policy in facts.policies:
        for variant in facts.evaluations[policy]["variants"]:
            figures = _figures(facts, policy, variant)
            stops = ", ".join(f"{name} {count}" for name, count in figures.get("stops", {}).items())
            rows.append(
                [
                    f"{policy} · {variant}",
                    *(_num(number(figures.get(key))) for key, _ in _COLUMNS),
                    _num(_last(figures, "pass_at_k")),
                    _num(_last(figures, "pass_hat_k")),
                    stops or MISSING,
                ]
            )
    head = ["policy · variant", *(name for _, name in _COLUMNS), "pass@k", "pass^k", "how episodes ended"]
    caption = "Means per scored episode. pass@k: at least one of k samples succeeds; pass^k: all k do."
    return h("details", h("summary", "More figures of each evaluation"), table(head, rows, caption=caption))


def _last(figures: Record, key: str) -> str:
    values = figures.get(key) or {}
    if not values:
        return MISSING
    k = max(values, key=int)
    return f"{share(values[k])} (k={k})"


def _num(text: str) -> Html:
    return h("td", text, class_="num")


# -------------------- differences


def differences(facts: Facts) -> Html:
    """Every comparison of the verdict as a bar around 0."""
    comparisons: list[Record] = (facts.verdict or {}).get("comparisons", [])
    if not comparisons:
        missing = (
            "Differences are taken with the verdict, once the untouched and the final policy are measured."
        )
        return section("differences", "Differences", empty(missing))
    bounds = [float(c["interval"][key]) for c in comparisons for key in ("low", "high")]
    reach = max(0.1, *(abs(value) for value in bounds))
    domain = (-reach if min(bounds) < -0.02 * reach else -0.1 * reach, reach)
    rows: list[list[Html | str]] = []
    previous = ""
    for comparison in comparisons:
        name, found = str(comparison["name"]), comparison["interval"]
        low, estimate, high = (float(found[key]) for key in ("low", "estimate", "high"))
        text = "above 0" if low > 0 else "below 0" if high < 0 else "covers 0"
        rows.append(
            [
                h(
                    "th",
                    name if name != previous else "",
                    scope="row",
                    class_="pair" if name != previous else None,
                ),
                str(comparison["variant"]),
                h("td", charts.interval_bar(low, estimate, high, domain, zero=True)),
                h(
                    "td",
                    f"{estimate:+.3f}",
                    h("span", interval(found, signed=True), class_="note"),
                    class_="num",
                ),
                text,
                _num(number(found.get("p_value"))),
            ]
        )
        previous = name
    head = ["comparison", "variant", charts.scale(domain), "difference in success", "interval", "p"]
    caption = (
        "Paired differences in success on the same held-out tasks. Filled: the interval lies on one side "
        "of 0; hollow: it covers 0. p: two-sided, of no difference."
    )
    return section(
        "differences",
        "Differences",
        table(head, rows, caption=caption, class_="forest"),
        _holm(facts.verdict or {}),
    )


def _holm(record: Record) -> Html | None:
    adjusted: Record = record.get("holm", {})
    if not adjusted:
        return None
    text = ", ".join(f"{name} {number(value)}" for name, value in adjusted.items())
    return h("p", f"p of final against each control on base, adjusted by Holm: {text}.", class_="note")


# -------------------- efficiency


def efficiency(facts: Facts, curves: Html) -> Html:
    """When the policy calls its tools, over training and by policy."""
    keys = ("call_rate_needed", "call_rate_not_needed", "calls_needed", "calls_not_needed", "success_needed",
            "success_not_needed")  # fmt: skip
    rows: list[list[Html | str]] = []
    for policy in facts.policies:
        for variant in facts.evaluations[policy]["variants"]:
            figures = _figures(facts, policy, variant)
            if any(key in figures for key in keys):
                cells = [_num(share(figures.get(key))) for key in keys]
                rows.append([f"{policy} · {variant}", *cells, _num(number(figures.get("turns")))])
    head = ["policy · variant", "call rate, needed", "call rate, not needed", "calls, needed",
            "calls, not needed", "success, needed", "success, not needed", "turns"]  # fmt: skip
    caption = (
        "Call rate: share of episodes with at least one tool call, for tasks that need one and tasks that "
        "do not. The best policy calls always on the left and never on the right."
    )
    shown = table(head, rows, caption=caption) if rows else None
    absent = (
        "No measured task says whether it needs a call." if facts.evaluations else "Nothing is measured yet."
    )
    return section("efficiency", "Efficiency", curves, shown or empty(absent))

"""How training went, step by step: learning curves, call rates, optimisation, signal.

Must not know evaluations; curves of control arms show the true rewards, as the metrics do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from surefoot.evaluation.statistics import wilson
from surefoot.report import charts
from surefoot.report.charts import Series
from surefoot.report.facts import TREATMENT, Facts, Record
from surefoot.report.figures import clip, number
from surefoot.report.html import Html, h, join, table
from surefoot.report.measures import empty, section

_STYLES = {
    TREATMENT: 0, "start": 0, "permuted": 1, "random": 2, "constant": 3, "frozen": 4,
    "random_unclipped": 6, "random_on_policy": 7, "permuted_unclipped": 8, "permuted_on_policy": 9,
}  # fmt: skip
_OTHER_STYLE = 5
_NO_STEPS = "No reinforcement step has been taken yet (metrics.jsonl)."


def _style(arm: str) -> int:
    return _STYLES.get(arm, _OTHER_STYLE)


def value_of(line: Record, key: str) -> float | None:
    """A finite number of a metrics line, else None."""
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _series(facts: Facts, read: Callable[[Record], float | None], *, bands: bool = False) -> list[Series]:
    """One series an arm that has values."""
    found: list[Series] = []
    for arm in facts.arms:
        lines = [(line, value) for line in facts.steps(arm) if (value := read(line)) is not None]
        points = tuple((float(line["step"]), value) for line, value in lines)
        if points:
            band = _wilson_band(facts, lines) if bands and arm == TREATMENT else ()
            found.append(Series(arm, _style(arm), points, band))
    return found


def _wilson_band(facts: Facts, lines: list[tuple[Record, float]]) -> tuple[tuple[float, float, float], ...]:
    """Wilson intervals of each step's success; none where the number of episodes is not known."""
    if len(lines) > charts.MAX_POINTS:
        return ()
    band: list[tuple[float, float, float]] = []
    for line, success in lines:
        episodes = _episodes(facts, line)
        if episodes > 0:
            band.append((float(line["step"]), *wilson(success, episodes)))
    return tuple(band)


def _episodes(facts: Facts, line: Record) -> int:
    """Scored episodes of a step, from its stage's settings; 0 when they are not known."""
    place, stages = int(line.get("stage_number", 0)), facts.rl_stages
    stage = stages[place] if place < len(stages) else {}
    played = int(stage.get("tasks_per_step", 0)) * int(stage.get("group_size", 0))
    return max(0, played - int(line.get("unscored") or 0))


def figure(title: str, series: list[Series], **options: Any) -> Html | None:
    """A small chart with its title, None without data."""
    if not series:
        return None
    chart = charts.line_chart(series, label=title, **options)
    return h("figure", h("figcaption", title), chart)


def _large(title: str, series: list[Series], **options: Any) -> Html | None:
    """A chart in two widths, so that its text stays readable on a phone."""
    if not series:
        return None
    return h(
        "figure",
        h("figcaption", title),
        h("div", charts.line_chart(series, label=title, width=620, height=300, **options), class_="wide"),
        h("div", charts.line_chart(series, label=title, **options), class_="narrow"),
    )


def multiples(*figures: Html | None, class_: str = "multiples") -> Html | None:
    """Charts side by side; None without any."""
    shown = [one for one in figures if one is not None]
    return h("div", *shown, class_=class_) if shown else None


def _arm_legend(facts: Facts) -> Html:
    return charts.legend([(arm, _style(arm)) for arm in facts.arms])


def learning(facts: Facts) -> Html:
    """Success and return of the sampled training episodes."""
    success = _series(facts, lambda line: value_of(line, "success"), bands=True)
    returns = _series(facts, lambda line: value_of(line, "return_mean"))
    if not (success or returns):
        return section("learning", "Learning curves", empty(_NO_STEPS))
    text = (
        "Training episodes as they were sampled, every arm judged by the true rewards. Each step has its own "
        "tasks, so steps differ in difficulty; the shaded band is the treatment's 95% Wilson interval with "
        "episodes taken as independent. From 30 steps on the bold line is a rolling mean."
    )
    return section(
        "learning",
        "Learning curves",
        _arm_legend(facts),
        multiples(
            _large("Success per step", success, y_range=(0.0, 1.0)),
            _large("Mean return per step", returns),
            class_="pair-of-charts",
        ),
        h("p", text, class_="note"),
    )


def calls(facts: Facts) -> Html:
    """Call rates per step."""
    needed = _series(facts, lambda line: value_of(line, "call_rate_needed"))
    needless = _series(facts, lambda line: value_of(line, "call_rate_not_needed"))
    overall = _series(facts, lambda line: value_of(line, "tool_calls"))
    shown = multiples(
        figure("Call rate when a call is needed", needed, y_range=(0.0, 1.0)),
        figure("Call rate when none is needed", needless, y_range=(0.0, 1.0)),
        figure("Tool calls per episode", overall),
    )
    return join(_arm_legend(facts), shown) if shown is not None else empty(_NO_STEPS)


_OPTIMISATION = (
    ("entropy", "Entropy (nats per token)"),
    ("grad_norm", "Gradient norm before clipping"),
    ("mismatch_kl", "Sampler–learner mismatch (KL)"),
    ("mismatch_max", "Largest gap in log-probability"),
    ("approx_kl", "KL of the update (approximate)"),
    ("clip_fraction", "Share of clipped tokens"),
    ("ess_token", "Effective sample size (tokens)"),
    ("ess_sequence", "Effective sample size (episodes)"),
    ("accuracy", "Share of pairs in order, before the update"),
    ("held_out_accuracy", "Share of held-out pairs in order"),
    ("truncated", "Share of truncated episodes"),
    ("turns", "Turns per episode"),
)


def optimisation(facts: Facts) -> Html:
    """Entropy, gradients, mismatch, and the cold start's loss."""
    figures = [figure(title, _series(facts, _reader(key))) for key, title in _OPTIMISATION]
    cold = [
        (float(line["step"]), value)
        for arm in dict.fromkeys(line["arm"] for line in facts.metrics)
        for line in facts.steps(str(arm), ("sft",))
        if (value := value_of(line, "loss")) is not None
    ]
    figures.append(
        figure("Cold start: loss (nats per token)", [Series("cold start", 0, tuple(cold))] if cold else [])
    )
    shown = multiples(*figures)
    missing = "No training step has been taken yet (metrics.jsonl)."
    legend = _arm_legend(facts) if facts.arms else None
    return section("optimisation", "Optimisation", legend if shown else None, shown or empty(missing))


def _reader(key: str) -> Callable[[Record], float | None]:
    return lambda line: value_of(line, key)


# -------------------- signal


def signal(facts: Facts) -> Html:
    """Whether there was anything to learn from, and what went wrong on the way."""
    dead = _series(facts, _dead_share)
    unscored = _series(facts, _reader("unscored"))
    advantage = _series(facts, _reader("advantage_abs_mean"))
    shown = multiples(
        figure("Share of groups without signal", dead, y_range=(0.0, 1.0)),
        figure("Mean absolute advantage", advantage),
        figure("Unscored episodes per step", unscored)
        if any(y for s in unscored for _, y in s.points)
        else None,
    )
    text = (
        "A group whose episodes all have the same return teaches nothing. Unscored episodes (a reward or the "
        "machinery failed) are left out of every mean, never counted as 0."
    )
    return section(
        "signal",
        "Signal and events",
        _warnings(facts),
        _arm_legend(facts) if shown else None,
        shown or empty(_NO_STEPS),
        _totals(facts),
        h("p", text, class_="note"),
        _events(facts),
    )


def _dead_share(line: Record) -> float | None:
    dead, groups = value_of(line, "dead_groups"), value_of(line, "groups")
    return dead / groups if dead is not None and groups else None


def _totals(facts: Facts) -> Html | None:
    rows: list[list[Html | str]] = []
    for arm in facts.arms:
        lines = facts.steps(arm)
        sums = [sum(int(line.get(key) or 0) for line in lines) for key in
                ("groups", "dead_groups", "singleton_groups", "unscored")]  # fmt: skip
        skipped = sum(line.get("stepped") is False for line in lines)
        cells = [str(len(lines)), *(f"{value:,}" for value in sums), str(skipped)]
        rows.append([arm, *(h("td", cell, class_="num") for cell in cells)])
    if not rows:
        return None
    head = [
        "arm",
        "steps",
        "groups",
        "without signal",
        "of one episode",
        "unscored episodes",
        "steps without update",
    ]
    return table(head, rows, caption="Signal over all steps of each arm.")


def _warnings(facts: Facts) -> Html | None:
    kinds = Counter(str(event.get("kind")) for event in facts.events)
    lines = [f"A file could not be read: {problem}" for problem in facts.problems]
    if count := kinds["replay_differs"]:
        lines.append(
            f"{count} episodes did not repeat exactly when the run was resumed (replay_differs). Trained on "
            "and stored are the episodes played again; an uninterrupted run would not give the same bits."
        )
    if count := kinds["episode_fault"]:
        lines.append(f"{count} episodes failed in the environment or the machinery (episode_fault).")
    return join(*(h("p", clip(line, 600), class_="warning") for line in lines)) if lines else None


def _events(facts: Facts) -> Html:
    if not facts.events:
        return empty("No events: no fault, retry, refusal or resume was recorded.")
    kinds = Counter(str(event.get("kind")) for event in facts.events)
    rows: list[list[Html | str]] = []
    for kind, count in kinds.most_common():
        last = next(event for event in reversed(facts.events) if str(event.get("kind")) == kind)
        fields = ", ".join(f"{key} = {value}" for key, value in last.items() if key != "kind")
        rows.append([clip(kind, 80), h("td", number(count), class_="num"), clip(fields, 300)])
    return table(["event", "times", "the last one"], rows[:40], caption="Events of the run (events.jsonl).")

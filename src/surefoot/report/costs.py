"""What a run cost, and its settings: tokens by kind, calls, seconds and money by arm and phase.

Must not know prices beyond the phrase that the ledger gives for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from surefoot.economics import money
from surefoot.economics.prices import PriceTable
from surefoot.report.facts import Facts, Record, in_order
from surefoot.report.figures import duration, number
from surefoot.report.html import Html, h, table
from surefoot.report.measures import empty, section

_COUNTS = (
    ("model_calls", "model calls"),
    ("tool_calls", "tool calls"),
    ("prompt_tokens", "prompt"),
    ("observation_tokens", "observation"),
    ("sampled_tokens", "sampled"),
    ("cached_tokens", "cached"),
    ("trained_tokens", "trained"),
)
_SUMS = (*(key for key, _ in _COUNTS), "wall_seconds", "cpu_seconds", "usd")
_PHASES = ("rollout", "update", "evaluation", "checkpoint")


def cost(facts: Facts) -> Html:
    """The ledger as a table, with its basis."""
    if not facts.ledger:
        return section("cost", "Cost", empty("Nothing is booked yet (ledger.jsonl is empty)."))
    sums = _sums(facts.ledger)
    arms = in_order((arm for arm, _ in sums), ("initial", "start", "treatment", "final", *facts.controls))
    rows: list[list[Html | str]] = []
    for arm in arms:
        for phase in in_order((p for a, p in sums if a == arm), _PHASES):
            rows.append([f"{arm} · {phase}", *_cells(sums[arm, phase])])
    total = _add(sums.values())
    rows.append([h("th", "total", scope="row", class_="total"), *_cells(total)])
    head = ["arm · phase", "episodes", *(name for _, name in _COUNTS), "wall", "CPU", "money"]
    caption = (
        "Tokens by kind: prompt, observation and sampled went through the policy once and are disjoint; "
        "cached is context read again; trained counts the tokens of updates. Evaluations stand under "
        "their policy."
    )
    return section("cost", "Cost", _tiles(facts, total), table(head, rows, caption=caption), _repeated(facts))


def _sums(lines: list[Record]) -> dict[tuple[str, str], dict[str, float]]:
    sums: dict[tuple[str, str], dict[str, float]] = {}
    for line in lines:
        held = sums.setdefault(
            (str(line["arm"]), str(line["phase"])), dict.fromkeys((*_SUMS, "episodes"), 0.0)
        )
        for key in _SUMS:
            held[key] += line.get(key, 0)
        held["episodes"] += line.get("entry") == "trajectory"
    return sums


def _add(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total = dict.fromkeys((*_SUMS, "episodes"), 0.0)
    for part in parts:
        for key, value in part.items():
            total[key] += value
    return total


def _cells(sums: dict[str, float]) -> list[Html]:
    counts = [number(int(sums[key])) for key in ("episodes", *(key for key, _ in _COUNTS))]
    texts = [*counts, duration(sums["wall_seconds"]), duration(sums["cpu_seconds"]), money(sums["usd"])]
    return [h("td", text if text not in ("0", "0.0 s", "$0.00") else "", class_="num") for text in texts]


def _tiles(facts: Facts, total: dict[str, float]) -> Html:
    once = sum(total[f"{kind}_tokens"] for kind in ("prompt", "observation", "sampled"))
    tiles = [
        (
            "Tokens through the policy",
            number(int(once)),
            f"{number(int(total['cached_tokens']))} more from the cache",
        ),
        ("Calls", f"{number(int(total['model_calls']))} model", f"{number(int(total['tool_calls']))} tool"),
        ("Time", duration(total["wall_seconds"]), f"{duration(total['cpu_seconds'])} of CPU"),
        ("Money", money(total["usd"]), _basis(facts)),
    ]
    return h(
        "dl",
        *(
            h("div", h("dt", name), h("dd", value), h("dd", note, class_="note"))
            for name, value, note in tiles
        ),
        class_="tiles",
    )


def _basis(facts: Facts) -> str:
    """What the money rests on: as the ledger says, before it is summed up as the settings say."""
    if facts.ledger_summary is not None and "basis" in facts.ledger_summary:
        return str(facts.ledger_summary["basis"])
    prices = {key: value for key, value in facts.config.get("prices", {}).items() if value != {}}
    try:
        return f"{PriceTable.model_validate(prices).basis()}, as in the settings"
    except ValidationError:
        return "the basis is not known"


def _repeated(facts: Facts) -> Html | None:
    again = [line for line in facts.ledger if line.get("repeated")]
    wall = sum(line.get("wall_seconds", 0.0) for line in again)
    if not again:
        return None
    text = f"Work done again after interruptions, included above: {duration(wall)}, {money(_usd(again))}."
    return h("p", text, class_="note")


def _usd(lines: list[Record]) -> float:
    return sum(line.get("usd", 0.0) for line in lines)


def settings(facts: Facts) -> Html:
    """The resolved configuration and what made the run, folded away."""
    manifest = facts.manifest
    made: list[tuple[str, Any]] = [
        ("recipe", manifest.recipe),
        ("seed", manifest.seed),
        ("started", manifest.created),
        ("surefoot", manifest.surefoot),
        ("python", manifest.python),
        ("platform", manifest.platform),
        ("cores", manifest.cpus),
        ("configuration, SHA-256", manifest.config_hash),
        ("model hash", manifest.model_hash or "not recorded"),
        *manifest.packages.items(),
    ]
    rows = [[str(key), str(value)] for key, value in made]
    return section(
        "settings",
        "Settings",
        h(
            "details",
            h("summary", "Resolved configuration (config.toml)"),
            h("pre", facts.config_text, tabindex=0),
        ),
        h(
            "details",
            h("summary", "Versions and machine (manifest.json)"),
            table(["", ""], rows, caption="What made this run."),
        ),
    )

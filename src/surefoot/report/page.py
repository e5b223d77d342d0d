"""Joins the sections into one file that asks nothing of the network and runs only its own script.

Must not know what the sections say.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Final

from surefoot.core.errors import ModelError
from surefoot.policy.models import load_tokenizer
from surefoot.report import costs, episodes, measures, monitors, training_curves
from surefoot.report.facts import Facts, Record, read_facts
from surefoot.report.figures import number
from surefoot.report.html import Html, h, join, json_script, raw, table
from surefoot.runs.files import write_atomic

_SECTIONS: Final = (
    ("verdict", "Verdict"),
    ("success", "Success"),
    ("differences", "Differences"),
    ("learning", "Learning curves"),
    ("efficiency", "Efficiency"),
    ("optimisation", "Optimisation"),
    ("monitors", "Monitors"),
    ("cost", "Cost"),
    ("signal", "Signal and events"),
    ("settings", "Settings"),
    ("reader", "Episodes"),
)


def write_report(run: Path) -> Path:
    """Write ``report.html`` into a run folder, finished or not, and return its path.

    The file stands alone: no request to anywhere, one inline script whose hash the page's policy names.
    Raises ConfigError when there is no run, StorageError when its manifest is damaged or the disk refuses.
    """
    facts = read_facts(run)
    write_atomic(facts.run.report, render(facts))
    return facts.run.report


def render(facts: Facts) -> str:
    """The page as text."""
    reader = _reader(facts)  # first, since it may find files that cannot be read
    body = join(
        _header(facts),
        h(
            "main",
            measures.verdict(facts),
            measures.success(facts),
            measures.differences(facts),
            training_curves.learning(facts),
            measures.efficiency(facts, training_curves.calls(facts)),
            training_curves.optimisation(facts),
            monitors.monitors(facts),
            costs.cost(facts),
            training_curves.signal(facts),
            costs.settings(facts),
            reader,
            id="content",
        ),
    )
    return _document(f"{facts.name} · Surefoot report", body)


def _document(title: str, body: Html) -> str:
    style, script = _asset("report.css"), _asset("report.js")
    # Hashes and not 'unsafe-inline': text that slips into the page still cannot run.
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content=policy),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="referrer", content="no-referrer"),
        h("title", title),
        h("style", raw(style)),
    )
    page = h("html", head, h("body", body, h("script", raw(script))), lang="en")
    return f"<!doctype html>\n{page}\n"


def _asset(name: str) -> str:
    return files("surefoot.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _header(facts: Facts) -> Html:
    config = facts.config
    algorithms = [str(stage.get("algorithm")) for stage in facts.rl_stages]
    parts = [
        ("model", config.get("model", {}).get("name")),
        ("environment", config.get("environment", {}).get("name")),
        ("algorithm", ", ".join(algorithms)),
        ("seed", facts.manifest.seed),
        ("started", facts.manifest.created.replace("T", " ").removesuffix("+00:00") + " UTC"),
    ]
    described = str(config.get("description", ""))
    items = [h("span", f"{name} ", h("b", str(value))) for name, value in parts if value not in (None, "")]
    links = [h("li", h("a", title, href=f"#{identity}")) for identity, title in _SECTIONS]
    return h(
        "header",
        h("a", "Skip to the content", href="#content", class_="skip"),
        h("p", "Surefoot report", class_="kicker"),
        h("h1", facts.name),
        h("p", described, class_="lead") if described else None,
        h("p", *items, class_="facts"),
        h("nav", h("ul", *links), aria_label="Sections"),
    )


# -------------------- episodes


def _reader(facts: Facts) -> Html:
    shown = episodes.choose(facts)
    if not shown:
        waiting = "".join(
            f" {name} is being played: {n} episodes so far." for name, n in facts.journals.items()
        )
        return measures.section(
            "reader", "Episodes", measures.empty(f"No unit of episodes is finished yet.{waiting}")
        )
    decode, trouble = _decoder(facts)
    data = episodes.Packer(decode).pack(shown, facts.credit)
    return measures.section(
        "reader",
        "Episodes",
        h("p", trouble, class_="warning") if trouble else None,
        h(
            "noscript",
            h("p", "The episode reader needs JavaScript, which this page runs locally.", class_="warning"),
        ),
        _controls(),
        _legend(tokens=decode is not None),
        _transcript(),
        _left_out(facts, data),
        json_script("episodes", data),
    )


def _transcript() -> Html:
    """The places that the script fills: tokens, what is known of one of them, and the episode's facts."""
    tokens = h(
        "div",
        id="transcript",
        tabindex=0,
        role="group",
        aria_label="Transcript; arrow keys walk through the tokens",
    )
    left = h("div", tokens, h("p", id="token", aria_live="polite", class_="token-line"))
    return h(
        "div", left, h("aside", id="facts", aria_label="Rewards and counts of the episode"), class_="reader"
    )


def _decoder(facts: Facts) -> tuple[episodes.Decode | None, str]:
    """How to turn ids into text, or None and why messages are shown in place of tokens."""
    name = str(facts.config.get("model", {}).get("name", ""))
    try:
        tokenizer = load_tokenizer(name)
    except (ModelError, ImportError) as error:
        return None, f"Messages are shown in place of tokens: {error}."
    return (lambda ids: tokenizer.decode(ids, skip_special_tokens=False)), ""


def _controls() -> Html:
    return h(
        "div",
        h("label", "Unit ", h("select", id="unit")),
        h("label", "Episode ", h("select", id="episode")),
        h("span", h("button", "← Previous", id="previous", type="button"), " ",
          h("button", "Next →", id="next", type="button"), class_="buttons"),
        class_="controls",
    )  # fmt: skip


def _legend(*, tokens: bool) -> Html | None:
    if not tokens:
        return None
    shades = ("≥ 0.9", "0.5 – 0.9", "0.1 – 0.5", "0.01 – 0.1", "< 0.01")
    items = [
        h("li", h("span", "prompt", class_="t p0")),
        h("li", h("span", "observation", class_="t p1")),
        h("li", h("span", "forced by a script", class_="t p3")),
        h("li", "sampled, by probability:"),
        *(h("li", h("span", text, class_=f"t p2 l{i}")) for i, text in enumerate(shades)),
    ]
    return h("ul", *items, class_="legend tokens", aria_label="Colours of tokens")


def _left_out(facts: Facts, data: Record) -> Html:
    """What the page shows of each unit and how to see the rest."""
    units: list[Record] = data["units"]
    rows = [
        [unit["name"], unit["label"], str(len(unit["episodes"])), number(unit["total"])] for unit in units
    ]
    count = sum(len(unit["episodes"]) for unit in units)
    others = len(facts.units) - len(units)
    text = (
        f"Shown are {count} episodes of {len(units)} units, chosen as the table says; {others} further units "
        f"are left out, and so are tokens past the first {episodes.MAX_EPISODE_TOKENS:,} of an episode. "
        "See everything with: "
    )
    sql = "SELECT task_id, value, stop, messages FROM trajectories WHERE name = '…'"
    return h(
        "details",
        h("summary", "What is shown and what is left out"),
        h("p", text, h("code", f'surefoot query {facts.run.path.name} "{sql}"')),
        table(["unit", "what", "shown", "episodes"], rows, caption="Units in the reader."),
    )

"""The report stands alone, shows all that was measured, and cannot be made to run what a policy wrote."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, ModelError
from surefoot.core.types import Group
from surefoot.policy.models import load_tokenizer
from surefoot.report import charts, episodes, figures, write_report
from surefoot.report.facts import read_facts
from surefoot.report.html import h, json_script
from surefoot.runs import files

Made = Any  # the builder of conftest.py
HOSTILE = "</script><script>window.owned=1</script><img src=x onerror=alert(1)> \ud800 \u202e ]]> <!--"
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background", "formaction", "xlink:href"}


class Page(HTMLParser):
    """What a browser would build: tags with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._script: dict[str, str | None] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs)
            self.scripts.append((self._script, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("id") == "episodes"))


def page_of(made: Made) -> tuple[str, Page]:
    text = write_report(made.path).read_text(encoding="utf-8")
    return text, Page(text)


def text_of(data: dict[str, Any], block: dict[str, Any]) -> str:
    return "".join(data["vocabulary"][i][1] for i in block["tokens"])


def test_page_asks_nothing_of_any_other_file_or_host(finished: Made) -> None:
    text, page = page_of(finished)
    assert {tag for tag, _ in page.tags}.isdisjoint(
        {"link", "img", "iframe", "object", "embed", "base", "form", "use"}
    )
    loads = [v for _, attrs in page.tags for k, v in attrs.items() if k in LOADING]
    assert loads and all(value is not None and value.startswith("#") for value in loads)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|WebSocket|import\(", text)


def test_policy_of_the_page_allows_only_the_hashes_of_its_own_style_and_script(finished: Made) -> None:
    text, page = page_of(finished)
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe" not in policy
    running = [attrs for attrs, _ in page.scripts if attrs.get("type") != "application/json"]
    assert running == [{}] and text.count("<style>") == 1
    handlers = [name for _, attrs in page.tags for name in attrs if name.startswith("on") or name == "style"]
    assert handlers == []


def test_hostile_text_stays_text_wherever_a_policy_or_environment_can_write(
    make: Callable[..., Made],
) -> None:
    made = make()
    said = HOSTILE.replace("\ud800", "")
    made.evaluate("initial", 0.5, said=said)
    made.train("treatment", 2, said=said)
    made.run.event("episode_fault", reason=said)
    made.run.event(said)
    text, page = page_of(made)
    assert [attrs for attrs, _ in page.scripts] == [{"type": "application/json", "id": "episodes"}, {}]
    assert not any(tag == "img" for tag, _ in page.tags)
    assert "<script>window" not in text and "onerror=alert" in text
    last = page.data["units"][0]["episodes"][0]["blocks"][3]
    assert text_of(page.data, last) == said  # shown whole, as text


@pytest.mark.parametrize("text", [HOSTILE, "a & b < c > d \" ' \0"])
def test_text_and_attributes_are_escaped_and_always_encodable(text: str) -> None:
    built = h("p", text, title=text) + json_script("x", {"k": text})
    built.encode("utf-8")
    page = Page(built)
    assert [tag for tag, _ in page.tags] == ["p", "script"]
    assert page.tags[0][1]["title"] == text.replace("\ud800", "?").replace("\0", "\ufffd")
    assert json.loads(page.scripts[0][1]) == {"k": text}


def test_every_policy_and_variant_measured_appears_better_or_worse(finished: Made) -> None:
    text, _ = page_of(finished)
    for policy, variants in (
        *((name, finished.variants) for name in ("initial", "start", "final")),
        ("permuted", ("base",)),
    ):
        for variant in variants:
            assert f">{policy} · {variant}</th>" in text
    verdict = json.loads(finished.run.verdict.read_text())
    found = {(c["name"], c["variant"]) for c in verdict["comparisons"]}
    assert {"final - initial", "final - start", "final - permuted", "permuted - start"} == {
        n for n, _ in found
    }
    forest = text[text.index('id="differences"') : text.index('id="learning"')]
    for comparison in verdict["comparisons"]:
        assert f"{comparison['interval']['estimate']:+.3f}" in forest
    assert forest.count('class="interval"') == len(verdict["comparisons"])
    assert "below 0" in forest or "covers 0" in forest


def test_verdict_comes_first_with_what_it_rests_on(finished: Made) -> None:
    text, _ = page_of(finished)
    verdict = json.loads(finished.run.verdict.read_text())
    section = text[text.index("<main") : text.index('id="success"')]
    assert f'class="badge {verdict["outcome"]}"' in section and verdict["sentence"] in section
    assert "verified" in section and "seed 3" in section and "$0.010, 999 tokens" in section


def test_unfinished_runs_render_at_every_stage(make: Callable[..., Made]) -> None:
    made = make()
    for work, expected in (
        (lambda: None, "nothing"),
        (lambda: made.evaluate("initial", 0.0), "Measured so far: initial."),
        (lambda: made.train("treatment", 2), "treatment 2 of 3 steps"),
        (lambda: made.evaluate("final", 1.0), "Still to be measured: start, permuted."),
    ):
        work()
        text, _ = page_of(made)
        assert "Unfinished" in text and expected in text
    task = made.task("base", 0, "Which?")
    with made.store.journal("eval-start") as journal:
        journal.append("g", task, made.episode(task, 0, success=True))
    made.run.event("budget_reached", reason="budget.tokens is used up: 9 of 8")
    assert "A budget ended the run: budget.tokens is used up: 9 of 8." in page_of(made)[0]
    assert "Being played: eval-start, 1 episodes so far." in page_of(made)[0]


def test_damaged_files_are_named_and_do_not_stop_the_report(finished: Made) -> None:
    finished.run.ledger.write_text("{")
    finished.run.metrics.write_bytes(b"not json\n" + finished.run.metrics.read_bytes())
    (finished.run.trajectories / "eval-final.parquet").write_bytes(b"PAR1")
    text, page = page_of(finished)
    assert (
        "ledger.json is not JSON" in text
        and "line 1 is damaged" in text
        and "eval-final.parquet is damaged" in text
    )
    assert any(unit["name"] == "eval-start" for unit in page.data["units"])


def test_episodes_that_replay_differently_are_a_warning(finished: Made) -> None:
    assert "replay_differs" not in page_of(finished)[0]
    finished.run.event("replay_differs", unit="eval-final", trajectory="x")
    text, _ = page_of(finished)
    assert "1 episodes did not repeat exactly" in text


def test_reader_holds_the_tokens_of_each_episode_with_origin_and_log_probability(finished: Made) -> None:
    data = page_of(finished)[1].data
    units = {unit["name"]: unit for unit in data["units"]}
    shown = units["treatment-rl-000000"]["episodes"][0]
    group = next(
        g
        for g in finished.store.read("treatment-rl-000000")
        if any(t.id == shown["id"] for t in g.trajectories)
    )
    trajectory = next(t for t in group.trajectories if t.id == shown["id"])
    tokens = [data["vocabulary"][i][0] for block in shown["blocks"] for i in block["tokens"]]
    assert tokens == trajectory.segments[0].tokens.tolist()
    origins = "".join(block["provenance"] for block in shown["blocks"])
    assert [int(c) for c in origins] == trajectory.segments[0].provenance.tolist()
    logprobs = [value for block in shown["blocks"] for value in block["logprobs"]]
    kept = trajectory.segments[0].logprobs[trajectory.segments[0].sampled]
    assert logprobs == pytest.approx(kept.tolist(), abs=1e-3)
    assert [block["kind"] for block in shown["blocks"]] == ["context", "agent", "context", "agent"]
    assert shown["advantage"] == 0.5 and shown["scores"][0]["trust"] == "verified"
    assert "3" in units["start-sft-oracle"]["episodes"][0]["blocks"][1]["provenance"]  # forced by the script


def test_success_of_shown_evaluation_episodes_is_that_of_the_evaluation(finished: Made) -> None:
    data = page_of(finished)[1].data
    final = next(unit for unit in data["units"] if unit["name"] == "eval-final")
    record = json.loads(finished.run.evaluation_of("final").read_text())
    for shown in final["episodes"]:
        assert shown["success"] == bool(record["variants"][shown["variant"]]["scores"][shown["task"]][0])
    assert {shown["success"] for shown in final["episodes"]} == {True, False}
    assert {shown["variant"] for shown in final["episodes"]} == set(finished.variants)


def test_unscored_episodes_show_their_reason_and_no_number(make: Callable[..., Made]) -> None:
    made = make()
    task = made.task("train", 0, "Which?")
    members = tuple(made.episode(task, i, success=None) for i in range(2))
    made.store.write("treatment-rl-000000", [Group(task, members)], {"arm": "treatment"})
    made.store.write_credit(
        "treatment-rl-000000", [t.id for t in members], [None, None], ["the judge was away"] * 2
    )
    shown = page_of(made)[1].data["units"][0]["episodes"][0]
    assert shown["return"] is None and shown["unscored"] == "the judge was away"
    assert shown["advantage"] is None and shown["scores"] == [
        {"name": "solved", "reason": "the judge was away"}
    ]


def test_without_the_tokenizer_the_messages_are_shown(make: Callable[..., Made]) -> None:
    made = make(model="no-such-model")
    made.evaluate("initial", 0.5)
    text, page = page_of(made)
    assert "Messages are shown in place of tokens" in text and page.data["vocabulary"] == []
    blocks = page.data["units"][0]["episodes"][0]["blocks"]
    assert blocks[0]["messages"][0]["content"].startswith("Which drawer?")
    assert blocks[2]["messages"][0]["content"] == "it is 3"


def test_a_character_of_several_tokens_stands_at_its_last_one() -> None:
    ids = list("aé漢b".encode())
    texts = episodes.token_texts(lambda part: bytes(part).decode("utf-8", "replace"), ids, {})
    assert texts == ["a", "", "é", "", "", "漢", "b"]


def test_size_is_bounded_however_long_the_run_and_its_episodes(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "MAX_EPISODE_TOKENS", 200)
    monkeypatch.setattr(episodes, "MAX_PAGE_TOKENS", 1_000)
    made = make(steps=5)
    for policy in ("initial", "start", "final"):
        made.evaluate(policy, 0.5, said="long " * 2_000)
    made.train("treatment", 3, said="long " * 2_000)
    line = json.loads(made.run.metrics.read_text().splitlines()[0])
    files.append_json_lines(made.run.metrics, ({**line, "step": step} for step in range(3, 5_000)))
    text, page = page_of(made)
    counts = [
        len(e["blocks"][i]["tokens"]) for u in page.data["units"] for e in u["episodes"] for i in range(4)
    ]
    assert sum(counts) <= 1_200 and len(text) < 600_000
    assert page.data["units"][0]["episodes"][0]["blocks"][3]["omitted"] > 9_000
    assert "What is shown and what is left out" in text


def test_shown_episodes_are_few_and_chosen_from_first_middle_and_last_step(make: Callable[..., Made]) -> None:
    made = make(steps=7)
    made.train("treatment", 7)
    for policy in ("initial", "start", "final", "permuted", "random", "constant"):
        made.evaluate(policy, 0.5)
    shown = episodes.choose(read_facts(made.path))
    assert sum(len(unit.episodes) for unit in shown) <= episodes.MAX_EPISODES
    steps = [unit.name for unit in shown if "-rl-" in unit.name]
    assert steps == ["treatment-rl-000000", "treatment-rl-000003", "treatment-rl-000006"]


def test_a_tokenizer_that_is_not_here_is_not_fetched_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    for name in ("smollm2-135m", "nobody/no-such-model", "no-such-model", str(tmp_path)):
        with pytest.raises(ModelError, match="not on this machine"):
            load_tokenizer(name, cache=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0, "0"),
        (1234567, "1,234,567"),
        (0.12345, "0.123"),
        (4.2e-7, "4.2e-07"),
    ],
)
def test_numbers_have_sensible_precision(value: float | None, text: str) -> None:
    assert figures.number(value) == text


def test_time_is_readable_at_every_size() -> None:
    assert [figures.duration(v) for v in (0.04, 59, 61, 3661)] == ["0.0 s", "59 s", "1 min 1 s", "1 h 1 min"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=600))
def test_charts_draw_any_values_inside_the_picture(values: list[float]) -> None:
    points = tuple((float(i), y) for i, y in enumerate(values))
    drawn = charts.line_chart([charts.Series("a", 0, points)], label="x", width=380, height=230)
    lines = re.findall(r' d="M([^"Z]*)"', drawn)
    assert lines and all(line.count("L") < charts.MAX_POINTS for line in lines)
    for x, y in (pair.split() for line in lines for pair in line.split("L")):
        assert 0 <= float(x) <= 380 and 0 <= float(y) <= 230


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path)


def test_report_loads_neither_torch_nor_transformers(finished: Made) -> None:
    code = (
        "import sys; from pathlib import Path; from surefoot.report import write_report; "
        f"write_report(Path({str(finished.path)!r})); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

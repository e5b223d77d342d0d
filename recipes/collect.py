"""Joins runs of one recipe over several seeds into one line of results.jsonl, and rewrites RESULTS.md.

Usage: ``python recipes/collect.py RUN RUN ...``. The verdict over seeds is the same rule, with
intervals that resample training seeds and tasks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from surefoot.core.errors import DataError
from surefoot.economics import money
from surefoot.evaluation.summary import policy_scores, shared_tasks
from surefoot.evaluation.verdict import PolicyScores, judge
from surefoot.runs.directory import RunDirectory
from surefoot.runs.files import append_json, read_json_lines
from surefoot.training.config import parse_config

HERE = Path(__file__).parent
CALLS = ("call_rate_needed", "call_rate_not_needed", "success_needed", "success_not_needed")


def merged(name: str, parts: Sequence[PolicyScores], seeds: Sequence[int]) -> PolicyScores:
    """One policy over several training seeds: samples side by side, labelled with their seed."""
    variants = set.intersection(*(set(part.by_variant) for part in parts))
    samples = [len(next(iter(part.by_variant["base"].values()))) for part in parts]
    labels = [seed for seed, n in zip(seeds, samples, strict=True) for _ in range(n)]
    by_variant = {
        variant: {
            task: [score for part in parts for score in part.by_variant[variant][task]]
            for task in parts[0].by_variant[variant]
        }
        for variant in sorted(variants)
    }
    return PolicyScores(name, by_variant, labels)


def collect(paths: Sequence[Path]) -> dict[str, Any]:
    """The results line of runs that differ in their seed only. Raises DataError otherwise."""
    runs = [RunDirectory.open(path, writable=False) for path in paths]
    configs = [parse_config(run.config_toml, source=str(run.path)) for run in runs]
    if len({config.model_copy(update={"seed": 0}).model_dump_json() for config in configs}) != 1:
        raise DataError("the runs differ in more than their seed; they cannot be joined")
    seeds = [config.seed for config in configs]
    records = [json.loads(run.evaluation.read_text()) for run in runs]
    names = [name for name in records[0] if all(name in record for record in records)]
    parts = {
        f"{name} {i}": policy_scores(name, record[name]) for i, record in enumerate(records) for name in names
    }
    shared = shared_tasks(parts)
    policies = {
        name: merged(name, [shared[f"{name} {i}"] for i in range(len(runs))], seeds) for name in names
    }
    single = [json.loads(run.verdict.read_text()) for run in runs]
    verdict = judge(
        initial=policies["initial"],
        start=policies.get("start", policies["initial"]),
        final=policies["final"],
        controls={arm: policies[arm] for arm in configs[0].arms},
        weakest_trust=single[0]["weakest_trust"],
        seeds=seeds,
        cost_usd=sum(item["cost_usd"] for item in single),
        tokens=sum(item["tokens"] for item in single),
    )
    seconds = [sum(line["wall"] for line in read_json_lines(run.timings)) for run in runs]
    return {
        "recipe": configs[0].name,
        "command": f"surefoot run {configs[0].name} --seed N",
        "seeds": seeds,
        "model": configs[0].model.name,
        "date": date.today().isoformat(),
        "minutes": [round(s / 60, 1) for s in seconds],
        "usd": verdict.cost_usd,
        "tokens": verdict.tokens,
        "outcome": verdict.outcome,
        "outcome_by_seed": [item["outcome"] for item in single],
        "sentence": verdict.sentence,
        "success": verdict.success,
        "differences": {
            f"{c.name} on {c.variant}": [c.interval.estimate, c.interval.low, c.interval.high]
            for c in verdict.comparisons
        },
        "differences_by_seed": [
            {f"{c['name']} on {c['variant']}": [c["interval"][k] for k in ("estimate", "low", "high")]
             for c in item["comparisons"]}
            for item in single
        ],
        "calls_by_seed": [
            {name: {key: record[name]["variants"]["base"].get(key) for key in CALLS} for name in names}
            for record in records
        ],
    }  # fmt: skip


def show(difference: Sequence[float]) -> str:
    """An estimate with its interval."""
    estimate, low, high = difference
    return f"{estimate:+.3f} [{low:+.3f}, {high:+.3f}]"


def table(line: dict[str, Any]) -> str:
    """One result as Markdown."""
    seeds = ", ".join(map(str, line["seeds"]))
    out = [
        f"## {line['recipe']} ({line['date']})",
        "",
        f"`{line['command']}`, seeds {seeds}; model {line['model']}; {', '.join(map(str, line['minutes']))} "
        f"minutes; {line['tokens']:,} tokens and {money(line['usd'])} in all.",
        "",
        f"**{line['sentence']}**",
        "",
        f"Seed by seed: {', '.join(line['outcome_by_seed'])}.",
        "",
        "| difference in success | all seeds | " + " | ".join(f"seed {s}" for s in line["seeds"]) + " |",
        "|---|---|" + "---|" * len(line["seeds"]),
    ]
    for name, value in line["differences"].items():
        each = [show(item[name]) if name in item else "" for item in line["differences_by_seed"]]
        out.append(f"| {name} | {show(value)} | " + " | ".join(each) + " |")
    out += ["", "| policy | " + " | ".join(line["success"]["final"]) + " |"]
    out.append("|---|" + "---|" * len(line["success"]["final"]))
    for policy, success in line["success"].items():
        cells = [f"{success[v]:.3f}" if v in success else "" for v in line["success"]["final"]]
        out.append(f"| {policy} | " + " | ".join(cells) + " |")
    out += ["", "| base tasks | " + " | ".join(key.replace("_", " ") for key in CALLS) + " |"]
    out.append("|---|" + "---|" * len(CALLS))
    for seed, calls in zip(line["seeds"], line["calls_by_seed"], strict=True):
        for policy, rates in calls.items():
            cells = ["" if rates[key] is None else f"{rates[key]:.2f}" for key in CALLS]
            out.append(f"| seed {seed}, {policy} | " + " | ".join(cells) + " |")
    return "\n".join(out)


def main(arguments: Sequence[str]) -> None:
    if arguments:
        append_json(HERE / "results.jsonl", collect([Path(item) for item in arguments]))
    lines = read_json_lines(HERE / "results.jsonl")
    head = "# Results\n\nMade by `python recipes/collect.py RUN ...` from `results.jsonl`; do not edit.\n\n"
    (HERE / "RESULTS.md").write_text(head + "\n\n".join(table(line) for line in lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Writes the tables of docs/algorithms.md from the code: ``python docs/generate.py [--check]``.

What stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is replaced; all other text is written
by hand. With ``--check`` nothing is written, and the exit code is 1 when the page differs from the code.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from surefoot.training.algorithms import _ACTIVE, _CHOICES, ALGORITHMS, COMMON, SETTINGS, Algorithm
from surefoot.training.config import OptimizerConfig, PreferenceStage, RlStage, SftStage

PAGE = Path(__file__).parent / "algorithms.md"
_REGION = re.compile(r"(<!-- begin ([\w-]+) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)
_PAPER = re.compile(r"\b\d{4}\.\d{5}\b")
_STAGES: Mapping[str, type[OptimizerConfig]] = {"rl": RlStage, "preference": PreferenceStage, "sft": SftStage}

# The keys of a stage -> what they mean. Those of the optimiser are the same for every kind.
_OPTIMIZER: Mapping[str, str] = {
    "lr": "learning rate of AdamW at its peak",
    "betas": "decay of AdamW's two means; over a dozen updates a first one of 0.9 can overshoot, 0.5 less",
    "weight_decay": "of AdamW",
    "clip_norm": "largest gradient norm",
    "warmup": "updates until the peak",
    "schedule": 'after it: `"constant"`, `"linear"` or `"cosine"` down to 0',
}
_KEYS: Mapping[str, Mapping[str, str]] = {
    "rl": {
        "algorithm": "a row of the table",
        "settings": "the row's settings",
        "teacher": "the model that `distill` learns from; only for it",
        "group_size": "episodes of each task, at least 2",
        "tasks_per_step": "tasks in a step",
        "steps": "steps of the stage",
        "updates_per_step": "updates made of a step's episodes, each on its own share of the groups; "
        "algorithms that clip hold back the later ones where the earlier went far",
        "checkpoint_every": "steps between checkpoints",
    },
    "preference": {
        "algorithm": "a row of the table",
        "settings": "the row's settings",
        "runs": "run folders whose training episodes are ranked; without any, the policy samples its own",
        "tasks": "tasks to sample, where `runs` is empty",
        "group_size": "episodes of each of them, at least 2",
        "pairs": "most pairs of a group",
        "batch_size": "pairs in an update",
        "steps": "updates of the stage",
        "checkpoint_every": "updates between checkpoints",
    },
    "sft": {
        "algorithm": "a row of the table",
        "settings": "the row's settings",
        "episodes": "training tasks to show",
        "epochs": "passes over the examples",
        "batch_size": "a pass is episodes / batch_size updates",
    },
}


def rows(kind: str) -> str:
    """The table of all rows of a kind."""
    found = [
        [
            f"`{row.name}`<br>{link(row.source)}",
            "<br>".join([f"`{row.formula}`", *([loss(row)] if row.credit is not None else [])]),
            row.when,
            "<br>".join(f"`{key}` = {value(v)}" for key, v in row.own.items()),
            "; ".join(row.costs),
        ]
        for row in ALGORITHMS.values()
        if row.kind == kind
    ]
    head = "advantage and loss" if kind == "rl" else "loss"
    return table(["algorithm", head, "for, or when", "settings", "costs beside the episodes"], found)


def loss(row: Algorithm) -> str:
    """The parts that make a policy-gradient row's loss of its advantage."""
    kind = row.clip(row.settings).kind
    clip = "no clip" if kind == "none" else f"{kind} clip"
    return f"{clip}, {row.ratio} ratio, {row.aggregate}"


def common() -> str:
    """The settings of every policy-gradient row."""
    head = ["setting", "means", "values", "default", "has an effect only with"]
    return table(
        head,
        [
            [f"`{key}`", SETTINGS[key], choices(key), value(v), _ACTIVE[key][0] if key in _ACTIVE else ""]
            for key, v in COMMON.items()
        ],
    )


def own() -> str:
    """The settings of single rows."""
    found = dict.fromkeys(key for row in ALGORITHMS.values() for key in row.settings if key not in COMMON)
    return table(["setting", "means", "values"], [[f"`{key}`", SETTINGS[key], choices(key)] for key in found])


def optimizer() -> str:
    """The keys that every kind of stage has."""
    listed = explained("optimizer", OptimizerConfig, _OPTIMIZER, ())
    defaults = {
        key: list(dict.fromkeys(value(stage.model_fields[key].default) for stage in _STAGES.values()))
        for key in listed
    }
    lr = ", ".join(f"{value(stage.model_fields['lr'].default)} (`{kind}`)" for kind, stage in _STAGES.items())
    return table(
        ["key", "means", "default"],
        [[f"`{key}`", listed[key], lr if key == "lr" else ", ".join(defaults[key])] for key in listed],
    )


def stage(kind: str) -> str:
    """The keys that only stages of ``kind`` have."""
    model = _STAGES[kind]
    listed = explained(f"stage {kind}", model, _KEYS[kind], (*OptimizerConfig.model_fields, "kind"))
    return table(
        ["key", "means", "default"],
        [[f"`{key}`", text, value(model.model_fields[key].get_default(call_default_factory=True))]
         for key, text in listed.items()],
    )  # fmt: skip


def explained(
    what: str, model: type[BaseModel], texts: Mapping[str, str], left_out: Iterable[str]
) -> Mapping[str, str]:
    """``texts``, which must name every field of ``model`` but those ``left_out``, and nothing else."""
    fields = set(model.model_fields) - set(left_out)
    if odd := sorted(fields ^ set(texts)):
        raise SystemExit(f"docs/generate.py: {what}.{odd[0]} is in the code or in the texts, not in both")
    return texts


def choices(key: str) -> str:
    """The values that a setting of text takes."""
    return ", ".join(value(item) for item in _CHOICES.get(key, ()))


def value(item: Any) -> str:
    """A setting's value as it is written in a recipe."""
    if item is None or item in ((), {}):
        return "none"
    if isinstance(item, tuple):
        return "[" + ", ".join(value(part) for part in item) + "]"
    return f'`"{item}"`' if isinstance(item, str) else f"{item:g}"


def link(source: str) -> str:
    """``source`` with its arXiv numbers as links."""
    return _PAPER.sub(lambda found: f"[{found[0]}](https://arxiv.org/abs/{found[0]})", source)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A GitHub table; a bar inside a cell would end it."""
    cells = [
        list(head),
        ["---"] * len(head),
        *([cell.replace("|", r"\|") for cell in line] for line in lines),
    ]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


REGIONS: Mapping[str, Callable[[], str]] = {
    **{kind: partial(rows, kind) for kind in _STAGES},
    "common": common,
    "own": own,
    "optimizer": optimizer,
    **{f"stage-{kind}": partial(stage, kind) for kind in _STAGES},
}


def render(page: str) -> str:
    """``page`` with every region written anew; each must be there exactly once."""
    named = [found[2] for found in _REGION.finditer(page)]
    if sorted(named) != sorted(REGIONS) or page.count("<!-- begin") != len(named):
        raise SystemExit(f"docs/generate.py: the page has the regions {named}; it must have {list(REGIONS)}")
    return _REGION.sub(lambda found: found[1] + REGIONS[found[2]]() + found[4], page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with ``--check`` compare it; 1 when it differs."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/algorithms.md from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when they differ")
    check = parser.parse_args(arguments).check
    page = PAGE.read_text(encoding="utf-8")
    fresh = render(page)
    if check:
        if fresh != page:
            print(f"{PAGE.name} differs from the code; run `make docs`", file=sys.stderr)
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

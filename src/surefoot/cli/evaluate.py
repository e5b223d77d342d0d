"""``surefoot eval``: measure a run's policy, a recipe's model or any other model on held-out tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from surefoot.training.config import RunConfig


def evaluate(
    target: Annotated[str, typer.Argument(help="A run folder, a recipe's name or a .toml file.")],
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", help="A run's checkpoint; default its last.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="train, dev or test.")] = None,
    variants: Annotated[
        str | None, typer.Option(metavar="NAMES", help="all, or variants with commas between.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Episodes of each task.")] = None,
    tasks: Annotated[int | None, typer.Option(help="Tasks of each variant.")] = None,
    model: Annotated[str | None, typer.Option(help="Another model: name, folder or hub id.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder that keeps the trajectories.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Evaluate a policy; nothing is written unless --out is given."""
    from surefoot.cli.output import emit, say, show
    from surefoot.cli.progress import make_progress
    from surefoot.cli.results import figures_table
    from surefoot.core.errors import ConfigError

    overrides = _overrides(split, variants, samples, tasks, model)
    is_run = (Path(target) / "manifest.json").is_file()
    if checkpoint is not None and (not is_run or model is not None):
        why = f"--model {model} replaces it" if model is not None else f"{target} is no run folder"
        raise ConfigError(f"--checkpoint has no effect: {why}")
    config = _config(target, overrides, is_run)
    weights = _weights(Path(target), checkpoint) if is_run and model is None else None
    policy = "initial" if weights is None else "final" if checkpoint is None else f"step-{checkpoint}"

    from surefoot.training.evaluate import evaluate_policy

    with make_progress(json=json) as progress:
        record: dict[str, Any] = evaluate_policy(
            config, policy=policy, weights=weights, out=out, progress=progress
        )
    if json:
        emit({"target": target, "model": config.model.name, "weights": weights, **record})
        return
    what = f"{weights or config.model.name} on {record['split']}, {record['samples']} samples a task"
    show(figures_table(what, record["variants"]))
    if out is not None:
        say(f"episodes: {out}")


def _overrides(
    split: str | None, variants: str | None, samples: int | None, tasks: int | None, model: str | None
) -> list[str]:
    """The options as settings; those that were not given stay as the target has them."""
    from json import dumps

    chosen: dict[str, object | None] = {
        "evaluation.split": split,
        "evaluation.variants": variants
        if variants in (None, "all")
        else [part.strip() for part in (variants or "").split(",")],
        "evaluation.samples": samples,
        "evaluation.tasks": tasks,
        "model.name": model,
    }
    return [f"{key}={dumps(value)}" for key, value in chosen.items() if value is not None]


def _config(target: str, overrides: list[str], is_run: bool) -> RunConfig:
    from surefoot.recipes import find_recipe
    from surefoot.training.config import load_config

    return load_config(Path(target) / "config.toml" if is_run else find_recipe(target), overrides=overrides)


def _weights(run: Path, step: int | None) -> Path:
    from surefoot.runs.directory import RunDirectory
    from surefoot.training.evaluate import checkpoint_of

    return checkpoint_of(RunDirectory.open(run, writable=False), step)

"""Measures one policy on held-out tasks outside a run: a run's checkpoint, or a model as it is loaded.

Uses the same tasks, seeds and figures as a run's own evaluation, so that equal settings give equal
numbers. Must not know what a terminal looks like, and writes nothing into the run it reads.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from surefoot.core.errors import ConfigError
from surefoot.learner import checkpoint
from surefoot.runs import files
from surefoot.runs.directory import Manifest, RunDirectory
from surefoot.training.arms import TREATMENT
from surefoot.training.config import RunConfig, to_toml
from surefoot.training.measuring import measure
from surefoot.training.progress import Progress, Silent
from surefoot.training.run import START, check_config, latest_checkpoint
from surefoot.training.session import Session


def checkpoint_of(run: RunDirectory, step: int | None) -> Path:
    """The folder of the treatment's checkpoint after ``step`` steps (None: the newest).

    A run without reinforcement learning ends with its cold start. Raises ConfigError that lists the
    steps there are.
    """
    for arm in (TREATMENT, START):
        folder = run.checkpoint(arm, 0).parent
        if (latest := latest_checkpoint(folder)) is not None:
            break
    else:
        raise ConfigError(f"{run.path} holds no checkpoint yet")
    if step is None:
        return latest
    wanted = run.checkpoint(folder.name, step)
    if not wanted.is_dir():
        kept = ", ".join(str(int(path.name.removeprefix("step-"))) for path in sorted(folder.glob("step-*")))
        raise ConfigError(f"--checkpoint {step}: {folder} keeps only step {kept}")
    return wanted


def evaluate_policy(
    config: RunConfig,
    *,
    policy: str,
    weights: Path | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The evaluation record (policy, split, samples, figures by variant) under ``config.evaluation``.

    ``weights``: a checkpoint's folder to load over the model. ``out``: a new folder that keeps the
    trajectories and the record; without it they are gone afterwards. Raises SurefootError.
    """
    check_config(config)
    with ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="surefoot-eval-"))) / "run"
        text = to_toml(config)
        manifest = Manifest.current(recipe=config.name, seed=config.seed, config_toml=text)
        run = stack.enter_context(RunDirectory.create(out, config_toml=text, manifest=manifest))
        session = Session(config, run, progress or Silent())
        if weights is not None:
            checkpoint.load_weights(weights, session.loaded.model)
        record = measure(session, policy, session.variants)
        files.write_atomic(run.evaluation_of(policy), json.dumps(record, indent=1))
        files.write_atomic(run.evaluation, json.dumps({policy: record}, indent=1))
        session.ledger.write_summary(run.ledger)
        return record

"""Which episodes a preference stage ranks, in which order they stand, and which pairs an update gets.

Pairs are made once, as the stage begins. Must not know losses or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from surefoot.core.errors import ConfigError, SignalError
from surefoot.core.seeds import derive
from surefoot.core.types import Group
from surefoot.objectives.preference import pairs_by_rule
from surefoot.runs.directory import RunDirectory
from surefoot.runs.store import TrajectoryStore
from surefoot.training.config import PreferenceStage, parse_config
from surefoot.training.session import Session, Unit
from surefoot.training.signal import Batch, read_batch

Pair = tuple[int, int]  # rows of (chosen, rejected)


def rank_pairs(batch: Batch, *, limit: int | None, seed: int) -> tuple[list[int], list[int]]:
    """Rows of (chosen, rejected): correct first, then fewer calls, then shorter."""
    chosen, rejected = pairs_by_rule(
        torch.from_numpy(batch.success),
        torch.from_numpy(batch.calls),
        torch.from_numpy(batch.sizes),
        torch.from_numpy(batch.group),
        torch.from_numpy(batch.valid),
        limit=limit,
        seed=seed,
    )
    return chosen.tolist(), rejected.tolist()


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Episodes as one arm judges them, and their pairs."""

    batch: Batch
    pairs: tuple[Pair, ...]


class PairSource:
    """The episodes of one preference stage: of stored runs, or sampled as the stage begins."""

    def __init__(self, session: Session, stage: PreferenceStage, arm: str, first_task: int, tag: str) -> None:
        self.session, self.stage, self.arm, self.tag = session, stage, arm, tag
        self.first_task = first_task
        self._groups: list[Group] | None = None

    @property
    def groups(self) -> list[Group]:
        """The episodes to rank, gathered once. Those of other runs are copied, so that a resumed run reads
        the same. Raises ConfigError for runs that do not fit.
        """
        if self._groups is None:
            self._groups = self._gathered()
        return self._groups

    def ranked(self, judge: str) -> Ranked:
        """The episodes as the arm ``judge`` sees them, at most ``pairs`` pairs of a group."""
        seed = derive(self.session.config.seed, self.tag, "pairs")
        batch = read_batch(self.groups, arm=judge, seed=seed, won=self.session.won)
        chosen, rejected = rank_pairs(batch, limit=self.stage.pairs, seed=seed)
        return Ranked(batch, tuple(zip(chosen, rejected, strict=True)))

    def nothing(self) -> SignalError:
        """What to raise when no pair differs."""
        return SignalError(
            f"stage preference: none of {len(self.groups)} groups has a solved episode and a worse one; "
            "sample more tasks, or start from a policy that solves some"
        )

    def share(self, pairs: Sequence[Pair], index: int) -> list[Pair]:
        """The pairs of update ``index``; every pass over them has its own order."""
        size = self.stage.batch_size
        per_pass = max(1, math.ceil(len(pairs) / size))
        turn, place = divmod(index, per_pass)
        rng = np.random.Generator(np.random.Philox(derive(self.session.config.seed, self.tag, turn)))
        order = rng.permutation(len(pairs))[place * size :][:size]
        return [pairs[i] for i in order]

    def _gathered(self) -> list[Group]:
        session, stage = self.session, self.stage
        unit = Unit(f"{self.arm}-{self.tag}-samples", self.arm, self.tag, 0, "rollout")
        if stage.runs:
            if not session.store.exists(unit.name):
                labels = {"arm": self.arm, "stage": self.tag, "step": 0, "phase": "copied"}
                session.store.write(unit.name, self._stored(), labels)
            return session.store.read(unit.name)
        tasks = session.training_tasks(self.first_task, stage.tasks)
        session.progress.begin(f"{self.arm}: episodes to rank", len(tasks) * stage.group_size)
        seed = derive(session.config.seed, self.tag, "samples")
        return session.collect(unit, tasks, members=stage.group_size, seed=seed)

    def _stored(self) -> list[Group]:
        """Training episodes of other runs with the same model and environment. Raises ConfigError."""
        config, found = self.session.config, list[Group]()
        for name in self.stage.runs:
            run = RunDirectory.open(Path(name), writable=False)
            theirs = parse_config(run.config_toml, source=str(run.config))
            for what, own, other in (
                ("model", config.model.name, theirs.model.name),
                ("environment", config.environment.name, theirs.environment.name),
            ):
                if own != other:
                    raise ConfigError(f"stage preference: run {name} has {what} {other!r}, not {own!r}")
            store = TrajectoryStore(run)
            for unit in store.names():
                found.extend(
                    g for g in store.read(unit) if g.task.split == "train" and len(g.trajectories) > 1
                )
        if not found:
            raise ConfigError(f"stage preference: {list(self.stage.runs)} hold no group of training episodes")
        return found

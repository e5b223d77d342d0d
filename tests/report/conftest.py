"""Builds small run folders as a real run leaves them: stored episodes, metrics, ledger, verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from surefoot.core.types import (
    Action,
    Cost,
    Group,
    Message,
    Provenance,
    Sampling,
    Scored,
    Segment,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Trust,
    Turn,
    Unscored,
)
from surefoot.economics.ledger import Ledger
from surefoot.economics.prices import PriceTable
from surefoot.evaluation.summary import policy_scores, summarise
from surefoot.evaluation.verdict import judge
from surefoot.runs import Manifest, RunDirectory, TrajectoryStore, files

VARIANTS = ("base", "rule", "scale")
CONFIG = """name = "guess"
description = "A made-up run."
seed = 3
[model]
name = {model}
[environment]
name = "guess"
[[stage]]
kind = "sft"
[[stage]]
kind = "rl"
algorithm = "grpo"
group_size = 4
tasks_per_step = 2
steps = {steps}
[evaluation]
level = 0.95
[controls]
arms = ["permuted"]
"""


def byte_tokenizer(folder: Path) -> Path:
    """A folder with a tokenizer of single bytes: id ``b`` is byte ``b``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter([c for c in alphabet if ord(c) > 255])
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    vocabulary = {(chr(byte) if byte in kept else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def segment_of(parts: Sequence[tuple[str, Provenance]], version: int = 1) -> Segment:
    tokens = [list(text.encode()) for text, _ in parts]
    ids = np.array([i for part in tokens for i in part], np.int32)
    origin = [np.full(len(part), by, np.uint8) for part, (_, by) in zip(tokens, parts, strict=True)]
    provenance = np.concatenate(origin)
    sampled = provenance == Provenance.SAMPLED
    logprobs = np.where(sampled, -0.001 * ids, np.nan).astype(np.float32)
    return Segment(ids, provenance, logprobs, np.where(sampled, version, -1).astype(np.int32))


def episode(
    task: Task, number: int, *, success: bool | None, said: str = "Answer: 3", forced: bool = False
) -> Trajectory:
    """Two turns: a call and its result, then ``said``."""
    by = Provenance.FORCED if forced else Provenance.SAMPLED
    call, result = 'look({"d": 1})', "it is 3"
    parts = [
        (task.prompt[0].content, Provenance.PROMPT),
        (call, by),
        (result, Provenance.OBSERVATION),
        (said, by),
    ]
    sizes = np.cumsum([0, *(len(text.encode()) for text, _ in parts)]).tolist()
    turns = (
        Turn(
            0, 0, sizes[1], sizes[2],
            Action("", (ToolCall("call_0", "look", {"d": 1}),)),
            (Message("tool", result, (), "call_0"),),
            (ToolResult("call_0", "look", result, True),),
        ),
        Turn(1, 0, sizes[3], sizes[4], Action(said)),
    )  # fmt: skip
    score = Unscored("the judge was away", "solved") if success is None else Scored(
        float(success), Trust.VERIFIED, "solved", f"saw {said}"
    )  # fmt: skip
    cost = Cost(sizes[1], 0, len(result), sizes[4] - sizes[3] + len(call), 2, 1)
    return Trajectory(
        f"{task.id}-{number}", task.id, f"g-{task.id}", (segment_of(parts),), turns, StopReason.ANSWERED,
        True, False, cost, Sampling(), number, {}, (score,), score,
    )  # fmt: skip


@dataclass
class Made:
    """A run folder under construction."""

    run: RunDirectory
    store: TrajectoryStore
    ledger: Ledger
    variants: tuple[str, ...] = VARIANTS

    @property
    def path(self) -> Path:
        return self.run.path

    def episode(self, task: Task, number: int, *, success: bool | None) -> Trajectory:
        return episode(task, number, success=success)

    def task(self, variant: str, number: int, prompt: str) -> Task:
        split = "test" if variant != "train" else "train"
        return Task(
            f"{variant}-{number}",
            split,
            variant,
            (Message("user", prompt),),
            3,
            {"needs_call": number % 2 == 0},
        )

    def evaluate(
        self, policy: str, rate: float, said: str = "Answer: 3", variants: Sequence[str] = VARIANTS
    ) -> None:
        """Six tasks a variant, two samples each, of which ``rate`` succeed."""
        groups: list[Group] = []
        for variant in variants:
            for n in range(6):
                task = self.task(variant, n, f"Which drawer? {variant} {n}")
                members = tuple(episode(task, i, success=(n + 0.5) / 6 < rate, said=said) for i in range(2))
                groups.append(Group(task, members))
        self.store.write(f"eval-{policy}", groups, {"arm": policy, "stage": "evaluation", "step": 0})
        figures = {
            v: summarise([g for g in groups if g.task.variant == v], reward="solved", full=1.0)
            for v in variants
        }
        record = {"policy": policy, "split": "test", "samples": 2, "variants": figures}
        files.write_atomic(self.run.evaluation_of(policy), json.dumps(record))
        self.ledger.record_phase(policy, "evaluation", 0, "evaluation", 2.0, 3.0)

    def train(self, arm: str, steps: int, said: str = "Answer: 3") -> None:
        for step in range(steps):
            name = f"{arm}-rl-{step:06d}"
            tasks = [self.task("train", 2 * step + n, "Which drawer?") for n in range(2)]
            groups = [
                Group(t, tuple(episode(t, i, success=i <= (step + k) % 4, said=said) for i in range(4)))
                for k, t in enumerate(tasks)
            ]
            self.store.write(name, groups, {"arm": arm, "stage": "rl", "step": step})
            everyone = [t for group in groups for t in group.trajectories]
            self.store.write_credit(
                name, [t.id for t in everyone], [0.5] * len(everyone), [""] * len(everyone)
            )
            wins = float(np.mean([t.value or 0.0 for t in everyone]))
            files.append_json(self.run.metrics, {
                "arm": arm, "stage": "rl", "stage_number": 0, "step": step, "success": wins,
                "return_mean": wins,
                "call_rate_needed": 1.0, "call_rate_not_needed": 0.5, "tool_calls": 1.0, "turns": 2.0,
                "truncated": 0.0, "groups": 2, "dead_groups": 1, "singleton_groups": 0, "unscored": 0,
                "advantage_abs_mean": 0.5, "entropy": 1.0 / (step + 1), "grad_norm": 2.0, "mismatch_kl": 1e-9,
                "mismatch_max": 1e-6, "approx_kl": 0.0, "clip_fraction": 0.0, "stepped": True, "loss": 0.1,
                "ess_token": 1.0, "ess_sequence": 1.0,
            })  # fmt: skip
            self.ledger.record_phase(arm, "rl", step, "rollout", 1.0, 1.5)

    def finish(self, policies: Sequence[str] = ("initial", "start", "final", "permuted")) -> None:
        """Judge what was evaluated and write the summaries."""
        records = {name: json.loads(self.run.evaluation_of(name).read_text()) for name in policies}
        scores = {name: policy_scores(name, record) for name, record in records.items()}
        verdict = judge(
            initial=scores["initial"], start=scores["start"], final=scores["final"],
            controls={"permuted": scores["permuted"]}, weakest_trust="VERIFIED", seeds=(3,),
            cost_usd=0.01, tokens=999,
        )  # fmt: skip
        files.write_atomic(self.run.evaluation, json.dumps(records))
        files.write_atomic(self.run.verdict, json.dumps({**verdict.to_json(), "stopped": ""}))
        self.ledger.flush()
        self.ledger.write_summary(self.run.ledger)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    """Makes an empty run; ``model`` defaults to a tokenizer of bytes."""

    def build(*, model: str | None = None, steps: int = 3) -> Made:
        name = model or str(byte_tokenizer(tmp_path / "bytes"))
        text = CONFIG.format(model=json.dumps(name), steps=steps)
        manifest = Manifest.current(recipe="guess", seed=3, config_toml=text)
        run = RunDirectory.create(tmp_path / "run", config_toml=text, manifest=manifest)
        return Made(run, TrajectoryStore(run), Ledger(run.ledger_lines, PriceTable(), files))

    return build


@pytest.fixture
def finished(make: Callable[..., Made]) -> Made:
    """A whole run with a verdict."""
    made = make()
    made.evaluate("initial", 0.0)
    made.evaluate("start", 0.3)
    tasks = [made.task("train", n, "Which drawer?") for n in range(2)]
    oracle = [Group(t, (episode(t, 0, success=True, forced=True),)) for t in tasks]
    made.store.write("start-sft-oracle", oracle, {"arm": "start", "stage": "sft", "step": 0})
    files.append_json(
        made.run.metrics,
        {
            "arm": "start",
            "stage": "sft",
            "stage_number": 0,
            "step": 0,
            "loss": 2.0,
            "grad_norm": 1.0,
            "stepped": True,
        },
    )
    for arm in ("treatment", "permuted"):
        made.train(arm, 3)
    made.evaluate("final", 0.9)
    made.evaluate("permuted", 0.2, variants=("base",))
    made.finish()
    return made

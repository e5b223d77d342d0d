"""What all credit functions cost together, as a share of the least that a training step can cost.

One batch of 512 trajectories x 4,096 sampled tokens x 16 turns goes once through every function of
``surefoot.credit`` and the token functions of ``surefoot.objectives``, which no real step does. The step is a
floor, not a measurement: 6 x parameters FLOPs for each token (the matrix products of forward and backward; no
attention, sampling or optimiser), at the best matrix-product rate that is seen between the timings, on every
core at once. Credit runs on one thread. Both are timed in CPU seconds, which a busy machine hardly changes.
Usage: ``python benchmarks/credit_cost.py [--trajectories 512] [--repeats 3]``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from common import keep

from surefoot import credit, objectives
from surefoot.credit import filters
from surefoot.objectives import entropy

PARAMETERS = 134_515_008
"""SmolLM2-135M; the tied embedding counts once, as the output layer's matrix product."""
MEMBERS = 8
SIDE = 1536
TOO_MUCH = 0.01
LOSS = ("token_weights", "policy_gradient")
STEPS = {
    "grpo": ("dynamic_sampling", "group_relative", "to_tokens", *LOSS),
    "grpo, decoupled": ("dynamic_sampling", "group_relative", "to_tokens", "decoupled", *LOSS),
    "grpo-roc": ("tool_penalty", "resample_on_correct", "group_relative", "to_tokens", *LOSS),
    "gigpo": ("anchor_groups", "gigpo", "steps_to_tokens", *LOSS),
    "istar": ("istar_step_rewards", "bradley_terry_trajectories", "istar", "steps_to_tokens", *LOSS),
    "ppo": ("gae", "whiten", "value_loss", *LOSS),
    "prime": ("prime", "prime_loss", "whiten", *LOSS),
}
"""What one step of an algorithm calls."""

Works = dict[str, Callable[[], Any]]


class Batch:
    """Random returns, rewards, values and log-probabilities, with groups of 8 and equal lengths."""

    def __init__(self, trajectories: int, tokens: int, turns: int) -> None:
        draw = torch.Generator().manual_seed(0)
        n, steps, total = trajectories, trajectories * turns, trajectories * tokens

        def normal(size: int) -> Tensor:
            return torch.randn(size, generator=draw)

        self.returns = (torch.rand(n, generator=draw) < 0.5).double()
        self.group = torch.arange(n) // MEMBERS
        self.lengths = torch.full((n,), tokens)
        self.success = self.returns > 0
        self.components = torch.stack([self.returns, torch.rand(n, generator=draw).double()], 1)
        self.trajectory = torch.arange(n).repeat_interleave(turns)
        self.step_lengths = torch.full((steps,), tokens // turns)
        self.step_rewards, self.step_values = normal(steps), normal(steps)
        self.tool_step = torch.rand(steps, generator=draw) < 0.5
        self.state = torch.randint(0, 64, (steps,), generator=draw).tolist()
        self.done = torch.arange(1, steps + 1) % turns == 0
        self.heads = torch.randn(2, steps, generator=draw)
        self.rewards, self.values = normal(total), normal(total)
        self.old = -normal(total).abs()
        self.new = self.old + 0.05 * normal(total)
        self.clipped = torch.rand(total, generator=draw) < 0.1
        self.entropy = normal(total).abs()
        self.sequence = torch.arange(n).repeat_interleave(tokens)
        self.penalty = np.random.default_rng(0).random(n)
        self.counts = np.full(n, turns)

    @property
    def texts(self) -> list[str]:
        """What the environment showed before each step: 64 states of about 400 characters in each group."""
        return [f"state {state} " + "of a page " * 40 for state in self.state]


def of_trajectories(b: Batch) -> Works:
    """One number per trajectory."""
    r, g, sizes = b.returns, b.group, b.lengths
    return {
        "group_statistics": lambda: credit.group_statistics(r, g),
        "group_relative": lambda: credit.group_relative(r, g),
        "leave_one_out": lambda: credit.leave_one_out(r, g, normalise=True),
        "reinforce": lambda: credit.reinforce(r, g),
        "reinforce_pp": lambda: credit.reinforce_pp(r, sizes),
        "reinforce_pp_baseline": lambda: credit.reinforce_pp_baseline(r, g, sizes),
        "opo": lambda: credit.opo(r, g, sizes),
        "remax": lambda: credit.remax(r, r),
        "pass_at_k": lambda: credit.pass_at_k(r, g),
        "gdpo": lambda: credit.gdpo(b.components, g, (1.0, 0.5)),
        "to_tokens": lambda: credit.to_tokens(r, sizes),
    }


def of_steps(b: Batch) -> Works:
    """One number per turn."""
    r, g, at = b.returns, b.group, b.trajectory
    owner = g[at]
    anchor = credit.anchor_groups(b.texts, owner)
    texts, x = b.texts, b.step_rewards
    return {
        "returns_to_go": lambda: credit.returns_to_go(x, at, gamma=0.95),
        "step_relative": lambda: credit.step_relative(x, at, g),
        "anchor_groups": lambda: credit.anchor_groups(texts, owner),
        "gigpo": lambda: credit.gigpo(r, x, at, anchor, g),
        "mt_grpo": lambda: credit.mt_grpo(r, r, g, at, b.tool_step),
        "istar": lambda: credit.istar(r, x, at, g),
        "turn_gae": lambda: credit.turn_gae(x, b.step_values, at, gamma=0.99, lam=0.95),
        "archer_targets": lambda: credit.archer_targets(x, b.done, b.heads, b.heads),
        "archer_advantages": lambda: credit.archer_advantages(b.heads, b.heads),
        "steps_to_tokens": lambda: credit.steps_to_tokens(x, b.step_lengths),
    }


def of_tokens(b: Batch) -> Works:
    """One number per token."""
    r, g, at, sizes = b.returns, b.group, b.trajectory, b.step_lengths
    ratio = b.new - b.old
    return {
        "gae": lambda: credit.gae(b.rewards, b.values, b.lengths, gamma=1.0, lam=0.95),
        "bilevel_gae": lambda: credit.bilevel_gae(
            b.step_rewards, b.values, at, sizes, turn_gamma=1, turn_lam=1, token_gamma=1, token_lam=0.95
        ),
        "length_adaptive_lambda": lambda: credit.length_adaptive_lambda(b.lengths),
        "whiten": lambda: credit.whiten(b.rewards, b.lengths),
        "value_loss": lambda: credit.value_loss(b.values, b.values, b.rewards, b.entropy),
        "istar_step_rewards": lambda: credit.istar_step_rewards(ratio, sizes),
        "bradley_terry_trajectories": lambda: credit.bradley_terry_trajectories(
            ratio, sizes, at, b.success, g
        ),
        "prime": lambda: credit.prime(ratio, r, b.lengths, g),
        "prime_loss": lambda: credit.prime_loss(ratio, r, b.lengths),
        "sweet_advantage": lambda: credit.sweet_advantage(b.new, b.old, sizes),
        "sweet_loss": lambda: credit.sweet_loss(b.new, b.old, sizes, at, b.success, g),
    }


def of_filters(b: Batch) -> Works:
    """Which trajectories to train on."""
    r, g = b.returns.numpy(), b.group.numpy()
    wrong = b.counts // 4
    return {
        "dynamic_sampling": lambda: filters.dynamic_sampling(r, g),
        "duplicate_live": lambda: filters.duplicate_live(r, g, seed=0),
        "variance_filter": lambda: filters.variance_filter(r, g),
        "resample_on_correct": lambda: filters.resample_on_correct(r, g, b.penalty, keep=MEMBERS // 2),
        "tool_penalty": lambda: filters.tool_penalty(wrong, b.counts, answers=wrong, turns=b.counts),
        "overlong_filter": lambda: filters.overlong_filter(r > 0, g),
        "soft_overlong": lambda: filters.soft_overlong(b.lengths.numpy()),
    }


def of_objectives(b: Batch) -> Works:
    """Weights, corrections and the loss itself, forward only."""
    new, old, w = b.new, b.old, objectives.token_weights(b.lengths)
    clip = objectives.Clip.ppo()
    return {
        "token_weights": lambda: objectives.token_weights(b.lengths, aggregate="sequence_mean"),
        "token_weights, by turn": lambda: objectives.token_weights(
            b.lengths, aggregate="turn_mean", turn_lengths=b.step_lengths
        ),
        "policy_gradient": lambda: objectives.policy_gradient(new, old, b.rewards, w, clip=clip),
        "policy_gradient, by sequence": lambda: objectives.policy_gradient(
            new, old, b.rewards, w, sequence=b.sequence, ratio="sequence", clip=clip
        ),
        "truncated_importance": lambda: objectives.truncated_importance(new, old),
        "icepop": lambda: objectives.icepop(new, old),
        "decoupled": lambda: objectives.decoupled(new, old),
        "offpolicy_sequence_mask": lambda: objectives.offpolicy_sequence_mask(
            new, old, b.rewards, b.sequence
        ),
        "kl_estimate": lambda: objectives.kl_estimate(new, old),
        "clip_cov": lambda: entropy.clip_cov(new, b.rewards, b.clipped, seed=0),
        "kl_cov": lambda: entropy.kl_cov(new, b.rewards),
        "top_entropy": lambda: entropy.top_entropy(b.entropy),
    }


def seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def product_rate(dtype: torch.dtype) -> float:
    """FLOPs per CPU second of one square matrix product."""
    a, b = torch.ones(SIDE, SIDE, dtype=dtype), torch.ones(SIDE, SIDE, dtype=dtype)
    return 2 * SIDE**3 / seconds(lambda: a @ b)


def measure(works: Works, repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each function and FLOPs per second of the products, taken in turns; one pass is dropped."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    rates: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for turn in range(repeats + 1):
        for name, work in works.items():
            took = seconds(work)
            speeds = {"float32": product_rate(torch.float32), "bfloat16": product_rate(torch.bfloat16)}
            if turn:
                spent[name].append(took)
                for kind, speed in speeds.items():
                    rates[kind].append(speed)
    return spent, rates


def shares(spent: dict[str, list[float]], rates: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Median credit seconds over the floor of a step, for each number format of its matrix products."""
    middle = {name: statistics.median(values) for name, values in spent.items()}
    total = sum(middle.values())
    one_step = {name: sum(middle[part] for part in parts) for name, parts in STEPS.items()}
    work = 6 * PARAMETERS * tokens
    floors = {kind: work / max(values) / (os.cpu_count() or 1) for kind, values in rates.items()}
    return {
        "credit_seconds": total,
        "credit_seconds_worst": sum(max(values) for values in spent.values()),
        "step_flops": work,
        "gflops_best_one_core": {kind: max(values) / 1e9 for kind, values in rates.items()},
        "gflops_median_one_core": {kind: statistics.median(values) / 1e9 for kind, values in rates.items()},
        "step_floor_seconds": floors,
        "share": {kind: total / floor for kind, floor in floors.items()},
        "share_of_one_algorithm": {
            name: {kind: took / floor for kind, floor in floors.items()} for name, took in one_step.items()
        },
    }


def similarity_seconds(turns: int) -> float:
    """CPU seconds to match the states of ONE group by text similarity: 8 x turns pages of 400 letters.

    Kept apart: it compares pairs of texts with difflib, and grows with the square of the distinct texts.
    """
    letters = np.random.default_rng(0).choice(list("etaoin shrdlu"), size=(MEMBERS * turns, 400))
    pages = ["".join(row) for row in letters]
    owner = torch.zeros(len(pages), dtype=torch.int64)
    return seconds(lambda: credit.anchor_groups(pages, owner, mode="similarity"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    b = Batch(given.trajectories, given.tokens, given.turns)
    rooms = {
        "trajectory": of_trajectories(b),
        "steps": of_steps(b),
        "tokens": of_tokens(b),
        "filters": of_filters(b),
        "objectives": of_objectives(b),
    }
    works = {name: work for room in rooms.values() for name, work in room.items()}
    spent, rates = measure(works, given.repeats)
    found = shares(spent, rates, given.trajectories * given.tokens)
    for name, values in sorted(spent.items(), key=lambda item: -statistics.median(item[1])):
        print(f"{name:30s} {1e3 * statistics.median(values):9.2f} ms")
    print(f"all {len(works)} functions {found['credit_seconds']:.2f} s")
    for kind, share in found["share"].items():
        floor, rate = found["step_floor_seconds"][kind], found["gflops_best_one_core"][kind]
        verdict = "below" if share < TOO_MUCH else "NOT below"
        print(f"{kind:9s} {rate:7.1f} GFLOP/s a core: a step takes at least {floor:8.0f} s; ", end="")
        print(f"share {100 * share:.4f}%, {verdict} {100 * TOO_MUCH:g}%")
    for name, parts in found["share_of_one_algorithm"].items():
        print(f"{name:16s}", ", ".join(f"{kind} {100 * share:.4f}%" for kind, share in parts.items()))
    alike = similarity_seconds(given.turns)
    print(f"apart: anchor_groups by similarity, one group {alike:.2f} s")
    settings = {
        "shape": [given.trajectories, given.tokens, given.turns],
        "parameters": PARAMETERS,
        "threads": 1,
        "torch": torch.__version__,
        "repeats": given.repeats,
    }
    print(
        "kept in",
        keep("credit_cost", {**settings, **found, "similarity_seconds_one_group": alike, "seconds": spent}),
    )


if __name__ == "__main__":
    main()

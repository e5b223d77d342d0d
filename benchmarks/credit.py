"""Toy comparisons of credit methods: tabular policies, many seeds, whole step-size curves, controls.

Every advantage and every loss comes from ``surefoot.credit`` and ``surefoot.objectives``; this file only
holds the toys. They say in which direction a method moves a tabular policy, nothing about language models.
Usage: ``python benchmarks/credit.py [--seeds 16] [--only gigpo,istar,roc,staleness]``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from common import keep

from surefoot.core.seeds import derive
from surefoot.credit import (
    alpha_schedule,
    anchor_groups,
    bradley_terry_trajectories,
    gigpo,
    group_relative,
    istar,
    istar_step_rewards,
    to_tokens,
)
from surefoot.credit.filters import resample_on_correct, tool_penalty
from surefoot.evaluation.statistics import PairedInterval, holm, mean_interval, paired_difference
from surefoot.objectives import (
    Clip,
    decoupled,
    icepop,
    policy_gradient,
    token_weights,
    truncated_importance,
)

Floats = NDArray[np.float64]

MEMBERS = 8
DISCOUNT = 0.95
LAST = 10
DRAWS = 10_000
SMALLEST_NORM = 1e-9  # below this a gradient is rounding, and scaling it up would be a random step
AREA, END = "success, mean of all updates", "success, last 10"
ERRORS, PAIRS = "calls that err, last 10", "pairs ordered rightly"


class Worlds:
    """Independent repeats side by side in one batch: each step size with each seed.

    A world draws from its seed alone, so all arms and all step sizes of a seed meet the same luck.
    """

    def __init__(self, seeds: int, sizes: Sequence[float], matched: bool) -> None:
        self.seeds, self.matched, self.count = seeds, matched, seeds * len(sizes)
        self.size = torch.tensor(sizes, dtype=torch.float64).repeat_interleave(seeds)
        self.draws = [np.random.default_rng(derive("credit toys", seed)) for seed in range(seeds)]

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers float64[worlds, *shape]."""
        drawn = torch.from_numpy(np.stack([draw.random(shape) for draw in self.draws]))
        return drawn.repeat(self.count // self.seeds, *([1] * len(shape)))

    def policy(self, states: int, actions: int) -> Tensor:
        """Logits [worlds, states, actions] of the uniform policy."""
        return torch.zeros(self.count, states, actions, dtype=torch.float64, requires_grad=True)

    def descend(self, logits: Tensor, loss: Tensor, times: float = 1.0) -> Tensor:
        """New logits: ``times`` each world's size along the gradient or, matched, along its unit vector."""
        (gradient,) = torch.autograd.grad(loss * self.count, logits)  # the loss is a mean over worlds
        if self.matched:
            norm = gradient.flatten(1).norm(dim=1)[:, None, None]
            gradient = torch.where(norm > SMALLEST_NORM, gradient / norm, 0.0)
        return (logits - times * self.size[:, None, None] * gradient).detach().requires_grad_()


@dataclass(frozen=True)
class Batch:
    """Episodes of all worlds: one row per action, in time order inside each trajectory."""

    state: Tensor  # int64[M], numbered through all worlds
    action: Tensor  # int64[M]
    trajectory: Tensor  # int64[M]
    lengths: Tensor  # int64[n]
    group: Tensor  # int64[n]
    returns: Tensor  # float64[n]

    def logp(self, logits: Tensor) -> Tensor:
        """Log-probability of each action, float64[M]."""
        return logits.flatten(0, 1).log_softmax(-1)[self.state, self.action]

    def loss(self, logits: Tensor, advantages: Tensor) -> Tensor:
        """The on-policy surrogate: mean over trajectories of the sum over their actions."""
        logp = self.logp(logits)
        weights = token_weights(self.lengths, aggregate="constant", constant=1)
        return policy_gradient(logp, logp.detach(), advantages, weights, clip=Clip.ppo()).loss


def choose(probabilities: Tensor, u: Tensor) -> Tensor:
    """Draw an action from float64[..., actions] by the uniform numbers [...]."""
    return (u[..., None] > probabilities.cumsum(-1)[..., :-1]).sum(-1)


def groups_of(count: int, members: int) -> Tensor:
    """Group ids of ``count`` trajectories, ``members`` in each group."""
    return torch.arange(count) // members


# -------------------- grid world: GiGPO against GRPO


@dataclass(frozen=True)
class Grid:
    """Walk from one corner to the other within ``horizon`` moves; a slip replaces a move by a random one."""

    side: int = 6
    horizon: int = 40
    slip: float = 0.0

    @property
    def goal(self) -> int:
        return self.side**2 - 1

    @property
    def next(self) -> Tensor:
        """Where each of the four moves leads, int64[cells, 4]; walls stop."""
        cell, most = torch.arange(self.side**2), self.side - 1
        row, column = cell // self.side, cell % self.side
        moves = ((-1, 0), (1, 0), (0, -1), (0, 1))
        ends = [(row + i).clamp(0, most) * self.side + (column + j).clamp(0, most) for i, j in moves]
        return torch.stack(ends, 1)

    def success(self, logits: Tensor) -> Tensor:
        """Exact chance to arrive in time from the start, float64[worlds]."""
        after, moves = self.next, (1 - self.slip) * logits.detach().softmax(-1) + self.slip / 4
        value = torch.zeros(logits.shape[:2], dtype=torch.float64)
        value[:, self.goal] = 1
        for _ in range(self.horizon):
            value = (moves * value[:, after]).sum(-1)
            value[:, self.goal] = 1
        return value[:, 0]

    def play(self, worlds: Worlds, logits: Tensor, episodes: int) -> Batch:
        after, policy = self.next, logits.detach().softmax(-1)
        u, slips = worlds.uniform(self.horizon, episodes), worlds.uniform(2, self.horizon, episodes)
        at = torch.zeros(worlds.count, episodes, dtype=torch.int64)
        world = torch.arange(worlds.count)[:, None]
        states, actions = [], []
        for t in range(self.horizon):
            action = choose(policy[world, at], u[:, t])
            states.append(at)
            actions.append(action)
            moved = torch.where(slips[:, 0, t] < self.slip, (4 * slips[:, 1, t]).long(), action)
            at = torch.where(at == self.goal, at, after[at, moved])
        cell, action = torch.stack(states, -1), torch.stack(actions, -1)  # [worlds, episodes, horizon]
        alive = cell != self.goal
        count = worlds.count * episodes
        trajectory = torch.arange(count).view(worlds.count, episodes, 1).expand_as(cell)
        state = cell + self.side**2 * world[..., None]
        return Batch(
            state[alive],
            action[alive],
            trajectory[alive],
            alive.sum(-1).flatten(),
            groups_of(count, MEMBERS),
            (at == self.goal).double().flatten(),
        )


def grid_advantages(arm: str, batch: Batch, cells: int, shuffle: Tensor) -> Tensor:
    """Advantages of each action under an arm; ``shuffle`` float64[n, most] orders the control's anchors."""
    if arm.startswith("grpo"):
        returns = batch.returns * DISCOUNT**batch.lengths if arm == "grpo, discounted" else batch.returns
        return to_tokens(group_relative(returns, batch.group), batch.lengths)
    last = batch.lengths.cumsum(0) - 1
    rewards = torch.zeros(batch.state.numel(), dtype=torch.float64)
    rewards[last] = batch.returns
    owner = batch.group[batch.trajectory]
    anchor = anchor_groups([f"at {cell}" for cell in (batch.state % cells).tolist()], owner)
    if arm == "shuffled anchors":
        position = torch.arange(owner.numel()) - (last - batch.lengths + 1)[batch.trajectory]
        luck = shuffle[batch.trajectory, position]
        mixed = torch.argsort(luck)
        mixed = mixed[torch.argsort(owner[mixed], stable=True)]
        anchor = torch.empty_like(anchor).index_copy_(0, mixed, anchor)  # rows of a group are adjacent
    scale = "std" if arm == "gigpo, std" else "none"
    return gigpo(batch.returns, rewards, batch.trajectory, anchor, batch.group, gamma=DISCOUNT, scale=scale)


def grid_study(arm: str, worlds: Worlds, updates: int, *, grid: Grid) -> dict[str, Tensor]:
    """One group of episodes per update."""
    logits, episodes, curve = worlds.policy(grid.side**2, 4), MEMBERS, []
    for _ in range(updates):
        curve.append(grid.success(logits))
        batch = grid.play(worlds, logits, episodes)
        shuffle = worlds.uniform(episodes, grid.horizon).flatten(0, 1)
        advantages = grid_advantages(arm, batch, grid.side**2, shuffle)
        logits = worlds.descend(logits, batch.loss(logits, advantages))
    return summary([*curve, grid.success(logits)])


def summary(curve: list[Tensor]) -> dict[str, Tensor]:
    """Exact success before each update and after the last: its mean, and its end."""
    values = torch.stack(curve)
    return {AREA: values.mean(0), END: values[-LAST:].mean(0)}


# -------------------- chain: iStar against outcome only and merged rewards


@dataclass(frozen=True)
class Chain:
    """A fixed number of choices, of which those in ``decisive`` must all be action 0; the rest do nothing."""

    horizon: int
    decisive: tuple[int, ...]
    actions: int

    def success(self, logits: Tensor) -> Tensor:
        """Exact chance of success, float64[worlds]."""
        return logits.detach().softmax(-1)[:, list(self.decisive), 0].prod(1)

    def play(self, worlds: Worlds, logits: Tensor, tasks: int, members: int = MEMBERS) -> Batch:
        episodes = tasks * members
        count = worlds.count * episodes
        policy = logits.detach().softmax(-1)[:, None]
        action = choose(policy, worlds.uniform(episodes, self.horizon))
        state = torch.arange(worlds.count * self.horizon).view(worlds.count, 1, self.horizon)
        return Batch(
            state.expand_as(action).flatten(),
            action.flatten(),
            torch.arange(count).repeat_interleave(self.horizon),
            torch.full((count,), self.horizon),
            groups_of(count, members),
            (action[..., list(self.decisive)] == 0).all(-1).double().flatten(),
        )


def permuted(success: Tensor, group: Tensor, luck: Tensor) -> Tensor:
    """``success`` shuffled inside each group (ids ascending) by ``luck`` float64[n]."""
    mixed = torch.argsort(luck)
    mixed = mixed[torch.argsort(group[mixed], stable=True)]
    return torch.empty_like(success).index_copy_(0, mixed, success)


def istar_study(arm: str, worlds: Worlds, updates: int, *, chain: Chain, tasks: int) -> dict[str, Tensor]:
    """The reward model starts as the policy and makes one step per update, twice as long as the policy's.

    Twice is the published ratio of the two learning rates.
    """
    times = {"istar, model x 1/2": 0.5, "istar, model x 8": 8.0}.get(arm, 2.0)
    logits = worlds.policy(chain.horizon, chain.actions)
    model, curve, correct, pairs = worlds.policy(chain.horizon, chain.actions), [], 0, 0
    for update in range(updates):
        curve.append(chain.success(logits))
        batch = chain.play(worlds, logits, tasks)
        luck = worlds.uniform(tasks * MEMBERS).flatten()
        if arm == "outcome only":
            advantages = to_tokens(group_relative(batch.returns, batch.group), batch.lengths)
        else:
            ratio = batch.logp(model) - batch.logp(logits).detach()
            ones = torch.ones_like(batch.trajectory)
            steps = istar_step_rewards(ratio, ones)
            success = batch.returns > 0
            if arm == "permuted pairs":
                success = permuted(success, batch.group, luck)
            scored = bradley_terry_trajectories(ratio, ones, batch.trajectory, success, batch.group)
            correct, pairs = correct + scored.correct, pairs + scored.count
            if scored.mean is not None:
                model = worlds.descend(model, scored.mean, times)
            advantages = istar_advantages(arm, batch, steps, update / updates)
        logits = worlds.descend(logits, batch.loss(logits, advantages))
    result = summary([*curve, chain.success(logits)])
    if pairs:
        result[PAIRS] = torch.full((worlds.count,), correct / pairs)  # counted over all worlds
    return result


def istar_advantages(arm: str, batch: Batch, steps: Tensor, done: float) -> Tensor:
    """Fused after normalising (iStar), or before it (merged); ``done`` is the share of updates made."""
    if arm == "merged rewards":
        merged = steps + batch.returns[batch.trajectory]
        return istar(torch.zeros_like(batch.returns), merged, batch.trajectory, batch.group)
    alpha = alpha_schedule(int(1000 * done), decay=1000) if arm == "istar, alpha decays" else 1.0
    return istar(batch.returns, steps, batch.trajectory, batch.group, alpha=alpha)


# -------------------- tool errors: RoC against uniform downsampling

PLAN, CALLS = 3, 4
CARELESS_ERROR, CAREFUL_ERROR = 0.5, 0.05
TOOLS = Chain(horizon=PLAN + CALLS, decisive=tuple(range(PLAN)), actions=2)


def roc_study(arm: str, worlds: Worlds, updates: int, *, bold: bool, tasks: int) -> dict[str, Tensor]:
    """Three plan choices decide the outcome; four calls are careful (action 0) or careless.

    The right plan succeeds with chance 0.8, so that groups stay alive. With ``bold`` that chance is 0.2 +
    0.8 (share of careless calls): what errs is what finds the answer.
    """
    logits, curve, errors = worlds.policy(TOOLS.horizon, 2), [], []
    for _ in range(updates):
        success, error = tools_exact(logits, bold)
        curve.append(success)
        errors.append(error)
        batch = TOOLS.play(worlds, logits, tasks, 2 * MEMBERS)
        n = batch.returns.numel()
        careless = batch.action.view(n, -1)[:, PLAN:].double()
        luck = worlds.uniform(tasks * 2 * MEMBERS, CALLS + 2).flatten(0, 1)
        failed = luck[:, :CALLS] < torch.where(careless > 0, CARELESS_ERROR, CAREFUL_ERROR)
        returns = batch.returns * (luck[:, CALLS] < found(careless.mean(1), bold))
        penalty = tool_penalty(failed.sum(1).numpy(), np.full(n, CALLS))
        kept = downsample(arm, returns, batch.group, penalty, luck[:, -1])
        advantages = to_tokens(group_relative(returns, batch.group, valid=kept), batch.lengths)
        logits = worlds.descend(logits, batch.loss(logits, advantages))
    success, error = tools_exact(logits, bold)
    result = summary([*curve, success])
    result[ERRORS] = torch.stack([*errors, error])[-LAST:].mean(0)
    return result


def tools_exact(logits: Tensor, bold: bool) -> tuple[Tensor, Tensor]:
    """Exact success and exact share of calls that err, float64[worlds] each."""
    careless = logits.detach().softmax(-1)[:, PLAN:, 1].mean(1)
    error = CAREFUL_ERROR + (CARELESS_ERROR - CAREFUL_ERROR) * careless
    return TOOLS.success(logits) * found(careless, bold), error


def found(careless: Tensor, bold: bool) -> Tensor:
    """Chance that the right plan succeeds, given the share of careless calls."""
    return 0.2 + 0.8 * careless if bold else torch.full_like(careless, 0.8)


def downsample(arm: str, returns: Tensor, group: Tensor, penalty: Any, luck: Tensor) -> Tensor:
    """The half of each group to train on, bool[n]; episodes are alike, so the first half is a uniform one."""
    if arm == "all 16":
        return torch.ones_like(group, dtype=torch.bool)
    if arm == "uniform":
        return torch.arange(group.numel()) % (2 * MEMBERS) < MEMBERS
    if arm == "permuted penalties":
        penalty = permuted(torch.from_numpy(penalty), group, luck).numpy()
    sample = arm == "roc, sampled"
    seed = int(luck[0] * 2**32) if sample else None
    result = resample_on_correct(
        returns.numpy(),
        group.numpy(),
        penalty,
        keep=MEMBERS,
        mode="sample" if sample else "rank",
        seed=seed,
    )
    return torch.from_numpy(result.keep)


# -------------------- staleness: batches from an older policy


CORRECTIONS = ("naive", "recompute", "decoupled", "TIS", "IcePop")


def stale_study(
    arm: str, worlds: Worlds, updates: int, *, chain: Chain, tasks: int, epochs: int
) -> dict[str, Tensor]:
    """Each batch was sampled ``eta`` steps ago and is used for ``epochs`` clipped updates."""
    correction, eta = arm.split(" ")[0], int(arm.split(" ")[-1])
    logits, curve = worlds.policy(chain.horizon, chain.actions), []
    versions: deque[Tensor] = deque([logits], maxlen=eta + 1)
    for _ in range(updates):
        curve.append(chain.success(logits))
        batch = chain.play(worlds, versions[0], tasks)
        advantages = to_tokens(group_relative(batch.returns, batch.group), batch.lengths)
        weights = token_weights(batch.lengths, aggregate="constant", constant=1)
        old, factor = anchors(correction, batch.logp(versions[0]).detach(), batch.logp(logits).detach())
        for _ in range(epochs):
            loss = policy_gradient(
                batch.logp(logits), old, advantages, weights, clip=Clip.ppo(), correction=factor
            ).loss
            logits = worlds.descend(logits, loss)
        versions.append(logits)
    return summary([*curve, chain.success(logits)])


def anchors(correction: str, behaviour: Tensor, proximal: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the ratio is taken against, and the weight of each token."""
    if correction == "naive":
        return behaviour, None
    factors: dict[str, Callable[[Tensor, Tensor], Tensor] | None] = {
        "recompute": None,
        "decoupled": decoupled,
        "TIS": truncated_importance,
        "IcePop": icepop,
    }
    factor = factors[correction]
    return proximal, None if factor is None else factor(proximal, behaviour)


# -------------------- the studies


@dataclass(frozen=True)
class Study:
    """One comparison: arms by step sizes by seeds. ``versus`` names pairs (arm, its baseline).

    ``matched``: sizes are lengths of the update, else learning rates.
    """

    title: str
    sizes: tuple[float, ...]
    arms: tuple[str, ...]
    versus: tuple[tuple[str, str], ...]
    run: Callable[[str, Worlds, int], dict[str, Tensor]]
    measure: str = AREA
    matched: bool = True

    @property
    def knob(self) -> str:
        return "step length" if self.matched else "learning rate"


def against(base: str, *arms: str) -> tuple[tuple[str, str], ...]:
    """Pairs of each arm with ``base``."""
    return tuple((arm, base) for arm in arms)


LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
GRID_ARMS = ("grpo", "grpo, discounted", "gigpo, std", "gigpo, mean", "shuffled anchors")
GRID_PAIRS = (
    *against("grpo", *GRID_ARMS[1:]),
    *against("grpo, discounted", "gigpo, std", "gigpo, mean"),
    *against("shuffled anchors", "gigpo, mean"),
)
ISTAR_ARMS = ("outcome only", "merged rewards", "istar", "istar, alpha decays", "permuted pairs")
ISTAR_MORE = ("istar, model x 1/2", "istar, model x 8")
ISTAR_PAIRS = (
    *against("outcome only", "merged rewards", "istar", "istar, alpha decays", "permuted pairs"),
    *against("merged rewards", "istar"),
    *against("permuted pairs", "istar"),
)
ROC_ARMS = ("uniform", "all 16", "roc", "roc, sampled", "permuted penalties")
ROC_PAIRS = (*against("uniform", *ROC_ARMS[1:]), *against("all 16", "roc"))
STALE_ARMS = (
    *(f"{name} at 0" for name in CORRECTIONS[:-1]),
    *(f"{name} at {eta}" for eta in (1, 4, 8, 16) for name in CORRECTIONS),
)
STALE_BASES = (("decoupled", "naive"), ("TIS", "naive"), ("TIS", "decoupled"), ("decoupled", "recompute"))
STALE_PAIRS = tuple(
    (f"{arm} at {eta}", f"{base} at {eta}") for eta in (0, 1, 4, 8, 16) for arm, base in STALE_BASES
)


def chain_run(horizon: int) -> Callable[[str, Worlds, int], dict[str, Tensor]]:
    """iStar on a chain whose three decisive steps lie at a sixth, a half and five sixths."""
    return partial(
        istar_study, chain=Chain(horizon, (horizon // 6, horizon // 2, 5 * horizon // 6), 4), tasks=2
    )


STUDIES = {
    "gigpo": Study("GiGPO, 6 x 6 grid", LENGTHS, GRID_ARMS, GRID_PAIRS, partial(grid_study, grid=Grid())),
    "gigpo-slip": Study(
        "GiGPO, 6 x 6 grid, one move in ten slips",
        LENGTHS,
        GRID_ARMS,
        GRID_PAIRS,
        partial(grid_study, grid=Grid(slip=0.1)),
    ),
    "gigpo-rate": Study(
        "GiGPO, 6 x 6 grid at equal learning rate",
        (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4),
        GRID_ARMS,
        GRID_PAIRS,
        partial(grid_study, grid=Grid()),
        matched=False,
    ),
    "istar": Study(
        "iStar, 24 steps of which 3 decide",
        LENGTHS,
        (*ISTAR_ARMS, *ISTAR_MORE),
        (*ISTAR_PAIRS, *against("istar", *ISTAR_MORE)),
        chain_run(24),
    ),
    "istar-long": Study("iStar, 60 steps of which 3 decide", LENGTHS, ISTAR_ARMS, ISTAR_PAIRS, chain_run(60)),
    "roc": Study(
        "RoC, tool errors do not matter to the outcome",
        LENGTHS,
        ROC_ARMS,
        ROC_PAIRS,
        partial(roc_study, bold=False, tasks=4),
        measure=ERRORS,
    ),
    "roc-bold": Study(
        "RoC, the calls that err find the answer",
        LENGTHS,
        ROC_ARMS,
        ROC_PAIRS,
        partial(roc_study, bold=True, tasks=4),
    ),
    "staleness": Study(
        "Stale batches",
        (0.125, 0.5, 2.0, 8.0, 32.0, 128.0),
        STALE_ARMS,
        STALE_PAIRS,
        partial(stale_study, chain=Chain(6, (0, 2, 4), 4), tasks=4, epochs=4),
        matched=False,
    ),
}

# -------------------- statistics and the record


def own_best(values: Floats, less: bool) -> Floats:
    """Each seed at the size that is best for the *other* half of the seeds: float64[seeds].

    Chosen on the same seeds, the best of many sizes would look better than it is.
    """
    score = -values if less else values
    best = np.empty(values.shape[1])
    for half in (0, 1):
        pick = int(score[:, 1 - half :: 2].mean(1).argmax())
        best[half::2] = values[pick, half::2]
    return best


def play(study: Study, seeds: int, updates: int) -> dict[str, dict[str, Floats]]:
    """Measure -> arm -> float64[sizes, seeds]."""
    tables: dict[str, dict[str, Floats]] = {}
    for arm in study.arms:
        worlds = Worlds(seeds, study.sizes, study.matched)
        for measure, values in study.run(arm, worlds, updates).items():
            tables.setdefault(measure, {})[arm] = values.view(len(study.sizes), seeds).numpy()
    return tables


def columns(study: Study, measure: str, values: Floats) -> list[Floats]:
    """The scores over seeds at each size and at the own best size."""
    return [*values, own_best(values, less=measure == ERRORS)]


def compare(study: Study, tables: dict[str, dict[str, Floats]], measure: str) -> dict[str, dict[str, str]]:
    """Paired differences of all pairs, at all sizes and the own best; p-values by Holm over all of them."""
    found: dict[str, list[PairedInterval]] = {}
    for arm, base in study.versus:
        ours, theirs = (columns(study, measure, tables[measure][name]) for name in (arm, base))
        found[f"{arm} − {base}"] = [
            paired_difference(a, b, draws=DRAWS) for a, b in zip(ours, theirs, strict=True)
        ]
    adjusted = iter(holm([cell.p_value for cells in found.values() for cell in cells]))
    return {
        pair: {
            "difference": words(cell.estimate for cell in cells),
            "low": words(cell.low for cell in cells),
            "high": words(cell.high for cell in cells),
            "p_holm": words(next(adjusted) for _ in cells),
        }
        for pair, cells in found.items()
    }


def words(values: Iterable[float]) -> str:
    """Numbers as one line of the record."""
    return " ".join(f"{value:.4f}" for value in values)


def record_of(study: Study, seeds: int, updates: int) -> dict[str, Any]:
    """Run one study: what is kept of it."""
    began = time.process_time()
    tables = play(study, seeds, updates)
    means: dict[str, Any] = {}
    for measure, arms in tables.items():
        for arm, values in arms.items():
            cells = [mean_interval(x, range(seeds)) for x in columns(study, measure, values)]
            means.setdefault(measure, {})[arm] = {
                "mean": words(cell.estimate for cell in cells),
                "low": words(cell.low for cell in cells),
                "high": words(cell.high for cell in cells),
                "seeds": [words(row) for row in values],
            }
    return {
        "title": study.title,
        "knob": study.knob,
        "sizes": list(study.sizes),
        "measure": study.measure,
        "means": means,
        "differences": compare(study, tables, study.measure),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def markdown(record: dict[str, Any]) -> str:
    """One study as a table: mean of each arm, then the paired differences with their 95% intervals."""
    head = [f"{record['knob']} {size:g}" for size in record["sizes"]] + ["own best"]
    lines = [f"| {record['measure']} | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for arm, row in record["means"][record["measure"]].items():
        lines.append(f"| {arm} | {' | '.join(f'{mean:.3f}' for mean in numbers(row['mean']))} |")
    for pair, row in record["differences"].items():
        cells = zip(*(numbers(row[key]) for key in ("difference", "low", "high", "p_holm")), strict=True)
        shown = [
            f"**{d:+.3f} [{low:+.3f}, {high:+.3f}]**" if p < 0.05 else f"{d:+.3f} [{low:+.3f}, {high:+.3f}]"
            for d, low, high, p in cells
        ]
        lines.append(f"| {pair} | {' | '.join(shown)} |")
    return "\n".join(lines)


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--only", default="", help=f"some of {','.join(STUDIES)}; nothing is kept then")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(STUDIES)
    if unknown := [name for name in names if name not in STUDIES]:
        parser.error(f"--only holds {unknown[0]!r}; the studies are {', '.join(STUDIES)}")
    if given.seeds < 4:
        parser.error(f"--seeds is {given.seeds}; both halves need at least two")
    torch.set_num_threads(1)
    studies: dict[str, Any] = {}
    for name in names:
        studies[name] = record_of(STUDIES[name], given.seeds, given.updates)
        print(f"\n{studies[name]['title']} ({studies[name]['cpu_seconds']} s)\n")
        print(markdown(studies[name]), flush=True)
    if not given.only:
        settings = {"seeds": given.seeds, "updates": given.updates, "threads": 1, "torch": torch.__version__}
        print("\nkept in", keep("credit", {**settings, "studies": studies}))


if __name__ == "__main__":
    main()

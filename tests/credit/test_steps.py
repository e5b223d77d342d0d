"""Step-level credit against published numbers, public bug cases and slow loops written from the formulas."""

from __future__ import annotations

import difflib
import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot import credit
from surefoot.core.errors import ConfigError, DataError

EPS = 1e-6
NAN = float("nan")


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Tensor, expected: list[float], tolerance: float = 1e-9) -> None:
    assert actual.dtype == torch.float64
    assert not actual.requires_grad
    torch.testing.assert_close(actual, tensor(expected), rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Batch:
    """Trajectories in groups; each step has a reward, an anchor, a tool mark and token log-ratios."""

    group: list[int]
    valid: list[bool]
    outcome: list[float]
    turn_reward: list[float]
    rewards: list[list[float]]
    anchors: list[list[int]]
    tools: list[list[bool]]
    ratios: list[list[list[float]]]

    @property
    def n(self) -> int:
        return len(self.group)

    @property
    def owner(self) -> list[int]:
        return [i for i, steps in enumerate(self.rewards) for _ in steps]

    def peers(self, i: int) -> list[int]:
        return [j for j in range(self.n) if self.valid[j] and self.group[j] == self.group[i]]

    def seen(self, values: list[float]) -> Tensor:
        """Per trajectory, with NaN where invalid."""
        return tensor([x if v else NAN for x, v in zip(values, self.valid, strict=True)])

    def step_tensor(self, rows: list[list[float]]) -> Tensor:
        return tensor([x if self.valid[i] else NAN for i, row in enumerate(rows) for x in row])

    def permuted(self, order: list[int]) -> Batch:
        def pick(column: list[object]) -> list[object]:
            return [column[i] for i in order]

        return Batch(*(pick(column) for column in vars(self).values()))  # type: ignore[arg-type]

    def arguments(self) -> dict[str, Tensor]:
        step_lengths = [len(q) for steps in self.ratios for q in steps]
        return {
            "outcome": self.seen(self.outcome),
            "turn_reward": self.seen(self.turn_reward),
            "group": torch.tensor(self.group),
            "valid": torch.tensor(self.valid),
            "trajectory": torch.tensor(self.owner),
            "rewards": self.step_tensor(self.rewards),
            "anchor": torch.tensor([a for row in self.anchors for a in row]),
            "tool_step": torch.tensor([t for row in self.tools for t in row]),
            "log_ratio": self.step_tensor([[q for step in steps for q in step] for steps in self.ratios]),
            "step_lengths": torch.tensor(step_lengths),
            "lengths": torch.tensor([sum(map(len, steps)) for steps in self.ratios]),
            "success": torch.tensor([o > 0 for o in self.outcome]),
        }


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    n = draw(st.integers(1, 9))
    rng = random.Random(draw(st.integers(0, 2**20)))
    sizes = [rng.randint(1, 4) for _ in range(n)]

    def eighth() -> float:
        return rng.randint(-8, 8) / 8

    return Batch(
        [rng.randint(-1, 1) for _ in range(n)],
        [rng.random() < 0.75 for _ in range(n)],
        [float(rng.randint(0, 1)) for _ in range(n)],
        [eighth() for _ in range(n)],
        [[eighth() for _ in range(k)] for k in sizes],
        [[rng.randint(0, 3) for _ in range(k)] for k in sizes],
        [[rng.random() < 0.4 for _ in range(k)] for k in sizes],
        [[[rng.gauss(0, 1) for _ in range(rng.randint(1, 3))] for _ in range(k)] for k in sizes],
    )


def spread(x: float, pool: list[float], kind: str, eps: float = EPS, floor: float = 0.0) -> float:
    """x against a pool; 0 for a pool of one and a constant pool."""
    if len(set(pool)) < 2:
        return 0.0
    difference = x - statistics.fmean(pool)
    if kind == "std":
        return difference / (max(statistics.stdev(pool), floor) + eps)
    return difference * (len(pool) / (len(pool) - 1) if kind == "leave_one_out" else 1)


def to_go(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (s - t) * r for s, r in enumerate(rewards) if s >= t) for t in range(len(rewards))]


def outcome_loop(b: Batch, values: list[float], i: int, kind: str, eps: float = EPS) -> float:
    return spread(values[i], [values[j] for j in b.peers(i)], kind, eps) if b.valid[i] else 0.0


def step_relative_loop(b: Batch, gamma: float, kind: str) -> list[float]:
    returns = [to_go(r, gamma) for r in b.rewards]
    out: list[float] = []
    for i, row in enumerate(returns):
        for t, x in enumerate(row):
            pool = [returns[j][t] for j in b.peers(i) if t < len(returns[j])]
            out.append(spread(x, pool, kind) if b.valid[i] else 0.0)
    return out


def gigpo_loop(b: Batch, gamma: float, omega: float, kind: str) -> list[float]:
    returns = [to_go(r, gamma) for r in b.rewards]
    out: list[float] = []
    for i, row in enumerate(returns):
        for t, x in enumerate(row):
            pool = [
                returns[j][s]
                for j in b.peers(i)
                for s, anchor in enumerate(b.anchors[j])
                if anchor == b.anchors[i][t]
            ]
            step = spread(x, pool, kind) if b.valid[i] else 0.0
            out.append(outcome_loop(b, b.outcome, i, kind) + omega * step)
    return out


def mt_grpo_loop(b: Batch, coefficient: float) -> list[float]:
    out: list[float] = []
    for i, tools in enumerate(b.tools):
        final = outcome_loop(b, b.outcome, i, "std", 1e-4)
        turn = outcome_loop(b, b.turn_reward, i, "std", 1e-4)
        for t in range(len(tools)):
            out.append(final + coefficient * turn * (not any(tools[:t])))
    return out


def istar_loop(b: Batch, alpha: float, kind: str, floor: float = 0.0, first: bool = False) -> list[float]:
    out: list[float] = []
    for i, row in enumerate(b.rewards):
        pool = [x for j in b.peers(i) for x in (b.rewards[j][:1] if first else b.rewards[j])]
        for x in row:
            step = spread(x, pool, kind, floor=floor) if b.valid[i] else 0.0
            out.append(outcome_loop(b, b.outcome, i, kind) + alpha * step)
    return out


def prime_loop(b: Batch, beta: float, weight: float, gamma: float) -> list[float]:
    tokens = [[beta * q for step in steps for q in step] for steps in b.ratios]
    out: list[float] = []
    for i, row in enumerate(tokens):
        others = [j for j in b.peers(i) if j != i]
        if not b.valid[i] or not others:
            out.extend([0.0] * len(row))
            continue
        baseline = statistics.fmean(statistics.fmean(tokens[j]) for j in others)
        final = b.outcome[i] - statistics.fmean(b.outcome[j] for j in others)
        out.extend(final + weight * r for r in to_go([x - baseline for x in row], gamma))
    return out


def pair_loop(b: Batch, scores: list[float]) -> tuple[float, int]:
    terms = [
        math.log1p(math.exp(scores[j] - scores[i]))
        for i, j in itertools.product(range(b.n), repeat=2)
        if b.valid[i] and b.valid[j] and b.group[i] == b.group[j] and b.outcome[i] > 0 >= b.outcome[j]
    ]
    return sum(terms), len(terms)


Fast = Callable[[dict[str, Tensor]], Tensor]


def call(function: Callable[..., Tensor], *names: str, **options: object) -> Fast:
    """``function`` on the named arguments of a batch, in this order; "rewards:x" passes rewards as x."""

    def fast(a: dict[str, Tensor]) -> Tensor:
        return function(*(a[name] for name in names), valid=a["valid"], **options)

    return fast


STEPS = ("rewards", "trajectory")
GIGPO = ("outcome", "rewards", "trajectory", "anchor", "group")
ISTAR = ("outcome", "rewards", "trajectory", "group")
MT = ("outcome", "turn_reward", "group", "trajectory", "tool_step")
CASES: dict[str, tuple[Fast, Callable[[Batch], list[float]]]] = {
    "returns_to_go": (
        call(credit.returns_to_go, *STEPS, gamma=0.9),
        lambda b: [x if b.valid[i] else 0.0 for i, r in enumerate(b.rewards) for x in to_go(r, 0.9)],
    ),
    "step_relative": (
        call(credit.step_relative, *STEPS, "group", gamma=0.5),
        lambda b: step_relative_loop(b, 0.5, "none"),
    ),
    "step_relative_std": (
        call(credit.step_relative, *STEPS, "group", gamma=0.5, scale="std"),
        lambda b: step_relative_loop(b, 0.5, "std"),
    ),
    "gigpo": (
        call(credit.gigpo, *GIGPO, gamma=0.5, omega=0.7),
        lambda b: gigpo_loop(b, 0.5, 0.7, "none"),
    ),
    "gigpo_std": (
        call(credit.gigpo, *GIGPO, gamma=0.5, omega=0.7, scale="std"),
        lambda b: gigpo_loop(b, 0.5, 0.7, "std"),
    ),
    "mt_grpo": (call(credit.mt_grpo, *MT, coefficient=0.7), lambda b: mt_grpo_loop(b, 0.7)),
    "istar": (call(credit.istar, *ISTAR, alpha=0.7), lambda b: istar_loop(b, 0.7, "std")),
    "istar_floor": (
        call(credit.istar, *ISTAR, alpha=0.7, floor=0.5),
        lambda b: istar_loop(b, 0.7, "std", floor=0.5),
    ),
    "istar_mean": (
        call(credit.istar, *ISTAR, alpha=0.7, estimator="none"),
        lambda b: istar_loop(b, 0.7, "none"),
    ),
    "istar_rloo": (
        call(credit.istar, *ISTAR, alpha=0.7, estimator="leave_one_out"),
        lambda b: istar_loop(b, 0.7, "leave_one_out"),
    ),
    "istar_quirk": (
        call(credit.istar, *ISTAR, alpha=0.7, first_step_quirk=True),
        lambda b: istar_loop(b, 0.7, "std", first=True),
    ),
    "istar_quirk_rloo": (
        call(credit.istar, *ISTAR, alpha=0.7, estimator="leave_one_out", first_step_quirk=True),
        lambda b: istar_loop(b, 0.7, "leave_one_out", first=True),
    ),
    "prime": (
        call(credit.prime, "log_ratio", "outcome", "lengths", "group", beta=0.3, weight=0.7, gamma=0.9),
        lambda b: prime_loop(b, 0.3, 0.7, 0.9),
    ),
}
GROUPED = [name for name in CASES if name != "returns_to_go"]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(batch=batches())
def test_vectorised_equals_the_formula_in_a_loop(name: str, batch: Batch) -> None:
    fast, slow = CASES[name]
    close(fast(batch.arguments()), slow(batch))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(batch=batches(), seed=st.integers(0, 2**20))
def test_order_of_trajectories_is_irrelevant_bit_for_bit(name: str, batch: Batch, seed: int) -> None:
    rng = random.Random(seed)
    # Thirds make sums round, and ties stay ties.
    uneven = [[r / 3 for r in row] for row in batch.rewards]
    batch = Batch(**{**vars(batch), "rewards": uneven})
    order = rng.sample(range(batch.n), batch.n)
    pieces = batch.ratios if name == "prime" else batch.rewards
    sizes = [sum(map(len, p)) if name == "prime" else len(p) for p in pieces]
    straight = CASES[name][0](batch.arguments()).split(sizes)
    moved = CASES[name][0](batch.permuted(order).arguments()).split([sizes[i] for i in order])
    assert all(torch.equal(straight[i], x) for i, x in zip(order, moved, strict=True))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(batch=batches())
def test_E8_invalid_trajectories_get_zero_and_influence_nobody(name: str, batch: Batch) -> None:
    fast = CASES[name][0]
    everyone = fast(batch.arguments())
    sizes = [sum(map(len, p)) if name == "prime" else len(p) for p in batch.ratios]
    assert all(
        piece.tolist() == [0.0] * len(piece)
        for piece, valid in zip(everyone.split(sizes), batch.valid, strict=True)
        if not valid
    )
    kept = [i for i in range(batch.n) if batch.valid[i]]
    if kept:
        alone = fast(batch.permuted(kept).arguments()).split([sizes[i] for i in kept])
        assert all(torch.equal(everyone.split(sizes)[i], x) for i, x in zip(kept, alone, strict=True))


def constant(size: int, value: float) -> Batch:
    """``size`` trajectories of three equal steps, whose only difference is their number."""
    return Batch(
        [0] * size,
        [True] * size,
        [value] * size,
        [value] * size,
        [[value] * 3 for _ in range(size)],
        [[0, 1, 2] for _ in range(size)],
        [[False, True, False] for _ in range(size)],
        [[[value, value], [value], [value] * 3] for _ in range(size)],
    )


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(("value", "size"), [(0.7, 8), (0.9, 8), (0.35, 7)])
def test_E5_constant_group_in_float32_gives_exact_zero(name: str, value: float, size: int) -> None:
    arguments = constant(size, value).arguments()
    narrow = {k: x.float() if x.is_floating_point() else x for k, x in arguments.items()}
    assert set(CASES[name][0](narrow).tolist()) == {0.0}


@pytest.mark.parametrize("name", GROUPED)
def test_E5_batch_without_a_valid_member_gives_zeros(name: str) -> None:
    batch = Batch(**{**vars(constant(3, NAN)), "valid": [False] * 3})
    assert set(CASES[name][0](batch.arguments()).tolist()) == {0.0}


@pytest.mark.parametrize("name", GROUPED)
def test_E6_middle_group_of_equal_members_gets_zero_beside_live_groups(name: str) -> None:
    dead, live = constant(3, 5.0), constant(4, 0.0)
    mixed = Batch(*(a + b for a, b in zip(vars(dead).values(), vars(live).values(), strict=True)))
    spread_out = [0.0, 1.0, 2.0, 6.0]
    mixed.group[3:] = [1] * 4
    mixed.outcome[3:], mixed.turn_reward[3:] = spread_out, spread_out
    mixed.rewards[3:] = [[x] * 3 for x in spread_out]
    mixed.ratios[3:] = [[[x, x], [x], [x] * 3] for x in spread_out]
    got = CASES[name][0](mixed.arguments())
    cut = 18 if name == "prime" else 9
    assert set(got[:cut].tolist()) == {0.0}
    assert float(got[cut:].abs().min()) > 0


@pytest.mark.parametrize("name", [n for n in GROUPED if not n.startswith("istar")])
def test_E7_lone_survivor_of_a_group_gets_zero(name: str) -> None:
    batch = constant(3, 1.0)
    batch.valid[:2] = [False, False]
    batch.rewards[2] = [1.0, 2.0, 4.0]
    batch.ratios[2] = [[1.0, 2.0], [3.0], [4.0, 5.0, 7.0]]
    assert set(CASES[name][0](batch.arguments()).tolist()) == {0.0}


def test_E7_lone_trajectory_of_istar_is_scored_by_the_contrast_of_its_steps_only() -> None:
    lone = {"outcome": tensor([1.0]), "trajectory": torch.tensor([0, 0]), "group": torch.tensor([0])}
    got = credit.istar(
        lone["outcome"], tensor([1.0, 3.0]), lone["trajectory"], lone["group"], estimator="none"
    )
    assert got.tolist() == [-1.0, 1.0]
    one = credit.istar(lone["outcome"], tensor([3.0]), torch.tensor([0]), lone["group"])
    assert one.tolist() == [0.0]


def test_E4_leave_one_out_over_steps_is_a_bounded_difference() -> None:
    rewards, owner = tensor([0.0] + [0.95] * 7), torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
    outcome, group = tensor([1.0, 1.0, 1.0]), torch.zeros(3, dtype=torch.int64)
    got = credit.istar(outcome, rewards, owner, group, estimator="leave_one_out")
    assert float(got[0]) == pytest.approx(-0.95, abs=1e-9)
    assert float(got.abs().max()) <= 0.95 + 1e-9


def test_E11_return_to_go_passes_over_observations() -> None:
    # rewards [0, 0, 1] with the middle one an observation, gamma 1/2: not [0, .5, 1] and not [.25, .5, 1].
    got = credit.returns_to_go(tensor([0.0, 1.0]), torch.tensor([0, 0]), gamma=0.5)
    assert got.tolist() == [0.5, 1.0]


def test_E12_reward_for_a_tool_result_never_reaches_the_answer_after_it() -> None:
    # Both answers are wrong; only the first searched well. Its "I do not know" must not be reinforced.
    zero, trajectory = tensor([0.0, 0.0]), torch.tensor([0, 0, 1, 1])
    tool = torch.tensor([True, False, True, False])
    got = credit.mt_grpo(zero, tensor([1.0, 0.0]), torch.tensor([0, 0]), trajectory, tool)
    assert got[[1, 3]].tolist() == [0.0, 0.0]
    assert float(got[0]) == -float(got[2]) > 0.7


def test_E15_each_sampled_token_receives_the_advantage_of_its_own_turn_once() -> None:
    a = tensor([1.0, 2.0, 3.0, 4.0])
    got = credit.steps_to_tokens(a, torch.tensor([2, 0, 1, 3]))
    assert got.tolist() == [1.0, 1.0, 3.0, 4.0, 4.0, 4.0]
    # One row per turn or one row per pair of turns: the return of a trajectory is the same.
    whole = credit.returns_to_go(tensor([3.0, 3.0]), torch.tensor([0, 0]))
    parts = credit.returns_to_go(tensor([1.0, 2.0, 0.0, 3.0]), torch.tensor([0, 0, 0, 0]))
    assert whole.tolist() == parts[[0, 2]].tolist()


def test_E25_step_pool_holds_all_steps_and_the_quirk_only_the_first_of_each_trajectory() -> None:
    rewards, owner = tensor([1.0, 2, 3, 0, 4]), torch.tensor([0, 0, 0, 1, 1])
    outcome, group = tensor([1.0, 1.0]), torch.tensor([0, 0])
    got = credit.istar(outcome, rewards, owner, group, estimator="leave_one_out")
    close(got, [-1.25, 0, 1.25, -2.5, 2.5], 1e-12)
    assert float(got.sum()) == pytest.approx(0, abs=1e-12)
    quirk = credit.istar(outcome, rewards, owner, group, estimator="leave_one_out", first_step_quirk=True)
    close(quirk, [1, 3, 5, -1, 7], 1e-12)


def test_published_numbers_of_gigpo() -> None:
    observations = ["s0", "s1", "s0", "s2", "s0", "s3", "s3"]
    owner = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    rewards, group = tensor([0.0, 0, 0, 10, 0, 0, 0]), torch.tensor([0, 0])
    close(credit.returns_to_go(rewards, owner, gamma=0.95)[:4], [8.57375, 9.025, 9.5, 10])
    anchor = credit.anchor_groups(observations, group[owner])
    got = credit.gigpo(tensor([10.0, 0.0]), rewards, owner, anchor, group)
    close(got, [7.549167, 5, 8.475417, 5, -11.024583, -5, -5], 1e-6)


def test_published_numbers_of_istar() -> None:
    q, sizes = tensor([0.2, -0.1, 0.5, -0.3, 0.1, 0.1, -0.4]), torch.tensor([2, 1, 1, 3])
    owner, group = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0])
    rewards = credit.istar_step_rewards(q, sizes)
    close(rewards, [0.005, 0.025, -0.015, -0.010], 1e-12)
    outcome = tensor([1.0, 0.0])
    close(credit.istar(outcome, rewards, owner, group, alpha=0.0)[[0, 2]], [0.707106, -0.707106], 1e-6)
    flat = credit.istar(tensor([1.0, 1.0]), rewards, owner, group)
    close(flat, [0.208671, 1.321582, -0.904241, -0.626013], 1e-6)
    close(credit.istar(outcome, rewards, owner, group), [0.915777, 2.028688, -1.611346, -1.333118], 1e-6)
    for reduce, expected in (("sum", 0.666025), ("step_mean", 0.679492)):
        loss = credit.bradley_terry_trajectories(q, sizes, owner, outcome > 0, group, reduce=reduce)
        assert float(loss.loss) == pytest.approx(expected, abs=1e-6)
        assert (loss.count, loss.correct) == (1, 1)


def test_istar_floor_shrinks_the_step_term_when_the_reward_model_has_nothing_to_say() -> None:
    owner, group, outcome = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0]), tensor([1.0, 1.0])
    faint = tensor([1e-4, -1e-4, 2e-4, -2e-4])
    loud = credit.istar(outcome, faint, owner, group)
    calm = credit.istar(outcome, faint, owner, group, floor=0.01)
    assert float(loud.abs().max()) > 1
    close(calm, (faint / (0.01 + EPS)).tolist())


def test_alpha_schedule_holds_then_falls_in_a_line_and_stays() -> None:
    got = [credit.alpha_schedule(s, initial=1.0, final=0.2, hold=2, decay=4) for s in range(9)]
    assert got == pytest.approx([1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_mt_grpo_without_a_tool_result_takes_the_combined_advantage_everywhere() -> None:
    outcome, turn = tensor([1.0, 0.0]), tensor([0.0, 1.0])
    owner, tool = torch.tensor([0, 0, 1, 1]), torch.tensor([False, False, True, True])
    z = 0.5 / (math.sqrt(0.5) + 1e-4)
    got = credit.mt_grpo(outcome, turn, torch.tensor([3, 3]), owner, tool, coefficient=0.5)
    close(got, [0.5 * z, 0.5 * z, -0.5 * z, -z])


def test_gigpo_keeps_equal_anchors_of_different_groups_apart() -> None:
    owner, anchor = torch.tensor([0, 1, 2, 3]), torch.zeros(4, dtype=torch.int64)
    rewards = tensor([1.0, 3.0, 10.0, 30.0])
    got = credit.gigpo(torch.zeros(4), rewards, owner, anchor, torch.tensor([0, 0, 1, 1]))
    assert got.tolist() == [-1.0, 1.0, -10.0, 10.0]


def test_gigpo_equal_terminal_rewards_at_equal_distance_are_an_exactly_constant_pool() -> None:
    # The same distance to the same reward, from trajectories of different length.
    rewards = tensor([0.0] * 12 + [10.0] + [0.0] * 7 + [10.0])
    owner = torch.tensor([0] * 13 + [1] * 8)
    anchor = torch.tensor(list(range(13)) + list(range(5, 13)))
    got = credit.gigpo(tensor([10.0, 10.0]), rewards, owner, anchor, torch.tensor([0, 0]), scale="std")
    assert set(got.tolist()) == {0.0}


def alike(ids: Tensor) -> list[list[int]]:
    """The partition that the ids describe."""
    clusters: dict[int, list[int]] = {}
    for i, number in enumerate(ids.tolist()):
        clusters.setdefault(number, []).append(i)
    return sorted(clusters.values())


def test_anchor_hash_groups_equal_observations_of_one_task_whatever_their_order() -> None:
    grid = np.array([[0.0, NAN], [1.0, -0.0]])
    observations: list[object] = [
        {"a": 1, "b": [1, 2]},
        {"b": [1, 2], "a": 1.0},
        {"a": True, "b": [1, 2]},
        grid,
        np.array([[-0.0, -NAN], [1.0, 0.0]]),
        torch.tensor([[0.0, NAN], [1.0, 0.0]], dtype=torch.float64),
        grid.ravel(),
        "1",
        1,
        np.int64(1),
        None,
        b"1",
        {1, 2},
        {2, 1},
        NAN,
        [float("nan")][0],
    ]
    same = torch.zeros(len(observations), dtype=torch.int64)
    expected = [[0, 1], [2], [3, 4, 5], [6], [7], [8, 9], [10], [11], [12, 13], [14, 15]]
    assert alike(credit.anchor_groups(observations, same)) == expected
    apart = torch.arange(len(observations))
    assert credit.anchor_groups(observations, apart).unique().numel() == len(observations)


def test_anchor_similarity_follows_the_ratio_and_not_the_order_of_steps() -> None:
    base = "You are in a kitchen with a fridge, a table and a drawer. Step {} of 50."
    texts = [base.format(k) for k in (1, 2, 17)] + ["You are in a garden.", base.format(3)]
    assert difflib.SequenceMatcher(None, texts[0], texts[2], autojunk=False).ratio() > 0.95
    group = torch.zeros(5, dtype=torch.int64)
    assert alike(credit.anchor_groups(texts, group, mode="similarity")) == [[0, 1, 2, 4], [3]]
    assert len(alike(credit.anchor_groups(texts, group, mode="similarity", threshold=1.0))) == 5
    assert len(alike(credit.anchor_groups(texts, torch.tensor([0, 1, 0, 1, 1]), mode="similarity"))) == 3


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.text("ab", min_size=4, max_size=8), min_size=1, max_size=10), seed=st.integers(0, 2**20)
)
def test_anchor_similarity_partition_is_the_same_in_any_order(texts: list[str], seed: int) -> None:
    order = random.Random(seed).sample(range(len(texts)), len(texts))
    group = torch.tensor([i % 2 for i in range(len(texts))])
    straight = credit.anchor_groups(texts, group, mode="similarity", threshold=0.7)
    moved = credit.anchor_groups([texts[i] for i in order], group[order], mode="similarity", threshold=0.7)
    back = torch.empty_like(moved)
    back[torch.tensor(order)] = moved
    assert alike(straight) == alike(back)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(batch=batches(), reduce=st.sampled_from(["sum", "step_mean"]))
def test_bradley_terry_equals_the_formula_in_a_loop(batch: Batch, reduce: str) -> None:
    a = batch.arguments()
    steps = [[0.3 * sum(q) for q in row] for row in batch.ratios]
    scores = [sum(row) if reduce == "sum" else statistics.fmean(row) for row in steps]
    got = credit.bradley_terry_trajectories(
        a["log_ratio"], a["step_lengths"], a["trajectory"], a["success"], a["group"],
        beta=0.3, reduce=reduce, valid=a["valid"],
    )  # fmt: skip
    loss, count = pair_loop(batch, scores)
    assert float(got.loss) == pytest.approx(loss, abs=1e-9)
    assert got.count == count
    assert (got.mean is None) == (count == 0)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(batch=batches())
def test_sweet_advantage_and_loss_equal_the_formula_in_a_loop(batch: Batch) -> None:
    a = batch.arguments()
    turns = [[statistics.fmean(q) for q in row] for row in batch.ratios]
    reference = torch.full_like(a["log_ratio"], -1.5)
    logp, of_step = a["log_ratio"] + reference, a["valid"][a["trajectory"]]
    expected = [x if batch.valid[i] else 0.0 for i, row in enumerate(turns) for x in row]
    close(credit.sweet_advantage(logp, reference, a["step_lengths"], valid=of_step), expected)
    got = credit.sweet_loss(
        logp, reference, a["step_lengths"], a["trajectory"], a["success"], a["group"],
        beta=0.4, valid=a["valid"],
    )  # fmt: skip
    loss, count = pair_loop(batch, [0.4 * sum(row) for row in turns])
    assert float(got.loss) == pytest.approx(loss, abs=1e-9)
    assert got.count == count


@settings(max_examples=50, deadline=None, derandomize=True)
@given(batch=batches())
def test_prime_loss_equals_the_formula_in_a_loop(batch: Batch) -> None:
    a = batch.arguments()
    got = credit.prime_loss(a["log_ratio"], a["outcome"], a["lengths"], beta=0.3, valid=a["valid"])
    expected, right = 0.0, 0
    for i in range(batch.n):
        if batch.valid[i]:
            p = 1 / (1 + math.exp(-0.3 * sum(q for step in batch.ratios[i] for q in step)))
            expected -= math.log(p if batch.outcome[i] else 1 - p)
            right += (p > 0.5) == bool(batch.outcome[i])
    assert float(got.loss) == pytest.approx(expected, abs=1e-9)
    assert (got.count, got.correct) == (sum(batch.valid), right)


def test_losses_match_finite_differences_and_pass_no_gradient_to_invalid_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(12, generator=generator, dtype=torch.float64)
    q[10:] = NAN
    sizes, owner = torch.tensor([2, 1, 3, 2, 2, 2]), torch.tensor([0, 0, 1, 2, 2, 3])
    group, valid = torch.zeros(4, dtype=torch.int64), torch.tensor([True, True, True, False])
    success, outcome = torch.tensor([True, False, True, False]), tensor([1.0, 0, 0.5, NAN])
    reference = torch.zeros(12, dtype=torch.float64)
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda x: credit.bradley_terry_trajectories(x, sizes, owner, success, group, valid=valid).loss,
        lambda x: (
            credit.bradley_terry_trajectories(
                x, sizes, owner, success, group, valid=valid, reduce="step_mean"
            ).loss
        ),
        lambda x: credit.sweet_loss(x, reference, sizes, owner, success, group, valid=valid).loss,
        lambda x: credit.prime_loss(x, outcome, torch.tensor([3, 3, 4, 2]), valid=valid).loss,
        lambda x: credit.sweet_advantage(x, reference, sizes, valid=valid[owner]).square().sum(),
    ]
    for loss in losses:
        seen = q[:10].clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(torch.cat([x, q[10:]])), (seen,))
        x = q.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(x), x)
        assert gradient[10:].tolist() == [0.0, 0.0]
        assert float(gradient[:10].abs().min()) > 0


def test_bradley_terry_without_a_pair_is_zero_and_says_so() -> None:
    q, sizes, owner = tensor([1.0, 2.0]).requires_grad_(), torch.tensor([1, 1]), torch.tensor([0, 1])
    for success, group in (([True, True], [0, 0]), ([False, False], [0, 0]), ([True, False], [0, 1])):
        got = credit.bradley_terry_trajectories(q, sizes, owner, torch.tensor(success), torch.tensor(group))
        assert (got.loss.item(), got.count, got.correct, got.mean) == (0.0, 0, 0, None)
        (gradient,) = torch.autograd.grad(got.loss, q)
        assert gradient.tolist() == [0.0, 0.0]


def test_bradley_terry_adds_up_over_micro_batches_of_whole_groups() -> None:
    q, one = torch.linspace(-1, 1, 8, dtype=torch.float64), torch.ones(8, dtype=torch.int64)
    owner, group = torch.arange(8), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    success = torch.tensor([True, False, False, True, False, True, False, False])
    whole = credit.bradley_terry_trajectories(q, one, owner, success, group)
    halves = [
        credit.bradley_terry_trajectories(q[s], one[s], owner[:4], success[s], group[s])
        for s in (slice(0, 4), slice(4, 8))
    ]
    torch.testing.assert_close(sum(h.loss for h in halves), whole.loss)
    assert [sum(h.count for h in halves), sum(h.correct for h in halves)] == [whole.count, whole.correct]
    assert whole.count == 2 * 2 + 1 * 3


def test_sum_form_does_not_depend_on_how_tokens_are_cut_into_steps() -> None:
    q = torch.linspace(-1, 2, 6, dtype=torch.float64)
    success, group = torch.tensor([True, False]), torch.tensor([0, 0])
    cuts = [([3, 3], [0, 1]), ([1, 2, 2, 1], [0, 0, 1, 1]), ([3, 0, 1, 1, 1], [0, 0, 1, 1, 1])]
    losses = [
        float(
            credit.bradley_terry_trajectories(
                q, torch.tensor(s), torch.tensor(o), success, group, beta=0.5
            ).loss
        )
        for s, o in cuts
    ]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-12)


def test_prime_counts_a_trajectory_without_tokens_in_the_outcome_only() -> None:
    q, lengths = tensor([1.0, 3.0, 5.0]), torch.tensor([2, 0, 1])
    got = credit.prime(q, tensor([1.0, 0.0, 0.0]), lengths, torch.zeros(3, dtype=torch.int64), beta=1.0)
    close(got, [1 + (1 - 5) + (3 - 5), 1 + (3 - 5), -0.5 + (5 - 2)])
    lone = credit.prime(q[:2], tensor([1.0, 0.0]), lengths[:2], torch.tensor([0, 0]), beta=1.0)
    close(lone, [1.0, 1.0])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**20), heads=st.integers(1, 3), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_archer_targets_and_advantages_equal_the_formula_in_a_loop(
    seed: int, heads: int, gamma: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    r = torch.randn(5, generator=generator, dtype=torch.float64)
    ahead, q, v = torch.randn(3, heads, 5, generator=generator, dtype=torch.float64)
    done = torch.rand(5, generator=generator) < 0.4
    q_target, v_target = credit.archer_targets(r, done, ahead.masked_fill(done, NAN), q, gamma=gamma)
    for h in range(heads):
        close(q_target[h], [float(r[k]) + (0.0 if done[k] else gamma * float(ahead[h, k])) for k in range(5)])
        close(v_target[h], q[h].tolist())
    low = [min(q[:, k].tolist()) - min(v[:, k].tolist()) for k in range(5)]
    close(credit.archer_advantages(q.requires_grad_(), v), low)


def test_polyak_moves_floats_by_tau_and_copies_counters() -> None:
    target = {"w": torch.tensor([0.0, 1.0]), "steps": torch.tensor(3)}
    online = {"w": torch.tensor([10.0, 1.0], requires_grad=True), "steps": torch.tensor(7)}
    got = credit.polyak(target, online, tau=0.1)
    torch.testing.assert_close(got["w"], torch.tensor([1.0, 1.0]))
    assert not got["w"].requires_grad
    assert int(got["steps"]) == 7
    assert target["w"].tolist() == [0.0, 1.0]
    assert torch.equal(credit.polyak(target, online, tau=1.0)["w"], online["w"].detach())
    assert torch.equal(credit.polyak(target, online, tau=0.0)["w"], target["w"])


def test_non_finite_and_misshapen_data_name_the_field() -> None:
    two, bad, k = tensor([0.0, 1.0]), tensor([0.0, NAN]), torch.tensor([0, 1])
    one, yes = torch.tensor([0]), torch.tensor([True, False])
    empty, pair = torch.tensor([], dtype=torch.int64), torch.tensor([1, 1])
    cases: list[tuple[str, Callable[[], object]]] = [
        (r"rewards\[1\] is nan", lambda: credit.returns_to_go(bad, k)),
        ("rewards must have shape", lambda: credit.returns_to_go(two[:1], k)),
        ("trajectory is empty", lambda: credit.returns_to_go(two[:0], empty)),
        (r"trajectory\[1\] is 1", lambda: credit.returns_to_go(two, k, valid=yes[:1])),
        ("group must hold integers", lambda: credit.step_relative(two, k, two)),
        (r"step_rewards\[1\] is nan", lambda: credit.gigpo(two, bad, k, k, k)),
        (r"outcome\[1\] is nan", lambda: credit.gigpo(bad, two, k, k, k)),
        ("anchor must have shape", lambda: credit.gigpo(two, two, k, one, k)),
        ("anchor must hold integers", lambda: credit.gigpo(two, two, k, two, k)),
        ("group must have shape", lambda: credit.gigpo(two, two, k, k, one)),
        (r"turn_reward\[1\] is nan", lambda: credit.mt_grpo(two, bad, k, k, yes)),
        ("turn_reward must have shape", lambda: credit.mt_grpo(two, two[:1], k, k, yes)),
        ("tool_step must be a bool", lambda: credit.mt_grpo(two, two, k, k, k)),
        (r"log_ratio\[1\] is nan", lambda: credit.istar_step_rewards(bad, torch.tensor([2]))),
        ("log_ratio must have shape", lambda: credit.istar_step_rewards(two, torch.tensor([3]))),
        (r"step_lengths\[0\] is -2", lambda: credit.istar_step_rewards(two, torch.tensor([-2]))),
        ("step_lengths is empty", lambda: credit.istar_step_rewards(two, empty)),
        ("step_rewards must have shape", lambda: credit.istar(two, two[:1], k, k)),
        ("success must be a bool", lambda: credit.bradley_terry_trajectories(two, pair, k, k, k)),
        (r"outcome\[1\] is nan", lambda: credit.istar(bad, two, k, k)),
        (r"outcome\[1\] is nan", lambda: credit.mt_grpo(bad, two, k, k, yes)),
        (r"outcome\[1\] is nan", lambda: credit.prime(two, bad, pair, k)),
        ("group must have shape", lambda: credit.bradley_terry_trajectories(two, pair, k, yes, one)),
        ("step_lengths must have shape", lambda: credit.bradley_terry_trajectories(two, one + 2, k, yes, k)),
        ("outcome must have shape", lambda: credit.prime(two, two[:1], torch.tensor([1, 1]), k)),
        ("outcome must have shape", lambda: credit.prime_loss(two, two[:1], torch.tensor([1, 1]))),
        (r"outcome\[1\] is 2", lambda: credit.prime_loss(two, two * 2, torch.tensor([1, 1]))),
        ("done must be a bool", lambda: credit.archer_targets(two, k, two[None], two[None])),
        ("policy_q must have shape", lambda: credit.archer_targets(two, yes, two[None], two)),
        ("next_values must have shape", lambda: credit.archer_targets(two, yes, two.repeat(2, 1), two[None])),
        (r"next_values\[0\]\[1\] is nan", lambda: credit.archer_targets(two, yes, bad[None], two[None])),
        ("v must have shape", lambda: credit.archer_advantages(two[None], two[None, :1])),
        ("only one holds b", lambda: credit.polyak({"a": two}, {"a": two, "b": two})),
        (r"online\['a'\] must have shape", lambda: credit.polyak({"a": two}, {"a": two[:1]})),
        ("logp_reference must have shape", lambda: credit.sweet_advantage(two, two[:1], torch.tensor([2]))),
        (r"step_lengths\[1\] is -1", lambda: credit.steps_to_tokens(two, torch.tensor([1, -1]))),
        ("observations needs", lambda: credit.anchor_groups([], empty)),
        ("observations needs", lambda: credit.anchor_groups(["a"], k)),
        (r"observations\[1\] holds a object", lambda: credit.anchor_groups(["a", [object()]], k)),
        (r"observations\[0\] is a int", lambda: credit.anchor_groups([1, "a"], k, mode="similarity")),
    ]
    for message, run in cases:
        with pytest.raises(DataError, match=message):
            run()


def test_impossible_options_name_the_setting() -> None:
    two, k, sizes = tensor([0.0, 1.0]), torch.tensor([0, 1]), torch.tensor([1, 1])
    yes = torch.tensor([True, False])
    cases: list[tuple[str, Callable[[], object]]] = [
        ("gamma must be a number from 0 to 1", lambda: credit.returns_to_go(two, k, gamma=1.5)),
        ("did you mean 'std'", lambda: credit.step_relative(two, k, k, scale="sdt")),
        ("omega must be a finite", lambda: credit.gigpo(two, two, k, k, k, omega=NAN)),
        ("coefficient must be a finite", lambda: credit.mt_grpo(two, two, k, k, yes, coefficient=math.inf)),
        ("estimator is 'rloo'", lambda: credit.istar(two, two, k, k, estimator="rloo")),
        ("alpha must be a finite", lambda: credit.istar(two, two, k, k, alpha=NAN)),
        ("floor must be", lambda: credit.istar(two, two, k, k, floor=-1.0)),
        ("beta must be a positive", lambda: credit.istar_step_rewards(two, sizes, beta=0.0)),
        ("reduce is 'mean'", lambda: credit.bradley_terry_trajectories(two, sizes, k, yes, k, reduce="mean")),
        ("weight must be a finite", lambda: credit.prime(two, two, sizes, k, weight=NAN)),
        ("beta must be a positive", lambda: credit.prime_loss(two, two, sizes, beta=-1.0)),
        ("tau must be a number from 0 to 1", lambda: credit.polyak({}, {}, tau=2.0)),
        ("mode is 'exact'", lambda: credit.anchor_groups(["a"], k[:1], mode="exact")),
        ("threshold must be", lambda: credit.anchor_groups(["a"], k[:1], mode="similarity", threshold=0.0)),
        ("decay must be a positive", lambda: credit.alpha_schedule(1, decay=0)),
        ("hold and step must be", lambda: credit.alpha_schedule(-1, decay=5)),
    ]
    for message, run in cases:
        with pytest.raises(ConfigError, match=message):
            run()

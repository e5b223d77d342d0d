"""GAE over tokens and turns against published numbers, public bug cases and slow loops from the formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot import credit
from surefoot.core.errors import ConfigError, DataError

NAN = float("nan")


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Tensor, expected: list[float], tolerance: float = 1e-9) -> None:
    assert actual.dtype == torch.float64
    assert not actual.requires_grad
    torch.testing.assert_close(actual, tensor(expected), rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Turns:
    """Trajectories of turns of tokens; ``turns[i][k]`` is the token count of turn k of trajectory i."""

    turns: list[list[int]]
    valid: list[bool]
    bootstrap: list[float]
    lam: list[float]
    gamma: float
    seed: int

    @property
    def lengths(self) -> list[int]:
        return [sum(t) for t in self.turns]

    @property
    def trajectory(self) -> list[int]:
        return [i for i, t in enumerate(self.turns) for _ in t]

    @property
    def step_lengths(self) -> list[int]:
        return [k for t in self.turns for k in t]

    def random(self, size: int, salt: int = 0) -> list[float]:
        generator = torch.Generator().manual_seed(self.seed + salt)
        return torch.randn(size, generator=generator, dtype=torch.float64).tolist()

    def hide(self, values: list[float], owner: list[int]) -> Tensor:
        """``values`` with NaN where the owner is invalid."""
        return tensor([v if self.valid[i] else NAN for v, i in zip(values, owner, strict=True)])


@st.composite
def turn_batches(draw: st.DrawFn) -> Turns:
    n = draw(st.integers(1, 6))
    turns = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=n, max_size=n))
    return Turns(
        turns,
        draw(st.lists(st.sampled_from([True, True, False]), min_size=n, max_size=n)),
        draw(st.lists(st.integers(-8, 8).map(lambda k: k / 4), min_size=n, max_size=n)),
        draw(st.lists(st.integers(0, 8).map(lambda k: k / 8), min_size=n, max_size=n)),
        draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        draw(st.integers(0, 2**20)),
    )


def gae_loop(
    r: list[float], v: list[float], gamma: float, lam: float, last: float = 0.0
) -> tuple[list[float], list[float]]:
    advantages, following, value = [0.0] * len(r), 0.0, last
    for t in reversed(range(len(r))):
        following = r[t] + gamma * value - v[t] + gamma * lam * following
        advantages[t], value = following, v[t]
    return advantages, [a + x for a, x in zip(advantages, v, strict=True)]


def masked_loop(
    r: list[float], v: list[float], mask: list[int], gamma: float, lam: float, *, reset: bool = False
) -> list[float]:
    """The padded form: tokens with mask 0 are passed over, or, with ``reset``, wipe out what comes after."""
    out, value, following = [0.0] * len(r), 0.0, 0.0
    for t in reversed(range(len(r))):
        a = r[t] + gamma * value - v[t] + gamma * lam * following
        if mask[t]:
            value, following = v[t], a
        elif reset:
            value, following = 0.0, 0.0
        out[t] = following if mask[t] else NAN
    return out


def split(values: list[float], lengths: list[int]) -> list[list[float]]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [values[e - n : e] for e, n in zip(ends, lengths, strict=True)]


def test_published_numbers_with_an_observation_in_the_middle() -> None:
    r, v, mask = [0.0, 0, 0, 0, 1], [0.1, 0.2, 9.0, 0.3, 0.4], [1, 1, 0, 1, 1]
    seen = [t for t in range(5) if mask[t]]
    rewards, values = tensor([r[t] for t in seen]), tensor([v[t] for t in seen])
    a, returns = credit.gae(rewards, values, torch.tensor([4]), gamma=0.9, lam=0.95)
    close(a, [0.558727, 0.559915, 0.573, 0.6], 1e-6)
    close(returns, [0.658727, 0.759915, 0.873, 1.0], 1e-6)
    padded = masked_loop(r, v, mask, 0.9, 0.95)
    close(a, [padded[t] for t in seen])
    wiped = masked_loop(r, v, mask, 0.9, 0.95, reset=True)
    assert abs(float(a[0]) - wiped[0]) > 0.3


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20), gamma=st.sampled_from([0.0, 0.7, 1.0]), lam=st.sampled_from([0.0, 0.9, 1.0])
)
def test_observations_anywhere_are_transparent(seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    r, v = torch.randn(2, 12, generator=generator, dtype=torch.float64).tolist()
    mask = (torch.rand(12, generator=generator) > 0.4).int().tolist()
    mask[3] = 1
    seen = [t for t in range(12) if mask[t]]
    rewards, values = tensor([r[t] for t in seen]), tensor([v[t] for t in seen])
    a, _ = credit.gae(rewards, values, torch.tensor([len(seen)]), gamma=gamma, lam=lam)
    padded = masked_loop(r, v, mask, gamma, lam)
    close(a, [padded[t] for t in seen])


def test_E11_rewards_of_masked_tokens_are_neither_reset_nor_decayed_over() -> None:
    # rewards [0, 0, 1], mask [1, 0, 1], gamma 1/2: the observation has no place at all.
    rewards, none = tensor([0.0, 1.0]), tensor([0.0, 0.0])
    _, returns = credit.gae(rewards, none, torch.tensor([2]), gamma=0.5, lam=1.0)
    assert returns.tolist() == [0.5, 1.0]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(batch=turn_batches())
def test_gae_equals_the_formula_in_a_loop(batch: Turns) -> None:
    owner = [i for i, n in enumerate(batch.lengths) for _ in range(n)]
    r, v = batch.random(len(owner)), batch.random(len(owner), 1)
    expected: tuple[list[float], list[float]] = ([], [])
    for i, (ri, vi) in enumerate(zip(split(r, batch.lengths), split(v, batch.lengths), strict=True)):
        pair = gae_loop(ri, vi, batch.gamma, batch.lam[i], batch.bootstrap[i])
        for total, part in zip(expected, pair, strict=True):
            total.extend(part if batch.valid[i] else [0.0] * len(part))
    got = credit.gae(
        batch.hide(r, owner),
        batch.hide(v, owner),
        torch.tensor(batch.lengths),
        gamma=batch.gamma,
        lam=tensor(batch.lam),
        valid=torch.tensor(batch.valid),
        bootstrap=batch.hide(batch.bootstrap, list(range(len(batch.valid)))),
    )
    close(got[0], expected[0])
    close(got[1], expected[1])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(batch=turn_batches())
def test_turn_gae_equals_the_formula_in_a_loop(batch: Turns) -> None:
    sizes, owner = [len(t) for t in batch.turns], batch.trajectory
    r, v = batch.random(len(owner)), batch.random(len(owner), 1)
    expected: tuple[list[float], list[float]] = ([], [])
    for i, (ri, vi) in enumerate(zip(split(r, sizes), split(v, sizes), strict=True)):
        pair = gae_loop(ri, vi, batch.gamma, 0.9, batch.bootstrap[i])
        for total, part in zip(expected, pair, strict=True):
            total.extend(part if batch.valid[i] else [0.0] * len(part))
    got = credit.turn_gae(
        batch.hide(r, owner),
        batch.hide(v, owner),
        torch.tensor(owner),
        gamma=batch.gamma,
        lam=0.9,
        valid=torch.tensor(batch.valid),
        bootstrap=tensor(batch.bootstrap),
    )
    close(got[0], expected[0])
    close(got[1], expected[1])


def bilevel_loop(
    r: list[float], v: list[list[float]], rates: tuple[float, float, float, float], last: float
) -> list[list[float]]:
    """Advantages per turn and token of one trajectory."""
    turn_gamma, turn_lam, token_gamma, token_lam = rates
    turn, _ = gae_loop(r, [tokens[-1] for tokens in v], turn_gamma, turn_lam, last)
    out: list[list[float]] = []
    for a, values in zip(turn, v, strict=True):
        tokens = [a]
        for t in reversed(range(len(values) - 1)):
            delta = token_gamma * values[t + 1] - values[t]
            tokens.insert(0, delta + token_gamma * token_lam * tokens[0])
        out.append(tokens)
    return out


@settings(max_examples=80, deadline=None, derandomize=True)
@given(batch=turn_batches(), token_lam=st.sampled_from([0.0, 0.7, 1.0]))
def test_bilevel_gae_equals_the_formula_in_a_loop(batch: Turns, token_lam: float) -> None:
    owner = batch.trajectory
    of_token = [i for i, n in enumerate(batch.lengths) for _ in range(n)]
    # Rewards of 0 in between: a turn is a turn all the same.
    r = [x if k % 2 else 0.0 for k, x in enumerate(batch.random(len(owner)))]
    v = batch.random(len(of_token), 1)
    rates = (batch.gamma, 0.8, 0.95, token_lam)
    values = iter(split(v, batch.step_lengths))
    rewards = iter(r)
    expected: list[float] = []
    for i, turns in enumerate(batch.turns):
        rows = bilevel_loop(
            [next(rewards) for _ in turns], [next(values) for _ in turns], rates, batch.bootstrap[i]
        )
        expected.extend(a if batch.valid[i] else 0.0 for row in rows for a in row)
    advantages, returns = credit.bilevel_gae(
        batch.hide(r, owner),
        batch.hide(v, of_token),
        torch.tensor(owner),
        torch.tensor(batch.step_lengths),
        turn_gamma=rates[0],
        turn_lam=rates[1],
        token_gamma=rates[2],
        token_lam=rates[3],
        valid=torch.tensor(batch.valid),
        bootstrap=tensor(batch.bootstrap),
    )
    close(advantages, expected)
    close(returns, [a + v[k] if batch.valid[of_token[k]] else 0.0 for k, a in enumerate(expected)])


def test_bilevel_gae_of_one_token_turns_is_turn_gae_and_of_one_turn_is_token_gae() -> None:
    r, v = tensor([0.0, 1.0, 0.0, 0.5]), tensor([0.1, -0.2, 0.3, 0.4])
    owner, ones = torch.tensor([0, 0, 0, 1]), torch.ones(4, dtype=torch.int64)
    both = credit.bilevel_gae(r, v, owner, ones, turn_gamma=0.9, turn_lam=0.8, token_gamma=0.5, token_lam=0.1)
    torch.testing.assert_close(both, credit.turn_gae(r, v, owner, gamma=0.9, lam=0.8))
    one = credit.bilevel_gae(
        tensor([1.0]), v, torch.tensor([0]), torch.tensor([4]),
        turn_gamma=0.1, turn_lam=0.2, token_gamma=0.9, token_lam=0.8,
    )  # fmt: skip
    flat = credit.gae(tensor([0.0, 0, 0, 1]), v, torch.tensor([4]), gamma=0.9, lam=0.8)
    torch.testing.assert_close(one, flat)


def test_bilevel_gae_does_not_carry_token_errors_into_an_earlier_turn() -> None:
    r, v = tensor([0.0, 1.0]), tensor([0.1, 0.2, 0.3, 0.4])
    rates = {"turn_gamma": 1.0, "turn_lam": 1.0, "token_gamma": 1.0, "token_lam": 1.0}
    owner, sizes = torch.tensor([0, 0]), torch.tensor([2, 2])
    a, _ = credit.bilevel_gae(r, v, owner, sizes, **rates)
    moved, _ = credit.bilevel_gae(r, v + tensor([0.0, 0, 5, 0]), owner, sizes, **rates)
    assert torch.equal(a[:2], moved[:2])
    assert float(moved[2]) == pytest.approx(float(a[2]) - 5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=turn_batches(), seed=st.integers(0, 2**20))
def test_order_of_trajectories_is_irrelevant_bit_for_bit(batch: Turns, seed: int) -> None:
    n = len(batch.turns)
    perm: list[int] = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    owner = batch.trajectory
    r, v = batch.random(sum(batch.lengths)), batch.random(sum(batch.lengths), 1)
    steps_r = batch.random(len(owner), 2)

    def all_of(order: list[int]) -> list[list[list[float]]]:
        lengths = [batch.lengths[i] for i in order]
        sizes = [len(batch.turns[i]) for i in order]
        tokens_r, tokens_v = (
            tensor([x for i in order for x in split(values, batch.lengths)[i]]) for values in (r, v)
        )
        rows = tensor([x for i in order for x in split(steps_r, [len(t) for t in batch.turns])[i]])
        trajectory = torch.tensor([k for k, i in enumerate(order) for _ in batch.turns[i]])
        step_lengths = torch.tensor([m for i in order for m in batch.turns[i]])
        lam, valid = tensor([batch.lam[i] for i in order]), torch.tensor([batch.valid[i] for i in order])
        boot = tensor([batch.bootstrap[i] for i in order])
        lengths_tensor = torch.tensor(lengths)
        a, ret = credit.gae(
            tokens_r, tokens_v, lengths_tensor, gamma=0.97, lam=lam, valid=valid, bootstrap=boot
        )
        turn, _ = credit.turn_gae(rows, rows * 0.3, trajectory, gamma=0.97, lam=lam, valid=valid)
        two, _ = credit.bilevel_gae(
            rows, tokens_v, trajectory, step_lengths,
            turn_gamma=0.9, turn_lam=0.9, token_gamma=0.99, token_lam=0.7, valid=valid,
        )  # fmt: skip
        white = credit.whiten(a, lengths_tensor, valid=valid)
        results = [
            split(x.tolist(), cut)
            for x, cut in ((a, lengths), (ret, lengths), (turn, sizes), (two, lengths), (white, lengths))
        ]
        return [[result[order.index(i)] for i in range(n)] for result in results]

    assert all_of(perm) == all_of(list(range(n)))


def test_rows_of_several_trajectories_may_alternate() -> None:
    r, v = tensor([1.0, 2, 3, 4, 5]), tensor([0.5, 0.4, 0.3, 0.2, 0.1])
    mixed = torch.tensor([1, 0, 1, 0, 1])
    p = torch.tensor([1, 3, 0, 2, 4])
    a, _ = credit.turn_gae(r, v, mixed, gamma=0.9, lam=0.8)
    b, _ = credit.turn_gae(r[p], v[p], mixed[p], gamma=0.9, lam=0.8)
    assert torch.equal(a[p], b)


def test_one_row_per_token_makes_turn_gae_the_token_gae() -> None:
    generator = torch.Generator().manual_seed(3)
    r, v = torch.randn(2, 3000, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([2500, 0, 500])
    owner = torch.tensor([0, 2]).repeat_interleave(torch.tensor([2500, 500]))
    tokens = credit.gae(r, v, lengths, gamma=0.999, lam=0.99)
    assert all(map(torch.equal, tokens, credit.turn_gae(r, v, owner, gamma=0.999, lam=0.99)))
    a, _ = gae_loop(r[:2500].tolist(), v[:2500].tolist(), 0.999, 0.99)
    close(tokens[0][:2500], a)


def test_order_is_irrelevant_bit_for_bit_when_threads_share_a_large_batch() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(0, 2000, (40,), generator=generator)
        pieces = torch.randn(int(lengths.sum()), generator=generator, dtype=torch.float64).split(
            lengths.tolist()
        )
        order = torch.randperm(40, generator=generator)
        x, y = torch.cat(pieces), torch.cat([pieces[i] for i in order])
        a, _ = credit.gae(x, x, lengths, gamma=1.0, lam=0.99)
        b, _ = credit.gae(y, y, lengths[order], gamma=1.0, lam=0.99)
        moved = a.split(lengths.tolist())
        assert torch.equal(torch.cat([moved[i] for i in order]), b)
    finally:
        torch.set_num_threads(threads)


def test_lambda_one_gives_the_discounted_return_whatever_the_values() -> None:
    generator = torch.Generator().manual_seed(4)
    r, v = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    _, returns = credit.gae(r, v, torch.tensor([40]), gamma=0.9, lam=1.0)
    close(returns, credit.returns_to_go(r, torch.zeros(40, dtype=torch.int64), gamma=0.9).tolist())


def test_bootstrap_continues_a_cut_trajectory_as_if_it_had_gone_on() -> None:
    r, v = tensor([0.1, 0.2, 0.3, 1.0]), tensor([0.5, 0.6, 0.7, 0.8])
    _, whole = credit.gae(r, v, torch.tensor([4]), gamma=0.9, lam=1.0)
    _, cut = credit.gae(r[:2], v[:2], torch.tensor([2]), gamma=0.9, lam=1.0, bootstrap=whole[2:3])
    torch.testing.assert_close(cut, whole[:2])


def test_length_adaptive_lambda_makes_td_weights_add_up_to_alpha_times_length() -> None:
    lam = credit.length_adaptive_lambda(torch.tensor([100, 400, 20, 5, 0]), alpha=0.05)
    close(lam, [0.8, 0.95, 0.0, 0.0, 0.0])
    assert float(1 / (1 - lam[1])) == pytest.approx(0.05 * 400)


def test_whiten_uses_the_valid_tokens_only_and_leaves_the_returns_alone() -> None:
    a, lengths = tensor([1.0, 2.0, NAN, 4.0]), torch.tensor([2, 1, 1])
    valid = torch.tensor([True, False, True])
    seen = [1.0, 2.0, 4.0]
    scale = statistics.stdev(seen) + 1e-6
    mean = statistics.fmean(seen)
    close(
        credit.whiten(a, lengths, valid=valid),
        [(1 - mean) / scale, (2 - mean) / scale, 0, (4 - mean) / scale],
    )


@pytest.mark.parametrize(("value", "size"), [(0.7, 8), (0.9, 8), (0.35, 7)])
def test_E5_constant_advantages_whiten_to_exact_zero(value: float, size: int) -> None:
    a = torch.full((size,), value, dtype=torch.float32)
    assert credit.whiten(a, torch.tensor([size])).tolist() == [0.0] * size
    assert credit.whiten(a * NAN, torch.tensor([size]), valid=torch.tensor([False])).tolist() == [0.0] * size


def value_loss_loop(
    v: list[float], old: list[float], ret: list[float], w: list[float], clip: float | None
) -> tuple[float, float]:
    loss = clipped = 0.0
    for x, o, r, weight in zip(v, old, ret, w, strict=True):
        plain = (x - r) ** 2
        bounded = plain if clip is None else (min(max(x, o - clip), o + clip) - r) ** 2
        loss += weight * 0.5 * max(plain, bounded)
        clipped += weight * (bounded > plain)
    return loss, clipped


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**20), size=st.integers(1, 12), clip=st.sampled_from([None, 0.1, 0.5]))
def test_value_loss_equals_the_formula_in_a_loop_however_it_is_split(
    seed: int, size: int, clip: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    v, old, ret, w = torch.randn(4, size, generator=generator, dtype=torch.float64)
    whole = credit.value_loss(v, old, ret, w.abs(), clip=clip)
    loss, clipped = value_loss_loop(v.tolist(), old.tolist(), ret.tolist(), w.abs().tolist(), clip)
    assert float(whole.loss) == pytest.approx(loss, abs=1e-9)
    assert float(whole.clip_fraction) == pytest.approx(clipped, abs=1e-9)
    parts = [
        credit.value_loss(*(x[i : i + 1] for x in (v, old, ret, w.abs())), clip=clip) for i in range(size)
    ]
    assert float(sum(p.loss for p in parts)) == pytest.approx(loss, abs=1e-9)
    assert float(sum(p.weight for p in parts)) == pytest.approx(float(whole.weight), abs=1e-9)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_value_loss_gradient_matches_finite_differences_and_vanishes_where_clipped(
    clip: float | None,
) -> None:
    generator = torch.Generator().manual_seed(0)
    v, old, ret, w = torch.randn(4, 20, generator=generator, dtype=torch.float64)
    v.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: credit.value_loss(x, old, ret, w.abs(), clip=clip).loss, (v,))
    # Past the bound and short of the target's other side, the clipped error is the larger one and is flat.
    x = tensor([1.0]).requires_grad_()
    loss = credit.value_loss(x, tensor([0.0]), tensor([2.0]), tensor([1.0]), clip=0.5)
    loss.loss.backward()
    assert x.grad is not None
    assert float(x.grad) == 0.0
    assert (float(loss.loss.detach()), float(loss.clip_fraction)) == (0.5 * 1.5**2, 1.0)
    assert not loss.clip_fraction.requires_grad


def test_value_loss_inside_the_bound_is_the_plain_squared_error_with_its_full_gradient() -> None:
    x = tensor([0.2, -0.1]).requires_grad_()
    loss = credit.value_loss(x, tensor([0.0, 0.0]), tensor([1.0, 1.0]), tensor([0.5, 0.5]))
    (gradient,) = torch.autograd.grad(loss.loss, x)
    torch.testing.assert_close(gradient, tensor([-0.4, -0.55]))


def test_non_finite_and_misshapen_data_name_the_field() -> None:
    r, v, n, k = tensor([0.0, 1]), tensor([0.0, 0]), torch.tensor([2]), torch.tensor([0, 0])
    bad, none = tensor([0.0, NAN]), torch.tensor([], dtype=torch.int64)
    g: dict[str, float] = {"gamma": 0.9, "lam": 0.9}
    b: dict[str, float] = {"turn_gamma": 1, "turn_lam": 1, "token_gamma": 1, "token_lam": 1}
    cases: list[tuple[str, Callable[[], object]]] = [
        (r"rewards\[1\] is nan", lambda: credit.gae(bad, v, n, **g)),
        (r"values\[1\] is nan", lambda: credit.gae(r, bad, n, **g)),
        ("rewards must have shape", lambda: credit.gae(r, v, torch.tensor([3]), **g)),
        ("values must have shape", lambda: credit.gae(r, v[:1], n, **g)),
        ("rewards must be a float", lambda: credit.gae(k, v, n, **g)),
        ("rewards is empty", lambda: credit.gae(r[:0], v[:0], torch.tensor([0]), **g)),
        ("lengths is empty", lambda: credit.gae(r, v, none, **g)),
        ("lengths must hold integers", lambda: credit.gae(r, v, r, **g)),
        ("lengths must have one dim", lambda: credit.gae(r, v, torch.tensor([[2]]), **g)),
        (r"lengths\[1\] is -1", lambda: credit.gae(r, v, torch.tensor([3, -1]), **g)),
        ("valid must be", lambda: credit.gae(r, v, n, valid=torch.tensor([True, True]), **g)),
        ("bootstrap must have shape", lambda: credit.gae(r, v, n, bootstrap=v, **g)),
        (r"bootstrap\[0\] is nan", lambda: credit.gae(r, v, n, bootstrap=bad[1:], **g)),
        ("lam must have shape", lambda: credit.gae(r, v, n, gamma=1.0, lam=tensor([1.0, 1.0]))),
        (r"lam\[0\] is 1.5", lambda: credit.gae(r, v, n, gamma=1.0, lam=tensor([1.5]))),
        ("trajectory is empty", lambda: credit.turn_gae(r[:0], v[:0], none, **g)),
        ("trajectory must hold integers", lambda: credit.turn_gae(r, v, r, **g)),
        (r"trajectory\[0\] is -1", lambda: credit.turn_gae(r, v, torch.tensor([-1, 0]), **g)),
        (r"trajectory\[1\] is 1", lambda: credit.turn_gae(r, v, torch.tensor([0, 1]), bootstrap=v[:1], **g)),
        ("step_lengths must have shape", lambda: credit.bilevel_gae(r, v, k, n, **b)),
        (r"step_lengths\[0\] is 0", lambda: credit.bilevel_gae(r, v, k, torch.tensor([0, 2]), **b)),
        ("advantages must have shape", lambda: credit.whiten(r, torch.tensor([1]))),
        ("old_values must have shape", lambda: credit.value_loss(v, v[:1], r, r)),
        (r"returns\[1\] is nan", lambda: credit.value_loss(v, v, bad, r)),
        (r"values\[1\] is nan", lambda: credit.value_loss(bad, v, r, r)),
    ]
    for message, call in cases:
        with pytest.raises(DataError, match=message):
            call()


def test_impossible_options_name_the_setting() -> None:
    r, n = tensor([0.0, 1]), torch.tensor([2])
    cases: list[tuple[str, Callable[[], object]]] = [
        ("gamma must be a number from 0 to 1", lambda: credit.gae(r, r, n, gamma=1.1, lam=1.0)),
        ("gamma must be a number from 0 to 1", lambda: credit.gae(r, r, n, gamma=NAN, lam=1.0)),
        ("lam must be a number from 0 to 1", lambda: credit.gae(r, r, n, gamma=1.0, lam=-0.1)),
        ("alpha must be a positive", lambda: credit.length_adaptive_lambda(n, alpha=0.0)),
        ("eps must be a positive", lambda: credit.whiten(r, n, eps=0.0)),
        ("clip must be a positive", lambda: credit.value_loss(r, r, r, r, clip=math.inf)),
    ]
    for message, call in cases:
        with pytest.raises(ConfigError, match=message):
            call()

"""What the critic's rows make of an episode: where it was cut off, and both levels of the bi-level one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot import credit
from surefoot.core.errors import ConfigError
from surefoot.credit import values
from surefoot.runs.directory import RunDirectory
from surefoot.runs.store import TrajectoryStore
from surefoot.training import algorithms
from surefoot.training.algorithms import ALGORITHMS, Algorithm
from surefoot.training.config import parse_config
from surefoot.training.run import start_run
from surefoot.training.signal import CreditInput

TINY = Path(__file__).with_name("tiny.py")
RECIPE = f"""
name = "cut"
model.name = "scratch"
environment.name = "{TINY}"
sampling.max_tokens = 4
audit.override.even_length = "luck must pay"

[[stage]]
kind = "rl"
algorithm = "ppo"
group_size = 6
tasks_per_step = 4
steps = 3
lr = 1e-3

[stage.settings]
bootstrap = "value"
value_lr = 1e-2

[evaluation]
tasks = 2
samples = 1
"""
CRITICS = ["ppo", "turn_ppo", "vapo", "bilevel_ppo"]


def given(cut: list[float] | None) -> CreditInput:
    """Two trajectories of two turns each: tokens 2 + 1 and 1 + 3."""
    rng = torch.Generator().manual_seed(0)
    lengths, sizes = torch.tensor([3, 4]), torch.tensor([2, 1, 1, 3])
    noise = torch.randn(7, generator=rng, dtype=torch.float64)
    return CreditInput(
        returns=torch.tensor([1.0, 0.0]).double(),
        turn_reward=torch.zeros(2).double(),
        group=torch.zeros(2, dtype=torch.int64),
        valid=torch.ones(2, dtype=torch.bool),
        success=torch.tensor([True, False]),
        lengths=lengths,
        trajectory=torch.tensor([0, 0, 1, 1]),
        step_lengths=sizes,
        step_rewards=torch.tensor([0.5, 1.0, 0.0, 0.25]).double(),
        tool_step=torch.zeros(4, dtype=torch.bool),
        anchors=["a"] * 4,
        behaviour=-torch.ones(7).double(),
        penalty=0.01 * noise.flip(0),
        values=noise,
        cut=None if cut is None else torch.tensor(cut).double(),
    )


def targets(name: str, cut: list[float] | None, **settings: Any) -> Tensor:
    row = ALGORITHMS[name].with_settings({"gamma": 0.9, **settings})
    assert row.credit is not None
    found = row.credit(given(cut), row.settings).targets
    assert found is not None
    return found


def test_the_bilevel_row_is_the_published_estimator_on_rewards_and_prices_of_turns() -> None:
    row = ALGORITHMS["bilevel_ppo"].with_settings({"token_gamma": 0.8, "token_lam": 0.7, "lam": 0.6})
    data = given(None)
    assert row.credit is not None and data.values is not None
    price = torch.stack([part.sum() for part in data.penalty.split(data.step_lengths.tolist())])
    advantages, returns = credit.bilevel_gae(
        data.step_rewards + price, data.values, data.trajectory, data.step_lengths,
        turn_gamma=0.95, turn_lam=0.6, token_gamma=0.8, token_lam=0.7,
    )  # fmt: skip
    got = row.credit(data, row.settings)
    torch.testing.assert_close(got.advantages, values.whiten(advantages, data.lengths))
    torch.testing.assert_close(got.targets, returns)


@pytest.mark.parametrize("row", ALGORITHMS.values(), ids=lambda row: row.name)
def test_a_row_takes_each_of_its_own_settings_or_says_what_it_needs(row: Algorithm) -> None:
    for key, value in row.settings.items():
        try:
            assert row.with_settings({key: value}).settings == row.settings
        except ConfigError as error:
            assert f"settings.{key} has an effect only with" in str(error)


@pytest.mark.parametrize("name", CRITICS)
def test_the_value_of_the_cut_counts_in_the_cut_episode_only(name: str) -> None:
    plain, none = targets(name, None), targets(name, [0.0, 0.0])
    assert torch.equal(plain.nan_to_num(), none.nan_to_num()), "0 is what follows an episode that ended"
    moved = (targets(name, [0.0, 2.0]) - plain).nan_to_num()
    assert not moved[:3].any() and bool(moved[3:].any())
    assert float(moved.max()) == pytest.approx(0.9 * 2.0), "discounted once, at the last state"


def test_a_run_takes_the_critics_value_where_a_limit_cut_and_0_where_the_episode_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    plain = algorithms.values.gae

    def gae(*args: Any, bootstrap: Tensor, **rest: Any) -> Any:
        seen.append(bootstrap)
        return plain(*args, bootstrap=bootstrap, **rest)

    monkeypatch.setattr(algorithms.values, "gae", gae)
    start_run(parse_config(RECIPE, source="test"), tmp_path / "run")
    store = TrajectoryStore(RunDirectory.open(tmp_path / "run", writable=False))
    assert len(seen) == 3
    found: set[tuple[bool, bool]] = set()
    for step, bootstrap in enumerate(seen):
        members = [t for g in store.read(f"treatment-rl-{step:06d}") for t in g.trajectories]
        assert len(bootstrap) == len(members)
        for t, value in zip(members, bootstrap.tolist(), strict=True):
            assert t.truncated or value == 0.0
            if step:  # the value head starts as 0 everywhere
                found.add((t.truncated, value != 0.0))
    assert (True, True) in found and (True, False) not in found


@pytest.mark.parametrize("name", CRITICS)
def test_without_the_setting_a_limit_ends_an_episode_as_the_field_has_it(name: str) -> None:
    assert ALGORITHMS[name].settings["bootstrap"] == "none"

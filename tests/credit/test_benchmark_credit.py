"""The toys of ``benchmarks/credit.py`` are sound, every study runs, and the page shows the kept figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """A benchmark as a module; dataclasses look it up in ``sys.modules``."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench: Any = load("credit")
SMALL = bench.Chain(horizon=4, decisive=(0, 2), actions=2)


def stale(arm: str, seeds: int, sizes: tuple[float, ...] = (1.0, 2.0)) -> torch.Tensor:
    worlds = bench.Worlds(seeds, sizes, False)
    result = bench.stale_study(arm, worlds, 4, chain=SMALL, tasks=2, epochs=2)
    return result[bench.AREA].view(len(sizes), seeds)


def test_a_seed_does_not_feel_other_seeds_or_sizes() -> None:
    together, alone = stale("TIS at 1", 3), stale("TIS at 1", 1, (2.0,))
    torch.testing.assert_close(together[1, 0], alone[0, 0], rtol=1e-12, atol=0)
    assert together[1, 0] != together[1, 1]


def test_without_staleness_all_corrections_are_one() -> None:
    naive = stale("naive at 0", 2)
    for name in bench.CORRECTIONS:
        assert torch.equal(stale(f"{name} at 0", 2), naive)


def test_with_staleness_the_corrections_differ() -> None:
    assert not torch.equal(stale("naive at 2", 2), stale("decoupled at 2", 2))


def test_matched_steps_have_the_length_that_was_asked_for() -> None:
    worlds = bench.Worlds(2, (0.5, 4.0), True)
    logits = worlds.policy(3, 2)
    after = worlds.descend(logits, (logits * torch.arange(6.0).view(3, 2)).sum(), 2.0)
    moved = (after - logits).flatten(1).norm(dim=1)
    torch.testing.assert_close(moved, torch.tensor([1.0, 1.0, 8.0, 8.0], dtype=torch.float64))


def test_a_matched_step_without_a_gradient_stays() -> None:
    worlds = bench.Worlds(1, (4.0,), True)
    logits = worlds.policy(3, 2)
    assert torch.equal(worlds.descend(logits, (0 * logits).sum()), logits)


@pytest.mark.parametrize("slip", [0.0, 0.3])
def test_exact_success_is_what_play_gives_on_the_grid(slip: float) -> None:
    grid, worlds = bench.Grid(side=3, horizon=8, slip=slip), bench.Worlds(1, (1.0,), True)
    logits = torch.tensor([0.0, 1.0, 0.2, 0.6], dtype=torch.float64).repeat(1, 9, 1)
    played = grid.play(worlds, logits, 8000).returns.mean()
    assert abs(float(played - grid.success(logits)[0])) < 0.02


def test_exact_success_is_what_play_gives_on_the_chain() -> None:
    worlds = bench.Worlds(1, (1.0,), True)
    logits = torch.tensor([[0.7, 0.0]], dtype=torch.float64).repeat(1, 4, 1)
    played = SMALL.play(worlds, logits, 1000).returns.mean()
    assert abs(float(played - SMALL.success(logits)[0])) < 0.02


def test_permuting_keeps_what_each_group_holds() -> None:
    draw = torch.Generator().manual_seed(0)
    success = torch.rand(64, generator=draw) < 0.4
    group = torch.arange(64) // 8
    mixed = bench.permuted(success, group, torch.rand(64, generator=draw))
    assert torch.equal(mixed.view(8, 8).sum(1), success.view(8, 8).sum(1))
    assert not torch.equal(mixed, success)


def test_own_best_is_chosen_on_the_other_half() -> None:
    # Size 0 is best for even seeds, size 1 for odd ones: each half is shown at the other half's choice.
    values = np.array([[1.0, 0.0, 1.0, 0.0], [0.2, 0.9, 0.2, 0.9]])
    assert bench.own_best(values, less=False).tolist() == [0.2, 0.0, 0.2, 0.0]
    assert bench.own_best(values, less=True).tolist() == [1.0, 0.9, 1.0, 0.9]


def test_the_page_shows_the_kept_figures() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "credit.json").read_text())
    page = (ROOT / "docs" / "credit-benchmark.md").read_text()
    assert kept["studies"].keys() == bench.STUDIES.keys()
    for name, study in kept["studies"].items():
        assert bench.markdown(study) in page, name


@pytest.mark.slow
@pytest.mark.parametrize("name", list(bench.STUDIES))
def test_every_study_runs_whole(name: str) -> None:
    study = bench.STUDIES[name]
    record = bench.record_of(study, 4, 2)
    assert {len(row["p_holm"].split()) for row in record["differences"].values()} == {len(study.sizes) + 1}
    table = bench.markdown(record).splitlines()
    assert len(table) == 2 + len(study.arms) + len(study.versus)
    assert {line.count("|") for line in table} == {len(study.sizes) + 3}


def test_every_cost_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cost: Any = load("credit_cost")
    monkeypatch.setattr(cost, "SIDE", 64)
    b = cost.Batch(16, 64, 4)
    works = {**cost.of_trajectories(b), **cost.of_steps(b), **cost.of_tokens(b)}
    works |= {**cost.of_filters(b), **cost.of_objectives(b)}
    spent, rates = cost.measure(works, 1)
    found = cost.shares(spent, rates, 16 * 64)
    assert set(spent) == set(works) and all(len(values) == 1 for values in spent.values())
    assert found["credit_seconds"] > 0 and found["step_floor_seconds"]["float32"] > 0

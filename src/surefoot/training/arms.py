"""Control arms: what an arm puts in place of the true returns, and of the update that learns from them.

Everything else of a control (weights, tasks, seeds, settings, episodes) is the treatment's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from surefoot.core.seeds import derive

if TYPE_CHECKING:  # recipes are read without torch
    from surefoot.training.algorithms import Algorithm, Settings
    from surefoot.training.config import RlStage

Float64 = npt.NDArray[np.float64]
Signal = Literal["true", "permuted", "random", "constant"]
TREATMENT = "treatment"


@dataclass(frozen=True, slots=True)
class Arm:
    """A signal and an update. ``clipped``: the algorithm's clip stays. ``on_policy``: one update of a
    batch, which the weights of that moment sampled, so that the ratio is 1. ``learns``: there is an update.
    """

    signal: Signal
    title: str
    clipped: bool = True
    on_policy: bool = False
    learns: bool = True

    @property
    def plain(self) -> bool:
        """Whether the update is the treatment's."""
        return self.clipped and not self.on_policy


def _with_updates(name: str, signal: Signal, title: str) -> dict[str, Arm]:
    """A signal under the treatment's update, and two that clipping cannot bias (arXiv 2506.10947)."""
    return {
        name: Arm(signal, title),
        f"{name}_unclipped": Arm(signal, f"{title}, no clip", clipped=False),
        f"{name}_on_policy": Arm(signal, f"{title}, one on-policy update a batch", on_policy=True),
    }


# Every control arm that a recipe may name.
ARMS: Mapping[str, Arm] = {
    **_with_updates("permuted", "permuted", "rewards permuted inside each group"),
    **_with_updates("random", "random", "random rewards at the same rate"),
    "constant": Arm("constant", "the same reward for all"),
    "frozen": Arm("true", "no update", learns=False),
}
_TREATMENT = Arm("true", "the run itself")


def arm_of(name: str) -> Arm:
    """The arm ``name``: a control, or the treatment."""
    return _TREATMENT if name == TREATMENT else ARMS[name]


def as_trained(arm: str, stage: RlStage, row: Algorithm) -> tuple[RlStage, Algorithm]:
    """The stage and its algorithm as ``arm`` trains them."""
    from surefoot.objectives import Clip

    def unclipped(settings: Settings) -> Clip:
        return Clip.none()

    chosen = arm_of(arm)
    if not chosen.clipped:
        row = replace(row, clip=unclipped)
    if chosen.on_policy:
        stage = stage.model_copy(update={"updates_per_step": 1})
        if "staleness" in row.settings:
            row = replace(row, settings={**row.settings, "staleness": 0})
    return stage, row


def without_effect(arm: str, stage: RlStage, row: Algorithm) -> str:
    """Why ``arm`` would train this stage just as the plain arm of its signal does; "" where it would not."""
    chosen = arm_of(arm)
    if chosen.plain:
        return ""
    if row.credit is None:
        return f"algorithm {row.name!r} has no ratio"
    stale = bool(row.settings["staleness"])
    if chosen.on_policy:
        fresh = stage.updates_per_step == 1 and not stale
        return "updates_per_step = 1 without staleness is on-policy already" if fresh else ""
    clip = row.clip(row.settings).kind
    if clip == "none":
        return f"algorithm {row.name!r} has no clip"
    # All but dppo measure from the weights at the start of the step, however old the samples are.
    bound = stage.updates_per_step > 1 or (stale and clip == "dppo")
    return "" if bound else "with updates_per_step = 1 the ratio is 1 and nothing is clipped"


def arm_returns(
    arm: str, returns: Float64, group: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_], *, seed: int
) -> Float64:
    """The returns that ``arm`` trains on, from the true ones. float64[n] -> float64[n].

    permuted: true returns shuffled among the valid members of each group, so that mean, spread and
    the number of constant groups stay. random: fresh Bernoulli draws between the batch's lowest and
    highest return with the batch's mean. constant: the mean for all. true: unchanged.
    """
    out, signal = returns.copy(), arm_of(arm).signal
    if signal == "true" or not valid.any():
        return out
    if signal == "permuted":
        return out[arm_order(arm, group, valid, seed=seed)]
    rng = np.random.Generator(np.random.Philox(derive(seed, signal)))
    true = returns[valid]
    if signal == "constant":
        out[valid] = true.mean()
        return out
    low, high = float(true.min()), float(true.max())
    rate = (true.mean() - low) / (high - low) if high > low else 0.5
    span = (low, high) if high > low else (0.0, 1.0)
    out[valid] = np.where(rng.random(len(true)) < rate, span[1], span[0])
    return out


def arm_order(
    arm: str, group: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_], *, seed: int
) -> npt.NDArray[np.int64]:
    """int64[n]: whose judgement each row gets. Its own, but in a permuted arm, where the valid members
    of each group exchange theirs; one order serves everything that is judged.
    """
    order = np.arange(len(group))
    signal = arm_of(arm).signal
    if signal == "permuted":
        rng = np.random.Generator(np.random.Philox(derive(seed, signal)))
        for g in np.unique(group):
            rows = np.flatnonzero((group == g) & valid)
            order[rows] = rng.permutation(rows)
    return order

"""Control arms: what an arm puts in place of the true returns before credit is taken.

Everything else of a control (weights, tasks, seeds, clipping, budget) is the treatment's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from surefoot.core.seeds import derive

Float64 = npt.NDArray[np.float64]
TREATMENT = "treatment"


def arm_returns(
    arm: str, returns: Float64, group: npt.NDArray[np.int64], valid: npt.NDArray[np.bool_], *, seed: int
) -> Float64:
    """The returns that ``arm`` trains on, from the true ones. float64[n] -> float64[n].

    permuted: true returns shuffled among the valid members of each group, so that mean, spread and
    the number of constant groups stay. random: fresh Bernoulli draws between the batch's lowest and
    highest return with the batch's mean. constant: the mean for all. treatment, frozen: unchanged.
    """
    out = returns.copy()
    if arm in (TREATMENT, "frozen") or not valid.any():
        return out
    if arm == "permuted":
        return out[arm_order(arm, group, valid, seed=seed)]
    rng = np.random.Generator(np.random.Philox(derive(seed, arm)))
    true = returns[valid]
    if arm == "constant":
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
    """int64[n]: whose judgement each row gets. Its own, but in the permuted arm, where the valid members
    of each group exchange theirs; one order serves everything that is judged.
    """
    order = np.arange(len(group))
    if arm == "permuted":
        rng = np.random.Generator(np.random.Philox(derive(seed, arm)))
        for g in np.unique(group):
            rows = np.flatnonzero((group == g) & valid)
            order[rows] = rng.permutation(rows)
    return order

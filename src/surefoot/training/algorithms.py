"""The algorithms table: each published name as credit, ratio, clip and aggregation, with its source.

An algorithm is data; the stage that runs it does not know its name. A setting that the chosen row
ignores is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from surefoot import credit
from surefoot.core.errors import ConfigError, nearest
from surefoot.objectives import Clip
from surefoot.objectives.policy_gradient import Aggregate, Ratio

Settings = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True)
class CreditInput:
    """What credit is computed from. returns: float64[n]; group, lengths: int64[n]; valid: bool[n]."""

    returns: Tensor
    group: Tensor
    valid: Tensor
    lengths: Tensor


# Advantages float64[n] from scores under the row's settings.
Credit = Callable[[CreditInput, Settings], Tensor]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row. ``settings`` holds the paper's values of everything that a recipe may override."""

    name: str
    summary: str
    source: str
    credit: Credit
    clip: Callable[[Settings], Clip]
    settings: Settings = field(default_factory=lambda: {})
    ratio: Ratio = "token"
    aggregate: Aggregate = "token_mean"

    def with_settings(self, chosen: Settings) -> Algorithm:
        """The row with ``chosen`` in place of its own values. Raises ConfigError for an ignored one."""
        for key, value in chosen.items():
            if key not in self.settings:
                raise ConfigError(
                    f"settings.{key} has no effect on algorithm {self.name!r}; {nearest(key, self.settings)}"
                )
            own = self.settings[key]
            if isinstance(own, str) != isinstance(value, str):
                raise ConfigError(f"settings.{key} = {value!r}; it must be a value like {own!r}")
        row = replace(self, settings={**self.settings, **chosen})
        row.clip(row.settings)  # a clip checks its own ranges
        return row


def _ppo(settings: Settings) -> Clip:
    return Clip.ppo(float(settings["clip_low"]), float(settings["clip_high"]))


def _no_clip(settings: Settings) -> Clip:
    return Clip.none()


def _group(scale: str) -> Credit:
    def relative(given: CreditInput, settings: Settings) -> Tensor:
        eps = float(settings.get("eps", 1e-6))
        chosen: Any = scale
        return credit.group_relative(given.returns, given.group, valid=given.valid, scale=chosen, eps=eps)

    return relative


def _rloo(given: CreditInput, settings: Settings) -> Tensor:
    return credit.leave_one_out(given.returns, given.group, valid=given.valid)


def _reinforce(given: CreditInput, settings: Settings) -> Tensor:
    baseline = float(settings["baseline"])
    return credit.reinforce(given.returns, given.group, baseline=baseline, valid=given.valid)


def _reinforce_pp_baseline(given: CreditInput, settings: Settings) -> Tensor:
    return credit.reinforce_pp_baseline(given.returns, given.group, given.lengths, valid=given.valid)


def _opo(given: CreditInput, settings: Settings) -> Tensor:
    return credit.opo(given.returns, given.group, given.lengths, valid=given.valid)


_CLIP: Settings = {"clip_low": 0.2, "clip_high": 0.2}

_ROWS = (
    Algorithm(
        "grpo",
        "group mean and standard deviation as baseline and scale",
        "DeepSeekMath, arXiv 2402.03300",
        _group("std"),
        _ppo,
        {**_CLIP, "eps": 1e-6},
        aggregate="sequence_mean",
    ),
    Algorithm(
        "dr_grpo",
        "GRPO without the scale by the standard deviation and with a constant length",
        "Understanding R1-Zero-like training, arXiv 2503.20783",
        _group("none"),
        _ppo,
        {**_CLIP, "max_length": 256},
        aggregate="constant",
    ),
    Algorithm(
        "rloo",
        "the other members' mean as baseline",
        "Back to basics, arXiv 2402.14740",
        _rloo,
        _no_clip,
        aggregate="sequence_mean",
    ),
    Algorithm(
        "reinforce",
        "the return minus a fixed baseline",
        "Williams 1992",
        _reinforce,
        _no_clip,
        {"baseline": 0.0},
    ),
    Algorithm(
        "reinforce_pp_baseline",
        "group mean subtracted, then whitened over the batch's tokens",
        "REINFORCE++, arXiv 2501.03262",
        _reinforce_pp_baseline,
        _ppo,
        _CLIP,
    ),
    Algorithm(
        "opo",
        "length-weighted group mean as baseline",
        "On-policy RL with optimal baseline, arXiv 2505.23585",
        _opo,
        _no_clip,
    ),
    Algorithm(
        "gspo",
        "GRPO's credit with one ratio a sequence",
        "arXiv 2507.18071",
        _group("std"),
        _ppo,
        {"clip_low": 3e-4, "clip_high": 4e-4, "eps": 1e-6},
        ratio="sequence",
        aggregate="sequence_mean",
    ),
    Algorithm(
        "cispo",
        "a clipped, detached ratio as weight, so that no token loses its gradient",
        "MiniMax-M1, arXiv 2506.13585",
        _group("std"),
        lambda settings: Clip.cispo(float(settings["clip_high"])),
        {"clip_high": 5.0, "eps": 1e-6},
    ),
)

ALGORITHMS: Mapping[str, Algorithm] = {row.name: row for row in _ROWS}


def algorithm(name: str, settings: Settings) -> Algorithm:
    """The row of ``name`` with overrides. Raises ConfigError that names the nearest row or setting."""
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithm {name!r} does not exist; {nearest(name, ALGORITHMS)}")
    return ALGORITHMS[name].with_settings(settings)

"""The algorithms table: each published name as data, with its source and its paper's settings.

An algorithm is a filter, a credit, a clip, a ratio and an aggregation (or a preference loss); the stage
that runs it does not know its name. A setting that the chosen row ignores is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from surefoot import credit
from surefoot.core.errors import ConfigError, nearest
from surefoot.credit import steps, values
from surefoot.objectives import Clip
from surefoot.objectives.policy_gradient import Aggregate, Ratio
from surefoot.objectives.preference import PREFERENCES, preference
from surefoot.objectives.supervised import distillation_advantages
from surefoot.training.signal import CreditInput

Setting = float | int | str
Settings = Mapping[str, Setting]
# What a row needs beside the policy; each costs memory or time, see ``COSTS``.
Need = Literal[
    "critic", "utterance_critic", "turn_critic", "implicit", "greedy", "reference", "teacher", "scorer"
]
Kind = Literal["rl", "preference", "sft"]
# What an implicit reward model learns from, a supervised stage imitates, or learns in the policy's place.
Learn = Literal["", "pairs", "outcomes", "demonstrations", "solved", "weighted", "scores"]
COSTS: Mapping[Need, str] = {
    "critic": "a linear value head; a forward pass",
    "utterance_critic": "a small critic, fitted anew each step; a forward pass",
    "turn_critic": "a second model that learns (weights, gradients, AdamW state); two forward passes and "
    "`critic_epochs` updates",
    "implicit": "a second model that learns (weights, gradients, AdamW state); a forward pass and an update",
    "greedy": "a greedy episode of each task",
    "reference": "a frozen copy of the model; a forward pass",
    "teacher": "the teacher model; a forward pass",
    "scorer": "a second model that learns (weights, gradients, AdamW state)",
}


class Credited(NamedTuple):
    """advantages: float64[M], one for each trained token. targets: float64[M] of the critic at each token,
    NaN where it has none (None without a critic).
    """

    advantages: Tensor
    targets: Tensor | None = None


Credit = Callable[[CreditInput, Settings], Credited]

CORRECTIONS = ("none", "tis", "tis_sequence", "icepop", "sequence_mask")
_CAPPED = ("tis", "tis_sequence", "icepop")
FILTERS = ("none", "dynamic", "duplicate", "variance", "roc", "overlong")
COVARIANCES = ("none", "clip", "kl")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "kl_kind": ("k1", "k2", "k3", "k3_k2grad"),
    "kl_place": ("loss", "reward"),
    "covariance": COVARIANCES,
    "correction": CORRECTIONS,
    "filter": FILTERS,
    "roc_mode": ("rank", "sample"),
    "anchor": ("hash", "similarity"),
    "step_scale": ("none", "std"),
    "estimator": ("std", "none", "leave_one_out"),
    "privileged": ("given", "withheld"),
    "bootstrap": ("none", "value"),
}

# Every policy-gradient row takes these; a row may have other defaults.
COMMON: Settings = {
    "kl_coef": 0.0,
    "kl_kind": "k3",
    "kl_place": "loss",
    "kl_reset_every": 0,
    "entropy_coef": 0.0,
    "entropy_target": 0.0,
    "covariance": "none",
    "correction": "none",
    "correction_cap": 2.0,
    "staleness": 0,
    "filter": "none",
    "filter_rounds": 3,
    "filter_share": 0.25,
    "roc_keep": 0,
    "roc_mode": "rank",
    "soft_overlong": 0,
}
# A setting -> what it means, in one line of the documentation.
SETTINGS: Mapping[str, str] = {
    "kl_coef": "weight of the KL divergence from the reference, which is the policy as the stage began",
    "kl_kind": "its estimator in the loss",
    "kl_place": "where it counts: a term of the loss, or a price in the reward (always `k1`)",
    "kl_reset_every": "steps after which the reference becomes the policy as it is then; 0: never",
    "entropy_coef": "weight of the entropy bonus; below 0 it lowers the entropy",
    "entropy_target": "entropy, in nats a token, to steer the bonus to in place of `entropy_coef`; 0: off",
    "covariance": "how the few tokens that would cost most entropy are held back",
    "correction": "weight for the gap between the sampler and the policy at the start of the step",
    "correction_cap": "largest such weight; `icepop` also drops what is below 1 / cap",
    "staleness": "steps by which sampling runs ahead of training",
    "filter": "which groups or episodes are trained on",
    "filter_rounds": "rounds of sampling for a step, the first one included",
    "filter_share": "share of the groups that is kept",
    "roc_keep": "episodes kept of each group, 0: half of it",
    "roc_mode": "successes with few tool errors come first (`rank`) or are more likely (`sample`)",
    "soft_overlong": "tokens up to the longest possible episode over which the return falls by 1; 0: off",
    "baseline": "number taken off every return",
    "clip_low": "how far the ratio may fall below 1 (`gmpo`: the log-ratio below 0)",
    "dual": "above 1: largest loss of a token, in units of its advantage below 0; 0: off",
    "clip_high": "how far the ratio may rise above 1 (`gmpo`: the log-ratio above 0; `cispo`: largest ratio)",
    "eps": "added to the standard deviation",
    "max_length": "tokens that each episode's loss is divided by; set it to what an episode may have",
    "tau_pos": "steepness of the gate where the advantage is above 0",
    "tau_neg": "steepness of the gate where it is not",
    "delta": "how far a token's probability may move before the token is dropped",
    "gamma": "discount of what comes later (`simpo`: the lead that the chosen one must have)",
    "lam": "lambda of GAE",
    "token_gamma": "the same, inside a turn",
    "token_lam": "the same, inside a turn",
    "bootstrap": "what follows where a limit cut an episode: nothing, or the critic's value of that state",
    "lam_alpha": "above 0: lambda is 1 - 1 / (lam_alpha l), at least 0",
    "value_clip": "how far a value may move from the old one in the critic's loss; 0: as far as it likes",
    "value_lr": "learning rate of the critic",
    "value_warmup": "updates at the start of the stage without a policy loss (`sweet_rl`: of the critic)",
    "critic_epochs": "passes over the step's turns to fit the critic (`sweet_rl`: its updates in a step)",
    "replay": "earlier steps whose episodes the critic learns from too; 0: none",
    "polyak": "share of the critic that its slow copy takes over in each pass",
    "omega": "weight of the step part",
    "anchor": "states are the same if equal (`hash`), or if 95 % alike as texts (`similarity`)",
    "step_scale": "divide by the standard deviation of what is compared, or not",
    "turn_coef": "weight of the part that rates the tool's use",
    "beta": "scale of the implicit reward, or of a preference's log-ratios (`reward_weighted`: temperature)",
    "alpha": "weight of the step part (`rpo`, `cpo`, `sweet_rl`: of the chosen one's likelihood; `ld_dpo`: "
    "of the tokens by which one is longer)",
    "estimator": "compared with mean and std (`std`), mean (`none`), or the others' mean (`leave_one_out`)",
    "floor": "smallest standard deviation that step rewards are divided by",
    "implicit_lr": "learning rate of the implicit reward model",
    "limit": "largest size of an advantage",
    "pairs": "most pairs of a task in a step (`sweet_rl`: of a turn)",
    "candidates": "turns to rank at each point of an episode, the played one included",
    "privileged": "whether the critic reads what the environment tells of a task for training only",
    "critic_beta": "scale of the critic's advantages in its own loss",
    "form": "log-ratios of whole episodes (`sum`) or per token (`mean`)",
    "label_smoothing": "share of the pairs thought to be the wrong way round, below 0.5",
    "odds_weight": "weight of the odds ratio beside the likelihood",
    "desirable": "weight of the chosen episodes",
    "undesirable": "weight of the rejected ones",
    "margin": "by how much the chosen one must lead, for each unit of return between the two; 0: no margin",
    "center": "weight of the squared sum of a pair's two scores, which holds their mean near 0",
    "held_out": "share of the tasks whose pairs only measure, at least one task; 0: none",
    "samples": "episodes of each task",
    "per_task": "most episodes that a task may give",
    "cap": "largest weight, before weights are scaled to a mean of 1",
}
# A setting -> when it has an effect, given all settings of the row.
_ACTIVE: Mapping[str, tuple[str, Callable[[Settings], bool]]] = {
    "kl_kind": ("kl_coef above 0, kl_place 'loss'", lambda s: _on(s, "kl_coef") and s["kl_place"] == "loss"),
    "kl_place": ("kl_coef above 0", lambda s: _on(s, "kl_coef")),
    "kl_reset_every": ("kl_coef above 0", lambda s: _on(s, "kl_coef")),
    "correction_cap": ("correction 'tis', 'tis_sequence' or 'icepop'", lambda s: s["correction"] in _CAPPED),
    "entropy_coef": ("entropy_target = 0", lambda s: not _on(s, "entropy_target")),
    "lam": ("lam_alpha = 0", lambda s: not float(s.get("lam_alpha", 0.0))),
    "filter_rounds": ("filter = 'dynamic'", lambda s: s["filter"] == "dynamic"),
    "filter_share": ("filter = 'variance'", lambda s: s["filter"] == "variance"),
    "roc_keep": ("filter = 'roc'", lambda s: s["filter"] == "roc"),
    "roc_mode": ("filter = 'roc'", lambda s: s["filter"] == "roc"),
}  # fmt: skip


def _on(settings: Settings, key: str) -> bool:
    return float(settings[key]) != 0.0


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row. ``settings`` holds the paper's values of everything that a recipe may override."""

    name: str
    summary: str
    source: str
    when: str
    kind: Kind = "rl"
    credit: Credit | None = None
    clip: Callable[[Settings], Clip] = field(default=lambda settings: Clip.none())
    settings: Settings = field(default_factory=lambda: {})
    ratio: Ratio = "token"
    aggregate: Aggregate = "token_mean"
    needs: frozenset[Need] = frozenset()
    formula: str = ""
    learn: Learn = ""
    # The preference loss of a reinforcement row without a credit.
    pair_loss: str = ""

    def with_settings(self, chosen: Settings) -> Algorithm:
        """The row with ``chosen`` in place of its own values. Raises ConfigError for an ignored one."""
        for key, value in chosen.items():
            if key not in self.settings:
                raise ConfigError(
                    f"settings.{key} has no effect on algorithm {self.name!r}; {nearest(key, self.settings)}"
                )
            _check_value(key, value, self.settings[key])
            if key == "gamma" and self.kind == "rl" and float(value) > 1:
                raise ConfigError(f"settings.gamma = {value}; a discount is from 0 to 1")
        row = replace(self, settings={**self.settings, **chosen})
        for key in chosen:
            if key in _ACTIVE and not _ACTIVE[key][1](row.settings):
                raise ConfigError(f"settings.{key} has an effect only with {_ACTIVE[key][0]}; remove it")
        row.clip(row.settings)  # a clip and a preference loss check their own ranges
        if self.preference:
            preference(self.preference, row.loss_settings)
        return row

    @property
    def preference(self) -> str:
        """The loss on log-probabilities of pairs that the row takes, empty without one."""
        if self.kind == "preference" and self.learn != "scores":
            return self.name
        return self.pair_loss

    @property
    def loss_settings(self) -> Settings:
        """The settings that the row's preference loss takes."""
        own = PREFERENCES[self.preference].settings
        return {key: value for key, value in self.settings.items() if key in own}

    def wanted(self) -> frozenset[Need]:
        """Everything the row needs under its settings."""
        extra: set[Need] = set(self.needs)
        if self.kind == "rl" and "kl_coef" in self.settings and _on(self.settings, "kl_coef"):
            extra.add("reference")
        return frozenset(extra)

    @property
    def own(self) -> Settings:
        """The settings that are not those of ``COMMON``, the row's alone first."""
        common = COMMON if self.credit is not None else {}
        alone = {key: v for key, v in self.settings.items() if key not in common}
        return alone | {key: self.settings[key] for key in common if self.settings[key] != common[key]}

    @property
    def costs(self) -> tuple[str, ...]:
        """What the row asks for beyond its episodes and one pass forward and back over them."""
        wanted = self.wanted()
        needs = [text for need, text in COSTS.items() if need in wanted]
        return (*needs, *(text for text, holds in _WORK if holds(self)))


# Work that follows from a row's settings or kind, with the condition for it.
_WORK: tuple[tuple[str, Callable[[Algorithm], bool]], ...] = (
    ("up to `filter_rounds` times the episodes", lambda row: row.settings.get("filter") == "dynamic"),
    ("episodes that are not trained on", lambda row: row.settings.get("filter") in ("variance", "roc")),
    (
        "a forward pass",
        lambda row: bool(row.settings.get("staleness")) or row.settings.get("correction") in _CAPPED,
    ),
    ("a forward pass before each update", lambda row: row.credit is None and row.kind != "sft"),
    (
        "two more, over answers to the wrong task",
        lambda row: bool(row.preference) and not PREFERENCES[row.preference].paired,
    ),
    ("a forward pass over cut episodes", lambda row: row.settings.get("bootstrap") == "value"),
    ("two forward passes over the replay", lambda row: bool(row.settings.get("replay"))),
    ("`candidates` samples of every turn", lambda row: "candidates" in row.settings),
    ("`samples` episodes of each task", lambda row: "samples" in row.settings),
)


def _check_value(key: str, value: Setting, own: Setting) -> None:
    if isinstance(own, str) != isinstance(value, str):
        raise ConfigError(f"settings.{key} = {value!r}; it must be a value like {own!r}")
    if isinstance(value, str) and key in _CHOICES and value not in _CHOICES[key]:
        raise ConfigError(f"settings.{key} = {value!r}; {nearest(value, _CHOICES[key])}")
    if isinstance(own, int) and isinstance(value, float) and not value.is_integer():
        raise ConfigError(f"settings.{key} = {value}; it must be a whole number like {own}")
    if isinstance(value, str):
        return
    low, high = _RANGES.get(key, (0.0, math.inf))
    if not low <= value <= high:
        wanted = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ConfigError(f"settings.{key} = {value}; it must be {wanted}")
    if key in _ABOVE_ZERO and value == 0:
        raise ConfigError(f"settings.{key} = {value}; it must be above 0")


# Everything else is at least 0.
_RANGES: Mapping[str, tuple[float, float]] = {
    "baseline": (-math.inf, math.inf),
    "entropy_coef": (-math.inf, math.inf),
    "lam": (0.0, 1.0),
    "token_gamma": (0.0, 1.0),
    "token_lam": (0.0, 1.0),
    "polyak": (0.0, 1.0),
    "filter_share": (0.0, 1.0),
    "held_out": (0.0, 0.9),
    "filter_rounds": (1, math.inf),
    "critic_epochs": (1, math.inf),
    "samples": (1, math.inf),
    "per_task": (1, math.inf),
    "pairs": (1, math.inf),
    "candidates": (2, math.inf),
}
_ABOVE_ZERO = frozenset(
    {
        "eps",
        "correction_cap",
        "filter_share",
        "value_lr",
        "implicit_lr",
        "max_length",
        "limit",
        "cap",
        "polyak",
        "critic_beta",
    }
)


def _number(settings: Settings, key: str) -> float:
    return float(settings[key])


# credit -------------------------------------------------------------------------------------------


def _each(function: Callable[[CreditInput, Settings], Tensor]) -> Credit:
    """A credit per trajectory, repeated on its tokens."""
    return lambda given, settings: Credited(credit.to_tokens(function(given, settings), given.lengths))


def _per_step(function: Callable[[CreditInput, Settings], Tensor]) -> Credit:
    """A credit per turn, repeated on its tokens."""
    return lambda given, settings: Credited(
        steps.steps_to_tokens(function(given, settings), given.step_lengths)
    )


def _group(scale: str) -> Credit:
    def relative(given: CreditInput, settings: Settings) -> Tensor:
        chosen: Any = scale
        eps = float(settings.get("eps", 1e-6))
        return credit.group_relative(given.returns, given.group, valid=given.valid, scale=chosen, eps=eps)

    return _each(relative)


def _rloo(given: CreditInput, settings: Settings) -> Tensor:
    return credit.leave_one_out(given.returns, given.group, valid=given.valid)


def _reinforce(given: CreditInput, settings: Settings) -> Tensor:
    baseline = _number(settings, "baseline")
    return credit.reinforce(given.returns, given.group, baseline=baseline, valid=given.valid)


def _reinforce_pp(given: CreditInput, settings: Settings) -> Tensor:
    return credit.reinforce_pp(given.returns, given.lengths, valid=given.valid)


def _reinforce_pp_baseline(given: CreditInput, settings: Settings) -> Tensor:
    return credit.reinforce_pp_baseline(given.returns, given.group, given.lengths, valid=given.valid)


def _opo(given: CreditInput, settings: Settings) -> Tensor:
    return credit.opo(given.returns, given.group, given.lengths, valid=given.valid)


def _remax(given: CreditInput, settings: Settings) -> Tensor:
    return credit.remax(given.returns, _given(given.greedy), valid=given.valid)


def _pass_at_k(given: CreditInput, settings: Settings) -> Tensor:
    return credit.pass_at_k(given.returns, given.group, valid=given.valid)


def _token_rewards(given: CreditInput) -> Tensor:
    """Each turn's reward on its last token, and the price of each token."""
    rewards = given.penalty.clone()
    ends = given.step_lengths.cumsum(0) - 1
    spoken = given.step_lengths > 0
    return rewards.index_add_(0, ends[spoken], given.step_rewards[spoken])


def _gae(given: CreditInput, settings: Settings) -> Credited:
    lam: float | Tensor
    if _on(settings, "lam_alpha"):
        lam = values.length_adaptive_lambda(given.lengths, alpha=_number(settings, "lam_alpha"))
    else:
        lam = _number(settings, "lam")
    advantages, targets = values.gae(
        _token_rewards(given),
        _given(given.values),
        given.lengths,
        gamma=_number(settings, "gamma"),
        lam=lam,
        valid=given.valid,
        bootstrap=given.cut,
    )
    return Credited(values.whiten(advantages, given.lengths, valid=given.valid), targets)


def _turn_rewards(given: CreditInput) -> Tensor:
    """Each turn's reward with the prices of its tokens."""
    owner = torch.arange(len(given.step_lengths)).repeat_interleave(given.step_lengths)
    return given.step_rewards.index_add(0, owner, given.penalty)


def _bilevel_gae(given: CreditInput, settings: Settings) -> Credited:
    """A turn's value is that of its last token, and every token's value learns."""
    advantages, targets = values.bilevel_gae(
        _turn_rewards(given),
        _given(given.values),
        given.trajectory,
        given.step_lengths,
        turn_gamma=_number(settings, "gamma"),
        turn_lam=_number(settings, "lam"),
        token_gamma=_number(settings, "token_gamma"),
        token_lam=_number(settings, "token_lam"),
        valid=given.valid,
        bootstrap=given.cut,
    )
    return Credited(values.whiten(advantages, given.lengths, valid=given.valid), targets)


def _turn_gae(given: CreditInput, settings: Settings) -> Credited:
    """A turn's value is read where it begins, and only there the critic learns."""
    first = given.step_lengths.cumsum(0) - given.step_lengths
    spoken = given.step_lengths > 0
    own = torch.zeros(len(first), dtype=torch.float64)
    own[spoken] = _given(given.values)[first[spoken]].double()
    advantages, turn_targets = values.turn_gae(
        _turn_rewards(given),
        own,
        given.trajectory,
        gamma=_number(settings, "gamma"),
        lam=_number(settings, "lam"),
        valid=given.valid,
        bootstrap=given.cut,
    )
    tokens = steps.steps_to_tokens(advantages, given.step_lengths)
    targets = torch.full_like(given.penalty, float("nan"))
    targets[first[spoken]] = turn_targets[spoken]
    return Credited(values.whiten(tokens, given.lengths, valid=given.valid), targets)


def _gigpo(given: CreditInput, settings: Settings) -> Tensor:
    mode: Any = settings["anchor"]
    shown = given.anchors if mode == "hash" else ["\n".join(map(str, _texts(a))) for a in given.anchors]
    anchor = steps.anchor_groups(shown, given.group[given.trajectory], mode=mode)
    scale: Any = settings["step_scale"]
    return steps.gigpo(
        given.returns,
        given.step_rewards,
        given.trajectory,
        anchor,
        given.group,
        gamma=_number(settings, "gamma"),
        omega=_number(settings, "omega"),
        scale=scale,
        valid=given.valid,
    )


def _step_relative(given: CreditInput, settings: Settings) -> Tensor:
    scale: Any = settings["step_scale"]
    return steps.step_relative(
        given.step_rewards,
        given.trajectory,
        given.group,
        gamma=_number(settings, "gamma"),
        scale=scale,
        valid=given.valid,
    )


def _mt_grpo(given: CreditInput, settings: Settings) -> Tensor:
    return steps.mt_grpo(
        given.returns,
        given.turn_reward,
        given.group,
        given.trajectory,
        given.tool_step,
        coefficient=_number(settings, "turn_coef"),
        valid=given.valid,
    )


def _istar(given: CreditInput, settings: Settings) -> Tensor:
    beta = _number(settings, "beta")
    valid = given.valid[given.trajectory]
    rewards = steps.istar_step_rewards(_given(given.log_ratio), given.step_lengths, beta=beta, valid=valid)
    estimator: Any = settings["estimator"]
    return steps.istar(
        given.returns,
        rewards,
        given.trajectory,
        given.group,
        # Before the first pair the reward model is the policy itself and has nothing to say.
        alpha=_number(settings, "alpha") if given.learned else 0.0,
        estimator=estimator,
        floor=_number(settings, "floor"),
        valid=given.valid,
    )


def _prime(given: CreditInput, settings: Settings) -> Credited:
    advantages = steps.prime(
        _given(given.log_ratio),
        given.returns,
        given.lengths,
        given.group,
        beta=_number(settings, "beta"),
        weight=_number(settings, "alpha") if given.learned else 0.0,
        valid=given.valid,
    )
    return Credited(values.whiten(advantages, given.lengths, valid=given.valid))


def _utterance(given: CreditInput, settings: Settings) -> Credited:
    """The critic's A = min Q - min V of each turn, given in ``values`` on each of its tokens."""
    return Credited(torch.where(given.valid.repeat_interleave(given.lengths), _given(given.values), 0.0))


def _distill(given: CreditInput, settings: Settings) -> Credited:
    limit = _number(settings, "limit")
    advantages = distillation_advantages(given.behaviour, _given(given.teacher), limit=limit)
    return Credited(torch.where(given.valid.repeat_interleave(given.lengths), advantages, 0.0))


def _texts(anchor: object) -> tuple[object, ...]:
    return anchor if isinstance(anchor, tuple) else (anchor,)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the row's needs name what its credit reads"
    return tensor


# clips --------------------------------------------------------------------------------------------


def _ppo_clip(settings: Settings) -> Clip:
    dual = float(settings.get("dual", 0.0))
    return Clip.ppo(_number(settings, "clip_low"), _number(settings, "clip_high"), dual or None)


def _cispo_clip(settings: Settings) -> Clip:
    return Clip.cispo(_number(settings, "clip_high"))


def _sapo_clip(settings: Settings) -> Clip:
    return Clip.sapo(_number(settings, "tau_pos"), _number(settings, "tau_neg"))


def _dppo_clip(settings: Settings) -> Clip:
    return Clip.dppo(_number(settings, "delta"))


_CLIP: Settings = {"clip_low": 0.2, "clip_high": 0.2, "dual": 0.0}
_EPS: Settings = {"eps": 1e-6}
_CRITIC: Settings = {"bootstrap": "none", "value_clip": 0.5, "value_lr": 1e-4, "value_warmup": 0}


def _rl(name: str, summary: str, source: str, when: str, credit: Credit, **rest: Any) -> Algorithm:
    """A policy-gradient row: the common settings with the row's own on top."""
    own: Settings = rest.pop("settings", {})
    return Algorithm(name, summary, source, when, "rl", credit, settings={**COMMON, **own}, **rest)


_RL = (
    _rl(
        "reinforce",
        "the return minus a fixed baseline",
        "Williams 1992",
        "a plain yardstick is wanted",
        _each(_reinforce),
        settings={"baseline": 0.0},
        formula="A = r - baseline",
    ),
    _rl(
        "rloo",
        "the other members' mean as baseline",
        "Back to basics, arXiv 2402.14740",
        "small groups, one update a batch, rewards whose scale means something",
        _each(_rloo),
        aggregate="sequence_mean",
        formula="A = r - mean of the others = n / (n - 1) (r - mean)",
    ),
    _rl(
        "grpo",
        "group mean and standard deviation as baseline and scale",
        "DeepSeekMath, arXiv 2402.03300",
        "the default of the field; verified rewards that are 0 or 1, without a price",
        _group("std"),
        clip=_ppo_clip,
        settings={**_CLIP, **_EPS},
        aggregate="sequence_mean",
        formula="A = (r - mean) / (std + eps)",
    ),
    _rl(
        "dr_grpo",
        "GRPO without the scale by the standard deviation and with a constant length",
        "Understanding R1-Zero-like training, arXiv 2503.20783",
        "small differences, like a price, must stay small, or wrong answers grow longer",
        _group("none"),
        clip=_ppo_clip,
        settings={**_CLIP, "max_length": 256},
        aggregate="constant",
        formula="A = r - mean",
    ),
    _rl(
        "dapo",
        "GRPO with clip-higher, a token mean and no dead groups",
        "DAPO, arXiv 2503.14476",
        "many groups are all right or all wrong, and episodes are cheap",
        _group("std"),
        clip=_ppo_clip,
        settings={"clip_low": 0.2, "clip_high": 0.28, **_EPS, "filter": "dynamic"},
        formula="A = (r - mean) / (std + eps), groups that differ only",
    ),
    _rl(
        "gspo",
        "GRPO's credit with one ratio a sequence",
        "arXiv 2507.18071",
        "mixtures of experts, or several updates a batch on long answers",
        _group("std"),
        clip=_ppo_clip,
        settings={"clip_low": 3e-4, "clip_high": 4e-4, **_EPS},
        ratio="sequence",
        aggregate="sequence_mean",
        formula="A as grpo; ratio = exp(mean log-ratio of the episode)",
    ),
    _rl(
        "cispo",
        "a clipped, detached ratio as weight, so that no token loses its gradient",
        "MiniMax-M1, arXiv 2506.13585",
        "off-policy updates in which rare tokens matter",
        _group("std"),
        clip=_cispo_clip,
        settings={"clip_high": 5.0, **_EPS},
        formula="A as grpo; L = -sg(min(ratio, clip_high)) A log p",
    ),
    _rl(
        "gmpo",
        "the geometric mean of clipped token ratios",
        "arXiv 2507.20673",
        "outlier ratios unsettle training",
        _group("std"),
        clip=_ppo_clip,
        settings={"clip_low": 0.4, "clip_high": 0.4, **_EPS},
        ratio="geometric",
        aggregate="sequence_mean",
        formula="A as grpo; ratio = exp(mean of the episode's clipped log-ratios)",
    ),
    _rl(
        "sapo",
        "a smooth gate in place of the clip",
        "arXiv 2511.20347",
        "hard clipping throws away too much of an off-policy batch",
        _group("std"),
        clip=_sapo_clip,
        settings={"tau_pos": 1.0, "tau_neg": 1.05, **_EPS},
        aggregate="sequence_mean",
        formula="A as grpo; L = -(4 / tau) sigmoid(tau (ratio - 1)) A",
    ),
    _rl(
        "dppo",
        "tokens whose probability has moved too far are dropped; no clip",
        "prime-rl",
        "asynchronous training with a sampler of another precision",
        _group("none"),
        clip=_dppo_clip,
        settings={"delta": 0.2},
        formula="A = r - mean; L = -A ratio, 0 where A has moved p by more than delta",
    ),
    _rl(
        "reinforce_pp",
        "the return whitened over all tokens of the batch",
        "REINFORCE++, arXiv 2501.03262",
        "many prompts, few samples of each",
        _each(_reinforce_pp),
        clip=_ppo_clip,
        settings=_CLIP,
        formula="A = whiten(r)",
    ),
    _rl(
        "reinforce_pp_baseline",
        "group mean subtracted, then whitened over the batch's tokens",
        "REINFORCE++, arXiv 2501.03262",
        "groups whose spreads differ much",
        _each(_reinforce_pp_baseline),
        clip=_ppo_clip,
        settings=_CLIP,
        formula="A = whiten(r - mean)",
    ),
    _rl(
        "opo",
        "length-weighted group mean as baseline",
        "On-policy RL with optimal baseline, arXiv 2505.23585",
        "strictly on-policy training with answers of very different lengths",
        _each(_opo),
        formula="A = r - sum(l r) / sum(l)",
    ),
    _rl(
        "remax",
        "the greedy rollout's return as baseline",
        "arXiv 2310.10505",
        "small groups, and the greedy answer is a fair measure of a task",
        _each(_remax),
        needs=frozenset({"greedy"}),
        formula="A = r - r(greedy)",
    ),
    _rl(
        "pass_at_k",
        "only the best member of a group, by its lead over the second best",
        "arXiv 2503.19595",
        "the agent will be asked several times and its best answer kept",
        _each(_pass_at_k),
        formula="A = r - r(second best) for the best, else 0",
    ),
    _rl(
        "ragen",
        "GRPO on the quarter of groups whose returns differ most",
        "StarPO-S of RAGEN, arXiv 2504.20073",
        "multi-turn training that collapses into repeated answers",
        _group("std"),
        clip=_ppo_clip,
        settings={"clip_low": 0.2, "clip_high": 0.28, **_EPS, "filter": "variance"},
        formula="A as grpo, the groups of largest std only",
    ),
    _rl(
        "grpo_roc",
        "twice the samples, of which the cleanest successes are kept",
        "rStar2-Agent, arXiv 2508.20722",
        "tool errors survive inside successful episodes",
        _group("std"),
        clip=_ppo_clip,
        settings={"clip_low": 0.2, "clip_high": 0.28, **_EPS, "filter": "roc"},
        formula="A as grpo, on the half of a group that is kept",
    ),
    _rl(
        "dupo",
        "dead groups are replaced by copies of live ones",
        "WebSailor, arXiv 2507.02592",
        "as dapo, where episodes are dear",
        _group("std"),
        clip=_ppo_clip,
        settings={"clip_low": 0.2, "clip_high": 0.28, **_EPS, "filter": "duplicate"},
        formula="A as grpo, live groups in the place of dead ones",
    ),
    _rl(
        "prorl",
        "DAPO with a KL to a reference that is reset from time to time",
        "ProRL, arXiv 2505.24864",
        "long runs that stop improving near the start policy",
        _group("std"),
        clip=_ppo_clip,
        settings={
            "clip_low": 0.2,
            "clip_high": 0.4,
            **_EPS,
            "filter": "dynamic",
            "kl_coef": 1e-3,
            "kl_kind": "k2",
            "kl_reset_every": 200,
        },
        formula="A as grpo; L + kl_coef KL(policy, reference)",
    ),
    _rl(
        "areal",
        "GRPO on stale samples: the trust region and the sampler are kept apart",
        "AReaL, arXiv 2505.24298",
        "sampling runs ahead of training",
        _group("std"),
        clip=_ppo_clip,
        settings={**_CLIP, **_EPS, "correction": "tis", "correction_cap": 5.0, "staleness": 4},
        formula="A as grpo; L = min(p_start / p_sampler, cap) clip(p / p_start)",
    ),
    _rl(
        "ppo",
        "token-level GAE with a value head on the policy's trunk",
        "arXiv 1707.06347, 1506.02438",
        "rewards come inside the episode, or few episodes of each task can be had",
        _gae,
        clip=_ppo_clip,
        settings={**_CLIP, "gamma": 1.0, "lam": 1.0, "lam_alpha": 0.0, **_CRITIC},
        needs=frozenset({"critic"}),
        formula="A = whiten(sum_k (gamma lam)^k delta_(t+k))",
    ),
    _rl(
        "turn_ppo",
        "GAE over turns, one value a turn",
        "RAGEN, arXiv 2504.20073",
        "long episodes in which a turn is the decision",
        _turn_gae,
        clip=_ppo_clip,
        settings={**_CLIP, "gamma": 1.0, "lam": 1.0, **_CRITIC},
        needs=frozenset({"critic"}),
        formula="A = whiten(sum_k (gamma lam)^k delta_(t+k)), t counts turns",
    ),
    _rl(
        "bilevel_ppo",
        "GAE over turns, then over the tokens inside each turn",
        "bi-level GAE of VAGEN, arXiv 2510.16907",
        "long episodes of long turns: the return must reach a turn, and inside it a token",
        _bilevel_gae,
        clip=_ppo_clip,
        settings={**_CLIP, "gamma": 0.95, "lam": 1.0, "token_gamma": 1.0, "token_lam": 1.0, **_CRITIC},
        needs=frozenset({"critic"}),
        formula="A = whiten(GAE of a turn's tokens), whose last one is paid A_turn + V, "
        "A_turn = sum_k (gamma lam)^k delta_(t+k), t counts turns",
    ),
    _rl(
        "vapo",
        "PPO with clip-higher, a lambda that grows with length and a warmed-up critic",
        "arXiv 2504.05118",
        "long answers with a reward at the end",
        _gae,
        clip=_ppo_clip,
        settings={
            "clip_low": 0.2,
            "clip_high": 0.28,
            "gamma": 1.0,
            "lam_alpha": 0.05,
            **_CRITIC,
            "value_warmup": 5,
        },
        needs=frozenset({"critic"}),
        formula="A as ppo; lam = 1 - 1 / (lam_alpha l)",
    ),
    _rl(
        "archer",
        "an utterance-level critic, double Q and V, fitted to each step's turns",
        "ArCHer, arXiv 2402.19446",
        "many turns, rewards late, episodes dear",
        _utterance,
        settings={
            "gamma": 0.9,
            "value_lr": 1e-3,
            "critic_epochs": 50,
            "polyak": 0.1,
            "replay": 0,
            "value_warmup": 0,
        },
        needs=frozenset({"utterance_critic"}),
        formula="A = min Q(state, turn) - min V(state)",
    ),
    _rl(
        "gigpo",
        "GRPO plus a comparison of the steps that start from the same state",
        "arXiv 2505.10978",
        "environments that revisit states: rooms, pages, retries",
        _per_step(_gigpo),
        clip=_ppo_clip,
        settings={**_CLIP, "gamma": 0.95, "omega": 1.0, "anchor": "hash", "step_scale": "none"},
        formula="A = (r - mean) + omega (R_k - mean of R from the same state)",
    ),
    _rl(
        "step_grpo",
        "explicit step rewards, return-to-go against the same step of the group",
        "arXiv 2402.03300, process supervision",
        "the environment itself rewards steps, and that reward is verified",
        _per_step(_step_relative),
        clip=_ppo_clip,
        settings={**_CLIP, "gamma": 1.0, "step_scale": "std"},
        formula="A_k = (R_k - mean_k) / (std_k + eps), over the group's steps number k",
    ),
    _rl(
        "mt_grpo",
        "tokens up to the first tool result also earn the tool's use",
        "arXiv 2505.11821",
        "one tool turn and one answer turn",
        _per_step(_mt_grpo),
        clip=_ppo_clip,
        settings={**_CLIP, "turn_coef": 1.0},
        aggregate="sequence_mean",
        formula="A = A_outcome + turn_coef A_tool up to the first tool result, then A_outcome",
    ),
    _rl(
        "m_grpo",
        "GRPO whose loss weighs every turn alike",
        "WebAgent-R1, arXiv 2505.16421",
        "turns of very different lengths",
        _group("std"),
        clip=_ppo_clip,
        settings={**_CLIP, **_EPS},
        aggregate="turn_mean",
        formula="A as grpo; L = mean over turns of the mean over tokens",
    ),
    _rl(
        "istar",
        "step rewards from an implicit reward model, added as advantages",
        "arXiv 2509.19199",
        "long episodes with one outcome, under a tight trust region",
        _per_step(_istar),
        clip=_ppo_clip,
        settings={
            **_CLIP,
            "beta": 0.05,
            "alpha": 1.0,
            "estimator": "std",
            "floor": 1e-4,
            "implicit_lr": 1e-6,
        },
        needs=frozenset({"implicit"}),
        learn="pairs",
        formula="A_k = A_outcome + alpha A_step, r_k = beta sum log(p_phi / p_old)",
    ),
    _rl(
        "prime",
        "token rewards from an implicit reward model trained by cross-entropy",
        "arXiv 2502.01456",
        "single-turn reasoning with one outcome",
        _prime,
        clip=_ppo_clip,
        settings={**_CLIP, "beta": 0.05, "alpha": 1.0, "implicit_lr": 1e-6},
        needs=frozenset({"implicit"}),
        learn="outcomes",
        formula="A_t = whiten(r - mean of the others + alpha sum_(s>=t) (beta q_s - b))",
    ),
    _rl(
        "distill",
        "a teacher's log-probs on the student's own tokens",
        "On-policy distillation, arXiv 2306.13649",
        "a stronger model with the same tokenizer is at hand",
        _distill,
        settings={"limit": 5.0},
        needs=frozenset({"teacher"}),
        formula="A_t = log p_teacher - log p_old, within +-limit",
    ),
    Algorithm(
        "online_dpo",
        "pairs from the policy's own groups: correct first, then fewer calls, then shorter",
        "arXiv 2402.04792, WebThinker 2504.21776",
        "ranks are easier to trust than scores",
        settings={**PREFERENCES["dpo"].settings, "pairs": 4},
        needs=frozenset({"reference"}),
        formula="-log sigmoid(beta d)",
        pair_loss="dpo",
    ),
    Algorithm(
        "sweet_rl",
        "turns ranked by a critic that reads what the policy never sees",
        "SWEET-RL, arXiv 2503.15478",
        "something about a task is known in training only: its answer, a hidden state",
        settings={
            "candidates": 16,
            "pairs": 4,
            "beta": 0.1,
            "alpha": 0.01,
            "privileged": "given",
            "critic_beta": 0.1,
            "critic_epochs": 4,
            "value_lr": 2e-7,
            "value_warmup": 0,
        },
        needs=frozenset({"reference", "turn_critic"}),
        formula="-log sigmoid(beta d) + alpha nll of a turn, d between turns that A ranks; "
        "A = mean log p_critic - mean log p_reference, both given the privileged text",
        pair_loss="rpo",
    ),
)

_SFT = (
    Algorithm(
        "sft",
        "cross-entropy of the agent's own tokens in demonstrations",
        "-",
        "the form of a call must be known before it can be rewarded",
        "sft",
        learn="demonstrations",
        formula="L = -mean log p",
    ),
    Algorithm(
        "rft",
        "cross-entropy on the policy's own solved episodes, without copies",
        "RFT, arXiv 2308.01825; STaR, arXiv 2203.14465",
        "no oracle, and the policy already solves some tasks",
        "sft",
        settings={"samples": 8, "per_task": 2},
        learn="solved",
        formula="L = -mean log p over solved episodes",
    ),
    Algorithm(
        "reward_weighted",
        "cross-entropy on the policy's own episodes, weighed by how good they were",
        "AWR, arXiv 1910.00177",
        "graded rewards and no taste for negative gradients",
        "sft",
        settings={"samples": 8, "beta": 1.0, "cap": 20.0},
        learn="weighted",
        formula="L = -mean w log p, w ~ min(exp((r - mean) / beta), cap)",
    ),
)

# name: (formula, when)
_PAIRED: Mapping[str, tuple[str, str]] = {
    "dpo": ("-log sigmoid(beta d)", "the plain choice, for pairs of this policy or one close to it"),
    "ipo": ("(d - 1 / (2 beta))^2", "few pairs seen often, on which DPO would grow its lead without end"),
    "hinge": ("max(0, 1 - beta d)", "pairs that are in order by enough should be left alone"),
    "dmpo": (
        "-log sigmoid(beta d), turn t weighs gamma^t (1 - gamma^(T-t)) / (1 - gamma^T)",
        "long episodes, whose late turns are the noisier part of a pair",
    ),
    "ld_dpo": (
        "-log sigmoid(beta d), tokens beyond min(l+, l-) weigh alpha",
        "the longer episode must not win or lose by its length alone",
    ),
    "rpo": ("-log sigmoid(beta d) + alpha nll", "under DPO the chosen episodes grow less likely too"),
    "cpo": ("-log sigmoid(beta (log p+ - log p-)) + alpha nll", "there is no memory for a reference"),
    "simpo": (
        "-log sigmoid(beta (log p+ / l+ - log p- / l-) - gamma)",
        "no reference, and length must not decide",
    ),
    "orpo": ("nll - odds_weight log sigmoid(log odds+ - log odds-)", "no supervised stage came before"),
    "kto": ("sigmoid(beta (z - d+)), sigmoid(beta (d- - z))", "a pair's two sides are better judged alone"),
}
_PREFERENCE = tuple(
    Algorithm(
        row.name,
        row.summary,
        row.source,
        _PAIRED[row.name][1],
        "preference",
        settings=row.settings,
        needs=frozenset({"reference"}) if row.reference else frozenset(),
        formula=_PAIRED[row.name][0],
    )
    for row in PREFERENCES.values()
)
_SCORES = (
    Algorithm(
        "reward_model",
        "a linear head on a copy of the policy, whose score puts the pairs in order; the policy stays",
        "Bradley and Terry 1952; InstructGPT, arXiv 2203.02155",
        "a later run wants an opinion where its verified reward makes no difference",
        "preference",
        settings={"margin": 0.0, "center": 0.0, "held_out": 0.2},
        needs=frozenset({"scorer"}),
        formula="-log sigmoid(s+ - s- - margin (r+ - r-)) + center (s+ + s-)^2",
        learn="scores",
    ),
)

ALGORITHMS: Mapping[str, Algorithm] = {row.name: row for row in (*_RL, *_PREFERENCE, *_SCORES, *_SFT)}


def algorithm(name: str, settings: Settings, *, kind: Kind = "rl") -> Algorithm:
    """The row of ``name`` for a stage of ``kind``, with overrides.

    Raises ConfigError that names the nearest row or setting.
    """
    fitting = {key: row for key, row in ALGORITHMS.items() if row.kind == kind}
    if name in ALGORITHMS and name not in fitting:
        raise ConfigError(
            f"algorithm {name!r} belongs to a stage of kind {ALGORITHMS[name].kind!r}, not {kind!r}"
        )
    if name not in fitting:
        raise ConfigError(f"algorithm {name!r} does not exist; {nearest(name, fitting)}")
    return fitting[name].with_settings(settings)

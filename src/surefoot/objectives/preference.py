"""Losses on preferred and less preferred trajectories, and how such pairs are made from a group.

Pure functions on flat tensors. They know nothing of models, padding or micro-batches: a log-probability here
is the sum over the sampled tokens of *all* turns of a trajectory, observations left out.

Log-probabilities are natural, float ``[P]``; all arithmetic is float64 and stays finite for any finite
float32. Gradients go through the policy's log-probabilities (or rewards) only. ``weights`` float ``[P]`` are
those of the *global* batch, e.g. 1 / pairs, so that loss = sum(weights * l) however the batch is split. A bad
tensor raises ``DataError`` naming the field, an impossible option ``ConfigError``.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from surefoot.core.checks import require_finite, require_fraction, require_option, require_positive, shape_of
from surefoot.core.errors import ConfigError, DataError, nearest
from surefoot.core.seeds import derive
from surefoot.objectives.policy_gradient import token_tensor

Form = Literal["sum", "mean"]
Settings = Mapping[str, float | int | str]

CERTAINTY_LIMIT = 1e-7
"""A log-probability above -1e-7 counts as -1e-7 where 1 - p is needed; closer to 1 float32 cannot tell."""

_ROUNDING = 1e-3  # how far above 0 a sum of log-probabilities may lie


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """``P`` pairs of trajectories of the same task.

    ``chosen, rejected``: log-probabilities float ``[P]``, with gradient. ``chosen_ref, rejected_ref``: those
    of the reference policy. ``chosen_length, rejected_length``: sampled tokens int ``[P]``, at least 1. A
    loss names the field that it misses.
    """

    chosen: Tensor
    rejected: Tensor
    weights: Tensor
    chosen_ref: Tensor | None = None
    rejected_ref: Tensor | None = None
    chosen_length: Tensor | None = None
    rejected_length: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected", "chosen_ref", "rejected_ref"):
            if getattr(self, name) is not None:
                _log_probability(name, getattr(self, name), like=self.chosen)
        _check_weights(self.weights, like=self.chosen)
        for name in ("chosen_length", "rejected_length"):
            if getattr(self, name) is not None:
                _check_lengths(name, getattr(self, name), like=self.chosen)

    def log_ratios(self, form: Form) -> tuple[Tensor, Tensor]:
        """log(policy / reference) of chosen and rejected, float64 ``[P]``, as sum or mean over tokens."""
        require_option("form", form, get_args(Form))
        good = self.chosen.double() - self._given("chosen_ref").detach().double()
        bad = self.rejected.double() - self._given("rejected_ref").detach().double()
        if form == "sum":
            return good, bad
        return good / self._given("chosen_length"), bad / self._given("rejected_length")

    def means(self) -> tuple[Tensor, Tensor]:
        """Log-probability per token of chosen and rejected, float64 ``[P]``."""
        return (
            self.chosen.double() / self._given("chosen_length"),
            self.rejected.double() / self._given("rejected_length"),
        )

    def _given(self, name: str) -> Tensor:
        tensor = cast("Tensor | None", getattr(self, name))
        if tensor is None:
            raise DataError(f"{name} is missing; this loss needs it")
        return tensor


@dataclass(frozen=True, slots=True, eq=False)
class Unpaired:
    """``P`` trajectories, each good or bad by itself.

    ``logp`` float ``[P]`` with gradient, ``ref`` float ``[P]`` of the reference policy, ``desirable`` bool
    ``[P]``, and ``z`` a scalar from ``kto_baseline`` over the global batch, or 0 for no baseline.
    """

    logp: Tensor
    ref: Tensor
    desirable: Tensor
    weights: Tensor
    z: Tensor

    def __post_init__(self) -> None:
        _log_probability("logp", self.logp, like=self.logp)
        _log_probability("ref", self.ref, like=self.logp)
        check_flags("desirable", self.desirable, like=self.logp)
        _check_weights(self.weights, like=self.logp)
        if self.z.ndim != 0 or not 0 <= float(self.z.detach()) < math.inf:
            raise DataError(f"z must be a finite scalar >= 0, got {self.z.tolist()}")


Preferences = Pairs | Unpaired


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceLoss:
    """Scalars (float64) that add up over micro-batches.

    ``loss`` carries the gradient; the others are detached weighted sums. ``chosen`` over ``chosen_weight`` is
    the mean implicit reward of the preferred trajectories, ``rejected`` over ``rejected_weight`` that of the
    others; ``accuracy`` over ``weight`` is the share put in the right order (a tie counts half); ``nll`` over
    ``weight`` is the chosen's negative log-likelihood per token (0 where the loss has no such term).
    """

    loss: Tensor
    accuracy: Tensor
    chosen: Tensor
    rejected: Tensor
    nll: Tensor
    weight: Tensor
    chosen_weight: Tensor
    rejected_weight: Tensor


def dpo(
    pairs: Pairs, *, beta: float = 0.1, form: Form = "sum", label_smoothing: float = 0.0
) -> PreferenceLoss:
    """-log sigmoid(beta d), d the difference of the log-ratios (DPO, arXiv 2305.18290).

    ``form="mean"`` takes log-ratios per token, so that length decides nothing. ``label_smoothing`` e < 1/2,
    the share of labels thought wrong: (1 - e) l(d) + e l(-d).
    """
    require_positive("beta", beta)
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    good, bad = pairs.log_ratios(form)
    x = beta * (good - bad)
    loss = -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)
    return _paired(pairs.weights, loss, beta * good, beta * bad)


def ipo(pairs: Pairs, *, beta: float = 0.1, form: Form = "mean") -> PreferenceLoss:
    """(d - 1 / (2 beta))^2, log-ratios per token or, with ``form="sum"``, summed (IPO, arXiv 2310.12036)."""
    require_positive("beta", beta)
    good, bad = pairs.log_ratios(form)
    return _paired(pairs.weights, (good - bad - 1 / (2 * beta)).square(), beta * good, beta * bad)


def hinge(pairs: Pairs, *, beta: float = 0.1) -> PreferenceLoss:
    """max(0, 1 - beta d) (SLiC, arXiv 2305.10425, with the log-ratios of DPO)."""
    require_positive("beta", beta)
    good, bad = pairs.log_ratios("sum")
    return _paired(pairs.weights, (1 - beta * (good - bad)).relu(), beta * good, beta * bad)


def rpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 1.0) -> PreferenceLoss:
    """DPO plus ``alpha`` times the chosen's NLL per token (iterative RPO, arXiv 2404.19733)."""
    check_not_negative("alpha", alpha)
    require_positive("beta", beta)
    good, bad = pairs.log_ratios("sum")
    nll = -pairs.means()[0]
    loss = -logsigmoid(beta * (good - bad)) + alpha * nll
    return _paired(pairs.weights, loss, beta * good, beta * bad, nll)


def cpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 1.0) -> PreferenceLoss:
    """-log sigmoid(beta (logp+ - logp-)) + ``alpha`` NLL of the chosen per token (CPO, arXiv 2401.08417)."""
    check_not_negative("alpha", alpha)
    require_positive("beta", beta)
    good, bad = beta * pairs.chosen.double(), beta * pairs.rejected.double()
    nll = -pairs.means()[0]
    return _paired(pairs.weights, -logsigmoid(good - bad) + alpha * nll, good, bad, nll)


def simpo(pairs: Pairs, *, beta: float = 2.5, gamma: float = 1.375) -> PreferenceLoss:
    """-log sigmoid(beta (mean logp+ - mean logp-) - gamma), means per token (SimPO, arXiv 2405.14734)."""
    require_positive("beta", beta)
    check_not_negative("gamma", gamma)
    good, bad = pairs.means()
    return _paired(pairs.weights, -logsigmoid(beta * (good - bad) - gamma), beta * good, beta * bad)


def orpo(pairs: Pairs, *, odds_weight: float = 0.1) -> PreferenceLoss:
    """NLL of the chosen per token - ``odds_weight`` log sigmoid(log odds ratio) (ORPO, arXiv 2403.07691).

    Odds p / (1 - p) of the probability per token (geometric mean); see ``CERTAINTY_LIMIT``.
    """
    check_not_negative("odds_weight", odds_weight)
    good, bad = (mean - log_one_minus_exp(mean) for mean in pairs.means())
    nll = -pairs.means()[0]
    return _paired(pairs.weights, nll - odds_weight * logsigmoid(good - bad), good, bad, nll)


def kto(
    rows: Unpaired, *, beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0
) -> PreferenceLoss:
    """``desirable`` sigmoid(beta (z - r)) on good rows, ``undesirable`` sigmoid(beta (r - z)) on bad ones.

    r is the log-ratio (KTO, arXiv 2402.01306). The paper keeps ``desirable`` n_good / (``undesirable`` n_bad)
    in [1, 4/3]. A row counts as right if r is on its side of z.
    """
    for name, value in (("beta", beta), ("desirable", desirable), ("undesirable", undesirable)):
        require_positive(name, value)
    ratio = rows.logp.double() - rows.ref.detach().double()
    ahead = ratio - rows.z.detach().double()
    good = rows.desirable.double()
    value = desirable * good * torch.sigmoid(-beta * ahead)
    value = value + undesirable * (1 - good) * torch.sigmoid(beta * ahead)
    weight, reward = rows.weights.detach().double(), beta * ratio.detach()
    right = _right(ahead.detach() * (2 * good - 1))
    return PreferenceLoss(
        loss=(weight * value).sum(),
        accuracy=(weight * right).sum(),
        chosen=(weight * good * reward).sum(),
        rejected=(weight * (1 - good) * reward).sum(),
        nll=weight.new_zeros(()),
        weight=weight.sum(),
        chosen_weight=(weight * good).sum(),
        rejected_weight=(weight * (1 - good)).sum(),
    )


def kto_baseline(logp: Tensor, ref: Tensor) -> Tensor:
    """z = max(0, mean log-ratio), a detached float64 scalar: the KL estimate of KTO.

    ``logp, ref`` float ``[n]`` are of trajectories read after the *wrong* task, over the global batch.
    """
    if logp.numel() == 0:
        raise DataError("logp is empty; the KL estimate needs at least one mismatched pair")
    policy = _log_probability("logp", logp, like=logp)
    return (policy - _log_probability("ref", ref, like=logp)).detach().mean().clamp(min=0)


def bradley_terry(
    reward_chosen: Tensor,
    reward_rejected: Tensor,
    *,
    weights: Tensor,
    margin: float | Tensor = 0.0,
    center: float = 0.0,
) -> PreferenceLoss:
    """-log sigmoid(r+ - r- - margin) + ``center`` (r+ + r-)^2, the loss of a reward model.

    ``reward_chosen, reward_rejected`` float ``[P]`` with gradient. ``margin`` one number or float ``[P]``: by
    how much the chosen should lead (Llama 2, arXiv 2307.09288). ``center`` > 0 holds the mean reward of a
    pair near 0, which its order leaves open (arXiv 2312.09244).
    """
    check_not_negative("center", center)
    good = token_tensor("reward_chosen", reward_chosen)
    bad = token_tensor("reward_rejected", reward_rejected, like=reward_chosen)
    _check_weights(weights, like=reward_chosen)
    if isinstance(margin, Tensor):
        lead = token_tensor("margin", margin, like=reward_chosen).detach()
    else:
        require_finite("margin", margin)
        lead = torch.full_like(good, margin).detach()
    loss = -logsigmoid(good - bad - lead) + center * (good + bad).square()
    return _paired(weights, loss, good, bad)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The lengths of one side of ``P`` pairs.

    ``lengths, other_lengths`` int ``[P]``: sampled tokens of this side of each pair and of the other;
    ``turn_lengths`` int ``[K]``: tokens of the turns of this side, pair after pair; ``turns`` int ``[P]``:
    turns of each.
    """

    lengths: Tensor
    other_lengths: Tensor
    turn_lengths: Tensor
    turns: Tensor


def _early_turns(side: Side, *, gamma: float = 0.7) -> Tensor:
    return turn_discounts(side.turn_lengths, side.turns, gamma=gamma)


def _shared_length(side: Side, *, alpha: float = 0.5) -> Tensor:
    return excess_discounts(side.lengths, side.other_lengths, alpha=alpha)


@dataclass(frozen=True, slots=True)
class Preference:
    """One row of the table. ``settings`` holds the paper's values of everything a recipe may override.

    ``loss`` takes ``Unpaired`` where ``paired`` is False, else ``Pairs``, and the settings as keywords.
    ``reference`` says whether log-probabilities of a reference policy are needed. ``discount`` gives the
    weights of a side's tokens in its sums, from a ``Side`` and its own settings as keywords.
    """

    name: str
    summary: str
    source: str
    loss: Callable[..., PreferenceLoss]
    reference: bool = True
    paired: bool = True
    settings: Settings = field(default_factory=lambda: {})
    discount: Callable[..., Tensor] | None = None

    def token_weights(self, side: Side) -> Tensor | None:
        """float64 ``[N]``: what the tokens of ``side`` weigh in its log-probabilities; None: all alike."""
        return None if self.discount is None else self.discount(side, **self._keywords(self.discount))

    def _keywords(self, function: Callable[..., Any]) -> Settings:
        return {key: self.settings[key] for key in _defaults(function)}

    def __call__(self, data: Preferences) -> PreferenceLoss:
        """The loss under the row's settings. Raises DataError for rows of the wrong kind."""
        if isinstance(data, Pairs) != self.paired:
            wanted = Pairs if self.paired else Unpaired
            raise DataError(f"{self.name!r} takes {wanted.__name__}, got {type(data).__name__}")
        return self.loss(data, **self._keywords(self.loss))

    def with_settings(self, chosen: Settings) -> Preference:
        """The row with ``chosen`` in place of its own. Raises ConfigError for an ignored or bad value."""
        for key, value in chosen.items():
            if key not in self.settings:
                raise ConfigError(
                    f"settings.{key} has no effect on loss {self.name!r}; {nearest(key, self.settings)}"
                )
            own = self.settings[key]
            if isinstance(value, bool) or isinstance(own, str) != isinstance(value, str):
                raise ConfigError(f"settings.{key} = {value!r}; it must be a value like {own!r}")
        row = replace(self, settings={**self.settings, **chosen})
        row(_probe(self.paired))  # a loss checks its own ranges, and so does a discount
        one = torch.ones(1, dtype=torch.int64)
        row.token_weights(Side(one, one, one, one))
        return row


def _row(
    name: str, summary: str, source: str, loss: Callable[..., PreferenceLoss], **options: Any
) -> Preference:
    """A table row whose settings are the keyword defaults of its functions: they are written once."""
    discount: Callable[..., Tensor] | None = options.get("discount")
    settings = _defaults(loss) | ({} if discount is None else _defaults(discount))
    return Preference(name, summary, source, loss, settings=settings, **options)


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of the keyword-only parameters of ``function``."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


_ROWS = (
    _row("dpo", "logistic loss on the difference of log-ratios", "arXiv 2305.18290", dpo),
    _row("ipo", "squared distance of that difference from a fixed lead", "arXiv 2310.12036", ipo),
    _row("hinge", "hinge loss on the difference of log-ratios", "SLiC, arXiv 2305.10425", hinge),
    _row("dmpo", "DPO whose early turns count more", "arXiv 2406.14868", dpo, discount=_early_turns),
    _row(
        "ld_dpo",
        "DPO in which tokens beyond the shorter one's length count less",
        "arXiv 2409.06411",
        dpo,
        discount=_shared_length,
    ),
    _row("rpo", "DPO plus the chosen's likelihood", "iterative RPO, arXiv 2404.19733", rpo),
    _row("cpo", "DPO without reference, plus likelihood", "arXiv 2401.08417", cpo, reference=False),
    _row("simpo", "likelihood per token with a margin", "arXiv 2405.14734", simpo, reference=False),
    _row("orpo", "likelihood plus the log odds ratio", "arXiv 2403.07691", orpo, reference=False),
    _row("kto", "good and bad trajectories without pairs", "arXiv 2402.01306", kto, paired=False),
)

PREFERENCES: Mapping[str, Preference] = {row.name: row for row in _ROWS}


def preference(name: str, settings: Settings) -> Preference:
    """The row of ``name`` with overrides. Raises ConfigError that names the nearest row or setting."""
    require_option("loss", name, PREFERENCES)
    return PREFERENCES[name].with_settings(settings)


def pairs_by_rule(
    correct: Tensor,
    calls: Tensor,
    lengths: Tensor,
    group: Tensor,
    valid: Tensor | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Rows int64 ``[P]`` of chosen and rejected trajectories, after the order of WebThinker (2504.21776).

    Of two members of a group the correct one is better, then the one with fewer tool ``calls``, then the one
    of fewer tokens (``lengths``); equal ones make no pair. The chosen one is always correct: a wrong answer
    is not worth more because it came early. At most ``limit`` pairs of a group are drawn by ``seed``
    (``None``: all). ``correct, valid`` bool ``[n]``, ``calls, lengths, group`` int ``[n]``.
    """
    check_flags("correct", correct, like=correct)
    for name, tensor in (("calls", calls), ("lengths", lengths), ("group", group)):
        check_integers(name, tensor, like=correct, negative=name == "group")
    if valid is not None:
        check_flags("valid", valid, like=correct)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    members = torch.ones_like(correct) if valid is None else valid
    columns = (~correct, calls, lengths)
    keys = list(zip(*(cast("list[int]", column.tolist()) for column in columns), strict=True))
    chosen: list[tuple[int, int]] = []
    for name in sorted(set(cast("list[int]", group[members].tolist()))):
        rows = cast("list[int]", torch.nonzero(members & (group == name))[:, 0].tolist())
        found = [(a, b) for a, b in product(rows, rows) if not keys[a][0] and keys[a] < keys[b]]
        if limit is not None and limit < len(found):
            found = sorted(random.Random(derive("pairs_by_rule", seed, name)).sample(found, limit))
        chosen += found
    table = torch.tensor(chosen, dtype=torch.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def pairs_by_score(
    score: Tensor, group: Tensor, *, limit: int, seed: int = 0, content: Sequence[object] | None = None
) -> tuple[Tensor, Tensor]:
    """Rows int64 ``[P]`` of chosen and rejected members of each group (SWEET-RL, arXiv 2503.15478).

    ``score`` float ``[n]``, ``group`` int ``[n]``. The chosen come from the better half of a group and the
    rejected from the worse; of an odd number the middle one is left out. Of all such pairs ``limit`` are
    drawn by ``seed``. Members of equal score or equal ``content`` (one entry each) make no pair.
    """
    values = cast("list[float]", token_tensor("score", score).detach().tolist())
    check_integers("group", group, like=score, negative=True)
    if limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    if content is not None and len(content) != len(values):
        raise DataError(f"content has {len(content)} entries for {len(values)} scores")
    members: dict[int, list[int]] = {}
    for row, name in enumerate(cast("list[int]", group.tolist())):
        members.setdefault(name, []).append(row)
    table: list[tuple[int, int]] = []
    for name, rows in sorted(members.items()):
        ranked = sorted(rows, key=lambda row: -values[row])
        half = len(ranked) // 2
        found = [
            (a, b)
            for a, b in product(ranked[:half], ranked[len(ranked) - half :])
            if values[a] > values[b] and (content is None or content[a] != content[b])
        ]
        if limit < len(found):
            found = random.Random(derive("pairs_by_score", seed, name)).sample(found, limit)
        table += sorted(found)
    pairs = torch.tensor(table, dtype=torch.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def trajectory_sums(logp: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of ``logp`` float ``[N]`` over each trajectory, float64 ``[n]``, with gradient.

    ``lengths`` int ``[n]``: sampled tokens per trajectory, one after the other. ``weights`` float ``[N]``
    multiply the tokens, e.g. ``turn_discounts``; a trajectory without tokens gives 0.
    """
    tokens = token_tensor("logp", logp)
    check_integers("lengths", lengths, like=lengths)
    if int(lengths.sum()) != tokens.numel():
        raise DataError(f"lengths add up to {int(lengths.sum())}; logp has {tokens.numel()} tokens")
    if weights is not None:
        tokens = tokens * token_tensor("weights", weights, like=logp).detach()
    index = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths.long())
    return tokens.new_zeros(lengths.numel()).index_add(0, index, tokens)


def turn_discounts(turn_lengths: Tensor, turns: Tensor, *, gamma: float) -> Tensor:
    """Token weights float64 ``[N]`` that count early turns more (DMPO, arXiv 2406.14868).

    Turn t = 0, 1, ... of a trajectory of T turns weighs gamma^t (1 - gamma^(T-t)) / (1 - gamma^T), and
    (T - t) / T in the limit gamma = 1. ``turn_lengths`` int ``[K]``: tokens of the turns of all trajectories
    one after the other; ``turns`` int ``[n]``: turns of each trajectory.
    """
    if not 0 < gamma <= 1:
        raise ConfigError(f"gamma must lie in (0, 1], got {gamma}")
    check_integers("turn_lengths", turn_lengths, like=turn_lengths)
    check_integers("turns", turns, like=turns)
    if int(turns.sum()) != turn_lengths.numel():
        raise DataError(f"turns add up to {int(turns.sum())}; turn_lengths has {turn_lengths.numel()}")
    total = turns.repeat_interleave(turns.long()).double()
    first = (turns.cumsum(0) - turns).repeat_interleave(turns.long())
    number = (torch.arange(total.numel(), device=turns.device) - first).double()
    if gamma == 1:
        weight = (total - number) / total
    else:
        rate = math.log(gamma)
        weight = (rate * number).exp() * torch.expm1(rate * (total - number)) / torch.expm1(rate * total)
    return weight.repeat_interleave(turn_lengths.long())


def excess_discounts(lengths: Tensor, other_lengths: Tensor, *, alpha: float) -> Tensor:
    """Token weights float64 ``[N]``: 1 up to the length of the pair's shorter one, ``alpha`` beyond (LD-DPO).

    ``lengths, other_lengths`` int ``[P]``: tokens of this side of each pair and of the other (arXiv
    2409.06411). ``alpha`` in [0, 1]; 1 is plain DPO.
    """
    require_fraction("alpha", alpha)
    check_integers("lengths", lengths, like=lengths)
    check_integers("other_lengths", other_lengths, like=lengths)
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths.long())
    number = torch.arange(first.numel(), device=lengths.device) - first
    shared = number < torch.minimum(lengths, other_lengths).repeat_interleave(lengths.long())
    return shared.double() + alpha * (~shared).double()


def log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of float64 x <= 0 without cancellation (Maechler 2012).

    Above -``CERTAINTY_LIMIT`` the value and slope at the limit stand, so that both stay finite and the
    gradient still points away from certainty.
    """
    bounded = x + (x.clamp(max=-CERTAINTY_LIMIT) - x).detach()
    near = bounded > -math.log(2)
    return torch.where(near, (-torch.expm1(bounded)).log(), torch.log1p(-bounded.exp()))


def check_integers(name: str, tensor: Tensor, *, like: Tensor, negative: bool = False) -> None:
    """Raise ``DataError`` unless ``tensor`` holds integers in the 1-d shape of ``like``, >= 0 by default."""
    if tensor.ndim != 1 or tensor.dtype == torch.bool or tensor.is_floating_point():
        raise DataError(f"{name} must be an integer tensor [n], got {tensor.dtype} {shape_of(tensor)}")
    _same_shape(name, tensor, like)
    if not negative and tensor.numel() and int(tensor.min()) < 0:
        raise DataError(f"{name} holds {int(tensor.min())}; a count cannot be negative")


def check_flags(name: str, tensor: Tensor, *, like: Tensor) -> None:
    """Raise ``DataError`` unless ``tensor`` holds bools in the 1-d shape of ``like``."""
    if tensor.ndim != 1 or tensor.dtype != torch.bool:
        raise DataError(f"{name} must be a bool tensor [n], got {tensor.dtype} {shape_of(tensor)}")
    _same_shape(name, tensor, like)


def check_not_negative(name: str, value: float) -> None:
    """Raise ``ConfigError`` unless ``value`` is a finite number >= 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} must be a number >= 0, got {value}")


def _paired(
    weights: Tensor, loss: Tensor, chosen: Tensor, rejected: Tensor, nll: Tensor | None = None
) -> PreferenceLoss:
    """Weighted sums over pairs from per-pair losses and implicit rewards."""
    weight, good, bad = weights.detach().double(), chosen.detach(), rejected.detach()
    return PreferenceLoss(
        loss=(weight * loss).sum(),
        accuracy=(weight * _right(good - bad)).sum(),
        chosen=(weight * good).sum(),
        rejected=(weight * bad).sum(),
        nll=weight.new_zeros(()) if nll is None else (weight * nll.detach()).sum(),
        weight=weight.sum(),
        chosen_weight=weight.sum(),
        rejected_weight=weight.sum(),
    )


def _right(lead: Tensor) -> Tensor:
    """1 where the lead is positive, 1/2 where it is 0, else 0."""
    return (torch.sign(lead) + 1) / 2


def _probe(paired: bool) -> Preferences:
    """The smallest data that every loss of the kind accepts."""
    one, length = -torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    if not paired:
        return Unpaired(one, one, length > 0, -one, torch.zeros((), dtype=torch.float64))
    return Pairs(one, one, -one, one, one, length, length)


def _log_probability(name: str, tensor: Tensor, *, like: Tensor) -> Tensor:
    """``tensor`` as float64, checked like a token tensor and to be no likelihood above 1."""
    values = token_tensor(name, tensor, like=like)
    bad = torch.nonzero(values.detach() > _ROUNDING)
    if bad.numel():
        at = int(bad[0, 0])
        raise DataError(f"{name}[{at}] is {float(values[at])}; a log-probability cannot be positive")
    return values


def _check_weights(weights: Tensor, *, like: Tensor) -> None:
    values = token_tensor("weights", weights, like=like)
    if values.numel() and float(values.min()) < 0:
        raise DataError(f"weights holds {float(values.min())}; a weight cannot be negative")


def _check_lengths(name: str, tensor: Tensor, *, like: Tensor) -> None:
    check_integers(name, tensor, like=like)
    if tensor.numel() and int(tensor.min()) < 1:
        raise DataError(f"{name} holds {int(tensor.min())}; a trajectory needs at least one sampled token")


def _same_shape(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise DataError(f"{name} must have shape {shape_of(like)}, got {shape_of(tensor)}")

"""The rule, fixed before a run, that turns scores of policies into one of four verdicts.

This module knows scores by variant and task and what the run cost; it must not know how the policies were
trained, where scores are stored or how a verdict is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from surefoot.core.errors import ConfigError, DataError, nearest
from surefoot.core.types import Trust
from surefoot.economics import money
from surefoot.evaluation.statistics import PairedInterval, holm, paired_difference, require_same_tasks

Outcome: TypeAlias = Literal["learned", "memorised", "not_shown", "falsified"]
TaskScores: TypeAlias = Mapping[str, Sequence[float]]

BASE = "base"
_TITLES: dict[Outcome, str] = {
    "learned": "Learned",
    "memorised": "Memorised",
    "not_shown": "Not shown",
    "falsified": "Falsified",
}


@dataclass(frozen=True)
class PolicyScores:
    """0/1 successes of one policy: variant -> task id -> one value per sample.

    ``seeds``, when the policy was trained several times, gives the training seed of each sample position and
    holds for every task (three seeds with two samples each: ``(0, 0, 1, 1, 2, 2)``). None: one fixed policy.
    Raises DataError when a variant or task is empty, a value is not 0 or 1, or a list does not fit ``seeds``.
    """

    name: str
    by_variant: Mapping[str, TaskScores]
    seeds: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if BASE not in self.by_variant:
            found = ", ".join(map(repr, self.by_variant)) or "none"
            raise DataError(f"{self.name}: by_variant lacks {BASE!r}; it holds {found}")
        for variant, tasks in self.by_variant.items():
            if not tasks:
                raise DataError(f"{self.name}: variant {variant!r} holds no task")
            for task, scores in tasks.items():
                self._check(f"{self.name}: variant {variant!r}, task {task!r}", scores)

    def _check(self, where: str, scores: Sequence[float]) -> None:
        if len(scores) == 0:
            raise DataError(f"{where} holds no score")
        for score in scores:
            if score not in (0, 1):
                raise DataError(f"{where} holds {score!r}; a success is 0 or 1")
        if self.seeds is not None and len(scores) != len(self.seeds):
            raise DataError(f"{where} holds {len(scores)} scores; seeds labels {len(self.seeds)}")

    def success(self, variant: str) -> float:
        """Mean over tasks of the share of successful samples."""
        return float(np.mean([np.mean(scores) for scores in self.by_variant[variant].values()]))


@dataclass(frozen=True)
class Comparison:
    """``name`` (``"final - start"``) on one variant, with the interval of the difference in success."""

    name: str
    variant: str
    interval: PairedInterval

    @property
    def improves(self) -> bool:
        """The whole interval lies above 0."""
        return self.interval.above(0.0)

    def __str__(self) -> str:
        i = self.interval
        return f"{i.estimate:+.3f} [{i.low:+.3f}, {i.high:+.3f}]"


@dataclass(frozen=True)
class Verdict:
    """What may be claimed, and everything the claim rests on.

    ``sentence`` is one line for a person; ``comparisons`` holds every arm and variant measured, better or
    worse; ``success`` the mean success by arm and variant; ``reasons`` the conditions of ``learned`` that
    failed (empty when learned); ``notes`` what a reader should know beside the rule; ``holm`` the adjusted
    p-value of final against each control on base.
    """

    outcome: Outcome
    sentence: str
    comparisons: tuple[Comparison, ...]
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    success: Mapping[str, Mapping[str, float]]
    holm: Mapping[str, float]
    weakest_trust: str
    seeds: tuple[int, ...]
    cost_usd: float
    tokens: int
    level: float

    def to_json(self) -> dict[str, Any]:
        """Plain dict of strings, numbers, lists and dicts."""
        return {
            "outcome": self.outcome,
            "sentence": self.sentence,
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "success": {arm: dict(by_variant) for arm, by_variant in self.success.items()},
            "holm": dict(self.holm),
            "weakest_trust": self.weakest_trust,
            "seeds": list(self.seeds),
            "cost_usd": self.cost_usd,
            "tokens": self.tokens,
            "level": self.level,
        }


def judge(
    *,
    initial: PolicyScores,
    start: PolicyScores,
    final: PolicyScores,
    controls: Mapping[str, PolicyScores],
    weakest_trust: str,
    seeds: Sequence[int],
    cost_usd: float,
    tokens: int,
    level: float = 0.95,
    required_controls: Sequence[str] = ("permuted",),
    draws: int = 2000,
    bootstrap_seed: int = 0,
) -> Verdict:
    """Apply the rule to scores on the ``test`` split.

    ``initial`` is the untouched model, ``start`` the policy before reinforcement learning (after any cold
    start), ``final`` the trained one, ``controls`` the arms trained from ``start`` on a broken signal. A
    difference "is shown" when its whole interval lies above 0. On ``base``, in this order:

    * ``falsified``: for some control, control - start is shown and final - control is not.
    * ``memorised``: as ``learned``, yet variants were measured and final - start is shown on none.
    * ``learned``: final - initial, final - start and final - each control are shown, at least one control was
      run, and none of ``required_controls`` is missing.
    * ``not_shown``: everything else.

    All conditions must hold together, so their conjunction needs no correction for multiplicity; the
    Holm-adjusted p-values of the controls are given for reading them one by one.

    Arms with ``PolicyScores.seeds`` are compared over the seeds they share, resampling seeds and tasks; an
    arm without is one fixed policy. Raises DataError when task sets, variants or seeds do not fit together,
    ConfigError for an unknown trust tier or an arm name that is taken.
    """
    trust = _trust(weakest_trust)
    run_seeds = _run_seeds(seeds, final)
    if not (math.isfinite(cost_usd) and cost_usd >= 0 and tokens >= 0):
        raise DataError(
            f"cost_usd is {cost_usd} and tokens is {tokens}; both must be finite and not negative"
        )
    arms = _arms(initial, start, final, controls)
    comparisons = tuple(
        Comparison(
            f"{a} - {b}",
            variant,
            _difference(arms[a], arms[b], variant, (a, b), level=level, draws=draws, seed=bootstrap_seed),
        )
        for a, b in _pairs(controls)
        for variant in _shared_variants(arms[a], arms[b])
    )
    found = {(comparison.name, comparison.variant): comparison for comparison in comparisons}
    outcome, reasons = _apply_rule(found, sorted(controls), required_controls)
    success = {
        arm: {v: policy.success(v) for v in _ordered(policy.by_variant)} for arm, policy in arms.items()
    }
    paid = f"{len(run_seeds)} seed{'s' * (len(run_seeds) > 1)}; {tokens:,} tokens, {money(cost_usd)}"
    return Verdict(
        outcome=outcome,
        sentence=f"{_TITLES[outcome]}: {_facts(found, sorted(controls), success, level)}"
        f"{_because(reasons)}; weakest trust {trust}; {paid}.",
        comparisons=comparisons,
        reasons=reasons,
        notes=_notes(final, controls, run_seeds),
        success=success,
        holm=_holm_by_control(found, sorted(controls)),
        weakest_trust=trust,
        seeds=run_seeds,
        cost_usd=float(cost_usd),
        tokens=int(tokens),
        level=level,
    )


# -------------------- the rule

_Found: TypeAlias = Mapping[tuple[str, str], Comparison]


def _apply_rule(
    found: _Found, controls: Sequence[str], required: Sequence[str]
) -> tuple[Outcome, tuple[str, ...]]:
    """The outcome, and which conditions of ``learned`` failed (the decisive one first)."""
    beaten = {name: found[f"final - {name}", BASE].improves for name in controls}
    as_good = [name for name in controls if found[f"{name} - start", BASE].improves and not beaten[name]]
    reasons = [
        f"control {name!r} improves as much: {name} - start {found[f'{name} - start', BASE]}, "
        f"final - {name} {found[f'final - {name}', BASE]}"
        for name in as_good
    ]
    if not controls:
        reasons.append("no control arm")
    reasons += [
        f"required control {name!r} was not run" for name in required if controls and name not in controls
    ]
    reasons += [
        f"{name} on {BASE} does not exclude 0 from above: {found[name, BASE]}"
        for name in (
            "final - initial",
            "final - start",
            *(f"final - {c}" for c in controls if c not in as_good),
        )
        if not found[name, BASE].improves
    ]
    if as_good:
        return "falsified", tuple(reasons)
    if reasons:
        return "not_shown", tuple(reasons)
    held_out = _held_out(found)
    if held_out and not any(comparison.improves for comparison in held_out):
        seen = ", ".join(f"{comparison.variant} {comparison}" for comparison in held_out)
        return "memorised", (f"no held-out variant improves over the start: {seen}",)
    return "learned", ()


def _held_out(found: _Found) -> list[Comparison]:
    return [c for (name, variant), c in found.items() if name == "final - start" and variant != BASE]


def _holm_by_control(found: _Found, controls: Sequence[str]) -> dict[str, float]:
    if not controls:
        return {}
    adjusted = holm([found[f"final - {name}", BASE].interval.p_value for name in controls])
    return {name: float(p) for name, p in zip(controls, adjusted, strict=True)}


# -------------------- words


def _facts(
    found: _Found, controls: Sequence[str], success: Mapping[str, Mapping[str, float]], level: float
) -> str:
    parts = [
        f"success on {BASE} {success['final'][BASE]:.3f} "
        f"against {success['start'][BASE]:.3f} at the start ({found['final - start', BASE]}) "
        f"and {success['initial'][BASE]:.3f} untouched ({found['final - initial', BASE]}), "
        f"{100 * level:g}% intervals"
    ]
    if controls:
        against = ", ".join(f"{name} {found[f'final - {name}', BASE]}" for name in controls)
        parts.append(f"final - control: {against}")
    else:
        parts.append("no control arm")
    if held_out := _held_out(found):
        better = sum(comparison.improves for comparison in held_out)
        worse = sum(comparison.interval.high < 0 for comparison in held_out)
        parts.append(f"held-out variants: {better} of {len(held_out)} better than the start, {worse} worse")
    else:
        parts.append("no held-out variant")
    return "; ".join(parts)


def _because(reasons: Sequence[str]) -> str:
    if not reasons:
        return ""
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"; because {reasons[0]}{more}"


def _notes(
    final: PolicyScores, controls: Mapping[str, PolicyScores], run_seeds: Sequence[int]
) -> tuple[str, ...]:
    notes: list[str] = []
    if len(run_seeds) == 1:
        notes.append("one training seed: the intervals cover luck in tasks, not in training")
    elif final.seeds is None:
        notes.append("scores carry no training seed: the intervals cover luck in tasks, not in training")
    else:
        for name in sorted(controls):
            labels = controls[name].seeds
            if labels is None:
                notes.append(f"control {name!r} carries no training seed: compared as one fixed policy")
            elif lacking := sorted(set(final.seeds) - set(labels)):
                notes.append(f"control {name!r} lacks training seeds {lacking}: compared on the shared ones")
    if set(final.by_variant) == {BASE}:
        notes.append("no held-out variant was measured: memorisation cannot be told from learning")
    return tuple(notes)


# -------------------- pairing


def _pairs(controls: Mapping[str, PolicyScores]) -> list[tuple[str, str]]:
    pairs = [("final", "initial"), ("final", "start")]
    for name in sorted(controls):
        pairs += [("final", name), (name, "start")]
    return pairs


def _difference(
    a: PolicyScores,
    b: PolicyScores,
    variant: str,
    names: tuple[str, str],
    *,
    level: float,
    draws: int,
    seed: int,
) -> PairedInterval:
    """Paired difference on one variant; by training seed when a side is labelled with seeds."""
    left, right = a.by_variant[variant], b.by_variant[variant]
    require_same_tasks(left, right, (f"{names[0]} on {variant!r}", f"{names[1]} on {variant!r}"))
    labelled = [set(policy.seeds) for policy in (a, b) if policy.seeds is not None]
    if not labelled:
        return paired_difference(left, right, level=level, draws=draws, seed=seed)
    shared = sorted(set.intersection(*labelled))
    if not shared:
        raise DataError(f"{names[0]} and {names[1]} share no training seed: {a.seeds} and {b.seeds}")
    tasks = sorted(left)
    return paired_difference(
        _by_seed(left, tasks, a.seeds, shared),
        _by_seed(right, tasks, b.seeds, shared),
        tasks * len(shared),
        seeds=[label for label in shared for _ in tasks],
        level=level,
        draws=draws,
        seed=seed,
    )


def _by_seed(
    scores: TaskScores, tasks: Sequence[str], labels: Sequence[int] | None, shared: Sequence[int]
) -> list[float]:
    """Mean success of each (seed, task), seed by seed; a fixed policy repeats itself for every seed."""
    if labels is None:
        return [float(np.mean(scores[task])) for task in tasks] * len(shared)
    table = np.array([scores[task] for task in tasks], dtype=np.float64)
    columns = np.asarray(labels)
    return [float(mean) for label in shared for mean in table[:, columns == label].mean(axis=1)]


def _shared_variants(a: PolicyScores, b: PolicyScores) -> list[str]:
    return _ordered(set(a.by_variant) & set(b.by_variant))


def _ordered(variants: Iterable[str]) -> list[str]:
    """Base first, then by name."""
    return sorted(variants, key=lambda variant: (variant != BASE, variant))


# -------------------- checks


def _arms(
    initial: PolicyScores, start: PolicyScores, final: PolicyScores, controls: Mapping[str, PolicyScores]
) -> dict[str, PolicyScores]:
    """All arms by name, once their variants are known to fit those of ``final``."""
    arms = {"initial": initial, "start": start, "final": final}
    for name in controls:
        if name in arms:
            raise ConfigError(f"controls names an arm {name!r}; that name is taken, choose another")
    arms.update(controls)
    measured = set(final.by_variant)
    if lacking := measured - set(start.by_variant):
        raise DataError(
            f"start lacks variants {sorted(lacking)} that final has; measure both on the same ones"
        )
    for name, policy in arms.items():
        if extra := set(policy.by_variant) - measured:
            raise DataError(f"{name} has variants {sorted(extra)} that final lacks; report final on them too")
    return arms


def _trust(weakest: str) -> str:
    tiers = [tier.name.lower() for tier in Trust]
    if weakest.lower() not in tiers:
        raise ConfigError(f"weakest_trust is {weakest!r}; {nearest(weakest.lower(), tiers)}")
    return weakest.lower()


def _run_seeds(seeds: Sequence[int], final: PolicyScores) -> tuple[int, ...]:
    distinct = tuple(sorted({int(label) for label in seeds}))
    if not distinct:
        raise DataError("seeds is empty; name the training seed of the run")
    if final.seeds is not None and {int(label) for label in final.seeds} != set(distinct):
        raise DataError(
            f"final.seeds labels {sorted(set(final.seeds))}; seeds of the run are {list(distinct)}"
        )
    return distinct

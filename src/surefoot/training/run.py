"""A whole run: evaluate, cold start, reinforce, control arms, evaluate again, judge.

Every piece is stored when it is done and found again at resume, so a run that was killed at any
instant goes on to the same result. Must not know what a report or a terminal looks like.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from surefoot.audit.rewards import admit, audit_rewards, check_overrides
from surefoot.core.errors import BudgetReached, ConfigError, StorageError
from surefoot.envs.base import Environment
from surefoot.envs.loading import load_environment
from surefoot.evaluation.summary import policy_scores, shared_tasks
from surefoot.evaluation.verdict import PolicyScores, Verdict, judge
from surefoot.learner import checkpoint
from surefoot.learner.learner import Learner, OptimizerSettings
from surefoot.runs import files
from surefoot.runs.directory import Manifest, RunDirectory
from surefoot.training.algorithms import Algorithm, algorithm
from surefoot.training.arms import TREATMENT, arm_of, as_trained, without_effect
from surefoot.training.companions import value_head_of
from surefoot.training.config import PreferenceStage, RlStage, RunConfig, SftStage, parse_config, to_toml
from surefoot.training.learned import check_learned, check_unchanged, learned_events
from surefoot.training.measuring import measure
from surefoot.training.preference import PreferenceTraining
from surefoot.training.progress import Progress, Silent
from surefoot.training.reward_model import RewardModelTraining
from surefoot.training.rl import RlTraining
from surefoot.training.session import Session, Unit, resolve_rewards, resolve_variants
from surefoot.training.sft import SftTraining
from surefoot.training.watching import check_watch

START = "start"
_STEP = re.compile(r"step-(\d+)$")
_KEEP = 2  # checkpoints of an unfinished arm
_SAID = 20  # lines about the steps of one stage, at least

Stage = SftStage | RlStage | PreferenceStage
Training = SftTraining | RlTraining | PreferenceTraining | RewardModelTraining


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to. ``stopped`` says which budget ended it early, empty when it finished."""

    path: Path
    verdict: dict[str, Any] | None
    stopped: str = ""


def check_config(config: RunConfig) -> None:
    """Everything about a recipe that can be wrong without loading the model. Raises ConfigError."""
    cls = load_environment(config.environment.name)
    suite = resolve_rewards(config, cls)
    if cls.success_reward() not in [item.name for item in suite.rewards]:
        raise ConfigError(f"rewards.weights removes {cls.success_reward()!r}, which defines success")
    check_overrides(config.audit.override, [item.name for item in suite.rewards])
    resolve_variants(config, cls)
    check_watch(config)
    check_learned(config)
    scorers = 0
    for stage in config.stage:
        row = algorithm(stage.algorithm, stage.settings, kind=stage.kind)
        if isinstance(stage, RlStage) and (stage.teacher is not None) != ("teacher" in row.needs):
            what = "needs" if stage.teacher is None else "ignores"
            raise ConfigError(f"stage rl: algorithm {row.name!r} {what} a teacher model")
        if isinstance(stage, RlStage):
            _check_stage(config, stage, row)
            _check_privileged(cls, row)
        scorers += row.learn == "scores"
    if scorers > 1:
        raise ConfigError(f"{scorers} stages train a reward model; a run keeps one, so leave the others out")
    _check_arms(config)


def _check_arms(config: RunConfig) -> None:
    """An arm with an update of its own must differ in some stage from the plain one. Raises ConfigError."""
    for arm in config.arms:
        if arm_of(arm).plain:
            continue
        reasons: list[str] = []
        for stage in config.learning:
            row = algorithm(stage.algorithm, stage.settings, kind=stage.kind)
            if isinstance(stage, RlStage):
                reasons.append(without_effect(arm, stage, row))
            else:
                reasons.append(f"algorithm {row.name!r} has no ratio")
        if all(reasons):
            raise ConfigError(
                f"controls.arms holds {arm!r}, which would train exactly like {arm_of(arm).signal!r}: "
                f"{'; '.join(dict.fromkeys(reasons))}. Remove it, or use {arm_of(arm).signal!r}"
            )


def _check_stage(config: RunConfig, stage: RlStage, row: Algorithm) -> None:
    """What an algorithm asks of its stage. Raises ConfigError."""
    settings = row.settings
    judged = [arm for arm in config.arms if arm_of(arm).learns]
    if "teacher" in row.needs and judged:
        raise ConfigError(
            f"controls.arms = {judged}: algorithm {row.name!r} reads no reward, so these arms would train "
            'exactly like the treatment; use ["frozen"] or none'
        )
    keep = int(settings.get("roc_keep", 0))
    if keep and not 2 <= keep <= stage.group_size:
        raise ConfigError(
            f"settings.roc_keep = {keep}; it must be from 2 to group_size = {stage.group_size}, or 0 for half"
        )
    if settings.get("covariance") == "kl" and stage.updates_per_step == 1:
        raise ConfigError("settings.covariance = 'kl' has an effect only with updates_per_step above 1")


def _check_privileged(cls: type[Environment], row: Algorithm) -> None:
    """A critic that reads privileged text needs an environment that has some. Raises ConfigError."""
    own = cls.privileged.__func__ is not Environment.privileged.__func__
    if row.settings.get("privileged") == "given" and not own:
        raise ConfigError(
            f"algorithm {row.name!r} reads Environment.privileged(task), which {cls.name!r} does not define; "
            'define it, or set settings.privileged = "withheld"'
        )


def start_run(config: RunConfig, out: Path, *, progress: Progress | None = None) -> RunResult:
    """Check, audit, create the run folder, and work to the end (or the budget). Raises SurefootError."""
    check_config(config)
    admitted = audit_config(config, progress or Silent())
    text = to_toml(config)
    manifest = Manifest.current(recipe=config.name, seed=config.seed, config_toml=text)
    with RunDirectory.create(out, config_toml=text, manifest=manifest) as run:
        gate = load_environment(config.environment.name).gate
        if gate is not None:
            run.event("gate_version", version=gate.version)
        for kind, fields in [*admitted, *learned_events(config)]:
            run.event(kind, **fields)
        return _Run(config, run, progress or Silent()).execute()


def audit_config(config: RunConfig, progress: Progress) -> list[tuple[str, dict[str, str]]]:
    """Audit the rewards while no policy is loaded; the events to keep. Raises AuditFailed."""
    cls = load_environment(config.environment.name)
    suite = resolve_rewards(config, cls)
    audit = audit_rewards(suite, cls, tasks=config.audit.tasks, seconds=config.limits.env_seconds)
    events = admit(audit, config.audit.override)
    for _, fields in events:
        progress.say(f"audit: {fields['message']}")
    return events


def resume_run(out: Path, *, budget: Sequence[str] = (), progress: Progress | None = None) -> RunResult:
    """Go on with an interrupted run from its own settings. Raises SurefootError.

    ``budget``: settings such as ``budget.tokens=5000`` that replace the run's, now and whenever it is
    resumed again. They are kept as events; the run's own settings stay as they were.
    """
    for setting in budget:
        if not setting.startswith("budget."):
            raise ConfigError(
                f"{setting!r} cannot change when a run is resumed: "
                "only budget.tokens, budget.usd and budget.wall can"
            )
    with RunDirectory.open(out) as run:
        earlier = [e["setting"] for e in files.read_json_lines(run.events) if e["kind"] == "budget_changed"]
        config = parse_config(run.config_toml, source=str(run.config), overrides=[*earlier, *budget])
        check_config(config)
        check_unchanged(config, files.read_json_lines(run.events))
        run.event("resumed")
        for setting in budget:
            run.event("budget_changed", setting=setting)
        return _Run(config, run, progress or Silent()).execute()


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of an arm."""
    found = sorted(path for path in folder.glob("step-*") if _STEP.search(path.name))
    return found[-1] if found else None


class _Run:
    def __init__(self, config: RunConfig, run: RunDirectory, progress: Progress) -> None:
        self.config, self.run, self.progress = config, run, progress
        self.session = Session(config, run, progress)

    def execute(self) -> RunResult:
        """All the work; a budget that is used up ends it cleanly with what there is."""
        stopped = ""
        try:
            self._work()
        except BudgetReached as error:
            stopped = str(error)
            self.run.event("budget_reached", reason=stopped)
            self.progress.say(stopped)
        finally:
            self.session.ledger.flush()
            self.session.ledger.write_summary(self.run.ledger)
        verdict = self._judge(stopped)
        return RunResult(self.run.path, verdict, stopped)

    def _work(self) -> None:
        config = self.config
        variants = self.session.variants
        self._evaluate("initial", variants, 0)
        version = self._train(START, config.cold_start, None)
        if config.cold_start:
            self._evaluate(START, variants, version)
        if not config.learning:
            return
        start = latest_checkpoint(self.run.checkpoint(START, 0).parent)
        assert start is not None
        version = self._train(TREATMENT, config.learning, start)
        self._evaluate("final", variants, version)
        controls = variants if config.evaluation.control_variants == "all" else ("base",)
        for arm in config.arms:
            version = self._train(arm, config.learning, start)
            self._evaluate(arm, controls, version)

    # training -----------------------------------------------------------------------------------

    def _train(self, arm: str, stages: Sequence[Stage], base: Path | None) -> int:
        """Run an arm's stages from ``base`` (None: the model as loaded), or from where it was left.

        Returns the arm's number of steps, which is the version of its last policy.
        """
        latest = latest_checkpoint(self.run.checkpoint(arm, 0).parent)
        state = checkpoint.read_state(latest)["state"] if latest is not None else None
        if latest is not None and state is not None and state["finished"]:
            _prune(latest.parent, 1)  # a kill may have come between writing the last one and this
            checkpoint.load_weights(latest, self.session.loaded.model)
            return int(state["global_step"])
        done = int(state["global_step"]) if state is not None else 0
        files.truncate_json_lines(self.run.metrics, lambda line: line["arm"] != arm or line["step"] < done)
        if latest is None and base is not None:
            checkpoint.load_weights(base, self.session.loaded.model)
        first_step = first_task = 0
        for number, stage in enumerate(stages):
            training = self._training(stage, arm, number, first_task, first_step)
            if first_step + training.steps > done:
                last = number == len(stages) - 1
                self._stage(arm, number, stage, training, first_step, done, latest, last=last)
                latest = None
            first_step += training.steps
            first_task += _tasks_of(stage)
        if not stages:
            learner = Learner(self.session.loaded.model, OptimizerSettings(), total_updates=0)
            self._save(arm, learner, None, 0, finished=True)
        return first_step

    def _training(self, stage: Stage, arm: str, number: int, first_task: int, first_step: int) -> Training:
        row = algorithm(stage.algorithm, stage.settings, kind=stage.kind)
        tag = stage.kind + (str(number) if number else "")
        shown = sum(item.episodes for item in self.config.cold_start)
        if isinstance(stage, SftStage):
            return SftTraining(self.session, stage, row, arm, tag)
        if isinstance(stage, PreferenceStage):
            kind = RewardModelTraining if row.learn == "scores" else PreferenceTraining
            return kind(self.session, stage, row, arm, shown + first_task, tag)
        return RlTraining(self.session, stage, row, arm, shown + first_task, first_step, tag)

    def _stage(
        self,
        arm: str,
        number: int,
        stage: Stage,
        training: Training,
        first: int,
        done: int,
        latest: Path | None,
        *,
        last: bool,
    ) -> None:
        """Run one stage from its step ``done - first`` on; checkpoints as it goes and at its end."""
        gc.collect()
        learner = self._learner(arm, stage, training.steps)
        begin = max(done - first, 0)
        if latest is not None and not begin:
            checkpoint.load_weights(latest, learner.model)
        training.prepare(learner)
        if latest is not None and begin:
            state = checkpoint.load(latest, learner, companions=training.companions)
            training.restore(state["training"])
        every = training.steps if isinstance(stage, SftStage) else stage.checkpoint_every
        for index in range(begin, training.steps):
            result = training.step(index, learner)
            line = {"arm": arm, "stage": stage.kind, "stage_number": number, "step": first + index}
            files.append_json(self.run.metrics, {**line, **result.metrics})
            end = index + 1 == training.steps
            if end or (index + 1) % max(1, training.steps // _SAID) == 0:
                self.progress.say(_step_line(arm, index, training.steps, result.metrics))
            if end or (index + 1) % every == 0:
                self._save(
                    arm, learner, training, first + index + 1, finished=end and last, optimizer=not end
                )

    def _learner(self, arm: str, stage: Stage, steps: int) -> Learner:
        settings = OptimizerSettings(
            stage.lr, stage.betas, 1e-8, stage.weight_decay, stage.clip_norm, stage.warmup, stage.schedule
        )
        row = algorithm(stage.algorithm, stage.settings, kind=stage.kind)
        if isinstance(stage, RlStage):
            stage, row = as_trained(arm, stage, row)
        updates = steps * (stage.updates_per_step if isinstance(stage, RlStage) else 1)
        config = self.config.learner
        model = self.session.loaded.model
        critic = "critic" in row.needs
        return Learner(
            model,
            settings,
            total_updates=updates,
            tokens_per_batch=config.tokens_per_batch,
            chunk=config.chunk,
            checkpoint_activations=config.checkpoint_activations,
            value_head=value_head_of(model) if critic else None,
            value_lr=float(row.settings["value_lr"]) if critic else 0.0,
        )

    def _save(
        self,
        arm: str,
        learner: Learner,
        training: Training | None,
        global_step: int,
        *,
        finished: bool,
        optimizer: bool = False,
    ) -> None:
        began, cpu = self.session.clock()
        own = training.state() if training is not None else {}
        state = {"arm": arm, "global_step": global_step, "finished": finished, "training": own}
        path = self.run.checkpoint(arm, global_step)
        beside = training.companions if training is not None and optimizer else {}
        checkpoint.save(path, learner, state, optimizer=optimizer, companions=beside)
        _prune(path.parent, 1 if finished else _KEEP)
        self.session.spent(Unit("", arm, "checkpoint", global_step, "checkpoint"), began, cpu)

    # evaluation ---------------------------------------------------------------------------------

    def _evaluate(self, policy: str, variants: Sequence[str], version: int) -> None:
        """Measure the current weights, once."""
        path = self.run.evaluation_of(policy)
        if path.exists():
            return
        record = measure(self.session, policy, variants, version=version)
        files.write_atomic(path, json.dumps(record, indent=1))
        self.progress.say(_evaluation_line(policy, record["variants"]))

    # verdict ------------------------------------------------------------------------------------

    def _judge(self, stopped: str) -> dict[str, Any] | None:
        """Apply the rule to what was measured; None while the treatment's policies are not all measured."""
        needed = ["initial", *([START] if self.config.cold_start else []), "final", *self.config.arms]
        records = {name: self._evaluation(name) for name in needed}
        found = {name: record for name, record in records.items() if record is not None}
        files.write_atomic(self.run.evaluation, json.dumps(found, indent=1))
        controls = {arm: found[arm] for arm in self.config.arms if arm in found}
        files.write_atomic(self.run.controls, json.dumps(controls, indent=1))
        if "initial" not in found or "final" not in found:
            return None
        scores = shared_tasks({name: policy_scores(name, record) for name, record in found.items()})
        totals = self.session.ledger.totals()
        verdict: Verdict = judge(
            initial=scores["initial"],
            start=scores.get(START, scores["initial"]),
            final=scores["final"],
            controls={arm: scores[arm] for arm in controls},
            weakest_trust=self.session.rewards.trust.name,
            seeds=(self.config.seed,),
            cost_usd=totals.usd,
            tokens=totals.tokens,
            level=self.config.evaluation.level,
            required_controls=self.config.arms or ("permuted",),
        )
        judged = verdict.to_json()
        record = {**judged, "notes": [*judged["notes"], *self._idle()], "stopped": stopped}
        files.write_atomic(self.run.verdict, json.dumps(record, indent=1))
        return record

    def _idle(self) -> list[str]:
        """What a reader must know of a treatment that learned nothing because it never took a step."""
        lines = files.read_json_lines(self.run.metrics)
        steps = [line["stepped"] for line in lines if line["arm"] == TREATMENT and "stepped" in line]
        if not steps or any(steps):
            return []
        return [
            f"no update in {len(steps)} steps of the treatment: no group of episodes differed in its returns"
        ]

    def _evaluation(self, policy: str) -> dict[str, Any] | None:
        path = self.run.evaluation_of(policy)
        if not path.exists():
            return None
        try:
            return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise StorageError(f"{path} cannot be read: {error}; delete it to measure again") from error


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints of an arm."""
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def _tasks_of(stage: Stage) -> int:
    """Training tasks that a stage uses up, so that the next one begins with fresh ones."""
    if isinstance(stage, RlStage):
        settings = algorithm(stage.algorithm, stage.settings).settings
        rounds = 1 + int(settings["filter_rounds"]) if settings.get("filter") == "dynamic" else 1
        return stage.tasks_per_step * stage.steps * rounds
    return 0 if isinstance(stage, SftStage) or stage.runs else stage.tasks


def _step_line(arm: str, index: int, total: int, metrics: dict[str, Any]) -> str:
    parts = [f"{arm} {index + 1}/{total}"]
    for key, label in (
        ("success", "success"),
        ("return_mean", "return"),
        ("call_rate_not_needed", "needless calls"),
        ("loss", "loss"),
        ("held_out_accuracy", "held-out pairs in order"),
        ("grad_norm", "grad"),
    ):
        if metrics.get(key) is not None:
            parts.append(f"{label} {metrics[key]:.3f}")
    return "  ".join(parts)


def _evaluation_line(policy: str, figures: dict[str, dict[str, Any]]) -> str:
    parts = [
        f"{variant} {record['success']['estimate']:.3f}"
        for variant, record in figures.items()
        if "success" in record
    ]
    return f"{policy}: success " + ", ".join(parts)


def scores_of(path: Path, policy: str) -> PolicyScores:
    """The stored scores of one policy of a run. Raises StorageError when they are missing."""
    run = RunDirectory.open(path, writable=False)
    file = run.evaluation_of(policy)
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} cannot be read: {error}; the run has not measured {policy!r}") from error
    return policy_scores(policy, record)

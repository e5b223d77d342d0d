"""The reinforcement-learning stage: collect groups, filter, take credit, update.

Reads an algorithm's row as data; must not know its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from surefoot.core.errors import DataError
from surefoot.core.seeds import derive
from surefoot.core.types import Group, Scored, Trajectory, Unscored
from surefoot.credit import filters, group_statistics, steps
from surefoot.learner.batch import Example, Float64
from surefoot.learner.checkpoint import Companions
from surefoot.learner.learner import Learner, UpdateReport
from surefoot.learner.utterance import Turns, fit_critic, turn_advantages
from surefoot.objectives import icepop, truncated_importance
from surefoot.objectives.entropy import AdaptiveCoefficient, clip_cov, kl_cov
from surefoot.training.algorithms import Algorithm, Credited
from surefoot.training.arms import TREATMENT, arm_of, as_trained
from surefoot.training.companions import Beside, cut_values, flat, split
from surefoot.training.config import RlStage
from surefoot.training.losses import RlLoss
from surefoot.training.metrics import StepResult, common, mean, merge, merge_pairs, nothing
from surefoot.training.preference import PairUpdate
from surefoot.training.ranking import rank_pairs
from surefoot.training.replay import Replay, turn_weights
from surefoot.training.session import Session, Unit
from surefoot.training.signal import Batch, CreditInput, credit_input, example_of, read_batch
from surefoot.training.turns import TurnCritic
from surefoot.training.watching import Watch

# Engine and learner hold the same weights at a step's first update, so they must agree this well.
_MISMATCH_LIMIT = 1e-3
_FIRST_COEFFICIENT = 0.0  # of the entropy, where a target moves it


class RlTraining:
    """On-policy steps, or steps on samples of at most ``staleness`` versions ago."""

    def __init__(
        self,
        session: Session,
        stage: RlStage,
        row: Algorithm,
        arm: str,
        first_task: int,
        first_step: int,
        tag: str,
    ) -> None:
        stage, row = as_trained(arm, stage, row)
        self.session, self.stage, self.row, self.arm = session, stage, row, arm
        self.first_task, self.first_step, self.tag = first_task, first_step, tag
        self.steps = stage.steps
        self.staleness = int(row.settings.get("staleness", 0))
        self._coefficient = _FIRST_COEFFICIENT
        self._entropy: float | None = None
        # Control arms optimise a reward that means nothing; only the treatment can cheat.
        self._watch = Watch(session) if arm == TREATMENT else None
        self._beside: Beside | None = None
        self._replay = Replay(int(row.settings.get("replay", 0)))
        self._replay_metrics: dict[str, Any] = {}

    def prepare(self, learner: Learner) -> None:
        """Build what the algorithm needs beside the policy, from the policy as it is."""
        self._beside = Beside(
            self.row, learner, self.session.config, teacher=self.stage.teacher, steps=self.steps
        )
        self.session.progress.begin(f"{self.arm}: {self.row.name}", self.steps * self._episodes)

    @property
    def beside(self) -> Beside:
        """The models beside the policy. Only after ``prepare``."""
        assert self._beside is not None, "prepare comes first"
        return self._beside

    @property
    def companions(self) -> Companions:
        """What a checkpoint holds beside the policy."""
        return self.beside.companions

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this stage beside weights."""
        watched = self._watch.state() if self._watch is not None else {}
        return {
            "entropy_coefficient": self._coefficient,
            "entropy": self._entropy,
            "monitors": watched,
            "replay": self._replay.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's :meth:`state`."""
        self._coefficient = float(state["entropy_coefficient"])
        self._entropy = state["entropy"]
        if self._watch is not None:
            self._watch.load(state["monitors"])
        past: list[dict[str, Any]] = state.get("replay", [])  # older checkpoints have none
        kept = [int(item["step"]) for item in past]
        self._replay.load(past, {step: self._stored(step) for step in kept})

    def _stored(self, index: int) -> list[Example]:
        """The trained episodes of a finished step, as they were trained on."""
        batch = self._read(self._sample(index), derive(self.session.config.seed, self.tag, index))
        return [example_of(t) for t, ok in zip(batch.trajectories, batch.valid, strict=True) if ok]

    @property
    def _episodes(self) -> int:
        return self.stage.tasks_per_step * self.stage.group_size

    # collecting -----------------------------------------------------------------------------------

    def step(self, index: int, learner: Learner) -> StepResult:
        """One rollout and its updates. A policy's version is the number of steps that made it."""
        self.session.engine.new_version(self.first_step + index)
        reset = int(self.row.settings.get("kl_reset_every", 0))
        if reset and index and index % reset == 0:
            self.beside.reset_reference()
        groups = self._sample(index)
        unit = self._unit(index)
        began, cpu = self.session.clock()
        seed = derive(self.session.config.seed, self.tag, index)
        batch = self._read(groups, seed)
        greedy: Float64 | None = None
        if "greedy" in self.row.needs:
            greedy = self._greedy(index, groups, batch)
            # A greedy episode that could not be scored takes its task out of the batch.
            batch = replace(batch, valid=batch.valid & np.isfinite(greedy))
        if "turn_critic" in self.row.needs:
            advantages, learned = self._learn_turns(index, groups, batch, learner)
        else:
            advantages, learned = self._learn(index, batch, learner, seed, greedy)
        self._keep_credit(unit, groups, batch, advantages)
        metrics = {**self._signal(batch), **learned}
        self.session.spent(unit, began, cpu, trained=int(metrics["trained_tokens"]), phase="update")
        if self._watch is not None:
            metrics |= self._watch.look(self.first_step + index, groups)
        return StepResult({**self._describe(groups), **metrics})

    def _unit(self, index: int, suffix: str = "") -> Unit:
        name = f"{self.arm}-{self.tag}-{index:06d}{suffix}"
        return Unit(name, self.arm, self.tag, index, "rollout")

    def _sample(self, index: int) -> list[Group]:
        """The groups of a step. Sampling runs ``staleness`` steps ahead of training, with today's weights."""
        count = self.stage.tasks_per_step
        groups = self._collect(index, 0, count)
        for ahead in range(index + 1, min(index + self.staleness, self.steps - 1) + 1):
            if not self.session.store.exists(self._unit(ahead).name):
                self._collect(ahead, 0, count)
        return self._refilled(index, groups) if self.row.settings.get("filter") == "dynamic" else groups

    def _collect(self, index: int, round_: int, count: int) -> list[Group]:
        """Round 0 takes the step's own tasks; refills take tasks that no step of the stage plans."""
        per_step = self.stage.tasks_per_step
        first = self.first_task + index * per_step
        if round_:
            rounds = int(self.row.settings["filter_rounds"])
            first = self.first_task + (self.steps + index * rounds + round_) * per_step
        unit = self._unit(index, f"-refill{round_}" if round_ else "")
        tasks = self.session.training_tasks(first, count)
        seed = derive(self.session.config.seed, self.tag, index, *([round_] if round_ else []))
        return self.session.collect(unit, tasks, members=self.stage.group_size, seed=seed)

    def _refilled(self, index: int, groups: list[Group]) -> list[Group]:
        """Live groups up to the wanted number, from further rounds while some are missing (DAPO)."""
        wanted = self.stage.tasks_per_step
        refill = filters.Refill(wanted, int(self.row.settings["filter_rounds"]))
        live = [group for group in groups if _live(group)]
        refill = refill.add(sampled=len(groups), live=len(live))
        while not refill.done:
            more = self._collect(index, refill.rounds, refill.request)
            fresh = [group for group in more if _live(group)]
            live.extend(fresh)
            refill = refill.add(sampled=len(more), live=len(fresh))
        return live[:wanted]

    def _greedy(self, index: int, groups: Sequence[Group], batch: Batch) -> Float64:
        """The return of the greedy episode of each trajectory's task: float64[n], NaN where unscored."""
        unit = self._unit(index, "-greedy")
        greedy = replace(self.session.sampling, temperature=0.0, top_p=1.0, top_k=0)
        seed = derive(self.session.config.seed, self.tag, index, "greedy")
        tasks = [group.task for group in groups]
        found = self.session.collect(unit, tasks, members=1, seed=seed, sampling=greedy)
        values = [group.trajectories[0].value for group in found]
        by_task = {group.task.id: np.nan if v is None else v for group, v in zip(found, values, strict=True)}
        return np.array([by_task[t.task_id] for t in batch.trajectories], np.float64)

    def _read(self, groups: Sequence[Group], seed: int) -> Batch:
        cache = int(self.row.settings.get("soft_overlong", 0))
        most = self.session.sampling.max_tokens * self.session.cls.horizon

        def overlong(trajectory: Trajectory) -> float:
            length = np.array([trajectory.sampled_tokens])
            return float(filters.soft_overlong(length, max_length=most, cache=min(cache, most))[0])

        extra = overlong if cache else None
        batch = read_batch(groups, arm=self.arm, seed=seed, won=self.session.won, extra=extra)
        return self._filtered(batch, seed)

    def _filtered(self, batch: Batch, seed: int) -> Batch:
        """The members that are trained on. Dynamic sampling has dropped its groups before."""
        kind, settings = self.row.settings.get("filter", "none"), self.row.settings
        if not batch.valid.any():
            return batch
        if kind == "variance":
            share = float(settings["filter_share"])
            kept = filters.variance_filter(batch.returns, batch.group, batch.valid, share=share).keep
            return batch.take(np.flatnonzero(kept))
        if kind == "duplicate":
            copies = filters.duplicate_live(batch.returns, batch.group, batch.valid, seed=seed)
            return batch.take(copies.rows, copies.group)
        if kind == "roc":
            mode: Any = settings["roc_mode"]
            kept = filters.resample_on_correct(
                batch.returns,
                batch.group,
                batch.tool_errors,
                batch.valid,
                keep=int(settings["roc_keep"]) or max(self.stage.group_size // 2, 2),
                mode=mode,
                minimum=(1, 1),
                seed=seed if mode == "sample" else None,
            ).keep
            return batch.take(np.flatnonzero(kept))
        return batch

    # learning -------------------------------------------------------------------------------------

    def _learn(
        self, index: int, batch: Batch, learner: Learner, seed: int, greedy: Float64 | None
    ) -> tuple[list[Float64], dict[str, Any]]:
        """(the advantages of each trajectory's tokens, metrics) of the step's updates."""
        if not arm_of(self.arm).learns or not batch.valid.any():
            return [np.zeros(n) for n in batch.lengths], common(nothing(learner))
        if self.row.credit is None:
            return self._learn_pairs(batch, learner, seed)
        examples = [example_of(t) for t in batch.trajectories]
        columns = self._columns(examples)
        given, columns = self._credit_input(batch, examples, columns, learner, greedy, seed)
        credited = self.row.credit(given, self.row.settings)
        advantages = split(credited.advantages, examples)
        if self.row.settings.get("filter") == "overlong":
            advantages = [a * (not t.truncated) for a, t in zip(advantages, batch.trajectories, strict=True)]
        columns |= self._critic_columns(credited, given, examples)
        columns |= self._covariance(given, credited, seed, examples)
        metrics = self._updates(batch, examples, advantages, columns, learner)
        if self._replay.limit:
            self._remember(index, batch, examples, given)
            metrics |= self._replay_metrics
        if self.beside.implicit is not None:
            metrics |= self._learn_implicit(batch, examples, given)
        return advantages, {**metrics, **_credit_metrics(advantages, batch)}

    def _columns(self, examples: Sequence[Example]) -> dict[str, list[Float64]]:
        """Log-probs that must be taken before the weights move."""
        sampling, found = self.session.sampling, dict[str, list[Float64]]()
        if self.beside.reference is not None:
            found["reference"] = self.beside.scores(self.beside.reference, examples, sampling)
        correction = str(self.row.settings["correction"])
        if self.staleness or correction in ("tis", "tis_sequence", "icepop"):
            found["proximal"] = self.beside.learner.frozen_scores(examples, sampling)[0]
        if correction not in ("none", "sequence_mask"):
            found["correction"] = self._corrections(correction, examples, found["proximal"])
        return found

    def _corrections(
        self, kind: str, examples: Sequence[Example], proximal: Sequence[Float64]
    ) -> list[Float64]:
        new = torch.from_numpy(np.concatenate(proximal))
        old = torch.from_numpy(np.concatenate([e.behaviour.astype(np.float64) for e in examples]))
        cap = float(self.row.settings["correction_cap"])
        if kind == "icepop":
            weight = icepop(new, old, low=1.0 / cap, high=cap)
        elif kind == "tis":
            weight = truncated_importance(new, old, cap=cap)
        else:
            counts = torch.tensor([example.trained for example in examples])
            sequence = torch.arange(len(examples)).repeat_interleave(counts)
            weight = truncated_importance(new, old, cap=cap, level="sequence", sequence=sequence)
        return split(weight, examples)

    def _credit_input(
        self,
        batch: Batch,
        examples: Sequence[Example],
        columns: dict[str, list[Float64]],
        learner: Learner,
        greedy: Float64 | None,
        seed: int,
    ) -> tuple[CreditInput, dict[str, list[Float64]]]:
        """The credit's inputs, and the columns less those that the loss does not read."""
        settings, sampling, extra = self.row.settings, self.session.sampling, dict[str, Any]()
        if greedy is not None:
            extra["greedy"] = torch.from_numpy(np.nan_to_num(greedy))
        if "reference" in columns and settings["kl_place"] == "reward":
            pairs = zip(examples, columns.pop("reference"), strict=True)
            price = [-float(settings["kl_coef"]) * (e.behaviour - ref) for e, ref in pairs]
            extra["penalty"] = torch.from_numpy(np.concatenate(price).astype(np.float64))
            if "critic" not in self.row.needs:
                total = np.array([part.sum() for part in price])
                batch = replace(batch, returns=np.where(batch.valid, batch.returns + total, 0.0))
        given = credit_input(batch, extra.pop("penalty", None))
        if "critic" in self.row.needs:
            extra["values"] = flat(learner.frozen_scores(examples, sampling)[1])
        if settings.get("bootstrap") == "value":
            extra["cut"] = self._cut(batch, examples, learner)
        if self.beside.implicit is not None:
            scores = self.beside.implicit.frozen_scores(examples, sampling)[0]
            behaviour = np.concatenate([e.behaviour for e in examples])
            extra["log_ratio"] = flat(scores) - torch.from_numpy(behaviour.astype(np.float64))
            extra["learned"] = self.beside.implicit.updates > 0
        if self.beside.teacher is not None:
            extra["teacher"] = flat(self.beside.scores(self.beside.teacher, examples, sampling))
        given = replace(given, **extra)
        if "utterance_critic" in self.row.needs:
            given = replace(given, values=self._utterance_values(given, examples, seed))
        return given, columns

    def _cut(self, batch: Batch, examples: Sequence[Example], learner: Learner) -> torch.Tensor:
        """float64[n]: the critic's value of the state in which a limit cut an episode off; 0 elsewhere."""
        cut = torch.zeros(len(examples), dtype=torch.float64)
        rows = [i for i, t in enumerate(batch.trajectories) if t.truncated and batch.valid[i]]
        if rows:
            cut[rows] = cut_values(learner, [examples[i] for i in rows])
        return cut

    def _utterance_values(self, given: CreditInput, examples: Sequence[Example], seed: int) -> torch.Tensor:
        """A = min Q - min V of each turn on its tokens, from a critic fitted to these and replayed turns.

        The critic is fitted anew each step on the trunk's present states: no weights of it to keep, and no
        features of weights that are gone.
        """
        settings = self.row.settings
        everyone = self._turns(examples, given.step_rewards, given.trajectory)
        keep = given.valid[given.trajectory]
        own = Turns(
            everyone.before[keep],
            everyone.after[keep],
            everyone.rewards[keep],
            everyone.trajectory[keep],
            everyone.weights[keep],
        )
        critic = fit_critic(
            Turns.join([*self._replayed(), own]),
            gamma=float(settings["gamma"]),
            epochs=int(settings["critic_epochs"]),
            lr=float(settings["value_lr"]),
            polyak=float(settings["polyak"]),
            seed=seed,
        )
        return steps.steps_to_tokens(turn_advantages(critic, everyone), given.step_lengths)

    def _turns(self, examples: Sequence[Example], rewards: torch.Tensor, trajectory: torch.Tensor) -> Turns:
        """The turns of examples of the present policy."""
        before, after = self.beside.states(examples)
        return Turns(before, after, rewards, trajectory, torch.ones(len(rewards), dtype=torch.float64))

    def _replayed(self) -> list[Turns]:
        """Turns of earlier steps, each weighed by how likely the present policy is to take it."""
        found: list[Turns] = []
        for past in self._replay.past:
            turns = self._turns(past.examples, torch.from_numpy(past.rewards), past.trajectory)
            logp = self.beside.learner.frozen_scores(past.examples, self.session.sampling)[0]
            found.append(replace(turns, weights=turn_weights(logp, past.examples)))
        self._replay_metrics = {
            "replay_turns": sum(len(turns.rewards) for turns in found),
            "replay_weight": mean([w for turns in found for w in turns.weights.tolist()]),
        }
        return found

    def _remember(self, index: int, batch: Batch, examples: Sequence[Example], given: CreditInput) -> None:
        """Put the step's trained episodes into the replay."""
        keep = given.valid[given.trajectory]
        own = [e for e, ok in zip(examples, batch.valid, strict=True) if ok]
        self._replay.add(index, own, given.step_rewards[keep].numpy())

    def _critic_columns(
        self, credited: Credited, given: CreditInput, examples: Sequence[Example]
    ) -> dict[str, list[Float64]]:
        if credited.targets is None or given.values is None:
            return {}
        has = torch.isfinite(credited.targets)
        return {
            "old_values": split(given.values, examples),
            "targets": split(torch.where(has, credited.targets, 0.0), examples),
            "has_target": split(has.double(), examples),
        }

    def _covariance(
        self, given: CreditInput, credited: Credited, seed: int, examples: Sequence[Example]
    ) -> dict[str, list[Float64]]:
        kind = self.row.settings["covariance"]
        if kind == "none":
            return {}
        valid = given.valid.repeat_interleave(given.lengths)
        if kind == "kl":
            held = kl_cov(given.behaviour, credited.advantages, valid=valid)
            return {"held": split(held.double(), examples)}
        clipped = torch.zeros_like(valid)  # nothing is clipped yet at a ratio of 1
        chosen = clip_cov(given.behaviour, credited.advantages, clipped, seed=seed, valid=valid)
        return {"detached": split(chosen.double(), examples)}

    def _updates(
        self,
        batch: Batch,
        examples: Sequence[Example],
        advantages: Sequence[Float64],
        columns: Mapping[str, Sequence[Float64]],
        learner: Learner,
    ) -> dict[str, Any]:
        """``updates_per_step`` optimiser steps on disjoint sets of groups.

        KL-Cov acts from the second one on: at a ratio of 1 its gradient is the sign of a rounding error.
        """
        reports: list[UpdateReport] = []
        warming = learner.updates < int(self.row.settings.get("value_warmup", 0))
        loss = RlLoss(self.row, entropy_coef=self._entropy_coefficient(), policy=not warming)
        everyone = loss.entropy_coef != 0 or learner.value_head is not None or "reference" in columns
        constant = self.row.settings.get("max_length")
        mismatch: float | None = None
        for k, part in enumerate(np.array_split(np.unique(batch.group), self.stage.updates_per_step)):
            rows = [i for i in range(len(examples)) if batch.valid[i] and batch.group[i] in part]
            chosen = [
                replace(
                    examples[i],
                    advantages=advantages[i],
                    columns={name: values[i] for name, values in columns.items() if k or name != "held"},
                )
                for i in rows
            ]
            live = [j for j, i in enumerate(rows) if everyone or bool(np.any(advantages[i] != 0.0))]
            report = learner.update(
                chosen,
                loss,
                sampling=self.session.sampling,
                aggregate=self.row.aggregate,
                constant=int(constant) if constant is not None else None,
                keep=live,
            )
            reports.append(report)
            if k == 0 and not self.staleness:
                mismatch = _agreement(loss.worst)
        merged = merge(reports)
        self._move_entropy(merged.get("entropy"))
        return {**merged, "mismatch_max": mismatch}

    def _entropy_coefficient(self) -> float:
        target = float(self.row.settings["entropy_target"])
        if not target > 0:
            return float(self.row.settings["entropy_coef"])
        if self._entropy is None:
            return 0.0
        return AdaptiveCoefficient(target).active(self._coefficient, self._entropy)

    def _move_entropy(self, entropy: float | None) -> None:
        target = float(self.row.settings["entropy_target"])
        if target > 0 and entropy is not None:
            self._entropy = max(entropy, 0.0)
            self._coefficient = AdaptiveCoefficient(target).next(self._coefficient, self._entropy)

    def _learn_implicit(
        self, batch: Batch, examples: Sequence[Example], given: CreditInput
    ) -> dict[str, Any]:
        """The implicit reward model learns from this step's outcomes, after its rewards were used."""
        assert given.log_ratio is not None
        log_ratio = given.log_ratio.clone().requires_grad_()
        beta = float(self.row.settings["beta"])
        if self.row.learn == "pairs":
            part = steps.bradley_terry_trajectories(
                log_ratio, given.step_lengths, given.trajectory, given.success, given.group,
                beta=beta, valid=given.valid,
            )  # fmt: skip
        else:
            outcome = given.success.double()
            part = steps.prime_loss(log_ratio, outcome, given.lengths, beta=beta, valid=given.valid)
        loss = part.mean
        if loss is None:
            return {"implicit_pairs": 0}
        (slope,) = torch.autograd.grad(loss, log_ratio)
        rows = [i for i in range(len(examples)) if batch.valid[i]]
        slopes = split(slope, examples)
        done = self.beside.learn_implicit(
            [examples[i] for i in rows], [slopes[i] for i in rows], self.session.sampling
        )
        return {
            "implicit_pairs": part.count,
            "implicit_loss": float(loss.detach()),
            "implicit_accuracy": part.correct / part.count,
            **done,
        }

    def _learn_pairs(self, batch: Batch, learner: Learner, seed: int) -> tuple[list[Float64], dict[str, Any]]:
        """Preference updates on pairs ranked inside each group, ``updates_per_step`` of them."""
        ranked = rank_pairs(batch, limit=int(self.row.settings["pairs"]), seed=seed)
        examples = [example_of(t) for t in batch.trajectories]
        advantages = [np.zeros(n) for n in batch.lengths]
        updates = self._on_pairs(examples, list(zip(*ranked, strict=True)), learner)
        for own, _ in updates:
            for row, value in own.items():
                advantages[row] += value
        return advantages, merge_pairs([metrics for _, metrics in updates])

    def _on_pairs(
        self, examples: Sequence[Example], pairs: Sequence[tuple[int, int]], learner: Learner
    ) -> list[tuple[dict[int, Float64], dict[str, Any]]]:
        """``updates_per_step`` updates, each on its share of the pairs, with what each returned."""
        update = PairUpdate(self.row.preference, self.row.loss_settings, self.beside, learner)
        shares = np.array_split(np.arange(len(pairs)), self.stage.updates_per_step)
        return [update.step(examples, [pairs[i] for i in own]) for own in shares]

    def _learn_turns(
        self, index: int, groups: Sequence[Group], batch: Batch, learner: Learner
    ) -> tuple[list[Float64], dict[str, Any]]:
        """The critic learns from the step's episodes; then the policy from turns that the critic ranks.

        Before its first pair, and while it warms up, the critic ranks nothing. What is returned is its
        advantage of the turns that were played.
        """
        advantages = [np.zeros(n) for n in batch.lengths]
        rows = np.flatnonzero(batch.valid)
        if not arm_of(self.arm).learns or not len(rows):
            return advantages, common(nothing(learner))
        own = batch.take(rows)
        tasks = {group.task.id: group.task for group in groups}
        critic = TurnCritic(self.session, self.row.settings, self.beside, tasks)
        warming = critic.critic.updates < int(self.row.settings["value_warmup"])
        metrics = critic.learn(own)
        if warming or not critic.critic.updates:
            return advantages, {**metrics, **common(nothing(learner))}
        unit = replace(self._unit(index, "-candidates"), phase="candidates")
        seed = derive(self.session.config.seed, self.tag, index, "candidates")
        ranked = critic.rank(unit, own, seed=seed)
        for row, t, played in zip(rows, own.trajectories, ranked.played, strict=True):
            advantages[row] = np.repeat(played, [turn.stop - turn.start for turn in t.turns])
        updates = self._on_pairs(ranked.examples, ranked.pairs, learner)
        used = {**merge_pairs([found for _, found in updates]), "candidates": len(ranked.examples)}
        return advantages, {**metrics, **used, **_credit_metrics(advantages, batch)}

    # records --------------------------------------------------------------------------------------

    def _keep_credit(
        self, unit: Unit, groups: Sequence[Group], batch: Batch, advantages: Sequence[Float64]
    ) -> None:
        """One advantage a trajectory: the mean over its tokens. Copies of a row are written once."""
        used = {t.id: i for i, t in reversed(list(enumerate(batch.trajectories))) if batch.valid[i]}
        everyone = [t for group in groups for t in group.trajectories]
        self.session.store.write_credit(
            unit.name,
            [t.id for t in everyone],
            [float(advantages[used[t.id]].mean()) if t.id in used else None for t in everyone],
            ["" if t.id in used else _why_unused(t) for t in everyone],
            [_by_turn(t, advantages[used[t.id]]) if t.id in used else [] for t in everyone],
        )

    def _signal(self, batch: Batch) -> dict[str, Any]:
        if not batch.trajectories:
            return {"groups": 0, "dead_groups": 0, "singleton_groups": 0, "unscored": 0}
        stats = group_statistics(
            torch.from_numpy(batch.returns), torch.from_numpy(batch.group), torch.from_numpy(batch.valid)
        )
        return {
            "groups": stats.groups,
            "dead_groups": stats.constant,
            "singleton_groups": stats.singletons,
            "unscored": int((~batch.valid).sum()),
        }

    def _describe(self, groups: Sequence[Group]) -> dict[str, Any]:
        """What the sampled episodes were like, by the true rewards (also in control arms)."""
        pairs = [(group.task, t) for group in groups for t in group.trajectories]
        wins = [w for w in (self.session.won(t) for _, t in pairs) if w is not None]
        values = [t.value for _, t in pairs if t.value is not None]
        out: dict[str, Any] = {
            "success": mean(wins),
            "return_mean": mean(values),
            "tool_calls": mean([t.cost.tool_calls for _, t in pairs]),
            "turns": mean([len(t.turns) for _, t in pairs]),
            "sampled_tokens": sum(t.sampled_tokens for _, t in pairs),
            "truncated": mean([float(t.truncated) for _, t in pairs]),
        }
        for key, needed in (("needed", True), ("not_needed", False)):
            calls = [
                float(t.cost.tool_calls > 0) for task, t in pairs if task.metadata.get("needs_call") is needed
            ]
            if calls:
                out[f"call_rate_{key}"] = mean(calls)
        return out


def _live(group: Group) -> bool:
    """Two of its scored returns differ."""
    return len({t.value for t in group.trajectories if t.value is not None}) > 1


def _agreement(worst: float) -> float:
    """The largest gap in log-probability; raises DataError where sampler and learner do not agree."""
    if worst > _MISMATCH_LIMIT:
        raise DataError(
            f"sampler and learner disagree by {worst:.2e} on the log-probability of a token under the same "
            f"weights; the limit is {_MISMATCH_LIMIT:g}"
        )
    return worst


def _credit_metrics(advantages: Sequence[Float64], batch: Batch) -> dict[str, float]:
    used = [float(np.abs(a).mean()) for a, ok in zip(advantages, batch.valid, strict=True) if ok and len(a)]
    return {"advantage_abs_mean": mean(used) or 0.0}


def _by_turn(trajectory: Trajectory, advantages: Float64) -> list[float]:
    """The mean over each turn's tokens; empty where every token has the same."""
    if not len(advantages) or bool(np.all(advantages == advantages[0])):
        return []
    ends = np.cumsum([turn.stop - turn.start for turn in trajectory.turns])[:-1]
    return [float(part.mean()) if len(part) else 0.0 for part in np.split(advantages, ends)]


def _why_unused(trajectory: Trajectory) -> str:
    final = trajectory.final
    if isinstance(final, Scored):
        return "left out by the filter" if trajectory.sampled_tokens else "no token was sampled"
    return final.reason if isinstance(final, Unscored) else "not scored"

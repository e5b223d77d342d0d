"""Turns ranked by a critic that reads what the policy never sees (SWEET-RL, arXiv 2503.15478).

The privileged text goes into the critic's own examples and nowhere else: not into a prompt, a request, a
stored trajectory or an example of the policy. Must not know environments or the loss of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.core.errors import DataError
from surefoot.core.types import Int32, Sampling, Task, Trajectory, Turn
from surefoot.credit import steps
from surefoot.learner.batch import Example, Float64
from surefoot.learner.learner import Learner
from surefoot.objectives.preference import pairs_by_score
from surefoot.training.algorithms import Settings
from surefoot.training.companions import Beside, flat, follow, split
from surefoot.training.session import Session, Unit
from surefoot.training.signal import Batch, credit_input, example_of

_PLAIN = Sampling()  # advantages are defined on the models' own distributions


def informed(example: Example, preamble: Int32) -> Example:
    """``example`` as the critic reads it: ``preamble`` int32[N] before each segment, nothing else changed."""
    unread = np.zeros(len(preamble), np.bool_)
    segments = tuple(
        (np.concatenate([preamble, tokens]), np.concatenate([unread, mask]))
        for tokens, mask in example.segments
    )
    return Example(segments, example.behaviour, example.advantages, example.turns)


def turn_example(trajectory: Trajectory, turn: Turn) -> Example:
    """One turn to learn from: its own tokens after everything that came before them."""
    segment = trajectory.segments[turn.segment]
    mask = np.arange(turn.stop) >= turn.start
    behaviour = segment.logprobs[turn.start : turn.stop]
    size = turn.stop - turn.start
    return Example(((segment.tokens[: turn.stop], mask),), behaviour, np.zeros(size), np.array([size]))


@dataclass(frozen=True, slots=True, eq=False)
class RankedTurns:
    """Turns to learn from and rows of them, (chosen, rejected). played: float64[K] of each trajectory, the
    critic's advantage of the turns that it took.
    """

    examples: list[Example]
    pairs: list[tuple[int, int]]
    played: list[Float64]


class TurnCritic:
    """The critic of one stage at work. Its advantage of a turn is the mean over the turn's tokens of
    log p - log p_reference, where both models read the privileged text; so it is 0 until the critic learns.
    """

    def __init__(
        self, session: Session, settings: Settings, beside: Beside, tasks: Mapping[str, Task]
    ) -> None:
        assert beside.turn_critic is not None, "the row's needs name the models that are built"
        self.session, self.settings, self.beside, self.tasks = session, settings, beside, tasks
        self.critic: Learner = beside.turn_critic
        self._preambles: dict[str, Int32] = {}

    def learn(self, batch: Batch) -> dict[str, Any]:
        """``critic_epochs`` updates on all pairs of a success and a failure at a task; metrics of the first.

        All trajectories of ``batch`` must be valid.
        """
        examples = [self._informed(example_of(t), t.task_id) for t in batch.trajectories]
        given = credit_input(batch)
        reference = flat(self.beside.scores(self.beside.reference, examples, _PLAIN))
        found: dict[str, Any] = {}
        for _ in range(int(self.settings["critic_epochs"])):
            logp = flat(self.critic.frozen_scores(examples, _PLAIN)[0]).requires_grad_()
            part = steps.sweet_loss(
                logp, reference, given.step_lengths, given.trajectory, given.success, given.group,
                beta=float(self.settings["critic_beta"]),
            )  # fmt: skip
            loss = part.mean
            if loss is None:
                return {"critic_pairs": 0}
            (slope,) = torch.autograd.grad(loss, logp)
            slopes = split(slope, examples)
            live = [i for i, own in enumerate(slopes) if np.any(own != 0.0)]
            report = follow(self.critic, [examples[i] for i in live], [slopes[i] for i in live], _PLAIN)
            found = found or {
                "critic_pairs": part.count,
                "critic_loss": float(loss.detach()),
                "critic_accuracy": part.correct / part.count,
                "critic_grad_norm": report.grad_norm,
                "critic_stepped": report.stepped,
            }
        return found

    def rank(self, unit: Unit, batch: Batch, *, seed: int) -> RankedTurns:
        """Sample further turns where ``batch``'s were taken, and pair the better with the worse."""
        tasks = [self.tasks[t.task_id] for t in batch.trajectories]
        played = list(zip(tasks, batch.trajectories, strict=True))
        members = int(self.settings["candidates"]) - 1
        others = self.session.candidates(unit, played, members=members, seed=seed)
        turns: list[tuple[Trajectory, Turn]] = []
        place: list[int] = []
        owned: list[list[int]] = []  # of each trajectory, the rows of the turns that it took
        number = 0
        for t in batch.trajectories:
            owned.append([])
            for turn, more in zip(t.turns, others[t.id], strict=True):
                owned[-1].append(len(turns))
                turns += [(t, turn), *((other, other.turns[0]) for other in more)]
                place += [number] * (1 + len(more))
                number += 1
        examples = [turn_example(*item) for item in turns]
        score = self.advantages(examples, [t.task_id for t, _ in turns])
        content = [e.segments[0][0][e.segments[0][1]].tobytes() for e in examples]
        limit = int(self.settings["pairs"])
        ranked = pairs_by_score(score, torch.tensor(place), limit=limit, seed=seed, content=content)
        pairs = [(int(a), int(b)) for a, b in zip(*ranked, strict=True)]
        return RankedTurns(examples, pairs, [score[rows].numpy() for rows in owned])

    def advantages(self, examples: Sequence[Example], task_ids: Sequence[str]) -> Tensor:
        """float64[K]: the critic's advantage of every turn of the examples, which belong to these tasks."""
        read = [self._informed(e, name) for e, name in zip(examples, task_ids, strict=True)]
        logp = flat(self.critic.frozen_scores(read, _PLAIN)[0])
        reference = flat(self.beside.scores(self.beside.reference, read, _PLAIN))
        lengths = torch.from_numpy(np.concatenate([e.turns for e in read]))
        return steps.sweet_advantage(logp, reference, lengths)

    def _informed(self, example: Example, task_id: str) -> Example:
        if self.settings["privileged"] == "withheld":
            return example
        if task_id not in self._preambles:
            text = self.session.cls.privileged(self.tasks[task_id])
            self._preambles[task_id] = self.session.codec.preamble(text)
        found = informed(example, self._preambles[task_id])
        longest, context = max(len(tokens) for tokens, _ in found.segments), self.session.loaded.context
        if longest > context:
            room = context - len(self._preambles[task_id])
            raise DataError(
                f"privileged({task_id!r}): an episode and this text have {longest} tokens; the critic reads "
                f"at most {context}; shorten the text, or cap episodes at {room} tokens"
            )
        return found

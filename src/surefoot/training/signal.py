"""What a batch of episodes says, as the arrays that credit is computed from.

Reads trajectories; must not know any algorithm by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.core.types import Group, Scored, Trajectory
from surefoot.credit.filters import tool_penalty
from surefoot.learner.batch import Example
from surefoot.training.arms import arm_of, arm_order, arm_returns

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


def example_of(trajectory: Trajectory, advantages: float | Float64 = 0.0, **columns: Float64) -> Example:
    """What a trajectory teaches: its own tokens, each with its advantage (one number: the same for all)."""
    masks = [(segment.tokens, segment.acted) for segment in trajectory.segments]
    behaviour = np.concatenate([s.logprobs[s.acted] for s in trajectory.segments])
    turns = np.array([turn.stop - turn.start for turn in trajectory.turns], np.int64)
    behaviour = np.nan_to_num(behaviour, nan=0.0).astype(np.float32)
    own = np.broadcast_to(np.asarray(advantages, np.float64), behaviour.shape).copy()
    return Example(tuple(masks), behaviour, own, turns, columns)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The trajectories of one step as arrays; row i of each belongs to ``trajectories[i]``.

    returns, turn_reward: float64[n], what the arm trains on (0 where not ``valid``). success: bool[n] of
    the arm. calls, sizes: int64[n] tool calls and sampled tokens as they are judged; tool_errors:
    float64[n], see ``filters.tool_penalty``. group: int64[n]. ``true_steps`` is False in control arms,
    whose step rewards are all 0.
    """

    trajectories: tuple[Trajectory, ...]
    prompts: tuple[tuple[str, ...], ...]
    group: Int64
    valid: Bool
    returns: Float64
    success: Bool
    turn_reward: Float64
    calls: Int64
    sizes: Int64
    tool_errors: Float64
    true_steps: bool

    def take(self, rows: Int64, group: Int64 | None = None) -> Batch:
        """The batch of ``rows`` (repeats allowed), under new group numbers where given."""
        judged = ("valid", "returns", "success", "turn_reward", "calls", "sizes", "tool_errors")
        picked = {name: getattr(self, name)[rows] for name in judged}
        return replace(
            self,
            trajectories=tuple(self.trajectories[i] for i in rows),
            prompts=tuple(self.prompts[i] for i in rows),
            group=self.group[rows] if group is None else group,
            **picked,
        )

    @property
    def lengths(self) -> Int64:
        """Trained tokens of each trajectory: int64[n]."""
        found = [sum(turn.stop - turn.start for turn in t.turns) for t in self.trajectories]
        return np.array(found, np.int64)


def read_batch(
    groups: Sequence[Group],
    *,
    arm: str,
    seed: int,
    won: Callable[[Trajectory], float | None],
    extra: Callable[[Trajectory], float] | None = None,
) -> Batch:
    """Arrays of ``groups`` under ``arm``; ``won`` gives the success of a trajectory, 0 to 1.

    ``extra`` is added to each true return. A control arm moves everything that is judged (returns,
    success, tool use, calls, length) in one way, so that no part of the true order is left for an
    algorithm to find.
    """
    pairs = [(i, group, t) for i, group in enumerate(groups) for t in group.trajectories]
    everyone = tuple(t for _, _, t in pairs)
    number = np.array([i for i, _, _ in pairs], np.int64)
    valid = np.array([isinstance(t.final, Scored) and t.sampled_tokens > 0 for t in everyone], np.bool_)
    true = np.array([t.final.value if isinstance(t.final, Scored) else 0.0 for t in everyone])
    if extra is not None:
        true = true + np.where(valid, [extra(t) for t in everyone], 0.0)
    returns = arm_returns(arm, true, number, valid, seed=seed)
    order = arm_order(arm, number, valid, seed=seed)
    success = np.array([(won(t) or 0.0) >= 1.0 - 1e-6 for t in everyone], np.bool_)[order]
    turn_reward = np.array([_tool_use(t) for t in everyone])[order]
    calls = np.array([t.cost.tool_calls for t in everyone], np.int64)[order]
    sizes = np.array([t.sampled_tokens for t in everyone], np.int64)[order]
    errors = _tool_errors(everyone)[order]
    signal = arm_of(arm).signal
    if signal in ("random", "constant"):
        # These arms draw returns of their own; the upper end of the draw counts as success.
        ends = (returns[valid].min(), returns[valid].max()) if valid.any() else (0.0, 0.0)
        success = valid & (returns > 0.5 * (ends[0] + ends[1]))
        turn_reward, calls, sizes = np.zeros_like(turn_reward), np.zeros_like(calls), np.zeros_like(sizes)
        errors = np.zeros_like(errors)
    prompts = tuple(tuple(m.content for m in group.task.prompt) for _, group, _ in pairs)
    return Batch(
        everyone,
        prompts,
        number,
        valid,
        returns,
        success,
        turn_reward,
        calls,
        sizes,
        errors,
        signal == "true",
    )


def _tool_errors(everyone: Sequence[Trajectory]) -> Float64:
    """GRPO-RoC's penalty of each trajectory, by the tools' own status."""
    results = [[result for turn in t.turns for result in turn.tool_results] for t in everyone]
    failed = np.array([sum(not result.ok for result in found) for found in results], np.int64)
    return tool_penalty(failed, np.array([len(found) for found in results], np.int64))


def _tool_use(trajectory: Trajectory) -> float:
    """1 when a tool ran without an error of its own, by the tool's status and never by its text."""
    return float(any(result.ok for turn in trajectory.turns for result in turn.tool_results))


@dataclass(frozen=True, slots=True, eq=False)
class CreditInput:
    """What credit is computed from. n trajectories, K turns and M trained tokens, each in order.

    returns, turn_reward: float64[n]; group, lengths: int64[n]; valid, success: bool[n].
    trajectory, step_lengths: int64[K]; step_rewards: float64[K], the return included at the last turn;
    tool_step: bool[K]; anchors: what the environment showed before each turn. penalty: float64[M], a
    price per token (KL) that is not in the returns. Where the algorithm asks for them: values: float64[M]
    (a critic's), cut: float64[n] (its value of the last state where a limit cut the episode off, else 0),
    log_ratio: float64[M] (an implicit reward model's), greedy: float64[n] (returns of the
    greedy policy), teacher: float64[M] (a teacher's log-probs) beside behaviour: float64[M].
    ``learned`` says whether the implicit reward model has seen a pair yet.
    """

    returns: Tensor
    turn_reward: Tensor
    group: Tensor
    valid: Tensor
    success: Tensor
    lengths: Tensor
    trajectory: Tensor
    step_lengths: Tensor
    step_rewards: Tensor
    tool_step: Tensor
    anchors: Sequence[object]
    behaviour: Tensor
    penalty: Tensor
    values: Tensor | None = None
    cut: Tensor | None = None
    log_ratio: Tensor | None = None
    greedy: Tensor | None = None
    teacher: Tensor | None = None
    learned: bool = False


def credit_input(batch: Batch, penalty: Tensor | None = None) -> CreditInput:
    """The tensors of ``batch``, without the optional ones."""
    turns = [(i, k, turn) for i, t in enumerate(batch.trajectories) for k, turn in enumerate(t.turns)]
    owner = torch.tensor([i for i, _, _ in turns], dtype=torch.int64)
    rewards = torch.tensor(
        [turn.step_reward if batch.true_steps else 0.0 for _, _, turn in turns], dtype=torch.float64
    )
    returns = torch.from_numpy(batch.returns)
    last = torch.tensor([k + 1 == len(batch.trajectories[i].turns) for i, k, _ in turns], dtype=torch.bool)
    rewards = rewards + torch.where(last, returns[owner], 0.0)
    behaviour = [example_of(t).behaviour.astype(np.float64) for t in batch.trajectories]
    lengths = torch.from_numpy(batch.lengths)
    return CreditInput(
        returns=returns,
        turn_reward=torch.from_numpy(batch.turn_reward),
        group=torch.from_numpy(batch.group),
        valid=torch.from_numpy(batch.valid),
        success=torch.from_numpy(batch.success),
        lengths=lengths,
        trajectory=owner,
        step_lengths=torch.tensor([turn.stop - turn.start for _, _, turn in turns]),
        step_rewards=rewards,
        tool_step=torch.tensor([bool(turn.tool_results) for _, _, turn in turns], dtype=torch.bool),
        anchors=[_shown(batch, i, k) for i, k, _ in turns],
        behaviour=torch.from_numpy(np.concatenate(behaviour)),
        penalty=torch.zeros(int(lengths.sum()), dtype=torch.float64) if penalty is None else penalty,
    )


def _shown(batch: Batch, i: int, turn: int) -> tuple[str, ...]:
    """What the environment showed last before a turn, without the history."""
    if turn == 0:
        return batch.prompts[i]
    return tuple(message.content for message in batch.trajectories[i].turns[turn - 1].observation)

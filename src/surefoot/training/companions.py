"""What an algorithm needs beside the policy: a reference, a teacher, models that judge, a critic.

Built from the policy as a stage begins; all of it that changes is part of the checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.core.errors import ConfigError
from surefoot.core.types import Sampling
from surefoot.learner.batch import Example, Float64
from surefoot.learner.checkpoint import Companions
from surefoot.learner.learner import (
    Learner,
    OptimizerSettings,
    UpdateReport,
    end_states,
    frozen_scores,
    turn_states,
)
from surefoot.policy.forward import base_of
from surefoot.training.algorithms import Algorithm
from surefoot.training.config import RunConfig
from surefoot.training.losses import linear_loss
from surefoot.training.session import load_policy


def value_head_of(model: nn.Module) -> nn.Linear:
    """A linear value head on the model's last hidden state, zero at the start."""
    width = int(base_of(model).get_output_embeddings().weight.shape[1])
    head = nn.Linear(width, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class Beside:
    """The models beside one learner. ``reference`` and ``teacher`` are frozen, the others learn."""

    def __init__(
        self, row: Algorithm, learner: Learner, config: RunConfig, *, teacher: str | None, steps: int
    ) -> None:
        self.learner = learner
        needs = row.wanted()
        self.reference = _frozen(learner.model) if "reference" in needs else None
        self.teacher: nn.Module | None = None
        if "teacher" in needs:
            self.teacher = _teacher(config, teacher, learner.model)
        self.implicit: Learner | None = None
        if "implicit" in needs:
            self.implicit = _twin(learner, float(row.settings["implicit_lr"]), 10.0, steps)
        self.turn_critic: Learner | None = None
        if "turn_critic" in needs:
            updates = steps * int(row.settings["critic_epochs"])
            self.turn_critic = _twin(learner, float(row.settings["value_lr"]), 1.0, updates)

    @property
    def companions(self) -> Companions:
        """What a checkpoint must hold. The teacher never changes and is loaded by its name."""
        found: dict[str, Learner | nn.Module] = {}
        if self.reference is not None:
            found["reference"] = self.reference
        if self.implicit is not None:
            found["implicit"] = self.implicit
        if self.turn_critic is not None:
            found["turn_critic"] = self.turn_critic
        return found

    def reset_reference(self) -> None:
        """Make the policy as it is the reference (ProRL)."""
        if self.reference is not None:
            self.reference = _frozen(self.learner.model)

    def scores(
        self, model: nn.Module | None, examples: Sequence[Example], sampling: Sampling
    ) -> list[Float64]:
        """Log-probs of each example's tokens under a frozen model."""
        assert model is not None, "the row's needs name the models that are built"
        learner = self.learner
        budget, chunk = learner.tokens_per_batch, learner.chunk
        return frozen_scores(model, examples, sampling, tokens_per_batch=budget, chunk=chunk)[0]

    def learn_implicit(
        self, examples: Sequence[Example], slopes: Sequence[Float64], sampling: Sampling
    ) -> dict[str, Any]:
        """One step of the implicit reward model along the derivative of its loss by each log-prob."""
        assert self.implicit is not None
        report = follow(self.implicit, examples, slopes, sampling)
        return {"implicit_grad_norm": report.grad_norm, "implicit_stepped": report.stepped}

    def states(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """Hidden states around each turn; see :func:`surefoot.learner.learner.turn_states`."""
        return turn_states(self.learner.model, examples, tokens_per_batch=self.learner.tokens_per_batch)


def cut_values(learner: Learner, examples: Sequence[Example]) -> Tensor:
    """float64[n]: the critic's value of the state that each example ends in."""
    assert learner.value_head is not None, "the row's needs name a critic"
    states = end_states(learner.model, examples, tokens_per_batch=learner.tokens_per_batch)
    with torch.no_grad():
        return learner.value_head(states)[:, 0].double()


def follow(
    learner: Learner, examples: Sequence[Example], slopes: Sequence[Float64], sampling: Sampling
) -> UpdateReport:
    """One optimiser step down a loss given by its derivative ``slopes`` by each token's log-prob."""
    shifted = [
        Example(e.segments, e.behaviour, slope, e.turns) for e, slope in zip(examples, slopes, strict=True)
    ]
    return learner.update(shifted, linear_loss, sampling=sampling)


def flat(parts: Sequence[Float64]) -> Tensor:
    """One array for each example -> float64[M] over all of them."""
    return torch.from_numpy(np.concatenate(parts))


def split(tokens: Tensor, examples: Sequence[Example]) -> list[Float64]:
    """The inverse of :func:`flat`: float64[M] over all examples -> one array for each."""
    ends = np.cumsum([example.trained for example in examples])[:-1]
    return [np.asarray(part) for part in np.split(tokens.double().numpy(), ends)]


def _twin(learner: Learner, lr: float, clip_norm: float, updates: int) -> Learner:
    """A copy of the policy that learns something else, with an optimiser of its own."""
    return Learner(
        copy.deepcopy(learner.model),
        OptimizerSettings(lr=lr, clip_norm=clip_norm),
        total_updates=updates,
        tokens_per_batch=learner.tokens_per_batch,
        chunk=learner.chunk,
        checkpoint_activations=learner.checkpoint_activations,
    )


def _frozen(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.grad = None
        parameter.requires_grad_(False)
    return twin.eval()


def _teacher(config: RunConfig, name: str | None, student: nn.Module) -> nn.Module:
    """The teacher model; its vocabulary must be the student's. Raises ConfigError."""
    if name is None:
        raise ConfigError('algorithm "distill" needs teacher = "model name" in its stage')
    plain = config.model.model_copy(update={"name": name, "lora": None})
    teacher = load_policy(config.model_copy(update={"model": plain})).model
    sizes = [int(base_of(m).get_output_embeddings().weight.shape[0]) for m in (teacher, student)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"teacher {name!r} has {sizes[0]} tokens and the policy {sizes[1]}; both must share a tokenizer"
        )
    return _frozen(teacher)

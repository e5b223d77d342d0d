"""Scores whole conversations by a sequence classifier, and trains it along a loss of those scores.

A score is the classifier's head on the state of a conversation's last token; the caller says which token
that is by where it ends the conversation. Must not know episodes, pairs or rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.core.errors import DataError
from surefoot.core.types import Int32
from surefoot.learner.batch import Float64, split_by_tokens
from surefoot.learner.learner import Learner, UpdateReport, packed_states


def score_batch(model: nn.Module, conversations: Sequence[Int32]) -> tuple[Tensor, int]:
    """(float32[n] with gradient, packed tokens) of one packed pass over int32[N_i] conversations."""
    trie, hidden = packed_states(model, conversations)
    last = torch.tensor([int(place[-1]) for place in trie.places])
    head = cast("nn.Linear", model.score)
    return head(hidden.index_select(0, last))[:, 0], len(trie)


def conversation_scores(
    model: nn.Module, conversations: Sequence[Int32], *, tokens_per_batch: int
) -> Float64:
    """float64[n]: the score of each conversation, without gradient. Raises DataError for an empty one."""
    _check(conversations)
    found = np.zeros(len(conversations))
    with torch.no_grad():
        for rows in split_by_tokens([[tokens] for tokens in conversations], tokens_per_batch):
            scores, _ = score_batch(model, [conversations[i] for i in rows])
            found[rows] = scores.double().numpy()
    return found


class ScoreLearner(Learner):
    """A learner whose model is a sequence classifier with one output: ``model.score`` on its trunk."""

    def scores(self, conversations: Sequence[Int32]) -> Float64:
        """float64[n] under the weights as they are; see :func:`conversation_scores`."""
        return conversation_scores(self.model, conversations, tokens_per_batch=self.tokens_per_batch)

    def update_along(self, conversations: Sequence[Int32], slopes: Float64) -> UpdateReport:
        """One optimiser step down sum(slope * score): exact for any loss with these slopes by the scores.

        ``slopes``: float64[n]. No micro-batch needs to hold both sides of a pair. Every token of a
        conversation counts as trained: its score reads them all.
        """
        _check(conversations)
        if len(slopes) != len(conversations):
            raise DataError(f"slopes has {len(slopes)} entries for {len(conversations)} conversations")
        factor = self.settings.factor(self.updates, self.total_updates)
        packed = 0
        batches = split_by_tokens([[tokens] for tokens in conversations], self.tokens_per_batch)
        self.model.train(self.checkpoint_activations)
        for rows in batches:
            scores, size = score_batch(self.model, [conversations[i] for i in rows])
            part = (torch.from_numpy(slopes[rows]) * scores.double()).sum()
            cast("Any", part).backward()
            packed += size
        self.model.eval()
        read = sum(len(tokens) for tokens in conversations)
        return self._step({}, self.settings.lr * factor, read, packed, len(batches))


def _check(conversations: Sequence[Int32]) -> None:
    for i, tokens in enumerate(conversations):
        if len(tokens) == 0:
            raise DataError(f"conversations[{i}] is empty; a score needs at least one token")

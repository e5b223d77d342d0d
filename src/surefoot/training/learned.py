"""A trained reward model as a reward: what a recipe's ``rewards.learned`` names.

The model is loaded when the first episode is scored. Must not know how such a model is trained.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.core.errors import ConfigError, ModelError, StorageError
from surefoot.core.types import Int32, Score, Scored, Trust, Unscored
from surefoot.learner.scores import conversation_scores
from surefoot.policy.models import load_tokenizer
from surefoot.policy.rendering import Codec, make_codec
from surefoot.policy.reward_model import (
    WEIGHTS,
    RewardModel,
    RewardModelRecord,
    conversation_of,
    load_reward_model,
    read_record,
)
from surefoot.rewards.base import Episode, Reward, reward
from surefoot.training.config import RunConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAME = "reward_model"
_EVENT = "learned_reward"
_SECONDS = 600.0  # one group on a busy machine; other groups of an audit wait in the same line


def learned_reward(folder: Path, *, tokens_per_batch: int) -> Reward:
    """The reward of the reward model in ``folder``: sigmoid(score - offset), a group of episodes at once.

    The score is the model's on the tokens that the policy saw and wrote; an episode of no policy (a scripted
    play) is written in the model's own format. Of a conversation longer than the model's context the last
    part is read. Raises ConfigError when the folder holds no reward model.
    """
    _record(folder)
    scorer = _Scorer(folder, tokens_per_batch)
    declare = reward(trust=Trust.LEARNED, span=(0.0, 1.0), group=True, name=NAME, seconds=_SECONDS)
    return declare(scorer.scores)


class _Scorer:
    """Loads a reward model once, and scores one group at a time."""

    def __init__(self, folder: Path, tokens_per_batch: int) -> None:
        self.folder, self.tokens_per_batch = folder, tokens_per_batch
        self._one_at_a_time = threading.Lock()
        self._found: tuple[RewardModel, Codec] | None = None

    def scores(self, episodes: Sequence[Episode]) -> list[Score]:
        """One score for each episode; Unscored where nobody said anything."""
        with self._one_at_a_time:
            model, codec = self._loaded()
            context = model.loaded.context
            read = [_conversation(episode, codec) for episode in episodes]
            spoken = [i for i, tokens in enumerate(read) if tokens is not None]
            given = [tokens[-context:] for tokens in read if tokens is not None]
            values = conversation_scores(model.loaded.model, given, tokens_per_batch=self.tokens_per_batch)
        found: list[Score] = [Unscored("nothing was said in the episode", NAME)] * len(episodes)
        for i, value in zip(spoken, values.tolist(), strict=True):
            share = _sigmoid(value - model.record.offset)
            found[i] = Scored(share, Trust.LEARNED, NAME, f"score {value:.4f}")
        return found

    def _loaded(self) -> tuple[RewardModel, Codec]:
        if self._found is None:
            model = load_reward_model(self.folder)
            self._found = model, make_codec(model.loaded)
        return self._found


def _conversation(episode: Episode, codec: Codec) -> Int32 | None:
    """int32[N], up to the last token that the agent wrote; None when it wrote none."""
    if episode.segments:
        return conversation_of(episode.segments)
    own = [i for i, message in enumerate(episode.messages) if message.role == "assistant"]
    return codec.finished(episode.messages[: own[-1] + 1], episode.tools) if own else None


def _sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


# -------------------- what is checked and kept


def check_learned(config: RunConfig) -> None:
    """Raises ConfigError when the recipe's reward model is missing or reads other tokens than the policy.

    A policy that is not on this machine yet is compared once it is loaded.
    """
    if config.rewards.learned is None:
        return
    folder = Path(config.rewards.learned.path)
    _record(folder)
    try:
        policy = load_tokenizer(config.model.name)
    except ModelError:
        return
    check_vocabulary(folder, policy, config.model.name)


def check_vocabulary(folder: Path, policy: Tokenizer, name: str) -> None:
    """Raises ConfigError unless the reward model's tokenizer has the policy's tokens under the same ids."""
    try:
        own = load_tokenizer(folder)
    except ModelError as error:
        raise ConfigError(f"rewards.learned.path: {error}") from error
    if own.get_vocab() != policy.get_vocab():
        raise ConfigError(
            f"rewards.learned.path = {str(folder)!r}: its tokenizer is not that of model.name = {name!r}; "
            "a reward model reads the tokens that the policy wrote, so train it in a run with this model"
        )


def learned_events(config: RunConfig) -> list[tuple[str, dict[str, Any]]]:
    """What a run writes down of its reward model: (kind, fields)."""
    if config.rewards.learned is None:
        return []
    folder = Path(config.rewards.learned.path)
    facts = _record(folder).facts
    right = facts.get("held_out_accuracy")
    known = "nothing is known of it" if right is None else f"held-out pairs in order: {right:.3f}"
    fields = {"sha256": _fingerprint(folder), "facts": dict(facts), "message": f"reward model: {known}"}
    return [(_EVENT, {"path": str(folder), **fields})]


def check_unchanged(config: RunConfig, events: Sequence[Mapping[str, Any]]) -> None:
    """Raises StorageError when a run that goes on would score with other weights than it began with."""
    began = next((event for event in events if event["kind"] == _EVENT), None)
    if config.rewards.learned is not None and began is not None:
        folder = Path(config.rewards.learned.path)
        if _fingerprint(folder) != began["sha256"]:
            raise StorageError(
                f"rewards.learned.path = {str(folder)!r}: its weights were changed after the run began; "
                "put them back or start a new run"
            )


def _record(folder: Path) -> RewardModelRecord:
    try:
        return read_record(folder)
    except ModelError as error:
        raise ConfigError(f"rewards.learned.path = {str(folder)!r}: {error}") from error


def _fingerprint(folder: Path) -> str:
    """SHA-256 over the weights' files."""
    total = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"rewards.learned.path = {str(folder)!r}: there is no {WEIGHTS} in it")
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                total.update(block)
    return total.hexdigest()

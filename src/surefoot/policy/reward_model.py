"""A reward model: a policy's layers under a linear head with one output, as a folder on disk.

The folder is what transformers calls a sequence classifier, so other libraries read it and theirs can be
read here. Must not know how the model is trained or what its scores are used for.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from safetensors import SafetensorError

from surefoot.core.errors import ModelError, StorageError
from surefoot.core.seeds import derive
from surefoot.core.types import Int32, Segment
from surefoot.policy.forward import base_of, install
from surefoot.policy.models import LoadedModel, load_classifier, no_progress_bar
from surefoot.runs.files import write_folder

if TYPE_CHECKING:
    from torch import nn

RECORD = "reward_model.json"
WEIGHTS = "model.safetensors"  # or several parts of another library
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RewardModelRecord:
    """What is known of a reward model beside its weights.

    ``model``: the policy that it began as. ``offset``: its mean score on the episodes it learned from, which
    their order leaves open. ``facts``: how it was trained and what it got right, as plain values.
    """

    model: str
    offset: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A loaded reward model, ready for packed attention, with its record."""

    loaded: LoadedModel
    record: RewardModelRecord


def conversation_of(segments: Sequence[Segment]) -> Int32 | None:
    """int32[N]: what the policy saw last, up to the last token of its own; None when it wrote none.

    Where the end stands is known from who produced each token, never from a token's value: the padding
    token of many models also ends their turns. After an edited history the last segment holds all of it.
    """
    for segment in reversed(segments):
        own = np.flatnonzero(segment.acted)
        if len(own):
            return segment.tokens[: int(own[-1]) + 1]
    return None


def classifier_of(policy: LoadedModel, *, seed: int) -> LoadedModel:
    """A reward model that starts from ``policy``: a copy of its layers (adapters merged), and a new head.

    The head is drawn from N(0, 1 / (d + 1)) by ``seed``, d the hidden size (arXiv 2009.01325); it has no
    bias, which no order of scores could teach. Shares no weight with the policy. Raises ModelError when
    transformers has no sequence classifier of the architecture.
    """
    import torch
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    source = _plain(policy.model)
    config = copy.deepcopy(source.config)
    kind = cast("Any", MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING).get(type(config), None)
    if kind is None:
        raise ModelError(
            f"model {policy.name!r}: transformers has no sequence classifier of this architecture"
        )
    config.num_labels = 1
    # Other libraries then read the state of the last token, as is done here, and of no token by its value.
    config.get_text_config().pad_token_id = None
    config._attn_implementation = "eager"  # until it is installed below; a copy may name the policy's own
    with torch.random.fork_rng(devices=[]):
        model: Any = kind(config).float().eval()
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(f"model {policy.name!r}: its sequence classifier has no linear head named score")
    getattr(model, model.base_model_prefix).load_state_dict(source.get_decoder().state_dict())
    generator = torch.Generator().manual_seed(derive("reward head", seed))
    torch.nn.init.normal_(head.weight, std=1.0 / math.sqrt(head.in_features + 1), generator=generator)
    install(model)
    return replace(policy, model=model, path=None)


def save_reward_model(folder: Path, loaded: LoadedModel, record: RewardModelRecord) -> None:
    """Write the folder whole or not at all, in place of an older one. Raises StorageError."""
    try:
        with write_folder(folder) as new:
            with no_progress_bar():
                loaded.model.save_pretrained(str(new))
            loaded.tokenizer.save_pretrained(str(new))
            (new / RECORD).write_text(json.dumps({"format": _FORMAT, **asdict(record)}, indent=1))
    except (OSError, SafetensorError) as error:
        raise StorageError(f"reward model {folder} could not be written: {error}") from error


def read_record(folder: Path) -> RewardModelRecord:
    """The record of a folder; one that another library wrote has none, and an offset of 0.

    Raises ModelError for a folder that holds no model, or a record that cannot be read.
    """
    if not folder.is_dir():
        raise ModelError(f"reward model {folder}: there is no such folder")
    outputs = len(_json(folder / "config.json").get("id2label", ()))
    if outputs != 1:
        raise ModelError(
            f"reward model {folder}: config.json names {outputs} outputs in id2label; it must be 1"
        )
    file = folder / RECORD
    if not file.is_file():
        return RewardModelRecord(str(folder))
    found = _json(file)
    if found.get("format") != _FORMAT:
        raise ModelError(f"{file} has format {found.get('format')}; this version reads {_FORMAT}")
    try:
        return RewardModelRecord(str(found["model"]), float(found["offset"]), dict(found["facts"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is damaged: {error!r}") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        found: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds no JSON object")
    return cast("dict[str, Any]", found)


def load_reward_model(folder: Path) -> RewardModel:
    """Load a folder. Raises ModelError for one that is missing, damaged, or no reward model."""
    record = read_record(folder)
    loaded = load_classifier(folder)
    if not hasattr(loaded.model, "score"):
        raise ModelError(f"reward model {folder}: it has no linear head named score")
    for parameter in loaded.model.parameters():
        # Weights in a mapped file may lie at odd addresses, where the same product rounds otherwise.
        parameter.data = parameter.data.clone()
    install(loaded.model)
    # Its codec goes by the name of the model that it began as.
    return RewardModel(replace(loaded, name=record.model), record)


def _plain(model: nn.Module) -> Any:
    """The transformers causal-LM of a policy; with adapters, a copy into which they are merged."""
    if base_of(model) is model:
        return model
    return cast("Any", copy.deepcopy(model)).merge_and_unload()

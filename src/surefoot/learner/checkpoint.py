"""Checkpoints: weights and optimiser state, written whole or not at all, read back bit for bit.

Every file carries a checksum. Must not know what the numbers mean.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from surefoot.core.errors import StorageError
from surefoot.learner.learner import Learner
from surefoot.policy.forward import base_of
from surefoot.runs.files import write_folder

_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_VALUE_HEAD = "value_head.safetensors"
_SCHEMA = 1
_ADAPTER = ".lora_"

# What learns or is kept beside the policy, by name: a reward model that learns, a frozen reference.
Companions = Mapping[str, "Learner | nn.Module"]
_NO_COMPANIONS: Companions = MappingProxyType({})


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters to store: the adapters' where there are any, else each one once."""
    every = {name: p.detach() for name, p in model.named_parameters()}
    adapters = base_of(model) is not model
    return {name: p for name, p in every.items() if not adapters or _ADAPTER in name}


def save(
    path: Path,
    learner: Learner,
    state: Mapping[str, Any],
    *,
    optimizer: bool = True,
    companions: Companions = _NO_COMPANIONS,
) -> None:
    """Write a checkpoint folder. Raises StorageError on a full disk; nothing older is touched.

    Without ``optimizer`` only the policy's weights are kept: what evaluation needs.
    """
    try:
        with write_folder(path) as folder:
            save_file(named_weights(learner.model), str(folder / _WEIGHTS))
            if optimizer:
                _save_progress(folder, "", learner)
                for name, companion in companions.items():
                    model = companion.model if isinstance(companion, Learner) else companion
                    save_file(named_weights(model), str(folder / f"{name}.{_WEIGHTS}"))
                    if isinstance(companion, Learner):
                        _save_progress(folder, f"{name}.", companion)
            updates = {name: item.updates for name, item in companions.items() if isinstance(item, Learner)}
            record = {
                "schema": _SCHEMA,
                "updates": learner.updates,
                "companion_updates": updates,
                "files": {item.name: _checksum(item) for item in sorted(folder.iterdir())},
                "state": dict(state),
            }
            (folder / _STATE).write_text(json.dumps(record, indent=1))
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"checkpoint {path} could not be written: {error}; earlier ones are whole"
        ) from error


def _save_progress(folder: Path, prefix: str, learner: Learner) -> None:
    """The optimiser's state, and the value head, which is nothing without it."""
    save_file(_optimizer_tensors(learner), str(folder / f"{prefix}{_OPTIMIZER}"))
    if learner.value_head is not None:
        save_file(named_weights(learner.value_head), str(folder / f"{prefix}{_VALUE_HEAD}"))


def load(
    path: Path, learner: Learner, *, optimizer: bool = True, companions: Companions = _NO_COMPANIONS
) -> dict[str, Any]:
    """Restore weights (and with ``optimizer`` everything that learns beside them) in place.

    Returns the saved state. Raises StorageError naming the file that is missing, cut or changed.
    """
    record = read_state(path)
    load_weights(path, learner.model, record)
    if optimizer:
        _restore_progress(path, "", learner, int(record["updates"]), record)
        for name, companion in companions.items():
            model = companion.model if isinstance(companion, Learner) else companion
            _copy_weights(path, f"{name}.{_WEIGHTS}", model, record)
            if isinstance(companion, Learner):
                updates = int(record["companion_updates"][name])
                _restore_progress(path, f"{name}.", companion, updates, record)
    return cast("dict[str, Any]", record["state"])


def _restore_progress(
    path: Path, prefix: str, learner: Learner, updates: int, record: Mapping[str, Any]
) -> None:
    _restore_optimizer(learner, _read(path, f"{prefix}{_OPTIMIZER}", record))
    if learner.value_head is not None:
        _copy_weights(path, f"{prefix}{_VALUE_HEAD}", learner.value_head, record)
    learner.updates = updates


def load_weights(path: Path, model: nn.Module, record: Mapping[str, Any] | None = None) -> None:
    """Copy a checkpoint's weights into ``model``. Raises StorageError when the names do not fit."""
    _copy_weights(path, _WEIGHTS, model, record or read_state(path))


def _copy_weights(path: Path, file: str, model: nn.Module, record: Mapping[str, Any]) -> None:
    stored = _read(path, file, record)
    own = named_weights(model)
    if stored.keys() != own.keys():
        odd = sorted(stored.keys() ^ own.keys())[0]
        raise StorageError(
            f"checkpoint {path} does not fit this model: parameter {odd!r} is on one side only"
        )
    with torch.no_grad():
        for name, tensor in stored.items():
            if own[name].shape != tensor.shape:
                raise StorageError(
                    f"checkpoint {path}: {name} is {list(tensor.shape)}, not {list(own[name].shape)}"
                )
            own[name].copy_(tensor)


def read_state(path: Path) -> dict[str, Any]:
    """The checkpoint's record. Raises StorageError when it is missing, unreadable or foreign."""
    try:
        record = cast("dict[str, Any]", json.loads((path / _STATE).read_text()))
        schema = record["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"checkpoint {path} is not readable: {error}; resume from an earlier one"
        ) from error
    if schema != _SCHEMA:
        raise StorageError(f"checkpoint {path} has schema {schema}; this version reads {_SCHEMA}")
    return record


def _read(path: Path, name: str, record: Mapping[str, Any]) -> dict[str, Tensor]:
    file = path / name
    expected = record["files"].get(name)
    try:
        if expected is None or _checksum(file) != expected:
            raise StorageError(f"{file} is damaged (its checksum differs); resume from an earlier checkpoint")
        return load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{file} cannot be read: {error}; resume from an earlier checkpoint") from error


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for i, parameter in enumerate(learner.parameters):
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            tensors[f"{i}.{key}"] = cast("Tensor", value).contiguous()
    return tensors or {"empty": torch.zeros(1)}


def _restore_optimizer(learner: Learner, tensors: Mapping[str, Tensor]) -> None:
    learner.optimizer.state.clear()
    for key, value in tensors.items():
        if key == "empty":
            continue
        index, name = key.split(".", 1)
        learner.optimizer.state[learner.parameters[int(index)]][name] = value.clone()


def _checksum(file: Path) -> list[int]:
    """[bytes, CRC-32] of a file."""
    total = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            crc = zlib.crc32(block, crc)
            total += len(block)
    return [total, crc]

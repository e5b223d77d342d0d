"""Checkpoints: weights and optimiser state, written whole or not at all, read back bit for bit.

A folder is first written under a temporary name, synced, then renamed; every file carries a
checksum. Must not know what the numbers mean.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from surefoot.core.errors import StorageError
from surefoot.learner.learner import Learner
from surefoot.policy.forward import base_of

_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_SCHEMA = 1


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters to store: the trainable ones where only adapters train, else each one once."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    every = dict(model.named_parameters())
    adapters = base_of(model) is not model
    return {name: p.detach() for name, p in (trainable if adapters else every).items()}


def save(path: Path, learner: Learner, state: Mapping[str, Any], *, optimizer: bool = True) -> None:
    """Write a checkpoint folder. Raises StorageError on a full disk; nothing older is touched."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(named_weights(learner.model), str(temporary / _WEIGHTS))
        if optimizer:
            save_file(_optimizer_tensors(learner), str(temporary / _OPTIMIZER))
        files = {item.name: _checksum(item) for item in sorted(temporary.iterdir())}
        record = {"schema": _SCHEMA, "updates": learner.updates, "files": files, "state": dict(state)}
        (temporary / _STATE).write_text(json.dumps(record, indent=1))
        for item in temporary.iterdir():
            _sync(item)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temporary, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(
            f"checkpoint {path} could not be written: {error}; earlier ones are whole"
        ) from error


def load(path: Path, learner: Learner, *, optimizer: bool = True) -> dict[str, Any]:
    """Restore weights (and optimiser) in place; returns the saved state.

    Raises StorageError naming the file that is missing, cut or changed.
    """
    record = read_state(path)
    load_weights(path, learner.model, record)
    if optimizer:
        _restore_optimizer(learner, _read(path, _OPTIMIZER, record))
        learner.updates = int(record["updates"])
    return cast("dict[str, Any]", record["state"])


def load_weights(path: Path, model: nn.Module, record: Mapping[str, Any] | None = None) -> None:
    """Copy a checkpoint's weights into ``model``. Raises StorageError when the names do not fit."""
    stored = _read(path, _WEIGHTS, record or read_state(path))
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

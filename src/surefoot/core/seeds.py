"""Seeds derived by hashing names, so that every random draw is a function of what it is for.

Must not keep state: two calls with the same parts give the same seed, whatever ran between them.
"""

from __future__ import annotations

import hashlib


def derive(*parts: object) -> int:
    """A 63-bit seed from the parts' text (SHA-256); order and type of the parts matter."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def digest(*parts: object, length: int = 16) -> str:
    """Hex digest (``length`` characters) of the parts' text, for identifiers."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:length]

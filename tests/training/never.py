"""A verifier that no episode satisfies."""

from __future__ import annotations

from typing import Any

from surefoot import Trust, reward


@reward(trust=Trust.VERIFIED)
def never(episode: Any) -> float:
    """0 for everything."""
    return 0.0

"""Small verified rewards that many environments share."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.core.errors import ConfigError
from surefoot.core.types import Trust
from surefoot.rewards.base import Episode, Reward, reward


def call_price(price: float, *, most: int = 8, when: Callable[[Episode], bool] | None = None) -> Reward:
    """A price for every tool call (well formed or not): -price * min(calls, most).

    With ``when``, only episodes for which it holds pay, for example only solved ones. A price that
    failures pay too makes not trying the best of several failures, and algorithms that scale by the
    group's spread (GRPO) then teach that as loudly as they teach success.

    The harness counts the calls, so the tier is VERIFIED. Raises ConfigError unless price > 0.
    """
    if not price > 0:
        raise ConfigError(f"call_price: price is {price}; it must be > 0")

    @reward(trust=Trust.VERIFIED, span=(0.0, float(most)), weight=-price, name="call_price")
    def calls(episode: Episode) -> float:
        if when is not None and not when(episode):
            return 0.0
        made = sum(len(turn.action.tool_calls) + len(turn.action.malformed) for turn in episode.turns)
        return float(min(made, most))

    return calls

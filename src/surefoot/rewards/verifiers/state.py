"""A verified reward from the environment's own account of how the episode ended.

This module must not read what the policy wrote: words about the state are not the state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.types import Scored, Trust
from surefoot.rewards.base import Episode, Reward, reward
from surefoot.rewards.verifiers.submission import verified

# (state, reference) -> whether the goal is reached, or that with the evidence for it.
Check = Callable[[Mapping[str, Any], Any], bool | tuple[bool, str]]


def state_reward(check: Check, *, name: str = "", weight: float = 1.0, seconds: float = 30.0) -> Reward:
    """1 when ``check(state, reference)`` is True for the end state of the episode, else 0.

    ``check`` gets copies, so it cannot change the episode. It returns a bool, or (bool, evidence);
    anything else, a missing key or another exception is a failed measurement, never a value. Text of
    the policy or of tools is not passed. Not stopped: a state that the policy can set directly (for
    example ``answer``, or a file it writes), which a check must treat as a claim, not as a fact.

    Raises ConfigError for a nameless check (a lambda) without ``name``.
    """
    own = name or getattr(check, "__name__", "")
    if not own.isidentifier():
        raise ConfigError("state_reward: name is empty and the check has none of its own; give a name")

    @reward(trust=Trust.VERIFIED, weight=weight, name=own, resolution=1.0, seconds=seconds)
    def score(episode: Episode) -> Scored:
        found = check(copy.deepcopy(dict(episode.state)), copy.deepcopy(episode.reference))
        evidence = f"state has {', '.join(sorted(map(str, episode.state))) or 'nothing'}"
        if isinstance(found, tuple):
            found, evidence = found
        if type(found) is not bool:
            raise DataError(f"check of {own!r} returned {found!r}; it must return True or False")
        return verified(float(found), own, evidence)

    return score

"""The contract between rollouts and whatever samples tokens. Must not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from surefoot.core.types import Finish, Float32, Int32, Sampling


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """Ask for one turn. ``tokens``: int32[N], the whole context so far, ids only.

    Requests of one ``session`` reuse its cached keys and values as far as the context is unchanged.
    The same ``seed`` gives the same random numbers whatever else is in the batch.
    """

    session: str
    tokens: Int32
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sampled turn: int32[M] ids (the stop id included), float32[M] log-probs, and why it ended.

    ``prefilled`` counts context tokens that had to be computed, ``cached`` those that were reused.
    """

    tokens: Int32
    logprobs: Float32
    finish: Finish
    version: int
    prefilled: int = 0
    cached: int = 0

    def __post_init__(self) -> None:
        assert self.tokens.dtype == np.int32 and self.logprobs.dtype == np.float32
        assert len(self.tokens) == len(self.logprobs)


class Engine(Protocol):
    """Samples turns. ``enter``/``leave`` bracket each episode slot that will keep asking."""

    @property
    def version(self) -> int:
        """The policy version that samples now."""
        ...

    @property
    def context(self) -> int:
        """Most tokens that a context may hold."""
        ...

    async def sample(self, request: SampleRequest) -> Sample:
        """Sample one turn."""
        ...

    def enter(self) -> None:
        """One more slot will ask for samples until it leaves."""
        ...

    def leave(self) -> None:
        """That slot asks no more."""
        ...

    def release(self, session: str) -> None:
        """Forget a session's cache."""
        ...

    def new_version(self, version: int) -> None:
        """The weights changed: drop every cache and label what follows with ``version``."""
        ...

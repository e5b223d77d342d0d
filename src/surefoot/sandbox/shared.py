"""One sandbox for all episodes of a process, opened when the first of them needs it.

Must not know who uses it.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from surefoot.sandbox.io import elsewhere
from surefoot.sandbox.sandbox import Sandbox
from surefoot.sandbox.types import BARE, Limits, Profile


class SharedSandbox:
    """Opens its sandbox at the first :meth:`get`, from any thread and event loop; it ends with the process.

    ``profile`` and ``limits`` are those of :meth:`Sandbox.open`. Making one starts nothing, so an
    environment's module can hold it.
    """

    def __init__(self, *, profile: Profile = BARE, limits: Limits | None = None) -> None:
        self.profile, self.limits = profile, limits
        self._opening = asyncio.Lock()
        self._manager: AbstractAsyncContextManager[Sandbox] | None = None
        self._sandbox: Sandbox | None = None

    async def get(self) -> Sandbox:
        """The open sandbox. Raises SandboxFault when none can be opened; the next call tries again."""
        # In the sandbox's own loop: the loop of the episode that asks first ends with that episode.
        return await elsewhere(self._get())

    async def _get(self) -> Sandbox:
        async with self._opening:
            if self._sandbox is None:
                self._manager = Sandbox.open(profile=self.profile, limits=self.limits)
                self._sandbox = await self._manager.__aenter__()
            return self._sandbox

"""A thread with an event loop of its own, for what must live in one loop while episodes run in many.

A connection or a browser is such a thing. Must not know what it holds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from surefoot.tools.base import ToolFault

T = TypeVar("T")


class Resident:
    """Runs coroutines from any thread or loop in one loop. After :meth:`stop` every call is a ToolFault."""

    def __init__(self, name: str) -> None:
        self.name, self.loop = name, asyncio.new_event_loop()
        self._stopped, self._stopping = False, threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"surefoot-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work`` there; its result can be waited for in any thread."""
        with self._stopping:
            if self._stopped:
                work.close()
                raise ToolFault(f"{self.name} was closed")
            return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` there and wait for it in this loop; cancelling the wait cancels the work."""
        return await asyncio.wrap_future(self.submit(work))

    def stop(self, last: Coroutine[Any, Any, None], seconds: float) -> None:
        """Run ``last``, then end the thread. Stopping twice is no error.

        Raises ToolFault when ``last`` takes longer than ``seconds``; the thread is then left to itself.
        """
        with self._stopping:
            if self._stopped:
                last.close()
                return
            self._stopped = True
            ending = asyncio.run_coroutine_threadsafe(last, self.loop)
        try:
            ending.result(seconds)
        except TimeoutError as error:
            raise ToolFault(f"{self.name} did not end within {seconds:g} s") from error
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(seconds)

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

"""Calls with a deadline that hold even when the called code blocks its thread and never yields.

Each worker owns one thread with its own event loop. A call that overruns is cancelled, and when
the thread does not come back it is abandoned: the caller goes on, the program can still exit.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlineExceeded(TimeoutError):
    """The call did not end in time."""


async def _invoke(function: Callable[[], T | Awaitable[T]]) -> T:
    try:
        result = function()
        if inspect.isawaitable(result):
            return await result
        return result
    except (SystemExit, KeyboardInterrupt) as error:
        # Either would end the worker's loop and leave the caller to wait for its whole deadline.
        raise RuntimeError(f"the called code raised {type(error).__name__}") from error


class Worker:
    """One daemon thread with an event loop, in which foreign code runs."""

    def __init__(self, name: str = "surefoot-worker") -> None:
        self._loop = asyncio.new_event_loop()
        self.abandoned = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        if pending:  # let cancelled code reach its own finally blocks before the loop goes
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.close()

    async def call(self, function: Callable[[], T | Awaitable[T]], seconds: float) -> T:
        """Run ``function`` (sync or async) in the worker; its result, or its own exception.

        Raises DeadlineExceeded after ``seconds``; the worker is then abandoned and refuses calls. So
        it is when the caller is cancelled, since the thread may still be busy.
        """
        if self.abandoned:
            raise DeadlineExceeded("the worker was abandoned after an earlier call overran its deadline")
        coroutine: Coroutine[Any, Any, T] = _invoke(function)
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                raise  # the foreign code raised TimeoutError by itself
            self._abandon()
            raise DeadlineExceeded(f"no answer within {seconds:g} s") from error
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            if caller is not None and not caller.cancelling():
                raise RuntimeError("the called code cancelled itself") from error
            self._abandon()
            raise

    def _abandon(self) -> None:
        self.abandoned = True
        self.stop()

    def stop(self) -> None:
        """Ask the thread to end; does not wait, since the thread may be stuck for ever."""
        if not self._stopped:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)


class WorkerPool:
    """Hands out idle workers and takes them back; abandoned ones are counted and not reused."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self.abandoned = 0

    def acquire(self) -> Worker:
        """An idle worker, or a new one."""
        return self._idle.pop() if self._idle else Worker()

    def release(self, worker: Worker) -> None:
        """Take a worker back."""
        if worker.abandoned:
            self.abandoned += 1
        else:
            self._idle.append(worker)

    def close(self) -> None:
        """Stop all idle workers."""
        while self._idle:
            self._idle.pop().stop()

    def __del__(self) -> None:
        # A worker holds a thread and three descriptors until it is told to stop.
        self.close()

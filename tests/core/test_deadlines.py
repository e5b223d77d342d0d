"""Deadlines hold against code that blocks, and spend no more than the one worker that it blocks."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time

import pytest

from surefoot.core.deadlines import DeadlineExceeded, Worker, WorkerPool


async def _ask(pool: WorkerPool, function, seconds: float):
    worker = pool.acquire()
    try:
        return await worker.call(function, seconds)
    finally:
        pool.release(worker)


def test_call_returns_what_sync_and_async_code_return() -> None:
    async def later() -> int:
        await asyncio.sleep(0)
        return 2

    async def scenario() -> list[int]:
        pool = WorkerPool()
        found = [await _ask(pool, lambda: 1, 5), await _ask(pool, later, 5)]
        pool.close()
        return found

    assert asyncio.run(scenario()) == [1, 2]


def test_blocking_hang_is_abandoned_within_its_deadline_and_the_pool_goes_on() -> None:
    never = threading.Event()

    async def scenario() -> tuple[float, int, int]:
        pool = WorkerPool()
        began = time.perf_counter()
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await _ask(pool, never.wait, 0.05)
        waited = time.perf_counter() - began
        after = await _ask(pool, lambda: 7, 5)
        abandoned = pool.abandoned
        pool.close()
        return waited, after, abandoned

    try:
        waited, after, abandoned = asyncio.run(scenario())
    finally:
        never.set()
    assert waited < 1
    assert (after, abandoned) == (7, 1)


def test_abandoned_worker_refuses_further_calls() -> None:
    never = threading.Event()

    async def scenario() -> None:
        worker = Worker()
        with pytest.raises(DeadlineExceeded):
            await worker.call(never.wait, 0.02)
        with pytest.raises(DeadlineExceeded, match="abandoned"):
            await worker.call(lambda: 1, 5)
        worker.stop()  # a second stop does nothing

    try:
        asyncio.run(scenario())
    finally:
        never.set()


def test_async_code_that_overruns_reaches_its_finally_block() -> None:
    cleaned = threading.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.set()

    async def scenario() -> None:
        with pytest.raises(DeadlineExceeded):
            await Worker().call(slow, 0.02)

    asyncio.run(scenario())
    assert cleaned.wait(2)


def test_own_timeout_error_of_the_code_is_not_taken_for_the_deadline() -> None:
    def fails() -> None:
        raise TimeoutError("mine")

    async def scenario() -> bool:
        worker = Worker()
        with pytest.raises(TimeoutError, match="mine") as caught:
            await worker.call(fails, 5)
        assert not isinstance(caught.value, DeadlineExceeded)
        worker.stop()
        return worker.abandoned

    assert asyncio.run(scenario()) is False


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_code_that_tries_to_end_the_program_fails_at_once(error: type[BaseException]) -> None:
    def leaves() -> None:
        raise error

    async def scenario() -> float:
        pool = WorkerPool()
        began = time.perf_counter()
        with pytest.raises(RuntimeError, match="the called code"):
            await _ask(pool, leaves, 30)
        assert await _ask(pool, lambda: 3, 5) == 3
        pool.close()
        return time.perf_counter() - began

    assert asyncio.run(scenario()) < 5


def test_cancelled_caller_does_not_hand_a_busy_worker_to_the_next() -> None:
    release = threading.Event()

    async def scenario() -> int:
        pool = WorkerPool()
        task = asyncio.create_task(_ask(pool, release.wait, 30))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        found = await _ask(pool, lambda: 5, 1)
        pool.close()
        return found

    try:
        assert asyncio.run(scenario()) == 5
    finally:
        release.set()


def test_a_pool_that_is_dropped_gives_its_threads_and_descriptors_back() -> None:
    async def use() -> None:
        pool = WorkerPool()
        worker = pool.acquire()
        assert await worker.call(lambda: 1, 5.0) == 1
        pool.release(worker)

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        asyncio.run(use())
    gc.collect()
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before + 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before + 6

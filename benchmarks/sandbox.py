"""What a sandboxed execution costs, beside bare subprocesses in the same run.

Latency one at a time, throughput with several in flight on both sides, warm packages against importing them,
turns of a session, many at once, and what idle sessions hold.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
from common import keep, paired_interval, ratio_interval

from surefoot.sandbox import BARE, SCIENCE, Limits, Profile, Sandbox, Status

CODE = "print(sum(range(1000)))"
IMPORTS = "import numpy, sympy\n" + CODE
LIMITS = Limits(seconds=60)
_IDLE = 500
_ALL_ASLEEP = 3.0  # seconds to start as many as are in flight; one that is late fails, since it cannot sleep
_IN_FLIGHT = 4 * (os.cpu_count() or 1)  # as rollouts have it: more than the cores, so that none waits


async def _bare(code: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out == b"499500\n"


def _held(box: Sandbox, code: str) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        assert (await box.run(code)).stdout == "499500\n"

    return run


async def latency(run: Callable[[], Awaitable[None]], repeats: int) -> list[float]:
    """Milliseconds of each of ``repeats`` executions, one at a time."""
    found: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        await run()
        found.append(1e3 * (time.perf_counter() - began))
    return found


async def throughput(run: Callable[[], Awaitable[None]], seconds: float, at_once: int) -> float:
    """Executions per second with ``at_once`` in flight."""
    began = time.perf_counter()
    done = 0

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            await run()
            done += 1

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return done / (time.perf_counter() - began)


async def one_shot(box: Sandbox, repeats: int, seconds: float) -> dict[str, Any]:
    """A fresh execution against ``python -c``, the two taking turns."""
    ours: list[float] = []
    bare: list[float] = []
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(4):
        ours += await latency(_held(box, CODE), repeats)
        bare += await latency(lambda: _bare(CODE), repeats // 4)
        rates["ours"].append(await throughput(_held(box, CODE), seconds, _IN_FLIGHT))
        rates["bare"].append(await throughput(lambda: _bare(CODE), seconds, _IN_FLIGHT))
    return {
        "latency_ms": {"ours": _spread(ours), "bare": _spread(bare), "ratio": ratio_interval(bare, ours)},
        "per_second": {**rates, "ratio": ratio_interval(rates["ours"], rates["bare"])},
    }


def _spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20)
    return {"p50": statistics.median(values), "p95": cuts[-1], "n": len(values)}


async def cpu_time(repeats: int) -> dict[str, Any]:
    """CPU milliseconds of each thing, all processes counted: these do not depend on the machine's load."""

    async def bare(code: str, number: int) -> float:
        began = _cpu()
        for _ in range(number):
            await _bare(code)
        return 1e3 * (_cpu() - began) / number

    one = {"ours": await _slope(BARE, CODE, repeats), "bare": await bare(CODE, repeats // 2)}
    warm_one = {"ours": await _slope(SCIENCE, IMPORTS, repeats), "bare": await bare(IMPORTS, 4)}
    for pair in (one, warm_one):
        pair["ratio"] = pair["bare"] / pair["ours"]
    turn = await _slope(BARE, "x = 1\nx", repeats, session=True)
    return {"one_shot": one, "numpy_sympy": warm_one, "session_turn": turn}


async def _slope(profile: Profile, code: str, repeats: int, *, session: bool = False) -> float:
    """CPU milliseconds of one more execution (or turn), what opening and closing cost taken off."""

    async def spent(number: int) -> float:
        began = _cpu()
        async with Sandbox.open(profile=profile, limits=LIMITS) as box:
            run = (await box.session()).run if session else box.run
            for _ in range(number):
                await run(code)
        return _cpu() - began  # the fork server has been waited for, and with it all its children

    return 1e3 * (await spent(2 * repeats) - await spent(repeats)) / repeats


def _cpu() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


async def warm(box: Sandbox) -> dict[str, Any]:
    """numpy and sympy: warm in the fork server against imported by each process."""
    ours = await latency(_held(box, IMPORTS), 40)
    bare = await latency(lambda: _bare(IMPORTS), 6)
    return {"ours": _spread(ours), "bare": _spread(bare), "ratio": ratio_interval(bare, ours)}


async def turns(box: Sandbox) -> dict[str, Any]:
    """Milliseconds of a session's opening, of its turns and of its forks."""
    opening, turning, forking = [], [], []
    for _ in range(20):
        began = time.perf_counter()
        session = await box.session()
        await session.run("x = 0")
        opening.append(1e3 * (time.perf_counter() - began))
        for _ in range(50):
            began = time.perf_counter()
            await session.run("x += 1\nx")
            turning.append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        branch = await session.fork()
        forking.append(1e3 * (time.perf_counter() - began))
        await branch.close()
        await session.close()
    return {"open": _spread(opening), "turn": _spread(turning), "fork": _spread(forking)}


async def many(number: int, at_once: int, seconds: float, rounds: int) -> dict[str, Any]:
    """``number`` executions that sleep, ``at_once`` in flight: do all end well, and how well they overlap.

    No schedule beats two times: that of all places sleeping without a pause; and, as at most ``at_once`` have
    not ended when the last one falls asleep, that of starting all and ending the others, and then of a sleep.
    What starting and ending take is measured in the same round: by as many executions that do not sleep, less
    the time in which ``at_once`` that wake together end.
    """
    taken: dict[str, list[float]] = {"sleeping": [], "awake": [], "ending": []}
    busy: dict[str, list[float]] = {"sleeping": [], "awake": [], "ending": []}  # core-seconds, with starting
    right = 0
    async with Sandbox.open(profile=BARE, limits=LIMITS, concurrency=at_once) as box:

        async def timed(name: str, code: str, count: int, begins: float | None = None) -> None:
            nonlocal right
            begun, before = begins or time.monotonic(), psutil.cpu_times()
            results = await asyncio.gather(*(box.run(f"import time\n{code}\n{CODE}") for _ in range(count)))
            taken[name].append(time.monotonic() - begun)
            after = psutil.cpu_times()
            busy[name].append(sum(after) - sum(before) - (after.idle - before.idle))
            right += sum(item.status is Status.OK and item.stdout == "499500\n" for item in results)

        for index in range(rounds):
            for name in ("awake", "sleeping") if index % 2 else ("sleeping", "awake"):
                await timed(name, f"time.sleep({seconds if name == 'sleeping' else 0})", number)
            waking = time.monotonic() + _ALL_ASLEEP
            await timed("ending", f"time.sleep({waking} - time.monotonic())", at_once, waking)
    floor = number * seconds / at_once
    pairs = zip(taken["awake"], taken["ending"], strict=True)
    ideal = [max(floor, awake - ending + seconds) for awake, ending in pairs]
    plain = [max(floor, awake) for awake in taken["awake"]]
    return {
        "number": number, "at_once": at_once, "right": right / (rounds * (2 * number + at_once)),
        "seconds": taken, "busy_core_seconds": busy, "sleep_alone_seconds": floor,
        "overlap": paired_interval(ideal, taken["sleeping"]),
        "overlap_without_the_last_sleep": paired_interval(plain, taken["sleeping"]),
    }  # fmt: skip


def _memory_mb(root: int) -> tuple[float, float]:
    """MB of ``root`` and all below it: with shared pages divided among their holders, and private ones."""
    top = psutil.Process(root)
    held = [one.memory_full_info() for one in (top, *top.children(recursive=True))]
    return sum(one.pss for one in held) / 2**20, sum(one.uss for one in held) / 2**20


async def idle(box: Sandbox, number: int) -> dict[str, Any]:
    """Memory of idle sessions, from what is free before and after and from their pages."""
    before = psutil.virtual_memory().available
    sessions = [await box.session() for _ in range(number)]
    for session in sessions:
        await session.run("x = 1")
    held = (before - psutil.virtual_memory().available) / 2**20
    proportional, private = _memory_mb(box._servers[0].pid)
    for session in sessions:
        await session.close()
    return {
        "sessions": number, "available_fell_mb": held, "proportional_mb": proportional, "private_mb": private,
    }  # fmt: skip


async def measure(quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with Sandbox.open(profile=BARE, limits=LIMITS) as box:
        found["tier"] = str(box.tier)
        await latency(_held(box, CODE), 10)
        found["one_shot"] = await one_shot(box, 20 if quick else 100, 0.5 if quick else 3.0)
        found["session_ms"] = await turns(box)
    found["cpu_ms"] = await cpu_time(10 if quick else 150)
    async with Sandbox.open(profile=SCIENCE, limits=LIMITS) as box:
        found["numpy_sympy_ms"] = await warm(box)
        found["idle"] = await idle(box, 50 if quick else _IDLE)
    found["many"] = await many(100 if quick else 1000, 50 if quick else 200, 0.3, 1 if quick else 10)
    return found


def targets(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> what it should be, what it is, and whether that is met; the middle of an interval decides."""
    shot, idle_sessions, at_once = found["one_shot"], found["idle"], found["many"]
    rows: dict[str, tuple[str, float, bool]] = {}

    def least(name: str, bound: float, value: float) -> None:
        rows[name] = (f">= {bound:g}", value, value >= bound)

    def most(name: str, bound: float, value: float) -> None:
        rows[name] = (f"<= {bound:g}", value, value <= bound)

    least("one-shot throughput, times python -c", 2.5, shot["per_second"]["ratio"][0])
    most("one-shot median latency, share of python -c", 1 / 3, 1 / shot["latency_ms"]["ratio"][0])
    least("numpy+sympy warm, times a process that imports them", 30, found["numpy_sympy_ms"]["ratio"][0])
    most("session turn, median ms", 1, found["session_ms"]["turn"]["p50"])
    least(f"{at_once['number']} executions that sleep, share of ideal overlap", 0.9, at_once["overlap"][0])
    least("of which right, share", 1, at_once["right"])
    if idle_sessions["sessions"] == _IDLE:  # fewer would be charged with all that they share
        most(f"{_IDLE} idle sessions with numpy+sympy, MB", 2000, idle_sessions["proportional_mb"])
    return {
        name: {"target": target, "value": value, "met": met} for name, (target, value, met) in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats, nothing kept")
    quick = parser.parse_args().quick
    found = asyncio.run(measure(quick))
    shot, session, cpu = found["one_shot"], found["session_ms"], found["cpu_ms"]
    print(f"tier {found['tier']}, user {os.geteuid()}")
    for name in ("latency_ms", "per_second"):
        middle, low, high = shot[name]["ratio"]
        print(f"one-shot {name}: {middle:.2f} [{low:.2f}, {high:.2f}] times better than python -c")
    ours, bare = (shot["latency_ms"][who]["p50"] for who in ("ours", "bare"))
    print(f"one-shot p50 {ours:.1f} ms, bare {bare:.1f} ms")
    print(f"CPU ms: {cpu}")
    print(f"numpy+sympy warm: {found['numpy_sympy_ms']['ratio'][0]:.1f} times a process that imports them")
    print("session p50 ms: " + ", ".join(f"{name} {session[name]['p50']:.2f}" for name in session))
    print(f"many at once: {found['many']}")
    print(f"idle: {found['idle']}")
    found["targets"] = targets(found)
    for name, row in found["targets"].items():
        print(f"{'met  ' if row['met'] else 'UNMET'} {name}: {row['value']:.3f} (target {row['target']})")
    if not quick:
        print("kept in", keep("sandbox", {"user": os.geteuid(), **found}))


if __name__ == "__main__":
    main()

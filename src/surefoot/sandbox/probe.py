"""Finds out what this machine can really hold, by trying: each tier is attacked before it is trusted."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from surefoot.sandbox.execution import Job, execute
from surefoot.sandbox.io import elsewhere
from surefoot.sandbox.server import Server
from surefoot.sandbox.types import BARE, Check, Limits, Probe, Result, SandboxFault, Tier

_LIMITS = Limits(seconds=10, memory_mb=64, output_bytes=4096, processes=24, files_mb=8, cpu_seconds=10)
_ORDER = (Tier.FULL, Tier.UID, Tier.LANDLOCK)
_TOLD: dict[tuple[str, int], Probe] = {}


async def probe(tier: Tier | str = "auto") -> Probe:
    """Attack each tier from the strongest down and return the first that holds; about a second each.

    The answer is kept for the life of the process. A named ``tier`` is tested alone; ``none`` promises
    nothing and is not tested. Raises SandboxFault, with the reasons, when no tier holds.
    """
    if sys.platform != "linux":
        raise SandboxFault(f"the sandbox needs Linux; this is {sys.platform}")
    key = (str(tier), os.geteuid())
    if key not in _TOLD:
        _TOLD[key] = await elsewhere(_choose(_ORDER if tier == "auto" else (Tier(tier),)))
    return _TOLD[key]


async def _choose(tiers: tuple[Tier, ...]) -> Probe:
    refused: dict[str, str] = {}
    for tier in tiers:
        if tier is Tier.NONE:
            return Probe(tier, tuple(Check(name, False, "not tried") for name in _ATTACKS), refused)
        why = _unfit(tier)
        if not why:
            try:
                checks = await _attack(tier)
            except SandboxFault as error:
                why = str(error)
            else:
                failed = [c for c in checks if not c.stopped and c.name not in _KNOWN_GAPS[tier]]
                if not failed:
                    return Probe(tier, checks, refused)
                why = "; ".join(f"{check.name}: {check.detail}" for check in failed)
        refused[str(tier)] = why
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
    raise SandboxFault(f"no tier of the sandbox holds on this machine ({reasons})")


def _unfit(tier: Tier) -> str:
    if tier is Tier.UID and os.geteuid() != 0:
        return "needs root"
    if tier is Tier.LANDLOCK and os.geteuid() == 0:
        return "as root it would bound no number of threads; use tier 'uid'"
    return ""


async def _attack(tier: Tier) -> tuple[Check, ...]:
    server = await Server.start(BARE, tier, most=64)
    try:
        honest = await execute(server, Job("import json, decimal\nprint(json.dumps([6 * 7]))"), _LIMITS)
        # A tier in which nothing runs would stop every attack.
        if honest.stdout != "[42]\n":
            raise SandboxFault(f"honest code does not run: {honest.stderr[-300:] or honest.status}")
        checks: list[Check] = []
        for name, attack in _ATTACKS.items():
            seen = await attack(server)
            checks.append(Check(name, not seen, seen))
        return tuple(checks)
    finally:
        await server.close()


async def _run(server: Server, code: str) -> Result:
    return await execute(server, Job(code), _LIMITS)


# Each attack returns what it achieved, "" if it was stopped. What it did is judged from outside.


async def _read_outside(server: Server) -> str:
    secret = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "secret"
        path.write_text(secret)
        # World-readable on purpose: the sandbox must not lean on file modes.
        os.chmod(folder, 0o755)
        result = await _run(server, f"print(open({str(path)!r}).read())")
    return "read a file of the harness" if secret in result.stdout else ""


async def _write_outside(server: Server) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reward"
        path.write_text("0")
        os.chmod(folder, 0o777)
        path.chmod(0o666)
        await _run(server, f"open({str(path)!r}, 'w').write('1')")
        await _run(server, f"open({str(path)!r} + '2', 'w').write('1')")
        changed = path.read_text() != "0" or len(os.listdir(folder)) > 1
    return "changed a file of the harness" if changed else ""


async def _see_outside(server: Server) -> str:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        result = await _run(server, f"import os\nprint(os.path.exists({folder!r}))")
    return "saw that a file of the harness exists" if "True" in result.stdout else ""


async def _connect(server: Server) -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        code = f"import socket\ns = socket.create_connection(('127.0.0.1', {port}), 2)\nprint('in')"
        result = await _run(server, code)
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return "made a connection" if "in" in result.stdout else ""
    return "reached a port of the machine"


async def _processes(server: Server) -> str:
    pid = os.getpid()
    code = f"""
import os
for what in (lambda: os.kill({pid}, 0), lambda: open('/proc/{pid}/environ', 'rb').read(),
             lambda: open('/proc/{pid}/mem', 'rb')):
    try:
        what()
        print('in')
    except OSError:
        pass
"""
    return "reached the harness's process" if "in" in (await _run(server, code)).stdout else ""


async def _namespaces(server: Server) -> str:
    code = """
import ctypes
libc = ctypes.CDLL(None)
for flags in (0x10000000, 0x20000, 0x40000000):
    if libc.unshare(flags) == 0:
        print('in')
if libc.ptrace(0, 0, 0, 0) == 0:
    print('in')
"""
    return "made a namespace or traced" if "in" in (await _run(server, code)).stdout else ""


async def _fork_bomb(server: Server) -> str:
    code = """
import os, time
n = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        n += 1
except OSError:
    pass
print(n)
"""
    made = (await _run(server, code)).stdout.strip()
    return "" if made.isdigit() and int(made) < _LIMITS.processes else f"started {made or '?'} processes"


async def _thread_bomb(server: Server) -> str:
    code = """
import threading, time
threading.stack_size(65536)
n = 0
try:
    for _ in range(600):
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        n += 1
except RuntimeError:
    pass
print(n, flush=True)
import os
os._exit(0)
"""
    made = (await _run(server, code)).stdout.strip()
    return "" if made.isdigit() and int(made) < 300 else f"started {made or '?'} threads"


async def _daemon(server: Server) -> str:
    mark = f"{secrets.randbelow(10**9) + 10**9}"
    code = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv('/bin/sleep', ['sleep', '{mark}'])
    os._exit(0)
"""
    await _run(server, code)
    await asyncio.sleep(0.05)
    alive = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _content(path)]
    return "left a process running" if alive else ""


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # ended between listing and reading
        return b""


async def _memory(server: Server) -> str:
    result = await _run(server, "a = bytearray(1 << 30)\nprint('in')")
    return "took a GB of memory" if "in" in result.stdout else ""


async def _disk(server: Server) -> str:
    code = """
import os
n = 0
try:
    for i in range(24):
        with open(f'{i}', 'wb') as f:
            n += f.write(b'x' * (1 << 20))
except OSError:
    pass
print(n >> 20)
"""
    wrote = (await _run(server, code)).stdout.strip()
    stopped = wrote.isdigit() and int(wrote) <= _LIMITS.files_mb
    return "" if stopped else f"wrote {wrote or '?'} MB of {_LIMITS.files_mb}"


async def _flood(server: Server) -> str:
    result = await _run(server, "while True: print('x' * 65536)")
    held = len(result.stdout) <= _LIMITS.output_bytes and result.truncated
    return "" if held else f"got {len(result.stdout)} characters out"


async def _endless(server: Server) -> str:
    code = """
import signal
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
while True:
    pass
"""
    result = await execute(server, Job(code), replace(_LIMITS, seconds=0.3))
    return "" if result.status == "timeout" else f"ended as {result.status}"


_ATTACKS: dict[str, Callable[[Server], Awaitable[str]]] = {
    "read files outside": _read_outside,
    "write files outside": _write_outside,
    "see that files outside exist": _see_outside,
    "reach the network": _connect,
    "reach other processes": _processes,
    "make namespaces, trace": _namespaces,
    "fork bomb": _fork_bomb,
    "thread bomb": _thread_bomb,
    "leave a process behind": _daemon,
    "take memory": _memory,
    "fill the disk": _disk,
    "flood the output": _flood,
    "run past the deadline": _endless,
}

_KNOWN_GAPS: dict[Tier, frozenset[str]] = {
    Tier.FULL: frozenset(),
    Tier.UID: frozenset({"see that files outside exist", "fill the disk"}),
    Tier.LANDLOCK: frozenset({"see that files outside exist", "fill the disk"}),
}

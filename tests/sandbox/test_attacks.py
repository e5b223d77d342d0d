"""What agent code may try, tier by tier: each attack is run, and judged by what is seen from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from surefoot.sandbox import Result, Status
from surefoot.sandbox.inside.filters import _ALWAYS

from .conftest import SMALL, Held, Outside, held, processes_with

pytestmark = pytest.mark.attack

TRY = """
def attempt(name, what):
    try:
        found = what()
    except BaseException as error:
        print(name, 'refused', type(error).__name__, getattr(error, 'errno', ''))
    else:
        print(name, 'ACHIEVED', repr(found)[:200])
"""


def achieved(result: Result) -> bool:
    """Whether code built on TRY got anywhere. It must have run to its end to count as stopped."""
    assert "refused" in result.stdout or "ACHIEVED" in result.stdout, result
    return "ACHIEVED" in result.stdout


@dataclass(frozen=True)
class Attack:
    """``code`` gets TRY and names of the harness; ``judge`` says whether it achieved anything."""

    code: str
    judge: Callable[[Result, Outside], bool]
    gaps: tuple[str, ...] = ()  # tiers that are known not to stop it
    endless: bool = False


def _leaked(result: Result, outside: Outside) -> bool:
    return outside.secret in result.stdout + result.stderr + result.value or achieved(result)


def _tried(result: Result, outside: Outside) -> bool:
    return achieved(result)


def _changed(result: Result, outside: Outside) -> bool:
    return not outside.untouched()


def _count(most: int) -> Callable[[Result, Outside], bool]:
    """Achieved when the number that the code printed last is above ``most``."""

    def judge(result: Result, outside: Outside) -> bool:
        words = result.stdout.split()
        assert words and words[-1].isdigit(), result
        return int(words[-1]) > most

    return judge


def _ended_as(*statuses: Status) -> Callable[[Result, Outside], bool]:
    return lambda result, outside: result.status not in statuses


LOWER = ("uid", "landlock")
ATTACKS = {
    "read the grader": Attack("attempt('read', lambda: open(GRADER).read())", _leaked),
    "read another rollout": Attack(
        "attempt('read', lambda: open(FOLDER + '/rollout-2.txt').read())", _leaked
    ),
    "list the harness's folder": Attack("import os\nattempt('list', lambda: os.listdir(FOLDER))", _tried),
    "stat the grader": Attack("import os\nattempt('stat', lambda: os.stat(GRADER))", _tried, LOWER),
    "import the harness": Attack("attempt('import', lambda: __import__('surefoot'))", _tried),
    "write the reward": Attack(
        "attempt('write', lambda: open(REWARD, 'w').write('1'))\n"
        "attempt('new', lambda: open(FOLDER + '/new', 'w'))\n"
        "import os\nattempt('rename', lambda: os.rename(REWARD, REWARD + '2'))\n"
        "attempt('remove', lambda: os.unlink(REWARD))\n"
        "attempt('truncate', lambda: os.truncate(REWARD, 0))\n"
        "attempt('link', lambda: os.link(REWARD, 'mine'))",
        _changed,
    ),
    "change mode and times": Attack(
        "import os\nattempt('chmod', lambda: os.chmod(REWARD, 0))\n"
        "attempt('utime', lambda: os.utime(REWARD, (0, 0)))\n"
        "attempt('touch', lambda: os.utime(REWARD))\n"
        "attempt('chown', lambda: os.chown(REWARD, os.getuid(), -1))\n"
        "attempt('xattr', lambda: os.setxattr(REWARD, 'user.x', b'1'))",
        _changed,
    ),
    "read a process": Attack(
        "for name in ('environ', 'mem', 'maps', 'root/etc/hostname', 'fd', 'cmdline'):\n"
        "    import os\n"
        "    read = os.listdir if name == 'fd' else lambda p: open(p, 'rb').read(1)\n"
        "    attempt(name, lambda: read(f'/proc/{VICTIM}/{name}'))",
        _leaked,
    ),
    "trace a process": Attack(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(*a):\n"
        "    if libc.syscall(*map(ctypes.c_long, a)) < 0: raise OSError(ctypes.get_errno(), '')\n"
        "attempt('attach', lambda: call(101, 16, VICTIM, 0, 0))\n"
        "attempt('seize', lambda: call(101, 0x4206, VICTIM, 0, 0))\n"
        "attempt('vm_readv', lambda: call(310, VICTIM, 0, 0, 0, 0, 0))\n"
        "attempt('pidfd', lambda: call(438, os.pidfd_open(VICTIM), 0, 0))",
        _tried,
    ),
    "signal a process": Attack(
        "import os, signal\nattempt('kill', lambda: os.kill(VICTIM, 9))\n"
        "attempt('group', lambda: os.killpg(VICTIM, 9))",
        lambda result, outside: outside.victim.poll() is not None or achieved(result),
    ),
    "lower a process's limits": Attack(
        "import resource, os\n"
        "attempt('prlimit', lambda: resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (1, 1)))\n"
        "attempt('nice', lambda: os.setpriority(os.PRIO_PROCESS, VICTIM, 19))\n"
        "attempt('affinity', lambda: os.sched_setaffinity(VICTIM, {0}))",
        _tried,
    ),
    "connect to a port": Attack(
        "import socket\nattempt('tcp', lambda: socket.create_connection(('127.0.0.1', PORT), 1))",
        lambda result, outside: outside.reached() or achieved(result),
    ),
    "connect to an abstract socket": Attack(
        "import socket\n"
        "attempt('unix', lambda: socket.socket(socket.AF_UNIX).connect('\\0harness-' + ABSTRACT))",
        lambda result, outside: outside.reached() or achieved(result),
    ),
    "open other sockets": Attack(
        "import socket\n"
        "for family, kind in ((2, 2), (2, 3), (10, 1), (16, 3), (17, 3), (38, 5), (40, 1), (1, 2)):\n"
        "    attempt(f'{family}', lambda: socket.socket(family, kind))",
        _tried,
    ),
    "find inherited descriptors": Attack(
        "import os\nfor fd in range(4, 4096): attempt(fd, lambda: os.fstat(fd)) if fd < 40 else None\n"
        "found = 0\nfor fd in range(4, 4096):\n"
        "    try: os.fstat(fd); found += 1\n"
        "    except OSError: pass\nprint(found)",
        _count(0),
    ),
    "make namespaces and mount": Attack(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(f, *a):\n"
        "    if f(*a) < 0: raise OSError(ctypes.get_errno(), '')\n"
        "for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x80):\n"
        "    attempt('unshare', lambda: call(libc.unshare, flag))\n"
        "    attempt('clone', lambda: call(libc.syscall, 56, flag | 17, 0, 0, 0, 0))\n"
        "    attempt('clone3', lambda: call(libc.syscall, 435, 0, 0))\n"
        "attempt('mount', lambda: call(libc.mount, b'none', b'/box', b'tmpfs', 0, None))\n"
        "attempt('umount', lambda: call(libc.umount2, b'/proc', 2))\n"
        "attempt('chroot', lambda: call(libc.chroot, b'.'))",
        _tried,
    ),
    "use dangerous system calls": Attack(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(n):\n"
        "    ctypes.set_errno(0)\n"
        "    result = libc.syscall(ctypes.c_long(n), *[ctypes.c_long(0)] * 6)\n"
        "    if ctypes.get_errno() in (1, 38): raise OSError(ctypes.get_errno(), '')\n"
        "    return n, result, ctypes.get_errno()\n"
        "for n in SYSCALLS: attempt(n, lambda: call(n))",
        _tried,
    ),
    "raise its own limits": Attack(
        "import resource as r\n"
        "for kind in (r.RLIMIT_DATA, r.RLIMIT_AS, r.RLIMIT_NOFILE, r.RLIMIT_CPU, r.RLIMIT_FSIZE):\n"
        "    attempt(kind, lambda: r.setrlimit(kind, (r.RLIM_INFINITY, r.RLIM_INFINITY)))",
        _tried,
    ),
    "fork bomb": Attack(
        "import os, time\nn = 0\ntry:\n"
        "    for _ in range(200):\n"
        "        if os.fork() == 0:\n            time.sleep(60)\n            os._exit(0)\n"
        "        n += 1\nexcept OSError: pass\nprint(n, flush=True)\nos._exit(0)",
        _count(SMALL.processes),
    ),
    "thread bomb": Attack(
        "import os, threading, time\nthreading.stack_size(65536)\nn = 0\ntry:\n"
        "    for _ in range(600):\n"
        "        threading.Thread(target=time.sleep, args=(60,)).start()\n        n += 1\n"
        "except RuntimeError: pass\nprint(n, flush=True)\nos._exit(0)",
        _count(300),
    ),
    "take memory": Attack("a = bytearray(300 << 20)\nprint(len(a))", _ended_as(Status.MEMORY)),
    "take memory by mapping": Attack(
        "import mmap\nn, held = 0, []\ntry:\n"
        "    for _ in range(20):\n"
        "        held.append(mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))\n"
        "        held[-1][:1 << 20] = b'x' * (1 << 20)\n        n += 64\n"
        "except (OSError, MemoryError): pass\nprint(n)",
        _count(SMALL.memory_mb),
    ),
    "take memory in files that are not there": Attack(
        "import os\nn = 0\n"
        "attempt('memfd', lambda: os.memfd_create('x'))\n"
        "try:\n    f = open('/dev/shm/x', 'wb')\n"
        "    for _ in range(40):\n        n += f.write(b'x' * (1 << 20)) >> 20\n        f.flush()\n"
        "except OSError: pass\nprint(n)",
        _count(SMALL.files_mb),
    ),
    "take memory in pipes": Attack(
        "import os, fcntl\nn = 0\ntry:\n"
        "    for _ in range(400):\n"
        "        r, w = os.pipe()\n        os.set_blocking(w, False)\n"
        "        n += os.write(w, bytes(65536)) >> 10\n"
        "except OSError: pass\nprint(n >> 10)",
        _count(16),
    ),
    "fill the disk": Attack(
        "import os\nn = 0\nfor folder in ('.', '/tmp', '/var/tmp', '/dev/shm', os.environ['TMPDIR']):\n"
        "    try:\n"
        "        for i in range(24):\n"
        "            with open(f'{folder}/{i}', 'wb') as f: n += f.write(b'x' * (1 << 20)) >> 20\n"
        "    except OSError: pass\nprint(n)",
        _count(SMALL.files_mb),
        LOWER,
    ),
    "flood the inodes": Attack(
        "n = 0\ntry:\n    for i in range(1800):\n        open(f'{i}', 'w').close()\n        n += 1\n"
        "except OSError: pass\nprint(n)",
        _count(1600),
        LOWER,
    ),
    "flood the output": Attack(
        "import sys\nwhile True: sys.stdout.write('x' * 65536)", _ended_as(Status.OUTPUT_LIMIT)
    ),
    "flood the errors": Attack(
        "import os\nwhile True: os.write(2, b'x' * 65536)", _ended_as(Status.OUTPUT_LIMIT)
    ),
    "flood the report": Attack(
        "import os\nwhile True: os.write(3, b'0=x' * 20000)", _ended_as(Status.KILLED)
    ),
    "loop for ever, deaf": Attack(
        "import signal\nfor s in range(1, 65):\n"
        "    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        _ended_as(Status.TIMEOUT),
        endless=True,
    ),
    "hold the interpreter": Attack("sum(range(10**12))", _ended_as(Status.TIMEOUT), endless=True),
    "stop itself": Attack(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)",
        _ended_as(Status.TIMEOUT),
        endless=True,
    ),
    "become root": Attack(
        "import os\nfor call in (os.setuid, os.seteuid, os.setgid): attempt('root', lambda: call(0))\n"
        "attempt('groups', lambda: os.setgroups([0]))\n"
        "attempt('nice', lambda: os.nice(-10))",
        _tried,
    ),
    "look around the machine": Attack(
        "for path in ('/proc/cmdline', '/proc/meminfo', '/proc/mounts', '/sys/kernel', '/etc/shadow',\n"
        "             '/etc/machine-id', '/var/log/dpkg.log', '/root/.bashrc', '/proc/1/environ'):\n"
        "    if path != '/proc/mounts': attempt(path, lambda: open(path).read())",
        lambda result, outside: any(
            f"{path} ACHIEVED" in result.stdout
            for path in (
                "/proc/cmdline",
                "/proc/meminfo",
                "/etc/shadow",
                "/var/log/dpkg.log",
                "/etc/machine-id",
            )
        ),
    ),
}


def _code(attack: Attack, outside: Outside) -> str:
    names = {
        "GRADER": str(outside.grader), "REWARD": str(outside.reward), "FOLDER": str(outside.folder),
        "VICTIM": outside.victim.pid, "PORT": outside.port, "ABSTRACT": outside.folder.name,
        "SYSCALLS": sorted(pair[0] for pair in _ALWAYS.values()),
    }  # fmt: skip
    return "".join(f"{name} = {value!r}\n" for name, value in names.items()) + TRY + attack.code


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_stopped_or_is_a_known_gap_of_its_tier(name: str, tiered: Held, outside: Outside) -> None:
    attack = ATTACKS[name]
    seconds = 0.5 if attack.endless else SMALL.seconds
    result = tiered.run(_code(attack, outside), limits=replace(SMALL, seconds=seconds))
    gap = str(tiered.tier) in attack.gaps
    assert attack.judge(result, outside) is gap, result
    assert outside.untouched()
    assert outside.victim.poll() is None
    assert tiered.run("print('still here')").stdout == "still here\n"


# Without a tier these reach their goal, and do no harm by it.
REAL = (
    "read the grader", "read another rollout", "list the harness's folder", "stat the grader",
    "read a process", "lower a process's limits", "connect to a port", "connect to an abstract socket",
    "open other sockets", "use dangerous system calls",
)  # fmt: skip


@pytest.fixture(scope="module")
def unheld() -> Iterator[Held]:
    with held("none") as one:
        yield one


@pytest.mark.parametrize("name", REAL)
def test_attack_is_a_real_one_where_nothing_holds_it(name: str, unheld: Held, outside: Outside) -> None:
    result = unheld.run(_code(ATTACKS[name], outside))
    assert ATTACKS[name].judge(result, outside) is True, result


def test_nothing_that_a_run_started_outlives_it(tiered: Held) -> None:
    mark = f"{time.time_ns()}"
    code = (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv('/bin/sleep', ['sleep', '{mark}'])\n    os._exit(0)\nos.wait()"
    )
    tiered.run(code)
    time.sleep(0.05)
    assert processes_with(mark) == []


def test_killing_every_process_in_reach_harms_nobody_else(tiered: Held, outside: Outside) -> None:
    tiered.run("import os\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)")
    tiered.run("import os\nos.kill(os.getppid(), 9)")
    assert outside.victim.poll() is None
    assert tiered.run("print(1)").stdout == "1\n"


def test_many_processes_share_one_budget_of_memory(tiered: Held) -> None:
    code = (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n"
        "        a = bytearray(40 << 20)\n        time.sleep(2)\n        os._exit(0)\n"
        "time.sleep(2)\nprint('all held')"
    )
    result = tiered.run(code)
    assert "all held" not in result.stdout
    if tiered.tier != "landlock":  # there no process can be started at all
        assert result.status is Status.MEMORY


def test_what_cannot_be_decoded_or_printed_is_made_harmless(tiered: Held) -> None:
    code = (
        "import os, sys\nprint('\\ud800')\nsys.stdout.flush()\n"
        "os.write(1, b'\\xff\\xfe\\0\\x1b[31m\\x07\\x9b end\\n')"
    )
    result = tiered.run(code)
    assert result.stdout == "\\ud800\n\\xff\\xfe[31m\\x9b end\n"


def test_a_crash_is_told_apart_from_an_end(tiered: Held) -> None:
    for code in ("import ctypes\nctypes.string_at(0)", "import os\nos.abort()"):
        result = tiered.run(code)
        assert result.status is Status.KILLED
        assert result.exit_code < 0


def test_the_command_line_shows_nothing_of_the_harness(box: Held) -> None:
    shown = box.run("print(open('/proc/1/cmdline').read(), open('/proc/self/environ').read())").stdout
    assert "surefoot" not in shown.lower()
    assert "TOKEN" not in shown


def test_the_process_list_holds_only_its_own(box: Held) -> None:
    assert box.run("import os\n[p for p in os.listdir('/proc') if p.isdigit()]").value == "['1']"


def test_two_runs_share_no_file(box: Held) -> None:
    box.run("for folder in ('.', '/tmp', '/dev/shm'): open(folder + '/left', 'w').close()")
    found = box.run("import os\n[os.listdir(p) for p in ('.', '/tmp', '/dev/shm', '/forks')]")
    assert found.value == "[[], [], [], []]"


def test_every_place_but_its_own_is_read_only(box: Held) -> None:
    code = """
import os
wrote = []
for folder, names, _ in os.walk('/'):
    if folder.startswith(('/proc', '/box', '/tmp', '/dev/shm', '/forks', '/run')):
        continue
    if folder.count('/') > 3:
        names.clear()
    try:
        open(folder + '/planted', 'w').close()
        wrote.append(folder)
    except OSError:
        pass
print(wrote)
"""
    assert box.run(code).stdout == "[]\n"

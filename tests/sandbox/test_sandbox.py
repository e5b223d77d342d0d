"""One-shot executions: what goes in, what comes out, what is bounded, what the harness survives."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from surefoot.core.errors import ConfigError
from surefoot.sandbox import NUMPY, Limits, Profile, Sandbox, SandboxFault, Status, Tier, probe
from surefoot.sandbox.io import elsewhere

from .conftest import ROOT, SMALL, Held, held, processes_with


def test_output_error_and_last_value_come_back(tiered: Held) -> None:
    result = tiered.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert (result.stdout, result.stderr, result.value) == ("out\n", "err\n", "42")
    assert (result.exit_code, result.status, result.truncated) == (0, Status.OK, False)
    assert 0 < result.seconds < SMALL.seconds


def test_an_exception_shows_its_traceback_in_the_code_alone(tiered: Held) -> None:
    result = tiered.run("def f():\n    return 1 / 0\nf()")
    assert result.status is Status.ERROR
    assert result.exit_code == 1
    assert result.stderr.count("File ") == result.stderr.count('File "<cell>"') == 2
    assert "return 1 / 0" in result.stderr
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("raise SystemExit", 0), ("raise SystemExit(3)", 3), ("exit()", 0), ("import os\nos._exit(9)", 9)],
)
def test_exit_codes_are_those_of_the_code(box: Held, code: str, exit_code: int) -> None:
    result = box.run(code)
    assert result.exit_code == exit_code
    assert result.status is (Status.ERROR if exit_code else Status.OK)


def test_code_that_cannot_be_parsed_is_an_error_of_the_code(box: Held) -> None:
    for code in ("a = [", "\0", "return", "é = \ud800"):
        assert box.run(code).status is Status.ERROR


def test_stdin_and_files_are_given(tiered: Held) -> None:
    code = "import sys\nprint(sys.stdin.read() + open('sub/data.txt').read())"
    result = tiered.run(code, stdin=b"from stdin, ", files={"sub/data.txt": b"from a file"})
    assert result.stdout == "from stdin, from a file\n"
    assert tiered.run("input()").stderr.endswith("EOFError: EOF when reading a line\n")


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_files_outside_the_working_folder_are_refused(box: Held, name: str) -> None:
    with pytest.raises(ConfigError, match="files holds"):
        box.run("1", files={name: b""})


def test_exit_handlers_and_threads_end_as_in_a_script(box: Held) -> None:
    code = (
        "import atexit, threading, time\natexit.register(lambda: print('bye'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nprint('main')"
    )
    assert box.run(code).stdout == "main\nthread\nbye\n"


def test_common_libraries_work(box: Held) -> None:
    code = """
import asyncio, dataclasses, multiprocessing as mp, pickle, sqlite3, subprocess, sys, tempfile
from multiprocessing import shared_memory
async def later(): return 1
@dataclasses.dataclass
class P: x: int
def square(x): return x * x
with mp.Pool(2) as pool: squares = pool.map(square, range(4))
shm = shared_memory.SharedMemory(create=True, size=8); shm.close(); shm.unlink()
with tempfile.NamedTemporaryFile() as f: f.write(b'1')
child = subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True)
print(asyncio.run(later()), pickle.loads(pickle.dumps(P(2))), squares,
      sqlite3.connect(':memory:').execute('select 3').fetchone(), child.stdout.strip())
"""
    result = box.run(code, limits=replace(SMALL, memory_mb=256, seconds=20))
    assert result.stdout == "1 P(x=2) [0, 1, 4, 9] (3,) 5\n", result.stderr


def test_seed_repeats_and_its_lack_does_not(box: Held) -> None:
    code = "import random\nrandom.random()"
    assert box.run(code, seed=7).value == box.run(code, seed=7).value
    assert box.run(code).value != box.run(code).value


def test_commands_run_with_the_same_bounds(box: Held) -> None:
    done = box.command("sh", "-c", "cat; echo $HOME; exit 3", stdin=b"in ")
    assert (done.stdout, done.exit_code, done.status) == ("in /box\n", 3, Status.ERROR)
    assert box.command("no-such-program").exit_code == 127
    assert box.command("sleep", "60", limits=replace(SMALL, seconds=0.3)).status is Status.TIMEOUT
    with pytest.raises(ConfigError, match="argv"):
        box.command()


def test_deadline_holds_for_what_sleeps(tiered: Held) -> None:
    result = tiered.run("import time\ntime.sleep(60)", limits=replace(SMALL, seconds=0.3))
    assert result.status is Status.TIMEOUT
    assert result.exit_code == -signal.SIGKILL
    assert 0.3 <= result.seconds < 2


def test_output_before_the_deadline_is_kept(box: Held) -> None:
    code = "import time\nprint('so far', flush=True)\ntime.sleep(60)"
    assert box.run(code, limits=replace(SMALL, seconds=0.3)).stdout == "so far\n"


@pytest.mark.slow
def test_cpu_time_is_bounded_apart_from_wall_time(box: Held) -> None:
    limits = replace(SMALL, seconds=120, cpu_seconds=1)
    result = box.run("while True: pass", limits=limits)
    assert result.status is Status.TIMEOUT
    assert result.seconds < 120


def test_output_at_the_limit_is_whole_and_one_byte_more_is_cut(box: Held) -> None:
    whole = box.run(f"print('x' * {SMALL.output_bytes - 1})")
    assert (len(whole.stdout), whole.truncated, whole.status) == (SMALL.output_bytes, False, Status.OK)
    cut = box.run(f"print('x' * {SMALL.output_bytes})")
    assert (len(cut.stdout), cut.truncated) == (SMALL.output_bytes, True)
    assert cut.status is Status.OUTPUT_LIMIT


def test_memory_error_that_the_code_handles_is_no_failure(box: Held) -> None:
    code = "try:\n    bytearray(1 << 30)\nexcept MemoryError:\n    print('handled')"
    assert box.run(code).status is Status.OK


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "4", True])
def test_a_limit_that_is_none_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"Limits\.seconds"):
        Limits(seconds=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Limits\.processes"):
        Limits(processes=1.5)  # type: ignore[arg-type]


async def _open(options: dict[str, object]) -> None:
    async with Sandbox.open(**options):  # type: ignore[arg-type]
        raise AssertionError("opened")


def test_settings_that_are_not_valid_are_refused() -> None:
    for options, match in (
        ({"tier": "fulll"}, "did you mean 'full'"),
        ({"concurrency": 0}, "concurrency"),
        ({"limits": 3}, "limits"),
    ):
        with pytest.raises(ConfigError, match=match):
            asyncio.run(_open(options))  # type: ignore[arg-type]
    for options in ({"network": "all"}, {"preload": ("a b",)}, {"tree": Path("/no/such/folder")}):
        with pytest.raises(ConfigError, match=f"Profile.{next(iter(options))}"):
            Profile(**options)  # type: ignore[arg-type]
    with (
        pytest.raises(ConfigError, match="not installed"),
        held(profile=Profile(packages=("nosuchpackage",))),
    ):
        pass


# ---- profiles


def test_preloaded_packages_are_warm_and_others_are_absent() -> None:
    with held(profile=NUMPY) as one:
        code = "import sys\nwarm = 'numpy' in sys.modules\nimport numpy as np\nwarm, int(np.arange(5).sum())"
        assert one.run(code).value == "(True, 10)"
        assert one.run("import pydantic").stderr.endswith("No module named 'pydantic'\n")
        draws = {one.run("import numpy as np\nnp.random.random()").value for _ in range(2)}
        assert len(draws) == 2
        assert one.run("import numpy as np\nnp.ones(1 << 28)").status is Status.MEMORY


def test_a_tree_can_be_changed_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "code.py").write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / "test_code.py").write_text(
        "from pkg.code import add\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    )
    os.chmod(tmp_path, 0o755)
    profile = Profile("repo", packages=("pytest",), tree=tmp_path)
    limits = replace(SMALL, seconds=30, memory_mb=256, output_bytes=65536)
    fixed = {"pkg/code.py": b"def add(a, b):\n    return a + b\n"}
    with held(profile=profile, limits=limits) as one:
        tests = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider")
        assert "1 failed" in one.command(*tests).stdout
        assert "1 passed" in one.command(*tests, files=fixed).stdout
        assert "1 failed" in one.command(*tests).stdout
        assert one.run("import os\nsorted(os.listdir())").value == "['pkg', 'test_code.py']"
        assert one.run("open('/tree/x', 'w')").status is Status.ERROR
    assert "a - b" in (tmp_path / "pkg" / "code.py").read_text()


def test_loopback_is_a_network_of_its_own() -> None:
    code = """
import socket, threading
server = socket.create_server(('127.0.0.1', 8080))
threading.Thread(target=lambda: server.accept()[0].sendall(b'hello')).start()
print(socket.create_connection(('127.0.0.1', 8080)).recv(9))
for family, kind in ((2, 3), (16, 3), (17, 3)):
    try:
        socket.socket(family, kind)
        print('ACHIEVED')
    except OSError:
        pass
try:
    socket.create_connection(('192.0.2.1', 80), 1)
    print('ACHIEVED')
except OSError as error:
    print(error.errno)
"""
    with held(profile=Profile("net", network="loopback")) as one:
        for _ in range(2):  # the second finds the port free: it has another network
            assert one.run(code).stdout == "b'hello'\n101\n"


def test_loopback_does_not_reach_the_machine(outside) -> None:
    code = f"import socket\nsocket.create_connection(('127.0.0.1', {outside.port}), 1)"
    with held(profile=Profile("net", network="loopback")) as one:
        assert one.run(code).status is Status.ERROR
    assert not outside.reached()


# ---- the harness's side


def test_runs_go_side_by_side_from_several_threads_and_loops(box: Held) -> None:
    found: list[str] = []

    def work(number: int) -> None:
        async def many() -> None:
            results = await asyncio.gather(*(box.sandbox.run(f"print({number}, {i})") for i in range(8)))
            found.extend(result.stdout for result in results)

        asyncio.run(many())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(f"{n} {i}\n" for n in range(4) for i in range(8))


def test_a_cancelled_run_ends_its_process(box: Held) -> None:
    mark = f"{time.time_ns()}"

    async def scenario() -> None:
        task = asyncio.create_task(box.sandbox.run_command(["sleep", mark]))
        for _ in range(200):
            await asyncio.sleep(0.02)
            if processes_with(mark):
                break
        assert processes_with(mark)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    _until_gone(mark)


def test_a_kill_that_comes_before_the_set_up_ends_a_child_in_every_tier() -> None:
    async def scenario(one: Held) -> None:
        server = one.sandbox._servers[0]
        os.kill(server.pid, signal.SIGSTOP)  # it is to find the order and the kill together
        run = asyncio.ensure_future(one.sandbox.run("while True: pass"))
        while not server._waiting:
            await asyncio.sleep(0)

        async def kill() -> None:
            server.kill(next(iter(server._waiting)), "cancelled")

        await elsewhere(kill())
        os.kill(server.pid, signal.SIGCONT)
        try:
            assert (await asyncio.wait_for(run, 10)).status is Status.KILLED
        except SandboxFault as fault:  # it was not yet set up
            assert "cancelled" in str(fault)

    with held("none") as one:
        for _ in range(30):
            asyncio.run(scenario(one))


def test_a_folder_of_any_depth_does_not_end_the_fork_server_of_a_lower_tier() -> None:
    dig = "import os\nfor _ in range(1500): os.mkdir('a'); os.chdir('a')\nopen('bottom', 'w').close()"
    with held("none") as one:
        server = one.sandbox._servers[0]
        for _ in range(2):
            assert one.run(dig).status is Status.OK
        assert one.run("1").value == "1"
        assert one.sandbox._servers == [server]
        assert os.listdir(server._folder / "root") == []
    assert not server._folder.exists()


def test_runs_leave_no_descriptor_open(box: Held) -> None:
    box.run("1")
    before = len(os.listdir("/proc/self/fd"))
    for code in ("1", "1 / 0", "import os\nos.abort()", "print('x' * 100000)"):
        box.run(code)
    assert len(os.listdir("/proc/self/fd")) <= before  # others may end meanwhile


def test_a_lost_fork_server_fails_what_ran_and_is_replaced() -> None:
    with held() as one:

        async def scenario() -> str:
            running = asyncio.create_task(one.sandbox.run("import time\ntime.sleep(60)"))
            await asyncio.sleep(0.3)
            os.kill(one.sandbox._servers[0].pid, signal.SIGKILL)
            with pytest.raises(SandboxFault, match="fork server is gone"):
                await running
            return (await one.sandbox.run("print('again')")).stdout

        assert asyncio.run(scenario()) == "again\n"


_HARNESS = """
import asyncio, sys
from surefoot.sandbox import Sandbox, Limits
from surefoot.sandbox.io import elsewhere
async def main():
    async with Sandbox.open(tier=sys.argv[2], limits=Limits(seconds=600)) as box:
        session = await box.session()
        start = "import os\\nif os.fork() == 0: os.setsid(); os.execv('/bin/sleep', ['sleep', '%s'])"
        await session.run(start % sys.argv[1])
        asyncio.ensure_future(box.run_command(["sleep", sys.argv[1]]))
        await asyncio.sleep(0.3)
        print(box._servers[0].pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


def _over(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _until_gone(mark: str) -> None:
    for _ in range(100):
        if not processes_with(mark):
            return
        time.sleep(0.02)
    raise AssertionError(f"still running: {processes_with(mark)}")


@pytest.mark.parametrize("victim", ["harness", "fork server"])
def test_killing_the_harness_or_the_fork_server_leaves_nothing(victim: str, tmp_path: Path) -> None:
    mark = f"{time.time_ns()}"
    harness = subprocess.Popen(
        [sys.executable, "-c", _HARNESS, mark, "full"], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        assert harness.stdout is not None
        server = int(harness.stdout.readline())
        assert len(processes_with(mark)) >= 3  # the harness itself, and two that sleep
        os.kill(server if victim == "fork server" else harness.pid, signal.SIGKILL)
        if victim == "fork server":
            for _ in range(100):
                if len(processes_with(mark)) == 1:
                    break
                time.sleep(0.02)
            assert processes_with(mark) == [harness.pid]
    finally:
        harness.kill()
        harness.wait()
        harness.stdout.close()
    _until_gone(mark)
    assert os.listdir(tmp_path) == []
    for _ in range(100):
        if _over(server):
            return
        time.sleep(0.02)
    raise AssertionError("the fork server is still there")


_LOWER = """
import asyncio
from surefoot.sandbox import Sandbox, Limits
async def main():
    async with Sandbox.open(tier="none", limits=Limits(seconds=600)) as box:
        running = asyncio.ensure_future(box.run("open('f', 'w').close(); import time; time.sleep(600)"))
        await asyncio.sleep(0.3)
        print(box._servers[0].pid, flush=True)
        await running
asyncio.run(main())
"""


def test_killing_the_harness_leaves_no_folder_of_a_lower_tier(tmp_path: Path) -> None:
    harness = subprocess.Popen(
        [sys.executable, "-c", _LOWER], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert harness.stdout is not None
    server = int(harness.stdout.readline())
    assert len(list(tmp_path.glob("*/root/*/box/f"))) == 1
    harness.kill()
    harness.wait()
    harness.stdout.close()
    for _ in range(250):
        if _over(server):
            break
        time.sleep(0.02)
    assert _over(server) and os.listdir(tmp_path) == []


# -------------------- the child that is set up in advance

_CONFINED = """
import os, resource
print(sorted(os.listdir('/proc/self/fd')), os.getpid(), sorted(os.listdir('/proc')), os.listdir('.'))
print({n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith('RLIMIT_')})
print([l for l in open('/proc/self/status') if l.startswith(('Cap', 'Seccomp', 'NoNewPrivs', 'Uid', 'Gid'))])
print(open('/proc/self/oom_score_adj').read(), len(list(open('/proc/self/mountinfo'))), dict(os.environ))
"""


def _children(pid: int) -> list[int]:
    return [one.pid for one in psutil.Process(pid).children()]


def _spare(one: Held, *, other_than: int = 0) -> int:
    """The child that waits in an idle fork server."""
    (server,) = _children(one.sandbox._servers[-1].pid)
    for _ in range(250):
        waiting = [pid for pid in _children(server) if pid != other_than]
        if len(waiting) == 1:
            return waiting[0]
        time.sleep(0.02)
    raise AssertionError(f"children of the fork server: {_children(server)}")


def test_a_child_set_up_in_advance_is_used_once_and_confined_like_a_fresh_one() -> None:
    with held() as one:
        fresh = one.run(_CONFINED)
        first = _spare(one)
        prepared = one.run(_CONFINED)
        assert prepared.stdout == fresh.stdout and fresh.status is Status.OK, prepared.stderr
        assert _spare(one, other_than=first) != first
        assert one.run("open('left', 'w')").status is Status.OK
        assert one.run("import os\nprint(os.listdir('.'))").stdout == "[]\n"


def test_a_child_set_up_in_advance_is_not_used_for_other_limits() -> None:
    write = "open('a', 'wb').write(bytes(3 << 20))"
    with held() as one:
        for megabytes, status in ((8, Status.OK), (2, Status.ERROR), (8, Status.OK), (2, Status.ERROR)):
            assert one.run(write, limits=replace(SMALL, files_mb=megabytes)).status is status
            _spare(one)


def test_a_child_set_up_in_advance_that_dies_harms_nobody_and_leaves_nothing_open() -> None:
    with held() as one:
        one.run("1")
        last = _spare(one)
        (server,) = _children(one.sandbox._servers[-1].pid)
        open_before = len(os.listdir(f"/proc/{server}/fd"))
        for number in range(20):
            os.kill(last, signal.SIGKILL)
            time.sleep(0.05 * (number % 2))  # dead before the hand-over, or found dead after it
            assert one.run(f"{number}").value == str(number)
            last = _spare(one, other_than=last)
        assert len(os.listdir(f"/proc/{server}/fd")) == open_before


def test_probe_names_the_strongest_tier_and_its_gaps() -> None:
    found = asyncio.run(probe())
    assert found.tier is Tier.FULL
    assert found.gaps == ()
    assert len(found.checks) > 10
    assert asyncio.run(probe("none")).gaps == tuple(check.name for check in found.checks)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can have it")
def test_a_tier_that_this_user_cannot_have_is_refused_with_the_reason() -> None:
    with pytest.raises(SandboxFault, match="uid: needs root"):
        asyncio.run(probe("uid"))

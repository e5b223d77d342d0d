"""Sessions keep their state, forks go their own way, and what the code does to itself stays its own loss."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from surefoot.core.errors import ConfigError, DataError
from surefoot.sandbox import Session, Status
from surefoot.sandbox.session import SessionEnded

from .conftest import SMALL, Held, processes_with


def within(box: Held, scenario: Callable[[Session], Awaitable[None]], **limits: float) -> None:
    """Run ``scenario`` with a fresh session."""

    async def whole() -> None:
        async with await box.sandbox.session(limits=replace(SMALL, **limits)) as session:
            await scenario(session)

    asyncio.run(whole())


def test_state_and_files_live_from_turn_to_turn(tiered: Held) -> None:
    async def scenario(session: Session) -> None:
        first = await session.run("import os\nx = 1\nopen('f', 'w').write('kept')\nprint('one')")
        assert (first.stdout, first.status) == ("one\n", Status.OK)
        second = await session.run("print('two')\nx + 1, open('f').read(), os.getcwd() != '/'")
        assert (second.stdout, second.value) == ("two\n", "(2, 'kept', True)")

    within(tiered, scenario)


def test_an_error_or_an_exit_ends_the_turn_and_not_the_session(box: Held) -> None:
    async def scenario(session: Session) -> None:
        await session.run("x = 5")
        for code, status in (("1 / 0", Status.ERROR), ("exit(3)", Status.ERROR), ("a = [", Status.ERROR)):
            assert (await session.run(code)).status is status
        assert (await session.run("bytearray(1 << 30)")).status is Status.MEMORY
        assert (await session.run("x")).value == "5"

    within(box, scenario)


def test_the_deadline_interrupts_and_keeps_the_state(tiered: Held) -> None:
    async def scenario(session: Session) -> None:
        await session.run("x = 5")
        for code in ("while True: pass", "import time\ntime.sleep(60)"):
            result = await session.run("print('before', flush=True)\n" + code, seconds=0.2)
            assert (result.status, result.exit_code) == (Status.TIMEOUT, 130)
            assert result.stdout == "before\n"
            assert "KeyboardInterrupt" in result.stderr
        assert (await session.run("x")).value == "5"

    within(tiered, scenario)


def test_code_that_is_deaf_to_the_interrupt_is_killed(tiered: Held) -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"

    async def scenario(session: Session) -> None:
        began = time.monotonic()
        result = await session.run(code, seconds=0.2)
        assert (result.status, result.exit_code) == (Status.TIMEOUT, -9)
        assert time.monotonic() - began < 3
        assert not session.alive
        again = await session.run("1")
        assert again.status is Status.KILLED
        assert "the session has ended" in again.stderr

    within(tiered, scenario)


def test_too_much_output_ends_the_turn_and_keeps_the_state(box: Held) -> None:
    async def scenario(session: Session) -> None:
        await session.run("x = 5")
        flood = await session.run("while True: print('y' * 1000)")
        assert (flood.status, flood.truncated) == (Status.OUTPUT_LIMIT, True)
        assert len(flood.stdout) == SMALL.output_bytes
        after = await session.run("print('z')\nx")
        assert (after.stdout, after.value, after.truncated) == ("z\n", "5", False)

    within(box, scenario)


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "import ctypes\nctypes.string_at(0)",
        "import os\nos.close(3)",
        "import os\nos.closerange(0, 9)",
        "import os\nos.kill(os.getpid(), 9)",
        "import os\nos.write(3, b'junk' * 10000)\nos.write(3, b'0=forged')\nimport time\ntime.sleep(60)",
    ],
)
def test_a_session_that_harms_itself_is_killed_and_never_a_fault_of_the_sandbox(box: Held, code: str) -> None:
    async def scenario(session: Session) -> None:
        await session.run(code, seconds=1)
        await asyncio.sleep(0.05)
        assert (await session.run("1")).status is Status.KILLED

    within(box, scenario)
    assert box.run("1").status is Status.OK


def test_a_report_that_nobody_asked_for_is_no_answer_to_the_next_turn(box: Held) -> None:
    code = """
import os, threading, time
def forge():
    time.sleep(0.1)
    os.write(3, b"0='forged'")
threading.Thread(target=forge, daemon=True).start()
"""

    async def scenario(session: Session) -> None:
        assert (await session.run(code)).status is Status.OK
        await asyncio.sleep(0.3)
        result = await session.run("'true'")
        assert (result.status, result.value) == (Status.KILLED, "")

    within(box, scenario)


def test_sessions_that_send_noise_end_alone(box: Held) -> None:
    noise = """
import os, random
rng = random.Random({seed})
for _ in range(rng.randrange(1, 30)):
    os.write(3, rng.choice([b'0=', b'F', b'F99', b'M', b'']) + rng.randbytes(rng.randrange(1, 2000)))
"""

    async def scenario() -> None:
        honest = await box.sandbox.session()
        await honest.run("x = 1")
        for seed in range(25):
            async with await box.sandbox.session() as session:
                await session.run(noise.format(seed=seed), seconds=1)
                await session.run("2")  # what it says is its own affair; that it says something is ours
        assert (await honest.run("x")).value == "1"
        await honest.close()

    asyncio.run(scenario())


def test_turns_of_one_session_queue_up(box: Held) -> None:
    async def scenario(session: Session) -> None:
        await session.run("seen = []")
        await asyncio.gather(*(session.run(f"seen.append({i})") for i in range(5)))
        assert (await session.run("seen")).value == "[0, 1, 2, 3, 4]"

    within(box, scenario)


def test_turn_time_is_checked(box: Held) -> None:
    async def scenario(session: Session) -> None:
        for seconds in (0, -1, SMALL.seconds + 1, float("nan")):
            with pytest.raises(ConfigError, match="seconds"):
                await session.run("1", seconds=seconds)

    within(box, scenario)


# ---- forks


def test_a_fork_has_the_memory_and_files_of_its_moment_and_then_goes_its_own_way(box: Held) -> None:
    async def scenario(session: Session) -> None:
        await session.run("x = [1]\nopen('f', 'w').write('old')")
        branch = await session.fork()
        await branch.run("x.append(2)\nopen('f', 'w').write('new')")
        await session.run("x.append(3)")
        assert (await session.run("x, open('f').read()")).value == "([1, 3], 'old')"
        assert (await branch.run("x, open('f').read()")).value == "([1, 2], 'new')"
        assert await branch.read_file("f") == b"new"
        assert await session.read_file("f") == b"old"
        twig = await branch.fork()
        assert (await twig.run("x, open('f').read()")).value == "([1, 2], 'new')"

    within(box, scenario)


def test_forks_live_on_when_their_parent_ends(box: Held) -> None:
    async def scenario(session: Session) -> None:
        await session.run("x = 1")
        branch = await session.fork()
        other = await session.fork()
        await session.close()
        assert not session.alive
        assert (await branch.run("x")).value == "1"
        assert (await branch.run("import os\nos._exit(1)")).status is Status.KILLED
        assert (await other.run("x")).value == "1"
        await other.close()
        await branch.close()

    within(box, scenario)


def test_the_last_close_ends_everything_of_the_tree(box: Held) -> None:
    mark = f"{time.time_ns()}"

    async def scenario(session: Session) -> None:
        await session.run(
            f"import subprocess\np = subprocess.Popen(['sleep', '{mark}'], start_new_session=True)"
        )
        branch = await session.fork()
        await session.close()
        assert len(processes_with(mark)) == 1
        await branch.close()
        assert processes_with(mark) == []

    within(box, scenario)


def test_a_fork_that_cannot_be_is_the_sessions_own_end_or_refusal(box: Held) -> None:
    async def scenario(session: Session) -> None:
        with pytest.raises(SessionEnded, match="no process"):
            for _ in range(SMALL.processes + 1):
                await session.fork()
        assert (await session.run("1")).value == "1"
        await session.run("import os\nos._exit(0)")
        with pytest.raises(SessionEnded, match="has ended"):
            await session.fork()

    within(box, scenario)


def test_a_fork_needs_nothing_that_the_code_may_have_spoilt(box: Held) -> None:
    spoil = """
import os, sys
for name in ("shutil", "lzma", "fnmatch"):
    sys.modules[name] = None
    open(name + ".py", "w").write("raise RuntimeError('mine')")
sys.path.insert(0, os.getcwd())
os.mkfifo("pipe")
os.mkdir("d")
os.chdir("d")
os.rmdir("../d")
x = 7
"""

    async def scenario(session: Session) -> None:
        assert (await session.run(spoil)).status is Status.OK
        branch = await session.fork()
        assert (await branch.run("os.path.basename(os.getcwd()), x")).value == "('1', 7)"
        assert (await session.run("x")).value == "7"

    within(box, scenario)


def test_a_fork_that_fails_says_why_and_the_session_lives_on(box: Held) -> None:
    async def scenario(session: Session) -> None:
        await session.run("x = 7\nwith open('f', 'wb') as f: f.write(bytes(6 << 20))")
        with pytest.raises(SessionEnded, match="No space left"):
            await session.fork()
        assert (await session.run("x")).value == "7"

    within(box, scenario)


def test_who_gives_up_waiting_for_a_fork_does_not_shift_the_answers(box: Held) -> None:
    async def scenario(session: Session) -> None:
        await session.run("import signal\nx = 7\nwith open('f', 'wb') as f: f.write(bytes(3 << 20))")
        waiting = asyncio.ensure_future(session.fork())
        await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        result = await session.run("import time\ntime.sleep(0.2)\nprint('hi')\nx")
        assert (result.stdout, result.value) in {("hi\n", "7"), ("", "")}
        assert (result.status is Status.OK) == (result.stdout == "hi\n") == session.alive

    for _ in range(5):
        within(box, scenario)


def test_who_gives_up_waiting_for_a_file_does_not_shift_the_answers(box: Held) -> None:
    async def scenario(session: Session) -> None:
        await session.run("open('a', 'w').write('AAA')\nopen('b', 'w').write('BBB')")
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            waiting = asyncio.ensure_future(session.read_file("a"))
            await asyncio.sleep(0)
            waiting.cancel()
            assert await session.read_file("b") == b"BBB"
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert len(os.listdir("/proc/self/fd")) == descriptors

    within(box, scenario)


def test_memory_that_forks_share_counts_once(box: Held) -> None:
    async def scenario(session: Session) -> None:
        await session.run("a = bytearray(40 << 20)")
        forks = [await session.fork() for _ in range(4)]
        await asyncio.sleep(0.3)
        assert [(await fork.run("len(a) >> 20")).value for fork in forks] == ["40"] * 4
        unshare = "for i in range(0, len(a), 4096): a[i] = 1\nimport time\ntime.sleep(0.4)"
        ends = [(await fork.run(unshare)).status for fork in forks]
        assert next(end for end in ends if end is not Status.OK) is Status.MEMORY

    within(box, scenario)


# ---- files


def test_files_are_read_only_where_they_really_are(tiered: Held, outside) -> None:
    code = f"""
import os
os.mkdir('d')
open('d/plain', 'wb').write(b'content')
os.symlink({str(outside.grader)!r}, 'link')
os.symlink({str(outside.folder)!r}, 'folder')
os.symlink('d/plain', 'inner')
os.symlink('/proc/self/root', 'root')
os.mkfifo('pipe')
with open('big', 'wb') as f: f.truncate(1 << 20)
"""

    async def scenario(session: Session) -> None:
        made = await session.run(code)
        assert made.status is Status.OK, made
        assert await session.read_file("d/plain") == b"content"
        refused = ("link", "folder/grader.py", "inner", f"root{outside.grader}", "pipe", "d", "none", "../x")
        for path in (*refused, str(outside.grader), "/proc/self/environ", "", "a\0b", "x" * 5000):
            with pytest.raises(DataError):
                await session.read_file(path)
        with pytest.raises(DataError, match="more than 1000 bytes"):
            await session.read_file("big", most=1000)

    within(tiered, scenario)


def test_a_folder_that_the_code_swaps_for_a_link_is_not_followed(box: Held) -> None:
    async def scenario(session: Session) -> None:
        branch = await session.fork()
        swap = "import os, shutil\nos.chdir('/')\nshutil.rmtree('/forks/1')\nos.symlink('/etc', '/forks/1')"
        assert (await branch.run(swap)).status is Status.OK
        with pytest.raises(DataError, match="links"):
            await branch.read_file("passwd")

    within(box, scenario)


def test_sessions_leave_no_descriptor_open(box: Held) -> None:
    async def scenario(session: Session) -> None:
        await session.run("open('f', 'w').close()")
        await session.read_file("f")
        await (await session.fork()).close()

    within(box, scenario)
    before = len(os.listdir("/proc/self/fd"))
    within(box, scenario)
    assert len(os.listdir("/proc/self/fd")) <= before  # others may end meanwhile


@pytest.mark.slow
def test_more_sessions_than_the_code_may_have_descriptors(box: Held) -> None:
    async def scene() -> list[str]:
        sessions = [await box.sandbox.session() for _ in range(300)]
        values = [(await session.run(f"{i} + 1")).value for i, session in enumerate(sessions)]
        late = await box.sandbox.run("print('late')")
        for session in sessions:
            await session.close()
        return [*values, late.stdout]

    assert asyncio.run(scene()) == [*(str(i + 1) for i in range(300)), "late\n"]

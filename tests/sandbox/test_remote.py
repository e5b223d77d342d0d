"""Sandboxes in containers elsewhere. The container is stood in for by a process of this machine that runs the
real worker; each library is the real one, with the service behind it played here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import queue
import random
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from surefoot.core.errors import ConfigError, DataError
from surefoot.sandbox import Limits, Profile, Sandbox, SandboxFault, Status, Tier
from surefoot.sandbox.io import elsewhere
from surefoot.sandbox.layout import interpreter
from surefoot.sandbox.remote import E2B, Docker, Kubernetes, link, worker
from surefoot.sandbox.remote.docker import DockerChannel
from surefoot.sandbox.remote.kubernetes import PodChannel
from surefoot.sandbox.remote.libraries import PACKAGES
from surefoot.sandbox.session import SessionEnded

# Tier `none` inside: what the inner tiers hold is tested where they are; here it would only cost the probe.
SMALL = Limits(seconds=30, memory_mb=256, output_bytes=4096)
Scene = Callable[[Sandbox], Awaitable[None]]


class Played:
    """A process in place of a container: its stdin and its output in order."""

    def __init__(self, command: Sequence[str]) -> None:
        # A real container takes its files along.
        self._files = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            [interpreter(), *command[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={"PATH": os.environ["PATH"], "TMPDIR": self._files.name},
            start_new_session=True,
        )  # fmt: skip
        self.output: queue.Queue[tuple[int, bytes] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None and self.process.stderr is not None
        names = {self.process.stdout.fileno(): 1, self.process.stderr.fileno(): 2}
        while names:
            for fd in select.select(list(names), [], [])[0]:
                data = os.read(fd, 1 << 16)
                if data:
                    self.output.put((names[fd], data))
                else:
                    del names[fd]
        self.output.put(None)

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def receive(self) -> tuple[int, bytes] | None:
        return self.output.get()

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._files.cleanup()


class Local:
    """A backend whose containers are processes."""

    def __init__(self) -> None:
        self.started: list[Played] = []

    def start(self, command: Sequence[str], *, label: str) -> Played:
        self.started.append(Played(command))
        return self.started[-1]


def play(scene: Scene, backend: Any, **options: Any) -> None:
    async def whole() -> None:
        given = {"limits": SMALL, "tier": "none", **options}
        async with Sandbox.open(backend=backend, **given) as box:
            await scene(box)

    asyncio.run(whole())


async def everything(box: Sandbox) -> None:
    """The whole interface once: runs, programs, files, errors, limits, sessions and forks."""
    assert box.tier is Tier.REMOTE and box.probe.inside is Tier.NONE
    result = await box.run("print('hello')\n6 * 7", stdin=b"", seed=1)
    assert (result.stdout, result.value, result.status) == ("hello\n", "42", Status.OK)
    odd = await box.run("import os, sys\nos.write(1, b'\\xff\\0')\nprint(sys.stdin.read())", stdin=b"in\n")
    assert odd.stdout == "\\xffin\n\n"
    found = await box.run("print(open('a/b.txt').read())", files={"a/b.txt": b"inside"})
    assert found.stdout == "inside\n"
    assert (await box.run_command(["sh", "-c", "echo out; exit 3"])).exit_code == 3
    failed = await box.run("1 / 0")
    assert failed.status is Status.ERROR and "ZeroDivisionError" in failed.stderr
    flood = await box.run("while True: print('x' * 1000)")
    assert flood.status is Status.OUTPUT_LIMIT and flood.truncated and len(flood.stdout) <= 4096
    late = await box.run("while True: pass", limits=Limits(seconds=0.5))
    assert late.status is Status.TIMEOUT
    async with await box.session(seed=3) as session:
        await session.run("x = 1\nopen('out.txt', 'w').write('mine')")
        branch = await session.fork()
        assert (await branch.run("x += 1\nx")).value == "2"
        assert (await session.run("x")).value == "1"
        assert await session.read_file("out.txt") == b"mine"
        with pytest.raises(DataError, match="cannot be read"):
            await session.read_file("../x")
        with pytest.raises(DataError, match="more than 2 bytes"):
            await session.read_file("out.txt", most=2)
        stopped = await session.run("while True: pass", seconds=0.4)
        assert stopped.status is Status.TIMEOUT and session.alive
        assert (await session.run("x")).value == "1", "an interrupted turn keeps the state"
        gone = await branch.run("import os\nos._exit(3)")
        assert gone.exit_code == 3 and not branch.alive
        with pytest.raises(SessionEnded):
            await branch.fork()
    assert not session.alive


def test_the_whole_interface_through_a_worker() -> None:
    backend = Local()
    play(everything, backend)
    assert len(backend.started) == 1
    assert backend.started[0].process.poll() is not None, "closing the sandbox ends the container"


@pytest.mark.attack
def test_the_tier_inside_is_probed_there() -> None:
    async def scene(box: Sandbox) -> None:
        assert box.probe.inside is Tier.FULL and len(box.probe.checks) > 10 and not box.probe.gaps
        code = "import os\nprint(os.path.exists('/work'), os.listdir('/tmp'), os.getpid())"
        assert (await box.run(code)).stdout == "False [] 1\n"

    # As of a busy machine: the probe gives each attack ten seconds.
    play(scene, Local(), tier="full")


def test_runs_overlap_and_a_cancelled_one_is_ended() -> None:
    async def scene(box: Sandbox) -> None:
        began = time.monotonic()
        await asyncio.gather(*(box.run("import time\ntime.sleep(1)") for _ in range(8)))
        assert time.monotonic() - began < 7
        mark = f"{time.time_ns()}"
        lost = asyncio.ensure_future(box.run_command(["sleep", f"{1000}.{mark}"]))
        await _until(lambda: _running(mark))
        lost.cancel()
        await _until(lambda: not _running(mark))

    play(scene, Local(), concurrency=8)


async def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def _running(mark: str) -> bool:
    done = subprocess.run(["pgrep", "-f", rf"^sleep 1000\.{mark}"], stdout=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def test_a_lost_container_fails_what_runs_in_it_and_the_next_run_gets_a_new_one() -> None:
    backend = Local()

    async def scene(box: Sandbox) -> None:
        session = await box.session()
        running = asyncio.ensure_future(box.run("import time\ntime.sleep(60)"))
        await asyncio.sleep(0.5)
        backend.started[0].close()
        with pytest.raises(SandboxFault, match="the container is gone"):
            await running
        with pytest.raises(SandboxFault, match="the container is gone"):
            await session.run("1")
        assert not session.alive
        assert (await box.run("print(2)")).stdout == "2\n"

    play(scene, backend)
    assert len(backend.started) == 2


OPENED = {"tier": "none", "checks": [], "refused": {}}


class Scripted(Local):
    """A container that says it is open, ``opened`` say, and ``answer`` to the order after that."""

    def __init__(self, answer: bytes, opened: Any = None) -> None:
        super().__init__()
        self._answer, self._opened = answer, opened or OPENED

    def start(self, command: Sequence[str], *, label: str) -> Played:
        opened = json.dumps({"id": 1, "ok": self._opened}).encode() + b"\n"
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(self._answer)
        code = (
            "import os, sys\n"
            "say, hear = sys.stdout.buffer, sys.stdin.buffer\n"
            f"hear.readline(); hear.readline(); say.write({opened!r}); say.flush()\n"
            f"hear.readline(); say.write(open({file.name!r}, 'rb').read()); say.flush()\n"
            f"os.unlink({file.name!r}); hear.read()\n"
        )
        return super().start(["python3", "-c", code], label=label)


RIGHT = {
    "stdout": "", "stderr": "", "value": "", "status": "ok",
    "exit_code": 0, "seconds": 0.1, "truncated": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"not json\n", "the container is gone: JSONDecodeError"),
        (b'{"id": 2, "ok": []}\n', "an answer from the container is no table"),
        (b'{"id": 2, "error": 5}\n', "an answer that is none"),
        (b'{"id": 2, "error": ["ConfigError"]}\n', "an answer that is none"),
        (b'{"id": 2, "error": ["KeyError", "made up"]}\n', "made up"),
        ({**RIGHT, "stdout": 5}, "stdout = 5"),
        ({**RIGHT, "status": "fine"}, "status 'fine'"),
        ({**RIGHT, "stdout": "x" * 200_000}, "larger than its limits"),
        ({**RIGHT, "exit_code": None}, "exit_code = None"),
    ],
)
def test_what_a_container_says_is_checked(answer: Any, why: str) -> None:
    line = answer if isinstance(answer, bytes) else json.dumps({"id": 2, "ok": answer}).encode() + b"\n"

    async def scene(box: Sandbox) -> None:
        with pytest.raises(SandboxFault, match=re.escape(why)):
            await box.run("1")

    play(scene, Scripted(line))


@pytest.mark.parametrize(
    "opened",
    [
        {**OPENED, "tier": "best"},
        {**OPENED, "checks": 5},
        {**OPENED, "checks": [["short"]]},
        {**OPENED, "checks": [{"name": "x"}]},
        {**OPENED, "refused": 5},
        {**OPENED, "refused": ["abc"]},
    ],
    ids=str,
)
def test_a_probe_that_cannot_be_read_is_a_fault_and_ends_the_container(opened: Any) -> None:
    backend = Scripted(b"", opened)

    async def scene(box: Sandbox) -> None:
        raise AssertionError("it must not open")

    with pytest.raises(SandboxFault, match="what was probed in the container cannot be read"):
        play(scene, backend)
    assert backend.started[0].process.returncode is not None


class Parts:
    """A channel whose output comes in the parts given; closing fails, as where the daemon has gone."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts: queue.Queue[tuple[int, bytes] | None] = queue.Queue()
        self._given = [*((1, part) for part in parts), None]
        self.broken = False

    def send(self, data: bytes) -> None:
        if self.broken:
            raise ConnectionError("the daemon has gone")
        for part in self._given:
            self._parts.put(part)
        self._given = []

    def receive(self) -> tuple[int, bytes] | None:
        return self._parts.get()

    def close(self) -> None:
        self._parts.put(None)
        raise RuntimeError("no daemon answers")


def test_answers_are_whole_wherever_they_are_cut() -> None:
    rng = random.Random(0)

    async def scene(parts: Sequence[bytes], number: int) -> list[Any]:
        one = link.Link(Parts(parts))
        told = await asyncio.gather(*(one.ask("run", {}, 20) for _ in range(number)))
        await one.close()
        return [found["n"] for found in told]

    for _ in range(30):
        lines = [json.dumps({"id": n, "ok": {"n": n, "x": "y" * rng.randrange(40)}}) for n in (1, 2, 3)]
        data = "".join(f"{line}\n" for line in lines).encode()
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(8)))
        parts = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
        assert asyncio.run(elsewhere(scene(parts, 3))) == [1, 2, 3]


def test_a_daemon_that_has_gone_hides_neither_the_fault_nor_the_cancellation() -> None:
    async def scene() -> None:
        one = link.Link(Parts([b"not json\n"]))
        with pytest.raises(SandboxFault, match="the container is gone: JSONDecodeError"):
            await one.ask("run", {}, 20)
        await one.close()
        channel = Parts([])
        channel._given = []
        other = link.Link(channel)
        asked = asyncio.ensure_future(other.ask("run", {}, 20))
        await asyncio.sleep(0.05)
        channel.broken = True
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await other.close()

    asyncio.run(elsewhere(scene()))


def test_a_session_whose_opening_was_cancelled_does_not_stay() -> None:
    class Opened:
        closed = False

        async def session(self, **options: Any) -> Opened:
            return self

        async def fork(self) -> Opened:
            return Opened()

        async def close(self) -> None:
            self.closed = True

    async def scene() -> None:
        ours, theirs = os.pipe()
        served = worker.Worker(theirs)
        served._box = kept = Opened()  # type: ignore[assignment]
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        serving = asyncio.ensure_future(served.serve(lines))

        def say(**order: Any) -> None:
            lines.put_nowait(json.dumps(order).encode())

        say(op="session", id=1, limits={}, seed=None)
        say(op="session", id=2, limits={}, seed=None)
        say(op="fork", id=3, session=1)
        await _until(lambda: len(served._sessions) == 3 and not served._running)
        copy: Any = served._sessions[3]
        say(op="cancel", target=3)  # its answer was on the way when the harness gave up
        await _until(lambda: copy.closed)
        assert list(served._sessions) == [1, 2] and not kept.closed
        say(op="cancel", target=2)
        say(op="cancel", target=9)
        await _until(lambda: kept.closed)
        assert list(served._sessions) == [1]
        lines.put_nowait(b"")
        await serving
        os.close(theirs)
        with open(ours, "rb") as said:
            assert sorted(json.loads(line)["id"] for line in said) == [1, 2, 3]

    asyncio.run(scene())


def test_an_answer_without_end_ends_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_MOST_LINE", 100_000)

    async def scene(box: Sandbox) -> None:
        with pytest.raises(SandboxFault, match="an answer of more than 100000 bytes"):
            await box.run("1")

    play(scene, Scripted(b"x" * 200_000))


def test_a_container_without_python_says_so() -> None:
    class Broken(Local):
        def start(self, command: Sequence[str], *, label: str) -> Played:
            return super().start(["python3", "-c", "import sys; sys.exit('no python3.11 here')"], label=label)

    async def scene(box: Sandbox) -> None:
        raise AssertionError("it must not open")

    with pytest.raises(SandboxFault, match=r"no python3\.11 here|Broken ?[Pp]ipe"):
        play(scene, Broken())


def test_what_is_shipped_holds_the_sandbox_and_nothing_else() -> None:
    import base64
    import io
    import zipfile

    names = zipfile.ZipFile(io.BytesIO(base64.b64decode(link.shipped()))).namelist()
    assert {name.rpartition("/")[0] for name in names} == {
        "surefoot", "surefoot/core", "surefoot/sandbox", "surefoot/sandbox/inside", "surefoot/sandbox/remote",
    }  # fmt: skip
    assert len(names) == len(set(names)) and all(name.endswith(".py") for name in names)


def test_settings_that_cannot_hold_elsewhere_are_refused(tmp_path: Any) -> None:
    async def opened(**options: Any) -> None:
        async with Sandbox.open(**options):
            raise AssertionError("it must not open")

    for options, why in (
        ({"tier": "remote"}, "give a backend for 'remote'"),
        ({"backend": Local(), "tier": "remote"}, "give a backend for 'remote'"),
        ({"backend": Local(), "total_memory_mb": 100}, "set the backend's memory"),
        ({"backend": Local(), "profile": Profile("repo", tree=tmp_path)}, "Profile.tree"),
    ):
        with pytest.raises(ConfigError, match=why):
            asyncio.run(opened(**options))
    for wrong in (
        lambda: Docker(""), lambda: Docker("i", memory_mb=0), lambda: Kubernetes(""), lambda: E2B(lifetime=0),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            wrong()
    for cpus in (0.0, -1.0, 0.001, float("nan"), float("inf")):
        for kind in (Docker, Kubernetes):
            with pytest.raises(ConfigError, match=rf"{kind.__name__}\.cpus .* got {cpus}"):
                kind("i", cpus=cpus)
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match=rf"Kubernetes\.ready_seconds .* got {seconds}"):
            Kubernetes("i", ready_seconds=seconds)


@pytest.mark.parametrize(
    "backend", [Docker("python:3.12"), Kubernetes("python:3.12"), E2B()], ids=lambda b: type(b).__name__
)
def test_a_missing_package_names_the_extra(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            monkeypatch.setitem(sys.modules, name, None)

    async def scene(box: Sandbox) -> None:
        raise AssertionError("it must not open")

    with pytest.raises(ConfigError, match=r"pip install 'surefoot\[remote\]'"):
        play(scene, backend)


# ---- Docker: the real client against a daemon that is played


class Daemon(BaseHTTPRequestHandler):
    """Create, attach, start and remove, as Docker's API has them."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[dict[str, Any]]] = []
    calls: ClassVar[list[str]] = []
    started: ClassVar[threading.Event]
    played: ClassVar[list[Played]] = []

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def _reply(self, status: int, body: Any = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _called(self) -> str:
        path = re.sub(r"^/v[\d.]+", "", self.path.partition("?")[0])
        self.calls.append(f"{self.command} {path}")
        return path

    def do_GET(self) -> None:
        self._called()
        self._reply(200, {"ApiVersion": "1.44", "MinAPIVersion": "1.24", "Version": "27"})

    def do_DELETE(self) -> None:
        self._called()
        for one in self.played:
            one.close()
        self._reply(204)

    def do_POST(self) -> None:
        path = self._called()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/containers/create":
            made = json.loads(body)
            if made["Image"] == "missing":
                self._reply(404, {"message": "No such image: missing"})
                return
            self.bodies.append(made)
            self._reply(201, {"Id": "c0ffee", "Warnings": []})
        elif path == "/containers/c0ffee/start":
            self.started.set()
            self._reply(204)
        else:
            assert path == "/containers/c0ffee/attach" and "stdin=1" in self.path
            self._attach()

    def _attach(self) -> None:
        self.wfile.write(
            b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.multiplexed-stream\r\n"
            b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        self.wfile.flush()
        self.close_connection = True
        assert self.started.wait(20)
        one = Played(self.bodies[-1]["Cmd"])
        self.played.append(one)

        def out() -> None:
            while (part := one.receive()) is not None:
                self.connection.sendall(struct.pack(">BxxxL", part[0], len(part[1])) + part[1])
            with contextlib.suppress(OSError):  # the client went first
                self.connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=out, daemon=True).start()
        while data := self.connection.recv(1 << 16):
            one.send(data)
        assert one.process.stdin is not None
        one.process.stdin.close()  # as StdinOnce: the harness has gone


@pytest.fixture
def daemon() -> Any:
    pytest.importorskip("docker", reason="needs the extra remote")
    Daemon.bodies, Daemon.calls, Daemon.played = [], [], []
    Daemon.started = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Daemon)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"tcp://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    for one in Daemon.played:
        one.close()


def test_docker_holds_the_whole_interface(daemon: str) -> None:
    play(everything, Docker("python:3.12-slim", url=daemon, memory_mb=512, cpus=1.5, runtime="runsc"))
    body = Daemon.bodies[0]
    host = body["HostConfig"]
    assert body["StdinOnce"] and body["OpenStdin"] and body["NetworkDisabled"]
    assert body["Labels"] == {"surefoot": "surefoot-sandbox"}
    assert host["Memory"] == host["MemorySwap"] == 512 << 20 and host["PidsLimit"] == 4096
    assert host["NetworkMode"] == "none" and host["ReadonlyRootfs"] and host["AutoRemove"]
    assert host["CapDrop"] == ["ALL"] and "SYS_ADMIN" not in host["CapAdd"]
    assert host["SecurityOpt"] == ["no-new-privileges"] and host["Runtime"] == "runsc"
    assert host["NanoCpus"] == 1_500_000_000
    assert Daemon.calls[-1] == "DELETE /containers/c0ffee"


def test_docker_says_what_the_daemon_says(daemon: str) -> None:
    async def scene(box: Sandbox) -> None:
        raise AssertionError("it must not open")

    with pytest.raises(SandboxFault, match=r"'missing'.*No such image"):
        play(scene, Docker("missing", url=daemon))
    with pytest.raises(SandboxFault, match="no Docker daemon answers at tcp"):
        play(scene, Docker("python", url="tcp://127.0.0.1:9"))


# ---- Kubernetes: the real client against an API that is played, and a stream that is stubbed


class Cluster(BaseHTTPRequestHandler):
    """Create, read and delete pods, as the API server has them."""

    protocol_version = "HTTP/1.1"
    pods: ClassVar[dict[str, Any]] = {}
    deleted: ClassVar[list[tuple[str, str]]] = []
    played: ClassVar[list[Played]] = []
    pending = 0

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def _reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")

    def do_POST(self) -> None:
        body = self._body()
        if "/forbidden/" in self.path:
            self._reply(403, {"kind": "Status", "reason": "Forbidden"})
            return
        self.pods[body["metadata"]["name"]] = body
        self._reply(201, body)

    def do_GET(self) -> None:
        body = self.pods[self.path.rpartition("/")[2]]
        Cluster.pending -= 1
        waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
        status: dict[str, Any] = {"phase": "Running"}
        if Cluster.pending >= 0:
            state = {
                "name": "worker", "image": "i", "imageID": "", "ready": False, "restartCount": 0,
                "state": {"waiting": waiting},
            }  # fmt: skip
            status = {"phase": "Pending", "containerStatuses": [state]}
        self._reply(200, {**body, "status": status})

    def do_DELETE(self) -> None:
        self._body()
        name, _, query = self.path.rpartition("/")[2].partition("?")
        self.deleted.append((name, query))
        for one in self.played:
            one.close()
        self._reply(200, self.pods[name])


class Websocket:
    """What of the client's WSClient is used: one reader, text in both directions."""

    def __init__(self, played: Played) -> None:
        self._played, self._open, self._all = played, True, ""

    def is_open(self) -> bool:
        return self._open

    def update(self, timeout: float = 0) -> None:
        try:
            part = self._played.output.get(timeout=timeout)
        except queue.Empty:
            return
        if part is None:
            self._open = False
        elif part[0] == 1:
            self._all += part[1].decode()

    def read_all(self) -> str:
        found, self._all = self._all, ""
        return found

    def write_channel(self, channel: int, data: str) -> None:
        assert channel == 0 and len(data) <= 1 << 16
        self._played.send(data.encode())

    def close(self) -> None:
        self._open = False


def attach(call: Any, name: str, namespace: str, **options: Any) -> Websocket:
    assert call.__name__ == "connect_get_namespaced_pod_attach" and namespace == "rl"
    assert options == {
        "stdin": True, "stdout": True, "stderr": False, "tty": False, "_preload_content": False,
    }  # fmt: skip
    Cluster.played.append(Played(Cluster.pods[name]["spec"]["containers"][0]["command"]))
    return Websocket(Cluster.played[-1])


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("kubernetes", reason="needs the extra remote")
    from kubernetes import client, config, stream

    Cluster.pods, Cluster.deleted, Cluster.played, Cluster.pending = {}, [], [], 1
    server = ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = client.Configuration(host=f"http://127.0.0.1:{server.server_port}")
    settings.retries = False
    use = client.Configuration.set_default
    monkeypatch.setattr(config, "load_kube_config", lambda context: use(settings))
    monkeypatch.setattr(stream, "stream", attach)
    yield Cluster
    use(None)
    server.shutdown()
    server.server_close()
    for one in Cluster.played:
        one.close()


def test_kubernetes_holds_the_whole_interface(cluster: type[Cluster]) -> None:
    play(everything, Kubernetes("python:3.12-slim", namespace="rl", runtime_class="gvisor", memory_mb=512))
    ((name, body),) = cluster.pods.items()
    spec, container = body["spec"], body["spec"]["containers"][0]
    assert cluster.deleted == [(name, "gracePeriodSeconds=0")]
    assert body["metadata"]["labels"] == {"surefoot": "surefoot-sandbox"}
    assert spec["runtimeClassName"] == "gvisor" and spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False and spec["activeDeadlineSeconds"] == 86_400
    assert container["stdinOnce"] and container["resources"]["limits"] == {"memory": "512Mi", "cpu": "2.0"}
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_a_pod_that_does_not_run_is_deleted_and_says_why(cluster: type[Cluster]) -> None:
    cluster.pending = 1000

    async def scene(box: Sandbox) -> None:
        raise AssertionError("it must not open")

    with pytest.raises(SandboxFault, match=r"Pending.*ImagePullBackOff: no such image"):
        play(scene, Kubernetes("nowhere", namespace="rl", ready_seconds=1.2))
    assert [name for name, _ in cluster.deleted] == list(cluster.pods)
    with pytest.raises(SandboxFault, match=r"refuses a pod in 'forbidden'.*Forbidden"):
        play(scene, Kubernetes("python", namespace="forbidden"))


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_a_channel_lets_its_socket_go_where_the_service_does_not_answer(kind: str) -> None:
    pytest.importorskip(kind, reason="needs the extra remote")
    ours, theirs = socket.socketpair()

    class Gone:
        attach_socket = start = close = lambda self, *_: theirs

        def refuse(self, *_: Any, **options: Any) -> None:
            raise ConnectionError("nothing answers")

        remove_container = delete_namespaced_pod = refuse

    channel = DockerChannel(Gone(), "c") if kind == "docker" else PodChannel(Gone(), "p", "rl", theirs)
    with ours, pytest.raises(ConnectionError, match="nothing answers"):
        channel.close()
    assert theirs.fileno() == -1


def test_without_a_cluster_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pytest.importorskip("kubernetes", reason="needs the extra remote")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    from kubernetes.config import kube_config

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(SandboxFault, match="no Kubernetes cluster is configured"):
        Kubernetes("python").start(["python3"], label="x")


# ---- E2B: the real package, with a machine that is played


class Machine:
    """What E2B's Sandbox offers, as a process."""

    def __init__(self) -> None:
        self.killed = False
        self.commands = self
        self.options: dict[str, Any] = {}

    def run(self, command: str, **options: Any) -> Machine:
        import shlex

        assert options == {
            "background": True, "stdin": True, "timeout": 0, "user": "root", "retain_output": False,
        }  # fmt: skip
        self.played = Played(shlex.split(command))
        return self

    @property
    def pid(self) -> int:
        return self.played.process.pid

    def send_stdin(self, pid: int, data: str) -> None:
        assert pid == self.pid
        self.played.send(data.encode())

    def __iter__(self) -> Any:
        while (part := self.played.receive()) is not None:
            text = part[1].decode()
            yield (text, None, None) if part[0] == 1 else (None, text, None)

    def kill(self) -> None:
        self.killed = True
        self.played.close()


def test_e2b_holds_the_whole_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    e2b = pytest.importorskip("e2b", reason="needs the extra remote")
    machine = Machine()

    def create(template: str, **options: Any) -> Machine:
        machine.options = {"template": template, **options}
        return machine

    monkeypatch.setattr(e2b.Sandbox, "create", create)
    play(everything, E2B("science", lifetime=600))
    assert machine.killed
    assert machine.options == {
        "template": "science", "timeout": 600, "allow_internet_access": False,
        "metadata": {"surefoot": "surefoot-sandbox"},
    }  # fmt: skip


def test_e2b_without_a_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("e2b", reason="needs the extra remote")
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(SandboxFault, match="E2B gives no machine"):
        E2B().start(["python3"], label="x")

"""A sandbox per tier for all tests, and a harness for it to attack."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from surefoot.sandbox import Limits, Profile, Result, Sandbox, Tier
from surefoot.sandbox.layout import interpreter

ROOT = Path(__file__).resolve().parents[2]
SMALL = Limits(seconds=20, memory_mb=64, output_bytes=4096, processes=24, files_mb=8, cpu_seconds=10)


class Held:
    """A sandbox that tests use without an event loop of their own."""

    def __init__(
        self, tier: str, profile: Profile | None = None, limits: Limits = SMALL, **options: Any
    ) -> None:
        self._manager = Sandbox.open(tier=tier, profile=profile or Profile(), limits=limits, **options)
        # asyncio.run would close the manager's generator at its end, and with it the sandbox.
        self._loop = asyncio.new_event_loop()
        self.sandbox = self._loop.run_until_complete(self._manager.__aenter__())
        self.tier = self.sandbox.tier

    def run(self, code: str, **options: Any) -> Result:
        return asyncio.run(self.sandbox.run(code, **options))

    def command(self, *argv: str, **options: Any) -> Result:
        return asyncio.run(self.sandbox.run_command(argv, **options))

    def close(self) -> None:
        self._loop.run_until_complete(self._manager.__aexit__(None, None, None))
        self._loop.close()


@contextmanager
def held(tier: str = "full", profile: Profile | None = None, limits: Limits = SMALL) -> Iterator[Held]:
    one = Held(tier, profile or Profile(), limits)
    try:
        yield one
    finally:
        one.close()


def why_not(tier: Tier) -> str:
    """Why a tier cannot be tried by this user, or ""."""
    root = os.geteuid() == 0
    if tier is Tier.UID and not root:
        return "needs root"
    if tier is Tier.LANDLOCK and root:
        return "needs an ordinary user"
    if tier is Tier.UID and not _open_to_all(Path(interpreter())):
        return "the interpreter lies in a folder that only root may enter"
    return ""


def _open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)


@pytest.fixture(scope="session")
def box() -> Iterator[Held]:
    with held() as one:
        yield one


@pytest.fixture(scope="session", params=["full", "uid", "landlock"])
def tiered(request: pytest.FixtureRequest) -> Iterator[Held]:
    reason = why_not(Tier(request.param))
    if reason:
        pytest.skip(reason)
    with held(request.param) as one:
        yield one


@dataclass
class Outside:
    """What an agent would like to reach: a grader, a reward, another rollout, a process, ports."""

    folder: Path
    secret: str
    victim: subprocess.Popen[bytes]
    tcp: socket.socket
    abstract: socket.socket
    before: dict[str, tuple[int, int, bytes]] = field(default_factory=dict)

    @property
    def grader(self) -> Path:
        return self.folder / "grader.py"

    @property
    def reward(self) -> Path:
        return self.folder / "reward.json"

    @property
    def port(self) -> int:
        return self.tcp.getsockname()[1]

    def snapshot(self) -> dict[str, tuple[int, int, bytes]]:
        """Mode, change time and content of every file."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            state = path.stat()
            found[path.name] = (state.st_mode, state.st_ctime_ns, path.read_bytes())
        return found

    def untouched(self) -> bool:
        return self.snapshot() == self.before

    def reached(self) -> bool:
        """Whether anything connected."""
        for listener in (self.tcp, self.abstract):
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                continue
            return True
        return False


@pytest.fixture(scope="session")
def outside() -> Iterator[Outside]:
    # Open to every user on purpose: the sandbox must not lean on the modes of files.
    folder = Path(tempfile.mkdtemp(prefix="harness-"))
    folder.chmod(0o777)
    secret = os.urandom(8).hex()
    (folder / "grader.py").write_text(f"ANSWER = '{secret}'")
    (folder / "reward.json").write_text("0")
    (folder / "rollout-2.txt").write_text(secret)
    for path in folder.iterdir():
        path.chmod(0o666)
    victim = subprocess.Popen(
        [sys.executable, "-S", "-c", f"token = '{secret}'\nimport time\ntime.sleep(600)"],
        env={"TOKEN": secret},
    )
    tcp = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0harness-{folder.name}")
    abstract.listen()
    for listener in (tcp, abstract):
        listener.setblocking(False)
    found = Outside(folder, secret, victim, tcp, abstract)
    found.before = found.snapshot()
    yield found
    victim.kill()
    victim.wait()
    tcp.close()
    abstract.close()
    shutil.rmtree(folder)


def processes_with(mark: str) -> list[int]:
    """Process ids on this machine with ``mark`` on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # ended between listing and reading
    return found


def as_user(uid: int, *command: str) -> list[str]:
    """``command`` as another user, who may enter the interpreter's folder though it may lie in root's own.

    From root only. Works in a mount namespace of its own: nothing changes for anybody else.
    """
    needed = [path for path in (sys.base_prefix, sys.prefix, str(ROOT)) if not _open_to_all(Path(path) / "x")]
    script = ["set -e", "mkdir -p /mnt", "mount -t tmpfs none /mnt"]
    script += [f"mkdir /mnt/{i} && mount --rbind '{path}' /mnt/{i}" for i, path in enumerate(needed)]
    closed = sorted({str(_first_closed(Path(path))) for path in needed})
    script += [f"mount -t tmpfs -o mode=755 none '{folder}'" for folder in closed]
    script += [f"mkdir -p '{path}' && mount --rbind /mnt/{i} '{path}'" for i, path in enumerate(needed)]
    drop = f"setpriv --reuid {uid} --regid {uid} --clear-groups --inh-caps=-all --bounding-set=-all"
    script.append(f'exec {drop if uid else ""} "$@"')
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(script), "sh", *command]


def _first_closed(path: Path) -> Path:
    return next(
        folder for folder in reversed((path, *path.parents)) if not folder.stat().st_mode & stat.S_IXOTH
    )

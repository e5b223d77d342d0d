"""Virtual machines of E2B, a hosted service, through its package ``e2b``."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.core.errors import ConfigError
from surefoot.sandbox.remote.libraries import library
from surefoot.sandbox.types import SandboxFault

_PART = 1 << 20  # of a request to stdin


@dataclass(frozen=True, slots=True)
class E2B:
    """Which machine to ask for.

    ``template``: of the account; needs ``python3`` (3.11 or newer) and the profile's packages; its memory and
    CPU are the machine's. ``lifetime``: seconds after which the service ends a machine. ``internet``: whether
    the machine reaches it (code does only in inner tier ``none``). The key comes from ``E2B_API_KEY``.
    """

    template: str = "base"
    lifetime: int = 3600
    internet: bool = False
    user: str = "root"

    def __post_init__(self) -> None:
        if self.lifetime < 1:
            raise ConfigError(f"E2B.lifetime must be at least 1 second, got {self.lifetime}")

    def start(self, command: Sequence[str], *, label: str) -> E2BChannel:
        """A new machine. See :class:`Backend`."""
        e2b = library("e2b")
        try:
            machine = e2b.Sandbox.create(
                self.template,
                timeout=self.lifetime,
                allow_internet_access=self.internet,
                metadata={"surefoot": label},
            )
        except Exception as error:  # the client's errors and httpx's have no common base
            raise SandboxFault(f"E2B gives no machine: {error}") from error
        try:
            handle = machine.commands.run(
                shlex.join(command),
                background=True,
                stdin=True,
                timeout=0,
                user=self.user,
                retain_output=False,
            )
        except Exception as error:
            with contextlib.suppress(Exception):  # why it cannot be used says more
                machine.kill()
            raise SandboxFault(f"E2B cannot start the worker: {error}") from error
        return E2BChannel(machine, handle)


class E2BChannel:
    """A command's stdin and output."""

    def __init__(self, machine: Any, handle: Any) -> None:
        self._machine, self._handle = machine, handle
        self._events: Iterator[tuple[str | None, str | None, Any]] = iter(handle)

    def send(self, data: bytes) -> None:
        """Write all of ``data``, which is ASCII, in parts."""
        text = data.decode("ascii")
        for start in range(0, len(text), _PART):
            self._machine.commands.send_stdin(self._handle.pid, text[start : start + _PART])

    def receive(self) -> tuple[int, bytes] | None:
        """What came next."""
        for out, err, _ in self._events:
            if out:
                return 1, out.encode("utf-8", "backslashreplace")
            if err:
                return 2, err.encode("utf-8", "backslashreplace")
        return None

    def close(self) -> None:
        """End the machine."""
        self._machine.kill()

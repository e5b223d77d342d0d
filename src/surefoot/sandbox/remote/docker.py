"""Containers of a Docker (or Podman) daemon, through the package ``docker``."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.core.errors import ConfigError
from surefoot.sandbox.remote.libraries import library
from surefoot.sandbox.remote.link import CAPABILITIES
from surefoot.sandbox.types import SandboxFault


@dataclass(frozen=True, slots=True)
class Docker:
    """Where containers come from, and what each may use in all.

    ``image``: needs ``python3`` (3.11 or newer) and the profile's packages. ``memory_mb``, ``processes``,
    ``cpus``, ``disk_mb`` (of ``/tmp``, which is memory): of the whole container. ``runtime``: ``runsc`` for
    gVisor, say. ``network``: a Docker network; ``none`` by default. ``security``: of Docker's
    ``security_opt``, beside ``no-new-privileges``. ``url``: of the daemon; the environment's if empty.
    """

    image: str
    memory_mb: int = 4096
    processes: int = 4096
    cpus: float | None = None
    disk_mb: int = 1024
    runtime: str | None = None
    network: str = "none"
    security: tuple[str, ...] = ()
    url: str = ""
    labels: dict[str, str] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        for name in ("memory_mb", "processes", "disk_mb"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Docker.{name} must be at least 1, got {getattr(self, name)}")
        if self.cpus is not None and not 0.01 <= self.cpus < math.inf:
            raise ConfigError(f"Docker.cpus must be at least 0.01, or None for no bound, got {self.cpus}")
        if not self.image:
            raise ConfigError("Docker.image is empty; name an image with Python 3.11 or newer")

    def start(self, command: Sequence[str], *, label: str) -> DockerChannel:
        """A new container, removed by the daemon when its command ends. See :class:`Backend`."""
        docker = library("docker")
        errors = (docker.errors.DockerException, OSError)
        try:
            api = docker.APIClient(base_url=self.url, version="auto") if self.url else docker.from_env().api
        except errors as error:
            raise SandboxFault(
                f"no Docker daemon answers at {self.url or 'its usual place'}: {error}"
            ) from error
        try:
            made = api.create_container(
                self.image,
                list(command),
                stdin_open=True,  # once: when this harness is killed, the worker's stdin ends and so does it
                labels={"surefoot": label, **self.labels},
                network_disabled=self.network == "none",
                host_config=self._host(api),
            )
            return DockerChannel(api, str(made["Id"]))
        except errors as error:
            raise SandboxFault(f"Docker cannot start a container of {self.image!r}: {error}") from error

    def _host(self, api: Any) -> Any:
        memory = f"{self.memory_mb}m"
        more: dict[str, Any] = {"runtime": self.runtime} if self.runtime else {}
        if self.cpus is not None:
            more["nano_cpus"] = int(self.cpus * 1e9)
        return api.create_host_config(
            auto_remove=True,
            network_mode=self.network,
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=self.processes,
            read_only=True,
            tmpfs={"/tmp": f"rw,exec,nosuid,nodev,size={self.disk_mb}m,mode=1777"},
            cap_drop=["ALL"],
            cap_add=list(CAPABILITIES),
            security_opt=["no-new-privileges", *self.security],
            **more,
        )


class DockerChannel:
    """A container's stdin and output on one hijacked connection."""

    def __init__(self, api: Any, container: str) -> None:
        self._api, self._container = api, container
        try:
            params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            self._attached = api.attach_socket(container, params)
            # Before the start, so that nothing of its output is missed.
            self._socket: socket.socket = getattr(self._attached, "_sock", self._attached)
            self._socket.settimeout(None)
            api.start(container)
        except BaseException:
            self.close()
            raise
        frames = library("docker", "utils.socket").frames_iter(self._attached, tty=False)
        self._frames: Iterator[tuple[int, bytes]] = iter(frames)

    def send(self, data: bytes) -> None:
        """Write all of ``data``."""
        self._socket.sendall(data)

    def receive(self) -> tuple[int, bytes] | None:
        """The next frame."""
        return next(self._frames, None)

    def close(self) -> None:
        """Remove the container by force."""
        if hasattr(self, "_socket"):
            with contextlib.suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)
        try:
            with contextlib.suppress(library("docker").errors.APIError):  # it ended and the daemon removed it
                self._api.remove_container(self._container, force=True, v=True)
        finally:
            if hasattr(self, "_attached"):
                self._attached.close()
            self._api.close()

"""Pods of a Kubernetes cluster, through the package ``kubernetes``."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.core.errors import ConfigError
from surefoot.sandbox.remote.libraries import library
from surefoot.sandbox.remote.link import CAPABILITIES
from surefoot.sandbox.types import SandboxFault

_STDIN = 0
_POLL_SECONDS = 0.5
_PART = 1 << 16  # of a message to stdin; servers refuse larger ones


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Where pods come from, and what each may use in all.

    ``image``: needs ``python3`` (3.11 or newer) and the profile's packages. ``runtime_class``: of the
    cluster, ``gvisor`` or ``kata`` say. ``memory_mb``, ``cpus``, ``disk_mb`` (of ``/tmp``): of the pod.
    ``lifetime``: seconds after which the cluster ends a pod that the harness has left. ``ready_seconds``:
    wait for a place and the image. ``context``: of the kubeconfig; inside a cluster, without one, the pod's
    own account is used.
    """

    image: str
    namespace: str = "default"
    runtime_class: str | None = None
    memory_mb: int = 4096
    cpus: float = 2.0
    disk_mb: int = 1024
    lifetime: int = 86_400
    ready_seconds: float = 300.0
    context: str | None = None

    def __post_init__(self) -> None:
        for name in ("memory_mb", "disk_mb", "lifetime"):
            if getattr(self, name) < 1:
                raise ConfigError(f"Kubernetes.{name} must be at least 1, got {getattr(self, name)}")
        if not 0.01 <= self.cpus < math.inf:
            raise ConfigError(f"Kubernetes.cpus must be at least 0.01, got {self.cpus}")
        if not self.ready_seconds > 0:
            raise ConfigError(f"Kubernetes.ready_seconds must be more than 0, got {self.ready_seconds}")
        if not self.image:
            raise ConfigError("Kubernetes.image is empty; name an image with Python 3.11 or newer")

    def start(self, command: Sequence[str], *, label: str) -> PodChannel:
        """A new pod that ends with its command. See :class:`Backend`."""
        client, api = self._api()
        name = f"surefoot-{secrets.token_hex(6)}"
        try:
            api.create_namespaced_pod(self.namespace, self._pod(name, command, label))
        except client.exceptions.ApiException as error:
            raise SandboxFault(f"the cluster refuses a pod in {self.namespace!r}: {error.reason}") from error
        except Exception as error:  # urllib3's, when no server answers
            raise SandboxFault(f"no Kubernetes API answers: {error}") from error
        try:
            self._wait(api, name)
            stream = library("kubernetes", "stream").stream
            attached = stream(
                api.connect_get_namespaced_pod_attach, name, self.namespace,
                stdin=True, stdout=True, stderr=False, tty=False, _preload_content=False,
            )  # fmt: skip
        except Exception as error:
            with contextlib.suppress(Exception):  # why it cannot be used says more
                api.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)
            if isinstance(error, SandboxFault):
                raise
            raise SandboxFault(f"pod {name} cannot be attached to: {error}") from error
        return PodChannel(api, name, self.namespace, attached)

    def _api(self) -> tuple[Any, Any]:
        client, config = library("kubernetes", "client"), library("kubernetes", "config")
        try:
            if self.context is None:
                with contextlib.suppress(config.ConfigException):  # not inside a cluster
                    config.load_incluster_config()
                    return client, client.CoreV1Api()
            config.load_kube_config(context=self.context)
        except config.ConfigException as error:
            raise SandboxFault(f"no Kubernetes cluster is configured: {error}") from error
        return client, client.CoreV1Api()

    def _pod(self, name: str, command: Sequence[str], label: str) -> dict[str, Any]:
        most = {"memory": f"{self.memory_mb}Mi", "cpu": str(self.cpus)}
        container: dict[str, Any] = {
            "name": "worker",
            "image": self.image,
            "command": list(command),
            "stdin": True,
            "stdinOnce": True,  # when this harness is killed, the worker's stdin ends and so does it
            "resources": {"limits": most, "requests": most},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {
                    "drop": ["ALL"],
                    "add": list(CAPABILITIES),
                },
            },
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }
        spec: dict[str, Any] = {
            "containers": [container],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": self.lifetime,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": f"{self.disk_mb}Mi"}}],
        }
        if self.runtime_class is not None:
            spec["runtimeClassName"] = self.runtime_class
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"surefoot": label}},
            "spec": spec,
        }

    def _wait(self, api: Any, name: str) -> None:
        deadline = time.monotonic() + self.ready_seconds
        phase, why = "", ""
        while time.monotonic() < deadline:
            status = api.read_namespaced_pod(name, self.namespace).status
            phase = str(status.phase)
            if phase == "Running":
                return
            states = [one.state for one in status.container_statuses or []]
            waits = [state.waiting for state in states if state is not None and state.waiting is not None]
            why = "; ".join(f"{wait.reason}: {wait.message or ''}".strip(": ") for wait in waits)
            if phase in ("Failed", "Succeeded"):
                break
            time.sleep(_POLL_SECONDS)
        raise SandboxFault(
            f"pod {name} does not run; it is {phase or 'not there'} ({why or 'no reason given'})"
        )


class PodChannel:
    """A pod's stdin and output on one websocket."""

    def __init__(self, api: Any, name: str, namespace: str, attached: Any) -> None:
        self._api, self._name, self._namespace, self._socket = api, name, namespace, attached
        self._closed = False

    def send(self, data: bytes) -> None:
        """Write all of ``data``, which is ASCII, in parts."""
        text = data.decode("ascii")
        for start in range(0, len(text), _PART):
            self._socket.write_channel(_STDIN, text[start : start + _PART])

    def receive(self) -> tuple[int, bytes] | None:
        """What came next on stdout, the only channel that is attached; the pod's log has stderr."""
        while not self._closed:
            self._socket.update(timeout=_POLL_SECONDS)
            found = self._socket.read_all()  # and not read_channel, which keeps a copy of everything
            if found:
                return 1, found.encode("utf-8", "backslashreplace")
            if not self._socket.is_open():
                return None
        return None

    def close(self) -> None:
        """Delete the pod at once."""
        self._closed = True
        try:
            with contextlib.suppress(library("kubernetes", "client").exceptions.ApiException):  # it is gone
                self._api.delete_namespaced_pod(self._name, self._namespace, grace_period_seconds=0)
        finally:
            self._socket.close()

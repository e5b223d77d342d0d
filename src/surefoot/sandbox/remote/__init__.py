"""Sandboxes in containers elsewhere: the same fork server, started in one and reached through a library.

Needs ``surefoot[remote]``. Must not know agents, nor how a container is held; that is said by who runs it.
"""

from surefoot.sandbox.remote.docker import Docker
from surefoot.sandbox.remote.e2b import E2B
from surefoot.sandbox.remote.kubernetes import Kubernetes

__all__ = ["E2B", "Docker", "Kubernetes"]

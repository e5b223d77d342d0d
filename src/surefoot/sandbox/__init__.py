"""Runs untrusted Python and programs with files, network, processes, memory, time and output bounded.

It must know nothing of agents, rewards or models: bytes go in, a :class:`Result` comes out.
"""

from surefoot.sandbox.probe import probe
from surefoot.sandbox.sandbox import Sandbox
from surefoot.sandbox.session import Session
from surefoot.sandbox.shared import SharedSandbox
from surefoot.sandbox.types import (
    BARE,
    NUMPY,
    SCIENCE,
    Check,
    Limits,
    Probe,
    Profile,
    Result,
    SandboxFault,
    Status,
    Tier,
)

__all__ = [
    "BARE",
    "NUMPY",
    "SCIENCE",
    "Check",
    "Limits",
    "Probe",
    "Profile",
    "Result",
    "Sandbox",
    "SandboxFault",
    "Session",
    "SharedSandbox",
    "Status",
    "Tier",
    "probe",
]

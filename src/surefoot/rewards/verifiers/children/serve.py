"""The loop of a helper process: bounded memory and CPU, one JSON line in, one out."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until the input closes. What ``handle`` prints goes nowhere."""
    size = int(sys.argv[1]) * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        # Should the caller die, this ends a check that would never end.
        limit = int(usage.ru_utime + usage.ru_stime + request.pop("cpu_seconds")) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        reply = {"ready": True} if request.get("ready") else handle(request)
        data = memoryview(json.dumps(reply).encode() + b"\n")
        while data:
            data = data[out.write(data) :]

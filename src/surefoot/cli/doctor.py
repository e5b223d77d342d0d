"""``surefoot doctor``: whether this machine can train, and what is missing where."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import typer

# name, lowest version, extra ("" = always needed) of "torch>=2.6; extra == 'train'"
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)\s*(?:>=([0-9.]+))?[^;]*(?:;.*extra\s*==\s*['\"]([a-z]+)['\"])?")
_NEEDED = ("", "train")
_GIGABYTE = 1e9
_LEAST_MEMORY = 4 * _GIGABYTE


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis. ``ok`` None: worth knowing, no obstacle."""

    name: str
    ok: bool | None
    detail: str


def doctor(
    part: Annotated[
        str | None,
        typer.Argument(help="sandbox: attack the sandbox, tell its tier and what it does not stop."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Load this model and probe its chat format.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Look at Python, machine, packages, cache and models; exit with 1 when training cannot run."""
    from surefoot.cli.output import emit, new_table, show
    from surefoot.core.errors import ConfigError

    if part not in (None, "sandbox"):
        raise ConfigError(f"doctor knows no part {part!r}; valid: sandbox")
    if part == "sandbox":
        findings = list(_sandbox())
    else:
        findings = [*_machine(), *_packages(), *_torch(), *_cache(), *(_probe(model) if model else ())]
    well = all(item.ok is not False for item in findings)
    if json:
        emit({"ok": well, "findings": [asdict(item) for item in findings]})
    else:
        table = new_table("", "what", "state", "detail")
        shown = {True: ("ok", "green"), False: ("failed", "bold red"), None: ("note", "yellow")}
        for item in findings:
            state, style = shown[item.ok]
            table.add_row(item.name, state, item.detail, style=style)
        show(table)
    if not well:
        raise typer.Exit(1)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> tuple[float, float | None]:
    """(bytes in all, bytes free for new work where the system tells)."""
    total = float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.is_file() else None
    return total, float(found.group(1)) * 1024 if found else None


def _machine() -> Iterator[Finding]:
    from surefoot import __version__
    from surefoot.cli.output import size

    yield Finding("surefoot", True, __version__)
    yield Finding(
        "python", sys.version_info >= (3, 11), f"{platform.python_version()} on {platform.system()}"
    )
    yield Finding("cores", True, str(cores()))
    total, free = memory()
    left = f", {size(free)} available" if free is not None else ""
    yield Finding("memory", None if (free or total) < _LEAST_MEMORY else True, f"{size(total)}{left}")


def _packages() -> Iterator[Finding]:
    """Every dependency that the package itself declares, with the extra that brings it."""
    try:
        declared = requires("surefoot") or []
    except PackageNotFoundError:
        yield Finding("packages", False, "surefoot is not installed; pip install -e .")
        return
    for line in declared:
        match = _REQUIREMENT.match(line)
        if match is None or match.group(3) == "dev":
            continue
        name, lowest, extra = match.group(1), match.group(2) or "0", match.group(3) or ""
        needed = extra in _NEEDED
        fix = f'pip install "surefoot[{extra}]"' if extra else "pip install surefoot"
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(name, False if needed else None, f"missing: {fix}")
            continue
        if _numbers(found) < _numbers(lowest):
            yield Finding(name, False if needed else None, f"{found} is older than {lowest}: {fix}")
        else:
            yield Finding(name, True, found)


def _numbers(text: str) -> tuple[int, ...]:
    """The release part of a version: 2.13.0+cpu -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _torch() -> Iterator[Finding]:
    variable = os.environ.get("OMP_NUM_THREADS")
    setting = f"OMP_NUM_THREADS={variable}" if variable else "OMP_NUM_THREADS is not set"
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        yield Finding("threads", False, f"{setting}; torch cannot be imported: {error}")
        return
    threads = torch.get_num_threads()
    yield Finding("threads", None if threads > cores() else True, f"torch uses {threads}; {setting}")
    if torch.cuda.is_available():
        yield Finding("cuda", None, f"{torch.cuda.get_device_name(0)}; this version trains on the CPU")


def _cache() -> Iterator[Finding]:
    from surefoot.cli.output import size
    from surefoot.policy.models import cache_root, list_models

    root = cache_root()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    writable = os.access(existing, os.W_OK)
    free = size(shutil.disk_usage(existing).free)
    detail = f"{root}, {free} free" if writable else f"{root} cannot be written; set SUREFOOT_CACHE"
    yield Finding("cache", True if writable else None, detail)
    for item in list_models():
        where = f"pulled, {item.path or 'built in'}" if item.pulled else f"surefoot models pull {item.name}"
        yield Finding(f"model {item.name}", True if item.pulled else None, where)


def _probe(name: str) -> Iterator[Finding]:
    """Load a model and try its renderer; a format that loses tokens or tool calls is an obstacle."""
    from surefoot.core.errors import SurefootError
    from surefoot.policy.models import load
    from surefoot.policy.rendering import make_codec

    try:
        loaded = load(name)
        probe = make_codec(loaded).probe()
    except SurefootError as error:
        yield Finding(f"probe {name}", False, str(error))
        return
    yield Finding(f"probe {name}", True, f"loads, {loaded.context} tokens of context")
    unstable = "every turn opens a new segment" if not probe.prefix_stable else "turns extend token by token"
    yield Finding("prefix stable", True if probe.prefix_stable else None, unstable)
    yield Finding("untrusted text safe", probe.untrusted_safe, probe.detail)
    yield Finding("tool calls round trip", probe.tool_calls_round_trip, probe.detail)


def _sandbox() -> Iterator[Finding]:
    """The strongest tier that holds here, what was tried in it, and why no stronger one does."""
    import asyncio

    from surefoot.sandbox import SandboxFault, probe
    from surefoot.sandbox.cgroup import make_group
    from surefoot.sandbox.remote.libraries import PACKAGES

    try:
        found = asyncio.run(probe())
    except SandboxFault as error:
        yield Finding("tier", False, str(error))
        return
    yield Finding("tier", True if found.tier == "full" else None, str(found.tier))
    for name, why in found.refused.items():
        yield Finding(f"not {name}", None, why)
    for check in found.checks:
        yield Finding(check.name, True if check.stopped else None, check.detail or "stopped")
    group = make_group(None)
    if group is not None:
        group.remove()
    bound = f"{group.memory >> 20} MB in a control group" if group is not None else "no control group here"
    yield Finding("memory of all together", True if group is not None else None, bound)
    for name, package in PACKAGES.items():
        there = importlib.util.find_spec(package) is not None
        hint = "its package is installed" if there else "for containers there: pip install 'surefoot[remote]'"
        yield Finding(f"remote {name}", True if there else None, hint)

"""Decides what of this machine a sandbox may see: the interpreter, system programs, chosen packages.

Everything that is not listed here is absent inside, the harness and its data above all.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

import surefoot
from surefoot.core.errors import ConfigError
from surefoot.sandbox.types import Profile, Tier

# The user that code runs as when the harness is root; the `uid` tier counts up from it.
DEDICATED_USER = 60_600
_SITE = "/site"
_SYSTEM = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/usr/libexec", "/usr/share")
_LOCAL = ("/usr/local/bin", "/usr/local/lib")
_TOP = ("/bin", "/sbin", "/lib", "/lib64")
_LINKS = {"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1"}
_ETC = {
    "/etc/passwd": "agent:x:65534:65534::/box:/bin/sh\n",
    "/etc/group": "agent:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\nhosts: files\n",
}
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def interpreter() -> str:
    """The base interpreter's program, not a virtual environment's link to it."""
    base = getattr(sys, "_base_executable", "") or sys.executable
    return os.path.realpath(base)


def environment() -> dict[str, str]:
    """The whole environment of the fork server, and so of the code."""
    programs = os.path.dirname(interpreter())
    return {
        "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONPATH": _SITE,
        "PYTHONHASHSEED": "0",  # sets iterate alike in every run
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        # Each further arena reserves 64 MB of the address space.
        "MALLOC_ARENA_MAX": "2",
    }


def describe(profile: Profile, tier: Tier, *, most: int, folder: str, tree: str | None) -> dict[str, Any]:
    """The configuration of a fork server. ``folder``: an empty one of its own on this machine."""
    if tier is not Tier.FULL and (profile.network != "none" or profile.tree is not None):
        raise ConfigError(f"profile {profile.name!r} needs tier 'full' for its network or tree, not {tier}")
    shown = _package_paths(profile)
    binds, masks = _interpreter_paths(), _hidden()
    config: dict[str, Any] = {
        "tier": str(tier),
        "root": os.geteuid() == 0,
        "uid": DEDICATED_USER,
        "network": profile.network,
        "tree": tree is not None,
        "preload": list(profile.preload),
        "most": most,
        "staging": folder,
        "slots": folder,
    }
    if tier is Tier.FULL:
        targets = [[path, path] for path in binds] + [[str(path), f"{_SITE}/{path.name}"] for path in shown]
        targets += [[tree, "/tree"]] if tree else []
        links = [[os.readlink(top), top] for top in _TOP if os.path.islink(top)]
        targets += [[top, top] for top in _TOP if os.path.isdir(top) and not os.path.islink(top)]
        links += [[target, link] for link, target in _LINKS.items()]
        rules = {"read": ["/"], "device": [f"/dev/{name}" for name in ("null", "zero", "full")]}
        return {
            **config, "binds": targets, "masks": [path for path in masks if _under(path, binds)],
            "links": links, "etc": _ETC, "path": [_SITE], "rules": rules,
        }  # fmt: skip
    read, listed = carve([*binds, *(top for top in _TOP if os.path.isdir(top))], masks)
    devices = ["/dev/null", "/dev/zero", "/dev/full"]
    rules = {
        "read": [*read, *map(str, shown), "/dev/urandom", "/dev/random"],
        "list": [*listed, *sorted({str(path.parent) for path in shown})],
        "device": devices,
    }
    return {**config, "rules": rules, "path": sorted({str(path.parent) for path in shown})}


def _under(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _interpreter_paths() -> list[str]:
    """System folders, and the interpreter's own where they lie elsewhere. None lies inside another."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    # Of the base interpreter: a virtual environment answers with its own folder for some.
    own = [base / "lib", Path(os.__file__).resolve().parent]
    own += [Path(interpreter()), *(base / "bin" / name for name in ("python", "python3", version))]
    wanted = [*_SYSTEM, *_LOCAL, "/etc/ld.so.cache", *(str(path) for path in own)]
    chosen: list[str] = []
    for path in sorted({path for path in wanted if os.path.exists(path)}):
        if not _under(path, chosen):
            chosen.append(path)
    return chosen


def _hidden() -> list[str]:
    """Folders under those that must not be seen: installed packages, and the harness wherever it lies."""
    roots = {Path("/usr"), Path("/usr/local"), Path(sys.base_prefix)}
    found = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path.cwd())}
    found.add(str(Path(surefoot.__file__).resolve().parent.parent))
    if sys.prefix != sys.base_prefix:
        found.add(sys.prefix)
    for root in roots:
        for pattern in ("lib*/python3*/site-packages", "lib*/python3*/dist-packages"):
            found.update(str(path) for path in root.glob(pattern))
    return sorted(path for path in found if path != "/")


def carve(paths: Sequence[str], masks: Sequence[str]) -> tuple[list[str], list[str]]:
    """(paths to read, folders to list) that together cover ``paths`` without what lies under ``masks``."""
    read: list[str] = []
    listed: list[str] = []
    for path in paths:
        real = os.path.realpath(path)
        if _under(real, masks):
            continue
        if any(_under(mask, [real]) for mask in masks):
            listed.append(path)
            deeper = carve(sorted(entry.path for entry in os.scandir(real)), masks)
            read += deeper[0]
            listed += deeper[1]
        elif os.path.exists(real):
            read.append(path)
    return read, listed


# ---- packages


def _package_paths(profile: Profile) -> list[Path]:
    """Files and folders of the profile's distributions and of what they depend on, sorted."""
    owners = None
    names: list[str] = list(profile.packages)
    for module in profile.preload:
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        if _find(top) is None:
            owners = owners if owners is not None else packages_distributions()
            names += owners.get(top, [])
            if top not in owners:
                raise ConfigError(f"Profile.preload names {module!r}, which is not installed here")
        else:
            names.append(top)
    paths: set[Path] = set()
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        found = _find(name)
        if found is None:
            if name in profile.packages:
                raise ConfigError(f"Profile.packages names {name!r}, which is not installed here")
            continue  # a dependency for another platform
        paths |= _top_level(found)
        names += _needs(found)
    return sorted(paths)


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _needs(found: Distribution) -> list[str]:
    names: list[str] = []
    for line in found.requires or []:
        match = _REQUIREMENT.match(line)
        if match and "extra ==" not in line:
            names.append(match.group())
    return names


def _top_level(found: Distribution) -> set[Path]:
    """What the distribution put into its site folder; programs and other places stay out."""
    tops = {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}
    site = Path(str(found.locate_file("")))
    return {site / top for top in tops if (site / top).exists() and not top.endswith(".pth")}

"""Builds the world that the code sees, and closes it behind each process, tier by tier.

``build`` runs once in the zygote. ``furnish`` and ``confine`` run in every forked child, before any code
of the agent: first its own files and process list, then everything that cannot be undone.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping
from typing import Any

from . import filters, kernel

_MIB = 1 << 20
# Folders that a child gets from its own tmpfs, and where they show.
_OWN = {"box": "/box", "tmp": "/tmp", "shm": "/dev/shm", "forks": "/forks"}
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Room for libraries that are mapped but not counted as data.
_MAPPINGS = 512 * _MIB
_FILES = 256


def build(config: Mapping[str, Any]) -> None:
    """Leave the host: new namespaces, a root of read-only mounts, and (from root) another user.

    Returns in a new process that is process 1 of its process namespace; the caller's process waits for it
    and never returns.
    """
    everything = kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
    if config["root"]:
        # Real root builds, since the interpreter may lie where the dedicated user cannot look.
        kernel.unshare(kernel.NEWNS)
        _build_root(config)
        become_user(config["uid"], config["uid"])
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(everything)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    if not config["root"]:
        _build_root(config)
    kernel.set_hostname("sandbox")
    inner = os.fork()
    if inner:
        _, status = os.waitpid(inner, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.die_with_parent()
    kernel.mount_new("proc", "/proc", "")
    kernel.restrict_mount("/", recursive=False)
    _live_in(_OWN)  # the same for all children, each of which would spend a quarter of a millisecond on it


def _live_in(places: Mapping[str, str]) -> None:
    os.environ.update(HOME=places["box"], TMPDIR=places["tmp"])


def _build_root(config: Mapping[str, Any]) -> None:
    kernel.make_private()
    root: str = config["staging"]
    kernel.mount_new("tmpfs", root, "size=1m,nr_inodes=8192,mode=755")
    for folder in ("/proc", "/run", "/dev", "/etc", *_OWN.values()):
        os.makedirs(root + folder, exist_ok=True)
    for source, target in config["binds"]:
        _mount_point(source, root + target)
        kernel.bind(source, root + target)
        kernel.restrict_mount(root + target)
    for path in config["masks"]:
        if os.path.isdir(root + path):
            kernel.mount_new("tmpfs", root + path, "size=4k,nr_inodes=1,mode=555")
    for name in _DEVICES:
        target = f"{root}/dev/{name}"
        _mount_point("/dev/null", target)
        kernel.bind(f"/dev/{name}", target)
        kernel.restrict_mount(target, read_only=False, devices=True)
    for target, link in config["links"]:
        os.symlink(target, root + link)
    for path, text in config["etc"].items():
        _write(root + path, text)
    # A process list can only be mounted anew while an unmasked one is in sight.
    kernel.bind("/proc", root + "/proc")
    kernel.become_root(root)


def _mount_point(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def _write(path: str, text: str) -> None:
    # Not open(): its layers would be pages of a child's own.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(fd, text.encode())
    os.close(fd)


def become_user(uid: int, gid: int) -> None:
    """Change user and group for good."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    kernel.dumpable()


# ---- per child


def furnish(config: Mapping[str, Any], limits: Mapping[str, Any], slot: str) -> dict[str, str]:
    """Give this process files of its own and, in the full tier, its own process list and network.

    ``slot`` is the child's folder on the host in the lower tiers. Returns where ``box`` (the working
    folder), ``tmp`` and ``forks`` are.
    """
    if config["tier"] != "full":
        places = {name: f"{slot}/{name}" for name in ("box", "tmp", "forks")}
        for path in places.values():
            os.mkdir(path, 0o700)
        os.chdir(places["box"])
        _live_in(places)
        return places
    local = config["network"] == "loopback"
    kernel.unshare(kernel.NEWNS | kernel.NEWIPC | (kernel.NEWNET if local else 0))
    size = limits["files_mb"]
    kernel.mount_new("tmpfs", "/run", f"size={size}m,nr_inodes={1024 + 64 * size},mode=755")
    for name, target in _OWN.items():
        if name == "box" and config["tree"]:
            os.mkdir("/run/upper")
            os.mkdir("/run/work")
            layers = "lowerdir=/tree,upperdir=/run/upper,workdir=/run/work,userxattr"
            kernel.mount_new("overlay", target, layers)
            continue
        os.mkdir(f"/run/{name}")
        kernel.bind(f"/run/{name}", target)
    kernel.mount_new("proc", "/proc", "subset=pid")
    if local:
        _raise_loopback()
    os.chdir("/box")
    return {name: _OWN[name] for name in ("box", "tmp", "forks")}


def confine(
    config: Mapping[str, Any], limits: Mapping[str, Any], base: Mapping[str, int], slot: str, uid: int
) -> None:
    """Take away everything the agent's code must not have. Nothing of this can be undone.

    ``base``: data and mapped bytes that the zygote already holds, which do not count as the code's own.
    """
    tier = config["tier"]
    _set_limits(limits, base)
    _write("/proc/self/oom_score_adj", "1000")  # where memory is short, this goes before the fork server
    if tier == "full":
        # A user namespace without a map: its own count of processes, and a user that owns nothing.
        kernel.unshare(kernel.NEWUSER)
        kernel.drop_capabilities()
    if tier == "uid":
        become_user(uid, uid)
    if tier != "full":
        kernel.die_with_parent()
    if tier != "none":
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
    if tier == "none":
        return
    kernel.no_new_privileges()
    rules: dict[str, list[str]] = dict(config["rules"])
    own = list(_OWN.values()) if tier == "full" else [slot]
    rules["write"] = own
    fd = filters.ruleset(rules, sockets=_has_sockets(config))
    if fd is not None:
        kernel.landlock_restrict(fd)
        os.close(fd)
    elif tier != "full":
        raise OSError(f"tier {tier} needs Landlock, which this kernel lacks")
    kernel.install_filter(seccomp_program(config))


def seccomp_program(config: Mapping[str, Any]) -> bytes:
    """What :func:`confine` installs."""
    tier = config["tier"]
    alone = os.getpid() if tier == "landlock" else None
    return filters.program(sockets=_has_sockets(config), shared_files=tier != "full", alone=alone)


def _has_sockets(config: Mapping[str, Any]) -> bool:
    return config["network"] == "loopback"


def _set_limits(limits: Mapping[str, Any], base: Mapping[str, int]) -> None:
    memory, cpu = limits["memory_mb"] * _MIB, math.ceil(limits["cpu_seconds"])
    ceilings = {
        resource.RLIMIT_DATA: base["data"] + memory,
        resource.RLIMIT_AS: base["mapped"] + memory + _MAPPINGS,
        resource.RLIMIT_FSIZE: limits["files_mb"] * _MIB,
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, value in ceilings.items():
        resource.setrlimit(kind, (value, value))


def _raise_loopback() -> None:
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, 0x8914, struct.pack("16sH14s", b"lo", 1, b""))  # SIOCSIFFLAGS, IFF_UP

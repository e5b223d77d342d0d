"""The system calls that Python has no function for, each raising OSError with what was attempted."""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  has no stub
import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_whole = ctypes.PyDLL(None, use_errno=True)  # its calls keep the interpreter's lock
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

# As in the module signal, but without the enum members that it makes of everything.
set_handler, SIG_IGN, SIG_DFL = _signal.signal, _signal.SIG_IGN, _signal.SIG_DFL

MACHINE = os.uname().machine
# Numbers from 424 on are the same on every architecture.
_CAPSET = {"x86_64": 126, "aarch64": 91}.get(MACHINE, -1)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(MACHINE, -1)
_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(MACHINE, -1)
_OPENAT2 = 437
_MOUNT_SETATTR = 442
_LANDLOCK = 444  # create_ruleset, add_rule, restrict_self

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_RDONLY, _NOSUID, _NODEV = 1, 2, 4
_BIND, _REC, _PRIVATE = 0x1000, 0x4000, 0x40000
_DETACH = 2
_AT_RECURSIVE = 0x8000

_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS, _SUBREAPER = 1, 4, 38, 36
# No link of any kind is followed, and nothing outside the folder can be named.
_RESOLVE = 0x02 | 0x04 | 0x08  # NO_MAGICLINKS | NO_SYMLINKS | BENEATH


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _call(number: int, what: str, *arguments: object) -> int:
    return _check(_syscall(ctypes.c_long(number), *arguments), what)


def fork() -> int:
    """As ``os.fork``, for a process with one thread: 0 in the child.

    Without what Python does afterwards for the sake of other threads, which would give each child half a MB
    of the zygote's pages for its own.
    """
    return _check(_whole.fork(), "fork")


def unshare(flags: int) -> None:
    """Leave the namespaces of ``flags`` (NEWNS, NEWPID, ...) for new ones."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def set_hostname(name: str) -> None:
    """Name this UTS namespace."""
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace of ``fd``, which must be of ``kind``."""
    _check(_libc.setns(fd, kind), "setns")


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode() or None
    )
    _check(done, f"mount {kind or 'bind'} on {target}")


def make_private() -> None:
    """Stop mounts of this namespace from spreading to others, and others' from coming in."""
    _mount("none", "/", "", _REC | _PRIVATE, "")


def mount_new(kind: str, target: str, options: str) -> None:
    """Mount a fresh file system without set-user-id programs or devices."""
    _mount(kind, target, kind, _NOSUID | _NODEV, options)


def bind(source: str, target: str) -> None:
    """Show ``source`` (file or folder, with what is mounted in it) at ``target``, with the same rights."""
    _mount(source, target, "", _BIND | _REC, "")


def restrict_mount(
    target: str, *, read_only: bool = True, devices: bool = False, recursive: bool = True
) -> None:
    """Take writing, devices and set-user-id away from a mount and, if ``recursive``, from all below it."""
    attributes = _NOSUID | (0 if devices else _NODEV) | (_RDONLY if read_only else 0)
    data = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    _call(
        _MOUNT_SETATTR, f"mount_setattr {target}",
        ctypes.c_int(-100), target.encode(), flags, data, ctypes.c_size_t(32),
    )  # fmt: skip


def become_root(folder: str) -> None:
    """Make ``folder`` (a mount) the root folder and let go of the old one."""
    os.chdir(folder)
    _call(_PIVOT_ROOT, "pivot_root", b".", b".")
    _check(_libc.umount2(b".", _DETACH), "umount2 of the old root")
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up every capability of this process."""
    header = struct.pack("=Ii", 0x20080522, 0)
    _call(_CAPSET, "capset", header, bytes(24))


def _prctl(option: int, value: int, what: str) -> None:
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), what)


def no_new_privileges() -> None:
    """No program that is started from here on gains anything by its file's mode."""
    _prctl(_NO_NEW_PRIVS, 1, "no_new_privs")


def die_with_parent() -> None:
    """SIGKILL this process when the thread that forked it ends. Lost on a change of user."""
    _prctl(_PDEATHSIG, 9, "pdeathsig")


def become_reaper() -> None:
    """Orphans below this process become its children."""
    _prctl(_SUBREAPER, 1, "subreaper")


def dumpable() -> None:
    """Let the process's own user see its ``/proc/self`` again after a change of user."""
    _prctl(_DUMPABLE, 1, "dumpable")


def install_filter(program: bytes) -> None:
    """Install a seccomp program (8 bytes an instruction), which can never be taken off again."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _call(_SECCOMP, "seccomp", ctypes.c_uint(1), ctypes.c_uint(0), fprog)


def landlock_abi() -> int:
    """The kernel's Landlock version; 0 when it has none."""
    found = _syscall(ctypes.c_long(_LANDLOCK), None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(int(found), 0)


def landlock_ruleset(attributes: bytes) -> int:
    """A new ruleset as a file descriptor."""
    size = ctypes.c_size_t(len(attributes))
    return _call(_LANDLOCK, "landlock_create_ruleset", attributes, size, ctypes.c_uint(0))


def landlock_allow(ruleset: int, path: str, rights: int) -> None:
    """Allow ``rights`` on ``path`` and below."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, fd)
        _call(
            _LANDLOCK + 1, f"landlock rule for {path}",
            ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0),
        )  # fmt: skip
    finally:
        os.close(fd)


def landlock_restrict(ruleset: int) -> None:
    """Bind this process and its children to the ruleset, for ever."""
    _call(_LANDLOCK + 2, "landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint(0))


def open_beneath(folder: int, path: str) -> int:
    """Open ``path`` under the folder descriptor for reading; links and ``..`` to outside are refused."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    how = struct.pack("=QQQ", flags, 0, _RESOLVE)
    return _call(_OPENAT2, f"open {path}", ctypes.c_int(folder), path.encode(), how, ctypes.c_size_t(24))

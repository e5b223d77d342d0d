"""The seccomp program and the Landlock rules: what code in the sandbox may ask of the kernel.

System calls that are unknown here (newer than the table) are answered with ENOSYS, so that a new kernel
opens nothing.
"""

from __future__ import annotations

import errno
import functools
import os
import struct
from collections.abc import Mapping

from . import kernel

# name: (x86_64, aarch64); -1 where the architecture lacks the call.
_ALWAYS: dict[str, tuple[int, int]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "quotactl_fd": (443, 443), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162),
    "init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "iopl": (172, -1), "ioperm": (173, -1),
    "modify_ldt": (154, -1), "personality": (135, 92), "quotactl": (179, 60), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "syslog": (103, 116), "vhangup": (153, 58), "lookup_dcookie": (212, 18),
    "uselib": (134, -1), "ustat": (136, -1), "sysfs": (139, -1), "_sysctl": (156, -1),
    "nfsservctl": (180, 42), "vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450), "fanotify_init": (300, 262),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180),
}  # fmt: skip

# Denied where the machine's files are in sight: Landlock covers neither marks nor times of a file.
_SHARED_FILES: dict[str, tuple[int, int]] = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
# Answered with success and not done, since copying a file would fail otherwise.
_TIMES: dict[str, tuple[int, int]] = {
    "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88),
}  # fmt: skip

# Where the code also shares its user with others.
_SHARED_USER: dict[str, tuple[int, int]] = {
    "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "fork": (57, -1), "vfork": (58, -1),
    "setpriority": (141, 140), "ioprio_set": (251, 30),
}  # fmt: skip
_MODES: dict[str, tuple[int, int]] = {
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
}  # fmt: skip

_HIGHEST = 452
_NUMBERS = {
    "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198), "ioctl": (16, 29),
    "prctl": (157, 167), "fcntl": (72, 25), "kill": (62, 129), "tgkill": (234, 131),
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag, CLONE_NEWTIME included
_THREAD = 0x10000

_LD, _JEQ, _JGE, _JSET, _RET, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def _op(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, true, false, value)


def _argument(index: int) -> bytes:
    """Load the low 32 bits of an argument (both architectures are little-endian)."""
    return _op(_LD, 16 + 8 * index)


_NUMBER = _op(_LD, 0)
_EPERM = _op(_RET, _ERRNO | errno.EPERM)
_ENOSYS = _op(_RET, _ERRNO | errno.ENOSYS)
_NOTHING_DONE = _op(_RET, _ERRNO)  # errno 0: success
_PASS = _op(_RET, _ALLOW)


def _when(number: int, body: bytes) -> bytes:
    """Run ``body``, which must return, for one system call."""
    return _op(_JEQ, number, 0, len(body) // 8) + body


def _unless_equal(index: int, value: int) -> bytes:
    """Refuse the call unless the argument is ``value``."""
    return _argument(index) + _op(_JEQ, value, 1, 0) + _EPERM + _PASS


def _if_any(index: int, values: tuple[int, ...]) -> bytes:
    """Refuse the call when the argument is one of ``values``."""
    tests = b"".join(_op(_JEQ, value, 0, 1) + _EPERM for value in values)
    return _argument(index) + tests + _PASS


def _loopback_socket() -> bytes:
    """AF_UNIX, AF_INET or AF_INET6, and of these only streams and datagrams."""
    families = (1, 2, 10)
    accept = b"".join(_op(_JEQ, family, len(families) - i, 0) for i, family in enumerate(families))
    kinds = _argument(1) + _op(_AND, 0xF) + _op(_JEQ, 1, 2, 0) + _op(_JEQ, 2, 1, 0) + _EPERM + _PASS
    return _argument(0) + accept + _EPERM + kinds


@functools.cache
def program(*, sockets: bool, shared_files: bool, alone: int | None) -> bytes:
    """The seccomp program. ``sockets``: allow local families (the network namespace bounds them).

    ``shared_files``: the machine's own files are in sight; no file's times or marks can be altered.
    ``alone``: the process id of code that shares its user with others; it may then signal and change no
    process but itself, start no process, and alter no file's mode or owner.
    """
    column = 0 if kernel.MACHINE == "x86_64" else 1
    number = {name: pair[column] for name, pair in _NUMBERS.items()}
    denied, pretended = dict(_ALWAYS), dict[str, tuple[int, int]]()
    if shared_files:
        denied |= _SHARED_FILES
        pretended |= _TIMES
    if alone is not None:
        denied |= _SHARED_USER
        pretended |= _MODES
    namespaces = _argument(0) + _op(_JSET, _NEW_NAMESPACES, 0, 1) + _EPERM
    thread = b"" if alone is None else _op(_JSET, _THREAD, 1, 0) + _EPERM
    answers = {
        # glibc falls back to clone, whose flags a filter can read.
        number["clone3"]: _ENOSYS,
        number["clone"]: namespaces + thread + _PASS,
        number["socket"]: _loopback_socket() if sockets else _EPERM,
        number["ioctl"]: _if_any(1, (0x5412, 0x541C)),  # TIOCSTI, TIOCLINUX
        number["prctl"]: _if_any(0, (1,)),  # PR_SET_PDEATHSIG
    }
    if alone is not None:
        answers |= {number[name]: _unless_equal(0, alone) for name in ("kill", "tgkill")}
        own = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
        answers |= {number[name]: _unless_equal(0, 0) for name in own}
        # F_SETOWN, F_SETSIG, F_SETOWN_EX would let the kernel send the signal.
        answers[number["fcntl"]] = _if_any(1, (8, 10, 15))
    for table, answer in ((denied, _EPERM), (pretended, _NOTHING_DONE)):
        answers |= {pair[column]: answer for pair in table.values() if pair[column] >= 0}
    start = _op(_LD, 4) + _op(_JEQ, _ARCH[kernel.MACHINE], 1, 0) + _op(_RET, _KILL)
    return start + _NUMBER + _op(_JGE, _HIGHEST + 1, 0, 1) + _ENOSYS + _search(sorted(answers.items()))


def _search(answers: list[tuple[int, bytes]]) -> bytes:
    """Find the answer to the loaded number by halving; what has none passes.

    The kernel goes through the program once for every system call there is when a child installs it.
    """
    if len(answers) <= 2:
        return b"".join(_when(number, body) for number, body in answers) + _PASS
    middle = len(answers) // 2
    below = _search(answers[:middle])
    return _op(_JGE, answers[middle][0], len(below) // 8, 0) + below + _search(answers[middle:])


# ---- Landlock

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_FS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
_READ = _EXECUTE | _READ_FILE | _READ_DIR


def ruleset(rules: Mapping[str, list[str]], *, sockets: bool) -> int | None:
    """A Landlock ruleset as a file descriptor, or None when the kernel has no Landlock.

    ``rules``: paths by what is allowed on them and below: ``read`` (and execute), ``list`` (names only),
    ``device`` (single files, read and write), ``write`` (everything). TCP, abstract sockets and signals to
    outside are refused where the kernel can.
    """
    abi = kernel.landlock_abi()
    if abi < 1:
        return None
    everything = _ALL_FS.get(abi, 0xFFFF)
    attributes = struct.pack("=QQQ", everything, 0 if sockets else 3, 3)
    fd = kernel.landlock_ruleset(attributes[: 8 if abi < 4 else 16 if abi < 6 else 24])
    for path in rules.get("read", []):
        kernel.landlock_allow(fd, path, _READ if os.path.isdir(path) else _READ & ~_READ_DIR)
    for path in rules.get("list", []):
        kernel.landlock_allow(fd, path, _READ_DIR)
    for path in rules.get("device", []):
        kernel.landlock_allow(fd, path, _READ_FILE | _WRITE_FILE)
    for path in rules.get("write", []):
        kernel.landlock_allow(fd, path, everything)
    return fd

"""Removes and copies folders that the agent's code has made, whatever it made of them.

Nothing here recurses, since the code chooses how deep its folders are. It knows nothing of tiers. ``shutil``
does neither, and the libraries that it loads would make every fork of the zygote slower.
"""

from __future__ import annotations

import contextlib
import os
import stat

_CHUNK = 1 << 20


def wipe(folder: str) -> None:
    """Remove ``folder``, also what has no mode to be entered; what resists stays, and nothing is raised."""
    mark = os.urandom(8).hex()  # the code cannot have such names
    folders = [folder]
    for current in folders:  # grows as it goes
        for name in _names(current):
            path = f"{current}/{name}"
            with contextlib.suppress(OSError):  # it resists
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    os.unlink(path)
                    continue
                os.chmod(path, 0o700)
                # One level below the top, however deep it was: paths stay short.
                lifted = f"{folder}/{mark}{len(folders)}"
                os.rename(path, lifted)
                folders.append(lifted)
    for current in reversed(folders):
        with contextlib.suppress(OSError):  # something in it resisted
            os.rmdir(current)


def _names(folder: str) -> list[str]:
    try:
        os.chmod(folder, 0o700)
        return os.listdir(folder)
    except OSError:  # it is not there, or resists
        return []


def copy(source: str, target: str) -> None:
    """Copy a folder with modes and times, links as links; pipes and sockets are left out. Raises OSError."""
    folders = [""]
    os.mkdir(target)
    for inside in folders:  # grows as it goes
        for entry in os.scandir(source + inside):
            there = f"{target}{inside}/{entry.name}"
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), there)
            elif entry.is_dir():
                os.mkdir(there)
                folders.append(f"{inside}/{entry.name}")
            elif entry.is_file():
                _copy_file(entry.path, there)
    for inside in reversed(folders):  # their own modes may forbid to write into them
        _copy_facts(source + inside, target + inside)


def _copy_file(source: str, target: str) -> None:
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while data := reader.read(_CHUNK):
            writer.write(data)
    _copy_facts(source, target)


def _copy_facts(source: str, target: str) -> None:
    facts = os.stat(source)
    os.utime(target, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.chmod(target, stat.S_IMODE(facts.st_mode))

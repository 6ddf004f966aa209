"""A file that one living process owns: the process holds a lock on the file until it ends.

The kernel releases the lock however the process ends, so a file that a dead process left behind can be
replaced, and of two processes that claim a path at the same moment only one gets it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["EndNote", "FileOwned", "claim", "uptime_s"]

# Files that this process owns, by device and inode; the value is the descriptor with the lock.
_owned: Final[dict[tuple[int, int], int]] = {}

# Errors of a file system without locks or hard links: there the newest file counts.
_UNSUPPORTED: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EINVAL)


class FileOwned(Exception):
    """A living process owns the file. `pid` is None if that process is on another host."""

    def __init__(self, pid: int | None) -> None:
        super().__init__()
        self.pid = pid


class EndNote:
    """What the last owner of a file noted when it removed it: when, its process id, and a name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[float, int, str]:
        """When (seconds since the host was started), process id and name; zeros if there is no note."""
        try:
            at, pid, name = self._path.read_text().split(" ", 2)
            found = float(at), int(pid), name
        except (OSError, ValueError):
            return 0.0, 0, ""
        return found if found[0] <= uptime_s() else (0.0, 0, "")

    def write(self, name: str) -> None:
        """Note that this process removes its file now."""
        with contextlib.suppress(OSError):  # without a note two jobs are told apart only while both run
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_text(f"{uptime_s()} {os.getpid()} {name}")
            temporary.replace(self._path)


def claim(temporary: Path, path: Path) -> Callable[[], None]:
    """Move `temporary` to `path`, if the path is free or owned by a dead process or by this very one.

    Returns the function that removes the file again.

    Raises:
        FileOwned: another living process owns the file; the temporary file is still there.
        OSError: the file cannot be moved there.
    """
    descriptor = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
    try:
        _lock(descriptor)
        while not _moved(temporary, path):
            pass
    except BaseException:
        os.close(descriptor)
        raise
    mine = _identity(os.fstat(descriptor))
    _owned[mine] = descriptor

    def release() -> None:
        with contextlib.suppress(OSError):  # another process has removed it
            if _identity(path.stat()) == mine:
                path.unlink()
        if _owned.pop(mine, None) is not None:
            os.close(descriptor)

    return release


def _moved(temporary: Path, path: Path) -> bool:
    """Try once; False if the path has changed meanwhile."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        temporary.replace(path)
        return True
    else:
        temporary.unlink()
        return True
    try:
        old = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        found = os.fstat(old)
        if _identity(found) not in _owned and not _lock(old):
            raise FileOwned(_owner(found))
        # We hold the lock of the dead owner's file, so only one process replaces it.
        if _identity(path.stat()) != _identity(found):
            return False
        temporary.replace(path)
        return True
    except FileNotFoundError:
        return False
    finally:
        os.close(old)


def _lock(descriptor: int) -> bool:
    """Take the lock; False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def _owner(found: os.stat_result) -> int | None:
    """The process of this host that holds the file's lock, as the kernel lists it."""
    number = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "->" not in words and len(words) > 5 and words[5] == number and int(words[4]) > 0:
                return int(words[4])
    return None


def uptime_s() -> float:
    """Seconds since the host was started."""
    return float(Path("/proc/uptime").read_text().split()[0])


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _forget() -> None:
    """A forked child owns nothing: the files stay its parent's."""
    while _owned:
        os.close(_owned.popitem()[1])


os.register_at_fork(after_in_child=_forget)

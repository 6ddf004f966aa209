"""A file that belongs to one living process: whoever put it there holds a lock on it until it ends.

Knows files and locks. Does not know what the file says. The lock goes with the process, however it ends, so
that what a dead one has left can be told from what a living one holds, and two that come at the same moment
never both get the place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["EndNote", "Held", "claim", "uptime_s"]

# Files that this process holds, by device and inode; the value is the descriptor with the lock.
_held: Final[dict[tuple[int, int], int]] = {}

# A file system without locks or hard links: nobody can be told apart there, and the newest file counts.
_UNSUPPORTED: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EINVAL)


class Held(Exception):
    """A living process holds the place. `pid` is None if it is on another host."""

    def __init__(self, pid: int | None) -> None:
        super().__init__()
        self.pid = pid


class EndNote:
    """What the last holder of a place wrote when it gave it back: when, which process, and its name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[float, int, str]:
        """When, in seconds since the host was started, by which process, and its name; zeros if by none."""
        try:
            at, pid, name = self._path.read_text().split(" ", 2)
            found = float(at), int(pid), name
        except (OSError, ValueError):
            return 0.0, 0, ""
        return found if found[0] <= uptime_s() else (0.0, 0, "")

    def write(self, name: str) -> None:
        """Note that this process gives the place back now."""
        with contextlib.suppress(OSError):  # without it two jobs are told apart only while both run
            draft = self._path.with_suffix(f".{os.getpid()}")
            draft.write_text(f"{uptime_s()} {os.getpid()} {name}")
            draft.replace(self._path)


def claim(draft: Path, path: Path) -> Callable[[], None]:
    """Move a file to a place that is free, or that only the dead and this very process hold.

    Returns what gives the place back and removes the file.

    Raises:
        Held: another living process holds it; the draft is still there.
        OSError: the file cannot be put there.
    """
    descriptor = os.open(draft, os.O_RDWR | os.O_CLOEXEC)
    try:
        _lock(descriptor)
        while not _moved(draft, path):
            pass
    except BaseException:
        os.close(descriptor)
        raise
    mine = _identity(os.fstat(descriptor))
    _held[mine] = descriptor

    def release() -> None:
        with contextlib.suppress(OSError):  # somebody was faster
            if _identity(path.stat()) == mine:
                path.unlink()
        if _held.pop(mine, None) is not None:
            os.close(descriptor)

    return release


def _moved(draft: Path, path: Path) -> bool:
    """Try once; False if the place has changed meanwhile."""
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        draft.replace(path)
        return True
    else:
        draft.unlink()
        return True
    try:
        old = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        found = os.fstat(old)
        if _identity(found) not in _held and not _lock(old):
            raise Held(_holder(found))
        # Who replaces a dead one's file holds its lock, so that only one does.
        if _identity(path.stat()) != _identity(found):
            return False
        draft.replace(path)
        return True
    except FileNotFoundError:
        return False
    finally:
        os.close(old)


def _lock(descriptor: int) -> bool:
    """Whether nobody else holds it now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def _holder(found: os.stat_result) -> int | None:
    """The process of this host that holds a lock, as the kernel lists it."""
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "->" not in words and len(words) > 5 and words[5] == place and int(words[4]) > 0:
                return int(words[4])
    return None


def uptime_s() -> float:
    """Seconds since the host was started."""
    return float(Path("/proc/uptime").read_text().split()[0])


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _forget() -> None:
    """A forked child is another process: the place stays its parent's, and ends with it."""
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_forget)

"""Folders that only this user can enter: for tickets, and for the sockets by which ranks of one host connect.

<TMPDIR>/unisono-<uid>/<job>.ticket        the ticket of ranks that another launcher started
<TMPDIR>/unisono-<uid>/<token's hash>/     the sockets of one job
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from unisono.core.clock import file_age_s
from unisono.errors import RendezvousError

__all__ = [
    "check_private",
    "enter_socket_folder",
    "make_private",
    "own_folder",
    "remove_dead_folders",
    "socket_folder",
]

# The name of a job's folder.
_NAME: Final = re.compile("[0-9a-f]{16}")
# Notes of ended jobs are kept for a day: no process that was started with such a job still waits to join.
_NOTE_S: Final = 24 * 3600.0
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def own_folder(parent: str) -> Path:
    """The folder of this user. It is not made yet."""
    return Path(parent) / f"unisono-{os.getuid()}"


def socket_folder(parent: str, token: bytes) -> Path:
    """The folder for the sockets of a job; its name follows from the ticket. It is not made yet."""
    return own_folder(parent) / hashlib.sha256(b"unisono folder " + token).hexdigest()[:16]


def make_private(path: Path) -> Path:
    """Make a folder, unless it exists, and make sure that no other user can enter it.

    Raises:
        RendezvousError: another user owns it or could enter it, or it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        check_private(path, os.lstat(path), stat.S_ISDIR)
    except OSError as error:
        raise _not_made(path, error) from error
    return path


def enter_socket_folder(parent: str, token: bytes) -> tuple[Path, Callable[[], None]]:
    """Make the folder of a job, or find it, and hold it; the returned function leaves it again.

    A process holds it by a shared lock, which the kernel releases when the process ends, however it ends. The
    last process that leaves removes the folder. Folders of jobs that were killed are removed first.

    Raises:
        RendezvousError: see `make_private`.
    """
    make_private(own_folder(parent))
    remove_dead_folders(parent)
    path = socket_folder(parent, token)
    while True:
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            held = os.open(path, _FOLDER)
        except FileNotFoundError:
            make_private(own_folder(parent))
            continue  # another process removed it before we held it
        except OSError as error:
            raise _not_made(path, error) from error
        with contextlib.suppress(OSError):  # a file system without locks: then no process removes it, either
            fcntl.flock(held, fcntl.LOCK_SH)
        if _is_at(path, held):
            break
        os.close(held)
    try:
        check_private(path, os.fstat(held), stat.S_ISDIR)
    except RendezvousError:
        os.close(held)
        raise
    return path, partial(_leave, path, held, os.getpid())


def remove_dead_folders(parent: str) -> None:
    """Remove the folders of jobs that have no process any more."""
    folder = own_folder(parent)
    with contextlib.suppress(FileNotFoundError):
        for path in map(folder.joinpath, filter(_NAME.fullmatch, os.listdir(folder))):
            with contextlib.suppress(OSError):  # another process removed it, or it is not a folder
                _release(path, os.open(path, _FOLDER))
        _remove_old_notes(folder)


def _remove_old_notes(folder: Path) -> None:
    """Remove notes of ended jobs (see `owned_file.EndNote`) that no process needs any more."""
    for path in folder.glob("*.end"):
        with contextlib.suppress(OSError):  # another process removed it
            if file_age_s(path) > _NOTE_S:
                path.unlink()


def _leave(path: Path, held: int, pid: int) -> None:
    """Release the lock in the process that entered; a fork of it shares the lock and must not."""
    if os.getpid() == pid:
        _release(path, held)
    else:
        os.close(held)


def _release(path: Path, held: int) -> None:
    """Close a folder, and remove it if no other process holds it."""
    try:
        # With the exclusive lock, and the folder still at its path, no other process can enter it meanwhile.
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(path, held) and not _has_living_sockets(path):
            shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass  # other processes hold it
    finally:
        os.close(held)


def _not_made(path: Path, error: OSError) -> RendezvousError:
    return RendezvousError(
        f"the folder {path} cannot be made",
        cause=error.strerror,
        next_step="set TMPDIR to a folder that can be written to",
    )


def _is_at(path: Path, held: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(held))
    except FileNotFoundError:
        return False


def _has_living_sockets(path: Path) -> bool:
    """Whether a process that does not hold the lock has a socket of this folder open."""
    try:
        bound = Path("/proc/net/unix").read_text(errors="replace")
    except OSError:
        return False
    return any(name in bound for name in os.listdir(path))


def check_private(path: Path, found: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Make sure that a path is of the right kind and belongs to this user only.

    Raises:
        RendezvousError: it is not.
    """
    if not is_kind(found.st_mode):
        raise RendezvousError(
            f"{path} is not a {'folder' if is_kind is stat.S_ISDIR else 'regular file'}",
            next_step="remove it, or name another path",
        )
    if found.st_uid != os.getuid():
        raise RendezvousError(
            f"{path} belongs to user {found.st_uid}", next_step="remove it, or name another path"
        )
    if found.st_mode & 0o077:
        raise RendezvousError(
            f"{path} can be read by other users",
            cause=f"mode {stat.S_IMODE(found.st_mode):04o}",
            next_step=f"chmod go-rwx {path}",
        )

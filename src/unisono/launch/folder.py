"""Folders that only this user can enter: for tickets, and for the sockets by which ranks of one host meet.

Knows paths, owners and modes. Does not know what is put inside.

    <TMPDIR>/unisono-<uid>/<job>.ticket        where ranks find each other without a launcher of ours
    <TMPDIR>/unisono-<uid>/<token's hash>/     the engine's sockets of one job
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from unisono.errors import RendezvousError

__all__ = ["check_private", "make_private", "own_folder", "remove_socket_folder", "socket_folder"]


def own_folder(parent: str) -> Path:
    """The folder of this user. It is not made yet."""
    return Path(parent) / f"unisono-{os.getuid()}"


def socket_folder(parent: str, token: bytes) -> Path:
    """The folder for the sockets of a job: who has the ticket knows its name. It is not made yet."""
    return own_folder(parent) / hashlib.sha256(b"unisono folder " + token).hexdigest()[:16]


def make_private(path: Path) -> Path:
    """Make a folder, unless it is there, and make sure that nobody else can enter it.

    Raises:
        RendezvousError: somebody else owns it, or could enter it, or it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        check_private(path, os.lstat(path), stat.S_ISDIR)
    except OSError as error:
        raise RendezvousError(f"the folder {path} cannot be made", cause=error.strerror) from error
    return path


def remove_socket_folder(parent: str, token: bytes, *, is_over: bool) -> None:
    """Remove the folder of a job: with all in it when the job is over, else only if it is empty."""
    path = socket_folder(parent, token)
    if is_over:
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.rmdir()


def check_private(path: Path, found: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Make sure that something is of the right kind, and nobody else's.

    Raises:
        RendezvousError: it is not.
    """
    if not is_kind(found.st_mode):
        raise RendezvousError(f"{path} is not what it should be", cause="another kind of file")
    if found.st_uid != os.getuid():
        raise RendezvousError(
            f"{path} belongs to user {found.st_uid}", next_step="remove it, or name another place"
        )
    if found.st_mode & 0o077:
        raise RendezvousError(
            f"{path} can be read by other users",
            cause=f"mode {stat.S_IMODE(found.st_mode):04o}",
            next_step=f"chmod go-rwx {path}",
        )

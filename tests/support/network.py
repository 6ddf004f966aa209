"""A private network namespace with a loopback interface only, which may lose datagrams."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

__all__ = ["NoNetwork", "private_network"]

_CLONE_NEWNET = 0x40000000
_LOSSY = """
add table inet lossy
add chain inet lossy in { type filter hook input priority 0; }
add rule inet lossy in meta l4proto udp numgen random mod 100 < PERCENT counter drop
"""


class NoNetwork(Exception):
    """This machine does not permit a private network."""


@contextlib.contextmanager
def private_network(lost_percent: int = 0) -> Iterator[None]:
    """Move this thread, and the processes that it starts, into a namespace that ends with the last of them.

    Raises:
        NoNetwork: this process may not make a namespace, or a tool is missing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET):
            raise NoNetwork(os.strerror(ctypes.get_errno()))
        try:
            _run("ip", "link", "set", "lo", "up")
            if lost_percent:
                _run("nft", _LOSSY.replace("PERCENT", str(lost_percent)))
            yield
        finally:
            assert libc.setns(before, _CLONE_NEWNET) == 0
    finally:
        os.close(before)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoNetwork(str(error)) from None

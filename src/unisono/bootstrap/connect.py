"""Connecting to an address as RFC 8305 says: all addresses of a name are tried, staggered; the first wins."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from typing import Final

from unisono.bootstrap.address import Address, Endpoint, resolve
from unisono.bootstrap.limits import printable
from unisono.core.runtime import Deadline, Runtime

__all__ = ["ConnectLog", "connect"]

# RFC 8305: a second address is tried when the first has not answered in this time.
_STAGGER_S: Final = 0.25
_CONNECT_S: Final = 5.0

_ANSWERS: Final = {
    errno.ECONNREFUSED: "refused the connection",
    errno.EHOSTUNREACH: "no route to the host",
    errno.ENETUNREACH: "no route to the network",
    errno.ETIMEDOUT: "did not answer",
    errno.ECONNRESET: "closed the connection",
    errno.EADDRNOTAVAIL: "cannot be reached from this host",
}


class ConnectLog:
    """Which addresses were tried and what they answered, for an error."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[str, int]] = {}

    def note(self, address: str, answer: str) -> None:
        """Record an answer; the last one of each address is shown."""
        _, times = self._entries.get(address, ("", 0))
        self._entries[address] = (answer, times + 1)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __str__(self) -> str:
        if not self._entries:
            return "nothing was tried"
        return "; ".join(
            f"{address} {answer}" + (f" ({times} times)" if times > 1 else "")
            for address, (answer, times) in self._entries.items()
        )


def connect(address: Address, deadline: Deadline, runtime: Runtime, log: ConnectLog) -> socket.socket | None:
    """A connected, blocking socket; or None, and `log` says why."""
    limit = (
        runtime.now() + _CONNECT_S if deadline.at is None else min(deadline.at, runtime.now() + _CONNECT_S)
    )
    try:
        endpoints = resolve(address, max(0.0, limit - runtime.now()))
    except TimeoutError as error:
        log.note(str(address), str(error))
        return None
    except OSError as error:
        log.note(str(address), f"could not be resolved ({printable(error.strerror or str(error), 80)})")
        return None
    return _race(address, endpoints, limit, runtime, log)


def _race(
    address: Address, endpoints: list[Endpoint], limit: float, runtime: Runtime, log: ConnectLog
) -> socket.socket | None:
    waiting = list(endpoints)
    trying: dict[socket.socket, str] = {}
    next_start = runtime.now()
    winner: socket.socket | None = None
    with selectors.DefaultSelector() as selector:

        def fail(sock: socket.socket, code: int) -> None:
            nonlocal next_start
            log.note(trying.pop(sock), _ANSWERS.get(code, os.strerror(code)))
            sock.close()
            next_start = runtime.now()  # try the next address at once

        def start(endpoint: Endpoint) -> None:
            family, target = endpoint
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            trying[sock] = _shown(address, str(target[0]))
            code = sock.connect_ex(target)
            if code not in (0, errno.EINPROGRESS):
                fail(sock, code)
            else:
                selector.register(sock, selectors.EVENT_WRITE)

        try:
            while winner is None and (waiting or trying) and runtime.now() < limit:
                if waiting and runtime.now() >= next_start:
                    next_start = runtime.now() + _STAGGER_S
                    start(waiting.pop(0))
                    continue
                until = min(limit, next_start) if waiting else limit
                for key, _ in selector.select(max(0.0, until - runtime.now())):
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    selector.unregister(sock)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code:
                        fail(sock, code)
                    elif winner is None:
                        winner = sock
                        del trying[sock]
        finally:
            for sock, shown in trying.items():
                if winner is None:
                    log.note(shown, "did not answer")
                sock.close()
    if winner is not None:
        winner.setblocking(True)
        winner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return winner


def _shown(address: Address, host: str) -> str:
    """The address as the user wrote it, and the number that it was resolved to if that differs."""
    return str(address) if host == address.host else f"{address} ({host})"

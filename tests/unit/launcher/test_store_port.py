"""MASTER_PORT: no other socket gets the port by chance, and the store of a torch program can listen there."""

from __future__ import annotations

import contextlib
import socket

import pytest

from unisono.launcher.store_port import StorePort


def listener(port: int, *, reuse: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        sock.bind(("", port))
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def test_a_store_listens_at_the_kept_port_again_and_again() -> None:
    with contextlib.closing(StorePort()) as port:
        for _ in range(2):
            with listener(port.number, reuse=True), socket.create_connection(("127.0.0.1", port.number)):
                pass


def test_no_other_socket_gets_the_port() -> None:
    with contextlib.closing(StorePort()) as port:
        with pytest.raises(OSError, match="Address already in use"):
            listener(port.number, reuse=False)
        with contextlib.closing(StorePort()) as other:
            assert other.number != port.number
    listener(port.number, reuse=False).close()


def test_until_the_store_is_there_nothing_listens() -> None:
    with contextlib.closing(StorePort()) as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.number))

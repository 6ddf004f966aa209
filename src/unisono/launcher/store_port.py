"""The port for the store of torch programs: MASTER_PORT, free until rank 0's TCPStore listens there."""

from __future__ import annotations

import socket

from unisono.errors import RendezvousError

__all__ = ["StorePort"]


class StorePort:
    """Keeps the system from giving a port to a process that asks for any free one, until `close`.

    The socket is bound and never listens: the kernel then lets another one that sets SO_REUSEADDR, as
    TCPStore does, bind the same port and listen, as often as the program makes a store. It is bound to all
    addresses, because TCPStore is.

    Raises:
        RendezvousError: there is no free port.
    """

    def __init__(self) -> None:
        is_dual = socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_dual:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind(("", 0))
        except OSError as error:
            self._socket.close()
            raise RendezvousError("no port is free for the ranks' store", cause=str(error)) from None
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()

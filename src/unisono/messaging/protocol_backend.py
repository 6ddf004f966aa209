"""A backend over an endpoint: the contract without the transport."""

from __future__ import annotations

from collections.abc import Callable

from unisono.config import Config
from unisono.core.envelope import UNTYPED, Any_, Envelope, Lane
from unisono.core.request import Request
from unisono.core.runtime import Runtime
from unisono.messaging.backend import Backend
from unisono.messaging.endpoint import Endpoint
from unisono.messaging.peer_down import PeerDown

__all__ = ["ProtocolBackend"]


class ProtocolBackend(Backend):
    """A backend whose messages travel by the eager/rendezvous protocol. A subclass carries the frames."""

    def __init__(self, endpoint: Endpoint, size: int, config: Config, runtime: Runtime) -> None:
        self.endpoint = endpoint
        self._rank = endpoint.protocol.rank
        self._size = size
        self._config = config
        self._runtime = runtime

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def runtime(self) -> Runtime:
        """The clock."""
        return self._runtime

    @property
    def config(self) -> Config:
        """The settings of all ranks."""
        return self._config

    def start_send(
        self,
        dst: int,
        context: int,
        tag: int,
        data: memoryview,
        *,
        dtype: int = UNTYPED,
        header: bytes = b"",
        lane: Lane = Lane.BULK,
        sync: bool = False,
    ) -> Request:
        """Send eagerly if the message is short and the credit allows, otherwise by rendezvous."""
        self.check_peer(dst, "dst")
        self.check_length(tag, data.nbytes, header)
        envelope = Envelope(self._rank, context, tag, data.nbytes, dtype, header)
        return self.endpoint.send(dst, envelope, data, lane, sync)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive."""
        self.check_peer(src, "src")
        return self.endpoint.receive(src, context, tag, into, dtype)

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe."""
        self.check_peer(src, "src")
        return self.endpoint.probe(src, context, tag)

    def end_group(self, context: int) -> None:
        """Drop messages that no receive will match any more."""
        self.endpoint.end_context(context)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Notify the listener of every rank that is down or goes down."""
        self.endpoint.watch(listener)

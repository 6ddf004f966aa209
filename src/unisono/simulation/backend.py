"""The backend of a simulated rank: frames of the eager/rendezvous protocol over a network in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final
from typing import Protocol as TypingProtocol

from unisono.core.envelope import ANY, UNTYPED, Any_, Tags
from unisono.core.request import Request
from unisono.messaging.actions import Action, Fill, Frame, Kind, Transmit
from unisono.messaging.backend import Capabilities
from unisono.messaging.endpoint import Endpoint
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.protocol import Protocol
from unisono.messaging.protocol_backend import ProtocolBackend
from unisono.simulation.fabric import Fabric
from unisono.simulation.runtime import SimRuntime
from unisono.simulation.scheduler import SimThread

__all__ = ["SimBackend", "StepObserver"]


class StepObserver(TypingProtocol):
    """Is notified of what a rank does."""

    def on_step(self, rank: int, step: int) -> None:
        """A rank is about to start operation number `step`: faults may begin."""

    def on_close(self, rank: int) -> None:
        """A rank leaves."""


class SimBackend(ProtocolBackend):
    """One simulated rank. `peers` are the backends of all ranks, this one included."""

    def __init__(
        self, fabric: Fabric, thread: SimThread, peers: Sequence[SimBackend], observer: StepObserver
    ) -> None:
        endpoint = Endpoint(Protocol(thread.rank, fabric.config), self._carry, observe=self._observe)
        super().__init__(endpoint, fabric.size, fabric.config, SimRuntime(fabric.scheduler, thread))
        self.fabric = fabric
        self.thread = thread
        self._peers = peers
        self._observer = observer
        self._steps = 0

    @property
    def size(self) -> int:
        """The number of ranks, which are made one after the other."""
        return self.fabric.size

    @property
    def capabilities(self) -> Capabilities:
        """Everything but the fast paths."""
        return Capabilities("simulation")

    @property
    def is_gone(self) -> bool:
        """Whether it has left or was killed: nothing reaches it any more."""
        return self.endpoint.protocol.is_closed or self.thread.killed is not None

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        """Send, unless the rank is dead."""
        return super().start_send(dst, context, tag, data, **how) if self._begin(tag) else Request(dst)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive, unless the rank is dead."""
        if not self._begin(tag):
            return Request(src)
        return super().start_recv(src, context, tag, into, dtype=dtype)

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe, unless the rank is dead."""
        return super().probe(src, context, tag) if self._begin(tag) else Request(src)

    def end_group(self, context: int) -> None:
        """Drop messages that no receive will match any more."""
        if not self.is_gone:
            super().end_group(context)

    def close(self) -> None:
        """Leave: what was sent arrives, sends that wait for their receive are withdrawn."""
        if self.is_gone or self.fabric.scheduler.is_over:
            return
        self.fabric.scheduler.check_caller()
        self.endpoint.close()
        self.endpoint.cut()
        self._observer.on_close(self.rank)

    def has_lost(self, peer: int) -> bool:
        """Whether it knows that a rank is down."""
        return peer in self.endpoint.protocol.down

    def peer_down(self, down: PeerDown) -> None:
        """A rank is down: end every request that needs it, and notify the listeners."""
        self.endpoint.peer_down(down)

    def _begin(self, tag: int | Any_) -> bool:
        """Count an operation and let faults begin; False if the rank is dead and another rank's thread calls.

        Control messages of communicators are no steps of a user's program.
        """
        scheduler = self.fabric.scheduler
        scheduler.check_caller()
        if self.thread.killed is None and (tag is ANY or not tag & Tags.CONTROL):
            self._steps += 1
            self._observer.on_step(self.rank, self._steps)
        current = scheduler.current
        if current is not None and current.rank == self.rank:
            current.check_alive()
            current.wait_while_paused()
        return self.thread.killed is None

    def _carry(self, outgoing: Transmit) -> tuple[()]:
        _, peer, frame = outgoing
        if frame.kind is Kind.DATA:
            # Copy the bytes now: if this rank dies while they travel, they still arrive whole.
            frame = frame._replace(data=bytes(frame.data))
        delivery = partial(self._peers[peer]._arrive, self.rank, frame)
        self.fabric.carry(self.rank, peer, frame.lane, len(frame.data), delivery)
        return ()

    def _arrive(self, source: int, frame: Frame) -> None:
        if not self.is_gone:
            self._note_arrival(source, frame)
            self.endpoint.arrive(source, frame)

    # -- the trace -----------------------------------------------------------------------------------------

    def _observe(self, action: Action) -> None:
        if isinstance(action, Fill):
            self.fabric.note("match", self.rank, action.envelope.source, action.envelope)
        elif isinstance(action, Transmit):
            _, peer, frame = action
            if frame.kind is Kind.CTS:
                self.fabric.note("match", self.rank, peer, frame.envelope)
            elif frame.kind in _MESSAGES:
                self.fabric.note("send", self.rank, peer, frame.envelope)
            if peer == self.rank:
                self._note_arrival(peer, frame)

    def _note_arrival(self, source: int, frame: Frame) -> None:
        if frame.kind in _MESSAGES or frame.kind is Kind.DATA:
            kind = "data" if frame.kind is Kind.DATA else "arrive"
            self.fabric.note(kind, self.rank, source, frame.envelope)


_MESSAGES: Final = (Kind.EAGER, Kind.RTS)

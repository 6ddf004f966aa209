"""An endpoint drives the protocol of one rank: it has the lock and carries out the actions.

It does not know how frames travel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

from unisono.core.envelope import Any_, Envelope, Lane
from unisono.core.request import Request
from unisono.messaging.actions import Action, End, Fill, Frame, Kind, Transmit, finish
from unisono.messaging.matching import Posted
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.protocol import Protocol

__all__ = ["Carrier", "Endpoint"]

# Sends a frame. Must neither block nor end a request: the lock is held. Returns what follows at once, if the
# receiver shares the lock and has handled the frame. The bytes of a DATA frame are valid until its FIN.
Carrier: TypeAlias = Callable[[Transmit], Iterable[Action]]


class Endpoint:
    """The protocol of one rank, under a lock.

    Endpoints of one process may share a lock: then a frame from one of them to another is handled at once, in
    the same hold of the lock. Requests end after the lock is released: their callbacks may call anything.
    `observe` is called with each action before it is carried out.
    """

    def __init__(
        self,
        protocol: Protocol,
        carry: Carrier,
        lock: threading.Lock | None = None,
        observe: Callable[[Action], None] | None = None,
    ) -> None:
        self.protocol = protocol
        self.lock = threading.Lock() if lock is None else lock
        self._carry = carry
        self._observe = observe
        self.listeners: list[Callable[[PeerDown], None]] = []

    def send(self, dst: int, envelope: Envelope, data: memoryview, lane: Lane, sync: bool) -> Request:
        """Start to send a message."""
        request = Request(dst, self._withdraw)
        payload = data.cast("B") if envelope.nbytes else data
        with self.lock:
            ends = self.run(self.protocol.send(dst, envelope, payload, request, lane, sync))
        finish(ends)
        return request

    def receive(
        self, source: int | Any_, context: int, tag: int | Any_, into: memoryview | None, dtype: int
    ) -> Request:
        """Start to receive a message."""
        return self._post(Posted(source, context, tag, Request(source, self._withdraw), into, dtype))

    def probe(self, source: int | Any_, context: int, tag: int | Any_) -> Request:
        """Start to wait for a message without receiving it."""
        return self._post(Posted(source, context, tag, Request(source, self._withdraw), is_probe=True))

    def end_context(self, context: int) -> None:
        """Drop messages that no receive will match any more."""
        with self.lock:
            ends = self.run(self.protocol.end_context(context))
        finish(ends)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Notify the listener of every rank that is down or goes down."""
        with self.lock:
            if not self.protocol.is_closed:
                self.listeners.append(listener)
            known = list(self.protocol.down.values())
        for down in known:
            listener(down)

    def arrive(self, source: int, frame: Frame) -> None:
        """Handle a frame whose bytes lie in this process."""
        with self.lock:
            ends = self.run(self.take(source, frame))
        finish(ends)

    def placed(self, source: int, frame: Frame, nbytes: int) -> None:
        """The transport has written a piece into the memory that `Protocol.place` named."""
        with self.lock:
            ends = self.run(self.protocol.placed(source, frame, nbytes))
        finish(ends)

    def peer_down(self, down: PeerDown) -> None:
        """A rank is gone, and everything that it sent has arrived: end what needs it, then notify."""
        with self.lock:
            if down.rank in self.protocol.down:
                return
            ends = self.run(self.protocol.peer_down(down))
            listeners = list(self.listeners)
        finish(ends)
        for listener in listeners:
            listener(down)

    def close(self) -> bool:
        """End what is not matched; what is matched goes on until `cut`. False if it was closed before."""
        with self.lock:
            if self.protocol.is_closed:
                return False
            self.listeners.clear()
            ends = self.run(self.protocol.close())
        finish(ends)
        return True

    def cut(self) -> None:
        """The transport is closed: end what is left."""
        with self.lock:
            ends = self.run(self.protocol.cut())
        finish(ends)

    def take(self, source: int, frame: Frame) -> list[Action]:
        """Handle a frame whose bytes lie in this process; the caller holds the lock and runs the actions."""
        if frame.kind is not Kind.DATA:
            return self.protocol.arrive(source, frame)
        nbytes = len(frame.data)
        memory = self.protocol.place(source, frame, nbytes)
        if memory is not None and nbytes:
            memory[:] = frame.data
        return self.protocol.placed(source, frame, nbytes)

    def run(self, actions: list[Action]) -> list[Fill | End]:
        """Transmit frames; what is left is for `finish`, once the lock is released."""
        ends: list[Fill | End] = []
        for action in actions:  # the list grows meanwhile: frames are handled in the order they were sent
            if self._observe is not None:
                self._observe(action)
            if not isinstance(action, Transmit):
                ends.append(action)
            elif action.peer == action.source == self.protocol.rank:
                actions += self.take(action.peer, action.frame)
            else:
                actions += self._carry(action)
        return ends

    def _post(self, posted: Posted) -> Request:
        with self.lock:
            ends = self.run(self.protocol.receive(posted))
        finish(ends)
        return posted.request

    def _withdraw(self, request: Request) -> bool:
        with self.lock:
            ends = self.run(self.protocol.withdraw(request))
        finish(ends)
        return any(type(end) is End and end.request is request for end in ends)

"""The dispatcher: which part of an agent each frame is for.

Answers and items go to the calls that were made from here, all others to the server. Whatever is wrong with a
frame, the next one is dispatched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from unisono.errors import (
    BadArguments,
    ClosedError,
    DeadlineExceeded,
    NotExposed,
    PeerLost,
    ProtocolError,
    RemoteError,
    UnisonoError,
)
from unisono.rpc import wire
from unisono.rpc.attachments import InboundParts, allocate
from unisono.rpc.client import PendingCall
from unisono.rpc.peers import Peer, Peers, closed_there, lost
from unisono.rpc.server import Server
from unisono.rpc.streams import ItemBuffer
from unisono.rpc.transport import RpcTransport

__all__ = ["FrameDispatcher"]

_log = logging.getLogger("unisono.rpc")


class FrameDispatcher:
    """Dispatches the frames of one agent."""

    def __init__(self, transport: RpcTransport, peers: Peers, server: Server) -> None:
        self._transport = transport
        self._peers = peers
        self._server = server

    def on_frame(self, source: int, data: bytes) -> None:
        """A frame came. This never raises: the calling thread serves others, too."""
        try:
            frame = wire.decode(data)
            kind = type(frame)
            if kind is wire.Answer:
                self._on_answer(self._peers[source], frame)  # type: ignore[arg-type]
            elif kind is wire.Ask or kind is wire.PackedAsk:
                self._server.on_ask(source, frame)  # type: ignore[arg-type]
            else:
                self._on_rare_frame(self._peers[source], frame)
        except ProtocolError as error:
            self._on_malformed(self._peers[source], str(error))
        except ClosedError:
            return  # the backend was closed meanwhile: nothing can be answered
        except Exception:
            _log.exception("rank %d could not process a frame", self._peers.own.world_rank)

    def _on_malformed(self, peer: Peer, cause: str) -> None:
        rank = peer.world_rank
        if not peer.has_sent_malformed:
            peer.has_sent_malformed = True
            _log.warning("rank %d sends malformed frames: %s", rank, cause)
        self._peers.fail_calls(
            peer, lambda: ProtocolError(f"rank {rank} sent a malformed frame", cause=cause)
        )

    def _on_answer(self, peer: Peer, frame: wire.Answer) -> None:
        pending = peer.calls.get(frame.call)
        if pending is None:
            return
        if pending.buffer is not None:
            pending.buffer.end_at(frame.value if type(frame.value) is int else 0)
            _complete_stream(pending, pending.buffer)
        elif peer.calls.pop(frame.call, None) is not None:
            pending.complete(frame.value)

    def _on_rare_frame(self, peer: Peer, frame: Any) -> None:
        match frame:
            case wire.Failure():
                if (pending := peer.calls.pop(frame.call, None)) is not None:
                    pending.fail(_error_of(frame, pending).located(pending.location()))
            case wire.PackedAnswer():
                self._on_packed_answer(peer, frame)
            case wire.Item():
                if (pending := peer.calls.get(frame.call)) is not None and pending.buffer is not None:
                    pending.buffer.add(frame.index, frame.value)
                    _complete_stream(pending, pending.buffer)
            case wire.PackedItem():
                self._on_packed_item(peer, frame)
            case wire.More():
                self._server.on_more(peer.rank, frame.call, frame.count)
            case wire.Cancel():
                self._server.on_cancel(peer.rank, frame.call)
            case wire.Ack():
                with peer.lock:
                    peer.notifications = max(0, peer.notifications - max(0, frame.count))
                if peer.admissions:
                    self._peers.admit(peer)
            case wire.Goodbye():
                why = frame.why[: wire.TEXT_CHARS_MAX]
                self._peers.lose(peer, lambda: lost(peer.world_rank, why) if why else closed_there(peer))

    def _on_packed_answer(self, peer: Peer, frame: wire.PackedAnswer) -> None:
        pending = peer.calls.get(frame.call)
        if pending is None:
            # It was given up meanwhile: tell the callee that nobody will receive its attachments.
            self._peers.send(peer.rank, wire.Cancel(frame.call))
            return

        def end(value: Any, error: BaseException | None) -> None:
            if peer.calls.pop(frame.call, None) is None:
                return
            if error is None:
                pending.complete(value)
            else:
                pending.fail(error)

        inbound = self._receive(pending, frame.number, frame.body, end)
        # A finished one is not kept: it refers back to the call, which would keep the buffers until a
        # garbage collection.
        if inbound is not None and not inbound.is_done:
            pending.inbound = inbound
        if inbound is not None and pending.is_done:
            pending.inbound = None
            inbound.cancel()

    def _on_packed_item(self, peer: Peer, frame: wire.PackedItem) -> None:
        pending = peer.calls.get(frame.call)
        if pending is None or (buffer := pending.buffer) is None:
            return  # it was given up: the callee was told, and withdraws the attachments

        def end(value: Any, error: BaseException | None) -> None:
            buffer.add(frame.index, value, error)
            _complete_stream(pending, buffer)

        inbound = self._receive(pending, frame.number, frame.body, end)
        if inbound is not None:
            under_way = (one for one in pending.inbound_items if not one.is_done)
            pending.inbound_items = [*under_way, inbound]
            if pending.has_failed:
                inbound.cancel()

    def _receive(
        self,
        pending: PendingCall,
        number: int,
        body: wire.Packed,
        end: Callable[[Any, BaseException | None], None],
    ) -> InboundParts | None:
        """Receive a value with its attachments and call `end(value, error)`; None if it has none."""
        buffers = allocate(wire.part_lengths(body), wire.part_kinds(body))

        def on_done(error: BaseException | None) -> None:
            value = None
            if error is None:
                try:
                    value = wire.unpack(body, buffers)
                except Exception as fault:
                    error = fault
            elif isinstance(error, PeerLost):
                cause = "it died while it answered"
                error = lost(pending.peer.world_rank, cause).located(pending.location())
            end(value, error)

        if not buffers:
            on_done(None)
            return None
        return InboundParts(self._transport, pending.peer.rank, number, buffers, on_done)


def _complete_stream(pending: PendingCall, buffer: ItemBuffer) -> None:
    """End a stream once its last item is here: its Answer may arrive before its items."""
    if buffer.is_complete and pending.peer.calls.pop(pending.number, None) is not None:
        pending.complete(buffer.total)


def _error_of(failure: wire.Failure, pending: PendingCall) -> UnisonoError:
    """The error that a caller raises for a Failure."""
    rank, name = pending.peer.world_rank, pending.name
    what = "".join(c if c.isprintable() or c == "\n" else "?" for c in failure.what)
    match failure.kind:
        case "arguments":
            return BadArguments(
                f"rank {rank} cannot call {name!r}", rank=rank, type_name="TypeError", cause=what
            )
        case "unknown":
            return NotExposed(
                f"rank {rank} exposes no function {name!r}",
                rank=rank,
                type_name="LookupError",
                cause=what or None,
                next_step=f"agent.register({name!r}, fn) on rank {rank}, or call what it exposes",
            )
        case "deadline":
            return DeadlineExceeded(f"rank {rank} could not run {name!r} in time", waiting_on=(rank,))
        case "closed":
            return closed_there(pending.peer)
        case "busy":
            return RemoteError(
                f"rank {rank} refused the call",
                rank=rank,
                type_name="Busy",
                cause=what,
                next_step="call it again when some of its calls have ended",
            )
        case _:
            what, _, step = what.partition(". Next: ")  # an error of ours names its own next step
            return RemoteError(
                f"rank {rank} raised {failure.type_name or 'an exception'} in {name!r}",
                rank=rank,
                type_name=failure.type_name,
                traceback_text=failure.traceback_text,
                cause=what or None,
                next_step=step or None,
            )

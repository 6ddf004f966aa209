"""The dispatcher: which part of an agent each frame is for.

Answers and items go to the calls that were made from here, all others to the server. Whatever is wrong with a
frame, the next one is dispatched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from unisono._native import frame_value
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
from unisono.rpc.blobs import InboundValue, discard
from unisono.rpc.client import CallStarter
from unisono.rpc.frame import (
    ACK,
    ANSWER,
    ASK,
    CANCEL,
    FAILURE,
    GOODBYE,
    ITEM,
    MORE,
    TEXT_CHARS_MAX,
    UNWANTED,
    Frame,
    open_frame,
    short,
    texts_of,
)
from unisono.rpc.peers import Peer, Peers, closed_there, lost
from unisono.rpc.pending_call import PendingCall
from unisono.rpc.server import Server
from unisono.rpc.streams import ItemBuffer
from unisono.rpc.transport import RpcTransport

__all__ = ["FrameDispatcher"]

_log = logging.getLogger("unisono.rpc")


class FrameDispatcher:
    """Dispatches the frames of one agent."""

    def __init__(self, transport: RpcTransport, peers: Peers, client: CallStarter, server: Server) -> None:
        self._transport = transport
        self._peers = peers
        self._actions: dict[int, Callable[[Peer, Frame], None]] = {
            ASK: server.on_ask,
            ANSWER: self._on_answer,
            FAILURE: self._on_failure,
            ITEM: self._on_item,
            MORE: server.on_more,
            CANCEL: lambda peer, frame: server.on_cancel(peer.rank, frame.call),
            ACK: self._on_ack,
            GOODBYE: self._on_goodbye,
            UNWANTED: lambda peer, frame: client.on_unwanted(peer.rank, frame.count),
        }

    def on_frame(self, source: int, data: bytes) -> None:
        """A frame came. This never raises: the calling thread serves others, too."""
        peer = self._peers[source]
        try:
            frame = open_frame(data)
            self._actions[frame.kind](peer, frame)
        except ProtocolError as error:
            self._on_malformed(peer, str(error))
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

    # -- answers ------------------------------------------------------------------------------------------

    def _on_answer(self, peer: Peer, frame: Frame) -> None:
        pending = peer.calls.get(frame.call)
        if pending is None:
            if frame.blob_bytes:  # the call was given up meanwhile: its blobs are unwanted
                discard(self._transport, peer.rank, frame)
                self._peers.send(peer.rank, short(CANCEL, frame.call))
        elif pending.buffer is not None:
            total = None if frame.blob_bytes else frame_value(frame.data)
            if type(total) is not int:
                raise ProtocolError("a malformed frame: the number of items was expected")
            pending.buffer.end_at(total)
            _end_stream(pending, pending.buffer)
        elif frame.blob_bytes:
            self._receive_answer(pending, frame)
        else:
            self._complete(pending, *_value_of(frame))

    def _receive_answer(self, pending: PendingCall, frame: Frame) -> None:
        inbound = self._receive(pending, frame, lambda value, error: self._complete(pending, value, error))
        if not inbound.is_done:
            pending.inbound = inbound
        if pending.is_done:
            pending.inbound = None
            inbound.cancel()

    def _complete(self, pending: PendingCall, value: Any, error: BaseException | None) -> None:
        if pending.peer.calls.pop(pending.number, None) is None:
            return
        if error is None:
            pending.complete(value)
        else:
            pending.fail(error)

    def _on_failure(self, peer: Peer, frame: Frame) -> None:
        kind, what, type_name, traceback_text = texts_of(frame, 4)
        pending = peer.calls.get(frame.call)
        if pending is None:
            return
        error = _error_of(pending, kind, what, type_name, traceback_text).located(pending.location())
        if pending.buffer is not None:
            pending.buffer.end_at(frame.count, error)
            _end_stream(pending, pending.buffer)
        elif peer.calls.pop(frame.call, None) is not None:
            pending.fail(error)

    # -- items --------------------------------------------------------------------------------------------

    def _on_item(self, peer: Peer, frame: Frame) -> None:
        pending = peer.calls.get(frame.call)
        if pending is None or (buffer := pending.buffer) is None:
            discard(self._transport, peer.rank, frame)
            return  # it was given up: the callee was told, and withdraws the longer blobs

        buffer.announce(frame.count)

        def end(value: Any, error: BaseException | None) -> None:
            buffer.add(frame.count, value, error)
            _end_stream(pending, buffer)

        if not frame.blob_bytes:
            end(*_value_of(frame))
            return
        inbound = self._receive(pending, frame, end)
        pending.inbound_items = [*(one for one in pending.inbound_items if not one.is_done), inbound]
        if pending.has_failed:
            inbound.cancel()

    def _receive(
        self, pending: PendingCall, frame: Frame, end: Callable[[Any, BaseException | None], None]
    ) -> InboundValue:
        def on_end(value: Any, error: BaseException | None) -> None:
            if isinstance(error, PeerLost):
                cause = "it died while it answered"
                error = lost(pending.peer.world_rank, cause).located(pending.location())
            end(value, error)

        return InboundValue(self._transport, pending.peer.rank, frame, on_end)

    # -- the other agent ----------------------------------------------------------------------------------

    def _on_ack(self, peer: Peer, frame: Frame) -> None:
        with peer.lock:
            peer.notifications = max(0, peer.notifications - frame.count)
        if peer.admissions:
            self._peers.admit(peer)

    def _on_goodbye(self, peer: Peer, frame: Frame) -> None:
        why = texts_of(frame, 1)[0][:TEXT_CHARS_MAX]
        self._peers.lose(peer, lambda: lost(peer.world_rank, why) if why else closed_there(peer))


def _value_of(frame: Frame) -> tuple[Any, BaseException | None]:
    """The value of a frame without blobs, or why it cannot be made."""
    try:
        return frame_value(frame.data), None
    except Exception as error:
        return None, error


def _end_stream(pending: PendingCall, buffer: ItemBuffer) -> None:
    """End a stream once its last item is here: its ANSWER or FAILURE may arrive before its items."""
    if buffer.is_complete and pending.peer.calls.pop(pending.number, None) is not None:
        if buffer.error is None:
            pending.complete(buffer.total)
        else:
            pending.fail(buffer.error)


def _error_of(
    pending: PendingCall, kind: str, what: str, type_name: str, traceback_text: str
) -> UnisonoError:
    """The error that a caller raises for a FAILURE."""
    rank, name = pending.peer.world_rank, pending.name
    what = "".join(c if c.isprintable() or c == "\n" else "?" for c in what)
    match kind:
        case "arguments":
            what, _, step = what.partition(". Next: ")
            return BadArguments(
                f"rank {rank} cannot call {name!r}",
                rank=rank,
                type_name="TypeError",
                cause=what,
                next_step=step or None,
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
                f"rank {rank} raised {type_name or 'an exception'} in {name!r}",
                rank=rank,
                type_name=type_name,
                traceback_text=traceback_text,
                cause=what or None,
                next_step=step or None,
            )

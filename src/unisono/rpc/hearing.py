"""FrameDispatcher: what the frames of other agents cause here.

Knows which frame is for whom: answers and items for the calls that were made from here, the rest for the
server. Does not know how frames travel. Whatever is wrong with one, the next is heard.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from unisono.errors import ClosedError, PeerLost, ProtocolError
from unisono.rpc.calls import PendingCall, closed_there, error_of
from unisono.rpc.following import InboundParts
from unisono.rpc.frames import (
    TEXT_CHARS_MAX,
    Ack,
    Answer,
    Ask,
    Bye,
    Cancel,
    Failure,
    Item,
    More,
    PackedAnswer,
    PackedAsk,
    PackedItem,
    decode,
    encode,
)
from unisono.rpc.payload import places, unpack
from unisono.rpc.peers import Peer, Peers, lost
from unisono.rpc.server import Server
from unisono.rpc.streams import Arrivals

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent

__all__ = ["FrameDispatcher"]

_log = logging.getLogger("unisono.rpc")


class FrameDispatcher:
    """The ear of one agent."""

    def __init__(self, agent: Agent, peers: Peers, server: Server) -> None:
        self._agent = agent
        self._peers = peers
        self._server = server

    def on_frame(self, source: int, data: bytes) -> None:
        """A frame came. Whatever is wrong with it, the next one is heard."""
        try:
            frame = decode(data)
            kind = type(frame)
            if kind is Answer:
                self._on_answer(self._peers[source], frame)  # type: ignore[arg-type]
            elif kind is Ask or kind is PackedAsk:
                self._server.on_ask(source, frame)  # type: ignore[arg-type]
            else:
                self._on_rare_frame(self._peers[source], frame)
        except ProtocolError as error:
            rank = self._peers[source].world_rank
            if not self._peers[source].is_blamed:
                self._peers[source].is_blamed = True
                _log.warning("rank %d sends malformed frames: %s", rank, error)
            cause = str(error)
            self._peers.fail_calls(
                self._peers[source],
                lambda: ProtocolError(f"rank {rank} sent a malformed frame", cause=cause),
            )
        except ClosedError:
            return  # the backend was closed meanwhile: nobody can be answered
        except Exception:
            _log.exception("rank %d: a frame could not be heeded", self._agent.world_rank)

    def _on_answer(self, peer: Peer, frame: Answer) -> None:
        calling = peer.calls.get(frame.call)
        if calling is None:
            return
        if calling.stream is not None:
            calling.stream.end_at(frame.value if type(frame.value) is int else 0)
            self._look_at_end(peer, calling, calling.stream)
        elif peer.calls.pop(frame.call, None) is not None:
            calling.complete(frame.value)

    def _look_at_end(self, peer: Peer, calling: PendingCall, stream: Arrivals) -> None:
        """A stream ends when its last item is here, whoever brings it."""
        if stream.is_complete and peer.calls.pop(calling.number, None) is not None:
            calling.complete(stream.total)

    def _on_rare_frame(self, peer: Peer, frame: Any) -> None:
        match frame:
            case Failure():
                if (calling := peer.calls.pop(frame.call, None)) is not None:
                    calling.fail(error_of(frame, calling).located(calling.location()))
            case PackedAnswer():
                self._on_packed_answer(peer, frame)
            case Item():
                if (calling := peer.calls.get(frame.call)) is not None and calling.stream is not None:
                    calling.stream.add(frame.index, frame.value)
                    self._look_at_end(peer, calling, calling.stream)
            case PackedItem():
                self._on_packed_item(peer, frame)
            case More():
                self._server.on_more(peer.rank, frame.call, frame.count)
            case Cancel():
                self._server.on_cancel(peer.rank, frame.call)
            case Ack():
                with peer.lock:
                    peer.notes = max(0, peer.notes - max(0, frame.count))
                if peer.room:
                    self._peers.make_room(peer)
            case Bye():
                why = frame.why[:TEXT_CHARS_MAX]
                self._peers.lose(peer, lambda: lost(peer.world_rank, why) if why else closed_there(peer))

    def _on_packed_answer(self, peer: Peer, frame: PackedAnswer) -> None:
        calling = peer.calls.get(frame.call)
        if calling is None:
            # Given up meanwhile: what follows must not wait for somebody to take it.
            self._agent.tell(peer.rank, encode(Cancel(frame.call)))
            return
        memory = places(frame.body)

        def then(error: BaseException | None) -> None:
            if peer.calls.pop(frame.call, None) is None:
                return
            try:
                if error is not None:
                    raise error
                calling.complete(unpack(frame.body, memory))
            except PeerLost:
                calling.fail(lost(peer.world_rank, "it died while it answered").located(calling.location()))
            except Exception as fault:
                calling.fail(fault)

        if not memory:
            then(None)
            return
        taking = InboundParts(self._agent.post, peer.rank, frame.number, memory, then)
        # Those that hold each other keep the memory until the collector comes: so only while it is needed.
        if not taking.is_done:
            calling.taking = taking
        if calling.is_done:
            calling.taking = None
            taking.cancel()

    def _on_packed_item(self, peer: Peer, frame: PackedItem) -> None:
        calling = peer.calls.get(frame.call)
        if calling is None or (stream := calling.stream) is None:
            return  # given up: its generator was told, and takes back what is on its way
        memory = places(frame.body)

        def then(error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                stream.add(frame.index, unpack(frame.body, memory))
            except PeerLost:
                gone = lost(peer.world_rank, "it died while it answered").located(calling.location())
                stream.add(frame.index, None, gone)
            except Exception as fault:
                stream.add(frame.index, None, fault)
            self._look_at_end(peer, calling, stream)

        if not memory:
            then(None)
            return
        taking = InboundParts(self._agent.post, peer.rank, frame.number, memory, then)
        calling.items = [*(one for one in calling.items if not one.is_done), taking]
        if calling.has_failed:
            taking.cancel()

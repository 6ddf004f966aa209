"""The eager/rendezvous protocol of one rank: calls and frames in, actions out.

A message is eager, with its bytes, if it is short and the credit allows. Otherwise its envelope goes first,
and the bytes follow when a receive has matched it (rendezvous.py). A message to this rank itself travels in
the same way.

Pure: no threads, no clock, no transport. A driver (protocol_backend.py) holds a lock during each call, and
carries out the actions.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from unisono.config import Config
from unisono.core.envelope import ANY, Envelope, Lane
from unisono.core.request import Request, withdrawn
from unisono.errors import ClosedError, ProtocolError, UnisonoError
from unisono.messaging.actions import Action, End, Fill, Frame, Kind, Transmit
from unisono.messaging.credit import RTS_MAX, Credit, OwnCredit, eager_limits
from unisono.messaging.inbox import Inbox
from unisono.messaging.matching import Posted, UnexpectedMessage
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.rendezvous import (
    ReceiveAction,
    ReceiveEvent,
    ReceiveState,
    RendezvousReceive,
    RendezvousSend,
    SendAction,
    SendEvent,
    SendState,
)

__all__ = ["Protocol"]


@dataclass(slots=True, eq=False)
class _Readable:
    """A queued message whose bytes can be read: it came with them, or its sender lends them until the FIN."""

    lane: Lane
    data: bytes | memoryview
    rendezvous_id: int  # 0 if it is eager


@dataclass(slots=True)
class _Peer:
    """What is between this rank and another.

    `rts_sent` of our RTS have no FIN yet; `rts_held` could not be sent yet; `rts_withdrawn` were sent and
    withdrawn, and may be answered by a CTS. `rts_queued` RTS of the peer wait here for a receive.
    """

    credit: tuple[Credit, Credit]
    rts_sent: int = 0
    rts_held: deque[RendezvousSend] = field(default_factory=deque)
    rts_withdrawn: int = 0
    rts_queued: int = 0


_NO_CREDIT: Final = (0, 0)


class Protocol:
    """The protocol of one rank. Every event returns what must be done, in order.

    `piece_bytes` is the length of a piece of a rendezvous. `shares_memory`: receivers read the memory of
    senders. Then a frame must be handled before anything else happens at its sender.
    """

    def __init__(
        self, rank: int, config: Config, piece_bytes: int = sys.maxsize, *, shares_memory: bool = False
    ) -> None:
        self.rank = rank
        self.inbox: Inbox[_Readable | RendezvousReceive] = Inbox(config.recv_bytes_max)
        self.down: dict[int, PeerDown] = {}
        self.is_closed = False
        self._config = config
        self._piece_bytes = piece_bytes
        self._shares_memory = shares_memory
        self._room = SendEvent.LEND if shares_memory else SendEvent.ROOM
        self._peers: dict[int, _Peer] = {}
        self._ids = itertools.count(1)
        self._sends: dict[int, RendezvousSend] = {}
        self._sends_by_request: dict[Request, RendezvousSend] = {}
        # By peer and id: queued messages that are lent here, and receives by rendezvous from the RTS on.
        self._lent: dict[tuple[int, int], UnexpectedMessage[_Readable | RendezvousReceive]] = {}
        self._receives: dict[tuple[int, int], RendezvousReceive] = {}
        self._receives_by_request: dict[Request, RendezvousReceive] = {}

    # -- calls of the user --------------------------------------------------------------------------------

    def send(
        self, dst: int, envelope: Envelope, data: memoryview, request: Request, lane: Lane, sync: bool
    ) -> list[Action]:
        """Send a message: eagerly, or by rendezvous."""
        if self.is_closed or dst in self.down:
            return [End(request, error=self._error(dst))]
        out: list[Action] = []
        peer = self._peer(dst)
        # An eager message must not overtake an RTS that is held.
        if not sync and not peer.rts_held and peer.credit[lane].take(envelope.nbytes):
            self._transmit(out, dst, Kind.EAGER, lane, 0, envelope, bytes(data))
            out.append(End(request))
            return out
        send = RendezvousSend(next(self._ids), dst, lane, data, request, envelope)
        self._sends[send.rendezvous_id] = self._sends_by_request[request] = send
        if peer.rts_held or peer.rts_sent >= RTS_MAX:
            peer.rts_held.append(send)
        else:
            self._step_send(out, send, self._room)
        return out

    def receive(self, posted: Posted) -> list[Action]:
        """Post a receive or a probe."""
        if self.is_closed:
            return [End(posted.request, error=self._closed())]
        out: list[Action] = []
        self._post(posted, out)
        return out

    def withdraw(self, request: Request) -> list[Action]:
        """Cancel a request; without an action it is matched or over, and ends by itself."""
        out: list[Action] = []
        if (send := self._sends_by_request.get(request)) is not None:
            self._step_send(out, send, SendEvent.CANCEL)
        elif self.inbox.withdraw(request):
            out.append(End(request, error=withdrawn()))
        elif (receive := self._receives_by_request.get(request)) is not None:
            self._step_receive(out, receive, ReceiveEvent.CANCEL)
        return out

    def end_context(self, context: int) -> list[Action]:
        """A context is closed here: drop its eager messages, now and when they arrive.

        A message whose sender waits stays: its sender withdraws it when it learns of the end.
        """
        out: list[Action] = []
        for message in self.inbox.end_context(context):
            if isinstance(message.payload, _Readable) and not message.payload.rendezvous_id:
                self.inbox.remove(message)
                self._release(out, message.envelope, message.payload.lane)
        return out

    # -- frames of a peer ---------------------------------------------------------------------------------

    def arrive(self, source: int, frame: Frame) -> list[Action]:
        """A frame has come, which is not DATA.

        Raises:
            ProtocolError: the peer broke the protocol.
        """
        if frame.credit is not _NO_CREDIT:
            self._regain(source, frame)
        handler = _HANDLERS.get(frame.kind)
        if handler is None:
            raise ProtocolError(f"a frame of unknown kind {frame.kind}")
        out: list[Action] = []
        handler(self, out, source, frame)
        return out

    def place(self, source: int, frame: Frame, nbytes: int) -> memoryview | None:
        """A frame with a piece has come: the memory for it; None if the receive is over.

        Once the memory is filled, `placed` must be called.

        Raises:
            ProtocolError: the peer broke the protocol.
        """
        self._regain(source, frame)
        if nbytes > self._piece_bytes:
            raise ProtocolError(f"a piece of {nbytes} bytes; allowed: {self._piece_bytes}")
        receive = self._receives.get((source, frame.rendezvous_id))
        return None if receive is None else receive.announce(frame.offset, nbytes, self._piece_bytes)

    def placed(self, source: int, frame: Frame, nbytes: int) -> list[Action]:
        """A piece is in its memory."""
        out: list[Action] = []
        receive = self._receives.get((source, frame.rendezvous_id))
        if receive is None:
            return out
        if receive.is_last(nbytes):
            self._step_receive(out, receive, ReceiveEvent.LAST_PIECE)
        elif receive.state is ReceiveState.CLOSING and not receive.filling:
            self._step_receive(out, receive, ReceiveEvent.IDLE)
        return out

    # -- endings ------------------------------------------------------------------------------------------

    def peer_down(self, down: PeerDown) -> list[Action]:
        """A peer is gone, and everything that it sent has arrived."""
        out: list[Action] = []
        if down.rank in self.down:
            return out
        self.down[down.rank] = down
        self.inbox.peer_down(down, out)
        # Messages whose bytes are still there leave the queue, too.
        for key in [key for key in self._lent if key[0] == down.rank]:
            self.inbox.remove(self._lent.pop(key))
        for receive in [r for r in self._receives.values() if r.peer == down.rank]:
            self._step_receive(out, receive, ReceiveEvent.PEER_DOWN)
        for send in [s for s in self._sends.values() if s.peer == down.rank]:
            self._step_send(out, send, SendEvent.PEER_DOWN)
        return out

    def close(self) -> list[Action]:
        """This rank leaves: end what is not matched. What is matched goes on until `cut`."""
        out: list[Action] = []
        if self.is_closed:
            return out
        self.is_closed = True
        for send in list(self._sends.values()):
            self._step_send(out, send, SendEvent.CLOSE)
        self.inbox.close(self._closed(), out)
        self._lent.clear()
        for receive in list(self._receives.values()):
            self._step_receive(out, receive, ReceiveEvent.CLOSE)
            if receive.state is ReceiveState.CLOSING and not receive.filling:
                self._step_receive(out, receive, ReceiveEvent.IDLE)
        return out

    def cut(self) -> list[Action]:
        """The transport of a closed rank is gone: end what is left."""
        out: list[Action] = []
        for send in list(self._sends.values()):
            self._step_send(out, send, SendEvent.CUT)
        for receive in list(self._receives.values()):
            self._step_receive(out, receive, ReceiveEvent.CUT)
        return out

    def is_sending(self) -> bool:
        """Whether a send waits for its receive, or for the confirmation of its bytes."""
        return bool(self._sends)

    # -- the sending side ---------------------------------------------------------------------------------

    def _step_send(self, out: list[Action], send: RendezvousSend, event: SendEvent) -> None:
        was, action, peer = send.state, send.step(event), self._peers[send.peer]
        is_over = send.state is SendState.OVER
        if is_over:
            del self._sends[send.rendezvous_id], self._sends_by_request[send.request]
            if was is SendState.HELD:
                peer.rts_held.remove(send)
            else:
                peer.rts_sent -= 1
            if was is SendState.OFFERED:
                peer.rts_withdrawn += 1
        match action:
            case SendAction.SEND_RTS:
                peer.rts_sent += 1
                data = send.data if send.state is SendState.LENT else b""
                self._transmit(out, send.peer, Kind.RTS, send.lane, send.rendezvous_id, send.envelope, data)
            case SendAction.COMPLETE:
                out.append(End(send.request))
            case SendAction.SEND_DATA:
                self._send_data(out, send, send.data)
            case SendAction.SEND_COPY:
                self._send_data(out, send, memoryview(bytes(send.data)))
                out.append(End(send.request))
            case SendAction.SEND_WITHDRAW:
                self._transmit(out, send.peer, Kind.WITHDRAW, send.lane, send.rendezvous_id)
                out.append(End(send.request, error=withdrawn()))
            case SendAction.END_WITHDRAWN:
                out.append(End(send.request, error=withdrawn()))
            case SendAction.REVOKE:
                self._transmit(out, send.peer, Kind.WITHDRAW, send.lane, send.rendezvous_id)
                out.append(End(send.request, error=self._error(send.peer)))
            case SendAction.FAIL:
                out.append(End(send.request, error=self._error(send.peer)))
            case SendAction.NONE:
                pass
        if is_over and peer.rts_held and send.peer not in self.down and not self.is_closed:
            self._send_rts(out, peer)

    def _send_rts(self, out: list[Action], peer: _Peer) -> None:
        """Send the RTS that are held, in order, while the peer may queue more."""
        while peer.rts_held and peer.rts_sent < RTS_MAX:
            self._step_send(out, peer.rts_held.popleft(), self._room)

    def _send_data(self, out: list[Action], send: RendezvousSend, data: memoryview) -> None:
        about = (send.lane, send.rendezvous_id, send.envelope)
        for offset in range(0, max(1, data.nbytes), self._piece_bytes):
            piece = data[offset : offset + self._piece_bytes] if data.nbytes else b""
            self._transmit(out, send.peer, Kind.DATA, *about, piece, offset)

    def _on_cts(self, out: list[Action], source: int, frame: Frame) -> None:
        send = self._sends.get(frame.rendezvous_id)
        if send is not None:
            if send.peer != source:
                raise ProtocolError("a CTS without an RTS")
            is_short = send.data.nbytes <= self._peer(source).credit[send.lane].eager_bytes
            self._step_send(out, send, SendEvent.CTS_SHORT if is_short else SendEvent.CTS)
            return
        # A CTS may cross a withdrawal: one CTS for each withdrawn RTS is valid.
        peer = self._peer(source)
        if not peer.rts_withdrawn:
            raise ProtocolError("a CTS without an RTS")
        peer.rts_withdrawn -= 1
        self._transmit(out, source, Kind.RTS_GONE, frame.lane, frame.rendezvous_id)

    def _on_fin(self, out: list[Action], source: int, frame: Frame) -> None:
        send = self._sends.get(frame.rendezvous_id)
        if send is None or send.peer != source:
            raise ProtocolError("a FIN for a message that was not sent")
        self._step_send(out, send, SendEvent.FIN)

    # -- the receiving side -------------------------------------------------------------------------------

    def _post(self, posted: Posted, out: list[Action]) -> None:
        down = None if posted.source is ANY else self.down.get(posted.source)
        message = self.inbox.post(posted, down, out)
        if message is None:
            return
        payload = message.payload
        if isinstance(payload, _Readable):
            if payload.rendezvous_id:
                del self._lent[message.envelope.source, payload.rendezvous_id]
            self._read(out, posted, message.envelope, payload.lane, payload.data, payload.rendezvous_id)
        else:
            self._match(out, payload, posted)

    def _read(
        self,
        out: list[Action],
        posted: Posted,
        envelope: Envelope,
        lane: Lane,
        data: bytes | memoryview,
        rendezvous_id: int,
    ) -> None:
        """A receive has matched a message whose bytes can be read. The FIN ends a send after the copy."""
        out.append(Fill(posted, envelope, data))
        if rendezvous_id:
            self._transmit(out, envelope.source, Kind.FIN, lane, rendezvous_id)
        else:
            self._release(out, envelope, lane)

    def _on_eager(self, out: list[Action], source: int, frame: Frame) -> None:
        envelope, lane = frame.envelope, frame.lane
        assert envelope is not None
        self._peer(source).credit[lane].hold(envelope.nbytes)
        if self.is_closed:
            return
        if (posted := self.inbox.arrive(envelope, out)) is not None:
            self._read(out, posted, envelope, lane, frame.data, 0)
        elif self.inbox.has_ended(envelope.context):
            self._release(out, envelope, lane)
        else:  # the transport may use the memory of the frame again
            self.inbox.queue(UnexpectedMessage(envelope, _Readable(lane, bytes(frame.data), 0)))

    def _on_rts(self, out: list[Action], source: int, frame: Frame) -> None:
        number, envelope = frame.rendezvous_id, frame.envelope
        assert envelope is not None
        if (source, number) in self._receives:
            raise ProtocolError(f"a second RTS with id {number}")
        if self.is_closed:
            return
        posted = self.inbox.arrive(envelope, out)
        if self._shares_memory:
            if posted is not None:
                self._read(out, posted, envelope, frame.lane, frame.data, number)
                return
            message: UnexpectedMessage[_Readable | RendezvousReceive] = UnexpectedMessage(
                envelope, _Readable(frame.lane, frame.data, number)
            )
            self._lent[source, number] = message
            self.inbox.queue(message)
            return
        peer = self._peer(source)
        # Twice the limit: a withdrawal in one lane may arrive after a later RTS in the other.
        if posted is None and peer.rts_queued >= 2 * RTS_MAX:
            raise ProtocolError(f"it has sent {peer.rts_queued + 1} RTS; allowed: {RTS_MAX}")
        peer.rts_queued += 1
        receive = self._receives[source, number] = RendezvousReceive(number, source, frame.lane, envelope)
        if posted is not None:
            self._match(out, receive, posted)
            return
        receive.queued = UnexpectedMessage(envelope, receive)
        self.inbox.queue(receive.queued)

    def _on_withdraw(self, out: list[Action], source: int, frame: Frame) -> None:
        key = (source, frame.rendezvous_id)
        if (message := self._lent.pop(key, None)) is not None:
            self.inbox.remove(message)
        elif (receive := self._receives.get(key)) is not None:
            self._step_receive(out, receive, ReceiveEvent.WITHDRAW)

    def _on_rts_gone(self, out: list[Action], source: int, frame: Frame) -> None:
        if (receive := self._receives.get((source, frame.rendezvous_id))) is not None:
            self._step_receive(out, receive, ReceiveEvent.RTS_GONE)

    def _on_credit(self, out: list[Action], source: int, frame: Frame) -> None:
        """Its credit was regained, as that of every frame."""

    def _match(self, out: list[Action], receive: RendezvousReceive, posted: Posted) -> None:
        """A receive has matched an RTS, which has left the inbox."""
        receive.match(posted)
        self._step_receive(out, receive, ReceiveEvent.MATCH)

    def _step_receive(self, out: list[Action], receive: RendezvousReceive, event: ReceiveEvent) -> None:
        was, action, posted = receive.state, receive.step(event), receive.posted
        if was is ReceiveState.QUEUED:
            self._peers[receive.peer].rts_queued -= 1
        if receive.state is ReceiveState.OVER:
            del self._receives[receive.peer, receive.rendezvous_id]
            if posted is not None:
                self._receives_by_request.pop(posted.request, None)
        match action:
            case ReceiveAction.SEND_CTS:
                assert posted is not None
                self._receives_by_request[posted.request] = receive
                self._transmit(
                    out, receive.peer, Kind.CTS, receive.lane, receive.rendezvous_id, receive.envelope
                )
            case ReceiveAction.SEND_FIN:
                assert posted is not None
                self._transmit(out, receive.peer, Kind.FIN, receive.lane, receive.rendezvous_id)
                out.append(End(posted.request, receive.envelope, None, receive.data))
            case ReceiveAction.DROP:
                assert receive.queued is not None
                self.inbox.remove(receive.queued)
            case ReceiveAction.REPOST:
                assert posted is not None
                self._post(posted, out)
            case ReceiveAction.END_WITHDRAWN:
                assert posted is not None
                out.append(End(posted.request, error=withdrawn()))
            case ReceiveAction.FAIL:
                assert posted is not None
                out.append(End(posted.request, error=self._error(receive.peer)))
            case ReceiveAction.NONE:
                pass

    # -- both sides ---------------------------------------------------------------------------------------

    def _transmit(
        self,
        out: list[Action],
        peer: int,
        kind: Kind,
        lane: Lane,
        rendezvous_id: int = 0,
        envelope: Envelope | None = None,
        data: bytes | memoryview = b"",
        offset: int = 0,
    ) -> None:
        """Send a frame, with the credit that is owed."""
        bulk, control = self._peer(peer).credit
        credit = _NO_CREDIT
        if bulk.owed or control.owed:
            credit = (bulk.owed, 0 if control is bulk else control.owed)
            bulk.owed = control.owed = 0
        frame = Frame(kind, lane, rendezvous_id, envelope, data, offset, credit)
        out.append(Transmit(self.rank, peer, frame))

    def _release(self, out: list[Action], envelope: Envelope, lane: Lane) -> None:
        """An eager message was received or dropped: its sender may use the credit again."""
        source = envelope.source
        if self._peer(source).credit[lane].release(envelope.nbytes) and source not in self.down:
            self._transmit(out, source, Kind.CREDIT, lane)

    def _regain(self, source: int, frame: Frame) -> None:
        for credit, returned in zip(self._peer(source).credit, frame.credit, strict=True):
            credit.regain(returned)

    def _peer(self, rank: int) -> _Peer:
        peer = self._peers.get(rank)
        if peer is None:
            if rank == self.rank:
                own = OwnCredit(self._config)
                credit: tuple[Credit, Credit] = (own, own)
            else:
                bulk, control = (Credit(*eager_limits(self._config, lane)) for lane in Lane)
                credit = (bulk, control)
            peer = self._peers[rank] = _Peer(credit)
        return peer

    def _error(self, peer: int) -> UnisonoError:
        """The error of a request that needs a peer, after `close` or if the peer is down."""
        return self._closed() if self.is_closed else self.down[peer].error()

    def _closed(self) -> ClosedError:
        return ClosedError(f"rank {self.rank} is closed")


_HANDLERS: Final[dict[Kind, Callable[[Protocol, list[Action], int, Frame], None]]] = {
    Kind.EAGER: Protocol._on_eager,
    Kind.RTS: Protocol._on_rts,
    Kind.CTS: Protocol._on_cts,
    Kind.FIN: Protocol._on_fin,
    Kind.WITHDRAW: Protocol._on_withdraw,
    Kind.RTS_GONE: Protocol._on_rts_gone,
    Kind.CREDIT: Protocol._on_credit,
}

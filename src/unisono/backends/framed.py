"""A backend: the whole contract over links that carry frames in order, and know nothing else.

Knows how a message becomes frames: whole if the credit allows, else its envelope first and the bytes when a
receive asks for them; how credit comes back, how a send is taken back, how a rank says goodbye. Does not know
how a frame travels: a wire does, and foreign libraries (Gloo, MPI) are wires.

The nouns. A *frame* is a head of fixed length, a header and a few bytes. A *payload* follows its frame and
lies in the users' memory at both ends. An *offer* is a message whose bytes wait for a receive at their
sender; a *reassembly* is the receive that has asked for them.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple

from unisono.backends.registry import Closable
from unisono.config import Config
from unisono.core.clock import Runtime
from unisono.core.envelope import HEADER_BYTES_MAX, UNTYPED, Any_, Envelope, Lane
from unisono.core.request import Request
from unisono.errors import ClosedError, ProtocolError, UnisonoError
from unisono.messaging.backend import BROKEN, PeerDown
from unisono.messaging.credit import ENVELOPE_BYTES, OFFERS_MAX, OwnCredit, bytes_max, eager_limits
from unisono.messaging.inbox import InboundMessage, Inbox
from unisono.messaging.matching import Posted

__all__ = ["FrameTransport", "FramedBackend", "frame_bytes_max"]

_log = logging.getLogger("unisono.backend")


class Kind(IntEnum):
    """What a frame is."""

    EAGER = 1  # a message, whole
    OFFER = 2  # a message whose bytes may be asked for
    ASK = 3  # a receive has met the offer
    PIECE = 4  # a part of the bytes follows as payload
    LANDED = 5  # all of the bytes have come
    GONE = 6  # the offer that was asked for had been taken back
    WITHDRAW = 7  # the offer is taken back
    CREDIT = 8  # nothing but the credit that every frame may bring back
    BYE = 9  # the sender leaves; nothing more comes
    FAREWELL = 10  # the answer to a goodbye; nothing more comes from this side either


class Head(NamedTuple):
    """The fixed part of a frame. Credit is what the receiver of the frame may use again, by lane."""

    kind: int
    lane: int = 0
    dtype: int = UNTYPED
    header_bytes: int = 0
    number: int = 0
    context: int = 0
    tag: int = 0
    nbytes: int = 0
    offset: int = 0
    credit_bulk: int = 0
    credit_control: int = 0


_HEAD: Final = struct.Struct("<BBBxHxxQQQQQII")


def frame_bytes_max(config: Config) -> int:
    """The longest frame: one with the longest header and the longest message that travels unasked."""
    return _HEAD.size + HEADER_BYTES_MAX + max(eager_limits(config, lane)[0] for lane in Lane)


class FrameTransport(ABC):
    """What carries frames between ranks. None of its methods blocks but `close`.

    It passes each frame of a peer to `FramedBackend.arrive`, in the order of its lane and never two frames of
    one peer at a time. It calls `FramedBackend.lost` once a peer can no longer be heard, and stops reading
    from a peer once `FramedBackend.is_over`.
    """

    @abstractmethod
    def send(self, peer: int, frame: bytes, payload: memoryview | None, lane: Lane | None) -> None:
        """Send a frame and the payload behind it, whose memory it keeps as long as it needs it.

        A wire with lanes keeps the order within each, and may deliver payloads in any; without a lane the
        frame comes after all before it. A wire without lanes keeps the order of all.
        """

    @abstractmethod
    def is_own_thread(self) -> bool:
        """Whether the calling thread is one that brings news: it must not wait for any."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening. Everything that was to be heard has been, or the time for it is over."""


class FramedBackend(Closable):
    """A backend over a wire, which a subclass opens with `_wire`."""

    # A payload crosses in pieces of so many bytes: what waits behind one waits some milliseconds.
    piece_bytes = 4 << 20

    _wire: FrameTransport

    def __init__(self, rank: int, size: int, config: Config, runtime: Runtime) -> None:
        self._rank = rank
        self._size = size
        self._pid = os.getpid()
        self._config = config
        self._runtime = runtime
        self._inbox = Inbox(rank, config.recv_bytes_max)
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._numbers = itertools.count(1)
        self._outgoing: dict[int, _Outgoing] = {}
        self._offered: dict[tuple[int, int], _Offered] = {}
        self._landings: dict[tuple[int, int], _Reassembly] = {}
        self._used = {(peer, lane): 0 for peer in range(size) for lane in Lane}
        self._owed = {(peer, lane): 0 for peer in range(size) for lane in Lane}
        self._own = OwnCredit(config)
        self._held = {(peer, lane): 0 for peer in range(size) for lane in Lane}
        # Offers of ours: made to a peer, waiting to be made, and taken back after they were.
        self._offers_made = dict.fromkeys(range(size), 0)
        self._held_back: dict[int, deque[_Outgoing]] = {peer: deque() for peer in range(size)}
        self._withdrawn = dict.fromkeys(range(size), 0)
        self._offering: set[int] = set()
        # Offers of each peer that wait here.
        self._offers_held = dict.fromkeys(range(size), 0)
        self._limits = {lane: eager_limits(config, lane) for lane in Lane}
        self._down: dict[int, PeerDown] = {}
        self._listeners: list[Callable[[PeerDown], None]] = []
        self._is_closed = False
        self._farewells: set[int] = set()
        self._after_close: list[Callable[[], None]] = []

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    @property
    def runtime(self) -> Runtime:
        """The clock."""
        return self._runtime

    @property
    def config(self) -> Config:
        """The settings of all ranks."""
        return self._config

    # -- the contract -------------------------------------------------------------------------------------

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
        """Send at once if the message is short and the credit allows, else offer it."""
        self.check_peer(dst, "dst")
        self.check_length(tag, data.nbytes, header)
        if self.is_forked():
            return _failed(dst)
        request = Request(dst)
        envelope = Envelope(self._rank, context, tag, data.nbytes, dtype, header)
        bytes_of = data.cast("B") if data.nbytes else data
        if dst == self._rank:
            self._send_here(request, envelope, bytes_of, sync)
            return request
        with self._lock:
            error = self._refusal(dst)
            number = 0
            if error is None and (sync or not self._take_credit(dst, lane, data.nbytes)):
                number = next(self._numbers)
                out = _Outgoing(number, dst, lane, bytes_of, request, envelope)
                self._outgoing[number] = out
                if self._is_held_back(dst) or self._offers_made[dst] >= OFFERS_MAX:
                    self._held_back[dst].append(out)
                else:
                    out.is_offered = True
                    self._offers_made[dst] += 1
        if error is not None:
            request.fail(error)
        elif number:
            request.withdraw_by(lambda _: self._withdraw(number))
            if out.is_offered:
                self._send(dst, _head_of(Kind.OFFER, envelope, lane, number), header)
            self._offer_next(dst)
        else:
            self._send(dst, _head_of(Kind.EAGER, envelope, lane), header, bytes(bytes_of))
            request.complete()
        return request

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive in this rank's inbox."""
        self.check_peer(src, "src")
        if self.is_forked():
            return _failed(src)
        return self._inbox.receive(src, context, tag, into, dtype)

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe in this rank's inbox."""
        self.check_peer(src, "src")
        if self.is_forked():
            return _failed(src)
        return self._inbox.probe(src, context, tag)

    def end_group(self, context: int) -> None:
        """Drop what nobody will receive any more."""
        self._inbox.end_context(context)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Tell the listener of ranks that are or go down."""
        with self._lock:
            if not self._is_closed:
                self._listeners.append(listener)
            known = list(self._down.values())
        for down in known:
            listener(down)

    def close(self) -> None:
        """Leave: what was asked for is sent, what was not is taken back, and everybody hears a goodbye."""
        closed = self._closed()
        if self.is_forked():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._listeners.clear()
            unmet = [out for out in self._outgoing.values() if not out.is_asked]
            for out in unmet:
                del self._outgoing[out.number]
                self._withdrawn[out.peer] += out.is_offered
            for held_back in self._held_back.values():
                held_back.clear()
            idle = [key for key, reassembly in self._landings.items() if not reassembly.filling]
            dropped = [self._landings.pop(key) for key in idle]
        for out in unmet:
            out.request.fail(closed)
        self._inbox.close(closed, closed)
        for reassembly in dropped:
            reassembly.posted.request.fail(closed)
        can_wait = not self._wire.is_own_thread()
        deadline = self._runtime.deadline(self._config.flush_s)
        if can_wait:
            self._wait_until(lambda: not self._outgoing, deadline.at)
        others = [peer for peer in range(self._size) if peer != self._rank and peer not in self._down]
        for peer in others:
            self._send(peer, Head(Kind.BYE))
        if can_wait:
            # Who closes a link with unread bytes may destroy, on its way, what it has just said.
            self._wait_until(
                lambda: all(p in self._farewells or p in self._down for p in others), deadline.at
            )
        self._wire.close()
        with self._lock:
            rest = [reassembly.posted.request for reassembly in self._landings.values()]
            rest += [out.request for out in self._outgoing.values()]
            self._landings.clear()
            self._outgoing.clear()
        for request in rest:
            request.fail(closed)
        for call in self._after_close:
            call()

    def is_forked(self) -> bool:
        """Whether this is a child of the process that it belongs to: threads and locks stayed behind."""
        return os.getpid() != self._pid

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call once the wire is closed: for what must outlive it."""
        self._after_close.append(call)

    # -- what a wire says ---------------------------------------------------------------------------------

    def arrive(self, peer: int, frame: memoryview) -> tuple[memoryview, Callable[[], None]] | None:
        """A frame has come. If its payload follows: where it shall lie, and what to call when it does.

        Raises:
            ProtocolError: it makes no sense; nothing more from this peer can be trusted.
        """
        if len(frame) < _HEAD.size:
            raise ProtocolError(f"a frame of {len(frame)} bytes")
        head = Head(*_HEAD.unpack_from(frame))
        body = frame[_HEAD.size :]
        self._regain(peer, head)
        match head.kind:
            case Kind.EAGER | Kind.OFFER:
                self._hear_message(peer, head, body)
            case Kind.ASK:
                self._hear_ask(peer, head.number)
            case Kind.PIECE:
                return self._hear_piece(peer, head)
            case Kind.LANDED:
                self._hear_landed(peer, head.number)
            case Kind.GONE:
                self._hear_gone(peer, head.number)
            case Kind.WITHDRAW:
                self._hear_withdraw(peer, head.number)
            case Kind.BYE:
                self._send(peer, Head(Kind.FAREWELL))
                self._end(PeerDown(peer, "left", left=True))
            case Kind.FAREWELL:
                with self._lock:
                    self._farewells.add(peer)
                    self._quiet.notify_all()
            case Kind.CREDIT:
                pass
            case _:
                raise ProtocolError(f"a frame of kind {head.kind}")
        return None

    def hear(self, peer: int, frame: memoryview) -> tuple[memoryview, Callable[[], None]] | None:
        """`arrive`, for a wire's own thread: a callback that fails must not make this rank deaf."""
        try:
            return self.arrive(peer, frame)
        except ProtocolError:
            raise
        except Exception:
            _log.exception("rank %d: a callback failed", self._rank)
            return None

    def is_over(self, peer: int) -> bool:
        """Whether a peer has said its last word."""
        return peer in self._farewells or peer in self._down

    def lost(self, peer: int, cause: str) -> None:
        """A peer cannot be heard any more; all that it said has arrived."""
        self._end(PeerDown(peer, cause))

    def broken(self, peer: int, error: ProtocolError) -> None:
        """A peer said what makes no sense."""
        self._end(PeerDown(peer, f"{BROKEN}: {error}"))

    # -- at the sender ------------------------------------------------------------------------------------

    def _send(
        self,
        peer: int,
        head: Head,
        header: bytes = b"",
        data: bytes = b"",
        payload: memoryview | None = None,
    ) -> None:
        with self._lock:
            bulk, control = (self._owed[peer, lane] for lane in (Lane.BULK, Lane.CONTROL))
            self._owed[peer, Lane.BULK] = self._owed[peer, Lane.CONTROL] = 0
        head = head._replace(header_bytes=len(header), credit_bulk=bulk, credit_control=control)
        lane = None if head.kind in (Kind.BYE, Kind.FAREWELL) else Lane(head.lane)
        self._wire.send(peer, _HEAD.pack(*head) + header + data, payload, lane)

    def _send_here(self, request: Request, envelope: Envelope, data: memoryview, sync: bool) -> None:
        """A message to oneself: it could never wait for its own receive, unless it shall."""
        with self._lock:
            error = self._refusal(self._rank)
        if error is not None:
            request.fail(error)
            return
        with self._lock:
            is_kept = not sync and self._own.take(data.nbytes)
        parcel = _Own(self, bytes(data) if is_kept else data, None if is_kept else request)
        request.withdraw_by(lambda _: parcel.take_back())
        if is_kept:
            request.complete()
        self._inbox.arrive(envelope, parcel)

    def withdraw_own(self, parcel: InboundMessage) -> bool:
        """Take a message to oneself back; False if it was received."""
        return self._inbox.withdraw_parcel(parcel)

    def settle_own(self, nbytes: int) -> None:
        """A message to oneself that was kept was received, or never will be."""
        with self._lock:
            self._own.give_back(nbytes)

    def _is_held_back(self, peer: int) -> bool:
        """Whether what is sent now must not overtake what was not offered yet; the caller holds the lock."""
        return bool(self._held_back[peer]) or peer in self._offering

    def _offer_next(self, peer: int) -> None:
        """Offer what was held back, in order, as long as the peer may hold more: one thread at a time."""
        is_mine = False
        while True:
            with self._lock:
                queue = self._held_back[peer]
                is_taken = peer in self._offering and not is_mine
                if is_taken or not queue or self._offers_made[peer] >= OFFERS_MAX:
                    if is_mine:
                        self._offering.discard(peer)
                    return
                is_mine = True
                self._offering.add(peer)
                out = queue.popleft()
                out.is_offered = True
                self._offers_made[peer] += 1
            self._send(peer, _head_of(Kind.OFFER, out.envelope, out.lane, out.number), out.envelope.header)

    def _end_offer(self, out: _Outgoing) -> None:
        """An offer has ended: another may be made; the caller holds the lock."""
        del self._outgoing[out.number]
        if out.is_offered:
            self._offers_made[out.peer] -= 1
        else:
            self._held_back[out.peer].remove(out)

    def _withdraw(self, number: int) -> bool:
        with self._lock:
            out = self._outgoing.get(number)
            if out is None or out.is_asked:
                return False
            self._end_offer(out)
            self._withdrawn[out.peer] += out.is_offered
        if out.is_offered:
            self._send(out.peer, Head(Kind.WITHDRAW, out.lane, number=number))
        out.request.cancelled()
        self._offer_next(out.peer)
        return True

    def _hear_ask(self, peer: int, number: int) -> None:
        with self._lock:
            out = self._outgoing.get(number)
            if out is None:
                # It may have asked before it heard that the offer was taken back: once for each of those.
                self._withdrawn[peer] -= 1
            if self._withdrawn[peer] < 0 or (out is not None and (out.peer != peer or not out.may_be_asked)):
                raise ProtocolError("it asked for what was not offered")
            if out is not None:
                out.is_asked = True
        if out is None:
            self._send(peer, Head(Kind.GONE, number=number))
            return
        nbytes = out.data.nbytes
        for offset in range(0, max(1, nbytes), self.piece_bytes):
            piece = out.data[offset : offset + self.piece_bytes] if nbytes else None
            count = piece.nbytes if piece is not None else 0
            head = Head(Kind.PIECE, number=number, nbytes=count, offset=offset)
            self._send(peer, head, payload=piece)

    def _hear_landed(self, peer: int, number: int) -> None:
        """The receiver says that it has all: before anything else that it says, a goodbye included."""
        with self._lock:
            out = self._outgoing.get(number)
            if out is None or out.peer != peer or not out.is_asked:
                raise ProtocolError("it has what was not sent")
            self._end_offer(out)
            self._quiet.notify_all()
        out.request.complete()
        self._offer_next(peer)

    def _take_credit(self, peer: int, lane: Lane, nbytes: int) -> bool:
        eager_bytes, limit = self._limits[lane]
        cost = nbytes + ENVELOPE_BYTES
        # Nor may it overtake what was not even offered yet.
        if nbytes > eager_bytes or self._used[peer, lane] + cost > limit or self._is_held_back(peer):
            return False
        self._used[peer, lane] += cost
        return True

    def _regain(self, peer: int, head: Head) -> None:
        with self._lock:
            for lane, credit in ((Lane.BULK, head.credit_bulk), (Lane.CONTROL, head.credit_control)):
                self._used[peer, lane] -= credit
                if self._used[peer, lane] < 0:
                    raise ProtocolError("it gave back more credit than was used")

    # -- at the receiver ----------------------------------------------------------------------------------

    def _hear_message(self, peer: int, head: Head, body: memoryview) -> None:
        is_eager = head.kind == Kind.EAGER
        due = head.header_bytes + (head.nbytes if is_eager else 0)
        if len(body) != due or head.header_bytes > HEADER_BYTES_MAX or head.lane not in tuple(Lane):
            raise ProtocolError(f"a message of {head.nbytes} bytes in a frame of {len(body)}")
        if head.nbytes > bytes_max(self._config, head.tag):
            raise ProtocolError(f"a message of {head.nbytes} bytes: longer than any of its kind may be")
        header, lane = bytes(body[: head.header_bytes]), Lane(head.lane)
        envelope = Envelope(peer, head.context, head.tag, head.nbytes, head.dtype, header)
        if is_eager:
            self._hold(peer, lane, head.nbytes)
            self._inbox.arrive(envelope, _Eager(self, peer, lane, bytes(body[head.header_bytes :])))
            return
        parcel, key = _Offered(self, peer, head.number), (peer, head.number)
        with self._lock:
            if key in self._offered or key in self._landings:
                raise ProtocolError(f"it offered message {head.number} twice")
            self._offers_held[peer] += 1
            # Twice: what a peer takes back in one lane may come after what it offers in the other.
            if self._offers_held[peer] > 2 * OFFERS_MAX:
                raise ProtocolError(f"it offered {self._offers_held[peer]} messages; allowed: {OFFERS_MAX}")
            self._offered[key] = parcel
        self._inbox.arrive(envelope, parcel)

    def _hold(self, peer: int, lane: Lane, nbytes: int) -> None:
        """Keep a message that nobody asked for. A correct peer sends no more of them than its credit."""
        eager_bytes, limit = self._limits[lane]
        with self._lock:
            self._held[peer, lane] += nbytes + ENVELOPE_BYTES
            if nbytes > eager_bytes or self._held[peer, lane] > limit:
                raise ProtocolError(f"it sent {self._held[peer, lane]} bytes unasked, its credit is {limit}")

    def owe(self, peer: int, lane: Lane, nbytes: int) -> None:
        """A message has met its receive: its sender may use the credit again."""
        with self._lock:
            self._held[peer, lane] -= nbytes + ENVELOPE_BYTES
            self._owed[peer, lane] += nbytes + ENVELOPE_BYTES
            is_due = self._owed[peer, lane] * 4 >= self._limits[lane][1] and peer not in self._down
        if is_due:
            self._send(peer, Head(Kind.CREDIT))

    def ask(self, peer: int, number: int, posted: Posted, envelope: Envelope) -> None:
        """An offer has met its receive: ask for the bytes."""
        data = None if posted.into is not None else bytearray(envelope.nbytes)
        memory = memoryview(data) if data is not None else posted.into
        assert memory is not None
        if envelope.nbytes:
            memory = memory.cast("B")[: envelope.nbytes]
        reassembly = _Reassembly(posted, envelope, memory, data)
        posted.request.withdraw_by(lambda _: self._let_go(reassembly))
        with self._lock:
            self._take_offer(peer, number)
            error = self._refusal(peer)
            if error is None:
                self._landings[peer, number] = reassembly
        if error is not None:
            posted.request.fail(error)
        else:
            self._send(peer, Head(Kind.ASK, number=number))

    def _hear_piece(self, peer: int, head: Head) -> tuple[memoryview, Callable[[], None]] | None:
        if head.nbytes > self.piece_bytes:
            raise ProtocolError(f"a piece of {head.nbytes} bytes")
        with self._lock:
            reassembly = self._landings.get((peer, head.number))
            if reassembly is not None:
                due = min(self.piece_bytes, reassembly.envelope.nbytes - head.offset)
                if head.offset % self.piece_bytes or head.nbytes != due or head.offset in reassembly.offsets:
                    raise ProtocolError(f"a piece of {head.nbytes} bytes at {head.offset}")
                reassembly.offsets.add(head.offset)
                reassembly.filling += 1
        if reassembly is None:  # its receive ended when this rank was closed
            return (memoryview(bytearray(head.nbytes)), lambda: None) if head.nbytes else None
        if not head.nbytes:
            self._landed(peer, head)
            return None
        part = reassembly.memory[head.offset : head.offset + head.nbytes]
        return part, partial(self._landed, peer, head)

    def _landed(self, peer: int, head: Head) -> None:
        with self._lock:
            reassembly = self._landings.get((peer, head.number))
            if reassembly is None:
                return
            reassembly.filling -= 1
            reassembly.filled += head.nbytes
            is_whole = reassembly.filled == reassembly.envelope.nbytes
            is_dropped = self._is_closed and not is_whole and not reassembly.filling
            if is_whole or is_dropped:
                del self._landings[peer, head.number]
        if is_whole:
            self._send(peer, Head(Kind.LANDED, number=head.number))
            reassembly.posted.request.complete(reassembly.envelope, reassembly.data)
        elif is_dropped:
            reassembly.posted.request.fail(self._closed())

    def _hear_gone(self, peer: int, number: int) -> None:
        with self._lock:
            reassembly = self._landings.pop((peer, number), None)
        if reassembly is None:
            return
        self._inbox.post_again(reassembly.posted)
        with self._lock:
            reassembly.is_posted = True
            is_unwanted = reassembly.is_unwanted
        if is_unwanted:
            reassembly.posted.request.cancel()

    def _let_go(self, reassembly: _Reassembly) -> bool:
        """A receive that met an offer is no longer wanted: it ends with the bytes, or without the offer."""
        with self._lock:
            reassembly.is_unwanted = True
            if not reassembly.is_posted:
                return False
        return reassembly.posted.request.cancel()

    def _hear_withdraw(self, peer: int, number: int) -> None:
        with self._lock:
            parcel = self._take_offer(peer, number)
        if parcel is not None:  # else it has met its receive, and whoever asks hears that it is gone
            self._inbox.withdraw_parcel(parcel)

    def _take_offer(self, peer: int, number: int) -> _Offered | None:
        """An offer of a peer waits no longer; the caller holds the lock."""
        parcel = self._offered.pop((peer, number), None)
        self._offers_held[peer] -= parcel is not None
        return parcel

    # -- endings ------------------------------------------------------------------------------------------

    def _end(self, down: PeerDown) -> None:
        peer = down.rank
        with self._lock:
            if peer in self._down:
                return
            self._down[peer] = down
            keys = [key for key in self._offered if key[0] == peer]
            offered = [self._offered.pop(key) for key in keys]
            landings = [self._landings.pop(key) for key in list(self._landings) if key[0] == peer]
            outgoing = [out for out in self._outgoing.values() if out.peer == peer]
            for out in outgoing:
                del self._outgoing[out.number]
            self._held_back[peer].clear()
            listeners = list(self._listeners)
            self._quiet.notify_all()
        for parcel in offered:
            # Its bytes will never come, so it is no message that could still be received.
            self._inbox.withdraw_parcel(parcel)
        self._inbox.peer_down(down)
        for reassembly in landings:
            reassembly.posted.request.fail(down.error())
        for out in outgoing:
            out.request.fail(down.error())
        for listener in listeners:
            listener(down)

    def _refusal(self, peer: int) -> UnisonoError | None:
        """Why nothing can go to a peer any more, if so; the caller holds the lock."""
        if self._is_closed:
            return self._closed()
        return self._down[peer].error() if peer in self._down else None

    def _closed(self) -> ClosedError:
        return ClosedError(f"rank {self._rank} is closed")

    def _wait_until(self, is_so: Callable[[], bool], until: float | None) -> None:
        with self._quiet:
            while not is_so():
                left = None if until is None else until - self._runtime.now()
                if left is not None and left <= 0:
                    return
                self._quiet.wait(left)


def _failed(peer: int | Any_) -> Request:
    """A request that a forked child asked for."""
    request = Request(peer)
    request.fail(
        ClosedError("this communicator belongs to the parent process", next_step="make a new one after fork")
    )
    return request


@dataclass(slots=True)
class _Outgoing:
    """A message that is to be offered, or was, and waits or is on its way."""

    number: int
    peer: int
    lane: Lane
    data: memoryview
    request: Request
    envelope: Envelope
    is_offered: bool = False
    is_asked: bool = False

    @property
    def may_be_asked(self) -> bool:
        return self.is_offered and not self.is_asked


@dataclass(slots=True)
class _Reassembly:
    """A receive whose bytes are under way: `filling` of its pieces are being written into its memory.

    `offsets` are those of the pieces that have come, in any order.

    If the offer was taken back meanwhile, it is posted again; `is_unwanted` if somebody tried to cancel it.
    """

    posted: Posted
    envelope: Envelope
    memory: memoryview
    data: bytearray | None
    offsets: set[int] = field(default_factory=set)
    filled: int = 0
    filling: int = 0
    is_unwanted: bool = False
    is_posted: bool = False


class _Eager(InboundMessage):
    """A message that came whole."""

    def __init__(self, backend: FramedBackend, peer: int, lane: Lane, data: bytes) -> None:
        self._backend, self._peer, self._lane, self._data = backend, peer, lane, data

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        self._backend.owe(self._peer, self._lane, envelope.nbytes)
        _fill(posted, envelope, self._data)

    def refuse(self, error: UnisonoError) -> None:
        """Its sender's part has ended long ago."""

    def is_whole(self) -> bool:
        return True

    def drop(self) -> None:
        self._backend.owe(self._peer, self._lane, len(self._data))


class _Offered(InboundMessage):
    """A message whose bytes are still at its sender."""

    def __init__(self, backend: FramedBackend, peer: int, number: int) -> None:
        self._backend, self._peer, self._number = backend, peer, number

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        self._backend.ask(self._peer, self._number, posted, envelope)

    def refuse(self, error: UnisonoError) -> None:
        """Its sender hears a goodbye."""


class _Own(InboundMessage):
    """A message to oneself; `request` is the sender's, if it waits."""

    def __init__(self, backend: FramedBackend, data: bytes | memoryview, request: Request | None) -> None:
        self._backend, self._data, self._request = backend, data, request

    def deliver(self, posted: Posted, envelope: Envelope) -> None:
        if self._request is None:
            self._backend.settle_own(envelope.nbytes)
        if posted.into is not None:
            posted.into.cast("B")[: envelope.nbytes] = self._data if envelope.nbytes else b""
        taken = bytearray(self._data) if posted.into is None else None
        # The bytes are out of the sender's memory by now.
        if self._request is not None:
            self._request.complete()
        posted.request.complete(envelope, taken)

    def refuse(self, error: UnisonoError) -> None:
        if self._request is not None:
            self._request.fail(error)

    def is_whole(self) -> bool:
        return self._request is None

    def drop(self) -> None:
        self._backend.settle_own(len(self._data))

    def take_back(self) -> bool:
        if self._request is None or not self._backend.withdraw_own(self):
            return False
        self._request.cancelled()
        return True


def _fill(posted: Posted, envelope: Envelope, data: bytes) -> None:
    if posted.into is None:
        posted.request.complete(envelope, bytearray(data))
        return
    if envelope.nbytes:
        posted.into.cast("B")[: envelope.nbytes] = data
    posted.request.complete(envelope)


def _head_of(kind: Kind, envelope: Envelope, lane: Lane, number: int = 0) -> Head:
    return Head(
        kind,
        lane,
        envelope.dtype,
        number=number,
        context=envelope.context,
        tag=envelope.tag,
        nbytes=envelope.nbytes,
    )

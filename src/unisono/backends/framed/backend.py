"""The backend contract over a FrameTransport: eager messages under credit, rendezvous, goodbyes.

A message travels eagerly, with its bytes, if it is short and the credit allows. Otherwise its envelope goes
first (RTS), and the bytes follow in pieces when a receive has matched it (CTS) until the receiver confirms
them (FIN). Bytes of a rendezvous lie in the users' memory at both ends.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from unisono.backends.framed.frames import Head, Kind, head_of, parse
from unisono.backends.framed.messages import (
    EagerMessage,
    OwnMessage,
    Reassembly,
    RendezvousSend,
    RtsMessage,
)
from unisono.backends.framed.transport import FrameTransport
from unisono.backends.registry import Closable
from unisono.config import Config
from unisono.core.clock import Runtime
from unisono.core.envelope import HEADER_BYTES_MAX, UNTYPED, Any_, Envelope, Lane
from unisono.core.request import Request
from unisono.errors import ClosedError, ProtocolError, UnisonoError
from unisono.messaging.backend import BROKEN, PeerDown
from unisono.messaging.credit import ENVELOPE_BYTES, RTS_MAX, OwnCredit, bytes_max, eager_limits
from unisono.messaging.inbox import Inbox
from unisono.messaging.matching import Posted

__all__ = ["FramedBackend"]

_log = logging.getLogger("unisono.backend")


class FramedBackend(Closable):
    """A backend over a transport, which a subclass sets as `_transport`."""

    # Length of a piece of a rendezvous: 4 MiB delay what waits behind a piece by some milliseconds at most.
    piece_bytes = 4 << 20

    _transport: FrameTransport

    def __init__(self, rank: int, size: int, config: Config, runtime: Runtime) -> None:
        self._rank = rank
        self._size = size
        self._pid = os.getpid()
        self._config = config
        self._runtime = runtime
        self._inbox = Inbox(rank, config.recv_bytes_max)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._rendezvous_ids = itertools.count(1)
        self._sends: dict[int, RendezvousSend] = {}
        self._rts_received: dict[tuple[int, int], RtsMessage] = {}
        self._reassemblies: dict[tuple[int, int], Reassembly] = {}
        lanes = [(peer, lane) for peer in range(size) for lane in Lane]
        self._credit_used = dict.fromkeys(lanes, 0)  # of ours, at a peer
        self._credit_owed = dict.fromkeys(lanes, 0)  # of a peer, to return with the next frame
        self._eager_held = dict.fromkeys(lanes, 0)  # bytes of a peer's eager messages that wait here
        self._own_credit = OwnCredit(config)
        # Our RTS by peer: those without a FIN, those not sent yet, and how many were withdrawn once sent.
        self._rts_outstanding = dict.fromkeys(range(size), 0)
        self._rts_queued: dict[int, deque[RendezvousSend]] = {peer: deque() for peer in range(size)}
        self._rts_withdrawn = dict.fromkeys(range(size), 0)
        self._rts_sending: set[int] = set()  # peers whose queue a thread is working on
        # RTS of each peer that wait here for a receive.
        self._rts_held = dict.fromkeys(range(size), 0)
        self._limits = {lane: eager_limits(config, lane) for lane in Lane}
        self._down: dict[int, PeerDown] = {}
        self._listeners: list[Callable[[PeerDown], None]] = []
        self._is_closed = False
        self._goodbye_acks: set[int] = set()
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
        """Send eagerly if the message is short and the credit allows, otherwise by rendezvous."""
        self.check_peer(dst, "dst")
        self.check_length(tag, data.nbytes, header)
        if self.is_forked():
            return _failed(dst)
        request = Request(dst)
        envelope = Envelope(self._rank, context, tag, data.nbytes, dtype, header)
        payload = data.cast("B") if data.nbytes else data
        if dst == self._rank:
            self._send_here(request, envelope, payload, sync)
            return request
        with self._lock:
            error = self._send_error(dst)
            rendezvous_id = 0
            if error is None and (sync or not self._take_credit(dst, lane, data.nbytes)):
                rendezvous_id = next(self._rendezvous_ids)
                out = RendezvousSend(rendezvous_id, dst, lane, payload, request, envelope)
                self._sends[rendezvous_id] = out
                if self._must_queue(dst) or self._rts_outstanding[dst] >= RTS_MAX:
                    self._rts_queued[dst].append(out)
                else:
                    out.is_rts_sent = True
                    self._rts_outstanding[dst] += 1
        if error is not None:
            request.fail(error)
        elif rendezvous_id:
            request.withdraw_by(lambda _: self._withdraw(rendezvous_id))
            if out.is_rts_sent:
                self._send(dst, head_of(Kind.RTS, envelope, lane, rendezvous_id), header)
            self._send_queued_rts(dst)
        else:
            self._send(dst, head_of(Kind.EAGER, envelope, lane), header, bytes(payload))
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
        """Drop messages that no receive will match any more."""
        self._inbox.end_context(context)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Notify the listener of every rank that is down or goes down."""
        with self._lock:
            if not self._is_closed:
                self._listeners.append(listener)
            known = list(self._down.values())
        for down in known:
            listener(down)

    def close(self) -> None:
        """Leave: finish sends that have a CTS, withdraw the others, and say goodbye to all ranks."""
        closed = self._closed()
        if self.is_forked():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._listeners.clear()
            unmatched = [out for out in self._sends.values() if not out.has_cts]
            for out in unmatched:
                del self._sends[out.rendezvous_id]
                self._rts_withdrawn[out.peer] += out.is_rts_sent
            for queue in self._rts_queued.values():
                queue.clear()
            idle = [key for key, reassembly in self._reassemblies.items() if not reassembly.filling]
            dropped = [self._reassemblies.pop(key) for key in idle]
        for out in unmatched:
            out.request.fail(closed)
        self._inbox.close(closed, closed)
        for reassembly in dropped:
            reassembly.posted.request.fail(closed)
        can_wait = not self._transport.is_own_thread()
        deadline = self._runtime.deadline(self._config.flush_s)
        if can_wait:
            self._wait_until(lambda: not self._sends, deadline.at)
        others = [peer for peer in range(self._size) if peer != self._rank and peer not in self._down]
        for peer in others:
            self._send(peer, Head(Kind.GOODBYE))
        if can_wait:
            # Closing a socket with unread bytes may reset it, and destroy the goodbye on its way.
            self._wait_until(
                lambda: all(p in self._goodbye_acks or p in self._down for p in others), deadline.at
            )
        self._transport.close()
        with self._lock:
            rest = [reassembly.posted.request for reassembly in self._reassemblies.values()]
            rest += [out.request for out in self._sends.values()]
            self._reassemblies.clear()
            self._sends.clear()
        for request in rest:
            request.fail(closed)
        for call in self._after_close:
            call()

    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that made it: threads and locks stayed behind."""
        return os.getpid() != self._pid

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call once the transport is closed: for resources that must outlive it."""
        self._after_close.append(call)

    # -- called by the transport --------------------------------------------------------------------------

    def arrive(self, peer: int, frame: memoryview) -> tuple[memoryview, Callable[[], None]] | None:
        """Handle a frame of a peer.

        Returns None, or if a payload follows: the memory for it, and a function to call when it is filled.

        Raises:
            ProtocolError: the frame is invalid; pass the error to `broken`.
        """
        head, body = parse(frame)
        self._regain_credit(peer, head)
        match head.kind:
            case Kind.EAGER | Kind.RTS:
                self._on_message(peer, head, body)
            case Kind.CTS:
                self._on_cts(peer, head.rendezvous_id)
            case Kind.DATA:
                return self._on_data(peer, head)
            case Kind.FIN:
                self._on_fin(peer, head.rendezvous_id)
            case Kind.RTS_GONE:
                self._on_rts_gone(peer, head.rendezvous_id)
            case Kind.WITHDRAW:
                self._on_withdraw(peer, head.rendezvous_id)
            case Kind.GOODBYE:
                self._send(peer, Head(Kind.GOODBYE_ACK))
                self._peer_down(PeerDown(peer, "left", left=True))
            case Kind.GOODBYE_ACK:
                with self._lock:
                    self._goodbye_acks.add(peer)
                    self._changed.notify_all()
            case Kind.CREDIT:
                pass
            case _:
                raise ProtocolError(f"a frame of unknown kind {head.kind}")
        return None

    def arrive_logged(self, peer: int, frame: memoryview) -> tuple[memoryview, Callable[[], None]] | None:
        """`arrive` for a transport's own thread, which goes on if a callback raises: the error is logged."""
        try:
            return self.arrive(peer, frame)
        except ProtocolError:
            raise
        except Exception:
            _log.exception("rank %d: a callback failed", self._rank)
            return None

    def is_over(self, peer: int) -> bool:
        """Whether nothing more comes from a peer."""
        return peer in self._goodbye_acks or peer in self._down

    def lost(self, peer: int, cause: str) -> None:
        """Nothing more can arrive from a peer, and all that had arrived was passed on."""
        self._peer_down(PeerDown(peer, cause))

    def broken(self, peer: int, error: ProtocolError) -> None:
        """A peer broke the protocol: nothing more from it can be trusted."""
        self._peer_down(PeerDown(peer, f"{BROKEN}: {error}"))

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
            bulk, control = (self._credit_owed[peer, lane] for lane in (Lane.BULK, Lane.CONTROL))
            self._credit_owed[peer, Lane.BULK] = self._credit_owed[peer, Lane.CONTROL] = 0
        head = head._replace(header_bytes=len(header), credit_bulk=bulk, credit_control=control)
        lane = None if head.kind in (Kind.GOODBYE, Kind.GOODBYE_ACK) else Lane(head.lane)
        self._transport.send(peer, head.packed() + header + data, payload, lane)

    def _send_here(self, request: Request, envelope: Envelope, data: memoryview, sync: bool) -> None:
        """Send to this rank itself. It keeps a copy: a blocking send could never reach its own receive."""
        with self._lock:
            error = self._send_error(self._rank)
        if error is not None:
            request.fail(error)
            return
        with self._lock:
            is_kept = not sync and self._own_credit.take(data.nbytes)
        message = OwnMessage(
            bytes(data) if is_kept else data,
            None if is_kept else request,
            partial(self._return_own_credit, data.nbytes),
        )
        request.withdraw_by(lambda _: self._withdraw_own(message))
        if is_kept:
            request.complete()
        self._inbox.arrive(envelope, message)

    def _withdraw_own(self, message: OwnMessage) -> bool:
        if message.request is None or not self._inbox.withdraw_message(message):
            return False
        message.request.cancelled()
        return True

    def _return_own_credit(self, nbytes: int) -> None:
        with self._lock:
            self._own_credit.give_back(nbytes)

    def _must_queue(self, peer: int) -> bool:
        """Whether a message must queue behind RTS that were not sent yet; the caller holds the lock."""
        return bool(self._rts_queued[peer]) or peer in self._rts_sending

    def _send_queued_rts(self, peer: int) -> None:
        """Send queued RTS in order while the peer may hold more; one thread at a time."""
        is_mine = False
        while True:
            with self._lock:
                queue = self._rts_queued[peer]
                is_taken = peer in self._rts_sending and not is_mine
                if is_taken or not queue or self._rts_outstanding[peer] >= RTS_MAX:
                    if is_mine:
                        self._rts_sending.discard(peer)
                    return
                is_mine = True
                self._rts_sending.add(peer)
                out = queue.popleft()
                out.is_rts_sent = True
                self._rts_outstanding[peer] += 1
            self._send(
                peer, head_of(Kind.RTS, out.envelope, out.lane, out.rendezvous_id), out.envelope.header
            )

    def _end_send(self, out: RendezvousSend) -> None:
        """A rendezvous has ended: another RTS may be sent; the caller holds the lock."""
        del self._sends[out.rendezvous_id]
        if out.is_rts_sent:
            self._rts_outstanding[out.peer] -= 1
        else:
            self._rts_queued[out.peer].remove(out)

    def _withdraw(self, rendezvous_id: int) -> bool:
        with self._lock:
            out = self._sends.get(rendezvous_id)
            if out is None or out.has_cts:
                return False
            self._end_send(out)
            self._rts_withdrawn[out.peer] += out.is_rts_sent
        if out.is_rts_sent:
            self._send(out.peer, Head(Kind.WITHDRAW, out.lane, rendezvous_id=rendezvous_id))
        out.request.cancelled()
        self._send_queued_rts(out.peer)
        return True

    def _on_cts(self, peer: int, rendezvous_id: int) -> None:
        with self._lock:
            out = self._sends.get(rendezvous_id)
            if out is None:
                # A CTS may cross a withdrawal: one CTS for each withdrawn RTS is valid.
                self._rts_withdrawn[peer] -= 1
            if self._rts_withdrawn[peer] < 0 or (
                out is not None and (out.peer != peer or not out.awaits_cts)
            ):
                raise ProtocolError("a CTS without an RTS")
            if out is not None:
                out.has_cts = True
        if out is None:
            self._send(peer, Head(Kind.RTS_GONE, rendezvous_id=rendezvous_id))
            return
        nbytes = out.data.nbytes
        for offset in range(0, max(1, nbytes), self.piece_bytes):
            piece = out.data[offset : offset + self.piece_bytes] if nbytes else None
            count = piece.nbytes if piece is not None else 0
            head = Head(Kind.DATA, rendezvous_id=rendezvous_id, nbytes=count, offset=offset)
            self._send(peer, head, payload=piece)

    def _on_fin(self, peer: int, rendezvous_id: int) -> None:
        """The receiver has all bytes. This comes before anything else that it sends, a goodbye included."""
        with self._lock:
            out = self._sends.get(rendezvous_id)
            if out is None or out.peer != peer or not out.has_cts:
                raise ProtocolError("a FIN for a message that was not sent")
            self._end_send(out)
            self._changed.notify_all()
        out.request.complete()
        self._send_queued_rts(peer)

    def _take_credit(self, peer: int, lane: Lane, nbytes: int) -> bool:
        eager_bytes, limit = self._limits[lane]
        cost = nbytes + ENVELOPE_BYTES
        # An eager message must not overtake a queued RTS.
        if nbytes > eager_bytes or self._credit_used[peer, lane] + cost > limit or self._must_queue(peer):
            return False
        self._credit_used[peer, lane] += cost
        return True

    def _regain_credit(self, peer: int, head: Head) -> None:
        with self._lock:
            for lane, credit in ((Lane.BULK, head.credit_bulk), (Lane.CONTROL, head.credit_control)):
                self._credit_used[peer, lane] -= credit
                if self._credit_used[peer, lane] < 0:
                    raise ProtocolError("it returned more credit than was used")

    # -- at the receiver ----------------------------------------------------------------------------------

    def _on_message(self, peer: int, head: Head, body: memoryview) -> None:
        is_eager = head.kind == Kind.EAGER
        expected = head.header_bytes + (head.nbytes if is_eager else 0)
        if len(body) != expected or head.header_bytes > HEADER_BYTES_MAX or head.lane not in tuple(Lane):
            raise ProtocolError(f"a message of {head.nbytes} bytes in a frame of {len(body)}")
        if head.nbytes > bytes_max(self._config, head.tag):
            raise ProtocolError(f"a message of {head.nbytes} bytes is longer than any may be")
        header, lane = bytes(body[: head.header_bytes]), Lane(head.lane)
        envelope = Envelope(peer, head.context, head.tag, head.nbytes, head.dtype, header)
        if is_eager:
            self._count_eager(peer, lane, head.nbytes)
            data = bytes(body[head.header_bytes :])
            return_credit = partial(self._return_credit, peer, lane, head.nbytes)
            self._inbox.arrive(envelope, EagerMessage(data, return_credit))
            return
        key = (peer, head.rendezvous_id)
        message = RtsMessage(partial(self._on_match, *key))
        with self._lock:
            if key in self._rts_received or key in self._reassemblies:
                raise ProtocolError(f"a second RTS with id {head.rendezvous_id}")
            self._rts_held[peer] += 1
            # Twice the limit: a withdrawal in one lane may arrive after a later RTS in the other.
            if self._rts_held[peer] > 2 * RTS_MAX:
                raise ProtocolError(f"it has sent {self._rts_held[peer]} RTS; allowed: {RTS_MAX}")
            self._rts_received[key] = message
        self._inbox.arrive(envelope, message)

    def _count_eager(self, peer: int, lane: Lane, nbytes: int) -> None:
        """Count an eager message against its sender's credit, which a correct peer never exceeds."""
        eager_bytes, limit = self._limits[lane]
        with self._lock:
            self._eager_held[peer, lane] += nbytes + ENVELOPE_BYTES
            if nbytes > eager_bytes or self._eager_held[peer, lane] > limit:
                held = self._eager_held[peer, lane]
                raise ProtocolError(f"it sent {held} bytes of eager messages; its credit is {limit}")

    def _return_credit(self, peer: int, lane: Lane, nbytes: int) -> None:
        """An eager message was received: its sender may use the credit again."""
        with self._lock:
            self._eager_held[peer, lane] -= nbytes + ENVELOPE_BYTES
            self._credit_owed[peer, lane] += nbytes + ENVELOPE_BYTES
            is_due = self._credit_owed[peer, lane] * 4 >= self._limits[lane][1] and peer not in self._down
        if is_due:
            self._send(peer, Head(Kind.CREDIT))

    def _on_match(self, peer: int, rendezvous_id: int, posted: Posted, envelope: Envelope) -> None:
        """A receive has matched an RTS: send the CTS."""
        data = None if posted.into is not None else bytearray(envelope.nbytes)
        memory = memoryview(data) if data is not None else posted.into
        assert memory is not None
        if envelope.nbytes:
            memory = memory.cast("B")[: envelope.nbytes]
        reassembly = Reassembly(posted, envelope, memory, data)
        posted.request.withdraw_by(lambda _: self._cancel_receive(reassembly))
        with self._lock:
            self._forget_rts(peer, rendezvous_id)
            error = self._send_error(peer)
            if error is None:
                self._reassemblies[peer, rendezvous_id] = reassembly
        if error is not None:
            posted.request.fail(error)
        else:
            self._send(peer, Head(Kind.CTS, rendezvous_id=rendezvous_id))

    def _on_data(self, peer: int, head: Head) -> tuple[memoryview, Callable[[], None]] | None:
        if head.nbytes > self.piece_bytes:
            raise ProtocolError(f"a piece of {head.nbytes} bytes; allowed: {self.piece_bytes}")
        with self._lock:
            reassembly = self._reassemblies.get((peer, head.rendezvous_id))
            if reassembly is not None:
                expected = min(self.piece_bytes, reassembly.envelope.nbytes - head.offset)
                is_again = head.offset in reassembly.offsets
                if head.offset % self.piece_bytes or head.nbytes != expected or is_again:
                    raise ProtocolError(f"a wrong or repeated piece of {head.nbytes} bytes at {head.offset}")
                reassembly.offsets.add(head.offset)
                reassembly.filling += 1
        if reassembly is None:  # the receive ended when this rank was closed: discard the bytes
            return (memoryview(bytearray(head.nbytes)), lambda: None) if head.nbytes else None
        if not head.nbytes:
            self._on_payload(peer, head)
            return None
        part = reassembly.memory[head.offset : head.offset + head.nbytes]
        return part, partial(self._on_payload, peer, head)

    def _on_payload(self, peer: int, head: Head) -> None:
        with self._lock:
            reassembly = self._reassemblies.get((peer, head.rendezvous_id))
            if reassembly is None:
                return
            reassembly.filling -= 1
            reassembly.filled += head.nbytes
            is_complete = reassembly.filled == reassembly.envelope.nbytes
            is_dropped = self._is_closed and not is_complete and not reassembly.filling
            if is_complete or is_dropped:
                del self._reassemblies[peer, head.rendezvous_id]
        if is_complete:
            self._send(peer, Head(Kind.FIN, rendezvous_id=head.rendezvous_id))
            reassembly.posted.request.complete(reassembly.envelope, reassembly.data)
        elif is_dropped:
            reassembly.posted.request.fail(self._closed())

    def _on_rts_gone(self, peer: int, rendezvous_id: int) -> None:
        with self._lock:
            reassembly = self._reassemblies.pop((peer, rendezvous_id), None)
        if reassembly is None:
            return
        self._inbox.post_again(reassembly.posted)
        with self._lock:
            reassembly.is_posted = True
            is_unwanted = reassembly.is_unwanted
        if is_unwanted:
            reassembly.posted.request.cancel()

    def _cancel_receive(self, reassembly: Reassembly) -> bool:
        """Cancel a receive that has sent a CTS: possible once its RTS was withdrawn and it was reposted."""
        with self._lock:
            reassembly.is_unwanted = True
            if not reassembly.is_posted:
                return False
        return reassembly.posted.request.cancel()

    def _on_withdraw(self, peer: int, rendezvous_id: int) -> None:
        with self._lock:
            message = self._forget_rts(peer, rendezvous_id)
        if message is not None:  # else a receive has matched it, and RTS_GONE will answer the CTS
            self._inbox.withdraw_message(message)

    def _forget_rts(self, peer: int, rendezvous_id: int) -> RtsMessage | None:
        """An RTS of a peer no longer waits for a receive; the caller holds the lock."""
        message = self._rts_received.pop((peer, rendezvous_id), None)
        self._rts_held[peer] -= message is not None
        return message

    # -- the end of a peer or of this rank ----------------------------------------------------------------

    def _peer_down(self, down: PeerDown) -> None:
        peer = down.rank
        with self._lock:
            if peer in self._down:
                return
            self._down[peer] = down
            keys = [key for key in self._rts_received if key[0] == peer]
            unmatched = [self._rts_received.pop(key) for key in keys]
            reassemblies = [self._reassemblies.pop(key) for key in list(self._reassemblies) if key[0] == peer]
            sends = [out for out in self._sends.values() if out.peer == peer]
            for out in sends:
                del self._sends[out.rendezvous_id]
            self._rts_queued[peer].clear()
            listeners = list(self._listeners)
            self._changed.notify_all()
        for message in unmatched:
            # Its bytes will never come, so it can no longer be received.
            self._inbox.withdraw_message(message)
        self._inbox.peer_down(down)
        for reassembly in reassemblies:
            reassembly.posted.request.fail(down.error())
        for out in sends:
            out.request.fail(down.error())
        for listener in listeners:
            listener(down)

    def _send_error(self, peer: int) -> UnisonoError | None:
        """The error of a send to a peer that is down, or after `close`; the caller holds the lock."""
        if self._is_closed:
            return self._closed()
        return self._down[peer].error() if peer in self._down else None

    def _closed(self) -> ClosedError:
        return ClosedError(f"rank {self._rank} is closed")

    def _wait_until(self, condition: Callable[[], bool], until: float | None) -> None:
        with self._changed:
            while not condition():
                left = None if until is None else until - self._runtime.now()
                if left is not None and left <= 0:
                    return
                self._changed.wait(left)


def _failed(peer: int | Any_) -> Request:
    """A failed request, for a forked child."""
    request = Request(peer)
    request.fail(
        ClosedError("this communicator belongs to the parent process", next_step="make a new one after fork")
    )
    return request

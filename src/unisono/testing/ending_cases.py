"""Cases about endings: a rank that leaves, what the others hear of it, and what they still get.

Knows what the contract promises when a rank closes. Does not know how a backend finds out.
"""

from __future__ import annotations

from unisono.core.envelope import ANY
from unisono.errors import ClosedError, PeerLost
from unisono.testing.case import Suite
from unisono.testing.seat import Downs, Seat, payload

__all__ = ["SUITE"]

SUITE = Suite()


@SUITE.case(size=3)
def requests_to_a_closed_peer_fail(seat: Seat) -> None:
    """Who waits for a rank that leaves gets PeerLost with its number; so does who begins later."""
    news = Downs(seat.backend)
    if seat.rank == 1:
        seat.meet()
        seat.backend.close()
        return
    waiting = {
        "a receive": seat.recv(1, tag=1),
        "a receive into a buffer": seat.recv(1, seat.buffer(8), tag=2),
        "a probe": seat.probe(1, tag=3),
        "a send that waits for its receive": seat.send(
            1, payload(seat.rank, 0, max(seat.eager_bytes, seat.credit_bytes) + 1), tag=4
        ),
    }
    seat.meet()
    for what, request in waiting.items():
        error = seat.failed(request, PeerLost, f"{what} of a rank that leaves")
        seat.equal(error.ranks, (1,), f"the lost ranks of {what}")
    seat.told(news, 1)
    late = {
        "a receive": seat.recv(1, tag=1),
        "a probe": seat.probe(1, tag=3),
        "a short send": seat.send(1, b"x", tag=5),
        "an empty send": seat.send(1, b"", tag=5),
        "a long send": seat.send(1, payload(seat.rank, 1, seat.eager_bytes + 1), tag=6),
    }
    for what, request in late.items():
        error = seat.failed(request, PeerLost, f"{what} of a rank that has left")
        seat.equal(error.ranks, (1,), f"the lost ranks of {what}")
    peer = 2 - seat.rank
    send = seat.send(peer, payload(seat.rank, 2, 100), tag=7)
    seat.take(peer, payload(peer, 2, 100), "a message between those who stay", tag=7)
    seat.done(send, "a send between those who stay")


@SUITE.case(size=2)
def messages_outlive_their_sender(seat: Seat) -> None:
    """What a rank sent before it left stays receivable, in order; only then PeerLost."""
    lengths = seat.eager_lengths(0, 3, 1021, seat.eager_bytes // 2)
    if seat.rank == 1:
        sends = [seat.send(0, payload(1, i, n), tag=i % 2) for i, n in enumerate(lengths)]
        seat.all_done(sends, "a send under the credit")
        seat.backend.close()
        return
    seat.told(Downs(seat.backend), 1)
    if lengths:
        seat.equal(seat.got(seat.probe(1, tag=0), "a probe").nbytes, lengths[0], "the length of what is left")
    for tag in (1, 0):
        for i in range(tag, len(lengths), 2):
            seat.take(1, payload(1, i, lengths[i]), f"message {i} of a rank that has left", tag=tag)
    seat.failed(seat.recv(1, tag=0), PeerLost, "a receive when nothing is left")


@SUITE.case(size=3, needs=["wildcards"])
def wildcards_outlive_a_peer(seat: Seat) -> None:
    """A receive or probe for ANY goes on when a rank leaves: another may serve it."""
    if seat.rank == 1:
        seat.meet()
        seat.backend.close()
        return
    news = Downs(seat.backend)
    posted = seat.recv(ANY, tag=1) if seat.rank == 0 else None
    seat.meet()
    seat.told(news, 1)
    if posted is None:
        seat.done(seat.send(0, b"from two", tag=1), "a send")
        seat.done(seat.send(0, b"again", tag=1), "a send")
        return
    seat.equal(seat.got(posted, "a receive from ANY").source, 2, "who served it")
    seat.equal(bytes(posted.data or b""), b"from two", "what it got")
    seat.equal(seat.got(seat.probe(ANY, tag=1), "a probe for ANY").source, 2, "who served the probe")
    seat.take(ANY, b"again", "the second message", tag=1)


@SUITE.case(size=3)
def watch_tells_once(seat: Seat) -> None:
    """A watch tells of every rank that leaves, once, whether it came before or after; it says who left."""
    early, twin = Downs(seat.backend), Downs(seat.backend)
    seat.meet()
    if seat.rank == 2:
        seat.backend.close()
        return
    down = seat.told(early, 2)
    seat.check(down.left, "a rank that closed is said to have left", repr(down))
    seat.check(bool(down.cause), "the news names a cause", repr(down))
    seat.told(twin, 2)
    late = Downs(seat.backend)
    seat.told(late, 2)
    if seat.rank == 1:
        seat.done(seat.send(0, b"", tag=1), "a send")
        seat.backend.close()
        return
    seat.take(1, b"", "the last message", tag=1)
    for news in (early, twin, late):
        seat.told(news, 1)
        told = {rank: len(downs) for rank, downs in news.told.items()}
        seat.equal(told, {1: 1, 2: 1}, "how often each rank was told to be down")


@SUITE.case(size=2)
def close_ends_everything_here(seat: Seat) -> None:
    """Closing ends all requests here with ClosedError, pending or begun later; twice does no harm."""
    large = max(seat.eager_bytes, seat.credit_bytes) + 1
    if seat.rank == 1:
        seat.meet()
        error = seat.failed(seat.recv(0, tag=9), PeerLost, "a receive from the rank that closed")
        seat.equal(error.ranks, (0,), "the lost ranks")
        return
    pending = {
        "a receive": seat.recv(1, tag=1),
        "a receive into a buffer": seat.recv(1, seat.buffer(9), tag=2),
        "a probe": seat.probe(1, tag=3),
        "a send that waits for its receive": seat.send(1, payload(0, 0, large), tag=4),
        "a receive from oneself": seat.recv(0, tag=5),
    }
    if seat.backend.capabilities.wildcards:
        pending["a receive from ANY"] = seat.recv(ANY, tag=ANY)
        pending["a probe for ANY"] = seat.probe(ANY, tag=6)
    if seat.backend.capabilities.sync_send:
        pending["a sync send"] = seat.send(1, b"sync", tag=7, sync=True)
    seat.meet()
    seat.backend.close()
    seat.backend.close()
    for what, request in pending.items():
        seat.failed(request, ClosedError, f"{what} that was pending at the close")
        seat.check(not request.cancel(), "cancel of an ended request returns False")
    late = {
        "a receive": seat.recv(1, tag=1),
        "a probe": seat.probe(1, tag=1),
        "a send": seat.send(1, b"x", tag=1),
        "a send to oneself": seat.send(0, b"x", tag=1),
    }
    for what, request in late.items():
        seat.failed(request, ClosedError, f"{what} begun after the close")
    seat.backend.close()


@SUITE.case(size=3)
def all_may_leave_at_once(seat: Seat) -> None:
    """Ranks that have what they need may close without waiting for the others."""
    after, before = (seat.rank + 1) % seat.size, (seat.rank - 1) % seat.size
    nbytes = seat.eager_bytes + 1
    receive, buffer = None, seat.buffer(nbytes)
    if seat.rank:
        receive = seat.recv(before, buffer, tag=0)
    send = seat.send(after, payload(seat.rank, 0, nbytes), tag=0)
    envelope = seat.got(receive or seat.recv(before, buffer, tag=0), "the message from the left")
    seat.check_filled(envelope, buffer, payload(before, 0, nbytes), "the message from the left")
    seat.done(send, "the send to the right")
    seat.backend.close()

"""Cases about endings: a rank that closes its backend, and what the other ranks see and still receive.

The first line of each docstring is the promise that the case checks.
"""

from __future__ import annotations

from unisono.core.envelope import ANY
from unisono.errors import ClosedError, PeerLost
from unisono.testing.case import Suite
from unisono.testing.case_rank import CaseRank, PeerDownLog, payload

__all__ = ["SUITE"]

SUITE = Suite()


@SUITE.case(size=3)
def requests_to_a_closed_peer_fail(me: CaseRank) -> None:
    """Requests to a rank that closes end with PeerLost, which names it; so do requests started later."""
    downs = PeerDownLog(me.backend)
    if me.rank == 1:
        me.barrier()
        me.backend.close()
        return
    waiting = {
        "a receive": me.recv(1, tag=1),
        "a receive into a buffer": me.recv(1, me.buffer(8), tag=2),
        "a probe": me.probe(1, tag=3),
        "a send that waits for its receive": me.send(
            1, payload(me.rank, 0, max(me.eager_bytes, me.credit_bytes) + 1), tag=4
        ),
    }
    me.barrier()
    for what, request in waiting.items():
        error = me.wait_failed(request, PeerLost, f"{what} of a rank that leaves")
        me.check_equal(error.ranks, (1,), f"the lost ranks of {what}")
    me.wait_down(downs, 1)
    late = {
        "a receive": me.recv(1, tag=1),
        "a probe": me.probe(1, tag=3),
        "a short send": me.send(1, b"x", tag=5),
        "an empty send": me.send(1, b"", tag=5),
        "a long send": me.send(1, payload(me.rank, 1, me.eager_bytes + 1), tag=6),
    }
    for what, request in late.items():
        error = me.wait_failed(request, PeerLost, f"{what} of a rank that has left")
        me.check_equal(error.ranks, (1,), f"the lost ranks of {what}")
    peer = 2 - me.rank
    send = me.send(peer, payload(me.rank, 2, 100), tag=7)
    me.expect(peer, payload(peer, 2, 100), "a message between the remaining ranks", tag=7)
    me.wait_done(send, "a send between the remaining ranks")


@SUITE.case(size=2)
def messages_outlive_their_sender(me: CaseRank) -> None:
    """Messages that a rank sent before it closed can be received, in order; after them comes PeerLost."""
    lengths = me.eager_lengths(0, 3, 1021, me.eager_bytes // 2)
    if me.rank == 1:
        sends = [me.send(0, payload(1, i, n), tag=i % 2) for i, n in enumerate(lengths)]
        me.wait_all_done(sends, "a send under the credit")
        me.backend.close()
        return
    me.wait_down(PeerDownLog(me.backend), 1)
    if lengths:
        me.check_equal(
            me.wait_envelope(me.probe(1, tag=0), "a probe").nbytes, lengths[0], "the length of what is left"
        )
    for tag in (1, 0):
        for i in range(tag, len(lengths), 2):
            me.expect(1, payload(1, i, lengths[i]), f"message {i} of a rank that has left", tag=tag)
    me.wait_failed(me.recv(1, tag=0), PeerLost, "a receive when nothing is left")


@SUITE.case(size=3, needs=["wildcards"])
def wildcards_outlive_a_peer(me: CaseRank) -> None:
    """A receive or probe for ANY stays pending when one rank closes: another rank can match it."""
    if me.rank == 1:
        me.barrier()
        me.backend.close()
        return
    downs = PeerDownLog(me.backend)
    posted = me.recv(ANY, tag=1) if me.rank == 0 else None
    me.barrier()
    me.wait_down(downs, 1)
    if posted is None:
        me.wait_done(me.send(0, b"from two", tag=1), "a send")
        me.wait_done(me.send(0, b"again", tag=1), "a send")
        return
    me.check_equal(me.wait_envelope(posted, "a receive from ANY").source, 2, "the rank that it matched")
    me.check_equal(bytes(posted.data or b""), b"from two", "what it got")
    me.check_equal(
        me.wait_envelope(me.probe(ANY, tag=1), "a probe for ANY").source, 2, "the rank that the probe matched"
    )
    me.expect(ANY, b"again", "the second message", tag=1)


@SUITE.case(size=3)
def watch_reports_once(me: CaseRank) -> None:
    """A watch reports every rank that closes, once, whether it was added before or after."""
    early, twin = PeerDownLog(me.backend), PeerDownLog(me.backend)
    me.barrier()
    if me.rank == 2:
        me.backend.close()
        return
    down = me.wait_down(early, 2)
    me.check(down.left, "a rank that closed is reported as left", repr(down))
    me.check(bool(down.cause), "the report names a cause", repr(down))
    me.wait_down(twin, 2)
    late = PeerDownLog(me.backend)
    me.wait_down(late, 2)
    if me.rank == 1:
        me.wait_done(me.send(0, b"", tag=1), "a send")
        me.backend.close()
        return
    me.expect(1, b"", "the last message", tag=1)
    for log in (early, twin, late):
        me.wait_down(log, 1)
        counts = {rank: len(reports) for rank, reports in log.reports.items()}
        me.check_equal(counts, {1: 1, 2: 1}, "the number of reports for each rank")


@SUITE.case(size=2)
def close_ends_everything_here(me: CaseRank) -> None:
    """Closing ends all requests of this rank with ClosedError, pending or later; closing twice is fine."""
    large = max(me.eager_bytes, me.credit_bytes) + 1
    if me.rank == 1:
        me.barrier()
        error = me.wait_failed(me.recv(0, tag=9), PeerLost, "a receive from the rank that closed")
        me.check_equal(error.ranks, (0,), "the lost ranks")
        return
    pending = {
        "a receive": me.recv(1, tag=1),
        "a receive into a buffer": me.recv(1, me.buffer(9), tag=2),
        "a probe": me.probe(1, tag=3),
        "a send that waits for its receive": me.send(1, payload(0, 0, large), tag=4),
        "a receive from oneself": me.recv(0, tag=5),
    }
    if me.backend.capabilities.wildcards:
        pending["a receive from ANY"] = me.recv(ANY, tag=ANY)
        pending["a probe for ANY"] = me.probe(ANY, tag=6)
    if me.backend.capabilities.sync_send:
        pending["a sync send"] = me.send(1, b"sync", tag=7, sync=True)
    me.barrier()
    me.backend.close()
    me.backend.close()
    for what, request in pending.items():
        me.wait_failed(request, ClosedError, f"{what} that was pending at the close")
        me.check(not request.cancel(), "cancel of an ended request returns False")
    late = {
        "a receive": me.recv(1, tag=1),
        "a probe": me.probe(1, tag=1),
        "a send": me.send(1, b"x", tag=1),
        "a send to oneself": me.send(0, b"x", tag=1),
    }
    for what, request in late.items():
        me.wait_failed(request, ClosedError, f"{what} begun after the close")
    me.backend.close()


@SUITE.case(size=3)
def all_may_leave_at_once(me: CaseRank) -> None:
    """A rank whose requests have ended can close without waiting for the other ranks."""
    after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    nbytes = me.eager_bytes + 1
    receive, buffer = None, me.buffer(nbytes)
    if me.rank:
        receive = me.recv(before, buffer, tag=0)
    send = me.send(after, payload(me.rank, 0, nbytes), tag=0)
    envelope = me.wait_envelope(receive or me.recv(before, buffer, tag=0), "the message from the left")
    me.check_filled(envelope, buffer, payload(before, 0, nbytes), "the message from the left")
    me.wait_done(send, "the send to the right")
    me.backend.close()

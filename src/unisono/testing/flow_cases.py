"""Cases about the flow of messages: credit, large messages, sync sends, sends to oneself, many threads.

The first line of each docstring is the promise that the case checks.
"""

from __future__ import annotations

import threading

from unisono.core.envelope import ANY, Lane
from unisono.messaging.credit import ENVELOPE_BYTES, OWN_CREDIT_BYTES
from unisono.testing.case import Suite
from unisono.testing.case_rank import CONTEXT, CaseRank, payload

__all__ = ["SUITE"]

SUITE = Suite()

_MIB = 1 << 20


@SUITE.case(size=1)
def a_rank_sends_to_itself(me: CaseRank) -> None:
    """A send to oneself ends before its receive is posted, whatever its length."""
    lengths = (0, 9, me.eager_bytes + 1, me.credit_bytes + 1, 12 * _MIB + 1)
    for i, n in enumerate(lengths):
        data = bytearray(payload(0, i, n))
        request = me.send(0, memoryview(data), tag=i)
        me.wait_done(request, f"a send of {n} bytes to oneself before its receive is posted")
        data[:] = bytes(n)  # the send has ended, so the buffer may change
    for i, n in reversed(list(enumerate(lengths))):
        me.expect(0, payload(0, i, n), f"the message of {n} bytes to oneself", tag=i)
    early = me.recv(0, tag=9)
    me.wait_done(me.send(0, b"later", tag=9), "a send to oneself after its receive")
    me.check_equal(bytes(me.wait_done(early, "that receive").data or b""), b"later", "the message to oneself")


@SUITE.case(size=1)
def messages_to_oneself_are_bounded(me: CaseRank) -> None:
    """Unreceived messages to oneself are buffered up to a bound; beyond it a send waits for its receive."""
    n = 8 * _MIB
    count = max(OWN_CREDIT_BYTES, me.credit_bytes) // n + 4
    data = [bytes([i]) * n for i in (1, 2)] * count
    sends = [me.send(0, memoryview(each), tag=i) for i, each in enumerate(data[:count])]
    me.wait_done(sends[0], "the first send to oneself")
    kept = sum(request.done for request in sends)
    bound = max(OWN_CREDIT_BYTES, me.credit_bytes) // n
    me.check(0 < kept <= bound, f"1 to {bound} sends of 8 MiB to oneself end unreceived", f"{kept} do")
    me.check(sends[-1].cancel(), "a send to oneself that waits can be withdrawn")
    for i in reversed(range(count - 1)):
        buffer = me.buffer(n)
        me.wait_envelope(me.recv(0, buffer, tag=i), f"message {i} to oneself")
        me.check_equal(bytes(buffer), data[i], f"message {i} to oneself")
    me.wait_all_done(sends[:-1], "a send to oneself that was received")
    me.wait_done(me.send(0, memoryview(data[0]), tag=99), "a send to oneself when there is space again")
    me.expect(0, data[0], "the last message to oneself", tag=99)


@SUITE.case(size=2)
def large_messages_cross_in_any_order(me: CaseRank) -> None:
    """Large messages can be received in another order of tags: an unmatched one does not block a lane."""
    n, order = 12 * _MIB + 5, (2, 0, 1)
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, n), tag=i) for i in range(3)]
        me.barrier()
        me.wait_all_done(sends, "a send of 12 MiB")
    else:
        me.barrier()
        for i in order:
            me.expect(0, payload(0, i, n), f"the message of 12 MiB with tag {i}", tag=i)


@SUITE.case(size=2)
def large_messages_cross_both_ways(me: CaseRank) -> None:
    """Two ranks can send each other large messages at the same time, with or without posted receives."""
    n, peer = 3 * _MIB + 1, 1 - me.rank
    early = me.buffer(n)
    request = me.recv(peer, early, tag=0)
    sends = [me.send(peer, payload(me.rank, i, n), tag=i) for i in range(2)]
    me.check_filled(
        me.wait_envelope(request, "the first"), early, payload(peer, 0, n), "the first large message"
    )
    me.expect(peer, payload(peer, 1, n), "the second large message", tag=1)
    me.wait_all_done(sends, "a large send")


@SUITE.case(size=2)
def buffers_are_free_when_sends_end(me: CaseRank) -> None:
    """Once a send has ended, changing its buffer does not change the message."""
    lengths = me.eager_lengths(1, 100, me.eager_bytes)
    if me.rank == 0:
        for i, n in enumerate(lengths):
            data = bytearray(payload(0, i, n))
            me.wait_done(me.send(1, memoryview(data), tag=i), f"a send of {n} bytes under the credit")
            data[:] = bytes(n)
        me.barrier()
    else:
        me.barrier()
        for i, n in enumerate(lengths):
            me.expect(0, payload(0, i, n), f"the message of {n} bytes", tag=i)


@SUITE.case(size=2)
def unmatched_payload_is_bounded(me: CaseRank) -> None:
    """Unreceived sends end only up to the credit; when they are received, all arrive, in order."""
    piece = max(1, me.eager_bytes)
    limit = me.credit_bytes + piece
    count = 4 * limit // piece + 4
    for turn in range(2):  # twice, because credit must come back
        if me.rank == 0:
            sends = [me.send(1, payload(turn, i, piece), tag=turn) for i in range(count)]
            me.barrier()
            ended = sum(request.done for request in sends) * piece
            me.check(
                ended <= limit,
                f"at most {limit} bytes of sends end before any receive (the credit and one message)",
                f"{ended} of {count * piece} bytes did",
            )
            me.barrier()
            me.wait_all_done(sends, "a send that was received at last")
            me.barrier()
            last = [me.send(1, payload(turn, 0, n), tag=9) for n in me.eager_lengths(piece)]
            me.wait_all_done(last, "a short send after the credit has come back")
            me.barrier()
        else:
            me.barrier()
            me.barrier()
            for i in range(count):
                me.expect(0, payload(turn, i, piece), f"message {i} of the flood", tag=turn)
            me.barrier()
            me.barrier()
            for n in me.eager_lengths(piece):
                me.expect(0, payload(turn, 0, n), "the short message after the flood", tag=9)


@SUITE.case(size=2)
def an_ended_context_holds_no_credit(me: CaseRank) -> None:
    """Unreceived messages return their credit when their context ends; later ones of it at once."""
    piece = min(4096, me.eager_bytes)
    count = me.credit_bytes // (piece + ENVELOPE_BYTES) // 3
    for turn in range(9):
        context, is_late = CONTEXT + 1 + turn, turn % 2 == 1
        if me.rank == 1 and is_late:
            me.backend.end_group(context)
        me.barrier()
        if me.rank == 0:
            sends = [me.send(1, payload(turn, i, piece), tag=i, context=context) for i in range(count)]
            me.wait_all_done(sends, f"a send in context {turn}, after the credit of those before came back")
        me.barrier()
        if me.rank == 1:
            me.backend.end_group(context)
            me.check(not me.probe(0, tag=0, context=context).done, "nothing is queued in an ended context")
    me.barrier()
    if me.rank == 0:
        me.wait_done(me.send(1, payload(0, 0, piece), tag=1), "a send in another context")
    else:
        me.expect(0, payload(0, 0, piece), "the message in another context", tag=1)


@SUITE.case(size=3)
def a_full_pair_blocks_no_other(me: CaseRank) -> None:
    """A pair without credit blocks neither other ranks, nor the other direction, nor the control lane."""
    piece = max(1, me.eager_bytes)
    count = 2 * (me.credit_bytes // piece) + 2
    if me.rank == 0:
        flood = [me.send(1, payload(0, i, piece), tag=0) for i in range(count)]
        me.wait_done(me.send(2, payload(0, 1, piece + 1), tag=1), "a send to a third rank")
        control = me.send(1, b"control", tag=2, lane=Lane.CONTROL)
        me.expect(1, payload(1, 2, piece + 1), "the message on the way back", tag=3)
        me.wait_done(control, "a send on the control lane")
        me.wait_all_done(flood, "a send of the flood")
    elif me.rank == 1:
        me.expect(0, b"control", "the message on the control lane", tag=2)
        me.wait_done(me.send(0, payload(1, 2, piece + 1), tag=3), "a send on the way back")
        for i in range(count):
            me.expect(0, payload(0, i, piece), f"message {i} of the flood", tag=0)
    else:
        me.expect(0, payload(0, 1, piece + 1), "the message to a third rank", tag=1)


@SUITE.case(size=2, needs=["sync_send"])
def sync_sends_end_when_matched(me: CaseRank) -> None:
    """A sync send ends when its message has matched a receive, not before; a probe does not count."""
    lengths = (0, 10, me.eager_bytes, me.eager_bytes + 1)
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, n), tag=i, sync=True) for i, n in enumerate(lengths)]
        me.barrier()
        me.barrier()
        early = [lengths[i] for i, request in enumerate(sends) if request.done]
        me.check(not early, "no sync send ends before its receive", f"those of {early} bytes did")
        me.barrier()
        me.wait_all_done(sends, "a sync send that was matched")
        back = me.send(1, b"gone", tag=7, sync=True)
        me.barrier()
        me.check(back.cancel(), "an unmatched sync send can be withdrawn")
        me.barrier()
        me.barrier()
    else:
        me.barrier()
        for i, n in enumerate(lengths):
            me.check_equal(
                me.wait_envelope(me.probe(0, tag=i), "a probe").nbytes, n, "the length that a probe shows"
            )
        me.barrier()
        me.barrier()
        for i, n in enumerate(lengths):
            me.expect(0, payload(0, i, n), f"the sync message of {n} bytes", tag=i)
        me.barrier()
        me.barrier()
        probe = me.probe(0, tag=7)
        me.check(not probe.done, "a withdrawn message is gone", "it is still there")
        me.check(probe.cancel(), "a waiting probe can be withdrawn")
        me.barrier()


@SUITE.case(size=1, needs=["sync_send"])
def sync_sends_to_oneself_wait(me: CaseRank) -> None:
    """A sync send to oneself waits for its receive, too."""
    request = me.send(0, b"me", tag=1, sync=True)
    me.check(not request.done, "a sync send to oneself waits for its receive", "it is done")
    me.expect(0, b"me", "the message to oneself", tag=1)
    me.wait_done(request, "the sync send")


@SUITE.case(size=2, needs=["threads"])
def threads_share_a_rank(me: CaseRank) -> None:
    """Several threads can start requests at once; the messages of each thread keep their order."""
    peer, turns, failures = 1 - me.rank, 40, []

    def exchange(tag: int) -> None:
        try:
            for i in range(turns):
                n = me.eager_bytes + tag if i % 10 == tag else 10 + i
                send = me.send(peer, payload(me.rank * 8 + tag, i, n), tag=tag)
                me.expect(peer, payload(peer * 8 + tag, i, n), f"message {i} of thread {tag}", tag=tag)
                me.wait_done(send, f"send {i} of thread {tag}")
        except AssertionError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=exchange, args=(tag,), daemon=True) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(me.time_left_s + 1)
    if failures:
        raise failures[0]
    me.check(not any(thread.is_alive() for thread in threads), "all threads end", "one hangs")


@SUITE.case(size=3, needs=["threads", "wildcards"])
def threads_share_wildcards(me: CaseRank) -> None:
    """Receives from ANY on several threads receive every message exactly once."""
    per_rank, taken, failures = 60, [], []
    if me.rank:
        sends = [me.send(0, payload(me.rank, i, 8), tag=i % 3) for i in range(per_rank)]
        me.wait_all_done(sends, "a send")
        return

    def take() -> None:
        try:
            for _ in range(2 * per_rank // 3):
                request = me.wait_done(me.recv(ANY, tag=ANY), "a receive from ANY")
                taken.append(bytes(request.data or b""))
        except AssertionError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=take, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(me.time_left_s + 1)
    if failures:
        raise failures[0]
    expected = sorted(bytes(payload(rank, i, 8)) for rank in (1, 2) for i in range(per_rank))
    me.check(sorted(taken) == expected, "every message is taken once", "some are missing or doubled")

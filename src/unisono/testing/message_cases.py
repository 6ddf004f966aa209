"""Cases about messages: bytes, order, wildcards, probes, refusals and cancelled requests.

The first line of each docstring is the promise that the case checks.
"""

from __future__ import annotations

import mmap

from unisono.core.dtypes import DTYPES
from unisono.core.envelope import ANY, HEADER_BYTES_MAX, TAG_MAX, UNTYPED, Any_, Tags
from unisono.core.request import Request
from unisono.errors import ClosedError, UsageError
from unisono.testing.case import Suite
from unisono.testing.case_rank import CONTEXT, CaseRank, payload

__all__ = ["SUITE"]

SUITE = Suite()

_OTHER_CONTEXT = CONTEXT ^ (1 << 63)  # differs in the highest bit only
_NOT_USERS = (Tags.collective(0, 0), Tags.collective(7, 3), Tags.CONTROL)


def _lengths(me: CaseRank) -> list[int]:
    """Empty, odd and even lengths, and both sides of every limit that a backend may have."""
    limits = (1, 8, 4096, me.eager_bytes, me.credit_bytes, 65536)
    near_limits = {limit + step for limit in limits for step in (-1, 0, 1)}
    return sorted({0, 1021, (1 << 20) + 3, *(n for n in near_limits if n >= 0)})


@SUITE.case(size=3)
def ranks_know_their_numbers(me: CaseRank) -> None:
    """Every rank has a number of its own, below the size, and all agree on the numbers."""
    backend = me.backend
    me.check(0 <= backend.rank < backend.size == 3, "rank is below size, which is 3", f"{backend.rank}")
    me.check(bool(backend.capabilities.name), "the backend has a name")
    hosts = backend.hosts()
    me.check(len(hosts) in (0, backend.size), "hosts() is empty or has a number per rank", repr(hosts))
    peers = [rank for rank in range(3) if rank != backend.rank]
    sends = [me.send(peer, bytes([me.rank, me.size])) for peer in peers]
    for peer in peers:
        request = me.wait_done(me.recv(peer), f"a receive from rank {peer}")
        me.check_equal(bytes(request.data or b""), bytes([peer, me.size]), f"what rank {peer} says it is")
    me.wait_all_done(sends, "a send")


@SUITE.case(size=2)
def ranks_that_do_not_exist_are_refused(me: CaseRank) -> None:
    """A rank that does not exist raises UsageError in the call, before anything is sent."""
    for call in (me.send, me.recv, me.probe):
        for rank in (2, -1, 1 << 40, True, 1.0, "0", None):
            me.check_raises(UsageError, f"{call.__name__} with rank {rank!r}", call, rank)
    me.check_raises(UsageError, "a send to ANY", me.send, ANY)


@SUITE.case(size=3)
def bytes_arrive_as_they_were_sent(me: CaseRank) -> None:
    """Messages of every length between all pairs arrive complete and write only their part of the buffer."""
    lengths = _lengths(me)
    peers = [rank for rank in range(me.size) if rank != me.rank]
    buffers = {(p, i): me.buffer(n + 5) for p in peers for i, n in enumerate(lengths)}
    receives = {(p, i): me.recv(p, buffer, tag=i) for (p, i), buffer in buffers.items()}
    sends = [
        me.send(peer, payload(me.rank * 10 + peer, i, n), tag=i)
        for i, n in enumerate(lengths)
        for peer in peers
    ]
    for (peer, i), request in receives.items():
        what = f"the message of {lengths[i]} bytes from rank {peer}"
        envelope = me.wait_envelope(request, what)
        me.check_equal((envelope.source, envelope.tag), (peer, i), f"source and tag of {what}")
        me.check_filled(envelope, buffers[peer, i], payload(peer * 10 + me.rank, i, lengths[i]), what)
    me.wait_all_done(sends, "a send")


@SUITE.case(size=2)
def receives_may_come_late(me: CaseRank) -> None:
    """A message waits for a receive that is posted later, whatever the order of tags."""
    lengths = _lengths(me)
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, n), tag=i) for i, n in enumerate(lengths)]
        me.barrier()
        me.wait_all_done(sends, "a send that waits for its receive")
    else:
        me.barrier()
        for i, n in reversed(list(enumerate(lengths))):
            me.expect(0, payload(0, i, n), f"the waiting message of {n} bytes", tag=i)


@SUITE.case(size=2)
def lengths_need_not_be_known(me: CaseRank) -> None:
    """A receive without a buffer returns as many bytes as the message has."""
    lengths = [0, 1, 1021, me.eager_bytes + 1, me.credit_bytes + 1]
    early = [me.recv(0, tag=0) for _ in lengths] if me.rank == 1 else []
    me.barrier()
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, n), tag=t) for t in (0, 1) for i, n in enumerate(lengths)]
        me.barrier()
        me.wait_all_done(sends, "a send")
        return
    for i, (n, request) in enumerate(zip(lengths, early, strict=True)):
        me.wait_done(request, f"a receive of {n} bytes, posted early")
        me.check_equal(bytes(request.data or b""), bytes(payload(0, i, n)), f"the message of {n} bytes")
    me.barrier()
    for i, n in enumerate(lengths):
        request = me.wait_done(me.recv(0, tag=1), f"a receive of {n} bytes, posted late")
        me.check_equal(
            bytes(request.data or b""), bytes(payload(0, i, n)), f"the waiting message of {n} bytes"
        )


@SUITE.case(size=2)
def messages_keep_their_order(me: CaseRank) -> None:
    """Messages with the same tag match receives in the order of the sends, eager and rendezvous mixed."""
    short, long = 5, me.eager_bytes + 6
    lengths = [short if i % 7 else long for i in range(60)]
    tags = (0, 3, TAG_MAX)
    if me.rank == 0:
        sends = [me.send(1, payload(t, i, n), tag=tags[t]) for i, n in enumerate(lengths) for t in range(3)]
        me.barrier()
        me.wait_all_done(sends, "a send")
        return
    posted = [(i, me.buffer(long)) for i in range(20)]
    early = [(i, buffer, me.recv(0, buffer, tag=tags[1])) for i, buffer in posted]
    me.barrier()
    for t in (2, 0):
        for i, n in enumerate(lengths):
            me.expect(0, payload(t, i, n), f"message {i} with tag {tags[t]}", tag=tags[t])
    for i, buffer, request in early:
        envelope = me.wait_envelope(request, f"early receive {i}")
        expected = payload(1, i, lengths[i])
        me.check_filled(envelope, buffer[: len(expected)], expected, f"message {i} in early receive {i}")
    for i, n in list(enumerate(lengths))[20:]:
        me.expect(0, payload(1, i, n), f"message {i} with tag {tags[1]}", tag=tags[1])


@SUITE.case(size=4, needs=["wildcards"])
def any_source_takes_from_all(me: CaseRank) -> None:
    """A receive from ANY matches messages of every rank, each rank's in order, and reports the source."""
    per_rank = 15
    if me.rank:
        lengths = [me.eager_bytes + 1 if i % 5 == 4 else 16 + i for i in range(per_rank)]
        sends = [me.send(0, payload(me.rank, i, n), tag=5) for i, n in enumerate(lengths)]
        me.wait_all_done(sends, "a send")
        return
    seen = dict.fromkeys(range(1, me.size), 0)
    for _ in range(per_rank * (me.size - 1)):
        request = me.recv(ANY, tag=5)
        source = me.wait_envelope(request, "a receive from ANY").source
        me.check(source in seen, f"the source is one of {list(seen)}", repr(source))
        data = bytes(request.data or b"")
        expected = bytes(payload(source, seen[source], len(data)))
        me.check_equal(data, expected, f"message {seen[source]} of rank {source}")
        seen[source] += 1
    me.check_equal(set(seen.values()), {per_rank}, "the number of messages from each rank")


@SUITE.case(size=2, needs=["wildcards"])
def any_tag_takes_in_order(me: CaseRank) -> None:
    """A receive with tag ANY matches the messages of a rank in the order of its sends, whatever the tags."""
    tags = [9, 0, TAG_MAX, 4, 9, 1, 0, 9]
    lengths = [me.eager_bytes + 1 if i in (1, 4) else 7 * i for i in range(len(tags))]
    if me.rank == 0:
        sends = [
            me.send(1, payload(0, i, n), tag=t) for i, (t, n) in enumerate(zip(tags, lengths, strict=True))
        ]
        me.wait_all_done(sends, "a send")
        return
    for i, (tag, n) in enumerate(zip(tags, lengths, strict=True)):
        envelope = me.expect(0, payload(0, i, n), f"message {i}, received by tag ANY", tag=ANY)
        me.check_equal(envelope.tag, tag, f"the tag of message {i}")


@SUITE.case(size=2, needs=["wildcards"])
def any_tag_matches_users_only(me: CaseRank) -> None:
    """A receive or probe with tag ANY never matches messages of collectives or control messages."""
    probe = me.probe(ANY, tag=ANY) if me.rank else None
    receive = me.recv(0, tag=ANY) if me.rank else None
    me.barrier()
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, 33), tag=tag) for i, tag in enumerate(_NOT_USERS)]
        me.barrier()
        me.barrier()
        sends.append(me.send(1, b"user", tag=6))
        me.barrier()
        me.wait_all_done(sends, "a send")
        return
    assert receive is not None
    assert probe is not None
    me.barrier()
    me.check(not receive.done, "tag ANY does not match collective or control messages", "it did")
    me.check(not probe.done, "a probe with tag ANY does not see collective or control messages", "it did")
    me.barrier()
    me.check_equal(me.wait_envelope(receive, "a receive with tag ANY").tag, 6, "the tag that ANY matched")
    me.check_equal(me.wait_envelope(probe, "a probe with tag ANY").tag, 6, "the tag that a probe for ANY saw")
    again = me.recv(0, tag=ANY)
    me.check(not again.done, "tag ANY does not match collective messages that wait", "it did")
    me.check(again.cancel(), "an unmatched receive can be withdrawn")
    me.barrier()
    for i, tag in enumerate(_NOT_USERS):
        me.expect(0, payload(0, i, 33), f"the message with tag {tag:#x}", tag=tag)


@SUITE.case(size=2, needs=["wildcards"])
def receives_are_served_as_posted(me: CaseRank) -> None:
    """A message matches the first posted receive that fits it, wildcard or not."""
    patterns: list[tuple[int | Any_, int | Any_]] = [(ANY, 4), (0, 4), (0, ANY), (0, 4), (ANY, ANY)]
    posted = [me.recv(src, tag=tag) for src, tag in patterns] if me.rank else []
    me.barrier()
    if me.rank == 0:
        me.wait_all_done([me.send(1, payload(0, i, 20 + i), tag=4) for i in range(5)], "a send")
    for i, request in enumerate(posted):
        me.wait_done(request, f"receive {i}")
        me.check_equal(bytes(request.data or b""), bytes(payload(0, i, 20 + i)), f"what receive {i} matched")


@SUITE.case(size=2)
def contexts_and_tags_never_mix(me: CaseRank) -> None:
    """A message matches only receives of its own context and tag, even if numbers differ in one bit."""
    tags = [0, 1, 1 << 16, TAG_MAX, Tags.collective(0, 0), Tags.collective(1 << 20, 15), Tags.CONTROL]
    contexts = [0, 1, CONTEXT, _OTHER_CONTEXT, CONTEXT ^ (1 << 32)]
    pairs = [(context, tag) for context in contexts for tag in tags]
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, 64), context=c, tag=t) for i, (c, t) in enumerate(pairs)]
        me.wait_all_done(sends, "a send")
        return
    for i, (context, tag) in reversed(list(enumerate(pairs))):
        what = f"the message with tag {tag:#x} in context {context:#x}"
        envelope = me.expect(0, payload(0, i, 64), what, context=context, tag=tag)
        me.check_equal((envelope.context, envelope.tag), (context, tag), f"the envelope of {what}")


@SUITE.case(size=2)
def headers_and_types_arrive(me: CaseRank) -> None:
    """Header and dtype arrive with every message, eager or rendezvous, and a probe shows them, too."""
    parts = [
        (n, header, code)
        for n in (0, 8, me.eager_bytes + 8)
        for header, code in ((b"", UNTYPED), (b"\0one\xff", 3), (bytes(payload(0, 1, HEADER_BYTES_MAX)), 11))
    ]
    if me.rank == 0:
        sends = [
            me.send(1, payload(0, i, n), tag=i, header=header, dtype=code)
            for i, (n, header, code) in enumerate(parts)
        ]
        me.wait_all_done(sends, "a send")
        return
    for i, (n, header, code) in enumerate(parts):
        buffer = me.buffer(n)
        seen = me.wait_envelope(me.probe(0, tag=i), f"a probe for message {i}")
        matched = me.wait_envelope(me.recv(0, buffer, tag=i, dtype=code), f"message {i}")
        me.check_filled(matched, buffer, payload(0, i, n), f"message {i}")
        me.check_equal((matched.dtype, matched.header), (code, header), f"dtype and header of message {i}")
        me.check_equal(seen, matched, f"what a probe shows of message {i}")


@SUITE.case(size=2)
def probes_take_nothing(me: CaseRank) -> None:
    """A probe ends when a matching message is queued, shows its envelope and leaves it for a receive."""
    for n in (12, me.eager_bytes + 12):
        early = me.probe(0, tag=1) if me.rank else None
        me.barrier()
        if me.rank == 0:
            me.wait_all_done([me.send(1, payload(0, i, n + i), tag=1) for i in range(2)], "a send")
            me.barrier()
            continue
        assert early is not None
        first = me.wait_envelope(early, "a probe that was there before the message")
        again = me.probe(0, tag=1)
        me.check(again.done, "a probe for a message that waits is done at once")
        for envelope in (
            first,
            me.wait_envelope(again, "a second probe"),
            me.wait_envelope(me.probe(0, tag=1), "a third"),
        ):
            me.check_equal((envelope.source, envelope.tag, envelope.nbytes), (0, 1, n), "what a probe shows")
        for i in range(2):
            me.expect(0, payload(0, i, n + i), f"message {i} after the probes", tag=1)
        empty = me.probe(0, tag=1)
        me.check(not empty.done, "a probe with nothing there waits", "it is done")
        me.check(empty.cancel(), "a waiting probe can be withdrawn")
        me.wait_failed(empty, ClosedError, "a withdrawn probe")
        me.barrier()


@SUITE.case(size=2, needs=["wildcards"])
def wildcard_probes_see_all(me: CaseRank) -> None:
    """A probe for ANY shows the next message, and a receive with its source and tag gets that message."""
    early = me.probe(ANY, tag=ANY) if me.rank else None
    me.barrier()
    if me.rank == 0:
        me.wait_all_done([me.send(1, payload(0, 0, 77), tag=31)], "a send")
        return
    assert early is not None
    for request in (early, me.probe(ANY, tag=ANY), me.probe(0, tag=ANY), me.probe(ANY, tag=31)):
        envelope = me.wait_envelope(request, "a probe for ANY")
        me.check_equal(
            (envelope.source, envelope.tag, envelope.nbytes), (0, 31, 77), "what a probe for ANY shows"
        )
    me.expect(0, payload(0, 0, 77), "the message that the probes showed", tag=31)


@SUITE.case(size=2)
def too_long_is_refused_and_stays(me: CaseRank) -> None:
    """A message longer than the buffer ends that receive with UsageError and stays queued for the next."""
    for n in (40, me.eager_bytes + 40):
        early = me.recv(0, me.buffer(n - 1), tag=2) if me.rank else None
        me.barrier()
        if me.rank == 0:
            me.wait_all_done([me.send(1, payload(0, i, n + i), tag=2) for i in range(2)], "a send")
            continue
        assert early is not None
        me.wait_failed(early, UsageError, "a receive that is one byte too short, posted early")
        for nbytes in (n - 1, 0):
            buffer = me.buffer(nbytes)
            me.wait_failed(me.recv(0, buffer, tag=2), UsageError, f"a receive of {nbytes} bytes for {n}")
            me.check_equal(bytes(buffer), bytes(me.buffer(nbytes)), "a buffer that was too short")
        for i in range(2):
            me.expect(0, payload(0, i, n + i), f"message {i}, refused before", tag=2, spare=0)


@SUITE.case(size=2)
def unknown_lengths_are_bounded(me: CaseRank) -> None:
    """A receive without a buffer refuses more than `recv_bytes_max` before it allocates memory."""
    config = me.backend.config
    n = config.recv_bytes_max + 1
    if n > config.message_bytes_max:
        return
    early = me.recv(0, tag=2) if me.rank else None
    me.barrier()
    if me.rank == 0:
        # Memory that is never touched costs nothing.
        sent = me.send(1, memoryview(mmap.mmap(-1, n)), tag=2)
        me.barrier()
        me.check(sent.cancel(), "a send that was refused can still be withdrawn")
        me.barrier()
        me.wait_done(me.send(1, b"short", tag=2), "a short send after it")
        return
    assert early is not None
    for request, when in ((early, "early"), (me.recv(ANY, tag=ANY), "late")):
        error = me.wait_failed(
            request, UsageError, f"a receive of unknown length for {n} bytes, posted {when}"
        )
        me.check("recv_bytes_max" in str(error), "the error names the setting", str(error))
    me.check_equal(
        me.wait_envelope(me.probe(0, tag=2), "a probe").nbytes, n, "the message, which stays queued,"
    )
    me.barrier()
    me.barrier()
    me.expect(0, b"short", "the message after it", tag=2)


@SUITE.case(size=2)
def another_type_is_refused_and_stays(me: CaseRank) -> None:
    """A message of another dtype ends that receive with UsageError and stays queued; bytes match all."""
    float32, int32, byte = (DTYPES[name].code for name in ("float32", "int32", "uint8"))
    early = me.recv(0, me.buffer(64), tag=0, dtype=int32) if me.rank else None
    me.barrier()
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, 64), dtype=float32, tag=i) for i in range(4)]
        sends += [me.send(1, payload(0, i, 64), dtype=code, tag=i) for i, code in ((4, UNTYPED), (5, byte))]
        me.wait_all_done(sends, "a send")
        return
    assert early is not None
    me.wait_failed(early, UsageError, "a receive of int32 for float32, posted early")
    late = me.recv(0, me.buffer(64), tag=0, dtype=int32)
    me.wait_failed(late, UsageError, "a receive of int32 for float32, posted late")
    for tag, code in ((0, float32), (1, UNTYPED), (2, byte), (3, float32), (4, int32), (5, int32)):
        buffer, what = me.buffer(64), f"message {tag}, received as type {code}"
        envelope = me.wait_envelope(me.recv(0, buffer, tag=tag, dtype=code), what)
        me.check_filled(envelope, buffer, payload(0, tag, 64), what)


@SUITE.case(size=2)
def receives_can_be_withdrawn(me: CaseRank) -> None:
    """A cancelled receive ends with ClosedError and leaves its message to the next receive."""
    if me.rank == 0:
        me.barrier()
        for i in range(2):
            me.wait_done(me.send(1, payload(0, i, 50), tag=8), f"send {i}")
        return
    buffers = [me.buffer(53) for _ in range(3)]
    posted = [me.recv(0, buffer, tag=8) for buffer in buffers]
    me.check(posted[0].cancel(), "cancel of a waiting receive returns True")
    me.wait_failed(posted[0], ClosedError, "a cancelled receive")
    me.check(not posted[0].cancel(), "cancel of an ended receive returns False")
    me.barrier()
    for i, request in enumerate(posted[1:]):
        envelope = me.wait_envelope(request, f"receive {i + 1}")
        me.check_filled(envelope, buffers[i + 1], payload(0, i, 50), f"message {i}")
        me.check(not request.cancel(), "cancel of an ended receive returns False")
    me.check_equal(bytes(buffers[0]), bytes(me.buffer(53)), "the buffer of the cancelled receive")


@SUITE.case(size=2)
def sends_can_be_withdrawn(me: CaseRank) -> None:
    """A send that is cancelled before a receive matches ends with ClosedError and is never received."""
    nbytes = max(me.eager_bytes, me.credit_bytes) + 1
    if me.rank == 0:
        request = me.send(1, payload(0, 0, nbytes), tag=8)
        me.barrier()
        me.check(not request.done, "a send that no receive asked for waits", "it is done")
        me.check(request.cancel(), "cancel of an unmatched send returns True")
        me.wait_failed(request, ClosedError, "a cancelled send")
        follower = me.send(1, payload(0, 1, nbytes), tag=8)
        me.barrier()
        me.wait_done(follower, "the send that followed")
        me.check(not follower.cancel(), "cancel of an ended send returns False")
    else:
        me.barrier()
        me.barrier()
        me.expect(0, payload(0, 1, nbytes), "the message that followed a cancelled one", tag=8)


@SUITE.case(size=2)
def callbacks_run_once(me: CaseRank) -> None:
    """Every callback of a request runs exactly once, at once if the request has ended."""
    calls: list[str] = []
    if me.rank == 0:
        me.barrier()
        me.wait_done(me.send(1, b"x", tag=1), "a send")
        return
    request: Request = me.recv(0, tag=1)
    for name in ("first", "second"):
        request.notify(lambda name=name: calls.append(name))  # type: ignore[misc]
    me.check_equal(calls, [], "what was called before the end")
    me.barrier()
    me.wait_done(request, "a receive")
    request.notify(lambda: calls.append("late"))
    me.check_equal(sorted(calls), ["first", "late", "second"], "what was called after the end")

"""Cases about messages: bytes, order, wildcards, probes, refusals and cancelled requests.

Knows what the contract promises about matching. Does not know how a backend keeps the promise.
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
    """Odd and even, empty, and both sides of every limit that a backend may have."""
    limits = (1, 8, 4096, me.eager_bytes, me.credit_bytes, 65536)
    around = {limit + step for limit in limits for step in (-1, 0, 1)}
    return sorted({0, 1021, (1 << 20) + 3, *(n for n in around if n >= 0)})


@SUITE.case(size=3)
def ranks_know_who_they_are(me: CaseRank) -> None:
    """Every rank has a number of its own below the size, on which all agree."""
    backend = me.backend
    me.check(0 <= backend.rank < backend.size == 3, "rank is below size, which is 3", f"{backend.rank}")
    me.check(bool(backend.capabilities.name), "the backend has a name")
    hosts = backend.hosts()
    me.check(len(hosts) in (0, backend.size), "hosts() is empty or has a number per rank", repr(hosts))
    peers = [rank for rank in range(3) if rank != backend.rank]
    sends = [me.send(peer, bytes([me.rank, me.size])) for peer in peers]
    for peer in peers:
        request = me.done(me.recv(peer), f"a receive from rank {peer}")
        me.equal(bytes(request.data or b""), bytes([peer, me.size]), f"what rank {peer} says it is")
    me.all_done(sends, "a send")


@SUITE.case(size=2)
def ranks_that_do_not_exist_are_refused(me: CaseRank) -> None:
    """A bad rank is a UsageError at once, before anything is sent."""
    for call in (me.send, me.recv, me.probe):
        for rank in (2, -1, 1 << 40, True, 1.0, "0", None):
            me.raised(UsageError, f"{call.__name__} with rank {rank!r}", call, rank)
    me.raised(UsageError, "a send to ANY", me.send, ANY)


@SUITE.case(size=3)
def bytes_arrive_as_they_were_sent(me: CaseRank) -> None:
    """Messages of every length, between all pairs at once, arrive whole and touch nothing else."""
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
        envelope = me.got(request, what)
        me.equal((envelope.source, envelope.tag), (peer, i), f"source and tag of {what}")
        me.check_filled(envelope, buffers[peer, i], payload(peer * 10 + me.rank, i, lengths[i]), what)
    me.all_done(sends, "a send")


@SUITE.case(size=2)
def receives_may_come_late(me: CaseRank) -> None:
    """Messages wait for receives that are posted later, in whatever order of tags."""
    lengths = _lengths(me)
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, n), tag=i) for i, n in enumerate(lengths)]
        me.meet()
        me.all_done(sends, "a send that waits for its receive")
    else:
        me.meet()
        for i, n in reversed(list(enumerate(lengths))):
            me.take(0, payload(0, i, n), f"the waiting message of {n} bytes", tag=i)


@SUITE.case(size=2)
def lengths_need_not_be_known(me: CaseRank) -> None:
    """A receive without a buffer gives bytes of the message's own length."""
    lengths = [0, 1, 1021, me.eager_bytes + 1, me.credit_bytes + 1]
    early = [me.recv(0, tag=0) for _ in lengths] if me.rank == 1 else []
    me.meet()
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, n), tag=t) for t in (0, 1) for i, n in enumerate(lengths)]
        me.meet()
        me.all_done(sends, "a send")
        return
    for i, (n, request) in enumerate(zip(lengths, early, strict=True)):
        me.done(request, f"a receive of {n} bytes, posted early")
        me.equal(bytes(request.data or b""), bytes(payload(0, i, n)), f"the message of {n} bytes")
    me.meet()
    for i, n in enumerate(lengths):
        request = me.done(me.recv(0, tag=1), f"a receive of {n} bytes, posted late")
        me.equal(bytes(request.data or b""), bytes(payload(0, i, n)), f"the waiting message of {n} bytes")


@SUITE.case(size=2)
def messages_keep_their_order(me: CaseRank) -> None:
    """Messages with one tag meet receives in the order they were sent, short and long ones mixed."""
    short, long = 5, me.eager_bytes + 6
    lengths = [short if i % 7 else long for i in range(60)]
    tags = (0, 3, TAG_MAX)
    if me.rank == 0:
        sends = [me.send(1, payload(t, i, n), tag=tags[t]) for i, n in enumerate(lengths) for t in range(3)]
        me.meet()
        me.all_done(sends, "a send")
        return
    posted = [(i, me.buffer(long)) for i in range(20)]
    early = [(i, buffer, me.recv(0, buffer, tag=tags[1])) for i, buffer in posted]
    me.meet()
    for t in (2, 0):
        for i, n in enumerate(lengths):
            me.take(0, payload(t, i, n), f"message {i} with tag {tags[t]}", tag=tags[t])
    for i, buffer, request in early:
        envelope = me.got(request, f"early receive {i}")
        expected = payload(1, i, lengths[i])
        me.check_filled(envelope, buffer[: len(expected)], expected, f"message {i} in early receive {i}")
    for i, n in list(enumerate(lengths))[20:]:
        me.take(0, payload(1, i, n), f"message {i} with tag {tags[1]}", tag=tags[1])


@SUITE.case(size=4, needs=["wildcards"])
def any_source_takes_from_all(me: CaseRank) -> None:
    """A receive from ANY meets messages of every rank, each rank's in order, and says whose it met."""
    per_rank = 15
    if me.rank:
        lengths = [me.eager_bytes + 1 if i % 5 == 4 else 16 + i for i in range(per_rank)]
        sends = [me.send(0, payload(me.rank, i, n), tag=5) for i, n in enumerate(lengths)]
        me.all_done(sends, "a send")
        return
    seen = dict.fromkeys(range(1, me.size), 0)
    for _ in range(per_rank * (me.size - 1)):
        request = me.recv(ANY, tag=5)
        source = me.got(request, "a receive from ANY").source
        me.check(source in seen, f"the source is one of {list(seen)}", repr(source))
        data = bytes(request.data or b"")
        expected = bytes(payload(source, seen[source], len(data)))
        me.equal(data, expected, f"message {seen[source]} of rank {source}")
        seen[source] += 1
    me.equal(set(seen.values()), {per_rank}, "the number of messages met from each rank")


@SUITE.case(size=2, needs=["wildcards"])
def any_tag_takes_in_order(me: CaseRank) -> None:
    """A receive with tag ANY meets one rank's messages in the order they were sent, whatever their tags."""
    tags = [9, 0, TAG_MAX, 4, 9, 1, 0, 9]
    lengths = [me.eager_bytes + 1 if i in (1, 4) else 7 * i for i in range(len(tags))]
    if me.rank == 0:
        sends = [
            me.send(1, payload(0, i, n), tag=t) for i, (t, n) in enumerate(zip(tags, lengths, strict=True))
        ]
        me.all_done(sends, "a send")
        return
    for i, (tag, n) in enumerate(zip(tags, lengths, strict=True)):
        envelope = me.take(0, payload(0, i, n), f"message {i}, received by tag ANY", tag=ANY)
        me.equal(envelope.tag, tag, f"the tag of message {i}")


@SUITE.case(size=2, needs=["wildcards"])
def any_tag_meets_users_only(me: CaseRank) -> None:
    """A receive or probe with tag ANY never meets messages of collectives or control."""
    probe = me.probe(ANY, tag=ANY) if me.rank else None
    receive = me.recv(0, tag=ANY) if me.rank else None
    me.meet()
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, 33), tag=tag) for i, tag in enumerate(_NOT_USERS)]
        me.meet()
        me.meet()
        sends.append(me.send(1, b"user", tag=6))
        me.meet()
        me.all_done(sends, "a send")
        return
    assert receive is not None
    assert probe is not None
    me.meet()
    me.check(not receive.done, "tag ANY does not meet collective or control messages", "it did")
    me.check(not probe.done, "a probe with tag ANY does not see collective or control messages", "it did")
    me.meet()
    me.equal(me.got(receive, "a receive with tag ANY").tag, 6, "the tag that ANY met")
    me.equal(me.got(probe, "a probe with tag ANY").tag, 6, "the tag that a probe for ANY saw")
    again = me.recv(0, tag=ANY)
    me.check(not again.done, "tag ANY does not meet collective messages that wait", "it did")
    me.check(again.cancel(), "an unmet receive can be withdrawn")
    me.meet()
    for i, tag in enumerate(_NOT_USERS):
        me.take(0, payload(0, i, 33), f"the message with tag {tag:#x}", tag=tag)


@SUITE.case(size=2, needs=["wildcards"])
def receives_are_served_as_posted(me: CaseRank) -> None:
    """A message meets the first posted receive that fits it, wildcard or not."""
    patterns: list[tuple[int | Any_, int | Any_]] = [(ANY, 4), (0, 4), (0, ANY), (0, 4), (ANY, ANY)]
    posted = [me.recv(src, tag=tag) for src, tag in patterns] if me.rank else []
    me.meet()
    if me.rank == 0:
        me.all_done([me.send(1, payload(0, i, 20 + i), tag=4) for i in range(5)], "a send")
    for i, request in enumerate(posted):
        me.done(request, f"receive {i}")
        me.equal(bytes(request.data or b""), bytes(payload(0, i, 20 + i)), f"what receive {i} met")


@SUITE.case(size=2)
def contexts_and_tags_never_meet(me: CaseRank) -> None:
    """A message meets only receives of its own context and tag, however alike the numbers are."""
    tags = [0, 1, 1 << 16, TAG_MAX, Tags.collective(0, 0), Tags.collective(1 << 20, 15), Tags.CONTROL]
    contexts = [0, 1, CONTEXT, _OTHER_CONTEXT, CONTEXT ^ (1 << 32)]
    places = [(context, tag) for context in contexts for tag in tags]
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, 64), context=c, tag=t) for i, (c, t) in enumerate(places)]
        me.all_done(sends, "a send")
        return
    for i, (context, tag) in reversed(list(enumerate(places))):
        what = f"the message with tag {tag:#x} in context {context:#x}"
        envelope = me.take(0, payload(0, i, 64), what, context=context, tag=tag)
        me.equal((envelope.context, envelope.tag), (context, tag), f"the envelope of {what}")


@SUITE.case(size=2)
def headers_and_types_arrive(me: CaseRank) -> None:
    """Header and dtype come with every message, eager or not, and a probe shows them too."""
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
        me.all_done(sends, "a send")
        return
    for i, (n, header, code) in enumerate(parts):
        buffer = me.buffer(n)
        seen = me.got(me.probe(0, tag=i), f"a probe for message {i}")
        met = me.got(me.recv(0, buffer, tag=i, dtype=code), f"message {i}")
        me.check_filled(met, buffer, payload(0, i, n), f"message {i}")
        me.equal((met.dtype, met.header), (code, header), f"dtype and header of message {i}")
        me.equal(seen, met, f"what a probe shows of message {i}")


@SUITE.case(size=2)
def probes_take_nothing(me: CaseRank) -> None:
    """A probe ends when a fitting message waits, shows it, and leaves it to the next receive."""
    for n in (12, me.eager_bytes + 12):
        early = me.probe(0, tag=1) if me.rank else None
        me.meet()
        if me.rank == 0:
            me.all_done([me.send(1, payload(0, i, n + i), tag=1) for i in range(2)], "a send")
            me.meet()
            continue
        assert early is not None
        first = me.got(early, "a probe that was there before the message")
        again = me.probe(0, tag=1)
        me.check(again.done, "a probe for a message that waits is done at once")
        for envelope in (first, me.got(again, "a second probe"), me.got(me.probe(0, tag=1), "a third")):
            me.equal((envelope.source, envelope.tag, envelope.nbytes), (0, 1, n), "what a probe shows")
        for i in range(2):
            me.take(0, payload(0, i, n + i), f"message {i} after the probes", tag=1)
        empty = me.probe(0, tag=1)
        me.check(not empty.done, "a probe with nothing there waits", "it is done")
        me.check(empty.cancel(), "a waiting probe can be withdrawn")
        me.failed(empty, ClosedError, "a withdrawn probe")
        me.meet()


@SUITE.case(size=2, needs=["wildcards"])
def wildcard_probes_see_all(me: CaseRank) -> None:
    """A probe for ANY shows whichever message comes, and a receive by what it showed gets it."""
    early = me.probe(ANY, tag=ANY) if me.rank else None
    me.meet()
    if me.rank == 0:
        me.all_done([me.send(1, payload(0, 0, 77), tag=31)], "a send")
        return
    assert early is not None
    for request in (early, me.probe(ANY, tag=ANY), me.probe(0, tag=ANY), me.probe(ANY, tag=31)):
        envelope = me.got(request, "a probe for ANY")
        me.equal((envelope.source, envelope.tag, envelope.nbytes), (0, 31, 77), "what a probe for ANY shows")
    me.take(0, payload(0, 0, 77), "the message that the probes showed", tag=31)


@SUITE.case(size=2)
def too_long_is_refused_and_stays(me: CaseRank) -> None:
    """A message longer than the buffer fails that receive with UsageError and stays for the next."""
    for n in (40, me.eager_bytes + 40):
        early = me.recv(0, me.buffer(n - 1), tag=2) if me.rank else None
        me.meet()
        if me.rank == 0:
            me.all_done([me.send(1, payload(0, i, n + i), tag=2) for i in range(2)], "a send")
            continue
        assert early is not None
        me.failed(early, UsageError, "a receive that is one byte too short, posted early")
        for room in (n - 1, 0):
            buffer = me.buffer(room)
            me.failed(me.recv(0, buffer, tag=2), UsageError, f"a receive of {room} bytes for {n}")
            me.equal(bytes(buffer), bytes(me.buffer(room)), "a buffer that was too short")
        for i in range(2):
            me.take(0, payload(0, i, n + i), f"message {i}, refused before", tag=2, room=0)


@SUITE.case(size=2)
def unknown_lengths_are_bounded(me: CaseRank) -> None:
    """A receive without a buffer refuses more than `recv_bytes_max`, before it takes memory."""
    config = me.backend.config
    n = config.recv_bytes_max + 1
    if n > config.message_bytes_max:
        return
    early = me.recv(0, tag=2) if me.rank else None
    me.meet()
    if me.rank == 0:
        # Memory that nobody touches costs nothing.
        sent = me.send(1, memoryview(mmap.mmap(-1, n)), tag=2)
        me.meet()
        me.check(sent.cancel(), "a send that was refused can still be withdrawn")
        me.meet()
        me.done(me.send(1, b"short", tag=2), "a short send after it")
        return
    assert early is not None
    for request, when in ((early, "early"), (me.recv(ANY, tag=ANY), "late")):
        error = me.failed(request, UsageError, f"a receive of unknown length for {n} bytes, posted {when}")
        me.check("recv_bytes_max" in str(error), "the error names the setting", str(error))
    me.equal(me.got(me.probe(0, tag=2), "a probe").nbytes, n, "the message, which stays queued,")
    me.meet()
    me.meet()
    me.take(0, b"short", "the message after it", tag=2)


@SUITE.case(size=2)
def another_type_is_refused_and_stays(me: CaseRank) -> None:
    """A message of another dtype fails that receive with UsageError and stays; bytes fit everything."""
    float32, int32, byte = (DTYPES[name].code for name in ("float32", "int32", "uint8"))
    early = me.recv(0, me.buffer(64), tag=0, dtype=int32) if me.rank else None
    me.meet()
    if me.rank == 0:
        sends = [me.send(1, payload(0, i, 64), dtype=float32, tag=i) for i in range(4)]
        sends += [me.send(1, payload(0, i, 64), dtype=code, tag=i) for i, code in ((4, UNTYPED), (5, byte))]
        me.all_done(sends, "a send")
        return
    assert early is not None
    me.failed(early, UsageError, "a receive of int32 for float32, posted early")
    late = me.recv(0, me.buffer(64), tag=0, dtype=int32)
    me.failed(late, UsageError, "a receive of int32 for float32, posted late")
    for tag, code in ((0, float32), (1, UNTYPED), (2, byte), (3, float32), (4, int32), (5, int32)):
        buffer, what = me.buffer(64), f"message {tag}, received as type {code}"
        envelope = me.got(me.recv(0, buffer, tag=tag, dtype=code), what)
        me.check_filled(envelope, buffer, payload(0, tag, 64), what)


@SUITE.case(size=2)
def receives_can_be_withdrawn(me: CaseRank) -> None:
    """A cancelled receive ends with ClosedError and leaves its message to the next one."""
    if me.rank == 0:
        me.meet()
        for i in range(2):
            me.done(me.send(1, payload(0, i, 50), tag=8), f"send {i}")
        return
    buffers = [me.buffer(53) for _ in range(3)]
    posted = [me.recv(0, buffer, tag=8) for buffer in buffers]
    me.check(posted[0].cancel(), "cancel of a waiting receive returns True")
    me.failed(posted[0], ClosedError, "a cancelled receive")
    me.check(not posted[0].cancel(), "cancel of an ended receive returns False")
    me.meet()
    for i, request in enumerate(posted[1:]):
        envelope = me.got(request, f"receive {i + 1}")
        me.check_filled(envelope, buffers[i + 1], payload(0, i, 50), f"message {i}")
        me.check(not request.cancel(), "cancel of an ended receive returns False")
    me.equal(bytes(buffers[0]), bytes(me.buffer(53)), "the buffer of the cancelled receive")


@SUITE.case(size=2)
def sends_can_be_withdrawn(me: CaseRank) -> None:
    """A cancelled send that was not met ends with ClosedError, and its message is never received."""
    nbytes = max(me.eager_bytes, me.credit_bytes) + 1
    if me.rank == 0:
        request = me.send(1, payload(0, 0, nbytes), tag=8)
        me.meet()
        me.check(not request.done, "a send that no receive asked for waits", "it is done")
        me.check(request.cancel(), "cancel of an unmet send returns True")
        me.failed(request, ClosedError, "a cancelled send")
        follower = me.send(1, payload(0, 1, nbytes), tag=8)
        me.meet()
        me.done(follower, "the send that followed")
        me.check(not follower.cancel(), "cancel of an ended send returns False")
    else:
        me.meet()
        me.meet()
        me.take(0, payload(0, 1, nbytes), "the message that followed a cancelled one", tag=8)


@SUITE.case(size=2)
def callbacks_run_once(me: CaseRank) -> None:
    """Whoever asks to be told of a request's end is told exactly once, at once if it has ended."""
    calls: list[str] = []
    if me.rank == 0:
        me.meet()
        me.done(me.send(1, b"x", tag=1), "a send")
        return
    request: Request = me.recv(0, tag=1)
    for name in ("first", "second"):
        request.notify(lambda name=name: calls.append(name))  # type: ignore[misc]
    me.equal(calls, [], "what was called before the end")
    me.meet()
    me.done(request, "a receive")
    request.notify(lambda: calls.append("late"))
    me.equal(sorted(calls), ["first", "late", "second"], "what was called after the end")

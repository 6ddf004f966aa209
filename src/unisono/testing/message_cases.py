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
from unisono.testing.seat import CONTEXT, Seat, payload

__all__ = ["SUITE"]

SUITE = Suite()

_OTHER_CONTEXT = CONTEXT ^ (1 << 63)  # differs in the highest bit only
_NOT_USERS = (Tags.collective(0, 0), Tags.collective(7, 3), Tags.CONTROL)


def _lengths(seat: Seat) -> list[int]:
    """Odd and even, empty, and both sides of every limit that a backend may have."""
    limits = (1, 8, 4096, seat.eager_bytes, seat.credit_bytes, 65536)
    around = {limit + step for limit in limits for step in (-1, 0, 1)}
    return sorted({0, 1021, (1 << 20) + 3, *(n for n in around if n >= 0)})


@SUITE.case(size=3)
def ranks_know_who_they_are(seat: Seat) -> None:
    """Every rank has a number of its own below the size, on which all agree."""
    backend = seat.backend
    seat.check(0 <= backend.rank < backend.size == 3, "rank is below size, which is 3", f"{backend.rank}")
    seat.check(bool(backend.capabilities.name), "the backend has a name")
    hosts = backend.hosts()
    seat.check(len(hosts) in (0, backend.size), "hosts() is empty or has a number per rank", repr(hosts))
    peers = [rank for rank in range(3) if rank != backend.rank]
    sends = [seat.send(peer, bytes([seat.rank, seat.size])) for peer in peers]
    for peer in peers:
        request = seat.done(seat.recv(peer), f"a receive from rank {peer}")
        seat.equal(bytes(request.data or b""), bytes([peer, seat.size]), f"what rank {peer} says it is")
    seat.all_done(sends, "a send")


@SUITE.case(size=2)
def ranks_that_do_not_exist_are_refused(seat: Seat) -> None:
    """A bad rank is a UsageError at once, before anything is sent."""
    for call in (seat.send, seat.recv, seat.probe):
        for rank in (2, -1, 1 << 40, True, 1.0, "0", None):
            seat.raised(UsageError, f"{call.__name__} with rank {rank!r}", call, rank)
    seat.raised(UsageError, "a send to ANY", seat.send, ANY)


@SUITE.case(size=3)
def bytes_arrive_as_they_were_sent(seat: Seat) -> None:
    """Messages of every length, between all pairs at once, arrive whole and touch nothing else."""
    lengths = _lengths(seat)
    peers = [rank for rank in range(seat.size) if rank != seat.rank]
    buffers = {(p, i): seat.buffer(n + 5) for p in peers for i, n in enumerate(lengths)}
    receives = {(p, i): seat.recv(p, buffer, tag=i) for (p, i), buffer in buffers.items()}
    sends = [
        seat.send(peer, payload(seat.rank * 10 + peer, i, n), tag=i)
        for i, n in enumerate(lengths)
        for peer in peers
    ]
    for (peer, i), request in receives.items():
        what = f"the message of {lengths[i]} bytes from rank {peer}"
        envelope = seat.got(request, what)
        seat.equal((envelope.source, envelope.tag), (peer, i), f"source and tag of {what}")
        seat.check_filled(envelope, buffers[peer, i], payload(peer * 10 + seat.rank, i, lengths[i]), what)
    seat.all_done(sends, "a send")


@SUITE.case(size=2)
def receives_may_come_late(seat: Seat) -> None:
    """Messages wait for receives that are posted later, in whatever order of tags."""
    lengths = _lengths(seat)
    if seat.rank == 0:
        sends = [seat.send(1, payload(0, i, n), tag=i) for i, n in enumerate(lengths)]
        seat.meet()
        seat.all_done(sends, "a send that waits for its receive")
    else:
        seat.meet()
        for i, n in reversed(list(enumerate(lengths))):
            seat.take(0, payload(0, i, n), f"the waiting message of {n} bytes", tag=i)


@SUITE.case(size=2)
def lengths_need_not_be_known(seat: Seat) -> None:
    """A receive without a buffer gives bytes of the message's own length."""
    lengths = [0, 1, 1021, seat.eager_bytes + 1, seat.credit_bytes + 1]
    early = [seat.recv(0, tag=0) for _ in lengths] if seat.rank == 1 else []
    seat.meet()
    if seat.rank == 0:
        sends = [seat.send(1, payload(0, i, n), tag=t) for t in (0, 1) for i, n in enumerate(lengths)]
        seat.meet()
        seat.all_done(sends, "a send")
        return
    for i, (n, request) in enumerate(zip(lengths, early, strict=True)):
        seat.done(request, f"a receive of {n} bytes, posted early")
        seat.equal(bytes(request.data or b""), bytes(payload(0, i, n)), f"the message of {n} bytes")
    seat.meet()
    for i, n in enumerate(lengths):
        request = seat.done(seat.recv(0, tag=1), f"a receive of {n} bytes, posted late")
        seat.equal(bytes(request.data or b""), bytes(payload(0, i, n)), f"the waiting message of {n} bytes")


@SUITE.case(size=2)
def messages_keep_their_order(seat: Seat) -> None:
    """Messages with one tag meet receives in the order they were sent, short and long ones mixed."""
    short, long = 5, seat.eager_bytes + 6
    lengths = [short if i % 7 else long for i in range(60)]
    tags = (0, 3, TAG_MAX)
    if seat.rank == 0:
        sends = [seat.send(1, payload(t, i, n), tag=tags[t]) for i, n in enumerate(lengths) for t in range(3)]
        seat.meet()
        seat.all_done(sends, "a send")
        return
    posted = [(i, seat.buffer(long)) for i in range(20)]
    early = [(i, buffer, seat.recv(0, buffer, tag=tags[1])) for i, buffer in posted]
    seat.meet()
    for t in (2, 0):
        for i, n in enumerate(lengths):
            seat.take(0, payload(t, i, n), f"message {i} with tag {tags[t]}", tag=tags[t])
    for i, buffer, request in early:
        envelope = seat.got(request, f"early receive {i}")
        expected = payload(1, i, lengths[i])
        seat.check_filled(envelope, buffer[: len(expected)], expected, f"message {i} in early receive {i}")
    for i, n in list(enumerate(lengths))[20:]:
        seat.take(0, payload(1, i, n), f"message {i} with tag {tags[1]}", tag=tags[1])


@SUITE.case(size=4, needs=["wildcards"])
def any_source_takes_from_all(seat: Seat) -> None:
    """A receive from ANY meets messages of every rank, each rank's in order, and says whose it met."""
    per_rank = 15
    if seat.rank:
        lengths = [seat.eager_bytes + 1 if i % 5 == 4 else 16 + i for i in range(per_rank)]
        sends = [seat.send(0, payload(seat.rank, i, n), tag=5) for i, n in enumerate(lengths)]
        seat.all_done(sends, "a send")
        return
    seen = dict.fromkeys(range(1, seat.size), 0)
    for _ in range(per_rank * (seat.size - 1)):
        request = seat.recv(ANY, tag=5)
        source = seat.got(request, "a receive from ANY").source
        seat.check(source in seen, f"the source is one of {list(seen)}", repr(source))
        data = bytes(request.data or b"")
        expected = bytes(payload(source, seen[source], len(data)))
        seat.equal(data, expected, f"message {seen[source]} of rank {source}")
        seen[source] += 1
    seat.equal(set(seen.values()), {per_rank}, "the number of messages met from each rank")


@SUITE.case(size=2, needs=["wildcards"])
def any_tag_takes_in_order(seat: Seat) -> None:
    """A receive with tag ANY meets one rank's messages in the order they were sent, whatever their tags."""
    tags = [9, 0, TAG_MAX, 4, 9, 1, 0, 9]
    lengths = [seat.eager_bytes + 1 if i in (1, 4) else 7 * i for i in range(len(tags))]
    if seat.rank == 0:
        sends = [
            seat.send(1, payload(0, i, n), tag=t) for i, (t, n) in enumerate(zip(tags, lengths, strict=True))
        ]
        seat.all_done(sends, "a send")
        return
    for i, (tag, n) in enumerate(zip(tags, lengths, strict=True)):
        envelope = seat.take(0, payload(0, i, n), f"message {i}, received by tag ANY", tag=ANY)
        seat.equal(envelope.tag, tag, f"the tag of message {i}")


@SUITE.case(size=2, needs=["wildcards"])
def any_tag_meets_users_only(seat: Seat) -> None:
    """A receive or probe with tag ANY never meets messages of collectives or control."""
    probe = seat.probe(ANY, tag=ANY) if seat.rank else None
    receive = seat.recv(0, tag=ANY) if seat.rank else None
    seat.meet()
    if seat.rank == 0:
        sends = [seat.send(1, payload(0, i, 33), tag=tag) for i, tag in enumerate(_NOT_USERS)]
        seat.meet()
        seat.meet()
        sends.append(seat.send(1, b"user", tag=6))
        seat.meet()
        seat.all_done(sends, "a send")
        return
    assert receive is not None
    assert probe is not None
    seat.meet()
    seat.check(not receive.done, "tag ANY does not meet collective or control messages", "it did")
    seat.check(not probe.done, "a probe with tag ANY does not see collective or control messages", "it did")
    seat.meet()
    seat.equal(seat.got(receive, "a receive with tag ANY").tag, 6, "the tag that ANY met")
    seat.equal(seat.got(probe, "a probe with tag ANY").tag, 6, "the tag that a probe for ANY saw")
    again = seat.recv(0, tag=ANY)
    seat.check(not again.done, "tag ANY does not meet collective messages that wait", "it did")
    seat.check(again.cancel(), "an unmet receive can be withdrawn")
    seat.meet()
    for i, tag in enumerate(_NOT_USERS):
        seat.take(0, payload(0, i, 33), f"the message with tag {tag:#x}", tag=tag)


@SUITE.case(size=2, needs=["wildcards"])
def receives_are_served_as_posted(seat: Seat) -> None:
    """A message meets the first posted receive that fits it, wildcard or not."""
    patterns: list[tuple[int | Any_, int | Any_]] = [(ANY, 4), (0, 4), (0, ANY), (0, 4), (ANY, ANY)]
    posted = [seat.recv(src, tag=tag) for src, tag in patterns] if seat.rank else []
    seat.meet()
    if seat.rank == 0:
        seat.all_done([seat.send(1, payload(0, i, 20 + i), tag=4) for i in range(5)], "a send")
    for i, request in enumerate(posted):
        seat.done(request, f"receive {i}")
        seat.equal(bytes(request.data or b""), bytes(payload(0, i, 20 + i)), f"what receive {i} met")


@SUITE.case(size=2)
def contexts_and_tags_never_meet(seat: Seat) -> None:
    """A message meets only receives of its own context and tag, however alike the numbers are."""
    tags = [0, 1, 1 << 16, TAG_MAX, Tags.collective(0, 0), Tags.collective(1 << 20, 15), Tags.CONTROL]
    contexts = [0, 1, CONTEXT, _OTHER_CONTEXT, CONTEXT ^ (1 << 32)]
    places = [(context, tag) for context in contexts for tag in tags]
    if seat.rank == 0:
        sends = [seat.send(1, payload(0, i, 64), context=c, tag=t) for i, (c, t) in enumerate(places)]
        seat.all_done(sends, "a send")
        return
    for i, (context, tag) in reversed(list(enumerate(places))):
        what = f"the message with tag {tag:#x} in context {context:#x}"
        envelope = seat.take(0, payload(0, i, 64), what, context=context, tag=tag)
        seat.equal((envelope.context, envelope.tag), (context, tag), f"the envelope of {what}")


@SUITE.case(size=2)
def headers_and_types_arrive(seat: Seat) -> None:
    """Header and dtype come with every message, eager or not, and a probe shows them too."""
    parts = [
        (n, header, code)
        for n in (0, 8, seat.eager_bytes + 8)
        for header, code in ((b"", UNTYPED), (b"\0one\xff", 3), (bytes(payload(0, 1, HEADER_BYTES_MAX)), 11))
    ]
    if seat.rank == 0:
        sends = [
            seat.send(1, payload(0, i, n), tag=i, header=header, dtype=code)
            for i, (n, header, code) in enumerate(parts)
        ]
        seat.all_done(sends, "a send")
        return
    for i, (n, header, code) in enumerate(parts):
        buffer = seat.buffer(n)
        seen = seat.got(seat.probe(0, tag=i), f"a probe for message {i}")
        met = seat.got(seat.recv(0, buffer, tag=i, dtype=code), f"message {i}")
        seat.check_filled(met, buffer, payload(0, i, n), f"message {i}")
        seat.equal((met.dtype, met.header), (code, header), f"dtype and header of message {i}")
        seat.equal(seen, met, f"what a probe shows of message {i}")


@SUITE.case(size=2)
def probes_take_nothing(seat: Seat) -> None:
    """A probe ends when a fitting message waits, shows it, and leaves it to the next receive."""
    for n in (12, seat.eager_bytes + 12):
        early = seat.probe(0, tag=1) if seat.rank else None
        seat.meet()
        if seat.rank == 0:
            seat.all_done([seat.send(1, payload(0, i, n + i), tag=1) for i in range(2)], "a send")
            seat.meet()
            continue
        assert early is not None
        first = seat.got(early, "a probe that was there before the message")
        again = seat.probe(0, tag=1)
        seat.check(again.done, "a probe for a message that waits is done at once")
        for envelope in (first, seat.got(again, "a second probe"), seat.got(seat.probe(0, tag=1), "a third")):
            seat.equal((envelope.source, envelope.tag, envelope.nbytes), (0, 1, n), "what a probe shows")
        for i in range(2):
            seat.take(0, payload(0, i, n + i), f"message {i} after the probes", tag=1)
        empty = seat.probe(0, tag=1)
        seat.check(not empty.done, "a probe with nothing there waits", "it is done")
        seat.check(empty.cancel(), "a waiting probe can be withdrawn")
        seat.failed(empty, ClosedError, "a withdrawn probe")
        seat.meet()


@SUITE.case(size=2, needs=["wildcards"])
def wildcard_probes_see_all(seat: Seat) -> None:
    """A probe for ANY shows whichever message comes, and a receive by what it showed gets it."""
    early = seat.probe(ANY, tag=ANY) if seat.rank else None
    seat.meet()
    if seat.rank == 0:
        seat.all_done([seat.send(1, payload(0, 0, 77), tag=31)], "a send")
        return
    assert early is not None
    for request in (early, seat.probe(ANY, tag=ANY), seat.probe(0, tag=ANY), seat.probe(ANY, tag=31)):
        envelope = seat.got(request, "a probe for ANY")
        seat.equal(
            (envelope.source, envelope.tag, envelope.nbytes), (0, 31, 77), "what a probe for ANY shows"
        )
    seat.take(0, payload(0, 0, 77), "the message that the probes showed", tag=31)


@SUITE.case(size=2)
def too_long_is_refused_and_stays(seat: Seat) -> None:
    """A message longer than the buffer fails that receive with UsageError and stays for the next."""
    for n in (40, seat.eager_bytes + 40):
        early = seat.recv(0, seat.buffer(n - 1), tag=2) if seat.rank else None
        seat.meet()
        if seat.rank == 0:
            seat.all_done([seat.send(1, payload(0, i, n + i), tag=2) for i in range(2)], "a send")
            continue
        assert early is not None
        seat.failed(early, UsageError, "a receive that is one byte too short, posted early")
        for room in (n - 1, 0):
            buffer = seat.buffer(room)
            seat.failed(seat.recv(0, buffer, tag=2), UsageError, f"a receive of {room} bytes for {n}")
            seat.equal(bytes(buffer), bytes(seat.buffer(room)), "a buffer that was too short")
        for i in range(2):
            seat.take(0, payload(0, i, n + i), f"message {i}, refused before", tag=2, room=0)


@SUITE.case(size=2)
def unknown_lengths_are_bounded(seat: Seat) -> None:
    """A receive without a buffer refuses more than `recv_bytes_max`, before it takes memory."""
    config = seat.backend.config
    n = config.recv_bytes_max + 1
    if n > config.message_bytes_max:
        return
    early = seat.recv(0, tag=2) if seat.rank else None
    seat.meet()
    if seat.rank == 0:
        # Memory that nobody touches costs nothing.
        sent = seat.send(1, memoryview(mmap.mmap(-1, n)), tag=2)
        seat.meet()
        seat.check(sent.cancel(), "a send that was refused can still be withdrawn")
        seat.meet()
        seat.done(seat.send(1, b"short", tag=2), "a short send after it")
        return
    assert early is not None
    for request, when in ((early, "early"), (seat.recv(ANY, tag=ANY), "late")):
        error = seat.failed(request, UsageError, f"a receive of unknown length for {n} bytes, posted {when}")
        seat.check("recv_bytes_max" in str(error), "the error names the setting", str(error))
    seat.equal(seat.got(seat.probe(0, tag=2), "a probe").nbytes, n, "the message, which stays queued,")
    seat.meet()
    seat.meet()
    seat.take(0, b"short", "the message after it", tag=2)


@SUITE.case(size=2)
def another_type_is_refused_and_stays(seat: Seat) -> None:
    """A message of another dtype fails that receive with UsageError and stays; bytes fit everything."""
    float32, int32, byte = (DTYPES[name].code for name in ("float32", "int32", "uint8"))
    early = seat.recv(0, seat.buffer(64), tag=0, dtype=int32) if seat.rank else None
    seat.meet()
    if seat.rank == 0:
        sends = [seat.send(1, payload(0, i, 64), dtype=float32, tag=i) for i in range(4)]
        sends += [seat.send(1, payload(0, i, 64), dtype=code, tag=i) for i, code in ((4, UNTYPED), (5, byte))]
        seat.all_done(sends, "a send")
        return
    assert early is not None
    seat.failed(early, UsageError, "a receive of int32 for float32, posted early")
    late = seat.recv(0, seat.buffer(64), tag=0, dtype=int32)
    seat.failed(late, UsageError, "a receive of int32 for float32, posted late")
    for tag, code in ((0, float32), (1, UNTYPED), (2, byte), (3, float32), (4, int32), (5, int32)):
        buffer, what = seat.buffer(64), f"message {tag}, received as type {code}"
        envelope = seat.got(seat.recv(0, buffer, tag=tag, dtype=code), what)
        seat.check_filled(envelope, buffer, payload(0, tag, 64), what)


@SUITE.case(size=2)
def receives_can_be_withdrawn(seat: Seat) -> None:
    """A cancelled receive ends with ClosedError and leaves its message to the next one."""
    if seat.rank == 0:
        seat.meet()
        for i in range(2):
            seat.done(seat.send(1, payload(0, i, 50), tag=8), f"send {i}")
        return
    buffers = [seat.buffer(53) for _ in range(3)]
    posted = [seat.recv(0, buffer, tag=8) for buffer in buffers]
    seat.check(posted[0].cancel(), "cancel of a waiting receive returns True")
    seat.failed(posted[0], ClosedError, "a cancelled receive")
    seat.check(not posted[0].cancel(), "cancel of an ended receive returns False")
    seat.meet()
    for i, request in enumerate(posted[1:]):
        envelope = seat.got(request, f"receive {i + 1}")
        seat.check_filled(envelope, buffers[i + 1], payload(0, i, 50), f"message {i}")
        seat.check(not request.cancel(), "cancel of an ended receive returns False")
    seat.equal(bytes(buffers[0]), bytes(seat.buffer(53)), "the buffer of the cancelled receive")


@SUITE.case(size=2)
def sends_can_be_withdrawn(seat: Seat) -> None:
    """A cancelled send that was not met ends with ClosedError, and its message is never received."""
    nbytes = max(seat.eager_bytes, seat.credit_bytes) + 1
    if seat.rank == 0:
        request = seat.send(1, payload(0, 0, nbytes), tag=8)
        seat.meet()
        seat.check(not request.done, "a send that no receive asked for waits", "it is done")
        seat.check(request.cancel(), "cancel of an unmet send returns True")
        seat.failed(request, ClosedError, "a cancelled send")
        follower = seat.send(1, payload(0, 1, nbytes), tag=8)
        seat.meet()
        seat.done(follower, "the send that followed")
        seat.check(not follower.cancel(), "cancel of an ended send returns False")
    else:
        seat.meet()
        seat.meet()
        seat.take(0, payload(0, 1, nbytes), "the message that followed a cancelled one", tag=8)


@SUITE.case(size=2)
def callbacks_run_once(seat: Seat) -> None:
    """Whoever asks to be told of a request's end is told exactly once, at once if it has ended."""
    calls: list[str] = []
    if seat.rank == 0:
        seat.meet()
        seat.done(seat.send(1, b"x", tag=1), "a send")
        return
    request: Request = seat.recv(0, tag=1)
    for name in ("first", "second"):
        request.notify(lambda name=name: calls.append(name))  # type: ignore[misc]
    seat.equal(calls, [], "what was called before the end")
    seat.meet()
    seat.done(request, "a receive")
    request.notify(lambda: calls.append("late"))
    seat.equal(sorted(calls), ["first", "late", "second"], "what was called after the end")

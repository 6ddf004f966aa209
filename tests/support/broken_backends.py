"""Backends that break one promise of the contract each, and the cases that must catch them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from unisono.backends.local import LocalBackend
from unisono.config import Config
from unisono.core.envelope import ANY, UNTYPED, Any_
from unisono.core.request import Request
from unisono.core.runtime import Runtime
from unisono.errors import PeerLost, UsageError
from unisono.messaging.backend import Backend, Capabilities
from unisono.messaging.peer_down import PeerDown


class Mutant(Backend):
    """A correct backend to which a subclass adds one fault. `caught_by` names the cases that may catch it."""

    caught_by: ClassVar[tuple[str, ...]]

    @classmethod
    def create(cls, size: int) -> list[Mutant]:
        return [cls(backend) for backend in LocalBackend.create(size)]

    def __init__(self, inner: LocalBackend) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def runtime(self) -> Runtime:
        return self.inner.runtime

    @property
    def config(self) -> Config:
        return self.inner.config

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        return self.inner.start_send(dst, context, tag, data, **how)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        return self.inner.start_recv(src, context, tag, into, dtype=dtype)

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        return self.inner.probe(src, context, tag)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        self.inner.watch(listener)

    def close(self) -> None:
        self.inner.close()


def follow(inner: Request, end: Callable[[Request], None]) -> Request:
    """A request in front of an inner one; `end` decides how the outer request ends."""
    outer = Request(inner.peer, lambda _: inner.cancel())
    inner.notify(lambda: end(outer))
    return outer


def pass_on(inner: Request, outer: Request) -> None:
    if inner.error is not None:
        outer.fail(inner.error, inner.envelope)
    else:
        outer.complete(inner.envelope, inner.data)


class Overtakes(Mutant):
    """Of every three messages with one tag the third is sent before the second."""

    caught_by = ("messages_keep_their_order", "any_source_takes_from_all")

    def __init__(self, inner: LocalBackend) -> None:
        super().__init__(inner)
        self.held: dict[Any, tuple[Any, Any, Request]] = {}
        self.counts: dict[Any, int] = {}

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        key = (dst, context, tag)
        self.counts[key] = count = self.counts.get(key, -1) + 1
        if count % 3 == 1 and tag == 5:
            outer = Request(dst)
            self.held[key] = (bytes(data), how, outer)
            return outer
        request = super().start_send(dst, context, tag, data, **how)
        if key in self.held:
            held, its_how, outer = self.held.pop(key)
            late = super().start_send(dst, context, tag, memoryview(held), **its_how)
            late.notify(lambda: pass_on(late, outer))
        return request


class DropsTheTail(Mutant):
    """Long messages lose their last byte."""

    caught_by = ("bytes_arrive_as_they_were_sent",)

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        return super().start_send(dst, context, tag, data[:-1] if data.nbytes > 60_000 else data, **how)


class FlipsABit(Mutant):
    """The last bit of a long message is flipped."""

    caught_by = ("bytes_arrive_as_they_were_sent",)

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        if data.nbytes > 1_000_000:
            wrong = bytearray(data)
            wrong[-1] ^= 1
            data = memoryview(wrong)
        return super().start_send(dst, context, tag, data, **how)


class WritesTooFar(Mutant):
    """A receive clears the rest of its buffer."""

    caught_by = ("bytes_arrive_as_they_were_sent",)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        if into is not None:
            into[:] = bytes(into.nbytes)
        return super().start_recv(src, context, tag, into, dtype=dtype)


class SwallowsTheRefused(Mutant):
    """A message that is too long for its buffer is lost."""

    caught_by = ("too_long_is_refused_and_stays",)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        request = super().start_recv(src, context, tag, into, dtype=dtype)
        if isinstance(request.error, UsageError):
            super().start_recv(src, context, tag, None)
        return request


class MatchesEverything(Mutant):
    """Tags have 31 bits, so ANY also matches collectives and control messages."""

    caught_by = ("any_tag_matches_users_only", "contexts_and_tags_never_mix")

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        return super().start_send(dst, context, tag & 0x7FFFFFFF, data, **how)


class ForgetsHalfTheContext(Mutant):
    """Contexts have 32 bits."""

    caught_by = ("contexts_and_tags_never_mix",)

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        return super().start_send(dst, context & 0xFFFFFFFF, tag, data, **how)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        return super().start_recv(src, context & 0xFFFFFFFF, tag, into, dtype=dtype)

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        return super().probe(src, context & 0xFFFFFFFF, tag)


class NeverHoldsBack(Mutant):
    """Every send ends at once, and unreceived messages pile up."""

    caught_by = ("receives_may_come_late", "sends_can_be_withdrawn")

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        super().start_send(dst, context, tag, memoryview(bytes(data)), **how)
        request = Request(dst)
        request.complete()
        return request


class FloodsItsPeers(Mutant):
    """Short messages have no limit; only long ones wait for credit."""

    caught_by = ("unmatched_payload_is_bounded",)

    @classmethod
    def create(cls, size: int) -> list[Mutant]:
        ranks = LocalBackend.create(size, Config(eager_credit_bytes=1 << 30))
        return [cls(backend) for backend in ranks]

    @property
    def config(self) -> Config:
        return Config()


class KeepsTheCredit(Mutant):
    """Used credit is never returned."""

    caught_by = ("unmatched_payload_is_bounded",)

    def __init__(self, inner: LocalBackend) -> None:
        super().__init__(inner)
        self.sent = 0

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        self.sent += data.nbytes
        if self.sent > self.config.eager_credit_bytes and dst != self.rank:
            how["sync"] = True
        return super().start_send(dst, context, tag, data, **how)


class EndsSyncEarly(Mutant):
    """A sync send ends like any other send."""

    caught_by = ("sync_sends_end_when_matched",)

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        how["sync"] = False
        return super().start_send(dst, context, tag, data, **how)


class LendsTheBuffer(Mutant):
    """A short send ends at once, but its bytes are read later."""

    caught_by = ("buffers_are_free_when_sends_end",)

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        if not 90 < data.nbytes <= self.config.eager_bytes or how.get("sync"):
            return super().start_send(dst, context, tag, data, **how)
        shown = super().start_send(dst, context, tag, memoryview(bytes(data)), **how)
        for queued in self.inner._hub.endpoints[dst].protocol.inbox.matcher.all_unexpected():
            about = queued.envelope
            if (about.source, about.tag, about.nbytes) == (self.rank, tag, data.nbytes):
                queued.payload = replace(queued.payload, data=data)
        return shown


class WaitsForItself(Mutant):
    """A long send to oneself waits for its receive."""

    caught_by = ("a_rank_sends_to_itself",)

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        if dst == self.rank and data.nbytes > self.config.eager_bytes:
            how["sync"] = True
        return super().start_send(dst, context, tag, data, **how)


class DropsHeaders(Mutant):
    caught_by = ("headers_and_types_arrive",)

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        how["header"] = how.get("header", b"")[:512]
        return super().start_send(dst, context, tag, data, **how)


class IgnoresTypes(Mutant):
    caught_by = ("another_type_is_refused_and_stays",)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        return super().start_recv(src, context, tag, into)


class ProbesTake(Mutant):
    """A probe receives the message that it shows."""

    caught_by = ("any_tag_matches_users_only", "headers_and_types_arrive", "probes_take_nothing")

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        return super().start_recv(src, context, tag, None)


class CancelsInWordsOnly(Mutant):
    """A cancelled receive ends, but still takes messages."""

    caught_by = ("receives_can_be_withdrawn",)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        inner = super().start_recv(src, context, tag, into, dtype=dtype)
        outer = Request(src)

        def cancel(request: Request) -> bool:
            request.cancelled()
            return True

        outer.withdraw_by(cancel)
        inner.notify(lambda: None if outer.done else pass_on(inner, outer))
        return outer


class TruncatesTheUnknown(Mutant):
    """A receive without a buffer gets at most the length of an eager message."""

    caught_by = ("lengths_need_not_be_known", "any_source_takes_from_all")

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        inner = super().start_recv(src, context, tag, into, dtype=dtype)
        if into is not None:
            return inner

        def end(outer: Request) -> None:
            if inner.error is not None:
                outer.fail(inner.error)
            else:
                outer.complete(inner.envelope, bytes(inner.data or b"")[: self.config.eager_bytes])

        return follow(inner, end)


class HangsOnTheGone(Mutant):
    """Requests to a rank that has left never end."""

    caught_by = ("requests_to_a_closed_peer_fail",)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        inner = super().start_recv(src, context, tag, into, dtype=dtype)
        return follow(
            inner, lambda outer: None if isinstance(inner.error, PeerLost) else pass_on(inner, outer)
        )


class BlamesTheWrongRank(Mutant):
    caught_by = ("requests_to_a_closed_peer_fail",)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        inner = super().start_recv(src, context, tag, into, dtype=dtype)

        def end(outer: Request) -> None:
            if isinstance(inner.error, PeerLost):
                outer.fail(inner.error.of_ranks((0,)))
            else:
                pass_on(inner, outer)

        return follow(inner, end)


class ForgetsTheDead(Mutant):
    """Messages of a rank are lost when it leaves."""

    caught_by = ("receives_may_come_late", "messages_outlive_their_sender")

    def close(self) -> None:
        for endpoint in self.inner._hub.endpoints:
            inbox = endpoint.protocol.inbox
            for message in list(inbox.matcher.all_unexpected()):
                if message.envelope.source == self.rank:
                    inbox.remove(message)
        super().close()


class PanicsOnWildcards(Mutant):
    """A receive from ANY fails as soon as any rank leaves."""

    caught_by = ("any_source_takes_from_all", "wildcards_outlive_a_peer")

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        request = super().start_recv(src, context, tag, into, dtype=dtype)
        if src is not ANY:
            return request
        outer = follow(request, lambda outer: None if outer.done else pass_on(request, outer))
        self.inner.watch(lambda down: None if outer.done else outer.fail(down.error()))
        return outer


class NotifiesTwice(Mutant):
    caught_by = ("watch_reports_once",)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        def twice(down: PeerDown) -> None:
            listener(down)
            listener(down)

        super().watch(twice)


class NeverNotifies(Mutant):
    caught_by = ("requests_to_a_closed_peer_fail", "watch_reports_once")

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        pass


class ClosesItsListenerOnly(Mutant):
    """Closing does not end the rank's own requests."""

    caught_by = ("close_ends_everything_here",)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        inner = super().start_recv(src, context, tag, into, dtype=dtype)
        closed = f"rank {self.rank} is closed"
        return follow(
            inner, lambda outer: None if getattr(inner.error, "what", "") == closed else pass_on(inner, outer)
        )


class TakesAnyRank(Mutant):
    """Ranks are taken modulo the size."""

    caught_by = ("ranks_that_do_not_exist_are_refused",)

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        return super().start_send(dst % self.size, context, tag, data, **how)


class Blocks(Mutant):
    """`start_recv` blocks until the message arrives."""

    caught_by = ("bytes_arrive_as_they_were_sent",)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        request = super().start_recv(src, context, tag, into, dtype=dtype)
        ended = threading.Event()
        request.notify(ended.set)
        ended.wait()
        return request


class KeepsTheCreditOfEndedContexts(Mutant):
    """Unreceived messages of an ended context keep their credit for ever."""

    caught_by = ("an_ended_context_holds_no_credit",)

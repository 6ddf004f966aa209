"""The conformance kit: our backends and a user's pass it, and a backend that breaks a promise is caught."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

import unisono as uni
from unisono.backends.hybrid import HybridBackend
from unisono.backends.local import LocalBackend
from unisono.backends.sub import SubBackend
from unisono.config import Config
from unisono.core.clock import RealRuntime
from unisono.core.envelope import ANY, UNTYPED, Any_
from unisono.core.request import Request
from unisono.core.runtime import Runtime
from unisono.errors import ClosedError, PeerLost, UsageError
from unisono.messaging.actions import Frame, Transmit
from unisono.messaging.backend import Backend, Capabilities
from unisono.messaging.endpoint import Endpoint
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.protocol import Protocol
from unisono.messaging.protocol_backend import ProtocolBackend
from unisono.plans.steps import Buf
from unisono.testing import CASES, ConformanceError, check_backend, run_case, run_local
from unisono.testing.case_rank import payload

NAMES = [case.name for case in CASES]


# -- our own backends -------------------------------------------------------------------------------------


class OwnedView(SubBackend):
    """A view that also closes its parent, so that its ranks leave like those of a real backend."""

    def close(self) -> None:
        self.parent.close()


def local(size: int) -> list[LocalBackend]:
    return LocalBackend.create(size)


def tight(size: int) -> list[LocalBackend]:
    """Almost no message is eager, and segments are short."""
    return LocalBackend.create(size, Config(eager_bytes=48, eager_credit_bytes=256, segment_bytes=512))


def never_eager(size: int) -> list[LocalBackend]:
    return LocalBackend.create(size, Config(eager_bytes=0, eager_credit_bytes=0))


def view(size: int) -> list[SubBackend]:
    """Every second rank of a larger world."""
    world, members = LocalBackend.create(2 * size + 1), range(1, 2 * size, 2)
    return [OwnedView(world[member], members) for member in members]


def view_on_a_view(size: int) -> list[SubBackend]:
    """A view on some ranks of another view, in another order."""
    world = LocalBackend.create(2 * size + 3)
    outer, inner = range(1, 2 * size + 2, 2), range(size, 0, -1)
    views = [OwnedView(world[member], outer) for member in outer]
    return [OwnedView(views[member], inner, ordered=True) for member in inner]


def hybrid_by_peer(size: int) -> list[HybridBackend]:
    """Ranks of equal parity exchange messages through one part, ranks of different parity through another."""
    parts = list(zip(LocalBackend.create(size), LocalBackend.create(size), strict=True))
    return [HybridBackend(pair, lambda peer, r=r: (peer + r) % 2) for r, pair in enumerate(parts)]


# -- a user's backend -------------------------------------------------------------------------------------


class QueueBackend(ProtocolBackend):
    """A user's own backend: a queue and a thread that delivers per rank, on unisono's protocol classes."""

    @classmethod
    def create(cls, size: int) -> list[QueueBackend]:
        ranks: list[QueueBackend] = []
        ranks.extend(cls(rank, size, ranks) for rank in range(size))
        for each in ranks:
            each.deliverer.start()
        return ranks

    def __init__(self, rank: int, size: int, ranks: list[QueueBackend]) -> None:
        config = Config()
        super().__init__(Endpoint(Protocol(rank, config), self._carry), size, config, RealRuntime())
        self.frames: queue.Queue[tuple[int, Frame] | PeerDown | None] = queue.Queue()
        self.deliverer = threading.Thread(target=self._deliver_all, name=f"deliverer-{rank}", daemon=True)
        self._ranks = ranks

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("post")

    def close(self) -> None:
        if not self.endpoint.close():
            return
        self.endpoint.cut()
        for each in self._ranks:
            each.frames.put(None if each is self else PeerDown(self.rank, "left", left=True))

    def _carry(self, outgoing: Transmit) -> tuple[()]:
        frame = outgoing.frame._replace(data=bytes(outgoing.frame.data))
        self._ranks[outgoing.peer].frames.put((self.rank, frame))
        return ()

    def _deliver_all(self) -> None:
        while (item := self.frames.get()) is not None:
            if isinstance(item, PeerDown):
                self.endpoint.peer_down(item)
            elif not self.endpoint.protocol.is_closed:
                self.endpoint.arrive(*item)


FACTORIES = [
    local,
    pytest.param(tight, marks=pytest.mark.more),
    pytest.param(never_eager, marks=pytest.mark.more),
    view,
    pytest.param(view_on_a_view, marks=pytest.mark.more),
    hybrid_by_peer,
    QueueBackend.create,
]


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__qualname__)
def test_a_backend_keeps_its_contract(factory: Callable[[int], Sequence[Backend]]) -> None:
    assert check_backend(factory) == NAMES


# -- backends that break a promise ------------------------------------------------------------------------


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


class MeetsEverything(Mutant):
    """Tags have 31 bits, so ANY also matches collectives and control messages."""

    caught_by = ("any_tag_meets_users_only", "contexts_and_tags_never_meet")

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        return super().start_send(dst, context, tag & 0x7FFFFFFF, data, **how)


class ForgetsHalfTheContext(Mutant):
    """Contexts have 32 bits."""

    caught_by = ("contexts_and_tags_never_meet",)

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

    caught_by = ("sync_sends_end_when_met",)

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

    caught_by = ("any_tag_meets_users_only", "headers_and_types_arrive", "probes_take_nothing")

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


class TellsTwice(Mutant):
    caught_by = ("watch_tells_once",)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        def twice(down: PeerDown) -> None:
            listener(down)
            listener(down)

        super().watch(twice)


class TellsNobody(Mutant):
    caught_by = ("requests_to_a_closed_peer_fail", "watch_tells_once")

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


class Library:
    """A library with its own all_reduce: the last rank to call reduces for all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.waiting: list[tuple[np.ndarray, Request]] = []

    def reduce(self, x: np.ndarray, request: Request, combine: Callable[..., np.ndarray]) -> None:
        with self.lock:
            self.waiting.append((x, request))
            if len(self.waiting) < self.size:
                return
            everyone, self.waiting = self.waiting, []
        total = everyone[0][0].copy()
        for other, _ in everyone[1:]:
            total = combine(total, other)
        for taken, ended in everyone:
            taken[:] = total
            ended.complete()


class OwnAllReduce(Mutant):
    """Runs an all_reduce in a library whose results differ from ours."""

    caught_by = ("all_reduce_keeps_special_values",)
    solves: ClassVar[tuple[str, str]] = ("", "")

    @classmethod
    def create(cls, size: int) -> list[Mutant]:
        backends, library = super().create(size), Library(size)
        for backend in backends:
            backend.library = library
        return backends

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, run_collective=True)

    def run_collective(self, problem: Any, stage: Any) -> Request | None:
        if problem.collective != "all_reduce" or (stage.op.name, stage.dtype.name) != self.solves:
            return None
        request = Request(-1)
        self.library.reduce(stage.memory[Buf.OUT], request, self.combined)
        return request

    @staticmethod
    def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class Saturates(OwnAllReduce):
    """Integers saturate, as in Open MPI's vector code."""

    solves = ("sum", "int8")

    @staticmethod
    def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.clip(a.astype(int) + b, -128, 127).astype(a.dtype)


class LosesNaN(OwnAllReduce):
    """NaN is lost, as by a comparison in C."""

    solves = ("max", "float32")

    @staticmethod
    def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(a > b, a, b)


class LosesTheSignOfZero(OwnAllReduce):
    solves = ("min", "float64")

    @staticmethod
    def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.minimum(a, b) + 0.0


class KeepsTheCreditOfEndedContexts(Mutant):
    """Unreceived messages of an ended context keep their credit for ever."""

    caught_by = ("an_ended_context_holds_no_credit",)


MUTANTS = [
    mutant
    for mutant in (*Mutant.__subclasses__(), *OwnAllReduce.__subclasses__())
    if mutant is not OwnAllReduce
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_backend_that_breaks_a_promise_is_caught(mutant: type[Mutant]) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_backend(mutant.create, names=mutant.caught_by, timeout=1.0)
    assert caught.value.case in mutant.caught_by
    assert 0 <= caught.value.rank < 4
    assert f"case {caught.value.case!r}, rank {caught.value.rank}: expected that" in str(caught.value)


# -- the kit itself ---------------------------------------------------------------------------------------


def test_the_names_of_cases_are_unique_and_say_what_they_promise() -> None:
    assert len(set(NAMES)) == len(CASES) >= 40
    for case in CASES:
        assert case.promise.endswith("."), case.name


def test_only_the_named_cases_run() -> None:
    made: list[int] = []

    def factory(size: int) -> list[LocalBackend]:
        made.append(size)
        return LocalBackend.create(size)

    chosen = ["probes_take_nothing", "ranks_know_who_they_are"]
    assert check_backend(factory, names=chosen) == ["ranks_know_who_they_are", "probes_take_nothing"]
    assert made == [3, 2]


def test_a_name_that_is_no_case_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="probes_take_everything: no such case; allowed: ranks_know"):
        check_backend(local, names=["probes_take_everything"])


def test_cases_for_capabilities_that_a_backend_lacks_are_left_out() -> None:
    class Modest(Mutant):
        """Has neither wildcards nor sync sends, and declares that."""

        caught_by = ()

        @property
        def capabilities(self) -> Capabilities:
            return Capabilities("modest", sync_send=False, wildcards=False)

    passed = check_backend(Modest.create, names=["sync_sends_end_when_met", "any_tag_takes_in_order"])
    assert passed == []
    assert check_backend(Modest.create, names=["bytes_arrive_as_they_were_sent"]) != []


def test_a_factory_that_makes_other_ranks_is_caught() -> None:
    with pytest.raises(ConformanceError, match=r"ranks 0 to 2 in order; got \[2, 1, 0\]"):
        check_backend(lambda size: local(size)[::-1], names=["ranks_know_who_they_are"])


def test_the_first_rank_that_fails_is_the_one_named() -> None:
    class Odd(Mutant):
        """Only rank 2 reports a wrong size."""

        caught_by = ()

        @property
        def size(self) -> int:
            return self.inner.size + (self.rank == 2)

    with pytest.raises(ConformanceError, match="rank is below size, which is 3") as caught:
        check_backend(Odd.create, names=["ranks_know_who_they_are"])
    assert caught.value.rank == 2


def test_a_case_closes_its_backend_even_if_it_fails() -> None:
    backend, _absent = LocalBackend.create(2)
    case = next(case for case in CASES if case.name == "receives_may_come_late")
    with pytest.raises(ConformanceError, match="barrier: a receive from 1 ends; it hangs"):
        run_case(case, backend, timeout=0.05)
    assert isinstance(backend.start_recv(0, 5, 0, None).error, ClosedError)


def test_payloads_differ_by_sender_index_and_place() -> None:
    seen = {bytes(payload(rank, index, 8)) for rank in range(16) for index in range(256)}
    assert len(seen) == 16 * 256
    assert bytes(payload(3, 4, 1000))[:7] == bytes(payload(3, 4, 7))
    assert len(set(payload(1, 2, 100_000))) == 256


# -- in-process ranks for the tests of programs -----------------------------------------------------------


def test_run_local_gives_results_by_rank() -> None:
    def program(comm: uni.Communicator, factor: int) -> int:
        return factor * comm.all_reduce(comm.rank) + comm.rank

    assert run_local(program, 4, 10) == [60, 61, 62, 63]


def test_run_local_raises_the_first_failure_not_its_consequences() -> None:
    def program(comm: uni.Communicator) -> None:
        if comm.rank == 2:
            raise ZeroDivisionError("rank two divides")
        comm.barrier()

    for _ in range(10):
        with pytest.raises(ZeroDivisionError, match="rank two divides"):
            run_local(program, 4)


def test_run_local_says_which_rank_hangs_and_where() -> None:
    release = threading.Event()

    def linger() -> None:
        release.wait(30)

    def program(comm: uni.Communicator) -> None:
        if comm.rank == 1:
            linger()

    try:
        with pytest.raises(TimeoutError, match=r"not ended after 0.2 s: rank 1 is at .*in linger"):
            run_local(program, 3, timeout=0.2)
    finally:
        release.set()


def test_run_local_ends_ranks_that_wait_for_one_that_hangs() -> None:
    release = threading.Event()

    def program(comm: uni.Communicator) -> None:
        if comm.rank == 1:
            release.wait(30)
        else:
            comm.recv_bytes(1)

    try:
        with pytest.raises(TimeoutError, match=r"rank 0 is at .*; rank 1 is at "):
            run_local(program, 2, timeout=0.2)
    finally:
        release.set()


def test_run_local_passes_the_settings_on() -> None:
    def program(comm: uni.Communicator) -> int:
        return comm.backend.config.segment_bytes

    assert run_local(program, 2, config=Config(segment_bytes=4096)) == [4096, 4096]


def test_run_local_takes_numpy_results() -> None:
    results = run_local(lambda comm: comm.all_gather(np.array([comm.rank])), 3)
    assert all((result == [[0], [1], [2]]).all() for result in results)

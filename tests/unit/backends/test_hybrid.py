"""A hybrid of several backends: routes by peer, receives from any source, order, losses."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import PATIENCE_S, run_each

import unisono as uni
from unisono.backends.hybrid import HybridBackend, Route
from unisono.backends.local import LocalBackend
from unisono.config import Config
from unisono.core.envelope import ANY
from unisono.core.request import Request
from unisono.errors import ClosedError, PeerLost, UsageError
from unisono.messaging.backend import Capabilities
from unisono.messaging.peer_down import PeerDown

CONTEXT = 79


class Counting(LocalBackend):
    """A backend that counts the messages it sends."""

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        self.tags = [*getattr(self, "tags", []), tag]
        return super().start_send(dst, context, tag, data, **how)


def by_parity(rank: int) -> Route:
    """Ranks of one parity reach each other by the first part, ranks of different parity by the second."""
    return lambda peer: (rank + peer) % 2


def world(size: int = 3, **settings: Any) -> list[HybridBackend]:
    """Rank 1 reaches rank 0 and 2 by the second part; ranks 0 and 2 reach each other by the first."""
    config = Config(**settings)
    parts = zip(Counting.create(size, config), Counting.create(size, config), strict=True)
    return [HybridBackend(both, by_parity(rank)) for rank, both in enumerate(parts)]


def send(backend: HybridBackend, dst: int, data: bytes = b"", tag: int = 0, **how: Any) -> Request:
    return backend.start_send(dst, CONTEXT, tag, memoryview(data), **how)


def recv(backend: HybridBackend, src: Any = ANY, tag: Any = ANY, into: Any = None) -> Request:
    return backend.start_recv(src, CONTEXT, tag, into)


def wait(request: Request) -> Request:
    ended = threading.Event()
    request.notify(ended.set)
    assert ended.wait(PATIENCE_S), "a request does not end"
    return request


def close_all(backends: list[HybridBackend]) -> None:
    for backend in backends:
        backend.close()


def idle(backends: list[HybridBackend]) -> bool:
    """Whether no part holds a receive, a probe or a message."""
    parts = [part for backend in backends for part in backend._parts]
    return all(part.endpoint.protocol.inbox.is_idle() for part in parts)  # type: ignore[attr-defined]


# -- parts ------------------------------------------------------------------------------------------------


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="parts is empty"):
        HybridBackend([], by_parity(0))
    three, two = LocalBackend.create(3), LocalBackend.create(2)
    with pytest.raises(UsageError, match=r"parts disagree on rank and size: \[\(0, 3\), \(0, 2\)\]"):
        HybridBackend([three[0], two[0]], by_parity(0))
    with pytest.raises(UsageError, match="parts disagree"):
        HybridBackend([three[0], three[1]], by_parity(0))


class Limited(LocalBackend):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("limited", True, True, False, False, False)


def test_a_hybrid_has_the_capabilities_that_all_its_parts_have() -> None:
    whole, limited = LocalBackend.create(1)[0], Limited.create(1)[0]
    assert HybridBackend([whole, whole], by_parity(0)).capabilities == Capabilities("local+local")
    mixed = HybridBackend([whole, limited], by_parity(0)).capabilities
    assert mixed == Capabilities("local+limited", sync_send=False, wildcards=False)


def test_clock_settings_and_hosts_are_those_of_the_first_part() -> None:
    first, second = LocalBackend.create(1, Config(segment_bytes=4096))[0], LocalBackend.create(1)[0]
    both = HybridBackend([first, second], by_parity(0))
    assert (both.config, both.runtime, both.hosts()) == (first.config, first.runtime, ())


# -- routes -----------------------------------------------------------------------------------------------


def test_every_message_takes_the_part_that_reaches_its_peer() -> None:
    ranks = world(4)
    for dst in (1, 2, 3):
        assert send(ranks[0], dst, bytes([dst]), tag=dst).done
    assert [part.tags for part in ranks[0]._parts] == [[2], [1, 3]]  # type: ignore[attr-defined]
    for dst in (3, 2, 1):
        assert recv(ranks[dst], 0, ANY).data == bytes([dst])
    assert idle(ranks)
    close_all(ranks)


def test_collectives_and_groups_work_across_parts() -> None:
    ranks = world(3)

    def program(comm: uni.Communicator) -> Any:
        comm.send(np.array([comm.rank]), (comm.rank + 1) % 3)
        got = np.empty(1, np.int64)
        comm.recv(got, (comm.rank - 1) % 3)
        half = comm.split(comm.rank % 2)
        assert half is not None
        return comm.all_reduce(int(got[0])), half.size

    comms = [uni.Communicator.world(rank) for rank in ranks]
    assert run_each(program, comms).values() == [(3, 2), (3, 1), (3, 2)]
    for comm in comms:
        comm.close()


# -- receives from any source -----------------------------------------------------------------------------


def test_a_receive_from_any_source_takes_from_whichever_part_has_a_message() -> None:
    ranks = world()
    requests = [recv(ranks[0]) for _ in range(4)]
    for src in (1, 2, 2, 1):
        send(ranks[src], 0, bytes([src]))
    assert [request.data for request in requests] == [b"\1", b"\2", b"\2", b"\1"]
    send(ranks[1], 0, b"waits")
    assert recv(ranks[0]).data == b"waits"
    assert idle(ranks)
    close_all(ranks)


def test_later_receives_wait_behind_one_from_any_source() -> None:
    """This includes receives that could go straight to their part, with and without a tag."""
    ranks = world()
    first, exact, other, last = (
        recv(ranks[0]),
        recv(ranks[0], 1, 4),
        recv(ranks[0], 2, 4),
        recv(ranks[0], 1),
    )
    for i in range(3):
        send(ranks[1], 0, bytes([i]), 4)
    assert [request.data for request in (first, exact, last)] == [b"\0", b"\1", b"\2"]
    assert not other.done
    send(ranks[2], 0, b"other", 4)
    assert other.data == b"other"
    assert idle(ranks)
    close_all(ranks)


def test_a_receive_does_not_wait_behind_one_that_matches_other_messages() -> None:
    ranks = world()
    any_source = recv(ranks[0], ANY, 5)
    exact = recv(ranks[0], 1, 4)
    send(ranks[1], 0, b"mine", 4)
    assert exact.data == b"mine"
    assert not any_source.done
    assert any_source.cancel()
    assert idle(ranks)
    close_all(ranks)


def test_a_receive_whose_buffer_is_too_short_leaves_its_message_to_the_next() -> None:
    ranks = world()
    short = recv(ranks[0], into=memoryview(bytearray(3)))
    next_one = recv(ranks[0], 1, 1)
    send(ranks[1], 0, b"too long", 1)
    assert isinstance(short.error, UsageError)
    assert short.envelope is not None
    assert short.envelope.nbytes == 8
    assert next_one.data == b"too long"
    assert idle(ranks)
    close_all(ranks)


def test_a_cancelled_receive_leaves_the_queue() -> None:
    ranks = world()
    first, second, third = recv(ranks[0]), recv(ranks[0]), recv(ranks[0], 1, 1)
    assert second.cancel()
    assert isinstance(second.error, ClosedError)
    assert not second.cancel()
    send(ranks[1], 0, b"one", 1)
    send(ranks[1], 0, b"two", 1)
    assert [first.data, third.data] == [b"one", b"two"]
    assert not first.cancel()
    assert idle(ranks)
    close_all(ranks)


def test_a_probe_from_any_source_sees_all_parts_and_takes_nothing() -> None:
    ranks = world()
    early = ranks[0].probe(ANY, CONTEXT, ANY)
    assert not early.done
    send(ranks[1], 0, b"seen", 3)
    for probe in (early, ranks[0].probe(1, CONTEXT, ANY), ranks[0].probe(ANY, CONTEXT, 3)):
        assert probe.envelope is not None
        assert (probe.envelope.source, probe.envelope.tag) == (1, 3)
    assert not ranks[0].probe(ANY, CONTEXT, 2).done
    assert recv(ranks[0]).data == b"seen"
    close_all(ranks)


@pytest.mark.parametrize("seed", range(6))
def test_receives_from_any_source_and_cancels_on_many_threads_lose_nothing(seed: int) -> None:
    """Each message is received once, by a receive that was not cancelled; no receive or message is left."""
    ranks = world(eager_bytes=32, eager_credit_bytes=800)
    sent: list[bytes] = []
    taken: list[bytes] = []
    lock = threading.Lock()

    def sender(rank: HybridBackend, rng: random.Random) -> None:
        for i in range(150):
            word = f"{rank.rank}:{i}:".encode() * rng.choice([1, 9])
            with lock:
                sent.append(word)
            send(rank, 0, word, rng.randrange(4))

    def taker(rank: HybridBackend, rng: random.Random) -> None:
        for _ in range(150):
            request = recv(rank, rng.choice([ANY, 1, 2]), rng.choice([ANY, 0, 1]))
            if rng.random() < 0.6 and request.cancel():
                continue
            request.notify(lambda r=request: r.error or taken.append(bytes(r.data or b"")))  # type: ignore[misc]

    jobs = [(sender, ranks[1]), (sender, ranks[2]), *[(taker, ranks[0])] * 3]
    rngs = [random.Random(f"{seed} {i}") for i in range(len(jobs))]
    run_each(lambda job: job[0][0](job[0][1], job[1]), list(zip(jobs, rngs, strict=True))).values()
    while (probe := ranks[0].probe(ANY, CONTEXT, ANY)).done:
        assert probe.envelope is not None
        taken.append(bytes(wait(recv(ranks[0], probe.envelope.source, probe.envelope.tag)).data or b""))
    assert probe.cancel()
    close_all(ranks)
    assert Counter(taken) == Counter(sent)


# -- endings ----------------------------------------------------------------------------------------------


def test_a_loss_is_reported_once_whichever_part_sees_it() -> None:
    ranks = world()
    reported: list[PeerDown] = []
    ranks[0].watch(reported.append)
    ranks[1]._parts[1].kill("second link cut")  # type: ignore[attr-defined]
    assert reported == [PeerDown(1, "second link cut")]
    ranks[1]._parts[0].kill("first link cut")  # type: ignore[attr-defined]
    ranks[2].close()
    assert reported[1:] == [PeerDown(2, "left", left=True)]
    late: list[PeerDown] = []
    ranks[0].watch(late.append)
    assert sorted(down.rank for down in late) == [1, 2]
    close_all(ranks)


def test_a_message_that_one_part_still_holds_is_received_after_its_sender_left() -> None:
    ranks = world(2)
    send(ranks[1], 0, b"on the second part", 1)
    ranks[1].close()
    for src in (1, ANY):
        probe = ranks[0].probe(src, CONTEXT, ANY)
        assert probe.envelope is not None
        assert probe.envelope.tag == 1
    assert recv(ranks[0]).data == b"on the second part"
    assert isinstance(recv(ranks[0], 1).error, PeerLost)
    close_all(ranks)


def test_receives_that_need_a_rank_end_when_it_leaves() -> None:
    ranks = world()
    any_source = recv(ranks[0])
    waiting = [recv(ranks[0], 1), ranks[0].probe(1, CONTEXT, ANY), recv(ranks[0], 1, 4)]
    ranks[1].close()
    for request in waiting:
        assert isinstance(request.error, PeerLost)
        assert request.error.ranks == (1,)
    send(ranks[2], 0, b"from another rank")
    assert any_source.data == b"from another rank"
    assert idle([ranks[0]])
    close_all(ranks)


def test_closing_closes_every_part() -> None:
    ranks = world()
    any_source, exact = recv(ranks[0]), recv(ranks[0], 1, 1)
    ranks[0].close()
    ranks[0].close()
    assert all(isinstance(request.error, ClosedError) for request in (any_source, exact, recv(ranks[0])))
    for src in (1, 2):
        assert isinstance(send(ranks[src], 0).error, PeerLost)
    close_all(ranks)

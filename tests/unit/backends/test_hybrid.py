"""Several backends as one: routes, wildcards over all parts, order, losses told once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import PATIENCE_S, run_each

import unisono as uni
from unisono.backends.hybrid import HybridBackend
from unisono.backends.local import LocalBackend
from unisono.config import Config
from unisono.core.envelope import ANY, Tags
from unisono.core.request import Request
from unisono.errors import ClosedError, PeerLost, UsageError
from unisono.messaging.backend import Capabilities, PeerDown

CONTEXT = 79


class Counting(LocalBackend):
    """Counts the messages that it carries."""

    def start_send(self, dst: int, context: int, tag: int, data: memoryview, **how: Any) -> Request:
        self.tags = [*getattr(self, "tags", []), tag]
        return super().start_send(dst, context, tag, data, **how)


def by_tag(peer: int, tag: int) -> int:
    """Even tags of users by the first part, odd ones by the second."""
    return tag % 2


def pair(route: Any = by_tag, size: int = 2, **settings: Any) -> list[HybridBackend]:
    config = Config(**settings)
    parts = zip(Counting.create(size, config), Counting.create(size, config), strict=True)
    return [HybridBackend(both, route) for both in parts]


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
    return all(part._hub.inboxes[part.rank].is_idle() for part in parts)  # type: ignore[attr-defined]


# -- what it is made of -----------------------------------------------------------------------------------


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="parts is empty"):
        HybridBackend([], by_tag)
    three, two = LocalBackend.create(3), LocalBackend.create(2)
    with pytest.raises(UsageError, match=r"parts disagree on rank and size: \[\(0, 3\), \(0, 2\)\]"):
        HybridBackend([three[0], two[0]], by_tag)
    with pytest.raises(UsageError, match="parts disagree"):
        HybridBackend([three[0], three[1]], by_tag)


class Limited(LocalBackend):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("limited", True, True, False, False, False)


def test_it_can_do_what_all_parts_can() -> None:
    whole, limited = LocalBackend.create(1)[0], Limited.create(1)[0]
    assert HybridBackend([whole, whole], by_tag).capabilities == Capabilities("local+local")
    mixed = HybridBackend([whole, limited], by_tag).capabilities
    assert mixed == Capabilities("local+limited", sync_send=False, wildcards=False)


def test_clock_settings_and_hosts_are_those_of_the_first_part() -> None:
    first, second = LocalBackend.create(1, Config(segment_bytes=4096))[0], LocalBackend.create(1)[0]
    both = HybridBackend([first, second], by_tag)
    assert (both.config, both.runtime, both.hosts()) == (first.config, first.runtime, ())


# -- routes -----------------------------------------------------------------------------------------------


def test_every_message_takes_the_part_that_the_route_names() -> None:
    ranks = pair()
    for tag in (0, 1, 2, 3, 5):
        assert send(ranks[0], 1, bytes([tag]), tag).done
    assert [part.tags for part in ranks[0]._parts] == [[0, 2], [1, 3, 5]]  # type: ignore[attr-defined]
    for tag in (5, 0, 3, 2, 1):
        assert recv(ranks[1], 0, tag).data == bytes([tag])
    assert idle(ranks)
    close_all(ranks)


def test_collectives_and_messages_can_go_apart() -> None:
    ranks = pair(lambda peer, tag: 0 if Tags.is_users(tag) else 1, size=3)

    def program(comm: uni.Communicator) -> Any:
        comm.send(np.array([comm.rank]), (comm.rank + 1) % 3)
        got = np.empty(1, np.int64)
        comm.recv(got, (comm.rank - 1) % 3)
        return comm.all_reduce(int(got[0]))

    comms = [uni.Communicator.world(rank) for rank in ranks]
    assert run_each(program, comms).values() == [3, 3, 3]
    for rank in ranks:
        users, rest = rank._parts
        assert all(Tags.is_users(tag) for tag in users.tags)  # type: ignore[attr-defined]
        assert not any(Tags.is_users(tag) for tag in rest.tags)  # type: ignore[attr-defined]
    for comm in comms:
        comm.close()


# -- wildcards --------------------------------------------------------------------------------------------


def test_a_wildcard_takes_from_whichever_part_has_a_message() -> None:
    ranks = pair()
    requests = [recv(ranks[1]) for _ in range(4)]
    for tag in (1, 0, 0, 1):
        send(ranks[0], 1, bytes([tag]), tag)
    assert [request.data for request in requests] == [b"\1", b"\0", b"\0", b"\1"]
    send(ranks[0], 1, b"waits", 1)
    assert recv(ranks[1]).data == b"waits"
    assert idle(ranks)
    close_all(ranks)


def test_later_receives_stand_behind_a_wildcard() -> None:
    """Also those that could go straight to their part."""
    ranks = pair()
    wild, exact, other, last = (
        recv(ranks[1]),
        recv(ranks[1], 0, 4),
        recv(ranks[1], 0, 5),
        recv(ranks[1], 0, 4),
    )
    for i in range(3):
        send(ranks[0], 1, bytes([i]), 4)
    assert [request.data for request in (wild, exact, last)] == [b"\0", b"\1", b"\2"]
    assert not other.done
    send(ranks[0], 1, b"odd", 5)
    assert other.data == b"odd"
    assert idle(ranks)
    close_all(ranks)


def test_a_receive_does_not_stand_behind_a_wildcard_that_wants_something_else() -> None:
    ranks = pair(size=3)
    wild = recv(ranks[1], 2)
    exact = recv(ranks[1], 0, 4)
    send(ranks[0], 1, b"mine", 4)
    assert exact.data == b"mine"
    assert not wild.done
    assert wild.cancel()
    assert idle(ranks)
    close_all(ranks)


def test_a_receive_without_room_leaves_its_message_to_the_next_in_line() -> None:
    ranks = pair()
    short = recv(ranks[1], into=memoryview(bytearray(3)))
    roomy = recv(ranks[1], 0, 1)
    send(ranks[0], 1, b"too long", 1)
    assert isinstance(short.error, UsageError)
    assert short.envelope is not None
    assert short.envelope.nbytes == 8
    assert roomy.data == b"too long"
    assert idle(ranks)
    close_all(ranks)


def test_a_cancelled_wildcard_is_out_of_the_line() -> None:
    ranks = pair()
    first, second, third = recv(ranks[1]), recv(ranks[1]), recv(ranks[1], 0, 1)
    assert second.cancel()
    assert isinstance(second.error, ClosedError)
    assert not second.cancel()
    send(ranks[0], 1, b"one", 1)
    send(ranks[0], 1, b"two", 1)
    assert [first.data, third.data] == [b"one", b"two"]
    assert not first.cancel()
    assert idle(ranks)
    close_all(ranks)


def test_a_wildcard_probe_sees_all_parts_and_takes_nothing() -> None:
    ranks = pair()
    early = ranks[1].probe(ANY, CONTEXT, ANY)
    assert not early.done
    send(ranks[0], 1, b"seen", 3)
    for probe in (early, ranks[1].probe(0, CONTEXT, ANY), ranks[1].probe(ANY, CONTEXT, 3)):
        assert probe.envelope is not None
        assert (probe.envelope.source, probe.envelope.tag) == (0, 3)
    assert not ranks[1].probe(ANY, CONTEXT, 2).done
    assert recv(ranks[1]).data == b"seen"
    close_all(ranks)


@pytest.mark.parametrize("seed", range(6))
def test_wildcards_and_cancels_on_many_threads_lose_nothing(seed: int) -> None:
    """Each message is taken once, by a receive that was not withdrawn; nothing stays behind."""
    ranks = pair(size=3, eager_bytes=32, eager_credit_bytes=800)
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


def test_a_loss_is_told_once_whichever_part_sees_it() -> None:
    ranks = pair(size=3)
    told: list[PeerDown] = []
    ranks[0].watch(told.append)
    ranks[1]._parts[1].kill("second link cut")  # type: ignore[attr-defined]
    assert told == [PeerDown(1, "second link cut")]
    ranks[1]._parts[0].kill("first link cut")  # type: ignore[attr-defined]
    ranks[2].close()
    assert told[1:] == [PeerDown(2, "left", left=True)]
    late: list[PeerDown] = []
    ranks[0].watch(late.append)
    assert sorted(down.rank for down in late) == [1, 2]
    close_all(ranks)


def test_what_one_part_still_holds_comes_before_the_news_that_its_sender_left() -> None:
    ranks = pair()
    send(ranks[1], 0, b"on the second part", 1)
    ranks[1].close()
    for _ in range(2):
        probe = ranks[0].probe(1, CONTEXT, ANY)
        assert probe.envelope is not None
        assert probe.envelope.tag == 1
    assert recv(ranks[0], 1).data == b"on the second part"
    assert isinstance(recv(ranks[0], 1).error, PeerLost)
    close_all(ranks)


def test_who_waits_on_all_parts_for_a_rank_that_leaves_hears_of_it_once() -> None:
    ranks = pair(size=3)
    waiting = [recv(ranks[0], 1), ranks[0].probe(1, CONTEXT, ANY)]
    behind = recv(ranks[0], 1, 4)
    ranks[1].close()
    for request in (*waiting, behind):
        assert isinstance(request.error, PeerLost)
        assert request.error.ranks == (1,)
    assert idle([ranks[0]])
    close_all(ranks)


def test_closing_closes_every_part() -> None:
    ranks = pair()
    wild, exact = recv(ranks[0]), recv(ranks[0], 1, 1)
    ranks[0].close()
    ranks[0].close()
    assert all(isinstance(request.error, ClosedError) for request in (wild, exact, recv(ranks[0])))
    for tag in (0, 1):
        assert isinstance(send(ranks[1], 0, b"", tag).error, PeerLost)
    close_all(ranks)

"""A rank of this process aborts: every pending operation on every rank ends with the reason.

Documented are 0.5 s. The tests allow 1 s, in which time without a core on a loaded machine does not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.failing_ranks import (
    SMALL,
    ProgramError,
    backend_of,
    close_all,
    ended_by,
    is_in_time,
    metronome,  # noqa: F401
    one_collective,
    ramp,
    seeds,
)
from tests.support.ranks import reference_local, run_each, run_ranks

import unisono as uni
from unisono.backends.local import LocalBackend
from unisono.comm.control_messages import GroupFailure
from unisono.config import Config
from unisono.core.envelope import Tags
from unisono.core.request import Request
from unisono.errors import (
    DeadlineExceeded,
    PeerAborted,
    PeerLost,
)

PENDING: dict[str, Callable[[uni.Communicator], Any]] = {
    "recv": lambda c: c.recv(np.empty(5), 3),
    "recv from another": lambda c: c.recv_bytes((c.rank + 1) % 3),
    "recv from ANY": lambda c: c.recv(np.empty(5)),
    "send": lambda c: c.send(np.ones(100_000), 3),
    "probe": lambda c: c.probe(3, 5),
    "sendrecv": lambda c: c.sendrecv(np.ones(100_000), 3, np.empty(5), 3),
    "all_reduce": lambda c: c.all_reduce(np.ones(5)),
    "barrier": lambda c: c.barrier(),
    "all_gather_v": lambda c: c.all_gather_v(np.ones(c.rank)),
    "split": lambda c: c.split(0),
    "broadcast_object": lambda c: c.broadcast_object({"a": 1}, 3),
}


@pytest.mark.parametrize("verb", PENDING)
@pytest.mark.parametrize("how", ["exception", "abort"])
def test_a_rank_that_aborts_ends_every_pending_operation(verb: str, how: str) -> None:
    """Messages end too, also those between other ranks; the aborted rank takes part in nothing any more."""
    gave_up_at: list[float] = []

    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 3:
            for peer in range(3):
                comm.recv_bytes(peer, 1)
            gave_up_at.append(time.monotonic())
            if how == "abort":
                comm.abort("ProgramError: spilled coffee")
                return None
            with comm:
                raise ProgramError("spilled coffee\nand more of it")
        comm.send(b"ready", 3, 1)
        error = ended_by(PeerAborted, lambda: PENDING[verb](comm))
        at = time.monotonic()
        with pytest.raises(PeerAborted):  # every operation on it fails
            comm.send(b"x", (comm.rank + 1) % 3)
        return error, at

    worlds = uni.local(4)
    ended = run_each(program, worlds)
    for error, at in ended[:3]:
        assert error.rank == 3
        assert "ProgramError: spilled coffee" in str(error)
        assert "and more" not in str(error)
        assert is_in_time(gave_up_at[0], at)
    assert (ended[3] is None) if how == "abort" else isinstance(ended[3], ProgramError)
    close_all(worlds)


def test_ctrl_c_in_one_rank_reaches_the_others() -> None:
    def program(comm: uni.Communicator) -> Any:
        if comm.rank == 0:
            comm.recv_bytes(1)
            raise KeyboardInterrupt
        comm.send(b"ready", 0)
        comm.barrier()

    ended = run_ranks(program, 2)
    assert isinstance(ended[0], KeyboardInterrupt)
    assert isinstance(ended[1], PeerAborted)
    assert (ended[1].rank, "KeyboardInterrupt" in str(ended[1])) == (0, True)


def test_a_reduce_function_that_raises_is_reported_on_every_rank() -> None:
    def program(comm: uni.Communicator) -> Any:
        def add(left: Any, right: Any) -> Any:
            if comm.rank == 2:
                raise ProgramError("cannot add")
            return left + right

        comm.all_reduce(np.ones(4), uni.op(add, name="add"), algorithm="tree")

    ended = run_ranks(program, 4)
    assert isinstance(ended[2], ProgramError)
    for rank in (0, 1, 3):
        assert isinstance(ended[rank], PeerAborted)
        assert ended[rank].rank == 2
        assert "ProgramError: cannot add" in str(ended[rank])


# -- never a wrong result ---------------------------------------------------------------------------------


class Forgetful(LocalBackend):
    """A rank that never sends the `forgotten`-th message of a plan to rank 4, as if it had withdrawn it."""

    forgotten: int | None = None
    sent = 0

    def start_send(self, dst: int, context: int, tag: int, *args: Any, **how: Any) -> Request:
        if dst == 4 and tag == Tags.collective(0, 1):
            self.sent += 1
            if self.sent == self.forgotten:
                request = Request(dst)
                request.withdraw_by(lambda r: r.cancelled() or True)  # type: ignore[func-returns-value]
                return request
        return super().start_send(dst, context, tag, *args, **how)


@pytest.mark.parametrize("forgotten", [1, 2, 4])
def test_a_missing_message_is_never_replaced_by_a_later_one(forgotten: int) -> None:
    """Rank 0 scatters; rank 4 forwards pieces to ranks 5, 6 and 7, which must not get each other's pieces."""
    backends = Forgetful.create(8, Config(segment_bytes=256, eager_bytes=1024))
    backends[0].forgotten = forgotten  # type: ignore[attr-defined]
    x = np.stack([ramp(128, rank, 1) for rank in range(8)])

    def program(comm: uni.Communicator) -> Any:
        try:
            got = comm.scatter(x if comm.rank == 0 else None, timeout=0.5, algorithm="tree")
        except DeadlineExceeded:
            return "gave up"
        np.testing.assert_array_equal(got, x[comm.rank])
        return "right"

    worlds = [uni.Communicator.world(backend) for backend in backends]
    ended = run_each(program, worlds).values()
    assert ended[0] == ended[4] == "gave up"
    close_all(worlds)


# -- random endings ---------------------------------------------------------------------------------------


def endings(seed: int) -> tuple[int, dict[int, tuple[str, int]]]:
    """A size; and for each rank that ends, how it ends and at which turn."""
    rng = random.Random(f"endings {seed}")
    size = rng.randint(2, 7)
    ends = rng.sample(range(size), rng.randint(1, min(3, size)))
    return size, {rank: (rng.choice(["die", "leave", "raise", "abort"]), rng.randint(0, 12)) for rank in ends}


def live_until_the_end(comm: uni.Communicator, seed: int, struck: dict[int, str]) -> None:
    """Run collectives, messages and groups, until this rank or another one ends."""
    rng, (size, ends) = random.Random(seed), endings(seed)
    rank = comm.rank
    for turn in range(300):
        how, when = ends.get(rank, ("", -1))
        if turn == when:
            struck[rank] = how
            if how == "die":
                backend_of(comm).kill()
            elif how == "leave":
                comm.close()
                return
            elif how == "abort":
                comm.abort(f"ProgramError: of rank {rank}")
            raise ProgramError(f"of rank {rank}")
        if turn % 5 == 3:
            got = np.empty(30)
            comm.sendrecv(ramp(30, rank, turn), (rank + 1) % size, got, (rank - 1) % size, tag=turn)
            np.testing.assert_array_equal(got, ramp(30, (rank - 1) % size, turn))
        elif turn % 7 == 6:
            group = comm.split(rank % 2)
            assert group is not None
            assert group.all_reduce(1) == group.size
        else:
            one_collective(comm, rng, turn)


def live_and_leave(comm: uni.Communicator, seed: int, struck: dict[int, str]) -> Any:
    with comm:
        return live_until_the_end(comm, seed, struck)


@seeds(80, 20)
def test_whatever_happens_no_rank_hangs_and_only_ended_ranks_are_named(first: int) -> None:
    for seed in range(first, first + 20):
        size, _ = endings(seed)
        struck: dict[int, str] = {}
        ended = run_each(
            lambda comm, seed=seed, struck=struck: live_and_leave(comm, seed, struck),
            reference_local(size, SMALL),
        )
        lost = {rank for rank, how in struck.items() if how in ("die", "leave")}
        gave_up = set(struck) - lost
        for rank, error in enumerate(ended):
            where = f"seed {seed}, rank {rank} of {size}, {struck}: {error!r}"
            if rank in struck:
                assert error is None or isinstance(error, ProgramError), where
            elif isinstance(error, PeerLost):
                assert set(error.ranks) <= lost, where
            else:
                assert isinstance(error, PeerAborted), where
                assert error.rank in gave_up, where
                assert f"ProgramError: of rank {error.rank}" in str(error), where


def test_an_abort_is_sent_before_it_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller may close at once, and nothing follows a goodbye: the others would blame the wrong rank."""
    comms = uni.local(3)
    group = comms[1]._group
    send, aborted = group.control.send, []

    def send_abort(ranks: Any, message: Any, *lane: Any) -> None:
        if isinstance(message, GroupFailure):
            group.check_usable(is_collective=True)
            aborted.append(tuple(ranks))
        send(ranks, message, *lane)

    monkeypatch.setattr(group.control, "send", send_abort)
    comms[0].abort("ProgramError: of rank 0")
    for comm in comms[1:]:
        with pytest.raises(PeerAborted, match="ProgramError: of rank 0"):
            comm.barrier()
    assert aborted == [(0, 1, 2)]
    for comm in comms:
        comm.close()

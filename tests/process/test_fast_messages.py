"""Messages on the fast path: the same order, results and errors as in Python."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.engines import MakeWorld, every_kind, found, outcome, world
from tests.support.metronome import stopwatch
from tests.support.oracle import Notes
from tests.support.ranks import run_each, wait_until

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.errors import ClosedError, PeerAborted, PeerLost, UsageError

__all__ = ["world"]

TYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex128")
# Eager, at the eager limit, in one piece, in several pieces.
COUNTS = (0, 1, 7, 2048, 2049, 100_003)


def counts_of(comm: Communicator) -> tuple[int, int]:
    """The numbers of calls that ended on the fast path, and that Python adopted."""
    native_group = comm._group.native
    assert native_group is not None
    return native_group.ended, native_group.adopted


def ramp(count: int, dtype: str, salt: int) -> np.ndarray[Any, Any]:
    return ((np.arange(count) * 7 + salt) % 251).astype(dtype)


# -- right results ----------------------------------------------------------------------------------------


@every_kind
def test_messages_arrive_unchanged(world: MakeWorld, kind: str) -> None:
    comms = world(2, kind)
    cases = [(dtype, count) for dtype in TYPES for count in COUNTS]

    def program(comm: Communicator) -> Notes:
        notes, other = Notes(), 1 - comm.rank
        for salt, (dtype, count) in enumerate(cases):
            there, back = ramp(count, dtype, salt), ramp(count, dtype, salt + 100)
            into = np.zeros(count, dtype)
            if comm.rank == 0:
                assert comm.send(there, other, tag=salt) is None
                status = comm.recv(into, src=other)
                notes.expect(into, back, f"back {dtype} {count}")
            else:
                status = comm.recv(into, other, salt)
                notes.expect(into, there, f"there {dtype} {count}")
                comm.send(back, dst=other, tag=salt)
            assert type(status) is uni.Status
            assert status == (other, salt, into.nbytes)
        return notes

    assert found(comms, program) == []
    # On a loaded machine some calls may wait for so long that Python adopts them.
    assert all(counts_of(comm)[0] > len(cases) for comm in comms)


def test_shapes_shorter_messages_and_messages_to_oneself(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes, rank, other = Notes(), comm.rank, 1 - comm.rank
        comm.send(np.arange(12.0).reshape(3, 4) + rank, other)
        into = np.zeros((2, 2, 5))
        notes.expect(comm.recv(into, other).nbytes, 96, "shorter than the buffer")
        notes.expect(into.reshape(-1)[:12], np.arange(12.0) + other, "another shape")
        comm.send(np.array(rank + 0.5), rank, 3)
        own = np.zeros(())
        notes.expect(comm.recv(own, rank, 3), (rank, 3, 8), "to oneself")
        notes.expect(own, np.array(rank + 0.5), "from oneself")
        return notes

    assert found(comms, program) == []


def test_order_and_tags_are_kept_among_messages_of_both_paths(world: MakeWorld) -> None:
    comms = world(2)
    rounds = 300

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        if comm.rank == 0:
            for k in range(rounds):
                x = np.array([k], np.int64)
                match k % 4:
                    case 0 | 1:
                        comm.send(x, 1, k % 3)
                    case 2:
                        comm.send(memoryview(x), 1, k % 3)
                    case _:
                        comm.start.send(x, 1, tag=k % 3).wait()
            return notes
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        x = np.zeros(1, np.int64)
        for k in range(rounds):
            tag = (k * 2) % 3
            match k % 3:
                case 0:
                    status = comm.recv(x, 0, tag)
                case 1:
                    status = comm.recv(memoryview(x), uni.ANY, tag)
                case _:
                    status = comm.start.recv(x, 0, tag).wait()
            got[status.tag].append(int(x[0]))
        for tag, numbers in got.items():
            notes.expect(numbers, [k for k in range(rounds) if k % 3 == tag], f"tag {tag}")
        return notes

    assert found(comms, program) == []
    assert all(counts_of(comm)[0] > rounds / 5 for comm in comms)


def test_any_tag_takes_messages_in_order_of_arrival_and_no_collective(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes, x = Notes(), np.zeros(1, np.int64)
        for k in range(50):
            if comm.rank == 0:
                comm.send(np.array([k]), 1, k * 3)
                comm.broadcast(np.array([-k]))
            else:
                # The messages of the collective are also under way.
                notes.expect(comm.recv(x, 0, uni.ANY), (0, k * 3, 8), f"status #{k}")
                notes.expect(x, np.array([k]), f"#{k}")
                comm.broadcast(x)
                notes.expect(x, np.array([-k]), f"broadcast #{k}")
        return notes

    assert found(comms, program) == []


def test_messages_of_groups_and_threads_are_apart(world: MakeWorld) -> None:
    comms = world(4)

    def program(comm: Communicator) -> Notes:
        rows = comm.split(comm.rank // 2, key=-comm.rank)  # in reverse order
        everyone = comm.sub(range(4))
        assert rows is not None
        notes = Notes()

        def ring(one: Communicator, salt: int) -> None:
            after, before = (one.rank + 1) % one.size, (one.rank - 1) % one.size
            x = np.zeros(2, np.int64)
            for k in range(100):
                one.send(np.array([k * salt, one.rank]), after, 5)
                notes.expect(one.recv(x, before, 5).source, before, f"{one.name} source")
                notes.expect(x, np.array([k * salt, before]), f"{one.name} #{k}")

        threads = [
            threading.Thread(target=ring, args=(one, salt)) for salt, one in enumerate((rows, everyone, comm))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        notes.expect(all(counts_of(one)[0] > 50 for one in (rows, everyone, comm)), True, "fast path")
        return notes

    assert found(comms, program) == []


def test_two_threads_of_a_rank_receive_each_its_own(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes, other = Notes(), 1 - comm.rank

        def talk(tag: int) -> None:
            x = np.zeros(3000 * (tag + 1), np.int64)
            for k in range(40):
                mine = np.full(x.size, k * 10 + tag + comm.rank)
                if comm.rank == 0:
                    comm.send(mine, other, tag)
                    comm.recv(x, other, tag)
                else:
                    comm.recv(x, other, tag)
                    comm.send(mine, other, tag)
                notes.expect(x, np.full(x.size, k * 10 + tag + other), f"tag {tag} #{k}")

        threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return notes

    assert found(comms, program) == []


# -- refused ----------------------------------------------------------------------------------------------


def test_a_message_that_does_not_fit_is_refused_and_stays_queued(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        if comm.rank == 0:
            comm.send(np.arange(10.0), 1, 1)
            comm.send(np.arange(50_000.0), 1, 2)
            comm.send(np.arange(4, dtype=np.int32), 1, 3)
            return notes
        for tag, count in ((1, 10), (2, 50_000)):
            for _ in range(2):
                error = outcome(lambda tag=tag, count=count: comm.recv(np.zeros(count - 1), 0, tag))
                notes.expect(isinstance(error, UsageError) and str(8 * count) in str(error), True, str(error))
            x = np.zeros(count)
            notes.expect(comm.recv(x, 0, tag), (0, tag, 8 * count), "then")
            notes.expect(x, np.arange(float(count)), "then")
        error = outcome(lambda: comm.recv(np.zeros(4, np.float32), 0, 3))
        notes.expect(isinstance(error, UsageError) and "int32" in str(error), True, str(error))
        ints = np.zeros(4, np.int32)
        comm.recv(ints, 0, 3)
        notes.expect(ints, np.arange(4, dtype=np.int32), "the right type")
        return notes

    assert found(comms, program) == []


def test_bad_arguments_are_refused_on_the_fast_path(world: MakeWorld) -> None:
    comm, _ = world(2)
    x, frozen = np.zeros(4), np.zeros(4)
    frozen.flags.writeable = False
    bad: list[Callable[[], Any]] = [
        lambda: comm.send(x, 2),
        lambda: comm.send(x, -1),
        lambda: comm.send(x, True),
        lambda: comm.send(x, uni.ANY),
        lambda: comm.send(x, 1, uni.ANY),
        lambda: comm.send(x, 1, -1),
        lambda: comm.send(x, 1, 2**31),
        lambda: comm.send(x, 1, 2**70),
        lambda: comm.send(x.astype(">f8"), 1),
        lambda: comm.send(np.array(["a"]), 1),
        lambda: comm.recv(frozen, 1),
        lambda: comm.recv(np.zeros((4, 4))[:, 0], 1),
        lambda: comm.recv(x, 2),
        lambda: comm.recv(x, 1, tag=-3),
        lambda: comm.recv(3.0, 1),
    ]
    for i, call in enumerate(bad):
        assert isinstance(outcome(call), UsageError), i
    assert isinstance(outcome(lambda: comm.send(x)), TypeError)
    assert isinstance(outcome(lambda: comm.send(x, 1, dst=1)), TypeError)
    assert isinstance(outcome(lambda: comm.recv(x, 1, what=1)), TypeError)
    assert comm.send.__doc__ == Communicator.send.__doc__
    assert counts_of(comm) == (0, 0)


# -- waiting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 100_000])
def test_a_long_wait_goes_on_in_python_and_gets_the_message(world: MakeWorld, count: int) -> None:
    comms = world(2)
    is_waiting = threading.Event()

    def program(comm: Communicator) -> Notes:
        notes = Notes()
        x = np.zeros(count)
        # The waiting rank calls first; the other rank calls once Python has adopted that call.
        if comm.rank == 0:
            waiting = comms[1]
            wait_until(lambda: counts_of(waiting)[1] == 1)
            comm.send(np.arange(float(count)), 1)
            is_waiting.wait(60)
            comm.recv(x, 1)
            notes.expect(x, np.arange(float(count)) + 1, "sent late")
        else:
            comm.recv(x, 0)
            notes.expect(x, np.arange(float(count)), "received late")
            if count == 4:
                comm.send(np.arange(4.0) + 1, 0)  # needs no other rank
                is_waiting.set()
            else:
                watcher = threading.Thread(
                    target=lambda: (wait_until(lambda: counts_of(comm)[1] == 2), is_waiting.set())
                )
                watcher.start()
                comm.send(np.arange(float(count)) + 1, 0)
                watcher.join()
        return notes

    assert found(comms, program) == []


def test_a_rank_that_leaves_ends_a_waiting_receive(world: MakeWorld) -> None:
    comms = world(2)

    def program(comm: Communicator) -> Any:
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.ones(3), 0)
            comm.close()
            return None
        x = np.zeros(3)
        comm.recv(x, 1)
        return [x.tolist(), outcome(lambda: comm.recv(x, 1)), outcome(lambda: comm.send(np.zeros(9999), 1))]

    here, lost, unsent = run_each(program, list(comms)).values()[0]
    assert here == [1, 1, 1]
    for error in (lost, unsent):
        assert isinstance(error, PeerLost)
        assert error.ranks == (1,)
        assert "left" in str(error)


def test_an_abort_ends_a_waiting_receive(world: MakeWorld) -> None:
    comms = world(2)
    begun = threading.Barrier(2)

    def program(comm: Communicator) -> Any:
        comm.barrier()
        begun.wait()
        if comm.rank == 1:
            comm.abort("enough")
            return None
        return [outcome(lambda: comm.recv(np.zeros(3), 1)) for _ in range(2)]

    for error in run_each(program, list(comms)).values()[0]:
        assert isinstance(error, PeerAborted)
        assert "enough" in str(error)


def test_a_close_in_another_thread_ends_a_waiting_receive(world: MakeWorld) -> None:
    comm, _ = world(2)
    ended: list[Any] = []
    waiter = threading.Thread(target=lambda: ended.append(outcome(lambda: comm.recv(np.zeros(3), 1))))
    waiter.start()
    comm._group.close()
    waiter.join(60)
    assert isinstance(ended[0], ClosedError)


# -- processes --------------------------------------------------------------------------------------------


def _die_or_wait(comm: Communicator, folder: str) -> None:
    x = np.zeros(4)
    for _ in range(50):
        if comm.rank == 1:
            comm.send(x, 0)
            comm.recv(x, 0)
        elif comm.rank == 0:
            comm.recv(x, 1)
            comm.send(x, 1)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with stopwatch() as seconds:
        error = outcome(lambda: comm.recv(x, 1))
        took = seconds()
    ranks = getattr(error, "ranks", ())
    Path(folder, str(comm.rank)).write_text(f"{type(error).__name__} {ranks} {took < 2 * 0.5}")


def test_a_killed_rank_is_named_where_its_message_is_awaited(tmp_path: Path) -> None:
    with pytest.raises(uni.UnisonoError, match="rank 1"):
        uni.spawn(_die_or_wait, 2, str(tmp_path))
    assert (tmp_path / "0").read_text() == "PeerLost (1,) True"


def _interrupted(comm: Communicator) -> list[Any]:
    x = np.zeros(4)
    if comm.rank == 1:
        assert comm.recv_bytes(0, 9) == b"go"
        comm.send(np.arange(4.0), 0, 1)
        return []
    main = threading.get_ident()
    is_called = threading.Event()

    def strike() -> None:
        is_called.wait()
        signal.pthread_kill(main, signal.SIGINT)

    striker = threading.Thread(target=strike)
    striker.start()
    with stopwatch() as seconds:
        try:
            is_called.set()
            comm.recv(x, 1, 1)
            ended = "well"
        except KeyboardInterrupt:
            ended = "interrupted"
        took = seconds()
    striker.join()
    # The receive is withdrawn, and the next receive gets the message.
    comm.send(b"go", 1, 9)
    y = np.zeros(4)
    comm.recv(y, 1, 1)
    return [ended, took < 2 * 0.2 + 0.2, x.tolist(), y.tolist()]


def test_ctrl_c_ends_a_waiting_receive_and_leaves_the_message_to_the_next() -> None:
    here, _ = uni.spawn(_interrupted, 2)
    assert here == ["interrupted", True, [0, 0, 0, 0], [0, 1, 2, 3]]

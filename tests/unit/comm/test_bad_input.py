"""Bad input is refused before anything is sent; the error names the value and the allowed ones.

One rank of three makes the bad call, blocking and started; then all three make a correct call. A sequence
number that the refused call had used, or a message that it had sent, would make that call fail. All cases
share one world, so a refusal must not affect the later cases either.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.bad_calls import CALLER, SIZE, STARTABLE, Bad, bad_groups, ones
from tests.support.ranks import run_each, run_ranks

import unisono as uni
from unisono.backends.local import LocalBackend


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """The ranks that have sent a message, in order."""
    senders: list[int] = []
    start_send = LocalBackend.start_send

    def noted(self, *args, **kwargs):
        senders.append(self.rank)
        return start_send(self, *args, **kwargs)

    monkeypatch.setattr(LocalBackend, "start_send", noted)
    return senders


@pytest.fixture(scope="module")
def comms() -> Iterator[list[uni.Communicator]]:
    """The ranks of all cases."""
    made = uni.local(SIZE)
    yield made
    for comm in made:
        comm.close()


def check_refusal(comms: list[uni.Communicator], bad: Bad, sent: list[int], *, started: bool) -> None:
    caller = comms[CALLER]
    for verbs in (caller, caller.start) if started else (caller,):
        with pytest.raises(uni.UsageError) as caught:
            bad.call(verbs)
        text = str(caught.value)
        assert all(word in text for word in bad.words), text
    assert sent == []

    def go_on(comm) -> tuple[list[int], int]:
        x = np.arange(4) + comm.rank
        comm.all_reduce(x)
        comm.send(np.array([comm.rank]), (comm.rank + 1) % SIZE, 5)
        got = np.empty(1, np.int64)
        comm.recv(got, tag=5)
        assert comm.probe(timeout=0) is None
        return x.tolist(), int(got[0])

    assert run_each(go_on, comms).values() == [([3, 6, 9, 12], (rank - 1) % SIZE) for rank in range(SIZE)]


@pytest.mark.parametrize("bad", STARTABLE, ids=[bad.name for bad in STARTABLE])
def test_a_bad_call_is_refused_before_anything_is_sent(comms, bad, sent):
    check_refusal(comms, bad, sent, started=True)


@pytest.mark.parametrize("bad", bad_groups(), ids=[bad.name for bad in bad_groups()])
def test_a_bad_group_is_refused_before_anything_is_sent(comms, bad, sent):
    check_refusal(comms, bad, sent, started=False)


def test_the_table_names_every_case_once_and_every_verb():
    names = [bad.name for bad in STARTABLE]
    assert len(set(names)) == len(names)
    assert len(names) > 400
    verbs = {name for name in dir(uni.Communicator) if not name.startswith("_")}
    others = {"rank", "size", "name", "epoch", "backend", "start", "close", "abort", "mesh", "sub", "world"}
    others |= {"local_rank", "local_size"}
    assert verbs - others <= {name.split()[0] for name in names}


@pytest.mark.parametrize("n", [0, -1, 1.0, "2", None, True])
def test_a_world_needs_a_size(n):
    with pytest.raises(uni.UsageError, match=r"n=.*; allowed: an?y? ?integers? >= 1"):
        uni.local(n)


def test_an_unknown_backend_is_refused_with_those_that_exist():
    with pytest.raises(uni.UsageError, match=r"backend .carrier pigeon. is unknown; allowed: auto, .*local"):
        uni.init("carrier pigeon")


def test_reproducible_ranks_refuse_algorithms_that_are_not():
    (world,) = uni.local(1, uni.Config(reproducible=True))
    with world:
        with pytest.raises(uni.UsageError, match="reproducible results need"):
            world.all_reduce(ones(3), algorithm="ring")
        assert world.all_reduce(ones(3)).tolist() == [1, 1, 1]


def test_an_axis_that_a_mesh_lacks_is_refused_with_those_it_has():
    (world,) = uni.local(1)
    with world:
        mesh = world.mesh([1, 1], ["dp", "tp"])
        for name in ("pp", 2, -1, True, None):
            with pytest.raises(uni.UsageError, match=r"mesh has no axis .*; allowed: dp, tp"):
                mesh[name]


def test_what_is_only_read_may_be_read_only_or_strided():
    """The converse: memory that can be handled correctly is not refused."""

    def program(comm):
        base = np.arange(36.0).reshape(6, 6) + comm.rank
        x = base[::2, 1::2].T  # 3 x 3, neither order
        x.flags.writeable = False
        me, everyone = comm.rank, [x + (r - comm.rank) for r in range(SIZE)]
        np.testing.assert_array_equal(comm.all_gather(x), everyone)
        np.testing.assert_array_equal(comm.all_to_all(x), [e[me] for e in everyone])
        np.testing.assert_array_equal(comm.reduce_scatter(x), sum(everyone)[me])
        np.testing.assert_array_equal(comm.scan(x), sum(everyone[: me + 1]))
        np.testing.assert_array_equal(comm.all_gather_v(x)[2], everyone[2])
        np.testing.assert_array_equal(comm.scatter(x if me == 2 else None, 2), everyone[2][me])
        np.testing.assert_array_equal(comm.all_reduce(x, out=np.empty((3, 3))), sum(everyone))
        if me == 1:
            assert comm.broadcast(x, 1) is x
            assert comm.reduce(x, 0) is None
        else:
            np.testing.assert_array_equal(comm.broadcast(np.empty((3, 3)), 1), everyone[1])
            total = comm.reduce(np.ascontiguousarray(x), 0)
            assert me or (total == sum(everyone)).all()
        comm.send(x, (me + 1) % SIZE)
        got = np.empty((3, 3))
        comm.recv(got)
        np.testing.assert_array_equal(got, everyone[me - 1])
        assert x.tolist() == (base[::2, 1::2].T).tolist(), "what was given is as it was"

    run_ranks(program, SIZE).values()


def test_an_out_that_does_not_fit_what_root_scatters_ends_the_collective_by_name():
    """The only argument that a rank can check only after root's announcement."""

    def program(comm):
        out = np.empty(4 if comm.rank == CALLER else 2, np.float32)
        comm.scatter(ones(3, 2) if comm.rank == 0 else None, 0, out=out)
        comm.barrier()

    ended = run_ranks(program, SIZE)
    assert isinstance(ended[CALLER], uni.UsageError)
    assert "out is float32 of shape (4,); root scatters float32 of shape (2,)" in str(ended[CALLER])
    for rank in (0, 2):
        assert isinstance(ended[rank], uni.PeerAborted)
        assert ended[rank].rank == CALLER
        assert "out is float32 of shape (4,)" in str(ended[rank])

"""Communicators compared with a simple model: made, used, broken, aborted and closed in any order.

The model is a list of groups. For each it knows the members, those that closed it, what broke it, and the
messages that wait. After every step each member must get what the model predicts: the right values, or the
right error.

Operations are started one after another from one thread, or run on a thread per rank, with the same outcome.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.support.ranks import PATIENCE_S, reference_local, run_each

import unisono as uni

pytestmark = pytest.mark.more

LIFE = settings(derandomize=True, deadline=None, database=None, max_examples=70, stateful_step_count=30)

# The causes that break a group, and the error that its members get from then on.
ERROR_AFTER = {
    "late": uni.DeadlineExceeded,
    "mismatch": uni.CollectiveMismatch,
    "cancelled": uni.PeerAborted,
    "aborted": uni.PeerAborted,
    "lost": uni.PeerLost,
}
BIG = 20_000  # elements of 8 bytes: beyond the eager limit, so that a send waits for its receive


@dataclass(eq=False)
class Message:
    """A message that waits for its receive; `work` is set if the sender waits too."""

    source: int
    target: int
    tag: int
    data: np.ndarray
    work: Any = None


@dataclass(eq=False)
class Group:
    """A communicator in the model, with the world ranks of its members."""

    members: tuple[int, ...]
    comms: dict[int, uni.Communicator]
    parent: Group | None = None
    children: list[Group] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    broken: str | None = None
    is_aborted: bool = False
    queue: list[Message] = field(default_factory=list)

    @property
    def open(self) -> list[int]:
        """The members that can still use the group."""
        return [rank for rank in self.members if rank not in self.closed]

    def here(self, rank: int) -> int:
        """The rank in this group of a world rank."""
        return self.members.index(rank)

    def descendants(self, rank: int) -> list[Group]:
        """This group and all groups that members made from it, directly or indirectly."""
        within = [child for child in self.children if rank in child.members]
        return [self, *itertools.chain.from_iterable(child.descendants(rank) for child in within)]


class Life(RuleBasedStateMachine):
    groups = Bundle("groups")

    # -- making ------------------------------------------------------------------------------------------

    @initialize(target=groups, size=st.integers(1, 5))
    def world(self, size):
        self.errors: list[Any] = []
        # A close need not wait for sends that will never be received.
        comms = reference_local(size, uni.Config(flush_s=0.0, deadlock_after_s=0.0))
        self.root = Group(tuple(range(size)), dict(enumerate(comms)))
        self.all = [self.root]
        self.killed: set[int] = set()
        self.works: list[Any] = []
        return self.root

    @rule(target=groups, group=groups, data=st.data(), threads=st.booleans())
    def split(self, group, data, threads):
        pattern = {
            rank: (data.draw(st.none() | st.integers(0, 2)), data.draw(st.integers(-1, 1)))
            for rank in group.members
        }
        made = self.collectively(group, lambda c, rank: c.split(*pattern[rank]), threads)
        if made is None:
            return multiple()
        children = []
        for color in {color for color, _ in pattern.values()} - {None}:
            ranks = [rank for rank in group.members if pattern[rank][0] == color]
            ranks.sort(key=lambda rank: (pattern[rank][1], group.here(rank)))
            children.append(self.adopt(group, tuple(ranks), {rank: made[rank] for rank in ranks}))
        assert all(made[rank] is None for rank in group.members if pattern[rank][0] is None)
        return multiple(*children)

    @rule(target=groups, group=groups, data=st.data())
    def sub(self, group, data):
        ranks = (
            tuple(rank for rank in group.members if data.draw(st.booleans(), label=f"rank {rank}"))
            or group.members[:1]
        )
        made = {}
        if self.killed & set(ranks):
            return multiple()
        for rank in ranks:
            with self.expecting(self.refusal(group, rank, is_collective=False)):
                made[rank] = group.comms[rank].sub([group.here(r) for r in ranks])
        if len(made) < len(ranks):  # the other members have made the group, and will miss these
            for comm in made.values():
                comm.close()
            return multiple()
        return self.adopt(group, ranks, made)

    @rule(target=groups, group=groups, data=st.data())
    def mesh(self, group, data):
        size = len(group.members)
        rows = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        made = self.collectively(group, lambda c, rank: c.mesh([rows, size // rows], ["row", "column"]), True)
        if made is None:
            return multiple()
        children = []
        for name, axis in (("row", 0), ("column", 1)):
            grid = np.array(group.members).reshape(rows, -1)
            lines = grid.T if axis == 0 else grid
            children += [
                self.adopt(group, tuple(line.tolist()), {rank: made[rank][name] for rank in line.tolist()})
                for line in lines
            ]
        return multiple(*children)

    def adopt(self, parent: Group, ranks: tuple[int, ...], comms: dict[int, uni.Communicator]) -> Group:
        child = Group(ranks, comms, parent)
        child.gone |= self.killed
        parent.children.append(child)
        self.all.append(child)
        for rank, comm in comms.items():
            assert (comm.rank, comm.size) == (child.here(rank), len(ranks))
        return child

    # -- using -------------------------------------------------------------------------------------------

    @rule(group=groups, data=st.data(), threads=st.booleans())
    def collective(self, group, data, threads):
        count, seed = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 9))
        size, root = len(group.members), data.draw(st.integers(0, len(group.members) - 1))
        x = {rank: np.arange(count) * (rank + 1) + seed for rank in group.members}
        stacked = np.stack([x[rank] for rank in group.members])
        total = stacked.sum(0)
        wide = {rank: np.stack([x[rank] + d for d in range(size)]) for rank in group.members}
        table = {
            "all_reduce": (lambda c, r: c.all_reduce(x[r].copy()), lambda i: total),
            "max": (lambda c, r: c.all_reduce(x[r].copy(), "max"), lambda i: stacked.max(0)),
            "reduce": (lambda c, r: c.reduce(x[r].copy(), root), lambda i: total if i == root else None),
            "broadcast": (lambda c, r: c.broadcast(x[r].copy(), root), lambda i: stacked[root]),
            "all_gather": (lambda c, r: c.all_gather(x[r]), lambda i: stacked),
            "gather": (lambda c, r: c.gather(x[r], root), lambda i: stacked if i == root else None),
            "scatter": (
                lambda c, r: c.scatter(wide[r] if c.rank == root else None, root),
                lambda i: stacked[root] + i,
            ),
            "reduce_scatter": (lambda c, r: c.reduce_scatter(wide[r]), lambda i: total + size * i),
            "all_to_all": (lambda c, r: c.all_to_all(wide[r]), lambda i: stacked + i),
            "scan": (lambda c, r: c.scan(x[r]), lambda i: stacked[: i + 1].sum(0)),
            "exscan": (lambda c, r: c.exscan(x[r]), lambda i: stacked[:i].sum(0)),
            "all_gather_v": (
                lambda c, r: c.all_gather_v(x[r][: c.rank]),
                lambda i: [stacked[j][:j] for j in range(size)],
            ),
            "object": (
                lambda c, r: c.all_gather_object((r, "x" * r)),
                lambda i: [(r, "x" * r) for r in group.members],
            ),
            "barrier": (lambda c, r: c.barrier(), lambda i: None),
        }
        verb = data.draw(st.sampled_from(sorted(table)))
        make, wanted = table[verb]
        got = self.collectively(
            group, make, threads, needs_all=verb in ("all_reduce", "barrier", "all_gather", "max")
        )
        if got is None:
            return
        for rank, value in got.items():
            np.testing.assert_equal(_plain(value), _plain(wanted(group.here(rank))))

    @rule(group=groups, data=st.data(), tag=st.integers(0, 2), count=st.sampled_from([0, 3, BIG]))
    def send(self, group, data, tag, count):
        source, target = (data.draw(st.sampled_from(group.members), label=what) for what in ("from", "to"))
        if source in self.killed:
            return
        if target in group.closed and target not in self.root.closed:
            return  # the rank closed only this communicator: a send may or may not succeed
        payload = np.arange(count) + 7 * len(self.works)
        expected = self.refusal(group, source, is_collective=False)
        if expected is None and target in self.root.closed:
            expected = uni.PeerLost
        with self.expecting(expected):
            work = group.comms[source].start.send(payload, group.here(target), tag)
            self.works.append(work)
            if expected is not None:
                work.wait(timeout=PATIENCE_S)
            waits = count == BIG and target != source
            assert work.done() is not waits
            group.queue.append(Message(source, target, tag, payload, work if waits else None))

    @rule(
        group=groups,
        data=st.data(),
        tag=st.integers(0, 2) | st.just(uni.ANY),
        verb=st.sampled_from(["recv", "recv", "recv_bytes", "probe", "too small"]),
    )
    def receive(self, group, data, tag, verb):
        target = data.draw(st.sampled_from(group.members), label="at")
        source = data.draw(st.sampled_from([*group.members, uni.ANY]), label="from")
        if target in self.killed:
            return
        comm, here = group.comms[target], source if source is uni.ANY else group.here(source)
        expected = self.refusal(group, target, is_collective=False)
        found = next((m for m in group.queue if m.target == target and _fits(m, source, tag)), None)
        if expected is not None:
            with self.expecting(expected):
                comm.recv(np.empty(BIG, int), here, tag, timeout=0)
        elif found is None and verb == "probe":
            with contextlib.suppress(uni.PeerLost):  # a poll may or may not notice that all others have left
                assert comm.probe(here, tag, timeout=0) is None
        elif found is None:
            # The expired receive has been withdrawn, so the next message goes to the next receive.
            with self.expecting(self.despair(group, target, source) or uni.DeadlineExceeded):
                comm.recv(np.empty(BIG, int), here, tag, timeout=0.001)
        else:
            self.take(group, comm, found, here, tag, verb)

    def take(self, group, comm, found: Message, here, tag, verb) -> None:
        status = uni.Status(group.here(found.source), found.tag, found.data.nbytes)
        if verb == "probe":
            assert comm.probe(here, tag, timeout=0) == status
        elif verb == "too small" and found.data.size:
            with pytest.raises(uni.UsageError, match="it stays queued"):
                comm.recv(np.empty(found.data.size - 1, int), here, tag, timeout=PATIENCE_S)
        else:
            if verb == "recv_bytes":
                got = np.frombuffer(comm.recv_bytes(here, tag, timeout=PATIENCE_S), int)
            else:
                buf = np.full(BIG, -1)
                assert comm.recv(buf, here, tag, timeout=PATIENCE_S) == status
                got = buf[: found.data.size]
                assert (buf[found.data.size :] == -1).all()
            np.testing.assert_array_equal(got, found.data)
            group.queue.remove(found)
            if found.work is not None:
                assert found.work.wait(timeout=PATIENCE_S) is None

    # -- breaking ----------------------------------------------------------------------------------------

    @rule(group=groups, data=st.data())
    def too_late(self, group, data):
        """All members but one start a collective, which cannot end before its deadline."""
        if not self.is_whole(group) or len(group.members) < 2:
            return
        absent = data.draw(st.sampled_from(group.members))
        works = []
        for rank in set(group.members) - {absent}:
            with contextlib.suppress(uni.DeadlineExceeded):  # the first may expire before the last begins
                works.append(group.comms[rank].start.all_reduce(np.ones(3), timeout=0.01))
        for work in works:
            with pytest.raises(uni.DeadlineExceeded):
                work.wait(timeout=PATIENCE_S)
        group.broken = "late"

    @rule(group=groups, data=st.data())
    def disagree(self, group, data):
        if not self.is_whole(group) or len(group.members) < 2:
            return
        odd = data.draw(st.sampled_from(group.members))
        works = []
        for rank in group.members:
            with contextlib.suppress(uni.CollectiveMismatch):
                works.append(group.comms[rank].start.all_gather(np.ones(3 + (rank == odd))))
        for work in works:
            with pytest.raises(uni.CollectiveMismatch) as caught:
                work.wait(timeout=PATIENCE_S)
            assert "all_gather float64[3]" in caught.value.report
            assert f"rank {odd}: all_gather float64[4]" in caught.value.report
        group.broken = "mismatch"

    @rule(group=groups, data=st.data())
    def cancel(self, group, data):
        if not self.is_whole(group) or len(group.members) < 2:
            return
        rank = data.draw(st.sampled_from(group.members))
        assert group.comms[rank].start.barrier().cancel()
        group.broken = "cancelled"

    @rule(group=groups, data=st.data())
    def abort(self, group, data):
        rank = data.draw(st.sampled_from(group.members))
        if rank in group.closed:
            return
        group.comms[rank].abort("enough")
        for within in group.descendants(rank):
            if rank not in within.closed and not within.is_aborted:
                within.broken = within.broken or "aborted"
                within.is_aborted = True
                self.drop(within, within.queue)

    @rule(group=groups, data=st.data())
    def close(self, group, data):
        rank = data.draw(st.sampled_from(group.members))
        if rank in self.killed:
            return
        group.comms[rank].close()
        for within in group.descendants(rank):
            within.closed.add(rank)
            within.gone.add(rank)
            # The rank's own waiting sends are withdrawn; sends to it end too.
            self.drop(
                within, [m for m in within.queue if m.work is not None and rank in (m.source, m.target)]
            )
            within.queue = [m for m in within.queue if m.target != rank]
        if group is self.root:
            self.vanish(rank)

    @precondition(lambda self: len(self.root.members) > 1)
    @rule(data=st.data())
    def kill(self, data):
        rank = data.draw(st.sampled_from(self.root.members))
        if rank in self.root.closed:
            return
        self.root.comms[rank].backend.kill("killed by the test")
        self.killed.add(rank)
        for group in self.all:
            if rank in group.members:
                group.closed.add(rank)
                self.drop(
                    group, [m for m in group.queue if m.work is not None and rank in (m.source, m.target)]
                )
                group.queue = [m for m in group.queue if m.target != rank]
                if len(group.open) and group.broken is None:
                    group.broken = "lost"
        self.vanish(rank)

    def vanish(self, rank: int) -> None:
        for group in self.all:
            if rank in group.members:
                group.gone.add(rank)
                group.closed.add(rank)

    def drop(self, group: Group, messages: list[Message]) -> None:
        """Remove messages that will never be received: a send that waits for it ends with an error."""
        for message in list(messages):
            group.queue.remove(message)
            if message.work is not None:
                with pytest.raises(uni.UnisonoError):
                    message.work.wait(timeout=PATIENCE_S)

    # -- what the model predicts -------------------------------------------------------------------------

    def is_whole(self, group: Group) -> bool:
        return group.broken is None and not group.closed

    def refusal(self, group: Group, rank: int, *, is_collective: bool) -> type[Exception] | None:
        """The error that a member's next operation raises before anything is sent, or None."""
        if rank in group.closed:
            return uni.ClosedError
        if group.broken is not None and (is_collective or group.is_aborted):
            return ERROR_AFTER[group.broken]
        return None

    def despair(self, group: Group, rank: int, source: Any) -> type[Exception] | None:
        """The reason why a receive that finds no message can never get one, or None."""
        dead = self.killed & set(group.members)
        if source is uni.ANY:
            others = set(group.members) - {rank}
            return uni.PeerLost if dead or (others and others <= group.gone) else None
        return uni.PeerLost if source in group.gone else None

    def collectively(
        self, group: Group, make, threads: bool, needs_all: bool = True
    ) -> dict[int, Any] | None:
        """Every member makes the call; return the results, or None if all were refused as predicted."""
        if self.is_whole(group):
            return self.do(group, make, threads)
        if group.broken is None and group.open:
            # A rank has left. A call that needs this rank fails; only calls that need every rank surely do.
            if not needs_all:
                make = lambda c, rank: c.barrier()  # noqa: E731
            for error in self.fail(group, make):
                assert isinstance(error, uni.PeerLost), repr(error)
                assert set(error.ranks) & group.gone
            group.broken = "lost"
        for rank in set(group.members) - self.killed:
            with self.expecting(self.refusal(group, rank, is_collective=True)):
                make(group.comms[rank], rank)
        return None

    def do(self, group: Group, make, threads: bool) -> dict[int, Any]:
        if threads:
            results = run_each(lambda rank: make(group.comms[rank], rank), list(group.members)).values()
        else:
            works = [make(_Starting(group.comms[rank]), rank) for rank in group.members]
            results = uni.wait_all(works, timeout=PATIENCE_S)
        return dict(zip(group.members, results, strict=True))

    def fail(self, group: Group, make) -> list[BaseException]:
        ended = run_each(lambda rank: make(group.comms[rank], rank), group.open)
        return [
            error if isinstance(error, BaseException) else AssertionError(f"it gave {error!r}")
            for error in ended
        ]

    @contextlib.contextmanager
    def expecting(self, kind: type[Exception] | None):
        if kind is None:
            yield
        else:
            with pytest.raises(kind):
                yield

    # -- invariants --------------------------------------------------------------------------------------

    @invariant()
    def queued_messages_are_those_of_the_model(self):
        if not hasattr(self, "root"):
            return
        hub = self.root.comms[0].backend._hub
        for rank in self.root.open:
            waiting = sum(
                1
                for message in hub.endpoints[rank].protocol.inbox.matcher.all_unexpected()
                if 0 <= message.envelope.tag < 2**31
                and message.envelope.context in {g.comms[rank]._group.context for g in self.listening(rank)}
            )
            wanted = sum(1 for g in self.listening(rank) for m in g.queue if m.target == rank)
            assert waiting == wanted, f"rank {rank}"

    def listening(self, rank: int) -> list[Group]:
        """The groups in which a rank can still receive messages."""
        return [g for g in self.all if rank in g.members and rank not in g.closed and not g.is_aborted]

    @invariant()
    def every_rank_has_its_own_rank(self):
        for group in getattr(self, "all", []):
            for rank, comm in group.comms.items():
                assert (comm.rank, comm.size) == (group.here(rank), len(group.members))
                if rank not in self.killed:
                    assert ("closed" in repr(comm)) is (rank in group.closed)

    def teardown(self):
        if not hasattr(self, "root"):
            return
        for comm in self.root.comms.values():
            comm.close()
        for work in self.works:
            with contextlib.suppress(uni.UnisonoError):
                work.wait(timeout=PATIENCE_S)
        hub = self.root.comms[0].backend._hub
        assert all(endpoint.protocol.inbox.is_idle() for endpoint in hub.endpoints)


class _Starting:
    """A communicator whose verbs start."""

    def __init__(self, comm: uni.Communicator) -> None:
        self.rank = comm.rank
        self._start = comm.start

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._start, verb)


def _fits(message: Message, source: Any, tag: Any) -> bool:
    return source in (uni.ANY, message.source) and tag in (uni.ANY, message.tag)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_communicators_live_and_die_as_the_model_says():
    run_state_machine_as_test(Life, settings=LIFE)


# -- control messages for a communicator that is not made yet --------------------------------------------


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        (lambda child: child.abort("changed my mind"), uni.PeerAborted, "changed my mind"),
        (lambda child: child.close(), uni.PeerLost, "left"),
        (lambda child: child.start.barrier().cancel(), uni.PeerAborted, "rank 0 cancelled barrier"),
    ],
    ids=["aborted", "closed", "cancelled"],
)
def test_the_fate_of_a_group_is_kept_for_a_rank_that_makes_it_later(end, kind, words):
    """`sub` exchanges no messages, so one member may have ended the group before another makes it."""
    comms = uni.local(2)
    end(comms[0].sub([0, 1]))
    late = comms[1].sub([0, 1])

    def call_twice():
        for _ in range(2):  # the first call may still match a message that was sent before the end
            late.barrier(timeout=PATIENCE_S)

    with pytest.raises(kind, match=words):
        call_twice()
    for comm in comms:
        comm.close()

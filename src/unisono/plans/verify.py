"""Proof by execution: all ranks run symbolically, and every element must end as the collective promises."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, NoReturn, TypeAlias

import numpy as np

from unisono.plans.layout import buffer_counts, is_local, offsets, touched
from unisono.plans.steps import Buf, Copy, Plan, Problem, Recv, RecvReduce, Reduce, Send, Slice, Step
from unisono.plans.symbols import UNSET, Expressions, Values, expression_of, leaf, position_of, unset

__all__ = ["PlanError", "verify"]


class PlanError(AssertionError):
    """A set of plans is wrong; the text says which rank, round and step shows it."""


def verify(plans: Sequence[Plan], *, ordered: bool = False, canonical: bool = False) -> None:
    """Run the plans of all ranks and raise PlanError unless they do what their collective promises.

    - Every required element has exactly the right contributions, each once, at the right position, and the
      same expression on every rank.
    - Messages match in number, order and length.
    - `in` is never written, and nothing is read before it is set.
    - Messages of one round do not touch each other's elements.
    - There is no deadlock, even if every send waits for its receive and every round for the one before.

    `ordered` also requires the rank order, `canonical` the canonical bracketing.
    """
    _check_shapes(plans)
    world = _World(plans)
    world.run()
    _check_results(world, ordered or canonical, canonical)


def _check_shapes(plans: Sequence[Plan]) -> None:
    """Refuse a set that is not one plan per rank of one problem, with the right buffers."""
    if not plans or [plan.rank for plan in plans] != list(range(plans[0].problem.size)):
        raise PlanError(f"not one plan per rank: ranks {[plan.rank for plan in plans]}")
    first = plans[0]
    for plan in plans:
        if plan.algorithm != first.algorithm or _common(plan.problem) != _common(first.problem):
            raise PlanError(
                f"ranks 0 and {plan.rank} solve different problems: "
                f"{first.algorithm} {first.problem}, {plan.algorithm} {plan.problem}"
            )
        if (plan.in_count, plan.out_count) != buffer_counts(plan.problem, plan.rank):
            raise PlanError(
                f"rank {plan.rank}: in and out hold {plan.in_count} and {plan.out_count} elements"
            )


def _common(problem: Problem) -> tuple[object, ...]:
    """Return what all ranks must agree on; in an all_to_all each rank knows only its own counts."""
    counts = () if problem.collective == "all_to_all" else problem.counts
    return problem.collective, problem.size, counts, problem.root, problem.hosts


class _Posted(NamedTuple):
    """A step of a message that waits for its other end."""

    rank: int
    step: Send | Recv | RecvReduce


class _Rank:
    """The state of one rank."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        in_place = plan.problem.collective in ("all_reduce", "broadcast", "reduce")
        self.buffers = {
            Buf.IN: leaf(plan.rank, plan.in_count),
            Buf.OUT: leaf(plan.rank, plan.out_count) if in_place else unset(plan.out_count),
            Buf.TMP: unset(plan.tmp_count),
        }
        if plan.problem.collective == "barrier":
            self.buffers[Buf.TMP] = np.full(plan.tmp_count, 1 << plan.rank, object)
        self.round = 0
        self.waiting: list[Step] = []
        self.local_after: list[Step] = []

    @property
    def ended(self) -> bool:
        return self.round == len(self.plan.rounds)

    def wrong(self, step: Step | None, what: str) -> NoReturn:
        """Raise PlanError with the rank, round and step."""
        at = f", step {step}" if step is not None else ""
        plan = self.plan
        raise PlanError(
            f"{plan.problem.collective} by {plan.algorithm}: rank {plan.rank}, round {self.round}{at}: {what}"
        )


class _World:
    """All ranks, and the messages that wait for their other end.

    In a barrier, an element of `tmp` holds the ranks that must have arrived before it was last touched, one
    bit per rank; a write adds to it, since it waited for the touches before. Dependencies count here, not
    rounds: an executor may run ahead of rounds.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.is_barrier = plans[0].problem.collective == "barrier"
        self.ranks = [_Rank(plan) for plan in plans]
        self.expressions = Expressions(len(plans))
        self.posted: defaultdict[tuple[int, int, bool], deque[_Posted]] = defaultdict(deque)
        self.ready = deque(self.ranks)

    def run(self) -> None:
        """Run all ranks, one round at a time, until all have ended."""
        while self.ready:
            state = self.ready.popleft()
            if not state.ended:
                self._begin_round(state)
        stuck = [state for state in self.ranks if not state.ended]
        if stuck:
            waits = "; ".join(
                f"rank {state.plan.rank}, round {state.round}: {', '.join(map(str, state.waiting[:3]))}"
                for state in stuck[:8]
            )
            stuck[0].wrong(None, f"deadlock: {len(stuck)} ranks wait forever: {waits}")

    def _begin_round(self, state: _Rank) -> None:
        """Run the local steps before the messages and post these; the other local steps run after them."""
        steps = state.plan.rounds[state.round]
        for step in steps:
            _check_step(state, step)
        state.waiting = [step for step in steps if not is_local(step)]
        if not state.waiting:
            state.local_after = list(steps)
            self._end_round(state)
            return
        first, stop = steps.index(state.waiting[0]), len(steps) - steps[::-1].index(state.waiting[-1])
        if stop - first != len(state.waiting):
            state.wrong(None, "a local step is between messages")
        _check_conflicts(state)
        for step in steps[:first]:
            self._run_local(state, step)
        state.local_after = list(steps[stop:])
        for step in list(state.waiting):
            self._post(state, step)

    def _end_round(self, state: _Rank) -> None:
        for step in state.local_after:
            self._run_local(state, step)
        state.round += 1
        self.ready.append(state)

    def _post(self, state: _Rank, step: Step) -> None:
        """Match a message with its other end if that is posted already."""
        assert isinstance(step, Send | Recv | RecvReduce)
        is_send = isinstance(step, Send)
        rank, peer = state.plan.rank, step.peer
        others = self.posted[(rank, peer, False) if is_send else (peer, rank, True)]
        if not others:
            self.posted[(rank, peer, True) if is_send else (peer, rank, False)].append(_Posted(rank, step))
            return
        other = others.popleft()
        sent, received = (_Posted(rank, step), other) if is_send else (other, _Posted(rank, step))
        self._deliver(self.ranks[sent.rank], sent.step, self.ranks[received.rank], received.step)

    def _deliver(self, sender: _Rank, send: Step, receiver: _Rank, receive: Step) -> None:
        assert isinstance(send, Send)
        assert isinstance(receive, Recv | RecvReduce)
        if send.src.count != receive.dst.count:
            receiver.wrong(receive, f"rank {sender.plan.rank} sends {send.src.count} elements: {send}")
        values = self._read(sender, send, send.src)
        if isinstance(receive, RecvReduce):
            self._reduce(receiver, receive, receive.dst, values, receive.left)
        else:
            self._write(receiver, receive.dst, values)
        for state, step in ((sender, send), (receiver, receive)):
            state.waiting.remove(step)
            if not state.waiting:
                self._end_round(state)

    def _run_local(self, state: _Rank, step: Step) -> None:
        assert isinstance(step, Copy | Reduce)
        values = self._read(state, step, step.src)
        if isinstance(step, Copy):
            self._write(state, step.dst, values)
        else:
            self._reduce(state, step, step.dst, values, step.left)

    def _reduce(self, state: _Rank, step: Step, dst: Slice, values: Values, left: bool) -> None:
        if not dst.count:
            return
        held = self._read(state, step, dst)
        try:
            result = self.expressions.combine(*((values, held) if left else (held, values)))
        except ValueError as error:
            state.wrong(step, str(error))
        self._write(state, dst, result)

    def _read(self, state: _Rank, step: Step, src: Slice) -> Values:
        values = state.buffers[src.buf][src.start : src.stop]
        if values.size and values.min() == UNSET:
            first = src.start + int(np.argmin(values))
            state.wrong(step, f"reads {src.buf.value}[{first}], which nothing has set")
        return values

    def _write(self, state: _Rank, dst: Slice, values: Values) -> None:
        held = state.buffers[dst.buf][dst.start : dst.stop]
        held[:] = held | values if self.is_barrier else values


def _check_step(state: _Rank, step: Step) -> None:
    """Refuse a step that is wrong by itself."""
    for slice_, is_written in touched(step):
        if not 0 <= slice_.start <= slice_.stop <= len(state.buffers[slice_.buf]):
            state.wrong(step, f"{slice_} is outside a buffer of {len(state.buffers[slice_.buf])} elements")
        if is_written and slice_.buf is Buf.IN:
            state.wrong(step, "writes `in`")
    if isinstance(step, Copy | Reduce):
        if step.dst.count != step.src.count:
            state.wrong(step, f"{step.src.count} elements into {step.dst.count}")
        if step.dst.overlaps(step.src):
            state.wrong(step, "source and destination overlap")
    elif not 0 <= step.peer < state.plan.problem.size:
        state.wrong(step, "no such rank")
    elif step.peer == state.plan.rank:
        state.wrong(step, "a message to itself")


def _check_conflicts(state: _Rank) -> None:
    """Refuse a round where one message writes what another reads or writes."""
    if len(state.waiting) == 1:
        return
    touches = [
        (slice_.buf.value, slice_.start, slice_.stop, is_written, step)
        for step in state.waiting
        for slice_, is_written in touched(step)
        if slice_.count
    ]
    touches.sort(key=lambda touch: touch[:3])
    in_buf, read_until, written_until = "", 0, 0
    for buf, start, stop, is_written, step in touches:
        if buf != in_buf:
            in_buf, read_until, written_until = buf, 0, 0
        if start < written_until or (is_written and start < read_until):
            state.wrong(step, "conflict: another message of this round touches these elements")
        if is_written:
            written_until = max(written_until, stop)
        else:
            read_until = max(read_until, stop)


class _Piece(NamedTuple):
    """What a part of `out` must hold: contributions of these ranks, from this position on."""

    start: int
    length: int
    contributors: int
    position: int


Promise: TypeAlias = Callable[[Sequence[Plan], int], list[_Piece]]


def _everyone(plans: Sequence[Plan]) -> int:
    return (1 << len(plans)) - 1


def _blocks_of_all(plans: Sequence[Plan], rank: int) -> list[_Piece]:
    counts = plans[rank].problem.counts
    return [
        _Piece(*block, 1 << src, 0) for src, block in enumerate(zip(offsets(counts), counts, strict=False))
    ]


def _own_block(plans: Sequence[Plan], rank: int, contributors: int) -> list[_Piece]:
    counts = plans[rank].problem.counts
    return [_Piece(0, counts[rank], contributors, offsets(counts)[rank])]


def _column(plans: Sequence[Plan], rank: int) -> list[_Piece]:
    size = len(plans)
    counts = plans[rank].problem.counts[rank::size]
    pieces = []
    for src, (start, count) in enumerate(zip(offsets(counts), counts, strict=False)):
        row = plans[src].problem.counts[src * size : (src + 1) * size]
        if row[rank] != count:
            raise PlanError(
                f"ranks {src} and {rank} disagree about the block between them: {row[rank]}, {count}"
            )
        pieces.append(_Piece(start, count, 1 << src, offsets(row)[rank]))
    return pieces


def _vector(plans: Sequence[Plan], contributors: int) -> list[_Piece]:
    return [_Piece(0, plans[0].problem.counts[0], contributors, 0)]


_PROMISES: Final[dict[str, Promise]] = {
    "all_reduce": lambda plans, rank: _vector(plans, _everyone(plans)),
    "reduce": lambda plans, rank: _vector(plans, _everyone(plans)) if rank == plans[0].problem.root else [],
    "broadcast": lambda plans, rank: _vector(plans, 1 << plans[0].problem.root),
    "all_gather": _blocks_of_all,
    "gather": lambda plans, rank: _blocks_of_all(plans, rank) if rank == plans[0].problem.root else [],
    "scatter": lambda plans, rank: _own_block(plans, rank, 1 << plans[0].problem.root),
    "reduce_scatter": lambda plans, rank: _own_block(plans, rank, _everyone(plans)),
    "all_to_all": _column,
    "scan": lambda plans, rank: _vector(plans, (2 << rank) - 1),
    "exscan": lambda plans, rank: _vector(plans, (1 << rank) - 1) if rank else [],
    "barrier": lambda plans, rank: [],
}


def _check_results(world: _World, ordered: bool, canonical: bool) -> None:
    plans = [state.plan for state in world.ranks]
    collective = plans[0].problem.collective
    for state in world.ranks:
        for piece in _PROMISES[collective](plans, state.plan.rank):
            if piece.length:
                _check_piece(world.expressions, state, piece, ordered, canonical)
        if collective == "barrier":
            _check_barrier(state)
        if collective == "exscan" and state.plan.rank == 0 and (state.buffers[Buf.OUT] != UNSET).any():
            state.wrong(None, "rank 0 of an exscan gets nothing, but `out` was written")
        if collective == "all_reduce":
            differs = state.buffers[Buf.OUT] != world.ranks[0].buffers[Buf.OUT]
            if differs.any():
                state.wrong(None, f"out[{int(np.argmax(differs))}] is bracketed differently than on rank 0")


def _check_barrier(state: _Rank) -> None:
    arrived = 1 << state.plan.rank
    for before in state.buffers[Buf.TMP]:
        arrived |= int(before)
    missing = ((1 << state.plan.problem.size) - 1) & ~arrived
    if missing:
        state.wrong(None, f"passes the barrier before ranks {_ranks(missing)} have arrived")


def _check_piece(known: Expressions, state: _Rank, piece: _Piece, ordered: bool, canonical: bool) -> None:
    values = state.buffers[Buf.OUT][piece.start : piece.start + piece.length]
    if values.min() == UNSET:
        state.wrong(None, f"out[{piece.start + int(np.argmin(values))}] is never set")
    misplaced = position_of(values) != np.arange(piece.position, piece.position + piece.length)
    if misplaced.any():
        first = int(np.argmax(misplaced))
        found = int(position_of(values)[first])
        state.wrong(None, f"out[{piece.start + first}] holds position {found}, not {piece.position + first}")
    for expression in map(int, np.unique(expression_of(values))):
        if known.contributors[expression] != piece.contributors:
            state.wrong(
                None,
                f"out holds {known.text(expression)}, not the contributions of {_ranks(piece.contributors)}",
            )
        if ordered and not known.is_ascending[expression]:
            state.wrong(None, f"out holds {known.text(expression)}, not in rank order")
        if canonical and expression != _canonical(known, state.plan.problem.collective, piece.contributors):
            state.wrong(None, f"out holds {known.text(expression)}, not bracketed canonically")


def _canonical(known: Expressions, collective: str, contributors: int) -> int:
    """Return the expression of a reproducible result: a left fold for prefixes, otherwise the tree."""
    ranks = _ranks(contributors)
    if len(ranks) == 1:
        return ranks[0]
    if collective in ("scan", "exscan"):
        result = 0
        for rank in ranks[1:]:
            result = known.pair(result, rank)
        return result

    def tree(lo: int, hi: int) -> int:
        if hi - lo == 1:
            return lo
        mid = lo + (1 << ((hi - lo - 1).bit_length() - 1))
        return known.pair(tree(lo, mid), tree(mid, hi))

    return tree(0, len(ranks))


def _ranks(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]

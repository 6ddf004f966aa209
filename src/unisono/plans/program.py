"""Programs: a plan cut into pieces, each with the earlier pieces that it must wait for.

A program is run by the reference executor (execute.py) or by the engine (backends/native/programs.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from unisono.plans.catalog import entry_of, reduces
from unisono.plans.steps import Buf, Copy, Plan, Recv, RecvReduce, Reduce, Send, Slice, Step

__all__ = ["Program", "piece_bytes_of", "program_of"]

# With the default segment 64 MiB. Both ends share the copying of a message, more evenly the longer it is.
_DIRECT_SEGMENTS: Final = 256


@dataclass(frozen=True, slots=True)
class Program:
    """The pieces of a plan. Piece i waits for the pieces `before[i]`; the pieces `after[i]` wait for it."""

    pieces: tuple[Step, ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]


def piece_bytes_of(plan: Plan, segment_bytes: int, message_bytes_max: int) -> int:
    """The largest length of a piece, in bytes; the same on every rank.

    Pieces allow overlap: one is reduced or forwarded while the next arrives. Where every byte goes straight
    to its destination there is nothing to overlap, and pieces are longer, because each costs a message.
    """
    problem = plan.problem
    # With two ranks nothing is forwarded.
    is_pair = problem.size <= 2 and not reduces(problem.collective)
    if not is_pair and not entry_of(problem.collective, plan.algorithm).is_direct:
        return segment_bytes
    return max(segment_bytes, min(_DIRECT_SEGMENTS * segment_bytes, message_bytes_max))


def program_of(plan: Plan, segment: int) -> Program:
    """Cut a plan into pieces of at most `segment` elements; cached by what the plan was built from."""
    # Hashing the plan itself would be slow.
    return _programs(_Key(plan, (plan.problem, plan.algorithm, plan.rank, segment)), segment)


class _Key:
    """A plan that is compared by what it was built from."""

    __slots__ = ("identity", "plan")

    def __init__(self, plan: Plan, identity: tuple[Any, ...]) -> None:
        self.plan = plan
        self.identity = identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.identity == other.identity


@lru_cache(maxsize=1024)
def _programs(key: _Key, segment: int) -> Program:
    pieces = tuple(piece for step in key.plan.steps for piece in _cut(step, segment))
    touches = {buf: _Touches() for buf in Buf}
    before: list[tuple[int, ...]] = []
    after: list[list[int]] = [[] for _ in pieces]
    for i, piece in enumerate(pieces):
        earlier: set[int] = set()
        for touched, writes in _reads_writes(piece):
            earlier |= touches[touched.buf].touch(touched, writes, i)
        earlier.discard(i)
        before.append(tuple(sorted(earlier)))
        for j in before[i]:
            after[j].append(i)
    return Program(pieces, tuple(before), tuple(map(tuple, after)))


def _cut(step: Step, segment: int) -> Iterator[Step]:
    """Cut a step into pieces of at most `segment` elements; an empty step stays one empty piece."""
    whole = _reads_writes(step)[0][0]
    if whole.count <= segment:
        yield step
        return
    for start in range(0, whole.count, segment):
        length = min(segment, whole.count - start)

        def part(s: Slice, start: int = start, length: int = length) -> Slice:
            return Slice(s.buf, s.start + start, s.start + start + length)

        match step:
            case Send(peer, src):
                yield Send(peer, part(src))
            case Recv(peer, dst):
                yield Recv(peer, part(dst))
            case RecvReduce(peer, dst, left):
                yield RecvReduce(peer, part(dst), left)
            case Copy(dst, src):
                yield Copy(part(dst), part(src))
            case Reduce(dst, src, left):
                yield Reduce(part(dst), part(src), left)


def _reads_writes(step: Step) -> tuple[tuple[Slice, bool], ...]:
    """The slices a step touches, each with whether it is written."""
    match step:
        case Send(_, src):
            return ((src, False),)
        case Recv(_, dst) | RecvReduce(_, dst):
            return ((dst, True),)
        case Copy(dst, src) | Reduce(dst, src):
            return ((dst, True), (src, False))


class _Touches:
    """Which pieces touched which elements of a buffer last: the source of every dependency.

    The buffer is cut wherever a touch begins or ends, so each interval has one last writer (-1: none) and the
    pieces that have read it since. A piece that waits for these readers has waited for the writer, too.
    """

    def __init__(self) -> None:
        self._starts = [0]
        self._marks: list[tuple[int, tuple[int, ...]]] = [(-1, ())]

    def touch(self, s: Slice, writes: bool, i: int) -> set[int]:
        """Record that piece i touches a slice; return the pieces that it must wait for."""
        if s.count == 0:
            return set()
        first, last = self._bound(s.start), self._bound(s.stop)
        earlier: set[int] = set()
        for k in range(first, last):
            writer, readers = self._marks[k]
            earlier.update(readers if writes and readers else (writer,))
            if not writes:
                self._marks[k] = (writer, (*readers, i))
        if writes:
            self._starts[first:last] = [s.start]
            self._marks[first:last] = [(i, ())]
        earlier.discard(-1)
        return earlier

    def _bound(self, at: int) -> int:
        """Make an interval begin at `at`; return its index."""
        k = bisect_left(self._starts, at)
        if k == len(self._starts) or self._starts[k] != at:
            self._starts.insert(k, at)
            self._marks.insert(k, self._marks[k - 1])
        return k

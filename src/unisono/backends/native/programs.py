"""Plans compiled to programs of the engine (native/collective/program.hpp), which run.hpp executes."""

from __future__ import annotations

from typing import Final

from unisono import _native
from unisono.plans.program import program_of
from unisono.plans.steps import Buf, Copy, Plan, Recv, RecvReduce, Reduce, Send, Slice, Step

__all__ = ["compiled"]

# native/collective/program.hpp: Step, Buffer
_SEND, _RECV, _RECV_REDUCE, _COPY, _REDUCE = range(5)
_BUFFERS: Final = {Buf.IN: 0, Buf.OUT: 1, Buf.TMP: 2}

_Row = tuple[int, int, int, int, int, int, int, int]


def compiled(plan: Plan, segment: int, members: tuple[int, ...] | None, ranks: int) -> _native.Program:
    """Return the engine's program for a plan cut into pieces of `segment` elements."""
    # Plans are built once and cached, so the identity of a plan is a short key.
    key = (id(plan), segment, members, ranks)
    known = _compiled.get(key)
    if known is not None:
        return known[1]
    program = program_of(plan, segment)
    made = _native.Program(
        [_row(piece, members) for piece in program.pieces],
        program.before,
        (plan.in_count, plan.out_count, plan.tmp_count),
        ranks,
    )
    while len(_compiled) >= _KEPT:
        _compiled.pop(next(iter(_compiled)), None)
    _compiled[key] = (plan, made)  # keep the plan: while it lives, no other plan has its id
    return made


# As many as the cache of plans holds.
_KEPT: Final = 1024
_compiled: dict[tuple[int, int, tuple[int, ...] | None, int], tuple[Plan, _native.Program]] = {}


def _row(piece: Step, members: tuple[int, ...] | None) -> _Row:
    match piece:
        case Send(peer, dst):
            return _line(_SEND, peer if members is None else members[peer], dst, dst)
        case Recv(peer, dst):
            return _line(_RECV, peer if members is None else members[peer], dst, dst)
        case RecvReduce(peer, dst, left):
            return _line(_RECV_REDUCE, peer if members is None else members[peer], dst, dst, left)
        case Copy(dst, src):
            return _line(_COPY, 0, dst, src)
        case Reduce(dst, src, left):
            return _line(_REDUCE, 0, dst, src, left)


def _line(step: int, peer: int, dst: Slice, src: Slice, left: bool = False) -> _Row:
    return (step, peer, _BUFFERS[dst.buf], dst.start, _BUFFERS[src.buf], src.start, dst.count, left)

"""What every foreign library's collectives need: the agreement before a call, and how a call ends.

Gloo and MPI do not compare calls: ranks that call different things hang, or get wrong results.
So every collective begins with an *agreement*: all ranks gather *preambles* of one length with the
fingerprint of what each of them calls. A short operand fits into the preamble. Then nothing else travels:
every rank has every operand and reduces them in rank order. Otherwise all ranks have entered by the end of
the agreement, so the library call cannot block on an absent rank.

A library matches the calls of a group by their order, so all ranks must begin them in one order. The first
stage of a verb begins in the order of the user's calls. Later stages begin whenever they can, so they go by
plans.

This module names no library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from unisono.core.dtypes import Kind
from unisono.core.envelope import Lane, Tags
from unisono.core.kernels import reduce_into
from unisono.core.request import HeaderMismatch, Request
from unisono.core.runtime import Runtime
from unisono.messaging.backend import Backend
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.stage import FINGERPRINT_BYTES, Stage
from unisono.plans.catalog import reduces
from unisono.plans.steps import Buf, Problem

__all__ = [
    "PREAMBLE_BYTES",
    "Agreement",
    "ForeignRequest",
    "Introductions",
    "fits_preamble",
    "library_may_run",
    "order_is_free",
]

Array = np.ndarray[Any, Any]

_HEAD_BYTES: Final = 32  # the fingerprint, a note, and padding that aligns the operand
# 512 bytes of operand cost a library nothing that can be measured; 4 KiB do.
_OPERAND_BYTES: Final = 512
PREAMBLE_BYTES: Final = _HEAD_BYTES + _OPERAND_BYTES

# The library's threads may need this long to read the last messages of a rank that is gone.
_LAST_MESSAGES_S: Final = 2.0
_NO_PEER: Final = -1


class ForeignRequest(Request):
    """A collective under way in a library.

    It can be cancelled at any time until all ranks have agreed; `on_abandoned` is called then, while the
    request still owns its memory. After the agreement it is *committed*: the library works on the user's
    memory and all ranks take part, so it ends by itself; `on_unwanted` may make that happen sooner.
    """

    __slots__ = (
        "_failure",
        "_is_ended",
        "_is_unwanted",
        "_on_abandoned",
        "_on_unwanted",
        "_others",
        "_state_lock",
        "is_committed",
    )

    def __init__(
        self,
        others: tuple[int, ...],
        *,
        on_abandoned: Callable[[], None] = lambda: None,
        on_unwanted: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(_NO_PEER)
        self._others = others
        self._on_abandoned = on_abandoned
        self._on_unwanted = on_unwanted
        self._is_ended = False
        self._is_unwanted = False
        self._failure: BaseException | None = None
        self._state_lock = threading.Lock()
        self.is_committed = False

    def peers_awaited(self) -> tuple[int, ...]:
        """All other ranks: a library does not say which one it waits for."""
        return () if self.done else self._others

    def commit(self) -> bool:
        """All ranks have agreed; False if it was cancelled before."""
        with self._state_lock:
            self.is_committed = not self._is_ended
        return self.is_committed

    def cancel(self) -> bool:
        """Cancel it; False if it is committed and ends by itself."""
        if self._claim_end(if_committed=False):
            self._on_abandoned()
            self.cancelled()
            return True
        with self._state_lock:
            self._is_unwanted, failure = True, self._failure
        if failure is not None:
            self.abort(failure)
        elif not self.done:
            self._on_unwanted()
        return False

    def succeed(self) -> None:
        """The library is done."""
        if self._claim_end():
            self.complete()

    def abort(self, error: BaseException) -> None:
        """The library or another rank failed, and the memory is no longer in use."""
        if self._claim_end():
            if not self.is_committed:
                self._on_abandoned()
            self.fail(error)

    def abort_later(self, runtime: Runtime, error: BaseException) -> None:
        """The library failed. Leave time for the verdict that a rank is dead, which explains it better.

        The group cancels the request when it learns of a dead rank; then the request ends at once. If it
        learns of none, the request ends with `error`.
        """
        with self._state_lock:
            self._failure, is_unwanted = error, self._is_unwanted
        if is_unwanted:
            self.abort(error)
        else:
            runtime.call_at(runtime.now() + _LAST_MESSAGES_S, lambda: self.abort(error))

    def peer_down(self, runtime: Runtime, down: PeerDown) -> None:
        """A rank is gone, but may have done its part before. A committed collective ends by the library."""
        runtime.call_at(runtime.now() + _LAST_MESSAGES_S, lambda: self._abandon(down.error()))

    def _abandon(self, error: BaseException) -> None:
        if self._claim_end(if_committed=False):
            self._on_abandoned()
            self.fail(error)

    def _claim_end(self, *, if_committed: bool = True) -> bool:
        """Whether the caller is the one that ends it."""
        with self._state_lock:
            if self._is_ended or (self.is_committed and not if_committed):
                return False
            self._is_ended = True
        return True


class Agreement:
    """The preambles of one collective: the library gathers `mine` of every rank into `everyone`.

    `note` is a byte for the library's own use. An agreement that is over can be used again for the next call
    of the same kind.
    """

    __slots__ = (
        "_memory",
        "_operand",
        "_operands",
        "_problem",
        "_rank",
        "_stage",
        "everyone",
        "is_sufficient",
        "mine",
    )

    def __init__(self, problem: Problem, stage: Stage, rank: int) -> None:
        self._problem = problem
        self._stage = stage
        self._rank = rank
        self._memory: Mapping[Any, Array] = {}
        self.mine = bytearray(PREAMBLE_BYTES)
        self.everyone = bytearray(PREAMBLE_BYTES * problem.size)
        self.mine[:FINGERPRINT_BYTES] = stage.header
        # Whether the preambles carry all that the collective needs.
        nbytes = 0 if problem.collective == "barrier" else _operand_bytes(problem, stage)
        self.is_sufficient = nbytes <= _OPERAND_BYTES
        self._operands: list[Array] = []
        if self.is_sufficient and problem.collective != "barrier":
            dtype = stage.dtype.storage
            count = nbytes // dtype.itemsize
            self._operand = np.frombuffer(self.mine, dtype, count, _HEAD_BYTES)
            self._operands = [
                np.frombuffer(self.everyone, dtype, count, rank * PREAMBLE_BYTES + _HEAD_BYTES)
                for rank in range(problem.size)
            ]

    def write(self, memory: Mapping[Any, Array], note: int = 0) -> None:
        """Write this rank's preamble for a call on `memory`."""
        self._memory = memory
        self.mine[FINGERPRINT_BYTES] = note
        if self._operands:
            self._operand[:] = _operand_of(self._problem, memory, self._rank)

    def is_unanimous(self) -> bool:
        """Whether all ranks called the same."""
        # A loop, because a generator expression costs more than the comparisons.
        fingerprint, everyone = self._stage.header, self.everyone
        for at in range(0, len(everyone), PREAMBLE_BYTES):
            if everyone[at : at + FINGERPRINT_BYTES] != fingerprint:
                return False
        return True

    def disagreement(self) -> HeaderMismatch:
        """The error of an agreement that was not unanimous; it names a rank of the backend that differs."""
        stage, everyone = self._stage, self.everyone
        theirs = [
            bytes(everyone[at : at + FINGERPRINT_BYTES]) for at in range(0, len(everyone), PREAMBLE_BYTES)
        ]
        peer = next(rank for rank, fingerprint in enumerate(theirs) if fingerprint != stage.header)
        there = peer if stage.rank_map is None else stage.rank_map.to_global(peer)
        return HeaderMismatch(there, theirs[peer])

    def notes(self) -> bytes:
        """What each rank noted."""
        return bytes(self.everyone[FINGERPRINT_BYTES::PREAMBLE_BYTES])

    def conclude(self) -> None:
        """Compute the result from the operands in the preambles."""
        problem, rank, operands = self._problem, self._rank, self._operands
        kind = problem.collective
        if kind == "barrier" or (kind in ("reduce", "gather") and rank != problem.root):
            return
        out = self._memory[Buf.OUT]
        match kind:
            case "all_reduce" | "reduce":
                self._fold(out, operands)
            case "scan":
                self._fold(out, operands[: rank + 1])
            case "exscan":
                self._fold(out, operands[:rank])
            case "reduce_scatter":
                start = rank * out.size
                self._fold(out, [each[start : start + out.size] for each in operands])
            case "broadcast":
                out[:] = operands[problem.root]
            case "all_to_all":
                part = out.size // problem.size
                for peer, each in enumerate(operands):
                    out[peer * part : (peer + 1) * part] = each[rank * part : (rank + 1) * part]
            case _:
                np.concatenate(operands, out=out)

    def _fold(self, out: Array, parts: list[Array]) -> None:
        op, dtype = self._stage.op, self._stage.dtype
        assert op is not None
        for part in parts[:1]:
            out[:] = part
        for part in parts[1:]:
            reduce_into(out, part, op, dtype)


class Introductions:
    """The exchange among the members of a group that precedes the library's own group.

    Every member sends its `card` (what the library wants the others to know) to all others. `on_all` gets the
    cards of all members in their order, on any thread.
    """

    def __init__(
        self,
        backend: Backend,
        context: int,
        members: tuple[int, ...],
        card: bytes,
        on_all: Callable[[list[bytes]], None],
    ) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._on_all = on_all
        self._cards = {backend.rank: card}
        self._members = members
        others = [member for member in members if member != backend.rank]
        for member in others:
            backend.start_send(member, context, _INTRODUCTION, memoryview(card), lane=Lane.CONTROL)
        self._receives = [backend.start_recv(member, context, _INTRODUCTION, None) for member in others]
        for member, receive in zip(others, self._receives, strict=True):
            receive.notify(partial(self._on_card, member, receive))

    def close(self) -> None:
        """Stop waiting for cards."""
        for receive in self._receives:
            receive.cancel()

    def _on_card(self, member: int, receive: Request) -> None:
        if receive.error is not None:
            return  # the group reports the loss of a member to the waiting caller
        with self._lock:
            self._cards[member] = bytes(receive.data or b"")
            is_last = len(self._cards) == len(self._members)
        if is_last:
            self._on_all([self._cards[each] for each in self._members])


_INTRODUCTION: Final = Tags.CONTROL | 1


def library_may_run(problem: Problem, stage: Stage) -> bool:
    """Whether ranks begin it in the order of the user's calls, and all blocks have one length.

    This includes blocks of no bytes: the library counts calls, so a rank that left one out would be a call
    behind the others.
    """
    if (stage.tag & ~Tags.COLLECTIVE) % Tags.STAGES != 0:
        return False
    return problem.collective == "barrier" or len(set(problem.counts)) == 1


def fits_preamble(problem: Problem, stage: Stage) -> bool:
    """Whether the preambles alone carry the collective."""
    if problem.collective == "barrier":
        return True
    # Only the root of a scatter has an operand.
    return problem.collective != "scatter" and _operand_bytes(problem, stage) <= _OPERAND_BYTES


def order_is_free(problem: Problem, stage: Stage, reproducible: bool) -> bool:
    """Whether operands may be combined in any order: nothing rounds, or `Config.reproducible` is off."""
    is_exact = stage.dtype.kind in (Kind.INTEGER, Kind.BOOL)
    return not reproducible or is_exact or not reduces(problem.collective)


def _operand_of(problem: Problem, memory: Mapping[Any, Array], rank: int) -> Array:
    """The array that a rank contributes."""
    kind = problem.collective
    in_place = kind in ("all_reduce", "broadcast") or (kind == "reduce" and rank == problem.root)
    return memory[Buf.OUT if in_place else Buf.IN]


def _operand_bytes(problem: Problem, stage: Stage) -> int:
    """The length of an operand, the same on every rank."""
    parts = problem.size if problem.collective in ("all_to_all", "reduce_scatter") else 1
    return problem.counts[0] * parts * stage.dtype.storage.itemsize

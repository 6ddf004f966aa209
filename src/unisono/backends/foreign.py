"""What the collectives of a foreign library have in common: agreements, groups, and how each is given up.

Knows when such a collective may begin, what ranks show each other before and how it ends. Does not know any
library.

A library that compares nothing hangs, or adds what should not be added, when ranks call different things. So
every collective begins with an *agreement*: all ranks exchange *preambles* of one length that say what each
calls. A short operand fits in the preamble, and then nothing else travels: every rank has every operand, and
reduces them in the order of ranks. Otherwise all ranks have entered by the end of the agreement, so the
library call cannot block on an absent rank.

Libraries put the calls of a group in order by themselves, so all ranks must begin them in one order. Verbs
begin their first stage in the order of the user's calls; later stages do so when they can, and go by plans.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np

from unisono.core.clock import Runtime
from unisono.core.dtypes import Kind
from unisono.core.envelope import HEADER_BYTES_MAX, Lane, Tags
from unisono.core.kernels import reduce_into
from unisono.core.request import HeaderMismatch, Request
from unisono.messaging.backend import Backend, PeerDown, Stage
from unisono.plans.catalog import reduces
from unisono.plans.steps import Buf, Problem

__all__ = [
    "SLIP_BYTES",
    "Agreement",
    "ForeignRequest",
    "Introductions",
    "disagreement",
    "is_exact",
    "is_slip",
    "library_may_run",
    "shown",
]

Array = np.ndarray[Any, Any]

_DIGEST_BYTES: Final = 8
_HEAD_BYTES: Final = 16  # the digest, a note, and room to align what follows
# 512 bytes more cost a library nothing that can be measured; 4 KiB do.
_OPERAND_BYTES: Final = 512
SLIP_BYTES: Final = _HEAD_BYTES + _OPERAND_BYTES

# After a rank is gone, what it said last may need so long to be read by a library's threads.
_PATIENCE_S: Final = 2.0
_NOBODY: Final = -1


class ForeignRequest(Request):
    """A collective under way in a library.

    Until all ranks have agreed it can be given up at any time; `on_given_up` is called while its memory is
    still its own. Then it is *committed*: the library works on the user's memory and everybody is there, so
    that it ends by itself; `on_unwanted` may hasten that.
    """

    __slots__ = (
        "_failure",
        "_is_unwanted",
        "_on_given_up",
        "_on_unwanted",
        "_others",
        "_state_lock",
        "_taken",
        "is_committed",
    )

    def __init__(
        self,
        others: tuple[int, ...],
        *,
        on_given_up: Callable[[], None] = lambda: None,
        on_unwanted: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(_NOBODY)
        self._others = others
        self._on_given_up = on_given_up
        self._on_unwanted = on_unwanted
        self._taken = False
        self._is_unwanted = False
        self._failure: BaseException | None = None
        self._state_lock = threading.Lock()
        self.is_committed = False

    def peers_awaited(self) -> tuple[int, ...]:
        """Everybody: a library does not say whom it waits for."""
        return () if self.done else self._others

    def commit(self) -> bool:
        """All have agreed; False if it was given up before."""
        with self._state_lock:
            self.is_committed = not self._taken
        return self.is_committed

    def cancel(self) -> bool:
        """Give it up; False if it ends by itself."""
        if self._take(if_committed=False):
            self._on_given_up()
            self.cancelled()
            return True
        with self._state_lock:
            self._is_unwanted, failure = True, self._failure
        if failure is not None:
            self.break_off(failure)
        elif not self.done:
            self._on_unwanted()
        return False

    def succeed(self) -> None:
        """The library is done."""
        if self._take():
            self.complete()

    def break_off(self, error: BaseException) -> None:
        """The library or the others failed, and nobody uses the memory."""
        if self._take():
            if not self.is_committed:
                self._on_given_up()
            self.fail(error)

    def break_off_later(self, runtime: Runtime, error: BaseException) -> None:
        """The library failed. Why is for those to say who know the ranks; if they do not, it is this.

        Who knows it gives the request up: then it ends at once.
        """
        with self._state_lock:
            self._failure, is_unwanted = error, self._is_unwanted
        if is_unwanted:
            self.break_off(error)
        else:
            runtime.call_at(runtime.now() + _PATIENCE_S, lambda: self.break_off(error))

    def peer_down(self, runtime: Runtime, down: PeerDown) -> None:
        """A rank is gone, and may have done its part before. What is committed ends with the library."""
        runtime.call_at(runtime.now() + _PATIENCE_S, lambda: self._leave(down.error()))

    def _leave(self, error: BaseException) -> None:
        if self._take(if_committed=False):
            self._on_given_up()
            self.fail(error)

    def _take(self, *, if_committed: bool = True) -> bool:
        """Whether the caller is the one who ends it."""
        with self._state_lock:
            if self._taken or (self.is_committed and not if_committed):
                return False
            self._taken = True
        return True


class Agreement:
    """What all ranks of a group show each other before a collective: `mine` is sent, `everyone` gathered.

    `note` is a byte for the library's own use. Once it is over, the like of it can be shown again.
    """

    __slots__ = (
        "_digest",
        "_given",
        "_memory",
        "_problem",
        "_rank",
        "_shown",
        "_stage",
        "everyone",
        "is_whole",
        "mine",
    )

    def __init__(self, problem: Problem, stage: Stage, rank: int) -> None:
        self._problem = problem
        self._stage = stage
        self._rank = rank
        self._digest = _digest_of(stage.header)
        self._memory: Mapping[Any, Array] = {}
        self.mine = bytearray(SLIP_BYTES)
        self.everyone = bytearray(SLIP_BYTES * problem.size)
        self.mine[:_DIGEST_BYTES] = self._digest
        # Whether the slips are all that is needed.
        self.is_whole = problem.collective == "barrier" or _operand_bytes(problem, stage) <= _OPERAND_BYTES
        self._shown: list[Array] = []
        if self.is_whole and problem.collective != "barrier":
            dtype = stage.dtype.storage
            count = _operand_bytes(problem, stage) // dtype.itemsize
            self._given = np.frombuffer(self.mine, dtype, count, _HEAD_BYTES)
            self._shown = [
                np.frombuffer(self.everyone, dtype, count, rank * SLIP_BYTES + _HEAD_BYTES)
                for rank in range(problem.size)
            ]

    def show(self, memory: Mapping[Any, Array], note: int = 0) -> None:
        """Write the preamble of a collective on this memory."""
        self._memory = memory
        self.mine[_DIGEST_BYTES] = note
        if self._shown:
            self._given[:] = _operand(self._problem, memory, self._rank)

    def is_met(self) -> bool:
        """Whether all ranks called the same."""
        digest, everyone = self._digest, self.everyone
        for at in range(0, len(everyone), SLIP_BYTES):  # noqa: SIM110 - a generator costs more than the rest
            if everyone[at : at + _DIGEST_BYTES] != digest:
                return False
        return True

    def notes(self) -> bytes:
        """What each rank noted."""
        return bytes(self.everyone[_DIGEST_BYTES::SLIP_BYTES])

    def conclude(self) -> None:
        """Do what remains when the slips are whole: everybody's operands are here."""
        problem, rank, shown = self._problem, self._rank, self._shown
        kind = problem.collective
        if kind == "barrier" or (kind in ("reduce", "gather") and rank != problem.root):
            return
        out = self._memory[Buf.OUT]
        match kind:
            case "all_reduce" | "reduce":
                self._fold(out, shown)
            case "scan":
                self._fold(out, shown[: rank + 1])
            case "exscan":
                self._fold(out, shown[:rank])
            case "reduce_scatter":
                start = rank * out.size
                self._fold(out, [each[start : start + out.size] for each in shown])
            case "broadcast":
                out[:] = shown[problem.root]
            case "all_to_all":
                part = out.size // problem.size
                for peer, each in enumerate(shown):
                    out[peer * part : (peer + 1) * part] = each[rank * part : (rank + 1) * part]
            case _:
                np.concatenate(shown, out=out)

    def _fold(self, out: Array, parts: list[Array]) -> None:
        op, dtype = self._stage.op, self._stage.dtype
        assert op is not None
        for part in parts[:1]:
            out[:] = part
        for part in parts[1:]:
            reduce_into(out, part, op, dtype)


class Introductions:
    """The members of a group tell each other what a library needs to know before it has a group, too.

    Every member sends its own words to all others; `on_all` gets everybody's, in order, on any thread.
    """

    def __init__(
        self,
        backend: Backend,
        context: int,
        members: tuple[int, ...],
        words: bytes,
        on_all: Callable[[list[bytes]], None],
    ) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._on_all = on_all
        self._words = {backend.rank: words}
        self._members = members
        others = [member for member in members if member != backend.rank]
        for member in others:
            backend.start_send(member, context, _INTRODUCTION, memoryview(words), lane=Lane.CONTROL)
        self._receives = [backend.start_recv(member, context, _INTRODUCTION, None) for member in others]
        for member, receive in zip(others, self._receives, strict=True):
            receive.notify(partial(self._hear, member, receive))

    def close(self) -> None:
        """Listen no longer."""
        for receive in self._receives:
            receive.cancel()

    def _hear(self, member: int, receive: Request) -> None:
        if receive.error is not None:
            return  # who waits for the group hears why by other ways
        with self._lock:
            self._words[member] = bytes(receive.data or b"")
            is_last = len(self._words) == len(self._members)
        if is_last:
            self._on_all([self._words[each] for each in self._members])


_INTRODUCTION: Final = Tags.CONTROL | 1


def library_may_run(problem: Problem, stage: Stage) -> bool:
    """Whether ranks begin it in the order of the user's calls, and all blocks have one length.

    Empty ones are no exception: a rank that left one out would be a call behind without a word.
    """
    if (stage.tag & ~Tags.COLLECTIVE) % Tags.STAGES != 0:
        return False
    return problem.collective == "barrier" or len(set(problem.counts)) == 1


def is_slip(problem: Problem, stage: Stage, reproducible: bool) -> bool:
    """Whether slips alone will do."""
    if problem.collective == "barrier":
        return True
    if problem.collective == "scatter":  # only its root has anything to show
        return False
    if reduces(problem.collective) and not is_exact(stage, reproducible):
        return False
    return _operand_bytes(problem, stage) <= _OPERAND_BYTES


def is_exact(stage: Stage, reproducible: bool) -> bool:
    """Whether the order of operands is free: nothing rounds, or nobody asked for the same bits every time."""
    return not reproducible or stage.dtype.kind in (Kind.INTEGER, Kind.BOOL)


def shown(stage: Stage) -> bytearray:
    """The whole fingerprint in a fixed length: what ranks show if they differ."""
    text = stage.header[: HEADER_BYTES_MAX - 2]
    return bytearray(len(text).to_bytes(2, "little") + text.ljust(HEADER_BYTES_MAX - 2, b"\0"))


def disagreement(stage: Stage, everyone: bytes | bytearray, rank: int) -> HeaderMismatch:
    """The error of ranks whose calls differ, from the fingerprints of all, in the numbers of the backend."""
    rows = [bytes(everyone[at : at + HEADER_BYTES_MAX]) for at in range(0, len(everyone), HEADER_BYTES_MAX)]
    headers = [row[2 : 2 + int.from_bytes(row[:2], "little")] for row in rows]
    mine = _call_of(stage.header)
    # Where this rank agrees with some, those who differ show it; where with nobody, anyone does.
    peer = next(r for r, header in enumerate(headers) if r != rank and _call_of(header) != mine)
    return HeaderMismatch(peer if stage.members is None else stage.members[peer], headers[peer])


def _operand(problem: Problem, memory: Mapping[Any, Array], rank: int) -> Array:
    """What a rank contributes."""
    kind = problem.collective
    in_place = kind in ("all_reduce", "broadcast") or (kind == "reduce" and rank == problem.root)
    return memory[Buf.OUT if in_place else Buf.IN]


def _operand_bytes(problem: Problem, stage: Stage) -> int:
    """How long it is, the same number on every rank."""
    parts = problem.size if problem.collective in ("all_to_all", "reduce_scatter") else 1
    return problem.counts[0] * parts * stage.dtype.storage.itemsize


@lru_cache(maxsize=1024)
def _digest_of(header: bytes) -> bytes:
    return hashlib.blake2b(_call_of(header), digest_size=_DIGEST_BYTES).digest()


def _call_of(header: bytes) -> bytes:
    return header.partition(b"\0")[0]

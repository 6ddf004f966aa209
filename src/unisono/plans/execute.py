"""The reference executor: runs a plan over any backend, with several segments in flight.

A plan is first bound to its counts and cut into a *bound program* (program.py). A *run* then posts every
piece that is ready. It runs ahead of the plan's rounds as far as data dependencies allow; only messages to
or from one peer keep their order, since the k-th send matches the k-th receive.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from unisono.core.buffers import as_bytes
from unisono.core.call import Call, Steps
from unisono.core.kernels import reduce_into
from unisono.core.request import Request
from unisono.errors import PeerLost, UnisonoError, UsageError
from unisono.messaging.backend import Backend
from unisono.messaging.stage import Stage
from unisono.plans.program import BoundProgram, bound_program, piece_bytes_of
from unisono.plans.steps import Buf, Copy, Plan, Recv, RecvReduce, Reduce, Send, Slice

__all__ = ["Execution", "Memory", "execute"]

_NUMBER_BYTES: Final = 4

Memory: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Execution:
    """What a run needs beside the plan."""

    backend: Backend
    stage: Stage
    call: Call
    world_ranks: tuple[int, ...]
    """The peers' world ranks, for errors."""
    check_header: Callable[[int, bytes], None]
    """Called with the peer and the header of its first message; raises if the fingerprint differs."""
    check_length: Callable[[int, int, int, bytes], None]
    """Called with the peer, the bytes received, the bytes expected and the header, if they differ; raises."""


def execute(plan: Plan, counts: tuple[int, ...], how: Execution) -> Steps[None]:
    """Run one rank's plan to its end; on an error, cancel its requests and wait for those that cannot be."""
    config = how.backend.config
    nbytes = piece_bytes_of(plan, config.segment_bytes, config.message_bytes_max)
    program = bound_program(plan, counts, max(1, nbytes // how.stage.dtype.itemsize))
    run = _Run(program, how, config.window_segments)
    try:
        if how.call.interruption is not None:
            raise how.call.interruption
        while not run.advance():
            yield
    except BaseException as reason:
        run.cancel()
        while run.has_pending() and not isinstance(reason, GeneratorExit):
            # The first error counts. Requests that have matched still use our memory, so wait for their end.
            with contextlib.suppress(UnisonoError):
                yield
        raise


class _Run:
    """A running execution."""

    def __init__(self, program: BoundProgram, how: Execution, window: int) -> None:
        self._program = program
        self._how = how
        self._window = window
        storage = how.stage.dtype.storage
        self._memory: dict[Buf, Memory] = {
            Buf.IN: how.stage.memory.get(Buf.IN, np.empty(0, storage)),
            Buf.OUT: how.stage.memory.get(Buf.OUT, np.empty(0, storage)),
            Buf.TMP: np.empty(program.tmp_count, storage),
        }
        for buf, count in ((Buf.IN, program.in_count), (Buf.OUT, program.out_count)):
            assert self._memory[buf].size == count, (
                f"{buf.value} has {self._memory[buf].size} elements, not {count}"
            )
        self._bytes = {buf: as_bytes(flat) for buf, flat in self._memory.items()}
        self._waits = [len(earlier) for earlier in program.before]
        self._left = len(program.pieces)
        self._sends: dict[int, deque[int]] = {}
        self._recvs: dict[int, deque[int]] = {}
        self._receiving: dict[int, int] = {}
        self._pending: dict[int, Request] = {}
        self._staged: dict[int, Memory] = {}
        self._spare: list[Memory] = []
        self._ended: deque[int] = deque()
        self._ready: deque[int] = deque()
        self._peers_gone: set[int] = set()
        for i, piece in enumerate(program.pieces):
            if isinstance(piece, Send):
                self._sends.setdefault(piece.peer, deque()).append(i)
            elif isinstance(piece, Recv | RecvReduce):
                self._recvs.setdefault(piece.peer, deque()).append(i)
            elif not self._waits[i]:
                self._ready.append(i)
        # The number of each message to or from its peer: the k-th send matches the k-th receive.
        queues = (*self._sends.values(), *self._recvs.values())
        self._number = {i: number for queue in queues for number, i in enumerate(queue)}
        how.call.waiting_on = self.peers_awaited

    def advance(self) -> bool:
        """Run and post everything that is ready; True once all pieces are done."""
        while True:
            while self._ended:
                self._on_request(self._ended.popleft())
            while self._ready:
                self._on_ready(self._ready.popleft())
            for peer in self._sends:
                self._post_sends(peer)
            for peer in self._recvs:
                self._post_recvs(peer)
            if not self._ended and not self._ready:
                return self._left == 0

    def peers_awaited(self) -> tuple[int, ...]:
        """The world ranks that this run waits for."""
        pieces = [self._program.pieces[i] for i, request in list(self._pending.items()) if not request.done]
        peers = {piece.peer for piece in pieces if not isinstance(piece, Copy | Reduce)} | self._peers_gone
        return tuple(sorted(self._how.world_ranks[peer] for peer in peers))

    def cancel(self) -> None:
        """Cancel every request that has not matched."""
        for request in list(self._pending.values()):
            request.cancel()

    def has_pending(self) -> bool:
        """Whether a request still uses our memory."""
        return any(not request.done for request in self._pending.values())

    def _post_sends(self, peer: int) -> None:
        queue = self._sends[peer]
        while queue and not self._waits[queue[0]]:
            i = queue.popleft()
            piece = self._program.pieces[i]
            assert isinstance(piece, Send)
            # The first message carries the fingerprint and is sent synchronously: if the peer never receives
            # it, the ranks called different things, and the sender must still be there to find out.
            how, is_first = self._how, not self._number[i]
            request = how.backend.start_send(
                peer,
                how.stage.context,
                how.stage.tag,
                self._view(piece.src),
                dtype=how.stage.dtype.code,
                header=self._header(i),
                sync=is_first and how.backend.capabilities.sync_send,
            )
            self._track(i, request)

    def _post_recvs(self, peer: int) -> None:
        queue = self._recvs[peer]
        while queue and self._receiving.get(peer, 0) < self._window:
            i = queue[0]
            piece = self._program.pieces[i]
            if isinstance(piece, RecvReduce):
                staging = self._staging_buffer(piece.dst.count)
                self._staged[i] = staging
                into = as_bytes(staging)
            else:
                assert isinstance(piece, Recv)
                if self._waits[i]:
                    return
                into = self._view(piece.dst)
            queue.popleft()
            self._receiving[peer] = self._receiving.get(peer, 0) + 1
            how = self._how
            self._track(
                i,
                how.backend.start_recv(
                    peer, how.stage.context, how.stage.tag, into, dtype=how.stage.dtype.code
                ),
            )

    def _header(self, i: int) -> bytes:
        """The header of a message: the fingerprint in the first one to a peer, then the message's number."""
        header, number = self._how.stage.header, self._number[i]
        return header if not number or not header else number.to_bytes(_NUMBER_BYTES, "little")

    def _track(self, i: int, request: Request) -> None:
        self._pending[i] = request
        request.notify(partial(self._on_end, i))

    def _on_end(self, i: int) -> None:
        self._ended.append(i)
        self._how.call.wake()

    def _on_request(self, i: int) -> None:
        request = self._pending.pop(i)
        piece = self._program.pieces[i]
        assert isinstance(piece, Send | Recv | RecvReduce)
        if isinstance(request.error, PeerLost):
            self._peers_gone.add(piece.peer)  # a control message will say why
            self._staged.pop(i, None)
            return
        if isinstance(piece, Send):
            if request.error is not None:
                raise self._how.call.translate_error(request.error)
            self._finish(i)
            return
        if self._is_after_gap(i, piece, request):
            self._staged.pop(i, None)
            return
        self._check_message(i, piece, request)
        if isinstance(piece, Recv):
            self._receiving[piece.peer] -= 1
            self._finish(i)
        elif not self._waits[i]:
            self._reduce_staged(i, piece)
        # else: `_on_ready` reduces it when the pieces before it are done

    def _is_after_gap(self, i: int, piece: Recv[int] | RecvReduce[int], request: Request) -> bool:
        """Whether a message follows a gap: the peer cancelled an earlier one, so it has given up.

        A control message with the reason is on its way; data of this call that is still queued is void.
        """
        envelope, peer, header = request.envelope, piece.peer, self._header(i)
        if header and envelope is not None:
            is_first = not self._number[i]
            # `_check_message` compares the first one's fingerprint; here its presence is enough.
            if len(envelope.header) <= _NUMBER_BYTES if is_first else envelope.header != header:
                self._peers_gone.add(peer)
        return peer in self._peers_gone and (request.error is None or isinstance(request.error, UsageError))

    def _check_message(self, i: int, piece: Recv[int] | RecvReduce[int], request: Request) -> None:
        how, awaited = self._how, piece.dst.count * self._how.stage.dtype.itemsize
        if isinstance(request.error, UsageError):
            # Too long, or of another type: the message is still queued, or a later receive has matched it.
            refused = request
            if refused.envelope is None:
                refused = how.backend.probe(piece.peer, how.stage.context, how.stage.tag)
                refused.cancel()
            envelope = refused.envelope
            if envelope is not None:
                if not self._number[i]:
                    how.check_header(piece.peer, envelope.header)
                how.check_length(piece.peer, envelope.nbytes, awaited, envelope.header)
        if request.error is not None:
            raise how.call.translate_error(request.error)
        envelope = request.envelope
        assert envelope is not None
        # The fingerprint is in the first message, which need not be the first to complete.
        if not self._number[i]:
            how.check_header(piece.peer, envelope.header)
        if envelope.nbytes != awaited:
            how.check_length(piece.peer, envelope.nbytes, awaited, envelope.header)

    def _on_ready(self, i: int) -> None:
        piece = self._program.pieces[i]
        if isinstance(piece, Copy):
            self._slice(piece.dst)[:] = self._slice(piece.src)
            self._finish(i)
        elif isinstance(piece, Reduce):
            self._combine(piece.dst, self._slice(piece.src), piece.left)
            self._finish(i)
        elif isinstance(piece, RecvReduce) and i in self._staged and i not in self._pending:
            # Posted, no longer pending, not yet reduced: its bytes are in the staging buffer.
            self._reduce_staged(i, piece)

    def _reduce_staged(self, i: int, piece: RecvReduce[int]) -> None:
        staging = self._staged.pop(i)
        self._combine(piece.dst, staging, piece.left)
        self._spare.append(staging)
        self._receiving[piece.peer] -= 1
        self._finish(i)

    def _combine(self, dst: Slice[int], src: Memory, left: bool) -> None:
        assert self._how.stage.op is not None, "a plan that reduces needs an op"
        if dst.count:
            reduce_into(self._slice(dst), src, self._how.stage.op, self._how.stage.dtype, left)

    def _finish(self, i: int) -> None:
        self._left -= 1
        for later in self._program.after[i]:
            self._waits[later] -= 1
            if not self._waits[later]:
                self._ready.append(later)

    def _staging_buffer(self, count: int) -> Memory:
        for k, spare in enumerate(self._spare):
            if spare.size == count:
                return self._spare.pop(k)
        return np.empty(count, self._how.stage.dtype.storage)

    def _slice(self, s: Slice[int]) -> Memory:
        return self._memory[s.buf][s.start : s.stop]

    def _view(self, s: Slice[int]) -> memoryview:
        itemsize = self._how.stage.dtype.itemsize
        return self._bytes[s.buf][s.start * itemsize : s.stop * itemsize]

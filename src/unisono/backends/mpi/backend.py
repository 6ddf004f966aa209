"""The mpi backend: any MPI library, through mpi4py, carries the frames of a FramedBackend.

A thread that waits polls MPI for progress; while no thread waits, a background thread polls every 2 ms. All
MPI calls are made under one lock, so MPI_THREAD_SERIALIZED is enough. Their events are dispatched after that
lock is released, by one thread at a time, in order.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from unisono._native import CallLog, RankMap
from unisono.backends.foreign import ForeignRequest
from unisono.backends.framed import FramedBackend, FrameTransport
from unisono.backends.mpi.calls import MpiCalls
from unisono.backends.mpi.collectives import MpiCollectives
from unisono.backends.registry import BackendInfo
from unisono.config import Config
from unisono.core.clock import RealEvent, RealRuntime
from unisono.core.envelope import Lane
from unisono.core.request import Request
from unisono.core.runtime import Event, Waiting
from unisono.errors import BackendUnavailable, ProtocolError, RendezvousError
from unisono.messaging.backend import Capabilities
from unisono.messaging.stage import Stage
from unisono.plans.steps import Problem
from unisono.version import VERSION

__all__ = ["DESCRIPTION", "Engine", "MpiBackend"]

_log = logging.getLogger("unisono.mpi")

_FRAME, _PAYLOAD = 1, 2  # MPI's tags
# A waiting thread polls this many times without a pause, then up to this many times with a yield; then with
# pauses that grow from the first to the last, because there may be more ranks than cores.
_SPINS: Final = 50
_YIELDS: Final = 500
_PAUSE_FIRST_S: Final = 20e-6
_PAUSE_LAST_S: Final = 1e-4
# Time for a cancelled collective to finish its part after this rank has said goodbye.
_BOUND_S: Final = 0.05
# Interval of the background thread: how long a message may wait here while no thread polls.
_IDLE_S: Final = 2e-3
_JOIN_S: Final = 5.0
_CAPABILITIES: Final = Capabilities("mpi", run_collective=True)


class Engine:
    """MPI progress: polls what was started, and dispatches the events that this brings."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_over = False
        self.polls = 0
        self._checks: list[Callable[[], Sequence[Callable[[], None]]]] = []
        self._events: deque[Callable[[], None]] = deque()
        self._dispatcher = 0  # the thread that dispatches
        self._dispatching = threading.Lock()

    def watch(self, check: Callable[[], Sequence[Callable[[], None]]]) -> None:
        """Call `check` under the lock at every poll; it returns the events to dispatch.

        Checks run in the order in which they were added, until one brings events.
        """
        self._checks.append(check)

    def progress(self) -> bool:
        """Poll MPI and dispatch what happened. False if nothing did."""
        if self._events:
            self._dispatch()
        self.polls += 1
        for check in self._checks:
            with self.lock:
                events = () if self.is_over else check()
                self._events.extend(events)
            if events:
                self._dispatch()
                return True
        return False

    def has_events(self) -> bool:
        """Whether an event waits for the next thread that makes progress; the caller holds the lock."""
        self.polls += 1
        if not self.is_over and not self._events:
            self._events.extend(self._checks[0]())
        return self.is_over or bool(self._events)

    def is_dispatching(self) -> bool:
        """Whether the calling thread is dispatching, further up its stack."""
        return self._dispatcher == threading.get_ident()

    def _dispatch(self) -> None:
        """Dispatch in order. If another thread dispatches, it takes our events too.

        A callback that waits dispatches the rest itself.
        """
        if self.is_dispatching():
            self._dispatch_all()
            return
        while self._events and self._dispatching.acquire(blocking=False):
            try:
                self._dispatcher = threading.get_ident()
                self._dispatch_all()
            finally:
                self._dispatcher = 0
                self._dispatching.release()

    def _dispatch_all(self) -> None:
        while self._events:
            event = self._events.popleft()
            try:
                event()
            except Exception:  # the other events must still be dispatched
                _log.exception("a callback failed")


class MpiBackend(FramedBackend):
    """One rank of MPI_COMM_WORLD, or of another communicator, of which it takes a duplicate."""

    def __init__(self, comm: Any, config: Config) -> None:
        self.engine = engine = Engine()
        super().__init__(comm.rank, comm.size, config, _MpiRuntime(engine))
        self.collectives = MpiCollectives(self, comm.Dup(), engine)
        self._transport = _MpiTransport(self, comm.Dup(), engine)
        engine.watch(self.collectives.check)
        self._handles = itertools.count(1)
        self._handed_over: dict[int, ForeignRequest] = {}
        self.watch(self.collectives.peer_down)
        self._pump = threading.Thread(target=self._run, name="unisono-mpi", daemon=True)
        self._pump.start()

    @property
    def capabilities(self) -> Capabilities:
        """Messages, and MPI's own collectives."""
        return _CAPABILITIES

    def run_collective(self, problem: Problem, stage: Stage) -> Request | None:
        """Let MPI run it, if MPI gives our results."""
        return self.collectives.run(problem, stage)

    def end_group(self, context: int) -> None:
        """Free the communicator's queue and its unclaimed messages."""
        super().end_group(context)
        self.collectives.close_queue(context)

    def library_calls(
        self, context: int, call_log: CallLog, rank_map: RankMap | None = None
    ) -> MpiCalls | None:
        """The calls of a communicator that go straight to MPI."""
        size = self.size if rank_map is None else len(rank_map)
        return MpiCalls(self, context, rank_map, call_log) if size > 1 else None

    def keep(self, request: ForeignRequest) -> int:
        """Keep a request that is handed over, until `adopt` takes it."""
        handle = next(self._handles)
        self._handed_over[handle] = request
        return handle

    def adopt(self, handle: int, *operation: Any) -> Request:
        """Take a request that was handed over."""
        return self._handed_over.pop(handle)

    def close(self) -> None:
        """Leave."""
        super().close()
        self.collectives.close()
        if threading.current_thread() is not self._pump:
            self._pump.join(_JOIN_S)

    def _run(self) -> None:
        polls = -1
        while not self.engine.is_over:
            # Where other threads poll, this one would only take the lock from them.
            if polls != self.engine.polls or not self.engine.progress():
                polls = self.engine.polls
                self.runtime.sleep(_IDLE_S)


class _MpiTransport(FrameTransport):
    """Frames and payloads as MPI messages on a communicator of their own."""

    def __init__(self, backend: MpiBackend, comm: Any, engine: Engine) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._backend = backend
        self._comm = comm
        self._engine = engine
        self._status = MPI.Status()
        self._sends: list[tuple[Any, bytes | memoryview]] = []
        # By peer: the receive of a payload, and the frames that came behind it.
        self._payloads: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._frames_behind: dict[int, deque[bytearray]] = {}
        engine.watch(self._check)

    def send(self, peer: int, frame: bytes, payload: memoryview | None, lane: Lane | None) -> None:
        """Start the sends; MPI keeps their order."""
        with self._engine.lock:
            if self._engine.is_over:
                return
            self._start_send(peer, frame, _FRAME)
            if payload:
                self._start_send(peer, payload, _PAYLOAD)

    def is_own_thread(self) -> bool:
        """Whether this thread is dispatching."""
        return self._engine.is_dispatching()

    def close(self) -> None:
        """Wait for what was sent, and poll no more."""
        runtime = self._backend.runtime
        flush, bound = runtime.deadline(self._backend.config.flush_s), runtime.deadline(_BOUND_S)
        while (self._sends and not flush.has_passed(runtime.now())) or (
            self._backend.collectives.is_bound() and not bound.has_passed(runtime.now())
        ):
            if not self._engine.progress():
                runtime.sleep(_PAUSE_LAST_S)
        with self._engine.lock:
            self._engine.is_over = True

    def _start_send(self, peer: int, data: bytes | memoryview, tag: int) -> None:
        self._sends.append((self._comm.Isend([data, self._mpi.BYTE], peer, tag), data))

    def _check(self) -> list[Callable[[], None]]:
        """Poll sends and receives; the caller holds the lock."""
        events: list[Callable[[], None]] = []
        if self._sends:
            self._sends = [entry for entry in self._sends if not entry[0].Test()]
        if self._payloads:
            for peer, (request, on_received) in list(self._payloads.items()):
                if request.Test():
                    del self._payloads[peer]
                    events.append(partial(self._on_payload, peer, on_received))
        status = self._status
        while (message := self._comm.Improbe(self._mpi.ANY_SOURCE, _FRAME, status)) is not None:
            frame = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([frame, self._mpi.BYTE])
            events.append(partial(self._on_frame, status.source, frame))
        return events

    # What follows is dispatched: one at a time, without the lock.

    def _on_frame(self, peer: int, frame: bytearray) -> None:
        """A frame has come; it waits behind a payload that has not been received."""
        if peer in self._frames_behind:
            self._frames_behind[peer].append(frame)
            return
        try:
            payload = self._backend.arrive(peer, memoryview(frame))
        except ProtocolError as error:
            self._backend.broken(peer, error)
            return
        if payload is not None:
            memory, on_received = payload
            self._frames_behind[peer] = deque()
            with self._engine.lock:
                request = self._comm.Irecv([memory, self._mpi.BYTE], peer, _PAYLOAD)
                self._payloads[peer] = (request, on_received)

    def _on_payload(self, peer: int, on_received: Callable[[], None]) -> None:
        frames = self._frames_behind.pop(peer)
        on_received()
        while frames:
            self._on_frame(peer, frames.popleft())
            if peer in self._frames_behind:
                self._frames_behind[peer].extend(frames)
                return


class _MpiRuntime(RealRuntime):
    """The real runtime; a thread that blocks makes progress."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait for the event; poll and dispatch meanwhile."""
        if self._engine.is_over:
            return super().block(event, timeout, waiting, is_limited=is_limited)
        end = None if timeout is None else self.now() + timeout
        spins, pause = 0, _PAUSE_FIRST_S
        while not event.is_set():
            if self._engine.progress():
                spins, pause = 0, _PAUSE_FIRST_S
                continue
            if event.is_set():
                break
            left = pause if end is None else min(pause, end - self.now())
            if left <= 0:
                return False
            spins += 1
            if spins > _YIELDS:
                assert isinstance(event, RealEvent)
                event.wait(left)
                pause = min(2 * pause, _PAUSE_LAST_S)
            elif spins > _SPINS:
                os.sched_yield()
        return True


def _join(config: Config, timeout: float | None) -> MpiBackend:
    """Join the other ranks of MPI_COMM_WORLD. `timeout` has no effect: MPI's start-up has no deadline.

    Raises:
        BackendUnavailable: MPI cannot serve threads.
        RendezvousError: the ranks differ in version or settings.
    """
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        raise BackendUnavailable(
            f"backend 'mpi': MPI was started with thread level {_level(level)}",
            cause="a background thread of this backend calls MPI beside the user's threads",
            next_step="do not lower mpi4py.rc.thread_level; allowed: serialized, multiple",
        )
    world = MPI.COMM_WORLD
    said = world.allgather(f"unisono {VERSION}, settings {config.digest()}")
    if len(set(said)) > 1:
        odd = next(rank for rank, text in enumerate(said) if text != said[0])
        raise RendezvousError(
            f"rank {odd} differs from rank 0",
            cause=f"rank 0: {said[0]}; rank {odd}: {said[odd]}",
            next_step="start all ranks with the same version of unisono and the same settings",
        )
    return MpiBackend(world, config)


def _level(level: int) -> str:
    return ("single", "funneled", "serialized", "multiple")[level]


def _check() -> str | None:
    """Why it cannot run here. MPI itself is not imported, because that would start it."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return None


DESCRIPTION = BackendInfo(
    name="mpi",
    summary="ranks as processes that mpiexec started, over an MPI library",
    check=_check,
    install="pip install 'unisono[mpi]'",
    capabilities=_CAPABILITIES,
    join=_join,
    launcher="mpiexec",
)

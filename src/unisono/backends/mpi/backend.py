"""The mpi backend: any MPI library, through mpi4py, carries the frames.

Knows how frames and payloads become MPI messages, and who makes MPI progress: whoever waits asks it again and
again, and while nobody waits a thread does so now and then. Does not know messages (the backend does), nor
how ranks were started: MPI's launcher did that.

All calls of MPI stand under one lock, so that MPI_THREAD_SERIALIZED is enough. What they bring is told after
that lock is released, by one thread at a time, in the order in which it came.
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

from unisono._native import CallLog
from unisono.backends.foreign import ForeignRequest
from unisono.backends.framed import FramedBackend, FrameTransport
from unisono.backends.mpi.calls import Decision, MpiCalls
from unisono.backends.mpi.collectives import Collectives
from unisono.backends.registry import BackendInfo
from unisono.config import Config
from unisono.core.clock import Event, RealRuntime, Waiting
from unisono.core.envelope import Lane
from unisono.core.request import Request
from unisono.errors import BackendUnavailable, ProtocolError, RendezvousError
from unisono.messaging.backend import Capabilities, Stage
from unisono.plans.steps import Problem
from unisono.version import VERSION

__all__ = ["DESCRIPTION", "Engine", "MpiBackend"]

_log = logging.getLogger("unisono.mpi")

_FRAME, _PAYLOAD = 1, 2  # MPI's tags
# Who waits asks so often without a pause; then with pauses that grow, because ranks may outnumber cores.
_SPINS: Final = 50
_YIELDS: Final = 500
_PAUSE_FIRST_S: Final = 20e-6
_PAUSE_LAST_S: Final = 1e-4
# Once this rank has said its last word, what the others relied on has been said, and is heard within this.
_BOUND_S: Final = 0.05
# While nobody waits, a message that nobody awaits may lie so long.
_IDLE_S: Final = 2e-3
_JOIN_S: Final = 5.0
_CAPABILITIES: Final = Capabilities("mpi", run_collective=True)


class Engine:
    """MPI progress: what was started and asked for, and what is told of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_over = False
        self.turns = 0  # how often somebody asked
        self._checks: list[Callable[[], Sequence[Callable[[], None]]]] = []
        self._news: deque[Callable[[], None]] = deque()
        self._teller = 0
        self._telling = threading.Lock()

    def watch(self, check: Callable[[], Sequence[Callable[[], None]]]) -> None:
        """Call this under the lock whenever progress is made; it returns what is to be told.

        What is watched first goes first, and its news are told before the others are asked.
        """
        self._checks.append(check)

    def progress(self) -> bool:
        """Ask MPI until something happened, and tell. False if nothing did."""
        if self._news:
            self._tell()
        self.turns += 1
        for check in self._checks:
            with self.lock:
                news = () if self.is_over else check()
                self._news.extend(news)
            if news:
                self._tell()
                return True
        return False

    def hears(self) -> bool:
        """Whether there is any news; the caller holds the lock. It will be told by whoever makes progress."""
        self.turns += 1
        if not self.is_over and not self._news:
            self._news.extend(self._checks[0]())
        return self.is_over or bool(self._news)

    def is_teller(self) -> bool:
        """Whether this very thread is telling, further up its stack."""
        return self._teller == threading.get_ident()

    def _tell(self) -> None:
        """Tell in order. Another thread that tells takes ours too; a callback that waits tells the rest."""
        if self.is_teller():
            self._tell_all()
            return
        while self._news and self._telling.acquire(blocking=False):
            try:
                self._teller = threading.get_ident()
                self._tell_all()
            finally:
                self._teller = 0
                self._telling.release()

    def _tell_all(self) -> None:
        while self._news:
            told = self._news.popleft()
            try:
                told()
            except Exception:  # the others must not pay for it
                _log.exception("a callback failed")


class MpiBackend(FramedBackend):
    """One rank of MPI_COMM_WORLD, or of another communicator, of which it takes a duplicate."""

    def __init__(self, comm: Any, config: Config) -> None:
        self.engine = engine = Engine()
        super().__init__(comm.rank, comm.size, config, _MpiRuntime(engine))
        self.collectives = Collectives(self, comm.Dup(), engine)
        self._wire = _MpiWire(self, comm.Dup(), engine)
        engine.watch(self.collectives.check)
        self._handles = itertools.count(1)
        self._kept: dict[int, ForeignRequest] = {}
        self.watch(self.collectives.peer_down)
        self._pump = threading.Thread(target=self._run, name="unisono-mpi", daemon=True)
        self._pump.start()

    @property
    def capabilities(self) -> Capabilities:
        """Messages as everywhere, and collectives of its own."""
        return _CAPABILITIES

    def run_collective(self, problem: Problem, stage: Stage) -> Request | None:
        """Let MPI solve it, if it gives our results."""
        request = self.collectives.run(problem, stage)
        if request is not None and stage.on_compiled is not None:
            room = self.collectives.queue_of(stage.context, stage.members)
            assert room is not None
            stage.on_compiled(Decision(room, problem, stage))
        return request

    def end_group(self, context: int) -> None:
        """Let go of what was made for it."""
        super().end_group(context)
        self.collectives.close_queue(context)

    def fast_path(
        self, context: int, size: int, call_log: CallLog, on_unclaimed: Callable[[int, int, bytes], bool]
    ) -> MpiCalls | None:
        """Make what brings known calls straight to MPI."""
        return MpiCalls(self, size, call_log) if size > 1 else None

    def keep(self, request: ForeignRequest) -> int:
        """Keep what a known call began until somebody adopts it."""
        handle = next(self._handles)
        self._kept[handle] = request
        return handle

    def adopt_run(self, handle: int, memory: tuple[Any, ...]) -> Request:
        """Follow it."""
        return self._kept.pop(handle)

    def close(self) -> None:
        """Leave."""
        super().close()
        self.collectives.close()
        if threading.current_thread() is not self._pump:
            self._pump.join(_JOIN_S)

    def _run(self) -> None:
        turns = -1
        while not self.engine.is_over:
            # Where others ask all the time, another thread would only hold them up.
            if turns != self.engine.turns or not self.engine.progress():
                turns = self.engine.turns
                self.runtime.sleep(_IDLE_S)


class _MpiWire(FrameTransport):
    """Frames and payloads as MPI messages on a communicator of their own."""

    def __init__(self, backend: MpiBackend, comm: Any, engine: Engine) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._backend = backend
        self._comm = comm
        self._engine = engine
        self._status = MPI.Status()
        self._sends: list[tuple[Any, bytes | memoryview]] = []
        self._landing: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._waiting: dict[int, deque[bytearray]] = {}
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
        """Whether this thread is in the midst of telling."""
        return self._engine.is_teller()

    def close(self) -> None:
        """Ask MPI no more."""
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
        """What has ended and come; the caller holds the lock."""
        told: list[Callable[[], None]] = []
        if self._sends:
            self._sends = [entry for entry in self._sends if not entry[0].Test()]
        if self._landing:
            for peer, (request, on_landed) in list(self._landing.items()):
                if request.Test():
                    del self._landing[peer]
                    told.append(partial(self._landed, peer, on_landed))
        status = self._status
        while (message := self._comm.Improbe(self._mpi.ANY_SOURCE, _FRAME, status)) is not None:
            frame = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([frame, self._mpi.BYTE])
            told.append(partial(self._hear, status.source, frame))
        return told

    # What follows is told, one by one and without the lock.

    def _hear(self, peer: int, frame: bytearray) -> None:
        """A frame; behind a payload that has not landed it has to wait."""
        if peer in self._waiting:
            self._waiting[peer].append(frame)
            return
        try:
            reassembly = self._backend.arrive(peer, memoryview(frame))
        except ProtocolError as error:
            self._backend.broken(peer, error)
            return
        if reassembly is not None:
            memory, on_landed = reassembly
            self._waiting[peer] = deque()
            with self._engine.lock:
                request = self._comm.Irecv([memory, self._mpi.BYTE], peer, _PAYLOAD)
                self._landing[peer] = (request, on_landed)

    def _landed(self, peer: int, on_landed: Callable[[], None]) -> None:
        waiting = self._waiting.pop(peer)
        on_landed()
        while waiting:
            self._hear(peer, waiting.popleft())
            if peer in self._waiting:
                self._waiting[peer].extend(waiting)
                return


class _MpiRuntime(RealRuntime):
    """The real runtime; who blocks makes progress."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait for the event, telling what ends meanwhile."""
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
                assert isinstance(event, threading.Event)
                event.wait(left)
                pause = min(2 * pause, _PAUSE_LAST_S)
            elif spins > _SPINS:
                os.sched_yield()
        return True


def _join(config: Config, timeout: float | None) -> MpiBackend:
    """Join the other ranks of MPI_COMM_WORLD. MPI brought them together, and waits as long as it likes.

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
            cause="a thread of ours makes progress beside the user's",
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
    """Why it cannot run here. Importing MPI starts it: who only asks does not."""
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

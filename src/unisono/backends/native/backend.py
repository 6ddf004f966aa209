"""The native backend: ranks in processes of their own, on one host or several.

Knows how requests map to operations of the engine, and which thread tells of their ends. Does not know rings,
sockets or who started the ranks: it gives a card, and gets everybody's.

Two threads may tell. Whoever waits makes progress in the engine itself, without the GIL, and tells what has
ended. While nobody waits, a pump thread sleeps in the engine and tells, so that tasks without a waiter go on.
"""

from __future__ import annotations

import atexit
import errno
import functools
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from unisono import _native
from unisono.backends.native.programs import compiled
from unisono.backends.native.refusals import Refusals
from unisono.backends.native.signals import HELD, HeldSignals
from unisono.backends.registry import BackendInfo, Closable
from unisono.config import Config
from unisono.core.call_site import is_users
from unisono.core.clock import Event, RealRuntime, Runtime, Waiting
from unisono.core.dtypes import BFLOAT16, DTYPES
from unisono.core.envelope import ANY, UNTYPED, Any_, Envelope, Lane, Status, Tags
from unisono.core.request import HeaderMismatch, LengthMismatch, Request
from unisono.errors import BackendUnavailable, ClosedError, UnisonoError, UsageError
from unisono.messaging.backend import Capabilities, PeerDown, Stage
from unisono.messaging.credit import CONTROL_BYTES_MAX, OWN_CREDIT_BYTES, bytes_max, eager_limits
from unisono.messaging.fast_path import Mailbox
from unisono.messaging.matching import Posted, refusal
from unisono.plans.program import piece_bytes_of
from unisono.plans.steps import Buf, Plan

__all__ = ["DESCRIPTION", "Card", "Credentials", "NativeBackend"]

_log = logging.getLogger("unisono.native")

# How long the engine waits before Python looks for signals.
_SLICE_S = 0.05

_CAPABILITIES = Capabilities("native", run_plan=True)

# By their number; NumPy's own arrays are never bfloat16.
_NUMPY_TYPES = [None if dtype is BFLOAT16 else dtype.storage for dtype in DTYPES.values()]

# What stands in news for the number of an operation: see _native.Engine.
_UNMET = -2
# native/messaging/message.hpp: Outcome
_DONE, _CANCELLED, _PEER_DOWN, _REFUSED, _CLOSED, _NO_MEMORY = range(6)


class Card(NamedTuple):
    """What the others need to reach a rank, and on its host to see whether it is only starved.

    `unix_path` is empty if it uses no shared memory; `pid` is 0 if it is not known.
    """

    host: str
    unix_path: str
    address: str
    port: int
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a rank shows with TLS, and whom it trusts, as PEM; `names[r]` is in rank r's certificate."""

    names: Sequence[str]
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    authority_pem: bytes = field(repr=False)


class NativeBackend(Closable):
    """One rank. It listens from the start; `connect` with everybody's cards lets it call others.

    `directory` is a folder of mode 0700 that the ranks of a host share; `secret` is known to the ranks only.
    `host` replaces the machine's own id: ranks with different ones use TCP. With `tls` all TCP is encrypted,
    and nobody is let in by TCP before `connect` has brought credentials; without, it carries checksums
    between hosts.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        directory: str,
        secret: bytes,
        *,
        config: Config | None = None,
        shm: bool = True,
        bind: str = "127.0.0.1",
        port: int = 0,
        host: str = "",
        checksum: bool = True,
        neighbours: bool = True,
        direct_read: bool = True,
        tls: bool = False,
        rekey_records: int = 1 << 22,
    ) -> None:
        self._rank = rank
        self._size = size
        self._config = config if config is not None else Config()
        control_eager_bytes, control_credit_bytes = eager_limits(self._config, Lane.CONTROL)
        try:
            self._engine = _native.Engine(
                rank,
                size,
                directory,
                secret,
                eager_bytes=self._config.eager_bytes,
                eager_credit_bytes=self._config.eager_credit_bytes,
                message_bytes_max=self._config.message_bytes_max,
                recv_bytes_max=self._config.recv_bytes_max,
                control_eager_bytes=control_eager_bytes,
                control_credit_bytes=control_credit_bytes,
                control_bytes_max=CONTROL_BYTES_MAX,
                own_credit_bytes=OWN_CREDIT_BYTES,
                silence_s=self._config.silence_s,
                shm=shm,
                checksum=checksum,
                neighbours=neighbours,
                direct_read=direct_read,
                bind=bind,
                port=port,
                host=host,
                tls=tls,
                rekey_records=rekey_records,
            )
        except RuntimeError as error:
            raise BackendUnavailable(
                "the native backend cannot start",
                cause=str(error),
                next_step="raise the limit of open files: ulimit -n 4096"
                if os.strerror(errno.EMFILE) in str(error)
                else "see the cause; what can run here is in uni.list_backends()",
            ) from None
        self._tls = tls
        self._desk = _Desk(self._engine, self._config.recv_bytes_max)
        self._runtime = _NativeRuntime(self._desk)
        self._hosts: tuple[int, ...] = ()
        self._short_bytes = bytes_max(self._config, Tags.CONTROL)  # what may have this length under any tag
        self._after_close: list[Callable[[], None]] = []
        self._pump = threading.Thread(
            target=_pump, args=(weakref.ref(self._desk), self._engine), name="unisono-pump", daemon=True
        )
        self._pump.start()
        # Who is simply forgotten must not leave threads and the others waiting.
        leave = functools.partial(_forget, self._desk, self._pump)
        _open[self._desk] = leave
        self._forgotten = weakref.finalize(self, self._runtime.call_soon, leave)
        self._forgotten.atexit = False

    def card(self) -> Card:
        """What the others need to reach this rank."""
        return Card(*self._engine.card())

    def connect(self, cards: Sequence[Card], credentials: Credentials | None = None) -> None:
        """Learn how to reach the others, by rank. Links are opened on first use.

        Raises:
            UsageError: the cards are not one per rank, or the credentials do not fit this rank.
        """
        if len(cards) != self._size:
            raise UsageError(f"{len(cards)} cards were given; allowed: one per rank, {self._size}")
        if self._tls != (credentials is not None):
            raise UsageError("allowed: credentials with tls=True, and none without")
        if credentials is not None:
            self._secure(credentials)
        names = list(dict.fromkeys(card.host for card in cards))
        self._hosts = tuple(names.index(card.host) for card in cards) if len(names) > 1 else ()
        self._engine.connect([(c.host, c.unix_path, c.address, c.port, c.pid) for c in cards])

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    @property
    def capabilities(self) -> Capabilities:
        """It runs plans itself."""
        return _CAPABILITIES

    @property
    def runtime(self) -> Runtime:
        """The clock; who waits by it makes progress."""
        return self._runtime

    @property
    def config(self) -> Config:
        """The settings of all ranks."""
        return self._config

    def hosts(self) -> tuple[int, ...]:
        """A number per rank, equal for ranks on one host; empty if all share one."""
        return self._hosts

    def link_kind(self) -> str:
        """Shared memory, unless a setting that all ranks share has turned it off."""
        return "shm" if self._config.shm else "tcp"

    def links(self) -> list[str]:
        """How each rank is reached at the moment; for tests and the curious."""
        return self._engine.links()

    def start_send(
        self,
        dst: int,
        context: int,
        tag: int,
        data: memoryview,
        *,
        dtype: int = UNTYPED,
        header: bytes = b"",
        lane: Lane = Lane.BULK,
        sync: bool = False,
    ) -> Request:
        """Send: at once if the message is short and the credit allows, else when its receive asks for it."""
        self.check_peer(dst, "dst")
        if data.nbytes > self._short_bytes:
            self.check_length(tag, data.nbytes, header)
        desk = self._desk
        request = _NativeRequest(dst, desk, data)
        number = request.number
        desk.requests[number] = request
        try:
            handle = self._engine.send(number, dst, context, tag, data, dtype, header, lane, sync)
        except BaseException as error:
            del desk.requests[number]
            raise _refused(error) from None
        if handle > 0:
            request.handle = handle
        elif desk.requests.pop(number, None) is not None:
            desk.end(request, -handle)
        return request

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive in the engine."""
        self.check_peer(src, "src")
        request = _NativeRequest(src, self._desk, into, dtype)
        source, tagged = _pattern(src, tag)
        return self._start(
            request,
            lambda: self._engine.receive(
                request.number, source, context, tagged, into, dtype, tagged & Tags.CONTROL > 0
            ),
        )

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe in the engine."""
        self.check_peer(src, "src")
        request = _NativeRequest(src, self._desk, None)
        source, tagged = _pattern(src, tag)
        return self._start(request, lambda: self._engine.probe(request.number, source, context, tagged))

    def run_plan(self, plan: Plan, stage: Stage) -> Request:
        """Run a plan in the engine, without the GIL."""
        dtype, memory, config, op = stage.dtype, stage.memory, self._config, stage.op
        nbytes = piece_bytes_of(plan, config.segment_bytes, config.message_bytes_max)
        program = compiled(plan, max(1, nbytes // dtype.itemsize), stage.members, self._size)
        if stage.on_compiled is not None:
            stage.on_compiled(program)
        given, result = memory.get(Buf.IN), memory.get(Buf.OUT)
        request = _RunRequest(self._desk, (given, result))
        return self._start(
            request,
            lambda: self._engine.run(
                request.number,
                program,
                stage.context,
                stage.tag,
                dtype.code,
                -1 if op is None or op.code is None else op.code,
                given,
                result,
                stage.header,
                config.window_segments,
            ),
        )

    def hot_path(
        self, context: int, size: int, ledger: _native.Ledger, on_unmet: Callable[[int, int, bytes], bool]
    ) -> _native.HotPath:
        """Make what runs a communicator's known calls in the engine."""
        self._desk.on_unmet(context, on_unmet)
        return _native.HotPath(
            self._engine,
            ledger,
            context=context,
            size=size,
            window=self._config.window_segments,
            stall_s=self._config.stall_query_s,
            array_type=np.ndarray,
            empty=np.empty,
            is_users=is_users,
        )

    def mailbox(self, context: int, tag: int) -> Mailbox:
        """Short messages without a request for each."""
        return _native.Mailbox(self._engine, context, tag)

    def hot_messages(
        self, context: int, members: tuple[int, ...], ledger: _native.Ledger, *, is_introduced: bool
    ) -> _native.HotMessages:
        """Make what sends and receives a communicator's plain messages in the engine."""
        return _native.HotMessages(
            self._engine,
            ledger,
            context=context,
            members=members,
            array_type=np.ndarray,
            empty=np.empty,
            dtypes=_NUMPY_TYPES,
            status=Status,
            any=ANY,
            is_introduced=is_introduced,
        )

    def adopt_run(self, handle: int, memory: tuple[Any, ...]) -> Request:
        """Follow a run that the hot path began."""
        request = _RunRequest(self._desk, memory)
        return self._start(request, lambda: self._engine.adopt(request.number, handle))

    def end_group(self, context: int) -> None:
        """Drop what nobody will receive any more."""
        self._engine.end_context(context)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Tell the listener of ranks that are or go down."""
        for down in self._desk.add_listener(listener):
            listener(down)

    def close(self) -> None:
        """Leave: flush what was started within the time set for it, tell the others, end the rest."""
        if self._forgotten.detach() is None or self._engine.is_forked():
            return
        self._engine.close(self._config.flush_s)
        self._desk.close()
        _open.pop(self._desk, None)
        if threading.current_thread() is not self._pump and not self._engine.is_forked():
            self._pump.join()
        for call in self._after_close:
            call()

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call once the engine is closed: for what must outlive it."""
        self._after_close.append(call)

    def _secure(self, given: Credentials) -> None:
        try:
            self._engine.secure(list(given.names), given.key_pem, given.certificate_pem, given.authority_pem)
        except RuntimeError as error:
            raise UsageError(
                "these credentials are of no use here",
                cause=str(error),
                next_step="give the key and the certificates that the seed of this job has made",
            ) from None

    def _start(self, request: _NativeRequest, start: Callable[[], int | tuple[Any, ...]]) -> Request:
        desk, number = self._desk, request.number
        desk.requests[number] = request
        try:
            started = start()
        except BaseException as error:
            del desk.requests[number]
            raise _refused(error) from None
        if isinstance(started, int):
            request.handle = started
        else:
            del desk.requests[number]
            if isinstance(request, _RunRequest):
                request.end(*started[1:])
            else:
                desk.end(request, *started[1:])
        return request


class _NativeRequest(Request):
    """A request with its operation's handle; it keeps the buffer until the engine is done with it."""

    __slots__ = ("buffer", "desk", "dtype", "handle", "number")

    def __init__(
        self, peer: int | Any_, desk: _Desk, buffer: memoryview | None, dtype: int = UNTYPED
    ) -> None:
        super().__init__(peer)
        self.desk = desk
        self.buffer = buffer
        self.dtype = dtype
        self.handle = 0
        self.number = next(desk.numbers)

    def cancel(self) -> bool:
        """Withdraw it from the engine."""
        if self.done or not self.handle or not self.desk.engine.cancel(self.handle):
            return False
        self.desk.requests.pop(self.number, None)
        self.cancelled()
        return True


# The peer of a request that concerns several.
_NOBODY = -1


class _RunRequest(_NativeRequest):
    """A plan under way in the engine; it keeps the plan's memory."""

    __slots__ = ("memory",)

    def __init__(self, desk: _Desk, memory: tuple[Any, ...]) -> None:
        super().__init__(_NOBODY, desk, None)
        self.memory: tuple[Any, ...] | None = memory

    def peers_awaited(self) -> tuple[int, ...]:
        """The peers of messages under way."""
        if self.done or not self.handle:
            return ()
        here = self.rank_here
        ranks = self.desk.engine.awaited(self.handle)
        return tuple(ranks if here is None else map(here, ranks))

    def cancel(self) -> bool:
        """Take back what can be taken back; it ends when the engine has let go of its memory."""
        return not self.done and bool(self.handle) and self.desk.engine.cancel(self.handle)

    def end(self, outcome: int, details: tuple[Any, ...] | None = None) -> None:
        """End as the run ended."""
        self.memory = None
        if outcome == _DONE:
            self.complete()
            return
        assert details is not None
        peer, is_header, came, awaited, header = details
        if outcome == _CANCELLED:
            self.cancelled()
        elif outcome != _REFUSED:
            self.fail(_broken(outcome))
        elif is_header:
            self.fail(HeaderMismatch(peer, header))
        else:
            self.fail(LengthMismatch(peer, came, awaited))


class _Desk:
    """The requests under way, and what is told of them."""

    def __init__(self, engine: _native.Engine, recv_bytes_max: int) -> None:
        self.engine = engine
        self._recv_bytes_max = recv_bytes_max
        self.numbers = itertools.count(1)
        self.requests: dict[int, _NativeRequest] = {}
        self.is_closed = False
        self._lock = threading.Lock()
        self._down: dict[int, PeerDown] = {}
        self._news: deque[tuple[Any, ...]] = deque()
        self._teller = 0
        self._listeners: list[Callable[[PeerDown], None]] = []
        self._unmet: dict[int, weakref.WeakMethod[Callable[[int, int, bytes], bool]]] = {}

    def tell(self, news: list[tuple[Any, ...]]) -> None:
        """Tell news that the engine gave to this thread, and whatever more there is by then.

        The order counts: who hears that a peer is gone must have heard of all that came from it. A callback
        that waits, here and now, tells the rest itself.
        """
        is_nested = self.is_teller()
        self._news.extend(news)
        failure: BaseException | None = None
        while True:
            self._teller = threading.get_ident()
            while self._news:
                try:
                    self._tell_one(*self._news.popleft())
                except BaseException as error:  # the others must not pay for it
                    failure = failure or error
            if is_nested:
                break
            self._teller = 0
            self._news.extend(self.engine.more(True))
            if not self._news:
                break
        if failure is not None:
            raise failure

    def is_teller(self) -> bool:
        """Whether this very thread is telling, further up its stack."""
        return self._teller == threading.get_ident()

    def end(
        self,
        request: _NativeRequest,
        outcome: int,
        envelope: tuple[Any, ...] | None = None,
        data: bytes | bytearray | None = None,
    ) -> None:
        """End a request as its operation ended."""
        met = None if envelope is None else Envelope(*envelope)
        if outcome == _DONE:
            request.buffer = None
            request.complete(met, data)
        elif outcome == _CANCELLED:
            request.cancelled()
        else:
            request.fail(self._error(request, outcome, met), met)

    def add_listener(self, listener: Callable[[PeerDown], None]) -> list[PeerDown]:
        with self._lock:
            if not self.is_closed:
                self._listeners.append(listener)
            return list(self._down.values())

    def on_unmet(self, context: int, hear: Callable[[int, int, bytes], bool]) -> None:
        """Let a group hear of messages that wait here although their senders do not, as long as it lives."""
        self._unmet[context] = weakref.WeakMethod(hear, lambda _: self._unmet.pop(context, None))

    def close(self) -> None:
        """Tell what ended with the engine; nobody listens any more."""
        with self._lock:
            self.is_closed = True
            self._listeners.clear()
        with HELD:
            self.tell(self.engine.wait(0.0, 0, self.is_teller()))
        self.engine.poke()

    def _tell_one(self, number: int, *details: Any) -> None:
        if number >= 0:
            request = self.requests.pop(number, None)
            if isinstance(request, _RunRequest):
                request.end(*details)
            elif request is not None:
                self.end(request, *details)
            return
        if number == _UNMET:
            self._tell_unmet(*details)
            return
        down = PeerDown(*details)
        with self._lock:
            self._down[down.rank] = down
            listeners = list(self._listeners)
        for listener in listeners:
            listener(down)

    def _tell_unmet(self, context: int, source: int, sequence: int, header: bytes) -> None:
        known = self._unmet.get(context)
        hear = None if known is None else known()
        if hear is None or not hear(source, sequence, header):
            self.engine.overlook(context)

    def _error(self, request: _NativeRequest, outcome: int, envelope: Envelope | None) -> UnisonoError:
        if outcome == _PEER_DOWN:
            assert isinstance(request.peer, int)
            return self._down_of(request.peer).error()
        if outcome == _REFUSED and envelope is not None:
            posted = Posted(
                envelope.source, envelope.context, envelope.tag, request, request.buffer, request.dtype
            )
            if (reason := refusal(posted, envelope, self._recv_bytes_max)) is not None:
                return reason
        return _broken(outcome)

    def _down_of(self, rank: int) -> PeerDown:
        known = self._down.get(rank)
        if known is not None:
            return known
        cause, left = self.engine.down_of(rank)
        return PeerDown(rank, cause, left)


class _Event:
    """A flag. Who waits for it does so in the engine, and is poked out if another thread raises it."""

    __slots__ = ("_engine", "_flag", "waiters")

    def __init__(self, engine: _native.Engine) -> None:
        self._engine = engine
        self._flag = False
        self.waiters: list[int] = []

    def set(self) -> None:
        self._flag = True
        waiters = self.waiters
        if waiters and waiters != [threading.get_ident()]:
            self._engine.poke()

    def clear(self) -> None:
        self._flag = False

    def is_set(self) -> bool:
        return self._flag


class _NativeRuntime(RealRuntime):
    """The real runtime; who blocks makes progress in the engine."""

    def __init__(self, desk: _Desk) -> None:
        super().__init__()
        self._desk = desk

    def undisturbed(self) -> HeldSignals:
        """Hold signals back: news that the engine gave and nobody told would be lost."""
        return HELD

    def event(self) -> Any:
        """Make an event."""
        return _Event(self._desk.engine)

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait for the event, telling what ends meanwhile; signals are seen every 50 ms."""
        assert isinstance(event, _Event)
        desk, engine = self._desk, self._desk.engine
        end = None if timeout is None else self.now() + timeout
        event.waiters.append(threading.get_ident())
        try:
            while not event.is_set():
                if HELD.came:
                    HELD.deliver()
                # Before the look at the flag: a poke after it ends the wait at once.
                pokes = engine.pokes()
                if event.is_set():
                    break
                left = _SLICE_S if end is None else min(_SLICE_S, end - self.now())
                if left <= 0:
                    return False
                if desk.is_teller():
                    desk.tell([])  # a callback waits: what it waits for may be behind it in the line
                if news := engine.wait(left, pokes, desk.is_teller()):
                    desk.tell(news)
                elif desk.is_closed:
                    self.sleep(
                        0.001
                    )  # the engine no longer waits; whoever raises the flag is a thread of ours
        finally:
            event.waiters.remove(threading.get_ident())
        return True


def _pattern(src: int | Any_, tag: int | Any_) -> tuple[int, int]:
    return (-1 if isinstance(src, Any_) else src, -1 if isinstance(tag, Any_) else tag)


def _broken(outcome: int) -> UnisonoError:
    if outcome in (_NO_MEMORY, _REFUSED):
        return UnisonoError(
            "there is no memory for the message", next_step="send it in parts, or free memory on this host"
        )
    return ClosedError("the backend is closed")


def _refused(error: BaseException) -> BaseException:
    if isinstance(error, _native.ForkedError):
        return ClosedError(
            "this communicator belongs to the parent process", next_step="make a new one after fork"
        )
    return error


def _forget(desk: _Desk, pump: threading.Thread) -> None:
    """Leave without a word."""
    _open.pop(desk, None)
    desk.engine.close(0.0)
    desk.is_closed = True
    desk.engine.poke()
    if threading.current_thread() is not pump and not desk.engine.is_forked():
        pump.join(1.0)


# Ranks that have not left, and how they do.
_open: dict[_Desk, Callable[[], None]] = {}


@atexit.register
def _leave_all() -> None:
    """At the end of the interpreter no thread may come back from the engine."""
    for leave in list(_open.values()):
        leave()


def _pump(desk_ref: weakref.ref[_Desk], engine: _native.Engine) -> None:
    """Tell what ends while nobody waits, and log who was turned away at the door."""
    refusals, clock = Refusals(), RealRuntime()
    while True:
        news = engine.pump(1.0)
        desk = desk_ref()
        is_over = desk is None or (desk.is_closed and not news)
        for line in refusals.lines(engine.take_refusals(), engine.refused(), clock.now(), is_last=is_over):
            _log.warning("refused %s", line)
        if desk is None or is_over:
            return
        if news:
            desk.tell(news)
        del desk, news


DESCRIPTION = BackendInfo(
    name="native",
    summary="ranks as processes, over shared memory and TCP",
    check=lambda: None,
    install="part of unisono",
    capabilities=_CAPABILITIES,
    around=lambda native: native,
)

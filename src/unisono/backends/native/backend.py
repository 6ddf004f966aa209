"""The native backend: ranks in processes of their own, on one host or several.

Knows how requests map to operations of the engine. Does not know rings, sockets or who started the ranks.
"""

from __future__ import annotations

import atexit
import errno
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from unisono import _native
from unisono.backends.native.clock import NativeRuntime
from unisono.backends.native.completions import CompletionDispatcher, NativeRequest, RunRequest
from unisono.backends.native.programs import compiled
from unisono.backends.native.refusals import Refusals
from unisono.backends.registry import BackendInfo, Closable
from unisono.config import Config
from unisono.core.call_site import is_users
from unisono.core.clock import RealRuntime, Runtime
from unisono.core.dtypes import BFLOAT16, DTYPES
from unisono.core.envelope import ANY, UNTYPED, Any_, Lane, Status, Tags
from unisono.core.request import Request
from unisono.errors import BackendUnavailable, ClosedError, UsageError
from unisono.messaging import strangers
from unisono.messaging.backend import Capabilities, PeerDown, Stage
from unisono.messaging.credit import CONTROL_BYTES_MAX, OWN_CREDIT_BYTES, bytes_max, eager_limits
from unisono.messaging.fast_path import Mailbox
from unisono.plans.program import piece_bytes_of
from unisono.plans.steps import Buf, Plan

__all__ = ["DESCRIPTION", "Card", "Credentials", "NativeBackend"]

_log = logging.getLogger("unisono.native")

_CAPABILITIES = Capabilities("native", run_plan=True)

# By their number; NumPy's own arrays are never bfloat16.
_NUMPY_TYPES = [None if dtype is BFLOAT16 else dtype.storage for dtype in DTYPES.values()]


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
                stranger_bytes_max=strangers.BYTES_MAX,
                stranger_s=strangers.STRANGER_S,
                strangers_max=strangers.STRANGERS_MAX,
                strangers_per_address_max=strangers.PER_ADDRESS_MAX,
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
        self._desk = CompletionDispatcher(self._engine, self._config.recv_bytes_max)
        self._runtime = NativeRuntime(self._desk)
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
        request = NativeRequest(dst, desk, data)
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
        request = NativeRequest(src, self._desk, into, dtype)
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
        request = NativeRequest(src, self._desk, None)
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
        request = RunRequest(self._desk, (given, result))
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

    def fast_path(
        self,
        context: int,
        size: int,
        call_log: _native.CallLog,
        on_unclaimed: Callable[[int, int, bytes], bool],
    ) -> _native.FastPath:
        """Make what runs a communicator's known calls in the engine."""
        self._desk.on_unclaimed(context, on_unclaimed)
        return _native.FastPath(
            self._engine,
            call_log,
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

    def fast_messages(
        self, context: int, members: tuple[int, ...], call_log: _native.CallLog, *, is_introduced: bool
    ) -> _native.FastMessages:
        """Make what sends and receives a communicator's plain messages in the engine."""
        return _native.FastMessages(
            self._engine,
            call_log,
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
        request = RunRequest(self._desk, memory)
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

    def _start(self, request: NativeRequest, start: Callable[[], int | tuple[Any, ...]]) -> Request:
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
            if isinstance(request, RunRequest):
                request.end(*started[1:])
            else:
                desk.end(request, *started[1:])
        return request


def _pattern(src: int | Any_, tag: int | Any_) -> tuple[int, int]:
    return (-1 if isinstance(src, Any_) else src, -1 if isinstance(tag, Any_) else tag)


def _refused(error: BaseException) -> BaseException:
    if isinstance(error, _native.ForkedError):
        return ClosedError(
            "this communicator belongs to the parent process", next_step="make a new one after fork"
        )
    return error


def _forget(desk: CompletionDispatcher, pump: threading.Thread) -> None:
    """Leave without a word."""
    _open.pop(desk, None)
    desk.engine.close(0.0)
    desk.is_closed = True
    desk.engine.interrupt_wait()
    if threading.current_thread() is not pump and not desk.engine.is_forked():
        pump.join(1.0)


# Ranks that have not left, and how they do.
_open: dict[CompletionDispatcher, Callable[[], None]] = {}


@atexit.register
def _leave_all() -> None:
    """At the end of the interpreter no thread may come back from the engine."""
    for leave in list(_open.values()):
        leave()


def _pump(desk_ref: weakref.ref[CompletionDispatcher], engine: _native.Engine) -> None:
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
    wrap=lambda native: native,
)

"""The native backend: ranks in processes of their own, on one host or several.

It maps requests to operations of the engine, which knows shared memory and sockets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from unisono import _native
from unisono.backends.native.card import Card, Credentials
from unisono.backends.native.clock import NativeRuntime
from unisono.backends.native.completions import CompletionDispatcher, Listening, NativeRequest, RunRequest
from unisono.backends.native.programs import compiled
from unisono.backends.native.pump import Pump
from unisono.backends.registry import BackendInfo, Closable
from unisono.config import Config
from unisono.core.buffers import arguments
from unisono.core.envelope import ANY, UNTYPED, Any_, Lane, Status, Tags
from unisono.core.request import Request
from unisono.core.runtime import Runtime
from unisono.errors import BackendUnavailable, ClosedError, UnisonoError, UsageError
from unisono.messaging import strangers
from unisono.messaging.backend import Capabilities, GroupListener, numbered_hosts
from unisono.messaging.credit import CONTROL_BYTES_MAX, OWN_CREDIT_BYTES, eager_limits
from unisono.messaging.fast_path import Mailbox
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.stage import Stage
from unisono.plans.program import piece_bytes_of
from unisono.plans.steps import Buf, Plan

__all__ = ["DESCRIPTION", "NativeBackend"]

_CAPABILITIES = Capabilities("native", run_plan=True)


class NativeBackend(Closable):
    """One rank. It listens from the start; `connect`, with the cards of all ranks, lets it reach the others.

    Args:
        rank: this rank.
        size: the number of ranks.
        directory: a folder of mode 0700 that the ranks of a host share.
        secret: known to the ranks of the job only.
        config: the settings, the same on all ranks.
        shm: whether ranks of one host use shared memory.
        bind: the address to listen on.
        port: the TCP port; 0 is any.
        host: replaces the machine's own id; ranks with different ones use TCP.
        checksum: whether TCP without TLS carries checksums between hosts.
        neighbours: open control links to the ranks at distance 2^k at once.
        direct_read: whether ranks of one host read each other's memory directly, where the system allows it.
        tls: encrypt all TCP. No TCP connection is accepted before `connect` has brought credentials.
        rekey_records: TLS records, or QUIC packets, until the key is renewed.
        quic: use QUIC in place of TCP. As with `tls`, no connection is accepted before `connect` has brought
            credentials.
        datagram_bytes: the bytes of QUIC's datagrams on a path that is known to carry them; 0: what the path
            turns out to carry.
        socket_buffer_bytes: asked of the system for QUIC's socket, which may grant less.
        local: the world of ranks in this process that it belongs to; then it does not listen.
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
        quic: bool = False,
        datagram_bytes: int = 0,
        socket_buffer_bytes: int = 4 << 20,
        local: _native.LocalWorld | None = None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._config = config if config is not None else Config()
        self._is_certified = tls or quic
        self._capabilities = replace(_CAPABILITIES, name="quic") if quic and not shm else _CAPABILITIES
        with _explained():
            self._engine = _native.Engine(
                rank,
                size,
                directory,
                secret,
                **_limits(self._config),
                shm=shm,
                checksum=checksum,
                neighbours=neighbours,
                direct_read=direct_read,
                bind=bind,
                port=port,
                host=host,
                tls=tls,
                rekey_records=rekey_records,
                quic=quic,
                datagram_bytes=datagram_bytes,
                socket_buffer_bytes=socket_buffer_bytes,
                local=local,
            )
        self._completions = CompletionDispatcher(self._engine, self._config.recv_bytes_max)
        self._runtime = self._make_runtime(self._completions)
        self._hosts: tuple[int, ...] = ()
        # By shape of group: its size, this rank in it, and its hosts. Links and settings are the same.
        self._decisions: dict[tuple[int, int | None, tuple[int, ...]], _native.DecisionTable] = {}
        # What may have this length under any tag.
        self._short_bytes = min(CONTROL_BYTES_MAX, self._config.message_bytes_max)
        self._after_close: list[Callable[[], None]] = []
        self._pump = Pump(self._completions)
        # A backend that is collected without `close` must leave neither threads nor ranks that wait for it.
        self._finalizer = self._runtime.finalizer(self, self._pump.abandon)

    def card(self) -> Card:
        """What other ranks need to reach this one."""
        return Card(*self._engine.card())

    def connect(self, cards: Sequence[Card], credentials: Credentials | None = None) -> None:
        """Learn how to reach all ranks. Links are opened on first use.

        Args:
            cards: one per rank, in order.
            credentials: with `tls=True` or `quic=True`, and only then.

        Raises:
            UsageError: the cards are not one per rank, or the credentials do not fit this rank.
        """
        if len(cards) != self._size:
            raise UsageError(f"{len(cards)} cards were given; allowed: one per rank, {self._size}")
        if self._is_certified != (credentials is not None):
            raise UsageError("allowed: credentials with tls=True or quic=True, and none without")
        if credentials is not None:
            self._secure(credentials)
        self._hosts = numbered_hosts([card.host for card in cards])
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
        """The engine runs plans."""
        return self._capabilities

    @property
    def runtime(self) -> Runtime:
        """The clock; a thread that blocks in it makes progress."""
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
        """How each rank is reached at the moment, for tests and diagnostics."""
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
        """Send eagerly if the message is short and the credit allows, otherwise by rendezvous."""
        self.check_peer(dst, "dst")
        if data.nbytes > self._short_bytes:
            self.check_length(tag, data.nbytes, header)
        completions = self._completions
        request = NativeRequest(dst, completions, data)
        number = request.number
        completions.requests[number] = request
        try:
            handle = self._engine.send(number, dst, context, tag, data, dtype, header, lane, sync)
        except BaseException as error:
            del completions.requests[number]
            raise _refused(error) from None
        if handle > 0:
            request.handle = handle
        elif completions.requests.pop(number, None) is not None:
            completions.end(request, -handle)
        return request

    def post(self, dst: int, context: int, tag: int, data: memoryview, lane: Lane) -> None:
        """Send without a request: what ends is the memory."""
        self.check_peer(dst, "dst")
        self.check_length(tag, data.nbytes, b"")
        completions = self._completions
        number = next(completions.numbers)
        completions.requests[number] = data
        try:
            handle = self._engine.send(number, dst, context, tag, data, UNTYPED, b"", lane, False)
        except BaseException as error:
            del completions.requests[number]
            raise _refused(error) from None
        if handle <= 0:
            completions.requests.pop(number, None)

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Post a receive in the engine."""
        self.check_peer(src, "src")
        request = NativeRequest(src, self._completions, into, dtype)
        source, tagged = _pattern(src, tag)
        return self._start(
            request,
            lambda: self._engine.receive(
                request.number, source, context, tagged, into, dtype, tagged & Tags.CONTROL > 0
            ),
        )

    def listen(
        self,
        context: int,
        tag: int,
        on_message: Callable[[int, bytes], None],
        on_end: Callable[[UnisonoError], None],
    ) -> bool:
        """Keep a receive posted in the engine."""
        self._completions.listen(Listening(context, tag, on_message, on_end))
        return True

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Post a probe in the engine."""
        self.check_peer(src, "src")
        request = NativeRequest(src, self._completions, None)
        source, tagged = _pattern(src, tag)
        return self._start(request, lambda: self._engine.probe(request.number, source, context, tagged))

    def run_plan(self, plan: Plan, counts: tuple[int, ...], stage: Stage) -> Request:
        """Run a plan in the engine, without the GIL."""
        dtype, memory, config, op = stage.dtype, stage.memory, self._config, stage.op
        # A matrix of counts that are all the same need not be built.
        is_even = plan.shape.collective == "all_to_all" and len(set(counts)) == 1
        program, piece_elements = self.compile_plan(plan, dtype.itemsize)
        call = _native.ProgramCall(
            program, counts[:1] if is_even else counts, is_even, piece_elements, stage.rank_map
        )
        given, result = memory.get(Buf.IN), memory.get(Buf.OUT)
        request = RunRequest(self._completions, (given, result))
        return self._start(
            request,
            lambda: self._engine.run(
                request.number,
                call,
                stage.context,
                stage.tag,
                dtype.code,
                -1 if op is None or op.code is None else op.code,
                given,
                result,
                stage.header,
                config.window_segments,
                stage.row_bytes,
            ),
        )

    def compile_plan(self, plan: Plan, itemsize: int) -> tuple[_native.Program, int]:
        """The engine's program for a plan, and the elements of its longest pieces."""
        nbytes = piece_bytes_of(plan, self._config.segment_bytes, self._config.message_bytes_max)
        return compiled(plan), max(1, nbytes // itemsize)

    def native_group(
        self,
        context: int,
        call_log: _native.CallLog,
        listener: GroupListener,
        *,
        fingerprint_seed: int,
        is_introduced: bool,
        rank_map: _native.RankMap | None = None,
        leaves_tensors: bool = False,
    ) -> _native.NativeGroup:
        """The communicator of a view's ranks, or of all, in the engine."""
        self._completions.listeners_of_groups[context] = weakref.ref(listener)
        ranks = self.rank_map if rank_map is None else rank_map
        hosts = numbered_hosts([self._hosts[peer] for peer in ranks.peers]) if self._hosts else ()
        shape = (len(ranks), ranks.to_local(self._rank), hosts)
        if (decisions := self._decisions.get(shape)) is None:
            decisions = self._decisions.setdefault(shape, _native.DecisionTable())
        return _native.NativeGroup(
            self._engine,
            call_log,
            arguments(leaves_tensors=leaves_tensors),
            decisions,
            context=context,
            fingerprint_seed=fingerprint_seed,
            rank_map=ranks,
            is_introduced=is_introduced,
            window=self._config.window_segments,
            stall_s=self._config.stall_query_s,
            message_stall_s=self._message_stall_s(),
            deadline_s=self._config.deadline_s,
            status=Status,
            any_=ANY,
        )

    def mailbox(self, context: int, tag: int, rank_map: _native.RankMap | None = None) -> Mailbox:
        """A mailbox in the engine."""
        return _native.Mailbox(self._engine, context, tag, self.rank_map if rank_map is None else rank_map)

    def adopt(
        self,
        handle: int,
        peer: int | Any_ | None,
        buffer: memoryview | None,
        dtype: int,
        memory: tuple[Any, ...],
    ) -> Request:
        """Let Python carry on an operation of the engine's calls."""
        if peer is None:
            request: NativeRequest = RunRequest(self._completions, memory)
        else:
            request = NativeRequest(peer, self._completions, buffer, dtype, memory)
        return self._start(request, lambda: self._engine.adopt(request.number, handle))

    def end_group(self, context: int) -> None:
        """Drop messages that no receive will match any more."""
        self._completions.listeners_of_groups.pop(context, None)
        self._engine.end_context(context)

    def end_unused(self, context: int) -> bool:
        """Ask the engine."""
        return self._engine.end_unused_context(context)

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Notify the listener of every rank that is down or goes down."""
        for down in self._completions.add_listener(listener):
            listener(down)

    def close(self) -> None:
        """Leave: flush sends for up to `Config.flush_s`, say goodbye, end all requests."""
        if not self._finalizer.detach() or self._engine.is_forked():
            return
        self._engine.close(self._config.flush_s)
        self._completions.close()
        self._pump.join()
        for call in self._after_close:
            call()

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call once the engine is closed: for resources that must outlive it."""
        self._after_close.append(call)

    def _message_stall_s(self) -> float:
        """How long a thread waits for a message before Python sees it: for a deadlock, or to log it."""
        config = self._config
        if self._runtime.sees_deadlocks:  # it must have seen the wait for that long
            return config.stall_query_s
        return min(config.deadlock_after_s or config.stall_log_s, config.stall_log_s)

    def _make_runtime(self, completions: CompletionDispatcher) -> NativeRuntime:
        return NativeRuntime(completions)

    def _secure(self, given: Credentials) -> None:
        try:
            self._engine.secure(list(given.names), given.key_pem, given.certificate_pem, given.authority_pem)
        except RuntimeError as error:
            raise UsageError(
                "TLS credentials rejected",
                cause=str(error),
                next_step="pass the key and certificates that the seed of this job has issued",
            ) from None

    def _start(self, request: NativeRequest, start: Callable[[], int | tuple[Any, ...]]) -> Request:
        completions, number = self._completions, request.number
        completions.requests[number] = request
        try:
            started = start()
        except BaseException as error:
            del completions.requests[number]
            raise _refused(error) from None
        if isinstance(started, int):
            request.handle = started
        else:
            del completions.requests[number]
            if isinstance(request, RunRequest):
                request.end(*started[1:])
            else:
                completions.end(request, *started[1:])
        return request


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """The error of an engine that cannot start, as users see it."""
    try:
        yield
    except RuntimeError as error:
        raise BackendUnavailable(
            "the native backend cannot start",
            cause=str(error),
            next_step="raise the limit of open files: ulimit -n 4096"
            if os.strerror(errno.EMFILE) in str(error)
            else "see the cause; what can run here is in uni.list_backends()",
        ) from None


def _limits(config: Config) -> dict[str, Any]:
    """The engine's bounds on messages, memory, silence and connections that are not authenticated yet."""
    control_eager_bytes, control_credit_bytes = eager_limits(config, Lane.CONTROL)
    return {
        "eager_bytes": config.eager_bytes,
        "eager_credit_bytes": config.eager_credit_bytes,
        "message_bytes_max": config.message_bytes_max,
        "recv_bytes_max": config.recv_bytes_max,
        "control_eager_bytes": control_eager_bytes,
        "control_credit_bytes": control_credit_bytes,
        "control_bytes_max": CONTROL_BYTES_MAX,
        "own_credit_bytes": OWN_CREDIT_BYTES,
        "silence_s": config.silence_s,
        "stranger_bytes_max": strangers.BYTES_MAX,
        "stranger_s": strangers.STRANGER_S,
        "strangers_max": strangers.STRANGERS_MAX,
        "strangers_per_address_max": strangers.PER_ADDRESS_MAX,
    }


def _pattern(src: int | Any_, tag: int | Any_) -> tuple[int, int]:
    return (-1 if isinstance(src, Any_) else src, -1 if isinstance(tag, Any_) else tag)


def _refused(error: BaseException) -> BaseException:
    if isinstance(error, _native.ForkedError):
        return ClosedError(
            "this communicator belongs to the parent process", next_step="make a new one after fork"
        )
    return error


DESCRIPTION = BackendInfo(
    name="native",
    summary="ranks as processes, over shared memory and TCP",
    check=lambda: None,
    install="part of unisono",
    capabilities=_CAPABILITIES,
    wrap=lambda native: native,
)

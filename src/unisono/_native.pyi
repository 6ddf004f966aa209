# The types of the module that native/python binds.
#
# A dtype is a DType.code, an op an OpCode. Memory is contiguous, and read as bits of that dtype whatever its
# own type. A wrong argument raises ValueError before anything is written; an object without such memory
# raises TypeError or BufferError.

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy.typing as npt

# NumPy declares the buffer protocol only from Python 3.12 on.
Memory: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]

def reduce(dst: Memory, a: Memory, b: Memory, dtype: int, op: int) -> None: ...
def divide(x: Memory, n: int, dtype: int) -> None: ...
def widen(dst: Memory, src: Memory, dtype: int) -> None: ...
def narrow(dst: Memory, src: Memory, dtype: int) -> None: ...
def isa() -> str: ...

# Called at interpreter exit: threads that have released the GIL never take it again, and sleep. See
# native/python/gil_released.hpp.
def forbid_reacquire() -> None: ...
def isas() -> tuple[str, ...]: ...
def use_isa(name: str) -> None: ...

# A plan for the engine: see native/collective/program.hpp. A piece is (step, peer, dst_buf, dst, src_buf,
# src, count, left).
class Program:
    def __init__(
        self,
        pieces: Sequence[tuple[int, int, int, int, int, int, int, int]],
        before: Sequence[Sequence[int]],
        lengths: tuple[int, int, int],
        ranks: int,
    ) -> None: ...

class ForkedError(RuntimeError): ...

# The ranks of one process: see native/connect/local_world.hpp. Its functions take the engine of such a rank.
class LocalWorld:
    def __init__(self, size: int) -> None: ...
    # The living threads that use the rank, by (ident, whether it has waited), and whether one that waited has
    # ended.
    @staticmethod
    def users(engine: Engine) -> tuple[list[tuple[int, bool]], bool]: ...
    # Makes what progress is possible; True if nothing moved and every completion was dispatched.
    @staticmethod
    def is_quiet(engine: Engine) -> bool: ...
    @staticmethod
    def moves(engine: Engine) -> int: ...
    # Whether a receive waits for its message, but for those with this bit in their tag, or a send.
    @staticmethod
    def has_pending(engine: Engine, tag_bit_ignored: int) -> bool: ...

# The data plane of one rank: see native/engine/engine.hpp. `id` is the caller's number of an operation. A
# completion is (id, outcome, envelope or None, data or None), with an envelope (source, context, tag, nbytes,
# dtype, header); for a peer that is down it is (-1, rank, cause, left); for an unclaimed message, whose
# sender ran ahead, (-2, context, source, sequence, header). -1 for src or tag means any. The caller keeps the
# owner of every buffer alive until the operation has ended.
class Engine:
    def __init__(
        self,
        rank: int,
        size: int,
        directory: str,
        secret: bytes,
        *,
        eager_bytes: int,
        eager_credit_bytes: int,
        message_bytes_max: int,
        recv_bytes_max: int,
        control_eager_bytes: int,
        control_credit_bytes: int,
        control_bytes_max: int,
        own_credit_bytes: int,
        silence_s: float,
        stranger_bytes_max: int,
        stranger_s: float,
        strangers_max: int,
        strangers_per_address_max: int,
        shm: bool = ...,
        checksum: bool = ...,
        neighbours: bool = ...,
        direct_read: bool = ...,
        bind: str = ...,
        port: int = ...,
        host: str = ...,
        tls: bool = ...,
        rekey_records: int = ...,
        local: LocalWorld | None = ...,
    ) -> None: ...
    def card(self) -> tuple[str, str, str, int, int]: ...
    # Sets the PEM credentials and the name in each rank's certificate; once, before `connect`, with `tls`.
    def secure(self, names: list[str], key: bytes, certificate: bytes, authority: bytes) -> None: ...
    def connect(self, cards: list[tuple[str, str, str, int, int]]) -> None: ...
    # Returns a handle, 0 if it is done, or the negative outcome if it failed.
    def send(
        self,
        id: int,  # noqa: A002
        dst: int,
        context: int,
        tag: int,
        data: Memory,
        dtype: int,
        header: bytes,
        lane: int,
        sync: bool,
    ) -> int: ...
    # Returns a handle, or the completion. With `in_order` it completes after everything that ended earlier.
    def receive(
        self,
        id: int,  # noqa: A002
        src: int,
        context: int,
        tag: int,
        into: Memory | None,
        dtype: int,
        in_order: bool,
    ) -> int | tuple[Any, ...]: ...
    def probe(self, id: int, src: int, context: int, tag: int) -> int | tuple[Any, ...]: ...  # noqa: A002
    # A cancelled run completes once it has released its memory; other cancelled operations do not complete.
    def cancel(self, handle: int) -> bool: ...
    # Returns a handle, or the completion: (id, outcome) or (id, outcome, (peer, whether its header differs,
    # bytes received, bytes expected, header)).
    def run(
        self,
        id: int,  # noqa: A002
        program: Program,
        context: int,
        tag: int,
        dtype: int,
        op: int,
        memory_in: Memory | None,
        memory_out: Memory | None,
        header: bytes,
        window: int,
    ) -> int | tuple[Any, ...]: ...
    # Takes over a run of the fast path; returns its handle, or the completion.
    def adopt(self, id: int, handle: int) -> int | tuple[Any, ...]: ...  # noqa: A002
    # The ranks that a run waits for.
    def awaited(self, handle: int) -> list[int]: ...
    # Completions, in order. `wait` and `pump` wait for them without the GIL; `wait` makes progress. A thread
    # that gets some is the dispatcher: it dispatches them, then calls `more` until that returns none. Until
    # then other threads get nothing.
    def wait(self, timeout: float, interrupt_count: int, is_dispatcher: bool) -> list[tuple[Any, ...]]: ...
    def pump(self, timeout: float) -> list[tuple[Any, ...]]: ...
    def more(self, is_last: bool) -> list[tuple[Any, ...]]: ...
    # Report no more unclaimed messages of this context.
    def ignore_context(self, context: int) -> None: ...
    # The context is closed: its whole messages are dropped, now and when they arrive.
    def end_context(self, context: int) -> None: ...
    def interrupt_count(self) -> int: ...
    def interrupt_wait(self) -> None: ...
    def close(self, flush_s: float) -> None: ...
    def is_forked(self) -> bool: ...
    def down_of(self, rank: int) -> tuple[str, bool]: ...
    # How many connections were refused.
    def refused(self) -> int: ...
    # The first few refusals since the last call, and why.
    def take_refusals(self) -> list[str]: ...
    def links(self) -> list[str]: ...
    # Seconds that the rounds of ping-pong took; negative if the peer went down.
    def ping(self, peer: int, nbytes: int, rounds: int, is_first: bool) -> float: ...

# The collective calls of a group: see native/collective/call_log.hpp. `find` and `last` return the
# fingerprints of calls by number. `awaited` returns the ranks that a call on the fast path waits for;
# `interrupt_in_flight` makes all of these calls return to Python.
class CallLog:
    next: int
    fast_path_open: bool
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def take(self) -> int: ...
    def remember(self, sequence: int, text: bytes) -> None: ...
    def find(self, sequence: int) -> bytes | None: ...
    def last(self, count: int) -> dict[int, bytes]: ...
    def awaited(self, sequence: int) -> list[int]: ...
    def interrupt_in_flight(self) -> None: ...

# messaging.fast_path.FastPath: see native/python/bind_fast_path.cpp.
class FastPath:
    verbs: ClassVar[tuple[str, ...]]
    # Calls that ended without Python, that Python had to decide, and that Python had to finish.
    ended: int
    missed: int
    handed_over: int
    def __init__(
        self,
        engine: Engine,
        call_log: CallLog,
        *,
        context: int,
        size: int,
        window: int,
        stall_s: float,
        array_type: type,
        empty: Callable[..., Any],
        is_users: Callable[[str], bool],
    ) -> None: ...
    def verb(self, name: str, slow: Callable[..., Any], slow_path: Any) -> Callable[..., Any]: ...
    def unclaimed(self, sequence: int) -> list[tuple[int, int, bytes]]: ...
    def unconfirmed_ranks(self) -> list[int]: ...
    def cache_decision(
        self,
        sequence: int,
        operation: str,
        program: Program,
        dtype: int,
        op: int,
        memory_in: Memory | None,
        memory_out: Memory | None,
        header: bytes,
        divisor: int,
    ) -> bool: ...

# messaging.fast_path.Mailbox: see native/engine/mailbox.hpp.
class Mailbox:
    def __init__(self, engine: Engine, context: int, tag: int) -> None: ...
    def post(self, dst: int, data: bytes, unsent_bytes_max: int) -> bool: ...
    def lend(self, dst: int, tag: int, data: Any, number: int) -> bool: ...
    def is_lent(self, number: int) -> bool: ...
    def expect(self, src: int, tag: int, into: Any, number: int) -> None: ...
    def withdraw(self, number: int) -> None: ...
    def take(self, timeout: float, is_front: bool) -> list[tuple[int, Any]]: ...
    def drain(self) -> list[tuple[int, Any]]: ...
    def batches(self) -> int: ...
    def interrupt_wait(self, is_front: bool) -> None: ...
    def close(self) -> None: ...

# Plain messages without Python: see native/python/bind_fast_messages.cpp. `members` are the group's ranks by
# their numbers in the engine; `dtypes` the NumPy types by code, None where there is no such type. `send` and
# `recv` return callables that try the fast path, then call `slow`. `check_header` gets a received header and
# the sender.
class FastMessages:
    # Calls that ended without Python, and that Python had to make again.
    ended: int
    handed_over: int
    def __init__(
        self,
        engine: Engine,
        call_log: CallLog,
        *,
        context: int,
        members: Sequence[int],
        array_type: type,
        empty: Callable[..., Any],
        dtypes: list[Any],
        status: type,
        any: Any,  # noqa: A002
        is_introduced: bool,
    ) -> None: ...
    # The group has introduced itself to this rank: messages to it need no header any more.
    def introduce(self, rank: int) -> None: ...
    # When the call began that this thread makes again, in monotonic seconds; 0.0 if it is new.
    def take_begun(self) -> float: ...
    def send(
        self, slow: Callable[..., Any], check_header: Callable[[bytes, int], None]
    ) -> Callable[..., Any]: ...
    def recv(
        self, slow: Callable[..., Any], check_header: Callable[[bytes, int], None]
    ) -> Callable[..., Any]: ...

# Completions of threads that must not touch Python: see native/python/completion_eventfd.hpp. `ring` is the
# address of the C function void(uint64 ticket, int8 code) that they call; `take` returns (number, code) of
# these calls.
class CompletionEventFd:
    def __init__(self) -> None: ...
    def descriptor(self) -> int: ...
    def ticket(self, number: int) -> int: ...
    @staticmethod
    def ring() -> int: ...
    def take(self) -> list[tuple[int, int]]: ...

def host_id() -> str: ...

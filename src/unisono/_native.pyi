# The types of the module that native/python binds.
#
# A dtype is a DType.code, an op an OpCode. Memory is contiguous, and read as bits of that dtype whatever its
# own type. A wrong argument raises ValueError before anything is written; an object without such memory
# raises TypeError or BufferError.

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, TypeAlias

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

# The typed codec: see native/python/codec.hpp and unisono/core/codec.py.
_PathText: TypeAlias = Callable[[Sequence[str]], str]
BLOB_BYTES_MIN: int
DEPTH_MAX: int

def pack(value: Any, path_text: _PathText | None = None, /) -> bytes: ...
def pack_writable(value: Any, path_text: _PathText | None = None, /) -> BlobMemory: ...
def pack_parts(
    value: Any, path_text: _PathText | None = None, blob_bytes: int = 4096, /
) -> tuple[bytes, list[memoryview]]: ...
def unpack(packed: Memory, /) -> Any: ...
def unpack_parts(head: Memory, blobs: Sequence[Memory], /) -> Any: ...
def unpack_beside(head: Memory, blobs: Memory, /) -> Any: ...
def head_bytes_at(data: Memory, /) -> int: ...
def set_kinds(kinds: dict[str, Any], /) -> None: ...

# Memory of another object as bytes; its `owner` is that object.
class BlobMemory:
    @property
    def owner(self) -> Any: ...

# Results of at least POOLED_BYTES_MIN have memory that is used again: see native/base/result_memory.hpp.
POOLED_BYTES_MIN: int

def result_memory(length: int, /) -> BlobMemory: ...

# The longest eager message that the control lane of a link carries: shared memory, TCP and QUIC.
CONTROL_EAGER_BYTES_SHM: int
CONTROL_EAGER_BYTES_SOCKET: int
# The longest wait in the engine before Python looks for signals: see native/python/blocking.hpp.
SIGNAL_CHECK_S: float

# A plan for the engine, for all counts: see native/collective/program.hpp. Rows: cuts (kind, of, parts);
# points (base, atom, times), from point 1 on; steps (step, peer, dst_buf, dst, dst_stop, src_buf, src,
# src_stop, left); edges (earlier, later, earlier slice, later slice). `lengths` are the points at which in
# and out end.
class Program:
    def __init__(
        self,
        cuts: Sequence[tuple[int, int, int]],
        points: Sequence[tuple[int, int, int]],
        steps: Sequence[tuple[int, int, int, int, int, int, int, int, int]],
        edges: Sequence[tuple[int, int, int, int]],
        lengths: tuple[int, int],
        counts: int,
        ranks: int,
    ) -> None: ...

# A program with the counts of a call, the most elements of a piece, and the group's ranks by their numbers
# in the engine.
# The ranks of a communicator and the peers, which the engine calls ranks: see
# native/collective/rank_map.hpp. `peers` are in the order of ranks; `to_local` is None for a peer that is not
# a member.
class RankMap:
    peers: tuple[int, ...]
    def __init__(self, peers: Sequence[int]) -> None: ...
    def __len__(self) -> int: ...
    def to_global(self, rank: int) -> int: ...
    def to_local(self, peer: int) -> int | None: ...
    def peers_of(self, ranks: Sequence[int]) -> tuple[int, ...]: ...
    # The same ranks, as a part of those that `outer` holds: from rank here to rank there.
    def within(self, outer: RankMap) -> RankMap: ...

class ProgramCall:
    def __init__(
        self,
        program: Program,
        counts: Sequence[int],
        is_even: bool,
        piece_elements: int,
        rank_map: RankMap | None,
    ) -> None: ...

class ForkedError(RuntimeError): ...

# The ranks of one process: see native/connect/local_world.hpp. Its functions take the engine of such a rank.
class LocalWorld:
    def __init__(self, size: int) -> None: ...
    # The living threads that use the rank, by (ident, whether it belongs to it), and whether one that did has
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
        quic: bool = ...,
        datagram_bytes: int = ...,
        socket_buffer_bytes: int = ...,
        local: LocalWorld | None = ...,
    ) -> None: ...
    def card(self) -> tuple[str, str, str, int, int]: ...
    # Sets the PEM credentials and the name in each rank's certificate; once, before `connect`, with `tls` or
    # `quic`.
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
        call: ProgramCall,
        context: int,
        tag: int,
        dtype: int,
        op: int,
        memory_in: Memory | None,
        memory_out: Memory | None,
        header: bytes,
        window: int,
        row_bytes: int = 0,
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
    def end_unused_context(self, context: int) -> bool: ...
    def has_undispatched(self) -> bool: ...
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

# The hash and the fields of a fingerprint, and one with another count and hash, for tests of its twin,
# comm/fingerprint.py: see native/collective/fingerprint.hpp.
def fingerprint_hash(seed: int, values: Sequence[int]) -> int: ...
def fingerprint_fields(fingerprint: bytes) -> tuple[int, int, int, int, int, int, int, int]: ...
def fingerprint_with(fingerprint: bytes, count: int, hash: int) -> bytes: ...  # noqa: A002

# The collective calls of a group: see native/collective/call_log.hpp. `find` and `last` return the
# fingerprints of calls by number, `site` the file and line of one. `awaited` returns the ranks that a call
# on the fast path waits for;
# `interrupt_in_flight` makes all of these calls return to Python.
class CallLog:
    next: int
    fast_path_open: bool
    messages_open: bool
    @property
    def is_agreed(self) -> bool: ...
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def take(self) -> int: ...
    def remember(
        self,
        sequence: int,
        fingerprint: bytes,
        code: CodeType | None = None,
        instruction: int = 0,
        lengths: Sequence[int] | None = None,
    ) -> None: ...
    def lengths(self, sequence: int) -> tuple[int, ...] | None: ...
    def types(self, sequence: int) -> tuple[int, ...] | None: ...
    def site(self, sequence: int) -> tuple[str, int] | None: ...
    def find(self, sequence: int) -> bytes | None: ...
    def last(self, count: int) -> dict[int, bytes]: ...
    def awaited(self, sequence: int) -> list[int]: ...
    def interrupt_in_flight(self) -> None: ...

# How the arguments of calls are seen: see native/python/argument.hpp. `dtypes` has the NumPy types by code,
# None where there is no such type; `view` is buffers.view.
class Arguments:
    def __init__(
        self,
        *,
        array_type: type,
        empty: Callable[..., Any],
        view: Callable[..., Any],
        dtypes: list[Any],
        leaves_tensors: bool,
    ) -> None: ...

# What was decided for the calls of groups of one shape.
class DecisionTable:
    def __init__(self) -> None: ...

# A communicator as the parser of calls sees it: see native/python/native_group.hpp.
class VerbGroup:
    # Calls that ended below Python, classes of calls that Python decided, and calls that Python adopted.
    ended: int
    decided: int
    adopted: int
    def __init__(
        self,
        call_log: CallLog,
        arguments: Arguments,
        decisions: DecisionTable,
        *,
        fingerprint_seed: int,
        rank: int,
        size: int,
        deadline_s: float | None,
    ) -> None: ...

# A communicator in the engine: see native/python/native_group.hpp.
class NativeGroup(VerbGroup):
    def __init__(
        self,
        engine: Engine,
        call_log: CallLog,
        arguments: Arguments,
        decisions: DecisionTable,
        *,
        context: int,
        fingerprint_seed: int,
        rank_map: RankMap,
        is_introduced: bool,
        window: int,
        stall_s: float,
        message_stall_s: float,
        deadline_s: float | None,
        status: type,
        any_: Any,
    ) -> None: ...
    def unclaimed(self, sequence: int) -> list[tuple[int, int, bytes]]: ...
    def has_unexpected(self) -> bool: ...
    def unconfirmed_ranks(self) -> list[int]: ...
    def is_idle(self) -> bool: ...
    def introduce(self, rank: int) -> None: ...
    def note_gone(self, rank: int, is_dead: bool) -> None: ...
    def works_to_adopt(self, *, only_overdue: bool, all_messages: bool) -> list[Any]: ...
    def messages_under_way(self) -> list[tuple[bool, int, int]]: ...
    def unwaited(self) -> list[tuple[str, CodeType | None, int, int]]: ...

# The base of unisono.Work: see native/python/work.hpp.
class WorkBase:
    _verb: str | None
    def wait(self, timeout: float | None = None) -> Any: ...
    def done(self) -> bool: ...
    _adoption: Any
    _is_concluded: bool
    _call_site: tuple[CodeType | None, int]
    def _adopt(self, is_seen: bool) -> bool: ...
    def _observe(self, observer: Callable[[], object]) -> bool: ...
    def _forget(self, observer: Callable[[], object]) -> None: ...

def set_work_type(work: type) -> None: ...
def are_works(objects: tuple[Any, ...]) -> bool: ...
def wait_works(works: tuple[Any, ...], timeout: float, is_one: bool) -> list[int] | None: ...
def conclude_announced(engine: Engine) -> None: ...
def bind_verbs(
    verbs: object, group: VerbGroup | None, adoption: object, reference: object, is_started: bool
) -> None: ...
def set_user_files(is_users: Callable[[str], bool]) -> None: ...
def make_verbs_type(rows: Sequence[tuple[str, str, int, Sequence[str], int]], ops: Sequence[str]) -> type: ...

# Frames of remote calls: see native/python/rpc_frame.cpp and unisono/rpc/frame.py.
FRAME_BYTES_MAX: int
FRAME_BLOB_BYTES: int
CERTAIN_BLOB_BYTES: int
RPC_MESSAGE_BYTES_MAX: int

class Frame:
    kind: int
    call: int
    number: int
    name: str
    timeout_s: float | None
    count: int
    blob_bytes: int
    data: bytes

def pack_frame(
    kind: int,
    call: int,
    number: int,
    name: str,
    timeout_s: float | None,
    count: int,
    value: Any,
    path_text: _PathText | None = None,
    /,
) -> tuple[bytes, tuple[memoryview, ...]]: ...

# The calling thread runs an inline handler, and may not block: see native/python/blocking.hpp.
def forbid_blocking(is_forbidden: bool, /) -> bool: ...
def is_blocking_forbidden() -> bool: ...
def open_frame(data: bytes, /) -> Frame: ...
def frame_lengths(data: bytes, /) -> list[int]: ...
def frame_memory(data: bytes, /) -> list[BlobMemory]: ...
def frame_value(data: bytes, memory: Sequence[Memory] = (), /) -> Any: ...

# messaging.fast_path.Mailbox: see native/engine/mailbox.hpp.
class Mailbox:
    def __init__(self, engine: Engine, context: int, tag: int, rank_map: RankMap) -> None: ...
    def post(
        self,
        dst: int,
        data: bytes,
        unsent_bytes_max: int,
        is_more: bool = False,
        lent: Sequence[tuple[int, Any, int]] = (),
    ) -> bool: ...
    def is_lent(self, number: int) -> bool: ...
    def expect(self, src: int, tag: int, into: Any, number: int) -> tuple[int, int] | None: ...
    def withdraw(self, number: int) -> None: ...
    def take(self, timeout: float, is_front: bool) -> list[tuple[int, Any]]: ...
    def drain(self) -> list[tuple[int, Any]]: ...
    def batches(self) -> int: ...
    def interrupt_wait(self, is_front: bool) -> None: ...
    def close(self) -> None: ...

# Completions of threads that must not touch Python: see native/python/completion_eventfd.hpp. `ring` is the
# address of the C function void(uint64 ticket, int8 code) that they call; `take` returns (number, code) of
# these calls.
class CompletionEventFd:
    def __init__(self) -> None: ...
    def descriptor(self) -> int: ...
    def token(self, number: int) -> int: ...
    @staticmethod
    def ring() -> int: ...
    def take(self) -> list[tuple[int, int]]: ...

# Whether this build has QUIC links.
def has_quic() -> bool: ...

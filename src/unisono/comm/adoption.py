"""What the engine's calls ask of Python: a decision for each class of calls, and what is rare.

A call runs in the engine from its arguments to its result (native/python/call.hpp). If it fails, stalls,
passes its deadline or is interrupted, or if its group has news, Python *adopts* it: its operations go on in
the engine, and a Task waits for them. So errors, stalls and deadlines are handled in one place, for every
backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any, Final, Protocol

import numpy as np

from unisono.comm.collectives import check_algorithm, check_reduction
from unisono.comm.deadlock import ANY_RANK, ANY_TAG
from unisono.comm.dispatch import CollectiveCall, Decided, decide
from unisono.comm.fingerprint import NOTHING, SHAPED, described
from unisono.comm.group import Group, await_request
from unisono.comm.split import ROW_OPERAND
from unisono.core.call_site import line_of
from unisono.core.clock import NEVER, Deadline, Runtime
from unisono.core.dtypes import DTYPES, DType
from unisono.core.envelope import ANY, Status
from unisono.core.kernels import narrow
from unisono.core.ops import ReduceOp, as_op
from unisono.core.request import Request
from unisono.core.task import Call, Message, Steps, await_requests
from unisono.core.work import Work, wait_or_cancel
from unisono.errors import ClosedError, Location, UnisonoError, UsageError
from unisono.plans import Problem

__all__ = ["Adoption"]

_DTYPES: Final = list(DTYPES.values())
_BY_RANK: Final = ("reduce_scatter", "all_to_all")
_ONE_COUNT: Final = ("all_reduce", "reduce", "broadcast", "scan", "exscan")
# Where what travels is not what a user gave.
_GIVEN: Final = {"barrier": NOTHING, "split": ROW_OPERAND}


class Splitting(Protocol):
    """The communicator, which makes the groups."""

    def _split_row(self, color: int | None, key: int) -> bytes:
        """What this rank contributes to a split."""

    def _make_group(self, sequence: int, mine: bytes, everyone: Any, timeout: float | None) -> object:
        """What a split gives."""


class Adoption:
    """The part of Python in the engine's calls of one group."""

    def __init__(self, group: Group, owner: Callable[[], Splitting | None]) -> None:
        self._group = group
        self._owner = owner  # weak: it holds this helper

    # -- splits -------------------------------------------------------------------------------------------

    def split_row(self, color: Any, key: Any) -> bytes:
        """What this rank contributes to a split."""
        owner = self._owner()
        assert owner is not None, "its method is being called"
        return owner._split_row(color, key)

    def make_group(self, *ended: Any) -> object:
        """What a split gives whose rows the engine has gathered."""
        owner = self._owner()
        assert owner is not None, "its method is being called"
        return owner._make_group(*ended)

    @property
    def runtime(self) -> Runtime:
        """The clock and threads of this rank."""
        return self._group.backend.runtime

    @property
    def world_rank(self) -> int:
        """This rank."""
        return self._group.world_rank

    # -- decisions ----------------------------------------------------------------------------------------

    def decide(
        self,
        operation: str,
        dtype_code: int,
        op_name: str | None,
        root: int,
        algorithm: str,
        shape: tuple[int, ...],
    ) -> Decided | None:
        """Decide how the engine runs a collective; None leaves it to the reference path.

        Raises:
            UsageError: the operation is not defined for the type, or there is no such algorithm.
        """
        group, dtype = self._group, _DTYPES[dtype_code]
        size, count = group.backend.size, int(np.prod(shape, dtype=np.int64))
        op = None if op_name is None else as_op(op_name)
        if op is None:
            check_algorithm(operation, algorithm)
        else:
            if op.is_mean and operation in ("scan", "exscan"):
                raise UsageError(
                    f"{operation} has no mean: the contributions of a prefix differ in number; allowed: sum"
                )
            parts = [count // size] * size if operation == "reduce_scatter" else []
            op.check_shape(shape, parts)
            check_reduction(operation, op, dtype, algorithm, group.backend.config.reproducible)
        counts: tuple[int, ...] = ()
        if operation in _ONE_COUNT:
            counts = (count,)
        elif operation != "barrier":
            counts = (count // size if operation in _BY_RANK else count,) * (
                size * size if operation == "all_to_all" else size
            )
        identity = _identity_of(op, dtype) if operation == "exscan" and op is not None else b""
        given = _GIVEN.get(operation)
        if given is None:
            given = described(dtype, counts, shape if operation in SHAPED else None)
        if self._group.library_calls is not None and (algorithm != "auto" or _is_converted(op, dtype)):
            return None
        if op is not None and op.width > 1:
            counts, dtype = tuple(n // op.width for n in counts), dtype.item(op.width)
        elif op is not None and op.is_mean and dtype.is_half and size > 1:
            dtype = DTYPES["float32"]  # the sum of many would overflow; the engine converts
        collective = "all_gather" if operation == "split" else operation
        problem = Problem(collective, size, counts, root, group.backend.hosts())
        return decide(
            group,
            operation,
            problem,
            dtype,
            op,
            algorithm,
            given,
            identity,
            is_shape_compared=operation in SHAPED,
        )

    # -- calls that do not end well or soon ---------------------------------------------------------------

    def adopt(self, *call: Any) -> Work[Any]:
        """Carry a started call on: a work that ends with it."""
        return self._resume(*call, timers=True)

    def carry_on(self, *call: Any) -> Any:
        """Wait for a blocking call; raises what the verb raises."""
        with self._group.backend.runtime.defer_signals():
            return wait_or_cancel(self._resume(*call, timers=False))

    def cancel(self, *call: Any) -> None:
        """Cancel a blocking call, because a signal handler raised."""
        with self._group.backend.runtime.defer_signals():
            self._resume(*call, timers=False).cancel()

    def warn_dropped(self, operation: str) -> None:
        """A work was dropped before it has ended. It goes on, and its memory is kept until then."""
        warnings.warn(
            f'{operation} on "{self._group.name}" was dropped before it ended; keep the Work and wait for it',
            ResourceWarning,
            stacklevel=2,
        )

    def _resume(
        self,
        operation: str,
        sequence: int | None,
        fingerprint: bytes | None,
        started_at: float,
        timeout: float | None,
        operations: list[tuple[Any, ...]],
        memory: tuple[Any, ...],
        *,
        timers: bool,
    ) -> Work[Any]:
        group = self._group
        deadline = NEVER if timeout is None else Deadline(started_at + timeout, timeout)

        def collective(call: Call) -> Steps[None]:
            assert fingerprint is not None
            return CollectiveCall(group, call).take_over(operations[0][1], memory, fingerprint)

        def messages(call: Call) -> Steps[Status | None]:
            return self._carry_messages(call, operations, memory)

        return group.resume(
            operation,
            sequence,
            started_at,
            deadline,
            collective if sequence is not None else messages,
            timers=timers,
            is_send=operation == "send",
        )

    def _carry_messages(
        self, call: Call, operations: list[tuple[Any, ...]], memory: tuple[Any, ...]
    ) -> Steps[Status | None]:
        group = self._group
        sending: Request | None = None
        receiving: Request | None = None
        for kind, handle, peer, tag, buffer, dtype in operations:
            source = ANY if peer < 0 else peer
            request = group.backend.adopt(handle, source, buffer, dtype, memory)
            is_send = kind == "send"
            rank = ANY_RANK if peer < 0 else group.world_ranks[peer]
            call.messages += (Message(is_send, rank, ANY_TAG if tag < 0 else tag, request),)
            if is_send:
                sending = request
            else:
                receiving = request
        status: Status | None = None
        if receiving is not None:
            try:
                peer = receiving.peer
                ranks = (group.world_ranks[peer],) if isinstance(peer, int) else ()
                yield from await_request(call, receiving, lambda: ranks)
                envelope = receiving.envelope
                assert envelope is not None
                group.check_introduction(envelope.header, envelope.source)
                status = Status(envelope.source, envelope.tag, envelope.nbytes)
            except Exception:
                if sending is not None:
                    sending.cancel()
                    yield from await_requests(call, [sending])
                raise
        if sending is not None:
            to = sending.peer
            assert isinstance(to, int)
            target = (group.world_ranks[to],)
            yield from await_request(call, sending, lambda: target)
        return status

    def take_over(
        self,
        operation: str,
        sequence: int,
        fingerprint: bytes,
        started_at: float,
        timeout: float | None,
        handle: int,
        memory: tuple[Any, ...],
        interruption: BaseException | None,
    ) -> None:
        """Wait for an operation that a library's call has started; raises what the verb raises."""
        call = (operation, sequence, fingerprint, started_at, timeout, [("collective", handle)], memory)
        if interruption is not None:
            self.cancel(*call)
            raise interruption
        self.carry_on(*call)

    # -- rare looks of a call -------------------------------------------------------------------------------

    def look_at_news(self) -> None:
        """Dispatch what has come before a collective begins: another rank may have said that it failed."""
        self._group.backend.runtime.polled()

    def check_unclaimed(self, source: int, sequence: int, theirs: bytes) -> None:
        """A message was not received by the call with its number: raise if the sender made another call.

        Raises:
            CollectiveMismatch: it did.
        """
        if not self._group.on_unclaimed(source, sequence, theirs):
            self._group.wait_for_mismatch()
            self._group.check_usable(is_collective=True)

    def check_introduction(self, header: bytes, source: int) -> None:
        """See Group.check_introduction."""
        self._group.check_introduction(header, source)

    def note_unwaited(self, operation: str, code: CodeType | None, instruction: int) -> None:
        """A work was dropped that nobody has waited for."""
        self._group.loose_ends.add_dropped(operation, line_of(code, instruction))

    @staticmethod
    def refuse_forked() -> None:
        """A work of the parent process is used in a forked child.

        Raises:
            ClosedError: always.
        """
        raise ClosedError(
            "this work belongs to the parent process", next_step="make a new communicator after fork"
        )

    @staticmethod
    def copy_of(error: BaseException) -> BaseException:
        """The error for one more thread that asks for it."""
        return error.located(Location()) if isinstance(error, UnisonoError) else error


def _is_converted(op: ReduceOp | None, dtype: DType) -> bool:
    """Whether something else is reduced than the user's elements: items of several, or a wider type."""
    return op is not None and (op.width > 1 or (op.is_mean and dtype.is_half))


def _identity_of(op: ReduceOp, dtype: DType) -> bytes:
    """The item that exscan gives to rank 0."""
    held = np.empty(op.width, dtype.storage)
    value = op.identity_for(dtype)
    if dtype.name == "bfloat16":
        narrow(np.full(op.width, value, np.float32), held, dtype)
    else:
        held[:] = value
    return held.tobytes()

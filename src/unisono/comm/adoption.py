"""The Python side of the engine's calls: a decision for each class of calls, and the rare events.

A call runs in the engine from its arguments to its result (native/python/call.hpp). If it fails, stalls,
passes its deadline or is interrupted, or if a member of its group has left or failed, Python *adopts* it: its
operations go on in the engine, and a Task waits for them. So errors, stalls and deadlines are handled in one
place, for every backend.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Final

import numpy as np

from unisono.comm.announcement import row_bytes
from unisono.comm.argument_checks import check_algorithm, check_reduction, no_mean
from unisono.comm.deadlock import ANY_RANK, ANY_TAG
from unisono.comm.dispatch import CollectiveCall, Decided, decide
from unisono.comm.fingerprint import NOTHING, Operand, described
from unisono.comm.group import Group
from unisono.comm.object_payload import as_no_object
from unisono.comm.point_to_point import receivable, received
from unisono.comm.split import ROW_OPERAND
from unisono.comm.splitter import Splitter
from unisono.comm.vector_collectives import (
    LISTED,
    STRAIGHT,
    Outs,
    announced_operand,
    as_list,
    family_number,
    finish,
    gathered_operand,
    lengths_of,
    rows_algorithm,
    rows_collective,
    rows_here,
)
from unisono.comm.verb_table import VERBS, Fact
from unisono.core import buffers
from unisono.core.call import Call, Message, Steps, await_request, await_requests
from unisono.core.dtypes import DTYPES, DType
from unisono.core.envelope import ANY
from unisono.core.event_loop import warn_of_stopped_loop
from unisono.core.kernels import narrow
from unisono.core.ops import ReduceOp, as_op
from unisono.core.request import Request
from unisono.core.runtime import NEVER, Deadline, Runtime
from unisono.core.work import Work, wait_or_cancel
from unisono.errors import ClosedError, Location, ProtocolError, UnisonoError, UsageError
from unisono.plans import Problem, counts_held

__all__ = ["Adoption"]

_DTYPES: Final = list(DTYPES.values())


class Adoption:
    """The part of Python in the engine's calls of one group."""

    def __init__(self, group: Group, splitter: Splitter[Any]) -> None:
        self._group = group
        self._splitter = splitter

    # -- splits -------------------------------------------------------------------------------------------

    def split_row(self, color: Any, key: Any) -> bytes:
        """What this rank contributes to a split."""
        return self._splitter.row(color, key)

    def make_group(self, *ended: Any) -> object:
        """The result of a split whose rows the engine has gathered."""
        return self._splitter.made(*ended)

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
        lengths: tuple[int, ...],
    ) -> Decided | None:
        """Decide how the engine runs a collective; None leaves it to the reference path.

        `lengths` are the elements of each part of a reduce_scatter_v. Each type of an all_reduce_many is
        decided by itself; the engine has found its arrays to hold whole items.

        Raises:
            UsageError: the operation is not defined for the type, or there is no such algorithm.
        """
        group, dtype = self._group, _DTYPES[dtype_code]
        op = None if op_name is None else as_op(op_name)
        self._check(operation, dtype, op, algorithm, shape)
        facts = VERBS[operation].facts
        if Fact.ANNOUNCED in facts:
            return self._decide_announced(operation, dtype, root, algorithm, shape)
        if group.library_calls is not None and (algorithm != "auto" or _is_converted(op, dtype)):
            return None
        size = group.backend.size
        counts = _counts_of(operation, size, shape, lengths)
        given = _operand_of(operation, dtype, counts, shape)
        identity = _identity_of(op, dtype) if operation == "exscan" and op is not None else b""
        if op is not None and op.width > 1:
            counts, dtype = tuple(n // op.width for n in counts), dtype.item(op.width)
        elif op is not None and op.is_mean and dtype.is_half and size > 1:
            dtype = DTYPES["float32"]  # the sum of many would overflow; the engine converts
        problem = Problem(VERBS[operation].collective, size, counts, root, group.backend.hosts())
        return decide(
            group,
            operation,
            problem,
            dtype,
            op,
            algorithm,
            given,
            identity,
            is_shape_compared=Fact.SHAPED in facts,
            has_longer=counts != () and min(counts) == max(counts) > 0,
        )

    def _check(
        self, operation: str, dtype: DType, op: ReduceOp | None, algorithm: str, shape: tuple[int, ...]
    ) -> None:
        """Refuse the arguments that the verb of the reference path refuses."""
        verb, backend = VERBS[operation], self._group.backend
        collective = verb.collective
        if op is None:
            check_algorithm(collective, algorithm, is_uneven=Fact.ANNOUNCED in verb.facts)
            return
        if op.is_mean and Fact.PREFIX in verb.facts:
            raise no_mean(operation)
        if Fact.FUSED not in verb.facts:
            is_by_rank = Fact.BY_RANK in verb.facts
            parts = [math.prod(shape) // backend.size] * backend.size if is_by_rank else []
            op.check_shape(shape, parts)
        check_reduction(collective, op, dtype, algorithm, backend.config.reproducible)

    def _decide_announced(
        self, operation: str, dtype: DType, root: int, algorithm: str, shape: tuple[int, ...]
    ) -> Decided:
        """Decide the first stage of a call whose ranks do not know each other's lengths."""
        group = self._group
        size, collective = group.backend.size, rows_collective(operation)
        nbytes = row_bytes(size, lengths_of(operation, size))
        counts = (nbytes,) * (1 if collective == "broadcast" else size)
        sender = 0 if collective == "all_gather" else root
        problem = Problem(collective, size, counts, sender, group.backend.hosts())
        given = announced_operand(operation, dtype, shape, root)
        return decide(
            group,
            operation,
            problem,
            DTYPES["uint8"],
            None,
            rows_algorithm(operation, algorithm),
            given,
            b"",
            is_shape_compared=True,
            shown=algorithm,
        )

    def decide_second_stage(
        self, operation: str, dtype_code: int, root: int, algorithm: str, counts: tuple[int, ...]
    ) -> Decided:
        """Decide how the engine moves the parts that did not fit into the rows of the first stage."""
        group, dtype = self._group, _DTYPES[dtype_code]
        collective = VERBS[operation].collective
        problem = Problem(collective, group.backend.size, counts, root, group.backend.hosts())
        is_gathered = collective == "gather"
        return decide(
            group,
            operation,
            problem,
            dtype,
            None,
            STRAIGHT if is_gathered else algorithm,
            gathered_operand(dtype, root) if is_gathered else described(dtype, counts),
            b"",
            is_shape_compared=False,
            shown=algorithm if is_gathered else None,
            stage=1,
        )

    @staticmethod
    def family_of(array: buffers.Array) -> int:
        """The number by which root names its kind of array to the others."""
        return family_number(array.family)

    def cut(
        self, memory: Any, like: Any, dtype_code: int, lengths: list[int], shape: tuple[int, ...]
    ) -> list[Any]:
        """The result of a verb that returns a list, for arrays of a kind that only Python knows."""
        dtype = _DTYPES[dtype_code]
        flat = np.frombuffer(memory, dtype.storage)
        return as_list(flat, lengths, shape, dtype, buffers.view(like, "x").family)

    # -- calls that do not end well or soon ---------------------------------------------------------------

    def adopt(self, *call: Any) -> Work[Any]:
        """Adopt a started call; returns the work that ends with it."""
        return self._resume(*call, timers=True)

    def carry_on(self, *call: Any) -> Any:
        """Wait for a blocking call; raises what the verb raises."""
        warn_of_stopped_loop(call[0])
        with self._group.backend.runtime.defer_signals():
            return wait_or_cancel(self._resume(*call, timers=False))

    def cancel(self, *call: Any) -> None:
        """Cancel a blocking call, because a signal handler raised."""
        with self._group.backend.runtime.defer_signals():
            self._resume(*call, timers=False).cancel()

    def warn_dropped(self, operation: str) -> None:
        """A work was dropped before it has ended. It goes on, and its memory is kept until then."""
        if self._group.loose_ends.is_lenient:
            return
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
        root: int | None = None,
        algorithm: str = "auto",
        *,
        timers: bool,
    ) -> Work[Any]:
        group = self._group
        deadline = NEVER if timeout is None else Deadline(started_at + timeout, timeout)

        def collective(call: Call) -> Steps[Any]:
            assert fingerprint is not None
            one = CollectiveCall(group, call, algorithm, first_stage=1)
            if operations:
                yield from one.take_over([handle for _, handle in operations], memory, fingerprint)
            if operation == "split":
                given, _, result, _ = memory
                # Made now, not when a thread waits for the work: other members may use the group already.
                return (yield from self._splitter.finish(call, given, result))
            if root is None:
                return None
            given, out, result, _ = memory
            # The first stage of a call is over, or only its result has to be looked at.
            parts = None if given is None else [buffers.view(x, "x") for x in given]
            filled = None
            if out is not None:
                filled = Outs.of(out) if operation in LISTED else receivable(out, "out")
            size = group.backend.size
            rows = rows_here(operation, size, group.backend.rank == root)
            nbytes = row_bytes(size, lengths_of(operation, size)) * rows
            return (yield from finish(operation, one, group, result[:nbytes], parts, root=root, out=filled))

        def messages(call: Call) -> Steps[object]:
            return self._carry_messages(call, operations, memory)

        return group.resume(
            operation,
            sequence,
            started_at,
            deadline,
            collective if sequence is not None else messages,
            timers=timers,
            is_send=VERBS[operation].facts & (Fact.SENDS | Fact.RECEIVES) == Fact.SENDS,
        )

    def _carry_messages(
        self, call: Call, operations: list[tuple[Any, ...]], memory: tuple[Any, ...]
    ) -> Steps[Any]:
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
        result = None
        if receiving is not None:
            try:
                peer = receiving.peer
                ranks = (group.world_ranks[peer],) if isinstance(peer, int) else ()
                yield from await_request(call, receiving, lambda: ranks)
                result = received(group, call.operation, receiving)
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
        return result

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

    def catch_up(self) -> None:
        """Dispatch what has arrived, before a collective begins: another rank may have failed."""
        self._group.backend.runtime.catch_up()

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

    def located(self, operation: str, error: BaseException, sequence: int | None = None) -> BaseException:
        """The error of something that was received, with the call that received it."""
        if sequence is None and isinstance(error, ProtocolError):  # a message
            error = as_no_object(error)
        here = Location(operation, self._group.name, self._group.epoch, sequence)
        return error.located(here) if isinstance(error, UnisonoError) else error

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
    def refuse_nested() -> None:
        """A signal handler or a finalizer waits for a work that its own thread is ending or adopting.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "this thread was interrupted while it was ending the work, and cannot wait for it here",
            next_step="wait for it when the signal handler or finalizer has returned",
        )

    @staticmethod
    def copy_of(error: BaseException) -> BaseException:
        """The error for one more thread that asks for it."""
        return error.located(Location()) if isinstance(error, UnisonoError) else error


def _counts_of(
    operation: str, size: int, shape: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[int, ...]:
    """The counts of the plan: see plans.Problem."""
    verb, count = VERBS[operation], math.prod(shape)
    if Fact.CUT in verb.facts:
        return lengths
    each = count // size if Fact.BY_RANK in verb.facts else count
    return (each,) * counts_held(verb.collective, size)


def _operand_of(operation: str, dtype: DType, counts: tuple[int, ...], shape: tuple[int, ...]) -> Operand:
    """What ranks compare of a call, but for the numbers that the engine knows better."""
    # A barrier gives nothing, and the row of a split is not what the user gave.
    known = {"barrier": NOTHING, "split": ROW_OPERAND}.get(operation)
    return known or described(dtype, counts, shape if Fact.SHAPED in VERBS[operation].facts else None)


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

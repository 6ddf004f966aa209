"""A collective under way: one or more stages, each with a plan, under one sequence number.

A stage is chosen, fingerprinted, and run by the backend if it can, otherwise by the executor in plans/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from unisono.comm.fingerprint import Operand, described, fingerprint_of, words_of
from unisono.comm.group import Group
from unisono.core.call import Call, Steps, await_request
from unisono.core.dtypes import DType
from unisono.core.envelope import UNTYPED, Tags
from unisono.core.ops import ReduceOp
from unisono.core.request import HeaderMismatch, JointRequest, LengthMismatch, Request
from unisono.errors import UsageError
from unisono.messaging.stage import Stage
from unisono.plans import LINKS, Links, Problem, build, choose, entry_of
from unisono.plans.catalog import synchronizes
from unisono.plans.choose import reach
from unisono.plans.execute import Execution, Memory, execute
from unisono.plans.steps import Buf, Plan

__all__ = ["CollectiveCall", "Decided", "check_order", "decide"]


class CollectiveCall:
    """One collective call of one rank. Its stages follow each other; each has a tag of its own."""

    def __init__(self, group: Group, call: Call, algorithm: str = "auto", first_stage: int = 0) -> None:
        self._group = group
        self._call = call
        self._algorithm = algorithm
        self._stage = first_stage
        self._fingerprint: bytes | None = None  # of the stage that began last

    @property
    def algorithm(self) -> str:
        """What the user named, or "auto"."""
        return self._algorithm

    @property
    def sequence(self) -> int:
        """Its number in the group."""
        assert self._call.sequence is not None, "a collective has a number"
        return self._call.sequence

    def run(
        self,
        collective: str,
        counts: tuple[int, ...],
        dtype: DType,
        memory: Mapping[Buf, Memory],
        *,
        root: int = 0,
        op: ReduceOp | None = None,
        shape: tuple[int, ...] | None = None,
        algorithm: str | None = None,
        given: Operand | None = None,
        row_bytes: int = 0,
        is_part: bool = False,
    ) -> Steps[None]:
        """Run one stage to its end. `shape` is shown and compared where ranks must agree on it.

        Where something else travels than the user gave (metadata, a wider type), `given` says what it was:
        the first stage is the one that ranks compare. `is_part`: the stages are parts of one thing, and all
        carry the fingerprint of the first.
        """
        group, backend = self._group, self._group.backend
        if given is None:
            given = described(dtype, counts, shape)
        if op is not None and op.width > 1:
            # From here on one item is `width` elements: no plan, cut or executor can separate them.
            counts, dtype = tuple(n // op.width for n in counts), dtype.item(op.width)
            memory = {buf: flat.view(dtype.storage) for buf, flat in memory.items()}
        problem = Problem(collective, backend.size, counts, root, backend.hosts())
        links = LINKS[backend.link_kind()]
        wanted = algorithm or self._algorithm
        name = algorithm_for(problem, dtype, op, wanted, backend.config.reproducible, links)
        # With algorithm="auto" a library with its own algorithms is asked first, on all ranks or on none.
        library_may_run = backend.capabilities.run_collective and wanted == "auto"
        # An algorithm for metadata follows from what is shown already; what the user asked for does not.
        shown = self._algorithm if algorithm is not None else "auto" if library_may_run else name
        tag = Tags.collective(self.sequence, self._stage)
        if is_part and self._fingerprint is not None:
            self._stage += 1
        else:
            self._fingerprint = self._begin_stage(given, op, dtype, shown, root)
        fingerprint = self._fingerprint
        part = Stage(group.context, tag, dtype, op, memory, fingerprint, row_bytes=row_bytes)
        if library_may_run and (own := backend.run_collective(problem, part)) is not None:
            self._call.is_joint = True
            yield from self._follow(own, fingerprint)
            self._call.is_joint = False
            return
        yield from self._run_plan(build(problem, backend.rank, name), counts, part)

    def _begin_stage(
        self, given: Operand, op: ReduceOp | None, dtype: DType, algorithm: str, root: int
    ) -> bytes:
        """The fingerprint of the stage that begins; that of the first is logged."""
        operation, stage = self._call.operation, self._stage
        fingerprint = _fingerprint(self._group, operation, given, op, dtype, algorithm, root, stage)
        self._stage += 1
        if stage == 0:
            self._group.remember(self.sequence, fingerprint)
        return fingerprint

    def _run_plan(self, plan: Plan, counts: tuple[int, ...], part: Stage) -> Steps[None]:
        """Let the backend run the plan, if it can; otherwise the reference executor does."""
        group, backend, call, fingerprint = self._group, self._group.backend, self._call, part.header
        if backend.capabilities.run_plan and (part.op is None or part.op.fn is None):
            yield from self._follow(backend.run_plan(plan, counts, part), fingerprint)
            return
        how = Execution(
            backend,
            part,
            call,
            group.world_ranks,
            check_header=lambda peer, theirs: group.check_fingerprint(call, fingerprint, peer, theirs),
            check_length=lambda peer, came, awaited, theirs: group.refuse_length(
                call, fingerprint, peer, came, awaited
            ),
        )
        yield from execute(plan, counts, how)

    def _follow(self, request: Request, fingerprint: bytes) -> Steps[None]:
        """Carry to its end what the backend runs by its own means."""
        group, call = self._group, self._call

        def peers() -> tuple[int, ...]:
            return tuple(sorted(group.world_ranks[peer] for peer in request.peers_awaited()))

        try:
            yield from await_request(call, request, peers)
        except HeaderMismatch as wrong:
            group.check_fingerprint(call, fingerprint, wrong.peer, wrong.header)
            raise
        except LengthMismatch as wrong:
            group.refuse_length(call, fingerprint, wrong.peer, wrong.came, wrong.awaited)

    def take_over(self, handles: list[int], memory: tuple[Any, ...], fingerprint: bytes) -> Steps[None]:
        """Finish what the fast path began: stages that run at once."""
        backend = self._group.backend
        self._call.is_joint = backend.capabilities.run_collective
        requests = [backend.adopt(handle, None, None, UNTYPED, memory) for handle in handles]
        request = requests[0] if len(requests) == 1 else JointRequest(requests)
        yield from self._follow(request, fingerprint)


# What a class of calls needs to be made on any group of one shape: the program (or the LibraryCall that makes
# them), the elements of its longest pieces, the fingerprint but for its count and hash, the number of the
# kernel (-1: none), the divisor of a mean (0: none), the item with which exscan fills the result of rank 0,
# whether the shape is part of the fingerprint, whether an end shows that all ranks have called, and how many
# classes of longer ones are decided alike.
Decided: TypeAlias = tuple[Any, int, bytes, int, int, bytes, bool, bool, int]

# More classes than there are.
_ALL_CLASSES: Final = 64


def decide(
    group: Group,
    operation: str,
    problem: Problem,
    dtype: DType,
    op: ReduceOp | None,
    algorithm: str,
    given: Operand,
    identity: bytes,
    *,
    is_shape_compared: bool,
    shown: str | None = None,
    stage: int = 0,
    has_longer: bool = False,
) -> Decided:
    """Choose the algorithm for a collective, and compile the program that the engine runs.

    Ranks compare the algorithm `shown` in its place, if one is given. A library that makes such calls has its
    own algorithms. `has_longer`: the next class is that of counts twice as long.
    """
    backend = group.backend
    config = backend.config
    divisor = problem.size if op is not None and op.is_mean and problem.size > 1 else 0
    code = -1 if op is None or op.code is None else int(op.code)
    if group.library_calls is not None:
        fingerprint = fingerprint_of(operation, given, op, "auto", problem.root, 0, ())
        call = group.library_calls.decide(problem, dtype, op)
        alike = _ALL_CLASSES if has_longer else 0
        return call, 0, fingerprint, code, divisor, identity, is_shape_compared, False, alike
    links = LINKS[backend.link_kind()]
    name = algorithm_for(problem, dtype, op, algorithm, config.reproducible, links)
    root = problem.root if given.root is None else given.root
    fingerprint = fingerprint_of(operation, given, op, shown or name, root, stage, ())
    program, piece_elements = backend.compile_plan(build(problem, backend.rank, name), dtype.itemsize)
    shows_all = synchronizes(problem.collective)
    alike = 0
    if has_longer and algorithm != "auto":
        alike = _ALL_CLASSES
    elif has_longer:
        alike = reach(problem, dtype.itemsize, links, ordered=_needs_order(op, config.reproducible))
    return program, piece_elements, fingerprint, code, divisor, identity, is_shape_compared, shows_all, alike


def _fingerprint(
    group: Group,
    operation: str,
    given: Operand,
    op: ReduceOp | None,
    dtype: DType,
    algorithm: str,
    root: int,
    stage: int,
) -> bytes:
    """The record of one stage; its words are kept for reports."""
    op_words = _op_words(op, dtype, operation)
    rest = group.state.compared(op_words or "" if op is not None and op.fn is not None else "")
    fingerprint = fingerprint_of(
        operation, given, op, algorithm, root if given.root is None else given.root, stage, rest
    )
    group.state.keep_words(
        fingerprint, lambda: words_of(fingerprint, given.text, op_words) + group.state.tail_words
    )
    return fingerprint


def _op_words(op: ReduceOp | None, dtype: DType, collective: str) -> str | None:
    """An operation in words: what ranks compare of one that a user made."""
    if op is None or op.fn is None:
        return None if op is None else str(op)
    identity = f" identity={op.shown_identity(dtype.element)}" if collective == "exscan" else ""
    width = f" width={op.width}" if op.width > 1 else ""
    return f"{op} commutative={op.commutative}{width}{identity}"


def algorithm_for(
    problem: Problem, dtype: DType, op: ReduceOp | None, wanted: str, reproducible: bool, links: Links
) -> str:
    """The algorithm by name, or the best that keeps what the operation and the settings need."""
    if wanted != "auto":
        check_order(problem.collective, op, wanted, reproducible)
        return wanted
    return choose(problem, dtype.itemsize, links, ordered=_needs_order(op, reproducible))[0]


def _needs_order(op: ReduceOp | None, reproducible: bool) -> bool:
    return op is not None and (reproducible or not op.commutative)


def check_order(collective: str, op: ReduceOp | None, algorithm: str, reproducible: bool) -> None:
    """Refuse a named algorithm that brackets or orders the operands otherwise than the call needs."""
    entry = entry_of(collective, algorithm)
    if op is None:
        return
    if reproducible and not entry.ordered:
        raise _disorder(collective, algorithm, "reproducible results need")
    if not op.commutative and not entry.keeps_rank_order:
        raise _disorder(collective, algorithm, f"op {op}, which does not commute, needs")


def _disorder(collective: str, algorithm: str, needed_by: str) -> UsageError:
    return UsageError(
        f"algorithm={algorithm!r} of {collective} does not keep the order that {needed_by}",
        next_step="algorithm='auto', or one that `unisono plan --list` shows as ordered",
    )

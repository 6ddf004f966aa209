"""The process group: what torch.distributed calls, as verbs of a communicator.

torch 2.13 lets Python subclass `ProcessGroup`, and uses what the creator returns in place of its own. Later
versions (2.14) let Python subclass `Backend`, with the same method names.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    _DistributedBackendOptions,
)

from unisono.comm.communicator import Communicator
from unisono.core.call_site import call_site
from unisono.core.envelope import ANY
from unisono.errors import CollectiveMismatch, UnisonoError, UsageError
from unisono.pytorch.calls import Calls, Finish
from unisono.pytorch.compiling import not_compiled
from unisono.pytorch.errors import backend_error
from unisono.pytorch.identity import Identity
from unisono.pytorch.monitored_barrier import MonitoredBarrier
from unisono.pytorch.overloads import overloaded
from unisono.pytorch.reductions import OPS, divided, is_divided, op_of, scaled
from unisono.pytorch.rendezvous import join_world
from unisono.pytorch.sparse import all_reduce_sparse
from unisono.pytorch.tensors import (
    CopyBack,
    apart,
    apart_from,
    cut,
    in_rows,
    is_plain,
    joined,
    readable,
    target,
    targets,
    updatable,
)
from unisono.pytorch.work import DONE, Once, Several

__all__ = ["ProcessGroup"]

_log = logging.getLogger("unisono")


@not_compiled
class ProcessGroup(Identity):
    """A group of torch.distributed on a communicator, which it closes. Its ranks are the communicator's.

    `members` are torch's global ranks, if the communicator has other world ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        timeout: timedelta,
        *,
        store: Any = None,
        members: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(comm, store)
        self._calls = Calls(comm, timeout, members)
        self._monitored: MonitoredBarrier | None = None
        self._is_shut_down = False

    @classmethod
    def create(cls, options: _DistributedBackendOptions) -> ProcessGroup:
        """Make the group that torch asks for, on its members.

        It is a part of the default group where that is ours; otherwise its ranks meet through the store.
        """
        ranks, timeout = tuple(options.global_ranks_in_group), options.timeout
        default = dist.GroupMember.WORLD
        rank, size, name = options.group_rank, options.group_size, str(options.group_id)
        try:
            if ranks and isinstance(default, ProcessGroup):
                return cls(default.communicator._sub(ranks), timeout, store=options.store)
            comm = join_world(options.store, rank, size, timeout, name, is_default=not ranks)
        except UnisonoError as error:
            call = "new_group" if ranks else "init_process_group"
            raise backend_error(error, call, call_site(), (*ranks, rank)[rank], ranks or None) from error
        return cls(comm, timeout, store=options.store, members=ranks or None)

    # -- collectives that reduce ----------------------------------------------------------------------------

    @overloaded(AllreduceOptions, "tensors", fields=("op",))
    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """`dist.all_reduce`; DDP's buckets."""
        (tensor,) = tensors
        if is_plain(tensor):
            name = OPS[tensor.dtype][opts.reduceOp.op.value]
            if name is not None:
                return self._calls.run("all_reduce", opts, tensors, None, tensor, name)
        if tensor.is_sparse:
            return all_reduce_sparse(self._calls, tensor, opts)
        with self._calls.errors("all_reduce"):
            name = op_of(opts.reduceOp, tensor.dtype)
            memory, finish = self._to_reduce(tensor, opts.reduceOp)
        return self._calls.run("all_reduce", opts, tensors, finish, memory, name)

    @overloaded(AllreduceCoalescedOptions, "tensors", are_lists=False)
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Several tensors with one operation."""
        kinds = {tensor.dtype for tensor in tensors}
        if len(kinds) != 1 or not all(map(is_plain, tensors)):
            return self._all([self.allreduce([tensor], opts) for tensor in tensors])
        name = OPS[tensors[0].dtype][opts.reduceOp.op.value]
        if name is None:
            return self._all([self.allreduce([tensor], opts) for tensor in tensors])
        return self._calls.run("all_reduce_many", opts, tensors, None, tensors, name)

    @overloaded(ReduceOptions, "tensors", fields=("root", "op"))
    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """`dist.reduce`."""
        (tensor,) = tensors
        root = opts.rootRank
        finish: Finish | None
        with self._calls.errors("reduce"):
            name = op_of(opts.reduceOp, tensor.dtype)
            if root == self._rank:
                memory, finish = self._to_reduce(tensor, opts.reduceOp)
            else:
                memory, finish = scaled(opts.reduceOp, readable(tensor)), None
        return self._calls.run("reduce", opts, tensors, finish, memory, root, name)

    @overloaded(ReduceScatterOptions, "output_tensors", "input_tensors", fields=("op",))
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """`dist.reduce_scatter`: a list by rank, whose tensors may differ in length."""
        (output,), (parts,) = outputs, inputs
        with self._calls.errors("reduce_scatter"):
            self._check_list(parts)
            op_of(opts.reduceOp, output.dtype)  # before types without arithmetic become bytes
            counts = [part.numel() for part in parts]
            if output.numel() != counts[self._rank]:
                raise _wrong_length(output.numel(), counts[self._rank])
            whole = joined(parts)
        if len(set(counts)) == 1:
            return self._reduce_scatter(output, whole, opts)
        with self._calls.errors("reduce_scatter"):
            op = opts.reduceOp
            name = op_of(op, output.dtype)
            x = scaled(op, whole)
            counts = [count * x.numel() // sum(counts) for count in counts]  # of pairs for complex32

        def fill(result: Tensor) -> None:
            if is_divided(op, output.dtype):
                divided(result, self._size)
            _fill([output], [result])

        return self._calls.run("reduce_scatter_v", opts, outputs, fill, x, counts, name)

    @overloaded(ReduceScatterOptions, "output", "input", are_lists=False)
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:  # noqa: A002
        """`dist.reduce_scatter_tensor`; FSDP2."""
        return self._reduce_scatter(output, input, opts)

    def _reduce_scatter(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:  # noqa: A002
        finish: Finish | None = None
        with self._calls.errors("reduce_scatter"):
            op = opts.reduceOp
            name = op_of(op, input.dtype)
            out, back = target(output)
            x = apart(scaled(op, readable(input)), out)
            if back is not None or is_divided(op, input.dtype):

                def finish(_: object) -> None:
                    if is_divided(op, input.dtype):
                        divided(out, self._size)
                    if back is not None:
                        back()

            self._check_parts(x, out, "the input")
        return self._calls.run(
            "reduce_scatter", opts, [output], finish, x.view(self._size, -1), name, out=out.view(-1)
        )

    @overloaded(ReduceScatterOptions, "outputs", "inputs", are_lists=False)
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        """Several of them; the functional form."""
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self.reduce_scatter_single(output, part, opts) for output, part in pairs])

    # -- collectives that move ------------------------------------------------------------------------------

    @overloaded(BroadcastOptions, "tensors", fields=("root",))
    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """`dist.broadcast`."""
        (tensor,) = tensors
        with self._calls.errors("broadcast"):
            memory, back = updatable(tensor)
        return self._calls.run("broadcast", opts, tensors, _then(back), memory, opts.rootRank)

    @overloaded(AllgatherOptions, "output_tensors", "input_tensors")
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """`dist.all_gather`: a list by rank, whose tensors may differ in length."""
        (outs,), (tensor,) = outputs, inputs
        with self._calls.errors("all_gather"):
            self._check_list(outs)
            if outs[self._rank].numel() != tensor.numel():
                raise _wrong_length(outs[self._rank].numel(), tensor.numel())
            x, taken, back = self._to_gather(tensor, outs)
            if len({out.numel() for out in outs}) == 1:
                x, *taken = in_rows([x, *taken])
        return self._calls.run("all_gather_v", opts, outs, _then(back), x, out=taken)

    @overloaded(AllgatherOptions, "output_lists", "input_list", are_lists=False)
    def allgather_coalesced(self, lists: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> dist.Work:
        """Several of them: `lists[rank][k]`."""
        return self._all(
            [
                self.allgather([[by_rank[k] for by_rank in lists]], [tensor], opts)
                for k, tensor in enumerate(tensors)
            ]
        )

    @overloaded(AllgatherOptions, "output", "input", are_lists=False)
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:  # noqa: A002
        """`dist.all_gather_into_tensor`; FSDP2, whose input is a slice of the output."""
        with self._calls.errors("all_gather"):
            out, back = target(output)
            x = apart(readable(input), out, self._rank)
            self._check_parts(out, x, "the output")
        return self._calls.run(
            "all_gather", opts, [output], _then(back), x.view(-1), out=out.view(self._size, -1)
        )

    @overloaded(AllgatherOptions, "output_lists", "input_list", are_lists=False)
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        """Several of them; the functional form."""
        pairs = zip(outputs, inputs, strict=True)
        return self._all([self.all_gather_single(output, part, opts) for output, part in pairs])

    @overloaded(GatherOptions, "output_tensors", "input_tensors", fields=("root",))
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """`dist.gather`."""
        (tensor,) = inputs
        root, outs = opts.rootRank, outputs[0] if outputs else []
        with self._calls.errors("gather"):
            if root == self._rank:
                self._check_list(outs)
                if any(out.numel() != tensor.numel() for out in outs):
                    raise UsageError(
                        f"outputs of other lengths than the input; allowed: {tensor.numel()} elements"
                    )
                x, taken, back = self._to_gather(tensor, outs)
                x, *taken = in_rows([x, *taken])
                return self._calls.run("gather_v", opts, outs, _then(back), x, root, out=taken)
            (x,) = in_rows([readable(tensor).view(-1)])
        return self._calls.run("gather_v", opts, outs, None, x, root)

    @overloaded(ScatterOptions, "output_tensors", "input_tensors", fields=("root",))
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """`dist.scatter`: root's tensors are sent without a copy."""
        (output,) = outputs
        root, parts = opts.rootRank, None
        with self._calls.errors("scatter"):
            if root == self._rank:
                self._check_list(inputs[0])
                if any(part.numel() != output.numel() for part in inputs[0]):
                    raise UsageError(
                        f"inputs of other lengths than the output; allowed: {output.numel()} elements"
                    )
            out, back = target(output)
            out = out.view(-1)
            if root == self._rank:
                parts = apart_from([readable(part).view(-1) for part in inputs[0]], [out])
        return self._calls.run("scatter_v", opts, outputs, _then(back), parts, root, out=out)

    @overloaded(AllToAllOptions, "output_tensors", "input_tensors", are_lists=False)
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        """`dist.all_to_all`: lists by rank, whose tensors may differ in length."""
        with self._calls.errors("all_to_all"):
            self._check_list(inputs)
            self._check_list(outputs)
            taken, back = targets(outputs)
            parts = apart_from([readable(part).view(-1) for part in inputs], taken)
        return self._calls.run("all_to_all_v", opts, outputs, _then(back), parts, out=taken)

    @overloaded(
        AllToAllOptions,
        "output_tensor",
        "input_tensor",
        "output_split_sizes",
        "input_split_sizes",
        are_lists=False,
    )
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> dist.Work:
        """`dist.all_to_all_single`: without splits, equal parts of dimension 0."""
        if output_splits or input_splits:
            with self._calls.errors("all_to_all"):
                out, back = target(output)
                x = apart(readable(input), out)
                parts = cut(x, _rows(input, input_splits, self._size))
                taken = cut(out, _rows(output, output_splits, self._size))
            return self._calls.run("all_to_all_v", opts, [output], _then(back), parts, out=taken)
        with self._calls.errors("all_to_all"):
            out, back = target(output)
            x = apart(readable(input), out)
            for tensor in (input, output):
                if tensor.dim() == 0 or tensor.shape[0] % self._size:
                    raise UsageError(
                        f"a tensor of shape {tuple(tensor.shape)}; allowed: {self._size} equal parts"
                    )
            if x.numel() != out.numel():
                raise _wrong_length(out.numel(), x.numel())
        x, out = x.view(self._size, -1), out.view(self._size, -1)
        return self._calls.run("all_to_all", opts, [output], _then(back), x, out=out)

    @overloaded(BarrierOptions)
    def barrier(self, opts: Any) -> dist.Work:
        """`dist.barrier`."""
        return self._calls.run("barrier", opts, (), None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """`dist.monitored_barrier`: names the ranks that do not arrive. The group stays usable.

        Raises:
            RuntimeError: some rank has not come in time.
        """
        with self._calls.errors("monitored_barrier"):
            if self._monitored is None:
                everyone = tuple(range(self._size))
                self._monitored = MonitoredBarrier(self.communicator._sub(everyone, "monitored_barrier"))
            self._monitored.wait(
                self._calls.timeout_s if timeout is None else timeout.total_seconds(), wait_all_ranks
            )

    # -- messages -------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """`dist.send` and `dist.isend`."""
        (tensor,) = tensors
        with self._calls.errors("send"):
            return self._calls.message("send", tensors, None, readable(tensor), dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """`dist.recv` and `dist.irecv`."""
        (tensor,) = tensors
        with self._calls.errors("recv"):
            memory, back = target(tensor)
            return self._calls.message("recv", tensors, _received(memory, back), memory, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """`dist.recv` without src; the work tells the source."""
        (tensor,) = tensors
        with self._calls.errors("recv"):
            memory, back = target(tensor)
            return self._calls.message("recv", tensors, _received(memory, back), memory, ANY, tag)

    # -- coalescing -----------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._calls.coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._calls.coalesced = self._calls.coalesced or [], None
        return Several(self._calls, works)

    def _all(self, works: Sequence[Any]) -> dist.Work:
        return DONE if all(work is DONE for work in works) else Several(self._calls, works)

    # -- parts of calls -------------------------------------------------------------------------------------

    def _to_reduce(self, tensor: Tensor, op: Any) -> tuple[Tensor, Finish | None]:
        """Memory for a reduction in place of one that is not plain, and what is left to do in the end."""
        memory, back = updatable(tensor)
        own = scaled(op, memory)
        if own is not memory:
            memory.copy_(own)
        if not is_divided(op, tensor.dtype):
            return memory, _then(back)

        def finish(_: object) -> None:
            divided(memory, self._size)
            if back is not None:
                back()

        return memory, finish

    def _to_gather(
        self, tensor: Tensor, outs: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], CopyBack | None]:
        """What to read, and flat memory for the parts of all ranks; one's own part may be what is read."""
        taken, back = targets(outs)
        x, own = readable(tensor).view(-1), taken[self._rank]
        if x.data_ptr() != own.data_ptr():
            (x,) = apart_from([x], taken)
        return x, taken, back

    def _check_list(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._size:
            raise UsageError(f"a list of {len(tensors)} tensors; allowed: one per rank, {self._size}")

    def _check_parts(self, whole: Tensor, part: Tensor, what: str) -> None:
        if whole.numel() != part.numel() * self._size or whole.dtype != part.dtype:
            raise UsageError(
                f"{what} has {whole.numel()} elements of {whole.dtype}; allowed: {self._size} times the "
                f"other's {part.numel()} of {part.dtype}"
            )

    # -- endings --------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """The time for every operation that is started from now on."""
        self._calls.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group. A second call does nothing."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        try:
            self.communicator.close()
        except CollectiveMismatch as mismatch:
            _log.error("[rank %d] %s", self._rank, mismatch)
        self._calls.close()

    def abort(self) -> None:
        """End all pending operations of the group, on every rank, by errors."""
        if not self._is_shut_down:
            self.communicator.abort("the process group was aborted")
            self.shutdown()

    # -- names of torch before 2.13 -------------------------------------------------------------------------

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _then(back: CopyBack | None) -> Finish | None:
    return None if back is None else lambda _: back()


def _wrong_length(given: int, needed: int) -> UsageError:
    return UsageError(f"an output of {given} elements; allowed: {needed}")


def _fill(outputs: Sequence[Tensor], parts: Any) -> None:
    """Copy what a verb gave, by rank, into the tensors of the caller."""
    for output, part in zip(outputs, parts, strict=True):
        own = output.detach()
        if not own.numel() and not part.numel():
            continue  # not every empty tensor can be seen as another type
        if part.dtype != own.dtype:
            part = part.view(own.dtype)
        if part.numel() != own.numel():
            raise _wrong_length(own.numel(), part.numel())
        own.copy_(part.view(own.shape))


def _received(memory: Tensor, back: CopyBack | None) -> Once:
    def finish(status: Any) -> None:
        if status.nbytes != memory.nbytes:
            raise UsageError(
                f"a tensor of {memory.nbytes} bytes; allowed: the message's {status.nbytes} bytes"
            )
        if back is not None:
            back()

    return Once(finish, is_owed=back is not None)


def _rows(tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """The lengths that cut dimension 0, by rank."""
    if tensor.dim() == 0:
        raise UsageError(f"a tensor of shape {tuple(tensor.shape)}; allowed: one with a dimension 0")
    rows = list(splits) or [tensor.shape[0] // size] * size
    if len(rows) != size or sum(rows) != tensor.shape[0]:
        raise UsageError(f"splits {rows}; allowed: {size} lengths of {tensor.shape[0]} together")
    return rows

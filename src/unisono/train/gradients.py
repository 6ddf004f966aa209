"""Data-parallel training for programs without torch: equal parameters at the start, averaged gradients.

Arrays travel in buckets: many small ones together, and each bucket is started as soon as it is full, while
the next is put together or computed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

import numpy as np

from unisono.comm.communicator import Communicator
from unisono.core.buffers import as_bytes
from unisono.core.dtypes import Kind
from unisono.core.runtime import Deadline
from unisono.core.waits import wait_all
from unisono.core.work import Work
from unisono.errors import CollectiveMismatch, UsageError
from unisono.train.error_feedback import ErrorFeedback, read_wide, write_narrow
from unisono.train.pipeline import Pipeline, collectives_of
from unisono.train.tree import Leaf, leaves_of

__all__ = ["BUCKET_BYTES", "GradientAverager", "average_gradients", "broadcast_parameters"]

T = TypeVar("T")

# As in torch's DistributedDataParallel: large enough for full bandwidth, small enough to begin early.
BUCKET_BYTES: Final = 25 * 2**20


def average_gradients(
    comm: Communicator,
    arrays: T,
    bucket_bytes: int = BUCKET_BYTES,
    *,
    compression: ErrorFeedback | None = None,
    timeout: float | None = None,
) -> T:
    """Replace every array by its mean over all ranks, in place, and return `arrays`. Every rank calls it.

    Args:
        comm: the ranks.
        arrays: an array of floats, or dicts, lists, tuples, named tuples and dataclasses of arrays, nested:
            NumPy arrays or torch tensors, of equal structure on all ranks.
        bucket_bytes: how many bytes travel together.
        compression: sends less, and keeps the error for the next call.
        timeout: seconds for all of it.

    Raises:
        UsageError: an array holds integers, or cannot be written to; nothing was sent.
        DeadlineExceeded: it took longer than `timeout`; the arrays hold anything.
    """
    averager = GradientAverager(comm, bucket_bytes, compression=compression, timeout=timeout)
    averager.add(arrays)
    averager.finish()
    return arrays


class GradientAverager:
    """Averages gradients over all ranks while more of them are computed.

        averager = uni.train.GradientAverager(comm)
        for layer in reversed(layers):
            averager.add(layer.backward())
        averager.finish()

    Every rank adds arrays of the same types and shapes in the same order. They belong to the averager until
    `finish` returns; then they hold the means, and it can be used again. `timeout` is the seconds from the
    first bucket that is started to the end of `finish`.
    """

    def __init__(
        self,
        comm: Communicator,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        compression: ErrorFeedback | None = None,
        timeout: float | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise UsageError(f"bucket_bytes is {bucket_bytes}; allowed: 1 or more")
        if compression is not None and not isinstance(compression, ErrorFeedback):
            raise UsageError(
                f"compression is {compression!r}; allowed: an ErrorFeedback, which keeps what was not sent",
                next_step="make uni.train.ErrorFeedback(uni.train.TopK(0.1)) once, and pass it in every step",
            )
        self._comm = comm
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._pipeline = Pipeline(collectives_of(comm, self._left_s))
        self._timeout_s = timeout
        self._deadline: Deadline | None = None  # until `finish`, once a bucket is started
        self._waiting: list[Leaf] = []
        self._started: list[Leaf] = []
        self._works: list[Work[Any]] = []
        self._buckets = 0

    def add(self, arrays: Any) -> None:
        """Add arrays, or a tree of arrays, and start every bucket that is full.

        Raises:
            UsageError: an array holds integers, or cannot be written to; none of `arrays` was sent.
        """
        leaves = leaves_of(arrays, "arrays")
        for leaf in leaves:
            _check_float(leaf, self._compression is not None)
        full = list(_buckets([*self._waiting, *leaves], self._bucket_bytes))
        self._waiting = full.pop() if full and _bytes_of(full[-1]) < self._bucket_bytes else []
        for bucket in full:
            self._start(bucket)

    def finish(self) -> None:
        """Start what is left, and wait until all arrays that were added hold their mean."""
        if self._waiting:
            self._start(self._waiting)
        works, leaves = self._works, self._started
        self._waiting, self._works, self._started, self._buckets = [], [], [], 0
        try:
            wait_all(works)
            self._pipeline.finish()
        finally:
            self._deadline = None
        for leaf in leaves:
            leaf.write_back()

    def _left_s(self) -> float | None:
        """Seconds for the next collective."""
        runtime = self._comm.backend.runtime
        if self._deadline is None:
            self._deadline = runtime.deadline(self._timeout_s)
        return self._deadline.remaining(runtime.now())

    def _start(self, bucket: list[Leaf]) -> None:
        number, self._buckets = self._buckets, self._buckets + 1
        self._started += bucket
        if self._compression is None:
            self._works.append(self._reduce(bucket))
        else:
            self._compress(self._compression, bucket, number)

    def _reduce(self, bucket: list[Leaf]) -> Work[Any]:
        start = self._comm.start
        if len(bucket) == 1:  # not packed: where it lies
            return start.all_reduce(_operand(bucket[0]), "mean", timeout=self._left_s())
        return start.all_reduce_many([_operand(leaf) for leaf in bucket], "mean", timeout=self._left_s())

    def _compress(self, compression: ErrorFeedback, bucket: list[Leaf], number: int) -> None:
        arrays = [leaf.array for leaf in bucket]
        parts = [read_wide(array) for array in arrays]
        joined = np.concatenate(parts)
        exchange = compression.exchange(
            joined, "mean", key=f"bucket {number}", rank=self._comm.rank, size=self._comm.size
        )

        def unpack(mean: np.ndarray[Any, Any]) -> None:
            cuts = np.cumsum([array.count for array in arrays])[:-1]
            for array, part in zip(arrays, np.split(mean, cuts), strict=True):
                write_narrow(array, part)

        self._pipeline.add(exchange, unpack)


def broadcast_parameters(comm: Communicator, arrays: T, root: int = 0, *, timeout: float | None = None) -> T:
    """Copy every array of `root` into the same array of all other ranks, and return `arrays`.

    Takes the same trees as `average_gradients`, of any element type, and `timeout` seconds at most.

    Raises:
        UsageError: an array cannot be written to; nothing was sent.
        CollectiveMismatch: the trees differ in their structure, types or shapes; on all ranks.
        DeadlineExceeded: it took longer than `timeout`; the arrays hold anything.
    """
    runtime = comm.backend.runtime
    deadline = runtime.deadline(timeout)
    leaves = leaves_of(arrays, "arrays")
    _check_alike(comm, leaves, root, timeout)
    buckets = list(_buckets(leaves, BUCKET_BYTES))
    works, packed = [], []
    for bucket in buckets:
        # One array travels where it lies, several as their bytes.
        joined = None if len(bucket) == 1 else np.concatenate([_bytes(leaf) for leaf in bucket])
        packed.append(joined)
        x = _bytes(bucket[0]) if joined is None else joined
        works.append(comm.start.broadcast(x, root, timeout=deadline.remaining(runtime.now())))
    wait_all(works)
    for bucket, joined in zip(buckets, packed, strict=True):
        if joined is not None:
            cuts = np.cumsum([leaf.array.flat.nbytes for leaf in bucket])[:-1]
            for leaf, part in zip(bucket, np.split(joined, cuts), strict=True):
                _bytes(leaf)[...] = part
        for leaf in bucket:
            leaf.write_back()
    return arrays


def _check_float(leaf: Leaf, is_compressed: bool) -> None:
    kind = leaf.array.dtype.kind
    if kind is Kind.FLOAT or (kind is Kind.COMPLEX and not is_compressed):
        return
    allowed = "floating-point" if is_compressed else "floating-point and complex"
    raise UsageError(f"{leaf.path} has dtype {leaf.array.dtype}, which has no mean; allowed: {allowed} types")


def _buckets(leaves: Iterable[Leaf], bucket_bytes: int) -> Iterator[list[Leaf]]:
    """Leaves in their order, cut after the one that fills a bucket."""
    bucket: list[Leaf] = []
    for leaf in leaves:
        bucket.append(leaf)
        if _bytes_of(bucket) >= bucket_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _bytes_of(bucket: list[Leaf]) -> int:
    return sum(leaf.array.flat.nbytes for leaf in bucket)


def _operand(leaf: Leaf) -> Any:
    """What a verb takes for the memory of a leaf: the user's object unless it was copied."""
    array = leaf.array
    return array.family.give(array.flat, array.shape, array.dtype) if leaf.is_copy else leaf.given


def _bytes(leaf: Leaf) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(as_bytes(leaf.array.flat))


def _check_alike(comm: Communicator, leaves: list[Leaf], root: int, timeout: float | None) -> None:
    described = zlib.crc32("\n".join(map(str, leaves)).encode())
    digests = comm.all_gather(np.array([len(leaves), described], np.int64), timeout=timeout)
    other = [rank for rank in range(comm.size) if not np.array_equal(digests[rank], digests[root])]
    if other:
        counts = ", ".join(f"rank {rank}: {digests[rank][0]} arrays" for rank in (root, *other))
        raise CollectiveMismatch(
            f"the arrays of ranks {other} differ from those of rank {root} in their places, types or shapes",
            report=counts,
            cause=counts,
            next_step="build the same tree on all ranks before broadcast_parameters",
        )

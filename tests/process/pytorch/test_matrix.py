"""Every call of torch.distributed, by element type, memory layout and size, with Gloo as the oracle.

Gloo supports few types and only contiguous memory, so it runs each call once with wide numbers. Its result is
converted and compared with ours; the conversion is exact for the small numbers used here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.torch_ranks import Pair, TorchPool, torch_pool

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128, torch.complex32)
INTEGERS = tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
NUMBERS = (*FLOATS, *INTEGERS, *COMPLEX)
OTHERS = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)

# Numbers of rows of three elements: none, one, some, and more than an eager message holds.
ROWS = (0, 1, 7, 1021, 23_003)
ROWS_QUICK = (0, 1, 7, 1021)
COLUMNS = 3


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type with which Gloo computes for this type."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def numbers(rank: int, rows: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small numbers that differ by rank and index; truth values for bool."""
    real = ((torch.arange(rows * COLUMNS) * 3 + rank * 5 + seed) % 4).reshape(rows, COLUMNS)
    if dtype is torch.bool:
        return (real % 2).to(torch.int64)
    return real.to(wide(dtype)) * (1 + 2j) if dtype.is_complex else real.to(wide(dtype))


# -- memory layouts -----------------------------------------------------------------------------------------


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def strided(x: torch.Tensor) -> torch.Tensor:
    base = torch.zeros(x.shape[0], 2 * COLUMNS, dtype=x.dtype)
    base[:, ::2] = x
    return base[:, ::2]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def with_offset(x: torch.Tensor) -> torch.Tensor:
    base = torch.zeros(x.shape[0] + 1, COLUMNS, dtype=x.dtype)
    base[1:] = x
    return base[1:]


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_(x.is_floating_point() or x.is_complex())


def inferred(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def strided_inferred(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return strided(x)


# By name: the memory layout of a tensor, and the context around the call.
LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]] = {
    "plain": (plain, contextlib.nullcontext),
    "strided": (strided, contextlib.nullcontext),
    "transposed": (transposed, contextlib.nullcontext),
    "offset": (with_offset, contextlib.nullcontext),
    "gradient": (with_gradient, contextlib.nullcontext),
    "inference": (inferred, torch.inference_mode),
    "strided inference": (strided_inferred, torch.inference_mode),
    "another default device": (strided, lambda: torch.device("meta")),
}


# -- calls --------------------------------------------------------------------------------------------------


@dataclass
class Ask:
    """One call: its group, type, layout and size."""

    group: Any
    rank: int
    size: int
    rows: int
    dtype: torch.dtype
    make: Callable[[torch.Tensor], torch.Tensor]
    around: Callable[[], Any]
    is_async: bool

    def given(self, rows: int | None = None, seed: int = 0) -> torch.Tensor:
        """The input of this rank."""
        wide_ones = numbers(self.rank, self.rows if rows is None else rows, self.dtype, seed)
        return self.make(wide_ones.to(self.dtype))

    def empty(self, rows: int | None = None) -> torch.Tensor:
        """An output tensor."""
        count = self.rows if rows is None else rows
        return self.make(torch.ones(count, COLUMNS, dtype=wide(self.dtype)).to(self.dtype))

    def run(self, call: Callable[..., Any], *args: Any, **named: Any) -> None:
        """Make the call, blocking or not."""
        with self.around():
            work = call(*args, **named, group=self.group, async_op=self.is_async)
            if work is not None:
                work.wait()

    @property
    def op(self) -> Any:
        """The sum, or for truth values its equivalent: Gloo has only numbers."""
        is_stand_in = self.dtype is torch.int64 and self.make is stand_in
        return dist.ReduceOp.MAX if is_stand_in and self.is_truth else dist.ReduceOp.SUM

    is_truth: bool = False


def stand_in(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor of Gloo's type."""
    return x.clone()


Call = Callable[[Ask], list[torch.Tensor]]
CALLS: dict[str, Call] = {}
REDUCTIONS: set[str] = set()


def call(fn: Call) -> Call:
    CALLS[fn.__name__] = fn
    return fn


def reduction(fn: Call) -> Call:
    REDUCTIONS.add(fn.__name__)
    return call(fn)


@reduction
def all_reduce(ask: Ask) -> list[torch.Tensor]:
    x = ask.given()
    ask.run(dist.all_reduce, x, ask.op)
    return [x]


@reduction
def reduce(ask: Ask) -> list[torch.Tensor]:
    x = ask.given()
    ask.run(dist.reduce, x, op=ask.op, group_dst=1)
    return [x] if ask.rank == 1 else []


@reduction
def reduce_scatter_single(ask: Ask) -> list[torch.Tensor]:
    out = ask.empty()
    ask.run(dist.reduce_scatter_single, out, ask.given(ask.rows * ask.size), ask.op)
    return [out]


@reduction
def reduce_scatter(ask: Ask) -> list[torch.Tensor]:
    out = ask.empty()
    ask.run(dist.reduce_scatter, out, [ask.given(seed=k) for k in range(ask.size)], ask.op)
    return [out]


@reduction
def reduce_scatter_of_uneven_parts(ask: Ask) -> list[torch.Tensor]:
    counts = [ask.rows + k for k in range(ask.size)]
    parts = [ask.given(n, seed=k) for k, n in enumerate(counts)]
    if ask.make is stand_in:  # Gloo refuses it
        for part in parts:
            ask.run(dist.all_reduce, part, ask.op)
        return [parts[ask.rank]]
    out = ask.empty(counts[ask.rank])
    ask.run(dist.reduce_scatter, out, parts, ask.op)
    return [out]


@call
def broadcast(ask: Ask) -> list[torch.Tensor]:
    x = ask.given()
    ask.run(dist.broadcast, x, group_src=1)
    return [x]


@call
def all_gather(ask: Ask) -> list[torch.Tensor]:
    outs = [ask.empty() for _ in range(ask.size)]
    ask.run(dist.all_gather, outs, ask.given())
    return outs


@call
def all_gather_of_uneven_parts(ask: Ask) -> list[torch.Tensor]:
    outs = [ask.empty(ask.rows + k) for k in range(ask.size)]
    mine = ask.given(ask.rows + ask.rank)
    if ask.make is not stand_in:
        ask.run(dist.all_gather, outs, mine)
        return outs
    outs[ask.rank].copy_(mine)
    for root, out in enumerate(outs):
        ask.run(dist.broadcast, out, group_src=root)
    return outs


@call
def all_gather_single(ask: Ask) -> list[torch.Tensor]:
    out = ask.empty(ask.rows * ask.size)
    ask.run(dist.all_gather_single, out, ask.given())
    return [out]


@call
def gather(ask: Ask) -> list[torch.Tensor]:
    if ask.make is stand_in:  # Gloo refuses complex numbers
        every = all_gather(ask)
        return every if ask.rank == 1 else []
    outs = [ask.empty() for _ in range(ask.size)] if ask.rank == 1 else None
    ask.run(dist.gather, ask.given(), outs, group_dst=1)
    return outs or []


@call
def scatter(ask: Ask) -> list[torch.Tensor]:
    out = ask.empty()
    parts = [ask.given(seed=k) for k in range(ask.size)] if ask.rank == 1 else None
    ask.run(dist.scatter, out, parts, group_src=1)
    return [out]


@call
def all_to_all(ask: Ask) -> list[torch.Tensor]:
    outs = [ask.empty() for _ in range(ask.size)]
    ask.run(dist.all_to_all, outs, [ask.given(seed=k) for k in range(ask.size)])
    return outs


@call
def all_to_all_single(ask: Ask) -> list[torch.Tensor]:
    out = ask.empty(ask.rows * ask.size)
    ask.run(dist.all_to_all_single, out, ask.given(ask.rows * ask.size))
    return [out]


@call
def all_to_all_single_with_splits(ask: Ask) -> list[torch.Tensor]:
    given = [ask.rows + (ask.rank + k) % 3 for k in range(ask.size)]
    taken = given  # the same in both directions
    out = ask.empty(sum(taken))
    ask.run(dist.all_to_all_single, out, ask.given(sum(given)), taken, given)
    return [out]


@call
def send_and_recv(ask: Ask) -> list[torch.Tensor]:
    given, out = ask.given(), ask.empty()
    with ask.around():
        if ask.rank == 0:
            (dist.isend if ask.is_async else dist.send)(given, group=ask.group, group_dst=1)
        elif ask.rank == 1:
            got = (dist.irecv if ask.is_async else dist.recv)(out, group=ask.group, group_src=0)
            if ask.is_async:
                got.wait()
            return [out]
    return []


# -- the matrix ---------------------------------------------------------------------------------------------


def types_of(name: str) -> tuple[torch.dtype, ...]:
    return (*NUMBERS, torch.bool) if name in REDUCTIONS else (*NUMBERS, *OTHERS)


def quick_cases(name: str) -> Iterator[tuple[torch.dtype, str, int]]:
    """Every type in one layout and size, and every layout in every size."""
    turn = itertools.cycle(itertools.product(LAYOUTS, ROWS_QUICK[1:]))
    for dtype in types_of(name):
        yield dtype, *next(turn)
    for layout, rows in itertools.product(LAYOUTS, ROWS_QUICK):
        yield torch.float32, layout, rows


def all_cases(name: str) -> Iterator[tuple[torch.dtype, str, int]]:
    yield from itertools.product(types_of(name), LAYOUTS, ROWS)


def compare(name: str, cases: Callable[[str], Iterator[tuple[torch.dtype, str, int]]], pair: Pair) -> None:
    warnings.filterwarnings("ignore", "ComplexHalf")  # torch warns that this is experimental
    expected: dict[Any, list[torch.Tensor]] = {}
    for number, (dtype, layout, rows) in enumerate(cases(name)):
        is_truth = dtype is torch.bool
        key = (wide(dtype), is_truth, rows)
        if key not in expected:
            kind = torch.bool if is_truth else wide(dtype)
            oracle = Ask(
                pair.gloo, pair.rank, pair.size, rows, kind, stand_in, contextlib.nullcontext, False, is_truth
            )
            if is_truth:
                oracle.dtype = torch.int64
                oracle.given = functools.partial(truths, oracle)  # type: ignore[method-assign]
            expected[key] = CALLS[name](oracle)
        make, around = LAYOUTS[layout]
        ask = Ask(pair.ours, pair.rank, pair.size, rows, dtype, make, around, bool(number % 2))
        got = CALLS[name](ask)
        assert len(got) == len(expected[key])
        for ours, gloos in zip(got, expected[key], strict=True):
            assert torch.equal(ours.detach().to(wide(dtype)), gloos), (name, dtype, layout, rows, ours, gloos)
        pair.progress()


def truths(ask: Ask, rows: int | None = None, seed: int = 0) -> torch.Tensor:
    """Convert Gloo's integers to truth values."""
    return numbers(ask.rank, ask.rows if rows is None else rows, torch.bool, seed)


CHECKS: dict[str, Callable[[Pair], None]] = {
    f"{name}{how}": functools.partial(compare, name, cases)
    for name in CALLS
    for how, cases in (("", quick_cases), (" in full", all_cases))
}


@pytest.fixture(scope="module")
def pool() -> Iterator[TorchPool]:
    with torch_pool(CHECKS, 4) as made:
        yield made


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", list(CALLS))
def test_call(pool: TorchPool, name: str, size: int) -> None:
    pool.run(name, size)


@pytest.mark.more
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", list(CALLS))
def test_call_in_full(pool: TorchPool, name: str, size: int) -> None:
    pool.run(f"{name} in full", size)

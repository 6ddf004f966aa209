"""torch.distributed's calls on Gloo and on unisono: two groups of the same processes, in alternating turns.

    python bench/torch_collectives.py [-n 2,4] [--sizes 8,64Ki,16Mi] [--only "gather;scatter"] [--rounds 7]
                                      [--turn 0.1] [--quick] [--keep torch.json [--again]] [--seconds 100]

Each call as a user writes it: blocking, started and waited for, started and waited for by its future; to and
fro between two ranks; single tensors, lists of chunks of one tensor ("row"), lists of tensors of their own;
uneven splits; several as one (coalesced). The size is that of the tensor that a rank gives, or of all
it gets. Both results are compared before anything is measured. A ratio is Gloo's time over ours, round by
round: the median, and the least and the most.

With `--keep` the figures go into a file, and cases that are in it are not measured again; `--seconds` ends
the run. So a long table is measured in short slices, and torch_page.py makes the page of the file.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch_figures import Call, Seconds, Slice, add_arguments
from torch_groups import GLOO, OURS, agreed, compete, ratios, run_ranks

SIZES = "8,1Ki,16Ki,64Ki,1Mi,4Mi,16Mi,64Mi"
QUICK_SIZES = "8,64Ki,4Mi"
TIMES_MAX = 2000
UNITS = {"Ki": 10, "Mi": 20}

# group, rank, ranks, elements -> the call, and the tensors that it writes
Form = Callable[[Any, int, int, int], tuple[Callable[[], Any], list[Tensor]]]


def values(rank: int, elements: int) -> Tensor:
    """Sums of these are exact, in whatever order."""
    return (torch.arange(elements) % 97 + rank).to(torch.float32)


def in_place(call: Callable[[Tensor, Any], Any]) -> Form:
    """A call that changes its tensor. A sum that grows ends at infinity, which takes no longer."""

    def form(group: Any, rank: int, ranks: int, elements: int) -> tuple[Callable[[], Any], list[Tensor]]:
        x = values(rank, elements)
        return lambda: call(x, group), [x]

    return form


def parts(
    call: Callable[[Tensor, list[Tensor], Any, int], Any], *, gets_all: bool, is_row: bool = False
) -> Form:
    """A call with a list of `ranks` parts, given or got: chunks of one tensor, or tensors of their own."""

    def form(group: Any, rank: int, ranks: int, elements: int) -> tuple[Callable[[], Any], list[Tensor]]:
        part = max(1, elements // ranks)
        whole = list(values(rank, ranks * part).chunk(ranks))
        whole = whole if is_row else [each.clone() for each in whole]
        one = values(rank, part)
        return lambda: call(one, whole, group, rank), whole if gets_all else [one]

    return form


def single(call: Callable[[Tensor, Tensor, Any], Any], *, gets_all: bool) -> Form:
    """The same with the parts in one tensor."""

    def form(group: Any, rank: int, ranks: int, elements: int) -> tuple[Callable[[], Any], list[Tensor]]:
        part = max(1, elements // ranks)
        whole, one = values(rank, ranks * part), values(rank, part)
        return lambda: call(one, whole, group), [whole if gets_all else one]

    return form


def exchange(*, is_async: bool = False, is_uneven: bool = False) -> Form:
    """all_to_all of one tensor; uneven: a rank gives and gets one element more for each rank that follows."""

    def form(group: Any, rank: int, ranks: int, elements: int) -> tuple[Callable[[], Any], list[Tensor]]:
        part = max(1, elements // ranks)
        splits = [part + (rank + other) % ranks for other in range(ranks)] if is_uneven else [part] * ranks
        x, out = values(rank, sum(splits)), torch.empty(sum(splits))
        given = (splits, splits) if is_uneven else (None, None)

        def call() -> None:
            work = dist.all_to_all_single(out, x, *given, group=group, async_op=is_async)
            if work is not None:
                work.wait()

        return call, [out]

    return form


def exchange_lists(
    group: Any, rank: int, ranks: int, elements: int
) -> tuple[Callable[[], Any], list[Tensor]]:
    part = max(1, elements // ranks)
    xs, outs = [values(rank + k, part) for k in range(ranks)], [torch.empty(part) for _ in range(ranks)]
    return lambda: dist.all_to_all(outs, xs, group=group), outs


def coalesced(group: Any, rank: int, ranks: int, elements: int) -> tuple[Callable[[], Any], list[Tensor]]:
    """Eight tensors as one operation."""
    xs = [values(rank + k, max(1, elements // 8)) for k in range(8)]

    def call() -> None:
        with dist._coalescing_manager(group):
            for x in xs:
                dist.all_reduce(x, group=group)

    return call, xs


def to_and_fro(send: Callable[..., Any], recv: Callable[..., Any]) -> Form:
    """From rank 0 to rank 1 and back; other ranks have nothing to do."""

    def form(group: Any, rank: int, ranks: int, elements: int) -> tuple[Callable[[], Any], list[Tensor]]:
        x = values(0, elements)

        def call() -> None:
            if rank == 0:
                send(x, 1, group=group)
                recv(x, 1, group=group)
            elif rank == 1:
                recv(x, 0, group=group)
                send(x, 0, group=group)

        return call, [x]

    return form


def at_root(rank: int, whole: list[Tensor]) -> list[Tensor] | None:
    return whole if rank == 0 else None


FORMS: dict[str, Form] = {
    "all_reduce": in_place(lambda x, group: dist.all_reduce(x, group=group)),
    "all_reduce, async": in_place(lambda x, group: dist.all_reduce(x, group=group, async_op=True).wait()),
    "all_reduce, future": in_place(
        lambda x, group: dist.all_reduce(x, group=group, async_op=True).get_future().wait()
    ),
    "broadcast": in_place(lambda x, group: dist.broadcast(x, 0, group=group)),
    "broadcast, async": in_place(lambda x, group: dist.broadcast(x, 0, group=group, async_op=True).wait()),
    "all_reduce, 8 coalesced": coalesced,
    "reduce": in_place(lambda x, group: dist.reduce(x, 0, group=group)),
    "all_gather_single": single(
        lambda one, whole, group: dist.all_gather_single(whole, one, group=group), gets_all=True
    ),
    "all_gather_single, async": single(
        lambda one, whole, group: dist.all_gather_single(whole, one, group=group, async_op=True).wait(),
        gets_all=True,
    ),
    "all_gather": parts(
        lambda one, whole, group, rank: dist.all_gather(whole, one, group=group), gets_all=True
    ),
    "all_gather, row": parts(
        lambda one, whole, group, rank: dist.all_gather(whole, one, group=group), gets_all=True, is_row=True
    ),
    "reduce_scatter_single": single(
        lambda one, whole, group: dist.reduce_scatter_single(one, whole, group=group), gets_all=False
    ),
    "reduce_scatter_single, async": single(
        lambda one, whole, group: dist.reduce_scatter_single(one, whole, group=group, async_op=True).wait(),
        gets_all=False,
    ),
    "reduce_scatter": parts(
        lambda one, whole, group, rank: dist.reduce_scatter(one, whole, group=group), gets_all=False
    ),
    "reduce_scatter, row": parts(
        lambda one, whole, group, rank: dist.reduce_scatter(one, whole, group=group),
        gets_all=False,
        is_row=True,
    ),
    "gather": parts(
        lambda one, whole, group, rank: dist.gather(one, at_root(rank, whole), 0, group=group), gets_all=True
    ),
    "gather, row": parts(
        lambda one, whole, group, rank: dist.gather(one, at_root(rank, whole), 0, group=group),
        gets_all=True,
        is_row=True,
    ),
    "scatter": parts(
        lambda one, whole, group, rank: dist.scatter(one, at_root(rank, whole), 0, group=group),
        gets_all=False,
    ),
    "scatter, row": parts(
        lambda one, whole, group, rank: dist.scatter(one, at_root(rank, whole), 0, group=group),
        gets_all=False,
        is_row=True,
    ),
    "all_to_all": exchange_lists,
    "all_to_all_single": exchange(),
    "all_to_all_single, async": exchange(is_async=True),
    "all_to_all_single, uneven": exchange(is_uneven=True),
    "send, recv": to_and_fro(dist.send, dist.recv),
    "isend, irecv": to_and_fro(
        lambda *args, **kwargs: dist.isend(*args, **kwargs).wait(),
        lambda *args, **kwargs: dist.irecv(*args, **kwargs).wait(),
    ),
    "barrier": lambda group, rank, ranks, elements: (lambda: dist.barrier(group=group), []),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--sizes", default=None, help=f"bytes ({SIZES})")
    parser.add_argument("--only", default="", help="calls whose name begins so, separated by semicolons")
    parser.add_argument("--quick", action="store_true", help="two ranks, three sizes, three short rounds")
    args = parser.parse_args()
    numbers = [int(n) for n in (args.n or ("2" if args.quick else "2,4")).split(",")]
    sizes = [as_bytes(size) for size in (args.sizes or (QUICK_SIZES if args.quick else SIZES)).split(",")]
    rounds = args.rounds or (3 if args.quick else 7)
    turn_s = args.turn or (0.02 if args.quick else 0.1)
    forms = [form for form in FORMS if form.startswith(tuple(args.only.split(";")))]
    here = Slice(args, "torch_collectives.py")
    for ranks in numbers:
        cases = here.missing(
            Call(ranks, form, nbytes)
            for form in forms
            for nbytes in (sizes[:1] if form == "barrier" else sizes)
        )
        if cases and here.left_s() > 0:
            print(f"{ranks} ranks; us per call, median; gloo / unisono: median (least to most)", flush=True)
            here.figures.calls |= run_ranks(rank, ranks, cases, rounds, turn_s, here.left_s)
    here.end()


def as_bytes(size: str) -> int:
    return int(size[:-2]) << UNITS[size[-2:]] if size[-2:] in UNITS else int(size)


def rank(
    rank: int,
    groups: dict[str, Any],
    cases: list[Call],
    rounds: int,
    turn_s: float,
    left_s: Callable[[], float],
) -> dict[Call, Seconds]:
    """One rank of both backends, until the time is over."""
    measured = {}
    for case in cases:
        if agreed(left_s()) <= 0:
            break
        form = FORMS[case.form]
        calls = {each: form(group, rank, case.ranks, case.nbytes // 4) for each, group in groups.items()}
        check(case.form, calls)
        turns = {each: call for each, (call, _) in calls.items()}
        seconds = measured[case] = compete(turns, rounds, turn_s, TIMES_MAX)
        if rank == 0:
            show(case, seconds)
    return measured


def check(name: str, calls: dict[str, tuple[Callable[[], Any], list[Tensor]]]) -> None:
    """Both give the same results. What a call must not look at is the same before."""
    for call, _ in calls.values():
        call()
    (_, theirs), (_, ours) = calls[GLOO], calls[OURS]
    if not all(map(torch.equal, theirs, ours)) and not (name == "reduce" and dist.get_rank() != 0):
        raise SystemExit(f"{name} of {theirs[0].numel()} elements: results differ")


def show(case: Call, seconds: Seconds) -> None:
    theirs, ours = (f"{statistics.median(seconds[each]) * 1e6:12,.1f}" for each in (GLOO, OURS))
    ratio = ratios(seconds[GLOO], seconds[OURS])
    print(f"{case.form:>29} {case.nbytes:>11,} {theirs} {ours}  {ratio}", flush=True)


if __name__ == "__main__":
    main()

"""Runs bound plans on numbers, one round at a time, without the verifier; and a NumPy oracle for them."""

from __future__ import annotations

import numpy as np

from unisono.plans import BoundPlan, BoundStep, Buf, Copy, Problem, Recv, RecvReduce, Reduce, Send, Slice

__all__ = ["Numbers", "contributions", "expected"]


class Numbers:
    """Runs the plans of all ranks: `given[r]` is what rank r contributes, in `in` or, in place, in `out`."""

    def __init__(self, plans: list[BoundPlan], given: list[np.ndarray]) -> None:
        self.plans = plans
        self.memory = [
            {
                Buf.IN: own[: plan.in_count].copy(),
                Buf.OUT: np.resize(own, plan.out_count)
                if plan.problem.collective in ("all_reduce", "broadcast", "reduce")
                else np.full(plan.out_count, -1, own.dtype),
                Buf.TMP: np.full(plan.tmp_count, -1, own.dtype),
            }
            for plan, own in zip(plans, given, strict=True)
        ]

    def run(self) -> list[np.ndarray]:
        """Run all rounds; return the `out` of every rank."""
        for number in range(len(self.plans[0].rounds)):
            rounds = [_parts(plan.rounds[number]) for plan in self.plans]
            for rank, (before, _, _) in enumerate(rounds):
                self._run_local(rank, before)
            self._run_messages([messages for _, messages, _ in rounds])
            for rank, (_, _, after) in enumerate(rounds):
                self._run_local(rank, after)
        return [own[Buf.OUT] for own in self.memory]

    def _run_messages(self, by_rank: list[list[BoundStep]]) -> None:
        wires: dict[tuple[int, int], list[np.ndarray]] = {}
        for rank, steps in enumerate(by_rank):
            for step in steps:
                if isinstance(step, Send):
                    wires.setdefault((rank, step.peer), []).append(self._view(rank, step.src).copy())
        for rank, steps in enumerate(by_rank):
            for step in steps:
                if isinstance(step, Recv | RecvReduce):
                    arrived, dst = wires[step.peer, rank].pop(0), self._view(rank, step.dst)
                    assert arrived.size == dst.size, (rank, step)
                    dst[:] = _sum(arrived, dst, step.left) if isinstance(step, RecvReduce) else arrived
        assert not any(wires.values()), "a message that is not received"

    def _run_local(self, rank: int, steps: list[BoundStep]) -> None:
        for step in steps:
            assert isinstance(step, Copy | Reduce)
            src, dst = self._view(rank, step.src), self._view(rank, step.dst)
            assert src.size == dst.size, (rank, step)
            dst[:] = _sum(src, dst, step.left) if isinstance(step, Reduce) else src

    def _view(self, rank: int, slice_: Slice[int]) -> np.ndarray:
        assert 0 <= slice_.start <= slice_.stop <= self.memory[rank][slice_.buf].size, slice_
        return self.memory[rank][slice_.buf][slice_.start : slice_.stop]


def _sum(other: np.ndarray, own: np.ndarray, left: bool) -> np.ndarray:
    return other + own if left else own + other


def _parts(steps: tuple[BoundStep, ...]) -> tuple[list[BoundStep], list[BoundStep], list[BoundStep]]:
    """Cut a round into local steps, messages, local steps."""
    at = [place for place, step in enumerate(steps) if not isinstance(step, Copy | Reduce)]
    if not at:
        return list(steps), [], []
    return list(steps[: at[0]]), list(steps[at[0] : at[-1] + 1]), list(steps[at[-1] + 1 :])


def contributions(problem: Problem) -> list[np.ndarray]:
    """The input of every rank: numbers that depend on rank and index, and whose sums are exact."""
    size, counts = problem.size, problem.counts
    lengths = {
        "all_gather": counts,
        "gather": counts,
        "scatter": [sum(counts)] * size,
        "reduce_scatter": [sum(counts)] * size,
        "all_to_all": [sum(counts[rank * size : (rank + 1) * size]) for rank in range(size)],
        "barrier": [0] * size,
    }.get(problem.collective, list(counts) * size)
    return [np.arange(length, dtype=np.int64) * 17 + 10_007 * (r + 1) for r, length in enumerate(lengths)]


def expected(problem: Problem, given: list[np.ndarray]) -> list[np.ndarray | None]:
    """The expected result of every rank; None for a rank without a result."""
    size, counts, root = problem.size, problem.counts, problem.root
    nothing: list[np.ndarray | None] = [None] * size

    def only(rank: int, value: np.ndarray) -> list[np.ndarray | None]:
        return [value if rank == r else None for r in range(size)]

    def cut(whole: np.ndarray, lengths: tuple[int, ...]) -> list[np.ndarray]:
        return np.split(whole, np.cumsum(lengths)[:-1])

    match problem.collective:
        case "all_reduce":
            return [sum(given)] * size
        case "reduce":
            return only(root, sum(given))
        case "broadcast":
            return [given[root]] * size
        case "all_gather":
            return [np.concatenate(given)] * size
        case "gather":
            return only(root, np.concatenate(given))
        case "scatter":
            return list(cut(given[root], counts))
        case "reduce_scatter":
            return list(cut(sum(given), counts))
        case "all_to_all":
            rows = [cut(given[s], counts[s * size : (s + 1) * size]) for s in range(size)]
            return [np.concatenate([row[d] for row in rows]) for d in range(size)]
        case "scan":
            return [sum(given[: rank + 1]) for rank in range(size)]
        case "exscan":
            return [sum(given[:rank]) if rank else None for rank in range(size)]
    return nothing

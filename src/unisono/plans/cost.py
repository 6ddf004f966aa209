"""What a plan costs: rounds, messages, bytes and the predicted time.

Pure: nothing here measures. The model: all messages of a round are in flight together, in both directions,
and a round takes

    the latency of its slowest link + the handling of each message
    + the largest of: bytes sent and bytes received over the links' rate (`crowding` reduces the rate when
      several peers share it; a message that the receiver fetches costs its sender nothing), and bytes reduced
      on arrival over the reduce rate
    + bytes copied and reduced locally over the reduce rate

An empty round is a wait for the next round that is not empty, and takes as long as that one. Through the
rounds of a pipeline go pieces, one after the other: it takes as many rounds more as there are pieces after
the first, each of a piece's length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from unisono.plans.layout import is_local, slice_of
from unisono.plans.steps import BoundPlan, BoundStep, Copy, Problem, Recv, RecvReduce, Reduce, Send

__all__ = ["LINKS", "Cost", "Links", "cost", "crosses_hosts", "crossings"]


# A pipeline's pieces: 16 Ki elements (64 KiB of float32), long enough to hide a message's latency. More than
# 64 of them save less than a percent of the time.
_PIECE_COUNT: Final = 16 * 1024
_PIECES_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Links:
    """Speed of links and of reductions; defaults: ranks on one host, and 10 Gbit/s between hosts.

    Rough figures that serve to compare algorithms. They must be the same on every rank.
    """

    latency_s: float = 1e-6
    bytes_per_s: float = 8e9
    reduce_bytes_per_s: float = 10e9
    # CPU time to send or receive one message; a rank handles its messages one after the other.
    message_s: float = 0.5e-6
    # Between hosts. The rate is per host: its ranks that send at the same time share it.
    inter_latency_s: float = 30e-6
    inter_bytes_per_s: float = 1.1e9
    inter_message_s: float = 2e-6
    # Factor on transfer times when several peers are served at once and share a queue.
    crowding: float = 1.1
    # On one host, the receiver copies messages of at least this length out of the sender's memory: that costs
    # the sender nothing, and several receivers can do so at once. 0: never.
    fetch_bytes: int = 0
    # Which measurements (measured.py) take precedence over predictions: shm, tcp, or none.
    kind: str = ""


# By the kind of link between ranks of one host, as measured by bench/tune.py on two cores; "" if unknown.
LINKS: Final[Mapping[str, Links]] = MappingProxyType(
    {
        "": Links(),
        "shm": Links(
            latency_s=0.6e-6,
            bytes_per_s=16e9,
            reduce_bytes_per_s=28e9,
            message_s=0.3e-6,
            fetch_bytes=16 * 1024,
            kind="shm",
        ),
        "tcp": Links(
            latency_s=1e-6, bytes_per_s=2.5e9, reduce_bytes_per_s=28e9, message_s=7.5e-6, kind="tcp"
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one rank. `rounds`: those with messages; `messages`: those that the rank sends."""

    time_s: float = 0.0
    rounds: int = 0
    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_reduced: int = 0


def cost(plan: BoundPlan, links: Links, itemsize: int, crossing: Sequence[int] = ()) -> Cost:
    """Predict what a plan costs its rank.

    `crossing[i]` is the number of ranks of its host that send to other hosts in round i; 1 if not given.
    """
    sends = [step for step in plan.steps if isinstance(step, Send)]
    receives = [step for step in plan.steps if isinstance(step, Recv | RecvReduce)]
    reduces = [step for step in plan.steps if isinstance(step, RecvReduce | Reduce)]
    return Cost(
        time_s=_time_s(plan, links, itemsize, crossing),
        rounds=sum(any(not is_local(step) for step in steps) for steps in plan.rounds),
        messages=len(sends),
        bytes_sent=itemsize * sum(step.src.count for step in sends),
        bytes_received=itemsize * sum(step.dst.count for step in receives),
        bytes_reduced=itemsize * sum(step.dst.count for step in reduces),
    )


def crossings(plans: Sequence[BoundPlan]) -> list[int]:
    """The number of a host's plans that communicate with other hosts, by round."""
    return [
        sum(
            any(
                not isinstance(step, Copy | Reduce) and crosses_hosts(plan.problem, plan.rank, step.peer)
                for step in plan.rounds[round_]
            )
            for plan in plans
        )
        for round_ in range(len(plans[0].rounds))
    ]


def crosses_hosts(problem: Problem, rank: int, peer: int) -> bool:
    """Whether a message between the two ranks leaves the host."""
    return bool(problem.hosts) and problem.hosts[rank] != problem.hosts[peer]


def _time_s(plan: BoundPlan, links: Links, itemsize: int, crossing: Sequence[int]) -> float:
    total_s = next_s = 0.0
    pipelines = {stop: start for start, stop in plan.pipelines if start < stop}
    number = len(plan.rounds)
    while number > 0:
        start = pipelines.get(number, number - 1)
        steps = [step for round_ in plan.rounds[start:number] for step in round_]
        # How many pieces a pipeline has does not depend on the rank: all of its steps have the same length.
        pieces = 1
        if number in pipelines:
            length = max(slice_of(step).count for step in steps) if steps else max(plan.problem.counts)
            pieces = max(1, min(_PIECES_MAX, length // _PIECE_COUNT))
        if steps:
            sharing = max(1, *crossing[start:number]) if crossing else 1
            next_s = _round_s(plan, steps, links, itemsize / pieces, sharing)
        total_s += next_s * (number - start + pieces - 1)
        number = start
    return total_s


def _round_s(
    plan: BoundPlan, steps: Sequence[BoundStep], links: Links, itemsize: float, sharing: int
) -> float:
    """The time of a round by the model above; `sharing` ranks share the host's link to other hosts."""
    latency_s = 0.0
    out, in_ = _Direction(), _Direction()
    bytes_on_arrival = bytes_local = 0.0
    for step in steps:
        nbytes = slice_of(step).count * itemsize
        if isinstance(step, Copy | Reduce):
            bytes_local += nbytes
            continue
        direction = out if isinstance(step, Send) else in_
        direction.messages += 1
        if crosses_hosts(plan.problem, plan.rank, step.peer):
            latency_s = max(latency_s, links.inter_latency_s)
            direction.handling_s += links.inter_message_s
            direction.wire_s += nbytes * sharing / links.inter_bytes_per_s
        else:
            latency_s = max(latency_s, links.latency_s)
            direction.handling_s += links.message_s
            is_fetched = direction is out and 0 < links.fetch_bytes <= nbytes
            direction.wire_s += 0.0 if is_fetched else nbytes / links.bytes_per_s
        bytes_on_arrival += nbytes if isinstance(step, RecvReduce) else 0.0
    flow_s = max(way.wire_s * (links.crowding if way.messages > 1 else 1.0) for way in (out, in_))
    flow_s = max(flow_s, bytes_on_arrival / links.reduce_bytes_per_s)
    handling_s = max(out.handling_s, in_.handling_s)
    return latency_s + handling_s + flow_s + bytes_local / links.reduce_bytes_per_s


@dataclass(slots=True)
class _Direction:
    """The messages of a round in one direction."""

    messages: int = 0
    handling_s: float = 0.0
    wire_s: float = 0.0

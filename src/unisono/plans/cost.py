"""What a plan costs: rounds, messages, bytes and the predicted time.

Knows latencies and rates of links. Does not know algorithms, nor measures anything.

The model. The messages of a round are in flight together, in both directions; a round takes

    latency of its slowest link + handling of each further message
    + the largest of: bytes sent and bytes received over the links' rate, bytes reduced on arrival over the
      reduce rate
    + bytes copied and reduced locally over the reduce rate

An empty round is waiting for the next one that is not, and takes as long as that one.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.plans.layout import is_local, slice_of
from unisono.plans.steps import Copy, Plan, Problem, Recv, RecvReduce, Reduce, Send, Step

__all__ = ["Cost", "Links", "cost"]


@dataclass(frozen=True, slots=True)
class Links:
    """How fast ranks talk and reduce; the defaults are ranks on one host, and 10 Gbit/s between hosts.

    They are orders of magnitude to choose by (bench/ has measured ones), and must be the same on every rank.
    """

    latency_s: float = 1e-6
    bytes_per_s: float = 8e9
    reduce_bytes_per_s: float = 10e9
    # Each message beyond the first of a round: the sender's and receiver's own work.
    message_s: float = 0.3e-6
    inter_latency_s: float = 30e-6
    inter_bytes_per_s: float = 1.1e9


@dataclass(frozen=True, slots=True)
class Cost:
    """One rank's share. `rounds` counts those with messages, `messages` those that it sends."""

    time_s: float = 0.0
    rounds: int = 0
    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_reduced: int = 0


def cost(plan: Plan, links: Links, itemsize: int) -> Cost:
    """Predict what a plan costs its rank."""
    times: list[float | None] = [_round_s(plan, steps, links, itemsize) for steps in plan.rounds]
    sends = [step for step in plan.steps if isinstance(step, Send)]
    receives = [step for step in plan.steps if isinstance(step, Recv | RecvReduce)]
    reduces = [step for step in plan.steps if isinstance(step, RecvReduce | Reduce)]
    return Cost(
        time_s=_with_waiting(times),
        rounds=sum(any(not is_local(step) for step in steps) for steps in plan.rounds),
        messages=len(sends),
        bytes_sent=itemsize * sum(step.src.count for step in sends),
        bytes_received=itemsize * sum(step.dst.count for step in receives),
        bytes_reduced=itemsize * sum(step.dst.count for step in reduces),
    )


def _with_waiting(times: list[float | None]) -> float:
    total, next_s = 0.0, 0.0
    for round_s in reversed(times):
        if round_s is not None:
            next_s = round_s
        total += next_s
    return total


def _round_s(plan: Plan, steps: tuple[Step, ...], links: Links, itemsize: int) -> float | None:
    """Return a round's time by the model above; None if it is empty."""
    if not steps:
        return None
    latency_s = 0.0
    sent = received = 0
    sent_s = received_s = 0.0
    reduced_on_arrival = handled_locally = 0
    for step in steps:
        nbytes = slice_of(step).count * itemsize
        if isinstance(step, Copy | Reduce):
            handled_locally += nbytes
            continue
        is_inter = crosses_hosts(plan.problem, plan.rank, step.peer)
        latency_s = max(latency_s, links.inter_latency_s if is_inter else links.latency_s)
        wire_s = nbytes / (links.inter_bytes_per_s if is_inter else links.bytes_per_s)
        if isinstance(step, Send):
            sent, sent_s = sent + 1, sent_s + wire_s
        else:
            received, received_s = received + 1, received_s + wire_s
            reduced_on_arrival += nbytes if isinstance(step, RecvReduce) else 0
    further = max(sent, received, 1) - 1
    flow_s = max(sent_s, received_s, reduced_on_arrival / links.reduce_bytes_per_s)
    return latency_s + further * links.message_s + flow_s + handled_locally / links.reduce_bytes_per_s


def crosses_hosts(problem: Problem, rank: int, peer: int) -> bool:
    """Whether a message between the two leaves its host."""
    return bool(problem.hosts) and problem.hosts[rank] != problem.hosts[peer]

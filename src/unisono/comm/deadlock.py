"""Deadlocks between processes: whether the waits of ranks close to a chain that nobody can open.

Knows what ranks report: in which operations their threads wait and for whom, what else is under way there,
and whether another thread could act. Does not know how reports travel. Pure.

A rank is *stuck* if every thread of its process that runs Python waits in an operation without a limit, or
for another thread. Of the stuck ranks those are *lost* each of whose waits needs a rank that is lost, too:
nobody is left to end any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from unisono.errors import ranks_text

__all__ = ["ANY_RANK", "ANY_TAG", "Report", "Wait", "cycle_of", "lost_of", "told"]

ANY_TAG = ANY_RANK = -1


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """A thread that waits in an operation: for each of `peers`, or for any of them.

    A collective has a sequence and waits for ranks that have not called it; a message has a tag.
    """

    number: int
    operation: str
    context: int
    peers: tuple[int, ...]
    is_any: bool = False
    sequence: int | None = None
    tag: int = ANY_TAG
    is_send: bool = False
    is_limited: bool = False


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What goes on in the process of one rank, by world ranks.

    `sends` and `receives` are all that is under way: (context, rank, tag). `following` is the number of the
    next collective by context. `helpers` are what else could act there: threads by name, agents.
    """

    rank: int
    waits: tuple[Wait, ...]
    sends: tuple[tuple[int, int, int], ...] = ()
    receives: tuple[tuple[int, int, int], ...] = ()
    following: dict[int, int] = {}
    helpers: tuple[str, ...] = ()

    @property
    def is_stuck(self) -> bool:
        """Whether no thread there can go on by itself."""
        return bool(self.waits) and not self.helpers and not any(wait.is_limited for wait in self.waits)

    def blockers(self) -> set[int]:
        """Whom its threads wait for."""
        return {peer for wait in self.waits for peer in wait.peers}


Reports = Mapping[int, Report]


def lost_of(reports: Reports) -> set[int]:
    """The ranks whose waits can never end."""
    return _closed(reports, lambda report: report.is_stuck, all)


def cycle_of(reports: Reports, start: int) -> list[tuple[int, Wait]]:
    """The chain of waits that closes, certain or not, to which `start` leads; its lowest rank is first."""
    waiting = _closed(reports, lambda report: bool(report.waits), any)
    chain: list[tuple[int, Wait]] = []
    ranks: list[int] = []
    rank = start
    while rank in waiting and rank not in ranks:
        wait = next(w for w in reports[rank].waits if _is_blocked(reports, rank, w, waiting))
        ranks.append(rank)
        chain.append((rank, wait))
        rank = next(peer for peer in wait.peers if _is_hopeless(reports, rank, wait, peer, waiting))
    if rank not in ranks:
        return []
    ring = chain[ranks.index(rank) :]
    lowest = min(range(len(ring)), key=lambda i: ring[i][0])
    return ring[lowest:] + ring[:lowest]


def told(rank: int, wait: Wait) -> str:
    """A wait in words."""
    whom = "any rank" if wait.is_any else ranks_text(wait.peers)
    return f"rank {rank} waits for {whom} in {wait.operation}"


def _closed(
    reports: Reports, is_candidate: Callable[[Report], bool], quantifier: Callable[..., bool]
) -> set[int]:
    """The largest set of candidates whose waits (all of them, or any) need members of the set."""
    members = {rank for rank, report in reports.items() if is_candidate(report)}
    while True:
        kept = {
            rank
            for rank in members
            if quantifier(_is_blocked(reports, rank, wait, members) for wait in reports[rank].waits)
        }
        if kept == members:
            return members
        members = kept


def _is_blocked(reports: Reports, rank: int, wait: Wait, members: set[int]) -> bool:
    hopeless = [_is_hopeless(reports, rank, wait, peer, members) for peer in wait.peers]
    return bool(hopeless) and (all(hopeless) if wait.is_any else any(hopeless))


def _is_hopeless(reports: Reports, rank: int, wait: Wait, peer: int, members: set[int]) -> bool:
    """Whether a peer can do nothing for a wait: it waits itself, and has nothing under way that meets it."""
    if peer not in members:
        return False
    there = reports[peer]
    if wait.sequence is not None:
        return there.following.get(wait.context, 0) <= wait.sequence
    others = there.receives if wait.is_send else there.sends
    return not any(
        context == wait.context
        and whom in (rank, ANY_RANK)
        and (ANY_TAG in (tag, wait.tag) or tag == wait.tag)
        for context, whom, tag in others
    )

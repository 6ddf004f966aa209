"""Deadlocks between processes: whether the waits that ranks report form a cycle that nothing can break.

A pure decision over the states of ranks; deadlock_watch.py collects them.

A rank is *blocked* if every thread of its process that runs Python waits in an operation without a timeout,
or for another thread. A set of blocked ranks is *deadlocked* if each of their waits needs a rank of the same
set: no rank is left that could end any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from unisono.errors import ranks_text

__all__ = ["ANY_RANK", "ANY_TAG", "RankState", "Wait", "cycle_of", "deadlocked", "wait_text"]

ANY_TAG = ANY_RANK = -1


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """One thread that waits in an operation: for each of `peers`, or with `is_any` for any one of them.

    A collective has a sequence number, and `peers` have not called it. A message has a tag. `is_limited`: the
    wait has a timeout.
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


class RankState(msgspec.Struct, frozen=True, array_like=True):
    """What the process of one rank waits for and has under way, by world ranks.

    `sends` and `receives` are all messages under way: (context, rank, tag). `next_sequences` is the number of
    the next collective by context. `helpers` names whatever else could act there: running threads, agents.
    """

    rank: int
    waits: tuple[Wait, ...]
    sends: tuple[tuple[int, int, int], ...] = ()
    receives: tuple[tuple[int, int, int], ...] = ()
    next_sequences: dict[int, int] = {}
    helpers: tuple[str, ...] = ()

    @property
    def is_blocked(self) -> bool:
        """Whether no thread there can continue by itself."""
        return bool(self.waits) and not self.helpers and not any(wait.is_limited for wait in self.waits)

    def blockers(self) -> set[int]:
        """The ranks that its threads wait for."""
        return {peer for wait in self.waits for peer in wait.peers}


States = Mapping[int, RankState]


def deadlocked(states: States) -> set[int]:
    """The ranks whose waits can never end."""
    return _closed_set(states, lambda state: state.is_blocked, all)


def cycle_of(states: States, start: int) -> list[tuple[int, Wait]]:
    """The cycle of waits that `start` leads to, lowest rank first, whether it is certain or not; else []."""
    waiting = _closed_set(states, lambda state: bool(state.waits), any)
    chain: list[tuple[int, Wait]] = []
    ranks: list[int] = []
    rank = start
    while rank in waiting and rank not in ranks:
        wait = next(w for w in states[rank].waits if _needs(states, rank, w, waiting))
        ranks.append(rank)
        chain.append((rank, wait))
        rank = next(peer for peer in wait.peers if _is_hopeless(states, rank, wait, peer, waiting))
    if rank not in ranks:
        return []
    ring = chain[ranks.index(rank) :]
    lowest = min(range(len(ring)), key=lambda i: ring[i][0])
    return ring[lowest:] + ring[:lowest]


def wait_text(rank: int, wait: Wait) -> str:
    """A wait in words, for errors and logs."""
    whom = "any rank" if wait.is_any else ranks_text(wait.peers)
    return f"rank {rank} waits for {whom} in {wait.operation}"


def _closed_set(
    states: States, is_candidate: Callable[[RankState], bool], quantifier: Callable[..., bool]
) -> set[int]:
    """The largest set of candidates each of which has all (or any) of its waits on ranks of the set."""
    ranks_in_set = {rank for rank, state in states.items() if is_candidate(state)}
    while True:
        kept = {
            rank
            for rank in ranks_in_set
            if quantifier(_needs(states, rank, wait, ranks_in_set) for wait in states[rank].waits)
        }
        if kept == ranks_in_set:
            return ranks_in_set
        ranks_in_set = kept


def _needs(states: States, rank: int, wait: Wait, ranks_in_set: set[int]) -> bool:
    hopeless = [_is_hopeless(states, rank, wait, peer, ranks_in_set) for peer in wait.peers]
    return bool(hopeless) and (all(hopeless) if wait.is_any else any(hopeless))


def _is_hopeless(states: States, rank: int, wait: Wait, peer: int, ranks_in_set: set[int]) -> bool:
    """Whether a peer cannot end a wait: it waits itself, and nothing that it has under way would match."""
    if peer not in ranks_in_set:
        return False
    there = states[peer]
    if wait.sequence is not None:
        return there.next_sequences.get(wait.context, 0) <= wait.sequence
    others = there.receives if wait.is_send else there.sends
    return not any(
        context == wait.context
        and whom in (rank, ANY_RANK)
        and (ANY_TAG in (tag, wait.tag) or tag == wait.tag)
        for context, whom, tag in others
    )

"""The table of verbs: the properties of each that do not depend on its arguments.

It is the one home of these facts. What is made from it: the methods that a user calls, with the facts that
the engine asks for, its parser, signatures and documentation (verb_type.py); decisions (adoption.py); the
numbers of verbs in fingerprints (fingerprint.py); the stages of verbs whose ranks do not know each other's
lengths (vector_collectives.py); docs/reference.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto
from types import MappingProxyType
from typing import Final

__all__ = ["COLLECTIVES", "VERBS", "Fact", "Verb", "verbs_with"]


class Fact(Flag):
    """What may be true of a verb. The engine has the same, in this order: native/python/verb_spec.hpp."""

    # Messages between two ranks.
    SENDS = auto()
    RECEIVES = auto()
    UNSIZED = auto()  # receives a message of any length
    PROBES = auto()  # leaves the message where it is
    # What travels.
    EMPTY = auto()  # nothing
    OBJECTS = auto()  # packed objects
    FUSED = auto()  # several arrays as one
    PER_RANK = auto()  # a list with an item for each rank
    BY_RANK = auto()  # an array whose leading axis is the rank
    CUT = auto()  # an array whose axis 0 is cut by `counts`
    # What the ranks do.
    ROOTED = auto()  # one rank is named
    ROOT_ONLY = auto()  # only root has a result
    REDUCES = auto()
    PREFIX = auto()  # reduces what the ranks up to this one give
    FOLDS = auto()  # each rank reduces all objects itself, with `fn`
    GROUPS = auto()  # makes communicators
    IN_PLACE = auto()  # the result takes the place of x unless `out` is given
    STACKED = auto()  # the result has a leading axis for the ranks
    SHAPED = auto()  # ranks must agree on the shape, not only on the length
    # Ranks do not know each other's lengths: a first stage carries rows that announce them, from
    ANNOUNCED = auto()  # root to every other rank, or:
    EXCHANGED = auto()  # every rank to every other
    GATHERED = auto()  # every rank to root


@dataclass(frozen=True, slots=True)
class Verb:
    """A row. `collective` is the one of `plans` that moves what the user gave; empty for a message."""

    facts: Fact
    collective: str = ""

    @property
    def is_collective(self) -> bool:
        """Whether every rank of the communicator calls it."""
        return bool(self.collective)


_F = Fact
_EXCHANGE = Fact.ANNOUNCED | Fact.EXCHANGED
_GATHER = Fact.ANNOUNCED | Fact.GATHERED | Fact.ROOTED | Fact.ROOT_ONLY
_SPREAD = Fact.ANNOUNCED | Fact.ROOTED

# The order of collectives is that of their numbers in fingerprints.
VERBS: Final[Mapping[str, Verb]] = MappingProxyType(
    {
        "send": Verb(_F.SENDS),
        "recv": Verb(_F.RECEIVES),
        "recv_bytes": Verb(_F.RECEIVES | _F.UNSIZED),
        "sendrecv": Verb(_F.SENDS | _F.RECEIVES),
        "send_object": Verb(_F.SENDS | _F.OBJECTS),
        "recv_object": Verb(_F.RECEIVES | _F.UNSIZED | _F.OBJECTS),
        "probe": Verb(_F.RECEIVES | _F.PROBES),
        "all_reduce": Verb(_F.REDUCES | _F.IN_PLACE, "all_reduce"),
        "all_reduce_many": Verb(_F.REDUCES | _F.IN_PLACE | _F.FUSED, "all_reduce"),
        "reduce": Verb(_F.REDUCES | _F.IN_PLACE | _F.ROOTED | _F.ROOT_ONLY, "reduce"),
        "broadcast": Verb(_F.IN_PLACE | _F.ROOTED, "broadcast"),
        "all_gather": Verb(_F.STACKED | _F.SHAPED, "all_gather"),
        "gather": Verb(_F.STACKED | _F.SHAPED | _F.ROOTED | _F.ROOT_ONLY, "gather"),
        "scatter": Verb(_SPREAD | _F.BY_RANK, "scatter"),
        "reduce_scatter": Verb(_F.REDUCES | _F.BY_RANK, "reduce_scatter"),
        "all_to_all": Verb(_F.BY_RANK | _F.SHAPED, "all_to_all"),
        "scan": Verb(_F.REDUCES | _F.PREFIX, "scan"),
        "exscan": Verb(_F.REDUCES | _F.PREFIX, "exscan"),
        "barrier": Verb(_F.EMPTY, "barrier"),
        "all_gather_v": Verb(_EXCHANGE, "all_gather"),
        "gather_v": Verb(_GATHER, "gather"),
        "scatter_v": Verb(_SPREAD | _F.PER_RANK, "scatter"),
        "reduce_scatter_v": Verb(_F.REDUCES | _F.CUT, "reduce_scatter"),
        "all_to_all_v": Verb(_EXCHANGE | _F.PER_RANK, "all_to_all"),
        "broadcast_object": Verb(_SPREAD | _F.OBJECTS, "broadcast"),
        "all_gather_object": Verb(_EXCHANGE | _F.OBJECTS, "all_gather"),
        "gather_object": Verb(_GATHER | _F.OBJECTS, "gather"),
        "scatter_object": Verb(_SPREAD | _F.PER_RANK | _F.OBJECTS, "scatter"),
        "all_to_all_object": Verb(_EXCHANGE | _F.PER_RANK | _F.OBJECTS, "all_to_all"),
        "all_reduce_object": Verb(_EXCHANGE | _F.OBJECTS | _F.FOLDS, "all_gather"),
        # A row for each rank, from which each makes its group.
        "split": Verb(_F.STACKED | _F.GROUPS, "all_gather"),
    }
)

COLLECTIVES: Final = tuple(name for name, verb in VERBS.items() if verb.is_collective)


def verbs_with(any_of: Fact) -> frozenset[str]:
    """The verbs of which at least one of these facts is true."""
    return frozenset(name for name, verb in VERBS.items() if verb.facts & any_of)

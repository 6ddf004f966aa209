"""Peers: the other agents, as a caller sees them.

Knows which of them are there, what they are called, how many calls each may get, and how the calls to one
that is gone end. Does not know how a call is made, or heard.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from unisono.core.clock import Deadline, Waiting
from unisono.errors import (
    DeadlineExceeded,
    NotExposed,
    PeerLost,
    RemoteError,
    UnisonoError,
    UsageError,
    lost_text,
)
from unisono.messaging.backend import PeerDown
from unisono.rpc.frames import Bye, encode
from unisono.rpc.post import UNBOUNDED, UNSENT_ASKS_MAX, UNSENT_BYTES_MAX, Waitable

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent
    from unisono.rpc.calls import PendingCall

__all__ = ["QUEUE_MAX", "AdmissionWait", "Directory", "Peer", "Peers", "busy", "lost"]

_log = logging.getLogger("unisono.rpc")

# Calls to one rank that are not answered yet; a caller with more is held back until half of them are.
QUEUE_MAX: Final = 1024
_QUEUE_LOW: Final = QUEUE_MAX // 2


class Peer:
    """Another agent, as a caller sees it."""

    class State(Enum):
        """Whether there is an agent."""

        UNKNOWN = "nobody has asked"
        ASKED = "it was asked, calls are held until it answers"
        PRESENT = "it is there"

    __slots__ = (
        "calls",
        "error",
        "held",
        "is_blamed",
        "is_given_up",
        "lock",
        "name",
        "notes",
        "rank",
        "room",
        "state",
        "world_rank",
    )

    def __init__(self, rank: int, world_rank: int) -> None:
        self.rank = rank
        self.world_rank = world_rank
        self.name: str | None = None
        self.lock = threading.Lock()
        self.state = Peer.State.UNKNOWN
        self.held: list[Callable[[], object]] = []
        # Whoever takes a call out of this table ends it: there is no other arbiter.
        self.calls: dict[int, PendingCall] = {}
        self.notes = 0
        self.is_blamed = False  # for frames that made no sense; once is enough for the log
        self.is_given_up = False  # it takes no frames
        self.room: list[AdmissionWait] = []
        # Makes the error of a call, once nothing can be called there any more.
        self.error: Callable[[], UnisonoError] | None = None

    @property
    def is_full(self) -> bool:
        """Whether another call has to wait."""
        return len(self.calls) + self.notes >= QUEUE_MAX

    @property
    def has_room(self) -> bool:
        """Whether those who were held back may go on."""
        return len(self.calls) + self.notes <= _QUEUE_LOW or self.error is not None


class AdmissionWait(Waitable):
    """What a caller waits for who is held back."""


class Directory(Protocol):
    """Who hears of agents, and of ranks that are gone: control.Control."""

    def settle(self, service: Any) -> None:
        """Tell it from now on who asks for it, and who is gone."""

    def unsettle(self, service: Any) -> None:
        """Tell it no more."""

    def ask_for(self, service: Any, rank: int) -> None:
        """Ask a world rank whether it has a service of this context: `on_present` or `on_absent` follows."""


class Peers:
    """The agents of one communicator, by rank."""

    def __init__(
        self,
        agent: Agent,
        directory: Directory,
        world_ranks: tuple[int, ...],
        own_rank: int,
        on_gone: Callable[[int], None],
    ) -> None:
        self._agent = agent
        self._directory = directory
        self._own_rank = own_rank
        self._on_gone = on_gone
        self._all = [Peer(rank, world) for rank, world in enumerate(world_ranks)]
        self._by_world_rank = {peer.world_rank: peer for peer in self._all}
        self._names: dict[str, Peer] = {}
        self._resolving: list[AdmissionWait] = []
        self._all[own_rank].state = Peer.State.PRESENT

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, rank: int) -> Peer:
        return self._all[rank]

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._all)

    def of(self, dst: Any, deadline: Deadline) -> Peer:
        """The agent of a rank, or of a name.

        Raises:
            UsageError: there is none.
        """
        if type(dst) is int and 0 <= dst < len(self._all):
            return self._all[dst]
        if isinstance(dst, str):
            return self._named(dst, deadline)
        if isinstance(dst, np.integer) and 0 <= dst < len(self._all):
            return self._all[int(dst)]
        raise UsageError(f"dst={dst!r}; allowed: ranks 0 to {len(self._all) - 1}, or an agent's name")

    def ask_for(self, peer: Peer) -> None:
        """Ask whether it is there: `on_present` or `on_absent` follows."""
        self._directory.ask_for(self._agent, peer.world_rank)

    def make_room(self, peer: Peer) -> None:
        """Let those go on who were held back, if there is room by now."""
        if not peer.has_room:
            return
        with peer.lock:
            rooms, peer.room = peer.room, []
        for room in rooms:
            room.is_done = True
            self._agent.post.wake(room)

    # -- news of them -------------------------------------------------------------------------------------

    def on_present(self, sender: int, name: str) -> None:
        """A rank has an agent: what was held for it may go."""
        peer = self._by_world_rank.get(sender)
        if peer is None:
            return
        peer.name = name
        while True:
            with peer.lock:
                if not peer.held:
                    peer.state = Peer.State.PRESENT
                    break
                held, peer.held = peer.held, []
            for send in held:
                send()
        self._wake_resolvers()

    def on_absent(self, sender: int) -> None:
        """A rank has no agent."""
        peer = self._by_world_rank.get(sender)
        if peer is None or peer.state is Peer.State.PRESENT:
            return
        with peer.lock:
            peer.state = Peer.State.UNKNOWN
            peer.held = []
            peer.notes = 0
        self.fail_calls(
            peer,
            lambda: NotExposed(
                f"rank {sender} has no agent",
                rank=sender,
                type_name="LookupError",
                next_step="make an Agent on that rank, too",
            ),
        )
        self._wake_resolvers()

    def on_peer_down(self, down: PeerDown) -> None:
        """A world rank is gone."""
        peer = self._by_world_rank.get(down.rank)
        if peer is None:
            return
        self.lose(peer, lambda: lost(down.rank, down.cause))

    # -- how they end -------------------------------------------------------------------------------------

    def lose(self, peer: Peer, error: Callable[[], UnisonoError]) -> None:
        """A rank, or its agent, is gone."""

        def end() -> None:
            self.end(peer, error, are_answers_awaited=True)
            self._on_gone(peer.rank)

        # Its last answers are here, but another thread may be about to deliver them.
        self._agent.post.when_quiet(end)

    def give_up(self, peer: Peer) -> None:
        """A rank does not take what is sent to it: tell it once, for when it reads, and lose it."""
        with peer.lock:
            is_known, peer.is_given_up = peer.is_given_up, True
        if is_known:
            return
        why = f"{UNSENT_BYTES_MAX} bytes of answers and stream items waited to be read"
        _log.warning("rank %d is given up: %s", peer.world_rank, why)
        self._agent.post.send(peer.rank, encode(Bye(why)), UNBOUNDED)
        self.lose(peer, lambda: lost(peer.world_rank, why))

    def end(
        self, peer: Peer, error: Callable[[], UnisonoError], *, are_answers_awaited: bool = False
    ) -> None:
        """Nothing can be called there any more, and why. An answer that is on its way may be awaited."""
        if peer.error is None:
            peer.error = error
        with peer.lock:
            peer.held = []
        self.fail_calls(peer, error, are_answers_awaited=are_answers_awaited)
        self.make_room(peer)
        self._wake_resolvers()

    def fail_calls(
        self, peer: Peer, error: Callable[[], UnisonoError], *, are_answers_awaited: bool = False
    ) -> None:
        """End every call to it."""
        for number, calling in list(peer.calls.items()):
            taking = calling.taking
            if are_answers_awaited and taking is not None and not taking.is_done:
                continue  # it ends when its answer is here, or with the link
            if peer.calls.pop(number, None) is not None:
                calling.fail(error().located(calling.location()))

    # -- names --------------------------------------------------------------------------------------------

    def _named(self, name: str, deadline: Deadline) -> Peer:
        """Find the agent of a name: every rank is asked once what its agent is called."""
        if (known := self._names.get(name)) is not None:
            return known
        self._all[self._own_rank].name = self._agent.name or ""
        for peer in self._all:
            with peer.lock:
                must_ask = peer.state is Peer.State.UNKNOWN and peer.error is None
                if must_ask:
                    peer.state = Peer.State.ASKED
            if must_ask:
                self.ask_for(peer)
        waiting = Waiting(self._agent.world_rank, (), f"looking for the agent {name!r}")
        while True:
            room = AdmissionWait()
            self._resolving.append(room)
            found = [peer for peer in self._all if peer.name == name]
            asked = [p for p in self._all if p.state is Peer.State.ASKED and p.error is None]
            if not asked:
                break
            self._agent.wait_for(room, deadline, waiting)
            if not room.is_done:
                raise DeadlineExceeded(
                    f"rank {asked[0].world_rank} did not say what its agent is called",
                    waiting_on=tuple(p.world_rank for p in asked),
                )
        if len(found) != 1:
            names = sorted(peer.name for peer in self._all if peer.name)
            shown = f"known names: {', '.join(names) or 'none'}"
            if found:
                where = ", ".join(str(peer.world_rank) for peer in found)
                raise UsageError(
                    f"ranks {where} all have an agent named {name!r}; {shown}",
                    next_step="give each agent a name of its own, or call by rank",
                )
            raise UsageError(
                f"no agent is named {name!r}; {shown}", next_step=f"Agent(comm, name={name!r}) on one rank"
            )
        self._names[name] = found[0]
        return found[0]

    def _wake_resolvers(self) -> None:
        rooms, self._resolving = self._resolving, []
        for room in rooms:
            room.is_done = True
            self._agent.post.wake(room)


def lost(rank: int, cause: str) -> PeerLost:
    """The error of a call to a world rank that is gone."""
    return PeerLost(lost_text((rank,), cause), ranks=(rank,), cause=cause)


def busy(peer: Peer) -> RemoteError:
    """The error of a call that was not sent, because the rank has too much to take."""
    return RemoteError(
        f"rank {peer.world_rank} has too much to read: the call was not sent",
        rank=peer.world_rank,
        type_name="Busy",
        cause=f"more than {UNSENT_ASKS_MAX} bytes wait for it",
        next_step="call it again when some of the calls under way have ended",
    )

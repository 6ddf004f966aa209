"""Peers: the agents of the other ranks, as a caller sees them.

Which of them exist, what they are named, how many calls each may have unanswered, and how the calls to a lost
one end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from unisono.core.runtime import Deadline, Waiting
from unisono.errors import (
    DeadlineExceeded,
    Location,
    NotExposed,
    PeerLost,
    RemoteError,
    UnisonoError,
    UsageError,
    lost_text,
)
from unisono.messaging.peer_down import PeerDown
from unisono.rpc.frame import GOODBYE, short
from unisono.rpc.transport import (
    UNBOUNDED,
    UNSENT_ASKS_MAX,
    UNSENT_BYTES_MAX,
    Outbound,
    RpcTransport,
    Waitable,
)

if TYPE_CHECKING:
    from unisono.rpc.pending_call import PendingCall

__all__ = ["QUEUE_MAX", "AdmissionWait", "Peer", "Peers", "busy", "closed_there", "lost"]

_log = logging.getLogger("unisono.rpc")

# Unanswered calls to one rank; a caller with more waits until half of them are answered.
QUEUE_MAX: Final = 1024
_QUEUE_LOW: Final = QUEUE_MAX // 2


class Peer:
    """The agent of one rank."""

    class State(Enum):
        """Whether the rank has an agent."""

        UNKNOWN = "not asked yet"
        ASKED = "asked; calls are held until it answers"
        PRESENT = "it has one"

    def __init__(self, rank: int, world_rank: int) -> None:
        self.rank = rank
        self.world_rank = world_rank
        self.name: str | None = None
        self.lock = threading.Lock()
        self.state = Peer.State.UNKNOWN
        self.held: list[Callable[[], object]] = []
        # The thread that removes a call from this table ends it: nothing else arbitrates.
        self.calls: dict[int, PendingCall] = {}
        self.notifications = 0  # sent and not acknowledged
        self.has_sent_malformed = False  # and this was logged once
        self.is_given_up = False  # it does not read
        self.admissions: list[AdmissionWait] = []
        # Makes the error of a call, once the rank cannot be called any more.
        self.error: Callable[[], UnisonoError] | None = None

    @property
    def is_full(self) -> bool:
        """Whether another call has to wait."""
        return len(self.calls) + self.notifications >= QUEUE_MAX

    @property
    def admits(self) -> bool:
        """Whether the callers that wait may go on."""
        return len(self.calls) + self.notifications <= _QUEUE_LOW or self.error is not None


class AdmissionWait(Waitable):
    """What a caller waits for before it may call: a shorter queue, or the name of an agent."""


class Peers:
    """The agents of one communicator, by rank.

    `query` asks a world rank whether it has an agent: `on_present` or `on_absent` follows.
    """

    def __init__(
        self,
        transport: RpcTransport,
        world_ranks: tuple[int, ...],
        own_rank: int,
        own_name: str | None,
        query: Callable[[int], None],
    ) -> None:
        self._transport = transport
        self._query = query
        self._all = [Peer(rank, world) for rank, world in enumerate(world_ranks)]
        self._by_world_rank = {peer.world_rank: peer for peer in self._all}
        self._by_name: dict[str, Peer] = {}
        self._lookups: list[AdmissionWait] = []
        self._on_lost: list[Callable[[int], None]] = []
        self.own = self._all[own_rank]
        self.own.state = Peer.State.PRESENT
        self.own.name = own_name or ""

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, rank: int) -> Peer:
        return self._all[rank]

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._all)

    def find(self, dst: Any, deadline: Deadline) -> Peer:
        """The agent of a rank, or of a name.

        Raises:
            UsageError: there is none.
            DeadlineExceeded: a rank did not tell the name of its agent in time.
        """
        if type(dst) is int and 0 <= dst < len(self._all):
            return self._all[dst]
        if isinstance(dst, str):
            return self._find_name(dst, deadline)
        if isinstance(dst, np.integer) and 0 <= dst < len(self._all):
            return self._all[int(dst)]
        raise UsageError(f"dst={dst!r}; allowed: ranks 0 to {len(self._all) - 1}, or an agent's name")

    def send(
        self, rank: int, frame: bytes, *, is_more: bool = False, outbound: Outbound | None = None
    ) -> None:
        """Send a frame that is not a call; a rank that leaves too many of them unread is given up."""
        if not self._transport.send(rank, frame, UNSENT_BYTES_MAX, is_more, outbound):
            self._give_up(self._all[rank])

    def hold(self, peer: Peer, send: Callable[[], object]) -> None:
        """Send a call once it is known that there is an agent to take it."""
        with peer.lock:
            state = peer.state
            if state is not Peer.State.PRESENT:
                peer.state = Peer.State.ASKED
                peer.held.append(send)
        if state is Peer.State.PRESENT:
            send()
        elif state is Peer.State.UNKNOWN:
            self._query(peer.world_rank)

    def admit(self, peer: Peer) -> None:
        """Wake the callers that wait for a shorter queue, if it is short enough."""
        if not peer.admits:
            return
        with peer.lock:
            admissions, peer.admissions = peer.admissions, []
        self._finish(admissions)

    def watch_lost(self, on_lost: Callable[[int], None]) -> None:
        """Call back with every rank that is lost from now on."""
        self._on_lost.append(on_lost)

    # -- control messages; ranks are world ranks ----------------------------------------------------------

    def on_present(self, sender: int, name: str) -> None:
        """A rank has an agent: send what was held for it."""
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
        self._wake_lookups()

    def on_absent(self, sender: int) -> None:
        """A rank has no agent."""
        peer = self._by_world_rank.get(sender)
        if peer is None or peer.state is Peer.State.PRESENT:
            return
        with peer.lock:
            peer.state = Peer.State.UNKNOWN
            peer.held = []
            peer.notifications = 0
        self.fail_calls(
            peer,
            lambda: NotExposed(
                f"rank {sender} has no agent",
                rank=sender,
                type_name="LookupError",
                next_step="make an Agent on that rank, too",
            ),
        )
        self._wake_lookups()

    def on_peer_down(self, down: PeerDown) -> None:
        """A rank was declared dead, or has left."""
        peer = self._by_world_rank.get(down.rank)
        if peer is not None:
            self.lose(peer, lambda: lost(down.rank, down.cause))

    def on_abort(self, error: UnisonoError) -> None:
        """The communicator was aborted, here or elsewhere."""
        for peer in self._all:
            self.end(peer, lambda: error.located(Location()))

    # -- endings ------------------------------------------------------------------------------------------

    def lose(self, peer: Peer, error: Callable[[], UnisonoError]) -> None:
        """A rank, or its agent, is gone."""

        def end() -> None:
            self.end(peer, error, await_answers=True)
            for on_lost in self._on_lost:
                on_lost(peer.rank)

        # Its last answers have arrived, but another thread may not have dispatched them yet.
        self._transport.when_delivered(end)

    def end(self, peer: Peer, error: Callable[[], UnisonoError], *, await_answers: bool = False) -> None:
        """Refuse every later call to a rank, and fail those under way.

        With `await_answers` a call whose answer is being received goes on: it ends with that, or the link.
        """
        if peer.error is None:
            peer.error = error
        with peer.lock:
            peer.held = []
        self.fail_calls(peer, error, await_answers=await_answers)
        self.admit(peer)
        self._wake_lookups()

    def fail_calls(
        self, peer: Peer, error: Callable[[], UnisonoError], *, await_answers: bool = False
    ) -> None:
        """Fail every call to a rank; `await_answers` as in `end`."""
        for pending in list(peer.calls.values()):
            inbound = pending.inbound
            if not await_answers or inbound is None or inbound.is_done:
                pending.fail_unless_done(error)

    def say_goodbye(self) -> None:
        """Tell the others that this agent is closed."""
        goodbye = short(GOODBYE, value=("",))
        for peer in self._all:
            if peer.state is Peer.State.PRESENT and peer.error is None and peer is not self.own:
                self._transport.send(peer.rank, goodbye, UNBOUNDED)

    def _give_up(self, peer: Peer) -> None:
        """A frame for a rank that does not read was dropped, so its calls cannot end well: lose it."""
        with peer.lock:
            was_given_up, peer.is_given_up = peer.is_given_up, True
        if was_given_up:
            return
        why = f"{UNSENT_BYTES_MAX} bytes of answers and stream items waited to be read"
        _log.warning("rank %d is given up: %s", peer.world_rank, why)
        self._transport.send(peer.rank, short(GOODBYE, value=(why,)), UNBOUNDED)
        self.lose(peer, lambda: lost(peer.world_rank, why))

    # -- names --------------------------------------------------------------------------------------------

    def _find_name(self, name: str, deadline: Deadline) -> Peer:
        """Find the agent of a name: every rank is asked once for the name of its agent."""
        if (known := self._by_name.get(name)) is not None:
            return known
        for peer in self._all:
            with peer.lock:
                must_ask = peer.state is Peer.State.UNKNOWN and peer.error is None
                if must_ask:
                    peer.state = Peer.State.ASKED
            if must_ask:
                self._query(peer.world_rank)
        waiting = Waiting(self.own.world_rank, (), f"looking for the agent {name!r}")
        while True:
            lookup = AdmissionWait()
            self._lookups.append(lookup)
            found = [peer for peer in self._all if peer.name == name]
            asked = [p for p in self._all if p.state is Peer.State.ASKED and p.error is None]
            if not asked:
                break
            self._transport.wait_outside_slot(lookup, deadline, waiting)
            if not lookup.is_done:
                raise DeadlineExceeded(
                    f"rank {asked[0].world_rank} did not tell the name of its agent in time",
                    waiting_on=tuple(p.world_rank for p in asked),
                )
        if len(found) == 1:
            self._by_name[name] = found[0]
            return found[0]
        names = sorted(peer.name for peer in self._all if peer.name)
        known_names = f"known names: {', '.join(names) or 'none'}"
        if found:
            ranks = ", ".join(str(peer.world_rank) for peer in found)
            raise UsageError(
                f"ranks {ranks} all have an agent named {name!r}; {known_names}",
                next_step="give each agent a name of its own, or call by rank",
            )
        raise UsageError(
            f"no agent is named {name!r}; {known_names}",
            next_step=f"Agent(world, name={name!r}) on one rank",
        )

    def _wake_lookups(self) -> None:
        lookups, self._lookups = self._lookups, []
        self._finish(lookups)

    def _finish(self, waits: list[AdmissionWait]) -> None:
        for wait in waits:
            wait.is_done = True
            self._transport.wake(wait)


# -- errors -----------------------------------------------------------------------------------------------


def lost(rank: int, cause: str) -> PeerLost:
    """The error of a call to a world rank that is gone."""
    return PeerLost(lost_text((rank,), cause), ranks=(rank,), cause=cause)


def closed_there(peer: Peer) -> PeerLost:
    """The error of a call to a rank whose agent is closed."""
    rank = peer.world_rank
    return PeerLost(lost_text((rank,)), ranks=(rank,), cause="it has closed its agent")


def busy(peer: Peer) -> RemoteError:
    """The error of a call that was not sent, because the rank leaves too much unread."""
    return RemoteError(
        f"rank {peer.world_rank} has too much to read: the call was not sent",
        rank=peer.world_rank,
        type_name="Busy",
        cause=f"more than {UNSENT_ASKS_MAX} bytes wait for it",
        next_step="call it again when some of the calls under way have ended",
    )

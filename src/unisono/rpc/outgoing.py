"""Calls on their way out: admitted, packed, and sent once somebody is there to take them.

Knows how a call becomes a frame and what follows it, and when it has to wait. Does not know what is answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from unisono.core.clock import NEVER, Deadline, Waiting
from unisono.core.codec import place_of_argument
from unisono.errors import DeadlineExceeded, Location, UsageError
from unisono.rpc.calls import Deadlines, PendingCall, closed_here
from unisono.rpc.following import OutboundParts
from unisono.rpc.frames import NAME_CHARS_MAX, Ask, PackedAsk, encode
from unisono.rpc.incoming import current
from unisono.rpc.payload import is_plain, pack
from unisono.rpc.peers import AdmissionWait, Peer, Peers, busy
from unisono.rpc.post import UNSENT_ASKS_MAX
from unisono.rpc.streams import WINDOW, Arrivals

if TYPE_CHECKING:
    from unisono.rpc.agent import Agent

__all__ = ["TIMEOUT_S", "CallStarter"]

_log = logging.getLogger("unisono.rpc")

# Of a call for which the user names none.
TIMEOUT_S: Final = 30.0


class CallStarter:
    """What one agent calls."""

    def __init__(self, agent: Agent, peers: Peers) -> None:
        self._agent = agent
        self._peers = peers
        self._deadlines = Deadlines(agent.runtime)

    def begin(
        self,
        dst: int | str,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        *,
        timers: bool,
        arrivals: Arrivals | None = None,
    ) -> PendingCall:
        """Begin a call; with `timers` it expires by itself, else whoever waits for it sees to that."""
        now = self._agent.runtime.now()
        deadline = NEVER if timeout is None else self._agent.runtime.deadline(timeout)
        above = current.get()
        until = None if above is None else above.deadline.at
        # Whoever waits for this handler does not wait longer.
        if until is not None and (deadline.at is None or until < deadline.at):
            deadline = Deadline(until, max(0.0, until - now))
        # A handler that waits here is one of a bounded number; held back, it might wait for its own caller.
        is_waiting_handler = above is not None and not timers and arrivals is None
        peer = self._admitted(dst, name, deadline, is_held=not is_waiting_handler)
        number = self._agent.next_number()
        calling = PendingCall(self._agent, peer, number, name, deadline, now)
        calling.stream, window = arrivals, WINDOW if arrivals is not None else 0
        try:
            frame, following, parts = self._asked(number, name, args, kwargs, deadline, window)
        except BaseException:
            calling.is_done = True  # it never began
            raise
        if above is not None:
            calling.above = above
            above.on_cancel[calling] = calling.cancel
        peer.calls[number] = calling
        self._dispatch(peer, frame, following, parts, calling)
        if above is not None and above.is_cancelled:
            calling.cancel()
        if timers and deadline.at is not None and not calling.is_done:
            self._deadlines.add(deadline.at, calling)
        return calling

    def notify(self, dst: int | str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call a function and want no answer: an error is logged there."""
        peer = self._admitted(dst, name, self._agent.runtime.deadline(TIMEOUT_S))
        frame, number, parts = self._asked(0, name, args, kwargs, None)
        with peer.lock:
            peer.notes += 1
        self._dispatch(peer, frame, number, parts, None)

    def close(self) -> None:
        """Nothing expires any more."""
        self._deadlines.close()

    def _admitted(self, dst: int | str, name: str, deadline: Deadline, *, is_held: bool = True) -> Peer:
        """The rank to call; if `is_held`, once there is room for another call to it."""
        if self._agent.is_closed or (self._agent.is_closing and current.get() is None):
            raise closed_here().located(
                Location(f"call of {name!r}", self._agent.communicator, self._agent.epoch)
            )
        if not isinstance(name, str) or len(name) > NAME_CHARS_MAX:
            raise UsageError(f"name={str(name)[:80]!r}; allowed: a text of up to {NAME_CHARS_MAX} characters")
        peer = self._peers.of(dst, deadline)
        if is_held and peer.is_full:
            self._await_room(peer, name, deadline)
        return peer

    def _await_room(self, peer: Peer, name: str, deadline: Deadline) -> None:
        room = AdmissionWait()
        with peer.lock:
            peer.room.append(room)
        self._peers.make_room(peer)
        waiting = Waiting(self._agent.world_rank, (peer.world_rank,), f"call of {name!r}")
        self._agent.wait_for(room, deadline, waiting)
        if not room.is_done:
            raise DeadlineExceeded(
                f"rank {peer.world_rank} has too many calls to answer",
                waiting_on=(peer.world_rank,),
                where=Location(f"call of {name!r}", self._agent.communicator, self._agent.epoch),
            )

    def _asked(
        self,
        number: int,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deadline: Deadline | None,
        window: int = 0,
    ) -> tuple[bytes, int, list[memoryview]]:
        """The frame of a call, and what follows it under which number."""
        timeout_s = None if deadline is None else deadline.given_s
        try:
            if not kwargs and is_plain(args):
                return encode(Ask(number, name, timeout_s, args, window)), 0, []  # type: ignore[arg-type]
            body, parts = pack([list(args), kwargs], lambda steps: place_of_argument(steps[1:]))
            following = self._agent.next_number()
            return encode(PackedAsk(number, name, timeout_s, following, body, window)), following, parts
        except (UnicodeEncodeError, OverflowError) as error:
            raise UsageError(
                f"the call of {name!r} cannot be encoded: {error}",
                next_step="send text that UTF-8 can hold, or bytes",
            ) from None

    def _dispatch(
        self, peer: Peer, frame: bytes, following: int, parts: list[memoryview], calling: PendingCall | None
    ) -> None:
        """Send a call, or hold it until it is known that there is an agent to take it."""
        if peer.state is Peer.State.PRESENT:
            if not self._send(peer, frame, following, parts, calling) and calling is None:
                raise busy(peer)
        else:
            self._hold(peer, partial(self._send, peer, frame, following, parts, calling))
        if peer.error is not None and calling is not None:
            error = peer.error
            if peer.calls.pop(calling.number, None) is not None:
                calling.fail(error().located(calling.location()))

    def _hold(self, peer: Peer, send: Callable[[], object]) -> None:
        with peer.lock:
            state = peer.state
            if state is not Peer.State.PRESENT:
                peer.state = Peer.State.ASKED
                peer.held.append(send)
        if state is Peer.State.PRESENT:
            send()
        elif state is Peer.State.UNKNOWN:
            self._peers.ask_for(peer)

    def _send(
        self, peer: Peer, frame: bytes, following: int, parts: list[memoryview], calling: PendingCall | None
    ) -> bool:
        if calling is not None and calling.is_done:
            return True
        if not self._agent.post.send(peer.rank, frame, UNSENT_ASKS_MAX):
            self._refuse(peer, calling)
            return False
        if parts:
            sending = OutboundParts(self._agent.post, peer.rank, following, parts)
            if calling is not None:
                calling.sending = sending
                if calling.is_done:
                    sending.cancel()
        return True

    def _refuse(self, peer: Peer, calling: PendingCall | None) -> None:
        """A call cannot be sent: too much waits for its rank."""
        if calling is None:
            with peer.lock:
                peer.notes -= 1
            _log.warning("a notification was not sent: %s", busy(peer))
        elif peer.calls.pop(calling.number, None) is not None:
            calling.fail(busy(peer).located(calling.location()))

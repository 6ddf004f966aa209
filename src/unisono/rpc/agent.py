"""The agent: what a user holds to call functions on other ranks, and to let them call functions here.

Knows how calls, frames and handlers meet. Does not know how any of them works: calls.py, post.py, server.py.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar, overload

import numpy as np

from unisono.contract import Backend, PeerDown, Tags
from unisono.errors import (
    ClosedError,
    DeadlineExceeded,
    Location,
    NotExposed,
    PeerLost,
    ProtocolError,
    UnisonoError,
    UsageError,
    lost_text,
)
from unisono.rpc.calls import Calling, Deadlines, Peer, Room, closed_here, closed_there, error_of
from unisono.rpc.following import Sending, Taking
from unisono.rpc.frames import (
    NAME_CHARS_MAX,
    Ack,
    Answer,
    Ask,
    Bye,
    Cancel,
    Failure,
    Item,
    More,
    PackedAnswer,
    PackedAsk,
    PackedItem,
    decode,
    encode,
)
from unisono.rpc.incoming import current
from unisono.rpc.objects import Proxy, Reference
from unisono.rpc.payload import is_plain, pack, places, unpack
from unisono.rpc.pool import Pool
from unisono.rpc.post import Awaited, CallbackPost, MailboxPost, Post
from unisono.rpc.registry import Registry, check_name
from unisono.rpc.server import Server
from unisono.rpc.streams import WINDOW, Arrivals, Stream
from unisono.runtime import NEVER, Deadline, Runtime, Waiting
from unisono.work import Work, wait_all

__all__ = ["TIMEOUT_S", "Agent"]

_log = logging.getLogger("unisono.rpc")

F = TypeVar("F", bound=Callable[..., Any])

# Of a call for which the user names none.
TIMEOUT_S: Final = 30.0
# Handlers that run at the same time; those that wait for other ranks do not count.
_HANDLERS: Final = 16

_BYE: Final = encode(Bye())


class Directory(Protocol):
    """Who hears of agents, and of ranks that are gone: control.Control."""

    def settle(self, tenant: Any) -> None:
        """Tell it from now on who asks for it, and who is gone."""

    def unsettle(self, tenant: Any) -> None:
        """Tell it no more."""

    def ask_for(self, tenant: Any, rank: int) -> None:
        """Ask a world rank whether it has a tenant of this context: `on_present` or `on_absent` follows."""


class Place(Protocol):
    """Where an agent lives, and as whom: group.Group."""

    name: str
    epoch: int
    world_rank: int
    world_ranks: tuple[int, ...]
    backend: Backend

    @property
    def control(self) -> Directory: ...

    def progress(self) -> dict[int, int]:
        """How far this rank has come: the number of its next collective, by context."""


class Communicator(Protocol):
    """What an agent needs of a communicator."""

    def attach(self, tenant: Any, purpose: str) -> tuple[Place, int]:
        """Live here until the communicator is closed: the place, and a context of one's own."""


class Agent:
    """Calls functions on the other ranks of a communicator, and serves their calls from now on.

    `name` is another way for the others to say which rank they mean. `handlers` is how many functions may
    run at the same time here; one that waits for another rank does not count. Every rank that is to be called
    makes an agent. It closes with its communicator.
    """

    def __init__(
        self, communicator: Communicator, *, name: str | None = None, handlers: int = _HANDLERS
    ) -> None:
        if name is not None:
            check_name(name)
        if isinstance(handlers, bool) or not isinstance(handlers, int) or not 1 <= handlers <= 1024:
            raise UsageError(f"handlers={handlers!r}; allowed: 1 to 1024")
        if not hasattr(communicator, "attach"):
            raise UsageError(f"{communicator!r} is no communicator")
        place, self.context = communicator.attach(self, "rpc")
        self.name = name
        self.progress: dict[int, int] = place.progress()
        self.backend: Backend = place.backend
        self.runtime: Runtime = self.backend.runtime
        self.communicator: str = place.name
        self.epoch: int = place.epoch
        self.world_rank: int = place.world_rank
        self.is_closing = False
        self.is_closed = False
        self._directory: Directory = place.control
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.next_number: Callable[[], int] = self._numbers.__next__
        self._peers = [Peer(rank, world) for rank, world in enumerate(place.world_ranks)]
        self._by_world_rank = {peer.world_rank: peer for peer in self._peers}
        self._names: dict[str, Peer] = {}
        self._resolving: list[Room] = []
        self._deadlines = Deadlines(self.runtime)
        self._registry = Registry()
        self._classes: dict[str, type] = {}
        self._server = Server(self, self._registry, len(self._peers), place.progress)
        self._peers[self.backend.rank].state = Peer.State.PRESENT
        title = f"unisono-rpc-{self.world_rank}"
        mailbox = self.backend.mailbox(self.context, Tags.RPC)
        self.post: Post
        if mailbox is not None:
            post = MailboxPost(mailbox, self.runtime, self._on_frame)
            self.post = post
            self._server.pool = Pool(self.runtime, self._server.run, handlers, title, post)
            # At the end of the interpreter no thread may come back from below Python.
            atexit.register(self._leave_at_exit, os.getpid())
        else:
            self._server.pool = Pool(self.runtime, self._server.run, handlers, title, None)
            self.post = CallbackPost(self.backend, self.context, self._on_frame)
            self.post.start()
        self._directory.settle(self)

    # -- what others may call -----------------------------------------------------------------------------

    @overload
    def expose(self, fn: F) -> F: ...
    @overload
    def expose(self, fn: None = None, *, name: str) -> Callable[[F], F]: ...
    def expose(self, fn: F | None = None, *, name: str | None = None) -> F | Callable[[F], F]:
        """Let others call a function by its name, or by the one given. A decorator, with or without one."""
        if fn is None:
            return partial(self._exposed, name)
        return self._exposed(name, fn)

    def register(self, name: str, fn: Callable[..., Any]) -> None:
        """Let others call a function by this name; of a class, let them make instances and call methods."""
        if isinstance(fn, type):
            if self._classes.get(name) is fn:
                return
            check_name(name)
            self._classes[name] = fn
            for its_name, (call, takes) in self._server.objects.handlers_of(fn, name).items():
                self._registry.add(its_name, call, takes)
        else:
            self._registry.add(name, fn)
        self._server.on_exposed()

    def _exposed(self, name: str | None, fn: F) -> F:
        self.register(name if name is not None else getattr(fn, "__name__", ""), fn)
        return fn

    # -- calling ------------------------------------------------------------------------------------------

    def call(
        self, dst: int | str, name: str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> Any:
        """Call a function of another rank, or of this one, and return what it returns.

        Raises:
            RemoteError: the function raised; BadArguments, NotExposed: it was not called.
            DeadlineExceeded: there was no answer within `timeout` seconds; the other side is told.
            PeerLost: the rank, or its agent, is gone.
        """
        loop = self._server.loop
        if loop is not None and loop.is_mine:
            raise UsageError("call would block the event loop; allowed: await agent.start(...)")
        return self._begin(dst, name, args, kwargs, timeout, timers=False).wait()

    def start(
        self, dst: int | str, name: str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> Work[Any]:
        """Begin a call. Arrays in the arguments belong to it until it is done.

        With many calls to one rank under way it waits until some of them are answered.
        """
        return self._begin(dst, name, args, kwargs, timeout, timers=True)

    def call_all(
        self, name: str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Call a function on every rank, this one included; the results by rank.

        The first error is raised after all have ended.
        """
        works = [self.start(rank, name, *args, timeout=timeout, **kwargs) for rank in range(len(self._peers))]
        return wait_all(works)

    def notify(self, dst: int | str, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Call a function and want no answer: an error is logged there."""
        peer = self._admitted(dst, name, self.runtime.deadline(TIMEOUT_S))
        frame, number, parts = self._asked(0, name, args, kwargs, None)
        with peer.lock:
            peer.notes += 1
        self._dispatch(peer, frame, number, parts, None)

    def stream(
        self, dst: int | str, name: str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> Stream:
        """Read what a generator on another rank gives, item by item; `timeout` is for each of them.

        The generator is at most a few items ahead. It is closed with the stream, or when that is forgotten.
        """
        arrivals = Arrivals(self.post.wake)
        calling = self._begin(dst, name, args, kwargs, None, timers=False, arrivals=arrivals)
        calling.on_done(arrivals.look)
        return Stream(self, calling, arrivals, timeout)

    # -- objects ------------------------------------------------------------------------------------------

    def remote(
        self, dst: int | str, cls: type | str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> Proxy:
        """Make an instance of an exposed class on another rank; a proxy calls its public methods.

        It lives until the proxy is released or forgotten, or this rank goes.
        """
        name = cls if isinstance(cls, str) else cls.__name__
        rank = self._peer_of(dst, self.runtime.deadline(TIMEOUT_S)).rank
        number = self.call(rank, name, *args, timeout=timeout, **kwargs)
        return Proxy(self, Reference(rank, name, number), is_owner=True)

    def proxy(self, reference: Reference) -> Proxy:
        """Call an object that another rank has made; it lives no longer for that."""
        if not isinstance(reference, Reference):
            raise UsageError(f"{reference!r} is no reference; allowed: `proxy.reference` of any rank")
        return Proxy(self, reference, is_owner=False)

    def forget(self, rank: int, name: str, number: int) -> None:
        """Tell a rank to release an object, if it still can be told."""
        with contextlib.suppress(UnisonoError):
            if not self.is_closing and self._peers[rank].error is None:
                self.notify(rank, name, number)

    # -- endings ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the calls that came, end those that were made, and leave.

        Whoever calls this rank from now on gets PeerLost.
        """
        with self._lock:
            if self.is_closing:
                return
            self.is_closing = True
        atexit.unregister(self._leave_at_exit)
        runtime, flush_s = self.runtime, self.backend.config.flush_s
        waiting = Waiting(self.world_rank, (), "closing the agent")
        self._drain(runtime.deadline(flush_s))
        for peer in self._peers:
            if peer.state is Peer.State.PRESENT and peer.error is None and peer.rank != self.backend.rank:
                self.post.send(peer.rank, _BYE)
        self.is_closed = True
        for peer in self._peers:
            self._end_peer(peer, closed_here)
        self._directory.unsettle(self)
        self._deadlines.close()
        self._server.close(flush_s, waiting)
        self.post.close()
        self._server.pool.close(flush_s, lambda: waiting)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"<Agent of rank {self.backend.rank} on {self.communicator!r}{state}>"

    # -- what the other parts ask of it -------------------------------------------------------------------

    def has_calls_to(self, rank: int) -> bool:
        """Whether calls to a rank are under way."""
        return bool(self._peers[rank].calls)

    def tell_cancelled(self, calling: Calling) -> None:
        """The other side need not answer."""
        peer = calling.peer
        if peer.state is Peer.State.PRESENT and peer.error is None and not self.is_closed:
            self.post.send(peer.rank, encode(Cancel(calling.number)))

    def make_room(self, peer: Peer) -> None:
        """Let those go on who were held back, if there is room by now."""
        if not peer.has_room:
            return
        with peer.lock:
            rooms, peer.room = peer.room, []
        for room in rooms:
            room.is_done = True
            self.post.wake(room)

    # -- news of others -----------------------------------------------------------------------------------

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
        self._fail_calls(
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
        self._lose(peer, lambda: _lost(down.rank, down.cause))

    def on_silence(self) -> None:
        """The backend was closed under the agent."""
        self.runtime.call_soon(self.close)

    def on_abort(self, error: UnisonoError) -> None:
        """The communicator was given up, here or elsewhere."""
        for peer in self._peers:
            self._end_peer(peer, lambda: error.located(Location()))

    # -- frames -------------------------------------------------------------------------------------------

    def _on_frame(self, source: int, data: bytes) -> None:
        """A frame came. Whatever is wrong with it, the next one is heard."""
        try:
            frame = decode(data)
            kind = type(frame)
            if kind is Answer:
                self._on_answer(self._peers[source], frame)  # type: ignore[arg-type]
            elif kind is Ask or kind is PackedAsk:
                self._server.on_ask(source, frame)  # type: ignore[arg-type]
            else:
                self._on_rare_frame(self._peers[source], frame)
        except ProtocolError as error:
            rank = self._peers[source].world_rank
            if not self._peers[source].is_blamed:
                self._peers[source].is_blamed = True
                _log.warning("rank %d sends malformed frames: %s", rank, error)
            cause = str(error)
            self._fail_calls(
                self._peers[source],
                lambda: ProtocolError(f"rank {rank} sent a malformed frame", cause=cause),
            )
        except ClosedError:
            return  # the backend was closed meanwhile: nobody can be answered
        except Exception:
            _log.exception("rank %d: a frame could not be heeded", self.world_rank)

    def _on_answer(self, peer: Peer, frame: Answer) -> None:
        calling = peer.calls.get(frame.call)
        if calling is None:
            return
        if calling.stream is not None:
            calling.stream.end_at(frame.value if type(frame.value) is int else 0)
            self._look_at_end(peer, calling, calling.stream)
        elif peer.calls.pop(frame.call, None) is not None:
            calling.complete(frame.value)

    def _look_at_end(self, peer: Peer, calling: Calling, stream: Arrivals) -> None:
        """A stream ends when its last item is here, whoever brings it."""
        if stream.is_complete and peer.calls.pop(calling.number, None) is not None:
            calling.complete(stream.total)

    def _on_rare_frame(self, peer: Peer, frame: Any) -> None:
        match frame:
            case Failure():
                if (calling := peer.calls.pop(frame.call, None)) is not None:
                    calling.fail(error_of(frame, calling).located(calling.location()))
            case PackedAnswer():
                self._on_packed_answer(peer, frame)
            case Item():
                if (calling := peer.calls.get(frame.call)) is not None and calling.stream is not None:
                    calling.stream.add(frame.index, frame.value)
                    self._look_at_end(peer, calling, calling.stream)
            case PackedItem():
                self._on_packed_item(peer, frame)
            case More():
                self._server.on_more(peer.rank, frame.call, frame.count)
            case Cancel():
                self._server.on_cancel(peer.rank, frame.call)
            case Ack():
                with peer.lock:
                    peer.notes = max(0, peer.notes - max(0, frame.count))
                if peer.room:
                    self.make_room(peer)
            case Bye():
                self._lose(peer, lambda: closed_there(peer))

    def _on_packed_answer(self, peer: Peer, frame: PackedAnswer) -> None:
        calling = peer.calls.get(frame.call)
        if calling is None:
            # Given up meanwhile: what follows must not wait for somebody to take it.
            self.post.send(peer.rank, encode(Cancel(frame.call)))
            return
        memory = places(frame.body)

        def then(error: BaseException | None) -> None:
            if peer.calls.pop(frame.call, None) is None:
                return
            try:
                if error is not None:
                    raise error
                calling.complete(unpack(frame.body, memory))
            except PeerLost:
                calling.fail(_lost(peer.world_rank, "it died while it answered").located(calling.location()))
            except Exception as fault:
                calling.fail(fault)

        if not memory:
            then(None)
            return
        taking = Taking(self.post, peer.rank, frame.number, memory, then)
        # Those that hold each other keep the memory until the collector comes: so only while it is needed.
        if not taking.is_done:
            calling.taking = taking
        if calling.is_done:
            calling.taking = None
            taking.cancel()

    def _on_packed_item(self, peer: Peer, frame: PackedItem) -> None:
        calling = peer.calls.get(frame.call)
        if calling is None or (stream := calling.stream) is None:
            return  # given up: its generator was told, and takes back what is on its way
        memory = places(frame.body)

        def then(error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                stream.add(frame.index, unpack(frame.body, memory))
            except PeerLost:
                lost = _lost(peer.world_rank, "it died while it answered").located(calling.location())
                stream.add(frame.index, None, lost)
            except Exception as fault:
                stream.add(frame.index, None, fault)
            self._look_at_end(peer, calling, stream)

        if not memory:
            then(None)
            return
        taking = Taking(self.post, peer.rank, frame.number, memory, then)
        calling.items = [*(one for one in calling.items if not one.is_done), taking]
        if calling.has_failed:
            taking.cancel()

    # -- making calls -------------------------------------------------------------------------------------

    def _begin(
        self,
        dst: int | str,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        *,
        timers: bool,
        arrivals: Arrivals | None = None,
    ) -> Calling:
        now = self.runtime.now()
        deadline = NEVER if timeout is None else self.runtime.deadline(timeout)
        above = current.get()
        until = None if above is None else above.deadline.at
        # Whoever waits for this handler does not wait longer.
        if until is not None and (deadline.at is None or until < deadline.at):
            deadline = Deadline(until, max(0.0, until - now))
        # A handler that waits here is one of a bounded number; held back, it might wait for its own caller.
        is_waiting_handler = above is not None and not timers and arrivals is None
        peer = self._admitted(dst, name, deadline, is_held=not is_waiting_handler)
        number = self.next_number()
        calling = Calling(self, peer, number, name, deadline, now)
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
            body, parts = pack([list(args), kwargs])
            following = self.next_number()
            return encode(PackedAsk(number, name, timeout_s, following, body, window)), following, parts
        except (UnicodeEncodeError, OverflowError) as error:
            raise UsageError(f"the call of {name!r} cannot be encoded: {error}") from None

    def _dispatch(
        self, peer: Peer, frame: bytes, following: int, parts: list[memoryview], calling: Calling | None
    ) -> None:
        """Send a call, or hold it until it is known that there is an agent to take it."""
        if peer.state is Peer.State.PRESENT:
            self._send(peer, frame, following, parts, calling)
        else:
            self._hold(peer, partial(self._send, peer, frame, following, parts, calling))
        if peer.error is not None and calling is not None:
            error = peer.error
            if peer.calls.pop(calling.number, None) is not None:
                calling.fail(error().located(calling.location()))

    def _hold(self, peer: Peer, send: Callable[[], None]) -> None:
        with peer.lock:
            state = peer.state
            if state is not Peer.State.PRESENT:
                peer.state = Peer.State.ASKED
                peer.held.append(send)
        if state is Peer.State.PRESENT:
            send()
        elif state is Peer.State.UNKNOWN:
            self._directory.ask_for(self, peer.world_rank)

    def _send(
        self, peer: Peer, frame: bytes, following: int, parts: list[memoryview], calling: Calling | None
    ) -> None:
        if calling is not None and calling.is_done:
            return
        self.post.send(peer.rank, frame)
        if parts:
            sending = Sending(self.post, peer.rank, following, parts)
            if calling is not None:
                calling.sending = sending
                if calling.is_done:
                    sending.cancel()

    def _admitted(self, dst: int | str, name: str, deadline: Deadline, *, is_held: bool = True) -> Peer:
        """The rank to call; if `is_held`, once there is room for another call to it."""
        if self.is_closed or (self.is_closing and current.get() is None):
            raise closed_here().located(Location(f"call of {name!r}", self.communicator, self.epoch))
        if not isinstance(name, str) or len(name) > NAME_CHARS_MAX:
            raise UsageError(f"name={str(name)[:80]!r}; allowed: a text of up to {NAME_CHARS_MAX} characters")
        peer = self._peer_of(dst, deadline)
        if is_held and peer.is_full:
            self._await_room(peer, name, deadline)
        return peer

    def _await_room(self, peer: Peer, name: str, deadline: Deadline) -> None:
        room = Room()
        with peer.lock:
            peer.room.append(room)
        self.make_room(peer)
        waiting = Waiting(self.world_rank, (peer.world_rank,), f"call of {name!r}")
        self.wait_for(room, deadline, waiting)
        if not room.is_done:
            raise DeadlineExceeded(
                f"rank {peer.world_rank} has too many calls to answer",
                waiting_on=(peer.world_rank,),
                where=Location(f"call of {name!r}", self.communicator, self.epoch),
            )

    def wait_for(self, room: Awaited, deadline: Deadline, waiting: Waiting) -> None:
        """Wait for something that is no answer; a handler gives up its slot meanwhile."""
        incoming = current.get()
        pool = None if incoming is None else incoming.server.slot_of_thread()
        if pool is None:
            self.post.wait(room, deadline, lambda: waiting)
            return
        pool.give_up_slot()
        try:
            self.post.wait(room, deadline, lambda: waiting)
        finally:
            pool.take_slot(lambda: waiting)

    # -- names --------------------------------------------------------------------------------------------

    def _peer_of(self, dst: Any, deadline: Deadline) -> Peer:
        if type(dst) is int and 0 <= dst < len(self._peers):
            return self._peers[dst]
        if isinstance(dst, str):
            return self._named(dst, deadline)
        if isinstance(dst, np.integer) and 0 <= dst < len(self._peers):
            return self._peers[int(dst)]
        raise UsageError(f"dst={dst!r}; allowed: ranks 0 to {len(self._peers) - 1}, or an agent's name")

    def _named(self, name: str, deadline: Deadline) -> Peer:
        """Find the agent of a name: every rank is asked once what its agent is called."""
        if (known := self._names.get(name)) is not None:
            return known
        self._peers[self.backend.rank].name = self.name or ""
        for peer in self._peers:
            with peer.lock:
                must_ask = peer.state is Peer.State.UNKNOWN and peer.error is None
                if must_ask:
                    peer.state = Peer.State.ASKED
            if must_ask:
                self._directory.ask_for(self, peer.world_rank)
        waiting = Waiting(self.world_rank, (), f"looking for the agent {name!r}")
        while True:
            room = Room()
            self._resolving.append(room)
            found = [peer for peer in self._peers if peer.name == name]
            asked = [p for p in self._peers if p.state is Peer.State.ASKED and p.error is None]
            if not asked:
                break
            self.wait_for(room, deadline, waiting)
            if not room.is_done:
                raise DeadlineExceeded(
                    f"rank {asked[0].world_rank} did not say what its agent is called",
                    waiting_on=tuple(p.world_rank for p in asked),
                )
        if len(found) != 1:
            names = sorted(peer.name for peer in self._peers if peer.name)
            raise UsageError(f"dst={name!r} is {len(found)} agents; known: {', '.join(names) or 'none'}")
        self._names[name] = found[0]
        return found[0]

    def _wake_resolvers(self) -> None:
        rooms, self._resolving = self._resolving, []
        for room in rooms:
            room.is_done = True
            self.post.wake(room)

    # -- how they end -------------------------------------------------------------------------------------

    def _leave_at_exit(self, pid: int) -> None:
        """Leave without a word: nobody has closed the agent."""
        if self.is_closing or os.getpid() != pid:
            return
        self.is_closing = self.is_closed = True
        for peer in self._peers:
            self._end_peer(peer, closed_here)
        self.post.close()
        self._server.pool.close(0.0, lambda: Waiting(self.world_rank, (), "the end of the process"))

    def _drain(self, deadline: Deadline) -> None:
        """Wait until every call that came is answered."""
        if self._server.pool.is_mine:
            return
        pause_s = 0.0002
        while not self._server.is_idle() and not deadline.has_passed(self.runtime.now()):
            self.runtime.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)

    def _lose(self, peer: Peer, error: Callable[[], UnisonoError]) -> None:
        """A rank, or its agent, is gone."""

        def end() -> None:
            self._end_peer(peer, error)
            self._server.on_gone(peer.rank)

        # Its last answers are here, but another thread may be about to deliver them.
        self.post.when_quiet(end)

    def _end_peer(self, peer: Peer, error: Callable[[], UnisonoError]) -> None:
        """Nothing can be called there any more, and why."""
        if peer.error is None:
            peer.error = error
        with peer.lock:
            peer.held = []
        self._fail_calls(peer, error)
        self.make_room(peer)
        self._wake_resolvers()

    def _fail_calls(self, peer: Peer, error: Callable[[], UnisonoError]) -> None:
        for number in list(peer.calls):
            if (calling := peer.calls.pop(number, None)) is not None:
                calling.fail(error().located(calling.location()))


def _lost(rank: int, cause: str) -> PeerLost:
    return PeerLost(lost_text((rank,)), ranks=(rank,), cause=cause)

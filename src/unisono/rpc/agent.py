"""The agent: what a user holds to call functions on other ranks, and to let them call functions here.

Knows the parts of an agent and how they meet: who the others are (peers.py), what is called (outgoing.py),
heard (hearing.py) and served (server.py), and how frames travel (post.py). Does not know how any of them
works.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar, overload

from unisono.core.clock import Deadline, Runtime, Waiting
from unisono.core.envelope import Tags
from unisono.core.work import Work, wait_all
from unisono.errors import Location, UnisonoError, UsageError
from unisono.messaging.backend import Backend, PeerDown
from unisono.rpc.calls import PendingCall, closed_here
from unisono.rpc.frames import Bye, Cancel, encode
from unisono.rpc.hearing import FrameDispatcher
from unisono.rpc.incoming import current
from unisono.rpc.objects import Proxy, Reference
from unisono.rpc.outgoing import TIMEOUT_S, CallStarter
from unisono.rpc.peers import Directory, Peer, Peers
from unisono.rpc.pool import Pool
from unisono.rpc.post import (
    UNBOUNDED,
    UNSENT_BYTES_MAX,
    CallbackTransport,
    MailboxTransport,
    RpcTransport,
    Waitable,
)
from unisono.rpc.registry import Registry, check_name
from unisono.rpc.server import Server
from unisono.rpc.streams import Arrivals, Stream

__all__ = ["Agent"]

F = TypeVar("F", bound=Callable[..., Any])

# Handlers that run at the same time; those that wait for other ranks do not count.
_HANDLERS: Final = 16

_BYE: Final = encode(Bye())


class LaunchInfo(Protocol):
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

    def _attach(self, service: Any, purpose: str) -> tuple[LaunchInfo, int]:
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
        if not hasattr(communicator, "_attach"):
            raise UsageError(
                f"{communicator!r} is no communicator", next_step="Agent(world), or any group of it"
            )
        place, self.context = communicator._attach(self, "rpc")
        # Who serves needs the communicator, whoever else has forgotten it.
        self._home: Communicator | None = communicator
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
        self._registry = Registry()
        self._classes: dict[str, type] = {}
        ranks = place.world_ranks
        self._server = Server(self, self._registry, len(ranks), place.progress)
        self._peers = Peers(self, place.control, ranks, self.backend.rank, self._server.on_gone)
        self._outgoing = CallStarter(self, self._peers)
        self._hearing = FrameDispatcher(self, self._peers, self._server)
        title = f"unisono-rpc-{self.world_rank}"
        mailbox = self.backend.mailbox(self.context, Tags.RPC)
        self.post: RpcTransport
        if mailbox is not None:
            post = MailboxTransport(mailbox, self.runtime, self._hearing.on_frame)
            self.post = post
            self._server.pool = Pool(self.runtime, self._server.run, handlers, title, post)
            # At the end of the interpreter no thread may come back from below Python.
            atexit.register(self._leave_at_exit, os.getpid())
        else:
            self._server.pool = Pool(self.runtime, self._server.run, handlers, title, None)
            self.post = CallbackTransport(self.backend, self.context, self._hearing.on_frame)
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
        return self._outgoing.begin(dst, name, args, kwargs, timeout, timers=False).wait()

    def start(
        self, dst: int | str, name: str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> Work[Any]:
        """Begin a call. Arrays in the arguments belong to it until it is done.

        With many calls to one rank under way it waits until some of them are answered.
        """
        return self._outgoing.begin(dst, name, args, kwargs, timeout, timers=True)

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
        self._outgoing.notify(dst, name, args, kwargs)

    def stream(
        self, dst: int | str, name: str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> Stream:
        """Read what a generator on another rank gives, item by item; `timeout` is for each of them.

        The generator is at most a few items ahead. It is closed with the stream, or when that is forgotten.
        """
        arrivals = Arrivals(self.post.wake)
        calling = self._outgoing.begin(dst, name, args, kwargs, None, timers=False, arrivals=arrivals)
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
        rank = self._peers.of(dst, self.runtime.deadline(TIMEOUT_S)).rank
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
                self.post.send(peer.rank, _BYE, UNBOUNDED)
        self.is_closed = True
        for peer in self._peers:
            self._peers.end(peer, closed_here)
        self._directory.unsettle(self)
        self._outgoing.close()
        self._server.close(flush_s, waiting)
        self.post.close()
        self.backend.end_group(self.context)
        self._server.pool.close(flush_s, lambda: waiting)
        self._home = None

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

    def tell_cancelled(self, calling: PendingCall) -> None:
        """The other side need not answer."""
        peer = calling.peer
        if peer.state is Peer.State.PRESENT and peer.error is None and not self.is_closed:
            self.tell(peer.rank, encode(Cancel(calling.number)))

    def tell(self, rank: int, frame: bytes) -> None:
        """Send a frame that is no call; a rank that takes none is given up."""
        if not self.post.send(rank, frame, UNSENT_BYTES_MAX):
            self.give_up(rank)

    def give_up(self, rank: int) -> None:
        """A frame for a rank was dropped, so one of its calls cannot end well: end all from and to it."""
        self._peers.give_up(self._peers[rank])

    def make_room(self, peer: Peer) -> None:
        """A call has ended: others may be held back."""
        self._peers.make_room(peer)

    def wait_for(self, room: Waitable, deadline: Deadline, waiting: Waiting) -> None:
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

    # -- news of others -----------------------------------------------------------------------------------

    def on_present(self, sender: int, name: str) -> None:
        """A world rank has an agent, and what it is called."""
        self._peers.on_present(sender, name)

    def on_absent(self, sender: int) -> None:
        """A world rank has no agent."""
        self._peers.on_absent(sender)

    def on_peer_down(self, down: PeerDown) -> None:
        """A world rank is gone."""
        self._peers.on_peer_down(down)

    def on_backend_closed(self) -> None:
        """The backend was closed under the agent."""
        self.runtime.call_soon(self.close)

    def on_abort(self, error: UnisonoError) -> None:
        """The communicator was given up, here or elsewhere."""
        for peer in self._peers:
            self._peers.end(peer, lambda: error.located(Location()))

    # -- how they end -------------------------------------------------------------------------------------

    def _leave_at_exit(self, pid: int) -> None:
        """Leave without a word: nobody has closed the agent."""
        if self.is_closing or os.getpid() != pid:
            return
        self.is_closing = self.is_closed = True
        for peer in self._peers:
            self._peers.end(peer, closed_here)
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

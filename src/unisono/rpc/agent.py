"""The agent: what a user holds to call functions on other ranks, and to let them call functions here.

It only wires the parts together: the transport carries frames, the dispatcher passes them to the calls made
from here (client) or to the server, and peers are the agents of the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, Self, TypeVar, overload

from unisono.core.envelope import Tags
from unisono.core.runtime import Runtime, Waiting, refuse_blocking
from unisono.core.waits import wait_all
from unisono.core.work import Work
from unisono.errors import UnisonoError, UsageError
from unisono.messaging.backend import Backend
from unisono.rpc.client import TIMEOUT_S, CallStarter
from unisono.rpc.dispatch import FrameDispatcher
from unisono.rpc.objects import Objects, Proxy, Reference
from unisono.rpc.peers import Peers
from unisono.rpc.pending_call import PendingCall
from unisono.rpc.registry import Registry, check_name
from unisono.rpc.server import Server
from unisono.rpc.streams import Stream
from unisono.rpc.transport import CallbackTransport, MailboxTransport, RpcTransport

__all__ = ["Agent"]

F = TypeVar("F", bound=Callable[..., Any])

# Handlers that run at the same time; those that wait for other ranks do not count.
_HANDLERS: Final = 16


class Directory(Protocol):
    """Finds the agents of other ranks, and reports lost ranks: control.Control."""

    def add_service(self, service: Any) -> None:
        """Tell the other ranks of this service when they ask, and call it back from now on."""

    def remove_service(self, service: Any) -> None:
        """Call it back no more."""

    def query_service(self, service: Any, rank: int) -> None:
        """Ask a world rank whether it has a service of this context: `on_present` or `on_absent` follows."""


class Group(Protocol):
    """The members of a communicator, and this rank among them: group.Group."""

    name: str
    epoch: int
    world_rank: int
    world_ranks: tuple[int, ...]
    backend: Backend

    @property
    def control(self) -> Directory: ...

    def progress(self) -> dict[int, int]:
        """The number of this rank's next collective, by context."""


class Communicator(Protocol):
    """What an agent needs of a communicator."""

    def _attach(self, service: Any, purpose: str) -> tuple[Group, int]:
        """Close the service with the communicator; returns the group, and a context for the service."""


class Agent:
    """Calls functions on the other ranks of a communicator, and serves their calls from now on.

    Every rank that is to be called makes an agent. It closes with its communicator.

    Args:
        communicator: whose ranks may call each other.
        name: another way for other ranks to call this one.
        handlers: how many functions may run at the same time here; one that waits for another rank does not
            count.

    Raises:
        UsageError: an argument is wrong, or the communicator has an agent already.
        ClosedError: the communicator is closed.
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
                f"{communicator!r} is not a communicator", next_step="Agent(world), or any group of it"
            )
        service = self._service = _Service(name, self.close)
        group, context = communicator._attach(service, "rpc")
        # An agent that serves keeps its communicator open, even if the program drops it.
        self._home: Communicator | None = communicator
        self._is_closing = False
        self._lock = threading.Lock()
        self._context = context
        self._communicator = group.name
        self._directory = group.control
        self._backend = backend = group.backend
        self._runtime: Runtime = backend.runtime

        mailbox = backend.mailbox(context, Tags.RPC)
        reader = None if mailbox is None else MailboxTransport(mailbox, self._runtime)
        transport: RpcTransport = reader or CallbackTransport(backend, context)
        self._transport = transport
        query = partial(self._directory.query_service, service)
        self._peers = peers = Peers(transport, group.world_ranks, backend.rank, name, query)
        self._objects = Objects()
        peers.watch_lost(self._objects.on_lost)
        self._classes: dict[str, tuple[type, bool]] = {}  # and whether they are inline
        self._registry = Registry()
        self._server = Server(
            self._runtime, transport, peers, self._registry, group.progress, handlers, reader
        )
        self._server.watch_cancelled(self._objects.on_cancelled)
        self._client = CallStarter(self._runtime, transport, peers, group.name, group.epoch)
        self._dispatcher = FrameDispatcher(transport, peers, self._client, self._server)

        service.start(context, group.progress(), peers, self._runtime)
        transport.start(self._dispatcher.on_frame)
        self._server.pool.start()
        if mailbox is not None:
            # When the interpreter ends, no thread of the pool may return into Python from the mailbox.
            atexit.register(self._leave_at_exit)
        self._directory.add_service(service)

    @property
    def name(self) -> str | None:
        """The name that other ranks may call this agent by."""
        return self._service.name

    # -- what others may call -----------------------------------------------------------------------------

    @overload
    def expose(self, fn: F) -> F: ...
    @overload
    def expose(
        self, fn: None = None, *, name: str | None = None, inline: bool = False
    ) -> Callable[[F], F]: ...
    def expose(
        self, fn: F | None = None, *, name: str | None = None, inline: bool = False
    ) -> F | Callable[[F], F]:
        """Let others call a function. A decorator, with or without options.

        Args:
            fn: the function, or class.
            name: by which others call it; by default its own.
            inline: as in `register`.

        Raises:
            UsageError: as in `register`.
        """
        if fn is None:
            return partial(self._exposed, name, inline)
        return self._exposed(name, inline, fn)

    def register(self, name: str, fn: Callable[..., Any], *, inline: bool = False) -> None:
        """Let others call a function by this name; of a class, let them make instances and call methods.

        Args:
            name: letters, digits and `_ . : / -`, beginning with a letter.
            fn: a function, a coroutine function, a generator function of either kind, or a class.
            inline: for a function that returns at once. Such a function also runs on a thread of this rank
                that waits for the answer to a remote call, so that no other thread has to be woken. It must
                not wait: blocking verbs and calls raise UsageError in it, and one that takes long is logged.

        Raises:
            UsageError: the name is invalid or taken; an `async def` function or a generator cannot be inline;
                a class has a method that a proxy could not call, such as `start` or `release`.
        """
        if isinstance(fn, type):
            if self._classes.get(name) == (fn, inline):
                return
            check_name(name)
            self._registry.add_all(self._objects.handlers_of(fn, name), is_inline=inline)
            self._classes[name] = (fn, inline)
        else:
            self._registry.add(name, fn, is_inline=inline)
        self._server.on_exposed()

    def _exposed(self, name: str | None, inline: bool, fn: F) -> F:
        self.register(name if name is not None else getattr(fn, "__name__", ""), fn, inline=inline)
        return fn

    # -- calling ------------------------------------------------------------------------------------------

    def call(
        self, dst: int | str, name: str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> Any:
        """Call a function of another rank, or of this one, and return what it returns.

        Args:
            dst: the rank, or the name of its agent.
            name: of the function.
            *args: passed on, as are keywords: plain data, bytes, arrays, registered classes, references.
            timeout: seconds until the answer must be here; None means no limit.
            **kwargs: passed on.

        Raises:
            UsageError: an argument cannot be sent, or the thread must not block. Nothing was sent.
            RemoteError: the function raised; BadArguments, NotExposed: it was not called.
            DeadlineExceeded: there was no answer within `timeout` seconds; the call is cancelled there.
            PeerLost: the rank, or its agent, is gone.
        """
        return self._begin_blocking(dst, name, args, kwargs, timeout).wait()

    def start(
        self, dst: int | str, name: str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> Work[Any]:
        """Begin a call. Arrays in the arguments belong to it until it is done.

        With many calls to one rank under way it waits until some of them are answered.

        Args:
            dst: the rank, or the name of its agent.
            name: of the function.
            *args: as in `call`.
            timeout: as in `call`.
            **kwargs: as in `call`.

        Raises:
            UnisonoError: as in `call`, if the call cannot be sent; else the work's `wait` raises it.
        """
        return self._client.begin(dst, name, args, kwargs, timeout, timers=True)

    def call_all(
        self, name: str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Call a function on every rank, this one included; the results by rank.

        Args:
            name: of the function.
            *args: as in `call`.
            timeout: seconds until each answer must be here.
            **kwargs: as in `call`.

        Raises:
            UnisonoError: as in `call`: the first error, after all calls have ended.
        """
        works: list[Work[Any]] = []
        try:
            for rank in range(len(self._peers)):
                work = self.start(rank, name, *args, timeout=timeout, **kwargs)
                works.append(work)
        except BaseException:
            for work in works:
                work.cancel()
            raise
        return wait_all(works)

    def notify(self, dst: int | str, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Call a function without an answer: an error is logged there.

        Args:
            dst: the rank, or the name of its agent.
            name: of the function.
            *args: as in `call`.
            **kwargs: as in `call`.

        Raises:
            UsageError: an argument cannot be sent.
            RemoteError, PeerLost, DeadlineExceeded: the call could not be sent.
        """
        self._client.notify(dst, name, args, kwargs)

    def stream(
        self, dst: int | str, name: str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> Stream:
        """Read the items of a generator on another rank.

        The generator is at most a few items ahead. It is closed with the stream, or when that is dropped.

        Args:
            dst: the rank, or the name of its agent.
            name: of the generator function.
            *args: as in `call`.
            timeout: seconds for each item.
            **kwargs: as in `call`.

        Raises:
            UnisonoError: as in `call`, if the call cannot be sent; else reading an item raises it.
        """
        return self._client.stream(dst, name, args, kwargs, timeout)

    # -- objects ------------------------------------------------------------------------------------------

    def remote(
        self, dst: int | str, cls: type | str, /, *args: Any, timeout: float | None = TIMEOUT_S, **kwargs: Any
    ) -> Proxy:
        """Make an instance of an exposed class on another rank; a proxy calls its public methods.

        It lives until the proxy is released or dropped, or this rank is gone.

        Args:
            dst: the rank, or the name of its agent.
            cls: the class, or the name under which it is exposed there.
            *args: of its constructor, as in `call`.
            timeout: as in `call`.
            **kwargs: of its constructor.

        Raises:
            UnisonoError: as in `call`.
        """
        name = cls if isinstance(cls, str) else cls.__name__
        rank = self._peers.find(dst, self._runtime.deadline(TIMEOUT_S)).rank
        pending = self._begin_blocking(rank, name, args, kwargs, timeout)
        try:
            reference = Reference(rank, name, pending.wait())
            return Proxy(self, reference, partial(self._release, reference), self._runtime.finalizer)
        except BaseException:
            # A call that is given up takes its instance along; if it was answered, a signal came after that.
            if not pending.cancel() and not pending.has_failed:
                self._release(Reference(rank, name, pending.wait()))
            raise

    def proxy(self, reference: Reference) -> Proxy:
        """Call an object that another rank has made; this proxy does not keep it alive.

        Args:
            reference: `proxy.reference` of any rank.

        Raises:
            UsageError: it is no reference.
        """
        if not isinstance(reference, Reference):
            raise UsageError(f"{reference!r} is not a reference; allowed: `proxy.reference` of any rank")
        return Proxy(self, reference)

    def _begin_blocking(
        self,
        dst: int | str,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
    ) -> PendingCall:
        """Begin a call for whose answer this thread is to wait."""
        loop = self._server.loop
        if loop is not None and loop.is_mine:
            raise UsageError("call would block the event loop; allowed: await agent.start(...)")
        refuse_blocking()
        return self._client.begin(dst, name, args, kwargs, timeout, timers=False)

    def _release(self, reference: Reference) -> None:
        with contextlib.suppress(UnisonoError):
            if self._client.can_call(reference.rank):
                self.notify(reference.rank, reference.release_name, reference.number)

    # -- endings ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the calls that came, end those that were made, send the notifications, and leave.

        Blocks up to `Config.flush_s`. A rank that calls this one from now on gets PeerLost. A second call
        does nothing.

        Raises:
            UsageError: an inline handler must not wait.
        """
        refuse_blocking()
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        atexit.unregister(self._leave_at_exit)
        if self._runtime.is_forked:
            return
        self._client.refuse_calls()
        self._server.refuse_calls()
        flush_s = self._backend.config.flush_s
        waiting = Waiting(self._peers.own.world_rank, (), "closing the agent")
        self._server.drain(self._runtime.deadline(flush_s), self._client.is_all_sent)
        self._peers.say_goodbye()
        self._client.close()
        self._directory.remove_service(self._service)
        self._server.close(flush_s, waiting)
        self._objects.clear()
        self._transport.close()
        self._backend.end_group(self._context)
        self._server.pool.close(flush_s, lambda: waiting)
        self._home = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._client.is_closed else ""
        return f"<Agent of rank {self._backend.rank} on {self._communicator!r}{state}>"

    def _leave_at_exit(self) -> None:
        """The interpreter ends and the program has not closed the agent: leave without a goodbye."""
        if self._is_closing or self._runtime.is_forked:
            return
        self._is_closing = True
        self._client.close()
        self._transport.close()
        waiting = Waiting(self._peers.own.world_rank, (), "the end of the process")
        self._server.pool.close(0.0, lambda: waiting)


class _Service:
    """An agent as its group and the control messages see it: control.Service. Ranks are world ranks."""

    def __init__(self, name: str | None, close: Callable[[], None]) -> None:
        self.name = name
        self.close = close

    def start(self, context: int, progress: dict[int, int], peers: Peers, runtime: Runtime) -> None:
        """The parts exist. `progress` is the number of this rank's next collective, by context."""
        self.context = context
        self.progress = progress
        self.on_present = peers.on_present
        self.on_absent = peers.on_absent
        self.on_peer_down = peers.on_peer_down
        self.on_abort = peers.on_abort
        self.on_backend_closed = partial(runtime.call_soon, self.close)

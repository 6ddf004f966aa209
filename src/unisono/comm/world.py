"""How a world begins: init (under a launcher, or alone), local, spawn and simulate.

Chooses the backend, joins the world through bootstrap/, and makes the Communicator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from unisono.backends.registry import (
    BackendStatus,
    BindSpec,
    Closable,
    UnconnectedBackend,
    backend_named,
    decoded_card,
    statuses,
)
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.environment import launch, network
from unisono.errors import BackendUnavailable, ProtocolError, UsageError
from unisono.messaging.backend import Backend
from unisono.plans import measured
from unisono.version import VERSION

if TYPE_CHECKING:
    from unisono.backends.native.backend import NativeBackend
    from unisono.backends.native.card import Card, Credentials
    from unisono.bootstrap.entry import ListenSpec
    from unisono.bootstrap.join import View
    from unisono.bootstrap.launch_info import LaunchInfo
    from unisono.simulation import Fault, Network, SimResult

__all__ = ["init", "joined", "list_backends", "local", "simulate", "spawn"]


def init(
    backend: str = "auto",
    *,
    rank: int | None = None,
    size: int | None = None,
    join: str | None = None,
    timeout: float = 30.0,
    config: Config | None = None,
) -> Communicator:
    """Join the world that this process was started in; without a launcher it is a world of one rank.

    Recognises `unisono run`, torchrun, Open MPI, Slurm and RANK/WORLD_SIZE, in this order. If a launcher
    names several ranks, a rank that does not find the others fails; it never becomes a world of one.

    Args:
        backend: a name of `list_backends()`. "auto" is the native backend, unless `unisono run --backend` or
            UNISONO_BACKEND names another.
        rank: this rank, if no launcher names it.
        size: the number of ranks, if no launcher names it.
        join: the join ticket, or the path of a file with it, if no launcher provides one.
        timeout: seconds to find the other ranks.
        config: the settings; by default those of the environment. They must be equal on all ranks.

    Raises:
        UsageError: the arguments contradict each other or the launcher.
        RendezvousError: the world did not form in time; the text names the missing ranks.
        BackendUnavailable: the backend cannot run here; the text names what is missing.
    """
    environment = network()  # the address, ticket and backend of this process
    if backend == "auto":
        backend = environment.backend
    # The native backend always exists: do not import the registry of the others for it.
    info = None if backend == "native" else backend_named(backend)
    settings = config if config is not None else Config()
    if info is not None and info.join is not None:
        if (rank, size, join) != (None, None, None):
            raise UsageError(
                f"backend={backend!r} takes rank and size from {info.launcher}",
                next_step="remove rank=, size= and join=",
            )
        _check_prefixes(backend, settings)
        return Communicator.world(info.join(settings, timeout))
    from unisono.bootstrap.launch_info import decide  # not needed for a world in one process

    launch_info = decide(launch(), environment, rank=rank, size=size, join=join, insecure=settings.insecure)
    return joined(launch_info, backend, settings, timeout)


def spawn(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    backend: str = "native",
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    config: Config | None = None,
) -> list[Any]:
    """Run `fn(comm, *args)` in `n` fresh processes of this host and return the results by rank.

    Args:
        fn: a function at the top level of a module or of the caller's main file, where the new processes find
            it by its name.
        n: the number of ranks.
        *args: objects as `send_object` takes them; so are the results.
        backend: a backend whose ranks need no launcher of their own.
        timeout: seconds after which all ranks are killed; None means no limit.
        env: environment variables for the ranks.
        config: the settings; by default those of the environment.

    Raises:
        DeadlineExceeded: the timeout passed.
        Exception: the exception of the first rank that failed; RemoteError if its type is unknown here.
    """
    if backend_named(backend).join is not None:
        raise UsageError(
            f"backend={backend!r} in uni.spawn; allowed: backends whose ranks need no launcher of their own",
            next_step=f"unisono run --backend {backend}",
        )
    from unisono.launcher.spawn import spawn as start  # imported only if it is used

    return start(
        fn, n, args, enter=_entered, backend=backend, version=VERSION, timeout=timeout, env=env, config=config
    )


@contextlib.contextmanager
def _entered(
    launch_info: LaunchInfo, backend: str, config: Config, timeout: float | None
) -> Iterator[Communicator]:
    """The world of a spawned rank."""
    with joined(launch_info, backend, config, timeout) as world:
        yield world


def joined(launch_info: LaunchInfo, backend: str, config: Config, timeout: float | None) -> Communicator:
    """Join the world that `launch_info` describes, on a backend whose ranks need no launcher of their own.

    Raises:
        UsageError: the backend has no ranks in processes of their own, or only by its own launcher.
        RendezvousError, BackendUnavailable: see `init`.
    """
    _check_prefixes(backend, config)
    if launch_info.source is None:
        return local(1, config)[0]
    bind, wrap, config = _binding_of(backend, launch_info.size, config)
    from unisono.bootstrap.entry import enter

    unconnected: list[_Native | _Foreign] = []

    def make_card(listen: ListenSpec) -> bytes:
        """Called once for each attempt to join; the backend of an earlier attempt is closed."""
        while unconnected:
            unconnected.pop().close()
        unconnected.append(bind(listen, config))
        return unconnected[0].card()

    try:
        entry = enter(launch_info, make_card=make_card, config=config, version=VERSION, timeout=timeout)
    except BaseException:
        for each in unconnected:
            each.close()
        raise
    try:
        measured.table()  # read now: at the first collective the process may have no file descriptor left
        world = unconnected[0].connect(entry.view)
        if wrap is not None:
            world = wrap(world)
    except BaseException:
        unconnected[0].close()
        entry.close()
        raise
    world.when_closed(entry.close)
    return Communicator.world(world)


def _check_prefixes(backend: str, config: Config) -> None:
    """Settings of one backend would silently do nothing for another.

    Raises:
        UsageError: settings of iroh's are given for another backend.
    """
    if backend != "iroh" and (names := config.chosen("iroh_")):
        raise UsageError(
            f"{', '.join(names)} for backend={backend!r}; allowed: for backend='iroh'",
            next_step="remove them, or choose backend='iroh'",
        )


def _binding_of(
    backend: str, size: int, config: Config
) -> tuple[Callable[[ListenSpec, Config], _Native | _Foreign], Callable[[Closable], Closable] | None, Config]:
    """What makes a rank of a backend that listens, what wraps it once it is connected, and its settings."""
    if backend in ("auto", "native"):
        return _Native, None, config
    info = backend_named(backend)
    if not info.has_processes:
        raise UsageError(f"backend={backend!r} for {size} processes; allowed: ranks of one process")
    if info.join is not None:
        raise UsageError(
            f"backend={backend!r} takes its ranks from {info.launcher}",
            next_step="unset UNISONO_BACKEND; native is the default",
        )
    bind = _Native if info.bind is None else partial(_Foreign, info.bind)
    return bind, info.wrap, info.adapt(config)


class _Native:
    """A rank of the native backend that is not connected yet."""

    def __init__(self, listen: ListenSpec, config: Config) -> None:
        self._listen = listen
        self._engine = _engine(listen, config)

    def card(self) -> bytes:
        """The address for the other ranks, with the advertised host and port."""
        card, advertise = self._engine.card(), self._listen.advertise
        return msgspec.msgpack.encode(card._replace(address=advertise.host, port=advertise.port or card.port))

    def connect(self, view: View) -> NativeBackend:
        """Connect to the world that has formed."""
        self._engine.connect([card_of(card) for card in view.cards], _credentials(view))
        return self._engine

    def close(self) -> None:
        """Close it if the world does not form."""
        self._engine.close()


class _Foreign:
    """A rank of another backend that is not connected yet."""

    def __init__(
        self, bind: Callable[[BindSpec], UnconnectedBackend], listen: ListenSpec, config: Config
    ) -> None:
        advertise = "" if listen.advertise == listen.bind else str(listen.advertise)
        self._unconnected = bind(
            BindSpec(
                listen.rank,
                listen.size,
                listen.bind.host,
                listen.is_encrypted,
                config,
                port=listen.bind.port,
                advertise=advertise,
                secret=listen.secret,
            )
        )

    def card(self) -> bytes:
        """What the backend sends to the other ranks."""
        return self._unconnected.card()

    def connect(self, view: View) -> Closable:
        """Connect to the world that has formed."""
        return self._unconnected.connect(view.cards)

    def close(self) -> None:
        """Close it if the world does not form."""
        self._unconnected.close()


def card_of(data: bytes) -> Card:
    """Decode the card of a rank: how to reach it.

    Raises:
        ProtocolError: the card is malformed.
    """
    from unisono.backends.native.card import Card

    card = decoded_card(data, Card)
    if not (0 <= card.port < 1 << 16 and 0 <= card.pid < 1 << 31):
        raise ProtocolError("a rank's card is malformed", cause=f"port {card.port}, pid {card.pid}")
    return card


def _engine(listen: ListenSpec, config: Config) -> NativeBackend:
    from unisono import _native
    from unisono.backends.native.backend import NativeBackend

    is_quic = config.links == "quic"
    if is_quic and not _native.has_quic():
        from unisono.backends.native.quic import MISSING, PACKAGES

        raise BackendUnavailable('links="quic"', cause=MISSING, next_step=PACKAGES)
    if config.tls and not listen.is_encrypted:
        raise UsageError(
            "tls=True, but the seed gave out a ticket without encryption",
            next_step="set UNISONO_TLS=1 for the process that runs the seed, too",
        )
    return NativeBackend(
        listen.rank,
        listen.size,
        str(listen.folder),
        listen.secret,
        config=config,
        shm=config.shm,
        bind=listen.bind.host,
        port=listen.bind.port,
        tls=listen.is_encrypted and not is_quic,
        quic=is_quic,
    )


def _credentials(view: View) -> Credentials | None:
    """This rank's certificate and key; None if links are not encrypted."""
    if view.identity is None:
        return None
    from unisono.backends.native.card import Credentials

    mine = view.identity
    return Credentials(view.names, mine.key_pem, mine.certificate_pem, mine.ca_pem)


def local(n: int, config: Config | None = None) -> list[Communicator]:
    """Make a world of `n` ranks in this process, for threads and tests: one communicator for each rank.

    Args:
        n: the number of ranks.
        config: the settings of all ranks.
    """
    from unisono.backends.native.local_ranks import LocalRank

    return [Communicator.world(backend) for backend in LocalRank.create(n, config)]


def simulate(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    seed: int = 0,
    network: Network | None = None,
    faults: Sequence[Fault] = (),
    config: Config | None = None,
) -> SimResult:
    """Run `fn(comm, *args)` on `n` simulated ranks in virtual time; the same seed gives the same run.

    Args:
        fn: the program of each rank.
        n: the number of ranks.
        *args: further arguments of fn.
        seed: decides everything that is random in the network and the schedule.
        network: latency, bandwidth and jitter of the links.
        faults: kills, pauses, partitions and losses, and when they happen.
        config: the settings of all ranks.

    Returns:
        The result of each rank, or the exception that ended it; the time; and a trace of every message.
    """
    from unisono import simulation  # imported only if it is used

    def program(backend: Backend) -> Any:
        with Communicator.world(backend) as world:
            return fn(world, *args)

    return simulation.run(program, n, seed=seed, network=network, faults=faults, config=config)


def list_backends() -> list[BackendStatus]:
    """All backends: whether each can run here, why not, and how to install it."""
    return statuses()

"""How a world begins: alone, in this process, in processes of its own, or simulated.

Knows which backend a beginning needs, brings its rank into the world and hands it to a Communicator. Does not
know how ranks find each other (launch), nor how any backend works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from unisono.backends.local import LocalBackend
from unisono.backends.registry import (
    BackendStatus,
    BindSpec,
    Closable,
    UnconnectedBackend,
    backend_named,
    statuses,
)
from unisono.comm.communicator import Communicator
from unisono.config import Config, launch, network
from unisono.errors import ProtocolError, UsageError
from unisono.messaging.backend import Backend
from unisono.plans import measured
from unisono.version import VERSION

if TYPE_CHECKING:
    from unisono.backends.native.backend import Card, Credentials, NativeBackend
    from unisono.bootstrap.entry import ListenSpec
    from unisono.bootstrap.join import View
    from unisono.bootstrap.launch_info import LaunchInfo
    from unisono.simulation import Fault, Network, SimResult

__all__ = ["init", "list_backends", "local", "simulate", "spawn"]


def init(
    backend: str = "auto",
    *,
    rank: int | None = None,
    size: int | None = None,
    join: str | None = None,
    timeout: float = 30.0,
    config: Config | None = None,
) -> Communicator:
    """Join the world that this process was started in; started alone, it is a world of one.

    Looks for `unisono run`, torchrun, Open MPI, Slurm and RANK/WORLD_SIZE, in this order. A launcher that
    names several ranks never leaves each of them alone. `timeout` is for finding the others. "auto" is the
    native backend, unless `unisono run --backend` or UNISONO_BACKEND says otherwise.

    Raises:
        RendezvousError: the others were not found; it names who is missing.
        BackendUnavailable: the backend cannot run here; it names what is missing.
    """
    around = network()
    if backend == "auto":
        backend = around.backend
    # The native one is always there: who uses nothing else does not pay for looking.
    info = None if backend == "native" else backend_named(backend)
    settings = config if config is not None else Config()
    if info is not None and info.join is not None:
        if (rank, size, join) != (None, None, None):
            raise UsageError(
                f"rank, size and join are {info.launcher}'s to say with backend={backend!r}",
                next_step="leave them out",
            )
        return Communicator.world(info.join(settings, timeout))
    from unisono.bootstrap.launch_info import decide  # a world in one process does not need it

    place = decide(launch(), around, rank=rank, size=size, join=join, insecure=settings.insecure)
    return _joined(place, backend, settings, timeout)


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

    `fn` is found by its qualified name in the caller's main file or module; arguments and results are plain
    data, arrays and registered dataclasses. The first failing rank's exception is raised here. When `timeout`
    seconds are over, all ranks are killed and DeadlineExceeded is raised; without it there is no limit.
    """
    if backend_named(backend).join is not None:
        raise UsageError(
            f"backend={backend!r} in uni.spawn; allowed: backends whose ranks need no launcher of their own",
            next_step=f"unisono run --backend {backend}",
        )
    from unisono.launcher.spawn import spawn as start  # only who spawns pays for it

    return start(
        fn, n, args, enter=_entered, backend=backend, version=VERSION, timeout=timeout, env=env, config=config
    )


@contextlib.contextmanager
def _entered(
    place: LaunchInfo, backend: str, config: Config, timeout: float | None
) -> Iterator[Communicator]:
    """A spawned rank's world."""
    with _joined(place, backend, config, timeout) as world:
        yield world


def _joined(place: LaunchInfo, backend: str, config: Config, timeout: float | None) -> Communicator:
    if place.source is None:
        return local(1, config)[0]
    bind: type[_Native] | Callable[[ListenSpec, Config], _Foreign] = _Native
    around: Callable[[Closable], Closable] | None = None
    if backend not in ("auto", "native"):
        info = backend_named(backend)
        if not info.has_processes:
            raise UsageError(f"backend={backend!r} for {place.size} processes; allowed: ranks of one process")
        around = info.wrap
        if info.bind is not None:
            bind = partial(_Foreign, info.bind)
    from unisono.bootstrap.entry import enter

    made: list[_Native | _Foreign] = []

    def make_card(site: ListenSpec) -> bytes:
        while made:
            made.pop().close()
        made.append(bind(site, config))
        return made[0].card()

    try:
        entry = enter(place, make_card=make_card, config=config, version=VERSION, timeout=timeout)
    except BaseException:
        for one in made:
            one.close()
        raise
    try:
        measured.table()  # read now: when the first collective asks for it, no descriptor may be left
        world = made[0].connect(entry.view)
        if around is not None:
            world = around(world)
    except BaseException:
        made[0].close()
        entry.close()
        raise
    world.when_closed(entry.close)
    return Communicator.world(world)


class _Native:
    """A rank of the native backend on its way into the world."""

    def __init__(self, site: ListenSpec, config: Config) -> None:
        self._site = site
        self._engine = _engine(site, config)

    def card(self) -> bytes:
        """How to reach it, as the site wants it told."""
        card, advertise = self._engine.card(), self._site.advertise
        return msgspec.msgpack.encode(card._replace(address=advertise.host, port=advertise.port or card.port))

    def connect(self, view: View) -> NativeBackend:
        """Learn of the others."""
        self._engine.connect([card_of(card) for card in view.cards], _credentials(view))
        return self._engine

    def close(self) -> None:
        """Give up."""
        self._engine.close()


class _Foreign:
    """A rank of another backend on its way into the world."""

    def __init__(
        self, bind: Callable[[BindSpec], UnconnectedBackend], site: ListenSpec, config: Config
    ) -> None:
        advertise = "" if site.advertise == site.bind else str(site.advertise)
        self._unconnected = bind(
            BindSpec(
                site.rank,
                site.size,
                site.bind.host,
                site.is_encrypted,
                config,
                port=site.bind.port,
                advertise=advertise,
                secret=site.secret,
            )
        )

    def card(self) -> bytes:
        """What the backend wants told."""
        return self._unconnected.card()

    def connect(self, view: View) -> Closable:
        """Learn of the others."""
        return self._unconnected.connect(view.cards)

    def close(self) -> None:
        """Give up."""
        self._unconnected.close()


def card_of(data: bytes) -> Card:
    """Read how to reach a rank, as the rank itself said it.

    Raises:
        ProtocolError: it is no card.
    """
    from unisono.backends.native.backend import Card

    try:
        card = msgspec.msgpack.decode(data, type=Card)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError("a rank's card is malformed", cause=str(error)) from None
    if not (0 <= card.port < 1 << 16 and 0 <= card.pid < 1 << 31):
        raise ProtocolError("a rank's card is malformed", cause=f"port {card.port}, pid {card.pid}")
    return card


def _engine(site: ListenSpec, config: Config) -> NativeBackend:
    from unisono.backends.native.backend import NativeBackend

    if config.tls and not site.is_encrypted:
        raise UsageError(
            "tls=True, but the seed gave out a ticket without encryption",
            next_step="set UNISONO_TLS=1 for whoever hosts the seed, too",
        )
    return NativeBackend(
        site.rank,
        site.size,
        str(site.folder),
        site.secret,
        config=config,
        shm=config.shm,
        bind=site.bind.host,
        port=site.bind.port,
        tls=site.is_encrypted,
    )


def _credentials(view: View) -> Credentials | None:
    """What a rank shows to others; None on links that are not encrypted."""
    if view.identity is None:
        return None
    from unisono.backends.native.backend import Credentials

    mine = view.identity
    return Credentials(view.names, mine.key_pem, mine.certificate_pem, mine.ca_pem)


def local(n: int, config: Config | None = None) -> list[Communicator]:
    """Make a world of `n` ranks inside this process: one communicator each, for threads and tests."""
    return [Communicator.world(backend) for backend in LocalBackend.create(n, config)]


def simulate(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    seed: int = 0,
    network: Network | None = None,
    faults: Sequence[Fault] = (),
    config: Config | None = None,
) -> SimResult:
    """Run `fn(comm, *args)` on `n` simulated ranks, in virtual time and always in the same way for one seed.

    Returns what each rank returned or the exception that ended it, and a trace of every message.
    """
    from unisono import simulation  # only who simulates pays for it

    def program(backend: Backend) -> Any:
        with Communicator.world(backend) as world:
            return fn(world, *args)

    return simulation.run(program, n, seed=seed, network=network, faults=faults, config=config)


def list_backends() -> list[BackendStatus]:
    """Every backend: whether it can run here, why not, and how to install it."""
    return statuses()

"""Entering a world: host the seed if it is this process's turn, make the card, join.

Knows the order of these steps and undoes them when one fails. Does not know what a card is made from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from unisono.bootstrap.address import Address, bindable, source_toward
from unisono.bootstrap.descriptors import need
from unisono.bootstrap.folder import enter_socket_folder
from unisono.bootstrap.join import View, join
from unisono.bootstrap.launch_info import LaunchInfo
from unisono.bootstrap.protocol import links_secret
from unisono.bootstrap.ticket import Ticket, TicketSource
from unisono.config import Config
from unisono.core.clock import Deadline, RealRuntime
from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.bootstrap.seed import Seed

__all__ = ["Entry", "ListenSpec", "enter"]


@dataclass(frozen=True, slots=True)
class ListenSpec:
    """Where the engine of this rank shall listen, and what it tells the others.

    `bind` is an address of this host, and never a wildcard unasked. `advertise` is what the card should name:
    it differs where a router or a container stands in between. Port 0: the engine takes a free one, and
    advertises it. `is_encrypted`: its TCP links need TLS; else all ranks are on this host, or insecure.
    `folder` (mode 0700) is shared by the job's ranks on this host; `secret` is known to the job's ranks only.
    """

    rank: int
    size: int
    bind: Address
    advertise: Address
    is_encrypted: bool
    folder: Path
    secret: bytes = field(repr=False)


@dataclass(slots=True)
class Entry:
    """The view, and the seed if this process hosts it. Close it after the engine."""

    view: View
    seed: Seed | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def close(self) -> None:
        """Stop hosting. Nobody needs the seed after the world is formed: it only tells late-comers why."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def enter(
    place: LaunchInfo,
    *,
    make_card: Callable[[ListenSpec], bytes],
    config: Config,
    version: str,
    timeout: float | None,
) -> Entry:
    """Join the world of several ranks that `place` names.

    `make_card` is called once a seed has proven itself, and it is known where the engine shall listen. It is
    called again in the rare case that this seed was an earlier job's: then the first engine is to be closed.

    Raises:
        RendezvousError: see `join`.
    """
    with need(_descriptors(place), f"rank {place.rank} of {place.size}"):
        return _enter(place, make_card, config, version, timeout)


def _enter(
    place: LaunchInfo,
    make_card: Callable[[ListenSpec], bytes],
    config: Config,
    version: str,
    timeout: float | None,
) -> Entry:
    assert place.source is not None
    deadline = RealRuntime().deadline(timeout)
    undo: list[Callable[[], None]] = []
    seed: Seed | None = None
    try:
        source = place.source
        if place.seed_address is not None:
            seed = _host(place, source, config, version, undo)
            source = TicketSource(seed.ticket.text(), insecure=config.insecure)

        def card(ticket: Ticket) -> bytes:
            folder, leave = enter_socket_folder(place.network.folder, ticket.token)
            undo.insert(0, leave)  # last of all: the engine is to be closed by then
            return make_card(_site(place, ticket, folder, deadline))

        view = join(
            source,
            rank=place.rank,
            size=place.size,
            card=card,
            config=config,
            version=version,
            deadline=deadline,
        )
    except BaseException as error:
        if seed is not None:
            seed.close(f"rank 0 gave up ({type(error).__name__})")
        while undo:
            undo.pop()()
        raise
    if seed is not None and place.source.path is None:
        undo.pop()()  # everybody has read the ticket; in a file it stays, as a sign that this job lives
    return Entry(view, seed, undo)


def _descriptors(place: LaunchInfo) -> int:
    """How many a rank needs in any case: the engine's own, two for each link of heartbeats, and the seed's.

    Further links take two each when they are opened.
    """
    links = min(place.size - 1, 2 * place.size.bit_length())
    seed = 6 + place.size if place.seed_address is not None else 0
    return 14 + 2 * links + seed


def _host(
    place: LaunchInfo, source: TicketSource, config: Config, version: str, undo: list[Callable[[], None]]
) -> Seed:
    from unisono.bootstrap.seed import Seed  # only the process that hosts pays for it

    assert place.seed_address is not None
    advertise = place.network.advertise
    seed = Seed(
        place.size,
        version=version,
        address=bindable(place.seed_address),
        advertise=Address.parse(advertise) if advertise is not None else None,
        insecure=config.insecure,
        tls=config.tls or None,
    )
    undo.append(seed.close)
    seed.start()
    undo.append(source.claim(seed.ticket))
    return seed


def _site(place: LaunchInfo, ticket: Ticket, folder: Path, deadline: Deadline) -> ListenSpec:
    runtime = RealRuntime()
    left = deadline.remaining(runtime.now())
    if place.network.address is not None:
        bound = bindable(place.network.address)
        if bound.is_wildcard and place.network.advertise is None:
            raise UsageError(
                f"UNISONO_ADDRESS={place.network.address} is every address of this host",
                next_step="set UNISONO_ADVERTISE to the one that others can reach",
            )
    else:
        bound = Address(source_toward(ticket.address, 5.0 if left is None else left))
    advertise = place.network.advertise
    return ListenSpec(
        place.rank,
        place.size,
        bind=_own_port(bound, place),
        advertise=_own_port(Address.parse(advertise) if advertise is not None else bound, place),
        is_encrypted=not ticket.is_plain,
        folder=folder,
        secret=links_secret(ticket.token),
    )


def _own_port(address: Address, place: LaunchInfo) -> Address:
    """A declared port is the seed's; the ranks of a host take those after it."""
    return replace(address, port=address.port + 1 + (place.local_rank or 0)) if address.port else address

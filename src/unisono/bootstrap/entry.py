"""Entering a world: host the seed if this process is to, make the card, join. A step that fails is undone."""

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
from unisono.core.clock import RealRuntime
from unisono.core.runtime import Deadline
from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.bootstrap.seed import Seed

__all__ = ["Entry", "ListenSpec", "enter"]


@dataclass(frozen=True, slots=True)
class ListenSpec:
    """Where the backend of this rank listens, and which address its card names.

    `bind` is an address of this host, and a wildcard only if the user named one. `advertise` is the address
    for the card; it differs from `bind` behind a router or in a container. Port 0: the backend takes a free
    port and advertises it. `is_encrypted`: TCP links need TLS; otherwise all ranks are on this host, or the
    user chose insecure=True. `folder` (mode 0700) is shared by the job's ranks on this host; `secret` is
    known to the job's ranks only.
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
    """The view, and the seed if this process hosts it. Close it after the backend."""

    view: View
    seed: Seed | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def close(self) -> None:
        """Stop hosting. After the world is formed the seed only tells late joiners why they are refused."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def enter(
    info: LaunchInfo,
    *,
    make_card: Callable[[ListenSpec], bytes],
    config: Config,
    version: str,
    timeout: float | None,
) -> Entry:
    """Join the world of several ranks that `info` names.

    `make_card` is called once a seed has proven the token, and it is known where the backend listens. It is
    called again in the rare case that the seed was an earlier job's; the caller then closes the first
    backend.

    Raises:
        RendezvousError: see `join`.
    """
    with need(_descriptors(info, config), f"rank {info.rank} of {info.size}"):
        return _enter(info, make_card, config, version, timeout)


def _enter(
    info: LaunchInfo,
    make_card: Callable[[ListenSpec], bytes],
    config: Config,
    version: str,
    timeout: float | None,
) -> Entry:
    assert info.source is not None
    deadline = RealRuntime().deadline(timeout)
    undo: list[Callable[[], None]] = []
    seed: Seed | None = None
    try:
        source = info.source
        if info.seed_address is not None:
            seed = _host_seed(info, source, config, version, undo)
            source = TicketSource(seed.ticket.text(), insecure=config.insecure)

        def card(ticket: Ticket) -> bytes:
            folder, leave = enter_socket_folder(info.network.folder, ticket.token)
            undo.insert(0, leave)  # undone last: the backend is closed by then
            return make_card(_listen_spec(info, ticket, folder, deadline))

        view = join(
            source,
            rank=info.rank,
            size=info.size,
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
    if seed is not None and info.source.path is None:
        undo.pop()()  # all have read the ticket; a file stays, as a sign that this job lives
    return Entry(view, seed, undo)


def _descriptors(info: LaunchInfo, config: Config) -> int:
    """Descriptors that a rank needs in any case: the engine's, two for each heartbeat link, and the seed's.

    Further links take two each when they are opened. All QUIC links together share the engine's socket.
    """
    links = min(info.size - 1, 2 * info.size.bit_length())
    if config.links == "quic" and not config.shm:
        links = 0
    seed = 6 + info.size if info.seed_address is not None else 0
    return 14 + 2 * links + seed


def _host_seed(
    info: LaunchInfo, source: TicketSource, config: Config, version: str, undo: list[Callable[[], None]]
) -> Seed:
    from unisono.bootstrap.seed import Seed  # only the hosting process pays for the import

    assert info.seed_address is not None
    advertise = info.network.advertise
    seed = Seed(
        info.size,
        version=version,
        address=bindable(info.seed_address),
        advertise=Address.parse(advertise) if advertise is not None else None,
        insecure=config.insecure,
        tls=config.tls or None,
    )
    undo.append(seed.close)
    seed.start()
    undo.append(source.claim(seed.ticket))
    return seed


def _listen_spec(info: LaunchInfo, ticket: Ticket, folder: Path, deadline: Deadline) -> ListenSpec:
    runtime = RealRuntime()
    left = deadline.remaining(runtime.now())
    if info.network.address is not None:
        bound = bindable(info.network.address)
        if bound.is_wildcard and info.network.advertise is None:
            raise UsageError(
                f"UNISONO_ADDRESS={info.network.address} is every address of this host",
                next_step="set UNISONO_ADVERTISE to the one that others can reach",
            )
    else:
        bound = Address(source_toward(ticket.address, 5.0 if left is None else left))
    advertise = info.network.advertise
    return ListenSpec(
        info.rank,
        info.size,
        bind=_own_port(bound, info),
        advertise=_own_port(Address.parse(advertise) if advertise is not None else bound, info),
        is_encrypted=not ticket.is_plain,
        folder=folder,
        secret=links_secret(ticket.token),
    )


def _own_port(address: Address, info: LaunchInfo) -> Address:
    """A named port is the seed's; the ranks of a host take the ports after it."""
    return replace(address, port=address.port + 1 + (info.local_rank or 0)) if address.port else address

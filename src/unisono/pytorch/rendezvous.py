"""Rendezvous: how the members of a torch group meet, through the store that torch gives the group.

Group rank 0 hosts a seed and puts its ticket into the store. It removes the ticket when all have joined,
because the keys of a store come back: torch counts groups from 0 again after `destroy_process_group`, and
under torchrun the store outlives them. A ticket that leads nowhere is read again until the deadline.

Knows stores and addresses. Does not know process groups.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from unisono.bootstrap.address import Address, bindable, source_toward
from unisono.bootstrap.launch_info import OURS, LaunchInfo
from unisono.bootstrap.store import KeyValueStore, StoreSource
from unisono.bootstrap.ticket import TicketSource
from unisono.comm.communicator import Communicator
from unisono.comm.world import joined
from unisono.config import Config
from unisono.environment import BARE, Launch, Network, launch, network
from unisono.errors import RendezvousError, UsageError

__all__ = ["join_world"]

_KEY: Final = "unisono/ticket"
# To find the address of this host from which the store's host is reached.
_RESOLVE_S: Final = 5.0
# The last store of a default group. With MASTER_PORT it is the server: if it ended with the group, ranks that
# begin the next group before this one has ended its own would find a store that dies. torch gives the next
# store at the same port the same server.
_kept: Final[list[KeyValueStore]] = []


def join_world(
    store: KeyValueStore, rank: int, size: int, timeout: timedelta, name: str, *, is_default: bool = False
) -> Communicator:
    """Join the world of a torch group. Torch's rank and size count, whatever launcher started this process.

    Args:
        store: the group's own, so that its keys mean nothing to other groups.
        rank: this process's rank in the group.
        size: the number of its members.
        timeout: for all of them to join.
        name: torch's name of the group, for errors.
        is_default: whether it is the default group, whose store torch has made for it.

    Raises:
        RendezvousError: not all came in time; the text names the missing ranks.
        UsageError: the environment's address or backend cannot be used.
    """
    settings = Config()
    if size == 1:
        return joined(LaunchInfo(0, 1), "native", settings, None)
    started, given = _launch(), network()
    portless = _portless(given)
    source = StoreSource(
        f"store of torch's group {name!r}",
        insecure=settings.insecure,
        is_keyed=True,
        known_by="store",
        key=_KEY,
        connect=lambda: store,
        secret=lambda: _secret(started, given, settings.insecure),
        if_silent="see whether the process that hosts the store still runs: with MASTER_PORT or tcp:// it is "
        "rank 0, under torchrun the agent of node 0",
    )
    info = LaunchInfo(
        rank,
        size,
        source=source,
        seed_address=_seed_address(store, portless, started) if rank == 0 else None,
        network=portless,
    )
    if is_default and rank == 0:
        _kept[:] = [store]
    return joined(info, portless.backend, settings, timeout.total_seconds())


def _portless(given: Network) -> Network:
    """The environment's addresses without ports: each of the worlds of a process takes free ones."""
    address, advertise = given.address, given.advertise
    return replace(
        given,
        join=None,
        address=bindable(address).host if address is not None else None,
        advertise=Address.parse(advertise).host if advertise is not None else None,
    )


def _launch() -> Launch | None:
    try:
        return launch()
    except UsageError:
        return None  # variables of a launcher that do not fit together; torch has its numbers from elsewhere


def _secret(started: Launch | None, given: Network, insecure: bool) -> bytes:
    """The token of the job of `unisono run`, which all its ranks know; empty under other launchers."""
    if started is None or started.launcher != OURS or given.join is None:
        return b""
    try:
        return TicketSource(given.join, insecure=insecure).read().token
    except OSError as error:
        raise RendezvousError("the ticket of this job cannot be read", cause=str(error)) from None


def _seed_address(store: Any, given: Network, started: Launch | None) -> str:
    """Where group rank 0 hosts the seed: on loopback only if it is certain that all members are on this host.

    A store that is reached by the network tells by which address; other members can reach that, too.
    """
    if given.address is not None:
        return given.address
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host = getattr(store, "host", None)
    if host is None:  # a file, or memory of this process
        why = "the store has no network address"
    elif Address(host).is_loopback:
        return "127.0.0.1"
    else:
        source = source_toward(Address(host, store.port), _RESOLVE_S)
        if not Address(source).is_loopback:
            return source
        why = f"the store's host {host} is loopback here"
    if started is not None and not started.is_one_host and started.launcher != BARE:
        raise RendezvousError(
            "rank 0 has no address that the other ranks of the group can join",
            cause=f"{started.launcher} started ranks on several hosts, and {why}",
            next_step="set UNISONO_ADDRESS to an address or interface of each host",
        )
    return "127.0.0.1"

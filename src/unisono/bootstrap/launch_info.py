"""What a launcher and the arguments of init say about this process: its rank, and where the ranks meet.

Pure: it reads neither the environment nor files; the values that a launcher has set are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from unisono.bootstrap.ticket import TicketSource
from unisono.environment import BARE, Launch, Network
from unisono.errors import RendezvousError, UsageError

__all__ = ["OURS", "LaunchInfo", "decide"]

OURS = "unisono run"


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """What a process needs to join. Without a `source` the world has one rank.

    `seed_address` is where this process hosts the seed; None if another one does.
    """

    rank: int
    size: int
    launcher: str = ""
    local_rank: int | None = None
    source: TicketSource | None = field(default=None, repr=False)
    seed_address: str | None = None
    network: Network = field(default_factory=Network)


def decide(
    started: Launch | None,
    network: Network,
    *,
    rank: int | None = None,
    size: int | None = None,
    join: str | None = None,
    insecure: bool = False,
) -> LaunchInfo:
    """Decide from the launcher's values and the arguments; arguments win.

    Raises:
        UsageError: rank and size contradict each other.
        RendezvousError: there are several ranks, and nothing says where they meet.
    """
    given = join or network.join
    if given is not None and started is None and size is None:
        raise UsageError(
            "there is a ticket (join= or UNISONO_JOIN), but neither rank nor size",
            next_step="give rank= and size=, or start it with `unisono run`",
        )
    info = _rank_and_size(started, network, rank, size)
    if info.size == 1 and given is None:
        return info
    is_ours = started is not None and started.launcher == OURS and join is None
    if given is not None:
        source = TicketSource(given, insecure=insecure)
        hosts = info.rank == 0 and source.path is not None and not is_ours
        return replace(info, source=source, seed_address=_seed_address(started, network) if hosts else None)
    if is_ours:
        raise RendezvousError(
            f"this process is rank {info.rank} of {info.size} (UNISONO_RANK), but UNISONO_JOIN is missing",
            next_step="start it with `unisono run`; inside uni.spawn, use the communicator that fn was given",
        )
    if started is not None and started.is_one_host and started.job:
        source = TicketSource.keyed(network.folder, started.job, _known_by(started), started.began)
        return replace(info, source=source, seed_address="127.0.0.1" if info.rank == 0 else None)
    if started is not None and started.store and started.job:
        from unisono.bootstrap.store import StoreSource  # only under torchrun on several hosts

        source = StoreSource.of_job(started.store, started.job, insecure=insecure)
        hosts = info.rank == 0
        return replace(info, source=source, seed_address=_seed_address(started, network) if hosts else None)
    named = f"{info.launcher} named" if info.launcher else "the arguments name"
    where = "" if started is None else " on several hosts" if not started.is_one_host else ""
    raise RendezvousError(
        f"{named} {info.size} ranks{where}, and they do not know where to meet",
        next_step="set UNISONO_JOIN (or join=) to a ticket, or to a file that all of them can read and where "
        "rank 0 puts one; set UNISONO_ADDRESS to an address or interface of each host",
    )


def _known_by(started: Launch) -> str:
    """What identifies a job of this launcher on one host, for errors."""
    return "MASTER_ADDR and MASTER_PORT" if started.launcher == BARE else f"job id of {started.launcher}"


def _rank_and_size(
    started: Launch | None, network: Network, rank: int | None, size: int | None
) -> LaunchInfo:
    count = size if size is not None else started.size if started is not None else 1
    number = rank if rank is not None else started.rank if started is not None else None
    if number is None:
        if count != 1:
            raise UsageError(
                f"size={count} without a rank; give rank= too, or start it with `unisono run`",
                next_step="uni.init(rank=..., size=...), or start it with `unisono run`",
            )
        number = 0
    for name, value in (("rank", number), ("size", count)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name}={value!r}; allowed: an integer")
    if not 0 <= number < count:
        raise UsageError(f"rank={number}, size={count}; allowed: 0 <= rank < size")
    return LaunchInfo(
        number,
        count,
        launcher=started.launcher if started is not None and size is None else "",
        local_rank=started.local_rank if started is not None else None,
        network=network,
    )


def _seed_address(started: Launch | None, network: Network) -> str:
    """Where rank 0 hosts the seed: the address that the user or torchrun named, or loopback on one host."""
    if network.address is not None:
        return network.address
    if started is None or started.is_one_host:
        return "127.0.0.1"
    if started.master:
        return started.master
    raise RendezvousError(
        f"{started.launcher} started ranks on several hosts, and rank 0 has no address that they can join",
        next_step="set UNISONO_ADDRESS to an address or interface of rank 0's host",
    )

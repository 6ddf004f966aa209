"""A job of `unisono run`: what to start on this host, where its ranks meet, and which options go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.bootstrap.ticket import TicketSource
from unisono.errors import UsageError, counted

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, and where its ranks meet. `env` repeats the options that the ranks need, as variables.

    With `is_mpi` mpiexec starts the ranks, and they meet by MPI. `verbose`: a failed job shows everything.
    """

    command: list[str]
    ranks_here: int
    nodes: int = 1
    node_rank: int = 0
    join: str | None = field(default=None, repr=False)
    address: str | None = None
    advertise: str | None = None
    insecure: bool = False
    tls: bool = False
    grace_s: float = 5.0
    env: Mapping[str, str] = field(default_factory=dict)
    is_mpi: bool = False
    verbose: bool = False

    @property
    def size(self) -> int:
        """Ranks on all hosts."""
        return self.ranks_here * self.nodes

    def check(self) -> None:
        """Refuse what cannot work, before anything is started."""
        if self.ranks_here < 1 or self.nodes < 1:
            given = f"{counted(self.ranks_here, 'rank')} on {counted(self.nodes, 'node')}"
            raise UsageError(f"{given}; allowed: at least 1 of each")
        if not 0 <= self.node_rank < self.nodes:
            raise UsageError(f"--node-rank {self.node_rank}; allowed: 0 to {self.nodes - 1}")
        if not self.grace_s >= 0:
            raise UsageError(f"--grace {self.grace_s}; allowed: seconds >= 0")
        if self.is_mpi and (self.nodes > 1 or self.join is not None):
            raise UsageError(
                "--nnodes and --join with --backend mpi; allowed: one host",
                next_step="for several hosts, run mpiexec with its host file, and uni.init(backend='mpi')",
            )
        if self.nodes > 1 and self.join is None:
            raise UsageError(
                "several nodes need --join FILE, or UNISONO_JOIN",
                next_step="name a file that every node can read; node 0 writes the ticket to it",
            )
        if self.nodes > 1 and self.node_rank == 0:
            if self.address is None:
                raise UsageError(
                    "several nodes need --address on node 0: an address or interface that the others reach",
                    cause="without an address the seed listens on loopback only",
                    next_step="--address ADDRESS, or the name of an interface, on node 0",
                )
            if TicketSource(self.join or "").path is None:
                raise UsageError(
                    "node 0 makes the ticket, so its --join is a file to write, not a ticket",
                    next_step="--join FILE",
                )
        if "UNISONO_JOIN" in self.env:
            raise UsageError(
                "a ticket on a command line can be read by every user; use --join FILE",
                next_step="--join FILE",
            )

"""The simulator: puts ranks, network and faults together and runs a program on the ranks' backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from unisono.config import Config
from unisono.errors import UsageError
from unisono.simulation.backend import SimBackend
from unisono.simulation.checks import check_step
from unisono.simulation.fabric import Fabric
from unisono.simulation.faults import Fault, checked_faults
from unisono.simulation.injector import Injector
from unisono.simulation.network import Network
from unisono.simulation.result import SimResult
from unisono.simulation.scheduler import Scheduler, Stopped, scheduler_here
from unisono.simulation.trace import trace_digest
from unisono.simulation.verdicts import Verdicts

__all__ = ["run"]


def run(
    program: Callable[[SimBackend], Any],
    n: int,
    *,
    seed: int = 0,
    network: Network | None = None,
    faults: Iterable[Fault] = (),
    config: Config | None = None,
) -> SimResult:
    """Run `program(backend)` on n simulated ranks, one at a time, in virtual time.

    The same arguments give the same trace, if the program itself is deterministic. The backend of a rank is
    closed when its program ends. A KeyboardInterrupt ends all ranks and is raised here.

    Raises:
        UsageError: an argument is invalid, or this is called inside a simulation.
    """
    check_step("n", n)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed={seed!r}; allowed: integers")
    if scheduler_here() is not None:
        raise UsageError(
            "a simulation cannot run inside another", next_step="call uni.simulate outside of the program"
        )
    network = network if network is not None else Network()
    if not isinstance(network, Network):
        raise UsageError(f"network is {type(network).__name__}; allowed: unisono.simulation.Network")
    config = config if config is not None else Config()
    if not isinstance(config, Config):
        raise UsageError(f"config is {type(config).__name__}; allowed: unisono.Config")
    network.check(n)
    return _World(n, seed, network, checked_faults(faults, n), config).run(program)


class _World:
    """One simulation."""

    def __init__(
        self, n: int, seed: int, network: Network, faults: tuple[Fault, ...], config: Config
    ) -> None:
        self._seed = seed
        self._scheduler = Scheduler(seed, config.deadlock_after_s)
        self._fabric = Fabric(self._scheduler, network, config, seed)
        self._results: list[Any] = [None] * n
        self._ranks: list[SimBackend] = []
        self._injector = Injector(self._fabric, Verdicts(self._fabric, self._ranks), faults)

    def run(self, program: Callable[[SimBackend], Any]) -> SimResult:
        for rank in range(len(self._results)):
            thread = self._scheduler.add_thread(lambda rank=rank: self._run_rank(rank, program))  # type: ignore[misc]
            self._ranks.append(SimBackend(self._fabric, thread, self._ranks, self._injector))
        self._scheduler.run()
        trace = tuple(self._fabric.trace)
        return SimResult(self._results, self._scheduler.now, self._seed, trace_digest(trace), trace)

    def _run_rank(self, rank: int, program: Callable[[SimBackend], Any]) -> None:
        """Run the program of a rank, then close its backend."""
        backend = self._ranks[rank]
        try:
            self._results[rank], end = program(backend), "return"
        except (Stopped, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._results[rank], end = error, "raise"
        backend.close()
        self._fabric.note(end, rank)

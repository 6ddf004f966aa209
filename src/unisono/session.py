"""How a world begins: alone, in this process, or simulated.

Knows which backend a beginning needs and hands it to a Communicator. Does not know how any of them works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono.backends.local import LocalBackend
from unisono.backends.registry import BackendStatus, backend_named, statuses
from unisono.communicator import Communicator
from unisono.config import Config, launch
from unisono.contract import Backend
from unisono.errors import BackendUnavailable

if TYPE_CHECKING:
    from unisono.simulation import Fault, Network, SimResult

__all__ = ["init", "list_backends", "local", "simulate"]


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

    A launcher that names several ranks never leaves each of them alone: if no backend can connect them, that
    is an error.
    """
    if backend != "auto":
        backend_named(backend)
    started = launch()
    where = "the arguments" if size is not None else started.launcher if started else "nobody"
    count = size if size is not None else started.size if started else 1
    if join is not None or rank not in (None, 0) or count != 1:
        raise BackendUnavailable(
            f"{where} named {count} ranks, and this version connects no processes",
            next_step="run the ranks in one process with unisono.local(n) or unisono.simulate(fn, n)",
        )
    return local(1, config)[0]


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

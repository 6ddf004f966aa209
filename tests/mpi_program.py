"""What ranks under mpiexec do for tests/test_mpi.py: `python -m tests.mpi_program cases`, for one.

All ranks run the same tests in step: each works in a communicator of as many ranks as it needs, and whoever
has no part in it waits. The last line that rank 0 prints says how it ended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from mpi4py import MPI

import unisono as uni
from unisono.backends.mpi import MpiBackend
from unisono.communicator import Communicator
from unisono.config import Config
from unisono.errors import UnisonoError
from unisono.testing import CASES, run_case

from . import test_properties
from .conftest import Ended
from .sums import SUMS, sums

WORLD = MPI.COMM_WORLD
HARDLY_ANY = settings(derandomize=True, deadline=None, database=None, max_examples=4)


def on_some(size: int, live: Callable[[MpiBackend], Any], config: Config | None = None) -> list[Any]:
    """Run `live(backend)` on the first ranks; what each returned or raised, told to all."""
    part = WORLD.Split(0 if WORLD.rank < size else 1, WORLD.rank)
    result: Any = None
    if WORLD.rank < size:
        try:
            result = live(MpiBackend(part, config or Config()))
        except Exception as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
    part.Free()
    return WORLD.allgather(result)[:size]


def cases() -> dict[str, str]:
    ended = {}
    for case in CASES:
        results = on_some(case.size, lambda backend, case=case: run_case(case, backend))
        wrong = [str(result) for result in results if result is not None]
        ended[case.name] = wrong[0] if wrong else "ok"
    return ended


def properties() -> dict[str, str]:
    def run_processes(
        fn: Callable[..., Any], size: int, *args: Any, kind: str, config: Config | None = None
    ) -> Ended:
        def live(backend: MpiBackend) -> Any:
            with Communicator.world(backend) as comm:
                return fn(comm, *args)

        return Ended(on_some(size, live, config))

    test_properties.KINDS["mpi"] = lambda rank: {}
    test_properties.run_processes = run_processes
    ended = {}
    for name, (prop, strategies) in test_properties.PROPERTIES.items():
        try:
            HARDLY_ANY(given(*strategies)(prop))(world="mpi")
        except AssertionError as error:
            ended[name] = repr(error)[:500]
        else:
            ended[name] = "ok"
    return ended


def fails(left: Any, right: Any) -> Any:
    raise ArithmeticError("no such sum")


def behaviour() -> dict[str, Any]:
    """What `uni.init` brings, MPI's own collectives, a user's operation that fails, an end by exception."""
    said: dict[str, Any] = {}
    import numpy as np

    with uni.init(backend="mpi") as world:
        said["name"], said["size"] = world.backend.capabilities.name, world.size
        seen = []
        real = world.backend.run_collective

        def spy(problem: Any, stage: Any) -> Any:
            request = real(problem, stage)
            seen.append((problem.collective, request is not None))
            return request

        world.backend.run_collective = spy  # type: ignore[method-assign]
        x = np.arange(5.0) + world.rank
        world.all_reduce(x.copy(), uni.op(lambda a, b: a + b, name="plus"))
        world.scan(x)
        world.all_reduce(x.copy(), "max")
        world.all_reduce(x.astype(np.float16))
        world.barrier()
        said["own"] = list(seen)
        try:
            world.all_reduce(x, uni.op(fails))
        except (UnisonoError, ArithmeticError) as error:
            said["failed"] = f"{type(error).__name__}: {error}"
    return said


def main() -> None:
    match sys.argv[1]:
        case "cases":
            said: Any = cases()
        case "properties":
            said = properties()
        case "behaviour":
            said = behaviour()
        case _:
            with uni.init(backend="mpi", config=Config(reproducible=True)) as world:
                said = world.all_gather_object(sums(world))
            assert len(said[0]) == SUMS
    everyone = WORLD.allgather(said)
    if WORLD.rank == 0:
        print("said " + json.dumps(everyone), flush=True)


if __name__ == "__main__":
    main()

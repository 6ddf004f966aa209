"""What ranks under mpiexec do for tests/test_mpi.py: `python -m tests.mpi_program cases`, for one.

The last line that rank 0 prints says how it ended.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mpi4py import MPI

import unisono as uni
from unisono.backends.mpi import MpiBackend
from unisono.config import Config
from unisono.errors import UnisonoError

from .crew import Crew
from .sums import SUMS, sums

WORLD = MPI.COMM_WORLD


class MpiCrew(Crew):
    """Ranks of mpiexec."""

    rank = WORLD.rank
    kind = "mpi"

    def opened(self, size: int, config: Config) -> MpiBackend | None:
        part = WORLD.Split(0 if WORLD.rank < size else 1, WORLD.rank)
        backend = MpiBackend(part, config) if WORLD.rank < size else None
        part.Free()
        return backend

    def gathered(self, said: Any) -> list[Any]:
        return WORLD.allgather(said)


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
            said: Any = MpiCrew().cases()
        case "properties":
            said = MpiCrew().properties(examples=4)
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

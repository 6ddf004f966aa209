"""The conformance kit: what every backend, and a user's own, must pass.

Knows the table of cases and how to run them on threads. Does not know backends: a factory makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from unisono.errors import UsageError
from unisono.messaging.backend import Backend
from unisono.testing import communicator_cases, ending_cases, flow_cases, message_cases, value_cases
from unisono.testing.case import Case, ConformanceError
from unisono.testing.case_rank import PATIENCE_S
from unisono.testing.ranks import Threads

__all__ = ["CASES", "check_backend", "run_case"]

# From the simple to the composed: the first that fails says most.
CASES: Final[tuple[Case, ...]] = tuple(
    case
    for part in (message_cases, flow_cases, ending_cases, communicator_cases, value_cases)
    for case in part.SUITE.cases
)

# How long a rank may take to give up once its patience has ended.
_GRACE_S: Final = 2.0


def check_backend(
    factory: Callable[[int], Sequence[Backend]],
    *,
    names: Collection[str] | None = None,
    timeout: float = 30.0,
) -> list[str]:
    """Check that backends keep their contract. `factory(size)` makes the ranks of a fresh world, in order.

    Every case (all, or those in `names`) runs in a world of its own, a thread per rank, and has `timeout`
    seconds; its backends are closed afterwards. A case that needs an ability the backend does not claim is
    left out.

    Returns:
        The names of the cases that passed.

    Raises:
        ConformanceError: a promise is broken; it names the case, the rank and what was expected.
        UsageError: a name is not a case.
    """
    known = [case.name for case in CASES]
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: no such case; allowed: {', '.join(known)}")
    return [
        case.name
        for case in CASES
        if (names is None or case.name in names) and _passes(case, factory, timeout)
    ]


def run_case(case: Case, backend: Backend, *, timeout: float = 30.0) -> None:
    """Run one rank's part of a case on its backend, and close it; for ranks that are no threads of ours.

    Raises:
        ConformanceError: something was not as expected here.
    """
    try:
        _run(case, backend, timeout)
    finally:
        backend.close()


def _run(case: Case, backend: Backend, timeout: float) -> None:
    token = PATIENCE_S.set(timeout)
    try:
        case.run(backend)
    except Exception as error:
        text = str(error) if type(error) is AssertionError else f"{type(error).__name__}: {error}"
        raise ConformanceError(case.name, backend.rank, text) from error
    finally:
        PATIENCE_S.reset(token)


def _passes(case: Case, factory: Callable[[int], Sequence[Backend]], timeout: float) -> bool:
    """Run a case on threads; False if the backends lack what it needs."""
    backends = list(factory(case.size))
    failures: list[BaseException] = []

    def live(backend: Backend) -> None:
        try:
            _run(case, backend, timeout)
        except BaseException as failure:
            failures.append(failure)  # before the others hear of it: the first is the cause of the rest
        finally:
            backend.close()

    try:
        ranks = [backend.rank for backend in backends]
        if ranks != list(range(case.size)):
            raise ConformanceError(case.name, 0, f"expected ranks 0 to {case.size - 1} in order; got {ranks}")
        if any(case.lacking(backend) for backend in backends):
            return False
        # A rank gives up by itself; beyond that, a call of the backend blocks, which none may.
        hanging = Threads(live, backends).join(timeout + _GRACE_S)
    finally:
        for backend in backends:
            backend.close()
    if failures:
        raise failures[0]
    for rank, place in hanging.items():
        raise ConformanceError(case.name, rank, f"expected that no call blocks; it hangs at {place}")
    return True

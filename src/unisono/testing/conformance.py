"""The conformance kit: the cases that every backend must pass, ours and those of other packages."""

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

# From simple to composed: fix the first one that fails first.
CASES: Final[tuple[Case, ...]] = tuple(
    case
    for part in (message_cases, flow_cases, ending_cases, communicator_cases, value_cases)
    for case in part.SUITE.cases
)

# A rank fails by itself at `timeout`; one that has not ended this many seconds later is stuck in a call.
_GRACE_S: Final = 2.0


def check_backend(
    factory: Callable[[int], Sequence[Backend]],
    *,
    names: Collection[str] | None = None,
    timeout: float = 30.0,
) -> list[str]:
    """Check that a backend keeps the contract of `unisono.messaging.backend.Backend`.

    Every case runs in a fresh world, with a thread per rank; its backends are closed afterwards. A case that
    needs an ability that `Backend.capabilities` does not claim is skipped.

    Args:
        factory: `factory(size)` returns connected backends for ranks 0 to size - 1, in this order.
        names: run only these cases; see `CASES` for names and promises.
        timeout: seconds for each case. A case that takes longer has failed.

    Returns:
        The names of the cases that passed; skipped ones are not in it.

    Raises:
        ConformanceError: a promise is broken; it names the case, the rank and what was expected. It is the
            failure that came first, and later cases did not run.
        UsageError: one of `names` is not a case.
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
    """Run one rank's part of a case on its backend, and close the backend.

    For ranks that are processes: every rank of a world of `case.size` calls it with the same case.

    Raises:
        ConformanceError: this rank saw a broken promise.
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
    """Run a case on threads; False if the backends do not meet its needs."""
    backends = list(factory(case.size))
    failures: list[BaseException] = []

    def run_rank(backend: Backend) -> None:
        try:
            _run(case, backend, timeout)
        except BaseException as failure:
            failures.append(failure)  # before `close`: failures that follow from it come later
        finally:
            backend.close()

    try:
        ranks = [backend.rank for backend in backends]
        if ranks != list(range(case.size)):
            raise ConformanceError(case.name, 0, f"expected ranks 0 to {case.size - 1} in order; got {ranks}")
        if any(case.lacking(backend) for backend in backends):
            return False
        # A rank gives up by itself, unless a call of its backend blocks, which none may.
        hanging = Threads(run_rank, backends).join(timeout + _GRACE_S)
    finally:
        for backend in backends:
            backend.close()
    if failures:
        raise failures[0]
    for rank, stack in hanging.items():
        raise ConformanceError(case.name, rank, f"expected that no call blocks; it hangs at {stack}")
    return True

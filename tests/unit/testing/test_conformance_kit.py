"""The conformance kit itself: the names, choice and order of its cases, and the factory that it is given."""

from __future__ import annotations

import pytest
from tests.support.broken_backends import Mutant

from unisono.backends.local import LocalBackend
from unisono.errors import ClosedError, UsageError
from unisono.messaging.backend import Capabilities
from unisono.testing import CASES, ConformanceError, check_backend, run_case
from unisono.testing.case_rank import payload

NAMES = [case.name for case in CASES]


# -- the kit itself ------------------------------------------------------------------------------------


def test_the_names_of_cases_are_unique_and_say_what_they_promise() -> None:
    assert len(set(NAMES)) == len(CASES) >= 40
    for case in CASES:
        assert case.promise.endswith("."), case.name


def test_only_the_named_cases_run() -> None:
    made: list[int] = []

    def factory(size: int) -> list[LocalBackend]:
        made.append(size)
        return LocalBackend.create(size)

    chosen = ["probes_take_nothing", "ranks_know_their_numbers"]
    assert check_backend(factory, names=chosen) == ["ranks_know_their_numbers", "probes_take_nothing"]
    assert made == [3, 2]


def test_a_name_that_is_no_case_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="probes_take_everything: no such case; allowed: ranks_know"):
        check_backend(LocalBackend.create, names=["probes_take_everything"])


def test_cases_for_capabilities_that_a_backend_lacks_are_left_out() -> None:
    class Modest(Mutant):
        """Has neither wildcards nor sync sends, and declares that."""

        caught_by = ()

        @property
        def capabilities(self) -> Capabilities:
            return Capabilities("modest", sync_send=False, wildcards=False)

    passed = check_backend(Modest.create, names=["sync_sends_end_when_matched", "any_tag_takes_in_order"])
    assert passed == []
    assert check_backend(Modest.create, names=["bytes_arrive_as_they_were_sent"]) != []


def test_a_factory_that_makes_other_ranks_is_caught() -> None:
    with pytest.raises(ConformanceError, match=r"ranks 0 to 2 in order; got \[2, 1, 0\]"):
        check_backend(lambda size: LocalBackend.create(size)[::-1], names=["ranks_know_their_numbers"])


def test_the_first_rank_that_fails_is_the_one_named() -> None:
    class Odd(Mutant):
        """Only rank 2 reports a wrong size."""

        caught_by = ()

        @property
        def size(self) -> int:
            return self.inner.size + (self.rank == 2)

    with pytest.raises(ConformanceError, match="rank is below size, which is 3") as caught:
        check_backend(Odd.create, names=["ranks_know_their_numbers"])
    assert caught.value.rank == 2


def test_a_case_closes_its_backend_even_if_it_fails() -> None:
    backend, _absent = LocalBackend.create(2)
    case = next(case for case in CASES if case.name == "receives_may_come_late")
    with pytest.raises(ConformanceError, match="barrier: a receive from 1 ends; it hangs"):
        run_case(case, backend, timeout=0.05)
    assert isinstance(backend.start_recv(0, 5, 0, None).error, ClosedError)


def test_payloads_differ_by_sender_index_and_place() -> None:
    seen = {bytes(payload(rank, index, 8)) for rank in range(16) for index in range(256)}
    assert len(seen) == 16 * 256
    assert bytes(payload(3, 4, 1000))[:7] == bytes(payload(3, 4, 7))
    assert len(set(payload(1, 2, 100_000))) == 256

"""The conformance kit: a backend that breaks a promise is caught."""

from __future__ import annotations

import pytest
from tests.support.broken_backends import Mutant
from tests.support.broken_collectives import OwnAllReduce

from unisono.testing import ConformanceError, check_backend

MUTANTS = [
    mutant
    for mutant in (*Mutant.__subclasses__(), *OwnAllReduce.__subclasses__())
    if mutant is not OwnAllReduce
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_backend_that_breaks_a_promise_is_caught(mutant: type[Mutant]) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_backend(mutant.create, names=mutant.caught_by, timeout=1.0)
    assert caught.value.case in mutant.caught_by
    assert 0 <= caught.value.rank < 4
    assert f"case {caught.value.case!r}, rank {caught.value.rank}: expected that" in str(caught.value)

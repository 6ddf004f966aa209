"""docs/verbs.md and `help` document every argument and error of every verb."""

from __future__ import annotations

import inspect

import pytest
from tests.support.paths import ROOT
from tests.support.verbs_page import page

from unisono.comm.communicator import Communicator
from unisono.comm.fingerprint import VERBS as COLLECTIVES
from unisono.comm.verb_docs import sections_of
from unisono.comm.verb_table import VERBS


def test_the_page_is_made_from_the_table() -> None:
    assert (ROOT / "docs/verbs.md").read_text() == page(), (
        "python -m tests.support.verbs_page > docs/verbs.md"
    )


@pytest.mark.parametrize("name", VERBS)
def test_help_names_every_argument_and_the_errors(name: str) -> None:
    verb = getattr(Communicator, name)
    sections = sections_of(inspect.cleandoc(verb.__doc__))
    assert list(sections["Args"]) == list(inspect.signature(verb).parameters)[1:]
    assert {"UsageError", "PeerLost", "DeadlineExceeded", "ClosedError"} <= set(sections["Raises"])
    assert ("CollectiveMismatch" in sections["Raises"]) == (name in COLLECTIVES)
    assert all(said.endswith(".") for section in sections.values() for said in section.values())

"""The text of `help` about the arguments and errors of every verb."""

from __future__ import annotations

import inspect

import pytest

import unisono as uni
from unisono.comm.communicator import Communicator
from unisono.comm.verb_docs import sections_of, special
from unisono.comm.verb_table import COLLECTIVES, VERBS


@pytest.mark.parametrize("name", VERBS)
def test_help_names_every_argument_and_the_errors(name: str) -> None:
    verb = getattr(Communicator, name)
    sections = sections_of(inspect.cleandoc(verb.__doc__))
    assert list(sections["Args"]) == list(inspect.signature(verb).parameters)[1:]
    assert {"UsageError", "PeerLost", "DeadlineExceeded", "ClosedError"} <= set(sections["Raises"])
    assert ("CollectiveMismatch" in sections["Raises"]) == (name in COLLECTIVES)
    assert all(said.endswith(".") for section in sections.values() for said in section.values())


def test_what_is_special_to_a_verb_leaves_out_the_errors_of_all() -> None:
    help_text = inspect.cleandoc(Communicator.recv_object.__doc__ or "")
    assert set(sections_of(special(help_text))["Raises"]) == {"UsageError", "ProtocolError"}
    assert "Raises" not in sections_of(special(inspect.cleandoc(Communicator.barrier.__doc__ or "")))


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_takes_a_number_as_x_if_help_says_so(name: str) -> None:
    (comm,) = uni.local(1)
    with comm:
        verb = getattr(comm, name)
        arguments = sections_of(inspect.cleandoc(verb.__doc__))["Args"]
        counts = {"counts": [1]} if "counts" in arguments else {}
        if "or a number" in arguments.get("x", ""):
            verb(2.0, **counts)
        elif "x" in arguments:
            with pytest.raises(uni.UsageError):
                verb(2.0, **counts)

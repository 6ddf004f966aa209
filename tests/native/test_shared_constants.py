"""Constants that C++ and Python both define: each pair is equal."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.support.paths import ROOT

from unisono import _native
from unisono.backends.native import completions, programs
from unisono.comm import announcement, fingerprint, vector_collectives
from unisono.comm.verb_table import Fact
from unisono.config import Config
from unisono.core import envelope
from unisono.messaging import credit
from unisono.plans import amounts
from unisono.rpc import frame, transport

# The file and the name of a constant in the engine; then its value in Python.
CONSTANTS: dict[tuple[str, str], Any] = {
    ("native/wire/frame.hpp", "header_bytes_max"): envelope.HEADER_BYTES_MAX,
    ("native/base/types.hpp", "line_bytes"): credit.ENVELOPE_BYTES,
    ("native/messaging/message.hpp", "user_tags"): envelope.TAG_MAX + 1,
    ("native/messaging/message.hpp", "untyped"): envelope.UNTYPED,
    ("native/messaging/inbox.cpp", "ended_max"): credit.ENDED_CONTEXTS_MAX,
    ("native/messaging/send_slots.hpp", "rendezvous_max"): credit.RTS_MAX,
    ("native/python/announced_call.cpp", "array_bytes_max"): announcement.ARRAY_BYTES_MAX,
}

# The file and the name of an enum in the engine; then its enumerators from 0 on, as in Python.
ENUMS: dict[tuple[str, str], list[str]] = {
    ("native/messaging/message.hpp", "Outcome"): [
        "done",
        "cancelled",
        "peer_down",
        "refused",
        "closed",
        "no_memory",
    ],
    ("native/collective/program.hpp", "Step"): ["send", "recv", "recv_reduce", "copy", "reduce"],
    ("native/collective/program.hpp", "Buffer"): [buf.name.lower() for buf in programs._BUFFERS],
    ("native/collective/program.hpp", "Kind"): [kind.name.lower() for kind in amounts.Kind],
    ("native/python/verb_spec.hpp", "Fact"): [name.lower() for name in Fact.__members__],
}


def number(file: str, name: str) -> int:
    """The value of a constant in the engine, which is an expression of numbers."""
    found = re.search(rf"constexpr [\w:]+ {name} = ([^;]+);", (ROOT / file).read_text())
    assert found is not None, f"{name} is no longer in {file}"
    text = re.sub(r"\w+\{(\d+)\}", r"\1", found[1]).replace("'", "")
    assert re.fullmatch(r"[\d\s()<*+-]+", text), text
    return int(eval(text))


@pytest.mark.parametrize("where", CONSTANTS, ids=lambda where: where[1])
def test_a_constant_is_the_same_on_both_sides(where: tuple[str, str]) -> None:
    assert number(*where) == CONSTANTS[where]


@pytest.mark.parametrize("where", ENUMS, ids=lambda where: where[1])
def test_an_enum_has_the_same_numbers_on_both_sides(where: tuple[str, str]) -> None:
    file, name = where
    found = re.search(rf"enum class {name} : uint8_t \{{([\w,\s]+)\}};", (ROOT / file).read_text())
    assert found is not None, f"{name} is no longer in {file}"
    assert re.findall(r"\w+", found[1]) == ENUMS[where]


def test_outcomes_have_the_engines_numbers() -> None:
    outcomes = ENUMS["native/messaging/message.hpp", "Outcome"]
    assert [getattr(completions, f"_{name.upper()}") for name in outcomes] == list(range(len(outcomes)))
    assert (transport._DONE, transport._PEER_DOWN, transport._CLOSED) == (
        completions._DONE,
        completions._PEER_DOWN,
        completions._CLOSED,
    )


def test_a_count_that_fits_any_is_the_engines() -> None:
    found = re.search(r"count_bits = (\d+);", (ROOT / "native/collective/fingerprint.hpp").read_text())
    assert found is not None
    assert (1 << int(found[1])) - 1 == fingerprint.COUNT_ANY


def test_steps_have_the_engines_numbers() -> None:
    named = [re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in programs._STEPS]
    assert named == ENUMS["native/collective/program.hpp", "Step"]
    assert list(programs._STEPS.values()) == list(range(len(named)))
    assert list(programs._BUFFERS.values()) == list(range(len(programs._BUFFERS)))


def test_the_longest_silence_is_the_engines() -> None:
    text = (ROOT / "native/messaging/settings.hpp").read_text()
    found = re.search(r"silence_ns_max = ([\d']+) \* second;", text)
    assert found is not None
    longest = float(found[1].replace("'", ""))
    assert Config(silence_s=longest).silence_s == longest
    with pytest.raises(ValueError, match="silence_s"):
        Config(silence_s=2 * longest)


def test_kinds_of_frames_fit_the_engines_limit() -> None:
    kinds = [value for name, value in vars(frame).items() if name.isupper() and name in frame.__all__]
    kinds = sorted(set(kinds) - {frame.NAME_CHARS_MAX, frame.TEXT_CHARS_MAX})
    assert kinds == list(range(number("native/python/rpc_frame.cpp", "kinds_max")))


def test_families_of_arrays_have_the_engines_numbers() -> None:
    text = (ROOT / "native/python/announced_call.cpp").read_text()
    assert "numpy_family = 0, torch_family = 1;" in text
    assert vector_collectives._FAMILIES[:2] == ("numpy", "torch")


def test_every_link_has_room_for_the_longest_eager_control_message() -> None:
    """So an abort with its reason, and every frame of a call, is sent without waiting for the receiver."""
    for link in (_native.CONTROL_EAGER_BYTES_SHM, _native.CONTROL_EAGER_BYTES_SOCKET):
        assert _native.FRAME_BYTES_MAX <= credit.CONTROL_EAGER_BYTES <= link

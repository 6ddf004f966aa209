"""The engine without Python: the cases of engine_test.cpp, and the decoders that `make fuzz` feeds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.support.native_programs import built
from tests.support.paths import TESTS

# A decoder that uses the corpus of another decoder: both read the same frames.
CORPUS = {"quic": "tcp"}


def cases_in(program: str) -> list[str]:
    return sorted(set(re.findall(r'\brun\("([^"]+)"', (TESTS / f"native/{program}.cpp").read_text())))


@pytest.fixture(scope="module")
def engine_test() -> Path:
    return built("engine_test")


@pytest.fixture(scope="module")
def decoders() -> Path:
    return built("decoders")


@pytest.fixture(scope="module")
def quic_test() -> Path:
    return built("quic_test")


def check_case(program: Path, case: str) -> None:
    ended = subprocess.run([program, case], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["ok"]), ended.stdout + ended.stderr


@pytest.mark.parametrize("case", cases_in("engine_test"))
def test_a_case_of_the_engine_holds(engine_test: Path, case: str) -> None:
    check_case(engine_test, case)


@pytest.mark.parametrize("case", cases_in("quic_test"))
def test_a_case_of_quic_connections_holds(quic_test: Path, case: str) -> None:
    """On a network in memory with a virtual clock: seconds of packet loss take milliseconds."""
    check_case(quic_test, case)


def test_a_case_that_does_not_exist_is_refused(engine_test: Path) -> None:
    ended = subprocess.run([engine_test, "no such case"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "not so: the command line names a case\n")


@pytest.mark.more
@pytest.mark.parametrize("decoder", ["tcp", "quic", "datagram", "ring", "connector"])
def test_a_decoder_of_the_engine_bears_ten_thousand_inputs(decoders: Path, decoder: str) -> None:
    """`make fuzz` gives it a million inputs, under sanitizers."""
    command = [decoders, decoder, "10000", "1", TESTS / "corpus" / CORPUS.get(decoder, decoder)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr

"""`unisono plan` as a user types it."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import unisono as uni
from unisono.cli import main
from unisono.plans import CATALOG


def unisono(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_the_version_is_shown() -> None:
    assert unisono("--version").output == f"unisono {uni.__version__}\n"


def test_the_choice_its_reason_and_the_costs_are_shown() -> None:
    result = unisono("plan", "all_reduce", "-n", "8", "--bytes", "1Mi")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "all_reduce on 8 ranks, 1 MiB of float32" in text
    assert "halving_doubling: 120 us predicted for up to 1 MiB on 8 ranks; next ring, 127 us or more" in text
    assert "14 MiB in 48 messages; the busiest rank sends 1.75 MiB in 6" in text
    assert "rounds 6" in text
    assert "5 8 0 4 MiB to 1, from 1" in text
    assert "send out" not in text


def test_the_steps_of_all_ranks_are_shown_if_asked_for() -> None:
    text = unisono("plan", "all_reduce", "-n", "8", "--bytes", "1Mi", "--steps").output
    assert "round 5: 8 messages, 4 MiB" in text
    assert "  7  send out[131072:262144] to 6; recv out[0:131072] from 6" in text
    assert text.count("send out[0:131072] to 1") == 1


@pytest.mark.parametrize("collective", CATALOG)
def test_every_collective_can_be_shown(collective: str) -> None:
    for algorithm in ("auto", *CATALOG[collective]):
        result = unisono(
            "plan", collective, "-n", "5", "--hosts", "2", "--bytes", "400", "--algorithm", algorithm
        )
        assert result.exit_code == 0, result.output
        assert collective in result.output


def test_a_long_plan_is_summed_up() -> None:
    result = unisono("plan", "all_reduce", "-n", "64", "--bytes", "1Gi", "--algorithm", "ring")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) < 40
    assert "63-125" in result.output
    assert "to 1, from 63" in result.output
    assert "--steps shows all steps, --rank R those of a rank" in result.output


def test_one_rank_is_shown_whole() -> None:
    result = unisono("plan", "all_reduce", "-n", "64", "--bytes", "1Gi", "--algorithm", "ring", "--rank", "3")
    steps = [line for line in result.output.splitlines() if "out[" in line]
    assert len(steps) == 2 * 126


def test_one_rank_alone_has_nothing_to_do() -> None:
    result = unisono("plan", "all_reduce", "-n", "1")
    assert result.exit_code == 0
    assert "one rank: nothing to exchange" in result.output
    assert "nothing to do" in result.output


def test_the_list_names_every_algorithm_and_marks_the_ordered_ones() -> None:
    result = unisono("plan", "--list")
    assert result.exit_code == 0
    text = result.output
    for collective, entries in CATALOG.items():
        assert collective in text
        for name, entry in entries.items():
            assert (f"{name}*" if entry.ordered else name) in text
    assert "* ordered" in text


def test_the_list_of_one_collective_is_shorter() -> None:
    result = unisono("plan", "gather", "--list")
    assert result.exit_code == 0
    assert "tree, flat" in result.output
    assert "scatter" not in result.output


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("4096", "4 KiB"),
        ("64Ki", "64 KiB"),
        ("1.5Mi", "1.5 MiB"),
        ("2Gi", "2 GiB"),
        ("4K", "3.906 KiB"),
        ("8M", "7.629 MiB"),
        ("1G", "953.7 MiB"),
        ("64KiB", "64 KiB"),
        ("0", "0 B"),
    ],
)
def test_amounts_of_bytes_are_read_with_common_units(written: str, shown: str) -> None:
    result = unisono("plan", "broadcast", "-n", "2", "--bytes", written)
    assert f"broadcast on 2 ranks, {shown} of float32" in result.output


def test_blocks_are_cut_from_the_whole() -> None:
    result = unisono("plan", "all_gather", "-n", "8", "--bytes", "64Ki", "--dtype", "float64")
    assert "64 KiB of float64, 8 KiB a block" in result.output


def test_ordered_restricts_the_choice() -> None:
    result = unisono("plan", "all_reduce", "-n", "5", "--bytes", "64Mi", "--ordered")
    assert "ordered algorithms only" in " ".join(result.output.split())
    assert "ring" not in result.output.split("others")[1].splitlines()[0]


def test_a_drawing_is_written(tmp_path: Path) -> None:
    target = tmp_path / "plan.svg"
    result = unisono("plan", "barrier", "-n", "6", "--hosts", "2", "--svg", str(target))
    assert result.exit_code == 0
    assert f"wrote {target}" in result.output.replace("\n", "")
    assert ET.fromstring(target.read_text()).tag.endswith("svg")


WRONG_CALLS = {
    "an unknown collective": (["all_sum"], "'all_sum' is not one of 'all_reduce'"),
    "no collective": ([], "name a collective: all_reduce"),
    "an unknown algorithm": (
        ["gather", "--algorithm", "ring"],
        "algorithm 'ring' is unknown for gather; allowed: tree, flat",
    ),
    "no amount of bytes": (["all_reduce", "--bytes", "many"], "'many' is no amount of bytes"),
    "a negative amount": (["all_reduce", "--bytes", "-4"], "no amount of bytes"),
    "half an element": (["all_reduce", "--bytes", "6"], "6 bytes are no whole number of 4-byte elements"),
    "an unknown dtype": (["all_reduce", "--dtype", "float128"], "'float128' is not one of"),
    "no ranks": (["all_reduce", "-n", "0"], "0 is not in the range"),
    "too many ranks": (["all_reduce", "-n", "100000"], "100000 is not in the range"),
    "a root outside": (["broadcast", "-n", "4", "--root", "4"], "root 4 is outside 0..3"),
    "a rank outside": (["broadcast", "-n", "4", "--rank", "9"], "9 is outside 0..3"),
    "more hosts than ranks": (["all_reduce", "-n", "2", "--hosts", "3"], "3 hosts for 2 ranks"),
    "an unordered algorithm": (["all_reduce", "--ordered", "--algorithm", "ring"], "is not reproducible"),
    "a file that cannot be written": (
        ["barrier", "--svg", "/nowhere/at/all.svg"],
        "cannot write /nowhere/at/all.svg",
    ),
    "an unknown option": (["all_reduce", "--colour"], "--colour"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_ends_with_one_line_and_exit_code_2(name: str) -> None:
    arguments, says = WRONG_CALLS[name]
    result = unisono("plan", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    assert says in line


def test_an_unknown_subcommand_is_refused() -> None:
    result = unisono("plant")
    assert result.exit_code == 2
    assert "No such command 'plant'" in result.stderr


def test_help_describes_the_subcommand_and_its_options() -> None:
    assert "plan" in unisono("--help").output
    assert "--algorithm" in unisono("plan", "-h").output


def test_python_dash_m_does_the_same() -> None:
    command = [sys.executable, "-m", "unisono", "plan", "scan", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "hillis_steele" in done.stdout


def test_the_command_is_not_imported_before_it_is_called() -> None:
    script = "import sys, unisono.cli; print('rich' in sys.modules, 'unisono.cli.plan' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("arguments", [("plan", "all_reduce", "-n", "64"), ("backends",), ("plan", "--list")])
def test_a_reader_that_leaves_ends_only_the_printing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """As in `unisono plan ... | head -1`: the drawing is still written, and no error is shown."""
    drawing = tmp_path / "plan.svg"
    is_drawn = "-n" in arguments
    with subprocess.Popen(
        [sys.executable, "-m", "unisono", *arguments, *(["--svg", str(drawing)] if is_drawn else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    if is_drawn:
        assert ET.parse(drawing).getroot().tag.endswith("svg")


def test_help_shows_whole_sentences() -> None:
    text = " ".join(unisono("--help").output.split())
    assert "..." not in text.replace("[ARGS]...", "")
    for name in ("backends", "bench", "plan", "run"):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert f"{name} {' '.join(str(command.help).split('.')[0].split())}" in text


def test_backends_shows_what_the_library_says() -> None:
    result = unisono("backends")
    assert result.exit_code == 0
    words = result.output.split()
    for status in uni.list_backends():
        at = words.index(status.name)
        assert words[at + 1] == ("yes" if status.available else "no")
        text = " ".join(word for word in words if not set(word) <= {"─"})
        for word in (status.summary if status.available else status.reason).split() + status.install.split():
            assert word in text

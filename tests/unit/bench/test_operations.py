"""The table of measured operations: complete, consistent, and called in the way of a user."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from typing import Any

import pytest

from unisono.bench import OPERATIONS, Case, Options
from unisono.bench.contest import left_out, missing_verbs
from unisono.bench.libraries import Library, _compiled
from unisono.bench.operands import Pool, expected, names_of, operands_of
from unisono.bench.operations import FLOAT32, Operation
from unisono.bench.systems import SYSTEMS
from unisono.bench.ways import WAYS, loop_text
from unisono.comm.communicator import Communicator
from unisono.core.call_site import is_users

# Methods of a communicator that are not measured by themselves.
NOT_MEASURED = {
    "close": "ends a communicator; measured with split, sub, dup and mesh",
    "abort": "ends the job",
    "world": "makes a communicator of a backend; no verb",
}
# Rows for verbs that the design names and this version may lack.
PLANNED = {"dup", "split_by_host"}
IDS = [f"{row.name} {row.data[0]}" for row in OPERATIONS]


def verbs_of_a_communicator() -> set[str]:
    names = {name for name in dir(Communicator) if not name.startswith("_")}
    return {name for name in names if not isinstance(inspect.getattr_static(Communicator, name), property)}


def measured_verbs() -> set[str]:
    return set().union(*(row.lines["unisono"].verbs() for row in OPERATIONS))


def test_every_verb_of_the_communicator_is_measured() -> None:
    forgotten = verbs_of_a_communicator() - measured_verbs() - set(NOT_MEASURED)
    assert not forgotten, f"add rows for {sorted(forgotten)} to unisono/bench/operations.py"


def test_a_verb_that_is_not_in_the_table_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicator, "all_shuffle", lambda self, x: x, raising=False)
    with pytest.raises(AssertionError, match="all_shuffle"):
        test_every_verb_of_the_communicator_is_measured()


def test_every_measured_verb_exists_or_is_planned() -> None:
    assert measured_verbs() - verbs_of_a_communicator() <= PLANNED


def test_an_operation_whose_verb_is_not_there_is_left_out() -> None:
    present = {case.operation for case in Options().cases(2)}
    assert present == {row.name for row in OPERATIONS if not missing_verbs(row)}


def test_what_is_not_measured_is_named() -> None:
    named = left_out(Options(), ["unisono", "mpi", "gloo"])
    lacking = [row.name for row in OPERATIONS if missing_verbs(row)]
    assert all(name in named.get("not measured", "") for name in lacking)
    assert "scan" in named["without gloo"].partition(":")[0].split(", ")
    assert "all_reduce" not in named["without gloo"].partition(":")[0].split(", ")
    assert "without mpi" not in named
    assert left_out(Options(only=["all_reduce/blocking*"]), ["mpi", "gloo"]) == {}


@pytest.mark.parametrize("data", [FLOAT32])
def test_every_array_verb_is_measured_in_every_way(data: str) -> None:
    for row in OPERATIONS:
        if row.has_sizes and data in row.data and not row.is_posted:
            assert row.ways == tuple(WAYS), row.name


def test_no_pair_of_operation_and_data_has_two_rows() -> None:
    pairs = [(row.name, data) for row in OPERATIONS for data in row.data]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("quick", [False, True])
def test_every_case_is_one_of_its_own(quick: bool) -> None:
    cases = Options(quick=quick).cases(4)
    assert len(cases) == len(set(cases)) == len({case.label for case in cases})
    assert all(case.way in case.row.ways for case in cases)


def test_the_quick_mode_leaves_out_no_operation_and_no_way() -> None:
    quick, full = (Options(quick=quick).cases(2) for quick in (True, False))
    assert set(quick) <= set(full)
    assert {(case.operation, case.data) for case in quick} == {(case.operation, case.data) for case in full}
    assert {case.way for case in quick} == set(WAYS)


@pytest.mark.parametrize("row", OPERATIONS, ids=IDS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_lines_name_only_what_they_are_given(row: Operation, rank: int) -> None:
    provided = {
        "unisono": {"world", "first"},
        "mpi": {"world", "first", "IN_PLACE", "MAX", "Request", "status", "group", "SHARED"},
        "gloo": {"dist"},
    }
    builtins = {"range", "bytearray"}
    for library, line in row.lines.items():
        for way in row.ways:
            names = names_of(row.layout)
            tree = ast.parse(loop_text(library, row, replace(WAYS[way], lines=1), rank, names))
            loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            stored = {
                node.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            everywhere = {"rank", "size", "left", "right", "items"} | provided[library] | builtins
            assert loaded <= everywhere | stored, (library, way)
            answer = {node.id for node in ast.walk(ast.parse(line.answer)) if isinstance(node, ast.Name)}
            assert answer <= {*names, "result"} or row.layout == "none", library


@pytest.mark.parametrize("row", OPERATIONS, ids=IDS)
@pytest.mark.parametrize("rank", [0, 2])
def test_operands_come_in_the_order_of_their_names(row: Operation, rank: int) -> None:
    pool = Pool(is_fresh=False, wrap=lambda array: array)
    operands = operands_of(row, row.data[0], rank, 3, 5, pool, filled=True)
    assert len(operands) == len(names_of(row.layout))
    expected(row, row.data[0], rank, 3, 5)


def text(library: str, name: str, way: str, rank: int = 0) -> list[str]:
    row = next(row for row in OPERATIONS if row.name == name)
    lines = loop_text(library, row, WAYS[way], rank, names_of(row.layout)).splitlines()
    return [line.strip() for line in lines[3:-1]]


@pytest.mark.parametrize(
    ("library", "name", "way", "lines"),
    [
        ("unisono", "all_reduce", "blocking", ["result = world.all_reduce(x)"]),
        ("unisono", "all_reduce", "timeout", ["result = world.all_reduce(x, timeout=60)"]),
        ("unisono", "barrier", "timeout", ["result = world.barrier(timeout=60)"]),
        ("mpi", "all_reduce", "timeout", ["result = world.Allreduce(IN_PLACE, x)"]),
        ("unisono", "all_reduce", "started", ["result = world.start.all_reduce(x).wait()"]),
        ("mpi", "all_reduce", "started", ["result = world.Iallreduce(IN_PLACE, x).Wait()"]),
        ("gloo", "all_reduce", "started", ["result = dist.all_reduce(x, async_op=True).wait()"]),
        (
            "mpi",
            "all_reduce",
            "polled",
            [
                "work = world.Iallreduce(IN_PLACE, x)",
                "while not work.Test(): pass",
                "result = work.Wait()",
            ],
        ),
        (
            "mpi",
            "isend_irecv",
            "started",
            [
                "work0 = world.Irecv(out, left)",
                "work1 = world.Isend(x, right)",
                "Request.Waitall([work0, work1])",
            ],
        ),
        (
            "unisono",
            "isend_irecv",
            "polled",
            [
                "work0 = world.start.recv(out, left)",
                "work1 = world.start.send(x, right)",
                "while not work0.done(): pass",
                "while not work1.done(): pass",
                "work0.wait()",
                "work1.wait()",
            ],
        ),
        ("mpi", "broadcast_object", "started", ["result = world.bcast(value)"]),
        ("unisono", "split_close", "started", ["result = world.start.split(rank % 2, rank).wait().close()"]),
        ("unisono", "ping", "blocking", ["result = world.send(x, 1)", "result = world.recv(x, 1)"]),
    ],
)
def test_a_way_of_calling_is_a_line_of_the_users_program(
    library: str, name: str, way: str, lines: list[str]
) -> None:
    assert text(library, name, way) == lines


def test_the_second_of_a_pair_has_its_own_line_and_the_third_none() -> None:
    assert text("unisono", "ping", "blocking", 1) == [
        "result = world.recv(x, 0)",
        "result = world.send(x, 0)",
    ]
    assert text("unisono", "ping", "blocking", 2) == ["pass"]


def test_a_thousand_lines_are_a_thousand_places_of_the_program() -> None:
    assert text("unisono", "all_reduce", "1000 lines") == ["result = world.all_reduce(x)"] * 1000


def test_calls_come_from_the_users_side() -> None:
    run = _compiled("def run(items):\n    return items\n", {})
    assert is_users(run.__code__.co_filename)
    assert not run.__code__.co_filename.endswith(".py")


def test_every_library_of_a_system_has_lines() -> None:
    libraries = {system.library for system in SYSTEMS.values()}
    assert libraries == set().union(*(row.lines for row in OPERATIONS))
    assert all({"unisono", "mpi"} <= set(row.lines) for row in OPERATIONS)


class Alone(Library):
    """A rank that makes operands, and whose verbs are never called."""

    name, rank, size = "unisono", 1, 3

    def names(self) -> dict[str, Any]:
        return {}


def operands(library: Library, way: str, calls: int) -> list[tuple[Any, ...]]:
    items, count = library.prepared(Case("all_reduce", 3, 44, way), check=False).items(calls)
    assert count == calls
    return list(items)


def test_a_new_size_was_in_no_call_of_any_turn_before() -> None:
    library = Alone()
    lengths = [x.size for _ in range(3) for x, _out in operands(library, "new size", 5)]
    assert len(lengths) == len(set(lengths)) == 15
    assert all(x.size == out.size for x, out in operands(library, "new size", 2))


def test_sizes_that_were_seen_are_those_that_were_new() -> None:
    library = Alone()
    new, seen = (
        [[x.size for x, _ in operands(library, way, calls)] for calls in (3, 63, 250, 63, 250)]
        for way in ("new size", "seen size")
    )
    assert new == seen
    ready = library.prepared(Case("all_reduce", 3, 44, "seen size"), check=False)
    assert ready.is_seen
    items, _ = ready.items(7)
    assert [x.size for x, _ in items] == [x.size for x, _ in items]  # made twice


def test_known_operands_are_the_same_and_new_ones_are_not() -> None:
    library = Alone()
    same, views, arrays = (
        [x for x, _ in operands(library, way, 4)] for way in ("blocking", "new view", "new array")
    )
    assert len({id(x) for x in same}) == 1
    assert len({id(x) for x in views}) == 4
    assert len({x.ctypes.data for x in views}) == 1
    assert len({x.ctypes.data for x in arrays}) == 4


def test_calls_of_a_thousand_lines_are_counted() -> None:
    ready = Alone().prepared(Case("all_reduce", 3, 44, "1000 lines"), check=False)
    assert [ready.items(calls)[1] for calls in (1, 1000, 1001)] == [1000, 1000, 2000]

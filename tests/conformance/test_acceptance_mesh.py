"""Ranks in a grid: index arithmetic, and a communicator along each axis."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.conformance.test_acceptance_groups import everything_works
from tests.support.oracle import Notes, operand, reduced
from tests.support.ranks import run_ranks

import unisono as uni
from unisono.comm.mesh import Grid

# -- index arithmetic: ferrotorch DM01-DM10, CF28-CF30 ----------------------------------------------------


@pytest.mark.on_every_link
@pytest.mark.parametrize("shape", [(2, 3), (4,), (1,), (6,), (5, 1, 2)])
def test_a_shape_that_does_not_hold_the_world_is_refused(shape: tuple[int, ...]) -> None:
    def program(comm: uni.Communicator) -> int:
        with pytest.raises(uni.UsageError, match="exactly 5"):
            comm.mesh(shape)
        return comm.all_reduce(comm.rank)

    assert run_ranks(program, 5).values() == [10] * 5


@pytest.mark.parametrize("shape", [(), (0, 2), (2, 0), (-1, 2), (2.0, 1), (True, 2)])
def test_a_shape_without_sense_is_refused(shape: Any) -> None:
    with pytest.raises(uni.UsageError, match="lengths >= 1"):
        Grid(shape)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8,), (2, 2, 2), (1, 8, 1), (3, 1, 2, 2)])
def test_coordinates_and_ranks_translate_both_ways(shape: tuple[int, ...]) -> None:
    grid = Grid(shape)
    places = list(itertools.product(*map(range, shape)))
    assert [grid.coords(rank) for rank in range(grid.size)] == places  # row by row
    assert [grid.rank_of(place) for place in places] == list(range(grid.size))


def test_the_ranks_along_an_axis_are_the_published_ones() -> None:
    grid = Grid((2, 4))
    assert grid.ranks_along(0, 5) == (1, 5)
    assert grid.ranks_along(1, 5) == (4, 5, 6, 7)
    cube = Grid((2, 2, 3))
    assert cube.coords(7) == (1, 0, 1)
    assert cube.ranks_along(2, 7) == (6, 7, 8)
    assert cube.ranks_along(1, 7) == (7, 10)
    assert cube.ranks_along(0, 7) == (1, 7)


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (2, 2, 3), (1, 5)])
def test_the_groups_along_every_axis_hold_every_rank_once(shape: tuple[int, ...]) -> None:
    grid = Grid(shape)
    for axis, length in enumerate(shape):
        groups = grid.groups_along(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
        assert {len(group) for group in groups} == {length}


def test_names_resolve_and_unknown_ones_are_refused() -> None:
    grid = Grid((2, 4), ("dp", "tp"))
    assert (grid.axis("dp"), grid.axis("tp"), grid.axis(1)) == (0, 1, 1)
    for name in ("pp", "", 2, -1, True, None):
        with pytest.raises(uni.UsageError, match="dp, tp"):
            grid.axis(name)


@pytest.mark.parametrize("names", [("dp",), ("a", "b", "c"), ("a", "a"), (1, 2)])
def test_names_that_do_not_fit_the_axes_are_refused(names: Any) -> None:
    with pytest.raises(uni.UsageError, match="2 different names"):
        Grid((2, 4), names)


@pytest.mark.parametrize("rank", [-1, 8, 1.0, True, None])
def test_a_rank_outside_the_grid_is_refused(rank: Any) -> None:
    with pytest.raises(uni.UsageError, match="0 to 7"):
        Grid((2, 4)).coords(rank)


@pytest.mark.parametrize("coords", [(2, 0), (0, 4), (-1, 0), (0,), (0, 0, 0)])
def test_coordinates_outside_the_grid_are_refused(coords: tuple[int, ...]) -> None:
    with pytest.raises(uni.UsageError, match="inside the shape"):
        Grid((2, 4)).rank_of(coords)


# -- communicators along the axes -------------------------------------------------------------------------


@pytest.mark.on_every_link
@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (2, 2, 2), (1, 4)])
def test_every_axis_has_a_full_communicator(shape: tuple[int, ...]) -> None:
    grid = Grid(shape)
    names = tuple("pdtx"[: len(shape)])

    def program(comm: uni.Communicator) -> Notes:
        notes = Notes()
        mesh = comm.mesh(shape, names)
        notes.check(mesh.shape == shape and mesh.names == names, "shape and names", mesh)
        notes.check(mesh.coords == grid.coords(comm.rank), "coords", mesh.coords)
        for axis, name in enumerate(names):
            group = mesh[name]
            members = list(grid.ranks_along(axis, comm.rank))
            notes.check(group is mesh[axis], name, "by number is another")
            notes.check(group.name == name, "name", group.name)
            notes.check(group.rank == mesh.coords[axis], name, "rank", group.rank)
            notes.check(group.all_gather(comm.rank).tolist() == members, name, "members")
            notes.extend(everything_works(group, name))
        # All axes at once, waited for in reverse: pairs of ranks cross, and sizes are equal.
        works = [
            mesh[name].start.all_reduce(operand("int64", "sum", 97, comm.rank, grid.size, name).copy())
            for name in names
        ]
        for axis, name in reversed(list(enumerate(names))):
            members = list(grid.ranks_along(axis, comm.rank))
            xs = [operand("int64", "sum", 97, r, grid.size, name) for r in members]
            notes.expect(works[axis].wait(), reduced("sum", xs), "together", name)
        return notes

    ended = run_ranks(program, grid.size, config=uni.Config(segment_bytes=64))
    assert ended.values() == [[]] * grid.size


@pytest.mark.on_every_link
def test_an_axis_that_does_not_exist_is_refused_and_a_mesh_of_a_group_works() -> None:
    def program(comm: uni.Communicator) -> Any:
        group = comm.split(None if comm.rank == 0 else 0, -comm.rank)
        if group is None:
            return None
        mesh = group.mesh((2, 2))
        with pytest.raises(uni.UsageError, match="axis0, axis1"):
            mesh["dp"]
        first = mesh[0].all_gather(comm.rank).tolist()
        return mesh.names, first, mesh["axis1"].all_gather(comm.rank).tolist()

    # The group holds world ranks 4, 3, 2, 1 in this order.
    names = ("axis0", "axis1")
    want = [
        (names, [3, 1], [2, 1]),
        (names, [4, 2], [2, 1]),
        (names, [3, 1], [4, 3]),
        (names, [4, 2], [4, 3]),
    ]
    assert run_ranks(program, 5).values() == [None, *want]


@pytest.mark.on_every_link
def test_reducing_inside_and_then_across_is_reducing_over_all() -> None:
    """The two steps of ferrotorch's HybridShard: scatter inside a node, sum across, gather inside."""

    def program(comm: uni.Communicator) -> Any:
        mesh = comm.mesh((3, 2), ("across", "inside"))
        x = operand("float64", "sum", (2, 50), comm.rank, 6)
        part = mesh["inside"].reduce_scatter(x)
        mesh["across"].all_reduce(part)
        whole = mesh["inside"].all_gather(part)
        return np.array_equal(
            whole, reduced("sum", [operand("float64", "sum", (2, 50), r, 6) for r in range(6)])
        )

    assert run_ranks(program, 6).values() == [True] * 6

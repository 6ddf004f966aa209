"""The table of measurements: its names exist, and choices follow it on both sides of every threshold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.bench.tuning import REACH_BYTES, SIZES, thresholds
from unisono.plans import CATALOG, LINKS, Problem, choose, entry_of, measured
from unisono.plans.choose import _cheapest

VECTORS = ("all_reduce", "reduce", "broadcast", "scan", "exscan")
FAR = 1 << 40


def problem_of(collective: str, size: int, count: int, hosts: tuple[int, ...] = ()) -> Problem:
    held = {**dict.fromkeys(VECTORS, 1), "barrier": 0, "all_to_all": size * size}.get(collective, size)
    return Problem(collective, size, (count,) * held, hosts=hosts)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the real table by another one."""

    def write(whole: dict[str, Any]) -> None:
        (tmp_path / "table.json").write_text(json.dumps({"any": {}, "ordered": {}, **whole}))
        monkeypatch.setattr(measured, "PATH", tmp_path / "table.json")
        forget()

    def forget() -> None:
        for cached in (measured.table, _cheapest):
            cached.cache_clear()

    yield write
    monkeypatch.undo()
    forget()


def test_the_table_names_what_exists() -> None:
    table = measured.table()
    assert set(table) == {"machine", "any", "ordered"}
    for order in ("any", "ordered"):
        for kind, collectives in table[order].items():
            assert kind in LINKS
            for collective, by_size in collectives.items():
                for size, rows in by_size.items():
                    assert int(size) >= 2
                    limits = [limit for limit, _ in rows]
                    assert limits == sorted(set(limits))
                    for _, name in rows:
                        entry = entry_of(collective, name)
                        assert not entry.needs_hosts
                        assert entry.ordered or order == "any"


def test_choices_follow_the_table_on_both_sides_of_a_threshold(written: Any) -> None:
    written({"any": {"tcp": {"all_reduce": {"3": [[4096, "tree"], [FAR, "ring"]]}}}})
    below, above = Problem("all_reduce", 3, (1024,)), Problem("all_reduce", 3, (1025,))
    assert choose(below, 4, LINKS["tcp"]) == ("tree", "measured over tcp for up to 4 KiB on 3 ranks")
    assert choose(above, 4, LINKS["tcp"])[0] == "ring"
    assert choose(below, 8, LINKS["tcp"])[0] == "ring"


def test_cases_without_measurements_are_predicted(written: Any) -> None:
    written({"any": {"tcp": {"all_reduce": {"4": [[FAR, "tree"]]}}}})
    hosts = (0, 0, 1, 1)
    for problem, links, ordered in [
        (problem_of("all_reduce", 5, 9), LINKS["tcp"], False),
        (problem_of("all_reduce", 4, 9), LINKS["shm"], False),
        (problem_of("all_reduce", 4, 9), LINKS[""], False),
        (problem_of("all_reduce", 4, 9, hosts), LINKS["tcp"], False),
        (problem_of("all_reduce", 4, 9), LINKS["tcp"], True),
        (problem_of("broadcast", 4, 9), LINKS["tcp"], False),
    ]:
        name, reason = choose(problem, 4, links, ordered=ordered)
        assert "predicted" in reason
        assert choose(problem, 4, replace(links, kind=""), ordered=ordered) == (name, reason)


def test_one_host_of_several_is_one_host(written: Any) -> None:
    written({"any": {"shm": {"all_reduce": {"2": [[FAR, "tree"]]}}}})
    assert choose(Problem("all_reduce", 2, (9,), hosts=(3, 3)), 4, LINKS["shm"])[0] == "tree"


def test_uneven_blocks_take_only_what_takes_them(written: Any) -> None:
    written({"any": {"shm": {"all_to_all": {"2": [[FAR, "dissemination"]]}}}})
    assert choose(Problem("all_to_all", 2, (5, 5, 5, 5)), 4, LINKS["shm"])[0] == "dissemination"
    name, reason = choose(Problem("all_to_all", 2, (5, 1, 2, 5)), 4, LINKS["shm"])
    assert entry_of("all_to_all", name).takes_uneven
    assert "predicted" in reason


def test_ordered_choices_come_from_the_ordered_table(written: Any) -> None:
    written(
        {
            "any": {"shm": {"all_reduce": {"2": [[FAR, "ring"]]}, "broadcast": {"2": [[FAR, "chain"]]}}},
            "ordered": {"shm": {"all_reduce": {"2": [[FAR, "flat"]]}}},
        }
    )
    assert choose(Problem("all_reduce", 2, (9,)), 4, LINKS["shm"], ordered=True)[0] == "flat"
    assert choose(Problem("all_reduce", 2, (9,)), 4, LINKS["shm"])[0] == "ring"
    assert choose(Problem("broadcast", 2, (9,)), 4, LINKS["shm"], ordered=True)[0] == "chain"


def test_thresholds_lie_between_sizes_with_clearly_different_winners() -> None:
    times = {
        "all_reduce": {
            64: {"doubling": 1.0, "ring": 2.0, "flat": 0.95},
            1024: {"doubling": 1.0, "ring": 1.5},
            16384: {"doubling": 5.0, "ring": 4.9},
            262144: {"doubling": 9.0, "ring": 4.0, "halving_doubling": 3.9},
        }
    }
    # doubling: predicted, and not clearly slower than flat; ring at 16 KiB is not clearly faster.
    predicted = choose(Problem("all_reduce", 2, (1 << 16,)), 4, replace(LINKS["shm"], kind=""))[0]
    assert predicted in ("ring", "halving_doubling")
    assert thresholds(times, 2, "shm", ordered=False) == {
        "all_reduce": [[65536, "doubling"], [2 * 262144, predicted]]
    }
    assert thresholds(times, 2, "shm", ordered=True) == {
        "all_reduce": [[65536, "doubling"], [2 * 262144, "halving_doubling"]]
    }
    # The largest measured size stands for all larger ones.
    times["all_reduce"][SIZES[-1]] = {"doubling": 99.0, "halving_doubling": 50.0, "ring": 80.0}
    assert thresholds(times, 2, "shm", ordered=True)["all_reduce"][-1] == [REACH_BYTES, "halving_doubling"]


def test_only_what_reduces_has_an_ordered_table() -> None:
    times = {name: {8: dict.fromkeys(CATALOG[name], 1.0)} for name in ("broadcast", "barrier", "scan")}
    for entries in times.values():
        entries[8].pop("hierarchical", None)
    assert set(thresholds(times, 4, "shm", ordered=True)) == {"scan"}
    assert set(thresholds(times, 4, "shm", ordered=False)) == {"broadcast", "barrier", "scan"}

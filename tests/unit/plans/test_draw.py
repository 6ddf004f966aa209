"""Drawings: complete, well-formed, and without external references."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from unisono.plans import CATALOG, BoundPlan, Problem, bound
from unisono.plans.draw import as_svg, as_text, messages, rank_text

SVG = "{http://www.w3.org/2000/svg}"


def ring(size: int = 4, count: int = 20) -> list[BoundPlan]:
    return [bound(Problem("all_reduce", size, (count,)), rank, "ring") for rank in range(size)]


def test_text_shows_every_step_of_every_rank() -> None:
    text = as_text(ring(), itemsize=4)
    assert text.splitlines()[:2] == [
        "round 0: 4 messages, 80 B",
        "  0  send out[0:5] to 1; recv+reduce out[15:20] from 3 (arriving left)",
    ]
    assert sum(len(line.split(";")) for line in text.splitlines() if line.startswith("  ")) == 4 * 12


def test_a_rank_is_shown_line_by_line() -> None:
    lines = rank_text(ring()[1]).splitlines()
    assert len(lines) == 12
    assert lines[0] == "0  send out[5:10] to 2"


def test_arrows_pair_the_kth_send_with_the_kth_receive() -> None:
    found = messages(ring())
    assert len(found) == 4 * 6
    assert {(message.dst - message.src) % 4 for message in found} == {1}
    assert [message.reduces for message in found] == [True] * 12 + [False] * 12


@pytest.mark.parametrize("collective", CATALOG)
def test_every_plan_can_be_drawn(collective: str) -> None:
    counts = {"all_to_all": (2,) * 25, "barrier": ()}.get(
        collective,
        (7,) if collective in ("all_reduce", "reduce", "broadcast", "scan", "exscan") else (2,) * 5,
    )
    for name in CATALOG[collective]:
        problem = Problem(collective, 5, counts, hosts=(0, 0, 1, 1, 1))
        plans = [bound(problem, rank, name) for rank in range(5)]
        picture = ET.fromstring(as_svg(plans, itemsize=4))
        arrows = [line for line in picture.iter(f"{SVG}line") if line.find(f"{SVG}title") is not None]
        assert len(arrows) == len(messages(plans))
        assert as_text(plans, 4)


def test_a_drawing_of_one_rank_is_empty_but_whole() -> None:
    plans = [bound(Problem("all_reduce", 1, (5,)), 0, "ring")]
    ET.fromstring(as_svg(plans, itemsize=4))
    assert as_text(plans, 4) == ""


def test_long_plans_fit_on_a_page() -> None:
    plans = [bound(Problem("all_reduce", 33, (1000,)), rank, "ring") for rank in range(33)]
    picture = ET.fromstring(as_svg(plans, itemsize=4))
    assert int(picture.attrib["width"]) < 2200


def test_text_in_drawings_is_escaped_and_nothing_is_loaded() -> None:
    plans = [replace(plan, algorithm='<script>"&') for plan in ring()]
    drawn = as_svg(plans, itemsize=4, note="a < b & c")
    ET.fromstring(drawn)
    assert "<script>" not in drawn
    assert "a &lt; b &amp; c" in drawn
    assert drawn.count("http") == 1  # the namespace

"""docs/backends.md agrees with the code."""

from __future__ import annotations

from importlib.metadata import entry_points

from tests.support.paths import ROOT

from unisono.backends.registry import GROUP, BackendInfo

PAGE = ROOT / "docs" / "backends.md"
COLUMNS = ("run_plan", "run_collective", "sync_send", "wildcards", "device_memory")


def test_the_table_of_capabilities_is_the_codes() -> None:
    wanted = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        info = point.load()
        assert isinstance(info, BackendInfo)
        assert info.capabilities is not None
        words = ["yes" if getattr(info.capabilities, column) else "no" for column in COLUMNS]
        wanted.append(f"| {point.name} | {' | '.join(words)} |")
    text = PAGE.read_text()
    assert "\n".join(wanted) in text

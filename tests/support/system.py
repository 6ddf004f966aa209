"""Tools and permissions of the system that some tests need; without them a test is skipped and counted.

With CI=true, which .ci/run sets after it has installed .ci/packages, a missing tool is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from typing import NoReturn

import pytest

from unisono import _native
from unisono.backends.native.quic import MISSING

__all__ = ["need_quic", "need_root", "need_tools", "run_tool", "skip_without", "skipped_by_need"]

_WANT = "for want of "


def need_quic() -> None:
    """Skip this test unless unisono was built with QUIC links; in CI fail."""
    if not _native.has_quic():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{MISSING}; .ci/packages lists the packages")
        skip_without("QUIC links", MISSING)


def need_tools(*tools: str) -> None:
    """Skip this test unless every tool is installed; in CI fail."""
    for tool in tools:
        if shutil.which(tool) is None:
            if os.environ.get("CI") == "true":
                pytest.fail(f"{tool} is not installed; .ci/packages lists the packages that the tests need")
            skip_without(tool, "not installed")


def need_root(to: str) -> None:
    """Skip this test unless root runs it; in CI fail. `to` names what only root can do."""
    if os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail(f"only root can {to}")
        skip_without("root's rights", f"only root can {to}")


def run_tool(*words: str) -> bytes:
    """Run a tool of the system, which may need permissions that the test does not have; return its output."""
    need_tools(words[0])
    try:
        return subprocess.run(words, check=True, capture_output=True).stdout
    except subprocess.CalledProcessError as error:
        skip_without(f"the right to `{' '.join(words[:2])}`", error.stderr.decode().strip() or str(error))


def skip_without(what: str, why: str) -> NoReturn:
    """Skip this test, which needs something of the system that cannot be installed."""
    pytest.skip(f"{_WANT}{what}: {why}")


def skipped_by_need(reasons: list[str]) -> Counter[str]:
    """The number of skipped tests for each tool or permission that they need."""
    wants = (reason.partition(_WANT)[2].partition(":")[0] for reason in reasons if _WANT in reason)
    return Counter(wants)

"""Threads that run an event loop of asyncio, which a blocking verb stops."""

from __future__ import annotations

import sys
import warnings

from unisono.core.call_site import caller

__all__ = ["warn_of_stopped_loop"]


def warn_of_stopped_loop(verb: str) -> None:
    """Warn if the calling thread runs an event loop in asyncio's debug mode (PYTHONASYNCIODEBUG=1)."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if loop.get_debug():
        frame = caller()
        warnings.warn_explicit(
            f"{verb} blocks the event loop of this thread. Next: await comm.start.{verb}(...)",
            RuntimeWarning,
            frame.f_code.co_filename,
            frame.f_lineno,
        )

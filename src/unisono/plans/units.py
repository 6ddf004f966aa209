"""Seconds and bytes as text for people."""

from __future__ import annotations

__all__ = ["bytes_text", "seconds_text"]


def seconds_text(seconds: float) -> str:
    """Write a time with three digits: "1.46 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def bytes_text(nbytes: float) -> str:
    """Write an amount with four digits: "64 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"

"""Amounts of bytes as people type them: 4096, 64Ki, 1Mi, 10M."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

import click

__all__ = ["bytes_of"]

_SUFFIXES: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def bytes_of(text: str) -> int:
    """Read an amount.

    Raises:
        click.BadParameter: it is not an amount.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?|)B?", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no amount of bytes; write 4096, 64Ki, 1Mi, 2Gi or 10M")
    return int(Decimal(found[1]) * _SUFFIXES[found[2]])

"""Cards, by which a rank reaches another, and credentials, by which it proves its own identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Card", "Credentials"]


class Card(NamedTuple):
    """What other ranks need to reach a rank.

    `unix_path` is empty if the rank uses no shared memory. By `pid`, ranks of its host see whether it is dead
    or only not scheduled; 0 if it is not known.
    """

    host: str
    unix_path: str
    address: str
    port: int
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Credentials:
    """A rank's TLS key and certificate, and the authority it trusts; certificate r is for `names[r]`."""

    names: Sequence[str]
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    authority_pem: bytes = field(repr=False)

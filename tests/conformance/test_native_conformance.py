"""The native backend passes the conformance kit on all kinds of links; the engines share this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.credentials import credentials

from unisono.backends.native.backend import NativeBackend
from unisono.config import Config
from unisono.testing import CASES, check_backend

Factory = Callable[[int], list[NativeBackend]]

KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "shm": lambda rank: {},
    "rings": lambda rank: {"direct_read": False},  # long messages use the rings, too
    "tcp": lambda rank: {"shm": False},
    "hosts": lambda rank: {"host": f"host {rank % 2}"},  # shared memory in a host, TCP with checksums between
    "tight": lambda rank: {"config": Config(eager_bytes=48, eager_credit_bytes=256, segment_bytes=512)},
    "never eager": lambda rank: {"config": Config(eager_bytes=0, eager_credit_bytes=0), "shm": rank >= 0},
    "tight tcp": lambda rank: {"shm": False, "config": Config(eager_bytes=48, eager_credit_bytes=256)},
    "tls": lambda rank: {"shm": False, "tls": True},
    "hosts tls": lambda rank: {"host": f"host {rank % 2}", "tls": True},
    # A new key every third record, and messages that span records.
    "tight tls": lambda rank: {
        "shm": False,
        "tls": True,
        "rekey_records": 3,
        "config": Config(eager_bytes=48, eager_credit_bytes=256),
    },
    "quic": lambda rank: {"shm": False, "quic": True},
    "hosts quic": lambda rank: {"host": f"host {rank % 2}", "quic": True},
    # Frequent new keys, and messages that span datagrams of the smallest size in networks.
    "tight quic": lambda rank: {
        "shm": False,
        "quic": True,
        "datagram_bytes": 1200,
        "rekey_records": 30,
        "config": Config(eager_bytes=48, eager_credit_bytes=256),
    },
}


@pytest.fixture
def factory(tmp_path: Path) -> Iterator[Callable[[str], Factory]]:
    """`factory(kind)(size)`: connected ranks in this process."""
    numbers = itertools.count()

    def of(kind: str) -> Factory:
        def make(size: int) -> list[NativeBackend]:
            folder = tmp_path / str(next(numbers))
            folder.mkdir(mode=0o700)
            ranks = [NativeBackend(r, size, str(folder), b"secret", **KINDS[kind](r)) for r in range(size)]
            cards = [rank.card() for rank in ranks]
            given = credentials(size) if "tls" in kind or "quic" in kind else [None] * size
            for rank in ranks:
                rank.connect(cards, given[rank.rank])
            return ranks

        return make

    yield of
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()], "sockets are left behind"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_native_keeps_the_contract(factory: Callable[[str], Factory], kind: str, case: str) -> None:
    assert check_backend(factory(kind), names=[case]) == [case]

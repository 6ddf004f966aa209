"""The ways to choose QUIC links (the backend, the setting), and the combinations that are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.quic_ranks import PATIENCE_S

import unisono as uni
from unisono import _native
from unisono.backends.native.backend import NativeBackend
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.errors import BackendUnavailable, UsageError


def links_and_sum(comm: Communicator) -> tuple[str, set[str], float]:
    x = np.full(100_003, comm.rank + 1.0)
    comm.all_reduce(x)
    for peer in range(comm.size):
        comm.send(np.full(3, comm.rank), peer, 1)
    for peer in range(comm.size):
        comm.recv(np.zeros(3, np.int64), peer, 1)
    assert isinstance(comm.backend, NativeBackend)
    kinds = set(comm.backend.links()) - {"self"}
    comm.barrier()  # no rank has left so far
    return comm.backend.capabilities.name, kinds, float(x[7])


def test_backend_quic_uses_quic_between_all_ranks() -> None:
    assert uni.spawn(links_and_sum, 3, backend="quic") == [("quic", {"quic"}, 6.0)] * 3


def test_links_quic_keeps_shared_memory_within_a_host() -> None:
    (_, kinds, total), *_ = uni.spawn(links_and_sum, 2, config=Config(links="quic"))
    assert (kinds <= {"shm", "shm+read"}, total) == (True, 3.0)


def test_links_quic_without_shared_memory_are_quic() -> None:
    ended = uni.spawn(links_and_sum, 2, config=Config(links="quic", shm=False))
    assert ended == [("quic", {"quic"}, 3.0)] * 2


def test_ranks_that_choose_quic_themselves_get_certificates_from_the_launcher(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import unisono as uni\n"
        "with uni.init(backend='quic') as world:\n"
        "    total, links = world.all_reduce(world.rank + 1), sorted(set(world.backend.links()))\n"
        "    world.barrier()\n"
        "    print(total, links, flush=True)\n"
    )
    run = [sys.executable, "-m", "unisono", "run", "-n", "2", str(program)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] 3 ['quic', 'self']" for rank in range(2)]


def test_ranks_that_disagree_about_links_are_refused_by_name(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, unisono as uni\n"
        "links = 'quic' if os.environ['UNISONO_RANK'] == '0' else 'tcp'\n"
        "uni.init(config=uni.Config(links=links), timeout=10).close()\n"
    )
    run = [sys.executable, "-m", "unisono", "run", "-n", "2", str(program)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode != 0
    assert "its settings differ from rank 0's: links='tcp' (rank 0: 'quic')" in ended.stderr


@pytest.mark.parametrize(
    ("backend", "settings", "text"),
    [
        ("quic", {"links": "tcp"}, 'backend="quic" and links="tcp" contradict each other'),
        ("quic", {"insecure": True}, "QUIC is always encrypted"),
        ("native", {"iroh_streams": 2}, "iroh_streams for backend='native'"),
        ("native", {"iroh_streams": 4}, "iroh_streams for backend='native'"),  # the default
        ("quic", {"iroh_relay": "default"}, "iroh_relay for backend='quic'"),
    ],
)
def test_settings_that_contradict_the_backend_are_refused(
    backend: str, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError) as refused:
        uni.spawn(links_and_sum, 2, backend=backend, config=Config(**settings))
    assert text in str(refused.value)


def test_a_build_without_quic_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.backends.native import quic
    from unisono.bootstrap.address import Address
    from unisono.bootstrap.entry import ListenSpec
    from unisono.comm import world

    monkeypatch.setattr(_native, "has_quic", lambda: False)
    assert quic.DESCRIPTION.check() == quic.MISSING
    here = Address("127.0.0.1")
    listen = ListenSpec(0, 2, here, here, False, Path("/"), b"")
    with pytest.raises(BackendUnavailable) as refused:
        world._engine(listen, Config(links="quic"))
    for word in ("Debian", "Ubuntu", "Fedora", "libngtcp2-crypto-gnutls-dev", "ngtcp2-crypto-gnutls-devel"):
        assert word in str(refused.value)

"""Device tensors use the library of the device, all else the inner backend; why NCCL is unavailable here.

The tests need no GPU: the library is a fake, and its device is torch's "meta", whose tensors have no memory.
They check to which backend each call goes, and with which arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.processes import forked
from tests.support.ranks import PATIENCE_S, run_each
from tests.support.system import skip_without

import unisono as uni
from unisono.backends.devices.backend import DeviceBackend
from unisono.backends.devices.calls import DeviceLibrary
from unisono.backends.devices.nccl import missing, store_over
from unisono.backends.local import LocalBackend
from unisono.backends.native.backend import NativeBackend
from unisono.comm.communicator import Communicator
from unisono.config import Config
from unisono.errors import BackendUnavailable, UsageError


class FakeLibrary(DeviceLibrary):
    """A library that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.is_closed = False

    def takes(self, tensor: Any) -> bool:
        return bool(tensor.device.type == "meta")

    def run(self, verb: str, given: Any, taken: Any, op: str, root: int, timeout: float | None) -> None:
        self.calls.append((verb, tuple(given.shape), tuple(taken.shape), op, root, timeout))

    def close(self) -> None:
        self.is_closed = True


def on_ranks(
    program: Callable[[Communicator, FakeLibrary], Any], size: int = 2, config: Config | None = None
) -> list[FakeLibrary]:
    libraries = [FakeLibrary() for _ in range(size)]
    backends = [
        DeviceBackend(inner, library, "fake")
        for inner, library in zip(LocalBackend.create(size, config), libraries, strict=True)
    ]

    def live(rank: tuple[DeviceBackend, FakeLibrary]) -> Any:
        with Communicator.world(rank[0]) as comm:
            return program(comm, rank[1])

    run_each(live, list(zip(backends, libraries, strict=True))).values()
    return libraries


def test_device_tensors_go_by_the_library_and_everything_else_by_the_inner_backend() -> None:
    def program(comm: Communicator, library: FakeLibrary) -> None:
        assert comm.backend.capabilities.name == "fake"
        assert comm.backend.capabilities.device_memory
        x = torch.empty(2, 5, device="meta")
        assert comm.all_reduce(x) is x
        assert comm.all_reduce(x, "mean", timeout=3) is x
        assert comm.broadcast(x, root=1) is x
        assert comm.all_gather(x).shape == (2, 2, 5)
        assert comm.reduce_scatter(x, op="max").shape == (5,)
        out = torch.empty(2, 5, device="meta")
        assert comm.all_to_all(x, out=out) is out
        here = torch.full((3,), comm.rank + 1.0)
        assert comm.all_reduce(here).tolist() == [3.0] * 3
        assert comm.all_reduce(np.arange(4) + comm.rank).tolist() == [1, 3, 5, 7]
        assert comm.all_reduce(comm.rank + 1) == 3
        half = comm.split(0)
        assert half is not None
        with pytest.raises(UsageError, match="dense tensors on the CPU"):
            half.all_reduce(x)

    for library in on_ranks(program):
        assert library.calls == [
            ("all_reduce", (2, 5), (2, 5), "sum", 0, None),
            ("all_reduce", (2, 5), (2, 5), "mean", 0, 3),
            ("broadcast", (2, 5), (2, 5), "sum", 1, None),
            ("all_gather", (2, 5), (2, 2, 5), "sum", 0, None),
            ("reduce_scatter", (2, 5), (5,), "max", 0, None),
            ("all_to_all", (2, 5), (2, 5), "sum", 0, None),
        ]
        assert library.is_closed


def test_arguments_may_be_passed_as_to_every_verb() -> None:
    """By position or by name; wrong arguments are a TypeError, because a verb has one signature."""

    def program(comm: Communicator, library: FakeLibrary) -> None:
        x = torch.empty(2, 5, device="meta")
        comm.all_reduce(x=x, op="max")
        comm.broadcast(x, 1, timeout=2)
        comm.reduce_scatter(x, "min", timeout=4.0)
        with pytest.raises(TypeError, match="root"):
            comm.all_reduce(x, root=1)
        with pytest.raises(TypeError):
            comm.all_gather(x, "sum")
        with pytest.raises(UsageError, match="on the CPU"):  # the library has no scan
            comm.scan(x)

    for library in on_ranks(program):
        assert [(verb, op, root, timeout) for verb, _, _, op, root, timeout in library.calls] == [
            ("all_reduce", "max", 0, None),
            ("broadcast", "sum", 1, 2),
            ("reduce_scatter", "min", 0, 4.0),
        ]


def test_the_library_gets_the_deadline_of_the_communicator() -> None:
    def program(comm: Communicator, library: FakeLibrary) -> None:
        x = torch.empty(2, 5, device="meta")
        comm.all_reduce(x)
        comm.all_reduce(x, timeout=3)

    for library in on_ranks(program, config=Config(deadline_s=8)):
        assert [timeout for *_, timeout in library.calls] == [8.0, 3]


def test_the_fast_path_of_the_native_backend_stays() -> None:
    def live(backend: NativeBackend, pipe: Connection) -> list[float]:
        library = FakeLibrary()
        with Communicator.world(DeviceBackend(backend, library, "fake")) as comm:
            comm.all_reduce(torch.empty(3, device="meta"))
            x = np.ones(3)
            for _ in range(4):
                comm.all_reduce(x)
            assert comm._group.native is not None
            assert comm._group.native.ended >= 3
            pair = comm.split(0, key=-comm.rank)
            assert pair is not None
            comm.sendrecv(np.array([comm.rank + 5.0]), 1 - comm.rank, got := np.empty(1), 1 - comm.rank)
            assert len(library.calls) == 1
            return [*x, float(got[0]), *pair.all_gather(np.array([comm.rank * 1.0])).reshape(-1)]

    with forked(live, 2) as ranks:
        assert [ranks.result(rank) for rank in range(2)] == [
            [16.0, 16.0, 16.0, 6.0, 1.0, 0.0],
            [16.0, 16.0, 16.0, 5.0, 1.0, 0.0],
        ]


def test_what_the_library_cannot_do_is_refused_before_anything_is_sent() -> None:
    def program(comm: Communicator, library: FakeLibrary) -> None:
        x = torch.empty(2, 5, device="meta")
        for call, words in (
            (lambda: comm.all_reduce(x, algorithm="ring"), "allowed: auto"),
            (lambda: comm.all_reduce(x.t()), "not contiguous"),
            (lambda: comm.all_reduce(x, uni.op(lambda a, b: a + b)), "by name"),
            (lambda: comm.all_reduce(x.to(torch.int32), "mean"), "not defined for int32"),
            (lambda: comm.broadcast(x, 2), "root=2"),
            (lambda: comm.all_to_all(torch.empty(3, device="meta")), "a leading axis of 2"),
            (lambda: comm.all_gather(x, out=torch.empty(5, device="meta")), r"allowed: .*\[2, 2, 5\]"),
        ):
            with pytest.raises(UsageError, match=words):
                call()

    assert [library.calls for library in on_ranks(program)] == [[], []]


def test_a_store_over_messages_reaches_every_rank() -> None:
    backends = LocalBackend.create(3)
    stores = [store_over(backend) for backend in backends]
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(stores[2].get("id")), daemon=True)
    waiting.start()
    stores[0].set("id", b"\x00\xff")
    waiting.join(PATIENCE_S)
    assert found == [b"\x00\xff"]
    assert stores[1].get("id") == b"\x00\xff"
    assert stores[0].check(["id"])
    assert not stores[1].check(["id", "other"])
    for backend in backends:
        backend.close()


def folder_of(tmp_path: Path, cuda: str | None) -> Callable[[str], Any]:
    (tmp_path / "version.py").write_text(f"__version__ = '9.9'\ncuda = {cuda!r}\n")
    return lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)])


def test_what_nccl_lacks_is_said_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(lambda name: None) == "torch is not installed"
    assert missing(folder_of(tmp_path, None)) == "torch 9.9 was built without CUDA, so without NCCL"
    with_cuda = folder_of(tmp_path, "13.0")
    assert "no NVIDIA driver" in (missing(with_cuda, tmp_path / "no driver") or "")
    driver = tmp_path / "version.py"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no GPU" in (missing(with_cuda, driver) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "without NCCL" in (missing(with_cuda, driver) or "")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert missing(with_cuda, driver) is None


def test_without_a_gpu_nccl_is_a_row_and_an_error_that_say_why() -> None:
    if torch.cuda.is_available():
        skip_without("a host without a GPU", "torch finds one")
    (row,) = (row for row in uni.list_backends() if row.name == "nccl")
    assert not row.available
    assert "torch" in row.reason
    with pytest.raises(BackendUnavailable, match=r"'nccl': torch .* (without CUDA|driver|GPU)"):
        uni.init("nccl")

"""Backends with collectives of a library whose results differ from ours in one respect each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from tests.support.broken_backends import Mutant

from unisono.core.request import Request
from unisono.messaging.backend import Capabilities
from unisono.plans.steps import Buf


class Library:
    """A library with its own all_reduce: the last rank to call reduces for all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.waiting: list[tuple[np.ndarray, Request]] = []

    def reduce(self, x: np.ndarray, request: Request, combine: Callable[..., np.ndarray]) -> None:
        with self.lock:
            self.waiting.append((x, request))
            if len(self.waiting) < self.size:
                return
            everyone, self.waiting = self.waiting, []
        total = everyone[0][0].copy()
        for other, _ in everyone[1:]:
            total = combine(total, other)
        for taken, ended in everyone:
            taken[:] = total
            ended.complete()


class OwnAllReduce(Mutant):
    """Runs an all_reduce in a library whose results differ from ours."""

    caught_by = ("all_reduce_keeps_special_values",)
    solves: ClassVar[tuple[str, str]] = ("", "")

    @classmethod
    def create(cls, size: int) -> list[Mutant]:
        backends, library = super().create(size), Library(size)
        for backend in backends:
            backend.library = library
        return backends

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, run_collective=True)

    def run_collective(self, problem: Any, stage: Any) -> Request | None:
        if problem.collective != "all_reduce" or (stage.op.name, stage.dtype.name) != self.solves:
            return None
        request = Request(-1)
        self.library.reduce(stage.memory[Buf.OUT], request, self.combined)
        return request

    @staticmethod
    def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class Saturates(OwnAllReduce):
    """Integers saturate, as in Open MPI's vector code."""

    solves = ("sum", "int8")

    @staticmethod
    def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.clip(a.astype(int) + b, -128, 127).astype(a.dtype)


class LosesNaN(OwnAllReduce):
    """NaN is lost, as by a comparison in C."""

    solves = ("max", "float32")

    @staticmethod
    def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(a > b, a, b)


class LosesTheSignOfZero(OwnAllReduce):
    solves = ("min", "float64")

    @staticmethod
    def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.minimum(a, b) + 0.0

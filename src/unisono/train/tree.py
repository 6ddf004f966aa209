"""Pytrees: arrays in nested dicts, lists, tuples, named tuples and dataclasses, as a flat list of leaves.

The order of the leaves depends only on what is equal on all ranks: dicts are read by sorted keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.core import buffers
from unisono.core.buffers import Array
from unisono.errors import UsageError

__all__ = ["Leaf", "leaves_of"]

_KEYS = (str, int, float, bytes, tuple)


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """An array of a tree. `array` is its memory, or a copy of it if it is not contiguous."""

    path: str
    given: Any
    array: Array
    is_copy: bool

    def write_back(self) -> None:
        """Bring what was written to `array` into the array of the tree."""
        if self.is_copy:
            array = self.array
            target = self.given.detach() if isinstance(array.family, type(buffers.TORCH)) else self.given
            target[...] = array.family.give(array.flat, array.shape, array.dtype)

    def __str__(self) -> str:
        return f"{self.path} {self.array.dtype}{list(self.array.shape)}"


def leaves_of(tree: Any, name: str) -> list[Leaf]:
    """The arrays of a tree, which will be written to. None is no leaf, and an array counts once.

    Raises:
        UsageError: a leaf is no array, or read-only, or a dict has keys that cannot be sorted.
    """
    leaves: dict[int, Leaf] = {}
    for path, given in _walk(tree, name):
        if id(given) not in leaves:
            leaves[id(given)] = _leaf(path, given)
    return list(leaves.values())


def _walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if tree is None:
        return
    if isinstance(tree, dict):
        for key in _sorted_keys(tree, path):
            yield from _walk(tree[key], f"{path}[{key!r}]")
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for field in tree._fields:
            yield from _walk(getattr(tree, field), f"{path}.{field}")
    elif isinstance(tree, list | tuple):
        for index, each in enumerate(tree):
            yield from _walk(each, f"{path}[{index}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type | buffers.Typed):
        for each in dataclasses.fields(tree):
            yield from _walk(getattr(tree, each.name), f"{path}.{each.name}")
    else:
        yield path, tree


def _sorted_keys(tree: dict[Any, Any], path: str) -> list[Any]:
    """Keys in an order that does not depend on how the dict was filled."""
    for key in tree:
        if not isinstance(key, _KEYS):
            raise UsageError(
                f"{path} has a key of type {type(key).__name__}; allowed: str, int, float, bytes and tuples"
            )
    return sorted(tree, key=lambda key: (type(key).__name__, repr(key)))


def _leaf(path: str, given: Any) -> Leaf:
    array = buffers.view(given, path)
    if array.is_value:
        raise UsageError(
            f"{path} is a number, {type(given).__name__}, which cannot be written to; allowed: arrays",
            next_step="np.array(x)",
        )
    strided = isinstance(given, np.ndarray) or isinstance(array.family, type(buffers.TORCH))
    if not strided or _is_contiguous(given):
        return Leaf(path, given, buffers.view(given, path, writable=True), is_copy=False)
    if isinstance(given, np.ndarray) and not given.flags.writeable:
        raise UsageError(f"{path} is read-only; allowed: writable memory", next_step="pass a copy")
    return Leaf(path, given, array, is_copy=True)


def _is_contiguous(given: Any) -> bool:
    return bool(given.flags.c_contiguous if isinstance(given, np.ndarray) else given.is_contiguous())

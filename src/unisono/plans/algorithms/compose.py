"""Composition: a plan for a few ranks becomes a part of a plan for many.

It renames ranks and moves slices; what the parts compute does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.plans.amounts import Amount
from unisono.plans.layout import Region, Rounds, mapped
from unisono.plans.steps import Buf, Copy, Slice, Step

__all__ = ["embed", "padded"]


def embed(rounds: Rounds, ranks: Sequence[int], starts: Mapping[Buf, tuple[Buf, Amount]]) -> list[list[Step]]:
    """Translate a part's rounds: its rank i is our `ranks[i]`, its buffer b begins at our `starts[b]`.

    Two of its buffers may begin at the same element; a copy onto itself is then left out.
    """

    def ours(slice_: Region) -> Region:
        buf, start = starts[slice_.buf]
        return Slice(buf, start + slice_.start, start + slice_.stop)

    translated = [[mapped(step, ours, ranks.__getitem__) for step in steps] for steps in rounds]
    return [
        [step for step in steps if not (isinstance(step, Copy) and step.dst == step.src)]
        for steps in translated
    ]


def padded(rounds: Rounds, length: int) -> list[Sequence[Step]]:
    """Add empty rounds, so that ranks with fewer rounds stay in step with the others."""
    return [*rounds, *(() for _ in range(length - len(rounds)))]

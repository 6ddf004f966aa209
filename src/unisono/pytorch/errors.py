"""Errors as torch's callers know them: DistBackendError, which names the rank, the call and the line."""

from __future__ import annotations

from torch.distributed import DistBackendError

from unisono.errors import DeadlineExceeded, UnisonoError

__all__ = ["backend_error"]


def backend_error(
    error: UnisonoError, call: str, site: str, rank: int, members: tuple[int, ...] | None
) -> DistBackendError:
    """The error of a call that this rank made at `site`, a line of the user's program.

    `rank` is torch's global one; `members` are those of the group where unisono numbers its ranks otherwise.
    Programs look for " Timed out " in the text.
    """
    expired = "Timed out waiting: " if isinstance(error, DeadlineExceeded) else ""
    ranks = f" (rank i of unisono is global rank {list(members)}[i])" if members is not None else ""
    return DistBackendError(f"[rank {rank}] {call} at {site}: {expired}{error}{ranks}")

"""A wait for a request that ends while its peer leaves."""

from __future__ import annotations

import pytest

from unisono.core.call import Call, await_request
from unisono.core.request import Request, withdrawn
from unisono.errors import PeerLost, UnisonoError, UsageError


@pytest.mark.parametrize(
    ("ended_by", "raised"),
    [(UsageError("holds float32"), UsageError), (withdrawn(), PeerLost), (PeerLost(0), PeerLost)],
    ids=["refused", "withdrawn", "lost"],
)
def test_a_refused_message_ends_the_call_although_its_sender_has_left(
    ended_by: UnisonoError, raised: type[UnisonoError]
) -> None:
    request = Request(0)
    steps = await_request(Call("recv", 1), request, lambda: (0,))
    next(steps)
    request.fail(ended_by)
    with pytest.raises(raised):
        steps.throw(PeerLost(0))

"""Calls between ranks: one rank calls a function that another exposes.

agent = uni.rpc.Agent(world)

@agent.expose
def add(a: int, b: int) -> int:
    return a + b

agent.call(1, "add", 2, 3)
"""

from unisono.rpc.agent import Agent
from unisono.rpc.objects import Proxy, Reference
from unisono.rpc.server import Incoming, here
from unisono.rpc.streams import Stream

__all__ = ["Agent", "Incoming", "Proxy", "Reference", "Stream", "here"]


def __dir__() -> list[str]:
    """The public names, and nothing else."""
    return __all__

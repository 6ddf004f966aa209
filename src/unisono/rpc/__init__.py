"""Calls between ranks: a function of one, called by another.

agent = uni.rpc.Agent(world)

@agent.expose
def add(a: int, b: int) -> int:
    return a + b

agent.call(1, "add", 2, 3)
"""

from unisono.rpc.agent import Agent
from unisono.rpc.incoming import Incoming, here
from unisono.rpc.objects import Proxy, Reference
from unisono.rpc.streams import Stream

__all__ = ["Agent", "Incoming", "Proxy", "Reference", "Stream", "here"]


def __dir__() -> list[str]:
    """What is public, and nothing else."""
    return __all__

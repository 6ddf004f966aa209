"""unisono: messages, collectives, groups and remote calls between Python processes.

import numpy as np
import unisono as uni

def program(world):
    x = np.full(1_000_003, world.rank, np.float32)
    world.all_reduce(x)
    return x[0]

print(uni.simulate(program, 4).results)
"""

import importlib
from typing import TYPE_CHECKING, Any

from unisono.version import VERSION

if TYPE_CHECKING:
    from unisono.api import *  # noqa: F403

__version__ = VERSION


def __dir__() -> list[str]:
    """The public names only."""
    return [*_public_names(), "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public names when the first of them is used, and `unisono.rpc` when it is.

    Until then `import unisono` costs next to nothing where it is imported without being used: torch imports
    `unisono.pytorch.registration` with itself.
    """
    if name == "__all__":
        return _public_names()
    if name == "rpc":
        return importlib.import_module("unisono.rpc")
    if not name.startswith("_"):
        api = importlib.import_module("unisono.api")
        globals().update({each: vars(api)[each] for each in api.__all__ if each in vars(api)})
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")


def _public_names() -> list[str]:
    names: list[str] = importlib.import_module("unisono.api").__all__
    return names

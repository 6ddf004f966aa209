"""unisono: messages, collectives, groups and remote calls between Python processes.

import numpy as np
import unisono as uni

def program(world):
    x = np.full(1_000_003, world.rank, np.float32)
    world.all_reduce(x)
    return x[0]

print(uni.simulate(program, 4).results)
"""

import sys
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
        import unisono.rpc  # noqa: F401

        return sys.modules["unisono.rpc"]
    if not name.startswith("_"):
        public = {each: vars(sys.modules["unisono.api"])[each] for each in _public_names() if each != "rpc"}
        globals().update(public)
        if name in public:
            return public[name]
    raise AttributeError(f"module 'unisono' has no attribute {name!r}")


def _public_names() -> list[str]:
    import unisono.api  # noqa: F401

    # By its name: while it is being imported it is no attribute of this package, and has no names yet.
    names: list[str] = vars(sys.modules["unisono.api"]).get("__all__", [])
    return names

"""Frames that torch.compile leaves alone: the code that torch calls while a compiled program runs.

While it runs, torch looks at every Python frame, also at those of a group that C++ has called, such as DDP's
reducer. It would compile them, or refuse: to torch, a group is an opaque object.
"""

from __future__ import annotations

import types
from typing import Any, Final, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

__all__ = ["not_compiled"]

Kind = TypeVar("Kind", bound=type)

# As `torch.compiler.disable`, which wraps functions and imports the compiler.
_SKIP: Final = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def not_compiled(kind: Kind) -> Kind:
    """Let torch.compile leave alone the frames of a class's own methods, and what they call."""
    for method in vars(kind).values():
        function: Any = method.fget if isinstance(method, property) else method
        if isinstance(function, types.FunctionType):
            set_code_exec_strategy(function.__code__, _SKIP)
    return kind

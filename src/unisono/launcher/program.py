"""The program of a spawned rank: the caller's main file, and functions by their names in it.

Only names that the parent process gave are imported, never names from the network.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any, Final

from unisono.errors import UsageError

__all__ = ["Main", "Reference", "is_main_running", "run_main"]

MAIN_NAME: Final = "__mp_main__"

_is_main_running = False


@dataclass(frozen=True, slots=True)
class Main:
    """What the caller's interpreter was started with: a module (`python -m`), a file, or neither."""

    module: str | None = None
    path: str | None = None

    @classmethod
    def of_this_process(cls) -> Main:
        """That of the running process."""
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        if spec is not None and spec.name != MAIN_NAME:
            # A package's __main__ has no guard, and does not define functions that a rank needs.
            return cls() if spec.name.rpartition(".")[2] == "__main__" else cls(module=spec.name)
        return cls(path=getattr(main, "__file__", None))


@dataclass(frozen=True, slots=True)
class Reference:
    """A function by its name. `file` is loaded where its module cannot be imported by name, as in some tests.

    `line` is where a function of the main file is defined; it tells functions of the same name apart.
    """

    module: str
    qualname: str
    file: str | None = None
    line: int | None = None

    @classmethod
    def to(cls, fn: Callable[..., Any], main: Main) -> Reference:
        """Refer to a function that another process can find.

        Raises:
            UsageError: no new process can find it: a closure, a lambda, something typed at a prompt.
        """
        module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(qualname, str):
            raise UsageError(
                f"spawn needs a function with a name, not {type(fn).__name__}",
                next_step="pass a function that is defined at the top of a module",
            )
        if "<" in qualname:
            raise UsageError(
                f"spawn cannot find {qualname!r} in a new process",
                cause="it is a lambda or was defined inside a function",
                next_step="define it at the top of a module, and pass what it uses as arguments",
            )
        found: Any = sys.modules.get(module)
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if found is not fn:
            raise UsageError(
                f"spawn cannot find {module}.{qualname} in a new process",
                cause="that name means something else here",
                next_step="pass a function that is defined at the top of a module",
            )
        if module in ("__main__", MAIN_NAME):
            if main.module is None and main.path is None:
                raise UsageError(
                    f"spawn cannot find {qualname!r} in a new process",
                    cause="it was typed at a prompt or in a notebook",
                    next_step="put it into a file and import it",
                )
            return cls(MAIN_NAME, qualname, line=_line(fn))
        return cls(module, qualname, getattr(sys.modules[module], "__file__", None))

    def find(self) -> Callable[..., Any]:
        """The function, in the new process.

        Raises:
            UsageError: it is not there: it was defined in code that only the first process runs.
        """
        found: Any = _module(self)
        for part in self.qualname.split("."):
            found = getattr(found, part, None)
        if found is None or (self.line is not None and _line(found) != self.line):
            where = "its main file" if self.module == MAIN_NAME else self.module
            raise UsageError(
                f"spawn cannot find {self.qualname!r} in a new process",
                cause=f"a new process runs {where} under another name, and it defines no such function then; "
                'what is defined under `if __name__ == "__main__":` does not exist there',
                next_step="define it at the top of a module, and pass what it uses as arguments",
            )
        function: Callable[..., Any] = found
        return function


def is_main_running() -> bool:
    """Whether this is a new process that still runs the caller's main file."""
    return _is_main_running


def run_main(main: Main) -> None:
    """Run the caller's main file under another name, so that its `__main__` guard holds."""
    global _is_main_running
    _is_main_running = True
    try:
        if main.module is not None:
            module = types.ModuleType(MAIN_NAME)
            module.__dict__.update(runpy.run_module(main.module, run_name=MAIN_NAME, alter_sys=True))
            sys.modules["__main__"] = sys.modules[MAIN_NAME] = module
        elif main.path is not None:
            _load(MAIN_NAME, main.path, ("__main__", MAIN_NAME))
    finally:
        _is_main_running = False


def _line(fn: object) -> int | None:
    return getattr(getattr(fn, "__code__", None), "co_firstlineno", None)


def _module(reference: Reference) -> types.ModuleType:
    if reference.module in sys.modules:
        return sys.modules[reference.module]
    try:
        return importlib.import_module(reference.module)
    except ModuleNotFoundError:
        if reference.file is None:
            raise
        return _load(reference.module, reference.file, (reference.module,))


def _load(name: str, path: str, known_as: tuple[str, ...]) -> types.ModuleType:
    spec = ModuleSpec(name, _UncachedLoader(name, path), origin=path)
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    for alias in known_as:
        sys.modules[alias] = module
    _UncachedLoader(name, path).exec_module(module)
    return module


class _UncachedLoader(SourceFileLoader):
    """Leaves no compiled file beside a script."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Write nothing."""

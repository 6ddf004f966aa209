"""The layers: imports point down, and certain names are used in one package only. The source is parsed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tests.support.layers import LAYERS, NATIVE_CALLBACKS, NATIVE_LAYERS, native_picture, picture
from tests.support.paths import ROOT

import unisono
from unisono.core.call_site import is_users

PACKAGE = Path(unisono.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

LEVELS = {name: -level for level, layer in enumerate(LAYERS) for name in layer.members}
EDGES = ("cli", "testing", "pytorch", "train", "bench")
PACKAGES = next(layer.members for layer in LAYERS if "rpc" in layer.members)
FOREIGN = {"numpy", "msgspec"}  # packages that every layer may import beside the standard library


@dataclass(frozen=True)
class Import:
    """One import: its target (`module.name` for a name), its line, and whether it runs at load time."""

    target: str
    line: int
    at_load: bool


@cache
def imports_of(source: str, module: Path = Path("x.py")) -> list[Import]:
    return list(_imports(ast.parse(source), module, at_load=True))


def _imports(node: ast.AST, module: Path, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from (Import(alias.name, child.lineno, at_load) for alias in names)
            case ast.ImportFrom(module=name, names=names, level=level):
                above = ("unisono", *module.parts[:-1])[: len(module.parts) - level + 1] if level else ()
                whole = ".".join((*above, name) if name else above)
                yield from (Import(f"{whole}.{alias.name}", child.lineno, at_load) for alias in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _imports(child, module, at_load=False)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(child, module, at_load=False)
            case _:
                yield from _imports(child, module, at_load)


def package_of(path: Path) -> str:
    """The folder of a module of unisono, or the module itself at the top level."""
    return path.parts[0].removesuffix(".py")


def target_of(imported: Import) -> tuple[str, str] | None:
    """The folder and the module that an import names; None if it is not in unisono."""
    words = imported.target.split(".")
    if words[0] != "unisono":
        return None
    if len(words) == 1 or words[1] not in LEVELS:
        return "__init__", ""
    return words[1], words[2] if len(words) > 2 else ""


@cache
def source_of(path: Path) -> str:
    return (PACKAGE / path).read_text()


def faults(path: Path, source: str) -> list[str]:
    """Imports that point up or sideways."""
    found, here = [], package_of(path)
    layer = next(layer for layer in LAYERS if here in layer.members)
    depths = {name: depth for depth, names in enumerate(layer.inside) for name in names}
    for imported in imports_of(source, path):
        target = target_of(imported)
        if target is None:
            continue
        there, module = target
        where = f"{path}:{imported.line} imports {imported.target}"
        if there != here and LEVELS[there] > LEVELS[here]:
            found.append(f"{where}: that is above")
        elif there != here and there in layer.members and (here, there) not in layer.exceptions:
            found.append(f"{where}: neighbours do not know each other")
        elif there == here and path.stem in depths and module in depths:
            is_down = depths[module] > depths[path.stem] or module == path.stem
            if not is_down and (path.stem, module) not in layer.exceptions:
                found.append(f"{where}: that is not below in {here}/")
    return found


@cache
def calls_of(source: str) -> list[tuple[str, int]]:
    """Every name that is called or read, as written: `threading.Thread`, `print`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.append((f"{node.value.id}.{node.attr}", node.lineno))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.append((node.func.id, node.lineno))
    return found


def test_every_module_has_a_place():
    assert {package_of(path) for path in MODULES} - set(LEVELS) == set(), "name the layer of a new folder"
    for layer in LAYERS:
        if layer.inside:
            (folder,) = layer.members
            modules = {path.stem for path in (PACKAGE / folder).glob("*.py")} - {"__init__"}
            assert modules == {name for names in layer.inside for name in names}, folder


def test_the_architecture_page_draws_the_layers_that_are_enforced():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    assert f"```\n{picture()}\n```" in page, picture()
    assert f"```\n{native_picture()}\n```" in page, native_picture()


def test_files_of_the_engine_include_only_what_stands_below():
    """All headers do; only the listed sources include headers of a layer above, to call it back."""
    native = ROOT / "native"
    assert {folder.name for folder in native.iterdir() if folder.is_dir()} == set(NATIVE_LAYERS)
    levels = {name: level for level, name in enumerate(NATIVE_LAYERS)}
    upwards = {
        (path.relative_to(native).as_posix(), folder)
        for path in sorted([*native.rglob("*.hpp"), *native.rglob("*.cpp")])
        for folder in re.findall(r'#include "(\w+)/', path.read_text())
        if levels[folder] < levels[path.parent.name]
    }
    assert upwards == NATIVE_CALLBACKS


def test_imports_point_down():
    """This includes imports for type checkers: a type of a higher layer is knowledge of that layer."""
    assert [fault for path in MODULES for fault in faults(path, source_of(path))] == []


def test_every_module_says_what_it_is():
    texts = {path: ast.get_docstring(ast.parse(source_of(path))) or "" for path in MODULES}
    assert [path for path, text in texts.items() if len(text) <= 20] == []


# -- names that one package uses -------------------------------------------------------------------------

ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.putenv"}
MAY_READ_THE_ENVIRONMENT = ("config", "environment")
CLOCKS = {"time", "sched"}
MAY_READ_CLOCKS = {"core/clock.py", "simulation", "testing"}
# The launcher and the measurements start processes, and the seed has its own thread.
MAY_START_THREADS = {"core/clock.py", "simulation", "testing", "launcher", "bootstrap", "bench"}
# Above the transports only the clock starts threads; transports have threads that dispatch completions.
TRANSPORTS = {
    f"backends/{name}.py"
    for name in (
        "native/pump",
        "gloo/backend",
        "gloo/collectives",
        "gloo/process_group",
        "mpi/backend",
        "iroh/endpoint",
    )
}
THREADS = {"threading.Thread", "threading.Timer", "_thread.start_new_thread"}
POOLS = {"concurrent", "multiprocessing", "subprocess"}
PRINTS = {"print", "sys.stdout", "sys.stderr"}
CODE_FROM_BYTES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "copyreg"}


@cache
def names_imported(path: Path) -> set[str]:
    return {imported.target.split(".")[0] for imported in imports_of(source_of(path), path)}


def users_of(names: set[str], *but: str) -> list[str]:
    """Modules that call or read one of the names, except in these packages or modules."""
    return [
        f"{path}:{line} {name}"
        for path in MODULES
        if not {package_of(path), path.as_posix()} & set(but)
        for name, line in calls_of(source_of(path))
        if name in names
    ]


def importers_of(names: set[str], *but: str) -> list[str]:
    """Modules that import one of the libraries, except in these packages or modules."""
    return [
        f"{path} {sorted(names & names_imported(path))}"
        for path in MODULES
        if not {package_of(path), path.as_posix()} & set(but) and names & names_imported(path)
    ]


def test_only_two_modules_read_the_environment():
    assert users_of(ENVIRONMENT, *MAY_READ_THE_ENVIRONMENT) == []
    taken = {
        path: [i for i in imports_of(source_of(path), path) if i.target in ENVIRONMENT] for path in MODULES
    }
    assert {
        path for path, found in taken.items() if found and package_of(path) not in MAY_READ_THE_ENVIRONMENT
    } == set()


def test_only_the_clock_and_the_simulator_read_clocks_and_start_threads():
    """unisono.testing is exempt: the conformance kit has its own threads and time limits."""
    assert importers_of(CLOCKS, *MAY_READ_CLOCKS) == []
    assert importers_of(POOLS, *MAY_START_THREADS, *TRANSPORTS) == []
    wrong = []
    for path in MODULES:
        if {package_of(path), path.as_posix()} & {*MAY_START_THREADS, *TRANSPORTS}:
            continue
        # A Thread may be named as a type; only calls count.
        made = {ast.unparse(n.func) for n in ast.walk(ast.parse(source_of(path))) if isinstance(n, ast.Call)}
        taken = {imported.target for imported in imports_of(source_of(path), path)}
        wrong += [f"{path} {name}" for name in (made | taken) & THREADS]
    assert wrong == []


def test_only_the_command_line_prints():
    assert users_of(PRINTS, "cli") == []


def test_nothing_turns_bytes_into_code():
    assert importers_of(CODE_FROM_BYTES) == []


# The packages that may import a library outside the standard library and FOREIGN.
MAY_IMPORT = {
    "cli": {"click", "rich"},
    "pytorch": {"torch", "typing_extensions"},  # torch needs it, too
    "backends/gloo": {"torch"},
    "backends/devices": {"torch"},
    "backends/mpi": {"mpi4py"},
    "backends/iroh": {"iroh"},
    "bootstrap/store.py": {"torch", "cryptography"},
    "bootstrap/identity.py": {"cryptography"},
    "bootstrap/seal.py": {"cryptography"},
    "plans/draw.py": {"matplotlib"},
    "bench/chart.py": {"matplotlib"},
    "bench/libraries.py": {"torch", "mpi4py"},
}


def test_foreign_libraries_stay_where_they_belong():
    known = set(sys.stdlib_module_names) | FOREIGN | {"unisono", "__future__"}
    wrong = {}
    for path in MODULES:
        places = (path.parts[0], "/".join(path.parts[:2]))
        allowed = known.union(*(MAY_IMPORT.get(place, set()) for place in places))
        if names_imported(path) - allowed:
            wrong[str(path)] = names_imported(path) - allowed
    assert wrong == {}


def test_nothing_imports_in_a_circle():
    """Considers imports at load time; a cycle works only if the right module happens to be imported first."""
    graph: dict[str, set[str]] = {}
    names = {".".join(("unisono", *path.with_suffix("").parts)).removesuffix(".__init__") for path in MODULES}
    for path in MODULES:
        name = ".".join(("unisono", *path.with_suffix("").parts)).removesuffix(".__init__")
        reached = graph.setdefault(name, set())
        for imported in imports_of(source_of(path), path):
            if imported.at_load:
                words = imported.target.split(".")
                reached |= {".".join(words[:n]) for n in (len(words), len(words) - 1)} & names - {name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in sorted(graph[name]):
                # A package that imports its own modules is no cycle.
                if not name.startswith(f"{other}."):
                    visit(other, (*trail, name))
            done.add(name)

    for name in sorted(names):
        visit(name, ())


# -- the parser of imports -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("errors.py", "from unisono.plans import build"),
        ("core/work.py", "import unisono.comm.communicator"),
        ("core/task.py", "from unisono.core.work import Work"),
        ("messaging/matching.py", "from unisono import Communicator"),
        ("core/buffers.py", "from . import codec"),
        ("plans/algorithms/ring.py", "from unisono.backends.local import LocalBackend"),
        ("plans/algorithms/ring.py", "from ...comm.group import Group"),
        ("backends/local.py", "from unisono.simulation import run"),
        ("simulation/backend.py", "from unisono import backends"),
        ("bootstrap/join.py", "from unisono.launcher.run import run"),
        ("backends/sub.py", "def f():\n    from unisono.comm.communicator import Communicator"),
        ("backends/sub.py", "if TYPE_CHECKING:\n    from unisono.comm.communicator import Communicator"),
        ("comm/group.py", "import unisono.cli"),
        ("comm/group.py", "from unisono.comm.dispatch import CollectiveCall"),
        (
            "comm/world.py",
            "class C:\n    try:\n        from unisono.testing import check_backend\n    except X: ...",
        ),
        ("__init__.py", "from unisono.pytorch import DataParallel"),
    ],
)
def test_the_reader_sees_what_points_up_or_sideways(where, source):
    assert len(faults(Path(where), source)) == 1


@pytest.mark.parametrize(
    ("where", "source"),
    [
        (
            "comm/group.py",
            "from unisono.comm.control import Control\nfrom unisono.backends.sub import SubBackend",
        ),
        (
            "plans/ring.py",
            "from unisono.plans.steps import Plan\nfrom . import steps\nfrom ..errors import UsageError",
        ),
        ("backends/sub.py", "from unisono.backends.local import LocalBackend"),
        ("launcher/run.py", "from unisono.bootstrap.seed import Seed"),
        ("cli/plan.py", "import unisono\nimport rich"),
        ("errors.py", "import os.path\nfrom collections import abc"),
    ],
)
def test_the_reader_lets_pass_what_points_down(where, source):
    assert faults(Path(where), source) == []


# -- modules that an import loads ------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_importing_unisono_brings_little():
    """A program that never simulates, draws or awaits does not load the modules for it, nor torch."""
    bare, ours = loaded_by("import numpy, msgspec"), loaded_by("from unisono import init")
    unwanted = {
        "torch",
        "ml_dtypes",
        "asyncio",
        "click",
        "rich",
        "matplotlib",
        "cryptography",
        "mpi4py",
        "importlib.metadata",
        "concurrent.futures",
        "multiprocessing",
        "subprocess",
        "unisono.simulation",
        "unisono.testing",
        "unisono.cli",
        "unisono.plans.draw",
    }
    assert (ours - bare) & unwanted == set()
    assert "unisono.comm.communicator" in ours


def test_reducing_brings_no_more():
    use = "import unisono, numpy; c, = unisono.local(1); c.all_reduce(numpy.ones(3)); c.close()"
    assert loaded_by(use) & {"torch", "asyncio", "click", "rich", "unisono.simulation"} == set()


def test_edges_call_as_users_do_unless_a_user_calls_them():
    shown = set(EDGES) - {"pytorch", "train"}
    assert {name for name in (*EDGES, *PACKAGES) if is_users(str(PACKAGE / name / "some.py"))} == shown
    assert not is_users(str(PACKAGE / "comm" / "collectives.py"))
    assert is_users(__file__)

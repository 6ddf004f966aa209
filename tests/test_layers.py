"""The house: imports point down, and what concerns one room stays in it. Read from the source, not run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import unisono
from unisono.core.call_site import is_users

PACKAGE = Path(unisono.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

GROUND = (
    "errors",
    "values",
    "config",
    "runtime",
    "contract",
    "matching",
    "inbox",
    "buffers",
    "codec",
    "kernels",
    "work",
    "call_site",
    "version",
    "_native",
)
ROOMS = ("backends", "simulation", "launch", "rpc", "cluster")
HOLDERS = (
    "control",
    "group",
    "inquiry",
    "deadlock",
    "deadlock_watch",
    "stages",
    "messages",
    "uneven",
    "verbs",
    "mesh",
    "communicator",
    "session",
)
EDGES = ("cli", "testing", "pytorch", "bench")
LAYERS = {
    **dict.fromkeys(GROUND, 0),
    "plans": 1,
    **dict.fromkeys(ROOMS, 2),
    **dict.fromkeys(HOLDERS, 3),
    "__init__": 4,  # `import unisono`: all that a user needs, and no edge
    **dict.fromkeys(EDGES, 5),
    "cli": 6,  # the command line shows what the other edges do
    "__main__": 6,
}
FOREIGN = {"numpy", "msgspec"}  # what the ground stands on, beside the standard library


@dataclass(frozen=True)
class Import:
    """One import of a module: `module.name` if it took a name, where it stands and whether it runs."""

    target: str
    line: int
    at_load: bool


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


def room_of(path: Path) -> str:
    """The room of a module of ours: its folder, or itself."""
    return path.parts[0].removesuffix(".py")


def target_of(imported: Import) -> str | None:
    """The room that an import of ours reaches into; None if it is not ours."""
    words = imported.target.split(".")
    if words[0] != "unisono":
        return None
    known = set(LAYERS) | {"__init__"}
    return words[1] if len(words) > 1 and words[1] in known else "__init__"


def source_of(path: Path) -> str:
    return (PACKAGE / path).read_text()


def faults(path: Path, source: str) -> list[str]:
    """Imports that point up or sideways."""
    found, here = [], room_of(path)
    for imported in imports_of(source, path):
        there = target_of(imported)
        if there is None or there == here:
            continue
        if LAYERS[there] > LAYERS[here]:
            found.append(f"{path}:{imported.line} imports {imported.target}: that is above")
        elif here in ROOMS and there in ROOMS:
            found.append(f"{path}:{imported.line} imports {imported.target}: rooms do not know each other")
    return found


def calls_of(source: str) -> Iterator[tuple[str, int]]:
    """Every name that is called or read, dotted as written: `threading.Thread`, `print`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}", node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node.lineno


each_module = pytest.mark.parametrize("path", MODULES, ids=str)


def test_every_module_has_a_place():
    assert {room_of(path) for path in MODULES} - set(LAYERS) == set(), "name the layer of a new room here"


@each_module
def test_imports_point_down(path):
    """Those for type checkers too: a type from above is knowledge of what is above."""
    assert faults(path, source_of(path)) == []


@each_module
def test_every_module_says_what_it_is(path):
    text = ast.get_docstring(ast.parse(source_of(path)))
    assert text
    assert len(text) > 20


# -- what stays in one room ------------------------------------------------------------------------------

ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.putenv"}
CLOCKS = {"time", "sched"}
MAY_READ_CLOCKS = {"runtime", "simulation", "testing"}
# The launch room and the measurements start processes, and the seed serves on a thread of its own.
MAY_START_THREADS = {"runtime", "simulation", "testing", "launch", "bench"}
TRANSPORTS = {
    Path("backends") / f"{name}.py" for name in ("native", "gloo", "gloo_collectives", "mpi", "quic_endpoint")
}
THREADS = {"threading.Thread", "threading.Timer", "_thread.start_new_thread"}
POOLS = {"concurrent", "multiprocessing", "subprocess"}
PRINTS = {"print", "sys.stdout", "sys.stderr"}
CODE_FROM_BYTES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "copyreg"}


def names_imported(path: Path) -> set[str]:
    return {imported.target.split(".")[0] for imported in imports_of(source_of(path), path)}


@each_module
def test_only_config_reads_the_environment(path):
    if room_of(path) == "config":
        return
    read = [f"{name}, line {line}" for name, line in calls_of(source_of(path)) if name in ENVIRONMENT]
    taken = [i for i in imports_of(source_of(path), path) if i.target in ENVIRONMENT]
    assert read == []
    assert taken == []


@each_module
def test_only_the_runtime_and_the_simulator_read_clocks_and_start_threads(path):
    """The kit in unisono.testing, an edge, brings threads and patience of its own."""
    room, imported = room_of(path), imports_of(source_of(path), path)
    if room not in MAY_READ_CLOCKS:
        assert names_imported(path) & CLOCKS == set()
    # The runtime rules above the transports; these have threads that tell what ended below Python.
    if room not in MAY_START_THREADS and path not in TRANSPORTS:
        # As the type of something, a Thread may be named: what counts is the call.
        tree = ast.parse(source_of(path))
        made = [ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)]
        assert set(made) & THREADS == set()
        assert {i.target for i in imported} & THREADS == set()
        assert names_imported(path) & POOLS == set()


@each_module
def test_only_the_command_line_prints(path):
    if room_of(path) == "cli":
        return
    assert [f"{n}, line {line}" for n, line in calls_of(source_of(path)) if n in PRINTS] == []


@each_module
def test_nothing_turns_bytes_into_code(path):
    assert names_imported(path) & CODE_FROM_BYTES == set()


@each_module
def test_foreign_libraries_stay_where_they_belong(path):
    allowed = set(sys.stdlib_module_names) | FOREIGN | {"unisono"}
    if room_of(path) == "cli":
        allowed |= {"click", "rich"}
    if path.parts[:2] == ("plans", "draw.py"):
        allowed |= {"matplotlib"}
    if path.parts[:2] == ("launch", "store.py"):
        allowed |= {"torch"}
    if path.parts[:2] == ("launch", "identity.py"):
        allowed |= {"cryptography"}
    if room_of(path) == "pytorch":
        allowed |= {"torch"}
    if path.parts[0] == "backends" and path.stem.startswith(("gloo", "nccl")):
        allowed |= {"torch"}
    if path.parts[0] == "backends" and path.stem.startswith("mpi"):
        allowed |= {"mpi4py"}
    if path.parts[0] == "backends" and path.stem.startswith(("quic", "iroh")):
        allowed |= {"iroh"}
    if path.parts[:2] == ("bench", "libraries.py"):
        allowed |= {"torch", "mpi4py"}
    if path.parts[:2] == ("bench", "chart.py"):
        allowed |= {"matplotlib"}
    assert names_imported(path) - allowed - {"__future__"} == set()


def test_nothing_imports_in_a_circle():
    """Of what runs at load time; a circle works only by the luck of who comes first."""
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
                # A package that imports its modules is not above them.
                if not name.startswith(f"{other}."):
                    visit(other, (*trail, name))
            done.add(name)

    for name in sorted(names):
        visit(name, ())


# -- the reader itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("errors.py", "from unisono.plans import build"),
        ("work.py", "import unisono.comm.communicator"),
        ("matching.py", "from unisono import Communicator"),
        ("buffers.py", "from . import verbs"),
        ("plans/ring.py", "from unisono.backends.local import LocalBackend"),
        ("plans/ring.py", "from ..group import Group"),
        ("backends/local.py", "from unisono.simulation import run"),
        ("simulation/backend.py", "from unisono import backends"),
        ("backends/sub.py", "def f():\n    from unisono.comm.communicator import Communicator"),
        ("backends/sub.py", "if TYPE_CHECKING:\n    from unisono.comm.communicator import Communicator"),
        ("group.py", "import unisono.cli"),
        (
            "session.py",
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
        ("group.py", "from unisono.comm.control import Control\nfrom unisono.backends.sub import SubBackend"),
        (
            "plans/ring.py",
            "from unisono.plans.steps import Plan\nfrom . import steps\nfrom ..errors import UsageError",
        ),
        ("backends/sub.py", "from unisono.backends.local import LocalBackend"),
        ("cli/plan.py", "import unisono\nimport rich"),
        ("errors.py", "import os.path\nfrom collections import abc"),
    ],
)
def test_the_reader_lets_pass_what_points_down(where, source):
    assert faults(Path(where), source) == []


# -- what an import brings -------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_importing_unisono_brings_little():
    """Who never simulates, draws or awaits does not pay for it; and torch is never loaded unasked."""
    bare, ours = loaded_by("import numpy, msgspec"), loaded_by("import unisono")
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


def test_edges_call_as_users_do():
    assert {name for name in (*EDGES, *ROOMS) if is_users(str(PACKAGE / name / "some.py"))} == set(EDGES)
    assert not is_users(str(PACKAGE / "verbs.py"))
    assert is_users(__file__)

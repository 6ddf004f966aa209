"""The layers of the code, top to bottom, as one list: test_layers.py enforces it, ARCHITECTURE.md draws it.

    python -m tests.support.layers

prints the picture.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LAYERS", "NATIVE_CALLBACKS", "NATIVE_LAYERS", "Layer", "native_picture", "picture"]


@dataclass(frozen=True)
class Layer:
    """Folders or modules of one layer: they import from the layers below, and never one another.

    `inside` lists the modules of a single folder that has an order of its own, top to bottom. `exceptions`
    lists pairs within the layer of which the first may import the second.
    """

    members: tuple[str, ...]
    what: str
    inside: tuple[tuple[str, ...], ...] = ()
    exceptions: tuple[tuple[str, str], ...] = ()


# Top first. A name is a folder of src/unisono, or a module at its top.
LAYERS = (
    Layer(("__main__",), "`python -m unisono`"),
    Layer(("cli",), "the command line"),
    Layer(("bench", "testing", "pytorch"), "edges: nothing below imports them"),
    Layer(("__init__",), "`import unisono`"),
    Layer(("api",), "its public names, imported when the first is used"),
    Layer(
        ("train",),
        "data-parallel training on arrays: `uni.train`, imported on first use",
        inside=(
            ("gradients",),
            ("error_feedback", "tree"),
            ("compression",),
            ("pipeline",),
        ),
    ),
    Layer(
        ("comm",),
        "what a user holds",
        inside=(
            ("world",),
            ("communicator", "mesh", "verbs"),
            ("adoption", "verb_type", "open_worlds"),
            ("collectives",),
            ("announced_verbs",),
            ("argument_checks",),
            ("point_to_point", "vector_collectives", "splitter", "verb_docs"),
            ("announcement", "dispatch"),
            ("group_plan",),
            ("group",),
            ("operations",),
            ("run_ahead", "stall_queries", "loose_ends"),
            ("mismatch_collector",),
            ("group_state", "mismatch"),
            ("control",),
            ("deadlock_watch", "early_messages"),
            ("control_messages", "goodbyes", "split"),
            ("deadlock", "fingerprint", "object_payload"),
            ("verb_table",),
        ),
        exceptions=(
            ("mesh", "communicator"),
            ("communicator", "mesh"),
            ("verbs", "communicator"),
            ("communicator", "verbs"),
        ),
    ),
    Layer(
        ("rpc", "backends", "simulation", "launcher", "bootstrap"),
        "rooms: none imports another, but launcher -> bootstrap",
        exceptions=(("launcher", "bootstrap"),),
    ),
    Layer(("plans",), "collectives as data; plans/algorithms builds them"),
    Layer(
        ("messaging",),
        "the backend contract, the eager/rendezvous protocol, matching, credit",
        inside=(
            ("protocol_backend",),
            ("endpoint",),
            ("protocol",),
            ("inbox", "rendezvous"),
            ("actions",),
            ("backend", "matching"),
            ("stage", "peer_down", "credit", "fast_path", "strangers"),
        ),
    ),
    Layer(
        ("core",),
        "element types, memory, time, tasks",
        inside=(
            ("waits",),
            ("work",),
            ("callbacks", "task", "event_loop"),
            ("call", "clock"),
            ("codec", "kernels", "request"),
            ("buffers", "ops", "runtime"),
            ("dtypes", "envelope", "call_site", "parked_threads"),
        ),
    ),
    Layer(("config",), "settings"),
    Layer(("environment",), "launchers, and where ranks meet"),
    Layer(("errors", "version", "_native"), "what everything may name"),
)

# The same for native/: folders, top first. A file includes only files of the layers below.
NATIVE_LAYERS = {
    "python": "the Python module: calls, works, arguments, the codec, remote frames",
    "collective": "programs, their runs, fingerprints, the call log",
    "engine": "progress, the completion queue, mailboxes",
    "connect": "listener, handshakes, pings, ranks of one process",
    "messaging": "peers, the rendezvous protocol, matching, the inbox",
    "link": "shared memory, TCP, TLS, QUIC, the cooperative copy",
    "wire": "frames and admissions as bytes",
    "base": "system calls, lists, tables, memory",
    "kernels": "reductions",
}
# Sources that call upwards: a link hands what it reads to its peer, and the completion queue ends runs.
NATIVE_CALLBACKS = {
    ("link/frame_parser.cpp", "messaging"),
    ("link/quic_link.cpp", "messaging"),
    ("link/shm_link.cpp", "messaging"),
    ("link/tcp_link.cpp", "messaging"),
    ("engine/completion_queue.cpp", "collective"),
}


def picture() -> str:
    """The layers as text, widest first."""
    rows = []
    for layer in LAYERS[1:]:
        names = [name for name in layer.members if name != "_native"]
        rows.append((" ".join(f"{name}/" if name not in _MODULES else name for name in names), layer.what))
        rows += [(f"    {' '.join(level)}", "") for level in layer.inside]
    width = max(len(left) for left, what in rows if what) + 2
    return "\n".join(f"{left:<{width}}{what}".rstrip() for left, what in rows)


def native_picture() -> str:
    """The layers of native/ as text."""
    width = max(map(len, NATIVE_LAYERS)) + 3
    return "\n".join(f"{f'{name}/':<{width}}{what}" for name, what in NATIVE_LAYERS.items())


_MODULES = {"api", "config", "environment", "errors", "version", "__init__"}

if __name__ == "__main__":
    print(picture(), native_picture(), sep="\n\n")  # noqa: T201

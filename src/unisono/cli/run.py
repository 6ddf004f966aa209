"""`unisono run`: start ranks of a program on this host.

Command line and terminal; `unisono.launcher.run` starts the processes.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

import click

from unisono.config import Config, as_options
from unisono.environment import environment, given, network
from unisono.errors import BackendUnavailable, RendezvousError, UsageError

if TYPE_CHECKING:
    from unisono.launcher.job import Job

__all__ = ["command"]


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("-n", "ranks", type=int, default=1, show_default=True, help="Ranks on this host.")
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as in `python -m`.")
@click.option(
    "--backend",
    metavar="NAME",
    help="What `unisono.init()` uses [UNISONO_BACKEND; default: native]; mpi is started by mpiexec.",
)
@click.option("--nnodes", type=int, default=1, show_default=True, help="Hosts; each runs this command.")
@click.option("--node-rank", type=int, default=0, show_default=True, help="Which of the hosts this is.")
@click.option(
    "--join", metavar="FILE", help="Where node 0 puts the join ticket and the others read it [UNISONO_JOIN]."
)
@click.option(
    "--address",
    metavar="HOST[:PORT]",
    help="An address or interface of this host to meet on [UNISONO_ADDRESS; default: loopback].",
)
@click.option(
    "--advertise", metavar="HOST[:PORT]", help="How others reach it, if that differs [UNISONO_ADVERTISE]."
)
@click.option("--insecure", is_flag=True, help="No encryption between hosts.")
@click.option(
    "--grace",
    "grace_s",
    type=float,
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for the other ranks to end by themselves after one has failed.",
)
@click.option("--verbose", is_flag=True, help="When the job fails, show the whole tracebacks of all ranks.")
@click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="Set a variable for every rank.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int,
    is_module: bool,
    backend: str | None,
    nnodes: int,
    node_rank: int,
    join: str | None,
    address: str | None,
    advertise: str | None,
    insecure: bool,
    grace_s: float,
    verbose: bool,
    env: tuple[str, ...],
    program: str,
    arguments: tuple[str, ...],
) -> None:
    """Run PROGRAM, a Python script, as several ranks that find each other with `unisono.init()`.

    Each line that a rank prints is prefixed with its number. When a rank fails, the others have --grace
    seconds to end by themselves; the exit code and the last lines are those of the rank that failed first.
    """
    from unisono.launcher.job import Job

    if join is not None and "://" in join:
        raise UsageError(
            "--join takes a file: a ticket on a command line can be read by every user",
            next_step="put the ticket into a file of mode 0600, or into UNISONO_JOIN",
        )
    variables = dict(_pair(text) for text in env)
    options = {
        "BACKEND": backend,
        "ADDRESS": address,
        "ADVERTISE": advertise,
        "INSECURE": "1" if insecure else None,
    }
    variables |= as_options(options, variables)
    # As the ranks will read them: an option, otherwise a variable, otherwise the default.
    network_settings, settings = network(environment(variables)), Config.inherited(variables)
    launcher = _launcher_of(network_settings.backend, "--backend " if backend else "UNISONO_BACKEND=")
    job = Job(
        command=[sys.executable, *(["-m"] if is_module else []), program, *arguments],
        ranks_here=ranks,
        nodes=nnodes,
        node_rank=node_rank,
        join=join or (network(given()).join if nnodes > 1 else None),
        address=network_settings.address,
        advertise=network_settings.advertise,
        insecure=settings.insecure,
        tls=settings.tls,
        grace_s=grace_s,
        env=variables,
        is_mpi=bool(launcher),
        verbose=verbose,
    )
    sys.exit(_run(job))


def _run(job: Job) -> int:
    """Run the job on the streams of this process; returns its exit code."""
    from unisono import __version__
    from unisono.launcher.run import run
    from unisono.launcher.terminal import leave_terminal

    if os.isatty(0):
        leave_terminal()
    streams = (sys.stdout, sys.stderr)
    try:
        with open(os.devnull, "wb") as nowhere:  # for a stream that was closed before we started
            out, err = (_descriptor(stream, nowhere.fileno()) for stream in streams)
            return run(
                job,
                version=__version__,
                out=out,
                err=err,
                colour=all(stream is not None and stream.isatty() for stream in streams),
            )
    except (RendezvousError, BackendUnavailable) as error:
        raise click.ClickException(str(error)) from error


def _launcher_of(backend: str, named_by: str) -> str:
    """The program that starts the ranks of a backend; empty: this launcher."""
    from unisono.backends.registry import backend_named

    try:
        info = backend_named(backend)
    except BackendUnavailable as error:
        raise click.ClickException(str(error)) from error
    if not info.has_processes:
        raise UsageError(f"{named_by}{backend}; allowed: backends whose ranks are processes")
    return info.launcher


def _descriptor(stream: TextIO | None, otherwise: int) -> int:
    """The descriptor of a stream; `otherwise` if it is closed or has none."""
    try:
        return otherwise if stream is None else stream.fileno()
    except OSError:
        return otherwise


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UsageError(f"--env {text!r}; allowed: NAME=VALUE")
    return name, value

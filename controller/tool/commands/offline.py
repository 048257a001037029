"""Commands that need no running stack: they read files with the controller's own reader. They import it only when they
run, so that it does not delay other commands.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...model.text import counted
from .. import output as out
from ..errors import BAD_INPUT, BadInput, CommandError
from .options import Output

if TYPE_CHECKING:
    from ...model.spec import ServiceSpec, Spec

Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE]...", help="compose files; none named: those of COMPOSE_FILE or .env"),
]


NEIGHBOUR_TABLE = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
NEIGHBOURS = 8
"""Entries of it that a replica takes, about: each of two that talk has the other."""


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (validate, schema):
        app.command()(command)
    # The simulator has its own command line, which also works without typer: its options are passed on.
    app.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)(simulate)


def validate(
    files: Files = None,
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON Schema for editors, check nothing")] = False,
    output: Output = "text",
) -> None:
    """Check compose files, x-serve blocks included.

    Reads them as the controller does; needs no running stack and changes nothing.
    """
    as_json = out.is_json(output)
    if schema:
        _print_schema()
        return
    spec, problems = _read(_environment(files or []))
    services, warnings = (spec.services, spec.warnings) if spec else ({}, ())
    warnings = (*warnings, *_neighbours(services.values(), NEIGHBOUR_TABLE))
    if as_json:
        found = {"valid": not problems, "services": sorted(services), "problems": list(map(_problem, problems))}
        out.print_json({**found, "warnings": list(warnings)})
    else:
        lines = [*problems, *(f"warning: {warning}" for warning in warnings)]
        lines += [f"{name}: {_words(service)}" for name, service in services.items()]
        if spec and not services:
            lines.append("no service has an x-serve block; compose/reference.yaml explains its keys")
        out.say("\n".join(lines))
    if problems:
        raise typer.Exit(BAD_INPUT)


def schema() -> None:
    """Print the JSON Schema of x-serve, for editors."""
    _print_schema()


def simulate(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="TRACE [SERVICE] [OPTION]...")] = None,
) -> None:
    """Try autoscaling on a trace of requests, in simulated time; `pierhead simulate --help` has the options."""
    from simulator.__main__ import main

    raise typer.Exit(main(arguments or ["--help"]))


def _print_schema() -> None:
    from ...files.schema import schema_text

    out.say(schema_text().rstrip("\n"))


def _environment(files: list[str]) -> dict[str, str]:
    """The environment in which Compose reads these files. Raises BadInput for a missing file."""
    missing = [name for name in files if not Path(name).is_file()]
    if missing:
        raise BadInput(f"FILE: there is no file {', '.join(map(repr, missing))} in {Path.cwd()}")
    if not files:
        return dict(os.environ)
    named = os.pathsep.join(str(Path(name).absolute()) for name in files)
    return {**os.environ, "COMPOSE_FILE": named, "COMPOSE_PATH_SEPARATOR": os.pathsep}


def _read(environment: Mapping[str, str]) -> tuple[Spec | None, tuple[str, ...]]:
    """Return what the controller would read, or the problems of the files."""
    import asyncio

    from ...errors import ControllerError, SpecError
    from ...files.compose import ComposeProject
    from ...swarm.files.dialect import DIALECTS

    try:
        return asyncio.run(ComposeProject.from_environment(environment, DIALECTS).load()), ()
    except SpecError as error:
        return None, tuple(error.problems)
    except ControllerError as error:
        raise CommandError(str(error)) from None


def _neighbours(services: Iterable[ServiceSpec], table: Path) -> Iterator[str]:
    """Yield a warning where this machine's kernel has no room for all replicas that the files allow."""
    most = sum(one.autoscale.max if one.autoscale else one.replicas for one in services)
    if os.environ.get("PIERHEAD_ENGINE") == "swarm" or not table.exists():  # a container cannot read it
        return
    entries = int(table.read_text())
    if most * NEIGHBOURS > entries:
        yield (
            f"the files allow {most} replicas, and this machine's kernel has room for about {entries // NEIGHBOURS}: "
            "beyond that containers do not reach each other. Raise net.ipv4.neigh.default.gc_thresh3 (it is "
            f"{entries}) to {NEIGHBOURS} for each replica, and gc_thresh2 to half of it"
        )


def _problem(line: str) -> dict[str, str]:
    """Split "path: message"."""
    path, colon, message = line.partition(": ")
    return {"path": path, "message": message} if colon else {"path": "", "message": line}


def _words(service: ServiceSpec) -> str:
    bounds = service.autoscale
    count = f"{bounds.min} to {bounds.max} replicas" if bounds else counted(service.replicas, "replica")
    gpus = f", {service.gpu.count} GPU each" if service.gpu else ""
    reached = [service.matched] if service.matched else []
    reached += [f"gRPC {name}" for name in service.grpc_services]
    outside = ", ".join(reached) or "not reachable from outside"
    return f"{count}{gpus}, {service.protocol} on port {service.port}, {outside}"

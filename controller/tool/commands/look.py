"""Commands that show the current state: status, why, gpus, nodes, routes, plan, revisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer
from rich.console import RenderableType

from .. import output as out
from .. import prometheus, tables
from ..errors import BAD_INPUT
from ..why import Case
from ..why import page as why_page
from .options import EVENTS_KEPT, Output, Service, connect


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (status, why, gpus, nodes, routes, plan, revisions):
        app.command()(command)


def status(output: Output = "text") -> None:
    """Show services, replicas, GPUs, and what is wrong."""
    as_json = out.is_json(output)
    document = connect().services()
    traffic = prometheus.read(prometheus.address())
    rows = [out.with_members(row, p99_s=traffic.of(row.name).p99_s) for row in document.services]
    shown = out.with_members(document, services=rows)
    _show(as_json, shown, lambda width: tables.status(document, traffic, width))


def why(service: Service, output: Output = "text") -> None:
    """Explain a service's state.

    What is in the way, what sets the number of replicas, the last failure with its log, the last events.
    """
    as_json, api = out.is_json(output), connect()
    row, plan = api.service(service), api.plan()
    events = api.events({"service": service, "limit": str(EVENTS_KEPT)}).events
    case = Case(row, plan, events, prometheus.read(prometheus.address()).of(service))
    _show(as_json, case.as_json(), lambda width: why_page(case, width))


def gpus(output: Output = "text") -> None:
    """Show the GPUs and the containers that hold them."""
    as_json = out.is_json(output)
    document = connect().services()
    found = {"at": document.at, "gpus": document.gpus, "gpu_memory_problem": document.gpu_memory_problem}
    _show(as_json, found, lambda width: tables.gpus(document, width))


def nodes(output: Output = "text") -> None:
    """Show the nodes: role, state, replicas, GPUs, and what is wrong."""
    as_json = out.is_json(output)
    document = connect().nodes()
    _show(as_json, document, lambda width: tables.nodes(document.nodes, width))


def routes(output: Output = "text") -> None:
    """Show what HAProxy sends where."""
    as_json = out.is_json(output)
    document = connect().routes()
    _show(as_json, document, lambda width: tables.routes(document, width))


def plan(output: Output = "text") -> None:
    """Show what the controller would do now, and why.

    Ends with 2 while the compose files cannot be used: the plan is then that of the last good ones.
    """
    as_json = out.is_json(output)
    document = connect().plan()
    if as_json:
        out.print_json(document)
    else:
        out.say(document.text)
    if document.spec_problems:
        raise typer.Exit(BAD_INPUT)


def revisions(service: Service, output: Output = "text") -> None:
    """Show the versions that `rollback --to` can go to."""
    as_json = out.is_json(output)
    document = connect().revisions(service)
    _show(as_json, document, lambda width: tables.revisions(document, width))


def _show(as_json: bool, document: object, page: Callable[[int], Iterable[RenderableType]]) -> None:
    if as_json:
        out.print_json(document)
        return
    console = out.console()
    out.show(page(out.width(console)), console)

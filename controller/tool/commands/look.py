"""Commands that show the current state: status, why, gpus, nodes, routes, plan, revisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from .. import output as out
from .. import redraw, tables
from ..errors import BAD_INPUT
from ..why import Case
from ..why import page as why_page
from .options import EVENTS_KEPT, Output, Service, connect

if TYPE_CHECKING:
    from ...status.records.answers import Alerts, Traffic
    from ...status.records.services import Services

Watch = Annotated[bool, typer.Option("--watch", "-w", help="show it again and again, until Ctrl-C")]
Count = Annotated[int | None, typer.Option("-n", metavar="COUNT", min=1, help="with --watch: end after so many times")]
Interval = Annotated[
    float, typer.Option("--interval", metavar="SECONDS", min=0.2, max=3600.0, help="with --watch: between two times")
]
Rehearsed = Annotated[
    list[str] | None,
    typer.Option("--scale", metavar="SERVICE:N", help="with this number of replicas; repeatable"),
]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (status, why, gpus, nodes, routes, plan, revisions):
        app.command()(command)


def status(watch: Watch = False, n: Count = None, interval: Interval = 2.0, output: Output = "text") -> None:
    """Show services, replicas, GPUs, traffic, and what is wrong."""
    as_json, api = out.is_json(output), connect()

    def look() -> tuple[Services, Traffic, Alerts]:
        return api.services(), api.traffic(), api.alerts()

    if not watch:
        document, traffic, alerts = look()
        _show(
            as_json,
            _with_traffic(document, traffic, alerts),
            lambda width: tables.status(document, traffic, width, alerts),
        )
    elif as_json:
        redraw.json_lines(lambda: _with_traffic(*look()), n, interval)
    else:

        def draw(width: int) -> redraw.Page:
            document, traffic, alerts = look()
            return [tables.headline(document), *tables.status(document, traffic, width, alerts)]

        redraw.follow(draw, n, interval)


def _with_traffic(document: Services, traffic: Traffic, alerts: Alerts) -> dict[str, object]:
    """The document, with the newest numbers of each service in its row, and what fires."""
    rows = [out.with_members(row, **out.with_members(traffic.latest(row.name))) for row in document.services]
    fires = {"alerts": alerts.alerts, "alerts_problem": alerts.problem}
    return out.with_members(document, services=rows, traffic_problem=traffic.problem, **fires)


def why(service: Service, output: Output = "text") -> None:
    """Explain a service's state.

    What is in the way, what sets the number of replicas, the last failure with its log, the last events.
    """
    as_json, api = out.is_json(output), connect()
    row, plan = api.service(service), api.plan()
    events = api.events({"service": service, "limit": str(EVENTS_KEPT)}).events
    case = Case(row, plan, events, api.traffic().latest(service))
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


def plan(scale: Rehearsed = None, output: Output = "text") -> None:
    """Show what the controller would do now, and why.

    With --scale: what it would do after `pierhead scale` of that number, such as what would find no place.

    Ends with 2 while the compose files cannot be used: the plan is then that of the last good ones.
    """
    as_json = out.is_json(output)
    document = connect().plan(scale or ())
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

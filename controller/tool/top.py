"""`pierhead top`: the current traffic of every service. `page` is pure; `follow` redraws it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from . import output, rows, tables
from .errors import Unreachable
from .output import Console
from .prometheus import QueryResult

if TYPE_CHECKING:
    from ..status.records.services import Services

Page = list[RenderableType]
Draw = Callable[[int], Page]
"""Asks the API and Prometheus, and returns the page for a width."""


def page(document: Services, traffic: QueryResult, width: int) -> Iterator[RenderableType]:
    """Yield one picture."""
    services = document.services
    at = datetime.fromtimestamp(document.at).astimezone().strftime("%H:%M:%S")
    ready, wanted = sum(row.ready for row in services), sum(row.wanted for row in services)
    held = sum(bool(gpu.holder or gpu.slots) for gpu in document.gpus)
    gpus = f", {held} of {len(document.gpus)} GPUs held" if document.gpus else ""
    up = sum(node.state == "ready" for node in document.nodes)
    nodes = f", {up} of {len(document.nodes)} nodes ready" if document.nodes else ""
    yield Text(f"{document.project} at {at}: {ready} of {wanted} replicas ready{gpus}{nodes}")
    yield from tables.complaints(document)
    if services:
        yield Text("")
        yield from _services(document, traffic).render(width)
    if traffic.problem:
        yield Text("")
        yield Text(f"no rates and quantiles: {traffic.problem}", style="yellow")


def _services(document: Services, traffic: QueryResult) -> tables.CellTable:
    columns = ("SERVICE", "STATE", "READY", "IN FLIGHT", "WAITING", "REQ/S", "P50", "P99")
    listing = tables.CellTable(columns, "WHAT IS GOING ON")
    for row in document.services:
        known = traffic.of(row.name)
        listing.add(
            row.name,
            row.state,
            f"{row.ready}/{row.wanted}",
            rows.in_flight(row),
            rows.waiting(row),
            rows.rate(known.rate),
            rows.seconds(known.p50_s),
            rows.seconds(known.p99_s),
            sentence=row.summary,
        )
    return listing


def follow(draw: Draw, count: int | None, interval_s: float) -> None:
    """Show `count` pictures, or until Ctrl-C; on a terminal each in the place of the one before.

    Raises Unreachable when the controller does not answer the first time; later pictures say so.
    """
    console = output.console()
    try:
        if console.is_terminal and count != 1:
            _live(draw, console, count, interval_s)
        else:
            _printed(draw, console, count, interval_s)
    except KeyboardInterrupt:
        return


def _live(draw: Draw, console: Console, count: int | None, interval_s: float) -> None:
    first = draw(output.width(console))
    with Live(Group(*first), console=console, screen=count is None, auto_refresh=False) as live:
        for shown in _pages(draw, console, count, interval_s, first):
            live.update(Group(*shown), refresh=True)


def _printed(draw: Draw, console: Console, count: int | None, interval_s: float) -> None:
    first = draw(output.width(console))
    for number, shown in enumerate(_pages(draw, console, count, interval_s, first)):
        if number:
            output.say("")
        output.show(shown, console)


def _pages(draw: Draw, console: Console, count: int | None, interval_s: float, first: Page) -> Iterator[Page]:
    shown, number = first, 1
    yield shown
    while count is None or number < count:
        time.sleep(interval_s)
        try:
            shown = draw(output.width(console))
        except Unreachable as error:
            shown = [*first, Text(""), Text(str(error), style="red")]
        number += 1
        yield shown


def json_lines(look: Callable[[], object], count: int | None, interval_s: float) -> None:
    """Write `count` documents, one on each line, or until Ctrl-C."""
    number = 0
    try:
        while count is None or number < count:
            if number:
                time.sleep(interval_s)
            output.print_json_line(look())
            number += 1
    except KeyboardInterrupt:
        sys.stdout.flush()

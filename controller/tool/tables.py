"""The API's documents as tables. Pure: documents in, renderables out.

A page has a width in columns. A table has narrow columns and at most one sentence a row. Where there is room, the
sentences are the last column; else they stand below the table, each after the name of its row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..model.text import age
from . import rows

if TYPE_CHECKING:
    from ..model.world import Server
    from ..status.records.answers import (
        AlertDocument,
        Alerts,
        Keys,
        Revisions,
        Route,
        Routes,
        SilenceDocument,
        Silences,
        Traffic,
    )
    from ..status.records.services import GpuUse, NodeStatus, Service, Services

_STATES = {
    "green": ("RUNNING", "HEALTHY", "ready"),
    "yellow": (
        *("STARTING", "PENDING", "UPDATING", "UPSCALING", "DOWNSCALING", "DRAINING", "STOPPING"),
        *("drain", "maint", "partly", "unknown", "leaving", "drained", "paused", "ASLEEP"),
    ),
    "red": ("FAILED", "CRASH_LOOP", "UNHEALTHY", "DEPLOY_FAILED", "DOWN", "down"),
}
STYLES = {state: colour for colour, states in _STATES.items() for state in states}
SHORT_GPU = 12
"""Characters of a GPU's UUID ("GPU-3f2c1b0a") on a narrow page."""
WHOLE_GPU_FROM = 150
MOST_ALERTS = 8
"""Named by the status; the console has all."""
LEAST_FOR_SENTENCES = 36
_GAP = 2


@dataclass
class CellTable:
    """Rows of cells, each with at most one sentence. `last` is the title of the column of sentences; a page without
    room leaves out the columns in `optional`."""

    columns: Sequence[str]
    last: str = ""
    optional: Collection[str] = ()
    rows: list[tuple[tuple[str, ...], str]] = field(default_factory=list)

    def add(self, *cells: str, sentence: str = "") -> None:
        """Add a row; its first cell is the row's name."""
        self.rows.append((cells, sentence))

    def render(self, width: int) -> Iterator[RenderableType]:
        """Yield the table, and below it the sentences where the table has no room for them."""
        shown = self._fitting(width)
        sentences = [sentence for _, sentence in self.rows if sentence]
        room = width - self._taken(shown) - _GAP
        inside = bool(sentences) and room >= min(LEAST_FOR_SENTENCES, max(map(len, sentences)))
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        for number in shown:
            table.add_column(self.columns[number], no_wrap=True)
        if inside:
            table.add_column(self.last, overflow="fold")
        for cells, sentence in self.rows:
            styled = [Text(cells[number], style=STYLES.get(cells[number], "")) for number in shown]
            table.add_row(*styled, *([Text(sentence)] if inside else []))
        yield table
        if sentences and not inside:
            yield Text("")
            yield from map(Text, dict.fromkeys(f"{cells[0]}: {sentence}" for cells, sentence in self.rows if sentence))

    def _fitting(self, width: int) -> list[int]:
        """Return the numbers of the columns that are shown."""
        shown = list(range(len(self.columns)))
        for number in [number for number in shown if self.columns[number] in self.optional]:
            if self._taken(shown) > width:
                shown.remove(number)
        return shown

    def _taken(self, shown: Collection[int]) -> int:
        titles = {number: len(self.columns[number]) for number in shown}
        widest = {n: max([titles[n], *(len(cells[n]) for cells, _ in self.rows)]) for n in shown}
        return sum(widest.values()) + _GAP * max(len(widest) - 1, 0)


def headline(document: Services) -> Text:
    """Return when the page was made, and what the whole stack has."""
    services = document.services
    at = datetime.fromtimestamp(document.at).astimezone().strftime("%H:%M:%S")
    ready, wanted = sum(row.ready for row in services), sum(row.wanted for row in services)
    held = sum(bool(gpu.holder or gpu.slots) for gpu in document.gpus)
    gpus = f", {held} of {len(document.gpus)} GPUs held" if document.gpus else ""
    up = sum(node.state == "ready" for node in document.nodes)
    nodes = f", {up} of {len(document.nodes)} nodes ready" if document.nodes else ""
    return Text(f"{document.project} at {at}: {ready} of {wanted} replicas ready{gpus}{nodes}")


def status(document: Services, traffic: Traffic, width: int, alerts: Alerts | None = None) -> Iterator[RenderableType]:
    """Yield the page of `pierhead status`."""
    yield from complaints(document)
    if alerts and alerts.problem and alerts.problem != traffic.problem:
        yield Text(f"not all is known of alerts: {alerts.problem}", style="yellow")
    if said := list(dict.fromkeys(map(_firing, alerts.alerts if alerts else ()))):
        more = f" and {len(said) - MOST_ALERTS} more" if len(said) > MOST_ALERTS else ""
        yield Text(f"alerts that fire: {', '.join(said[:MOST_ALERTS])}{more}", style="red")
    if traffic.problem:
        yield Text(f"no rates and quantiles: {traffic.problem}", style="yellow")
    if not document.settled or not document.services:
        return
    yield from _services(document, traffic).render(width)
    if any(row.replicas for row in document.services):
        yield Text("")
        yield from replicas(document.services, width).render(width)
    if document.gpus:
        yield Text("")
        yield from gpus(document, width)
    if document.nodes:
        yield Text("")
        yield from nodes(document.nodes, width)
    if left := _left(document):
        yield Text("")
        yield Text(left)


def _left(document: Services) -> str:
    """What the machine has left."""
    machine = document.machine
    if machine is None:
        return ""
    memory = f"{_size(machine.free_bytes)} of {_size(machine.memory_bytes)} of memory are free"
    return f"machine: {memory}, load {machine.load:.1f} on {machine.cores} cores"


def _firing(alert: AlertDocument) -> str:
    of = f" of {alert.service}" if alert.service else ""
    return f"{alert.name}{of}{' (silenced)' if alert.silenced_by else ''}"


def silences(document: Silences, width: int) -> Iterator[RenderableType]:
    """Yield the silences of alerts, one a row."""
    listing = CellTable(("ID", "SILENCED", "ENDS", "BY"), "WHY", optional=("BY",))
    for one in document.silences:
        ends = datetime.fromtimestamp(one.ends_at).astimezone().strftime("%Y-%m-%d %H:%M")
        listing.add(one.id, silenced(one), ends, one.by, sentence=one.why)
    if listing.rows:
        yield from listing.render(width)
    else:
        yield Text("every alert is sent")


def silenced(one: SilenceDocument) -> str:
    """What a silence holds back."""
    of = f" of {one.service}" if one.service else ""
    return f"{one.alert or 'every alert'}{of}{f' where {one.others}' if one.others else ''}"


def complaints(document: Services) -> Iterator[RenderableType]:
    """Yield what is wrong beyond a single service, or why there is nothing to show."""
    for problem in document.spec_problems:
        yield Text(f"compose files: {problem}", style="red")
    for notice in document.notices:
        yield Text(notice, style="red")
    if not document.settled:
        if not document.spec_problems:
            yield Text("the controller was just started and reads the compose files")
    elif not document.services:
        yield Text("no service has an x-serve block; compose/reference.yaml explains its keys")


def _services(document: Services, traffic: Traffic) -> CellTable:
    columns = ("SERVICE", "STATE", "VERSION", "READY", "GPUS", "IN FLIGHT", "WAITING", "REQ/S", "P50", "P99")
    listing = CellTable(columns, "WHAT IS GOING ON", optional=("VERSION", "GPUS", "P50"))
    for row in document.services:
        latest = traffic.latest(row.name)
        listing.add(
            row.name,
            row.state,
            rows.version(row),
            f"{row.ready}/{row.wanted}",
            rows.gpus(row),
            rows.in_flight(row),
            rows.waiting(row),
            rows.rate(latest.rate),
            rows.seconds(latest.p50_s),
            rows.seconds(latest.p99_s),
            sentence=row.summary,
        )
    return listing


def replicas(services: Sequence[Service], width: int) -> CellTable:
    """Return the replicas of these services, one a row."""
    has_nodes = any(replica.node for row in services for replica in row.replicas)
    columns = ("REPLICA", "STATE", *(["NODE"] if has_nodes else []), "ADDRESS", "GPU", "IN FLIGHT")
    listing = CellTable(columns, "WHY", optional=("ADDRESS",))
    for row in services:
        for replica in row.replicas:
            listing.add(
                replica.name or f"{row.name} (none yet)",
                replica.state,
                *([replica.node or "-"] if has_nodes else []),
                _place(replica.address),
                ", ".join(_gpu(uuid, width) for uuid in replica.gpus) or "-",
                "-" if replica.ongoing is None else str(replica.ongoing),
                sentence=replica.message,
            )
    return listing


def gpus(document: Services, width: int) -> Iterator[RenderableType]:
    """Yield every GPU with its holders, and its memory where that is known."""
    found = document.gpus
    if not found:
        yield Text(
            "the Docker Engine knows no GPU (the NVIDIA Container Toolkit makes them known to it: docs/how-to/gpus.md)"
        )
        return
    sizes = {"MEMORY": attrgetter("memory_bytes"), "IN USE": attrgetter("used_bytes"), "FREE": attrgetter("free_bytes")}
    known = {title: size for title, size in sizes.items() if any(size(gpu) is not None for gpu in found)}
    has_nodes = any(gpu.node for gpu in found)
    listing = CellTable(("GPU", *(["NODE"] if has_nodes else []), "KIND", *known, "HELD BY"))
    for gpu in found:
        cells = [_size(size(gpu)) for size in known.values()]
        node = [gpu.node or "-"] if has_nodes else []
        listing.add(_gpu(gpu.uuid, width), *node, gpu.name or "-", *cells, _holders(gpu))
    yield from listing.render(width)
    if document.gpu_memory_problem:
        yield Text(str(document.gpu_memory_problem))


def nodes(listed: Sequence[NodeStatus], width: int) -> Iterator[RenderableType]:
    """Yield every node with what is there."""
    if not listed:
        yield Text("this stack runs on one machine: it has no nodes (PIERHEAD_ENGINE)")
        return
    listing = CellTable(("NODE", "ROLE", "STATE", "AVAILABILITY", "REPLICAS", "GPUS", "ADDRESS"), "WHAT IS GOING ON")
    listing.optional = ("ADDRESS",)
    for node in listed:
        gpus_used = f"{node.gpus_used}/{node.gpus}" if node.gpus else "-"
        cells = (node.name, node.role, node.state, node.availability, str(node.replicas), gpus_used)
        listing.add(*cells, node.address or "-", sentence=node.message)
    yield from listing.render(width)


def routes(document: Routes, width: int) -> Iterator[RenderableType]:
    """Yield HAProxy's routes in the order in which it matches them, and the servers behind them."""
    if document.haproxy is None:
        yield Text("HAProxy does not answer the controller: its routes and servers are not known", style="red")
    if not document.routes:
        yield Text("no service has a route or grpc_services: nothing is reachable from outside")
        return
    routed = CellTable(("ROUTE", "SERVICE", "SERVERS", "SESSIONS", "QUEUED"), "WHAT IS GOING ON")
    servers = CellTable(("SERVER", "STATE", "ADDRESS", "WEIGHT", "SESSIONS", "QUEUED"), "WHY", optional=("ADDRESS",))
    shown: set[str] = set()
    for route in document.routes:
        taking = [server for server in route.servers if server.up and server.state == "ready"]
        routed.add(
            _matched(route),
            route.service,
            f"{len(taking)}/{len(route.servers)}",
            str(sum(server.sessions for server in route.servers)),
            str(route.queued + sum(server.queued for server in route.servers)),
            sentence=_route_words(route, bool(taking), document.haproxy is not None),
        )
        for server in route.servers:
            if server.name not in shown:
                shown.add(server.name)
                _add_server(servers, server)
    yield from routed.render(width)
    if shown:
        yield Text("")
        yield from servers.render(width)


def _place(address: str) -> str:
    """Of a replica's requests. The path of a socket has nothing that the replica's name does not say."""
    return "socket" if address.startswith("unix:") else address or "-"


def _add_server(listing: CellTable, server: Server) -> None:
    listing.add(
        server.name,
        server.state if server.up else "DOWN",
        _place(server.address),
        str(server.weight),
        str(server.sessions),
        str(server.queued),
        sentence="" if server.up else "HAProxy's own check of it fails",
    )


def _matched(route: Route) -> str:
    if route.protocol == "http":
        return str(route.match)
    return f"gRPC {route.match}" + (f" ({route.application})" if route.application else "")


def _route_words(route: Route, serves: bool, known: bool) -> str:
    if not known:
        return ""
    if not route.in_haproxy:
        return "HAProxy does not have it yet"
    if not serves:
        return f"no server takes requests: they are answered 503; see `pierhead why {route.service}`"
    return "the route is taken off the path" if route.strip_prefix else ""


def revisions(document: Revisions, width: int) -> Iterator[RenderableType]:
    """Yield the versions of a service that the controller keeps, in its order."""
    if not document.revisions:
        yield Text(f"no version of {document.service} is known yet")
        return
    listing = CellTable(("VERSION", "AGE", "IMAGE", "IMAGE ID", "NOW"), optional=("IMAGE",))
    for revision in document.revisions:
        marks = [*(["current"] if revision.current else []), *(["stable"] if revision.stable else [])]
        listing.add(
            revision.version,
            age(revision.first_at, document.at),
            revision.image or "-",
            str(revision.image_id or "-").removeprefix("sha256:")[:12],
            ", ".join(marks) or "-",
        )
    yield from listing.render(width)


def keys(document: Keys, width: int) -> Iterator[RenderableType]:
    """Yield the keys of clients: what each opens, and its limits."""
    if not document.keys:
        yield Text("there are no keys; `pierhead keys create NAME` makes one")
        return
    listing = CellTable(
        ("KEY", "OPENS", "MODELS", "REQUESTS/MIN", "TOKENS/MIN", "AT A TIME", "AGE", "LAST USED", "ENDS"),
        optional=("MODELS", "AGE", "TOKENS/MIN"),
    )
    for key in document.keys:
        limits = (key.per_minute, key.tokens_per_minute, key.concurrent)
        listing.add(
            key.name,
            ", ".join(key.services) or "every service",
            ", ".join(key.models) or "all",
            *(str(limit or "-") for limit in limits),
            age(key.made_at, document.at),
            "-" if key.used_at is None else f"{age(key.used_at, document.at)} ago",
            "-"
            if key.ends_at is None
            else "ended"
            if key.ends_at <= document.at
            else f"in {age(document.at, key.ends_at)}",
        )
    yield from listing.render(width)


def _gpu(uuid: str, width: int) -> str:
    return uuid if width >= WHOLE_GPU_FROM or not uuid.startswith("GPU-") else uuid[:SHORT_GPU]


def _holders(gpu: GpuUse) -> str:
    slots = ", ".join(f"{slot.replica} ({slot.amount})" for slot in gpu.slots)
    unheld = "free" if gpu.free_bytes == gpu.memory_bytes else "other processes"
    fault = gpu.fault
    holder = slots or str(gpu.holder or ("no container" if fault else unheld))
    return f"{holder} (not used: {fault})" if fault else holder


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"

"""The API's documents as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

Document = Mapping[str, Any]

STYLES = {"RUNNING": "green", "STARTING": "yellow", "PENDING": "yellow", "FAILED": "red"}
COUNTDOWN = re.compile(r"\bin \d+ s\b")


def status(document: Document) -> Iterator[RenderableType]:
    """Yield what `pierhead status` shows."""
    for problem in document["spec_problems"]:
        yield Text(f"compose files: {problem}", style="red")
    for notice in document["notices"]:
        yield Text(notice, style="red")
    if not document["settled"]:
        if not document["spec_problems"]:
            yield Text("the controller was just started and reads the compose files")
        return
    if not document["services"]:
        yield Text("no service has an x-serve block")
        return
    yield _services(document)
    if any(row["replicas"] for row in document["services"]):
        yield Text("")
        yield _replicas(document)
    if document["gpus"]:
        yield Text("")
        yield _gpus(document)


def event_line(event: Document) -> str:
    """Return one event; further lines of its message are indented."""
    at = datetime.fromtimestamp(event["at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    mark = {"ok": "ok     ", "failed": "FAILED ", "warning": "warning"}.get(event["outcome"], "       ")
    first, *rest = event["message"].splitlines() or [""]
    again = f" ({event['times']} times)" if event["times"] > 1 else ""
    return "\n".join([f"{at} {mark} {first}{again}", *(f"{' ' * 28}{line}" for line in rest)])


class Progress:
    """What is waited for: one line that changes on a terminal, else a line for each change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("", console=console) if console.is_terminal else None
        self._last = ""

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()

    def show(self, message: str) -> None:
        """Say what is waited for now."""
        if self._status:
            self._status.update(Text(message))
            return
        essence = COUNTDOWN.sub("", message)
        if essence != self._last:
            self._last = essence
            self._console.print(Text(message), soft_wrap=True)


def _services(document: Document) -> Table:
    table = _table("SERVICE", "READY", "ROUTE", "WHAT IS GOING ON")
    for row in document["services"]:
        style = "green" if row["converged"] else "red" if row["blocked"] else "yellow"
        ready = Text(f"{row['ready']}/{row['wanted']}", style=style)
        table.add_row(Text(row["name"]), ready, Text(_route(row)), Text(row["message"]))
    return table


def _route(row: Document) -> str:
    routes = [row["route"]] if row["route"] else []
    return ", ".join([*routes, *row["grpc_services"]]) or "-"


def _replicas(document: Document) -> Table:
    table = _table("REPLICA", "STATE", "ADDRESS", "GPU", "IN FLIGHT", "WHY")
    for row in document["services"]:
        for replica in row["replicas"]:
            table.add_row(
                Text(replica["name"] or f"{row['name']} (none yet)"),
                Text(replica["state"], style=STYLES.get(replica["state"], "")),
                Text(replica["address"] or "-"),
                Text(", ".join(replica["gpus"]) or "-"),
                Text("-" if replica["ongoing"] is None else str(replica["ongoing"])),
                Text(replica["message"]),
            )
    return table


def _gpus(document: Document) -> Table:
    table = _table("GPU", "KIND", "HELD BY")
    for gpu in document["gpus"]:
        holder = gpu["holder"] or ("nobody" if gpu["fault"] else "free")
        fault = f" (not used: {gpu['fault']})" if gpu["fault"] else ""
        table.add_row(Text(gpu["uuid"]), Text(gpu["name"] or "-"), Text(f"{holder}{fault}"))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    return table

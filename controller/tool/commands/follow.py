"""Commands that can run until Ctrl-C: events, logs."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from .. import completion, feeds
from .. import output as out
from ..patience import patiently
from .options import EVENTS_KEPT, Follow, OfReplica, OfService, Output, Service, connect

if TYPE_CHECKING:
    from ...status.records.answers import EventDocument, Logs, ReplicaLog
    from ..api import ControllerApi

FOLLOW_S = 1.0
FOLLOWED_LINES = 1000
MOST_LINES = 10_000
"""The most lines that the controller sends for one replica."""
OVERLAP_S = 5.0
"""Longer than a line takes from a replica to the engine's log, and longer than a new replica takes to be listed."""
WAIT_S = 25

Kinds = Annotated[
    list[str] | None,
    typer.Option("--kind", metavar="KIND", help="of this kind only; repeatable", autocompletion=completion.kinds),
]
Since = Annotated[str, typer.Option("--since", metavar="TIME", help="from then on: 10m, 2h30m, 2026-01-31T18:00")]
Newest = Annotated[int, typer.Option("-n", metavar="COUNT", min=1, max=EVENTS_KEPT, help="how many of the newest")]
Lines = Annotated[
    int, typer.Option("-n", metavar="COUNT", min=1, max=MOST_LINES, help="how many lines of each replica")
]
Grep = Annotated[
    str,
    typer.Option("--grep", metavar="PATTERN", help="only lines, as replicas wrote them, that match it"),
]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (events, logs):
        app.command()(command)


def events(
    follow: Follow = False,
    n: Newest = 50,
    service: OfService = "",
    kind: Kinds = None,
    since: Since = "",
    output: Output = "text",
) -> None:
    """Show what happened, newest last, with causes."""
    as_json, api = out.is_json(output), connect()
    kinds = [name for names in kind or [] for name in names.split(",")]
    after = feeds.since_time(since, time.time()) if since else None
    only = {**({"service": service} if service else {}), **({"kind": ",".join(kinds)} if kinds else {})}
    # With a filter on kind or time, all kept events are filtered, not only the newest ones.
    limit = EVENTS_KEPT if kinds or since else n
    page = api.events({"limit": str(limit), **only})
    found = feeds.chosen(page.events, after)
    _explain_nothing(api, found, service, kinds, "since then" if since else "is kept")
    shown: Sequence[EventDocument] = found if since else found[-n:]
    while True:
        _print_events(shown, as_json=as_json)
        if not follow:
            return
        query = {"since": str(page.next), "wait": str(WAIT_S), **only}
        page = patiently(partial(api.events, query))
        shown = page.events


def logs(
    service: Service,
    follow: Follow = False,
    n: Lines = 100,
    since: Since = "",
    replica: OfReplica = "",
    grep: Grep = "",
    output: Output = "text",
) -> None:
    """Show the last log lines of a service's replicas.

    On a terminal, JSON lines are shown as text, tracebacks as lines; in a pipe they stay JSON.
    """
    as_json, api, pattern = out.is_json(output), connect(), feeds.pattern(grep)
    query = {"tail": str(MOST_LINES if grep else max(n, FOLLOWED_LINES) if follow else n)}
    if since:
        query["after"] = str(int(feeds.since_time(since, time.time())))
    if replica:
        query["replica"] = replica
    shown, at = {}, time.time()
    for document in _first(api, service, query, one_by_one=bool(grep and not replica)):
        at = document.at
        for log in document.replicas:
            shown[log.name] = feeds.timed(log)
            _print_lines(log.name, feeds.matching(shown[log.name], pattern)[-n:], as_json=as_json)
    if not shown and not follow:
        out.complain(f"{service} has no replica now; `pierhead why {service}` says why")
    while follow:
        time.sleep(FOLLOW_S)
        # Ask only for newer lines, with an overlap for lines that were just being written.
        query |= {"after": str(max(int(at - OVERLAP_S), 0)), "tail": str(max(n, FOLLOWED_LINES))}
        document = patiently(partial(api.logs, service, query))
        at = document.at
        for log in document.replicas:
            known, after = shown.get(log.name, []), float(query["after"])
            shown[log.name] = _follow_on(log, known, after, pattern, as_json=as_json)


def _first(api: ControllerApi, service: str, query: Mapping[str, str], *, one_by_one: bool) -> Iterator[Logs]:
    """The logs as they are now. `one_by_one`: many lines of many replicas are too much for one answer."""
    names = [each.name for each in api.service(service).replicas if each.name] if one_by_one else []
    if not names:
        yield api.logs(service, query)
    for name in names:
        yield api.logs(service, {**query, "replica": name})


def _follow_on(
    log: ReplicaLog, shown: list[feeds.LogLine], after: float, pattern: re.Pattern[str], *, as_json: bool
) -> list[feeds.LogLine]:
    """Print the new lines of a replica's log that match; return all lines that were looked at so far."""
    now = feeds.timed(log)
    fresh = feeds.new_lines(shown, now)
    if feeds.leaves_a_gap(shown, fresh, now, after):
        out.complain(f"{log.name} logs more than is sent at a time: lines are missing here")
    _print_lines(log.name, feeds.matching(fresh, pattern), as_json=as_json)
    return [*shown, *fresh][-MOST_LINES:]


def _explain_nothing(
    api: ControllerApi, found: Sequence[EventDocument], service: str, kinds: list[str], where: str
) -> None:
    """Explain an empty result. Raises BadInput for a service that does not exist."""
    if found:
        return
    if service:
        api.service(service)
    if kinds:
        out.complain(f"no event of kind {', '.join(kinds)} {where}")


def _print_events(listed: Sequence[EventDocument], *, as_json: bool) -> None:
    for event in listed:
        if as_json:
            out.print_json_line(event)
        else:
            out.say(feeds.event_line(event))


def _print_lines(replica: str, lines: Sequence[feeds.LogLine], *, as_json: bool) -> None:
    """Print log lines: in readable form on a terminal, unchanged in a pipe."""
    if as_json:
        for _, line in lines:
            out.print_json_line({"replica": replica, "line": line})
    elif lines:
        is_terminal = sys.stdout.isatty()
        shown = (part for _, line in lines for part in (feeds.readable(line) if is_terminal else [line]))
        out.say("\n".join(f"{replica} | {part}" for part in shown))

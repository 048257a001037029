"""What HAProxy's runtime API prints, as values. Pure; columns are found by name, since versions add and move them."""

from __future__ import annotations

import csv
import operator
import re
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import RoutingError
from ..model.world import Held, RoutingState, Server, ServerState
from .haproxy_config import BACKEND_PREFIX, HOLD_SERVER

QUESTIONS = ("show info", "get var proc.pierhead_routing", "show servers state", "show stat -1 6 -1")
"""Commands whose answers `routing_state` takes, in its order. `-1 6 -1`: all backends (2) and servers (4)."""
HELD_QUESTION = "show held"
"""The last one, of haproxy/hold.lua."""
NOTHING_HELD = "# backend held served expired left refused"

# srv_admin_state of "show servers state": forced by the runtime API, inherited, by resolution. 0x04 only says that the
# configuration file once said `disabled`.
_MAINT_BITS = 0x01 | 0x02 | 0x20 | 0x40
_DRAIN_BITS = 0x08 | 0x10
_STOPPED = 0
_BACKEND_ROW = "BACKEND"
# check_status of "show stat": a check without a question has passed; and what stands before it during the next one.
_CONNECTED = "L4OK"
_CHECK_GOES_ON = "* "


def routing_state(info: str, routing: str, servers_state: str, stat: str, held: str) -> RoutingState:
    """One snapshot out of the answers to QUESTIONS and HELD_QUESTION.

    Raises RoutingError when one of them is not what it should be.
    """
    try:
        facts, found = info_facts(info), traffic(stat)
        backends = {
            backend: seen.queued
            for (backend, row), seen in found.items()
            if row == _BACKEND_ROW and backend.startswith(BACKEND_PREFIX)
        }
        return RoutingState(
            pid=int(facts["Pid"]),
            started_at=float(facts["Start_time_sec"]),
            version=facts["Version"],
            routing_hash=variable(routing),
            servers=tuple(server for server, _ in servers(servers_state, found)),
            backends=frozenset(backends),
            queued=backends,
            held=holds(held),
            closed=closed_rooms(held),
        )
    except (LookupError, ValueError) as error:
        raise RoutingError(
            f"HAProxy's answers cannot be read: {error!r}; is this really HAProxy 3.0 or newer?"
        ) from error


def info_facts(text: str) -> Mapping[str, str]:
    """`show info` as a mapping."""
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def variable(text: str) -> str:
    """Value that `get var` prints; empty when the variable is not a string that is set."""
    found = re.search(r"type=str value=<(.*)>", text)
    return found.group(1) if found else ""


class Traffic(NamedTuple):
    """What `show stat` says of a server, or of a backend."""

    sessions: int = 0
    """In flight now."""
    queued: int = 0
    answered: int = 0
    """HTTP responses so far."""
    errors: int = 0
    """5xx among them."""
    is_asked: bool = True
    """False: the last check of the server only opened a connection, and that sufficed."""


_NOTHING = Traffic()


def traffic(stat: str) -> Mapping[tuple[str, str], Traffic]:
    """`show stat` by (backend, server), {} of nothing. A backend's own row goes by the server name BACKEND."""
    # For a worker that goes in this moment the master has an empty line, or a word of its own.
    lines = [line for line in stat.removeprefix("# ").splitlines() if line]
    if len(lines) <= 1:
        return {}
    header, *rows = csv.reader(lines)
    columns = {name: number for number, name in enumerate(header)}
    backend, server, sessions, queued = (columns[name] for name in ("pxname", "svname", "scur", "qcur"))
    responses = [columns[name] for name in ("hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx") if name in columns]
    errors, check = columns.get("hrsp_5xx"), columns.get("check_status")
    found = {}
    for row in rows:
        failed = int(row[errors] or 0) if errors is not None else 0
        answered = sum(int(row[number] or 0) for number in responses) + failed
        is_asked = check is None or row[check].removeprefix(_CHECK_GOES_ON) != _CONNECTED
        now = int(row[sessions] or 0), int(row[queued] or 0)
        found[row[backend], row[server]] = Traffic(*now, answered, failed, is_asked)
    return found


def holds(held: str) -> Mapping[str, Held]:
    """`show held` by backend."""
    found = {}
    for row in _rooms(held):
        endings = {ending: int(row[ending]) for ending in ("served", "expired", "left", "refused")}
        found[row["backend"]] = Held(now=int(row["held"]), **endings)
    return found


def closed_rooms(held: str) -> frozenset[str]:
    """Backends of which `show held` says that nobody may wait."""
    return frozenset(row["backend"] for row in _rooms(held) if row.get("closed") == "1")


def _rooms(held: str) -> list[dict[str, str]]:
    header, *lines = held.splitlines()
    columns = header.removeprefix("# ").split()
    return [dict(zip(columns, line.split(), strict=True)) for line in lines]


def servers(servers_state: str, found: Mapping[tuple[str, str], Traffic]) -> list[tuple[Server, int]]:
    """Servers of services' backends with their ids, ordered by backend and name."""
    _format, header, *lines = servers_state.splitlines()
    columns = {name: number for number, name in enumerate(header.removeprefix("# ").split())}
    wanted = ("be_name", "srv_name", "srv_addr", "srv_port", "srv_admin_state", "srv_op_state", "srv_id")
    weight_at = columns.get("srv_uweight")
    pick = operator.itemgetter(*(columns[name] for name in wanted))
    listed = []
    for line in lines:
        row = line.split()
        backend, name, ip, port, admin, operation, number = pick(row)
        if not backend.startswith(BACKEND_PREFIX) or name == HOLD_SERVER:
            continue
        seen = found.get((backend, name), _NOTHING)
        server = Server(
            backend=backend,
            name=name,
            address=f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}",
            state=_admin_state(int(admin)),
            up=int(operation) != _STOPPED,
            sessions=seen.sessions,
            queued=seen.queued,
            weight=1 if weight_at is None else int(row[weight_at]),
            answered=seen.answered,
            errors=seen.errors,
            is_asked=seen.is_asked,
        )
        listed.append((server, int(number)))
    return sorted(listed, key=lambda item: (item[0].backend, item[0].name))


def _admin_state(bits: int) -> ServerState:
    if bits & _MAINT_BITS:
        return ServerState.MAINT
    return ServerState.DRAIN if bits & _DRAIN_BITS else ServerState.READY


def refusal_of_version(version: str) -> str | None:
    """Why this HAProxy cannot be used, or None.

    Needed are `wait ... srv-removable` (3.0) and a `leastconn` that survives servers coming and going: from 3.2.6 on it
    hangs or aborts (haproxy issue 3360), until 3.2.17 and 3.4; which 3.3 has the fix is not known, so none is taken.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+)|-dev)?", version)
    if found is None:
        return f"its version {version!r} cannot be read; use HAProxy 3.0"
    major, minor, patch = int(found.group(1)), int(found.group(2)), int(found.group(3) or 0)
    if (major, minor) < (3, 0):
        return f"version {version} is older than 3.0 and cannot tell when a server may be deleted; use HAProxy 3.0"
    if (major, minor) == (3, 3) or ((major, minor) == (3, 2) and 6 <= patch <= 16):
        return (
            f"version {version} may abort when servers of a leastconn backend come and go (haproxy issue 3360); use 3.0"
        )
    return None

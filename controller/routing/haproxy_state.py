"""Parses the answers of HAProxy's runtime API. Pure; columns are found by name, because versions add and move them."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import RoutingError
from ..model.spec import socket_address, unix_address
from ..model.world import HeldRequests, RoutingState, Server, ServerState
from . import haproxy_keys
from .haproxy_text import BACKEND_PREFIX, HOLD_SERVER

QUESTIONS = (
    *("show info", "get var proc.pierhead_routing", haproxy_keys.ASK_DIGEST),
    *("show servers state", "show stat -1 6 -1", "show held"),
)
"""Commands whose answers `routing_state` takes, in its order. `-1 6 -1`: all backends (2) and servers (4).
`show held` is a command of haproxy/hold.lua."""

# srv_admin_state of "show servers state": forced by the runtime API, inherited, by resolution. 0x04 means only that the
# configuration file said `disabled`.
_MAINT_BITS = 0x01 | 0x02 | 0x20 | 0x40
_DRAIN_BITS = 0x08 | 0x10
_STOPPED = 0
_BACKEND_ROW = "BACKEND"
# check_status of "show stat": a check that only connects has passed; the prefix during the next check.
_CONNECTED = "L4OK"
_CHECK_GOES_ON = "* "
# Up to the last of these no column has a comma in it. More than half of the hundred columns come after it.
_STAT_COLUMNS = (
    *("pxname", "svname", "check_status", "scur", "qcur", "slim"),
    *("hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_5xx"),
)
_HOLDS_END = ("served", "expired", "left", "refused")


def routing_state(info: str, routing: str, keys: str, servers_state: str, stat: str, held: str) -> RoutingState:
    """One snapshot, made of the answers to QUESTIONS. Raises RoutingError when one of them cannot be read."""
    try:
        facts, found = info_facts(info), traffic(stat)
        rooms = _waiting_rooms(held)
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
            keys=haproxy_keys.digest_in(keys),
            servers=tuple(server for server, _ in servers(servers_state, found)),
            backends=frozenset(backends),
            queued=backends,
            held={
                row["backend"]: HeldRequests(int(row["held"]), **{end: int(row[end]) for end in _HOLDS_END})
                for row in rooms
            },
            closed=frozenset(row["backend"] for row in rooms if row["closed"] == "1"),
        )
    except (LookupError, ValueError) as error:
        raise RoutingError(
            f"HAProxy's answers cannot be read: {error!r}; is this really HAProxy 3.0 or newer?"
        ) from error


def info_facts(text: str) -> Mapping[str, str]:
    """`show info` as a mapping."""
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def variable(text: str) -> str:
    """Value that `get var` prints; "" when the variable is not set."""
    found = re.search(r"type=str value=<(.*)>", text)
    return found.group(1) if found else ""


def number(text: str) -> int:
    """Number that `get var` prints; 0 when the variable is not set."""
    found = re.search(r"type=sint value=<(\d+)>", text)
    return int(found.group(1)) if found else 0


class StatRow(NamedTuple):
    """A server's, or a backend's, row of `show stat`."""

    sessions: int = 0
    """In flight now."""
    queued: int = 0
    answered: int = 0
    """HTTP responses so far."""
    errors: int = 0
    """5xx among them."""
    is_asked: bool = True
    """False: the server's last check only opened a connection."""
    limit: int = 0
    """Requests that a server may have at a time; 0 = without a limit."""


def traffic(stat: str) -> Mapping[tuple[str, str], StatRow]:
    """`show stat` by (backend, server). The row of a backend itself has the server name BACKEND."""
    # Of a worker that is just ending the master gives an empty line, or an error.
    lines = [line for line in stat.removeprefix("# ").splitlines() if line]
    if len(lines) <= 1:
        return {}
    header, *rows = lines
    columns = {name: number for number, name in enumerate(header.split(","))}
    wanted = [columns[name] for name in _STAT_COLUMNS]
    pick, most = operator.itemgetter(*wanted), max(wanted) + 1
    found = {}
    for row in rows:
        backend, server, check, *numbers = pick(row.split(",", most))
        sessions, queued, limit, *responses = (int(number or 0) for number in numbers)
        is_asked = check.removeprefix(_CHECK_GOES_ON) != _CONNECTED
        found[backend, server] = StatRow(sessions, queued, sum(responses), responses[-1], is_asked, limit)
    return found


def _waiting_rooms(held: str) -> list[dict[str, str]]:
    header, *lines = held.splitlines()
    columns = header.removeprefix("# ").split()
    return [dict(zip(columns, line.split(), strict=True)) for line in lines]


def servers(servers_state: str, found: Mapping[tuple[str, str], StatRow]) -> list[tuple[Server, int]]:
    """Servers of services' backends with their ids, ordered by backend and name."""
    _format, header, *lines = servers_state.splitlines()
    columns = {name: number for number, name in enumerate(header.removeprefix("# ").split())}
    wanted = ("be_name", "srv_name", "srv_addr", "srv_port", "srv_admin_state", "srv_op_state", "srv_id", "srv_uweight")
    pick = operator.itemgetter(*(columns[name] for name in wanted))
    listed = []
    for line in lines:
        backend, name, ip, port, admin, operation, server_id, weight = pick(line.split())
        if not backend.startswith(BACKEND_PREFIX) or name == HOLD_SERVER:
            continue
        seen = found.get((backend, name), StatRow())
        server = Server(
            backend=backend,
            name=name,
            address=_address(backend, name, ip, int(port)),
            state=_admin_state(int(admin)),
            up=int(operation) != _STOPPED,
            weight=int(weight),
            **seen._asdict(),
        )
        listed.append((server, int(server_id)))
    return sorted(listed, key=lambda item: (item[0].backend, item[0].name))


def _address(backend: str, name: str, ip: str, port: int) -> str:
    """A server's address. HAProxy does not tell the path of a Unix socket, which follows from the names."""
    return unix_address(backend.removeprefix(BACKEND_PREFIX), name) if ip == "-" else socket_address(ip, port)


def _admin_state(bits: int) -> ServerState:
    if bits & _MAINT_BITS:
        return ServerState.MAINT
    return ServerState.DRAIN if bits & _DRAIN_BITS else ServerState.READY


def refusal_of_version(version: str) -> str | None:
    """Why this HAProxy cannot be used, or None.

    Needed are `wait ... srv-removable` (3.0) and a `leastconn` whose servers may come and go: from 3.2.6 on it hangs or
    aborts (haproxy issue 3360), until 3.2.17 and 3.4. Which 3.3 has the fix is not known, so no 3.3 is used.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+)|-dev)?", version)
    if found is None:
        return f"its version {version!r} cannot be read; use HAProxy 3.0"
    major, minor, patch = int(found.group(1)), int(found.group(2)), int(found.group(3) or 0)
    if (major, minor) < (3, 0):
        return f"version {version} is older than 3.0 and does not report when a server may be deleted; use HAProxy 3.0"
    if (major, minor) == (3, 3) or ((major, minor) == (3, 2) and 6 <= patch <= 16):
        return (
            f"version {version} may abort when servers of a leastconn backend come and go (haproxy issue 3360); use 3.0"
        )
    return None

"""What HAProxy's runtime API prints, as values. Pure; columns are found by name, since versions add and move them."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from typing import NamedTuple

from controller.errors import RoutingError
from controller.model import Held, RoutingState, Server, ServerState
from controller.routing.haproxy_config import BACKEND_PREFIX

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
        )
    except (KeyError, ValueError) as error:
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


def traffic(stat: str) -> Mapping[tuple[str, str], Traffic]:
    """`show stat` by (backend, server). A backend's own row goes by the server name BACKEND."""
    rows = csv.DictReader(stat.removeprefix("# ").splitlines())
    return {(row["pxname"], row["svname"]): _traffic(row) for row in rows}


def _traffic(row: Mapping[str, str]) -> Traffic:
    responses = [int(row.get(f"hrsp_{kind}xx") or 0) for kind in (1, 2, 3, 4, 5)]
    is_asked = (row.get("check_status") or "").removeprefix(_CHECK_GOES_ON) != _CONNECTED
    return Traffic(int(row["scur"] or 0), int(row["qcur"] or 0), sum(responses), responses[-1], is_asked)


def holds(held: str) -> Mapping[str, Held]:
    """`show held` by backend."""
    header, *lines = held.splitlines()
    columns = header.removeprefix("# ").split()
    found = {}
    for line in lines:
        row = dict(zip(columns, line.split(), strict=True))
        endings = {ending: int(row[ending]) for ending in ("served", "expired", "left", "refused")}
        found[row["backend"]] = Held(now=int(row["held"]), **endings)
    return found


def servers(servers_state: str, found: Mapping[tuple[str, str], Traffic]) -> list[tuple[Server, int]]:
    """Servers of services' backends with their ids, ordered by backend and name."""
    _format, header, *lines = servers_state.splitlines()
    columns = header.removeprefix("# ").split()
    listed = []
    for line in lines:
        row = dict(zip(columns, line.split(), strict=False))
        if row["be_name"].startswith(BACKEND_PREFIX):
            listed.append((_server(row, found), int(row["srv_id"])))
    return sorted(listed, key=lambda item: (item[0].backend, item[0].name))


def _server(row: Mapping[str, str], found: Mapping[tuple[str, str], Traffic]) -> Server:
    seen = found.get((row["be_name"], row["srv_name"]), Traffic())
    admin = int(row["srv_admin_state"])
    address = f"[{row['srv_addr']}]" if ":" in row["srv_addr"] else row["srv_addr"]
    return Server(
        backend=row["be_name"],
        name=row["srv_name"],
        address=f"{address}:{row['srv_port']}",
        state=_admin_state(admin),
        up=int(row["srv_op_state"]) != _STOPPED,
        sessions=seen.sessions,
        queued=seen.queued,
        weight=int(row.get("srv_uweight", 1)),
        answered=seen.answered,
        errors=seen.errors,
        is_asked=seen.is_asked,
    )


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

"""HAProxy's configuration as a text that exists: its hash, the lines of its servers, and what may stand in it. Pure.

`haproxy_config.py` renders the text from services; this module needs no template, so that HAProxy's own machine can use
it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import RoutingError
from ..model.spec import ADMIN_SUFFIX, SOCKETS, backend_name
from ..model.text import whole_number

BACKEND_PREFIX = backend_name("")

SERVICE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,62})")
# Every name that HAProxy accepts: an unusual name of a server that an operator added must not block the others.
_SERVER = re.compile(r"[A-Za-z0-9_.:-]+")
_UNIX = re.compile(rf"unix:{SOCKETS}/[a-z0-9-]+/[a-z0-9-]+")
HASH_LINE = re.compile(r"^    set-var proc\.pierhead_routing str\(([0-9a-f]*)\)$", re.MULTILINE)
_EPOCH_LINE = re.compile(r"^    set-var proc\.pierhead_epoch int\((\d+)\)$", re.MULTILINE)
_SERVERS_MARK = "    # servers: "
_SERVER_LINE = "    server "
DIGEST, NONE = "[0-9a-f]{16}", "none"
"""How directories of the operator's files are called; there never is one of the second name."""
SECRETS = "/run/secrets"
"""Where the HAProxy of one of many nodes has the operator's files, in the directories `tls` and `jwt`."""
HOLD_SERVER = "hold"
"""The server of each service's backend that leads into the waiting room (haproxy.cfg.j2)."""


@dataclass(frozen=True, slots=True)
class ServerLine:
    """One server in the file; its options are those of its backend."""

    backend: str
    name: str
    address: str
    id: int
    disabled: bool = False
    limit: int = 0
    """Requests that it may have at a time (maxconn), where that is not its backend's number; 0 = it is."""


def hash_of(config: str) -> str:
    """The hash in a configuration; "" when it has none."""
    found = HASH_LINE.search(config)
    return found.group(1) if found else ""


def epoch_of(config: str) -> int:
    """The epoch in a configuration; 0 when it has none."""
    found = _EPOCH_LINE.search(config)
    return int(found.group(1)) if found else 0


def with_epoch(config: str, epoch: int) -> str:
    """The configuration with this epoch, if it has a line for it."""
    return _EPOCH_LINE.sub(f"    set-var proc.pierhead_epoch int({epoch})", config)


def with_servers(config: str, servers: Iterable[ServerLine]) -> str:
    """The configuration with exactly these servers, except servers of backends that it does not have."""
    wanted: dict[str, list[ServerLine]] = {}
    for server in servers:
        wanted.setdefault(server.backend, []).append(server)
    lines: list[str] = []
    backend = ""
    for line in config.splitlines():
        is_replica = line.startswith(_SERVER_LINE) and line.split()[1] != HOLD_SERVER
        if is_replica and backend.startswith(BACKEND_PREFIX):
            continue
        lines.append(line)
        if line.startswith("backend "):
            backend = line.split()[1]
        elif line.startswith(_SERVERS_MARK):
            options = line.removeprefix(_SERVERS_MARK)
            lines += [_server_line(server, options) for server in sorted(wanted.get(backend, ()), key=lambda s: s.id)]
    return "\n".join(lines) + "\n"


def checked_server_name(name: str) -> str:
    """The name, or RoutingError when HAProxy could misread it."""
    return matching(_SERVER, name, "server name")


def checked_backend(name: str) -> str:
    """The backend's name, or RoutingError when it is not a service's backend."""
    if not name.startswith(BACKEND_PREFIX):
        raise RoutingError(f"{name!r} is no backend of a service: expected a name that starts with {BACKEND_PREFIX!r}")
    matching(SERVICE, name.removeprefix(BACKEND_PREFIX), "backend")
    return name


def checked_address(address: str) -> str:
    """`ip:port` (IPv6 in brackets) or `unix:<path>`, or RoutingError: HAProxy resolves no names of servers added at run
    time.
    """
    if address.startswith("unix:"):
        return matching(_UNIX, address, "server address")
    host, _, port = address.rpartition(":")
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        host = ""
    if not host or not 0 < (whole_number(port) or 0) < 65536:
        raise RoutingError(f"server address {address!r}: expected <IP address>:<port>")
    return address


def server_words(address: str, number: int, options: Iterable[str]) -> tuple[str, ...]:
    """The words of a server after its name: its address, its id, and the options of its backend.

    A check of a replica's port of requests, or of its admin port, goes to the socket in that port's place.
    """
    address, words = checked_address(address), list(options)
    if address.startswith("unix:"):
        address = address.replace("unix:", "unix@", 1)
        if "port" in words:
            at = words.index("port")
            words[at : at + 2] = ["addr", address + ADMIN_SUFFIX]
    return (address, "id", str(number), *words)


def _server_line(server: ServerLine, options: str) -> str:
    name = checked_server_name(server.name)
    if server.limit:
        options = re.sub(r"\bmaxconn \d+", f"maxconn {server.limit}", options)
    words = " ".join(server_words(server.address, server.id, options.split()))
    return f"{_SERVER_LINE}{name} {words}{' disabled' if server.disabled else ''}"


def matching(pattern: re.Pattern[str], value: str, what: str) -> str:
    """The value, or RoutingError when it does not match."""
    if not pattern.fullmatch(value):
        raise RoutingError(
            f"{what} {value!r} may not be put into HAProxy's configuration: it must match {pattern.pattern}"
        )
    return value

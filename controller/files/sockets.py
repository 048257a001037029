"""Reads `x-serve.listen`, and gives a replica its directory of sockets and those of its callees. Pure.

controller/engines/sockets.py says what the directories are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from pierhead.serve_block import ServeBlock

from ..model.spec import LISTEN, SOCKETS, SOCKETS_VOLUME
from .attachments import with_volume
from .definition import ADMIN_PORT
from .problems import Problems, ServiceSource, at
from .stack_options import StackOptions

STACK_VARIABLE = "PIERHEAD_LISTEN"
"""`tcp`: no service listens at a socket."""


def stack_has_sockets(stack: StackOptions, volumes: Collection[str]) -> bool:
    """Whether services may listen at sockets at all. `volumes`: the names in the top-level section."""
    written = str(stack.get(STACK_VARIABLE) or "socket")
    if written not in ("socket", "tcp"):
        stack.expected(STACK_VARIABLE, "socket or tcp", written)
    return SOCKETS_VOLUME in volumes and written == "socket"


class StackSockets(NamedTuple):
    """What of the whole stack decides on the sockets of a service."""

    are_used: bool
    services: frozenset[str]
    """Those with x-serve."""


@dataclass(frozen=True, slots=True)
class ServiceSockets:
    """The sockets that the replicas of one service have."""

    listens: bool = False
    """Whether they listen at sockets of their own."""
    callees: tuple[str, ...] = ()
    """The services to whose sockets they can connect."""


def service_sockets(
    path: str, block: ServeBlock, depends_on: Collection[str], of_stack: StackSockets, problems: Problems
) -> ServiceSockets:
    """The sockets of a service. `path` is the block's path."""
    if "listen" in block.written and not block.is_managed:
        problems.add(
            at(path, "listen"),
            "has no effect on an image that is not built on Pierhead's runtime (managed: false): its own program "
            "decides where it listens; remove it",
        )
    if not (of_stack.are_used and block.is_managed):
        return ServiceSockets()
    is_asked_there = block.health.probe.port in (None, ADMIN_PORT)
    if "listen" in block.written and block.listen == "socket" and not is_asked_there:
        problems.add(
            at(path, "listen"),
            f"expected tcp, as health.probe.port is {block.health.probe.port}: a program that is asked at a port of "
            "its own takes requests at a port, too; found socket",
        )
    callees = sorted(of_stack.services & set(depends_on))
    return ServiceSockets(block.listen == "socket" and is_asked_there, tuple(callees))


def with_sockets(source: ServiceSource, sockets: ServiceSockets) -> ServiceSource:
    """The service with the directories of its sockets among its volumes."""
    mounts: list[dict[str, Any]] = [
        {"target": f"{SOCKETS}/{name}", "read_only": True, "volume": {"nocopy": True, "subpath": name}}
        for name in sockets.callees
    ]
    if sockets.listens:
        mounts.append({"target": LISTEN, "volume": {"nocopy": True, "subpath": f".listen/{source.name}"}})
    return with_volume(source, SOCKETS_VOLUME, mounts)

"""`exec`: a command inside a replica."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BadInput
from .options import OfReplica, Service, connect

if TYPE_CHECKING:
    from ...status.records.services import ReplicaStatus
    from ...status.records.services import Service as ServiceRow

Words = Annotated[list[str] | None, typer.Argument(metavar="[COMMAND ...]", help="a shell, if it is left out")]


def register(app: typer.Typer) -> None:
    """Add this command. Options after the service belong to the command that runs in the replica."""
    app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(exec_)


def exec_(service: Service, command: Words = None, replica: OfReplica = "") -> None:
    """Run a command in a container of a service, a shell by default.

    In a ready replica, if there is one. Options of `exec` stand before the service.
    """
    from ..project.programs import Programs

    chosen = _replica(connect().service(service), replica)
    if chosen.node:
        there = f"docker exec -it $(docker ps -q --filter name={chosen.name}) sh"
        raise BadInput(f"{chosen.name} runs on the node {chosen.node}; there, type: {there}")
    keeps = ("--interactive", "--tty") if sys.stdin.isatty() and sys.stdout.isatty() else ("--interactive",)
    given = command[1:] if command and command[0] == "--" else command
    try:
        Programs().become("docker", "exec", *keeps, chosen.name, *(given or ["sh"]), variables={}, directory=None)
    except OSError as error:
        raise BadInput(f"exec needs the program docker on this machine: {error.strerror}") from None


def _replica(row: ServiceRow, name: str) -> ReplicaStatus:
    """The replica of that name; without a name the first ready one, else the first. Raises BadInput."""
    placed = [each for each in row.replicas if each.address and name in ("", each.name)]
    if not placed:
        known = ", ".join(each.name for each in row.replicas if each.address)
        raise BadInput(
            f"{row.name} has no replica {name} now; it has {known}"
            if name and known
            else f"{row.name} has no running replica now; `pierhead why {row.name}` says why"
        )
    return next((each for each in placed if each.state == "RUNNING"), placed[0])

"""Which containers run the controller's daemon, whatever started them: Compose, `docker compose run`, `docker run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import docker.errors

from controller.engines.base import RunningController
from controller.engines.docker_reader import timestamp

if TYPE_CHECKING:
    from docker import APIClient

LABEL = "pierhead.role=controller"
"""What the controller's image says of itself, and every container made from it."""
PROJECT_VARIABLE = "COMPOSE_PROJECT_NAME"
_DAEMON = ["-m", "controller"]


def running_controllers(client: APIClient, project: str) -> tuple[RunningController, ...]:
    """Ask the engine; blocking. Raises what docker-py raises."""
    found = []
    for summary in client.containers(filters={"label": LABEL, "status": ["running", "paused"]}):
        try:
            container = client.inspect_container(summary["Id"])
        except docker.errors.NotFound:  # it ended between the two calls
            continue
        one = _controller(container, project)
        if one is not None:
            found.append(one)
    return tuple(sorted(found, key=lambda one: (one.started_at, one.id)))


def _controller(container: Mapping[str, Any], project: str) -> RunningController | None:
    """None for the image's other uses: its command line, the probe for GPUs, another project's controller."""
    environment = (container.get("Config") or {}).get("Env") or ()
    runs_daemon = list(container.get("Args") or ())[-2:] == _DAEMON
    if not runs_daemon or f"{PROJECT_VARIABLE}={project}" not in environment:
        return None
    started_at = timestamp(container["State"]["StartedAt"])
    name = str(container["Name"]).removeprefix("/")
    return None if started_at is None else RunningController(container["Id"], name, started_at)

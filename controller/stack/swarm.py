"""What the stack needs of a manager's API: services, tasks, networks, secrets, configs. Blocking."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import docker.errors
from docker import APIClient

from ..errors import EngineError
from .secrets import AUTHORITY_LABEL, CA, PROJECT_LABEL, Kept, Set, read

STACK_LABEL = "com.docker.stack.namespace"
LOOK_S = 0.3
Json = Mapping[str, Any]
ENDED = ("complete", "failed", "rejected", "shutdown", "orphaned", "remove")


class Swarm:
    """The Swarm that an engine manages."""

    def __init__(self, client: APIClient, project: str) -> None:
        self.client = client
        self.project = project

    # ---------------------------------------------------------------------------------------------------- services

    def stack(self) -> list[Json]:
        """The services of `docker stack deploy`."""
        return self._services(f"{STACK_LABEL}={self.project}")

    def replicas(self) -> list[Json]:
        """The services that the controller made."""
        return self._services(f"{PROJECT_LABEL}={self.project}")

    def service(self, name: str) -> Json | None:
        """One service of the stack."""
        return next((one for one in self.stack() if one["Spec"]["Name"] == f"{self.project}_{name}"), None)

    def remove_services(self, services: Iterable[Json]) -> None:
        """Remove services, if they are still there."""
        for service in services:
            with contextlib.suppress(docker.errors.NotFound):
                self.client.remove_service(service["ID"])  # type: ignore[no-untyped-call]

    def left(self, services: Iterable[Json]) -> list[str]:
        """The tasks of these services, removed or not, whose containers may still be on a node that can be reached."""
        ids = {service["ID"] for service in services}
        down = {node["ID"] for node in self.client.nodes() if node["Status"]["State"] == "down"}
        tasks = self.client.tasks()  # type: ignore[no-untyped-call]
        return [
            str(task["ID"])
            for task in tasks
            if task["ServiceID"] in ids and task.get("NodeID") not in down and task["Status"]["State"] not in ENDED
        ]

    def is_rolled_out(self) -> bool:
        """Whether no service of the stack is being updated."""
        return all((one.get("UpdateStatus") or {}).get("State") in (None, "completed") for one in self.stack())

    def _services(self, label: str) -> list[Json]:
        return list(self.client.services({"label": label}))  # type: ignore[no-untyped-call]

    # ---------------------------------------------------------------------------------------------------- networks

    def make_network(self, name: str, definition: Json) -> None:
        """Make an overlay network that replicas can be attached to, unless there is one."""
        if any(one["Name"] == name for one in self.client.networks(names=[name])):
            return
        self.client.create_network(
            name,
            driver="overlay",
            attachable=True,
            scope="swarm",
            internal=bool(definition.get("internal")),
            options=dict(definition.get("driver_opts") or {}),
            labels={STACK_LABEL: self.project},
        )

    def networks(self) -> list[Json]:
        """The stack's networks."""
        return list(self.client.networks(filters={"label": f"{STACK_LABEL}={self.project}"}))

    # --------------------------------------------------------------------------------------------- secrets, configs

    def kept(self, kind: str) -> dict[str, Kept]:
        """By name, the secrets or configs of the stack."""
        return read(getattr(self.client, kind)({"label": f"{PROJECT_LABEL}={self.project}"}))

    def used_secrets(self) -> Set:
        """By key, the certificates that controller and edges have; incomplete where there is no running stack."""
        known, used = self.kept("secrets"), dict[str, Kept]()
        bundles = set()
        for name in ("haproxy", "controller"):
            service = self.service(name)
            container = service["Spec"]["TaskTemplate"]["ContainerSpec"] if service else {}
            for one in container.get("Secrets") or ():
                key = one["File"]["Name"].rpartition("/")[2]
                if one["SecretName"] in known:
                    used[key] = known[one["SecretName"]]
                if key == CA:
                    bundles.add(one["SecretName"])
        return {key: one for key, one in used.items() if key != CA or len(bundles) == 1}

    def keep(self, kind: str, wanted: Iterable[Kept]) -> None:
        """Create what is not there yet."""
        there = self.kept(kind)
        create = self.client.create_secret if kind == "secrets" else self.client.create_config
        for one in wanted:
            if one.name not in there and one.data is not None:
                create(one.name, one.data, dict(one.labels))

    def drop_certificates(self, but: Set) -> None:
        """Remove the certificates of earlier stacks."""
        had = {name for name, one in self.kept("secrets").items() if AUTHORITY_LABEL in one.labels}
        self.drop("secrets", had - {one.name for one in but.values()})

    def drop(self, kind: str, names: Iterable[str]) -> None:
        """Remove those that no service uses."""
        remove = self.client.remove_secret if kind == "secrets" else self.client.remove_config
        for name in names:
            with contextlib.suppress(docker.errors.APIError):  # it is in use, or gone
                remove(name)


def wait(condition: Callable[[], bool], what: str, within_s: float) -> None:
    """Look until the condition holds. Raises EngineError."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise EngineError(f"{what}: not after {within_s:g} s; `docker service ls` and `docker node ls` may say why")
        time.sleep(LOOK_S)

"""What the stack needs of a manager's API: services, tasks, networks, secrets, configs. Blocking."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import docker.errors
from docker import APIClient
from docker.types import IPAMConfig, IPAMPool

from ...errors import EngineError
from ..names import STACK_LABEL, Json, node_name
from .secrets import CA, OWN_LABEL, PROJECT_LABEL, ROLES, Kept, Set, read

LOOK_S = 0.3


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
        """The tasks of these services, removed or not, that Swarm still has; not those of a node that is down."""
        ids = {service["ID"] for service in services}
        down = {node["ID"] for node in self.client.nodes() if node["Status"]["State"] == "down"}
        tasks = self.client.tasks()  # type: ignore[no-untyped-call]
        return [str(task["ID"]) for task in tasks if task["ServiceID"] in ids and task.get("NodeID") not in down]

    def runs(self, *names: str) -> bool:
        """Whether these services run everywhere in their last version. Raises EngineError for one that cannot."""
        return all(self._runs(self.service(name)) for name in names)

    def _runs(self, service: Json | None) -> bool:
        if service is None:
            return False
        name, update = service["Spec"]["Name"], service.get("UpdateStatus") or {}
        if update.get("State") == "paused":
            raise EngineError(f"{name}: {update.get('Message')}; `docker service ps --no-trunc {name}` says why")
        # During an update Swarm counts a node's new task only when the former one has ended.
        if update.get("State") == "updating":
            return False
        tasks = self._tasks(name, "running")
        new = [task for task in tasks if {**task["Spec"], "Runtime": "container"} == service["Spec"]["TaskTemplate"]]
        up = [task for task in new if task["Status"]["State"] == "running"]
        return len(up) == len(tasks) >= int(service["ServiceStatus"]["DesiredTasks"]) > 0

    def trouble(self) -> str:
        """What Swarm says about tasks of the stack that do not run, of services that lack some."""
        nodes = {node["ID"]: node_name(node) for node in self.client.nodes()}
        found = {
            f"{one['Spec']['Name']} on {nodes.get(task.get('NodeID'), 'no node')}: {task['Status']['Err']}"
            for one in self.stack()
            if one["ServiceStatus"]["RunningTasks"] < one["ServiceStatus"]["DesiredTasks"]
            for task in self._tasks(one["Spec"]["Name"])
            if task["Status"].get("Err")
        }
        return "; ".join(sorted(found))

    def _tasks(self, service: str, desired: str = "") -> list[Json]:
        filters = {"service": service} | ({"desired-state": desired} if desired else {})
        return list(self.client.tasks(filters))  # type: ignore[no-untyped-call]

    def _services(self, label: str) -> list[Json]:
        return list(self.client.services({"label": label}, status=True))  # type: ignore[no-untyped-call]

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
            ipam=addresses(definition),
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
            for key, secret in self.secrets_of(name).items():
                if key in (CA, *ROLES) and secret in known:
                    used[key] = known[secret]
                if key == CA:
                    bundles.add(secret)
        return {key: one for key, one in used.items() if key != CA or len(bundles) == 1}

    def secrets_of(self, name: str) -> dict[str, str]:
        """The names in Swarm of a service's secrets, by their files in the container's directory of secrets."""
        service = self.service(name)
        container = service["Spec"]["TaskTemplate"]["ContainerSpec"] if service else {}
        of_it = container.get("Secrets") or ()
        return {one["File"]["Name"].removeprefix("/run/secrets/"): one["SecretName"] for one in of_it}

    def keep(self, kind: str, wanted: Iterable[Kept]) -> None:
        """Create what is not there yet."""
        there = self.kept(kind)
        create = self.client.create_secret if kind == "secrets" else self.client.create_config
        for one in {one.name: one for one in wanted}.values():
            if one.name not in there and one.data is not None:
                create(one.name, one.data, dict(one.labels))

    def drop_own(self, but: Set) -> None:
        """Remove the stack's own former secrets; those of the compose files stay, as old versions may come back."""
        had = {name for name, one in self.kept("secrets").items() if OWN_LABEL in one.labels}
        self.drop("secrets", had - {one.name for one in but.values()})

    def drop(self, kind: str, names: Iterable[str]) -> None:
        """Remove those that no service uses."""
        remove = self.client.remove_secret if kind == "secrets" else self.client.remove_config
        for name in names:
            with contextlib.suppress(docker.errors.APIError):  # it is in use, or gone
                remove(name)


def addresses(definition: Json) -> IPAMConfig | None:
    """The subnets that the compose files name for a network; None = Swarm chooses one of its address pool."""
    subnets = [one["subnet"] for one in (definition.get("ipam") or {}).get("config") or () if "subnet" in one]
    pools = [IPAMPool(subnet=subnet) for subnet in subnets]
    return IPAMConfig(pool_configs=pools) if pools else None


def wait(condition: Callable[[], bool], what: str, within_s: float, why: Callable[[], str] = str) -> None:
    """Look until the condition holds. Raises EngineError, with the reason that is known."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            told = why() or "`docker service ls` and `docker node ls` may say why"
            raise EngineError(f"{what}: not after {within_s:g} s; {told}")
        time.sleep(LOOK_S)

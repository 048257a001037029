"""The resolved compose files -> the file for `docker stack deploy`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import SpecError
from ...files.problems import Problems, ServiceSource
from ..files.dialect import SWARM
from .services import stack_service

Json = dict[str, Any]
LOGINS = "logins"
"""Key of the secret with which the controller makes services whose images are in a private registry."""
SECTIONS = ("networks", "volumes", "secrets", "configs")


@dataclass(frozen=True, slots=True)
class Given:
    """What the file needs besides the compose files."""

    clone: str
    """Directory of the clone."""
    profiles: Collection[str]
    """COMPOSE_PROFILES; services of other profiles are left out."""
    images: Mapping[str, str]
    """By service, the image's name with its digest."""
    secrets: Mapping[str, str]
    """By key of the section secrets, the names in Swarm of the stack's own; those of the operator's files by path."""
    token: str = ""
    """For the controller's API."""
    registry_node: str = ""
    """The id of the node that has the stack's own registry."""
    https_port: int = 0
    """At which each node takes HTTPS; 0 = clients come without TLS."""


def services_of(config: Mapping[str, Any], profiles: Collection[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The services that are part of the stack: those without x-serve, of the chosen profiles."""
    for name, definition in (config.get("services") or {}).items():
        chosen = not definition.get("profiles") or {"*", *definition["profiles"]} & set(profiles)
        if "x-serve" not in definition and chosen:
            yield name, definition


def stack_file(config: Mapping[str, Any], given: Given) -> Json:
    """The file's content. Raises SpecError with every problem."""
    project = str(config["name"])
    sections = {key: config.get(key) or {} for key in SECTIONS}
    problems, services = Problems(), dict[str, Any]()
    for name, definition in services_of(config, given.profiles):
        source = ServiceSource(project, name, definition, sections, dialect=SWARM)
        services[name] = stack_service(source, given.images.get(name, ""), given.clone, problems)
    if problems.lines:
        raise SpecError(problems.lines)
    _complete(services, given)
    secrets = {**given.secrets, **{name: name for name in given.secrets.values()}}
    used = {kind: {item["source"] for one in services.values() for item in one.get(kind, ())} for kind in SECTIONS[2:]}
    networks = {name for one in services.values() for name in one["networks"]}
    volumes = {item.get("source") for one in services.values() for item in one.get("volumes", ())}
    return {
        "services": services,
        "networks": {name: {"external": True, "name": network_name(config, name)} for name in sorted(networks)},
        "volumes": {name: _volume(value) for name, value in sections["volumes"].items() if name in volumes},
        **{
            kind: {key: _there(sections[kind].get(key), secrets.get(key)) for key in sorted(used[kind])}
            for kind in ("secrets", "configs")
        },
    }


def network_name(config: Mapping[str, Any], key: str) -> str:
    """The name in Swarm of a network of the files."""
    definition = (config.get("networks") or {}).get(key) or {}
    return str(definition.get("name") or f"{config['name']}_{key}")


def _complete(services: Json, given: Given) -> None:
    if "controller" in services:
        services["controller"]["environment"]["PIERHEAD_API_TOKEN"] = given.token
        if LOGINS in given.secrets:
            login = {"source": LOGINS, "target": "/root/.docker/config.json", "mode": 0o400}
            services["controller"]["secrets"].append(login)
    # The controller as well: it tells when certificates end, and names the public keys in the routes.
    files = [{"source": name, "target": key, "mode": 0o400} for key, name in given.secrets.items() if "/" in key]
    for name in {"controller", "haproxy"} & services.keys() if files else ():
        services[name]["secrets"] += files
    if "haproxy" in services and given.https_port:
        https = {"target": 8443, "published": given.https_port, "mode": "host", "protocol": "tcp"}
        services["haproxy"]["ports"].append(https)
    if "registry" in services:
        services["registry"]["deploy"]["placement"] = {"constraints": [f"node.id == {given.registry_node}"]}


def _there(definition: Mapping[str, Any] | None, name: str | None) -> Json:
    """A secret or config that is in Swarm before the stack is deployed (controller/swarm/files/places.py)."""
    return {"external": True, "name": name or (definition or {})["name"]}


def _volume(value: Any) -> Json:
    kept = {key: item for key, item in (value or {}).items() if key in ("name", "driver", "driver_opts", "labels")}
    return kept | ({"external": True} if (value or {}).get("external") else {})

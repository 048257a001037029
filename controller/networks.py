"""The networks of a Compose service -> the engine's endpoints of a replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.problems import Problems, at
from controller.service_source import ServiceSource

_NETWORK_KEYS = frozenset({"aliases", "driver_opts", "priority"})


def add_networks(source: ServiceSource, body: dict[str, Any], problems: Problems) -> None:
    """Connect to every network of the service, under its service name; the first one is where replicas are reached."""
    path = at(source.path, "networks")
    joined = source.definition.get("networks")
    if isinstance(joined, list):
        joined = dict.fromkeys((name for name in joined if isinstance(name, str)), None)
    attachments: Mapping[str, Any] = problems.mapping(path, joined) or {"default": None}
    if any(not isinstance(name, str) for name in attachments):
        problems.expected(path, "names of networks", joined)
        return
    endpoints: dict[str, Any] = {}
    for name in attachments:
        engine_name = _engine_network(source, path, name, problems)
        endpoints[engine_name] = _endpoint(source, at(path, name), attachments[name], problems)
    first = _primary_network(source, path, attachments, problems)
    body["NetworkingConfig"] = {"EndpointsConfig": endpoints}
    body.setdefault("HostConfig", {})["NetworkMode"] = _engine_network(source, path, first, Problems())


def _engine_network(source: ServiceSource, path: str, name: str, problems: Problems) -> str:
    networks = source.sections.get("networks", {})
    if name not in networks and name != "default":
        problems.add(at(path, name), "no such network in the top-level networks section")
    definition = networks.get(name)
    engine_name = definition.get("name") if isinstance(definition, Mapping) else None
    return engine_name if isinstance(engine_name, str) and engine_name else f"{source.project}_{name}"


def _endpoint(source: ServiceSource, path: str, value: Any, problems: Problems) -> dict[str, Any]:
    options = problems.mapping(path, value)
    for key in options:
        if key not in _NETWORK_KEYS:
            problems.add(at(path, str(key)), "not possible with x-serve: it fits one container only; remove it")
    aliases = problems.texts(at(path, "aliases"), options.get("aliases") or []) or []
    endpoint: dict[str, Any] = {"Aliases": list(dict.fromkeys([source.name, *aliases]))}
    if options.get("driver_opts"):
        endpoint["DriverOpts"] = problems.text_map(at(path, "driver_opts"), options["driver_opts"])
    return endpoint


def _primary_network(source: ServiceSource, path: str, attachments: Mapping[str, Any], problems: Problems) -> str:
    """The network whose address counts: one that the controller is on too; by Compose's priority, then by name."""

    def rank(name: str) -> tuple[int, str]:
        options = attachments[name]
        priority = options.get("priority") if isinstance(options, Mapping) else None
        return -(priority if isinstance(priority, int) else 0), name

    ranked = sorted(attachments, key=rank)
    if source.control_networks is None:
        return ranked[0]
    shared = [name for name in ranked if name in source.control_networks]
    if not shared:
        control = ", ".join(sorted(source.control_networks))
        problems.add(
            path, f"the controller and HAProxy are on none of these and would not reach it; add one of: {control}"
        )
        return ranked[0]
    return shared[0]

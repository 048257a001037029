"""A Compose service without x-serve -> the same service in a file for `docker stack deploy`. Pure.

Input is what `docker compose config` printed. A key that would get lost on the way is a problem that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...files.problems import Problems, ServiceSource, at
from ..files.checks import NOT_ON_SWARM, check_swarm
from .settings import CLONE_LABEL

OWN = ("haproxy", "controller", "prometheus", "registry", "alertmanager")
"""The services of compose/swarm.yaml."""

Json = dict[str, Any]

KEPT = frozenset(
    {
        *("cap_add", "cap_drop", "command", "dns", "dns_search", "entrypoint", "healthcheck", "hostname", "init"),
        *("labels", "logging", "read_only", "stdin_open", "stop_grace_period", "stop_signal", "sysctls", "tty"),
        *("ulimits", "user", "working_dir"),
    }
)
IGNORED = frozenset(
    {
        *("attach", "build", "depends_on", "develop", "env_file", "expose", "extends", "image", "label_file"),
        *("networks", "profiles", "pull_policy", "scale", "deploy", "restart", "shm_size", "tmpfs", "volumes"),
    }
)
"""Without a meaning on a Swarm (it starts everything at once, and again what ended), or read elsewhere."""
REFUSED: Mapping[str, str] = {
    "container_name": "remove it (others reach it by the service's name)",
    "dns_opt": "write the option into daemon.json of the nodes",
    "external_links": "remove it (services find each other by name)",
    "gpus": "write x-serve, whose replicas get GPUs, or deploy.resources.reservations.generic_resources",
    "group_add": "write user with a group",
    "links": "remove it (services find each other by name)",
    "mac_address": "remove it",
    "network_mode": "remove it, and write networks",
    "platform": "remove it, and write deploy.placement.constraints: [node.platform.arch == ...]",
    "security_opt": "remove it",
    "volumes_from": "write volumes",
}
_NO_KEY = "`docker stack deploy` has no such key; remove it"
_MOUNT_OPTIONS: Mapping[str, frozenset[str]] = {
    "bind": frozenset({"create_host_path", "propagation", "selinux"}),
    "tmpfs": frozenset({"size"}),
    "volume": frozenset({"nocopy", "subpath"}),
}
"""The options of each kind of mount that are kept, need nothing, or are refused by `check_swarm`."""
_RESTART = {"always": "any", "unless-stopped": "any", "on-failure": "on-failure", "no": "none"}


def stack_service(source: ServiceSource, image: str, clone: str, problems: Problems) -> Json:
    """The service in the stack's file. `image`: its name with a digest; `clone`: see CLONE_LABEL."""
    check_swarm(source, None, None, problems)
    made: Json = {"image": image, "deploy": _deploy(source, clone, problems)}
    for key, value in source.definition.items():
        path = at(source.path, str(key))
        if key in REFUSED:
            problems.add(path, f"not possible on a Swarm: {REFUSED[key]}")
        elif key in KEPT:
            made[key] = value
        elif key in _CHANGED:
            made |= _CHANGED[key](source, path, value, problems)
        elif (
            key not in IGNORED and key not in NOT_ON_SWARM and key not in _INTO_DEPLOY and not str(key).startswith("x-")
        ):
            problems.add(path, _NO_KEY)
    made["networks"] = _networks(source, problems)
    mounts = [*_volumes(source, clone, problems), *_tmpfs(source, problems)]
    return made | ({"volumes": mounts} if mounts else {})


# ------------------------------------------------------------------------------------------------------- deploy


def _deploy(source: ServiceSource, clone: str, problems: Problems) -> Json:
    definition, path = source.definition, at(source.path, "deploy")
    deploy: Json = dict(problems.mapping(path, definition.get("deploy")))
    if "scale" in definition:
        deploy.setdefault("replicas", definition["scale"])
    if "restart" in definition:
        condition = _RESTART.get(str(definition["restart"]).partition(":")[0], "any")
        deploy.setdefault("restart_policy", {"condition": condition})
    deploy["labels"] = {**(problems.text_map(at(path, "labels"), deploy.get("labels")) or {}), CLONE_LABEL: clone}
    if deploy.setdefault("endpoint_mode", "dnsrr") != "dnsrr":
        problems.expected(
            at(path, "endpoint_mode"), "dnsrr (a virtual address needs IPVS in the kernel)", deploy["endpoint_mode"]
        )
    resources = {key: dict(value) for key, value in (deploy.get("resources") or {}).items()}
    if "devices" in resources.get("reservations", {}):
        problems.add(at(path, "resources.reservations.devices"), f"not possible on a Swarm: {REFUSED['gpus']}")
    for key, (kind, name) in _INTO_DEPLOY.items():
        if definition.get(key) is not None:
            resources.setdefault(kind, {}).setdefault(name, definition[key])
    for limit in resources.values():
        limit |= {key: str(limit[key]) for key in ("cpus", "memory") if key in limit}
    return deploy | ({"resources": resources} if resources else {})


_INTO_DEPLOY: Mapping[str, tuple[str, str]] = {
    "cpus": ("limits", "cpus"),
    "mem_limit": ("limits", "memory"),
    "mem_reservation": ("reservations", "memory"),
    "pids_limit": ("limits", "pids"),
}

# ------------------------------------------------------------------------------------------------ networks and ports


def _networks(source: ServiceSource, problems: Problems) -> Json:
    path = at(source.path, "networks")
    joined = problems.mapping(path, source.definition.get("networks")) or {"default": None}
    made: Json = {}
    for name, value in joined.items():
        options = problems.mapping(at(path, name), value)
        for key in options:
            if key not in ("aliases", "priority"):
                problems.add(at(at(path, name), key), "not possible on a Swarm: remove it")
        made[name] = {"aliases": options["aliases"]} if options.get("aliases") else None
    return made


def _ports(source: ServiceSource, path: str, value: Any, problems: Problems) -> Json:
    """Ports of the node that the task runs on: Compose writes ingress where nothing is said."""
    made = []
    for item_path, item in problems.items(path, value):
        if item.get("host_ip"):
            problems.add(at(item_path, "host_ip"), "not possible on a Swarm: remove it (all addresses have the port)")
        if not str(item.get("published", "")).isdecimal():
            problems.expected(at(item_path, "published"), "one port", item.get("published"))
            continue
        port = {"target": item["target"], "published": int(item["published"]), "mode": "host"}
        made.append(port | {"protocol": item.get("protocol", "tcp")})
    return {"ports": made}


def _extra_hosts(source: ServiceSource, path: str, value: Any, problems: Problems) -> Json:
    entries = [f"{key}:{one}" for key, one in value.items()] if isinstance(value, Mapping) else value
    return {"extra_hosts": [str(entry).replace("=", ":", 1) for entry in entries or ()]}


# ----------------------------------------------------------------------------------------------------------- mounts


def _volumes(source: ServiceSource, clone: str, problems: Problems) -> list[Json]:
    path, made = at(source.path, "volumes"), []
    for item_path, item in problems.items(path, source.definition.get("volumes")):
        if item.get("type") == "bind":
            _check_bind(item_path, str(item.get("source", "")), clone, problems)
        elif item.get("type") == "volume" and source.name not in OWN:
            _check_volume(source, item_path, item, problems)
        for key, known in _MOUNT_OPTIONS.items():
            for option in (item.get(key) or {}).keys() - known:
                problems.add(at(item_path, f"{key}.{option}"), _NO_KEY)
        kept = {key: item[key] for key in ("type", "source", "target", "read_only") if key in item}
        if (item.get("volume") or {}).get("nocopy"):
            kept["volume"] = {"nocopy": True}
        if (item.get("bind") or {}).get("propagation"):
            kept["bind"] = {"propagation": item["bind"]["propagation"]}
        if (item.get("tmpfs") or {}).get("size"):
            kept["tmpfs"] = {"size": int(item["tmpfs"]["size"])}
        made.append(kept)
    return made


def _check_bind(path: str, where: str, clone: str, problems: Problems) -> None:
    if where == clone or where.startswith(f"{clone}/"):
        problems.add(
            at(path, "source"),
            f"{where} is only on this machine: write it as configs or secrets (files up to 500 KB), or build it into "
            "the image",
        )


def _check_volume(source: ServiceSource, path: str, item: Mapping[str, Any], problems: Problems) -> None:
    """A local volume stays on its node: elsewhere, Swarm would start the service with an empty one."""
    name = item.get("source")
    volume = source.sections.get("volumes", {}).get(name) if name else None
    is_local = (
        isinstance(volume, Mapping) and volume.get("driver", "local") == "local" and not volume.get("driver_opts")
    )
    placement = (source.definition.get("deploy") or {}).get("placement") or {}
    if is_local and not placement.get("constraints"):
        problems.add(
            at(path, "source"),
            f"volume {name} is on one node, and Swarm may start the service on another one, without the data: name the "
            "node in deploy.placement.constraints (node.hostname == ...), or give the volume a driver that all nodes "
            "share",
        )


def _tmpfs(source: ServiceSource, problems: Problems) -> list[Json]:
    """`tmpfs` and `shm_size`, which `docker stack deploy` ignores, as mounts."""
    made: list[Json] = []
    for entry in problems.texts(at(source.path, "tmpfs"), source.definition.get("tmpfs") or []) or ():
        target, _, options = entry.partition(":")
        size = next((part[5:] for part in options.split(",") if part.startswith("size=")), None)
        if mode := next((part for part in options.split(",") if part.startswith("mode=")), None):
            problems.add(at(source.path, "tmpfs"), f"not possible on a Swarm: {mode}; it has size")
        bytes_ = problems.size(at(source.path, "tmpfs"), size) if size else None
        made.append({"type": "tmpfs", "target": target} | ({"tmpfs": {"size": bytes_}} if bytes_ else {}))
    shm = source.definition.get("shm_size")
    if shm is not None:
        bound = {"size": problems.size(at(source.path, "shm_size"), shm)}
        made.append({"type": "tmpfs", "target": "/dev/shm", "tmpfs": bound})  # noqa: S108
    return made


# ------------------------------------------------------------------------------------------------------ environment


def _environment(source: ServiceSource, path: str, value: Any, problems: Problems) -> Json:
    """Swarm fills in what stands in double braces; only the stack's HAProxy means that."""
    variables = problems.text_map(path, value) or {}
    if source.name != "haproxy":
        variables = {key: text.replace("{{", '{{"{{"}}') for key, text in variables.items()}
    return {"environment": variables}


def _attached(source: ServiceSource, path: str, value: Any, problems: Problems) -> Json:
    """`secrets` or `configs`: references to the top level."""
    key = path.rpartition(".")[2]
    made = []
    for item_path, item in problems.items(path, value):
        if item.get("source") not in source.sections.get(key, {}):
            problems.expected(at(item_path, "source"), f"a name of the top-level {key} section", item.get("source"))
        made.append({name: item[name] for name in ("source", "target", "uid", "gid", "mode") if item.get(name)})
    return {key: made}


_CHANGED: Mapping[str, Callable[[ServiceSource, str, Any, Problems], Json]] = {
    "configs": _attached,
    "environment": _environment,
    "extra_hosts": _extra_hosts,
    "ports": _ports,
    "secrets": _attached,
}

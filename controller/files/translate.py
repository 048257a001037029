"""A Compose service definition -> the part of the engine's create call that all replicas of the service share.

Input is what `docker compose config` printed: short forms are expanded, paths absolute, variables filled in. Keys are
handled by one of five tables (plain, structured, ignored, forbidden, and `deploy`). A key in none of them is an error
that names it: silently dropping a key would make a replica that differs from the one its author tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pierhead.serve_block import variables

from ..model.spec import COMPOSE_LABEL_PREFIX, LABEL_PREFIX
from ..model.text import shown
from .attachments import add_mounts, add_networks
from .definition import RESERVED_ENVIRONMENT
from .dialect import OF_NO_CONTAINER
from .problems import Problems, ServiceSource, at

# Key -> (section of the body, name there, reader). Section "" is the body itself.
PLAIN: Mapping[str, tuple[str, str, Callable[[Problems, str, Any], Any]]] = {
    "annotations": ("HostConfig", "Annotations", Problems.text_map),
    "cap_add": ("HostConfig", "CapAdd", Problems.texts),
    "cap_drop": ("HostConfig", "CapDrop", Problems.texts),
    "cgroup": ("HostConfig", "CgroupnsMode", Problems.text),
    "cgroup_parent": ("HostConfig", "CgroupParent", Problems.text),
    "cpu_period": ("HostConfig", "CpuPeriod", Problems.whole),
    "cpu_quota": ("HostConfig", "CpuQuota", Problems.whole),
    "cpu_shares": ("HostConfig", "CpuShares", Problems.whole),
    "cpuset": ("HostConfig", "CpusetCpus", Problems.text),
    "device_cgroup_rules": ("HostConfig", "DeviceCgroupRules", Problems.texts),
    "dns": ("HostConfig", "Dns", Problems.texts),
    "dns_opt": ("HostConfig", "DnsOptions", Problems.texts),
    "dns_search": ("HostConfig", "DnsSearch", Problems.texts),
    "domainname": ("", "Domainname", Problems.text),
    "group_add": ("HostConfig", "GroupAdd", Problems.texts),
    "init": ("HostConfig", "Init", Problems.flag),
    "mem_limit": ("HostConfig", "Memory", Problems.size),
    "mem_reservation": ("HostConfig", "MemoryReservation", Problems.size),
    "mem_swappiness": ("HostConfig", "MemorySwappiness", Problems.whole),
    "memswap_limit": ("HostConfig", "MemorySwap", Problems.size),
    "oom_kill_disable": ("HostConfig", "OomKillDisable", Problems.flag),
    "oom_score_adj": ("HostConfig", "OomScoreAdj", Problems.whole),
    "pids_limit": ("HostConfig", "PidsLimit", Problems.whole),
    "privileged": ("HostConfig", "Privileged", Problems.flag),
    "read_only": ("HostConfig", "ReadonlyRootfs", Problems.flag),
    "runtime": ("HostConfig", "Runtime", Problems.text),
    "shm_size": ("HostConfig", "ShmSize", Problems.size),
    "stdin_open": ("", "OpenStdin", Problems.flag),
    "stop_signal": ("", "StopSignal", Problems.text),
    "storage_opt": ("HostConfig", "StorageOpt", Problems.text_map),
    "sysctls": ("HostConfig", "Sysctls", Problems.text_map),
    "tty": ("", "Tty", Problems.flag),
    "user": ("", "User", Problems.scalar),
    "userns_mode": ("HostConfig", "UsernsMode", Problems.text),
    "uts": ("HostConfig", "UTSMode", Problems.text),
    "working_dir": ("", "WorkingDir", Problems.text),
}

IGNORED: Mapping[str, str] = {
    "attach": "which logs `docker compose up` shows",
    "build": "Compose builds the image; replicas run it",
    "depends_on": "order of start: a replica that misses another service is not ready yet and receives no requests",
    "develop": "`docker compose watch` only",
    "env_file": "Compose has read it into environment",
    "expose": "containers on one network reach every port",
    "extends": "Compose has resolved it",
    "gpus": "read by gpus.py",
    "image": "read by parse.py, as it may be derived",
    "label_file": "Compose has read it into labels",
    "profiles": "every service with x-serve counts",
    "pull_policy": "the controller pulls what is missing and cannot be built",
    "restart": "replicas never restart by themselves: the controller is the only healer",
    "scale": "read by parse.py: must be 0",
    "stop_grace_period": "read by parse.py, as its default is derived",
}
"""Keys without a meaning for a replica, or read elsewhere, with the reason."""

FORBIDDEN: Mapping[str, str] = {
    "container_name": "replicas have names of their own (<project>-<service>-<version>-<n>); remove it",
    "hostname": "all replicas would have the same one; remove it (callers use the service name)",
    "mac_address": "all replicas would have the same one; remove it",
    "network_mode": "replicas need addresses of their own on a Compose network; remove it or write networks",
    "ports": "a published port belongs to one container and a service has many replicas; remove it and write "
    "x-serve.route (HTTP) or x-serve.grpc_services (gRPC): HAProxy takes the requests and spreads them",
    "links": "replicas find services by name on shared networks; remove it",
    "external_links": "replicas find services by name on shared networks; remove it",
    "volumes_from": "replicas outlive the container it names; write volumes",
    "platform": "a replica runs the image that is on this machine; build or pull it for that platform and remove this",
}

_OMITTED_WHEN_NULL = frozenset({"command", "entrypoint", "environment", "networks"})


def translate(
    source: ServiceSource, image: str, extra_environment: Mapping[str, str], grace_s: float, problems: Problems
) -> dict[str, Any]:
    """The shared part of the create body: sorted keys, JSON types; without name, GPUs and Pierhead's labels.

    `extra_environment` is what the controller sets; the user may not set the same names.
    """
    body: dict[str, Any] = {
        "Image": image,
        "StopTimeout": math.ceil(grace_s),
        # The controller is the only healer: a container that restarted by itself would come back without a drain.
        "HostConfig": {"RestartPolicy": {"Name": "no"}},
    }
    for key in sorted(source.definition, key=str):
        value = source.definition[key]
        path = at(source.path, str(key))
        if key in FORBIDDEN:
            problems.add(path, f"not possible with x-serve: {FORBIDDEN[key]}")
        elif key in IGNORED or str(key).startswith("x-") or (value is None and key in _OMITTED_WHEN_NULL):
            continue
        elif key in PLAIN:
            section, name, read = PLAIN[key]
            put_into(body, section, name, read(problems, path, value))
        elif key in STRUCTURED:
            STRUCTURED[key](source, path, value, body, problems)
        else:
            problems.add(path, "not supported with x-serve; remove it")
    body["Env"] = _environment(source, extra_environment, problems)
    add_mounts(source, body, problems)
    add_networks(source, body, problems)
    return canonical(body)  # type: ignore[no-any-return]


def canonical(value: Any) -> Any:
    """The same value with sorted mappings and without None values: equal definitions become equal texts."""
    if isinstance(value, Mapping):
        return {key: canonical(value[key]) for key in sorted(value) if value[key] is not None}
    return [canonical(item) for item in value] if isinstance(value, list | tuple) else value


def put_into(body: dict[str, Any], section: str, name: str, value: Any) -> None:
    """Set a value in a section of the body; "": in the body itself."""
    (body.setdefault(section, {}) if section else body)[name] = value


# ------------------------------------------------------------------------------------------------- structured keys


def _command(name: str) -> Callable[..., None]:
    def put(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
        body[name] = problems.texts(path, value)

    return put


def labels(name: str) -> Callable[..., None]:
    """The reader of labels, which puts them into the body as `name`."""

    def put(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
        labels = problems.text_map(path, value) or {}
        for label in labels:
            if label.startswith((LABEL_PREFIX, COMPOSE_LABEL_PREFIX)):
                problems.add(at(path, label), "the controller sets labels of this name itself; choose another prefix")
        body[name] = labels

    return put


def _extra_hosts(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
    if isinstance(value, Mapping):
        entries = [f"{host}={address}" for host, address in (problems.text_map(path, value) or {}).items()]
    else:
        entries = problems.texts(path, value) or []
    # Compose prints "host=address", the engine expects "host:address".
    put_into(body, "HostConfig", "ExtraHosts", sorted(entry.replace("=", ":", 1) for entry in entries))


def _security_options(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
    options: list[str] = []
    for option in problems.texts(path, value) or ():
        if option == "systempaths=unconfined":
            # Compose's name for two empty lists; the engine fills these lists itself where they are missing.
            body["HostConfig"].update({"MaskedPaths": [], "ReadonlyPaths": []})
            continue
        name, _, setting = (option if "=" in option else option.replace(":", "=", 1)).partition("=")
        if name == "seccomp" and setting not in ("unconfined", "builtin"):
            problems.expected(path, "seccomp=unconfined or seccomp=builtin (profiles in files are not read)", option)
        options.append(f"{name}={setting}" if setting else name)
    put_into(body, "HostConfig", "SecurityOpt", options)


def _namespace(name: str, *allowed: str) -> Callable[..., None]:
    def put(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
        if value in allowed:
            put_into(body, "HostConfig", name, value)
        else:
            problems.expected(path, " or ".join(shown(mode) for mode in allowed), value)

    return put


def _ulimits(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
    limits: list[dict[str, Any]] = []
    for name, limit in sorted(problems.mapping(path, value).items(), key=lambda item: str(item[0])):
        pair = limit if isinstance(limit, Mapping) else {"soft": limit, "hard": limit}
        soft, hard = (problems.whole(at(at(path, str(name)), bound), pair.get(bound)) for bound in ("soft", "hard"))
        limits.append({"Name": str(name), "Soft": soft, "Hard": hard})
    put_into(body, "HostConfig", "Ulimits", limits)


def _device_entry(short: str) -> dict[str, str]:
    """The long form of "/dev/fuse:/dev/fuse:rwm" (older releases of Compose print the short form)."""
    host, _, rest = short.partition(":")
    inside, _, permissions = rest.partition(":")
    return {"source": host, "target": inside or host, "permissions": permissions or "rwm"}


def _devices(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
    devices: list[dict[str, str]] = []
    for item_path, item in problems.items(path, value):
        entry = _device_entry(item) if isinstance(item, str) else problems.mapping(item_path, item)
        host_path = entry.get("source")
        inside = entry.get("target") or host_path
        if not isinstance(host_path, str) or not host_path.startswith("/") or not isinstance(inside, str):
            problems.expected(
                item_path, "a device path (GPUs belong into deploy.resources.reservations.devices)", host_path or item
            )
            continue
        permissions = problems.text(at(item_path, "permissions"), entry.get("permissions", "rwm")) or ""
        devices.append({"PathOnHost": host_path, "PathInContainer": inside, "CgroupPermissions": permissions})
    put_into(body, "HostConfig", "Devices", devices)


def _logging(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
    section = problems.mapping(path, value)
    driver = section.get("driver")
    log_config = {
        "Type": "" if driver is None else problems.text(at(path, "driver"), driver),
        "Config": problems.text_map(at(path, "options"), section.get("options")) or {},
    }
    put_into(body, "HostConfig", "LogConfig", log_config)


_HEALTHCHECK_TIMES = {
    "interval": "Interval",
    "timeout": "Timeout",
    "start_period": "StartPeriod",
    "start_interval": "StartInterval",
}


def _healthcheck(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
    """Kept as written, for `docker ps`; only the readiness probe decides about traffic."""
    check = problems.mapping(path, value)
    if check.get("disable") is True:
        body["Healthcheck"] = {"Test": ["NONE"]}
        return
    health: dict[str, Any] = {}
    for key, item in check.items():
        item_path = at(path, str(key))
        if key == "test":
            health["Test"] = ["CMD-SHELL", item] if isinstance(item, str) else problems.texts(item_path, item)
        elif key == "retries":
            health["Retries"] = problems.whole(item_path, item)
        elif key in _HEALTHCHECK_TIMES:
            health[_HEALTHCHECK_TIMES[key]] = problems.duration_ns(item_path, item)
        elif key != "disable":
            problems.add(item_path, "not supported with x-serve; remove it")
    body["Healthcheck"] = health


def cpus(section: str, name: str) -> Callable[..., None]:
    """The reader of a number of cores, which puts nanocores into a section of the body as `name`."""

    def put(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
        cores = problems.number(path, value)
        if cores is not None and cores <= 1_000_000:
            put_into(body, section, name, round(cores * 1_000_000_000))
        elif cores is not None:
            problems.expected(path, "a number of CPUs up to 1000000", value)

    return put


_limit_of_cpus = cpus("HostConfig", "NanoCpus")


# -------------------------------------------------------------------------------------------------------- deploy

_DEPLOY_IGNORED = frozenset(
    {"replicas", "labels", "restart_policy"}
)  # read by parse.py; of no container; see `restart`
_LIMITS: Mapping[str, tuple[str, Callable[[Problems, str, Any], Any]]] = {
    "memory": ("Memory", Problems.size),
    "pids": ("PidsLimit", Problems.whole),
}


def _deploy(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
    deploy = problems.mapping(path, value)
    for key, item in deploy.items():
        if key == "mode" and item != "replicated":
            problems.expected(at(path, key), '"replicated"', item)
        elif source.dialect and (read := source.dialect.deploy.get(str(key))):
            read(source, at(path, str(key)), item, body, problems)
        elif key not in (*_DEPLOY_IGNORED, "mode", "resources"):
            problems.add(at(path, str(key)), OF_NO_CONTAINER)
    resources = problems.mapping(at(path, "resources"), deploy.get("resources"))
    for key, item in resources.items():
        item_path = at(at(path, "resources"), str(key))
        if key == "limits":
            _limits(source, item_path, item, body, problems)
        elif key == "reservations":
            _reservations(source, item_path, item, body, problems)
        else:
            problems.unknown_key(at(path, "resources"), key, ("limits", "reservations"))


def _limits(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
    for key, item in problems.mapping(path, value).items():
        item_path = at(path, str(key))
        if key == "cpus":
            _limit_of_cpus(source, item_path, item, body, problems)
        elif key in _LIMITS:
            name, read = _LIMITS[key]
            put_into(body, "HostConfig", name, read(problems, item_path, item))
        else:
            problems.add(item_path, "not supported with x-serve; remove it")


def _reservations(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
    for key, item in problems.mapping(path, value).items():
        if key == "memory":
            put_into(body, "HostConfig", "MemoryReservation", problems.size(at(path, key), item))
        elif source.dialect and (read := source.dialect.reservations.get(str(key))):
            read(source, at(path, str(key)), item, body, problems)
        elif key not in ("cpus", "devices"):  # cpus: Compose and the engine of one machine cannot; devices: GPUs
            problems.add(at(path, str(key)), "not supported with x-serve; remove it")


STRUCTURED: Mapping[str, Callable[[ServiceSource, str, Any, dict[str, Any], Problems], None]] = {
    "command": _command("Cmd"),
    "configs": lambda *_: None,  # attachments.py
    "cpus": _limit_of_cpus,
    "deploy": _deploy,
    "devices": _devices,
    "entrypoint": _command("Entrypoint"),
    "environment": lambda *_: None,  # _environment
    "extra_hosts": _extra_hosts,
    "healthcheck": _healthcheck,
    "ipc": _namespace("IpcMode", "private", "shareable", "host", "none"),
    "labels": labels("Labels"),
    "logging": _logging,
    "networks": lambda *_: None,  # attachments.py
    "pid": _namespace("PidMode", "host"),
    "secrets": lambda *_: None,  # attachments.py
    "security_opt": _security_options,
    "tmpfs": lambda *_: None,  # attachments.py
    "ulimits": _ulimits,
    "volumes": lambda *_: None,  # attachments.py
}


# ------------------------------------------------------------------------------------------------------ environment


def _environment(source: ServiceSource, extra: Mapping[str, str], problems: Problems) -> list[str]:
    path = at(source.path, "environment")
    value = source.definition.get("environment")
    entries = {name: f"{name}={text}" for name, text in extra.items()}
    without_value = [name for name in value if value[name] is None] if isinstance(value, Mapping) else []
    for name, text in ({} if value is None else problems.text_map(path, value) or {}).items():
        if name in RESERVED_ENVIRONMENT or name in extra:
            key = variables().get(name) if name in extra else None
            instead = f"write x-serve.{key.path} in its place" if key else "remove it"
            problems.add(at(path, name), f"the controller sets this variable; {instead}")
        # A name without a value removes the variable that the image sets, as in Compose.
        entries[name] = name if name in without_value else f"{name}={text}"
    return sorted(entries.values())

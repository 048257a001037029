"""The body of the engine's create call <-> the spec of the Swarm service that runs one replica. Pure.

Swarm's API drops a field that it does not know without a word. Every field is carried here, or its key in the compose
files is refused (files/checks.py); tests/harness/not_carried.py holds the two together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..names import STACK_LABEL

GPU_KIND = "NVIDIA-GPU"
"""The name under which nodes list their GPUs (`node-generic-resources` in daemon.json): NVIDIA's runtime reads it."""
STOPPED_LABEL = "pierhead.stopped"
"""A label of a service that was sent its stop signal, with the time of its task's start: Swarm forgets the tasks of a
service with 0 replicas."""
LIMIT_LABEL = "pierhead.max_replicas_per_node"
"""A label of a service whose replica is started only where a node has fewer replicas than that."""
NARROWED_LABEL = "pierhead.narrowed"
"""A label of a service while its replica is being placed: so many of its last constraints are not the compose file's.
They go once the replica has its node. Where a start was interrupted the label stays, and the start is repeated."""
RESTART_DELAY_S = 2.0
"""How long Swarm waits before it starts an ended replica again: the controller has replaced it by then. (With the
condition "none" Swarm would not move the replicas of a lost node either.)"""
FILES = ("Secrets", "Configs")
"""Of a create body: the secrets and configs of Swarm that become files of the container."""
_NS = 1_000_000_000
_NODE = "{{.Node.Hostname}}"
_SHM = "/dev/shm"  # noqa: S108  (a mount point inside the container)

Json = Any


def service_spec(
    name: str,
    body: Mapping[str, Any],
    gpus: int,
    image: str | None = None,
    ids: Mapping[tuple[str, str], str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The spec of the service of one replica, which is not started: it has 0 replicas.

    `gpus`: how many GPUs it gets; Swarm chooses which. `image`: in place of the body's, where that differs. `ids`: of
    the secrets and configs, by kind ("Secrets", "Configs") and name.
    """
    host: Mapping[str, Any] = body.get("HostConfig") or {}
    container: dict[str, Any] = {
        "Image": image or body["Image"],
        "Env": _environment(body.get("Env") or ()),
        "Labels": dict(body.get("Labels") or {}),
        # Swarm ends a container that its health check fails, and the controller is the only healer.
        "Healthcheck": {"Test": ["NONE"]},
        **{there: body[here] for here, there in COMMAND.items() if body.get(here)},
        **{there: body[here] for here, there in PLAIN.items() if body.get(here) is not None},
        **{there: host[here] for here, there in PLAIN_HOST.items() if host.get(here) is not None},
    }
    if body.get("StopTimeout") is not None:
        container["StopGracePeriod"] = int(body["StopTimeout"]) * _NS
    if mounts := _mounts(host):
        container["Mounts"] = mounts
    for kind in FILES:
        if files := [_file(kind, file, ids) for file in body.get(kind) or ()]:
            container[kind] = files
    if host.get("ExtraHosts"):
        container["Hosts"] = [" ".join(reversed(entry.split(":", 1))) for entry in host["ExtraHosts"]]
    if dns := {there: host[here] for here, there in DNS.items() if host.get(here)}:
        container["DNSConfig"] = dns
    if privileges := _privileges(host.get("SecurityOpt") or ()):
        container["Privileges"] = privileges
    task: dict[str, Any] = {
        "ContainerSpec": container,
        "Networks": _networks(body, host),
        "Resources": _resources(body, host, gpus),
        "RestartPolicy": {"Condition": "any", "Delay": int(RESTART_DELAY_S * _NS)},
    }
    if body.get("Placement"):
        task["Placement"] = body["Placement"]
    if (log := host.get("LogConfig")) and (log.get("Type") or log.get("Config")):
        task["LogDriver"] = {"Name": log["Type"], "Options": log.get("Config") or {}}
    return {
        "Name": name,
        "Labels": {**(body.get("ServiceLabels") or {}), **(body.get("Labels") or {})},
        "TaskTemplate": task,
        "Mode": {"Replicated": {"Replicas": 0}},
        "EndpointSpec": {"Mode": "dnsrr"},  # the address of a replica is its container's own
    }


# --------------------------------------------------------------------------------------------------------------- tables

COMMAND = {"Entrypoint": "Command", "Cmd": "Args"}
PLAIN = {
    "OpenStdin": "OpenStdin",
    "StopSignal": "StopSignal",
    "Tty": "TTY",
    "User": "User",
    "WorkingDir": "Dir",
}
PLAIN_HOST = {
    "CapAdd": "CapabilityAdd",
    "CapDrop": "CapabilityDrop",
    "GroupAdd": "Groups",
    "Init": "Init",
    "ReadonlyRootfs": "ReadOnly",
    "Sysctls": "Sysctls",
    "Ulimits": "Ulimits",
}
DNS = {"Dns": "Nameservers", "DnsOptions": "Options", "DnsSearch": "Search"}
LIMITS = {"Memory": "MemoryBytes", "NanoCpus": "NanoCPUs", "PidsLimit": "Pids"}

# ---------------------------------------------------------------------------------------------------------------- parts


def _environment(entries: Json) -> list[str]:
    """The variables, where Swarm finds no template but ours: it fills in what stands in double braces."""
    escaped = [entry.replace("{{", '{{"{{"}}') for entry in entries]
    return [f"PIERHEAD_NODE={_NODE}" if entry.startswith("PIERHEAD_NODE=") else entry for entry in escaped]


def _mounts(host: Mapping[str, Any]) -> list[dict[str, Any]]:
    mounts = [_mount(mount) for mount in host.get("Mounts") or ()]
    mounts += [
        {"Type": "tmpfs", "Target": target, **({"TmpfsOptions": options} if options else {})}
        for target, text in (host.get("Tmpfs") or {}).items()
        for options in [_tmpfs(text)]
    ]
    if host.get("ShmSize"):
        mounts.append({"Type": "tmpfs", "Target": _SHM, "TmpfsOptions": {"SizeBytes": host["ShmSize"], "Mode": 0o1777}})
    return mounts


def _mount(mount: Mapping[str, Any]) -> dict[str, Any]:
    """A directory of the host that is missing is not created: it would be an empty one on whichever node it is."""
    kept = {key: value for key, value in mount.items() if key != "Consistency" and value is not None}
    if options := kept.pop("BindOptions", None):
        kept["BindOptions"] = {key: value for key, value in options.items() if key != "CreateMountpoint"}
    labels = (kept.get("VolumeOptions") or {}).get("Labels") or {}
    if project := labels.get("com.docker.compose.project"):
        # With Compose's labels, a project of that name on the node itself would take the volume for its own.
        users = {key: value for key, value in labels.items() if not key.startswith("com.docker.compose.")}
        kept["VolumeOptions"] = {**kept["VolumeOptions"], "Labels": {**users, STACK_LABEL: project}}
    return kept


def _file(kind: str, file: Mapping[str, Any], ids: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """A secret or config: the API wants its id, and its name as well."""
    one, name = kind.removesuffix("s"), file["Name"]
    place = {"Name": file["Target"], **{key: file[key] for key in ("UID", "GID", "Mode")}}
    return {f"{one}ID": ids[kind, name], f"{one}Name": name, "File": place}


TMPFS_OPTION = re.compile(r"size=(?P<size>[0-9]+)(?P<unit>[kmg]?)|mode=(?P<mode>[0-7]{1,4})|rw|noexec|nosuid|nodev")
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def _tmpfs(text: str) -> dict[str, int]:
    """The options of a tmpfs that Swarm has; rw, noexec, nosuid and nodev are what it does anyway."""
    options: dict[str, int] = {}
    for part in filter(None, text.lower().split(",")):
        found = TMPFS_OPTION.fullmatch(part)
        if found and found["size"]:
            options["SizeBytes"] = int(found["size"]) * _UNITS[found["unit"]]
        elif found and found["mode"]:
            options["Mode"] = int(found["mode"], 8)
    return options


def _networks(body: Mapping[str, Any], host: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The primary network is the first."""
    endpoints: Mapping[str, Any] = (body.get("NetworkingConfig") or {}).get("EndpointsConfig") or {}
    main = host.get("NetworkMode")
    return [
        {"Target": name, **{key: value for key, value in endpoints[name].items() if value}}
        for name in sorted(endpoints, key=lambda name: (name != main, name))
    ]


def _resources(body: Mapping[str, Any], host: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    limits = {there: host[here] for here, there in LIMITS.items() if host.get(here)}
    reservations: dict[str, Any] = dict(body.get("Reservations") or {})
    if host.get("MemoryReservation"):
        reservations["MemoryBytes"] = host["MemoryReservation"]
    if gpus:
        reservations["GenericResources"] = [{"DiscreteResourceSpec": {"Kind": GPU_KIND, "Value": gpus}}]
    return {"Limits": limits, "Reservations": reservations}


_SELINUX = {"disable": "Disable", "user": "User", "role": "Role", "type": "Type", "level": "Level"}


def _privileges(options: Json) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for option in options:
        name, _, setting = option.partition("=")
        if name == "no-new-privileges":
            found["NoNewPrivileges"] = setting != "false"
        elif option == "seccomp=unconfined":
            found["Seccomp"] = {"Mode": "unconfined"}
        elif option == "apparmor=unconfined":
            found["AppArmor"] = {"Mode": "disabled"}
        elif name == "label":
            key, _, value = setting.partition(":")
            found.setdefault("SELinuxContext", {})[_SELINUX[key]] = value or True
    return found

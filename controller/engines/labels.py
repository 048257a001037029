"""Writes and reads the labels of a replica's container, which are all that the controller knows of a running one."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import EngineError
from ..model.actions import replica_name
from ..model.spec import ADMIN_SUFFIX, GPU_PARTS, LISTEN, NO_USER_CONFIG, GpuSlot, ServiceSpec, unix_address
from ..model.text import told, whole_number
from ..model.world import Gpu
from .privileges import restrict

DEFAULT_CDI_KIND = "nvidia.com/gpu"


def create_body(
    spec: ServiceSpec,
    replica: str,
    version: str,
    number: int,
    gpus: Sequence[Gpu],
    project: str,
    cdi_kind: str = DEFAULT_CDI_KIND,
    node: str = "",
) -> dict[str, Any]:
    """The body of POST /containers/create for one replica (its name travels in the query string).

    `gpus` are the devices it is pinned to; `cdi_kind` is the vendor and class in front of a CDI device's name; `node`
    is the engine's name for the machine. The replica gets it as a variable and a label, so that the replica and
    Discovery name the same machine, whatever the machine is called later.
    """
    body: dict[str, Any] = copy.deepcopy(dict(spec.container))
    body["Labels"] = {**body.get("Labels", {}), **_labels(spec, replica, version, number, gpus, project, node)}
    if spec.managed:
        own = [f"PIERHEAD_REPLICA={replica}", f"PIERHEAD_VERSION={version}", f"PIERHEAD_NODE={node}"]
        # Not in `container`, and so not part of the version: a change is sent to running replicas.
        own += _socket_environment(spec.name, replica) if spec.has_socket else []
        own += [f"PIERHEAD_USER_CONFIG={spec.user_config}"] if spec.user_config != NO_USER_CONFIG else []
        body["Env"] = sorted([*body.get("Env", []), *own])
    if slot := _slot_environment(spec, gpus):
        body["Env"] = sorted([*body.get("Env", []), *slot])
    host = body.setdefault("HostConfig", {})
    if requests := _device_requests(gpus, spec.gpu.capabilities if spec.gpu else ("gpu",), cdi_kind):
        host["DeviceRequests"] = requests
    restrict(host)
    return body


def check_same(replica: str, wanted: Mapping[str, str], existing: Mapping[str, str], kind: str, remove: str) -> None:
    """Raise EngineError unless what has a replica's name is this very replica, by its labels.

    `kind` and `remove`: what it is, and the command that removes one.
    """
    differing = sorted(key for key, value in wanted.items() if existing.get(key) != value)
    if differing:
        raise EngineError(
            f"create of replica {replica}: another {kind} has that name (its labels {', '.join(differing)} differ); "
            f"remove it with `{remove} {replica}`"
        )


def _labels(
    spec: ServiceSpec, replica: str, version: str, number: int, gpus: Sequence[Gpu], project: str, node: str
) -> dict[str, str]:
    """Pierhead's labels, and those of a Compose one-off: `up` leaves it alone, `down --remove-orphans` removes it."""
    slot = f"={spec.gpu.slot}" if spec.gpu and spec.gpu.slot else ""
    return {
        "pierhead.project": project,
        "pierhead.service": spec.name,
        "pierhead.version": version,
        "pierhead.number": str(number),
        "pierhead.replica": replica,
        "pierhead.port": str(spec.port),
        "pierhead.listen": "socket" if spec.has_socket else "tcp",  # also against a label of the image
        "pierhead.probe": f"{spec.probe.port}{spec.probe.path}",
        "pierhead.graceful_shutdown_timeout_s": f"{spec.graceful_shutdown_timeout_s:.10g}",
        "pierhead.stop_grace_period_s": f"{spec.stop_grace_period_s:.10g}",
        "pierhead.gpus": ",".join(f"{gpu.uuid}{slot}" for gpu in gpus),
        "pierhead.node": node,
        "com.docker.compose.project": project,
        "com.docker.compose.service": spec.name,
        "com.docker.compose.version": "2",
        "com.docker.compose.config-hash": spec.definition_hash,
        "com.docker.compose.container-number": str(number),
        "com.docker.compose.oneoff": "True",
    }


def why_left_alone(kind: str, name: str, project: str, remove: str) -> str:
    """Why what has our label is not touched, and what to do. `kind`, `remove`: as in `check_same`.

    An image can have any label, and every container of that image has it, too.
    """
    return (
        f"{kind} {name} carries the label pierhead.project={project}, but its name and its other labels are not those "
        f"of a replica, so it is left alone; if it was a replica and was renamed, remove it with `{remove} {name}`"
    )


def read_labels(labels: Mapping[str, str], name: str, project: str) -> dict[str, Any] | None:
    """The fields of a ReplicaContainer that its labels have; None where name and labels are not those of a replica."""
    number = whole_number(labels.get("pierhead.number", ""))
    service, version = labels.get("pierhead.service", ""), labels.get("pierhead.version", "")
    if number is None or name != replica_name(project, service, version, number):
        return None
    gpus, gpu_slot = read_gpus(labels.get("pierhead.gpus", ""))
    return {
        "name": name,
        "service": service,
        "version": version,
        "number": number,
        "port": read_port(labels.get("pierhead.port", "")),
        "probe": read_probe(labels.get("pierhead.probe", "")),
        "has_socket": labels.get("pierhead.listen") == "socket",
        "graceful_shutdown_timeout_s": read_seconds(labels.get("pierhead.graceful_shutdown_timeout_s", "")),
        "stop_grace_period_s": read_seconds(labels.get("pierhead.stop_grace_period_s", "")),
        "node": told(labels.get("pierhead.node", "")),
        "gpus": gpus,
        "gpu_slot": gpu_slot,
    }


def _slot_environment(spec: ServiceSpec, gpus: Sequence[Gpu]) -> list[str]:
    """The variables of a replica's slot: its memory, and its share of the GPU's memory (both rounded down).

    One of the two is left out where it does not follow from the other because the GPU's memory is not known.
    """
    slot = spec.gpu.slot if spec.gpu else None
    if slot is None or not gpus:
        return []
    whole, share, size = gpus[0].memory_bytes, slot.fraction, slot.memory_bytes
    if whole and share is not None:
        size = slot.of(whole)
    elif whole and size is not None:
        share = size * GPU_PARTS // whole / GPU_PARTS
    variables = [] if size is None else [f"PIERHEAD_GPU_MEMORY_BYTES={size}"]
    return variables if share is None else [*variables, f"PIERHEAD_GPU_FRACTION={share:.10g}"]


def _socket_environment(service: str, replica: str) -> list[str]:
    path = f"{LISTEN}/{unix_address(service, replica).rpartition('/')[2]}"
    return [f"PIERHEAD_SOCKET={path}", f"PIERHEAD_ADMIN_SOCKET={path}{ADMIN_SUFFIX}"]


def _device_requests(gpus: Sequence[Gpu], capabilities: Sequence[str], cdi_kind: str) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = []
    if cdi := [f"{cdi_kind}={gpu.uuid}" for gpu in gpus if gpu.driver == "cdi"]:
        requests.append({"Driver": "cdi", "DeviceIDs": cdi})
    if nvidia := [gpu.uuid for gpu in gpus if gpu.driver == "nvidia"]:
        requests.append({"Driver": "nvidia", "DeviceIDs": nvidia, "Capabilities": [list(capabilities)]})
    return requests


LONGEST_PATH = 200
"""Of a probe's path; the path is a part of the request's first line."""
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,10})?")


def read_port(text: str) -> int | None:
    """The port that a replica was made for; None where its label is missing or is no port."""
    port = whole_number(text)
    return port if port is not None and 0 < port <= 65535 else None


def read_probe(text: str) -> tuple[int, str] | None:
    """Port and path of the readiness probe a replica was made with; None where its label is missing or is no probe."""
    digits, slash, rest = text.partition("/")
    port = read_port(digits)
    is_path = slash and rest.isascii() and rest.isprintable() and " " not in rest and len(rest) <= LONGEST_PATH
    return (port, slash + rest) if port is not None and is_path else None


def read_seconds(text: str) -> float | None:
    """A duration that a replica was made with; None where its label is missing or is no duration."""
    return float(text) if _SECONDS.fullmatch(text) else None


def read_gpus(text: str) -> tuple[tuple[str, ...], GpuSlot | None]:
    """The GPUs of a replica, and its slot of its one GPU (None = all of it): "GPU-1,GPU-2", "GPU-1=fraction:0.5"."""
    uuids, _, amount = text.partition("=")
    return tuple(filter(None, uuids.split(","))), GpuSlot.read(amount)

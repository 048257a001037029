"""Finds the GPUs and their holders in what the engine, CDI files and `nvidia-smi` print. Pure.

A GPU is identified by its UUID (`GPU-...`, `MIG-...`). CDI files and containers also use indices ("0", MIG "0:1") and
"all". An index is an alias of a UUID, and identifies the GPU only where no UUID is known.

A GPU that is divided into MIG devices is not in the inventory: its MIG devices are. Its holder holds all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from ..model.world import Gpu
from .smi import SmiDevice

_ALL = "all"
_INDEX = re.compile(r"\d+(?::\d+)?")
# Values of NVIDIA_VISIBLE_DEVICES that mean no GPU.
_NO_GPU = frozenset({"", "none", "void"})
# The C loader reads the 100 kB file of an eight-GPU machine in 10 ms, the Python one in most of a second.
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class GpuInventory:
    """GPUs of this machine in the order of their indices where these are known, and index -> UUID."""

    gpus: tuple[Gpu, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    divided: frozenset[str] = frozenset()
    """UUIDs of the GPUs that are left out because they are divided into MIG devices."""

    def resolve(self, name: str) -> frozenset[str]:
        """UUIDs that a name in a device request stands for; empty for an unknown name."""
        uuids = frozenset(gpu.uuid for gpu in self.gpus)
        if name == _ALL:
            return uuids
        uuid = self.aliases.get(name, name)
        if uuid in self.divided:
            return frozenset(gpu.uuid for gpu in self.gpus if gpu.parent == uuid)
        return frozenset({uuid}) & uuids


class CdiFileError(ValueError):
    """A CDI file that the engine cannot use either; the message says what is wrong and where."""


# ------------------------------------------------------------------------------------------------------------- sources


def discovered_devices(info: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    """Names of the CDI devices of `kind` in the engine's `/info` (API >= 1.50), without the kind."""
    prefix = f"{kind}="
    devices = info.get("DiscoveredDevices") or ()
    ids = (str(device.get("ID", "")) for device in devices if device.get("Source") == "cdi")
    return tuple(dict.fromkeys(name.removeprefix(prefix) for name in ids if name.startswith(prefix)))


def parse_cdi_spec(text: str, kind: str, *, is_json: bool) -> dict[str, str]:
    """Devices of one CDI file: name -> fingerprint of the device nodes it brings ("" when it brings none).

    Empty when the file is about another kind. Raises CdiFileError with what is wrong when it is no CDI file.
    """
    try:
        # Both loaders build plain values only.
        document = json.loads(text) if is_json else yaml.load(text, Loader=_YAML_LOADER)  # noqa: S506
    except (ValueError, yaml.YAMLError) as error:
        raise CdiFileError(" ".join(str(error).split())) from error
    if not isinstance(document, dict):
        raise CdiFileError(f"expected a mapping, found {type(document).__name__}")
    if not isinstance(document.get("kind"), str):
        raise CdiFileError('expected a text under "kind"')
    if document["kind"] != kind:
        return {}
    devices = document.get("devices")
    if not isinstance(devices, list):
        raise CdiFileError('expected a list under "devices"')
    return dict(_device(position, device) for position, device in enumerate(devices))


def _device(position: int, device: object) -> tuple[str, str]:
    name = device.get("name") if isinstance(device, dict) else None
    if not isinstance(device, dict) or not isinstance(name, str) or not name:
        raise CdiFileError(f'devices[{position}]: expected a text under "name"')
    edits = device.get("containerEdits")
    nodes = edits.get("deviceNodes") if isinstance(edits, dict) else None
    paths = sorted(str(node.get("path")) for node in nodes or () if isinstance(node, dict))
    return name, "\n".join(paths)


def merge_cdi(directories: Iterable[Mapping[str, Mapping[str, str]]]) -> tuple[dict[str, str], tuple[str, ...]]:
    """One view over all CDI files, as the engine has it: devices, and a warning for each that is unusable.

    `directories` come in rising priority, each as path -> devices. A later directory overrides an earlier one. The
    engine refuses a name that two files of one directory have, so it is left out.
    """
    merged: dict[str, str] = {}
    warnings: list[str] = []
    for files in directories:
        owners: dict[str, list[str]] = {}
        for path, devices in files.items():
            for name in devices:
                owners.setdefault(name, []).append(path)
            merged.update(devices)
        for name, paths in owners.items():
            if len(paths) > 1:
                del merged[name]
                warnings.append(
                    f'CDI device "{name}" is left out: {" and ".join(paths)} both describe it, and the engine then '
                    "uses neither; remove one of the files"
                )
    return merged, tuple(warnings)


def inventory_of_names(names: Iterable[str], fingerprints: Mapping[str, str] | None = None) -> GpuInventory:
    """GPUs behind CDI device names. Where UUIDs exist, indices are aliases; else they are the names.

    An index and a UUID with the same `fingerprints` (from `parse_cdi_spec`) are the same device.
    """
    fingerprints = fingerprints or {}
    known = list(dict.fromkeys(name for name in names if name != _ALL))
    indices = sorted((name for name in known if _INDEX.fullmatch(name)), key=_index_order)
    uuids = [name for name in known if not _INDEX.fullmatch(name)]
    if not uuids:
        parents = {name: name.partition(":")[0] for name in indices if ":" in name}
        return _without_divided(GpuInventory(tuple(Gpu(uuid=name) for name in indices)), parents)
    by_nodes = _unique({uuid: fingerprints.get(uuid, "") for uuid in uuids})
    index_names = indices or sorted((name for name in fingerprints if _INDEX.fullmatch(name)), key=_index_order)
    aliases = {index: by_nodes[fingerprints[index]] for index in index_names if fingerprints.get(index, "") in by_nodes}
    position = {uuid: order for order, uuid in enumerate(aliases.values())}
    ordered = sorted(uuids, key=lambda uuid: (position.get(uuid, len(position)), uuid))
    inventory = GpuInventory(tuple(Gpu(uuid=uuid) for uuid in ordered), aliases)
    return _without_divided(inventory, _parents(uuids, fingerprints))


def _parents(uuids: Iterable[str], fingerprints: Mapping[str, str]) -> dict[str, str]:
    """MIG device -> its GPU: the only GPU with a device node that the MIG device has, too."""
    owners: dict[str, list[str]] = {}
    parts: list[str] = []
    for uuid in uuids:
        if Gpu(uuid).is_mig:
            parts.append(uuid)
        else:
            for node in filter(None, fingerprints.get(uuid, "").split("\n")):
                owners.setdefault(node, []).append(uuid)
    parents: dict[str, str] = {}
    for part in parts:
        for node in fingerprints.get(part, "").split("\n"):
            if len(owners.get(node, ())) == 1:
                parents.setdefault(part, owners[node][0])
    return parents


def _without_divided(inventory: GpuInventory, parents: Mapping[str, str], divided: Iterable[str] = ()) -> GpuInventory:
    """Fill in the parent GPU of each MIG device, and leave out the GPUs that are divided."""
    gone = inventory.divided | frozenset(divided) | frozenset(parents.values())
    gpus = tuple(
        replace(gpu, parent=parents.get(gpu.uuid, gpu.parent)) for gpu in inventory.gpus if gpu.uuid not in gone
    )
    return replace(inventory, gpus=gpus, divided=gone)


def described(inventory: GpuInventory, report: Iterable[SmiDevice]) -> GpuInventory:
    """The same GPUs with name, memory and parent from `nvidia-smi`."""
    known = {device.uuid: device for device in report}
    parents = {uuid: device.parent for uuid, device in known.items() if device.parent}
    inventory = _without_divided(inventory, parents, (uuid for uuid, device in known.items() if device.divided))
    gpus = (
        replace(gpu, name=device.name, memory_bytes=device.memory_bytes) if (device := known.get(gpu.uuid)) else gpu
        for gpu in inventory.gpus
    )
    return replace(inventory, gpus=tuple(gpus))


def inventory_of_report(report: Sequence[SmiDevice]) -> GpuInventory:
    """The GPUs that the nvidia driver assigns, from `nvidia-smi`."""
    gpus = tuple(Gpu(uuid=device.uuid, driver="nvidia") for device in report)
    return described(GpuInventory(gpus, {device.index: device.uuid for device in report}), report)


def _unique(fingerprints: Mapping[str, str]) -> dict[str, str]:
    """Fingerprint -> name, for the non-empty fingerprints that only one name has."""
    names: dict[str, list[str]] = {}
    for name, fingerprint in fingerprints.items():
        names.setdefault(fingerprint, []).append(name)
    return {nodes: owners[0] for nodes, owners in names.items() if nodes and len(owners) == 1}


def _index_order(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(":"))


# ------------------------------------------------------------------------------------------------------------- holders


def requested_gpus(container: Mapping[str, Any], kind: str) -> frozenset[str]:
    """Names (UUIDs, indices or "all") of the GPUs a container was created with, from its `inspect`."""
    host = container.get("HostConfig") or {}
    names: set[str] = set()
    for request in host.get("DeviceRequests") or ():
        names |= _names_in_request(request, kind)
    if host.get("Runtime") == "nvidia":
        names |= _names_in_environment((container.get("Config") or {}).get("Env") or (), kind)
    return frozenset(names)


def _names_in_request(request: Mapping[str, Any], kind: str) -> set[str]:
    driver = request.get("Driver") or ""
    ids: Sequence[str] = request.get("DeviceIDs") or ()
    if driver == "cdi":
        return {name.removeprefix(f"{kind}=") for name in ids if name.startswith(f"{kind}=")}
    wants_gpu = any("gpu" in group for group in request.get("Capabilities") or ())
    if driver != "nvidia" and not (driver == "" and wants_gpu):
        return set()
    if ids:
        return set(ids)
    count = int(request.get("Count") or 0)
    # The nvidia driver turns a count into the first indices, even if other containers hold them.
    return {_ALL} if count < 0 else {str(index) for index in range(count)}


def _names_in_environment(environment: Iterable[str], kind: str) -> set[str]:
    for variable in environment:
        key, _, value = variable.partition("=")
        if key == "NVIDIA_VISIBLE_DEVICES":
            names = {name.strip().removeprefix(f"{kind}=") for name in value.split(",")}
            return names - _NO_GPU
    return set()


def foreign_holders(
    requests: Mapping[str, frozenset[str]], inventory: GpuInventory
) -> tuple[dict[str, str], tuple[str, ...]]:
    """UUID -> name of the container that holds it, from container name -> requested names; and warnings.

    A name that stands for no known GPU (an index whose UUID no file has) holds nothing, with a warning.
    """
    holders: dict[str, str] = {}
    warnings: list[str] = []
    for container, names in sorted(requests.items()):
        for name in sorted(names):
            uuids = inventory.resolve(name)
            for uuid in uuids:
                holders.setdefault(uuid, container)
            if not uuids and inventory.gpus:
                warnings.append(
                    f'container {container} holds GPU "{name}", and it is not known which of '
                    f"{', '.join(gpu.uuid for gpu in inventory.gpus)} that is: it counts as free; start that container "
                    "with the GPU's UUID instead"
                )
    return holders, tuple(warnings)

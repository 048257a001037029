"""What the replicas of a Swarm cannot have, by Compose's keys, and what to do instead. Pure.

Swarm's API drops these without a word. tests/harness/not_carried.py has the same by the engine's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pierhead.serve_block import ServeBlock

from ...files.problems import Problems, ServiceSource, at
from ...model.spec import GpuRequest
from ...model.text import shown

_CPUS = "write deploy.resources.limits.cpus"
_MEMORY = "write deploy.resources.limits.memory"
_WHOLE_NODE = "give the node's engine that default, or remove it"
NOT_ON_SWARM: Mapping[str, str] = {
    "annotations": "remove it, or write labels",
    "cgroup": "remove it",
    "cgroup_parent": _WHOLE_NODE,
    "cpu_period": _CPUS,
    "cpu_quota": _CPUS,
    "cpu_shares": _CPUS,
    "cpuset": _CPUS,
    "device_cgroup_rules": "remove it",
    "devices": "reserve GPUs in deploy.resources.reservations.devices; other devices are only on one machine",
    "domainname": "remove it (callers use the service name)",
    "ipc": "write shm_size for a larger /dev/shm, or remove it",
    "mem_swappiness": _WHOLE_NODE,
    "memswap_limit": _MEMORY,
    "oom_kill_disable": _MEMORY,
    "oom_score_adj": _MEMORY,
    "pid": "remove it",
    "privileged": "write cap_add for what it needs",
    "runtime": "make it the default runtime of the nodes' engines (default-runtime in daemon.json)",
    "storage_opt": _WHOLE_NODE,
    "userns_mode": _WHOLE_NODE,
    "uts": "remove it",
}


def check_swarm(source: ServiceSource, block: ServeBlock | None, gpu: GpuRequest | None, problems: Problems) -> None:
    """Add a problem for everything in a service that its replicas could not have on a Swarm."""
    for key in sorted(source.definition, key=str):
        value, path = source.definition[key], at(source.path, str(key))
        if value is None:
            continue
        if key in NOT_ON_SWARM:
            problems.add(path, f"not possible on a Swarm: {NOT_ON_SWARM[key]}")
        elif key in _VALUES:
            _VALUES[key](path, value, problems)
    _check_networks(source, problems)
    if gpu is not None:
        _check_gpu(source.path, gpu, problems)
    if block and block.autoscale and isinstance(block.autoscale.policy, str):
        problems.add(
            at(source.path, "x-serve.autoscale.policy"),
            "not possible on a Swarm: a function is a file of the project, which the managers do not have; remove it "
            "(target_ongoing_requests then decides), or write a query: {prometheus: {query: ..., target: ...}}",
        )


def _check_networks(source: ServiceSource, problems: Problems) -> None:
    networks = source.sections.get("networks", {})
    joined = source.definition.get("networks")
    for name in joined if joined and isinstance(joined, Mapping | list) else ("default",):
        definition = networks.get(name)
        driver = definition.get("driver") if isinstance(definition, Mapping) else None
        if driver not in (None, "overlay"):
            problems.add(
                at(at("networks", name), "driver"),
                f"{shown(driver)} ends at its node, and replicas are on many; write overlay, or remove it",
            )


def _check_gpu(path: str, gpu: GpuRequest, problems: Problems) -> None:
    if gpu.slot is not None:
        problems.add(
            at(path, "x-serve.gpu"), "a Swarm gives out whole GPUs only: write count in place of memory or fraction"
        )
    if gpu.device_ids:
        problems.add(
            at(path, "deploy.resources.reservations.devices"),
            "a Swarm chooses the GPUs itself: write count in place of device_ids, and deploy.placement.constraints for "
            "the nodes",
        )
    if others := [one for one in gpu.capabilities if one != "gpu"]:
        problems.add(
            at(path, "deploy.resources.reservations.devices"),
            "a Swarm gives out GPUs without capabilities: write capabilities: [gpu], and "
            f"environment.NVIDIA_DRIVER_CAPABILITIES: {','.join(others)}",
        )
    if gpu.kind:
        problems.add(
            at(path, "x-serve.llm.accelerator_type"),
            "a Swarm does not know the names of its GPUs: label the nodes and write deploy.placement.constraints, such "
            "as node.labels.gpu==H100",
        )


def _security_options(path: str, value: Any, problems: Problems) -> None:
    for option in problems.texts(path, value) or ():
        if option == "systempaths=unconfined":
            problems.add(path, "not possible on a Swarm: systempaths=unconfined; remove it")


def _tmpfs(path: str, value: Any, problems: Problems) -> None:
    known = ("size=", "mode=", "rw", "noexec", "nosuid", "nodev")
    for entry in problems.texts(path, value) or ():
        for option in filter(None, entry.partition(":")[2].split(",")):
            if not option.startswith(known) or option.endswith("%"):
                problems.add(path, f"not possible on a Swarm: {option}; it has size (in bytes, k, m or g) and mode")


def _extra_hosts(path: str, value: Any, problems: Problems) -> None:
    entries = value.values() if isinstance(value, Mapping) else problems.texts(path, value) or ()
    if any(str(entry).endswith("host-gateway") for entry in entries):
        problems.add(path, "not possible on a Swarm: host-gateway; write an address")


def _volumes(path: str, value: Any, problems: Problems) -> None:
    for item_path, item in problems.items(path, value):
        volume = item if isinstance(item, Mapping) else {}
        if (volume.get("bind") or {}).get("selinux"):
            problems.add(at(item_path, "bind.selinux"), "not possible on a Swarm: label the nodes' directories")
        if (volume.get("volume") or {}).get("subpath"):
            problems.add(at(item_path, "volume.subpath"), "not possible on a Swarm: mount the whole volume")


def _entrypoint(path: str, value: Any, problems: Problems) -> None:
    if value == []:
        problems.add(path, "not possible on a Swarm: an empty entrypoint; write the program and its arguments in it")


_VALUES: Mapping[str, Callable[[str, Any, Problems], None]] = {
    "entrypoint": _entrypoint,
    "extra_hosts": _extra_hosts,
    "security_opt": _security_options,
    "tmpfs": _tmpfs,
    "volumes": _volumes,
}

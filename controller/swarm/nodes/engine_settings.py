"""What a node needs in the settings of its Docker Engine and of NVIDIA's runtime. Pure."""

from __future__ import annotations

import ipaddress
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from ...errors import InvalidRequest
from ..names import Json

GPU_KIND = "NVIDIA-GPU"
SWARM_RESOURCE = f'swarm-resource = "DOCKER_RESOURCE_{GPU_KIND}"'
RESOURCES = "node-generic-resources"
PRIVATE = ("10.0.0.0/8", "100.64.0.0/10")


def read_settings(place: str, text: str) -> dict[str, Any]:
    """The settings in daemon.json, which may be empty. Raises InvalidRequest."""
    try:
        found = json.loads(text.strip() or "{}")
    except ValueError as error:
        raise InvalidRequest(f"{place} is not JSON ({error}). Correct it and repeat. Nothing was changed.") from None
    if not isinstance(found, dict):
        raise InvalidRequest(
            f"{place} holds no settings (an object of JSON). Correct it and repeat. Nothing was changed."
        )
    return found


def node_settings(before: Json, uuids: list[str] | None, registry: str, *, has_toolkit: bool) -> dict[str, Any]:
    """The engine's settings with what a Swarm needs; every other one stays. `uuids`: None = the GPUs stay as well."""
    after = {**before, "live-restore": False}
    if uuids is not None:
        others = [one for one in after.pop(RESOURCES, []) if not one.startswith(f"{GPU_KIND}=")]
        if registered := [*others, *(f"{GPU_KIND}={uuid}" for uuid in uuids)]:
            after[RESOURCES] = registered
    if uuids and has_toolkit:
        after["runtimes"] = {"nvidia": {"path": "nvidia-container-runtime"}, **before.get("runtimes", {})}
        after["default-runtime"] = "nvidia"
    if registry:
        known = before.get("insecure-registries", [])
        after["insecure-registries"] = known if registry in known else [*known, registry]
    return after


def needs_restart(info: Json, uuids: list[str] | None) -> bool:
    """The engine reads its list of resources only when it starts. `info`: what it says about itself."""
    named = [one.get("NamedResourceSpec") or {} for one in info.get("GenericResources") or ()]
    return uuids is not None and {one["Value"] for one in named if one.get("Kind") == GPU_KIND} != {*uuids}


def toolkit_settings(before: str) -> str:
    """NVIDIA's config.toml with the variable in which Swarm gives GPUs. It belongs to no section, so it comes first."""
    if SWARM_RESOURCE in before.splitlines():
        return before
    rest = re.sub(r"(?m)^#?[ \t]*swarm-resource[ \t]*=.*\n?", "", before)
    return f"{SWARM_RESOURCE}\n{rest}"


def free_pool(routes: str) -> str:
    """Addresses for overlay networks: the largest block that no network of this machine is in. Raises InvalidRequest.

    From the end of the private ranges, as networks tend to be at their beginning.
    """
    taken = list(networks_in(routes))
    for whole in map(ipaddress.IPv4Network, PRIVATE):
        for prefix in range(whole.prefixlen, 17):
            for block in reversed(list(whole.subnets(new_prefix=prefix))):
                if not any(block.overlaps(network) for network in taken):
                    return str(block)
    raise InvalidRequest("the networks of this machine leave no range of addresses free: name one with --address-pool.")


def networks_in(routes: str) -> Iterator[ipaddress.IPv4Network]:
    """The networks in /proc/net/route, whose numbers are in the machine's own order; not the default route."""
    for line in routes.splitlines()[1:]:
        fields = line.split()
        address, mask = (int(fields[at], 16).to_bytes(4, sys.byteorder) for at in (1, 7))
        network = ipaddress.IPv4Network((address, int.from_bytes(mask, "big").bit_count()))
        if network.prefixlen:
            yield network

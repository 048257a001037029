"""The GPU request of one replica: Compose's device reservation (`gpus:` is its short form) and `x-serve.gpu`.

A reservation alone asks for whole GPUs. Together with `x-serve.gpu`, the reservation selects the GPUs (driver,
capabilities, device_ids) and `x-serve.gpu` sets the amount.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pierhead.serve_block import GpuBlock

from ..model.spec import GPU_PARTS, GpuRequest, GpuSlot
from .problems import Problems, at
from .serve_block import memory_bytes

MAX_GPUS = 64
_DRIVERS = ("nvidia", "cdi")
_KEYS = ("driver", "count", "device_ids", "capabilities", "options")
_UUID = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{2,127}")
_AMOUNTS = ("count", "memory", "fraction")
_UNWRITTEN = (None, "all", -1, "-1")
"""How Compose prints a count that is "all" or left out."""
_ALL_IS_NO_NUMBER = (
    'expected the number of GPUs of one replica, found "all" (also meant where neither count nor device_ids is '
    "written): the controller gives every replica GPUs of its own; write count: 1"
)


def gpu_request(
    path: str, definition: Mapping[str, Any], block: GpuBlock | None, replicas: int, problems: Problems
) -> GpuRequest | None:
    """The GPU request of a service's replicas; None without a request, or with a wrong one (a problem is added).

    `path` is the service's path, `block` its `x-serve.gpu`, `replicas` its maximum number of replicas.
    """
    deploy = problems.mapping(f"{path}.deploy", definition.get("deploy"))
    resources = problems.mapping(f"{path}.deploy.resources", deploy.get("resources"))
    reservations = problems.mapping(f"{path}.deploy.resources.reservations", resources.get("reservations"))
    found = [
        *problems.items(f"{path}.deploy.resources.reservations.devices", reservations.get("devices")),
        *problems.items(f"{path}.gpus", definition.get("gpus")),
    ]
    if len(found) > 1:
        problems.add(found[1][0], "expected one GPU reservation for each service, found another one; put them together")
    if block and block.yields and not any(getattr(block, key) for key in _AMOUNTS):
        if not found:
            problems.add(
                at(path, "x-serve.gpu.yields"),
                "has no effect without GPUs: write count, memory or fraction here, or a device reservation",
            )
        block = None  # the reservation sets the amount
    if not found and block is None:
        return None
    before = len(problems.lines)
    reserved = _device(*found[0], None if block else replicas, problems) if found else GpuRequest(0)
    request = _amount(at(path, "x-serve.gpu"), block, reserved, problems) if block else reserved
    return request if len(problems.lines) == before else None


def _amount(path: str, block: GpuBlock, reserved: GpuRequest, problems: Problems) -> GpuRequest:
    """The reservation with the amount that `x-serve.gpu` sets."""
    written = [key for key in _AMOUNTS if getattr(block, key) is not None]
    if len(written) != 1:
        found = f"found {' and '.join(written)}" if written else "found none of them"
        problems.add(path, f"expected exactly one of count, memory and fraction, {found}")
    count = block.count or 1
    if reserved.device_ids and count > len(reserved.device_ids):
        problems.expected(
            at(path, "count"), f"an integer from 1 to {len(reserved.device_ids)} (the reservation's device_ids)", count
        )
    slot: GpuSlot | None = None
    if block.memory is not None:
        slot = GpuSlot(memory_bytes=memory_bytes(block.memory))
    elif block.fraction is not None:
        # Rounded down to whole parts. The float 0.29 is a little less than 2900 parts and must give 2900.
        slot = GpuSlot(fraction=math.floor(block.fraction * GPU_PARTS + 1e-6) / GPU_PARTS)
    return replace(reserved, count=count, slot=slot, placement=block.placement)


def _device(path: str, value: object, replicas: int | None, problems: Problems) -> GpuRequest:
    """The request of a reservation. `replicas` is None where x-serve.gpu sets the amount."""
    device = problems.mapping(path, value)
    if not isinstance(value, Mapping):
        return GpuRequest(0)
    for key in device:
        if key not in _KEYS:
            problems.unknown_key(path, key, _KEYS)
    driver = device.get("driver")
    if driver not in (None, *_DRIVERS):
        problems.expected(at(path, "driver"), '"nvidia" or "cdi"', driver)
    if device.get("options"):
        problems.add(at(path, "options"), "not supported for replicas; remove it")
    capabilities = _capabilities(path, device, problems)
    if replicas is None:
        return GpuRequest(0, _which(path, device, problems), capabilities)
    if device.get("device_ids") is None:
        return GpuRequest(_count(at(path, "count"), device.get("count"), problems), (), capabilities)
    if device.get("count") is not None:
        problems.add(path, "expected either count or device_ids, found both")
    device_ids = _device_ids(at(path, "device_ids"), device["device_ids"], problems)
    if replicas > 1:
        pinned = ", ".join(device_ids)
        problems.add(
            at(path, "device_ids"),
            f"pins every replica to {pinned}, so only 1 of {replicas} replicas could run; write count: "
            f"{len(device_ids)} in its place and the controller chooses, or replicas: 1",
        )
    return GpuRequest(len(device_ids), device_ids, capabilities)


def _which(path: str, device: Mapping[str, Any], problems: Problems) -> tuple[str, ...]:
    """The GPUs that a reservation names in addition to x-serve.gpu; empty = any."""
    if device.get("count") not in _UNWRITTEN:
        problems.add(
            at(path, "count"),
            "is used together with x-serve.gpu, which says how much of a GPU each replica gets; remove one of the two",
        )
    named = device.get("device_ids")
    return () if named is None else _device_ids(at(path, "device_ids"), named, problems)


def _capabilities(path: str, device: Mapping[str, Any], problems: Problems) -> tuple[str, ...]:
    if device.get("capabilities") is None:
        return ("gpu",)  # Compose prints none for `gpus:`
    named = problems.texts(at(path, "capabilities"), device["capabilities"]) or []
    if "gpu" not in named:
        problems.expected(at(path, "capabilities"), '"gpu" among them', ", ".join(named))
    return tuple(dict.fromkeys(named))


def _count(path: str, value: object, problems: Problems) -> int:
    if value in _UNWRITTEN:
        problems.add(path, _ALL_IS_NO_NUMBER)
        return 0
    count = problems.whole(path, value)
    if count is not None and not 1 <= count <= MAX_GPUS:
        problems.expected(path, f"an integer from 1 to {MAX_GPUS}", value)
    return count or 0


def _device_ids(path: str, value: object, problems: Problems) -> tuple[str, ...]:
    uuids: list[str] = []
    for item_path, item in problems.items(path, value):
        # CDI writes the kind in front: nvidia.com/gpu=GPU-...
        uuid = item.rpartition("=")[2] if isinstance(item, str) else ""
        if not _UUID.fullmatch(uuid) or uuid in ("all", "none"):
            problems.expected(
                item_path, "a GPU's UUID as `nvidia-smi -L` prints it (indexes change between boots)", item
            )
        elif uuid in uuids:
            problems.add(item_path, f"names {uuid} a second time")
        else:
            uuids.append(uuid)
    if not uuids and value == []:
        problems.expected(path, "at least one UUID", value)
    return tuple(uuids)

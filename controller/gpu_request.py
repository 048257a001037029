"""How many GPUs, or which, one replica asks for: Compose's device reservations (`gpus:` is its short form)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from controller.model import GpuRequest
from controller.problems import Problems, at

MAX_GPUS = 64
_DRIVERS = ("nvidia", "cdi")
_KEYS = ("driver", "count", "device_ids", "capabilities", "options")
_UUID = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{2,127}")
_ALL_IS_NO_NUMBER = (
    'expected the number of GPUs of one replica, found "all" (also meant where neither count nor device_ids is '
    "written): the controller gives every replica GPUs of its own; write count: 1"
)


def gpu_request(path: str, definition: Mapping[str, Any], replicas: int, problems: Problems) -> GpuRequest | None:
    """The GPU reservation of one service; None where it has none, or a wrong one (then a problem is written down)."""
    deploy = problems.mapping(f"{path}.deploy", definition.get("deploy"))
    resources = problems.mapping(f"{path}.deploy.resources", deploy.get("resources"))
    reservations = problems.mapping(f"{path}.deploy.resources.reservations", resources.get("reservations"))
    found = [
        *problems.items(f"{path}.deploy.resources.reservations.devices", reservations.get("devices")),
        *problems.items(f"{path}.gpus", definition.get("gpus")),
    ]
    if len(found) > 1:
        problems.add(found[1][0], "expected one GPU reservation for each service, found another one; put them together")
    if not found:
        return None
    before = len(problems.lines)
    request = _device(*found[0], replicas, problems)
    return request if len(problems.lines) == before else None


def _device(path: str, value: object, replicas: int, problems: Problems) -> GpuRequest:
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


def _capabilities(path: str, device: Mapping[str, Any], problems: Problems) -> tuple[str, ...]:
    if device.get("capabilities") is None:
        return ("gpu",)  # Compose prints none for `gpus:`
    named = problems.texts(at(path, "capabilities"), device["capabilities"]) or []
    if "gpu" not in named:
        problems.expected(at(path, "capabilities"), '"gpu" among them', ", ".join(named))
    return tuple(dict.fromkeys(named))


def _count(path: str, value: object, problems: Problems) -> int:
    # Compose prints "all", and a count left out, as -1.
    if value in (None, "all", -1, "-1"):
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

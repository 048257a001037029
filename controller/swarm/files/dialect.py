"""What compose files mean on a Swarm: its own secrets and configs, placement, labels of services, reserved cores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...files.attachments import FILE_DIRECTORIES, attached
from ...files.dialect import Dialect
from ...files.problems import Problems, ServiceSource, at
from ...files.translate import cpus, labels, put_into
from .checks import check_swarm

_NODE_LABEL = re.compile(r"node\.labels\.[A-Za-z0-9][A-Za-z0-9._-]*")


def _files(source: ServiceSource, problems: Problems) -> Mapping[str, Any]:
    return {
        kind.capitalize(): [
            file
            for item_path, item in problems.items(at(source.path, kind), source.definition.get(kind))
            if (file := _file(item_path, kind, item, source.sections.get(kind, {}), problems))
        ]
        or None
        for kind in FILE_DIRECTORIES
    }


def _file(path: str, kind: str, value: Any, section: Mapping[str, Any], problems: Problems) -> Mapping[str, Any] | None:
    entry, name, target = attached(path, kind, value, section, problems)
    if name is None:
        return None
    definition = problems.mapping(at(kind, name), section[name])
    if not definition.get("external") and not isinstance(definition.get("file"), str):
        what = kind.removesuffix("s")
        problems.add(
            path,
            f"replicas can only be given a {what} from a file, or one that is in Swarm; write {kind}.{name}.file, or "
            f"create it (`docker {what} create`) and write {kind}.{name}.external: true",
        )
        return None
    return {
        "Name": problems.text(at(at(kind, name), "name"), definition.get("name", name)),
        "Target": target,
        "UID": problems.scalar(at(path, "uid"), entry.get("uid", "0")),
        "GID": problems.scalar(at(path, "gid"), entry.get("gid", "0")),
        "Mode": problems.whole(at(path, "mode"), entry.get("mode", 0o444)),
    }


def _placement(source: ServiceSource, path: str, value: Any, body: dict[str, Any], problems: Problems) -> None:
    for key, item in problems.mapping(path, value).items():
        item_path = at(path, str(key))
        if key == "constraints":
            put_into(body, "Placement", "Constraints", sorted(problems.texts(item_path, item) or ()))
        elif key == "preferences":
            put_into(body, "Placement", "Preferences", _preferences(item_path, item, problems))
        elif key == "max_replicas_per_node":
            problems.add(item_path, "each replica is a service of its own; write x-serve.max_replicas_per_node")
        else:
            problems.unknown_key(path, key, ("constraints", "preferences"))


def _preferences(path: str, value: Any, problems: Problems) -> list[dict[str, Any]]:
    """Where replicas are spread: over the values of the nodes' labels, of the first one first."""
    found = []
    for item_path, item in problems.items(path, value):
        label = problems.mapping(item_path, item).get("spread")
        if isinstance(label, str) and _NODE_LABEL.fullmatch(label):
            found.append({"Spread": {"SpreadDescriptor": label}})
        else:
            problems.expected(at(item_path, "spread"), "a label of nodes such as node.labels.zone", label)
    return found


SWARM = Dialect(
    check=check_swarm,
    files=_files,
    deploy=MappingProxyType({"placement": _placement, "labels": labels("ServiceLabels")}),
    reservations=MappingProxyType({"cpus": cpus("Reservations", "NanoCPUs")}),
)
DIALECTS: Mapping[str, Dialect] = MappingProxyType({"swarm": SWARM})
"""By the value of PIERHEAD_ENGINE."""

"""What a replica on a Swarm does not get of the body of the engine's create call, by the engine's names.

The compose files' own check (controller/swarm/files/checks.py) has to refuse all of it: Swarm's API drops it silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from controller.engines.privileges import KILLED_FIRST
from controller.swarm.engine.service_spec import DNS, FILES, LIMITS, PLAIN, PLAIN_HOST, TMPFS_OPTION

Json = Any


def not_carried(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of a create body that a Swarm service does not have, by the engine's names, sorted."""
    host: Mapping[str, Any] = body.get("HostConfig") or {}
    found = [key for key, value in body.items() if key not in _OF_THE_BODY and value is not None]
    found += [f"HostConfig.{key}" for key, value in host.items() if key not in _OF_THE_HOST and value is not None]
    found += [name for name, refuses in _REFUSES.items() if refuses(body, host)]
    return tuple(sorted(found))


_OF_THE_BODY = frozenset(
    {
        *("Cmd", "Entrypoint", "Env", "Healthcheck", "HostConfig", "Image", "Labels", "NetworkingConfig", "Placement"),
        *("Reservations", "ServiceLabels", "StopTimeout"),
        *FILES,
        *PLAIN,
    }
)
_OF_THE_HOST = frozenset(
    {
        *("Binds", "DeviceRequests", "ExtraHosts", "LogConfig", "MemoryReservation", "Mounts", "NetworkMode"),
        *("RestartPolicy", "SecurityOpt", "ShmSize", "Tmpfs"),
        "OomScoreAdj",  # ours is left out; one of the files is in the list below
        *PLAIN_HOST,
        *DNS,
        *LIMITS,
    }
)


def _has_other_option(options: Json) -> bool:
    known = re.compile(
        r"no-new-privileges(=true|=false)?|seccomp=(unconfined|builtin)|apparmor=unconfined|"
        r"label=(disable|(user|role|type|level):.*)"
    )
    return any(not known.fullmatch(option) for option in options or ())


def _has_subpath(mounts: Json) -> bool:
    return any((mount.get("VolumeOptions") or {}).get("Subpath") for mount in mounts or ())


_Refuses = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
_REFUSES: Mapping[str, _Refuses] = {
    "HostConfig.OomScoreAdj": lambda body, host: host.get("OomScoreAdj") not in (None, KILLED_FIRST),
    # An empty one is the image's own.
    "Entrypoint": lambda body, host: body.get("Entrypoint") == [],
    "HostConfig.Binds": lambda body, host: bool(host.get("Binds")),
    "HostConfig.ExtraHosts": lambda body, host: any(
        entry.endswith(":host-gateway") for entry in host.get("ExtraHosts") or ()
    ),
    "HostConfig.Mounts": lambda body, host: _has_subpath(host.get("Mounts")),
    "HostConfig.SecurityOpt": lambda body, host: _has_other_option(host.get("SecurityOpt")),
    "HostConfig.Tmpfs": lambda body, host: any(
        not TMPFS_OPTION.fullmatch(part)
        for text in (host.get("Tmpfs") or {}).values()
        for part in filter(None, text.lower().split(","))
    ),
}

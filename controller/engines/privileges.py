"""What a replica may not do unless the words of its service say so."""

from __future__ import annotations

from typing import Any

MOST_PROCESSES = 8192
"""Processes and threads of a replica without `pids_limit`: a fork bomb ends there. Python with torch has a hundred."""


def restrict(host: dict[str, Any]) -> None:
    """Add the restrictions to a HostConfig of POST /containers/create.

    No new privileges (setuid programs): `security_opt: [no-new-privileges:false]` allows them. No raw packets, by which
    a container passes as another one: `cap_add: [NET_RAW]`. MOST_PROCESSES: `pids_limit`. A privileged one keeps all.
    """
    if not host.get("PidsLimit"):
        host["PidsLimit"] = MOST_PROCESSES
    if host.get("Privileged"):
        return
    options = host.get("SecurityOpt") or []
    if not any(option.startswith("no-new-privileges") for option in options):
        host["SecurityOpt"] = [*options, "no-new-privileges=true"]
    added, dropped = ({_bare(name) for name in host.get(key) or ()} for key in ("CapAdd", "CapDrop"))
    if not {"ALL", "NET_RAW"} & (added | dropped):
        host["CapDrop"] = [*(host.get("CapDrop") or ()), "NET_RAW"]


def _bare(capability: str) -> str:
    return capability.upper().removeprefix("CAP_")

"""What a replica may not do unless the words of its service say so."""

from __future__ import annotations

from typing import Any

MOST_PROCESSES = 8192
"""Processes and threads of a replica without `pids_limit`: a fork bomb ends there. Python with torch has a hundred."""

KILLED_FIRST = 500
"""`oom_score_adj` of a replica without its own: where the machine's memory ends, the kernel kills replicas, the
greatest first, before HAProxy, the controller, the engine and other programs. Anybody may raise the number.
"""


def restrict(host: dict[str, Any]) -> None:
    """Add the restrictions to a HostConfig of POST /containers/create.

    No new privileges (setuid programs): `security_opt: [no-new-privileges:false]` allows them. No raw packets, by which
    a container passes as another one: `cap_add: [NET_RAW]`. MOST_PROCESSES: `pids_limit`; KILLED_FIRST:
    `oom_score_adj`. A privileged one keeps all privileges.
    """
    if not host.get("PidsLimit"):
        host["PidsLimit"] = MOST_PROCESSES
    host.setdefault("OomScoreAdj", KILLED_FIRST)
    if host.get("Privileged"):
        return
    options = host.get("SecurityOpt") or []
    if not any(option.startswith("no-new-privileges") for option in options):
        host["SecurityOpt"] = [*options, "no-new-privileges=true"]
    said = {name.upper().removeprefix("CAP_") for key in ("CapAdd", "CapDrop") for name in host.get(key) or ()}
    if not {"ALL", "NET_RAW"} & said:
        host["CapDrop"] = [*(host.get("CapDrop") or ()), "NET_RAW"]

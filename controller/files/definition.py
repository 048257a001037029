"""A replica's environment, and the hash of its definition, which determines its version.

`controller/files/translate.py` makes the body of the engine's create call (`ServiceSpec.container`),
`controller/engines/labels.py` adds what belongs to one replica. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pierhead.llm_config import VARIABLE as LLM_VARIABLE
from pierhead.serve_block import ServeBlock, variable_text, variables

from ..model.spec import AccessLog, GpuRequest, ProbeSpec
from .problems import ServiceSource
from .shared_memory import SharedMemoryLimits

ADMIN_PORT = 9100
DISCOVERY_ADDRESS = "controller:8101"

RESERVED_ENVIRONMENT = frozenset(
    {
        *variables(),
        "PIERHEAD_PROJECT",
        "PIERHEAD_SERVICE",
        "PIERHEAD_REPLICA",
        "PIERHEAD_VERSION",
        "PIERHEAD_NODE",
        "PIERHEAD_PORT",
        "PIERHEAD_ADMIN_PORT",
        "PIERHEAD_SOCKET",
        "PIERHEAD_ADMIN_SOCKET",
        "PIERHEAD_ADMIN_TOKEN",
        "PIERHEAD_DISCOVERY",
        "PIERHEAD_ACCESS_LOG_SAMPLE",
        "PIERHEAD_GPU_MEMORY_BYTES",
        "PIERHEAD_GPU_FRACTION",
        "PIERHEAD_SHARED_MEMORY_BYTES",
        "PIERHEAD_SHARED_MEMORY_THRESHOLD",
        "PIERHEAD_SHARED_MEMORY_DIR",
    }
)
"""Variables that only the controller sets: the GPU variables in any replica with a GPU slot, the others in managed
replicas. PIERHEAD_MAX_QUEUED_REQUESTS is not among them: a service's max_queued_requests bounds the queues in its
callers, which receive it from Discovery."""

_HASH_FORMAT = 1
"""Raise this when the meaning of `container` changes: every replica is then replaced."""


def managed_environment(
    source: ServiceSource,
    block: ServeBlock,
    drain_s: float,
    memory: SharedMemoryLimits,
    access_log: AccessLog,
    traces: Mapping[str, str],
) -> dict[str, str]:
    """The environment of every replica of a managed service; `create_body` adds its name, version and machine.

    Defaults are set as well: a replica's behaviour must not depend on the defaults of the runtime in its image.
    `traces`: the stack's variables, in whose place a service may have its own.
    """
    own = source.definition.get("environment")
    derived = {
        "PIERHEAD_PROJECT": source.project,
        "PIERHEAD_SERVICE": source.name,
        "PIERHEAD_PORT": str(block.own_port),
        "PIERHEAD_ADMIN_PORT": str(ADMIN_PORT),
        "PIERHEAD_DISCOVERY": DISCOVERY_ADDRESS,
        "PIERHEAD_DRAIN_TIMEOUT_S": f"{drain_s:.10g}",
        "PIERHEAD_ACCESS_LOG": access_log.word,
        "PIERHEAD_ACCESS_LOG_SAMPLE": f"{access_log.sample:.10g}",
        **memory.environment,
        **{name: value for name, value in traces.items() if not (isinstance(own, Mapping) and name in own)},
    }
    if block.streams_requests:  # a body may take as long as its request
        derived["PIERHEAD_BODY_TIMEOUT_S"] = variable_text(block.request_timeout_s)
    written = {
        name: variable_text(value)
        for name, key in variables().items()
        if key.needs_new_container and (value := block.at(key.path)) is not None
    }
    return written | derived | ({LLM_VARIABLE: block.llm.to_json()} if block.llm else {})


def definition_hash(
    container: Mapping[str, Any], *, port: int, managed: bool, gpu: GpuRequest | None, probe: ProbeSpec
) -> str:
    """Sha256 (hex) over every setting whose change needs a new container.

    Request limits and timeouts count only for managed services, whose containers have them in their environment.
    Replicas, routes, placement, queue limits of callers, user_config, probe intervals and metrics do not count: their
    change needs no new container. The probe's port and path count: a wrong probe must fail on a new replica, not on
    the replicas that serve.
    """
    if not managed:
        # StopTimeout is the wait of `docker stop`; the controller itself waits as long as the spec says.
        container = {key: value for key, value in container.items() if key != "StopTimeout"}
    gpu_part: list[Any] | None = None
    if gpu is not None:
        gpu_part = [gpu.count, gpu.device_ids, gpu.capabilities]
        gpu_part += [str(gpu.slot)] if gpu.slot else []
        gpu_part += [{"kind": gpu.kind}] if gpu.kind else []
    whole = {"format": _HASH_FORMAT, "container": container, "port": port, "managed": managed, "gpu": gpu_part}
    whole["probe"] = [probe.port, probe.path]
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()

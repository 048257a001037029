"""The keys of an `x-serve` block as the keywords of a service's class; the compose file's word outranks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypedDict, get_origin, get_type_hints

_EXPECTED: Final = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "text",
    list: "a list",
    Mapping: "a mapping",
}


class XServe(TypedDict, total=False):
    """See compose/reference.yaml. The kinds of values are checked where the compose file is written, all else of them
    where it is read.
    """

    replicas: int
    autoscale: Mapping[str, Any]
    rollout: Mapping[str, Any]
    canary: Mapping[str, Any]
    max_replicas_per_node: int
    gpu: Mapping[str, Any]
    protocol: str
    port: int
    route: str
    strip_prefix: bool
    grpc_services: list[str]
    application: str
    max_ongoing_requests: int
    max_queued_requests: int
    router: Mapping[str, Any]
    backpressure: Mapping[str, Any]
    request_timeout_s: float
    body_timeout_s: float
    graceful_shutdown_wait_loop_s: float
    graceful_shutdown_timeout_s: float
    startup: Mapping[str, Any]
    run_user_code_in_separate_thread: bool
    debug: bool
    logging: Mapping[str, Any]
    user_config: Mapping[str, Any]
    shared_memory: Mapping[str, Any]
    llm: Mapping[str, Any]
    managed: bool
    health: Mapping[str, Any]
    metrics: Mapping[str, Any]


def check_kind(key: str, value: object) -> None:
    """Raise ValueError for a value of another type than the key's. None stands for a key that is left out."""
    kind = get_type_hints(XServe)[key]
    kind = get_origin(kind) or kind
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if value is not None and not fits:
        raise ValueError(f"expected {_EXPECTED[kind]}, found {value!r:.60}")

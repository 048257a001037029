"""`handle()`: the caller's side of a call to another service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

StubT = TypeVar("StubT")


def handle(
    stub: Callable[[Any], StubT],
    service: str,
    *,
    policy: str = "power_of_two",
    timeout_s: float | None = None,
    max_queued_requests: int | None = None,
    transport: str = "grpc",
) -> StubT:
    """The unchanged generated stub, on a channel that finds, balances and bounds calls to a service's replicas."""
    raise NotImplementedError

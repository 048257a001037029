"""The fixtures of the runtime's tests: replicas, and an HTTP client; and a gateway before fake services."""

from __future__ import annotations

from tests.unit.runtime.conftest import client, cluster
from tests.unit.services.gateway_stand import gateway, stand

__all__ = ["client", "cluster", "gateway", "stand"]

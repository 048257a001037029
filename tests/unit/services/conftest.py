"""The fixtures of the runtime's tests: replicas, and an HTTP client."""

from __future__ import annotations

from tests.unit.runtime.conftest import client, cluster

__all__ = ["client", "cluster"]

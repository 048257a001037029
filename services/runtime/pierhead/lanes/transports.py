"""The transports of handles' calls. A new transport is a class that implements `Connection`, and one line here."""

from __future__ import annotations

from collections.abc import Callable

from pierhead.lanes.client import LaneConnection
from pierhead.lanes.connection import Connection, GrpcConnection

Connect = Callable[[str, Callable[[], None]], Connection]
"""Address, and what to call when `ready` changes."""

TRANSPORTS: dict[str, type[LaneConnection | GrpcConnection]] = {"lane": LaneConnection, "grpc": GrpcConnection}
"""`handle(..., transport=...)` -> the function that connects."""

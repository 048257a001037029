"""Composed machine-learning services on plain Docker: what a service imports.

from pierhead import serve, handle, batch
"""

import pierhead.interrupt  # noqa: F401 - first, as the others take long

# isort: split

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pierhead import errors, shared_store, tensors
    from pierhead.batching.batch import batch
    from pierhead.batching.results import ENDED, Ended
    from pierhead.batching.run import current_batch
    from pierhead.calls.clients import close_handles
    from pierhead.calls.handle import handle, has_replica
    from pierhead.classes.endpoints import endpoint
    from pierhead.classes.handles import call, options
    from pierhead.classes.service import Service
    from pierhead.errors import (
        Backpressure,
        BadRequest,
        Broken,
        ContentGone,
        DeadlineExceeded,
        NoReplica,
        NotFound,
        PayloadTooLarge,
        PierheadError,
        ReplicaDied,
        ScaledToZero,
        StoreUnavailable,
        Unavailable,
        UserCodeError,
    )
    from pierhead.http import errors as http_errors
    from pierhead.http.asgi_edge import asgi
    from pierhead.http.events import sse, sse_event
    from pierhead.http.gate import on_request_end
    from pierhead.local_service import local, override_handle
    from pierhead.multiplex.multiplexed import multiplexed
    from pierhead.policies.registry import register_policy
    from pierhead.replica.health import recheck
    from pierhead.replica.process import serve, serve_async
    from pierhead.replica.starting import progress
    from pierhead.request import RequestContext, current_request, set_model_id
    from pierhead.settings import Settings

__all__ = [
    "ENDED",
    "Backpressure",
    "BadRequest",
    "Broken",
    "ContentGone",
    "DeadlineExceeded",
    "Ended",
    "NoReplica",
    "NotFound",
    "PayloadTooLarge",
    "PierheadError",
    "ReplicaDied",
    "RequestContext",
    "ScaledToZero",
    "Service",
    "Settings",
    "StoreUnavailable",
    "Unavailable",
    "UserCodeError",
    "asgi",
    "batch",
    "call",
    "close_handles",
    "current_batch",
    "current_request",
    "endpoint",
    "errors",
    "handle",
    "has_replica",
    "http_errors",
    "local",
    "multiplexed",
    "on_request_end",
    "options",
    "override_handle",
    "progress",
    "recheck",
    "register_policy",
    "serve",
    "serve_async",
    "set_model_id",
    "shared_store",
    "sse",
    "sse_event",
    "tensors",
]

# Before gRPC is imported, as it reads the variable then. At a fork in a process whose gRPC is busy, gRPC's own handlers
# crash the child or stop the parent for ever. Without them the child may do anything but call gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

_HOMES = {
    "batching.batch": "batch",
    "batching.results": "ENDED Ended",
    "batching.run": "current_batch",
    "calls.clients": "close_handles",
    "calls.handle": "handle has_replica",
    "classes.endpoints": "endpoint",
    "classes.handles": "call options",
    "classes.service": "Service",
    "errors": "errors Backpressure BadRequest Broken ContentGone DeadlineExceeded NoReplica"
    " NotFound PayloadTooLarge PierheadError ReplicaDied ScaledToZero StoreUnavailable Unavailable UserCodeError",
    "http.asgi_edge": "asgi",
    "http.errors": "http_errors",
    "http.events": "sse sse_event",
    "http.gate": "on_request_end",
    "local_service": "local override_handle",
    "multiplex.multiplexed": "multiplexed",
    "policies.registry": "register_policy",
    "replica.health": "recheck",
    "replica.process": "serve serve_async",
    "replica.starting": "progress",
    "request": "RequestContext current_request set_model_id",
    "settings": "Settings",
    "shared_store": "shared_store",
    "tensors": "tensors",
}
"""By module, the names that it has; a module's own name is the module."""


def __getattr__(name: str) -> Any:
    """Import a name on its first use: the command needs no gRPC, and a service without HTTP no aiohttp."""
    for module, names in _HOMES.items():
        if name in names.split():
            home = importlib.import_module(f"pierhead.{module}")
            globals()[name] = found = getattr(home, name, home)
            return found
    raise AttributeError(f"module 'pierhead' has no attribute {name!r}")

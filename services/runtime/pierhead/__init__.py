"""Composed machine-learning services on plain Docker: what a service imports.

from pierhead import serve, handle, batch
"""

import pierhead.interrupt  # noqa: F401 - first, as the others take long

# isort: split

from typing import TYPE_CHECKING, Any

from pierhead import errors, shared_store, tensors
from pierhead.batching.batch import batch
from pierhead.batching.results import ENDED, Ended
from pierhead.batching.run import current_batch
from pierhead.calls.clients import close_handles
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
from pierhead.handle import handle, has_replica
from pierhead.http.asgi_edge import asgi
from pierhead.local import local, override_handle
from pierhead.multiplex.multiplexed import multiplexed
from pierhead.policies.registry import register_policy
from pierhead.replica.health import recheck
from pierhead.replica.process import serve, serve_async
from pierhead.replica.starting import progress
from pierhead.request import RequestContext, current_request, set_model_id
from pierhead.settings import Settings

if TYPE_CHECKING:
    from pierhead.http import errors as http_errors
    from pierhead.http.events import sse, sse_event
    from pierhead.http.gate import on_request_end

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


def __getattr__(name: str) -> Any:
    """Import on first use the names that need aiohttp, a quarter of the memory of a service without HTTP."""
    if name in ("sse", "sse_event"):
        from pierhead.http import events

        return getattr(events, name)
    if name == "on_request_end":
        from pierhead.http.gate import on_request_end

        return on_request_end
    if name == "http_errors":
        from pierhead.http import errors as http_errors

        return http_errors
    raise AttributeError(f"module 'pierhead' has no attribute {name!r}")

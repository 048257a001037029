"""Composed machine-learning services on plain Docker: what a service imports.

from pierhead import serve, handle, batch
"""

from pierhead import errors, tensors
from pierhead.batching import batch
from pierhead.errors import (
    Backpressure,
    BadRequest,
    DeadlineExceeded,
    NoReplica,
    NotFound,
    PayloadTooLarge,
    PierheadError,
    ReplicaDied,
    Unavailable,
    UserCodeError,
)
from pierhead.handle import handle
from pierhead.request import RequestContext, current_request
from pierhead.server import serve, serve_async
from pierhead.settings import Settings

__all__ = [
    "Backpressure",
    "BadRequest",
    "DeadlineExceeded",
    "NoReplica",
    "NotFound",
    "PayloadTooLarge",
    "PierheadError",
    "ReplicaDied",
    "RequestContext",
    "Settings",
    "Unavailable",
    "UserCodeError",
    "batch",
    "current_request",
    "errors",
    "handle",
    "serve",
    "serve_async",
    "tensors",
]

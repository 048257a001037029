"""Ray Serve's names: an application that was written for it runs by changing its import.

    from pierhead import rayserve as serve

`serve.run(app)` serves it in this process. `python -m pierhead dev|serve|build module:app` take it as they take a
service written as a class. docs/how-to/from-ray-serve.md says what differs.
"""

from contextlib import suppress

from pierhead.rayserve import (
    batching,
    config,
    context,
    exceptions,
    grpc_util,
    handle,
    metrics,
    request_router,
    schema,
    services,
    utils,
)
from pierhead.rayserve.api import (
    RunTarget,
    delete,
    get_app_handle,
    get_deployment_actor,
    get_deployment_actor_context,
    get_deployment_handle,
    run,
    run_many,
    shutdown,
    shutdown_async,
    start,
    status,
)
from pierhead.rayserve.batching import batch
from pierhead.rayserve.config import ControllerOptions, HTTPOptions
from pierhead.rayserve.context import get_multiplexed_model_id, get_replica_context, get_trace_context
from pierhead.rayserve.deployment import Application, Deployment, deployment, ingress
from pierhead.rayserve.multiplex import multiplexed
from pierhead.rayserve.schema import TracingConfig

with suppress(ImportError):  # after this import, as after Ray Serve's, `import starlette` alone gives these modules
    import starlette.requests
    import starlette.responses
    import starlette.websockets  # noqa: F401

__all__ = [
    "Application",
    "ControllerOptions",
    "Deployment",
    "HTTPOptions",
    "RunTarget",
    "TracingConfig",
    "batch",
    "batching",
    "config",
    "context",
    "delete",
    "deployment",
    "exceptions",
    "get_app_handle",
    "get_deployment_actor",
    "get_deployment_actor_context",
    "get_deployment_handle",
    "get_multiplexed_model_id",
    "get_replica_context",
    "get_trace_context",
    "grpc_util",
    "handle",
    "ingress",
    "metrics",
    "multiplexed",
    "request_router",
    "run",
    "run_many",
    "schema",
    "services",
    "shutdown",
    "shutdown_async",
    "start",
    "status",
    "utils",
]

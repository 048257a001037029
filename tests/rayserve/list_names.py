"""Prints the public names of Ray Serve, with the Python that has it: `python list_names.py >ray_serve_names.txt`.

Modules, what is marked as public in them, parameters of functions, public members of classes.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

MODULES = (
    "ray.serve",
    "ray.serve.autoscaling_policy",
    "ray.serve.batching",
    "ray.serve.config",
    "ray.serve.context",
    "ray.serve.deployment",
    "ray.serve.exceptions",
    "ray.serve.gang",
    "ray.serve.grpc_util",
    "ray.serve.handle",
    "ray.serve.metrics",
    "ray.serve.multiplex",
    "ray.serve.request_router",
    "ray.serve.schema",
    "ray.serve.task_consumer",
    "ray.serve.utils",
)
WITH_PARAMETERS = (
    "ray.serve.batch",
    "ray.serve.deployment",
    "ray.serve.handle.DeploymentHandle.options",
    "ray.serve.multiplexed",
    "ray.serve.run",
    "ray.serve.start",
)
WITH_MEMBERS = (
    "ray.serve.Deployment",
    "ray.serve.config.AutoscalingConfig",
    "ray.serve.config.BackpressureConfig",
    "ray.serve.config.HTTPOptions",
    "ray.serve.config.RequestRouterConfig",
    "ray.serve.config.gRPCOptions",
    "ray.serve.context.ReplicaContext",
    "ray.serve.handle.DeploymentBroadcastResponse",
    "ray.serve.handle.DeploymentHandle",
    "ray.serve.handle.DeploymentResponse",
    "ray.serve.handle.DeploymentResponseGenerator",
    "ray.serve.schema.LoggingConfig",
)


def main() -> None:
    names: set[str] = set()
    for path in MODULES:
        module = importlib.import_module(path)
        exported = getattr(module, "__all__", None)
        for name in exported or vars(module):
            found = getattr(module, name)
            own = getattr(found, "__module__", "") == path and hasattr(found, "_annotated")
            if not name.startswith("_") and (exported or own):
                names.add(f"{path}.{name}")
    for path in WITH_PARAMETERS:
        parameters = inspect.signature(_at(path)).parameters
        names |= {f"{path}({name})" for name in parameters if name not in ("self", "kwargs") and name[0] != "_"}
    for path in WITH_MEMBERS:
        cls = _at(path)
        fields = getattr(cls, "model_fields", None) or getattr(cls, "__dataclass_fields__", {})
        members = {name for name, _ in inspect.getmembers(cls)} if not fields else set(fields)
        own = {name for base in cls.__mro__ if base.__module__.startswith("ray.") for name in vars(base)}
        names |= {f"{path}.{name}" for name in members & (own | set(fields)) if not name.startswith("_")}
    print("\n".join(sorted(names)))


def _at(path: str) -> Any:
    found: Any = importlib.import_module("ray.serve")
    at = "ray.serve"
    for name in path.removeprefix("ray.serve.").split("."):
        at = f"{at}.{name}"
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(at)
    return found


if __name__ == "__main__":
    main()

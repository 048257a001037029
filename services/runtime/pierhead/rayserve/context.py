"""What the running code belongs to: the replica that it runs in, and the request that it works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from pierhead.edge.edge import Reports
from pierhead.held import HELD
from pierhead.rayserve.exceptions import RayServeException
from pierhead.rayserve.schema import ReplicaRank
from pierhead.routing_stats import STATS

DEFAULT_APPLICATION: Final = "default"


@dataclass(frozen=True, repr=False)
class DeploymentID:
    """A deployment of an application."""

    name: str
    app_name: str = DEFAULT_APPLICATION

    def to_replica_actor_class_name(self) -> str:
        """As Ray's dashboard shows it."""
        return f"ServeReplica:{self.app_name}:{self.name}"

    def __repr__(self) -> str:
        return f"Deployment(name='{self.name}', app='{self.app_name}')"


@dataclass(frozen=True, repr=False)
class ReplicaID:
    """A replica of a deployment."""

    unique_id: str
    deployment_id: DeploymentID

    def to_full_id_str(self) -> str:
        """Application, deployment and replica in one text."""
        found = self.deployment_id
        return "SERVE_REPLICA::" + "#".join(part for part in (found.app_name, found.name, self.unique_id) if part)

    def __repr__(self) -> str:
        found = self.deployment_id
        return f"Replica(id='{self.unique_id}', deployment='{found.name}', app='{found.app_name}')"


@dataclass
class ReplicaContext:
    """The replica that the running code is part of."""

    replica_id: ReplicaID
    servable_object: Any
    """The object of the deployment's class, or its function."""
    _deployment_config: Any = None
    rank: ReplicaRank = field(default_factory=lambda: ReplicaRank(rank=0, node_rank=0, local_rank=0))
    world_size: int = 1
    gang_context: None = None
    code_version: str | None = None
    _dispatchers: Mapping[DeploymentID, Any] = field(default_factory=dict)
    """What sends the replica's own calls: those of its version of the application."""
    _reports: Reports = field(default_factory=lambda: Reports(HELD, STATS))
    """What callers' policies receive."""
    _shares_process: bool = False
    """With other replicas, which continue when user code of this one calls `sys.exit`."""

    @property
    def app_name(self) -> str:
        """The application's name."""
        return self.replica_id.deployment_id.app_name

    @property
    def deployment(self) -> str:
        """The deployment's name."""
        return self.replica_id.deployment_id.name

    @property
    def replica_tag(self) -> str:
        """What tells the replica from the deployment's others."""
        return self.replica_id.unique_id


@dataclass(frozen=True)
class _RequestContext:
    """The request that the running code works on, and what goes with the arguments of a call."""

    request_id: str = ""
    route: str = ""
    app_name: str = ""
    multiplexed_model_id: str = ""
    session_id: str = ""
    call_method: str = "__call__"
    is_http_request: bool = False
    _client: str = ""
    grpc_context: None = None

    @property
    def _internal_request_id(self) -> str:
        return self.request_id

    internal_request_id = _internal_request_id


_REPLICA: ContextVar[ReplicaContext | None] = ContextVar("rayserve_replica", default=None)
REPLICAS: Final[list[ReplicaContext]] = []
"""The replicas of this process. If there is one, threads that carry no context belong to it."""

_serve_request_context: ContextVar[_RequestContext | None] = ContextVar("rayserve_request", default=None)
_BATCH: ContextVar[tuple[_RequestContext, ...]] = ContextVar("rayserve_batch", default=())
CHILDREN: ContextVar[set[Any] | None] = ContextVar("rayserve_children", default=None)
"""The calls in flight that the running request has begun: they are cancelled with it."""


def _get_serve_request_context() -> _RequestContext:
    return _serve_request_context.get() or _RequestContext()


def current_replica() -> ReplicaContext | None:
    """The replica of the running code; None outside of one."""
    found = _REPLICA.get()
    return REPLICAS[0] if found is None and len(REPLICAS) == 1 else found


_get_internal_replica_context = current_replica
"""Ray Serve's name, which its guide of request routers uses."""


def enter_replica(context: ReplicaContext, request: _RequestContext | None = None) -> None:
    """Make the running context one of a replica, and of a request in it. Called in a context of its own."""
    _REPLICA.set(context)
    _serve_request_context.set(request)
    _BATCH.set(())
    CHILDREN.set(None if request is None else set())


def cancel_children() -> None:
    """Cancel the calls in flight that the running request has begun."""
    for child in list(CHILDREN.get() or ()):
        child.cancel()


def enter_batch(requests: Iterable[_RequestContext]) -> None:
    """Let the running task, which has a context of its own, compute a batch of these requests. It belongs to none."""
    replica = current_replica()
    if replica is not None:
        enter_replica(replica, _RequestContext())
    _BATCH.set(tuple(requests))


def get_replica_context() -> ReplicaContext:
    """The replica that calls this. Raises RayServeException outside of a replica."""
    found = current_replica()
    if found is None:
        raise RayServeException("`serve.get_replica_context()` may only be called from within a Ray Serve deployment.")
    return found


def get_multiplexed_model_id() -> str:
    """The model that the current request is for, "" if it names none."""
    batch = _BATCH.get()
    return batch[0].multiplexed_model_id if batch else _get_serve_request_context().multiplexed_model_id


def get_trace_context() -> dict[str, str] | None:
    """The trace of the current request as OpenTelemetry's propagators read it; None without one."""
    from pierhead.request import TRACEPARENT_KEY, current_request

    request = current_request()
    traceparent = None if request is None else request.traceparent
    return None if traceparent is None else {TRACEPARENT_KEY: traceparent}

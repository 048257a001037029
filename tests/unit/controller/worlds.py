"""Small builders of specs and snapshots, so that a planner test reads as a picture of the world."""

from __future__ import annotations

from typing import Any

from controller.model.actions import replica_name
from controller.model.desired import Desired
from controller.model.observed import Observed
from controller.model.spec import GpuRequest, ProbeSpec, RolloutSpec, ServiceSpec, backend_name
from controller.model.world import (
    ContainerState,
    Gpu,
    ReplicaContainer,
    ReplicaHealth,
    Retirement,
    RoutingState,
    Server,
    ServerState,
    version_of,
)

NOW = 1_000.0
PROJECT = "p"
IMAGE_ID = "sha256:1"
ROUTES = "routes1"


def service(name: str = "web", **changes: Any) -> ServiceSpec:
    """A routed HTTP service of two replicas, by default."""
    fields: dict[str, Any] = {
        "name": name,
        "image": f"image/{name}",
        "protocol": "http",
        "port": 8080,
        "replicas": 2,
        "probe": ProbeSpec(port=9100, path="/readyz"),
        "route": f"/{name}",
        "has_build": True,
        "definition_hash": "d1",
        "rollout": RolloutSpec(bake_s=0.0),
    }
    return ServiceSpec(**{**fields, **changes})


def gpu_service(name: str = "ranker", **changes: Any) -> ServiceSpec:
    """A gRPC service without a route whose replicas take one GPU each."""
    fields: dict[str, Any] = {"protocol": "grpc", "port": 50051, "route": None, "gpu": GpuRequest(count=1)}
    return service(name, **{**fields, **changes})


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(uuid=f"GPU-{index}") for index in range(count))


def version(spec: ServiceSpec) -> str:
    return version_of(spec.definition_hash, IMAGE_ID)


def replica(spec: ServiceSpec, number: int, **changes: Any) -> ReplicaContainer:
    """A running, ready replica with nothing in flight."""
    its_version = changes.pop("version", version(spec))
    name = replica_name(PROJECT, spec.name, its_version, number)
    fields: dict[str, Any] = {
        "id": f"id-{name}",
        "name": name,
        "service": spec.name,
        "version": its_version,
        "number": number,
        "state": ContainerState.RUNNING,
        "ip": f"10.0.0.{number}",
        "created_at": NOW - 100,
        "started_at": NOW - 100,
        "health": ReplicaHealth.READY,
        "ongoing": 0,
        "ongoing_at": NOW,
    }
    return ReplicaContainer(**{**fields, **changes})


def server(container: ReplicaContainer, port: int = 8080, **changes: Any) -> Server:
    """HAProxy's server of a replica, ready and idle."""
    fields: dict[str, Any] = {
        "backend": backend_name(container.service),
        "name": container.name,
        "address": f"{container.ip}:{port}",
        "state": ServerState.READY,
        "up": True,
    }
    return Server(**{**fields, **changes})


def routing(*servers: Server, **changes: Any) -> RoutingState:
    fields: dict[str, Any] = {"pid": 7, "started_at": 0.0, "version": "3.0.11", "routing_hash": ROUTES}
    backends = frozenset({"svc_web", "svc_ranker", *(server.backend for server in servers)})
    return RoutingState(**{**fields, "servers": servers, "backends": backends, **changes})


def retirement(container: ReplicaContainer, **changes: Any) -> dict[str, Retirement]:
    fields: dict[str, Any] = {
        "replica": container.name,
        "container_id": container.id,
        "draining_since": NOW - 1,
        "stopping_since": None,
        "cause": "2 replicas, 1 wanted",
    }
    return {container.id: Retirement(**{**fields, **changes})}


def desired(*specs: ServiceSpec, **targets: int) -> Desired:
    services = {spec.name: spec for spec in specs}
    wanted = {name: targets.get(name, spec.replicas) for name, spec in services.items()}
    return Desired(project=PROJECT, services=services, targets=wanted, routing_hash=ROUTES)


def observed(*containers: ReplicaContainer, specs: tuple[ServiceSpec, ...] = (), **changes: Any) -> Observed:
    """A snapshot in which every image exists and HAProxy has a server for each ready replica of a routed service."""
    by_name = {spec.name: spec for spec in specs}
    servers = tuple(
        server(container, by_name[container.service].port)
        for container in containers
        if container.service in by_name
        and (by_name[container.service].route or by_name[container.service].grpc_services)
        and container.state is ContainerState.RUNNING
        and container.health is ReplicaHealth.READY
    )
    fields: dict[str, Any] = {
        "containers": containers,
        "images": {spec.image: IMAGE_ID for spec in specs},
        "routing": routing(*servers),
    }
    return Observed(**{**fields, **changes})

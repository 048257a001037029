"""The shape of each JSON document of the REST API, for its OpenAPI document and the tests that check real answers.

The documents themselves are made in documents.py and in the API's handlers; nothing is checked against these at run
time.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..model.plan import PendingReplica
from ..model.reports import AutoscaleStatus, EventOutcome, NodeStatus, ReplicaStatus, ServiceState
from ..model.world import Server
from .view import GpuUse


class Document(BaseModel):
    """A JSON object with exactly these members. Times are unix times by the machine's wall clock."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Failure(Document):
    """Replicas that failed in a row."""

    count: int
    last_at: float
    detail: str


class RefusedAction(Document):
    """An action that failed and waits for its next try."""

    does: str
    failures: int
    retry_in_s: float
    error: str


class UserConfig(Document):
    """A service's user_config, and in how many replicas it is in force."""

    value: Any
    """As in the compose files."""
    wanted: str
    """Its digest."""
    applied: int
    """Replicas in which it is in force."""
    replicas: int
    refused: list[str]
    """One sentence for each replica that rejects it."""
    refusing: list[str]
    """The names of these replicas."""
    changes: list[str]


class RolloutDocument(Document):
    """A rollout in progress."""

    source: str | None = Field(alias="from")
    to: str
    phase: str
    since: float
    begun_at: float
    cause: str
    ready: int
    wanted: int
    message: str


class RejectionDocument(Document):
    """A version of the files that does not run until a user asks for it, or the files give another one."""

    id: str
    """Does not change when the clock is set."""
    version: str
    reason: str
    at: float
    is_asked: bool
    """A user asked for it: nothing has failed."""
    is_refused: bool
    """Its contract cannot meet that of the version that runs: it has not served."""


class Service(Document):
    """One service."""

    name: str
    state: ServiceState
    message: str
    wanted: int
    ready: int
    replicas: list[ReplicaStatus]
    converged: bool
    """As many replicas as wanted, all ready and of the current version, none retiring."""
    blocked: str
    """Why waiting will not make it converge; "" when it may."""
    override: int | None
    """The number that `scale` has set."""
    autoscale: AutoscaleStatus | None
    at: float
    engine_reachable: bool
    image: str | None
    protocol: str | None
    port: int | None
    route: str | None
    grpc_services: list[str]
    user_config: UserConfig | None
    unknown_callees: dict[str, str]
    """Names that its code calls although no service has that name, each with a sentence."""
    version: str | None
    """The version of new replicas."""
    offered: str | None
    """The version that the files and the image define."""
    stable: str | None
    """The version that has proven itself."""
    changes: list[str]
    """The differences between `offered` and `stable`."""
    untried: bool
    rollout: RolloutDocument | None
    rejected: RejectionDocument | None
    in_flight: float | None
    """Requests in its replicas."""
    waiting: float | None
    """Requests that wait for a replica, in callers and in HAProxy."""
    spec_replicas: int | None
    """The number in the compose files."""
    failure: Failure | None
    refusals: list[RefusedAction]


class Services(Document):
    """The whole stack, as `pierhead status` shows it."""

    project: str
    at: float
    services: list[Service]
    gpus: list[GpuUse]
    nodes: list[NodeStatus]
    """None where the engine is one machine."""
    gpu_memory_problem: str
    spec_problems: list[str]
    """The problems of the compose files; while there are any, the last good files are in force."""
    notices: list[str]
    settled: bool
    """Whether compose files have been read."""
    files_current: bool
    """Whether this answer is about the files as they are now."""
    engine_reachable: bool


class ReplicaLog(Document):
    """The last lines of one replica's log, and the Engine's time of each."""

    name: str
    lines: list[str]
    times: list[str]


class Logs(Document):
    """The logs of a service's replicas."""

    service: str
    at: float
    replicas: list[ReplicaLog]


class RevisionDocument(Document):
    """A version that a service can go back to."""

    version: str
    image: str
    image_id: str
    first_at: float
    current: bool
    stable: bool


class Revisions(Document):
    """The versions of a service, the newest first."""

    service: str
    at: float
    revisions: list[RevisionDocument]


class ActionDocument(Document):
    """One action of the controller."""

    action: str
    target: str
    service: str
    does: str
    cause: str


class StepDocument(ActionDocument):
    """An action of the plan, and the numbers of the actions that come before it."""

    number: int
    after: list[int]


class PlanDocument(Document):
    """What the controller would do now, and what it is doing."""

    spec_problems: list[str]
    steps: list[StepDocument]
    pending: list[PendingReplica]
    in_progress: list[ActionDocument]
    text: str
    """The same as text."""


class HAProxyProcess(Document):
    """The HAProxy worker that accepts new connections."""

    pid: int
    started_at: float
    version: str


class Route(Document):
    """One of HAProxy's routes to a service."""

    protocol: Literal["http", "grpc"]
    match: str
    """A path prefix, or a gRPC service's full name."""
    application: str | None
    """The metadata by which clients choose between services that have the same gRPC service."""
    service: str
    strip_prefix: bool
    in_haproxy: bool
    queued: int
    servers: list[Server]


class Routes(Document):
    """Every route; `haproxy` is null while it does not answer."""

    at: float
    haproxy: HAProxyProcess | None
    routes: list[Route]


class EventDocument(Document):
    """Something that happened."""

    seq: int
    at: float
    kind: str
    service: str
    target: str
    message: str
    outcome: EventOutcome
    last_at: float
    """When it happened last; `times` says how often."""
    times: int


class Events(Document):
    """Events, the oldest first."""

    events: list[EventDocument]
    next: int
    """The `since` of the next request."""


class Target(Document):
    """A target group of Prometheus's http_sd."""

    targets: list[str]
    labels: dict[str, str]


class Health(Document):
    """Whether the controller works. 503 unless `status` is "ok"."""

    status: Literal["ok", "failing", "stuck"]
    last_tick_age_s: float
    engine_reachable: bool | None
    haproxy_reachable: bool | None
    spec_problems: list[str]
    store_trouble: str | None
    defect: str | None


class Scale(Document):
    """The number of replicas that a service shall have."""

    replicas: int | Literal["auto"]
    """0 to 1000; "auto" removes a number that was set."""


class Scaled(Document):
    """The change was accepted; the controller carries it out."""

    service: str
    replicas: int | Literal["auto"]
    message: str = ""
    wanted: int | None = None
    """The files' own number, with "auto" and without an autoscaler."""


class Deploy(Document):
    """Which services to roll out; without `services` all of them. `now`: without `bake_s`."""

    services: list[str] | None = None
    now: bool = False


class Deployed(Document):
    """A sentence for each service: which rollout begins, or why none does."""

    services: dict[str, Any]


class Rollback(Document):
    """The version to go back to; without `to` the one before."""

    to: str | None = None


class Nothing(Document):
    """An empty object, or no body."""


class Asked(Document):
    """The change was accepted; the controller carries it out."""

    service: str
    message: str


class Mark(Document):
    """Why a GPU is not to be used; null removes the mark."""

    fault: str | None


class Marked(Mark):
    """The mark of a GPU."""

    gpu: str


class Nodes(Document):
    """The nodes, by name; none where the engine is one machine."""

    at: float
    nodes: list[NodeStatus]
    engine_reachable: bool | None


class Drain(Document):
    """With `force`, replicas for which no other node has room end as well."""

    force: bool = False


class Labels(Document):
    """Labels to set; null takes one away."""

    labels: dict[str, str | None]


class NodeAsked(Document):
    """The change was made; the controller carries out what follows of it."""

    node: str
    message: str


class ErrorBody(Document):
    """What, where, why, and what to do."""

    code: str
    message: str


class Error(Document):
    """Every refusal and failure."""

    error: ErrorBody

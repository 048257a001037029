"""The documents about logs, versions, the plan, routes, events and the controller itself, and its refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ...api_tokens import Role
from ...model.plan import PendingReplica
from ...model.reports import EventOutcome
from ...model.spec import Auth
from ...model.world import Server
from .document import Document
from .services import GpuUse, MachineDocument, NodeStatus, Service


@dataclass(frozen=True, slots=True)
class ReplicaLog(Document):
    """The last lines of one replica's log, and the Engine's time of each."""

    name: str
    lines: tuple[str, ...]
    times: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Logs(Document):
    """The logs of a service's replicas."""

    service: str
    at: float
    replicas: tuple[ReplicaLog, ...]


@dataclass(frozen=True, slots=True)
class RevisionDocument(Document):
    """A version that a service can go back to."""

    version: str
    image: str
    image_id: str
    first_at: float
    current: bool
    stable: bool


@dataclass(frozen=True, slots=True)
class Revisions(Document):
    """The versions of a service, the newest first."""

    service: str
    at: float
    revisions: tuple[RevisionDocument, ...]


@dataclass(frozen=True, slots=True)
class KeyDocument(Document):
    """A key of clients. A limit of 0 is none; no services, or no models: every one."""

    name: str
    services: tuple[str, ...]
    models: tuple[str, ...]
    per_minute: int
    tokens_per_minute: int
    concurrent: int
    made_at: float
    ends_at: float | None
    used_at: float | None
    """About when it was last used; null = never, as far as is known."""


@dataclass(frozen=True, slots=True)
class Keys(Document):
    """The keys of clients, by name."""

    at: float
    keys: tuple[KeyDocument, ...]


@dataclass(frozen=True, slots=True)
class ActionDocument(Document):
    """One action of the controller."""

    action: str
    target: str
    service: str
    does: str
    cause: str


@dataclass(frozen=True, slots=True)
class StepDocument(Document):
    """An action of the plan, and the numbers of the actions that come before it."""

    number: int
    after: tuple[int, ...]
    action: str
    target: str
    service: str
    does: str
    cause: str


@dataclass(frozen=True, slots=True)
class PlanDocument(Document):
    """What the controller would do now, and what it is doing; with spec_problems, for the last good files."""

    spec_problems: tuple[str, ...]
    steps: tuple[StepDocument, ...]
    pending: tuple[PendingReplica, ...]
    in_progress: tuple[ActionDocument, ...]
    text: str
    """The same as text."""


@dataclass(frozen=True, slots=True)
class HAProxyProcess(Document):
    """The HAProxy worker that accepts new connections."""

    pid: int
    started_at: float
    version: str


@dataclass(frozen=True, slots=True)
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
    servers: tuple[Server, ...]


@dataclass(frozen=True, slots=True)
class Routes(Document):
    """Every route; `haproxy` is null while it does not answer."""

    at: float
    haproxy: HAProxyProcess | None
    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Events(Document):
    """Events, the oldest first."""

    events: tuple[EventDocument, ...]
    next: int
    """The `since` of the next request."""


@dataclass(frozen=True, slots=True)
class WebhookBody(Document):
    """What a webhook gets."""

    text: str
    """The messages of the events, as chats show them."""
    project: str
    events: tuple[EventDocument, ...]


@dataclass(frozen=True, slots=True)
class StateRow(Document):
    """One row of the controller's state."""

    kind: str
    key: str
    """JSON, as `value`."""
    value: str


@dataclass(frozen=True, slots=True)
class Backup(Document):
    """Everything in the controller's state, secrets included."""

    version: int
    """Of the state: a controller restores what its version, or an earlier one, has."""
    project: str
    at: float
    """When it was made."""
    build: str
    """Of the controller that made it."""
    last_seq: int
    """The greatest number that an event had."""
    rows: tuple[StateRow, ...]
    events: tuple[EventDocument, ...]


@dataclass(frozen=True, slots=True)
class LLMTraffic(Document):
    """A language model's numbers at each point in time, the newest last; null = not known."""

    tokens: tuple[float | None, ...]
    """Tokens per second that its engines generate."""
    first_p50_s: tuple[float | None, ...]
    """Half of the streams had their first token after at most so many seconds at the gateway."""
    first_p99_s: tuple[float | None, ...]
    running: tuple[float | None, ...]
    """Requests that its engines generate for."""
    waiting: tuple[float | None, ...]
    """Requests that wait in its engines."""
    kv_use: tuple[float | None, ...]
    """Share of the key-value cache in use, 0 to 1, of the replica with the least free."""


@dataclass(frozen=True, slots=True)
class ServiceTraffic(Document):
    """A service's requests at each point in time, the newest last; null = not known."""

    rate: tuple[float | None, ...]
    """Requests per second."""
    errors: tuple[float | None, ...]
    """Requests per second that failed by the service's own fault."""
    p50_s: tuple[float | None, ...]
    """Half of the requests took at most so many seconds."""
    p99_s: tuple[float | None, ...]
    ongoing: tuple[float | None, ...]
    """Requests in its replicas."""
    queued: tuple[float | None, ...]
    """Calls that wait in other services for one of its replicas."""
    edge: tuple[float | None, ...]
    """Requests per second that reach it through HAProxy."""
    llm: LLMTraffic | None = None
    """Left out: it is no language model, or its engines tell nothing."""


@dataclass(frozen=True, slots=True)
class Traffic(Document):
    """The traffic of the services that have any."""

    at: float
    """Of the newest point."""
    step_s: float
    """Seconds from one point to the next."""
    services: Mapping[str, ServiceTraffic]
    problem: str
    """Why there are no numbers; "" where Prometheus has answered."""

    def latest(self, service: str) -> LatestTraffic:
        """A service's newest numbers."""
        found = self.services.get(service)
        return LatestTraffic() if found is None else LatestTraffic(found.rate[-1], found.p50_s[-1], found.p99_s[-1])


@dataclass(frozen=True, slots=True)
class LatestTraffic:
    """Requests per second, and quantiles of their durations in seconds. None = not known."""

    rate: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class AlertDocument(Document):
    """An alert that fires; docs/how-to/alerts.md has them all."""

    name: str
    service: str
    """"" = it is about the whole stack."""
    severity: str
    """critical or warning."""
    summary: str
    description: str
    runbook: str
    """Where the docs say what to do."""
    since: float
    silenced_by: tuple[str, ...]
    """Ids of the silences that hold it back."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Alerts(Document):
    """What fires now, the newest first."""

    at: float
    alerts: tuple[AlertDocument, ...]
    is_sent: bool
    """Whether the stack has an Alertmanager that sends alerts to somebody."""
    problem: str
    """Why alerts, or what is silenced, are not known; "" where both are."""


@dataclass(frozen=True, slots=True)
class SilenceDocument(Document):
    """What is not sent for a while: an alert of a service, or all of one of them ("")."""

    id: str
    alert: str
    service: str
    others: str
    """Further conditions, which only other programs make."""
    by: str
    why: str
    starts_at: float
    ends_at: float


@dataclass(frozen=True, slots=True)
class Silences(Document):
    """The silences that have not ended, the next to end first."""

    at: float
    silences: tuple[SilenceDocument, ...]


@dataclass(frozen=True, slots=True)
class StackPart(Document):
    """The stack without its services, as a page shows it; see Services."""

    project: str
    machine: MachineDocument | None
    """null: not known, or there are several."""
    gpus: tuple[GpuUse, ...]
    nodes: tuple[NodeStatus, ...]
    gpu_memory_problem: str
    spec_problems: tuple[str, ...]
    notices: tuple[str, ...]
    settled: bool
    engine_reachable: bool | None
    haproxy_reachable: bool | None
    grafana_port: int | None
    """Of the machine; null = there is no Grafana."""


PartValue: TypeAlias = StackPart | PlanDocument | Service | EventDocument


@dataclass(frozen=True, slots=True)
class LivePart(Document):
    """A part of what a page shows, which is new or has changed. It replaces the part of this name."""

    part: str
    """stack, plan, service/<name> or event/<number>."""
    value: PartValue | None
    """null: there is no such part any more."""


@dataclass(frozen=True, slots=True)
class MethodDocument(Document):
    """A gRPC method that clients can call at HAProxy."""

    path: str
    """/shop.Ranker/rank"""
    example: Mapping[str, Any]
    """A message as JSON."""


@dataclass(frozen=True, slots=True)
class ClientContract(Document):
    """How clients call a service at HAProxy."""

    service: str
    host: str | None
    """The name, or "*.name", that requests for its route are sent to; null = whatever name."""
    route: str | None
    """The path; null = HAProxy sends it no HTTP requests."""
    auth: Auth
    """key, jwt: HAProxy asks for a key of the stack, or for a token."""
    methods: tuple[MethodDocument, ...]
    """Those of its gRPC services that the contract of a replica has."""


@dataclass(frozen=True, slots=True)
class TryHead(Document):
    """The beginning of an answer."""

    status: str
    """"200 OK"; "" of gRPC, whose status comes at the end."""
    headers: tuple[tuple[str, str], ...]
    first_byte_s: float
    """Seconds from the request to the answer's first byte."""


@dataclass(frozen=True, slots=True)
class TryEnd(Document):
    """The end of an answer."""

    total_s: float
    bytes: int
    """Of the body, as far as it was read."""
    status: str
    """Of gRPC: "OK"; "" of HTTP."""
    problem: str
    """Why the answer is not whole; "" = it is."""


@dataclass(frozen=True, slots=True)
class TryPart(Document):
    """A part of an answer, as soon as it is there."""

    request_id: str
    """By which logs have the request."""
    head: TryHead | None = None
    text: str = ""
    """The next piece of the body: what is not UTF-8 is shown as \ufffd."""
    end: TryEnd | None = None


@dataclass(frozen=True, slots=True)
class Caller(Document):
    """Who asks."""

    name: str
    role: Role
    """It may do what this role allows, and what lesser ones do: read, scale, deploy, admin."""


@dataclass(frozen=True, slots=True)
class Target(Document):
    """A target group of Prometheus's http_sd."""

    targets: tuple[str, ...]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Health(Document):
    """Whether the controller works. 503 unless `status` is "ok"."""

    status: Literal["ok", "failing", "stuck"]
    last_tick_age_s: float
    engine_reachable: bool | None
    haproxy_reachable: bool | None
    spec_problems: tuple[str, ...]
    store_trouble: str
    defect: str


@dataclass(frozen=True, slots=True)
class ErrorBody(Document):
    """What, where, why, and what to do."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Error(Document):
    """Every refusal and failure."""

    error: ErrorBody

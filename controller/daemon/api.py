"""The REST API. It answers from the view that the loop published last, and passes changes on to `commands`. Its calls:
CALLS, at the end, and status/openapi.py for machines.

Times are unix times by the machine's present wall clock.
daemon/callers.py says who gets an answer. Changes are answered with 202 before the world has changed.
Operations on language models are answered with 200, when the replicas have answered.
Errors: {"error": {"code", "message"}}.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Final

from aiohttp import web
from pierhead.json_data import not_json

from ..build import BUILD_HEADER, current_build
from ..desired.targets import rehearsed
from ..errors import ControllerError, InvalidRequest, NotYet
from ..files.watch import SpecWatch
from ..model.actions import KINDS
from ..model.spec import MOST_REPLICAS, ServiceSpec
from ..model.text import one_line, whole_number
from ..observe.traces import ReplicaTraces
from ..plan import plan
from ..status import documents, openapi
from ..status.live import EVENTS, LiveParts, SentPart
from ..status.methods import methods
from ..status.openapi import ApiCall, Query, whole_query
from ..status.publisher import Publisher
from ..status.records import answers, changes
from ..status.records.document import as_json
from ..status.records.services import Nodes, Service, Services
from ..status.records.traces import Traces
from ..status.traces import MOST_TRACES, joined
from ..status.traffic import AskSeries, TrafficReader
from ..status.view import View
from ..storage.events import EventLog
from . import bodies
from .api_socket import user_of
from .apply import Executor
from .callers import Gatekeeper
from .commands import Commands
from .console import add_page, page
from .edge_calls import EdgeAddress, EdgeCalls
from .live import Live

logger = logging.getLogger(__name__)

MOST_LINES = 10_000
MOST_EVENTS = 1000
LONGEST_WAIT_S = 60
MOST_MINUTES = 24 * 60
BODY_LIMIT = 64 * 1024
MOST_OF_BODY = 300
"""Characters of a change that its event has."""
LOOKS = ("GET", "HEAD", "OPTIONS")
"""Methods of HTTP that change nothing: requests that are tried by them are counted together."""
RETRY_AFTER_S = 1
"""The Retry-After of a request that came before the controller's first look."""
STUCK_AFTER_S = 120.0
"""A loop without a tick for this long is not healthy; the slowest look at an engine takes less."""

CALLER = web.RequestKey("caller", answers.Caller)
"""Who has sent a request."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class Api:
    """Routes and handlers. `clock` is the loop's, `wall` the machine's."""

    _commands: Commands
    _publisher: Publisher
    _events: EventLog
    _specs: SpecWatch
    _executor: Executor
    _gatekeeper: Gatekeeper
    _ask_series: AskSeries
    _replica_traces: ReplicaTraces
    _edge: EdgeAddress
    _grafana_port: int | None
    _clock: Callable[[], float]
    _wall: Callable[[], float]

    def __post_init__(self) -> None:
        self._closing = asyncio.Event()
        self._live_parts = LiveParts(self._grafana_port)
        self._traffic = TrafficReader(self._ask_series, self._wall)
        self._live = Live(self._parts, self._closing)
        self._edge_calls = EdgeCalls(self._edge, self._closing)

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(
            middlewares=[answer_errors, self.keep_changes, self.admit_callers], client_max_size=BODY_LIMIT
        )
        for call in CALLS.values():
            add = app.router.add_get if call.method == "GET" else partial(app.router.add_route, call.method)
            add(call.path, self._handler(call))
        add_page(app)
        app.on_shutdown.append(self._close)
        app.on_response_prepare.append(_name_build)
        return app

    def _handler(self, call: ApiCall) -> Handler:
        """A call's handler, which reads the body and answers with what it returns."""

        @wraps(call.handler)
        async def handle(request: web.Request) -> web.StreamResponse:
            wanted = () if call.body is None else (call.body(await _sent(request, call)),)
            found = await call.handler(self, request, *wanted)
            return found if isinstance(found, web.StreamResponse) else answer(found, call.status)

        return handle

    @web.middleware
    async def admit_callers(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer 421 to a request that a web page may have sent by a name of its own for this machine, 403 to callers
        that may not ask. Events tell who has asked for a change, or for a backup; a restored state has its own.
        """
        self._gatekeeper.refuse_unknown_host(request.headers.get("Host"))
        call, is_read = _call_of(request), request.method in ("GET", "HEAD")
        is_page = request.match_info.handler is page
        role = call.role if call else None if is_page else "read" if is_read else "admin"
        if role is None:
            return await handler(request)
        uid = user_of(request.transport)
        request[CALLER] = self._gatekeeper.admit(request.remote, request.headers, role, uid)
        if not is_read:
            self._commands.backups.refuse_late_changes()
        response = await handler(request)
        if role != "read" and response.status < 400 and not (call and call.notes_itself):
            await self._note_request(request)
        return response

    async def _note_request(self, request: web.Request) -> None:
        body = one_line((await request.read()).decode(errors="replace"))
        path = request.path.removeprefix("/api/v1/")
        said = f"{_who_asks(request)}: {request.method} {path} {body[:MOST_OF_BODY]}".rstrip()
        name = request.match_info.get("name", "")
        target = request.match_info.get("uuid") or request.match_info.get("node") or ""
        self._events.record("asked", said, service=name, target=target, each=True)

    @web.middleware
    async def keep_changes(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a change when it is stored."""
        response = await handler(request)
        if request.method != "GET":
            await self._commands.stored()
        return response

    def _parts(self) -> Mapping[str, SentPart]:
        newest = self._events.select(limit=EVENTS)
        return self._live_parts.now(self._publisher.view, self._executor.in_progress, newest)

    async def services(self, request: web.Request) -> Services:
        """The whole stack, as `pierhead status` shows it."""
        view = self._publisher.view
        return Services(
            project=view.project,
            at=view.wall_time(view.at),
            services=view.services,
            gpus=view.gpus,
            nodes=view.nodes,
            machine=documents.machine_document(view),
            gpu_memory_problem=view.gpu_memory_problem,
            spec_problems=view.spec_problems,
            notices=view.notices,
            settled=view.desired is not None,
            files_current=await self._specs.is_current(view.files),
            engine_reachable=view.engine_reachable,
        )

    async def service(self, request: web.Request) -> Service:
        """One service."""
        name = request.match_info["name"]
        view = self._publisher.view
        row = next((row for row in view.services if row.name == name), None)
        if row is None:
            self._specs.known(name)
            raise NotYet(f"{name} was just added and has not been looked at yet; repeat in a second")
        return row

    async def scale(self, request: web.Request, wanted: changes.Scale) -> changes.Scaled:
        """Set how many replicas a service should have."""
        name, replicas = request.match_info["name"], None if wanted.replicas == "auto" else wanted.replicas
        message = self._commands.scale(name, replicas)
        spec = self._specs.known(name).services[name]
        in_files = spec.replicas if replicas is None and spec.autoscale is None else None
        return changes.Scaled(name, wanted.replicas, message, in_files)

    async def revisions(self, request: web.Request) -> answers.Revisions:
        """The versions that a service can go back to."""
        name = request.match_info["name"]
        revisions, wanted, stable = self._commands.revisions(name)
        view = self._publisher.view
        listed = tuple(
            answers.RevisionDocument(
                version=revision.version,
                image=revision.image,
                image_id=revision.image_id,
                first_at=view.wall_time(revision.first_at),
                current=revision.version == wanted,
                stable=revision.version == stable,
            )
            for revision in revisions
        )
        return answers.Revisions(name, self._wall(), listed)

    async def deploy(self, request: web.Request, wanted: changes.Deploy) -> changes.Deployed:
        """Roll out what the compose files and images give."""
        return changes.Deployed(await self._commands.deploy(wanted.services, is_watched=not wanted.now))

    async def rollback(self, request: web.Request, wanted: changes.Rollback) -> changes.Asked:
        """Go back to an earlier version."""
        name = request.match_info["name"]
        return changes.Asked(name, await self._commands.roll_back(name, wanted.to))

    async def abort(self, request: web.Request, _: changes.Nothing) -> changes.Asked:
        """End a rollout: the former version serves again."""
        name = request.match_info["name"]
        return changes.Asked(name, self._commands.abort(name))

    async def promote(self, request: web.Request, _: changes.Nothing) -> changes.Asked:
        """End the watch over a first batch."""
        name = request.match_info["name"]
        return changes.Asked(name, self._commands.promote(name))

    async def restart(self, request: web.Request, _: changes.Nothing) -> changes.Asked:
        """Replace every replica by one of the same definition."""
        name = request.match_info["name"]
        return changes.Asked(name, await self._commands.restart(name))

    async def operate(self, request: web.Request, wanted: changes.Operate) -> changes.Operated:
        """Have every ready replica of a language model sleep, wake up or drop its cache of prompts."""
        name = request.match_info["name"]
        return changes.Operated(name, wanted.operation, await self._commands.operate(name, wanted))

    async def contract(self, request: web.Request) -> answers.ClientContract:
        """How clients call a service at HAProxy."""
        spec = self._spec(request)
        found = methods(self._told_contract(spec.name), spec.grpc_services)
        return answers.ClientContract(spec.name, spec.host, spec.route, spec.auth, found)

    async def try_service(self, request: web.Request, wanted: changes.Try) -> web.StreamResponse:
        """Send one request to HAProxy, as a client does, and pass on the answer as it comes."""
        spec = self._spec(request)
        parts = self._edge_calls.begin(spec, wanted, self._told_contract(spec.name))
        path = one_line(wanted.path.partition("?")[0])[:MOST_OF_BODY]  # a query may have secrets
        said, is_look = f"{_who_asks(request)}: try {wanted.method} {path}", wanted.method in LOOKS
        self._events.record("asked", said, service=spec.name, each=not is_look)
        return await self._edge_calls.stream(request, parts)

    def _spec(self, request: web.Request) -> ServiceSpec:
        name = request.match_info["name"]
        return self._specs.known(name).services[name]

    def _told_contract(self, service: str) -> bytes:
        """What a replica tells of its contract, the newest; b"" = none does."""
        told = [one for one in self._publisher.view.observed.containers_of(service) if one.contract]
        return (max(told, key=lambda one: one.created_at).contract if told else None) or b""

    async def gpu(self, request: web.Request, wanted: changes.Mark) -> changes.Marked:
        """Mark a GPU as not to be used, or remove its mark."""
        uuid, fault = request.match_info["uuid"], wanted.fault
        if fault is None:
            self._commands.unmark_gpu(uuid)
        else:
            self._commands.mark_gpu(uuid, fault)
        return changes.Marked(uuid, fault)

    async def nodes(self, request: web.Request) -> Nodes:
        """The nodes, what is there and what is wrong with them."""
        view = self._publisher.view
        return Nodes(view.wall_time(view.at), view.nodes, view.engine_reachable)

    async def drain_node(self, request: web.Request, wanted: changes.Drain) -> changes.NodeAsked:
        """Move the replicas of a node elsewhere, and then everything else."""
        name = request.match_info["node"]
        return await self._node_asked(name, self._commands.nodes.drain(name, at_once=wanted.force))

    async def activate_node(self, request: web.Request, _: changes.Nothing) -> changes.NodeAsked:
        """Use a node again."""
        name = request.match_info["node"]
        return await self._node_asked(name, self._commands.nodes.activate(name))

    async def label_node(self, request: web.Request, wanted: changes.Labels) -> changes.NodeAsked:
        """Set labels of a node, for placement constraints."""
        name = request.match_info["node"]
        return await self._node_asked(name, self._commands.nodes.label(name, wanted.labels))

    async def _node_asked(self, name: str, change: Awaitable[str]) -> changes.NodeAsked:
        message = await change
        return changes.NodeAsked(self._commands.nodes.known(name).name, message)

    async def keys(self, request: web.Request) -> answers.Keys:
        """The keys of clients, without the keys themselves: only their owners have them."""
        listed = await self._commands.keys.listed()
        return answers.Keys(self._wall(), tuple(documents.key_document(*each) for each in listed))

    async def make_key(self, request: web.Request, wanted: changes.MakeKey) -> changes.MadeKey:
        """Make a key for clients; this answer alone has it."""
        made, key = self._commands.keys.make(wanted)
        await self._commands.stored()
        return changes.MadeKey(key, documents.key_document(made), await self._commands.keys.told())

    async def revoke_key(self, request: web.Request, _: changes.Nothing) -> changes.Revoked:
        """Revoke a key of clients: it opens nothing any more."""
        name = request.match_info["key"]
        self._commands.keys.revoke(name)
        return changes.Revoked(name, await self._commands.keys.told())

    async def backup(self, request: web.Request) -> answers.Backup:
        """Everything in the controller's state, secrets included."""
        return self._commands.backups.made()

    async def restore(self, request: web.Request, wanted: changes.Restore) -> changes.Restored:
        """Put a backup in the place of the controller's state. The controller then ends, and begins again with it."""
        return await self._commands.backups.restore(wanted, _who_asks(request))

    async def logs(self, request: web.Request) -> answers.Logs:
        """The last log lines of a service's replicas."""
        name = request.match_info["name"]
        after = _integer(request, "after", 0, 0, 2**40) if "after" in request.query else None
        tail, at = _integer(request, "tail", 100, 1, MOST_LINES), self._wall()
        texts = await self._commands.logs(name, tail, after, request.query.get("replica"))
        replicas = tuple(documents.replica_log(replica, text) for replica, text in texts.items())
        return answers.Logs(name, at, replicas)

    async def plan(self, request: web.Request) -> answers.PlanDocument | web.Response:
        """What the controller would do now, and what it is doing."""
        view, in_progress = self._publisher.view, self._executor.in_progress
        if asked := request.query.getall("scale", []):
            view, in_progress = self._rehearsed(view, asked), ()
        form = request.query.get("format", "json")
        if form == "text":
            return web.Response(text=documents.plan_words(view, in_progress) + "\n")
        if form != "json":
            raise InvalidRequest(f"format: expected json or text, found {form!r}")
        return documents.plan_document(view, in_progress)

    def _rehearsed(self, view: View, asked: Sequence[str]) -> View:
        """The view, with the plan for other numbers of replicas ("web:4"). Raises InvalidRequest, NotYet."""
        targets = {}
        for text in asked:
            name, _, number = text.rpartition(":")
            replicas = whole_number(number)
            if not name or replicas is None or replicas > MOST_REPLICAS:
                raise InvalidRequest(f"scale: expected name:replicas such as web:4, found {text[:80]!r}")
            self._specs.known(name)
            targets[name] = replicas
        if view.desired is None:
            raise NotYet("the compose files are not read yet; repeat in a second")
        if not view.engine_reachable:
            raise NotYet("the Docker Engine does not answer, so nothing is planned")
        return replace(view, plan=plan(rehearsed(view.desired, targets), view.observed, view.at))

    async def routes(self, request: web.Request) -> answers.Routes:
        """What HAProxy sends where."""
        return documents.routes(self._publisher.view)

    async def events(self, request: web.Request) -> answers.Events:
        """The newest events, or the events after `since`; waits up to `wait` seconds for the first one."""
        log = self._events
        limit = _integer(request, "limit", 100, 1, MOST_EVENTS)
        wait_s = _integer(request, "wait", 0, 0, LONGEST_WAIT_S)
        since = _integer(request, "since", 0, 0, 2**62) if "since" in request.query else None
        service, kinds = request.query.get("service"), kinds_in(request.query.get("kind"))
        if since is not None and wait_s and since == log.last_seq:
            await self._wait_for_event(since, wait_s)
        chosen = log.select(since=since, service=service, kinds=kinds, limit=limit)
        # A list that `limit` has cut is continued where it was cut; otherwise all events so far have been looked at.
        following = chosen[-1].seq if since is not None and len(chosen) == limit else log.last_seq
        return answers.Events(tuple(map(documents.event_document, chosen)), following)

    async def alerts(self, request: web.Request) -> answers.Alerts:
        """The alerts that fire, and whether they are silenced."""
        return await self._commands.alerts.firing()

    async def silences(self, request: web.Request) -> answers.Silences:
        """The silences of alerts."""
        return answers.Silences(self._wall(), tuple(await self._commands.alerts.silences()))

    async def silence(self, request: web.Request, wanted: changes.MakeSilence) -> changes.Silenced:
        """Do not send an alert, or those of a service, for a while."""
        return changes.Silenced(await self._commands.alerts.silence(wanted, request[CALLER].name))

    async def end_silence(self, request: web.Request, _: changes.Nothing) -> changes.SilenceEnded:
        """Send alerts again that a silence holds back."""
        identity = request.match_info["silence"]
        await self._commands.alerts.end(identity)
        return changes.SilenceEnded(identity)

    async def traffic(self, request: web.Request) -> answers.Traffic:
        """Requests, errors, durations and queues of the services over the last minutes, as Prometheus counted them."""
        return await self._traffic.of(_integer(request, "minutes", 0, 0, MOST_MINUTES))

    async def traces(self, request: web.Request) -> Traces:
        """Requests that failed, were slow or are in the sample, and their ways through the stack."""
        service, trace = request.query.get("service", ""), request.query.get("trace", "")
        if service:
            self._specs.known(service)
        limit = _integer(request, "limit", 50, 1, MOST_TRACES)
        kept, silent = await self._replica_traces.read(self._publisher.view.observed.containers)
        return Traces(self._wall(), joined(kept, service=service, trace=trace, limit=limit), tuple(silent))

    async def live(self, request: web.Request) -> web.StreamResponse:
        """What a page shows, as server-sent events: each part at first, and again whenever it has changed."""
        return await self._live.watch(request)

    async def caller(self, request: web.Request) -> answers.Caller:
        """Who asks, and what it may do."""
        return request[CALLER]

    async def targets(self, request: web.Request) -> Sequence[answers.Target]:
        """The targets of one job, as Prometheus's http_sd reads them."""
        job = request.query.get("job", "replicas")
        if job == "alertmanager":
            return self._commands.alerts.targets()
        return [group for group in self._publisher.view.targets if group.labels["job"] == job]

    async def openapi(self, request: web.Request) -> Mapping[str, Any]:
        """This API, as an OpenAPI document."""
        return openapi.document(CALLS.values())

    async def healthz(self, request: web.Request) -> web.Response:
        """200 while the loop completes its ticks; the body has what else is wrong."""
        view = self._publisher.view
        age_s = self._clock() - (self._publisher.last_tick_at or self._publisher.started_at)
        health = answers.Health(
            status="stuck" if age_s >= STUCK_AFTER_S else "failing" if self._publisher.defect else "ok",
            last_tick_age_s=round(age_s, 3),
            engine_reachable=view.engine_reachable,
            haproxy_reachable=view.haproxy_reachable,
            spec_problems=view.spec_problems,
            store_trouble=self._publisher.store_trouble,
            defect=self._publisher.defect,
        )
        return answer(health, 200 if health.status == "ok" else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """The controller's own metrics, as Prometheus reads them."""
        return web.Response(
            body=self._publisher.metrics.page(), headers={"Content-Type": self._publisher.metrics.content_type}
        )

    async def _wait_for_event(self, since: int, wait_s: int) -> None:
        """Wait for an event newer than `since`, for `wait_s` seconds, or for the end of the server."""
        waits = [
            asyncio.ensure_future(self._events.wait_beyond(since)),
            asyncio.ensure_future(self._closing.wait()),
        ]
        try:
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _close(self, app: web.Application) -> None:
        self._closing.set()


def answer(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Answer with a document."""
    return web.json_response(text=json.dumps(document, default=as_json), status=status, headers=headers)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into {"error": {"code", "message"}}."""
    try:
        return await handler(request)
    except NotYet as error:
        return _error(error.http_status, "not_yet", str(error), {"Retry-After": str(RETRY_AFTER_S)})
    except ControllerError as error:
        return _error(error.http_status, code_in(type(error).__name__), str(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error(error.status, code_in(error.reason), _http_words(request, error), error.headers)
    except web.RequestPayloadError as error:
        detail = one_line(str(error)) or type(error).__name__
        return _error(400, "bad_request", f"body: expected one that its Content-Encoding describes, found: {detail}")
    except Exception as error:
        logger.exception("internal: %s %s raised", request.method, request.path)
        return _error(500, "internal", f"internal: {type(error).__name__}; the controller's log has the rest")


def _who_asks(request: web.Request) -> str:
    """Its caller, and from where the request came."""
    place = request.remote if user_of(request.transport) is None else "the socket"
    return f"{request[CALLER].name} at {place}"


def kinds_in(text: str | None) -> frozenset[str] | None:
    """Return the kinds named in "scale,rollout", None for no text; raises InvalidRequest."""
    if text is None:
        return None
    kinds = frozenset(text.split(","))
    if unknown := sorted(kinds - KINDS):
        raise InvalidRequest(f"kind: there are no events of kind {unknown[0]!r}; kinds: {', '.join(sorted(KINDS))}")
    return kinds


def _call_of(request: web.Request) -> ApiCall | None:
    """The call that a request is; None where there is none at its path, or not by its method."""
    return CALLS.get(request.match_info.handler.__name__)


async def _sent(request: web.Request, call: ApiCall) -> bytes:
    """The body of a request for a change. Raises InvalidRequest for one that is not sent as JSON."""
    most = call.longest_body
    body = await (request if most is None else request.clone(client_max_size=most)).read()
    if body and (problem := not_json(request.headers.get("Content-Type"))):
        raise InvalidRequest(problem)
    return body


# --------------------------------------------------------------------------------------------------------------- words


def _integer(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    number = whole_number(text)
    if number is None or not least <= number <= most:
        raise InvalidRequest(f"{name}: expected an integer from {least} to {most}, found {text[:40]!r}")
    return number


def code_in(words: str) -> str:
    """Return the `code` of an error in answers, from a class's name or a reason in words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", words).strip("_").lower()


def _http_words(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPNotFound):
        return f"there is nothing at {request.path}; the API is under /api/v1 (services, plan, routes, events, targets)"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.path} takes {', '.join(sorted(error.allowed_methods))}, not {error.method}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        call = _call_of(request)
        return f"body: expected at most {(call and call.longest_body) or BODY_LIMIT} bytes"
    return error.text or error.reason


def _error(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    kept = {name: value for name, value in (headers or {}).items() if name in ("Allow", "Retry-After")}
    return answer(answers.Error(answers.ErrorBody(code, message)), status, kept)


async def _name_build(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[BUILD_HEADER] = current_build()


# --------------------------------------------------------------------------------------------------------------- calls

_REHEARSAL = Query("scale", "As name:replicas, repeatable: the plan that there would be with these numbers.")
_PLAN_FORMAT = Query("format", "text: what `pierhead plan` prints.", {"enum": ["json", "text"], "default": "json"})
_LOG_QUERY = (
    whole_query("tail", "Lines of each replica.", 1, MOST_LINES, 100),
    whole_query("after", "Only lines later than this unix time.", 0),
    Query("replica", "Only this replica's."),
)
_EVENT_QUERY = (
    whole_query("since", "Only events with a higher number.", 0),
    whole_query("wait", "Seconds to wait for the first of them.", 0, LONGEST_WAIT_S, 0),
    whole_query("limit", "At most this many events, the newest.", 1, MOST_EVENTS, 100),
    Query("service", "Only events of this service."),
    Query("kind", "Only events of these kinds, separated by commas."),
)
_TRAFFIC_QUERY = (whole_query("minutes", "How many of the last minutes; 0: now.", 0, MOST_MINUTES, 0),)
_TRACE_QUERY = (
    Query("service", "Only requests that this service had a part in."),
    Query("trace", "Only the one with this trace id or request id."),
    whole_query("limit", "At most this many, the newest.", 1, MOST_TRACES, 50),
)
_JOBS = (
    "replicas (the default), haproxy (one on each node, where there are several), or alertmanager (where there is one)."
)
_TARGET_QUERY = (Query("job", _JOBS),)

LISTED: Final = (
    ApiCall("GET", "/api/v1/services", "read", Api.services, Services),
    ApiCall("GET", "/api/v1/services/{name}", "read", Api.service, Service),
    ApiCall("GET", "/api/v1/services/{name}/logs", "read", Api.logs, answers.Logs, query=_LOG_QUERY),
    ApiCall("GET", "/api/v1/services/{name}/revisions", "read", Api.revisions, answers.Revisions),
    ApiCall("PUT", "/api/v1/services/{name}/scale", "scale", Api.scale, changes.Scaled, bodies.scale_in),
    ApiCall("POST", "/api/v1/services/{name}/rollback", "deploy", Api.rollback, changes.Asked, bodies.rollback_in),
    ApiCall("POST", "/api/v1/services/{name}/abort", "deploy", Api.abort, changes.Asked, bodies.nothing_in),
    ApiCall("POST", "/api/v1/services/{name}/promote", "deploy", Api.promote, changes.Asked, bodies.nothing_in),
    ApiCall("POST", "/api/v1/services/{name}/restart", "deploy", Api.restart, changes.Asked, bodies.nothing_in),
    ApiCall(
        "POST", "/api/v1/services/{name}/operations", "scale",
        Api.operate, changes.Operated, bodies.operation_in, is_done=True,
    ),
    ApiCall("GET", "/api/v1/services/{name}/contract", "read", Api.contract, answers.ClientContract),
    ApiCall(
        "POST", "/api/v1/services/{name}/try", "scale", Api.try_service, answers.TryPart, bodies.try_in,
        is_done=True, is_stream=True, notes_itself=True, longest_body=3 * 1024 * 1024,
    ),
    ApiCall("POST", "/api/v1/deploy", "deploy", Api.deploy, changes.Deployed, bodies.deployment_in),
    ApiCall("PUT", "/api/v1/gpus/{uuid}", "admin", Api.gpu, changes.Marked, bodies.mark_in),
    ApiCall("GET", "/api/v1/nodes", "read", Api.nodes, Nodes),
    ApiCall("POST", "/api/v1/nodes/{node}/drain", "admin", Api.drain_node, changes.NodeAsked, bodies.drain_in),
    ApiCall(
        "POST", "/api/v1/nodes/{node}/activate", "admin",
        Api.activate_node, changes.NodeAsked, bodies.nothing_in,
    ),
    ApiCall("PUT", "/api/v1/nodes/{node}/labels", "admin", Api.label_node, changes.NodeAsked, bodies.labels_in),
    ApiCall("GET", "/api/v1/keys", "read", Api.keys, answers.Keys),
    ApiCall("POST", "/api/v1/keys", "admin", Api.make_key, changes.MadeKey, bodies.key_in, is_done=True),
    ApiCall("DELETE", "/api/v1/keys/{key}", "admin", Api.revoke_key, changes.Revoked, bodies.nothing_in),
    ApiCall("GET", "/api/v1/backup", "admin", Api.backup, answers.Backup),
    ApiCall(
        "POST", "/api/v1/restore", "admin", Api.restore, changes.Restored, bodies.restore_in,
        is_done=True, notes_itself=True, longest_body=64 * 1024 * 1024,
    ),
    ApiCall("GET", "/api/v1/plan", "read", Api.plan, answers.PlanDocument, query=(_PLAN_FORMAT, _REHEARSAL)),
    ApiCall("GET", "/api/v1/routes", "read", Api.routes, answers.Routes),
    ApiCall("GET", "/api/v1/events", "read", Api.events, answers.Events, query=_EVENT_QUERY),
    ApiCall("GET", "/api/v1/traffic", "read", Api.traffic, answers.Traffic, query=_TRAFFIC_QUERY),
    ApiCall("GET", "/api/v1/traces", "read", Api.traces, Traces, query=_TRACE_QUERY),
    ApiCall("GET", "/api/v1/alerts", "read", Api.alerts, answers.Alerts),
    ApiCall("GET", "/api/v1/silences", "read", Api.silences, answers.Silences),
    ApiCall("POST", "/api/v1/silences", "scale", Api.silence, changes.Silenced, bodies.silence_in, is_done=True),
    ApiCall(
        "DELETE", "/api/v1/silences/{silence}", "scale",
        Api.end_silence, changes.SilenceEnded, bodies.nothing_in, is_done=True,
    ),
    ApiCall("GET", "/api/v1/live", "read", Api.live, answers.LivePart, is_stream=True),
    ApiCall("GET", "/api/v1/caller", "read", Api.caller, answers.Caller),
    ApiCall("GET", "/api/v1/targets", None, Api.targets, list[answers.Target], query=_TARGET_QUERY),
    ApiCall("GET", "/api/v1/openapi.json", "read", Api.openapi, dict[str, Any]),
    ApiCall("GET", "/healthz", None, Api.healthz, answers.Health),
    ApiCall("GET", "/metrics", None, Api.metrics),
)  # fmt: skip
"""Prometheus, in a container of its own, reads those without a role: they have no logs, settings or events."""
CALLS: Final = {call.name: call for call in LISTED}
"""By the names of their handlers."""

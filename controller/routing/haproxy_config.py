"""HAProxy's configuration as text: rendered from services, with or without servers. Pure, but for reading the template.

The template is `haproxy/haproxy.cfg.j2`, in a checkout and in the controller's image. The text is made in two stages.
`render` gives everything that depends on services; its hash is the routing hash. `with_servers` adds the lines of
servers after the marks `# servers: <options>`. So scaling does not change the hash, and needs no reload.

Each text that is put into the configuration is matched against a strict pattern first, whatever checked it before: it
cannot end a line or a quote.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2

from ..errors import RoutingError
from ..model.spec import ServiceSpec, by_precedence
from ..settings import DEFAULT_LIMITS, EdgeLimits
from . import haproxy_keys, haproxy_tokens
from .haproxy_text import DIGEST, HASH_LINE, NONE, SECRETS, SERVICE, matching

TEMPLATE = Path(__file__).resolve().parents[2] / "haproxy" / "haproxy.cfg.j2"

_ROUTE = re.compile(r"/[A-Za-z0-9/._~-]*")
_PROBE_PATH = re.compile(r"/[A-Za-z0-9._~/?&=%:@+,-]*")
_GRPC_SERVICE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
_HOST = re.compile(r"(\*\.)?[a-z0-9-]+(\.[a-z0-9-]+)*")
_NETWORK = re.compile(r"[0-9a-f.:]+/[0-9]{1,3}")
_CERTIFICATES = re.compile(rf"/run/haproxy/tls/({DIGEST}|{NONE})|{SECRETS}/tls")
_THUMBPRINT = re.compile(r"([A-Za-z0-9_-]{43})?")
_APPLICATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HOLD_SERVER_ID = 1_000_000
"""Replicas' servers are numbered from 1."""

CHECK_INTERVAL_CAP_S = 0.5
"""HAProxy checks at least this often, so a replica that is gone is out of rotation within a second."""
CHECK_AGAIN_S = 0.15
"""Interval of checks while a server goes up or down."""
QUEUE_TIMEOUT_CAP_S = 30.0
SERVER_TIMEOUT_SLACK_S = 5.0
"""A replica ends a call at the deadline; HAProxy ends it this much later if the replica did not."""
HARD_STOP_FLOOR_S = 120
HEAL_HOLD_S = 5.0
"""How long a request waits for a service whose only replica crashed and is being replaced. For a service that scales to
zero it waits for the whole of `request_timeout_s`, because loading a model takes long."""
SESSION_HEADER = "x-session-id"
SESSION_HASH = "hash-type consistent crc32 avalanche\n    hash-balance-factor 125"
"""As the runtime's consistent_hash: a server that is added or removed moves only its own sessions, and no server has
more than 1.25 times its share of the requests (hash-balance-factor 125).

HAProxy has no floor such as the runtime's NEVER_CROWDED: it has 1.25 places for each request in flight, the new one
included, and at least one for each server (chash_server_is_eligible in its src/lb_chash.c). So with fewer than 1.6
requests per server, a request whose server has one other request may go to the session's next choice. The session
returns with the next request that finds its server free. No setting changes that: a factor that gives each server two
places at any load is no bound, and without a factor (0) a busy session would queue while servers are idle."""
FAILURES_PER_S = 200
"""Lines of failures in HAProxy's log that one client address can cause in a second."""
HELD_MOST = 1000
"""The bound of held requests for a service that does not bound its queue. hold.lua bounds all services together."""

# gRPC status and message for HTTP statuses of HAProxy itself; {} = the service.
_GRPC_ERRORS = MappingProxyType(
    {
        408: (3, "The message of this call of {} did not arrive within its body_timeout_s. Nothing was done."),
        500: (13, "HAProxy could not process the call of {}."),  # INTERNAL
        502: (14, "The replica of {} that had the call ended the connection. It may have done part of the work."),
        503: (14, "No replica of {} took the call: all are busy or cannot be reached. Nothing was done. Try again."),
        504: (4, "The replica of {} did not answer in time. It may still do the work."),  # DEADLINE_EXCEEDED
    }
)


def server_options(spec: ServiceSpec) -> tuple[str, ...]:
    """Every option of a server of this service, for `add server` and for the file.

    Checks go to the probe's port in HTTP/1.1, whatever the service's protocol. If that is the port of requests, it is
    left out: replicas of an older version are then checked at their own port. A check without a question connects to
    the port of requests. Three failed connections in a row take a server down at once; one good check brings it back.
    """
    probe = spec.probe
    interval = f"{_ms(min(probe.period_s, CHECK_INTERVAL_CAP_S))}ms"
    options = ["check"]
    if probe.haproxy_asks:
        options += ["check-proto", "h1"]
        if probe.port != spec.port:
            options += ["port", str(probe.port)]
    options += ["inter", interval, "fastinter", f"{_ms(min(probe.period_s, CHECK_AGAIN_S))}ms", "downinter", interval]
    options += ["fall", str(probe.failures), "rise", "1"]
    options += ["observe", "layer4", "error-limit", "3", "on-error", "mark-down"]
    options += ["maxconn", str(spec.max_ongoing_requests)]
    if spec.protocol == "grpc":
        options += ["proto", "h2"]
    return tuple(options)


class Tls(NamedTuple):
    """What HTTP and gRPC clients get over TLS alone."""

    certificates: str
    """The directory, in HAProxy's container."""
    https_port: int
    """At which clients reach HTTPS."""
    acme: str = ""
    """The thumbprint of the account at an ACME server, whose questions (HTTP-01) HAProxy answers; "" = none."""


def render(
    services: Collection[ServiceSpec],
    limits: EdgeLimits = DEFAULT_LIMITS,
    *,
    is_remote: bool = False,
    tls: Tls | None = None,
    tokens: haproxy_tokens.Tokens = haproxy_tokens.NO_KEYS,
) -> str:
    """Configuration for these services in any order, without servers, with its own hash in it.

    `is_remote`: for a HAProxy on another machine than the controller.

    Raises RoutingError when a value may not be put into a configuration.
    """
    unsigned = _render(services, limits, is_remote=is_remote, tls=tls, tokens=tokens)
    digest = hashlib.sha256(unsigned.encode()).hexdigest()[:16]
    return HASH_LINE.sub(lambda line: line.group().replace("()", f"({digest})"), unsigned)


class Rendered:
    """The configuration of the services asked for last: it is asked for in each tick and seldom changes."""

    def __init__(
        self,
        limits: EdgeLimits = DEFAULT_LIMITS,
        *,
        is_remote: bool = False,
        tls: Tls | None = None,
        tokens: haproxy_tokens.Tokens = haproxy_tokens.NO_KEYS,
    ) -> None:
        """As `render`."""
        self._limits, self._is_remote, self._tls, self._tokens = limits, is_remote, tls, tokens
        self._last: tuple[tuple[ServiceSpec, ...], str] | None = None

    def of(self, services: Collection[ServiceSpec]) -> str:
        """As `render`."""
        asked = tuple(services)
        if self._last is None or self._last[0] != asked:
            text = render(asked, self._limits, is_remote=self._is_remote, tls=self._tls, tokens=self._tokens)
            self._last = asked, text
        return self._last[1]


def _render(
    services: Collection[ServiceSpec],
    limits: EdgeLimits,
    *,
    is_remote: bool,
    tls: Tls | None,
    tokens: haproxy_tokens.Tokens,
) -> str:
    specs = [spec for spec in sorted(services, key=lambda s: s.name) if spec.is_routed]
    applications = _applications(specs)
    routed = [_service(spec, limits, applications) for spec in specs]
    places = {spec.name: number for number, spec in enumerate(sorted(specs, key=by_precedence))}
    http = sorted((s for s in routed if s["route"]), key=lambda s: places[s["name"]])
    grpc = [s for s in routed if s["grpc_services"]]
    for network in limits.trusted_proxies:
        matching(_NETWORK, network, "network of trusted proxies")
    if tls is not None:
        matching(_CERTIFICATES, tls.certificates, "directory of certificates")
        matching(_THUMBPRINT, tls.acme, "thumbprint of an ACME account")
    routes = {s["matched"]: s["name"] for s in http if limits.shows_routes}
    routes_text = f" The routes are {', '.join(routes)}." if routes else " There are no routes yet."
    grpc_names = ", ".join(sorted({name for spec in specs for name in spec.grpc_services}))
    grpc_text = f" Known are {grpc_names}." if grpc_names else " There are none yet."
    return _template(TEMPLATE).render(
        limits=limits,
        is_remote=is_remote,
        tls=tls,
        tokens=haproxy_tokens.checked(tokens),
        services=routed,
        http_services=http,
        grpc_services=grpc,
        applications=applications,
        routes_json=json.dumps(routes, separators=(",", ":")),
        routes_text=routes_text if limits.shows_routes else "",
        grpc_text="No such gRPC service here." + (grpc_text if limits.shows_routes else ""),
        grpc_errors=_GRPC_ERRORS,
        held_again_ms=max((s["timeout_held_ms"] for s in routed), default=0),
        hold_server_id=_HOLD_SERVER_ID,
        keys_map=haproxy_keys.MAP,
        keys_kept_s=haproxy_keys.KEPT_S,
        failures_per_s=FAILURES_PER_S,
        hard_stop_s=max([HARD_STOP_FLOOR_S, *(s["longest_call_s"] for s in routed)]),
    )


@functools.cache
def _template(path: Path) -> jinja2.Template:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  the text is no HTML; values are matched against patterns
    )
    return environment.from_string(path.read_text())


def _applications(specs: Collection[ServiceSpec]) -> dict[str, list[str]]:
    """The applications of each gRPC service that several services have."""
    found: dict[str, list[str]] = {}
    for spec in specs:
        for name in spec.grpc_services:
            application = matching(_APPLICATION, spec.application or spec.name, f"application of service {spec.name!r}")
            found.setdefault(name, []).append(application)
    return {name: sorted(names) for name, names in sorted(found.items()) if len(names) > 1}


def _grpc_match(name: str, spec: ServiceSpec, applications: Mapping[str, list[str]]) -> str:
    """The condition of a call to this service. The metadata counts only where there is a choice."""
    if name not in applications:
        return f"{{ path_beg /{name}/ }}"
    return f"{{ path_beg /{name}/ }} {{ req.fhdr(application) -m str {spec.application or spec.name} }}"


def _service(spec: ServiceSpec, limits: EdgeLimits, applications: Mapping[str, list[str]]) -> dict[str, Any]:
    """A service as the template uses it."""
    wakes = spec.autoscale is not None and spec.autoscale.min == 0
    # How long a request waits for a first server. (For a service at 0 the controller closes the waiting room.)
    hold_ms = _ms(spec.request_timeout_s if wakes else min(spec.request_timeout_s, HEAL_HOLD_S))
    timeout_server_ms = _ms(spec.request_timeout_s + SERVER_TIMEOUT_SLACK_S)
    timeout_queue_ms = _ms(min(spec.request_timeout_s, QUEUE_TIMEOUT_CAP_S))
    if spec.route is not None:
        matching(_ROUTE, spec.route, f"route of service {spec.name!r}")
    for name in spec.grpc_services:
        matching(_GRPC_SERVICE, name, f"gRPC service of service {spec.name!r}")
    probe_path = ""
    if spec.probe.haproxy_asks:  # it reads the path as a log format, where a percent sign is special
        probe_path = matching(_PROBE_PATH, spec.probe.path, f"probe path of service {spec.name!r}").replace("%", "%%")
    return {
        "name": matching(SERVICE, spec.name, "service name"),
        "protocol": spec.protocol,
        "route": spec.route,
        "matched": spec.matched,
        "http_matches": _http_matches(spec),
        "host": spec.host,
        "route_pattern": (spec.route or "").replace(".", "[.]"),
        "strip_prefix": spec.strip_prefix,
        "balance": _balance(spec),
        "hash": SESSION_HASH if spec.router_policy == "consistent_hash" else "",
        "grpc_services": spec.grpc_services,
        "grpc_matches": [_grpc_match(name, spec, applications) for name in spec.grpc_services],
        "auth": spec.auth,
        "allow": [matching(_NETWORK, network, f"network of service {spec.name!r}") for network in spec.allow],
        # Whether a response names its replica, and a request may.
        "names_replicas": spec.replica_header,
        # "" = nothing is asked, a connection suffices.
        "probe_path": probe_path,
        "max_queued_requests": limits.queued_requests if spec.max_queued_requests < 0 else spec.max_queued_requests,
        "refusal_status": spec.backpressure.status_code,
        "retry_after_s": math.ceil(spec.backpressure.retry_after_s),
        "body_timeout_ms": _ms(spec.body_timeout_s),
        "streams_requests": spec.streams_requests,
        "timeout_server_ms": timeout_server_ms,
        "timeout_queue_ms": timeout_queue_ms,
        "timeout_check_ms": _ms(spec.probe.timeout_s),
        # For the waiting room: service, longest wait in ms, most requests at once.
        "hold_facts": f"{spec.name} {hold_ms} {_hold_most(spec)}",
        # From a request's arrival in the waiting room to the first byte of its answer.
        "timeout_held_ms": hold_ms + timeout_queue_ms + timeout_server_ms,
        # The longest call, which a replaced worker must live for, with its wait in the waiting room.
        "longest_call_s": (timeout_server_ms + (hold_ms if wakes else 0)) // 1000,
        "access_log": spec.access_log.word,
        # The request ids of the sample are those whose crc32 is below this.
        "sample_below": round(spec.access_log.sample * 2**32),
        "slow_ms": _ms(spec.access_log.slow_request_s),
        # Its replicas log what reaches them.
        "logs_itself": spec.managed,
        "server_options": " ".join(server_options(spec)),
    }


def _http_matches(spec: ServiceSpec) -> list[str]:
    """The conditions of a request to this service, of which one must hold."""
    if spec.route is None:
        return []
    host = ""
    if spec.host is not None:
        name = matching(_HOST, spec.host, f"host of service {spec.name!r}")
        # A name below another one ends with it, dot included.
        host = f"{{ var(txn.host) -m {'end' if name.startswith('*') else 'str'} {name.removeprefix('*')} }} "
    if spec.route == "/":
        return [f"{host}{{ path_beg / }}"]
    return [f"{host}{{ path {spec.route} }}", f"{host}{{ path_beg {spec.route}/ }}"]


def _balance(spec: ServiceSpec) -> str:
    """The service's policy in HAProxy's words. Where callers compare two replicas, HAProxy, which sees all requests,
    takes the least loaded of all. It does the same for a policy of the user's own, which it cannot run.
    """
    match spec.router_policy:
        case "round_robin":
            return "roundrobin"
        case "consistent_hash":
            return f"hdr({SESSION_HEADER})"  # requests without it: round robin
        case _:
            # leastconn ignores weights among servers without requests, so it cannot keep a canary's share.
            return "leastconn" if spec.rollout.canary_weight is None else "random(2)"


def _hold_most(spec: ServiceSpec) -> int:
    """How many requests may wait: as many as the first replica serves at once, and as may then queue for it."""
    if spec.max_queued_requests < 0:
        return HELD_MOST
    return min(HELD_MOST, spec.max_ongoing_requests + spec.max_queued_requests)


def _ms(seconds: float) -> int:
    """Whole milliseconds, at least one because 0 means "no limit" to HAProxy, at most its 24 days."""
    if not 0 < seconds <= 2_000_000:
        raise RoutingError(
            f"a duration of {seconds} s cannot be put into HAProxy's configuration: expected 0 to 2000000 s"
        )
    return max(1, round(seconds * 1000))


if __name__ == "__main__":  # for the images: the configurations without services
    (TEMPLATE.parent / "haproxy.cfg").write_text(render(()))
    (TEMPLATE.parent / "edge.cfg").write_text(render((), is_remote=True))

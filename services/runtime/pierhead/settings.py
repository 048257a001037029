"""A replica's settings from the environment. Read once at the start; a bad value fails it with an error."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pierhead.environment import Environment, integer_from
from pierhead.serve_block import (
    DEFAULT_PORTS,
    BackpressureBlock,
    Between,
    Key,
    KeyBlock,
    LoggingBlock,
    ServeBlock,
    Syntax,
    Variable,
    is_block,
    keys_of,
)
from pierhead.trace import TraceSampler

MAX_USER_CONFIG_BYTES = 64 * 1024
"""Largest config text: it is passed in an environment variable, and Linux's limit for one is 128 KiB."""

NO_USER_CONFIG = "{}"
"""The config without PIERHEAD_USER_CONFIG."""


def read_user_config(text: str | bytes) -> Mapping[str, Any]:
    """Parse a config. Raises ValueError that says what was expected."""
    size = len(text.encode() if isinstance(text, str) else text)
    if size > MAX_USER_CONFIG_BYTES:
        raise ValueError(f"expected at most {MAX_USER_CONFIG_BYTES} bytes, found {size}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, found something else: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found a {type(found).__name__}")  # noqa: TRY004 - of its content
    return found


B = TypeVar("B", bound=KeyBlock)

LOOPBACK = "127.0.0.1"
DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT = DEFAULT_PORTS["grpc"], DEFAULT_PORTS["http"]
DEFAULT_ADMIN_PORT = 9100
DEFAULT_DRAIN_S = 20.0
DEFAULT_ACCESS_LOG = "sampled"
DEFAULT_SAMPLER = TraceSampler()
PARENT_BASED = "parentbased_"
SAMPLERS = ("always_on", "always_off", "traceidratio")


@dataclass(frozen=True, slots=True)
class Settings:
    """A replica's settings. The controller sets these variables; by hand they are all optional.

    | variable | meaning |
    |---|---|
    | PIERHEAD_PROJECT, _SERVICE, _REPLICA, _VERSION | names for metrics, logs and the controller |
    | PIERHEAD_HOST | address to listen on, default 0.0.0.0 |
    | PIERHEAD_PORT | port of the service's requests: 50051 (gRPC) or 8080 (HTTP) |
    | PIERHEAD_SOCKET, _ADMIN_SOCKET | paths of Unix sockets that take what the two ports take; empty = none |
    | PIERHEAD_GRPC_PORT | gRPC port of a process that serves both kinds, default 50051 |
    | PIERHEAD_ADMIN_PORT | /livez, /readyz, /metrics; default 9100 |
    | PIERHEAD_ADMIN_TOKEN | token that a change through the admin port must have; empty = none |
    | PIERHEAD_DISCOVERY | host:port of the controller's Discovery service |
    | PIERHEAD_STATIC_<SERVICE> | ip:port,ip:port of a service's replicas, where there is no Discovery |
    | PIERHEAD_MAX_ONGOING_REQUESTS | requests that this replica works on at a time, default 100 |
    | PIERHEAD_MAX_QUEUED_REQUESTS | calls that wait in a handle for which Discovery has no bound, -1 = no bound |
    | PIERHEAD_BACKPRESSURE_STATUS_CODE | an HTTP client's status when the replica is full: 503 (default) or 429 |
    | PIERHEAD_BACKPRESSURE_RETRY_AFTER_S | Retry-After of that answer, default 1 |
    | PIERHEAD_REQUEST_TIMEOUT_S | deadline of a request without one, default 60 |
    | PIERHEAD_BODY_TIMEOUT_S | how long an HTTP request's body may take to arrive, default 30; then 408 |
    | PIERHEAD_MAX_BODY_BYTES | largest body that an ASGI application gets, default 64 MiB; then 413 |
    | PIERHEAD_DRAIN_TIMEOUT_S | how long a drain may take, default 20 |
    | PIERHEAD_RUN_USER_CODE_IN_SEPARATE_THREAD | true: servicer methods run on an event loop in a thread of their own |
    | PIERHEAD_DEBUG | true: clients see the tracebacks of user code |
    | PIERHEAD_TRANSPORT | transport of handles: lane (default) or grpc |
    | PIERHEAD_SHARED_MEMORY_BYTES | most shared memory that this process makes for tensors; default 0 = none |
    | PIERHEAD_SHARED_MEMORY_THRESHOLD | bytes from which a tensor's content goes there, default 102400 |
    | PIERHEAD_SHARED_MEMORY_DIR | directory of Unix sockets that the processes which share memory have in common |
    | PIERHEAD_TRITON_SHARED_MEMORY_DIR | directory that is /dev/shm of the Triton servers that this process calls |
    | PIERHEAD_USER_CONFIG | JSON object for `reconfigure(user_config)` before the replica is ready, default {} |
    | PIERHEAD_NODE | name of the machine that this replica runs on; for policies that prefer near ones |
    | PIERHEAD_LOG_LEVEL | debug, info (default), warning or error; the line per request is of level info |
    | PIERHEAD_LOG_ENCODING | json (default): an object per line; text: lines for people |
    | PIERHEAD_ACCESS_LOG | lines of requests: sampled (default: errors, slow ones and a sample), all or off |
    | PIERHEAD_ACCESS_LOG_SAMPLE | the sample's share of the requests, 0 to 1, default 0.01; the request id decides |
    | PIERHEAD_SLOW_REQUEST_S | a request that takes this many seconds is slow, default 1 |
    | OTEL_SDK_DISABLED | true: no traces; default false |
    | OTEL_EXPORTER_OTLP_ENDPOINT | URL of the collector that gets the traces; default none |
    | OTEL_EXPORTER_OTLP_PROTOCOL | http/protobuf (default) or grpc |
    | PIERHEAD_TRACE_EXPORTER | module:function that returns OpenTelemetry's span processors, in place of a collector |
    | OTEL_TRACES_SAMPLER | as OpenTelemetry has it; default parentbased_always_on with a collector, else ..._off |
    | OTEL_TRACES_SAMPLER_ARG | the share that traceidratio takes, 0 to 1, default 1 |
    """

    project: str = ""
    service: str = ""
    replica: str = ""
    version: str = ""
    host: str = "0.0.0.0"
    port: int | None = None
    """None = the default port for the kind of requests."""
    socket: str = ""
    """Path of a Unix socket for the requests; "" = none. With one, ports of requests are this container's alone."""
    admin_socket: str = ""
    grpc_port: int = DEFAULT_GRPC_PORT
    """Used only by a process that serves gRPC and HTTP; `port` is then the HTTP one."""
    admin_port: int = DEFAULT_ADMIN_PORT
    admin_token: str = field(default="", repr=False)
    discovery: str = ""
    """"host:port"; empty = no controller."""
    static: Mapping[str, tuple[str, ...]] | None = None
    """Service name in upper case with underscores -> addresses."""
    max_ongoing_requests: int = ServeBlock.max_ongoing_requests
    max_queued_requests: int = ServeBlock.max_queued_requests
    request_timeout_s: float = ServeBlock.request_timeout_s
    body_timeout_s: float = ServeBlock.body_timeout_s
    max_body_bytes: int = 64 * 1024 * 1024
    drain_timeout_s: float = DEFAULT_DRAIN_S
    backpressure_status_code: int = BackpressureBlock.status_code
    backpressure_retry_after_s: float = BackpressureBlock.retry_after_s
    debug: bool = ServeBlock.debug
    run_user_code_in_separate_thread: bool = ServeBlock.run_user_code_in_separate_thread
    transport: str = "lane"
    node: str = ""
    shared_memory_bytes: int = 0
    shared_memory_threshold: int = 100 * 1024
    shared_memory_dir: str = ""
    triton_shared_memory_dir: str = ""
    """Empty = tensors for Triton travel as bytes."""
    user_config: str = NO_USER_CONFIG
    """JSON: the argument of `reconfigure` at the start."""
    access_log: str = DEFAULT_ACCESS_LOG
    access_log_sample: float = 0.01
    slow_request_s: float = LoggingBlock.slow_request_s
    log_level: str = LoggingBlock.log_level
    log_encoding: str = LoggingBlock.encoding
    traces: TraceSampler | None = DEFAULT_SAMPLER
    """None = requests have no traces."""
    trace_collector: str = ""
    """The OTLP endpoint; "" = none."""
    trace_protocol: str = ""
    """"grpc"; anything else is HTTP."""
    trace_exporter: str = ""
    """`module:function` that returns a list of OpenTelemetry's span processors, which get the traces; "" = none."""
    x_serve: ServeBlock = field(default_factory=ServeBlock)
    """The keys of `x-serve` that come by a variable. One without a name of its own above is read here."""
    health_period_s: float = 10.0
    health_timeout_s: float = 10.0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the environment. Raises SettingsError that names every bad variable, not only the first."""
        env = Environment(environ)
        block = _read_block(ServeBlock, env)
        drain_s = block.graceful_shutdown_timeout_s
        collector = env.text("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", env.text("OTEL_EXPORTER_OTLP_ENDPOINT"))
        collector = "" if env.text("OTEL_TRACES_EXPORTER") == "none" else collector
        exporter = env.read("PIERHEAD_TRACE_EXPORTER", "", import_path, "module:function")
        settings = cls(
            project=env.text("PIERHEAD_PROJECT"),
            service=env.text("PIERHEAD_SERVICE"),
            replica=env.text("PIERHEAD_REPLICA") or socket.gethostname(),
            version=env.text("PIERHEAD_VERSION"),
            host=env.text("PIERHEAD_HOST", "0.0.0.0"),
            port=env.read("PIERHEAD_PORT", None, _port, f"{_PORT} (0 = any free one)"),
            socket=env.text("PIERHEAD_SOCKET"),
            admin_socket=env.text("PIERHEAD_ADMIN_SOCKET"),
            grpc_port=env.read("PIERHEAD_GRPC_PORT", DEFAULT_GRPC_PORT, _port, _PORT),
            admin_port=env.read("PIERHEAD_ADMIN_PORT", DEFAULT_ADMIN_PORT, _port, _PORT),
            admin_token=env.text("PIERHEAD_ADMIN_TOKEN"),
            discovery=env.read("PIERHEAD_DISCOVERY", "", _address, "host:port, for example controller:8101"),
            static=_static(env),
            max_ongoing_requests=block.max_ongoing_requests,
            max_queued_requests=env.integer(
                "PIERHEAD_MAX_QUEUED_REQUESTS", -1, -1, expected="an integer >= 0, or -1 for no bound"
            ),
            request_timeout_s=block.request_timeout_s,
            body_timeout_s=block.body_timeout_s,
            max_body_bytes=env.integer("PIERHEAD_MAX_BODY_BYTES", 64 * 1024 * 1024, 1),
            drain_timeout_s=DEFAULT_DRAIN_S if drain_s is None else drain_s,
            backpressure_status_code=block.backpressure.status_code,
            backpressure_retry_after_s=block.backpressure.retry_after_s,
            debug=block.debug,
            run_user_code_in_separate_thread=block.run_user_code_in_separate_thread,
            transport=env.choice("PIERHEAD_TRANSPORT", "lane", ("lane", "grpc")),
            node=env.text("PIERHEAD_NODE"),
            shared_memory_bytes=env.integer("PIERHEAD_SHARED_MEMORY_BYTES", 0, 0),
            shared_memory_threshold=env.integer("PIERHEAD_SHARED_MEMORY_THRESHOLD", 100 * 1024, 1),
            shared_memory_dir=env.text("PIERHEAD_SHARED_MEMORY_DIR"),
            triton_shared_memory_dir=env.text("PIERHEAD_TRITON_SHARED_MEMORY_DIR"),
            user_config=env.read(
                "PIERHEAD_USER_CONFIG", NO_USER_CONFIG, _user_config, "a JSON object of at most 64 KiB"
            ),
            access_log=block.logging.access_log or DEFAULT_ACCESS_LOG,
            access_log_sample=env.read("PIERHEAD_ACCESS_LOG_SAMPLE", 0.01, _share, "a number from 0 to 1"),
            slow_request_s=block.logging.slow_request_s,
            log_level=block.logging.log_level,
            log_encoding=block.logging.encoding,
            traces=_sampler(env, is_exported=bool(collector or exporter)),
            trace_collector=collector,
            trace_exporter=exporter,
            trace_protocol=env.text("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", env.text("OTEL_EXPORTER_OTLP_PROTOCOL")),
            x_serve=block,
        )
        env.check()
        return settings

    @property
    def request_host(self) -> str:
        """Where the ports of requests listen. Admin pages have `host`: Prometheus reads them from another container."""
        return self.host if not self.socket or self.host.startswith("127.") else LOOPBACK

    def static_addresses(self, service: str) -> tuple[str, ...]:
        """Addresses that PIERHEAD_STATIC_<SERVICE> lists; empty when it is not set."""
        return (self.static or {}).get(static_key(service), ())


def static_key(service: str) -> str:
    """A service's name as PIERHEAD_STATIC_<SERVICE> spells it: upper case, underscores."""
    return service.upper().replace("-", "_").replace(".", "_")


def _read_block(block: type[B], env: Environment, inside: str = "") -> B:
    """The keys that come by a variable; the others have their default."""
    found: dict[str, Any] = {}
    for key in keys_of(block, inside):
        if is_block(key.hint) and key.default is not None:
            found[key.name] = _read_block(key.hint, env, f"{key.path}.")
        elif (variable := key.get(Variable)) and not key.get(Syntax):
            found[key.name] = _read_key(key, variable.name, env)
    return block(**found)


def _read_key(key: Key, name: str, env: Environment) -> Any:
    """The lower bound holds for a variable, too; the upper one is the compose file's alone."""
    bounds, default = key.get(Between) or Between(0), key.default
    if key.hint is bool:
        return env.flag(name, default)
    if key.hint is int:
        return env.integer(name, default, int(bounds.least))
    if key.hint is float:
        return env.seconds(name, default, may_be_zero=bounds.least <= 0)
    if key.hint is str:
        return env.text(name, default)
    choices = {str(choice): choice for choice in get_args(key.hint)}
    return choices.get(env.choice(name, str(default), list(choices)), default)


def _static(env: Environment) -> Mapping[str, tuple[str, ...]]:
    prefix = "PIERHEAD_STATIC_"
    found: dict[str, tuple[str, ...]] = {}
    empty: tuple[str, ...] = ()
    for name in sorted(env.variables):
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = env.read(name, empty, _addresses, "ip:port,ip:port,...")
    return found


def _sampler(env: Environment, *, is_exported: bool) -> TraceSampler | None:
    """By OpenTelemetry's variables: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/

    A value that is not known here is left out, as OpenTelemetry wants it: another program of the image may know it.
    """
    if env.text("OTEL_SDK_DISABLED").lower() == "true":
        return None
    word = env.text("OTEL_TRACES_SAMPLER").lower()
    if word.removeprefix(PARENT_BASED) not in SAMPLERS:
        word = f"{PARENT_BASED}{'always_on' if is_exported else 'always_off'}"
    kind = word.removeprefix(PARENT_BASED)
    return TraceSampler(_ratio(env, kind), follows=word != kind)


def _ratio(env: Environment, kind: str) -> float:
    if kind != "traceidratio":
        return float(kind == "always_on")
    try:
        return _share(env.text("OTEL_TRACES_SAMPLER_ARG", "1"))
    except ValueError:
        return 1.0


_port = integer_from(0, 65535)
_PORT = "a port number from 0 to 65535"


def import_path(raw: str) -> str:
    """A `module:function`. Raises ValueError."""
    module, colon, function = raw.partition(":")
    if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError
    return raw


def _share(raw: str) -> float:
    share = float(raw)
    if not 0 <= share <= 1:
        raise ValueError
    return share


def _user_config(raw: str) -> str:
    read_user_config(raw)
    return raw


def _address(raw: str) -> str:
    host, separator, port = raw.rpartition(":")
    if not host or not separator:
        raise ValueError
    _port(port)
    return raw


def _addresses(raw: str) -> tuple[str, ...]:
    return tuple(_address(part.strip()) for part in raw.split(",") if part.strip())

"""The `x-serve` block: its keys, their types, bounds and defaults. compose/reference.yaml explains each of them.

Null means "derived": the rule is a property of the block, or in `controller/spec/parse.py`, and in the reference. What
reaches HAProxy's configuration (routes, probe paths, gRPC names) is limited to characters without a special meaning
there.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pierhead.json_data import find_not_json
from pierhead.llm_config import LLMConfig
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ..model.spec import DEFAULT_POLICY, MOST_REPLICAS, AccessLogWord, Protocol
from ..model.text import shown
from .problems import Problems, at

ROUTER_POLICIES = (DEFAULT_POLICY, "round_robin", "least_ongoing", "consistent_hash", "prefix", "engine_load")
"""The policies by name; each has a counterpart in HAProxy (controller/routing/haproxy_config.py)."""
_PATH = re.compile(r"/[A-Za-z0-9/._~-]*")
_PROBE_PATH = re.compile(r"/[A-Za-z0-9/._~?=&-]*")
_MEMORY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([kmgt])i?b?", re.IGNORECASE | re.ASCII)
_MEMORY_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_LEAST_MEMORY, _MOST_MEMORY = 1024**2, 1024**4
_LEAST_THRESHOLD = 4096
"""One page: a smaller tensor would take as much."""
_GRPC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_APPLICATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_URL = re.compile(r"https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9/._~-]*)?")
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_LONGEST = 200
_LONGEST_QUERY = 10_000
_EXPECTED = "expected"
DEFAULT_PORTS: Mapping[Protocol, int] = {"http": 8080, "grpc": 50051}
LARGEST_POLICY_KWARGS = 4096
LARGEST_USER_CONFIG = 64 * 1024
"""Bytes. It is passed in an environment variable; Linux's limit is twice as large."""


def _expected(expectation: str) -> PydanticCustomError:
    return PydanticCustomError(_EXPECTED, "{expectation}", {"expectation": expectation})


def _check_route(route: str) -> str:
    if not _PATH.fullmatch(route) or len(route) > _LONGEST:
        raise _expected(f'a path that starts with "/" and has only letters, digits and "/-_.~" (at most {_LONGEST})')
    if route != "/" and route.endswith("/"):
        raise _expected(f'a path without a slash at its end ("{route.rstrip("/") or "/"}")')
    if any(segment in ("", ".", "..") for segment in route.split("/")[1:]) and route != "/":
        raise _expected('a path without empty, "." and ".." parts')
    if route == "/-" or route.startswith("/-/"):
        raise _expected('a path outside "/-/" (Pierhead answers there itself)')
    return route


def _check_probe_path(path: str) -> str:
    if not _PROBE_PATH.fullmatch(path) or len(path) > _LONGEST:
        raise _expected(f'a path that starts with "/" and has only letters, digits and "/-_.~?=&" (at most {_LONGEST})')
    return path


def _check_grpc_name(name: str) -> str:
    if not _GRPC_NAME.fullmatch(name) or len(name) > _LONGEST:
        raise _expected('the full name of a gRPC service such as "pierhead.echo.v1.Echo"')
    return name


def _check_application(name: str) -> str:
    if not _APPLICATION.fullmatch(name):
        raise _expected('a name of up to 63 letters, digits and "-_.", which starts with a letter or digit')
    return name


def memory_bytes(size: str) -> int:
    """Bytes of a size such as "16GiB"; 0 for other text. Units are of 1024, in Compose's short form or in full."""
    match = _MEMORY.fullmatch(size)
    return 0 if match is None else int(float(match[1]) * _MEMORY_UNITS[match[2].lower()])


def _check_memory(size: object) -> str:
    if not isinstance(size, str) or not _LEAST_MEMORY <= memory_bytes(size) <= _MOST_MEMORY:
        raise _expected('a size from "1MiB" to "1TiB" such as "16GiB"')
    return size


def shared_memory_size(size: object) -> str | None:
    """A size of shared memory as text; None where it is not one. 0 stands for no shared memory."""
    if size in ("0", 0) and not isinstance(size, bool):
        return "0"
    is_size = isinstance(size, str) and _LEAST_MEMORY <= memory_bytes(size) <= _MOST_MEMORY
    return str(size) if is_size else None


def _check_shared_memory(size: object) -> str:
    if (text := shared_memory_size(size)) is None:
        raise _expected('a size from "1MiB" to "1TiB" such as "2GiB", or 0 (none)')
    return text


def _check_threshold(size: object) -> str:
    if not isinstance(size, str) or not _LEAST_THRESHOLD <= memory_bytes(size) <= _MOST_MEMORY:
        raise _expected('a size from "4KiB" to "1TiB" such as "100KiB"')
    return size


def _check_policy(policy: object) -> object:
    if policy is None or isinstance(policy, Mapping) or (isinstance(policy, str) and _FUNCTION.fullmatch(policy)):
        return policy
    raise _expected('an import path such as "autoscaling.night:wanted", or {prometheus: {query: ..., target: ...}}')


def _check_router_policy(policy: object) -> object:
    if isinstance(policy, str) and (policy in ROUTER_POLICIES or (_FUNCTION.fullmatch(policy) and len(policy) < 200)):
        return policy
    raise _expected(f'one of {", ".join(ROUTER_POLICIES)}, or an import path such as "my_package.routing:MyPolicy"')


def _check_query(query: str) -> str:
    if not query.strip() or len(query) > _LONGEST_QUERY:
        raise _expected(f"a PromQL query of at most {_LONGEST_QUERY} characters that is not empty")
    return query


def _check_url(url: str) -> str:
    match = _URL.fullmatch(url)
    if match is None or len(url) > _LONGEST:
        raise _expected('an address such as "http://prometheus:9090", without user, password, query and fragment')
    if not _is_host(match[1]) or not 0 < int((match[2] or ":80")[1:]) <= 65535:
        raise _expected(
            "an address whose host is an IP address or a name of 1 to 63 letters, digits, hyphens and underscores "
            "between dots, and whose port, if any, is from 1 to 65535"
        )
    return url.rstrip("/")


def _check_user_config(config: object) -> object:
    if not isinstance(config, Mapping):
        raise _expected("a mapping that JSON can hold, such as {threshold: 0.7}")
    size = _json_size(config, "user_config")
    if size > LARGEST_USER_CONFIG:
        raise _expected(
            f"at most {LARGEST_USER_CONFIG} bytes as JSON (these are {size}; put what is large into a file that the "
            "service mounts, and the file's name here)"
        )
    return config


def _check_policy_kwargs(kwargs: object) -> object:
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in kwargs):
        raise _expected("the policy's keyword arguments by name, such as {match_rate_threshold: 0.2}")
    size = _json_size(kwargs, "policy_kwargs")
    if size > LARGEST_POLICY_KWARGS:
        raise _expected(
            f"at most {LARGEST_POLICY_KWARGS} bytes as JSON, since every caller gets them (these are {size})"
        )
    return kwargs


def _json_size(value: Mapping[str, Any], name: str) -> int:
    """Bytes of a value as JSON. Only values of JSON pass: a replica must receive what was written, not YAML's
    interpretation of it."""
    try:
        if (culprit := _not_json(value, name)) is not None:
            raise _expected(f"what JSON can hold: {culprit}; write it in quotes")
        return len(user_config_text(value))
    except RecursionError:
        raise _expected("a mapping that is nested less deeply") from None


def user_config_text(config: Mapping[str, Any]) -> str:
    """A user_config as canonical JSON, in ASCII: the same settings give the same text."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _not_json(value: object, name: str) -> str | None:
    """The part of a value that JSON cannot hold, in words; None when JSON can hold all of it."""
    found = find_not_json(value)
    if found is None:
        return None
    where = functools.reduce(at, found.place, name)
    if found.is_key:
        return f"{where} has the key {shown(found.value)}"
    return (
        f"{where} is {found.value}" if isinstance(found.value, float) else f"{where} is a {type(found.value).__name__}"
    )


def _is_host(host: str) -> bool:
    """Whether a URL's host can be looked up: an IPv6 address, or a name without empty or too long labels."""
    if not host.startswith("["):
        return all(_HOST_LABEL.fullmatch(label) for label in host.removesuffix(".").split("."))
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return False
    return True


def _check_replicas(count: int) -> int:
    if count > MOST_REPLICAS:
        raise _expected(f"at most {MOST_REPLICAS} replicas")
    return count


def _pattern(pattern: re.Pattern[str]) -> Any:
    """For editors (controller/spec/schema.py): what the check above accepts, as far as a pattern can express it."""
    return Field(json_schema_extra={"pattern": f"^{pattern.pattern}$", "maxLength": _LONGEST})


Route = Annotated[str, AfterValidator(_check_route), _pattern(_PATH)]
ProbePath = Annotated[str, AfterValidator(_check_probe_path), _pattern(_PROBE_PATH)]
GrpcName = Annotated[str, AfterValidator(_check_grpc_name), _pattern(_GRPC_NAME)]
Application = Annotated[str, AfterValidator(_check_application), _pattern(_APPLICATION)]
UserConfig = Annotated[dict[str, Any], BeforeValidator(_check_user_config)]
RouterPolicy = Annotated[
    str,
    BeforeValidator(_check_router_policy),
    Field(json_schema_extra={"anyOf": [{"enum": list(ROUTER_POLICIES)}, {"pattern": f"^{_FUNCTION.pattern}$"}]}),
]
PolicyKwargs = Annotated[dict[str, Any], BeforeValidator(_check_policy_kwargs)]
GpuMemory = Annotated[str, BeforeValidator(_check_memory)]
SharedMemorySize = Annotated[
    str, BeforeValidator(_check_shared_memory), Field(json_schema_extra={"type": ["string", "integer"]})
]
Threshold = Annotated[str, BeforeValidator(_check_threshold)]
Port = Annotated[int, Field(ge=1, le=65535)]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ProbeBlock(_Block):
    """Where a replica's readiness is probed."""

    path: ProbePath | None = None
    port: Port | None = None


class HealthBlock(_Block):
    """How a replica's readiness is probed, and when it counts as failed."""

    probe: ProbeBlock = Field(default_factory=ProbeBlock)
    period_s: Annotated[float, Field(ge=0.1, le=3600)] = 1.0
    timeout_s: Annotated[float, Field(ge=0.05, le=3600)] = 2.0
    failures: Annotated[int, Field(ge=1, le=1000)] = 3
    progress_timeout_s: Annotated[float, Field(ge=1, le=86_400)] | None = None


class StartupBlock(_Block):
    """How long a replica may take until it is ready."""

    deadline_s: Annotated[float, Field(ge=1, le=604_800)] = 1800.0


class MetricsBlock(_Block):
    """Where Prometheus finds a replica's metrics."""

    port: Port | None = None
    path: ProbePath = "/metrics"


class RouterBlock(_Block):
    """How a caller chooses among the replicas."""

    policy: RouterPolicy = DEFAULT_POLICY
    policy_kwargs: PolicyKwargs = Field(default_factory=dict)
    replica_header: bool = False


class BackpressureBlock(_Block):
    """The answer to an HTTP client when the queue is full."""

    status_code: Literal[503, 429] = 503
    retry_after_s: Annotated[float, Field(ge=0, le=86_400)] = 1.0


class LoggingBlock(_Block):
    """What is logged, in Ray Serve's names where it has one. Compose's `logging` decides where Docker keeps the log."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    encoding: Literal["json", "text"] = "json"
    access_log: AccessLogWord | None = None
    slow_request_s: Annotated[float, Field(ge=0.001, le=86_400)] = 1.0


class SharedMemoryBlock(_Block):
    """Memory by which large tensors travel between replicas of one machine."""

    size: SharedMemorySize | None = None
    threshold: Threshold = "100KiB"


Replicas = Annotated[int, Field(ge=0), AfterValidator(_check_replicas)]
Delay = Annotated[float, Field(ge=0, le=86_400)]
Factor = Annotated[float, Field(ge=0.01, le=100)]


class AutoscaleBlock(_Block):
    """The bounds of a service's number of replicas, and the rule that decides between them."""

    min: Replicas = 1
    max: Replicas = 1
    initial: Replicas | None = None
    target_ongoing_requests: Annotated[float, Field(ge=0.01, le=1_000_000)] = 2.0
    look_back_period_s: Annotated[float, Field(ge=1, le=3600)] = 30.0
    upscale_delay_s: Delay = 30.0
    downscale_delay_s: Delay = 600.0
    downscale_to_zero_delay_s: Delay | None = None
    upscaling_factor: Factor = 1.0
    downscaling_factor: Factor = 1.0
    aggregation_function: Literal["mean", "max", "min"] = "mean"
    panic_threshold: Annotated[float, Field(ge=1.1, le=1000)] = 2.0
    panic_window_s: Annotated[float, Field(ge=0.5, le=600)] = 3.0
    policy: Annotated[Any, AfterValidator(_check_policy)] = None
    policy_kwargs: dict[str, Any] = Field(default_factory=dict)


class PrometheusBlock(_Block):
    """A query to Prometheus, and the target of its value."""

    query: Annotated[str, AfterValidator(_check_query)]
    target: Annotated[float, Field(ge=0.0001, le=1_000_000_000)]
    url: Annotated[str, AfterValidator(_check_url)] = "http://prometheus:9090"
    period_s: Annotated[float, Field(ge=1, le=3600)] = 5.0
    timeout_s: Annotated[float, Field(ge=0.1, le=60)] = 4.0


class PolicyBlock(_Block):
    """A policy that is written in the block itself."""

    prometheus: PrometheusBlock


class RolloutBlock(_Block):
    """How the service goes from one version to the next."""

    max_surge: Annotated[int, Field(ge=0, le=1000)] = 1
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 0
    auto_rollback: bool = True
    bake_s: Annotated[float, Field(ge=0, le=86_400)] = 10.0
    incompatible: Literal["refuse", "allow"] = "refuse"


class CanaryBlock(_Block):
    """The share of requests that a new version receives while it bakes."""

    weight: Annotated[int, Field(ge=1, le=99, description="Per cent of the requests, 1 to 99.")]


class GpuBlock(_Block):
    """How much of the GPUs one replica gets: exactly one of count, memory and fraction is written."""

    count: Annotated[int, Field(ge=1, le=64)] | None = None
    memory: GpuMemory | None = None
    fraction: Annotated[float, Field(ge=0.0001, le=1)] | None = None
    placement: Literal["pack", "spread"] = "pack"


class ServeBlock(_Block):
    """One `x-serve` block as written; null where the value is derived."""

    replicas: Replicas = 1
    autoscale: AutoscaleBlock | None = None
    rollout: RolloutBlock = Field(default_factory=RolloutBlock)
    canary: CanaryBlock | None = None
    max_replicas_per_node: Annotated[int, Field(ge=1, le=1000)] | None = None
    gpu: GpuBlock | None = None
    protocol: Literal["http", "grpc"] | None = None
    port: Port | None = None
    route: Route | None = None
    strip_prefix: bool = False
    grpc_services: list[GrpcName] = Field(default_factory=list)
    application: Application | None = None
    max_ongoing_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    max_queued_requests: Annotated[int, Field(ge=-1, le=1_000_000)] = -1
    router: RouterBlock = Field(default_factory=RouterBlock)
    backpressure: BackpressureBlock = Field(default_factory=BackpressureBlock)
    request_timeout_s: Annotated[float, Field(ge=0.001, le=86_400)] = 60.0
    body_timeout_s: Annotated[float, Field(ge=0.001, le=86_400)] = 30.0
    graceful_shutdown_wait_loop_s: Annotated[float, Field(ge=0.25, le=86_400)] | None = None
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0, le=86_460)] | None = None
    startup: StartupBlock = Field(default_factory=StartupBlock)
    run_user_code_in_separate_thread: bool = False
    debug: bool = False
    logging: LoggingBlock = Field(default_factory=LoggingBlock)
    user_config: UserConfig = Field(default_factory=dict)
    shared_memory: SharedMemoryBlock | None = None
    llm: LLMConfig | None = None
    managed: bool | None = None
    health: HealthBlock = Field(default_factory=HealthBlock)
    metrics: MetricsBlock = Field(default_factory=MetricsBlock)

    @property
    def own_protocol(self) -> Protocol:
        """As written, or what follows from the route."""
        return self.protocol or ("grpc" if self.route is None else "http")

    @property
    def own_port(self) -> int:
        """As written, or the protocol's default."""
        return self.port or DEFAULT_PORTS[self.own_protocol]

    @property
    def is_managed(self) -> bool:
        """As written; an image with a probe path of its own is not built on Pierhead's runtime."""
        return self.health.probe.path is None if self.managed is None else self.managed


_INSTEAD: Mapping[str, str] = {
    "readiness": "write health, with path and port in health.probe",
    "health.path": "write health.probe.path",
    "health.port": "write health.probe.port",
    "health_check_period_s": "write health.period_s",
    "health_check_timeout_s": "write health.timeout_s",
    "startup_timeout_s": "write startup.deadline_s",
    "workers": "write replicas: HAProxy spreads requests over as many ingress replicas as there are",
    "logging.logs_dir": "a replica writes to standard error and Docker keeps it as the service's own logging key "
    "(beside x-serve) says; remove it",
    "logging.enable_access_log": 'write logging.access_log: "off" in place of false, "all" in place of true',
    "logging_config": "write logging",
}
"""Keys known from other systems or former versions, and what to write instead."""

Block = TypeVar("Block", bound=_Block)


def parse_block(path: str, value: object, problems: Problems) -> ServeBlock | None:
    """Read one block; None when something in it is wrong (each problem is added)."""
    if not isinstance(value, Mapping):
        problems.expected(path, 'a mapping of settings ("x-serve: {}" takes every default)', value)
        return None
    return _parse(ServeBlock, path, value, problems)


def parse_policy(path: str, value: Mapping[str, Any], problems: Problems) -> PolicyBlock | None:
    """Read a policy that is written as a mapping; None when something in it is wrong (each problem is added)."""
    return _parse(PolicyBlock, path, value, problems)


def _parse(model: type[Block], path: str, value: Mapping[Any, Any], problems: Problems) -> Block | None:
    try:
        return model.model_validate(dict(value))
    except ValidationError as error:
        schema = model.model_json_schema()
        for detail in error.errors(include_url=False):
            _tell(schema, path, detail, problems)
        return None


def _tell(model: Mapping[str, Any], path: str, detail: ErrorDetails, problems: Problems) -> None:
    """Add the problem for one of pydantic's errors."""
    kind, location, found = detail["type"], detail["loc"], detail["input"]
    here = path
    parent, parent_keys = path, list(model["properties"])
    schema: Mapping[str, Any] = model
    for key in location:
        parent, here = here, at(here, key)
        if "properties" in schema:
            parent_keys = list(schema["properties"])
        schema = _inner(schema, key, model)
    if kind in ("extra_forbidden", "invalid_key"):
        instead = _INSTEAD.get(".".join(map(str, location)), "")
        problems.unknown_key(parent, location[-1], parent_keys, instead)
    elif kind == _EXPECTED:
        problems.expected(here, detail["ctx"]["expectation"], found)
    elif kind == "missing":
        problems.add(here, f"expected {_expectation(schema, str(location[-1]))}, found nothing")
    else:
        problems.expected(here, _expectation(schema, str(location[-1])), found)


def _inner(schema: Mapping[str, Any], key: int | str, model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON schema of `key` inside `schema`; references and "or null" are resolved."""
    inner = schema.get("items", {}) if isinstance(key, int) else schema.get("properties", {}).get(key, {})
    for option in inner.get("anyOf", ()):
        if option.get("type") != "null":
            inner = option
    if "$ref" in inner:
        return dict(model["$defs"][inner["$ref"].rsplit("/", 1)[-1]])
    return dict(inner)


def _expectation(schema: Mapping[str, Any], key: str) -> str:
    """What the schema allows, in words: "an integer >= 0", "a number of seconds from 0.1 to 3600"."""
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    number = "a number of seconds" if key.endswith("_s") else "a number"
    names = {"integer": "an integer", "number": number, "boolean": "true or false", "array": "a list of strings"}
    name = names.get(schema.get("type", ""), "a mapping" if schema.get("type") == "object" else "a string")
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None:
        return name
    return f"{name} >= {low:.10g}" if high is None else f"{name} from {low:.10g} to {high:.10g}"

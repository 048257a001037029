"""Checks what is written in an `x-serve` block: the declaration (`pierhead.serve_block`) as pydantic's models, the
syntax of the values that have one, and the messages.

What reaches HAProxy's configuration (routes, probe paths, gRPC names) is limited to characters without a special
meaning there.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import operator
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import GenericAlias, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pierhead.json_data import find_not_json
from pierhead.llm_config import LLMConfig
from pierhead.serve_block import DEFAULT_POLICY, Between, KeyBlock, PolicyBlock, ServeBlock, Syntax, is_block
from pierhead.settings import MAX_USER_CONFIG_BYTES
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails, PydanticCustomError

from ..model.spec import MOST_REPLICAS
from ..model.text import shown
from ..settings import network
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
SERVICE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")
_GRPC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_APPLICATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_URL = re.compile(r"https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9/._~-]*)?")
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_LONGEST = 200
_LONGEST_QUERY = 10_000
_EXPECTED = "expected"
LARGEST_POLICY_KWARGS = 4096


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


def _check_network(text: object) -> str:
    try:
        return network(str(text))
    except ValueError:
        raise _expected("an address or a network, such as 10.0.0.0/8 (no bits set behind the slash's length)") from None


def memory_bytes(size: str) -> int:
    """Bytes of a size such as "16GiB"; 0 for other text. Units are of 1024, in Compose's short form or in full."""
    match = _MEMORY.fullmatch(size)
    return 0 if match is None else int(float(match[1]) * _MEMORY_UNITS[match[2].lower()])


def _size(least: int, words: str) -> Any:
    def check(size: object) -> str:
        if not isinstance(size, str) or not least <= memory_bytes(size) <= _MOST_MEMORY:
            raise _expected(words)
        return size

    return Annotated[str, BeforeValidator(check)]


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
    if size > MAX_USER_CONFIG_BYTES:
        raise _expected(
            f"at most {MAX_USER_CONFIG_BYTES} bytes as JSON (these are {size}; put what is large into a file that the "
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
    """For editors (controller/files/schema.py): what a check accepts, as far as a pattern can express it."""
    return Field(json_schema_extra={"pattern": f"^{pattern.pattern}$", "maxLength": _LONGEST})


def _matching(pattern: re.Pattern[str], words: str) -> Any:
    """Text of the pattern, of at most _LONGEST characters; otherwise `words` are what was expected."""

    def check(text: str) -> str:
        if not pattern.fullmatch(text) or len(text) > _LONGEST:
            raise _expected(words)
        return text

    return Annotated[str, AfterValidator(check), _pattern(pattern)]


_KINDS: Mapping[str, Any] = {
    "application": _matching(
        _APPLICATION, 'a name of up to 63 letters, digits and "-_.", which starts with a letter or digit'
    ),
    "autoscale_policy": Annotated[Any, AfterValidator(_check_policy)],
    "gpu_memory": _size(_LEAST_MEMORY, 'a size from "1MiB" to "1TiB" such as "16GiB"'),
    "group": _matching(
        _APPLICATION, 'a word of up to 63 letters, digits and "-_.", which starts with a letter or digit'
    ),
    "grpc_name": _matching(_GRPC_NAME, 'the full name of a gRPC service such as "pierhead.echo.v1.Echo"'),
    "llm": LLMConfig | None,
    "policy_kwargs": Annotated[dict[str, Any], BeforeValidator(_check_policy_kwargs)],
    "probe_path": _matching(
        _PROBE_PATH,
        f'a path that starts with "/" and has only letters, digits and "/-_.~?=&" (at most {_LONGEST})',
    ),
    "query": Annotated[str, AfterValidator(_check_query)],
    "replicas": Annotated[int, Field(ge=0), AfterValidator(_check_replicas)],
    "host": _matching(_HOST, 'a name in lower case, such as shop.example, or "*.shop.example"'),
    "network": Annotated[str, BeforeValidator(_check_network)],
    "route": Annotated[str, AfterValidator(_check_route), _pattern(_PATH)],
    "router_policy": Annotated[
        str,
        BeforeValidator(_check_router_policy),
        Field(json_schema_extra={"anyOf": [{"enum": list(ROUTER_POLICIES)}, {"pattern": f"^{_FUNCTION.pattern}$"}]}),
    ],
    "shared_memory_size": Annotated[
        str, BeforeValidator(_check_shared_memory), Field(json_schema_extra={"type": ["string", "integer"]})
    ],
    "threshold": _size(_LEAST_THRESHOLD, 'a size from "4KiB" to "1TiB" such as "100KiB"'),
    "url": Annotated[str, AfterValidator(_check_url)],
    "user_config": Annotated[dict[str, Any], BeforeValidator(_check_user_config)],
}
"""The check of each Syntax."""

Parsed = TypeVar("Parsed", bound=KeyBlock)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def model_of(block: type[KeyBlock]) -> type[BaseModel]:
    """The declaration of a block as pydantic's model: it checks what is written, and has the JSON schema."""
    hints = get_type_hints(block, include_extras=True)
    members: dict[str, Any] = {}
    for each in fields(block):
        if each.default_factory is not MISSING:
            members[each.name] = (_checked(hints[each.name]), Field(default_factory=each.default_factory))
        else:
            default = ... if each.default is MISSING else each.default
            members[each.name] = (_checked(hints[each.name]), default)
    del members["written"]
    return create_model(block.__name__, __base__=_Model, __doc__=block.__doc__, **members)


def _checked(hint: Any) -> Any:
    """A declared type as pydantic's: with its checks, and with models in the place of blocks."""
    inner = get_args(hint)
    if get_origin(hint) is Annotated:
        kinds = [_KINDS[said.name] for said in inner[1:] if isinstance(said, Syntax)]
        plain = kinds[0] if kinds else _checked(inner[0])
        bounds = [_bounds(said) for said in inner[1:] if isinstance(said, Between | str)]
        return Annotated[plain, *bounds] if bounds else plain
    if get_origin(hint) in (Union, UnionType):
        return functools.reduce(operator.or_, map(_checked, inner))
    if get_origin(hint) is list:
        return GenericAlias(list, (_checked(inner[0]),))
    if is_block(hint):
        return Annotated[model_of(hint), AfterValidator(functools.partial(_as_block, hint))]
    return hint


def _bounds(said: Between | str) -> Any:
    return Field(description=said) if isinstance(said, str) else Field(ge=said.least, le=said.most)


def _as_block(block: type[Parsed], model: BaseModel) -> Parsed:
    return block(**dict(model), written=frozenset(model.model_fields_set))


MODELS: Mapping[type[KeyBlock], type[BaseModel]] = {block: model_of(block) for block in (ServeBlock, PolicyBlock)}

_INSTEAD: Mapping[str, str] = {
    "readiness": "write health, with path and port in health.probe",
    "health.path": "write health.probe.path",
    "health.port": "write health.probe.port",
    "health_check_period_s": "write health.period_s",
    "health_check_timeout_s": "write health.timeout_s",
    "startup_timeout_s": "write startup.deadline_s",
    "workers": "write replicas: HAProxy spreads requests over as many ingress replicas as there are",
    "logging.logs_dir": "a replica writes to standard error and Docker keeps it as the service's own logging key "
    "(next to x-serve) says; remove it",
    "logging.enable_access_log": 'write logging.access_log: "off" in place of false, "all" in place of true',
    "logging_config": "write logging",
}
"""Keys known from other systems or former versions, and what to write instead."""


def parse_block(path: str, value: object, problems: Problems) -> ServeBlock | None:
    """Read one block; None when something in it is wrong (each problem is added)."""
    if not isinstance(value, Mapping):
        problems.expected(path, 'a mapping of settings ("x-serve: {}" takes every default)', value)
        return None
    return _parse(ServeBlock, path, value, problems)


def parse_policy(path: str, value: Mapping[str, Any], problems: Problems) -> PolicyBlock | None:
    """Read a policy that is written as a mapping; None when something in it is wrong (each problem is added)."""
    return _parse(PolicyBlock, path, value, problems)


def _parse(block: type[Parsed], path: str, value: Mapping[Any, Any], problems: Problems) -> Parsed | None:
    model = MODELS[block]
    try:
        return _as_block(block, model.model_validate(dict(value)))
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

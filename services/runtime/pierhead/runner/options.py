"""The `x-serve` words of a service without a controller: its class's keywords, and a compose file's over them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, get_origin, get_type_hints

from pierhead.calls.replica import Endpoint, ReplicaListing
from pierhead.classes.service import Bound
from pierhead.errors import SettingsError
from pierhead.runner.runner import FrontRoute
from pierhead.serve_block import DRAIN_MARGIN_S, XServe, variable_text, variables
from pierhead.settings import Settings

Options: TypeAlias = "Mapping[str, Any]"
"""An `x-serve` block as the file has it."""

_EXPECTED: Final = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "text",
    list: "a list",
    Mapping: "a mapping",
}


class NoOptions(Exception):
    """A compose file that cannot be read, or words that no service can have."""


def options_of(bound: Bound, written: Mapping[str, Options]) -> Options:
    """One service's words; `written`: those of a compose file, by service."""
    return {**bound.cls.__x_serve__, **written.get(bound.name, {})}


def variables_of(words: Options) -> dict[str, str]:
    """The environment that the controller would give a replica for these words."""
    found = {
        name: variable_text(value) for name, key in variables().items() if (value := _at(words, key.path)) is not None
    }
    timeout_s = words.get("request_timeout_s")
    if isinstance(timeout_s, int | float):
        found.setdefault("PIERHEAD_DRAIN_TIMEOUT_S", str(timeout_s + DRAIN_MARGIN_S))
    if words.get("streams_requests") is True:
        found["PIERHEAD_BODY_TIMEOUT_S"] = found.get("PIERHEAD_REQUEST_TIMEOUT_S", str(Settings().request_timeout_s))
    return found


def replicas_of(words: Options) -> int:
    """How many replicas there are without a controller, which would change their number: at least one."""
    scaling = words.get("autoscale") or {}
    return max(1, words.get("replicas") or scaling.get("initial") or scaling.get("min") or 1)


OWN_VARIABLES: Final = ("PIERHEAD_MAX_BODY_BYTES", "PIERHEAD_TRACE_EXPORTER", "OTEL_")
"""Beginnings of this process's variables that count for every replica in it."""


def settings_of(name: str, words: Options, replica: str = "") -> Settings:
    """The settings of a replica on this machine, with ports that are free. Raises NoOptions."""
    own = {name: value for name, value in os.environ.items() if name.startswith(OWN_VARIABLES)}
    fixed = {
        "PIERHEAD_SERVICE": name,
        "PIERHEAD_REPLICA": replica or name,
        "PIERHEAD_HOST": "127.0.0.1",
        "PIERHEAD_PORT": "0",
    }
    try:
        return Settings.from_env({**own, **variables_of(words), **fixed})
    except SettingsError as error:
        key_of = {variable: key.path for variable, key in variables().items()}
        lines = [_said(key_of, *line.partition(":")[::2]) for line in str(error).splitlines()]
        raise NoOptions("\n".join(f"{name}: x-serve.{line}" for line in lines)) from None


def listing_of(words: Options, endpoints: Sequence[Endpoint]) -> ReplicaListing:
    """What Discovery would report of a service with these replicas."""
    router = words.get("router", {})
    kwargs = router.get("policy_kwargs")
    return ReplicaListing(
        endpoints,
        max_queued_requests=words.get("max_queued_requests"),
        policy=router.get("policy"),
        policy_kwargs=json.dumps(kwargs) if kwargs else "",
    )


def route_of(service: str, words: Options, settings: Settings, endpoints: Sequence[Endpoint]) -> FrontRoute:
    """The route of a service, `endpoints` being where its replicas listen for HTTP. Only for words that have one."""
    return FrontRoute(
        words["route"],
        service,
        listing_of(words, endpoints),
        settings.request_timeout_s,
        settings.backpressure_status_code,
        settings.backpressure_retry_after_s,
        words.get("strip_prefix", False),
    )


def read_words(files: Iterable[Path]) -> dict[str, Options]:
    """The `x-serve` blocks of compose files, by service; a later file's words come over an earlier one's.

    Raises NoOptions for a file that is missing, or that is none.
    """
    found: dict[str, Options] = {}
    for file in files:
        services = _mapping(_mapping(_load(file), str(file)).get("services"), f"{file}: services")
        for name, definition in services.items():
            where = f"{file}: services.{name}"
            block = _mapping(_mapping(definition, where).get("x-serve"), f"{where}.x-serve")
            check_keys(f"{where}.x-serve", block)
            if block:
                found[str(name)] = {**found.get(str(name), {}), **_unescaped(block)}
    return found


def check_keys(where: str, words: Options) -> None:
    """Raise NoOptions for a key that `x-serve` does not have."""
    for key in words:
        if key not in XServe.__annotations__:
            raise NoOptions(f"{where}.{key}: unknown key")


def check_kind(key: str, value: object) -> None:
    """Raise ValueError for a value of another type than the key's. None stands for a key that is left out."""
    kind = get_type_hints(XServe)[key]
    kind = get_origin(kind) or kind
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if value is not None and not fits:
        raise ValueError(f"expected {_EXPECTED[kind]}, found {value!r:.60}")


def _load(file: Path) -> object:
    import yaml

    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise NoOptions(f"{file}: cannot be read: {error}") from None


def _mapping(found: object, where: str) -> Mapping[Any, Any]:
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise NoOptions(f"{where}: expected a mapping, found {found!r:.60}")
    return found


def _unescaped(value: Any) -> Any:
    """Compose writes a dollar sign twice."""
    if isinstance(value, Mapping):
        return {key: _unescaped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_unescaped(each) for each in value]
    return value.replace("$$", "$") if isinstance(value, str) else value


def _at(words: Options, key: str) -> Any:
    block, _, inner = key.partition(".")
    found = words.get(block)
    return found.get(inner) if inner and isinstance(found, Mapping) else None if inner else found


def _said(key_of: Mapping[str, str], variable: str, rest: str) -> str:
    return f"{key_of.get(variable, variable)}:{rest}"

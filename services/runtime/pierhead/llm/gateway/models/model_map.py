"""Maps models to services: PIERHEAD_LLM_MODELS and PIERHEAD_LLM_MODELS_OF_*. Pure.

    {"qwen": "llm-qwen",                                            a model and its service
     "big": {"service": "big-decode", "prefill": "big-prefill"},    prefill and decode apart
     "default": {"alias_of": "qwen"},                               another name of it
     "support": {"alias_of": "qwen:support"}}                       a name for one of its adapters

Further members of an entry: "fallback", another name in the map, answers while the service has no replica; "host" and
"path" ("/qwen") are the model's own: there the gateway is as a server of this model alone.

"qwen:support" is the adapter "support" of "qwen"; exact names in the map come first.

The map is the union of these variables. Compose merges the environment of a service in several files by variable: with
a variable each, independent files add their models to one gateway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pierhead.llm.gateway.endpoints import KNOWN
from pierhead.llm.openai_error import shown
from pierhead.request import MAX_ID_LENGTH, accept_opaque

VARIABLE = "PIERHEAD_LLM_MODELS"
VARIABLES_OF = f"{VARIABLE}_OF_"
"""How the names of the further variables begin; the rest is any name, such as a service's."""

FORM = '{"<model>": "<service>"} or {"<model>": {"service": ..., "prefill": ..., "alias_of": ...}}'

_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}(:[0-9]{1,5})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}")
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_PATH = re.compile(r"/[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_SERVICES_NAME = ("a service's name", _SERVICE)
_MODELS_NAME = ("a model's name", _NAME)
_VALUES = {
    "service": _SERVICES_NAME,
    "prefill": _SERVICES_NAME,
    "alias_of": _MODELS_NAME,
    "fallback": _MODELS_NAME,
    "host": ("a host's name in lower case, without a port", _HOST),
    "path": ("a slash and one word, such as /qwen", _PATH),
}


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """The destination of requests for one name."""

    model: str
    """The model that the service generates with: a model id, or "base:adapter"."""
    base: str
    """The model id without an adapter."""
    adapter: str
    """"" = none."""
    service: str
    prefill: str | None
    """The service that reads prompts; None = `service` does that as well."""
    fallback: str | None = None
    """The name that is asked for in its place while `service` has no replica."""


class Site(NamedTuple):
    """The place at the gateway that a request came to."""

    model: str = ""
    """The base of the only models there; "" = all are."""
    prefix: str = ""
    """Of its paths."""


class ModelMap:
    """Model names and their routes, and the hosts and paths of single models."""

    def __init__(
        self,
        routes: Mapping[str, ModelRoute],
        hosts: Mapping[str, str] | None = None,
        paths: Mapping[str, str] | None = None,
    ) -> None:
        self.routes = dict(routes)
        self.paths = dict(paths or {})
        """The base of the models at each path."""
        self._hosts = dict(hosts or {})
        self.services = tuple(dict.fromkeys(route.service for route in self.routes.values()))
        self.prefill_services = tuple(dict.fromkeys(r.prefill for r in self.routes.values() if r.prefill is not None))

    def find(self, name: str) -> ModelRoute | None:
        """The route of a name from a client; None if there is none."""
        route = self.routes.get(name)
        if route is not None:
            return route
        base, colon, adapter = name.partition(":")
        route = self.routes.get(base)
        if not colon or route is None or route.adapter or accept_opaque(adapter) is None:
            return None
        return replace(route, model=f"{route.base}:{adapter}", adapter=adapter)

    def site(self, host: str, path: str) -> Site:
        """Where a request came to: `host` is its header, `path` its path."""
        if self.paths and (model := self.paths.get(prefix := path[: path.find("/", 1)])):
            return Site(model, prefix)
        if self._hosts:
            return Site(self._hosts.get(host.partition(":")[0].lower(), ""))
        return Site()


def read_models(environ: Mapping[str, str]) -> ModelMap:
    """Read the map. Raises ValueError that names every problem, a line each."""
    set_variables = {name: text for name, text in environ.items() if name == VARIABLE or name.startswith(VARIABLES_OF)}
    texts = {name: text for name, text in sorted(set_variables.items()) if text.strip()}
    if not texts:
        raise ValueError(f"{VARIABLE}: expected JSON, {FORM}, found nothing")
    problems: list[str] = []
    entries: dict[str, Mapping[str, str]] = {}
    variables: dict[str, str] = {}
    for variable, text in texts.items():
        for name, value in _members(variable, text, problems).items():
            if name in variables:
                problems.append(f"{variable}: {name}: expected a model that {variables[name]} has not; leave one out")
                continue
            variables[name] = variable
            found: list[str] = []
            entries[name] = _entry(name, value, found)
            problems += [f"{variable}: {problem}" for problem in found]
    routes: dict[str, ModelRoute | None] = {}
    for name in () if problems else entries:
        found = []
        routes[name] = _route(name, entries, found)
        problems += [f"{variables[name]}: {problem}" for problem in found]
    if problems:
        raise ValueError("\n".join(problems))
    found_routes = {name: route for name, route in routes.items() if route is not None}
    hosts, paths = (_sites(key, entries, found_routes, variables, problems) for key in ("host", "path"))
    if problems:
        raise ValueError("\n".join(problems))
    return ModelMap(found_routes, hosts, paths)


def _sites(
    key: str,
    entries: Mapping[str, Mapping[str, str]],
    routes: Mapping[str, ModelRoute],
    variables: Mapping[str, str],
    problems: list[str],
) -> Mapping[str, str]:
    """The base of the models at each host, or path."""
    sites: dict[str, str] = {}
    for name, entry in entries.items():
        value = entry.get(key)
        if value is None:
            continue
        if value in sites or any(f"{known}/".startswith(f"{value}/") for known in KNOWN):
            taken = "another model's" if value in sites else "the gateway's own"
            problems.append(f"{variables[name]}: {name}.{key}: {value} is {taken}; choose another")
        sites[value] = routes[name].base
    return sites


def _members(variable: str, text: str, problems: list[str]) -> Mapping[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{variable}: expected JSON, {FORM}; {error}")
        return {}
    if not isinstance(found, dict) or not found:
        problems.append(f"{variable}: expected an object with at least one model, {FORM}, found {shown(found)}")
        return {}
    return found


def _entry(name: str, value: object, problems: list[str]) -> Mapping[str, str]:
    """One member of the object, checked by itself."""
    if _NAME.fullmatch(name) is None:
        problems.append(f"{shown(name)}: expected a model's name: letters, digits, and . _ - / : within")
    if isinstance(value, str):
        value = {"service": value}
    if not isinstance(value, dict) or not value:
        problems.append(f"{name}: expected a service's name or an object of {', '.join(_VALUES)}, found {shown(value)}")
        return {}
    for key, text in value.items():
        if key not in _VALUES:
            problems.append(f"{name}.{key}: unknown; there are {', '.join(_VALUES)}")
            continue
        what, form = _VALUES[key]
        if not isinstance(text, str) or form.fullmatch(text) is None:
            problems.append(f"{name}.{key}: expected {what}, found {shown(text)}")
    if "service" not in value and "alias_of" not in value:
        problems.append(f"{name}: expected a service, or alias_of with the name of another model")
    return value


def _route(name: str, entries: Mapping[str, Mapping[str, str]], problems: list[str]) -> ModelRoute | None:
    """The route of a name, through its alias if it is one."""
    entry = entries[name]
    model = entry.get("alias_of", name)
    base, colon, adapter = (model, "", "") if "alias_of" not in entry else model.partition(":")
    if colon and accept_opaque(adapter) is None:
        expected = f"the name of an adapter behind the colon, {MAX_ID_LENGTH} characters at most"
        problems.append(f"{name}.alias_of: expected {expected}, found {shown(model)}")
        return None
    target = entry
    if "service" not in entry:
        found = entries.get(base)
        if found is None or "alias_of" in found:
            models = ", ".join(other for other, its in entries.items() if "alias_of" not in its) or "none"
            problems.append(f"{name}.alias_of: expected one of the models ({models}), found {shown(model)}")
            return None
        target = found
    fallback = entry.get("fallback", target.get("fallback"))
    if fallback is not None and (fallback not in entries or fallback in (name, base)):
        names = ", ".join(other for other in entries if other not in (name, base)) or "none"
        problems.append(f"{name}.fallback: expected another of the names ({names}), found {shown(fallback)}")
    return ModelRoute(model, base, adapter, target["service"], entry.get("prefill", target.get("prefill")), fallback)

"""Maps models to services: PIERHEAD_LLM_MODELS and PIERHEAD_LLM_MODELS_OF_*. Pure.

    {"qwen": "llm-qwen",                                            a model and its service
     "big": {"service": "big-decode", "prefill": "big-prefill"},    prefill and decode apart
     "default": {"alias_of": "qwen"},                               another name of it
     "support": {"alias_of": "qwen:support"}}                       a name for one of its adapters

"qwen:support" is the adapter "support" of "qwen"; exact names in the map come first.

The map is the union of these variables. Compose merges the environment of a service in several files by variable: with
a variable each, independent files add their models to one gateway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pierhead.llm.openai_error import shown
from pierhead.request import MAX_ID_LENGTH, accept_opaque

VARIABLE = "PIERHEAD_LLM_MODELS"
VARIABLES_OF = f"{VARIABLE}_OF_"
"""How the names of the further variables begin; the rest is any name, such as a service's."""

FORM = '{"<model>": "<service>"} or {"<model>": {"service": ..., "prefill": ..., "alias_of": ...}}'

_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}(:[0-9]{1,5})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}")
_KEYS = ("service", "prefill", "alias_of")


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


class ModelMap:
    """Model names and their routes."""

    def __init__(self, routes: Mapping[str, ModelRoute]) -> None:
        self.routes = dict(routes)
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
        return ModelRoute(f"{route.base}:{adapter}", route.base, adapter, route.service, route.prefill)


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
    return ModelMap({name: route for name, route in routes.items() if route is not None})


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
        problems.append(f"{name}: expected a service's name or an object of {', '.join(_KEYS)}, found {shown(value)}")
        return {}
    for key, text in value.items():
        if key not in _KEYS:
            problems.append(f"{name}.{key}: unknown; there are {', '.join(_KEYS)}")
        elif not isinstance(text, str) or (_NAME if key == "alias_of" else _SERVICE).fullmatch(text) is None:
            what = "a model's name" if key == "alias_of" else "a service's name"
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
    return ModelRoute(model, base, adapter, target["service"], entry.get("prefill", target.get("prefill")))

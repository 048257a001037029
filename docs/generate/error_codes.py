"""The page of error codes, made of the classes of runtime and controller, and of HAProxy's pages and template."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from pierhead.errors import Backpressure, PierheadError, RemoteError, SettingsError

from controller.daemon.api import code_in
from controller.errors import ControllerError
from docs.generate.markdown import cell

ABOUT = """\
# Error codes

An HTTP answer that is an error has the body `{"error": {"code": "...", "message": "...", "request_id": "..."}}`, and a
gRPC call has a status. The table has the codes of services, HAProxy and the controller's [REST API](rest-api.md); the
column *from* says whose each is. [The gateway of language models](../how-to/llm-gateway.md#errors) has more of its own.
[Errors](errors.md) is about your own code: how it raises and catches them.
[Troubleshooting](../how-to/troubleshooting.md) says what to do.

| code | HTTP | gRPC | from | meaning |
|---|---|---|---|---|
"""
Base = TypeVar("Base")
_STATUS = re.compile(r"status (\d+|\{\{ service\.refusal_status \}\}) [^\n]*?/([\w-]+)\.json")
_REFUSAL = re.compile(r'refusal\(service, (\d+), "([\w-]+)"')
_VARIABLE = re.compile(r"%\[var\(txn\.(\w+)\)\]")
_OVERLOADED = "503"
"""The page whose status is that of the service's `backpressure`."""
_NOT_FOUND = "No service has this route. The answer lists the routes if `.env` says `PIERHEAD_ROUTES=shown`."


class Code(NamedTuple):
    """One row."""

    code: str
    http: str
    grpc: str
    comes_from: str
    meaning: str


def page(root: Path) -> str:
    """Return the whole page."""
    rows = sorted({*_of_services(), *_of_haproxy(root / "haproxy"), *_of_the_controller()})
    lines = [
        f"| `{code}` | {http} | {grpc} | {source} | {cell(meaning)} |" for code, http, grpc, source, meaning in rows
    ]
    return ABOUT + "\n".join(lines) + "\n"


def _of_services() -> Iterator[Code]:
    for found in _below(PierheadError):
        if (
            "kind" in vars(found)
            and found not in (RemoteError, SettingsError)
            and found.__module__ == PierheadError.__module__
        ):
            status = f"{found.http_status} or 429" if found is Backpressure else str(found.http_status)
            yield Code(found.kind, status, found.grpc_status.name, "service", _first(found))


def _of_haproxy(directory: Path) -> Iterator[Code]:
    template = (directory / "haproxy.cfg.j2").read_text(encoding="utf-8")
    statuses: dict[str, set[str]] = {}
    for status, name in (*_STATUS.findall(template), *_REFUSAL.findall(template)):
        statuses.setdefault(name, set()).add(status if status.isdigit() else "503 or 429")
    for path in sorted((directory / "errors").glob("*.json")):
        error = json.loads(path.read_text(encoding="utf-8"))["error"]
        meaning = _VARIABLE.sub(lambda found: f"<{found[1]}>", error["message"])
        status = "503 or 429" if path.stem == _OVERLOADED else ", ".join(sorted(statuses[path.stem]))
        yield Code(error["code"], status, "", "HAProxy", meaning)
    yield Code("route_not_found", "404", "UNIMPLEMENTED", "HAProxy", _NOT_FOUND)


def _of_the_controller() -> Iterator[Code]:
    for found in _below(ControllerError):
        if found.http_status != ControllerError.http_status and found.__module__ == ControllerError.__module__:
            yield Code(code_in(found.__name__), str(found.http_status), "", "controller", _first(found))


def _below(base: type[Base]) -> Iterator[type[Base]]:
    for found in base.__subclasses__():
        yield found
        yield from _below(found)


def _first(of: type) -> str:
    """The first paragraph of a class's docstring."""
    return " ".join((inspect.getdoc(of) or "").partition("\n\n")[0].split())

"""The contracts of an application's services as one message: an image carries it, and a replica tells its own part."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pierhead.classes.contract import Contract
from pierhead.classes.service import Bound, Service, name_of
from pierhead.contract.v1.application_pb2 import Application
from pierhead.files import replace_file


def application_of(bound: Bound, service: str = "") -> Application:
    """Of all services of an application, or of one with those that it calls. Raises ValueError for equal names."""
    found, graph = Application(), bound.graph()
    chosen = [graph[service], *graph[service].uses()] if service else list(graph.values())
    for name, each in {each.name: each for each in chosen}.items():
        _add(found, name, each.cls.__contract__, [used.name for used in each.uses()])
    return found


def told_by(parts: Iterable[object], service: str) -> bytes:
    """What a replica of these parts tells of its contract; b"" where none is a service written as a class.

    `service`: its name in the compose file, "" = the application's root.
    """
    found = Application()
    for part in parts:
        if isinstance(part, Bound):
            found.MergeFrom(application_of(part, service or part.name))
        elif isinstance(part, Service):
            _add(found, service or name_of(type(part)), part.__contract__, [])
    return found.SerializeToString(deterministic=True)


def write(bound: Bound, path: Path) -> None:
    """Write the contracts of an application into a file. Raises OSError, and what `application_of` raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, application_of(bound).SerializeToString(deterministic=True))


def _add(found: Application, name: str, contract: Contract, calls: list[str]) -> None:
    listed = next((each for each in found.services if each.name == name), None) or found.services.add(name=name)
    if contract.methods:
        listed.grpc_services.append(contract.service)
    listed.calls.extend(calls)
    known = {file.name for file in found.files.file}
    found.files.file.extend(file for file in contract.descriptor_set.file if file.name not in known)

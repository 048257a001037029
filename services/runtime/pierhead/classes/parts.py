"""What a replica serves of an application of service classes: one of its services, with handles to the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pierhead.classes.endpoints import endpoints_application
from pierhead.classes.handles import handle_to
from pierhead.classes.routes import with_service
from pierhead.classes.service import Bound, Service
from pierhead.errors import SettingsError
from pierhead.http.asgi_edge import asgi


def made(parts: Iterable[object], service: str) -> list[object]:
    """The parts of a replica, in which each bound application is the one service of it that the replica is of.

    `service`: its name, "" = the application's root. Raises SettingsError for a name that the application lacks.
    """
    return [_chosen(part, service).make(handle_to) if isinstance(part, Bound) else part for part in parts]


def with_applications(parts: Iterable[object]) -> Iterator[object]:
    """The parts, and the HTTP applications of those that are services written as classes."""
    for part in parts:
        yield part
        if isinstance(part, Service):
            application = type(part).__asgi__
            if application is not None:
                yield asgi(with_service(application, part))
            elif type(part).__endpoints__:
                yield endpoints_application(part, type(part).__endpoints__)


def _chosen(bound: Bound, service: str) -> Bound:
    graph = bound.graph()
    if service and service not in graph:
        raise SettingsError(
            f"PIERHEAD_SERVICE: expected one of {', '.join(graph)}, the services that {bound.cls.__name__} is made of, "
            f'found "{service}"; in the compose file a service is called as its class, in lower case with hyphens'
        )
    return graph[service] if service else bound

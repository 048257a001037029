"""Asks the API and the programs of this machine for what `pierhead bundle` writes."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..build import current_build
from ..status.records.answers import Traffic
from ..status.records.services import Services
from . import feeds, tables
from . import output as out
from .api import ControllerApi
from .bundle import NO_API, BundleSection
from .client import mismatch
from .errors import CommandError, Unreachable
from .project.programs import Programs
from .project.project import Project, optional_services

T = TypeVar("T")

LINES = "200"
"""Of each log."""
EVENTS = "1000"
"""As many as are kept."""
PROGRAM_S = 30.0
PROGRAMS = Programs()
_QUESTIONS = {
    "engine": ("docker", "version"),
    "Compose": ("docker", "compose", "version"),
    "what the engine keeps": ("docker", "system", "df"),
    "containers": ("docker", "ps", "--all", "--size", "--filter", "label=com.docker.compose.project={project}"),
}
_OWN = ("haproxy", "controller", "prometheus")


def sections(api: ControllerApi, project: str, programs: Programs = PROGRAMS) -> Iterator[BundleSection]:
    """What the programs say comes first: it is there without the API, too. What could not be had says why.

    `project`: the stack's name; "": as the API says.
    """
    document, services = _answered("services", api.services)
    project = project or (document.project if document else "pierhead")
    yield BundleSection("about", _about(project))
    for title, words in _QUESTIONS.items():
        yield _printed(programs, title, *(word.format(project=project) for word in words))
    for name in (*_OWN, *optional_services(written().get)):
        yield _printed(programs, f"logs of {name}", "docker", "logs", "--tail", LINES, f"{project}-{name}-1")
    yield _answered("status", partial(_status, api, document))[1] if document else replace(services, title="status")
    yield _answered("plan", lambda: api.plan().text)[1]
    yield _answered("events", partial(_events, api))[1]
    yield services
    yield _answered("routes", api.routes)[1]
    for row in document.services if document else ():
        yield _answered(f"revisions of {row.name}", partial(api.revisions, row.name))[1]
        yield _answered(f"logs of {row.name}", partial(_logs, api, row.name))[1]


def written() -> Mapping[str, str]:
    """The variables of the project's .env; none where this process sees no project."""
    directory = os.environ.get("PIERHEAD_PROJECT_DIR")
    return Project(Path(directory)).env_file().values() if directory else {}


def _about(project: str) -> str:
    disk = shutil.disk_usage(Path.cwd())
    return "\n".join(
        (
            f"project {project}, at {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}",
            f"tool of build {current_build()}, Python {platform.python_version()} on {platform.platform()}",
            f"{os.cpu_count()} cores; disk of this directory: {disk.free >> 30} of {disk.total >> 30} GiB free",
        )
    )


def _events(api: ControllerApi) -> str:
    return "\n".join(map(feeds.event_line, api.events({"limit": EVENTS}).events))


def _logs(api: ControllerApi, service: str) -> str:
    replicas = api.logs(service, {"tail": LINES}).replicas
    return "\n".join(f"{replica.name} | {line}" for replica in replicas for line in replica.lines)


def _status(api: ControllerApi, document: Services) -> str:
    """Its lines are not wrapped: a secret has to be on one line to be seen."""
    try:
        traffic = api.traffic()
    except CommandError as error:
        traffic = Traffic(document.at, 0.0, {}, str(error))
    return out.plain(tables.status(document, traffic, out.ENDLESS))


def _answered(title: str, ask: Callable[[], T]) -> tuple[T | None, BundleSection]:
    """The answer, None where there is none, and its section."""
    try:
        if reason := os.environ.get(NO_API):
            raise Unreachable(reason)
        found = ask()
    except CommandError as error:
        return None, BundleSection(title, str(error), is_missing=True)
    except (KeyError, TypeError) as error:
        unread = mismatch(error) or f"the answer cannot be read ({type(error).__name__}: {error})"
        return None, BundleSection(title, str(unread), is_missing=True)
    return found, BundleSection(title, found if isinstance(found, str) else json.loads(out.json_text(found)))


def _printed(programs: Programs, title: str, *words: str) -> BundleSection:
    done = programs.read(*words, timeout_s=PROGRAM_S)
    is_missing = done.status != 0
    return BundleSection(title, done.reason if is_missing else f"{done.output}{done.errors}", is_missing)

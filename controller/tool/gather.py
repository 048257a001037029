"""Asks the API and the programs of this machine for what `pierhead bundle` writes."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from ..build import current_build
from . import feeds, tables
from . import output as out
from .api import ControllerApi
from .errors import CommandError
from .project.programs import Programs
from .project.project import Project

LINES = "200"
"""Of each log."""
EVENTS = "1000"
"""As many as are kept."""
PROGRAM_S = 30.0
WIDTH = 160
PROGRAMS = Programs()
_QUESTIONS = {
    "engine": ("docker", "version"),
    "Compose": ("docker", "compose", "version"),
    "what the engine keeps": ("docker", "system", "df"),
    "containers": ("docker", "ps", "--all", "--size", "--filter", "label=com.docker.compose.project={project}"),
}
_OWN = ("haproxy", "controller", "prometheus")


def sections(api: ControllerApi, programs: Programs = PROGRAMS) -> Iterator[tuple[str, str]]:
    """Each has what could be had, or why it could not."""
    document = api.services()
    yield "about", _about(document.project)
    yield "status", out.plain(tables.status(document, api.traffic(), WIDTH), WIDTH)
    yield "plan", _answered(lambda: api.plan().text)
    yield "events", _answered(partial(_events, api))
    yield "services", _answered(lambda: document)
    yield "routes", _answered(api.routes)
    for row in document.services:
        yield f"revisions of {row.name}", _answered(partial(api.revisions, row.name))
        yield f"logs of {row.name}", _answered(partial(_logs, api, row.name))
    for title, words in _QUESTIONS.items():
        yield title, _printed(programs, *(word.format(project=document.project) for word in words))
    for name in _OWN:
        yield f"logs of {name}", _printed(programs, "docker", "logs", "--tail", LINES, f"{document.project}-{name}-1")


def settings() -> Mapping[str, str]:
    """The variables of this process, and those of the project's .env."""
    directory = os.environ.get("PIERHEAD_PROJECT_DIR")
    return {**(Project(Path(directory)).env_file().values() if directory else {}), **os.environ}


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


def _answered(ask: Callable[[], object]) -> str:
    try:
        found = ask()
    except CommandError as error:
        return f"not available: {error}"
    return found if isinstance(found, str) else out.json_text(found, indent=2)


def _printed(programs: Programs, *words: str) -> str:
    done = programs.read(*words, timeout_s=PROGRAM_S)
    return f"{done.output}{done.errors}" if done.status == 0 else f"not available: {done.reason}"

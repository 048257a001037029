"""`pierhead bundle`: what explains the stack's state, in one file to send to others."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pierhead.files import replace_file

from ...build import current_build
from .. import bundle as texts
from .. import feeds, tables
from .. import output as out
from ..api import ControllerApi
from ..errors import BadInput, CommandError
from ..project.programs import Programs
from ..project.project import Project
from .options import EVENTS_KEPT, connect

STANDARD = "-"
LINES = "200"
PROGRAM_S = 30.0
WIDTH = 160
_PROGRAMS = {
    "engine": ("docker", "version"),
    "Compose": ("docker", "compose", "version"),
    "what the engine keeps": ("docker", "system", "df"),
    "containers": ("docker", "ps", "--all", "--size", "--filter", "label=com.docker.compose.project={project}"),
}
_OWN = ("haproxy", "controller", "prometheus")

Written = Annotated[str, typer.Argument(metavar="FILE", help='where to; "-": standard output')]
Overwrite = Annotated[bool, typer.Option("--force", help="also where FILE exists")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bundle)


def bundle(file: Written, force: Overwrite = False) -> None:
    """Write what explains the stack's state into a file: status, plan, events, traffic, versions, ends of logs.

    Secrets of .env, and what is named or formed as a secret, are removed. Read the file before you send it: requests
    may be in logs.

    Example: pierhead bundle stack.txt
    """
    path = Path(file)
    if file != STANDARD and path.exists() and not force:
        raise BadInput(f"{file} exists; choose another name, or overwrite it with --force")
    sections = list(_sections(connect(), Programs()))
    text = texts.bundle(sections, texts.secrets_of(_settings()))
    if file == STANDARD:
        out.say(text)
        return
    try:
        replace_file(path, text.encode(errors="replace"), 0o600)
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}; nothing was written") from error
    out.say(f"{file} has {len(text) // 1024 + 1} KiB: {texts.contents(sections)}. Read it before you send it.")


def _sections(api: ControllerApi, programs: Programs) -> Iterator[tuple[str, str]]:
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
    for title, words in _PROGRAMS.items():
        yield title, _printed(programs, *(word.format(project=document.project) for word in words))
    for name in _OWN:
        yield f"logs of {name}", _printed(programs, "docker", "logs", "--tail", LINES, f"{document.project}-{name}-1")


def _settings() -> Mapping[str, str]:
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
    return "\n".join(map(feeds.event_line, api.events({"limit": str(EVENTS_KEPT)}).events))


def _logs(api: ControllerApi, service: str) -> str:
    replicas = api.logs(service, {"tail": LINES}).replicas
    return "\n".join(f"{replica.name} | {line}" for replica in replicas for line in replica.lines)


def _answered(ask: Callable[[], object]) -> str:
    try:
        found = ask()
    except CommandError as error:
        return f"not to be had: {error}"
    return found if isinstance(found, str) else out.json_text(found, indent=2)


def _printed(programs: Programs, *words: str) -> str:
    done = programs.read(*words, timeout_s=PROGRAM_S)
    return f"{done.output}{done.errors}" if done.status == 0 else f"not to be had: {done.reason}"

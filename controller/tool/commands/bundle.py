"""`pierhead bundle`: what explains the stack's state, in one file to send to others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from pierhead.files import replace_file

from .. import bundle as texts
from .. import output as out
from ..errors import BadInput, CommandError
from .options import connect

STANDARD = "-"

Written = Annotated[str, typer.Argument(metavar="FILE", help='where to; "-": standard output')]
Overwrite = Annotated[bool, typer.Option("--force", help="also where FILE exists")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bundle)


def bundle(file: Written, force: Overwrite = False) -> None:
    """Write what explains the stack's state into a file: status, plan, events, traffic, versions, ends of logs.

    Where the controller does not answer, the file has what the engine and the logs say, and why there is no more.

    Values of .env, but for the stack's own settings, are removed, and so is what is named or formed as a secret. Where
    several machines run the stack, the command runs without .env and the engine: there only what is named or formed as
    a secret is removed, and the sections of the engine and of the stack's own logs are missing. Read the file before
    you send it: requests may be in logs.

    Example: pierhead bundle stack.txt
    """
    path = Path(file)
    if file != STANDARD and path.exists() and not force:
        raise BadInput(f"{file} exists; choose another name, or overwrite it with --force")
    from .. import gather  # imported when needed: with the API's records, which help and completion do not need

    written = gather.written()
    project = {**written, **os.environ}.get("COMPOSE_PROJECT_NAME", "")
    sections = list(gather.sections(connect(), project))
    text = texts.bundle(sections, texts.secrets_of(written, os.environ))
    if file == STANDARD:
        out.say(text)
        return
    try:
        replace_file(path, text.encode(errors="replace"), 0o600)
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}; nothing was written") from error
    out.say(f"{file} has {len(text) // 1024 + 1} KiB: {texts.contents(sections)}. Read it before you send it.")

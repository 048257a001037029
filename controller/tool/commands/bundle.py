"""`pierhead bundle`: what explains the stack's state, in one file to send to others."""

from __future__ import annotations

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

    Secrets of .env, and what is named or formed as a secret, are removed. Read the file before you send it: requests
    may be in logs.

    Example: pierhead bundle stack.txt
    """
    path = Path(file)
    if file != STANDARD and path.exists() and not force:
        raise BadInput(f"{file} exists; choose another name, or overwrite it with --force")
    from .. import gather  # imported when needed: with the API's records, which help and completion do not need

    sections = list(gather.sections(connect()))
    text = texts.bundle(sections, texts.secrets_of(gather.settings()))
    if file == STANDARD:
        out.say(text)
        return
    try:
        replace_file(path, text.encode(errors="replace"), 0o600)
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}; nothing was written") from error
    out.say(f"{file} has {len(text) // 1024 + 1} KiB: {texts.contents(sections)}. Read it before you send it.")

"""`pierhead backup` and `pierhead restore`: the controller's state in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pierhead.files import replace_file

from .. import output as out
from ..errors import BadInput, CommandError
from .options import Output, connect

STANDARD = "-"
MOST_BYTES = 64 * 1024 * 1024
"""As the controller's API."""

Written = Annotated[str, typer.Argument(metavar="FILE", help='where to; "-": standard output')]
Read = Annotated[str, typer.Argument(metavar="FILE", help='of `pierhead backup`; "-": standard input')]
Overwrite = Annotated[bool, typer.Option("--force", help="also where FILE exists")]
OfAnother = Annotated[bool, typer.Option("--force", help="also the backup of another project")]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(backup)
    app.command()(restore)


def backup(file: Written, force: Overwrite = False) -> None:
    """Write the controller's state into a file: numbers of `scale`, keys, versions, events.

    FILE has secrets, and only its owner may read it. It does not have the compose files, .env, certificates, images and
    volumes.

    Example: pierhead backup state.json
    """
    if file == STANDARD:
        out.print_json(connect().backup())
        return
    path = Path(file)
    if path.exists() and not force:
        raise BadInput(f"{file} exists; choose another name, or overwrite it with --force")
    made = connect().backup()
    try:
        replace_file(path, f"{out.json_text(made, indent=2)}\n".encode(), 0o600, durable=True)
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}; nothing was written") from error
    out.say(f"{file} has the state of {made.project}: {len(made.rows)} rows and {len(made.events)} events.")


def restore(file: Read, force: OfAnother = False, output: Output = "text") -> None:
    """Replace the controller's state by a backup. The controller begins again with it.

    What was changed since the backup is lost: scale targets, keys, versions, events. Replicas continue to run.

    Example: pierhead restore state.json
    """
    as_json = out.is_json(output)
    restored = connect().restore(_read(file), force=force)
    if as_json:
        out.print_json(restored)
        return
    out.say(
        f"The state of {restored.project} is restored: {restored.rows} rows and {restored.events} events. The "
        "controller begins again with it; in a few seconds `pierhead status` shows what it does."
    )


def _read(file: str) -> dict[str, Any]:
    """A backup, as far as the command knows it: the API checks the rest. Raises BadInput."""
    try:
        content = (
            sys.stdin.buffer.read(MOST_BYTES + 1) if file == STANDARD else _beginning_of(Path(file), MOST_BYTES + 1)
        )
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise BadInput(f"{file}: a backup has at most {MOST_BYTES} bytes")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise BadInput(f"{file}: expected what `pierhead backup` writes, found something else")
    return document


def _beginning_of(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most)

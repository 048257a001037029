"""`console`: the address of the page that shows the stack."""

from __future__ import annotations

import typer

from .. import output as out
from .options import connect


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(console)


def console() -> None:
    """Print the address of the console, a page that shows the stack.

    Where the API has no port on this machine, the command opens one until Ctrl-C.
    """
    out.say(f"{connect().url}/")

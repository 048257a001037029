"""`console`: the address of the page that shows the stack."""

from __future__ import annotations

import typer

from .. import output as out
from ..errors import BadInput
from ..project.direct import UNIX
from .options import connect


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(console)


def console() -> None:
    """Print the address of the console, a page that shows the stack.

    For a stack of many machines, the command opens a port for it, and closes that at Ctrl-C.
    """
    url = connect().url
    if url.startswith(UNIX):
        raise BadInput(f"{url} is a Unix socket, which no browser opens: name the API's port in PIERHEAD_API_URL")
    out.say(f"{url}/")

"""Writes a command's output: text for users, JSON for programs, both to standard output; complaints to standard error.

Every text is made harmless here, on a terminal and in a pipe: a replica's log line or error may hold what a terminal
acts on. JSON keeps it as escapes.

Colours are used only on a terminal and without NO_COLOR (rich checks both). Off a terminal each row of a table is one
line, however long, so that `grep` finds whole sentences.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterable

from rich import console as rich_console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from .errors import BadInput

ENDLESS = 100_000
"""The width of output that is not a terminal."""


_ACTED_ON = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069]")
"""Control characters but for tab and line feed, and what turns the direction of text."""


def harmless(text: str) -> str:
    """The text with "?" for every character that a terminal acts on."""
    return _ACTED_ON.sub("?", text)


class Console(rich_console.Console):
    """A console whose texts are harmless; what it writes itself (colours, moves of the cursor) stays."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See rich."""
        for part in super().render(renderable, options):
            yield part if part.control else Segment(harmless(part.text), part.style)


def is_json(output: str) -> bool:
    """Whether `-o` asks for JSON. Raises BadInput for a form that does not exist."""
    if output not in ("text", "json"):
        raise BadInput(f"--output: expected text or json, found {output!r}")
    return output == "json"


def console() -> Console:
    """Return the console of standard output."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def width(on: Console) -> int:
    """Return how many columns a page has."""
    return on.width if on.is_terminal else ENDLESS


def show(page: Iterable[RenderableType], on: Console | None = None) -> None:
    """Write a page to standard output."""
    on = on or console()
    if on.is_terminal:
        for renderable in page:
            on.print(renderable)
    else:
        sys.stdout.write(plain(page))
    sys.stdout.flush()


def plain(page: Iterable[RenderableType], width: int = ENDLESS) -> str:
    """Return a page as text without colours and without spaces at the ends of lines."""
    text = io.StringIO()
    on = Console(file=text, width=width, highlight=False, color_system=None, force_terminal=False)
    for renderable in page:
        on.print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def say(text: str) -> None:
    """Write lines to standard output and flush."""
    sys.stdout.write(f"{harmless(text)}\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Write lines to standard error."""
    sys.stderr.write(f"{harmless(text)}\n")


def print_json(document: object) -> None:
    """Write one document, with records in it."""
    say(json_text(document, indent=2))


def print_json_line(document: object) -> None:
    """Write one document on one line, for streams of documents."""
    say(json_text(document))


def with_members(record: object, **more: object) -> dict[str, object]:
    """Return a record's members as JSON has them, and more after them."""
    from ..status.records.document import members

    return {**members(record), **more}


def json_text(document: object, indent: int | None = None) -> str:
    """Return a document, with records in it, as JSON."""
    from ..status.records.document import as_json  # imported when needed: most commands write none

    return json.dumps(document, default=as_json, indent=indent)

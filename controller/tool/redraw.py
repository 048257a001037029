"""Shows a page again and again: on a terminal in the place of the one before."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from . import output
from .errors import Unreachable
from .output import Console

Page = list[RenderableType]
Draw = Callable[[int], Page]
"""Asks the API, and returns the page for a width."""


def follow(draw: Draw, count: int | None, interval_s: float) -> None:
    """Show `count` pictures, or until Ctrl-C; on a terminal each in the place of the one before.

    Raises Unreachable when the controller does not answer the first time; later pictures say so.
    """
    console = output.console()
    try:
        if console.is_terminal and count != 1:
            _live(draw, console, count, interval_s)
        else:
            _printed(draw, console, count, interval_s)
    except KeyboardInterrupt:
        return


def _live(draw: Draw, console: Console, count: int | None, interval_s: float) -> None:
    first = draw(output.width(console))
    with Live(Group(*first), console=console, screen=count is None, auto_refresh=False) as live:
        for shown in _pages(draw, console, count, interval_s, first):
            live.update(Group(*shown), refresh=True)


def _printed(draw: Draw, console: Console, count: int | None, interval_s: float) -> None:
    first = draw(output.width(console))
    for number, shown in enumerate(_pages(draw, console, count, interval_s, first)):
        if number:
            output.say("")
        output.show(shown, console)


def _pages(draw: Draw, console: Console, count: int | None, interval_s: float, first: Page) -> Iterator[Page]:
    shown, number = first, 1
    yield shown
    while count is None or number < count:
        time.sleep(interval_s)
        try:
            shown = draw(output.width(console))
        except Unreachable as error:
            shown = [*first, Text(""), Text(str(error), style="red")]
        number += 1
        yield shown


def json_lines(look: Callable[[], object], count: int | None, interval_s: float) -> None:
    """Write `count` documents, one on each line, or until Ctrl-C."""
    number = 0
    try:
        while count is None or number < count:
            if number:
                time.sleep(interval_s)
            output.print_json_line(look())
            number += 1
    except KeyboardInterrupt:
        sys.stdout.flush()

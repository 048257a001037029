"""A container's log as the engine hands it out with times: one entry for each line that people see. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

_TIMED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z) ")


def timed_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield (time, line) of a log whose lines begin with the engine's time of them; "" where one has none.

    A line of more than 16 KiB was logged in pieces, and the engine puts the same time before each.
    """
    for raw in text.removesuffix("\n").split("\n") if text else ():
        match = _TIMED.match(raw)
        time, said = (match[1], raw.replace(match[0], "")) if match else ("", raw)
        for line in said.splitlines() or [""]:
            yield time, line

"""Numbers that a replica publishes for its callers' policies, such as the load of its engine.

    publish(running=3, waiting=1, kv_use=0.4)          at the replica, as often as it likes
      --> STATS.version, STATS.text --> replies --> parse --> Candidate.stats at the callers
      --> /readyz --> the controller --> Discovery ------------^   for callers that have had no reply of late

A reply carries the text only if `STATS.version` differs from the last one sent on its connection. Without numbers the
version stays 0, which costs nothing. On connections without such state, `STATS.text` goes with each reply.
A version is a time, so callers keep the newest numbers of both ways, also across a restart of the replica.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

STATS_KEY: Final = "pierhead-stats"
"""The metadata key: the version, then "name=number" each, separated by semicolons."""

MOST_NUMBERS = 16
"""Names that a replica may publish. All are sent together, and gRPC accepts 8 KiB of metadata by default."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

NOTHING: Mapping[str, float] = MappingProxyType({})


class Stats(NamedTuple):
    """What a replica published."""

    version: int
    """Microseconds since 1970 by the replica's clock, and always greater than the one before. 0 = nothing yet."""
    numbers: Mapping[str, float]


class Published:
    """The numbers of one process. `publish` may be called by any thread."""

    __slots__ = ("_lock", "_now", "_text", "changed", "numbers", "version")

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.version = 0
        """Grows with each change; 0 = nothing is published."""
        self.numbers: Mapping[str, float] = NOTHING
        self._now = now
        self._lock = threading.Lock()
        self.changed: Callable[[], object] = lambda: None
        """Called after each change."""
        self._text: tuple[int, str] = (0, "")

    def publish(self, numbers: Mapping[str, float]) -> None:
        """Set these numbers; others do not change. Raises ValueError."""
        for name, number in numbers.items():
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f'routing stats: expected a name of ASCII letters, digits and _ up to 64, found "{name}"'
                )
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ValueError(f"routing stats: {name}: expected a finite number, found {number!r}")
        with self._lock:
            changed = {**self.numbers, **{name: float(number) for name, number in numbers.items()}}
            if changed == self.numbers:
                return
            if len(changed) > MOST_NUMBERS:
                raise ValueError(
                    f"routing stats: expected at most {MOST_NUMBERS} names in all, found {len(changed)}: every reply's "
                    f"metadata has room for few ({', '.join(sorted(changed))})"
                )
            # The numbers before the version: a thread that sees the new version sees its numbers, or newer ones.
            self.numbers = changed
            self.version = max(self.version + 1, int(self._now() * 1e6))
        self.changed()

    @property
    def text(self) -> str:
        """The text for replies. Made on demand: most numbers change before they are sent."""
        version, text = self._text
        if version != self.version:
            version = self.version
            text = ";".join([str(version), *(f"{name}={number:.6g}" for name, number in self.numbers.items())])
            self._text = (version, text)
        return text


STATS = Published()


def publish(**numbers: float) -> None:
    """Send numbers to the callers of this replica; policies find them in `Candidate.stats`. From any thread.

        publish(running=3, waiting=0, kv_use=0.25)

    A number stays until the same name is published again. Cheap: call it whenever a number has changed. Callers get
    it with the next reply, or from the controller within about two seconds.
    Raises ValueError for a number that is not finite, for a name of more than 64 characters, and for too many names.
    """
    STATS.publish(numbers)


def parse_stats(text: str | None) -> Stats | None:
    """The numbers in a reply; None if there are none, or if they cannot be parsed."""
    if not text or len(text) > 4096:
        return None
    version, *pairs = text.split(";")
    try:
        numbers = {name: float(number) for name, _, number in (pair.partition("=") for pair in pairs)}
        found = Stats(int(version), numbers)
    except ValueError:
        return None
    return found if found.version > 0 and all(map(math.isfinite, numbers.values())) else None

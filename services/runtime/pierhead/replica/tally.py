"""How many requests a replica has answered, how many of them in time, and how many with errors of its own. Pure.

A controller compares these of two versions of a service, so an answer counts against the version that gave it only
where the version is to blame: what was refused, cancelled, or could not be had from another service does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

NOT_ANSWERED = frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED", "429", "499", "503"})
TOO_LATE = frozenset({"DEADLINE_EXCEEDED", "504"})
"""Deadlines: a replica whose code hangs still answers with these."""
OWN_ERRORS = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"})


class Tally(NamedTuple):
    """Since the process began."""

    answered: int = 0
    errors: int = 0
    in_time: int = 0
    """Answered before a deadline had to do it."""


def tally(requests: Mapping[tuple[str, ...], float]) -> Tally:
    """Read it from `pierhead_requests_total`: counts by (method, code); a code is gRPC's name or HTTP's number."""
    answered = errors = late = 0
    for (_, code), count in requests.items():
        if code in NOT_ANSWERED:
            continue
        answered += int(count)
        late += int(count) if code in TOO_LATE else 0
        if code in OWN_ERRORS or (len(code) == 3 and code.startswith("5")):
            errors += int(count)
    return Tally(answered, errors, answered - late)

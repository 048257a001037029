"""Counts a replica's answers: all, those in time, and errors of its own. Pure.

The controller compares these counts of two versions of a service. So an error counts only if the version is to blame,
not for refusals, cancellations, and failures of other services.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

NOT_ANSWERED = frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED", "429", "499", "503"})
TOO_LATE = frozenset({"DEADLINE_EXCEEDED", "504"})
"""Statuses of passed deadlines: a replica whose code hangs still answers with these."""
OWN_ERRORS = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"})


class RequestTally(NamedTuple):
    """Counts since the process began."""

    answered: int = 0
    errors: int = 0
    in_time: int = 0
    """Requests answered before their deadline."""


def tally(requests: Mapping[tuple[str, ...], float]) -> RequestTally:
    """Compute it from `pierhead_requests_total`: counts by (method, code); a code is gRPC's name or HTTP's number."""
    answered = errors = late = 0
    for (_, code), count in requests.items():
        if code in NOT_ANSWERED:
            continue
        answered += int(count)
        late += int(count) if code in TOO_LATE else 0
        if code in OWN_ERRORS or (len(code) == 3 and code.startswith("5")):
            errors += int(count)
    return RequestTally(answered, errors, answered - late)

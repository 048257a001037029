"""What is said of a service: where its replicas are, and how it is to be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pierhead.calls.absence import Absence
from pierhead.calls.replica import Endpoint


@dataclass(frozen=True, slots=True)
class Listing:
    """All of it, as one source says it: a later one replaces it whole."""

    endpoints: Sequence[Endpoint] = ()
    max_queued_requests: int | None = None
    """How many calls may wait at each handle; -1 = no bound, None = not said."""
    policy: str | None = None
    """How handles choose that name no policy of their own; None = not said."""
    policy_kwargs: str = ""
    """What that policy is made with: a JSON object, "" = nothing."""
    absence: Absence | None = None
    """Why calls do not wait for a replica where none may be called; None = one may come at any time."""

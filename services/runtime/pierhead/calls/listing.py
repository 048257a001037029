"""What a source reports about a service: where its replicas are, and how it is to be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pierhead.calls.absence import Absence
from pierhead.calls.replica import Endpoint


@dataclass(frozen=True, slots=True)
class ReplicaListing:
    """One source's whole report; the next one replaces it."""

    endpoints: Sequence[Endpoint] = ()
    max_queued_requests: int | None = None
    """How many calls may wait at each handle; -1 = no bound, None = not set."""
    policy: str | None = None
    """The policy of handles that name none; None = not set."""
    policy_kwargs: str = ""
    """The policy's keyword arguments as a JSON object; "" = none."""
    absence: Absence | None = None
    """Why calls do not wait while no replica may be called; None = a replica may come at any time."""

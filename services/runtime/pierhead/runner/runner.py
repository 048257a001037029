"""The seam between an application without containers and where its replicas live.

    LoopRunner      N replicas of each service in the running event loop, called through lanes in memory
    ProcessRunner   N replicas of each service in processes of their own, which find each other by Discovery

A replica starts, and is then ready until the application stops, or until it is ill: its check_health has failed three
times in a row, its process has left three probes in a row without an answer, or it has ended by itself. Another one
takes its place, and is tried until one is ready.

    starting --(check_health passed, listening)--> ready --(stop)--> draining --> ended
       `--(it raises)--> the start fails            `--(ill)--> draining; another one starts

Requests never go to a replica that is not ready. They wait in one kind of queue (`pierhead.calls.pool`), at each handle
and at the front; `max_queued_requests` bounds both. Services start at the same time: a call that one makes at its start
waits for its callee. Calls that still wait for a service when it stops fail, and so do later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from pierhead.calls.replica import ReplicaListing

PAUSE_S: Final = 1.0
"""After a replacement that did not start."""


class FrontRoute(NamedTuple):
    """A route of `x-serve`, and the replicas behind it."""

    path: str
    service: str
    listing: ReplicaListing
    """The replicas' addresses are those of HTTP."""
    timeout_s: float
    refusal_status: int = 503
    retry_after_s: float = 1.0
    strip_prefix: bool = False

    def takes(self, path: str) -> bool:
        """Whether a path is this route's, or below it."""
        return self.path in ("/", path) or path.startswith(f"{self.path}/")

    def inner(self, path: str) -> str:
        """The path as the service sees it."""
        if not self.strip_prefix or self.path == "/":
            return path
        return f"/{path[len(self.path) :].removeprefix('/')}"


class Offer(NamedTuple):
    """What an application serves."""

    routes: Sequence[FrontRoute]
    grpc_port: int | None
    """Of all methods; None = nothing speaks gRPC, or each service has a port of its own."""
    grpc: Mapping[str, str]
    """By gRPC service, its address where that is its own; "" = the front's."""


class NoApplication(Exception):
    """A graph that cannot be served; the message says why."""


class ProcessFailed(Exception):
    """A process that has ended before it did what it was for; its own output says why."""


Changed = Callable[[Offer], object]
"""Called whenever other replicas are ready than before."""


class Runner(Protocol):
    """The replicas of one application, from `start` to the end of `stop`. Used on one event loop, once."""

    async def start(self) -> Offer:
        """Start the replicas; return once all are ready. Calls that they make at their start wait for the callee.

        Raises NoApplication, ProcessFailed, or what a constructor or a check raises; then nothing runs. Cancellation
        ends what was started.
        """
        ...

    async def stop(self, *, at_once: bool = False) -> None:
        """End the replicas, callers first; unless `at_once`, each when its requests have ended, or its time to drain.

        Returns when all have ended. A second call with `at_once` ends what still drains.
        """
        ...

    def ready(self) -> Mapping[str, int]:
        """How many replicas of each service are ready."""
        ...

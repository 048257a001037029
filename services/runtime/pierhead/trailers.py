"""Translates errors to and from the wire: a call's trailing metadata, and the error that a status stands for."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from pierhead.errors import (
    ERROR_ID_KEY,
    ERROR_KIND_KEY,
    ONGOING_KEY,
    REFUSED_KEY,
    Backpressure,
    BadRequest,
    DeadlineExceeded,
    NotFound,
    PierheadError,
    RemoteError,
    Unavailable,
    UserCodeError,
)
from pierhead.held import MODELS_KEY
from pierhead.routing_stats import STATS_KEY

_BY_STATUS: dict[grpc.StatusCode, type[PierheadError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Backpressure,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


class Trailers:
    """Our own trailing metadata keys, read once from a finished call."""

    __slots__ = ("error_id", "kind", "models", "ongoing", "refused", "stats")

    def __init__(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        found = {key: value for key, value in metadata or () if isinstance(value, str)}
        self.kind = found.get(ERROR_KIND_KEY)
        self.error_id = found.get(ERROR_ID_KEY)
        self.refused = found.get(REFUSED_KEY)
        self.ongoing = found.get(ONGOING_KEY)
        self.models = found.get(MODELS_KEY)
        self.stats = found.get(STATS_KEY)


def from_status(status: grpc.StatusCode, details: str, trailers: Trailers) -> PierheadError:
    """The error that a finished call stands for: the callee's own class where it named one, else by status."""
    if trailers.kind == UserCodeError.kind:
        message, _, traceback = details.partition("\n")
        failed = UserCodeError(message, error_id=trailers.error_id or "", traceback=traceback)
        if traceback:
            failed.add_note(f"traceback at the callee:\n{traceback}")  # so that logs of this error show it
        return failed
    # The class of this kind that this process has imported, an application's own too: of several, the newest.
    known: list[type[PierheadError]] = [PierheadError]
    for each in known:
        known += [cls for cls in each.__subclasses__() if cls not in (RemoteError, UserCodeError)]
    same = [cls for cls in known if cls.kind == trailers.kind and "kind" in vars(cls) and cls.grpc_status is status]
    found = same[-1] if same else _BY_STATUS.get(status)
    if found is None:
        return RemoteError(details or f"the callee answered {status.name} without a message", status)
    error = Exception.__new__(found, details)  # its constructor may take other things than a message
    error.message = details
    if trailers.kind:
        error.kind = trailers.kind  # a subclass that only the callee knows keeps its own kind at the edge
    return error

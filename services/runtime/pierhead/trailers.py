"""Translates errors to and from the wire: a call's trailing metadata, and the error that a status stands for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import grpc

from pierhead.errors import (
    ERROR_ID_KEY,
    ERROR_KIND_KEY,
    ONGOING_KEY,
    REFUSED_KEY,
    Backpressure,
    BadRequest,
    BodyTimeout,
    Broken,
    ContentGone,
    DeadlineExceeded,
    Draining,
    NoReplica,
    NotFound,
    PayloadTooLarge,
    PierheadError,
    RemoteError,
    ReplicaDied,
    ScaledToZero,
    SettingsError,
    StoreUnavailable,
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

_BY_KIND: dict[str, type[PierheadError]] = {
    error.kind: error
    for error in (
        PierheadError,
        BadRequest,
        PayloadTooLarge,
        BodyTimeout,
        NotFound,
        DeadlineExceeded,
        Backpressure,
        Unavailable,
        NoReplica,
        ScaledToZero,
        Draining,
        StoreUnavailable,
        ReplicaDied,
        Broken,
        ContentGone,
        SettingsError,
    )
}


class Trailers:
    """Our own trailing metadata keys, read once from a finished call."""

    __slots__ = ("error_id", "kind", "models", "ongoing", "refused", "stats")
    KEYS: ClassVar[dict[str, str]] = {
        ERROR_KIND_KEY: "kind",
        ERROR_ID_KEY: "error_id",
        REFUSED_KEY: "refused",
        ONGOING_KEY: "ongoing",
        MODELS_KEY: "models",
        STATS_KEY: "stats",
    }

    def __init__(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        self.kind: str | None = None
        self.error_id: str | None = None
        self.refused: str | None = None
        self.ongoing: str | None = None
        self.models: str | None = None
        self.stats: str | None = None
        for key, value in metadata or ():
            name = self.KEYS.get(key)
            if name is not None and isinstance(value, str):
                setattr(self, name, value)


def from_status(status: grpc.StatusCode, details: str, trailers: Trailers) -> PierheadError:
    """The error that a finished call stands for: the callee's own class where it named one, else by status."""
    if trailers.kind == UserCodeError.kind:
        message, _, traceback = details.partition("\n")
        failed = UserCodeError(message, error_id=trailers.error_id or "", traceback=traceback)
        if traceback:
            failed.add_note(f"traceback at the callee:\n{traceback}")  # so that logs of this error show it
        return failed
    named = _BY_KIND.get(trailers.kind or "")
    found = named if named is not None and named.grpc_status is status else _BY_STATUS.get(status)
    if named is None and trailers.kind and (own := _own_class(trailers.kind, status)) is not None:
        error = Exception.__new__(own, details)  # its constructor may take other things than a message
        error.message = details
        return error
    if found is None:
        return RemoteError(details or f"the callee answered {status.name} without a message", status)
    error = found(details)
    if trailers.kind:
        error.kind = trailers.kind  # a subclass that only the callee knows keeps its own kind at the edge
    return error


def _own_class(kind: str, status: grpc.StatusCode) -> type[PierheadError] | None:
    """The class of this kind that the application has made and this process has imported: of several, the newest."""
    known: list[type[PierheadError]] = [PierheadError]
    for each in known:
        known += [cls for cls in each.__subclasses__() if cls not in (RemoteError, UserCodeError)]
    return next((cls for cls in reversed(known) if vars(cls).get("kind") == kind and cls.grpc_status is status), None)

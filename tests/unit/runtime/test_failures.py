"""What failures say, as a table."""

from __future__ import annotations

import grpc
import pytest
from pierhead import Backpressure, DeadlineExceeded, NoReplica, PayloadTooLarge, PierheadError, ReplicaDied
from pierhead.calls.failures import CORE_FAILED, Blame, CallFailure, count
from pierhead.errors import BadRequest, Draining, RemoteError, ScaledToZero, Unavailable
from pierhead.held import parse_announcement
from pierhead.lanes.connection import NEVER_SENT

S = grpc.StatusCode


def failed(code: grpc.StatusCode, details: str = "", remaining: float = 1.0, **trailers: str) -> CallFailure:
    metadata = grpc.aio.Metadata(*((f"pierhead-{key}", value) for key, value in trailers.items()))
    return CallFailure(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details), remaining)


FAILURES: list[tuple[CallFailure, str | None, Blame, type[PierheadError]]] = [
    (failed(S.UNAVAILABLE, refused="draining", error="draining", ongoing="3"), "draining", Blame.NONE, Draining),
    (failed(S.RESOURCE_EXHAUSTED, refused="overloaded", ongoing="3"), "overloaded", Blame.NONE, Backpressure),
    (failed(S.UNAVAILABLE, f"{NEVER_SENT}: connection refused"), "connect", Blame.BROKEN, NoReplica),
    (failed(S.UNAVAILABLE, NEVER_SENT, ongoing="3"), None, Blame.BROKEN, Unavailable),
    (failed(S.UNAVAILABLE, "Socket closed"), None, Blame.BROKEN, ReplicaDied),
    (failed(S.CANCELLED), None, Blame.NONE, ReplicaDied),
    (failed(S.CANCELLED, remaining=0.0), None, Blame.LATE, DeadlineExceeded),
    (failed(S.UNKNOWN, f"{CORE_FAILED}: x", remaining=-1.0), None, Blame.LATE, DeadlineExceeded),
    (failed(S.UNKNOWN, f"{CORE_FAILED}: x"), None, Blame.BROKEN, RemoteError),
    (failed(S.DEADLINE_EXCEEDED), None, Blame.LATE, DeadlineExceeded),
    (failed(S.DEADLINE_EXCEEDED, ongoing="3", error="deadline_exceeded"), None, Blame.NONE, DeadlineExceeded),
    (failed(S.INTERNAL, "ValueError", ongoing="3", error="internal"), None, Blame.BROKEN, PierheadError),
    (failed(S.UNKNOWN, ongoing="3"), None, Blame.BROKEN, RemoteError),
    (failed(S.DATA_LOSS), None, Blame.BROKEN, RemoteError),
    (failed(S.UNAVAILABLE, ongoing="3", error="no_replica"), None, Blame.BROKEN, NoReplica),
    (failed(S.UNAVAILABLE, ongoing="3", error="scaled_to_zero"), None, Blame.ANSWERED, ScaledToZero),
    (failed(S.RESOURCE_EXHAUSTED, ongoing="3", error="backpressure"), None, Blame.ANSWERED, Backpressure),
    (failed(S.UNIMPLEMENTED), None, Blame.ANSWERED, RemoteError),
    (failed(S.INVALID_ARGUMENT, "no", ongoing="3", error="bad_request"), None, Blame.ANSWERED, BadRequest),
    (failed(S.RESOURCE_EXHAUSTED, "Received message larger than max"), None, Blame.ANSWERED, PayloadTooLarge),
]


@pytest.mark.parametrize(("failure", "reason", "blame", "seen"), FAILURES, ids=lambda value: getattr(value, "code", ""))
def test_what_it_says(failure: CallFailure, reason: str | None, blame: Blame, seen: type[PierheadError]) -> None:
    assert failure.retry_reason == reason
    assert failure.blame is blame
    error = failure.as_seen("test.Test/One at fake replica r0", 0.25)
    assert isinstance(error, seen)
    assert failure.worked or failure.trailers.refused or "test.Test/One at fake replica r0: " in str(error)


@pytest.mark.parametrize(("text", "number"), [("3", 3), ("0", 0), (None, 0), ("-3", 0), ("x", 0), ("٣", 0)])
def test_a_load_as_it_travels(text: str | None, number: int) -> None:
    assert count(text) == number


def test_models_as_they_travel() -> None:
    assert parse_announcement(None) is None
    assert parse_announcement("") == frozenset()
    assert parse_announcement("a,b%2Cc") == frozenset({"a", "b,c"})

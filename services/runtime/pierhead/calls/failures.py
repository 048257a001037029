"""Classifies a failed call: whether it may be sent again, whether its replica is to blame, what its caller sees.

Pure. A status comes from the service, from the replica's runtime, or from the transport; the trailing metadata says
which. A status without trailing metadata comes from the transport, and only gRPC's text tells the causes apart.
"""

from __future__ import annotations

from enum import Enum

import grpc

from pierhead.errors import DeadlineExceeded, NoReplica, PayloadTooLarge, PierheadError, ReplicaDied, ScaledToZero
from pierhead.lanes.connection import NEVER_SENT
from pierhead.trailers import Trailers, from_status

RETRY_REASONS = ("overloaded", "draining", "connect")
"""Why a call may go to another replica: none of its work was begun."""

TOO_LARGE = "larger than max"
"""What gRPC's core says of a message above max_receive_message_length or max_send_message_length."""

MOMENT_S = 0.01
"""gRPC times deadlines with its own timer: a call may end this much earlier, or later, than by our clock."""

CORE_FAILED = "Internal error from Core"
"""The start of the status message that gRPC's Python layer sets when an operation of its core failed."""

BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
)
"""Statuses that mean that the service is broken, not the request."""


class Blame(Enum):
    """What a failure says about the replica."""

    NONE = "nothing"
    ANSWERED = "it works: the fault is the request's"
    LATE = "it has not answered in time"
    BROKEN = "it, or the way there, is broken"


class CallFailure:
    """One failed call, which had `remaining` seconds left when it failed."""

    __slots__ = ("code", "details", "error", "trailers")

    def __init__(self, error: grpc.aio.AioRpcError, remaining: float) -> None:
        self.error = error
        self.details = error.details() or ""
        self.trailers = Trailers(error.trailing_metadata())
        self.code = error.code()
        unclear = self.code is grpc.StatusCode.CANCELLED or CORE_FAILED in self.details
        if unclear and not self.worked and remaining < MOMENT_S:
            # The status that gRPC reports depends on what it was doing when its timer fired.
            self.code = grpc.StatusCode.DEADLINE_EXCEEDED

    @property
    def worked(self) -> bool:
        """Whether the replica's runtime received the call: its trailing metadata then holds the load."""
        return self.trailers.ongoing is not None

    @property
    def ongoing(self) -> int:
        """The replica's requests in flight at that time."""
        return count(self.trailers.ongoing)

    @property
    def never_sent(self) -> bool:
        """Whether the call had no connection to be sent on."""
        return not self.worked and self.details.startswith(NEVER_SENT)

    @property
    def retry_reason(self) -> str | None:
        """One of RETRY_REASONS; None when work may have been begun."""
        refused = self.trailers.refused
        if refused is not None:
            return "draining" if refused == "draining" else "overloaded"
        return "connect" if self.never_sent else None

    @property
    def blame(self) -> Blame:
        """What it says about the replica."""
        if self.trailers.refused is not None or self.code is grpc.StatusCode.CANCELLED:
            return Blame.NONE
        if self.trailers.kind == ScaledToZero.kind:  # the replica passes on the error of a service behind it
            return Blame.ANSWERED
        if self.code in BROKEN:
            return Blame.BROKEN
        if self.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Blame.NONE if self.worked else Blame.LATE
        return Blame.ANSWERED

    def as_seen(self, where: str, limit: float) -> PierheadError:
        """What the caller sees: the callee's own error where it sent one, else the transport's failure.

        `where`: the method and the replica, for the message; `limit`: seconds that the call had.
        """
        code, details = self.code, self.details
        if self.trailers.kind is not None or self.worked:
            return from_status(code, details, self.trailers)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"{where}: no reply within {limit:.3g} s")
        if self.never_sent:
            return NoReplica(f"{where}: not connected, and a call that sends a stream is not moved ({details})")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return ReplicaDied(f"{where}: it went away after it may have begun; not repeated, the work may be done")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_LARGE in details:
            return PayloadTooLarge(f"{where}: {details}")
        return from_status(code, f"{where}: {details}", self.trailers)


def count(text: str | None) -> int:
    """Parse a load from metadata; 0 where there is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0

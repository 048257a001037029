"""What the failure of a call says: whether it may be sent again, what it makes of its replica, what its caller sees.

Pure. A status comes from the service, from the replica's runtime, or from the transport; the trailing metadata says
which. Where there is none the transport made it up, and gRPC's text is all there is to go by.
"""

from __future__ import annotations

from enum import Enum

import grpc

from pierhead.errors import DeadlineExceeded, NoReplica, PayloadTooLarge, PierheadError, ReplicaDied, ScaledToZero
from pierhead.held import parse_announcement
from pierhead.lanes.connection import NEVER_SENT
from pierhead.trailers import Trailers, from_status

RETRY_REASONS = ("overloaded", "draining", "connect")
"""Why a call may go to another replica: none of its work was begun."""

TOO_LARGE = "larger than max"
"""What gRPC's core says of a message above max_receive_message_length or max_send_message_length."""

MOMENT_S = 0.01
"""gRPC keeps deadlines by a timer of its own: how a call has ended shows so much earlier, or later, than by ours."""

CORE_FAILED = "Internal error from Core"
"""How the message of a status begins that gRPC's Python layer makes up where an operation of its core failed."""

BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
)
"""Statuses that say that the service is broken, and not what was asked of it."""


class Blame(Enum):
    """What a failure makes of the replica."""

    NONE = "nothing"
    ANSWERED = "it works: the fault is the request's"
    LATE = "it has not answered in time"
    BROKEN = "it, or the way there, is broken"


class Failure:
    """One failed call, which had `remaining` seconds left when it failed."""

    __slots__ = ("code", "details", "error", "trailers")

    def __init__(self, error: grpc.aio.AioRpcError, remaining: float) -> None:
        self.error = error
        self.details = error.details() or ""
        self.trailers = Trailers(error.trailing_metadata())
        self.code = error.code()
        unclear = self.code is grpc.StatusCode.CANCELLED or CORE_FAILED in self.details
        if unclear and not self.worked and remaining < MOMENT_S:
            # What gRPC names as the cause depends on what it was about to do when its timer struck.
            self.code = grpc.StatusCode.DEADLINE_EXCEEDED

    @property
    def worked(self) -> bool:
        """Whether the replica's runtime had the call, and says so with its load."""
        return self.trailers.ongoing is not None

    @property
    def ongoing(self) -> int:
        """What it had in flight then."""
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
        """What it makes of the replica."""
        if self.trailers.refused is not None or self.code is grpc.StatusCode.CANCELLED:
            return Blame.NONE
        if self.trailers.kind == ScaledToZero.kind:  # it passes on what was said of a service behind it
            return Blame.ANSWERED
        if self.code in BROKEN:
            return Blame.BROKEN
        if self.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Blame.NONE if self.worked else Blame.LATE
        return Blame.ANSWERED

    def as_seen(self, where: str, limit: float) -> PierheadError:
        """What the caller sees: the callee's own error where it spoke, else what happened on the way.

        `where`: the method and the replica, in words; `limit`: seconds that the call had.
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
    """A load as it travels; 0 for what is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0


def models(text: str | None) -> frozenset[str] | None:
    """The models that a replica says it holds; None = it says nothing."""
    return None if text is None else parse_announcement(text)

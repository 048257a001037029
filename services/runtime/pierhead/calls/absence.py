"""Why a service has no replica and will get none: the errors that end waiting calls. Pure.

    SwitchedOff   an operator, or the compose files, set it to 0; no call wakes it
    Unknown       the controller knows no service of that name

These reasons count only while no replica can be called: a replica that is listed and ready still gets calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from pierhead.errors import NoReplica, ScaledToZero


@dataclass(frozen=True, slots=True)
class SwitchedOff:
    """A person has set the service to 0 replicas."""

    by: str
    """What set it to 0, for the message."""

    def error(self, service: str) -> NoReplica:
        """The error of a call. Clients of an ingress service get this text from haproxy/errors/scaled-to-zero.json."""
        return ScaledToZero(
            f"{service} is scaled to 0 replicas (by {self.by}), and no request wakes it: "
            f"`make scale SERVICE={service} N=1` does. Nothing was done."
        )


@dataclass(frozen=True, slots=True)
class Unknown:
    """The controller has reported that it knows no such service, and no other source lists replicas of it."""

    def error(self, service: str) -> NoReplica:
        """The error of a call."""
        return NoReplica(
            f"no replica of {service} can be called: the controller knows no service of that name; look at the name "
            "(`pierhead status` lists those that there are), or add it to the compose files. Nothing was done."
        )


Absence = SwitchedOff | Unknown

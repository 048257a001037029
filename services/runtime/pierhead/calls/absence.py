"""Why a service has no replica and will get none: the errors that end waiting calls. Pure.

    SwitchedOff   a person has set it to 0, and no call wakes it
    Unknown       the controller knows no service of that name

A replica that may be called all the same is.
"""

from __future__ import annotations

from dataclasses import dataclass

from pierhead.errors import NoReplica, ScaledToZero


@dataclass(frozen=True, slots=True)
class SwitchedOff:
    """A person has set the service to 0 replicas."""

    by: str
    """What did it, in words."""

    def error(self, service: str) -> NoReplica:
        """The error of a call. Clients of an ingress service get its words from haproxy/errors/scaled-to-zero.json."""
        return ScaledToZero(
            f"{service} is scaled to 0 replicas (by {self.by}), and no request wakes it: "
            f"`make scale SERVICE={service} N=1` does. Nothing was done."
        )


@dataclass(frozen=True, slots=True)
class Unknown:
    """The controller has said that it knows no such service, and nothing else says where it is."""

    def error(self, service: str) -> NoReplica:
        """The error of a call."""
        return NoReplica(
            f"no replica of {service} can be called: the controller knows no service of that name; look at the name "
            "(`pierhead status` lists those that there are), or add it to the compose files. Nothing was done."
        )


Absence = SwitchedOff | Unknown

"""Why a service has no replica and will get none: the errors that end waiting calls. Pure.

    SwitchedOff   an operator, or the compose files, set it to 0; no call wakes it
    Unknown       the controller knows no service of that name
    Unfound       there is no controller, and neither this process nor DNS knows a service of that name

These reasons count only while no replica can be called: a replica that is listed and ready still gets calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pierhead.errors import NoReplica, ScaledToZero
from pierhead.settings import static_key

MOST_NAMES = 20
"""Names of services that a message lists."""


@dataclass(frozen=True, slots=True)
class SwitchedOff:
    """A person has set the service to 0 replicas."""

    by: str
    """What set it to 0, for the message."""

    def error(self, service: str) -> NoReplica:
        """The error of a call. Clients of an ingress service get this text from haproxy/errors/scaled-to-zero.json."""
        return ScaledToZero(
            f"{service} is scaled to 0 replicas (by {self.by}), and no request wakes it: "
            f"`pierhead scale {service} 1` does. Nothing was done."
        )


@dataclass(frozen=True, slots=True)
class Unknown:
    """The controller has reported that it knows no such service, and no other source lists replicas of it."""

    names: tuple[str, ...] = ()
    """The services that it knows, where it has said so."""

    def error(self, service: str) -> NoReplica:
        """The error of a call."""
        named = _named(service, self.names) if self.names else "`pierhead status` lists those that there are"
        return NoReplica(
            f"no replica of {service} can be called: the controller knows no service of that name; look at the name "
            f"({named}), or add it to the compose files. Nothing was done."
        )


@dataclass(frozen=True, slots=True)
class Unfound:
    """There is no controller, and neither this process nor DNS knows the service."""

    names: tuple[str, ...]
    """The services that this process knows."""

    def error(self, service: str) -> NoReplica:
        """The error of a call."""
        variable = f"PIERHEAD_STATIC_{static_key(service)}"
        return NoReplica(
            f"no replica of {service} can be called: DNS knows no such host, and this process no such service; look at "
            f"the name ({_named(service, self.names)}), or set {variable}=ip:port. Nothing was done."
        )


def _named(service: str, names: Sequence[str]) -> str:
    """The services that there are, and the one that may be meant."""
    import difflib  # memory that a replica without such an error does without

    by_key = {static_key(name): name for name in names}
    close = difflib.get_close_matches(static_key(service), by_key, 1)
    hint = f'; did you mean "{by_key[close[0]]}"?' if close else ""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"there are {', '.join(names[:MOST_NAMES])}{more}{hint}"


Absence = SwitchedOff | Unknown | Unfound

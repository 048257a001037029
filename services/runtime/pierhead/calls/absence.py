"""Why a service has no replica and will get none: the errors that end waiting calls. Pure.

These reasons count only while no replica can be called: a replica that is listed and ready still gets calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pierhead.errors import NoReplica, ScaledToZero
from pierhead.settings import static_key

MOST_NAMES = 20
"""Names of services that a message lists."""


Absence = Callable[[str], NoReplica]
"""Makes the error of a call to the service of that name."""


def switched_off(by: str) -> Absence:
    """A person has set the service to 0 replicas; `by`: what set it to 0, for the message.

    Clients of an ingress service get this text from haproxy/errors/scaled-to-zero.json.
    """
    return lambda service: ScaledToZero(
        f"{service} is scaled to 0 replicas (by {by}), and no request wakes it: "
        f"`pierhead scale {service} 1` does. Nothing was done."
    )


def unknown(names: Sequence[str]) -> Absence:
    """The controller knows no such service, nor does another source; `names`: those that it has said it knows."""

    def error(service: str) -> NoReplica:
        named = _named(service, names) if names else "`pierhead status` lists those that there are"
        return NoReplica(
            f"no replica of {service} can be called: the controller knows no service of that name; look at the name "
            f"({named}), or add it to the compose files. Nothing was done."
        )

    return error


def unfound(names: Sequence[str]) -> Absence:
    """There is no controller, and neither this process, which knows `names`, nor DNS knows the service."""
    return lambda service: NoReplica(
        f"no replica of {service} can be called: DNS knows no such host, and this process no such service; look at "
        f"the name ({_named(service, names)}), or set PIERHEAD_STATIC_{static_key(service)}=ip:port. Nothing was done."
    )


OUT_OF_SIGHT = "it takes requests at a socket that is not in this container"


def out_of_sight(service: str) -> NoReplica:
    """An Absence: the service has replicas, whose sockets are not mounted here."""
    return NoReplica(
        f"no replica of {service} can be called: {OUT_OF_SIGHT}; name {service} in depends_on of this service, if "
        f"it has x-serve, or write x-serve.listen: tcp for {service}. Nothing was done."
    )


def stopped(service: str) -> NoReplica:
    """An Absence: the service was in this process, and has ended, or did not start."""
    return NoReplica(f"no replica of {service} can be called: it has ended, or did not start. Nothing was done.")


def _named(service: str, names: Sequence[str]) -> str:
    """The services that there are, and the one that may be meant."""
    import difflib  # memory that a replica without such an error does without

    by_key = {static_key(name): name for name in names}
    close = difflib.get_close_matches(static_key(service), by_key, 1)
    hint = f'; did you mean "{by_key[close[0]]}"?' if close else ""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"there are {', '.join(names[:MOST_NAMES])}{more}{hint}"

"""Which callers of the API get an answer.

No web page can have the name that they call the API by. Where a token is set, each of them has one, whose role allows
what is asked. Without any, they are on this machine, and have the role `deploy`. Who is let in at the Unix socket
(api_socket.py), or asks from inside the controller's container, is an admin.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from ..api_tokens import ROLES, ApiToken, Role, allows, owner_of
from ..errors import Forbidden, UnknownHost
from ..model.text import one_line
from ..status.records.answers import Caller

logger = logging.getLogger(__name__)

ROUTES = Path("/proc/net/route")
_HEADER = "`Authorization: Bearer <token>`"
_HOW = f"send {_HEADER} with PIERHEAD_API_TOKEN, or with a token of PIERHEAD_API_TOKENS"
_ROLE_AT_THE_PORT: Role = "deploy"
"""Of this machine's users, without tokens."""
_USERS = (
    "on one machine the owner of the project's directory and members of Docker's group can type `pierhead` commands "
    "without one"
)
_HERE = f"the API answers the machine itself (published at 127.0.0.1). For others set PIERHEAD_API_TOKEN, and {_HOW}"
_HOST = re.compile(r"(?P<name>[^\[\]:]+|\[(?P<address>[^\[\]]+)\])(:[0-9]*)?")
_NO_STRANGERS = re.compile(r"[^.]+|.+\.localhost|.+\.internal")
"""Names that nobody can register: without a dot (localhost, Compose's services), of this machine, of private networks
(host.docker.internal)."""


def default_gateways(table: str) -> frozenset[str]:
    """Return the gateways of the default routes in a table such as /proc/net/route.

    Connections to a published port come from the gateway of the container's default route: it is the host. Connections
    of another container come from its own address.
    """
    gateways = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000" and fields[2] != "00000000":
            gateways.add(socket.inet_ntoa(struct.pack("=L", int(fields[2], 16))))
    return frozenset(gateways)


def read_gateways() -> frozenset[str]:
    """Return this container's gateways; none where there is no route table (not Linux)."""
    try:
        return default_gateways(ROUTES.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        logger.warning("cannot read %s, so callers without a token are answered on loopback only: %s", ROUTES, error)
        return frozenset()


class Gatekeeper:
    """Decides which callers get an answer."""

    def __init__(
        self,
        tokens: Collection[ApiToken] = (),
        gateways: Callable[[], frozenset[str]] = read_gateways,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        """`gateways`: the addresses of this machine as the controller's container sees it. `hosts`: further names of
        the API.
        """
        self._tokens = tokens
        self._gateways = gateways
        self._hosts = hosts

    def refuse_unknown_host(self, host: str | None) -> None:
        """Raise UnknownHost where the header `Host` has a name that its owner may point at this machine: web pages of
        the owner would be of the API's origin then, and could read it. Clients without the header are no browsers.
        """
        if host is None:
            return
        found = _HOST.fullmatch(host)
        name = (found["address"] or found["name"]).lower() if found else ""
        if name in self._hosts or _address_of(name) or _NO_STRANGERS.fullmatch(name):
            return
        raise UnknownHost(
            f"Host: the API does not answer to {one_line(host)[:100]!r}, because a web page could be at that name. Ask "
            "for an address, or for localhost, or add the name to PIERHEAD_API_HOSTS in .env and repeat `pierhead up`"
        )

    def admit(self, peer: str | None, headers: Mapping[str, str], role: Role, uid: int | None = None) -> Caller:
        """The caller. Raises Forbidden for one that may not do what needs this role.

        `uid`: of a user of this machine whom the Unix socket has let in.
        """
        caller = self._caller(peer, headers, uid)
        if allows(caller.role, role):
            return caller
        if "Authorization" in headers:
            raise Forbidden(
                f"the token {caller.name} has the role {caller.role}, and this needs {role}; use a token of that role "
                "(`pierhead token` makes one)"
            )
        raise Forbidden(f"this needs the role {role}: set PIERHEAD_API_TOKEN in .env, and {_HOW}; {_USERS}")

    def _caller(self, peer: str | None, headers: Mapping[str, str], uid: int | None) -> Caller:
        offered = headers.get("Authorization")
        if offered is not None:
            return self._owner_of(offered)
        if uid is not None:
            return Caller(f"uid {uid}", ROLES[-1])
        if self._tokens:
            raise Forbidden(f"the API answers with a token only: {_HOW}; {_USERS}")
        if not _is_own_page(headers):
            # A browser on this machine sends requests for any web page; these headers tell of it.
            raise Forbidden(f"web pages may not ask without a token: {_HERE}")
        address = _address_of(peer or "")
        if address is not None and address.is_loopback:  # from inside: the host comes from a gateway
            return Caller("this machine", ROLES[-1])
        if address is None or str(address) not in self._gateways():
            raise Forbidden(f"{peer or 'an unknown address'} may not ask without a token: {_HERE}")
        return Caller("this machine", _ROLE_AT_THE_PORT)

    def _owner_of(self, offered: str) -> Caller:
        token = owner_of(offered, self._tokens)
        if token is None:
            raise Forbidden(
                f"`Authorization` has none of the tokens that this stack knows; {_HOW}. After a change of .env repeat "
                "`pierhead up`"
            )
        return Caller(token.name, token.role)


def _is_own_page(headers: Mapping[str, str]) -> bool:
    """Whether the API's own page asks, or none. `Host` is checked before, so no other page has that origin."""
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return False
    return headers.get("Origin") in (None, f"http://{headers.get('Host', '')}")


def _address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address

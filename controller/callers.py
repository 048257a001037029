"""Who may ask for a change: this machine, or whoever has the token. Pure but for the route table it is handed."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from controller.errors import Forbidden

logger = logging.getLogger(__name__)

ROUTES = Path("/proc/net/route")
_REFUSED = (
    "changes are accepted from the machine itself (published at 127.0.0.1) or with the header "
    "`Authorization: Bearer <PIERHEAD_API_TOKEN>`"
)


def default_gateways(table: str) -> frozenset[str]:
    """Return the gateways of the default routes in a table such as /proc/net/route.

    A published port's connections come from the gateway of the network that has the container's default route: it is
    the host. Another container's come from its own address.
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
        logger.warning("cannot read %s, only loopback may ask for changes: %s", ROUTES, error)
        return frozenset()


class Gatekeeper:
    """Lets changes through, or raises Forbidden."""

    def __init__(self, token: str | None, gateways: Callable[[], frozenset[str]] = read_gateways) -> None:
        self._token = token
        self._gateways = gateways

    def admit(self, peer: str | None, headers: Mapping[str, str]) -> None:
        """Raise Forbidden unless the peer's address or its token allows changes."""
        offered = headers.get("Authorization")
        if offered is not None and self._is_token(offered):
            return
        if offered is not None:
            raise Forbidden(f"the token in `Authorization` is not PIERHEAD_API_TOKEN; {_REFUSED}")
        if "Origin" in headers:
            # A browser says where its page is from; a page on this machine's screen is not this machine's user.
            raise Forbidden(f"web pages may not ask for changes without the token; {_REFUSED}")
        if not self._is_this_machine(peer):
            raise Forbidden(f"{peer or 'an unknown address'} may not ask for changes: {_REFUSED}")

    def _is_token(self, offered: str) -> bool:
        if self._token is None:
            return False
        return hmac.compare_digest(offered.encode(errors="replace"), f"Bearer {self._token}".encode())

    def _is_this_machine(self, peer: str | None) -> bool:
        try:
            address = ipaddress.ip_address(peer or "")
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return address.is_loopback or str(address) in self._gateways()

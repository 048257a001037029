"""The token by which a replica knows the controller (PIERHEAD_ADMIN_TOKEN). Pure."""

from __future__ import annotations

import hmac


def shows(authorization: str, token: str) -> bool:
    """Whether a header `Authorization` shows a token, whose letters are small; "" = none is asked for."""
    return not token or hmac.compare_digest(authorization.lower().encode(), f"bearer {token}".encode())

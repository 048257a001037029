"""Who may ask the API for what: tokens with a name and a role. Pure.

read      status, plan, events, logs
scale     in addition: numbers of replicas, sleep and wake of language models
deploy    in addition: deployments, their end, restarts
admin     everything, also GPUs, nodes, keys and backups
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, get_args

Role = Literal["read", "scale", "deploy", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each allows what those before it allow, too."""

FORM = "name:role:hash, as `pierhead token` prints them, separated by commas"
NAME = re.compile("[A-Za-z0-9._-]{1,40}")
_TOKEN = re.compile(rf"(?P<name>{NAME.pattern}):(?P<role>{'|'.join(ROLES)}):(?P<digest>[0-9a-f]{{64}})")
_OF_THE_STACK = "PIERHEAD_API_TOKEN"


@dataclass(frozen=True, slots=True)
class ApiToken:
    """A token that the API knows by its hash."""

    name: str
    role: Role
    digest: str = field(repr=False)
    """SHA-256 of the token, in hexadecimal digits. Enough for a random token of 256 bits."""


def allows(role: Role, needed: Role) -> bool:
    """Whether who has a role may do what needs another one."""
    return ROLES.index(role) >= ROLES.index(needed)


def digest_of(token: str) -> str:
    """The hash of a token."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def made(name: str, role: Role) -> tuple[str, str]:
    """A new random token, and its entry for PIERHEAD_API_TOKENS."""
    token = f"ph_{secrets.token_urlsafe(32)}"
    return token, f"{name}:{role}:{digest_of(token)}"


def read_tokens(of_stack: str | None, named: str) -> tuple[ApiToken, ...]:
    """The tokens of PIERHEAD_API_TOKEN, which allows everything, and of PIERHEAD_API_TOKENS.

    Raises ValueError, with what is wrong: it shows no entry, as one may be a token in the place of its hash.
    """
    found = [ApiToken(_OF_THE_STACK, "admin", digest_of(of_stack))] if of_stack else []
    for number, entry in enumerate(filter(None, re.split(r"[,\s]+", named)), 1):
        parts = _TOKEN.fullmatch(entry)
        if parts is None:
            raise ValueError(f"another form in entry {number}")
        role: Role = next(role for role in ROLES if role == parts["role"])
        if parts["name"] in {token.name for token in found}:
            raise ValueError(f"{parts['name']} twice")
        if same := next((token.name for token in found if token.digest == parts["digest"]), ""):
            raise ValueError(f"the same token as {same} and as {parts['name']}")
        found.append(ApiToken(parts["name"], role, parts["digest"]))
    return tuple(found)


def owner_of(offered: str, tokens: Collection[ApiToken]) -> ApiToken | None:
    """The token that a header `Authorization` shows; None where it is none of these."""
    digest = digest_of(offered.removeprefix("Bearer ")) if offered.startswith("Bearer ") else ""
    return next((token for token in tokens if hmac.compare_digest(token.digest, digest)), None)

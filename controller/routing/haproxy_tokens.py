"""JSON Web Tokens of clients at HAProxy (x-serve.auth: jwt): what its configuration says of them. Pure.

HAProxy accepts a file of a public key that is missing or wrong, and then refuses each token. So the files are checked
before (controller/files/public_keys.py), and without any it is told to answer 503.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ..settings import CLAIM, DEFAULT_TOKENS, TOKEN_ALGORITHMS, TokenRules
from .haproxy_text import DIGEST, NONE, SECRETS, matching

LEEWAY_S = 30
"""How far the identity provider's clock may be off."""
_DIRECTORY = re.compile(rf"/run/haproxy/jwt/({DIGEST}|{NONE})|{SECRETS}/jwt")
_FILE = re.compile(r"[0-9a-f]{1,16}\.pem")


class Tokens(NamedTuple):
    """How tokens are checked."""

    rules: TokenRules
    directory: str
    """Of public keys, in HAProxy's container."""
    files: tuple[str, ...]


NO_KEYS = Tokens(DEFAULT_TOKENS, f"/run/haproxy/jwt/{NONE}", ())


def checked(tokens: Tokens) -> dict[str, Any]:
    """For the template. Raises RoutingError when a value may not be put into a configuration."""
    rules, directory = tokens.rules, matching(_DIRECTORY, tokens.directory, "directory of public keys")
    return {
        "algorithm": matching(re.compile("|".join(TOKEN_ALGORITHMS)), rules.algorithm, "algorithm of tokens"),
        "issuer": matching(CLAIM, rules.issuer, "issuer of tokens"),
        "audience": matching(CLAIM, rules.audience, "audience of tokens"),
        "in_a_list": _in_a_list(rules.audience),
        "files": [f"{directory}/{matching(_FILE, file, 'public key')}" for file in tokens.files],
        "leeway_s": LEEWAY_S,
    }


def _in_a_list(audience: str) -> str:
    """A pattern of JSON lists of texts, of which one is this."""
    text = "".join(sign if sign.isalnum() else rf"\{sign}" for sign in audience)
    return rf'[\[,][[:space:]]*"{text}"[[:space:]]*[\],]'

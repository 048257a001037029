"""The public keys of an identity provider, by which HAProxy checks its tokens (x-serve.auth: jwt): a key a file."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .pem import SMALLEST_RSA, PemKind, Wrong

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

_KEY = re.compile(r"-----BEGIN ((?:RSA )?PUBLIC KEY)-----.*?-----END \1-----", re.DOTALL)
_CURVES = {"ES256": "secp256r1", "ES384": "secp384r1", "ES512": "secp521r1"}


def public_keys(algorithm: str) -> PemKind:
    """Those of tokens that are signed by this algorithm (controller.settings.TOKEN_ALGORITHMS)."""
    return PemKind(
        "public_keys",
        "PIERHEAD_JWT_DIR",
        "Make it, and put a file <name>.pem there for each public key by which your identity provider signs tokens: "
        "services with auth: jwt need one",
        partial(_checked, algorithm),
    )


def _checked(algorithm: str, path: Path, text: str, now: float) -> tuple[str, None]:
    """The key, as HAProxy reads it."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

    if "PRIVATE KEY-----" in text:
        raise Wrong(
            "it has a private key, which is for the identity provider alone: put the public one in its place "
            "(`openssl pkey -pubout -in FILE` prints it)"
        )
    found = [match[0] for match in _KEY.finditer(text)]
    if not found:
        raise Wrong(
            'it has no public key: put one there that begins with "-----BEGIN PUBLIC KEY-----" (of a certificate, '
            "`openssl x509 -pubkey -noout -in FILE` prints it)"
        )
    if len(found) > 1:
        raise Wrong(f"it has {len(found)} public keys: put each into a file of its own")
    try:
        key = load_pem_public_key(found[0].encode())
    except Exception:  # it raises errors of several kinds
        raise Wrong("its public key cannot be read: copy it again") from None
    _check_kind(key, algorithm)
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode(), None


def _check_kind(key: PublicKeyTypes, algorithm: str) -> None:
    """HAProxy takes a key of a wrong kind, and then refuses each token."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    if isinstance(key, RSAPublicKey):
        kind = "RSA"
    else:
        kind = key.curve.name if isinstance(key, EllipticCurvePublicKey) else "neither RSA nor of an elliptic curve"
    wanted = _CURVES.get(algorithm, "RSA")
    if kind != wanted:
        raise Wrong(
            f"its key is {kind}, and PIERHEAD_JWT_ALGORITHM={algorithm} needs {wanted}: put another key there, or "
            "write into .env by what algorithm your tokens are signed"
        )
    if isinstance(key, RSAPublicKey) and key.key_size < SMALLEST_RSA:
        raise Wrong(f"its RSA key has {key.key_size} bits, and {SMALLEST_RSA} are needed at least")

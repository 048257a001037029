"""JSON Web Tokens and the keys of an identity provider, made for a test."""

from __future__ import annotations

import base64
import hmac
import json
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
_HASHES = {"256": hashes.SHA256(), "384": hashes.SHA384(), "512": hashes.SHA512()}
_CURVES = {"256": ec.SECP256R1(), "384": ec.SECP384R1(), "512": ec.SECP521R1()}


def made(algorithm: str = "RS256", rsa_bits: int = 2048) -> PrivateKey:
    """A key that tokens of this algorithm are signed by."""
    if algorithm.startswith("ES"):
        return ec.generate_private_key(_CURVES[algorithm[2:]])
    return rsa.generate_private_key(65537, rsa_bits)


def public(key: PrivateKey | ed25519.Ed25519PrivateKey) -> str:
    """Its public half, as PEM."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def private(key: PrivateKey) -> str:
    """Itself, as PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def token(key: PrivateKey | str, claims: object, algorithm: str = "RS256", **header: Any) -> str:
    """Signed by the key; by a text, as HMAC's secret; not at all by ""."""
    head = {"alg": algorithm, "typ": "JWT", **header}
    text = f"{_encoded(json.dumps(head))}.{_encoded(claims if isinstance(claims, str) else json.dumps(claims))}"
    return f"{text}.{_encoded(_signature(key, text.encode(), algorithm))}"


def _signature(key: PrivateKey | str, text: bytes, algorithm: str) -> bytes:
    if isinstance(key, str):
        return hmac.digest(key.encode(), text, "sha256") if key else b""
    digest = _HASHES.get(algorithm[2:], hashes.SHA256())
    if isinstance(key, rsa.RSAPrivateKey):
        pss = padding.PSS(padding.MGF1(digest), digest.digest_size)
        return key.sign(text, pss if algorithm.startswith("PS") else padding.PKCS1v15(), digest)
    size = (key.key_size + 7) // 8
    return b"".join(half.to_bytes(size) for half in decode_dss_signature(key.sign(text, ec.ECDSA(digest))))


def _encoded(part: str | bytes) -> str:
    content = part if isinstance(part, bytes) else part.encode()
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()

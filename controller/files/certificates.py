"""The operator's certificates (PIERHEAD_TLS=files): each file has a private key and its chain."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .pem import SMALLEST_RSA, PemKind, Validity, Wrong, date

if TYPE_CHECKING:
    from cryptography import x509

_KEY = re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?-----END \1-----", re.DOTALL)


def _checked(path: Path, text: str, now: float) -> tuple[str, Validity]:
    """The file's text, and when its certificate ends."""
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    if path.stat().st_mode & 0o077:
        raise Wrong(f"others can read its private key (mode {path.stat().st_mode & 0o777:o}): chmod 600 {path}")
    of_key = _public_half_of_key(text)
    leaf = _leaf(text)
    of_certificate = leaf.public_key()
    if of_key != _encoded(of_certificate):
        raise Wrong(
            "its key is not that of its first certificate: put the two that belong together there, and the server's "
            "own certificate before those of the authorities"
        )
    if isinstance(of_certificate, RSAPublicKey) and of_certificate.key_size < SMALLEST_RSA:
        raise Wrong(f"its RSA key has {of_certificate.key_size} bits, and HAProxy wants {SMALLEST_RSA} at least")
    valid = _validity(leaf)
    if valid.begin > now:
        raise Wrong(
            f"its certificate is not valid before {date(valid.begin)}: put another there, or set the clock right"
        )
    if valid.end <= now:
        raise Wrong(f"its certificate ended on {date(valid.end)}: put a new one there")
    return text, valid


def _in_force(path: Path, text: str, now: float) -> tuple[str, Validity]:
    """Of a file that was checked before: its text, and when its certificate ends, or ended."""
    return text, _validity(_leaf(text))


CERTIFICATES = PemKind(
    "certificates",
    "PIERHEAD_TLS_DIR",
    "Make it, and put a file <name>.pem there: a private key and its certificate chain, the server's own first",
    _checked,
)


CERTIFICATES_IN_FORCE = replace(CERTIFICATES, check=_in_force)
"""Those that were checked before they were put in force: one that has ended since is still told, with its date."""


def _leaf(text: str) -> x509.Certificate:
    from cryptography import x509

    try:
        leaf = x509.load_pem_x509_certificates(text.encode())[0]
        leaf.public_key()
    except Exception:  # it raises errors of several kinds
        raise Wrong("it has no certificate that can be read: put the chain after the key") from None
    return leaf


def _validity(leaf: x509.Certificate) -> Validity:
    return Validity(leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp())


def _public_half_of_key(text: str) -> bytes:
    from cryptography.hazmat.primitives import serialization

    found = _KEY.search(text)
    if found is None:
        raise Wrong("it has no private key: put the key and the chain into one file")
    try:
        return _encoded(serialization.load_pem_private_key(found[0].encode(), None).public_key())
    except TypeError:
        raise Wrong("its private key has a passphrase, which HAProxy is not asked for: store it without") from None
    except Exception:  # likewise
        raise Wrong("its private key cannot be read: copy it again") from None


def _encoded(public_key: object) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    encoded: bytes = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return encoded

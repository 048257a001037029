"""Certificates of the stack's own TLS between controller and edges: one authority, and a certificate for each role.

The names are those of roles, not of machines: all edges have one certificate, as Swarm gives all tasks of a service one
secret. Each certificate is good for both ends of a connection, so each end checks the other's role too (`ROLE_NAMES`).

Rotation renews a certificate when a third of its time is left, so each machine has months to take the new one. A
new authority is added to the old one (`ca.pem` may hold several) before the first certificate of it is used.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ..errors import SettingsError

Role = Literal["edge", "controller"]
ROLE_NAMES = {"edge": "pierhead edge", "controller": "pierhead controller"}
"""The common name in each role's certificate."""
DOMAIN = "pierhead.internal"
"""Server names are `<anything>.<role>.<this>`."""
AUTHORITY_DAYS = 3650
DAYS = 365
SKEW_DAYS = 1
"""Certificates begin in the past: another machine's clock may be behind."""
RENEW_AT = 1 / 3
"""The share of a certificate's time that is left when it is renewed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its private key, both as PEM."""

    certificate: str
    key: str

    @property
    def pem(self) -> str:
        """Both in one file, as HAProxy and Python read them."""
        return self.certificate + self.key


def make_authority(now: float) -> Identity:
    """Make an authority that is good for `AUTHORITY_DAYS`."""
    return _made("pierhead authority", None, AUTHORITY_DAYS, now)


def make(role: Role, authority: Identity, now: float) -> Identity:
    """Make a role's certificate that is good for `DAYS`."""
    return _made(ROLE_NAMES[role], authority, DAYS, now, f"*.{role}.{DOMAIN}")


def is_due(certificate: str, now: float) -> bool:
    """Whether a certificate must be renewed now."""
    begin, end = _times(certificate)
    return end - now < RENEW_AT * (end - begin)


def ends_at(certificate: str) -> float:
    """Until when a certificate is good (unix time)."""
    return _times(certificate)[1]


def context(own: Path, authorities: Path, *, is_server: bool) -> ssl.SSLContext:
    """TLS with this identity (`Identity.pem`), for peers that have a certificate of one of these authorities.

    Raises SettingsError.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.verify_mode = ssl.CERT_REQUIRED
    try:
        made.load_cert_chain(own)
        made.load_verify_locations(authorities)
    except OSError as error:
        raise SettingsError(f"{own}, {authorities}: {error}; `make up` makes them, as secrets of Swarm") from error
    return made


def _made(name: str, authority: Identity | None, days: int, now: float, server_name: str = "") -> Identity:
    from cryptography import x509  # most commands make none, and the package has 100 modules
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer: Any = key
    if authority is not None:
        issuer = x509.load_pem_x509_certificate(authority.certificate.encode()).subject
        signer = serialization.load_pem_private_key(authority.key.encode(), None)
    is_authority, no = authority is None, False
    constraints = x509.BasicConstraints(is_authority, 0 if is_authority else None)
    # Digital signatures for roles, signatures of certificates and of revocations for the authority.
    usage = x509.KeyUsage(not is_authority, no, no, no, no, is_authority, is_authority, no, no)
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(now - SKEW_DAYS * 86_400, UTC))
        .not_valid_after(datetime.fromtimestamp(now + days * 86_400, UTC))
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if authority is not None:
        ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        names = x509.SubjectAlternativeName([x509.DNSName(server_name)])
        builder = builder.add_extension(ends, critical=False).add_extension(names, critical=False)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Identity(builder.sign(signer, hashes.SHA256()).public_bytes(pem).decode(), private.decode())


def _times(certificate: str) -> tuple[float, float]:
    from cryptography import x509

    read = x509.load_pem_x509_certificate(certificate.encode())
    return read.not_valid_before_utc.timestamp(), read.not_valid_after_utc.timestamp()

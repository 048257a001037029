"""Certificates of an operator, made for a test: files with a private key and a certificate that signs itself."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

DAY_S = 86_400.0


def made(
    *names: str, now: float, begins: float = -1, ends: float = 90, rsa_bits: int = 0, passphrase: bytes = b""
) -> tuple[str, str]:
    """Key and certificate, as PEM, of servers of these names. `begins`, `ends`: days from now."""
    key = rsa.generate_private_key(65537, rsa_bits) if rsa_bits else ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(_date(now + begins * DAY_S)).not_valid_after(_date(now + ends * DAY_S))
    builder = builder.add_extension(x509.SubjectAlternativeName(_names(names)), critical=False)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()
    cipher = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, cipher).decode(), certificate


def _names(names: Sequence[str]) -> list[x509.GeneralName]:
    return [x509.DNSName(name) for name in names]


def _date(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)


def write(file: Path, *texts: str, mode: int = 0o600) -> None:
    """Replace the file in one step."""
    file.parent.mkdir(exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text("".join(texts))
    new.chmod(mode)
    new.replace(file)

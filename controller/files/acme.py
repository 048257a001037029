"""The certificate that an ACME server gives (PIERHEAD_TLS=acme), in the volume of the container that asks for it.

The controller makes the account's key once, so that HAProxy can answer the server's questions from the account alone.
The container (haproxy/acme/entrypoint.sh) asks, and puts the certificate, or why there is none, into the volume.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pierhead.files import replace_file

from ..model.text import told, whole_number
from .certificates import CERTIFICATES
from .pem import LOOK_S, Validity, WrongFiles, read_files
from .watch import EventRecorder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

PLACE = Path("/var/lib/acme")
"""The volume."""
DIRECTORY, FILE = "tls", "acme.pem"
"""Of the certificate; the name stays, so that HAProxy gets another one without a reload."""
ACME_CERTIFICATES = replace(
    CERTIFICATES,
    variable="PIERHEAD_TLS=acme",
    remedy="Restart the controller: it makes a placeholder, and the container acme asks for another certificate",
    renewal="it should have been renewed long before; `pierhead logs acme` says what is in the way",
)
_PLACEHOLDER_DAYS = 3650
_PLACEHOLDERS = "pierhead placeholder"
"""Who issues them, by name."""
_MOST_BYTES = 4096


def prepare(place: Path, domains: Sequence[str], now: float) -> str:
    """Make what is missing: the account's key, and a certificate that signs itself, with which HAProxy speaks TLS until
    there is another. Returns the account's thumbprint (RFC 7638).
    """
    thumbprint = _thumbprint(_account(place / "account.key"))
    _write(place / "thumbprint", thumbprint)
    (place / DIRECTORY).mkdir(mode=0o700, exist_ok=True)
    try:
        read_files(ACME_CERTIFICATES, place, DIRECTORY, now)
    except WrongFiles:
        (place / "obtained").unlink(missing_ok=True)  # so that the container asks for another one
        _write(place / DIRECTORY / FILE, _placeholder(domains, now))
    return thumbprint


def check_authority(root: Path, name: str) -> None:
    """Raises WrongFiles where a file of the project is no certificate that the container can read, without being its
    owner.
    """
    from cryptography import x509

    path = root / name
    if not path.resolve().is_relative_to(root.resolve()) or Path(name).is_absolute():
        raise WrongFiles(f"{name} is not in {root}: copy the file there, and name it from there")
    try:
        if not path.stat().st_mode & 0o004:
            raise WrongFiles(f"others cannot read {path}, so the container acme cannot: chmod 644 {path}")
        x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise WrongFiles(f"{path} cannot be read ({error.strerror}): put the authority's certificate there") from None
    except ValueError:
        raise WrongFiles(f"{path} has no certificate that can be read: put the authority's there, as PEM") from None


@dataclass
class AcmeWatch:
    """Reads whether there is a certificate for the domains, and why not."""

    place: Path
    domains: tuple[str, ...]
    project: str
    wall: Callable[[], float]
    _failure: str = ""
    _next_at: int | None = None
    _missing: tuple[str, ...] = field(default=())
    _placeholder_of: float | None = None
    """When the placeholder in force was made; None = there is a certificate."""

    def validity(self, found: Mapping[str, Validity]) -> Mapping[str, Validity]:
        """When the certificate is valid, by its file: a placeholder, which no client trusts, never."""
        made_at = self._placeholder_of
        return found if made_at is None else {FILE: Validity(made_at, made_at)}

    def notices(self) -> tuple[str, ...]:
        """What an operator has to do."""
        if self._placeholder_of is not None:
            state = "HAProxy has a placeholder that no client trusts"
        else:
            names = f", which is not for {', '.join(self._missing)}" if self._missing else ""
            state = f"HAProxy keeps the certificate that it has{names}"
        container = f"{self.project}-acme-1"
        if self._failure:
            at = datetime.datetime.fromtimestamp(self._next_at or self.wall(), datetime.UTC)
            words = (
                f"the ACME server has given no certificate for {', '.join(self.domains)}: {self._failure}. {state}; "
                f"the next attempt is at {at:%Y-%m-%d %H:%M} UTC. This machine must reach the server, and the server "
                f"each name at port 80 of this machine. `docker kill --signal HUP {container}` tries at once"
            )
            return (words,)
        if self._placeholder_of is not None or self._missing:
            words = (
                f"no ACME server has given a certificate for {', '.join(self.domains)} yet. Until then {state}; "
                f"`pierhead logs acme` shows the attempts"
            )
            return (words,)
        return ()

    def look(self) -> str:
        """Read the volume; "" or the sentence for an event."""
        before = self._failure
        self._failure, self._next_at = self._read_failure()
        self._placeholder_of, self._missing = self._read_certificate()
        if self._failure == before:
            return ""
        if self._failure:
            return self.notices()[0]
        is_there = self._placeholder_of is None and not self._missing
        return "the ACME server has given the certificate" if is_there else ""

    async def run(self, events: EventRecorder) -> None:
        """Look until cancelled."""
        while True:
            words = await asyncio.to_thread(self.look)
            if words:
                events.record("certificates", words, outcome="failed" if self._failure else "ok")
            await asyncio.sleep(LOOK_S)

    def _read_failure(self) -> tuple[str, int | None]:
        """Why there is no certificate, and when the next attempt is. The server's own words are in it."""
        try:
            text, next_at, *_ = *_read(self.place / "failure").decode(errors="replace").split("\n"), ""
        except OSError:
            return "", None
        at = whole_number(next_at)
        return told(text).rstrip(". ") or "it did not say why", at if at and at < 2**32 else None

    def _read_certificate(self) -> tuple[float | None, tuple[str, ...]]:
        """When it was made if it is a placeholder, and the domains that it does not have."""
        from cryptography import x509

        try:
            chain = x509.load_pem_x509_certificates((self.place / DIRECTORY / FILE).read_bytes())
            names = chain[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            has = names.get_values_for_type(x509.DNSName)
            issuers = chain[0].issuer.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        except Exception:  # of several kinds; the watch of the files says what is wrong
            return None, ()
        missing = tuple(domain for domain in self.domains if domain not in has)
        is_placeholder = [issuer.value for issuer in issuers] == [_PLACEHOLDERS]
        return chain[0].not_valid_before_utc.timestamp() if is_placeholder else None, missing


def _write(path: Path, text: str) -> None:
    """For root alone."""
    replace_file(path, text.encode(), 0o600)


def _read(path: Path) -> bytes:
    """The beginning of a file of the container's, which the network reaches: no link that leads elsewhere, and nothing
    that waits for a writer. Raises OSError.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        return file.read(_MOST_BYTES)


def _account(file: Path) -> EllipticCurvePrivateKey:
    """The account's key; a new one where there is none that can be read."""
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    with contextlib.suppress(OSError, ValueError):
        key = load_pem_private_key(_read(file), None)
        if isinstance(key, EllipticCurvePrivateKey):
            return key
    made = generate_private_key(SECP256R1())
    _write(file, _text(made))
    return made


def _text(key: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()).decode()


def _thumbprint(key: EllipticCurvePrivateKey) -> str:
    point = key.public_key().public_numbers()
    x, y = (_base64(number.to_bytes(32, "big")) for number in (point.x, point.y))
    parts = {"crv": "P-256", "kty": "EC", "x": x, "y": y}
    return _base64(hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).digest())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _placeholder(domains: Sequence[str], now: float) -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding

    key, name = (
        generate_private_key(SECP256R1()),
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _PLACEHOLDERS)]),
    )
    begin = datetime.datetime.fromtimestamp(now, datetime.UTC) - datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begin)
    builder = builder.not_valid_after(begin + datetime.timedelta(days=_PLACEHOLDER_DAYS))
    names = x509.SubjectAlternativeName([x509.DNSName(domain) for domain in domains])
    certificate = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    return f"{_text(key)}{certificate.public_bytes(Encoding.PEM).decode()}"

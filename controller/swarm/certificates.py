"""Certificates of the stack's own TLS between controller and edges: one authority, and a certificate for each role.

`openssl` makes them. The names are those of roles, not of machines: all edges have one certificate, as Swarm gives all
tasks of a service one secret. Each certificate is good for both ends of a connection, so each end also looks at the
other's role (`ROLE_NAMES`).

Rotation makes a certificate anew when a third of its time is left, so each machine has months to take the new one. A
new authority is put beside the old one (`ca.pem` may hold several) before the first certificate of it is used.
"""

from __future__ import annotations

import ssl
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ControllerError, SettingsError

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
"""The share of a certificate's time that is left when it is made anew."""

_CONFIG = """
[ca]
default_ca = it
[it]
database = {directory}/index
new_certs_dir = {directory}
rand_serial = yes
default_md = sha256
policy = any
[any]
commonName = supplied
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
[role]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


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
    names = f"DNS:*.{role}.{DOMAIN}"
    return _made(ROLE_NAMES[role], authority, DAYS, now, names)


def is_due(certificate: str, now: float) -> bool:
    """Whether a certificate must be made anew now."""
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


def _made(name: str, authority: Identity | None, days: int, now: float, names: str = "DNS:none") -> Identity:
    with tempfile.TemporaryDirectory(prefix="pierhead-certificates-") as directory:
        where = Path(directory)
        (where / "index").touch()
        (where / "config").write_text(_CONFIG.format(directory=directory, names=names))
        key = _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1")
        (where / "key").write_text(key)
        (where / "request").write_text(
            _openssl("req", "-new", "-config", f"{where}/config", "-key", f"{where}/key", "-subj", f"/CN={name}")
        )
        signer = ["-selfsign", "-keyfile", f"{where}/key"]
        if authority is not None:
            (where / "ca").write_text(authority.certificate)
            (where / "ca-key").write_text(authority.key)
            signer = ["-cert", f"{where}/ca", "-keyfile", f"{where}/ca-key"]
        certificate = _openssl(
            *("ca", "-batch", "-notext", "-config", f"{where}/config", "-in", f"{where}/request", *signer),
            *("-extensions", "role" if authority else "authority"),
            *("-startdate", _time(now - SKEW_DAYS * 86_400), "-enddate", _time(now + days * 86_400)),
        )
    return Identity(certificate, key)


def _times(certificate: str) -> tuple[float, float]:
    out = _openssl("x509", "-noout", "-startdate", "-enddate", text=certificate)
    begin, end = (ssl.cert_time_to_seconds(line.partition("=")[2]) for line in out.splitlines())
    return begin, end


def _time(seconds: float) -> str:
    return time.strftime("%Y%m%d%H%M%SZ", time.gmtime(seconds))


def _openssl(*words: str, text: str = "") -> str:
    try:
        done = subprocess.run(["openssl", *words], input=text, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise ControllerError("certificates cannot be made: there is no `openssl` on this machine") from None
    if done.returncode:
        raise ControllerError(f"certificates cannot be made: `openssl {words[0]}`: {done.stderr.strip()}")
    return done.stdout

"""The operator's certificates (PIERHEAD_TLS=files): a directory of .pem files, each with a private key and its chain.

`up` checks them before anything is stopped, and the controller whenever they change. HAProxy gets no wrong file.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ..errors import InvalidRequest
from .watch import EventRecorder

LOOK_S = 2.0
SOON_S = 14 * 86_400
"""A certificate that ends within this time is reported."""
SMALLEST_RSA = 2048
"""OpenSSL, in HAProxy, refuses smaller keys."""
_KEY = re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?-----END \1-----", re.DOTALL)


class WrongCertificates(InvalidRequest):
    """The files cannot be used. `problems` has one sentence for each."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files that HAProxy can use."""

    files: Mapping[str, str]
    """The text of each, by name."""
    ends: Mapping[str, float]
    """Until when each is valid (unix time), by path."""

    def ending(self, now: float) -> tuple[str, ...]:
        """A sentence for each file whose certificate ends soon, or has ended."""
        return tuple(
            f"{path}: its certificate {'ends' if end > now else 'ended'} on {_date(end)}: put a new one in its place"
            for path, end in self.ends.items()
            if end - now < SOON_S
        )


def read_certificates(root: Path, directory: str, now: float) -> Certificates:
    """Read and check every .pem file of a directory of the project. Raises WrongCertificates."""
    place = root / directory
    if not place.resolve().is_relative_to(root.resolve()):
        raise WrongCertificates(
            f"PIERHEAD_TLS_DIR: {directory} is outside of {root}, and the controller sees nothing else: name a "
            "directory in the project, and copy the files there"
        )
    try:
        paths = sorted(path for path in place.iterdir() if path.suffix == ".pem" and not path.name.startswith("."))
    except OSError as error:
        raise WrongCertificates(f"PIERHEAD_TLS_DIR: {place} cannot be read ({error.strerror}). {_MAKE}") from None
    if not paths:
        raise WrongCertificates(f"PIERHEAD_TLS_DIR: {place} has no .pem file. {_MAKE}")
    texts, ends, problems = dict[str, str](), dict[str, float](), list[str]()
    for path in paths:
        try:
            texts[path.name], ends[str(path)] = _checked(path, root, now)
        except _Wrong as wrong:
            problems.append(f"{path}: {wrong}")
    if problems:
        raise WrongCertificates(*problems)
    return Certificates(texts, ends)


_MAKE = "Make it, and put a file <name>.pem there: a private key and its certificate chain, the server's own first"


class _Wrong(Exception):
    """What is wrong with a file, and what to do."""


def _checked(path: Path, root: Path, now: float) -> tuple[str, float]:
    """The file's text, and when its certificate ends."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    text = _text(path, root)
    of_key = _public_half_of_key(text)
    try:
        leaf = x509.load_pem_x509_certificates(text.encode())[0]
        of_certificate = leaf.public_key()
    except Exception:  # it raises errors of several kinds
        raise _Wrong("it has no certificate that can be read: put the chain after the key") from None
    if of_key != _encoded(of_certificate):
        raise _Wrong(
            "its key is not that of its first certificate: put the two that belong together there, and the server's "
            "own certificate before those of the authorities"
        )
    if isinstance(of_certificate, RSAPublicKey) and of_certificate.key_size < SMALLEST_RSA:
        raise _Wrong(f"its RSA key has {of_certificate.key_size} bits, and HAProxy wants {SMALLEST_RSA} at least")
    begin, end = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
    if begin > now:
        raise _Wrong(f"its certificate is not valid before {_date(begin)}: put another there, or set the clock right")
    if end <= now:
        raise _Wrong(f"its certificate ended on {_date(end)}: put a new one there")
    return text, end


def _text(path: Path, root: Path) -> str:
    if not path.resolve().is_relative_to(root.resolve()):
        raise _Wrong("it is a link that leads out of the project, where the controller sees nothing: copy the file")
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii")
    except OSError as error:
        raise _Wrong(f"it cannot be read ({error.strerror}): give it to the user who types `up`, with chown") from None
    except UnicodeDecodeError:
        raise _Wrong("it is not text: convert it to PEM") from None
    if mode & 0o077:
        raise _Wrong(f"others can read its private key (mode {mode & 0o777:o}): chmod 600 {path}")
    return text


def _public_half_of_key(text: str) -> bytes:
    from cryptography.hazmat.primitives import serialization

    found = _KEY.search(text)
    if found is None:
        raise _Wrong("it has no private key: put the key and the chain into one file")
    try:
        return _encoded(serialization.load_pem_private_key(found[0].encode(), None).public_key())
    except TypeError:
        raise _Wrong("its private key has a passphrase, which HAProxy is not asked for: store it without") from None
    except Exception:  # likewise
        raise _Wrong("its private key cannot be read: copy it again") from None


def _encoded(public_key: object) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    encoded: bytes = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return encoded


def _date(at: float) -> str:
    return str(datetime.fromtimestamp(at, UTC).date())


@dataclass
class CertificateWatch:
    """Hands over the files when they have changed and are right; what is wrong is told, and the former ones stay."""

    root: Path
    directory: str
    use: Callable[[Mapping[str, str]], None]
    wall: Callable[[], float]
    _wrong: tuple[str, ...] = ()
    _good: Certificates = field(default_factory=lambda: Certificates({}, {}))
    _seen: Hashable = None

    def notices(self) -> tuple[str, ...]:
        """What an operator has to do."""
        kept = "Until then HAProxy keeps the certificates that it was given before"
        return tuple(f"{words}. {kept}" for words in self._wrong) + self._good.ending(self.wall())

    def look(self) -> str:
        """Read the files; "" or the sentence for an event."""
        before, seen = self._wrong, self._fingerprint()
        try:
            good = read_certificates(self.root, self.directory, self.wall())
            is_new = good.files != self._good.files
            if is_new:
                self.use(good.files)
        except WrongCertificates as error:
            self._wrong, self._seen = error.problems, seen
        except OSError as error:  # it is tried again
            self._wrong, self._seen = (f"the certificates cannot be copied for HAProxy ({error}): make room",), None
        else:
            self._good, self._wrong, self._seen = good, (), seen
            again = "the certificates can be used again" if before else ""
            return f"HAProxy gets the certificates {', '.join(good.files)}" if is_new else again
        return "\n".join(self.notices()) if before != self._wrong else ""

    async def run(self, events: EventRecorder) -> None:
        """Look for changes until cancelled. Files are read when they have not changed for one more look."""
        if self._wrong:
            events.record("certificates", "\n".join(self.notices()), outcome="failed")
        before = self._seen
        while True:
            await asyncio.sleep(LOOK_S)
            now = await asyncio.to_thread(self._fingerprint)
            settled, before = now == before, now
            if settled and now != self._seen:
                words = await asyncio.to_thread(self.look)
                if words:
                    events.record("certificates", words, outcome="failed" if self._wrong else "ok")

    def _fingerprint(self) -> Hashable:
        return tuple(self._facts())

    def _facts(self) -> Iterator[tuple[str, int, int, int, int]]:
        with contextlib.suppress(OSError):
            for path in sorted((self.root / self.directory).glob("*.pem")):
                with contextlib.suppress(OSError):
                    at = path.stat()
                    yield path.name, at.st_mtime_ns, at.st_size, at.st_ino, at.st_mode

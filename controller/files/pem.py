"""The operator's .pem files in a directory of the project: certificates, and public keys of tokens.

`up` checks them before anything is stopped, and the controller whenever they change. HAProxy gets no wrong file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ..errors import InvalidRequest
from .watch import EventRecorder

LOOK_S = 2.0
AGAIN_S = 30.0
"""Time between checks of files that are wrong and unchanged."""
REPLACE = "put a new one in its place"
SOON_S, SOON_SHARE = 14 * 86_400, 0.25
"""What ends within this time is reported if that is also less than this share of its lifetime: private authorities
give certificates for a day."""
SMALLEST_RSA = 2048
"""OpenSSL, in HAProxy, refuses certificates of smaller keys, and JSON Web Tokens want as much (RFC 7518, 3.3)."""


class WrongFiles(InvalidRequest):
    """The files cannot be used. `problems` has one sentence for each."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Wrong(Exception):
    """What is wrong with a file, and what to do."""


class Validity(NamedTuple):
    """From when until when something is valid, as unix times."""

    begin: float
    end: float

    def ends_soon(self, now: float) -> bool:
        """Whether it is to be replaced now, or has ended."""
        return self.end - now < min(SOON_S, SOON_SHARE * (self.end - self.begin))


@dataclass(frozen=True, slots=True)
class PemKind:
    """What the files are for."""

    event: str
    """The kind of events of them."""
    variable: str
    """Names the directory."""
    remedy: str
    """What to do where there is no file."""
    check: Callable[[Path, str, float], tuple[str, Validity | None]]
    """Of a file, its text and the time now: the text that HAProxy gets, and when it is valid, if it ends. Raises Wrong.
    """
    renewal: str = REPLACE
    """What to do where one ends soon."""

    @property
    def name(self) -> str:
        """As in "HAProxy gets the public keys"."""
        return self.event.replace("_", " ")


@dataclass(frozen=True, slots=True)
class PemFiles:
    """Files that HAProxy can use."""

    files: Mapping[str, str]
    """The text of each, by name."""
    validity: Mapping[str, Validity]
    """When those are valid that end, by path."""

    def ending(self, now: float, renewal: str = REPLACE) -> tuple[str, ...]:
        """A sentence for each file whose certificate ends soon, or has ended."""
        return tuple(
            f"{path}: its certificate {'ends' if valid.end > now else 'ended'} on {date(valid.end)}: {renewal}"
            for path, valid in self.validity.items()
            if valid.ends_soon(now)
        )


def read_files(kind: PemKind, root: Path, directory: str, now: float) -> PemFiles:
    """Read and check every .pem file of a directory of the project. Raises WrongFiles."""
    return _checked(kind, root, directory, now, PemFiles({}, {}))[0]


def _checked(
    kind: PemKind, root: Path, directory: str, now: float, former: PemFiles
) -> tuple[PemFiles, tuple[str, ...]]:
    """The files that can be used, and what is wrong with the others: the former file of that name takes the place of a
    wrong one. Raises WrongFiles where there are no files, and for a wrong one where there are no former ones.
    """
    texts, validity, problems = dict[str, str](), dict[str, Validity](), list[str]()
    for path in _paths(kind, root, directory):
        valid: Validity | None
        try:
            texts[path.name], valid = kind.check(path, _text(path, root), now)
        except Wrong as wrong:
            problems.append(f"{path}: {wrong}")
            if path.name not in former.files:
                continue
            texts[path.name], valid = former.files[path.name], former.validity.get(str(path))
        validity |= {} if valid is None else {str(path): valid}
    if problems and not former.files:
        raise WrongFiles(*problems)
    return PemFiles(texts, validity), tuple(problems)


def _paths(kind: PemKind, root: Path, directory: str) -> list[Path]:
    place = root / directory
    if not place.resolve().is_relative_to(root.resolve()):
        raise WrongFiles(
            f"{kind.variable}: {directory} is outside of {root}, and the controller sees nothing else: name a "
            "directory in the project, and copy the files there"
        )
    try:
        paths = sorted(path for path in place.iterdir() if path.suffix == ".pem" and not path.name.startswith("."))
    except OSError as error:
        raise WrongFiles(f"{kind.variable}: {place} cannot be read ({error.strerror}). {kind.remedy}") from None
    if not paths:
        raise WrongFiles(f"{kind.variable}: {place} has no .pem file. {kind.remedy}")
    return paths


def _text(path: Path, root: Path) -> str:
    if not path.resolve().is_relative_to(root.resolve()):
        raise Wrong("it is a link that leads out of the project, where the controller sees nothing: copy the file")
    try:
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise Wrong(f"it cannot be read ({error.strerror}): give it to the user who types `up`, with chown") from None
    except UnicodeDecodeError:
        raise Wrong("it is not text: convert it to PEM") from None


def date(at: float) -> str:
    """The day of a unix time."""
    return str(datetime.fromtimestamp(at, UTC).date())


@dataclass
class PemWatch:
    """Hands over the files when they have changed and are right; what is wrong is told, and the former ones stay."""

    kind: PemKind
    root: Path
    directory: str
    use: Callable[[Mapping[str, str]], None]
    wall: Callable[[], float]
    _wrong: tuple[str, ...] = ()
    _good: PemFiles = field(default_factory=lambda: PemFiles({}, {}))
    _seen: Hashable = None

    def notices(self) -> tuple[str, ...]:
        """What an operator has to do."""
        kept = f"Until then HAProxy keeps the {self.kind.name} that it was given before"
        return tuple(f"{words}. {kept}" for words in self._wrong) + self._good.ending(self.wall(), self.kind.renewal)

    def validity(self) -> Mapping[str, Validity]:
        """When the files that HAProxy has are valid, by name."""
        return {Path(path).name: valid for path, valid in self._good.validity.items()}

    def files(self) -> Mapping[str, str]:
        """The text of each file that HAProxy has, by name."""
        return self._good.files

    def look(self) -> str:
        """Read the files; "" or the sentence for an event."""
        before, seen, name = self._wrong, self._fingerprint(), self.kind.name
        try:
            good, wrong = _checked(self.kind, self.root, self.directory, self.wall(), self._good)
            is_new = bool(good.files) and good.files != self._good.files
            if is_new:
                self.use(good.files)
        except WrongFiles as error:
            self._wrong, self._seen = error.problems, seen
        except OSError as error:  # it is tried again
            self._wrong, self._seen = (f"the {name} cannot be copied for HAProxy ({error}): make room",), None
        else:
            self._good, self._wrong, self._seen = good if good.files else self._good, wrong, seen
            news = [f"HAProxy gets the {name} {', '.join(good.files)}"] if is_new else []
            news += [f"the {name} can be used again"] if before and not wrong and not is_new else []
            return "\n".join((*news, *(self.notices() if wrong and (is_new or before != wrong) else ())))
        return "\n".join(self.notices()) if before != self._wrong else ""

    async def run(self, events: EventRecorder, is_asked: Callable[[], bool] = lambda: True) -> None:
        """Look for changes until cancelled. Files are read when they have not changed for one more look. `is_asked`:
        whether anything needs them; else there are no events.
        """
        if self._wrong and is_asked():
            events.record(self.kind.event, "\n".join(self.notices()), outcome="failed")
        before, waited_s = self._seen, 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            waited_s += LOOK_S
            now = await asyncio.to_thread(self._fingerprint)
            settled, before = now == before, now
            # Time alone makes some files right: a certificate begins, or the clock is set.
            if settled and (now != self._seen or (self._wrong and waited_s >= AGAIN_S)):
                waited_s = 0.0
                words = await asyncio.to_thread(self.look)
                if words and is_asked():
                    events.record(self.kind.event, words, outcome="failed" if self._wrong else "ok")

    def _fingerprint(self) -> Hashable:
        return tuple(self._facts())

    def _facts(self) -> Iterator[tuple[str, int, int, int, int]]:
        with contextlib.suppress(OSError):
            for path in sorted((self.root / self.directory).glob("*.pem")):
                with contextlib.suppress(OSError):
                    at = path.stat()
                    yield path.name, at.st_mtime_ns, at.st_size, at.st_ino, at.st_mode

"""Arguments, results and exceptions as bytes, by cloudpickle where it is installed; and the seal on such bytes.

A pickle runs code where it is read. So bytes are read only if they carry a seal: an HMAC with a secret of the stack,
or, where there is none, with one that this process has drawn at its start. Only a process with the secret can call.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import os
import pickle
import secrets
import struct
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from pierhead.dotenv import DotEnv
from pierhead.errors import BadRequest, SettingsError
from pierhead.rayserve.exceptions import RayError, RayTaskError, UnserializableException

try:
    import cloudpickle as _cloudpickle
except ImportError:  # what plain pickle cannot take is an error that names the extra
    _cloudpickle = None

ALLOW: Final = "PIERHEAD_ALLOW_PICKLE"
SECRET: Final = "PIERHEAD_PICKLE_SECRET"  # noqa: S105 - a name
SECRET_FILE: Final = "PIERHEAD_PICKLE_SECRET_FILE"  # noqa: S105 - a name

_DIGEST: Final = "sha256"
_SIZE: Final = 32
_TIME: Final = struct.Struct("!d")
GOOD_S: Final = 3600.0
"""A call may wait for a place in between, and clocks of machines differ by minutes."""


def dumps(value: Any, name_of: Callable[[Any], str | None] | None = None) -> bytes:
    """A value as bytes; of an object within it for which `name_of` returns a name only that. Raises TypeError, or what
    the value itself raises.
    """
    out = io.BytesIO()
    pickler: Any = pickle.Pickler if _cloudpickle is None else _cloudpickle.CloudPickler
    if name_of is not None:
        pickler = type("Naming", (pickler,), {"persistent_id": lambda _, each: name_of(each)})
    try:
        pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return out.getvalue()
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        more = "" if _cloudpickle is not None else "; install pierhead[rayserve] for functions and classes of a script"
        raise TypeError(f"Could not serialize {value!r:.200}: {error}{more}") from error


def loads(raw: bytes, named: Callable[[str], Any] | None = None) -> Any:
    """The value of bytes from `dumps`, with `named` for each name. Only for bytes of this process, or with a seal."""
    if named is None:
        return pickle.loads(raw)  # noqa: S301 - see the module
    unpickler: Any = type("Filling", (pickle.Unpickler,), {"persistent_load": lambda _, name: named(name)})
    return unpickler(io.BytesIO(raw)).load()


def copied(value: Any) -> Any:
    """The value as another replica would get it."""
    return loads(dumps(value))


# ---- exceptions


class PickledError(NamedTuple):
    """An exception on its way to the caller."""

    cause: bytes | None
    """None: it cannot be pickled."""
    kind: str
    traceback: str

    def error(self) -> Exception:
        """What the caller's code gets."""
        try:
            cause: BaseException = RayError(self.kind) if self.cause is None else loads(self.cause)
        except Exception as error:
            return UnserializableException(f"{self.kind} could not be deserialized: {error!r}\n{self.traceback}")
        return RayTaskError(cause, self.traceback).as_instanceof_cause()


def failure_of(error: BaseException) -> PickledError:
    """An exception as what travels."""
    text = "".join(traceback.format_exception(error)).strip()
    own = error.cause if isinstance(error, RayTaskError) else error
    kind = f"{type(own).__module__}.{type(own).__qualname__}"
    try:
        raw = dumps(own)
    except Exception as why:
        return PickledError(None, f"Exception {kind} isn't serializable: {why}", text)
    return PickledError(raw, kind, text)


# ---- the seal


class Seal:
    """Signs bytes for one purpose, and opens what was signed for it within GOOD_S."""

    def __init__(self, key: bytes, clock: Callable[[], float] = time.time) -> None:
        self._key = key
        self._clock = clock

    def of(self, service: str) -> Seal:
        """The seal of one service: what was signed for it is no other's."""
        return Seal(hmac.digest(self._key, service.encode(), _DIGEST), self._clock)

    def sealed(self, raw: bytes, purpose: str) -> bytes:
        """The bytes with their seal and its time before them."""
        timed = _TIME.pack(self._clock()) + raw
        return self._sign(timed, purpose) + timed

    def opened(self, sealed: bytes, purpose: str) -> bytes:
        """The bytes behind a seal. Raises BadRequest for bytes that were not sealed with this key for this purpose, or
        too long ago.
        """
        seal, timed = sealed[:_SIZE], sealed[_SIZE:]
        if not hmac.compare_digest(seal, self._sign(timed, purpose)):
            raise BadRequest(
                f"{purpose}: these bytes do not carry the seal of this stack ({SECRET}): Python objects are taken only "
                "from deployments of the same application"
            )
        ago_s = self._clock() - _TIME.unpack(timed[: _TIME.size])[0]
        if abs(ago_s) > GOOD_S:
            raise BadRequest(
                f"{purpose}: these bytes were sealed {ago_s:.0f} s ago, and a seal is good for {GOOD_S:.0f} s; if they "
                "were sent just now, set the clocks of the machines"
            )
        return timed[_TIME.size :]

    def _sign(self, raw: bytes, purpose: str) -> bytes:
        return hmac.digest(self._key, purpose.encode() + b"\0" + raw, _DIGEST)


def write_secret(env_file: Path) -> bool:
    """Write a secret into a Compose project's `.env` unless it has one; returns whether it was written.

    The file is its owner's alone afterwards.
    """
    file = DotEnv(env_file)
    if file.get(SECRET):
        return False
    file.set(SECRET, secrets.token_hex(16))
    return file.save(0o600)


_OF_THIS_PROCESS: Final = Seal(secrets.token_bytes(_SIZE))


def seal() -> Seal:
    """The stack's seal; that of this process where the environment does not allow pickles between processes.

    Raises SettingsError where they are allowed and there is no secret.
    """
    if os.environ.get(ALLOW, "").lower() not in ("1", "true", "yes"):
        return _OF_THIS_PROCESS
    secret = os.environ.get(SECRET, "").encode()
    path = os.environ.get(SECRET_FILE, "")
    if not secret and path:
        try:
            with open(path, "rb") as file:
                secret = file.read().strip()
        except OSError as error:
            raise SettingsError(f"{SECRET_FILE}: {path} cannot be read: {error}") from error
    if len(secret) < 16:
        raise SettingsError(
            f"{SECRET}: expected at least 16 characters, since {ALLOW} is true, found {len(secret)}; `pierhead build` "
            "writes both"
        )
    return Seal(hashlib.sha256(secret).digest())

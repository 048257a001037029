"""Asks the stack's Alertmanager for silences, and makes and ends them, by its API v2."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol
from urllib.parse import quote

import aiohttp

from ..errors import AlertmanagerError, InvalidRequest
from ..model.text import one_line
from .bounded import read_at_most

STACK_URL: Final = "http://alertmanager:9093"
"""Of the stack's own, on the controller's network."""
WITHIN_S = 3.0
MOST_BYTES = 4 * 1024 * 1024
"""Of an answer: everybody on the network can make silences."""
_ADVICE = "`pierhead logs alertmanager` says why"


@dataclass(frozen=True, slots=True)
class Silence:
    """What is not sent for a while: alerts that have all of these labels. Times are unix times."""

    labels: Mapping[str, str]
    starts_at: float
    ends_at: float
    by: str
    why: str
    id: str = ""
    """"" = it is not made yet."""
    others: str = ""
    """Its further conditions, which only other programs make, as Alertmanager writes them."""


SilencedAlerts = Mapping[frozenset[tuple[str, str]], Sequence[str]]
"""By the labels of an alert: the ids of the silences that hold it back."""


class Silencer(Protocol):
    """Where silences are. Every method raises AlertmanagerError."""

    async def silences(self) -> Sequence[Silence]:
        """Those that have not ended."""

    async def silenced(self) -> SilencedAlerts:
        """The alerts that are held back."""

    async def silence(self, wanted: Silence) -> str:
        """Make a silence; returns its id."""

    async def end(self, identity: str) -> None:
        """End a silence. Raises InvalidRequest where there is none that has not ended."""


class Alertmanager:
    """A Silencer over HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def silences(self) -> Sequence[Silence]:
        """See Silencer."""
        listed = await self._ask("GET", "silences")
        with _as_alertmanager_does():
            return [_silence(one) for one in listed if one["status"]["state"] != "expired"]

    async def silenced(self) -> SilencedAlerts:
        """See Silencer."""
        listed = await self._ask("GET", "alerts?active=false&silenced=true&inhibited=false&unprocessed=false")
        with _as_alertmanager_does():
            return {frozenset(one["labels"].items()): tuple(one["status"]["silencedBy"]) for one in listed}

    async def silence(self, wanted: Silence) -> str:
        """See Silencer."""
        equal = {"isRegex": False, "isEqual": True}
        matchers = [{"name": name, "value": value, **equal} for name, value in wanted.labels.items()]
        times = {"startsAt": _text(wanted.starts_at), "endsAt": _text(wanted.ends_at)}
        body = {"matchers": matchers, **times, "createdBy": wanted.by, "comment": wanted.why}
        answer = await self._ask("POST", "silences", body)
        with _as_alertmanager_does():
            return str(answer["silenceID"])

    async def end(self, identity: str) -> None:
        """See Silencer."""
        # Versions answer differently to one that has ended.
        if all(one.id != identity for one in await self.silences()):
            raise InvalidRequest(f"there is no silence {identity[:80]!r}; `pierhead silence` lists them")
        await self._ask("DELETE", f"silence/{quote(identity, safe='')}")

    async def _ask(self, method: str, path: str, body: object = None) -> Any:
        timeout = aiohttp.ClientTimeout(total=WITHIN_S)
        url = f"{self._url}/api/v2/{path}"
        try:
            async with self._session.request(
                method, url, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                read = await read_at_most(response, MOST_BYTES)
        except TimeoutError:
            raise AlertmanagerError(f"Alertmanager does not answer within {WITHIN_S:g} s; {_ADVICE}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise AlertmanagerError(f"Alertmanager cannot be reached ({type(error).__name__}); {_ADVICE}") from error
        if read is None:
            raise AlertmanagerError(f"Alertmanager answers more than {MOST_BYTES >> 20} MiB")
        if response.status != 200:
            said = one_line(read.decode(errors="replace"))[:300]
            raise AlertmanagerError(f"Alertmanager answers {response.status}: {said or 'nothing'}; {_ADVICE}")
        with _as_alertmanager_does():
            return await asyncio.to_thread(json.loads, read or b"null")


@contextlib.contextmanager
def _as_alertmanager_does() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise AlertmanagerError(f"{STACK_URL} answers, but not as Alertmanager does; {_ADVICE}") from error


def _silence(found: Any) -> Silence:
    labels: dict[str, str] = {}
    others: list[str] = []
    for matcher in found["matchers"]:
        name, value = str(matcher["name"]), str(matcher["value"])
        is_regex, is_equal = matcher["isRegex"], matcher.get("isEqual", True)
        if is_equal and not is_regex:
            labels[name] = value
        else:
            others.append(f"{name}{'=' if is_equal else '!'}{'~' if is_regex else '' if is_equal else '='}{value}")
    starts_at, ends_at = (datetime.fromisoformat(found[key]).timestamp() for key in ("startsAt", "endsAt"))
    by, why = str(found["createdBy"]), str(found["comment"])
    return Silence(labels, starts_at, ends_at, by, why, str(found["id"]), ", ".join(others))


def _text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()

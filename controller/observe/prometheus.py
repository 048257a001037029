"""Asks Prometheus over HTTP: the number that a service is autoscaled by, and the series of the stack's traffic."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import aiohttp

from ..errors import PrometheusError
from ..model.spec import PrometheusPolicy
from .bounded import read_at_most

T = TypeVar("T")

STACK_URL = "http://prometheus:9090"
"""Of the stack's own Prometheus, on the controller's network."""
NUMBER_LIMIT = 1024 * 1024
"""A single number is far smaller; a query without an aggregation may return every series."""
SERIES_LIMIT = 16 * 1024 * 1024
"""Bytes of six series for each of 1,000 services, 100 points each."""
SERIES_WITHIN_S = 3.0
LONGEST_COMPLAINT = 300
_SERVICE = re.compile(r"\$service\b")


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a range: its labels, and (unix time, value) of each point."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class FiringAlert:
    """An alert that fires. `since`: unix time."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    since: float


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A rule of alerts, and those of it that fire."""

    name: str
    firing: Sequence[FiringAlert]


class Prometheus:
    """POST <url>/api/v1/query and query_range. `url`: the stack's own, which has the traffic of its services."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._of_numbers, self._of_series = _session(8), _session(2)  # what people look at keeps no autoscaler waiting

    async def close(self) -> None:
        """Close the connections."""
        await self._of_numbers.close()
        await self._of_series.close()

    async def number(self, service: str, policy: PrometheusPolicy) -> float:
        """Query once. Raises PrometheusError for a result that is not a single number."""
        asked = {"query": _SERVICE.sub(service, policy.query)}
        session, url = self._of_numbers, f"{policy.url}/api/v1/query"
        status, body = await _answer(session, url, policy.url, asked, policy.timeout_s, NUMBER_LIMIT)
        return number_in(status, body, policy.url)

    async def series(self, query: str, start: float, end: float, step_s: float) -> Sequence[Series]:
        """The series of a query from `start` to `end` (unix times), `step_s` seconds apart. Raises PrometheusError."""
        asked = {"query": query, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_s:g}"}
        url = f"{self._url}/api/v1/query_range"
        status, body = await _answer(self._of_series, url, self._url, asked, SERIES_WITHIN_S, SERIES_LIMIT)
        return await asyncio.to_thread(series_in, status, body, self._url)

    async def rules(self) -> Sequence[AlertRule]:
        """The rules of alerts, with what fires. Raises PrometheusError."""
        url, asked = f"{self._url}/api/v1/rules", {"type": "alert"}
        status, body = await _answer(
            self._of_series, url, self._url, asked, SERIES_WITHIN_S, SERIES_LIMIT, method="GET"
        )
        return await asyncio.to_thread(_read, status, body, self._url, _rules)


def _session(connections: int) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=connections, keepalive_timeout=30.0)
    return aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers={"User-Agent": "pierhead-controller"}
    )


async def _answer(
    session: aiohttp.ClientSession,
    url: str,
    named: str,
    asked: Mapping[str, str],
    within_s: float,
    most: int,
    *,
    method: str = "POST",
) -> tuple[int, bytes]:
    """Status and body of an answer; `named`: the address as errors have it. Raises PrometheusError."""
    timeout = aiohttp.ClientTimeout(total=within_s)
    try:
        params, data = (asked, None) if method == "GET" else (None, asked)
        async with session.request(
            method, url, params=params, data=data, timeout=timeout, allow_redirects=False
        ) as response:
            return response.status, await _body(response, most)
    except TimeoutError as error:
        raise PrometheusError(f"no answer from {named} within {within_s:g} s") from error
    except aiohttp.ClientConnectorError as error:
        reason = error.os_error.strerror or str(error.os_error)
        raise PrometheusError(f"no connection to {named}: {reason}") from error
    except (
        aiohttp.ClientError,
        OSError,
        ValueError,
        OverflowError,
    ) as error:  # the last two: from host names and ports
        raise PrometheusError(f"no valid answer from {named}: {str(error) or type(error).__name__}") from error


async def _body(response: aiohttp.ClientResponse, most: int) -> bytes:
    body = await read_at_most(response, most)
    if body is None:
        raise PrometheusError(
            f"the query's answer is larger than {most >> 20} MiB; aggregate its series to one (avg, max, sum)"
        )
    return body


def number_in(status: int, body: bytes, url: str) -> float:
    """The single number in Prometheus's response. Raises PrometheusError where there is none."""
    return _read(status, body, url, _number)


def series_in(status: int, body: bytes, url: str) -> Sequence[Series]:
    """The series in Prometheus's response to a range, without points that are no numbers. Raises PrometheusError."""
    return _read(status, body, url, _series)


def _read(status: int, body: bytes, url: str, read: Callable[[Any], T]) -> T:
    try:
        answer = json.loads(body)
        if answer["status"] != "success":
            reason = " ".join(str(answer.get("error", "no reason given")).split())[:LONGEST_COMPLAINT]
            raise PrometheusError(f"Prometheus refuses the query: {reason}")
        return read(answer["data"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise PrometheusError(f"{url} answers {status}, but not as Prometheus does") from error


def _number(data: Any) -> float:
    kind, result = data["resultType"], data["result"]
    if kind not in ("vector", "scalar"):
        raise PrometheusError(f"the query gives a {kind}, which is not one number; an instant query does")
    if kind == "vector" and len(result) != 1:
        if not result:
            raise PrometheusError("the query gives nothing: no series matches it now")
        raise PrometheusError(f"the query gives {len(result)} series; aggregate them to one (avg, max, sum)")
    value = float((result if kind == "scalar" else result[0]["value"])[1])
    if not math.isfinite(value):
        raise PrometheusError(f"the query gives {value}, which is no number to decide by")
    return value


def _series(data: Any) -> list[Series]:
    found = []
    for series in data["result"]:
        points = [(float(at), float(value)) for at, value in series["values"]]
        found.append(Series(dict(series["metric"]), [(at, value) for at, value in points if math.isfinite(value)]))
    return found


def _rules(data: Any) -> list[AlertRule]:
    found = []
    for rule in (rule for group in data["groups"] for rule in group["rules"] if rule["type"] == "alerting"):
        firing = [_alert(one) for one in rule["alerts"] if one["state"] == "firing"]
        found.append(AlertRule(rule["name"], firing))
    return found


def _alert(found: Any) -> FiringAlert:
    since = datetime.fromisoformat(found["activeAt"]).timestamp()
    return FiringAlert(dict(found["labels"]), dict(found["annotations"]), since)

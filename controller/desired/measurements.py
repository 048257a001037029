"""Reads the values of the Prometheus queries that services are autoscaled by, each in a task outside the loop.

Prometheus      one query over HTTP, one number
Measurements    a task for each query, and the last good values with their times
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from ..errors import PolicyError
from ..model.spec import PrometheusPolicy
from ..outlive import Background

BODY_LIMIT = 1024 * 1024
"""A single number is far smaller; a query without an aggregation may return every series."""
LONGEST_COMPLAINT = 300
FIRST_S = 30.0
"""How long a first value may take: Prometheus discovers the targets of a new or woken service every few seconds."""
AGAIN_S = 5.0
"""Pause after a query without a value: Prometheus starts after the controller, and a series after its replica."""
BREAK_S = 5.0
"""After this time without need for a value (no replica was ready) the query is not asked any more; ticks are a second
apart."""
_SERVICE = re.compile(r"\$service\b")

Query = Callable[[str, PrometheusPolicy], Awaitable[float]]
"""Returns the value for a service (its name); raises PolicyError."""


@dataclass(slots=True)
class _QueryWatch:
    """One query, for as long as the loop needs its value, and its last result. Times are the loop's."""

    policy: PrometheusPolicy
    needed_since: float
    needed_at: float
    task: asyncio.Task[None] | None = None
    value: float | None = None
    read_at: float = 0.0
    error: str = ""

    def fail(self, error: str) -> None:
        self.error = error


@dataclass(eq=False)
class Measurements:
    """Owns one task for each service whose query is needed: one that has ready replicas."""

    _query: Query
    _background: Background
    _watches: dict[str, _QueryWatch] = field(default_factory=dict)

    def value(self, service: str, policy: PrometheusPolicy, now: float) -> float | None:
        """The last good value; raises PolicyError when there is none or it is too old.

        None while a first value is waited for, FIRST_S at most.
        """
        watch = self._watches.get(service)
        if watch is None or watch.policy != policy or now - watch.needed_at > BREAK_S:
            watch = self._begin(service, policy, now)
        watch.needed_at = now
        if watch.value is not None and now - watch.read_at <= policy.stale_after_s:
            return watch.value
        if watch.value is None and now - watch.needed_since <= FIRST_S:
            return None
        error = watch.error or f"no answer from {policy.url}"
        if watch.value is None:
            raise PolicyError(error)
        raise PolicyError(f"its last value ({watch.value:.4g}) is {now - watch.read_at:.0f} s old; {error}")

    def _begin(self, service: str, policy: PrometheusPolicy, now: float) -> _QueryWatch:
        before = self._watches.get(service)
        if before is not None and before.task is not None:
            before.task.cancel()
        watch = self._watches[service] = _QueryWatch(policy, now, now)
        ask = partial(self._ask_while_needed, service, watch)
        watch.task = self._background.begin(f"asking for {service}'s value", ask, watch.fail)
        return watch

    async def _ask_while_needed(self, service: str, watch: _QueryWatch) -> None:
        while self._background.clock() - watch.needed_at <= BREAK_S:
            try:
                async with asyncio.timeout(watch.policy.timeout_s):
                    value = await self._query(service, watch.policy)
            except TimeoutError:
                watch.error = f"no answer from {watch.policy.url} within {watch.policy.timeout_s:g} s"
            except PolicyError as error:
                watch.error = str(error)
            else:
                watch.value, watch.read_at, watch.error = value, self._background.clock(), ""
            await asyncio.sleep(min(watch.policy.period_s, AGAIN_S) if watch.error else watch.policy.period_s)


class Prometheus:
    """POST <url>/api/v1/query."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=8, keepalive_timeout=30.0)
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers={"User-Agent": "pierhead-autoscaler"}
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def __call__(self, service: str, policy: PrometheusPolicy) -> float:
        """Query once. Raises PolicyError for a result that is not a single number."""
        query = _SERVICE.sub(service, policy.query)
        timeout = aiohttp.ClientTimeout(total=policy.timeout_s)
        try:
            async with self._session.post(
                f"{policy.url}/api/v1/query", data={"query": query}, timeout=timeout, allow_redirects=False
            ) as response:
                body = await _body(response)
        except TimeoutError as error:
            raise PolicyError(f"no answer from {policy.url} within {policy.timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            reason = error.os_error.strerror or str(error.os_error)
            raise PolicyError(f"no connection to {policy.url}: {reason}") from error
        except (
            aiohttp.ClientError,
            OSError,
            ValueError,
            OverflowError,
        ) as error:  # the last two: from host names and ports
            raise PolicyError(f"no valid answer from {policy.url}: {str(error) or type(error).__name__}") from error
        return number_in(response.status, body, policy.url)


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > BODY_LIMIT:
            raise PolicyError("the query's answer is larger than 1 MiB; aggregate its series to one (avg, max, sum)")
    return body


def number_in(status: int, body: bytes, url: str) -> float:
    """The single number in Prometheus's response. Raises PolicyError where there is none."""
    try:
        answer = json.loads(body)
        if answer["status"] != "success":
            reason = " ".join(str(answer.get("error", "no reason given")).split())[:LONGEST_COMPLAINT]
            raise PolicyError(f"Prometheus refuses the query: {reason}")
        return _number(answer["data"]["resultType"], answer["data"]["result"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise PolicyError(f"{url} answers {status}, but not as Prometheus does") from error


def _number(kind: str, result: Any) -> float:
    if kind not in ("vector", "scalar"):
        raise PolicyError(f"the query gives a {kind}, which is not one number; an instant query does")
    if kind == "vector" and len(result) != 1:
        if not result:
            raise PolicyError("the query gives nothing: no series matches it now")
        raise PolicyError(f"the query gives {len(result)} series; aggregate them to one (avg, max, sum)")
    value = float((result if kind == "scalar" else result[0]["value"])[1])
    if not math.isfinite(value):
        raise PolicyError(f"the query gives {value}, which is no number to decide by")
    return value

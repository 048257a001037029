"""What Prometheus says of the services whose autoscaling goes by a query: asked beside the loop, read by it.

Prometheus      one question over HTTP, one number
Measurements    a task for each query, and the book of the last good values with their times
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from ..errors import PolicyError
from ..model.spec import PrometheusPolicy, ServiceSpec
from ..outlive import outlive

BODY_LIMIT = 1024 * 1024
"""A single number is far smaller; a query without an aggregation may answer with every series there is."""
LONGEST_COMPLAINT = 300
FIRST_S = 30.0
"""A service that has just begun, or woken, has no series yet: Prometheus takes up new targets every few seconds."""
AGAIN_S = 5.0
"""Pause after a question that brought no value: Prometheus begins after the controller, and series after a replica."""
BREAK_S = 5.0
"""A value that nobody needed for so long (no replica was ready) is needed anew; looks are a second apart."""
_SERVICE = re.compile(r"\$service\b")

Query = Callable[[str, PrometheusPolicy], Awaitable[float]]
"""Asks for a service's (its name) value; raises PolicyError."""


async def no_prometheus(service: str, policy: PrometheusPolicy) -> float:
    """For a controller without a Prometheus."""
    raise PolicyError(f"nobody can be asked for {service}'s value at {policy.url}")


@dataclass(slots=True)
class _Watch:
    """One query's task and what it has brought. Times are the loop's."""

    policy: PrometheusPolicy
    needed_since: float
    needed_at: float
    """When the value was asked for by the loop, without a break and last. A service without replicas needs none."""
    task: asyncio.Task[None] | None = None
    value: float | None = None
    read_at: float = 0.0
    error: str = ""


class Measurements:
    """Owns one asking task for each service with a query."""

    def __init__(
        self,
        query: Query,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._query = query
        self._spawn = spawn
        self._clock = clock
        self._watches: dict[str, _Watch] = {}

    def sync(self, services: Mapping[str, ServiceSpec]) -> None:
        """Ask for exactly these services' values from now on."""
        policies = {
            name: service.autoscale.policy
            for name, service in services.items()
            if service.autoscale and isinstance(service.autoscale.policy, PrometheusPolicy)
        }
        for name, watch in list(self._watches.items()):
            if policies.get(name) != watch.policy:
                del self._watches[name]
                if watch.task is not None:
                    watch.task.cancel()
        for name, policy in policies.items():
            if name not in self._watches:
                now = self._clock()
                watch = self._watches[name] = _Watch(policy, now, now)
                asking = partial(self._ask_forever, name, watch)
                watch.task = self._spawn(outlive(f"asking for {name}'s value", asking, tell=partial(_fail, watch)))

    def value(self, service: str, policy: PrometheusPolicy, now: float) -> float | None:
        """The last good value; raises PolicyError when there is none or it is too old.

        None while a first value is waited for, FIRST_S at most.
        """
        watch = self._watches.get(service)
        if watch is None:
            return None
        if not 0 <= now - watch.needed_at <= BREAK_S:
            watch.needed_since = now
        watch.needed_at = now
        if watch.value is not None and now - watch.read_at <= policy.stale_after_s:
            return watch.value
        is_first = watch.value is None or watch.read_at < watch.needed_since
        if is_first and now - watch.needed_since <= FIRST_S:
            return None
        error = watch.error or f"no answer from {policy.url}"
        if watch.value is None:
            raise PolicyError(error)
        raise PolicyError(f"its last value ({watch.value:.4g}) is {now - watch.read_at:.0f} s old; {error}")

    async def _ask_forever(self, service: str, watch: _Watch) -> None:
        while True:
            try:
                async with asyncio.timeout(watch.policy.timeout_s):
                    value = await self._query(service, watch.policy)
            except TimeoutError:
                watch.error = f"no answer from {watch.policy.url} within {watch.policy.timeout_s:g} s"
            except PolicyError as error:
                watch.error = str(error)
            else:
                watch.value, watch.read_at, watch.error = value, self._clock(), ""
            await asyncio.sleep(min(watch.policy.period_s, AGAIN_S) if watch.error else watch.policy.period_s)


def _fail(watch: _Watch, words: str) -> None:
    watch.error = words


class Prometheus:
    """GET <url>/api/v1/query. Connections are kept, nothing is remembered."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=8, keepalive_timeout=30.0)
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers={"User-Agent": "pierhead-autoscaler"}
        )

    async def close(self) -> None:
        """Let go of the connections."""
        await self._session.close()

    async def __call__(self, service: str, policy: PrometheusPolicy) -> float:
        """Ask once. Raises PolicyError for whatever is no single number."""
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
        except (aiohttp.ClientError, OSError, ValueError, OverflowError) as error:  # the last two: of names and ports
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
    """The one number of Prometheus's answer. Raises PolicyError where there is another or none."""
    try:
        answer = json.loads(body)
        if answer["status"] != "success":
            said = " ".join(str(answer.get("error", "no reason given")).split())[:LONGEST_COMPLAINT]
            raise PolicyError(f"Prometheus refuses the query: {said}")
        return _number(answer["data"]["resultType"], answer["data"]["result"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise PolicyError(f"{url} answers {status} with something that is not Prometheus's") from error


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

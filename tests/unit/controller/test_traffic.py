"""The traffic of the services, made of what Prometheus answers to one query of a range."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from controller.errors import PrometheusError
from controller.observe.prometheus import Series
from controller.observe.shared import FRESH_S
from controller.status.records.answers import LatestTraffic
from controller.status.traffic import TrafficReader, expression, read

NOW = 1_000.0


def series(service: str, what: str, *points: tuple[float, float]) -> Series:
    return Series({"service": service, "what": what}, points)


async def test_now_is_one_point() -> None:
    async def ask(query: str, start: float, end: float, step_s: float) -> Sequence[Series]:
        assert (query, start, end, step_s) == (expression(30), NOW, NOW, 5.0)
        return [series("web", "rate", (NOW, 812.4)), series("web", "p99_s", (NOW, 0.0093000001))]

    traffic = await read(ask, 0, NOW)
    assert traffic.latest("web") == LatestTraffic(812.4, None, 0.0093)
    assert traffic.latest("nobody") == LatestTraffic()
    assert (traffic.at, traffic.problem) == (NOW, "")


async def test_points_have_their_places_and_gaps_are_null() -> None:
    async def ask(query: str, start: float, end: float, step_s: float) -> Sequence[Series]:
        assert (start, end, step_s) == (NOW - 60, NOW, 5.0)
        return [
            series("web", "ongoing", (NOW - 60, 1), (NOW - 5.0004, 2), (NOW, 3), (NOW + 5, 4)),
            series("web", "of another build", (NOW, 1)),
        ]

    (web,) = (await read(ask, 1, NOW)).services.values()
    assert web.ongoing == (1, *[None] * 10, 2, 3)
    assert web.rate == (None,) * 13


async def test_a_language_model_has_numbers_of_its_own() -> None:
    async def ask(query: str, start: float, end: float, step_s: float) -> Sequence[Series]:
        assert query.count('"what", "tokens"') == 1
        return [
            series("web", "rate", (NOW, 1)),
            series("chat", "tokens", (NOW, 93)),
            series("chat", "kv_use", (NOW, 1)),
        ]

    traffic = await read(ask, 0, NOW)
    assert traffic.services["web"].llm is None
    chat = traffic.services["chat"].llm
    assert chat is not None
    assert (chat.tokens, chat.kv_use, chat.waiting, traffic.services["chat"].rate) == ((93,), (1,), (None,), (None,))


async def test_a_day_has_as_many_points_as_a_picture_shows() -> None:
    async def ask(query: str, start: float, end: float, step_s: float) -> Sequence[Series]:
        assert (start, step_s, "[1920s]" in query) == (NOW - 86_400, 960.0, True)
        return [series("web", "rate", (NOW, 1))]

    (web,) = (await read(ask, 1440, NOW)).services.values()
    assert len(web.rate) == 91


async def test_all_who_ask_at_a_time_share_one_question() -> None:
    asked: list[float] = []
    now = [NOW]

    async def ask(query: str, start: float, end: float, step_s: float) -> Sequence[Series]:
        asked.append(end - start)
        await asyncio.sleep(0)
        return []

    reader = TrafficReader(ask, lambda: now[0])
    await asyncio.gather(reader.of(15), reader.of(15), reader.of(0))
    await reader.of(15)
    assert sorted(asked) == [0, 900]
    now[0] += FRESH_S
    await reader.of(15)
    assert sorted(asked) == [0, 900, 900]


async def test_without_prometheus_there_is_the_reason() -> None:
    async def ask(query: str, start: float, end: float, step_s: float) -> Sequence[Series]:
        raise PrometheusError("no connection to http://prometheus:9090: refused")

    traffic = await read(ask, 15, NOW)
    assert (traffic.services, traffic.problem) == ({}, "no connection to http://prometheus:9090: refused")

"""A shop that asks its ranker; `rank` is what versions of it change."""

from __future__ import annotations

from typing import Any

from pierhead import Service


class Ranker(Service):
    async def rank(self, user: int, items: list[int]) -> list[int]:
        return sorted(items)


async def page(scope: Any, receive: Any, send: Any) -> None:
    body = str(await Shop.current.ask()).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})


class Shop(Service, asgi=page):
    current: Shop

    def __init__(self, ranker: Ranker) -> None:
        self.ranker = ranker
        Shop.current = self

    async def ask(self) -> list[int]:
        return await self.ranker.rank(7, [3, 1, 2])


app = Shop.bind(Ranker.bind())

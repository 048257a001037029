"""A shop that asks its ranker; `rank` is what versions of it change."""

from __future__ import annotations

import os

from aiohttp import web
from pierhead import Service, serve


class Ranker(Service):
    async def rank(self, user: int, items: list[int]) -> list[int]:
        return sorted(items)


class Shop(Service):
    current: Shop

    def __init__(self, ranker: Ranker) -> None:
        self.ranker = ranker
        Shop.current = self

    async def ask(self) -> list[int]:
        return await self.ranker.rank(7, [3, 1, 2])


app = Shop.bind(Ranker.bind())


async def page(_: web.Request) -> web.Response:
    return web.Response(text=str(await Shop.current.ask()))


if __name__ == "__main__":
    http = web.Application()
    http.router.add_get("/shop", page)
    serve(app, *([http] if os.environ["PIERHEAD_SERVICE"] == "shop" else []))

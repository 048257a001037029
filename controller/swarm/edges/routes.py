"""The routes of all edges: published by the controller, fetched by each edge over TLS (`agent.py`).

    GET /routes?edge=<node>&hash=<what it runs>&epoch=<the newest it knows>&refused=<hash>&why=<words>

answers at once when other routes are published than the edge runs or has refused, else after `WAIT_S` (204). The
answer's header `EPOCH_HEADER` is this controller's epoch: an edge takes nothing from a controller older than the newest
it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from aiohttp import web
from pierhead.tasks import is_set_within

from ...model.text import whole_number
from ...routing.haproxy_text import hash_of
from ..certificates import ROLE_NAMES
from .offer import EPOCH_HEADER, LONGEST_WHY, PATH, WAIT_S

MOST_EDGES = 1000


@dataclass(frozen=True, slots=True)
class _Report:
    """What an edge said when it asked last."""

    epoch: int
    refused: str
    why: str


class PublishedRoutes:
    """`text` is the configuration that all edges are to run, without servers; "" = none yet."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.text = ""
        self._reports: dict[str, _Report] = {}
        self._changed = asyncio.Event()
        self._waiting: set[asyncio.Transport] = set()

    @property
    def hash(self) -> str:
        """The routing hash of what is published; "" = nothing is."""
        return hash_of(self.text)

    def publish(self, text: str) -> None:
        """Offer this configuration to every edge from now on. An edge that has refused it before is asked again."""
        self.text = text
        self._reports = {name: _Report(report.epoch, "", "") for name, report in self._reports.items()}
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def refusals(self) -> Mapping[str, str]:
        """Edges that do not take what is published, each with the reason."""
        return {
            name: f"it obeys a controller of epoch {report.epoch}, this one has {self._epoch}"
            if report.epoch > self._epoch
            else f"it refuses the routes: {report.why}"
            for name, report in self._reports.items()
            if report.epoch > self._epoch or (report.refused and report.refused == self.hash)
        }

    async def answer(self, request: web.Request) -> web.Response:
        """Answer an edge. Only a certificate of the edges' role is let in."""
        if _common_name(request) != ROLE_NAMES["edge"]:
            raise web.HTTPForbidden(text="this is for edges")
        asked = request.query
        epoch = whole_number(asked.get("epoch", "")) or 0
        report = _Report(epoch, asked.get("refused", ""), asked.get("why", "")[:LONGEST_WHY])
        name = asked.get("edge", "")[:LONGEST_WHY]
        if name in self._reports or len(self._reports) < MOST_EDGES:
            self._reports[name] = report
        await self._news(request, asked.get("hash", ""), report.refused)
        is_news = self._is_news(asked.get("hash", ""), report.refused)
        headers = {EPOCH_HEADER: str(self._epoch)}
        return web.Response(text=self.text, headers=headers) if is_news else web.Response(status=204, headers=headers)

    def _is_news(self, *known: str) -> bool:
        return bool(self.text) and self.hash not in known

    async def _news(self, request: web.Request, *known: str) -> None:
        """Return when other routes than these are published, or the same ones again, at the latest after `WAIT_S`."""
        transport = request.transport
        if transport is None:
            return
        self._waiting.add(transport)
        try:
            if not self._is_news(*known):
                await is_set_within(self._changed, WAIT_S)
        finally:
            self._waiting.discard(transport)

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int, tls: ssl.SSLContext) -> AsyncIterator[int]:
        """Serve the edges; the port is returned."""
        application = web.Application()
        application.router.add_get(PATH, self.answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
            yield runner.addresses[0][1]
        finally:
            for transport in self._waiting:  # an edge that is gone would be waited for
                transport.abort()
            await runner.cleanup()


def _common_name(request: web.Request) -> str:
    certificate = request.get_extra_info("peercert") or {}
    names = {key: value for part in certificate.get("subject", ()) for key, value in part}
    return str(names.get("commonName", ""))

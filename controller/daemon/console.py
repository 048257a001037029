"""The console: a page of static files at the API's port, which shows what the API tells. It has no data of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aiohttp import web

FILES = Path(__file__).parent.parent / "console"
"""`lib` in it has the libraries, which the controller's image takes from npm."""
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_KINDS: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_SERVED: Final = web.AppKey("console", Mapping[str, Path])
"""By what comes after /console/: nothing else of the disk is ever opened."""


def add_page(app: web.Application) -> None:
    """Serve the page at /, and its files under /console/. They tell nothing of a stack, so everybody gets them."""
    app[_SERVED] = {path.relative_to(FILES).as_posix(): path for path in FILES.rglob("*") if path.suffix in _KINDS}
    app.router.add_get("/", page)
    app.router.add_get("/console/{path:.+}", page)


async def page(request: web.Request) -> web.StreamResponse:
    """One of the page's files."""
    path = request.app[_SERVED].get(request.match_info.get("path", "index.html"))
    if path is None:
        raise web.HTTPNotFound
    return web.FileResponse(path, headers={**HEADERS, "Content-Type": f"{_KINDS[path.suffix]}; charset=utf-8"})

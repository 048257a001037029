"""The recommendation app's HTTP application: candidates or the caller's own rows in, scores out."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
from aiohttp import web
from pierhead import BadRequest

from services.recsys.ingress.candidates import MAX_USER_ID, candidates
from services.recsys.ingress.rank_body import parse_rank_body
from services.recsys.ingress.rankers import Score


def make_app(score: Score) -> web.Application:
    """The HTTP application; `score` asks a ranker."""
    ingress = RecsysIngress(score)
    app = web.Application()
    app.router.add_get("/recsys", ingress.recommend)
    app.router.add_get("/recsys/", ingress.recommend)
    app.router.add_post("/recsys/rank", ingress.rank)
    return app


class RecsysIngress:
    """Two ways to the same call."""

    def __init__(self, score: Score) -> None:
        self._score = score

    async def recommend(self, request: web.Request) -> web.Response:
        """`GET /recsys/?user_id=7` -> `{"scores": [32 floats]}`, one for each of the user's candidates."""
        return await self._scores(*candidates(_user_id(request)))

    async def rank(self, request: web.Request) -> web.Response:
        """`POST /recsys/rank` with `{"dense": [[13]], "sparse": [[26]]}` -> `{"scores": [one float per row]}`."""
        return await self._scores(*parse_rank_body(await request.read()))

    async def _scores(self, dense: npt.NDArray[np.float32], sparse: npt.NDArray[np.int64]) -> web.Response:
        scores = await self._score(dense, sparse)
        return web.Response(body=json.dumps({"scores": scores}).encode(), content_type="application/json")


def _user_id(request: web.Request) -> int:
    raw = request.query.get("user_id")
    if raw is None:
        raise BadRequest("user_id: missing in the query string; send /recsys/?user_id=7")
    # Not int() alone: it takes other scripts' digits, "1_0" and " 5 " as well.
    if raw.isascii() and raw.isdigit() and len(raw) <= len(str(MAX_USER_ID)) and int(raw) <= MAX_USER_ID:
        return int(raw)
    raise BadRequest(f'user_id: expected an integer from 0 to {MAX_USER_ID}, found "{raw[:40]}"')

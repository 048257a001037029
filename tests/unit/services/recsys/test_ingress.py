"""The recommendation ingress before a ranker that scores rows by adding them up."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import numpy as np
import pytest
from pierhead import Settings, tensors
from pierhead.calls.clients import Clients
from pierhead.recsys.v1.ranker_pb2 import RankReply, RankRequest
from pierhead.recsys.v1.ranker_pb2_grpc import RankerServicer

from services.recsys.ingress.app import make_app
from services.recsys.ingress.candidates import candidates
from services.recsys.ingress.rankers import by_ranker
from tests.unit.runtime.harness import Cluster, address


class AddingRanker(RankerServicer):
    """Checks what every ranker may rely on, and adds up the dense features."""

    async def Rank(self, request: RankRequest, context: Any) -> RankReply:
        rows, _ = tensors.check("dense", request.dense, tensors.FLOAT32, (None, 13))
        tensors.check("sparse", request.sparse, tensors.INT64, (rows, 26))
        sums = np.frombuffer(request.dense.data, "<f4").reshape(rows, 13).sum(axis=1)
        return RankReply(scores=tensors.to_proto(tensors.FLOAT32, sums.shape, sums.astype("<f4").tobytes()))


@pytest.fixture
async def base_url(cluster: Cluster) -> str:
    ranker = await cluster.start(AddingRanker(), service="ranker")
    Clients.use(Settings(static={"RANKER": (address(ranker),)}))
    ingress = await cluster.start(make_app(by_ranker()), service="recsys")
    return f"http://127.0.0.1:{ingress.http_port}"


async def test_a_users_candidates_are_scored(base_url: str, client: aiohttp.ClientSession) -> None:
    expected = candidates(7)[0].sum(axis=1).tolist()
    for path in ("/recsys/?user_id=7", "/recsys?user_id=7", "/recsys/?user_id=007"):
        async with client.get(base_url + path) as answer:
            assert answer.status == 200
            assert answer.content_type == "application/json"
            assert await answer.json() == {"scores": expected}


async def test_own_rows_are_scored(base_url: str, client: aiohttp.ClientSession) -> None:
    rows = {"dense": [[0.5] * 13, [1] * 13], "sparse": [[0] * 26, [99_999] * 26]}
    async with client.post(f"{base_url}/recsys/rank", json=rows) as answer:
        assert answer.status == 200
        assert await answer.json() == {"scores": [6.5, 13.0]}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "user_id: missing in the query string; send /recsys/?user_id=7"),
        *(
            (
                f"?user_id={wrong}",
                f'user_id: expected an integer from 0 to 9223372036854775807, found "{wrong}"',
            )
            for wrong in ("-1", "1_0", "9223372036854775808")
        ),
    ],
)
async def test_a_wrong_user_gets_one_message(
    base_url: str, client: aiohttp.ClientSession, query: str, message: str
) -> None:
    async with client.get(f"{base_url}/recsys/{query}") as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert (error["code"], error["message"]) == ("bad_request", message)


async def test_a_wrong_row_is_a_400(base_url: str, client: aiohttp.ClientSession) -> None:
    body = json.dumps({"dense": [[0.0] * 12 + [float("nan")]], "sparse": [[0] * 26]})
    async with client.post(f"{base_url}/recsys/rank", data=body) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert error["message"] == "dense[0][12]: expected a finite number, found NaN"

"""The two services, real ones, with a model of small tables."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from pierhead import BadRequest, Settings
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.classes.handles import handle_on
from safetensors.torch import save_file

from services.recsys import rows as rows_
from services.recsys.app import Ranker, Recsys
from services.recsys.model import Dlrm, seeded
from services.recsys.rows import Rows, Scores
from tests.unit.runtime.harness import Cluster, address
from tests.unit.services.recsys.small_model import TABLE_ROWS, random_rows

pytestmark = pytest.mark.usefixtures("small_tables")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The row counts of each batch that the model is given."""
    seen: list[list[int]] = []
    score = Dlrm.score

    def recorded(self: Dlrm, blocks: Sequence[Rows]) -> list[Scores]:
        seen.append([len(dense) for dense, _ in blocks])
        return score(self, blocks)

    monkeypatch.setattr(Dlrm, "score", recorded)
    return seen


async def test_requests_share_batches_that_are_bounded_in_number_and_rows(batches: list[list[int]]) -> None:
    ranker = Ranker()
    await asyncio.gather(*(ranker.rank(*random_rows(32, seed)) for seed in range(250)))
    assert [len(batch) for batch in batches] == [100, 100, 50]
    batches.clear()
    await asyncio.gather(*(ranker.rank(*random_rows(rows)) for rows in (4096, 3000, 1000, 97, 1)))
    assert batches == [[4096], [3000, 1000], [97, 1]]


async def test_a_wrong_request_fails_alone() -> None:
    ranker = Ranker()
    dense, sparse = random_rows(3)
    good, refused = await asyncio.gather(
        ranker.rank(dense, sparse), ranker.rank(dense, sparse[:2]), return_exceptions=True
    )
    assert isinstance(good, np.ndarray)
    assert isinstance(refused, BadRequest)


async def test_weights_that_score_nan_are_not_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_, "TABLE_ROWS", TABLE_ROWS)
    broken = dict(seeded().state_dict())
    broken["top.3.bias"] = torch.tensor([float("nan")])
    path = tmp_path / "broken.safetensors"
    save_file(broken, path)
    monkeypatch.setenv("PIERHEAD_RANKER_WEIGHTS", str(path))
    with pytest.raises(RuntimeError, match=r"^the model scores user 0 \[nan"):
        await Ranker().check_health()


async def test_a_check_does_not_wait_behind_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_, "TABLE_ROWS", TABLE_ROWS)
    ranker = Ranker()
    calls = [asyncio.ensure_future(ranker.rank(*random_rows(4096, seed))) for seed in range(10)]
    await asyncio.sleep(0)
    await ranker.check_health()
    assert sum(call.done() for call in calls) <= 2, "its turn came after the batch in work, not after all of them"
    await asyncio.gather(*calls)


@pytest.fixture
async def base_url(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(rows_, "TABLE_ROWS", TABLE_ROWS)
    ranker = await cluster.start(Ranker(), service="ranker")
    Clients.use(Settings(static={"RANKER": (address(ranker),)}))
    handle: Any = handle_on(Ranker, HandleChannel("ranker"))
    ingress = await cluster.start(Recsys(handle), service="recsys")
    return f"http://127.0.0.1:{ingress.http_port}"


async def test_a_users_candidates_and_own_rows_are_scored(base_url: str, client: aiohttp.ClientSession) -> None:
    candidates = rows_.candidates(7)
    [expected] = seeded().score([candidates])
    for path in ("/recsys/?user_id=7", "/recsys?user_id=7", "/recsys/?user_id=007"):
        async with client.get(base_url + path) as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
            assert (await answer.json())["scores"] == pytest.approx(expected.tolist(), abs=1e-6)
    body = dict(zip(("dense", "sparse"), (array.tolist() for array in candidates), strict=True))
    async with client.post(f"{base_url}/recsys/rank", json=body) as answer:
        assert (await answer.json())["scores"] == pytest.approx(expected.tolist(), abs=1e-6)


DENSE: list[Any] = [0.5] * 13
SPARSE: list[Any] = list(range(26))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body: expected"),
        (b"\xff", "the body: expected"),
        (b"[" * 100_000, "the body: expected"),
        (b"[]", "the body: expected"),
        (b'{"dense": []}', "KeyError('sparse')"),
        ({"dense": [DENSE, DENSE[:12]], "sparse": [SPARSE] * 2}, "inhomogeneous"),
        ({"dense": [["1", *DENSE[1:]]], "sparse": [SPARSE]}, "from dtype('<U32')"),
        ({"dense": [DENSE], "sparse": [[0.5, *SPARSE[1:]]]}, "from dtype('float64') to dtype('int64')"),
        ({"dense": [DENSE], "sparse": [[10**400, *SPARSE[1:]]]}, "from dtype('O') to dtype('int64')"),
        ({"dense": [DENSE[1:]], "sparse": [SPARSE]}, "found dense [1, 12] and sparse [1, 26]"),
        ({"dense": [[float("nan"), *DENSE[1:]]], "sparse": [SPARSE]}, "dense: expected numbers from"),
        ({"dense": [[1e39, *DENSE[1:]]], "sparse": [SPARSE]}, "dense: expected numbers from"),
        ({"dense": [DENSE], "sparse": [[-1, *SPARSE[1:]]]}, "sparse: expected ids from"),
    ],
)
async def test_a_wrong_body_is_a_400_that_says_why(
    base_url: str, client: aiohttp.ClientSession, body: bytes | dict[str, Any], message: str
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    as_json = {"Content-Type": "application/json"}
    async with client.post(f"{base_url}/recsys/rank", data=data, headers=as_json) as answer:
        error = (await answer.json())["error"]
        assert answer.status == 400, error
    assert message in error["message"]

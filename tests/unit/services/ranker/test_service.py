from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pierhead import BadRequest, Unavailable, tensors
from pierhead.recsys.v1.ranker_pb2 import RankReply, RankRequest
from pierhead.recsys.v1.ranker_pb2_grpc import RankerStub
from pierhead.tensor.v1.tensor_pb2 import Tensor

from services.recsys.ranker.rows import MAX_BATCH_ROWS, Rows
from services.recsys.ranker.scorer import Scorer
from services.recsys.ranker.service import Ranker, read_request
from services.recsys.ranker.settings import RankerSettings
from services.recsys.ranker.weights import seeded_weights
from tests.unit.runtime.harness import Cluster
from tests.unit.services.ranker.small_model import random_rows

CPU = RankerSettings(weights=None, device=torch.device("cpu"), threads=1)


def dense_tensor(array: npt.NDArray[np.float32]) -> Tensor:
    return tensors.to_proto(tensors.FLOAT32, array.shape, array.tobytes())


def sparse_tensor(array: npt.NDArray[np.int64]) -> Tensor:
    return tensors.to_proto(tensors.INT64, array.shape, array.tobytes())


def rank_request(rows: int = 2, seed: int = 1) -> RankRequest:
    dense, sparse = random_rows(rows, seed)
    return RankRequest(dense=dense_tensor(dense), sparse=sparse_tensor(sparse))


def scores_of(reply: RankReply) -> npt.NDArray[np.float32]:
    (rows,) = tensors.check("scores", reply.scores, tensors.FLOAT32, (None,))
    return np.frombuffer(reply.scores.data, "<f4").reshape(rows)


@pytest.fixture
async def ranker(small_tables: None) -> AsyncIterator[Ranker]:
    made = Ranker(CPU)
    await made.check_health()
    yield made
    made.close()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The row counts of each batch that a scorer is given."""
    seen: list[list[int]] = []
    score = Scorer.score_now

    def recorded(self: Scorer, blocks: Sequence[Rows]) -> list[npt.NDArray[np.float32]]:
        seen.append([len(block.dense) for block in blocks])
        return score(self, blocks)

    monkeypatch.setattr(Scorer, "score_now", recorded)
    return seen


# ------------------------------------------------------------------------------------------------------------ scoring


async def test_requests_share_batches_that_are_bounded_in_number_and_rows(
    ranker: Ranker, batches: list[list[int]]
) -> None:
    batches.clear()
    await asyncio.gather(*(ranker.Rank(rank_request(32, seed), None) for seed in range(250)))
    assert [len(batch) for batch in batches] == [100, 100, 50]
    batches.clear()
    await asyncio.gather(*(ranker.Rank(rank_request(rows), None) for rows in (4096, 3000, 1000, 97, 1)))
    assert batches == [[4096], [3000, 1000], [97, 1]]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 600), min_size=1, max_size=6))
def test_any_split_of_rows_into_blocks_scores_alike(small_tables: None, sizes: list[int]) -> None:
    scorer = Scorer(seeded_weights(), torch.device("cpu"), max_rows=MAX_BATCH_ROWS)
    try:
        dense, sparse = random_rows(sum(sizes))
        whole = scorer.score_now([Rows(dense, sparse)])[0]
        cuts = np.cumsum(sizes)[:-1]
        blocks = [Rows(d, s) for d, s in zip(np.split(dense, cuts), np.split(sparse, cuts), strict=True)]
        parts = scorer.score_now(blocks)
        assert [len(part) for part in parts] == sizes
        np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)
    finally:
        scorer.close()


async def test_scores_outlive_the_batches_that_follow(ranker: Ranker) -> None:
    first = scores_of(await ranker.Rank(rank_request(4, seed=1), None))
    copy = first.copy()
    await ranker.Rank(rank_request(4, seed=2), None)
    np.testing.assert_array_equal(first, copy)


async def test_features_too_large_to_compute_with_are_refused_and_harm_no_other(ranker: Ranker) -> None:
    """Each is a float32; their sums are not, and a score that is no number is no JSON either."""
    dense, sparse = random_rows(3)
    dense[1] = 3e38 * np.array([1, -1] * 6 + [1], np.float32)
    good, refused = await asyncio.gather(
        ranker.Rank(rank_request(), None),
        ranker.Rank(RankRequest(dense=dense_tensor(dense), sparse=sparse_tensor(sparse)), None),
        return_exceptions=True,
    )
    assert isinstance(good, RankReply)
    assert isinstance(refused, BadRequest)
    assert str(refused) == (
        "dense[1]: expected numbers that the model can compute with in float32, found some up to 3e+38 either way: "
        "the row's score is not a number"
    )


# --------------------------------------------------------------------------------------------------------- validation


def with_dense(row: int, column: int, value: float) -> RankRequest:
    dense, sparse = random_rows(3)
    dense[row, column] = value
    return RankRequest(dense=dense_tensor(dense), sparse=sparse_tensor(sparse))


def with_sparse(row: int, column: int, value: int) -> RankRequest:
    dense, sparse = random_rows(3)
    sparse[row, column] = value
    return RankRequest(dense=dense_tensor(dense), sparse=sparse_tensor(sparse))


def of(dense: Any, sparse: Any) -> RankRequest:
    return RankRequest(dense=dense, sparse=sparse)


GOOD = rank_request(2)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (of(GOOD.dense, GOOD.dense), "sparse: expected int64 [*, 26], found float32 [2, 13]"),
        (of(GOOD.dense, None), "sparse: expected int64 [*, 26], found dtype_unspecified []"),
        (
            of(dense_tensor(np.zeros((0, 13), np.float32)), sparse_tensor(np.zeros((0, 26), np.int64))),
            "dense: expected 1 to 4096 rows, found 0",
        ),
        (rank_request(4097), "dense: expected 1 to 4096 rows, found 4097"),
        (of(GOOD.dense, rank_request(3).sparse), "sparse: expected as many rows as dense, 2, found 3"),
        (with_dense(2, 12, float("nan")), "dense[2][12]: expected a finite number, found nan"),
        (with_sparse(1, 25, 100_000), "sparse[1][25]: expected an id from 0 to 99999, found 100000"),
    ],
)
def test_a_wrong_request_gets_one_message(request_: RankRequest, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_request(request_)
    assert str(caught.value) == message


# --------------------------------------------------------------------------------------------------------------- life


async def test_before_its_first_check_it_has_no_model() -> None:
    ranker = Ranker(CPU)
    with pytest.raises(Unavailable, match="the model is not loaded yet"):
        await ranker.Rank(rank_request(), None)


@pytest.mark.usefixtures("small_tables")
async def test_weights_that_score_nan_are_not_healthy(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    broken = dict(seeded_weights().state_dict())
    broken["top.3.bias"] = torch.tensor([float("nan")])
    path = tmp_path / "broken.safetensors"
    save_file(broken, path)
    ranker = Ranker(RankerSettings(path, torch.device("cpu"), 1))
    with pytest.raises(RuntimeError, match=r"^the model scored its check row nan, expected 0 to 1"):
        await ranker.check_health()
    ranker.close()


async def test_a_check_does_not_wait_behind_the_requests(ranker: Ranker) -> None:
    calls = [asyncio.ensure_future(ranker.Rank(rank_request(4096, seed), None)) for seed in range(10)]
    await asyncio.sleep(0)
    await ranker.check_health()
    assert sum(call.done() for call in calls) <= 2, "its turn came after the batch in work, not after all of them"
    await asyncio.gather(*calls)


@pytest.mark.usefixtures("small_tables")
async def test_a_replica_is_ready_once_it_can_score(cluster: Cluster) -> None:
    import grpc

    ranker = Ranker(CPU)
    replica = await cluster.start(ranker, service="ranker")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{replica.grpc_port}") as channel:
        stub = RankerStub(channel)
        assert len(scores_of(await stub.Rank(rank_request(32), timeout=10))) == 32
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Rank(with_sparse(0, 0, -1), timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "sparse[0][0]: expected an id from 0 to 99999, found -1"
    ranker.close()

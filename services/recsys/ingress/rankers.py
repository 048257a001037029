"""The two rankers that the ingress can ask, as one function each: rows in, scores out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt
from pierhead import handle, tensors
from pierhead.recsys.v1.ranker_pb2 import RankRequest
from pierhead.recsys.v1.ranker_pb2_grpc import RankerStub

Dense = npt.NDArray[np.float32]
Sparse = npt.NDArray[np.int64]
Score = Callable[[Dense, Sparse], Awaitable[list[float]]]
"""dense [rows, 13] and sparse [rows, 26] -> a score for each row. Raises PierheadErrors."""


def by_ranker(service: str = "ranker") -> Score:
    """Score with the PyTorch ranker."""
    ranker = handle(RankerStub, service)

    async def score(dense: Dense, sparse: Sparse) -> list[float]:
        message = RankRequest(dense=tensors.from_numpy(dense), sparse=tensors.from_numpy(sparse))
        reply = await ranker.Rank(message)
        return _numbers(tensors.to_numpy(reply.scores, field="scores"))

    return score


def by_triton(service: str = "triton") -> Score:
    """Score with the same model in a Triton Inference Server."""
    from pierhead import triton  # needs tritonclient: only where it is used

    models = triton.client(service)

    async def score(dense: Dense, sparse: Sparse) -> list[float]:
        reply = await models.infer("dlrm", {"dense": dense, "sparse": sparse})
        return _numbers(reply["scores"].ravel())

    return score


def _numbers(scores: npt.NDArray[np.float32]) -> list[float]:
    numbers: list[float] = scores.tolist()
    return numbers

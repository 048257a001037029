"""The Ranker service: checks requests, batches them, scores them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from pierhead import BadRequest, Unavailable, batch, tensors
from pierhead.recsys.v1.ranker_pb2 import RankReply, RankRequest
from pierhead.recsys.v1.ranker_pb2_grpc import RankerServicer

from services.recsys.ranker.rows import MAX_BATCH_ROWS, Rows, check_scores, checked_rows
from services.recsys.ranker.scorer import Scorer
from services.recsys.ranker.settings import RankerSettings
from services.recsys.ranker.weights import load_weights, seeded_weights
from services.recsys.schema import DENSE_FEATURES, SPARSE_FEATURES

logger = logging.getLogger(__name__)

MAX_BATCH_REQUESTS: Final = 100


def read_request(request: RankRequest) -> Rows:
    """View a request's tensors as arrays, without a copy. Raises BadRequest: field, expected, found."""
    tensors.check("dense", request.dense, tensors.FLOAT32, (None, DENSE_FEATURES))
    tensors.check("sparse", request.sparse, tensors.INT64, (None, SPARSE_FEATURES))
    dense = tensors.to_numpy(request.dense)
    sparse = tensors.to_numpy(request.sparse)
    try:
        return checked_rows(dense, sparse)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def _row_count(rows: Rows) -> int:
    return len(rows.dense)


class Ranker(RankerServicer):
    """`Rank` on one model on one device. The first `check_health` loads the model: nothing comes before it."""

    def __init__(self, settings: RankerSettings) -> None:
        self._settings = settings
        self._scorer: Scorer | None = None

    async def Rank(self, request: RankRequest, context: Any) -> RankReply:
        """Score every row. The request is checked before it joins a batch, so a bad one fails alone."""
        rows = read_request(request)
        scores = await self._score(rows)
        try:
            check_scores(scores, rows.dense)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        return RankReply(scores=tensors.from_numpy(scores))

    @batch(
        max_batch_size=MAX_BATCH_REQUESTS,
        max_batch_rows=MAX_BATCH_ROWS,
        batch_wait_timeout_s=0.002,
        batch_size_fn=_row_count,
    )
    async def _score(self, blocks: list[Rows]) -> list[npt.NDArray[np.float32]]:
        if self._scorer is None:
            raise Unavailable("the model is not loaded yet; ask again when the replica is ready")
        return await self._scorer.score(blocks)

    async def check_health(self) -> None:
        """One real inference, of one row. Raises RuntimeError when the score is not between 0 and 1.

        The first one loads the model, in a thread: the replica answers "starting" meanwhile. Raises WeightsError.
        """
        if self._scorer is None:
            self._scorer = await asyncio.to_thread(load_scorer, self._settings)
        row = Rows(np.zeros((1, DENSE_FEATURES), dtype=np.float32), np.zeros((1, SPARSE_FEATURES), dtype=np.int64))
        # Past the requests that wait for a batch: a check must not take a full replica for an ill one.
        score = float((await self._scorer.score([row]))[0][0])
        if not 0 <= score <= 1:  # also true of NaN
            raise RuntimeError(
                f"the model scored its check row {score}, expected 0 to 1: the weights hold values that are not "
                "finite or too large (PIERHEAD_RANKER_WEIGHTS), or the device computes wrongly"
            )

    def close(self) -> None:
        """End the scoring thread. A process that ends needs no call."""
        if self._scorer is not None:
            self._scorer.close()


def load_scorer(settings: RankerSettings) -> Scorer:
    """Make the model and its scorer; takes seconds. Raises WeightsError."""
    torch.set_num_threads(settings.threads)
    model = seeded_weights() if settings.weights is None else load_weights(settings.weights)
    scorer = Scorer(model, settings.device, MAX_BATCH_ROWS)
    source = settings.weights or "the fixed seed"
    logger.info("model ready: weights from %s, device %s, %d threads", source, settings.device, settings.threads)
    return scorer

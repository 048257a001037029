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

from services.recsys.ranker.scorer import Rows, Scorer
from services.recsys.ranker.settings import RankerSettings
from services.recsys.ranker.weights import load_weights, seeded_weights
from services.recsys.schema import DENSE_FEATURES, MAX_ROWS, SPARSE_FEATURES, TABLE_ROWS

logger = logging.getLogger(__name__)

MAX_BATCH_REQUESTS: Final = 100
MAX_BATCH_ROWS: Final = MAX_ROWS
"""As many as the largest single request, so that no batch ever exceeds the scorer's buffers."""

_UNSIGNED_TABLE_ROWS: Final = np.uint64(TABLE_ROWS)


def read_request(request: RankRequest) -> Rows:
    """View a request's tensors as arrays, without a copy. Raises BadRequest: field, expected, found."""
    dense_shape = tensors.check("dense", request.dense, tensors.FLOAT32, (None, DENSE_FEATURES))
    sparse_shape = tensors.check("sparse", request.sparse, tensors.INT64, (None, SPARSE_FEATURES))
    if not 1 <= dense_shape[0] <= MAX_ROWS:
        raise BadRequest(f"dense: expected 1 to {MAX_ROWS} rows, found {dense_shape[0]}")
    if sparse_shape[0] != dense_shape[0]:
        raise BadRequest(f"sparse: expected as many rows as dense, {dense_shape[0]}, found {sparse_shape[0]}")
    dense = tensors.to_numpy(request.dense)
    sparse = tensors.to_numpy(request.sparse)
    finite = np.isfinite(dense)
    if not finite.all():
        row, column = _first(~finite)
        raise BadRequest(f"dense[{row}][{column}]: expected a finite number, found {dense[row, column]}")
    # Seen as unsigned, a negative id is a huge one: one pass finds both ends of the range.
    if sparse.view("<u8").max() >= _UNSIGNED_TABLE_ROWS:
        row, column = _first((sparse < 0) | (sparse >= TABLE_ROWS))
        raise BadRequest(
            f"sparse[{row}][{column}]: expected an id from 0 to {TABLE_ROWS - 1}, found {sparse[row, column]}"
        )
    return Rows(dense, sparse)


def _first(wrong: npt.NDArray[np.bool_]) -> tuple[int, int]:
    row, column = np.unravel_index(wrong.argmax(), wrong.shape)
    return int(row), int(column)


def _check_scores(scores: npt.NDArray[np.float32], dense: npt.NDArray[np.float32]) -> None:
    """Refuse finite features whose products are not: the model makes NaN of them. Raises BadRequest."""
    unknown = np.isnan(scores)
    if unknown.any():
        row = int(unknown.argmax())
        raise BadRequest(
            f"dense[{row}]: expected numbers that the model can compute with in float32, found some up to "
            f"{np.abs(dense[row]).max():g} either way: the row's score is not a number"
        )


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
        _check_scores(scores, rows.dense)
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

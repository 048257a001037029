"""Recommendations: `Recsys` makes candidates of a user's id, and `Ranker` scores them with the model."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from aiohttp import web
from pierhead import BadRequest, Service, batch, endpoint

from services.recsys.rows import MAX_ROWS, Dense, Rows, Scores, Sparse, candidates, checked


class Ranker(Service):
    """One model on one device.

    | variable | meaning |
    |---|---|
    | PIERHEAD_RANKER_WEIGHTS | safetensors file with the parameters; empty: weights from a fixed seed |
    | PIERHEAD_RANKER_DEVICE | cpu or cuda; empty: cuda where PyTorch finds it |
    | PIERHEAD_TORCH_THREADS | threads of one forward pass on a CPU; empty: `model.default_threads()` |
    """

    def __init__(self) -> None:
        import torch  # which the other service does without

        from services.recsys import model

        device = os.environ.get("PIERHEAD_RANKER_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
        weights = os.environ.get("PIERHEAD_RANKER_WEIGHTS")
        torch.set_num_threads(int(os.environ.get("PIERHEAD_TORCH_THREADS") or model.default_threads()))
        self.model = (model.loaded(weights) if weights else model.seeded()).to(device)
        self.thread = ThreadPoolExecutor(1)  # a second pass at a time would only contend for the same cores or GPU

    async def rank(self, dense: Dense, sparse: Sparse) -> Scores:
        """A score for each row. The rows are checked before they join a batch, so wrong ones fail alone."""
        try:
            rows = checked(dense, sparse)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        return await self._batched(rows)

    @batch(
        max_batch_size=100, max_batch_rows=MAX_ROWS, batch_wait_timeout_s=0.002, batch_size_fn=lambda rows: len(rows[0])
    )
    async def _batched(self, blocks: list[Rows]) -> list[Scores]:
        return await self._score(blocks)

    async def _score(self, blocks: list[Rows]) -> list[Scores]:
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.model.score, blocks)

    async def check_health(self) -> None:
        """Score one user; past the requests that wait for a batch, which make no replica ill."""
        [scores] = await self._score([candidates(0)])
        if not (scores >= 0).all():  # so of NaN
            raise RuntimeError(f"the model scores user 0 {scores.tolist()}; look at PIERHEAD_RANKER_WEIGHTS")


class Recsys(Service, route="/recsys"):
    """Two ways to a call."""

    def __init__(self, ranker: Ranker) -> None:
        self.ranker = ranker

    @endpoint("GET", "/recsys")
    @endpoint("GET", "/recsys/")
    async def recommend(self, user_id: int) -> dict[str, list[float]]:
        """Score the user's candidates: `{"scores": [32 floats]}`."""
        return {"scores": (await self.ranker.rank(*candidates(user_id))).tolist()}

    @endpoint("POST", "/recsys/rank")
    async def rank(self, request: web.Request) -> dict[str, list[float]]:
        """Score the rows in the body, `{"dense": [[13 numbers], ...], "sparse": [[26 integers], ...]}`."""
        try:
            body = await request.json()
            dense, sparse = np.array(body["dense"]), np.array(body["sparse"])
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, which the ranker refuses
                rows = dense.astype(np.float32, casting="same_kind"), sparse.astype(np.int64, casting="same_kind")
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f'the body: expected {{"dense": [[...]], "sparse": [[...]]}}: {error!r}') from None
        return {"scores": (await self.ranker.rank(*rows)).tolist()}


app = Recsys.bind(Ranker.bind())

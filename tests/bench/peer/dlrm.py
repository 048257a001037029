"""The peer's recommendations: two FastAPI ingresses make candidates, one ranker scores them in batches.

Model, weights, candidates and the scoring of a batch are ours (services/recsys): both sides compute the same scores
with the same code. Around it the application is built as in Ray's own benchmark.
"""

from __future__ import annotations

import os
from typing import Any

import numpy.typing as npt
import torch
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from services.recsys.model import seeded
from services.recsys.rows import Rows, candidates

api = FastAPI()

BATCH_WAIT_S = float(os.environ.get("PEER_BATCH_WAIT_S", "0.005"))
DEVICE = os.environ.get("PEER_DEVICE", "cpu")
THREADS = int(os.environ.get("PEER_TORCH_THREADS", "1"))


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_gpus": 1 if DEVICE == "cuda" else 0})
class Ranker:
    """One model on one device."""

    def __init__(self) -> None:
        torch.set_num_threads(THREADS)
        self._model = seeded().to(DEVICE)

    @serve.batch(max_batch_size=100, batch_wait_timeout_s=BATCH_WAIT_S)
    async def rank(self, blocks: list[Rows]) -> list[npt.NDArray[Any]]:
        return self._model.score(blocks)


@serve.deployment(num_replicas=2, max_ongoing_requests=1000)
@serve.ingress(api)
class Ingress:
    """One route, one call."""

    def __init__(self, ranker: DeploymentHandle) -> None:
        self._ranker = ranker

    @api.get("/recsys/")
    async def recommend(self, user_id: int) -> dict[str, list[float]]:
        scores = await self._ranker.rank.remote(candidates(user_id))
        return {"scores": scores.tolist()}


application = Ingress.bind(Ranker.bind())  # type: ignore[attr-defined]  # what the decorators add

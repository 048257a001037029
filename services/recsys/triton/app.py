"""The recommendations by either ranker: `serve services.recsys.triton.app:triton`, or `...:ranker`."""

from typing import cast

from pierhead import triton as inference

from services.recsys.app import Ranker, Recsys
from services.recsys.app import app as ranker
from services.recsys.rows import Dense, Scores, Sparse

__all__ = ["ranker", "triton"]


class TritonRanker:
    """What `Recsys` calls of a ranker."""

    def __init__(self, service: str) -> None:
        self._models = inference.client(service)

    async def rank(self, dense: Dense, sparse: Sparse) -> Scores:
        """A score for each row."""
        scores: Scores = (await self._models.infer("dlrm", {"dense": dense, "sparse": sparse}))["scores"]
        return scores.ravel()


triton = Recsys.bind(cast("Ranker", TritonRanker("triton")))

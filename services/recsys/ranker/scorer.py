"""Scores batches of rows with the model, away from the event loop: one worker thread owns model, device and buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from services.recsys.ranker.model import Dlrm
from services.recsys.ranker.rows import Rows
from services.recsys.schema import DENSE_FEATURES, SPARSE_FEATURES


class Scorer:
    """Turns lists of row blocks into lists of scores: one concatenation per field, one forward pass, one split."""

    def __init__(self, model: Dlrm, device: torch.device, max_rows: int) -> None:
        """`max_rows`: the most rows that one batch may hold; buffers for it are allocated here."""
        # Full fp32 products also where the GPU offers TF32: scores are the same on every device to fp32 rounding.
        torch.set_float32_matmul_precision("highest")
        self.device = device
        self.max_rows = max_rows
        self._model = model.place_on(device)
        # Pinned memory is copied to a GPU without another copy on the way, and while the CPU goes on.
        on_gpu = device.type == "cuda"
        self._dense = torch.empty((max_rows, DENSE_FEATURES), dtype=torch.float32, pin_memory=on_gpu)
        self._sparse = torch.empty((max_rows, SPARSE_FEATURES), dtype=torch.int64, pin_memory=on_gpu)
        self._dense_view = self._dense.numpy()
        self._sparse_view = self._sparse.numpy()
        # One thread: the buffers have one user, and a second batch would only contend for the same cores or GPU.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scorer")

    async def score(self, blocks: Sequence[Rows]) -> list[npt.NDArray[np.float32]]:
        """Score blocks of checked rows, at most `max_rows` in all -> float32 [rows of the block] for each."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.score_now, blocks)

    def score_now(self, blocks: Sequence[Rows]) -> list[npt.NDArray[np.float32]]:
        """Like `score`, in the calling thread. Must not run at the same time as another call."""
        ends = np.cumsum([len(block.dense) for block in blocks])
        rows = int(ends[-1])
        np.concatenate([block.dense for block in blocks], out=self._dense_view[:rows])
        np.concatenate([block.sparse for block in blocks], out=self._sparse_view[:rows])
        return np.split(self._forward(rows), ends[:-1])

    @torch.inference_mode()
    def _forward(self, rows: int) -> npt.NDArray[np.float32]:
        """Scores of the first `rows` rows of the buffers, in memory of their own."""
        dense = self._dense[:rows].to(self.device, non_blocking=True)
        sparse = self._sparse[:rows].to(self.device, non_blocking=True)
        scores: npt.NDArray[np.float32] = self._model(dense, sparse).cpu().numpy()
        return scores

    def close(self) -> None:
        """Wait for the batch in work and end the thread."""
        self._thread.shutdown(wait=True)

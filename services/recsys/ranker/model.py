"""The DLRM: a deep-learning recommendation model of 166,567,745 parameters.

    dense [rows, 13] -> bottom MLP 13-256-64 (ReLU) ----------------------+---> x [rows, 64] ------------------+
                                                                          |                                    |
    sparse [rows, 26] -> 26 tables of 100,000 x 64 -> 26 vectors ---------+-> 27 vectors -> 351 dot products --+
                                                                                                               |
                                     score [rows] <- sigmoid <- top MLP 415-256-128-64-1 (ReLU between) <------+

The dot products are those of the vector pairs (i, j) with i < j, row by row (the order of `torch.triu_indices`);
vector 0 is x, vector t + 1 comes from table t. All of it is fp32.

The forward pass is a few large operations over all rows of a batch. Each of them runs without Python's lock and takes
it again at its end, from an event loop that is busy with requests: passes of 512 rows take 1.4 times as long beside
one.
"""

from __future__ import annotations

import itertools
from typing import Final

import torch
from torch import Tensor, nn

from services.recsys.schema import DENSE_FEATURES, SPARSE_FEATURES, TABLE_ROWS

EMBEDDING_WIDTH: Final = 64
VECTORS: Final = SPARSE_FEATURES + 1
PADDED_VECTORS: Final = 28
"""VECTORS as a multiple of four: the products of so many vectors take less time than those of 27."""
PAIRS: Final = VECTORS * (VECTORS - 1) // 2
BOTTOM_WIDTHS: Final = (DENSE_FEATURES, 256, EMBEDDING_WIDTH)
TOP_WIDTHS: Final = (EMBEDDING_WIDTH + PAIRS, 256, 128, 64, 1)


class Dlrm(nn.Module):
    """The model's parameters and its forward pass. A new one has no memory yet (meta device): see weights.py.

    The 26 tables are one parameter, `embeddings` [26, 100000, 64]: one lookup instead of 26.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.empty(SPARSE_FEATURES, TABLE_ROWS, EMBEDDING_WIDTH, device="meta"))
        self.bottom = _layers(BOTTOM_WIDTHS)
        self.top = _layers(TOP_WIDTHS)
        # Made from the widths alone, so no part of a weights file.
        self._table_starts = torch.arange(SPARSE_FEATURES) * TABLE_ROWS
        first, second = torch.triu_indices(VECTORS, VECTORS, offset=1)
        self._pairs = first * PADDED_VECTORS + second

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Score rows: dense float32 [rows, 13], sparse int64 [rows, 26] (each 0 <= id < 100000) -> float32 [rows].

        Ids are not checked here (that costs a synchronisation on CUDA): the caller has checked them.
        """
        rows = dense.shape[0]
        hidden = _through(self.bottom, dense).relu_()
        # The first id of a row keeps the place of `hidden`, the last one is padding: no copy puts the vectors together.
        ids = nn.functional.pad(sparse + self._table_starts, (1, PADDED_VECTORS - VECTORS)).view(-1, 1)
        tables = self.embeddings.view(-1, EMBEDDING_WIDTH)
        # Bags of one id each: unlike index_select, embedding_bag fetches the next rows of the tables ahead.
        vectors = nn.functional.embedding_bag(ids, tables, mode="sum").view(rows, PADDED_VECTORS, EMBEDDING_WIDTH)
        vectors[:, 0] = hidden
        products = torch.bmm(vectors, vectors.transpose(1, 2)).view(rows, PADDED_VECTORS * PADDED_VECTORS)
        features = torch.cat((hidden, products.index_select(1, self._pairs)), dim=1)
        return _through(self.top, features).sigmoid_().view(rows)

    def place_on(self, device: torch.device) -> Dlrm:
        """Move everything, the derived index tensors too, to `device`; returns itself."""
        self.to(device)
        self._table_starts = self._table_starts.to(device)
        self._pairs = self._pairs.to(device)
        return self


def _layers(widths: tuple[int, ...]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(inputs, outputs, device="meta") for inputs, outputs in itertools.pairwise(widths))


def _through(layers: nn.ModuleList, values: Tensor) -> Tensor:
    """Apply linear layers with ReLU between them (not after the last)."""
    for layer in layers[:-1]:
        values = layer(values).relu_()
    last: Tensor = layers[-1](values)
    return last

"""The DLRM: a deep-learning recommendation model of 166,567,745 parameters.

    dense [rows, 13] -> bottom MLP 13-256-64 (ReLU) ----------------------+---> x [rows, 64] ------------------+
    sparse [rows, 26] -> 26 tables of 100,000 x 64 -> 26 vectors ---------+-> 27 vectors -> 351 dot products --+
                                     score [rows] <- sigmoid <- top MLP 415-256-128-64-1 (ReLU between) <------+

The dot products are those of the vector pairs (i, j) with i < j; vector 0 is x, vector t + 1 comes from table t.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from services.recsys.rows import DENSE_FEATURES, SPARSE_FEATURES, TABLE_ROWS, Rows, Scores

SEED = 20_240_917
WIDTH = 64
VECTORS = SPARSE_FEATURES + 1
PADDED = 28  # a multiple of four: the products of so many vectors take less time than those of 27
TOP_WIDTHS = (WIDTH + VECTORS * (VECTORS - 1) // 2, 256, 128, 64, 1)


class Dlrm(nn.Module):
    """A forward pass is a few large operations over all rows: each gives up Python's lock, and has to get it back."""

    pairs: Tensor
    starts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.empty(SPARSE_FEATURES, TABLE_ROWS, WIDTH))
        self.bottom = _layers(DENSE_FEATURES, 256, WIDTH)
        self.top = _layers(*TOP_WIDTHS)
        first, second = torch.triu_indices(VECTORS, VECTORS, offset=1)
        self.register_buffer("pairs", first * PADDED + second, persistent=False)
        self.register_buffer("starts", torch.arange(SPARSE_FEATURES) * TABLE_ROWS, persistent=False)

    def score(self, blocks: Sequence[Rows]) -> list[Scores]:
        """The scores of the rows of each block, in one pass; not for two threads at a time."""
        dense, sparse = (
            torch.from_numpy(np.concatenate(each)).to(self.pairs.device) for each in zip(*blocks, strict=True)
        )
        with torch.inference_mode():
            scores = self(dense, sparse).cpu().numpy()
        return np.split(scores, np.cumsum([len(dense) for dense, _ in blocks])[:-1])

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Scores [rows]. Ids are not checked here: that costs a synchronisation on CUDA."""
        rows = len(dense)
        hidden = _through(self.bottom, dense).relu_()
        # The first id of a row keeps the place of `hidden`, the last one is padding: no copy puts the vectors together.
        ids = nn.functional.pad(sparse + self.starts, (1, PADDED - VECTORS)).view(-1, 1)
        # Bags of one id each: unlike index_select, embedding_bag fetches the next rows of the tables ahead.
        found = nn.functional.embedding_bag(ids, self.embeddings.view(-1, WIDTH), mode="sum").view(rows, PADDED, WIDTH)
        found[:, 0] = hidden
        products = torch.bmm(found, found.transpose(1, 2)).view(rows, PADDED * PADDED).index_select(1, self.pairs)
        return _through(self.top, torch.cat((hidden, products), dim=1)).sigmoid_().view(rows)


def _layers(*widths: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(widths))


def _through(layers: nn.ModuleList, values: Tensor) -> Tensor:
    for layer in layers[:-1]:
        values = layer(values).relu_()
    last: Tensor = layers[-1](values)
    return last


def loaded(path: str) -> Dlrm:
    """With the weights of a safetensors file, which is mapped: replicas of one machine share its pages."""
    from safetensors.torch import load_file

    model = Dlrm()
    model.load_state_dict(load_file(path), assign=True)
    return model


def seeded(seed: int = SEED) -> Dlrm:
    """With the same weights on every machine, whose scores are spread over (0, 1).

    Only `uniform_`, whose values do not depend on the processor's vector width; the bounds keep the variance of what
    flows through constant (He).
    """
    model = Dlrm()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layers = [*model.bottom, *model.top]
        for layer in layers:
            bound = (6 / layer.in_features) ** 0.5
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.zero_()
        layers[-1].weight.mul_(2.0)  # the logits of SEED then have mean 0 and deviation 1.7
        layers[-1].bias.fill_(0.4)
        bound = (3 / WIDTH**0.5) ** 0.5  # a dot product of two such vectors has variance 64 * (bound^2 / 3)^2 = 1
        model.embeddings.uniform_(-bound, bound, generator=generator)
    return model


def default_threads(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Of a pass on a CPU: what the container's limit pays for, else half of the cores. One that waits holds up all."""
    # "200000 100000" is two CPUs, "max 100000" no limit
    quota, period = limit.read_text().split() if limit.exists() else ("max", "")
    return max(1, torch.get_num_threads() // 2 if quota == "max" else int(quota) // int(period))

"""What the recommendation model takes: the one place that names widths and bounds, for the ingress and the ranker.

Matches the comments of proto/pierhead/recsys/v1/ranker.proto. Imports nothing: the ingress has no PyTorch.
"""

from __future__ import annotations

from typing import Final

DENSE_FEATURES: Final = 13
"""Numbers (float32) per row in `dense`."""

SPARSE_FEATURES: Final = 26
"""Ids (int64) per row in `sparse`, one per embedding table."""

TABLE_ROWS: Final = 100_000
"""Rows of each embedding table: an id is 0 to TABLE_ROWS - 1."""

MAX_ROWS: Final = 4096
"""Rows one request may carry; a larger job is split by its caller. 4096 rows are 1 MiB on the wire."""

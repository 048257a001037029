"""The DLRM without any serving: `python -m tests.bench.bare.model_alone --threads 1 --seconds 5`.

Batches of 100 requests of 32 rows, made beforehand, through the ranker's own scorer, one after the other. Prints one
line of JSON: requests a second, CPU seconds used.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from services.recsys.ingress.candidates import candidates
from services.recsys.ranker.rows import Rows
from services.recsys.ranker.scorer import Scorer
from services.recsys.ranker.weights import seeded_weights
from services.recsys.schema import MAX_ROWS

BATCH = 100


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    scorer = Scorer(seeded_weights(), torch.device(arguments.device), MAX_ROWS)
    batches = [[Rows(*candidates(user)) for user in range(first, first + BATCH)] for first in range(1, 1001, BATCH)]
    for batch in batches[:3]:
        scorer.score_now(batch)
    done, began, cpu_began = 0, time.monotonic(), time.process_time()
    while time.monotonic() - began < arguments.seconds:
        scorer.score_now(batches[done % len(batches)])
        done += 1
    seconds = time.monotonic() - began
    cpu = time.process_time() - cpu_began
    print(json.dumps({"requests": done * BATCH, "seconds": seconds, "cpu_seconds": cpu}))


if __name__ == "__main__":
    main()

"""The DLRM without any serving: `python -m tests.bench.bare.model_alone --threads 1 --seconds 5`.

Batches of 100 requests of 32 rows, made beforehand, scored as the ranker does it, one after the other. Prints JSON:
requests a second, CPU seconds used.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from services.recsys.model import seeded
from services.recsys.rows import candidates

BATCH = 100


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = seeded().to(arguments.device)
    batches = [[candidates(user) for user in range(first, first + BATCH)] for first in range(1, 1001, BATCH)]
    for batch in batches[:3]:
        model.score(batch)
    done, began, cpu_began = 0, time.monotonic(), time.process_time()
    while time.monotonic() - began < arguments.seconds:
        model.score(batches[done % len(batches)])
        done += 1
    seconds = time.monotonic() - began
    cpu = time.process_time() - cpu_began
    print(json.dumps({"requests": done * BATCH, "seconds": seconds, "cpu_seconds": cpu}))


if __name__ == "__main__":
    main()

"""A replica that fetches a source, as a process: python -m tests.harness.fetching SOURCE CACHE [STEPS]

Each report of progress is a line of JSON, [doing, done, total], and so is the end, {"path": ...} or {"error": ...}.
With STEPS it fetches chunks of 1 MiB, and continues after each report once it reads a line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pierhead.llm.server.errors import LLMStartError
from pierhead.llm.server.models import buckets, cache, download
from pierhead.llm.server.models.loading import fetch

STEP_BYTES = 1024 * 1024


def _report(doing: str, done: float | None, total: float) -> None:
    print(json.dumps([doing, done, total]), flush=True)


def _report_and_wait(doing: str, done: float | None, total: float) -> None:
    _report(doing, done, total)
    sys.stdin.readline()


def main(source: str, directory: str, steps: str = "") -> None:
    """Fetch, and say how it ended."""
    cache.ASK_AGAIN_S = 0.02
    if steps:
        buckets.CHUNK_BYTES, download.REPORT_S = STEP_BYTES, 0.0
        if "://" not in source:
            from huggingface_hub import constants

            constants.DOWNLOAD_CHUNK_SIZE = STEP_BYTES
    try:
        found = fetch(source, Path(directory), _report_and_wait if steps else _report)
    except LLMStartError as error:
        print(json.dumps({"error": str(error)}), flush=True)
    else:
        print(json.dumps({"path": str(found)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Locks the cache directory that replicas share: one replica fetches a source, the others wait for it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pierhead.llm.server.engine import Report
from pierhead.llm.server.errors import LLMStartError

CACHE_VARIABLE = "PIERHEAD_LLM_CACHE"
ASK_AGAIN_S = 1.0
"""Seconds between two attempts to take the lock."""


@contextmanager
def one_at_a_time(
    cache: Path, source: str, report: Report, sleep: Callable[[float], None] = time.sleep
) -> Iterator[bool]:
    """One replica fetches a source at a time; the lock ends with its process. Yields whether it had to wait for
    another replica."""
    locks = cache / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / file_name(source)).open("a") as lock:
        waited = 0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited += 1
                # The growing number counts as progress, so the wait is not taken for a hanging start. A replica whose
                # fetch hangs is replaced at its own deadline, which frees the lock.
                report(f"waiting for another replica that downloads {source}", waited, 0)
                sleep(ASK_AGAIN_S)
        yield waited > 0


def file_name(source: str) -> str:
    """A readable name, unique to the source: s3://a/b_c and s3://a/b/c differ."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", source).strip("_")[:150]
    return f"{readable}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"


def cannot_keep(source: str, cache: Path, error: OSError) -> LLMStartError:
    """The error for a failure of the cache's file system, which says what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LLMStartError(
            f"no space left in {cache} for {source}; enlarge the cache volume, or remove models from it"
        )
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return LLMStartError(
            f"{cache} cannot be written to ({error.strerror}); mount a volume there that the user of the "
            f"image may write to, or name another directory in {CACHE_VARIABLE}"
        )
    return LLMStartError(f"{source} could not be fetched into {cache}: {error}")

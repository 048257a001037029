"""One controller for a project: a second one, started by mistake, refuses before it has touched anything.

Two of them would undo each other's work for ever. A lock on a file beside the state tells: the kernel drops it with the
process that holds it, so there is no timeout, and nothing that a controller killed at any instant could leave behind.
A controller that is refused ends with exit code 3. Docker starts it again, so it follows, within a minute, when the
other one has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from .errors import AnotherController, StoreError

LOCK_NAME = "controller.lock"
PATIENCE_S = 3.0
"""How long to wait for a controller that is just ending."""
LOOK_S = 0.1


@contextlib.asynccontextmanager
async def state_lock(directory: Path, project: str, patience_s: float = PATIENCE_S) -> AsyncIterator[None]:
    """Hold the state in `directory` alone. Raises AnotherController; StoreError where nothing can be locked."""
    file = await _take(directory / LOCK_NAME, project, patience_s)
    with file:  # when it is closed, here or by the process's end, the lock goes with it
        yield


async def _take(path: Path, project: str, patience_s: float) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path}: {error}; the controller needs a writable state directory") from error
    try:
        await _lock(file, path, patience_s)
    except OSError as error:
        file.close()
        raise StoreError(f"{path}: {error}; the controller's state has to lie where files can be locked") from error
    except BaseException:
        file.close()
        raise
    _sign(file, project)
    return file


async def _lock(file: IO[str], path: Path, patience_s: float) -> None:
    if not await _within(patience_s, lambda: _locked(file)):
        raise AnotherController(_held_words(path, file))


async def _within(patience_s: float, done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + patience_s
    while not done():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(LOOK_S)
    return True


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(file: IO[str], project: str) -> None:
    """Write down who holds the lock. On a full disk it is held all the same, by nobody one can name."""
    holder = {"project": project, "host": socket.gethostname(), "pid": os.getpid(), "since": _moment(time.time())}
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(json.dumps(holder))
        file.flush()


def _held_words(path: Path, file: IO[str]) -> str:
    file.seek(0)
    try:
        holder: dict[str, Any] = json.loads(file.read())
        who = (
            f"the controller of project {holder['project']} on {holder['host']} (process {holder['pid']}), "
            f"since {holder['since']}"
        )
    except (ValueError, KeyError, TypeError):
        who = "another controller"
    return (
        f"{path} is held by {who}; this one ends and has changed nothing. Stop the other one (in a container, its host "
        "is the beginning of the container's id: `docker stop <id>`), or give this one a state directory of its own"
    )


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")

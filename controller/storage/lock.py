"""Keeps a project to one controller: a second one, started by mistake, ends before it changes anything.

Two controllers would undo each other's work forever. Each locks a file next to the state. The kernel releases the lock
with the process that holds it, so it needs no timeout, and a killed controller leaves nothing behind. The second
controller ends with exit code 3. Docker starts it again, so it takes over within a minute after the first has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from ..errors import AnotherController, StoreError

LOCK_NAME = "controller.lock"
PATIENCE_S = 3.0
"""How long to wait for a controller that is ending."""
LOOK_S = 0.1


@contextlib.asynccontextmanager
async def state_lock(directory: Path, project: str, patience_s: float = PATIENCE_S) -> AsyncIterator[None]:
    """Hold the state in `directory` alone. Raises AnotherController; StoreError where nothing can be locked."""
    path = directory / LOCK_NAME
    with _opened(path) as file:  # closing it releases the lock
        try:
            await _lock(file, path, patience_s)
        except OSError as error:
            raise StoreError(f"{path}: {error}; the controller's state has to lie where files can be locked") from error
        _sign(file, project)
        yield


def _opened(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path}: {error}; the controller needs a writable state directory") from error


async def _lock(file: IO[str], path: Path, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise AnotherController(_held_words(path, file)) from None
        await asyncio.sleep(LOOK_S)


def _sign(file: IO[str], project: str) -> None:
    """Write the holder of the lock into its file. On a full disk the lock is held, and its holder is not named."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = {"project": project, "host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(json.dumps(holder))
        file.flush()


def _held_words(path: Path, file: IO[str]) -> str:
    file.seek(0)
    try:
        holder: dict[str, Any] = json.loads(file.read())
        owner = (
            f"the controller of project {holder['project']} on {holder['host']} (process {holder['pid']}), "
            f"since {holder['since']}"
        )
    except (ValueError, KeyError, TypeError):
        owner = "another controller"
    return (
        f"{path} is held by {owner}; this one ends and has changed nothing. Stop the other one (in a container, its "
        "host is the beginning of the container's id: `docker stop <id>`), or give this one its own state directory"
    )

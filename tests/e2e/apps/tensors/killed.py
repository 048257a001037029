"""Starts and kills senders (`front`, the first argument) or receivers (`back`) of large tensors, as the words say that
come in: start, kill, count.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from pierhead import ReplicaDied, Settings, handle, serve, tensors
from pierhead.calls.clients import Clients
from pierhead.memory.link_setup import share_memory
from pierhead.memory.scope import SCOPE, Scope
from pierhead.metrics import RuntimeMetrics

from service import Back, TensorsStub  # type: ignore[import-not-found]  # isort: skip

PORT = 9000
SIZE = 8 * 1024**2
STATS = ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat")


def say(word: object) -> None:
    print(word, flush=True)


def shared_bytes() -> int:
    """The shared memory of this container, as the kernel counts it."""
    stat = next(path for path in map(Path, STATS) if path.exists())
    return next(int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("shmem "))


async def send(replica: str) -> None:
    """Hold a reply, and a request that is worked on."""
    settings = Settings(shared_memory_bytes=8 * SIZE, shared_memory_dir=os.environ["PIERHEAD_SHARED_MEMORY_DIR"])
    shared = share_memory(settings, RuntimeMetrics())
    Clients.use(Settings(static={"BACK": (f"{replica}:{PORT}",)}))
    back: Any = handle(TensorsStub, "back")
    SCOPE.set(Scope())
    content, reply = np.full(SIZE, 7, np.uint8), None
    while reply is None or not reply.HasField("shared"):  # the first ones travel as bytes
        reply = await back.Negate(tensors.from_numpy(content))
    array = tensors.to_numpy(reply)
    say("held" if (array == 255 - content).all() else "torn")
    with suppress(ReplicaDied):
        await back.Hold(tensors.from_numpy(content))
    await asyncio.Event().wait()
    del shared


class HoldingBack(Back):  # type: ignore[misc]
    """Says when it holds a request."""

    async def Hold(self, request: Any, context: Any) -> Any:
        say("held" if (tensors.to_numpy(request) == 7).all() else "torn")
        return await super().Hold(request, context)


def child(role: str) -> None:
    if role == "back":
        serve(HoldingBack())
        return
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("back", PORT)) == 0:
                break
    asyncio.run(send("back"))


def main(role: str) -> None:
    started = 0
    for word in sys.stdin:
        if word == "start\n":
            started = os.fork()
            if not started:
                try:
                    child(role)
                finally:
                    say("ended")
                    os._exit(0)
        elif word == "kill\n":
            os.kill(started, signal.SIGKILL)
            os.waitpid(started, 0)
            say("killed")
        else:
            say(shared_bytes())


main(sys.argv[1])

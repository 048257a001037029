"""Services as processes of their own, which a test may stop, cut off or kill, and what the kernel says of them."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.harness.ports import own_address
from tests.unit.runtime.harness import until

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
"""A Python process that imports gRPC on a machine whose cores are busy."""

PORT = 50051
ADMIN_PORT = 9100

LOG_LINES_TOLD = 30


class Running:
    """One process, from its start to its end."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        program: str,
        name: str,
        host: str,
        inside: Sequence[str],
        log: Path,
        socket: str = "",
    ) -> None:
        self._process = process
        self.program = program
        self.name = name
        self.host = host
        self._inside = inside
        self._log = log
        self._socket = socket

    @property
    def address(self) -> str:
        """Where its requests go, "ip:port", or "unix:path"."""
        return f"unix:{self._socket}" if self._socket else f"{self.host}:{PORT}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident(self) -> int:
        """Bytes of memory that the kernel counts as resident now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def send(self, number: signal.Signals) -> None:
        """Send a signal. A stopped process gets SIGCONT and SIGKILL all the same."""
        self._process.send_signal(number)

    async def ended(self, within_s: float = 60.0) -> int:
        """Wait for its end; returns the exit status."""
        async with asyncio.timeout(within_s):
            return await self._process.wait()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, as its admin port tells them now; nan = it has not answered."""
        url = f"http://{self.host}:{ADMIN_PORT}/metrics"
        ask = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=30).read().decode())"
        # Asked from where it is: there its address can always be reached.
        done = subprocess.run(
            [*self._inside, sys.executable, "-c", ask], capture_output=True, text=True, timeout=START_S, check=False
        )
        if done.returncode:
            return math.nan
        page = done.stdout
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))

    def log(self) -> str:
        """The last lines that it has written."""
        return "\n".join(self._log.read_text().splitlines()[-LOG_LINES_TOLD:])

    @property
    def is_ready(self) -> bool:
        assert self._process.returncode is None, f"{self.name} ended with {self._process.returncode}:\n{self.log()}"
        return '"message": "ready"' in self._log.read_text()

    async def close(self) -> None:
        """End it, however it does."""
        if self._process.returncode is None:
            self.send(signal.SIGKILL)
        await self._process.wait()
        self._process._transport.close()  # type: ignore[attr-defined]


class Fleet:
    """The processes of one test."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._sockets: Path | None = None
        self._running: list[Running] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self._running:
            await each.close()
        if self._sockets is not None:
            shutil.rmtree(self._sockets)

    def use_sockets(self) -> None:
        """Those that are started from now on take requests at sockets, whose paths have to be short."""
        self._sockets = Path(tempfile.mkdtemp())

    async def workers(self, *names: str, **environ: object) -> list[Running]:
        """Replicas of the service "worker"; `environ` are settings without their PIERHEAD_."""
        return await asyncio.gather(*[self.start("worker", name, environ) for name in names])

    async def ingresses(self, count: int, workers: Sequence[Running], **environ: object) -> list[Running]:
        """HTTP servers that call `workers`."""
        settings = environ | {"static_worker": ",".join(worker.address for worker in workers)}
        return await asyncio.gather(*[self.start("ingress", f"ingress-{n}", settings) for n in range(count)])

    async def start(
        self,
        program: str,
        name: str,
        settings: Mapping[str, object] | None = None,
        *,
        host: str | None = None,
        inside: Sequence[str] = (),
    ) -> Running:
        """Run a program of tests/faults/programs and return once it is ready.

        `host`: the address that it listens on, one of its own unless given. `inside`: what to put before the command.
        """
        host = host or own_address()
        socket = str(self._sockets / host) if self._sockets else ""
        known = {"host": host, "port": PORT, "admin_port": ADMIN_PORT, "replica": name, "service": program}
        known |= {"socket": socket} if socket else {}
        log = self._logs / f"{len(self._running)}-{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *inside, sys.executable, "-m", f"tests.faults.programs.{program}",
                cwd=ROOT,
                env=environment(known | dict(settings or {})),
                stderr=output,
            )  # fmt: skip
        running = Running(process, program, name, host, inside, log, socket)
        self._running.append(running)
        await until(lambda: running.is_ready, f"{name} is ready", START_S)
        return running


def environment(settings: Mapping[str, object]) -> dict[str, str]:
    """This process's, without what belongs to a replica, and the settings given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIERHEAD_")}
    return inherited | {f"PIERHEAD_{name.upper()}": str(value) for name, value in settings.items()}

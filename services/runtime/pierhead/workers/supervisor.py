"""The parent of a replica's workers.

serve() --exec--> Supervisor --starts--> worker 1, worker 2, ...   (the service's own program, each with its seat)

It imports neither the service nor gRPC, so it stays small; it has no part in any request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from pierhead.edge import logs
from pierhead.replica.admin import AdminServer, Readiness, admin_pages, admin_takers
from pierhead.replica.user_config import ConfigReport, digest
from pierhead.settings import DEFAULT_HTTP_PORT, Settings, read_user_config
from pierhead.workers.board import Board, WorkerState
from pierhead.workers.pages import Ledger, read_page
from pierhead.workers.place import ASK, CONFIGURE, VARIABLE, Place
from pierhead.workers.supervision import Backoff, config_of, hung, verdict

logger = logging.getLogger("pierhead")

LOOK_S = 0.25
"""Between two looks at the workers."""

SCRAPE_S = 2.0
"""How long a worker may take for its metrics; then the page has what it said the last time."""

KILL_AFTER_S = 5.0
"""A worker that has not ended so long after its drain timeout is killed. Half of what a container is given."""

_SETTINGS = "PIERHEAD_SUPERVISOR"
_USER_CONFIG = "PIERHEAD_USER_CONFIG"

# The package's own __init__ would import all of the runtime.
_PROGRAM = """
import sys, types
package = types.ModuleType("pierhead")
package.__path__ = [sys.argv[1]]
sys.modules["pierhead"] = package
from pierhead.workers.supervisor import main
main()
"""


def become_supervisor(settings: Settings) -> NoReturn:
    """Go on as the supervisor of this very program's workers. Whatever this process has done is gone.

    Raises RuntimeError where the program cannot be started again.
    """
    program = sys.orig_argv[1:]
    file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    if "-c" not in program and not Path(file).exists():
        raise RuntimeError(
            "a program that was typed in, or piped into Python, cannot be started again; put it in a file"
        )
    told = {"settings": settings_text(settings), "program": [sys.executable, *program]}
    sys.stdout.flush()
    sys.stderr.flush()
    package = str(Path(__file__).resolve().parents[1])
    environ = {**os.environ, _SETTINGS: json.dumps(told)}
    os.execve(sys.executable, [sys.executable, "-P", "-c", _PROGRAM, package], environ)  # noqa: S606 - no shell


def settings_text(settings: Settings) -> str:
    """Settings, for `read_settings` in another process."""
    return json.dumps(dataclasses.asdict(settings))


def read_settings(text: str) -> Settings:
    """What `settings_text` was given."""
    fields = json.loads(text)
    static = fields.pop("static")
    if static is not None:
        static = {name: tuple(addresses) for name, addresses in static.items()}
    return Settings(**fields, static=static)


def main() -> None:
    """What the process does that has become a supervisor. Exits with the code that `serve` would have had."""
    told = json.loads(os.environ.pop(_SETTINGS))
    settings = read_settings(told["settings"])
    logs.configure(settings)
    try:
        code = asyncio.run(_run(settings, told["program"]))
    except Exception:
        logger.exception("internal: the supervisor of %s failed", settings.service or "the service")
        code = 1
    logging.shutdown()
    raise SystemExit(code)


async def _run(settings: Settings, program: Sequence[str]) -> int:
    supervisor = Supervisor(settings, program, os.environ)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)
    return await supervisor.run()


class StartError(Exception):
    """The replica cannot be started; `code` is what its process exits with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Worker:
    """One process, from its start to its end."""

    def __init__(self, index: int, process: asyncio.subprocess.Process, line: Line) -> None:
        self.index = index
        self.process = process
        self.started_at = time.monotonic()
        self._line = line
        self._asked: asyncio.Task[str] | None = None

    async def metrics(self) -> str:
        """Its exposition. Raises TimeoutError when it takes longer than SCRAPE_S, OSError or EOFError when it ends."""
        if self._asked is None or self._asked.done():  # else an earlier question is still to be answered
            self._asked = asyncio.create_task(self._ask())
        asked = self._asked
        await asyncio.wait([asked], timeout=SCRAPE_S)
        if not asked.done():
            raise TimeoutError
        return asked.result()

    def configure(self, text: str) -> None:
        """Give it a user_config. One that does not read leaves a few of them waiting, and ends as one that hangs."""
        raw = text.encode()
        self._line[1].write(CONFIGURE + len(raw).to_bytes(8, "big") + raw)

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens when it has ended."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                # Not by the process object: on Python 3.11 that would take the exit code away from who waits for it.
                os.kill(self.process.pid, number)

    async def close(self) -> None:
        """Let go of its line."""
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.gather(self._asked, return_exceptions=True)
        self._line[1].transport.abort()

    async def _ask(self) -> str:
        reader, writer = self._line
        writer.write(ASK)
        size = int.from_bytes(await reader.readexactly(8), "big")
        return (await reader.readexactly(size)).decode()


class Supervisor:
    """Keeps the workers of one replica. `run` returns the exit code when the last of them has ended."""

    def __init__(self, settings: Settings, program: Sequence[str], environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.admin_port: int | None = None
        self.http_port: int | None = None
        """Bound port once `run` has begun."""
        self._program = tuple(program)
        self._environ = dict(environ)
        self._config = settings.user_config
        self._board = Board.make(settings.workers)
        self._workers: dict[int, Worker] = {}
        """By seat."""
        self._numbers = itertools.count(1)
        self._ledger = Ledger()
        self._ledger_numbers: dict[Worker, int] = {}
        self._ends = 0
        self._was_ready = False
        self._looking_since = time.monotonic()
        self._draining = asyncio.Event()
        takers = admin_takers(self._configure, self._config_report)
        self._admin = AdminServer(admin_pages(self.readiness, self._expose), takers)

    async def run(self) -> int:
        """Start the workers, keep them until `stop`, wait for their end."""
        try:
            with self._reserved_port() as port:
                self.http_port = port
                self.admin_port = await self._listen_admin()
                async with asyncio.TaskGroup() as tasks:
                    keepers = [tasks.create_task(self._keep(index)) for index in range(self.settings.workers)]
                    helpers = [tasks.create_task(self._look()), tasks.create_task(self._enforce_end())]
                    await asyncio.wait(keepers)
                    for helper in helpers:
                        helper.cancel()
        except* StartError as group:
            first = group.exceptions[0]
            assert isinstance(first, StartError)  # noqa: S101 - what except* has chosen
            logger.error("%s", first)  # noqa: TRY400 - the message says it all
            code = first.code
        else:
            code = 0
        finally:
            await self._admin.close()
            self._board.close()
        logger.info("stopped")
        return code

    def stop(self) -> None:
        """What SIGTERM does: all workers drain. Asked again: they stop now."""
        if not self._draining.is_set():
            logger.info("draining %d workers", len(self._workers))
        self._draining.set()
        for worker in list(self._workers.values()):
            worker.signal(signal.SIGTERM)

    def readiness(self) -> Readiness:
        """What /readyz says."""
        seen = self._board.seen()
        state, detail = verdict(seen, was_ready=self._was_ready, draining=self._draining.is_set())
        self._was_ready = self._was_ready or state == "ready"
        return Readiness(
            state,
            sum(one.ongoing for one in seen),
            sum(one.queued for one in seen),
            detail,
            answered=sum(one.answered for one in seen),
            errors=sum(one.errors for one in seen),
            progress=sum(one.progress for one in seen),
            user_config=config_of(digest(self._config), seen),
            broken=state == "starting" and any(one.state is WorkerState.BROKEN for one in seen),
        )

    def _configure(self, text: str) -> None:
        """Give every worker this user_config, those to come too. Raises ValueError where it cannot be."""
        read_user_config(text)
        if text == self._config:
            return
        self._config = text
        for worker in list(self._workers.values()):
            worker.configure(text)

    def _config_report(self) -> ConfigReport:
        return config_of(digest(self._config), self._board.seen())

    # ---- ports

    @contextmanager
    def _reserved_port(self) -> Iterator[int]:
        """The port that workers share, held for this replica by sockets that never listen. Raises StartError.

        The first socket shares with nobody: another replica on the port is a mistake that must be seen.
        """
        settings = self.settings
        wanted = DEFAULT_HTTP_PORT if settings.port is None else settings.port
        try:
            with _bound(settings.host, wanted, share=False) as probe:
                port = int(probe.getsockname()[1])
            held = _bound(settings.host, port, share=True)
        except OSError as error:
            raise _cannot_listen("PIERHEAD_PORT", settings.host, wanted, error) from error
        with held:
            yield port

    async def _listen_admin(self) -> int:
        host, port = self.settings.host, self.settings.admin_port
        try:
            return await self._admin.start(host, port)
        except OSError as error:
            raise _cannot_listen("PIERHEAD_ADMIN_PORT", host, port, error) from error

    # ---- workers

    async def _keep(self, index: int) -> None:
        """Have a worker on a seat until the drain. Raises StartError when the replica does not come to be ready."""
        backoff = Backoff()
        while not self._draining.is_set():
            worker = await self._start(index)
            try:
                code = await worker.process.wait()
            except asyncio.CancelledError:
                await self._put_down(worker)
                raise
            finally:
                await self._ended(worker)
            if self._draining.is_set():
                return
            how = f"worker {index + 1} (process {worker.process.pid}) {_end_in_words(code)}"
            if not self._was_ready:
                raise StartError(f"{how} before the replica was ready", code if code > 0 else 1)
            self._ends += 1
            pause = backoff.after(time.monotonic() - worker.started_at)
            logger.error("%s; it is started again in %g s; %d others go on", how, pause, len(self._workers))
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._draining.wait()

    async def _start(self, index: int) -> Worker:
        ours, theirs = socket.socketpair()
        config = self._config
        with theirs:
            assert self.http_port is not None  # noqa: S101 - `run` has set it
            descriptor = self._board.descriptor
            place = Place(index, self.settings.workers, self.http_port, descriptor, theirs.fileno())
            ours.setblocking(False)
            line = await asyncio.open_connection(sock=ours)
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._program,
                    env={**self._environ, _USER_CONFIG: config, VARIABLE: place.text()},
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(descriptor, theirs.fileno()),
                    process_group=0,  # Ctrl-C is for the supervisor, who passes it on once
                )
            except BaseException:
                line[1].transport.abort()
                raise
        worker = self._workers[index] = Worker(index, process, line)
        self._ledger_numbers[worker] = next(self._numbers)
        if self._config != config:  # meanwhile
            worker.configure(self._config)
        if self._draining.is_set():  # meanwhile
            worker.signal(signal.SIGTERM)
        return worker

    async def _ended(self, worker: Worker) -> None:
        self._workers.pop(worker.index, None)
        self._board.clear(worker.index)
        self._ledger.retire(self._ledger_numbers.pop(worker))
        await worker.close()

    async def _put_down(self, worker: Worker) -> None:
        """End a worker whose replica will not be."""
        worker.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_AFTER_S):
                await worker.process.wait()
                return
        worker.signal(signal.SIGKILL)
        await worker.process.wait()

    async def _look(self) -> None:
        """Notice that the replica is ready, and workers that hang."""
        told = False
        last = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if now - last > 4 * LOOK_S:
                self._looking_since = now  # the whole container stood still: nobody's fault
            last = now
            if not told and self.readiness().state == "ready":
                told = True
                logger.info("ready: %d workers", self.settings.workers)
            for index, seen in enumerate(self._board.seen()):
                worker = self._workers.get(index)
                if worker is not None and hung(seen, now, self._looking_since):
                    logger.error(
                        "worker %d (process %d) has not run its event loop for %.3g s; it is killed",
                        index + 1, worker.process.pid, now - seen.beat_s,
                    )  # fmt: skip
                    worker.signal(signal.SIGKILL)

    async def _enforce_end(self) -> None:
        await self._draining.wait()
        await asyncio.sleep(self.settings.drain_timeout_s + KILL_AFTER_S)
        for worker in list(self._workers.values()):
            logger.warning("worker %d does not end; it is killed", worker.index + 1)
            worker.signal(signal.SIGKILL)

    # ---- metrics

    async def _expose(self) -> bytes:
        await asyncio.gather(*(self._scrape(worker) for worker in list(self._workers.values())))
        readiness = self.readiness()
        seen = self._board.seen()
        own: dict[str, float] = {
            "pierhead_ongoing_requests": readiness.ongoing,
            "pierhead_replica_ready": readiness.state == "ready",
            "pierhead_workers_ready": sum(one.state is WorkerState.READY for one in seen),
            "pierhead_worker_ends": self._ends,
        }
        return self._ledger.page(own, {"service": self.settings.service, "replica": self.settings.replica})

    async def _scrape(self, worker: Worker) -> None:
        try:
            page = read_page(await worker.metrics())
        except (TimeoutError, OSError, EOFError):  # it is busy, or has ended: its last page counts
            return
        number = self._ledger_numbers.get(worker)
        if number is not None:
            self._ledger.update(number, page)


def _bound(host: str, port: int, *, share: bool) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found


def _cannot_listen(variable: str, host: str, port: int, error: Exception) -> StartError:
    return StartError(f"{variable}: cannot listen on {host}:{port}: {error}; is another process there?", 2)


def _end_in_words(code: int) -> str:
    if code >= 0:
        return f"has ended with code {code}"
    try:
        name: Any = signal.Signals(-code).name
    except ValueError:
        name = -code
    return f"was ended by signal {name}"

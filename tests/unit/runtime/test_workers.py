"""Several processes behind one replica's port: started, killed, drained, all of them real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientSession, TCPConnector
from pierhead import Settings
from pierhead.replica.user_config import digest
from pierhead.workers.supervision import HUNG_S
from pierhead.workers.supervisor import Supervisor
from prometheus_client.parser import text_string_to_metric_families

from tests.harness import ports
from tests.harness.waiting import PATIENCE_S

APP = """
import asyncio, os, pathlib, signal, sys, time
from aiohttp import web
from pierhead import serve

async def pid(request):
    return web.json_response({"pid": os.getpid()})

async def work(request):
    while not pathlib.Path(request.query["until"]).exists():
        await asyncio.sleep(0.01)
    return web.json_response({"pid": os.getpid()})

class Part:
    async def check_health(self):
        await CHECK

app = web.Application()
app.add_routes([web.get("/pid", pid), web.post("/work", work)])
BEFORE
serve(app, Part())
print("behind", os.getpid(), flush=True)
"""


def program(check: str = "asyncio.sleep(0)", before: str = "") -> str:
    return APP.replace("CHECK", check).replace("BEFORE", before)


async def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true answer of a condition, which may be async; failures to connect are no answer."""
    found = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                    found = condition()
                    found = await found if asyncio.iscoroutine(found) else found
                    if found:
                        return found
                await asyncio.sleep(0.02)
    raise AssertionError(f"not within {PATIENCE_S:g} s: {what}; last: {found}")


class Replica:
    """A process that calls `serve()` with workers, seen from outside."""

    def __init__(self, port: int, admin_port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.admin = f"http://127.0.0.1:{admin_port}"
        self.environ = {
            **os.environ,
            "PIERHEAD_SERVICE": "web", "PIERHEAD_REPLICA": "web-1", "PIERHEAD_HOST": "127.0.0.1",
            "PIERHEAD_PORT": str(port), "PIERHEAD_ADMIN_PORT": str(admin_port), "PIERHEAD_WORKERS": "2",
            "PIERHEAD_ACCESS_LOG": "false",
        }  # fmt: skip
        self.process: asyncio.subprocess.Process
        self.output = ""
        self.asked = 0
        """Requests that `pids` has made and that were answered."""
        self._reading: asyncio.Task[None]

    async def start(self, source: str, **environ: str) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", source, env=self.environ | environ,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.output += line.decode()

    async def readyz(self) -> dict[str, Any]:
        async with self.session() as client, client.get(f"{self.admin}/readyz") as answer:
            found: dict[str, Any] = {"status": answer.status, **await answer.json()}
            return found

    async def ready(self) -> None:
        async def is_ready() -> bool:
            assert self.process.returncode is None, self.output
            return bool((await self.readyz())["status"] == 200)

        await until(is_ready, f"ready; {self.output}")

    def session(self) -> ClientSession:
        """Each request on a connection of its own: the kernel deals out connections, not requests."""
        return ClientSession(connector=TCPConnector(force_close=True, limit=0))

    async def pids(self) -> set[int]:
        """The workers' processes, as they answer."""
        found: set[int] = set()
        async with self.session() as client:

            async def both() -> bool:
                async with client.get(f"{self.url}/pid") as answer:
                    found.add((await answer.json())["pid"])
                self.asked += 1
                return len(found) == 2

            await until(both, "both workers answer")
        return found

    async def metric(self, name: str) -> float:
        async with self.session() as client, client.get(f"{self.admin}/metrics") as answer:
            text = await answer.text()
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples if one.name == name]
        assert {one.labels["service"] for one in samples} <= {"web"}
        assert all("worker" not in one.labels for one in samples)
        return sum(one.value for one in samples)

    async def idle(self) -> None:
        """Wait until nothing counts as in flight: a worker may answer, and only then come to say so."""

        async def none() -> bool:
            return bool((await self.readyz())["ongoing"] == 0)

        await until(none, "nothing is in flight")

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            code = await self.process.wait()
            await self._reading
        return code

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        async with asyncio.timeout(PATIENCE_S):
            await self._reading  # ends when no worker holds its other end any more
        self.process._transport.close()  # type: ignore[attr-defined]


@pytest.fixture
async def replica(free_port: int, another_port: int) -> AsyncIterator[Replica]:
    made = Replica(free_port, another_port)
    yield made
    await made.close()


@pytest.fixture
def another_port() -> int:
    return ports.free_port()


def libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="ascii")


def state_of(pid: int) -> str:
    """One letter, as in proc(5); Z where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between the file's opening and its reading
        return "Z"


def alive(pid: int) -> bool:
    return state_of(pid) != "Z"


async def test_all_workers_share_the_port_and_are_one_replica(replica: Replica) -> None:
    await replica.start(program())
    await replica.ready()
    pids = await replica.pids()
    assert replica.process.pid not in pids
    async with replica.session() as client:
        answers = await asyncio.gather(*(client.get(f"{replica.url}/pid") for _ in range(40)))
        assert {answer.status for answer in answers} == {200}
    for name in ("pierhead_requests_total", "pierhead_request_duration_seconds_count"):

        async def all_counted(name: str = name) -> bool:
            return await replica.metric(name) == replica.asked + 40

        await until(all_counted, f"{name} is {replica.asked + 40}: of a worker that is late it shows what it had")
    assert await replica.metric("pierhead_replica_ready") == 1
    assert await replica.metric("pierhead_workers_ready") == 2


async def test_the_supervisor_is_another_program(replica: Replica) -> None:
    """It has none of what the service has imported, nor gRPC: nothing in it can break, or grow, with them."""
    await replica.start(program(before="import decimal; KEPT = b'only the service has this' * 1000"))
    await replica.ready()
    maps = libraries(replica.process.pid)
    assert "cygrpc" not in maps
    assert "aiohttp" not in maps
    assert "_decimal" not in maps


async def test_ready_only_when_all_are(replica: Replica, tmp_path: Path) -> None:
    first, go = tmp_path / "first", tmp_path / "go"
    wait = f"""
def late():
    try:
        pathlib.Path({str(first)!r}).touch(exist_ok=False)
    except FileExistsError:
        while not pathlib.Path({str(go)!r}).exists():
            time.sleep(0.01)
"""
    await replica.start(program("asyncio.to_thread(late)", before=wait))

    async def half() -> bool:
        return bool((await replica.readyz())["detail"] == "1 of 2 workers is ready")

    await until(half, "one is ready")
    assert (await replica.readyz())["state"] == "starting"
    go.touch()
    await replica.ready()


async def test_what_all_have_in_flight_is_bounded_together(replica: Replica, tmp_path: Path) -> None:
    """However the kernel deals out the connections."""
    go = tmp_path / "go"
    await replica.start(program(), PIERHEAD_MAX_ONGOING_REQUESTS="6")
    await replica.ready()
    async with replica.session() as client:
        held = [asyncio.ensure_future(client.post(f"{replica.url}/work?until={go}")) for _ in range(6)]

        async def full() -> bool:
            return bool((await replica.readyz())["ongoing"] == 6)

        await until(full, "six are in flight")
        async with client.get(f"{replica.url}/pid") as answer:
            assert answer.status == 503
            assert "already works on 6 requests" in (await answer.json())["error"]["message"]
        go.touch()
        assert [(await request).status for request in held] == [200] * 6
    await replica.idle()


async def test_a_killed_worker_takes_only_its_own_requests_along(replica: Replica, tmp_path: Path) -> None:
    await replica.start(program())
    await replica.ready()
    counted = 0.0
    for killed in (1, 2):  # twice in a row
        go = tmp_path / f"go-{killed}"
        victim, other = await replica.pids()
        counted = max(counted, await replica.metric("pierhead_requests_total"))
        async with replica.session() as client:

            async def ask(client: ClientSession = client, go: Path = go) -> int | None:
                try:
                    async with client.post(f"{replica.url}/work?until={go}") as answer:
                        return int((await answer.json())["pid"])
                except aiohttp.ClientError:
                    return None

            load = [asyncio.ensure_future(ask()) for _ in range(40)]

            async def all_in_flight() -> bool:
                return bool((await replica.readyz())["ongoing"] == 40)

            await until(all_in_flight, "all are in flight")
            os.kill(victim, signal.SIGKILL)

            def gone(victim: int = victim) -> bool:
                return not alive(victim)

            await until(gone, "it has ended")
            go.touch()
            answered = [pid for pid in await asyncio.gather(*load) if pid is not None]
        assert set(answered) == {other}, "the others' requests are answered"
        assert 0 < len(answered) < 40
        assert (await replica.readyz())["state"] == "ready", "the port is served"
        assert await replica.metric("pierhead_requests_total") >= counted, "totals never go down"

        async def back() -> bool:
            return await replica.metric("pierhead_workers_ready") == 2

        await until(back, "another one is started")
        assert await replica.metric("pierhead_worker_ends_total") == killed
        await replica.idle()  # the dead one's requests count no more
    await until(lambda: replica.output.count("was ended by signal SIGKILL; it is started again in") == 2, "it says so")


async def test_a_drain_loses_no_request(replica: Replica, tmp_path: Path) -> None:
    go = tmp_path / "go"
    await replica.start(program())
    await replica.ready()
    pids = await replica.pids()
    async with replica.session() as client:
        held = [asyncio.ensure_future(client.post(f"{replica.url}/work?until={go}")) for _ in range(40)]

        async def all_in_flight() -> bool:
            return bool((await replica.readyz())["ongoing"] == 40)

        await until(all_in_flight, "all are in flight")
        replica.process.terminate()

        async def draining() -> bool:
            return bool((await replica.readyz())["state"] == "draining")

        await until(draining, "it says so")
        go.touch()
        assert [(await request).status for request in held] == [200] * 40
    assert await replica.ended() == 0
    assert not any(alive(pid) for pid in pids)
    assert replica.output.count("behind") == 2, "what stands behind serve() is run by each worker"


async def test_told_twice_it_stops_now(replica: Replica, tmp_path: Path) -> None:
    await replica.start(program())
    await replica.ready()
    async with replica.session() as client:
        held = asyncio.ensure_future(client.post(f"{replica.url}/work?until={tmp_path / 'never'}"))

        async def in_flight() -> bool:
            return bool((await replica.readyz())["ongoing"] == 1)

        await until(in_flight, "it is in flight")
        replica.process.terminate()
        await until(lambda: replica.output.count("draining: ") == 2, "both workers drain")
        replica.process.terminate()
        assert await replica.ended() == 0
        with pytest.raises(aiohttp.ClientError):
            await held


async def test_workers_do_not_outlive_their_supervisor(replica: Replica) -> None:
    await replica.start(program())
    await replica.ready()
    pids = await replica.pids()
    replica.process.kill()
    await until(lambda: not any(alive(pid) for pid in pids), "the workers have ended")
    assert await replica.ended() == -signal.SIGKILL  # and all that they wrote has been read
    assert "the supervisor of this worker is gone" in replica.output


async def test_a_worker_that_is_ill_makes_the_replica_so(replica: Replica, tmp_path: Path) -> None:
    """It goes on getting its share of the connections."""
    ill = tmp_path / "ill"
    check = f"""
import pierhead.replica.health
async def check():
    path = pathlib.Path({str(ill)!r})
    if path.exists() and path.read_text() == str(os.getpid()):
        raise RuntimeError("the GPU fell off the bus")
original = pierhead.Settings.from_env
import dataclasses
pierhead.Settings.from_env = lambda *a: dataclasses.replace(original(*a), health_period_s=0.01)
"""
    await replica.start("import pierhead\n" + program("check()", before=check))
    await replica.ready()
    victim, _ = await replica.pids()
    ill.write_text(str(victim))

    async def told() -> bool:
        found = await replica.readyz()
        return found["status"] == 503 and "the GPU fell off the bus" in found["detail"]

    await until(told, "it says why")
    ill.unlink()
    await replica.ready()


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (
            "from pierhead import serve\nfrom pierhead.echo.v1.echo_pb2_grpc import EchoServicer as E\nserve(E())",
            2,
            (
                "PIERHEAD_WORKERS: expected 1 for a service that takes gRPC calls, found 2: callers keep one "
                "connection to each replica, so one worker would get all of their calls; run more replicas in its place"
            ),
        ),
        (
            "from pierhead import serve\nclass P:\n    async def check_health(self): ...\nserve(P())",
            2,
            "PIERHEAD_WORKERS: expected 1 where no HTTP is served, found 2",
        ),
        (
            "import asyncio, aiohttp.web, pierhead\nasyncio.run(pierhead.serve_async(aiohttp.web.Application()))",
            1,
            "workers are processes of serve()",
        ),
        (program("asyncio.sleep(0)", before="sys.exit(3)"), 3, ""),
        (program("missing()"), 1, "before the replica was ready"),
    ],
)
async def test_what_cannot_be_started(replica: Replica, source: str, code: int, words: str) -> None:
    await replica.start(source)
    assert await replica.ended() == code
    assert words in replica.output


async def test_a_program_that_was_piped_in_cannot_be_started_again(replica: Replica) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, env=replica.environ, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    _, told = await process.communicate(program().encode())
    assert process.returncode == 2, told.decode()
    assert b"piped into Python, cannot be started again; put it in a file" in told
    await replica.start("")


async def test_a_port_that_another_has_is_told(replica: Replica, free_port: int) -> None:
    await replica.start(program())
    await replica.ready()
    second = Replica(free_port, ports.free_port())
    await second.start(program())
    assert await second.ended() == 2
    assert f"PIERHEAD_PORT: cannot listen on 127.0.0.1:{free_port}" in second.output
    await second.close()


class TestSupervisor:
    """In this very process, where a test can shorten its patience."""

    @pytest.fixture
    async def supervised(self, replica: Replica) -> AsyncIterator[tuple[Supervisor, Replica]]:
        settings = Settings(service="web", host="127.0.0.1", port=0, admin_port=0, workers=2, drain_timeout_s=5)
        supervisor = Supervisor(settings, [sys.executable, "-c", program()], replica.environ)
        task = asyncio.create_task(supervisor.run())
        await until(lambda: supervisor.readiness().state == "ready", "ready")
        replica.url = f"http://127.0.0.1:{supervisor.http_port}"
        replica.admin = f"http://127.0.0.1:{supervisor.admin_port}"
        yield supervisor, replica
        supervisor.stop()
        async with asyncio.timeout(PATIENCE_S):
            assert await task == 0
        await replica.start("")

    async def test_a_worker_that_hangs_is_killed_and_replaced(
        self, supervised: tuple[Supervisor, Replica], caplog: pytest.LogCaptureFixture
    ) -> None:
        supervisor, replica = supervised
        victim, other = await replica.pids()
        os.kill(victim, signal.SIGSTOP)
        await until(lambda: state_of(victim) == "T", "it stands still")
        # For long by now, it seems. With a shorter patience a busy machine could have the other one killed as well.
        (seat,) = [seat for seat, worker in supervisor._workers.items() if worker.process.pid == victim]
        supervisor._board.beat(seat, time.monotonic() - HUNG_S)
        supervisor._looking_since -= HUNG_S
        await until(lambda: not alive(victim), "it is killed")
        assert f"(process {victim}) has not run its event loop for" in caplog.text
        replaced = await until(replica.pids, "two answer again")
        assert other in replaced
        assert victim not in replaced

    async def test_a_worker_that_is_busy_keeps_its_last_metrics(
        self, supervised: tuple[Supervisor, Replica], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pierhead.workers.supervisor.SCRAPE_S", PATIENCE_S)  # nobody is late
        _, replica = supervised
        victim, _ = await replica.pids()
        before = await replica.metric("pierhead_requests_total")
        assert before == replica.asked
        os.kill(victim, signal.SIGSTOP)
        try:
            with monkeypatch.context() as soon:
                soon.setattr("pierhead.workers.supervisor.SCRAPE_S", 0.05)
                assert await replica.metric("pierhead_requests_total") == before
        finally:
            os.kill(victim, signal.SIGCONT)
        async with replica.session() as client, client.get(f"{replica.url}/pid"):
            pass

        async def counted() -> bool:
            return await replica.metric("pierhead_requests_total") == before + 1

        await until(counted, "it answers again")

    async def test_many_may_ask_for_metrics_at_once(
        self, supervised: tuple[Supervisor, Replica], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pierhead.workers.supervisor.SCRAPE_S", PATIENCE_S)  # nobody is late
        _, replica = supervised
        await replica.pids()
        counts = await asyncio.gather(*(replica.metric("pierhead_requests_total") for _ in range(20)))
        assert len(set(counts)) == 1
        assert counts[0] >= 2

    async def test_one_that_does_not_end_is_killed(
        self,
        supervised: tuple[Supervisor, Replica],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr("pierhead.workers.supervisor.KILL_AFTER_S", 0.1)
        supervisor, replica = supervised
        supervisor.settings = Settings(drain_timeout_s=0)
        victim, _ = await replica.pids()
        os.kill(victim, signal.SIGSTOP)
        supervisor.stop()
        await until(lambda: not alive(victim), "it is killed")
        assert "does not end; it is killed" in caplog.text


CONFIGURED = """
import os
from aiohttp import web
from pierhead import serve

class Part:
    greeting = "none"
    def reconfigure(self, user_config):
        if user_config["greeting"] == "bad":
            raise ValueError("no such greeting")
        self.greeting = user_config["greeting"]

part = Part()
async def greet(request):
    return web.json_response({"pid": os.getpid(), "greeting": part.greeting})
app = web.Application()
app.add_routes([web.get("/pid", greet)])
serve(app, part)
"""


async def test_every_worker_gets_the_user_config_those_that_come_later_too(replica: Replica) -> None:
    await replica.start(CONFIGURED, PIERHEAD_USER_CONFIG='{"greeting": "first"}')
    await replica.ready()
    assert await greetings(replica) == {"first"}

    assert (await reconfigure(replica, '{"greeting": "second"}'))["wanted"] == digest('{"greeting": "second"}')
    await until(lambda: applied(replica, '{"greeting": "second"}'), "both workers have it")
    assert await greetings(replica) == {"second"}

    dead = min(await replica.pids())
    os.kill(dead, signal.SIGKILL)
    await until(lambda: replaced(replica, dead), "another worker came")
    assert await greetings(replica) == {"second"}, "not what was there at the start"

    await reconfigure(replica, '{"greeting": "bad"}')
    refusal = "worker 1: Part.reconfigure raised ValueError: no such greeting"
    await until(lambda: refuses(replica, refusal), "both refuse it; the first is quoted")
    assert (await replica.readyz())["state"] == "ready"
    assert await greetings(replica) == {"second"}
    replica.process.send_signal(signal.SIGTERM)
    assert await replica.ended() == 0, replica.output


async def greetings(replica: Replica) -> set[str]:
    """What both workers say."""
    found: dict[int, str] = {}
    async with replica.session() as client:

        async def both() -> bool:
            async with client.get(f"{replica.url}/pid") as answer:
                said = await answer.json()
            found[said["pid"]] = said["greeting"]
            return len(found) == 2

        await until(both, "both workers answer")
    return set(found.values())


async def reconfigure(replica: Replica, text: str) -> dict[str, Any]:
    async with replica.session() as client, client.put(f"{replica.admin}/user-config", data=text) as answer:
        assert answer.status == 200
        found: dict[str, Any] = (await answer.json())["user_config"]
        return found


async def applied(replica: Replica, text: str) -> bool:
    return bool((await replica.readyz())["user_config"]["applied"] == digest(text))


async def refuses(replica: Replica, error: str) -> bool:
    return bool((await replica.readyz())["user_config"]["error"] == error)


async def replaced(replica: Replica, dead: int) -> bool:
    """Two workers answer, none of them the dead one."""
    return dead not in await replica.pids()

"""`python -m pierhead dev`: a project on the disk that is edited while it serves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import ClientSession
from pierhead.runner import processes
from pierhead.runner.processes import ProcessService, ServiceFacts, draw_ports
from pierhead.tasks import end_tasks

from tests.harness.waiting import PATIENCE_S, until

SHOP = """
from aiohttp import web
from pierhead import Service, endpoint
from scorer import Scorer


class Shop(Service, route="/shop"):
    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    @endpoint("GET", "/shop")
    async def get(self, request: web.Request) -> web.Response:
        return web.json_response(await self.scorer.score(int(request.query["user"])))

    @endpoint("GET", "/shop/wait")
    async def wait(self, request: web.Request) -> web.Response:
        await self.scorer.wait()
        return web.json_response(await self.scorer.score(1))

    async def aclose(self) -> None:
        print("the shop is closed", flush=True)


shop = Shop.bind(Scorer.bind())
"""

SCORER = """
import asyncio
import pathlib
from pierhead import Service


class Scorer(Service):
    def __init__(self) -> None:
        self.by = 2

    async def score(self, user: int) -> float:
        return user / self.by

    async def wait(self) -> None:
        pathlib.Path("waits").touch()
        while not pathlib.Path("go").exists():
            await asyncio.sleep(0.01)
"""


class Dev:
    """The command in a process of its own, and what it has said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = ""
        self.process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self, *arguments: str) -> None:
        await self.run("dev", "--port", "0", "--grpc-port", "0", *arguments)

    async def run(self, *words: str) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pierhead", *words,
            cwd=self.folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=_environment(),
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.said += line.decode()

    async def says(self, words: str, times: int = 1) -> str:
        """Wait until it has said something so many times; return all that it has said."""
        assert self.process is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self.said.count(words) < times:
                    assert self._reading is not None
                    assert not self._reading.done(), f"it ended without {words!r}:\n{self.said}"
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"it did not say {words!r}:\n{self.said}") from None
        return self.said

    async def serves(self, route: str = "/shop") -> str:
        """Wait for the first version; return the front's address."""
        said = await self.says(f"{route} ")
        [line] = [line for line in said.splitlines() if f"{route} " in line]
        self.url = line.split()[0].removesuffix(route)
        return self.url

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    async def ended(self) -> int:
        assert self.process is not None
        assert self._reading is not None
        async with asyncio.timeout(PATIENCE_S):
            await self._reading
            return await self.process.wait()

    async def close(self) -> None:
        if self.process is not None:
            if self.process.returncode is None:
                self.process.send_signal(signal.SIGTERM)
            await self.ended()
            self.process._transport.close()  # type: ignore[attr-defined]


def _environment() -> dict[str, str]:
    paths = [path for path in sys.path if path and Path(path).exists()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
async def dev(tmp_path: Path) -> AsyncIterator[Dev]:
    made = Dev(tmp_path)
    made.write("shop.py", SHOP)
    made.write("scorer.py", SCORER)
    yield made
    await made.close()


async def get(client: ClientSession, url: str) -> tuple[int, Any]:
    async with client.get(url) as response:
        return response.status, json.loads(await response.text())


async def becomes(client: ClientSession, url: str, wanted: object) -> None:
    """Wait until a request gets an answer; every one before it has to be an answer, too."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status, found = await get(client, url)
            assert status == 200, found
            if found == wanted:
                return
            await asyncio.sleep(0.01)


class TestReload:
    async def test_a_saved_file_is_served_and_a_broken_one_is_not(self, dev: Dev, client: ClientSession) -> None:
        await dev.start("shop:shop")
        url = f"{await dev.serves()}/shop?user=6"
        assert await get(client, url) == (200, 3.0)
        # Both saves have one size, and may have one second.
        dev.write("scorer.py", SCORER.replace("self.by = 2", "self.by = 3"))
        await becomes(client, url, 2.0)
        dev.write("scorer.py", SCORER.replace("self.by = 2", "self.by = 6"))
        await becomes(client, url, 1.0)
        await dev.says("version 3 serves after")

        dev.write("scorer.py", SCORER.replace("self.by = 2", "raise RuntimeError('no weights')"))
        said = await dev.says("version 3 still serves; the next save loads it again")
        assert "shop:shop could not be loaded: RuntimeError: no weights (scorer.py:9)" in said
        assert said.index("Traceback") < said.index('scorer.py", line 9') < said.index("could not be loaded")
        assert "pierhead/dev" not in said, "the traceback begins with the user's code"
        assert await get(client, url) == (200, 1.0)
        dev.write("scorer.py", "def broken(:\n")
        await dev.says("could not be loaded: SyntaxError", 1)
        assert await get(client, url) == (200, 1.0)
        dev.write("scorer.py", SCORER.replace("self.by = 2", "self.by = 1"))
        await becomes(client, url, 6.0)

    async def test_a_request_in_flight_ends_in_the_version_that_has_it(self, dev: Dev, client: ClientSession) -> None:
        await dev.start("shop:shop")
        url = f"{await dev.serves()}/shop"
        waiting = asyncio.create_task(get(client, f"{url}/wait"))
        await until((dev.folder / "waits").exists, "a method waits")
        dev.write("scorer.py", SCORER.replace("self.by = 2", "self.by = 4"))
        await becomes(client, f"{url}?user=4", 1.0)
        (dev.folder / "go").touch()
        assert await waiting == (200, 0.5)
        await dev.says("the shop is closed")

    async def test_former_versions_are_freed(self, dev: Dev, client: ClientSession) -> None:
        """Services hold weights."""
        counted = SCORER.replace("self.by = 2", "self.by = 1; builtins.made = _made(self)")
        counted = counted.replace("return user / self.by", "return sum(each() is not None for each in builtins.made)")
        counted = "import builtins, weakref\n" + counted + (
            "\ndef _made(one: object) -> list[object]:\n"
            "    return [*getattr(builtins, 'made', []), weakref.ref(one)]\n"
        )  # fmt: skip
        dev.write("scorer.py", counted)
        await dev.start("shop:shop")
        url = f"{await dev.serves()}/shop?user=6"
        for version in (2, 3):
            assert (await get(client, url))[0] == 200
            dev.write("scorer.py", counted + "#" * version)
            await dev.says(f"version {version} serves")
        await dev.says("the shop is closed", 2)
        await becomes(client, url, 1)

    async def test_code_that_blocks_every_service_is_named(self, dev: Dev, client: ClientSession) -> None:
        dev.write("scorer.py", SCORER.replace("await asyncio.sleep(0.01)", "__import__('time').sleep(0.01)"))
        await dev.start("shop:shop")
        url = await dev.serves()
        asking = asyncio.create_task(get(client, f"{url}/shop/wait"))
        await dev.says("the event loop has been blocked for ")
        await dev.says("scorer.py:17 Scorer.wait")
        (dev.folder / "go").touch()
        assert await asking == (200, 0.5)

    async def test_a_start_that_fails_waits_for_a_save(self, dev: Dev, client: ClientSession) -> None:
        dev.write("shop.py", SHOP.replace("from scorer import", "from scorers import"))
        await dev.start("shop:shop")
        await dev.says("ModuleNotFoundError: No module named 'scorers' (shop.py:4)")
        await dev.says("waiting for a save")
        dev.write("scorers.py", SCORER)
        assert await get(client, f"{await dev.serves()}/shop?user=6") == (200, 3.0)

    async def test_a_file_that_appears_while_a_start_fails_is_a_save(self, dev: Dev, client: ClientSession) -> None:
        writes = (
            "import pathlib\n"
            "if not pathlib.Path('scorers.py').exists():\n"
            "    pathlib.Path('scorers.py').write_text(pathlib.Path('scorer.py').read_text())\n"
            "    raise RuntimeError('too early')\n"
        )
        dev.write("scorer.py", SCORER)
        dev.write("shop.py", writes + SHOP.replace("from scorer import", "from scorers import"))
        await dev.start("shop:shop")
        assert await get(client, f"{await dev.serves()}/shop?user=6") == (200, 3.0)
        assert "RuntimeError: too early (shop.py:4)" in dev.said


class TestEnd:
    @pytest.mark.parametrize(("command", "module"), [("dev", "grpc"), ("build", "shop")])
    async def test_ctrl_c_during_an_import_is_quiet(self, dev: Dev, command: str, module: str) -> None:
        dev.write(f"{module}.py", "import time\nprint('imports', flush=True)\ntime.sleep(600)\n")
        await dev.run(command, "shop:shop")
        await dev.says("imports\n")
        assert dev.process is not None
        dev.process.send_signal(signal.SIGINT)
        assert (await dev.ended(), dev.said) == (130, "imports\n")

    async def test_ctrl_c_closes_the_services(self, dev: Dev) -> None:
        await dev.start("shop:shop")
        await dev.serves()
        assert dev.process is not None
        dev.process.send_signal(signal.SIGINT)
        assert await dev.ended() == 0
        assert "the shop is closed" in dev.said
        assert "Traceback" not in dev.said

    async def test_ctrl_c_waits_for_no_method_that_blocks(self, dev: Dev, client: ClientSession) -> None:
        blocking = SCORER.replace("async def wait", "def wait").replace("await asyncio.sleep(0.01)", "time.sleep(600)")
        dev.write("scorer.py", f"import time\n{blocking}")
        await dev.start("shop:shop")
        url = await dev.serves()
        asking = asyncio.create_task(client.get(f"{url}/shop/wait").__aenter__())
        await until((dev.folder / "waits").exists, "a method waits")
        assert dev.process is not None
        dev.process.send_signal(signal.SIGINT)
        assert await dev.ended() == 0
        assert "the shop is closed" in dev.said
        await asyncio.wait([asking])

    async def test_a_taken_port(self, dev: Dev) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = str(other.getsockname()[1])
            await dev.start("shop:shop", "--port", port)
            assert await dev.ended() == 2
        assert dev.said == f"--port {port} on 127.0.0.1 cannot be opened: Address already in use; choose another one\n"
        dev.said = ""
        await dev.start("shop:shop", "--host", "300.1.1.1")
        assert await dev.ended() == 2
        assert dev.said.startswith("--host 300.1.1.1: ")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("shop:SHOP", "shop:SHOP: expected module:name of a Service, or of what its bind() returned, found 'a text'"),
        ("shop:shop(x=1)", "shop:shop(x=1): shop is no function that builds an application, so it takes no arguments"),
        ("shop:Shop", "shop:Shop: Shop.bind(): missing a required argument: 'scorer'"),
        ("circle:circle", "services use each other in a circle: shop -> scorer -> shop"),
    ],
)
async def test_what_is_no_application_is_one_message(dev: Dev, target: str, words: str) -> None:
    dev.write("shop.py", f"{SHOP}\nSHOP = 'a text'\n")
    dev.write(
        "circle.py", "from shop import Scorer, Shop\nscorer = Scorer.bind()\ncircle = Shop.bind(scorer)\n"
        "scorer.kwargs = {'shop': circle}\n",
    )  # fmt: skip
    await dev.start(target)
    said = await dev.says("waiting for a save")
    assert words in said
    assert "Traceback" not in said


@pytest.mark.parametrize("processes", [[], ["--processes"]])
async def test_what_was_typed_wrongly_ends_at_once_and_waits_after_a_start(dev: Dev, processes: list[str]) -> None:
    for target, words in (
        ("shp:shop", f"there is no module shp in {dev.folder}"),
        ("shop:shpo", "expected module:name of a Service, or of what its bind() returned; shop has no shpo"),
    ):
        dev.said = ""
        await dev.start(target, *processes)
        assert (await dev.ended(), dev.said) == (2, f"pierhead dev: {target}: {words}\n")
    await dev.start("shop:shop", *processes)
    await dev.serves()
    dev.write("shop.py", SHOP.replace("shop = Shop", "shpo = Shop"))
    await dev.says("shop has no shop\nversion 1 still serves")


async def test_a_compose_file_s_words_come_over_the_class_s(dev: Dev, client: ClientSession) -> None:
    pytest.importorskip("yaml")
    dev.write("compose.yaml", "services: {shop: {image: x, x-serve: {route: /, request_timeout_s: 5}}, db: {image: y}}")
    await dev.start("shop:shop", "-f", "compose.yaml")
    url = await dev.serves("/")
    assert await get(client, f"{url}/shop?user=6") == (200, 3.0)
    dev.write("compose.yaml", "services: {shop: {image: x, x-serve: {route: /other}}}")
    await dev.says("version 2 serves after")
    assert (await get(client, f"{url}/shop?user=6"))[0] == 404


async def test_each_service_in_a_process_of_its_own(dev: Dev, client: ClientSession) -> None:
    dev.write("scorer.py", SCORER.replace("return user", "return __import__('os').getpid() + 0 * user"))
    # Two of one name in one interpreter are an error of prometheus_client's.
    counts = "from prometheus_client import Counter\nCOUNT = Counter('scores', 'Scores.')\n"
    dev.write("scorer.py", counts + (dev.folder / "scorer.py").read_text())
    await dev.start("shop:shop", "--processes")
    url = f"{await dev.serves()}/shop?user=6"
    assert dev.process is not None
    status, process = await get(client, url)
    assert (status, process == dev.process.pid) == (200, False)
    dev.write("scorer.py", counts + SCORER)
    await becomes(client, url, 3.0)
    dev.write("scorer.py", SCORER.replace("self.by = 2", "raise RuntimeError('no weights')"))
    await dev.says("version 2 still serves")
    dev.write("scorer.py", SCORER.replace("import asyncio", "import asyncioo"))
    await dev.says("No module named 'asyncioo'")
    await dev.says("version 2 still serves", 2)
    assert await get(client, url) == (200, 3.0)


def test_no_two_processes_get_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw gives the same ports, as any draw may once the former ones were given back."""
    monkeypatch.setattr(processes, "free_ports", lambda count: range(9001, 9001 + count))
    facts = ServiceFacts({}, {}, has_http=True, grpc_service="")
    names = ("shop", "scorer", "ranker")
    services = [ProcessService(name, facts, {}, "shop:shop", lambda _: None) for name in names]
    draw_ports(services)
    ports = [port for service in services for replica in service.ports for port in replica]
    assert sorted(ports) == list(range(9001, 9010))


@pytest.mark.parametrize(
    ("answers", "is_ill"),
    [
        ([None, 200], False),
        ([None, None, 200, None, None, 200], False),
        ([None, None, None], True),
        ([200, 503], True),
    ],
)
async def test_a_replica_is_ill_by_its_answer_or_by_three_that_do_not_come(
    answers: list[int | None], is_ill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its probes are answered in turn; None = not in time, which is short for those alone."""
    monkeypatch.setattr(processes, "WATCH_S", 0.01)
    is_ready = processes._is_ready
    left = iter(answers)
    status: int | None = None
    all_answered = asyncio.Event()

    async def probe(port: int) -> bool | None:
        nonlocal status
        try:
            status = next(left)
        except StopIteration:
            all_answered.set()
            return await asyncio.Event().wait()
        monkeypatch.setattr(processes, "PROBE_S", 0.05 if status is None else PATIENCE_S)
        return await is_ready(port)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if status is not None:
            writer.write(f"HTTP/1.1 {status} x\r\n\r\n".encode())
        await reader.read()  # until the probe has gone
        writer.close()

    monkeypatch.setattr(processes, "_is_ready", probe)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        ports = (0, 0, server.sockets[0].getsockname()[1])
        facts = ServiceFacts({}, {}, has_http=True, grpc_service="")
        service = ProcessService("shop", facts, {}, "shop:shop", lambda _: None)
        replica = processes.ServiceProcess("shop-1", service, ports)
        replica._process = Mock(returncode=None, wait=asyncio.Event().wait)
        watching = asyncio.create_task(replica.ill())
        others = asyncio.create_task(all_answered.wait())
        await asyncio.wait([watching, others], return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        assert (watching.done(), others.done()) == (is_ill, not is_ill)
        await end_tasks(watching, others)

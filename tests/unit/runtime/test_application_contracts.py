"""The contracts of an application: what an image carries, what a replica tells, and whether two versions can meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import ClientSession
from google.protobuf.message import DecodeError
from pierhead.classes.application import application_of, told_by, write
from pierhead.classes.compare import incompatible
from pierhead.classes.parts import made
from pierhead.contract.v1.application_pb2 import Application

from tests.harness.applications import GROWN, SHRUNK, contract, shop
from tests.unit.runtime.harness import Cluster, EchoService

BEFORE = contract()


def words(new: bytes, service: str, old: bytes = BEFORE) -> list[str]:
    return [str(change) for change in incompatible(old, new, service)]


def test_an_image_carries_all_services_and_a_replica_tells_its_own_and_those_that_it_calls() -> None:
    carried = {each.name: each for each in application_of(shop()).services}
    assert {name: list(each.calls) for name, each in carried.items()} == {
        "page": ["shop"],
        "shop": ["ranker"],
        "ranker": [],
    }
    assert {name: list(each.grpc_services) for name, each in carried.items()} == {
        "page": [],
        "shop": ["shop.Shop"],
        "ranker": ["shop.Ranker"],
    }
    told = Application.FromString(told_by([shop()], "shop"))
    assert [each.name for each in told.services] == ["shop", "ranker"]
    assert told_by([EchoService()], "echo") == b""
    ranker = made([shop()], "ranker")
    assert told_by(ranker, "ranker") == contract(service="ranker"), "an object tells what its class says"


@pytest.mark.parametrize("service", ["page", "shop", "ranker"])
@pytest.mark.parametrize("told", ["", "told"], ids=["images", "replicas"])
def test_versions_that_meet(service: str, told: str) -> None:
    of = service if told else ""
    assert words(contract(GROWN, of), service, contract(service=of)) == []
    assert words(contract(service=of), service, contract(service=of)) == []


def test_a_change_is_one_of_the_service_and_of_its_callers() -> None:
    changes = words(contract(SHRUNK), "ranker")
    assert changes[0].startswith("shop.Ranker.rank(user): was removed")
    assert words(contract(SHRUNK), "shop") == changes
    assert words(contract(SHRUNK, "shop"), "shop", contract(service="shop")) == changes
    assert words(contract(SHRUNK), "page") == [], "it calls the shop alone"


def test_a_service_that_is_another_one_now() -> None:
    gone = "the service was removed, or renamed"
    assert words(contract(module="store"), "ranker") == [f"shop.Ranker: {gone}"]
    assert words(contract(module="store"), "shop") == [f"shop.Ranker: {gone}", f"shop.Shop: {gone}"]
    assert words(contract(module="store"), "page") == [f"shop.Shop: {gone}"], "it has no methods of its own"
    assert words(contract(ranker="Sorter"), "ranker") == [f"shop.Ranker: {gone}"]
    assert words(contract(ranker="Sorter"), "shop") == [], "it calls another service, and the former one not any more"
    assert words(contract(), "sorter") == [], "the old version did not have it"


def test_what_is_no_contract_is_an_error() -> None:
    with pytest.raises(DecodeError):
        incompatible(BEFORE, b"\xff", "ranker")
    bare = Application.FromString(BEFORE)
    del bare.files.file[:]
    with pytest.raises(KeyError):
        incompatible(BEFORE, bare.SerializeToString(), "ranker")


def test_the_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "share" / "contract.binpb"
    write(shop(), path)
    assert path.read_bytes() == contract()


def run(directory: Path, *arguments: str, command: str = "contract") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    words = [sys.executable, "-m", "pierhead", command, *arguments]
    return subprocess.run(
        words, cwd=directory, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def test_the_command_writes_it(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from pierhead import Service\n"
        "class App(Service):\n"
        "    async def go(self, x: int) -> int: ...\n"
        "app = App.bind()\n"
    )
    done = run(tmp_path, "app:app", "--write", "made/contract.binpb")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    [service] = Application.FromString((tmp_path / "made" / "contract.binpb").read_bytes()).services
    assert (service.name, list(service.grpc_services)) == ("app", ["app.App"])
    done = run(tmp_path, "app:App", "--write", "app.py/contract.binpb")
    assert done.returncode == 1
    assert done.stderr.startswith("app.py/contract.binpb cannot be written: ")
    assert run(tmp_path, "app:other").returncode == 2
    (tmp_path / "broken.py").write_text("import app\ndef broken(:\n")
    done = run(tmp_path, "broken:app")
    assert done.returncode == 1
    first, *_, last = done.stderr.splitlines()
    assert first == f'  File "{tmp_path}/broken.py", line 2', "no frame of the machinery"
    assert last == "SyntaxError: invalid syntax (broken.py:2)"


def test_a_constructor_that_raises_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from pierhead import Service\n"
        "class App(Service):\n"
        "    def __init__(self) -> None:\n"
        "        raise RuntimeError('no such model')\n"
    )
    done = run(tmp_path, "app:App", command="serve")
    assert done.returncode == 1
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["message"] == "the service could not be served: RuntimeError: no such model (app.py:4)"
    assert "Traceback" in last["error"]


async def test_a_replica_tells_its_contract_on_its_admin_port(cluster: Cluster) -> None:
    told = told_by([shop()], "ranker")
    server = await cluster.start(*made([shop()], "ranker"), service="ranker", contract=told)
    async with ClientSession(f"http://127.0.0.1:{server.admin_port}") as client, client.get("/contract") as answer:
        assert (answer.status, answer.content_type) == (200, "application/x-protobuf")
        assert await answer.read() == told
    without = await cluster.start(EchoService())
    async with ClientSession(f"http://127.0.0.1:{without.admin_port}") as client, client.get("/contract") as answer:
        assert answer.status == 404

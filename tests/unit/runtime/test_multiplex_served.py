"""Calls for models find the replicas that hold them: two real replicas in processes of their own, and one caller."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from pierhead import Settings, handle
from pierhead.calls.clients import Clients
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.request import MODEL_KEY

from tests.harness.ports import free_ports
from tests.unit.runtime.harness import Cluster, echo, until

REPLICA = """
import asyncio, os
from pierhead import multiplexed, serve
from pierhead.echo.v1.echo_pb2 import EchoReply
from pierhead.echo.v1.echo_pb2_grpc import EchoServicer

class Echo(EchoServicer):
    loads = 0

    @multiplexed(max_num_models_per_replica=3)
    async def get_model(self, model_id):
        self.loads += 1
        return model_id

    async def Echo(self, request, context):
        if request.message == "loads":
            return EchoReply(response=str(self.loads))
        await self.get_model()
        if request.message == "wait":
            await asyncio.sleep(60)
        return EchoReply(response=os.environ["PIERHEAD_REPLICA"])

serve(Echo())
"""


class Caller:
    """Asks two replicas, each of which works on one request at a time."""

    def __init__(self, stub: Any) -> None:
        self.stub = stub

    async def where(self, model_id: str) -> str:
        """The replica that a call for a model went to."""
        return str((await self.stub.Echo(echo("hi"), metadata=((MODEL_KEY, model_id),))).response)


@pytest.fixture
async def caller(cluster: Cluster) -> Caller:
    ports = free_ports(2)
    await asyncio.gather(
        *[
            cluster.process(REPLICA, port, PIERHEAD_REPLICA=name, PIERHEAD_MAX_ONGOING_REQUESTS="1")
            for name, port in zip(("one", "two"), ports, strict=True)
        ]
    )
    addresses = tuple(f"127.0.0.1:{port}" for port in ports)
    Clients.use(Settings(static={"ECHO_CHILD": addresses}))
    pool = Clients.current().pool("echo-child", "lane")
    await until(lambda: sum(replica.callable for replica in pool.replicas()) == 2, "both can be called")
    return Caller(handle(EchoStub, "echo-child"))


async def test_a_model_stays_where_it_is_and_the_next_goes_where_fewest_are(caller: Caller) -> None:
    homes = {model_id: await caller.where(model_id) for model_id in "abcd"}
    assert sorted(homes.values()) == ["one", "one", "two", "two"]
    rng = Random(7)
    for model_id in rng.choices("abcd", k=40):
        assert await caller.where(model_id) == homes[model_id]

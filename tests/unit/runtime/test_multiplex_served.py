"""Calls for models find the replicas that hold them: two real replicas in processes of their own, and one caller."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from pierhead import Settings, handle
from pierhead.calls.clients import Clients
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.request import MODEL_KEY

from tests.harness.ports import free_ports
from tests.unit.runtime.harness import Cluster, echo, until

REPLICA = """
import os
from pierhead import multiplexed, serve
from pierhead.echo.v1.echo_pb2 import EchoReply
from pierhead.echo.v1.echo_pb2_grpc import EchoServicer

class Echo(EchoServicer):
    @multiplexed(max_num_models_per_replica=3)
    async def get_model(self, model_id):
        return model_id

    async def Echo(self, request, context):
        await self.get_model()
        return EchoReply(response=os.environ["PIERHEAD_REPLICA"])

serve(Echo())
"""


async def test_a_model_stays_where_it_is_and_the_next_goes_where_fewest_are(cluster: Cluster) -> None:
    ports = free_ports(2)
    await asyncio.gather(
        *[
            cluster.process(REPLICA, port, PIERHEAD_REPLICA=name, PIERHEAD_MAX_ONGOING_REQUESTS="1")
            for name, port in zip(("one", "two"), ports, strict=True)
        ]
    )
    Clients.use(Settings(static={"ECHO_CHILD": tuple(f"127.0.0.1:{port}" for port in ports)}))
    pool = Clients.current().pool("echo-child", "lane")
    await until(lambda: sum(replica.callable for replica in pool.replicas()) == 2, "both can be called")
    stub: Any = handle(EchoStub, "echo-child")

    async def home(model_id: str) -> str:
        return str((await stub.Echo(echo(), metadata=((MODEL_KEY, model_id),))).response)

    homes = {model_id: await home(model_id) for model_id in "abcd"}
    assert sorted(homes.values()) == ["one", "one", "two", "two"]
    for model_id in Random(7).choices("abcd", k=40):
        assert await home(model_id) == homes[model_id]

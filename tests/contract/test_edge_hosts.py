"""Routes of several hosts, and services for some networks of clients, at the real HAProxy."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from controller.model.actions import WriteKeys
from controller.model.keys import KeySet
from controller.routing.haproxy import HAProxyRouter
from controller.settings import EdgeLimits
from tests.harness.edge import Edge, GrpcReplica, error_of, refusal, service

pytestmark = pytest.mark.engine

SERVICES = (
    service("any", route="/"),
    service("any-below", route="/below"),
    service("shop", route="/", host="shop.example"),
    service("shop-below", route="/below", host="shop.example"),
    service("wild", route="/", host="*.shop.example"),
    service("named", route="/deep", host="a.shop.example"),
)


@pytest.mark.parametrize(
    ("host", "path", "service_name"),
    [
        ("shop.example", "/", "shop"),
        ("shop.example:8000", "/x", "shop"),
        ("SHOP.example", "/", "shop"),
        ("shop.example", "/below", "shop-below"),
        ("shop.example", "/below/x", "shop-below"),
        ("shop.example", "/belowx", "shop"),
        ("a.shop.example", "/", "wild"),
        ("a.b.shop.example", "/below", "wild"),
        ("a.shop.example", "/deep/x", "named"),
        ("ashop.example", "/", "any"),
        ("shop.example.evil", "/", "any"),
        ("other", "/below", "any-below"),
        ("other", "/deep", "any"),
    ],
)
async def test_the_host_decides_before_the_path(edge: Edge, host: str, path: str, service_name: str) -> None:
    await edge.route(*SERVICES)
    for each in SERVICES:
        await edge.serve(each.name, f"{each.name}-1")
    async with edge.http.get(path, headers={"host": host}) as answer:
        assert (await answer.json())["replica"] == f"{service_name}-1"


async def test_a_host_without_a_route_for_everybody_else(edge: Edge) -> None:
    await edge.route(service("shop", route="/", host="shop.example"))
    await edge.serve("shop", "shop-1")
    assert (await error_of(edge, "/"))[1]["code"] == "route_not_found"


NETWORKS = {
    "none of ours": (("192.0.2.0/24",), 403),
    "all": (("0.0.0.0/0",), 200),
    "one of two": (("192.0.2.7/32", "0.0.0.0/0"), 200),
}


@pytest.mark.parametrize(("networks", "status"), NETWORKS.values(), ids=NETWORKS)
async def test_only_clients_of_its_networks_use_a_service(edge: Edge, networks: tuple[str, ...], status: int) -> None:
    await edge.route(service("echo", allow=networks), service("open"))
    for name in ("echo", "open"):
        await edge.serve(name, f"{name}-1")
    async with edge.http.get("/echo", headers={"x-forwarded-for": "192.0.2.7"}) as answer:
        assert answer.status == status, "what a client says of itself does not count"
    async with edge.http.get("/open") as answer:
        assert answer.status == 200
    if status == 403:
        assert (await error_of(edge, "/echo"))[1]["code"] == "address_not_allowed"


async def test_behind_a_trusted_proxy_the_address_that_it_names_counts(edge: Edge) -> None:
    edge.router = HAProxyRouter(edge.run_dir, EdgeLimits(trusted_proxies=("0.0.0.0/0",)))
    await edge.route(service("echo", allow=("192.0.2.0/24",)))
    await edge.serve("echo", "echo-1")
    told = {"192.0.2.7": 200, "10.0.0.1, 192.0.2.7": 200, "192.0.2.7, 10.0.0.1": 403, "nonsense": 403}
    for text, status in told.items():
        async with edge.http.get("/echo", headers={"x-forwarded-for": text}) as answer:
            assert (text, answer.status) == (text, status)
    async with edge.http.get("/echo") as answer:
        assert answer.status == 403, "the proxy's own address"


async def test_addresses_come_before_keys_and_hold_for_grpc(edge: Edge) -> None:
    replica = GrpcReplica(edge.container.gateway)
    await replica.server.start()
    try:
        spec = service(
            "echo", protocol="grpc", route=None, grpc_services=("test.Echo",), auth="key", allow=("192.0.2.0/24",)
        )
        await edge.router.perform(WriteKeys(target="keys", keys=KeySet.of(())))
        await edge.route(spec)
        await edge.add("echo", "echo-1", replica.address)
        async with grpc.aio.insecure_channel(f"{edge.container.ip}:9000") as channel:
            echo: Any = channel.unary_unary("/test.Echo/Unary")
            error = await refusal(echo(b"x"))
        assert (error.code(), error.details()) == (
            grpc.StatusCode.PERMISSION_DENIED, "This address may not call echo. Nothing was done.",
        )  # fmt: skip
    finally:
        await replica.server.stop(None)

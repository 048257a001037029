"""HTTP and gRPC clients over TLS at the real HAProxy, with the operator's certificates (PIERHEAD_TLS=files)."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, TCPConnector
from cryptography import x509
from yarl import URL

from controller.errors import RoutingError
from controller.routing.haproxy import HAProxyRouter
from tests.harness import http2
from tests.harness.certificates import made
from tests.harness.edge import Edge, GrpcReplica, Load, posted, service
from tests.harness.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

NOW = time.time()
A, B = made("a.test", "127.0.0.1", now=NOW), made("b.test", now=NOW)
FILES = {"a.pem": "".join(A), "b.pem": f"{B[1]}{B[0]}"}
PORT = 18443
"""Where clients are said to reach HTTPS; here they come without a published port."""


async def with_tls(edge: Edge, files: Mapping[str, str], *services: Any, port: int = PORT) -> HAProxyRouter:
    edge.router = router = HAProxyRouter(edge.run_dir, https_port=port)
    router.use_certificates(files)
    await edge.route(*services)
    return router


async def connected(
    edge: Edge, name: str = "", protocols: tuple[str, ...] = (), port: int = 8443, **versions: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    for key, value in versions.items():
        setattr(context, key, value)
    return await asyncio.open_connection(edge.container.ip, port, ssl=context, server_hostname=name or None)


async def shown(edge: Edge, name: str = "", port: int = 8443) -> str:
    """Whose certificate a client gets that asks for this name."""
    _, writer = await connected(edge, name, port=port)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        (common,) = x509.load_der_x509_certificate(der).subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        return str(common.value)
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def https(edge: Edge) -> AsyncIterator[ClientSession]:
    url, connector = f"https://{edge.container.ip}:8443", TCPConnector(ssl=False, limit=0)
    async with ClientSession(url, connector=connector) as session:
        yield session


async def test_https_serves_what_http_does_and_http_leads_to_it(edge: Edge) -> None:
    await with_tls(edge, FILES, service("echo"))
    await edge.serve("echo", "echo-1")
    hsts = "max-age=31536000"
    async with https(edge) as session:
        async with session.get("/echo", headers={"host": "a.test:1", "x-forwarded-proto": "http"}) as answer:
            headers = (await answer.json())["headers"]
            assert (answer.status, answer.headers["strict-transport-security"]) == (200, hsts)
            assert (headers["x-forwarded-proto"], headers["x-forwarded-host"]) == ("https", "a.test:1")
        for path, status in {"/-/healthz": 200, "/-/routes": 200, "/nowhere": 404}.items():
            async with session.get(path) as answer:
                assert (answer.status, answer.headers["strict-transport-security"]) == (status, hsts)
    for host, path in {
        "a.test": "/echo",
        "a.test:8000": "/echo/%20?x=1&y=/a:80",
        "[::1]:8000": "/-/routes",
    }.items():
        async with edge.http.post(path, headers={"host": host}, allow_redirects=False) as answer:
            name = host.removesuffix(":8000")
            assert (answer.status, answer.headers["location"]) == (308, f"https://{name}:{PORT}{path}")
            assert "strict-transport-security" not in answer.headers
    async with edge.http.get("/echo", headers={"host": ""}, allow_redirects=False) as answer:
        assert answer.status == 400
    async with edge.http.get("/-/healthz", allow_redirects=False) as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ok"})


async def test_what_an_acme_server_asks_is_answered_for_the_account(edge: Edge) -> None:
    thumbprint = "A-_9" * 10 + "xyz"
    edge.router = HAProxyRouter(edge.run_dir, https_port=PORT, acme=thumbprint)
    edge.router.use_certificates(FILES)
    await edge.route(service("echo", route="/"))
    await edge.serve("echo", "echo-1")
    path = "/.well-known/acme-challenge/"
    answers = {f"{path}tok-EN_1": (200, f"tok-EN_1.{thumbprint}")}
    answers |= {f"{path}{other}": (308, "") for other in ("", "a.b", "a/b", "%61", "a" * 129)}
    for asked, expected in answers.items():
        async with edge.http.get(URL(f"{edge.url}{asked}", encoded=True), allow_redirects=False) as answer:
            assert (answer.status, await answer.text()) == expected, asked
            assert answer.status == 308 or answer.content_type == "text/plain"
    edge.router = HAProxyRouter(edge.run_dir)
    await edge.route(service("echo", route="/"))
    async with edge.http.get(f"{path}token", allow_redirects=False) as answer:
        assert (await answer.json())["path"] == f"{path}token", "without ACME it is the service's"


async def test_the_usual_port_is_not_named(edge: Edge) -> None:
    await with_tls(edge, FILES, service("echo"), port=443)
    async with edge.http.get("/echo", headers={"host": "a.test"}, allow_redirects=False) as answer:
        assert answer.headers["location"] == "https://a.test/echo"


async def test_the_name_that_a_client_asks_for_chooses_the_certificate(edge: Edge) -> None:
    await with_tls(edge, FILES, service("echo"))
    for port in (8443, 9000):
        seen = [await shown(edge, name, port) for name in ("", "a.test", "b.test", "c.test")]
        assert seen == ["a.test", "a.test", "b.test", "a.test"]


async def test_http_2_and_1_1_and_tls_1_2_up(edge: Edge) -> None:
    await with_tls(edge, FILES, service("echo"))
    reader, writer = await connected(edge, protocols=("h2", "http/1.1"))
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
    request = {":method": "GET", ":scheme": "https", ":path": "/-/routes", ":authority": "a.test"}
    writer.write(http2.PREFACE + http2.head(1, request, ends=True))
    status_200 = b"\x01\x04\0\0\0\x01\x88"  # of a frame: HEADERS, END_HEADERS, stream 1, `:status: 200`
    await asyncio.wait_for(reader.readuntil(status_200), PATIENCE_S)
    writer.close()
    _, writer = await connected(edge, protocols=("http/1.1",), maximum_version=ssl.TLSVersion.TLSv1_2)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    writer.close()
    old: dict[str, Any] = {
        "minimum_version": ssl.TLSVersion.MINIMUM_SUPPORTED,
        "maximum_version": ssl.TLSVersion.TLSv1_1,
    }
    with pytest.warns(DeprecationWarning, match="TLS"), pytest.raises((ssl.SSLError, ConnectionError)):
        await connected(edge, **old)


async def test_grpc_speaks_tls_alone(edge: Edge) -> None:
    replica = GrpcReplica(edge.container.gateway)
    await replica.server.start()
    probe = await edge.replica("probe")
    await with_tls(edge, FILES, service("echo", protocol="grpc", route=None, grpc_services=("test.Echo",)))
    await edge.add("echo", "echo-1", replica.address, probe.port)
    address, options = f"{edge.container.ip}:9000", (("grpc.ssl_target_name_override", "b.test"),)
    channel: Any
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(B[1].encode()), options) as channel:
        assert await channel.unary_unary("/test.Echo/Unary")(b"x") == b"x"
        stream = channel.unary_stream("/test.Echo/Count")(b"")
        assert [message async for message in stream] == [b"0", b"1", b"2", b"3", b"4"]
    async with grpc.aio.insecure_channel(address) as channel:
        code = await channel.unary_unary("/test.Echo/Unary")(b"x").code()
        assert code is grpc.StatusCode.UNAVAILABLE
    await replica.server.stop(0)


async def test_no_request_fails_while_certificates_are_changed_added_and_removed(edge: Edge) -> None:
    router = await with_tls(edge, {"a.pem": FILES["a.pem"]}, service("echo", max_ongoing_requests=50))
    await edge.serve("echo", "echo-1")
    renewed = "".join(made("renewed.test", now=NOW)).replace("-----\n-----", "-----\n\n-----")
    too_large = f"{FILES['b.pem']}{B[1] * 40}"
    changes = {  # whose certificate is the default -> the files, and whether HAProxy gets them without a reload
        "renewed.test": ({"a.pem": renewed}, True),
        "a.test": ({"a.pem": FILES["a.pem"]}, True),
        "x.test": (FILES | {"a.pem": "".join(made("x.test", now=NOW))}, False),
        "b.test": ({"b.pem": FILES["b.pem"]}, False),
        "b.test of a long chain": ({"b.pem": too_large}, False),
    }
    async with https(edge) as session, session.ws_connect("/echo/socket") as socket:
        async with Load(8, partial(posted, session)).running() as load:
            await load.more(50)
            for default, (files, is_swapped) in changes.items():
                before = await edge.state()
                router.use_certificates(files)
                await edge.route(*edge.specs.values())
                assert await shown(edge) == default.partition(" ")[0]
                now = await edge.state()
                assert (now.pid == before.pid) is is_swapped, default
                assert now.routing_hash == router.routing_hash(tuple(edge.specs.values())) != before.routing_hash
                await load.more(50)
        await socket.send_str("still there")
        assert (await socket.receive_str()) == "still there"
    assert load.outcomes.keys() == {200}
    kept = list((edge.run_dir / "tls").glob("*/*"))
    assert [file.name for file in kept] == ["b.pem"], "no key stays that is not used"
    assert [path.stat().st_mode & 0o777 for path in (kept[0], kept[0].parent, edge.run_dir / "tls")] == [
        *(0o600, 0o700, 0o700)
    ]


async def test_a_controller_and_a_haproxy_that_start_again_keep_the_certificates(edge: Edge) -> None:
    await with_tls(edge, FILES, service("echo"))
    await asyncio.to_thread(edge.container.kill_and_wait)
    assert await shown(edge, "b.test") == "b.test"
    renewed = FILES | {"b.pem": "".join(made("b.test", "renewed.test", now=NOW))}
    await with_tls(edge, renewed, service("echo"))
    assert await shown(edge, "renewed.test") == "b.test"
    await asyncio.to_thread(edge.container.kill_and_wait)
    assert await shown(edge, "renewed.test") == "b.test"
    edge.router = HAProxyRouter(edge.run_dir, https_port=PORT)  # its files are wrong now
    await edge.route(service("echo"), service("other"))
    assert await shown(edge, "b.test") == "b.test"


async def test_without_certificates_no_route_is_served_in_the_clear_and_without_tls_no_key_stays(edge: Edge) -> None:
    edge.router = HAProxyRouter(edge.run_dir, https_port=PORT)
    with pytest.raises(RoutingError, match="/run/haproxy/tls/none"):
        await edge.route(service("echo"))
    await with_tls(edge, FILES, service("echo"))
    edge.router = HAProxyRouter(edge.run_dir)
    await edge.route(service("echo"))
    await edge.serve("echo", "echo-1")
    async with edge.http.get("/echo", allow_redirects=False) as answer:
        assert answer.status == 200
    assert list((edge.run_dir / "tls").iterdir()) == []

"""Who may call a service with `x-serve.auth: jwt`, at the real HAProxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, TCPConnector, WSServerHandshakeError

from controller.routing.haproxy import HAProxyRouter
from controller.settings import TOKEN_ALGORITHMS, TokenRules
from tests.harness import certificates
from tests.harness.edge import Edge, GrpcReplica, error_of, refusal, service
from tests.harness.tokens import made, public, token
from tests.harness.waiting import until

pytestmark = pytest.mark.engine

KEY, NEXT_KEY, OTHERS_KEY = (made() for _ in range(3))
ISSUER, AUDIENCE = "https://idp.example/realms/a?x=#1", "api://shop.example/(web)"
RULES = TokenRules("RS256", ISSUER, AUDIENCE)
NOW, DAY_S = int(time.time()), 86_400
CLAIMS: Mapping[str, Any] = {"iss": ISSUER, "aud": AUDIENCE, "exp": NOW + DAY_S, "sub": "ann"}
GOOD = token(KEY, CLAIMS)
HEAD, BODY, SIGNATURE = GOOD.split(".")


def claims(**changes: Any) -> dict[str, Any]:
    """Those of a good token, but for these; None = without it."""
    return {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def takes_tokens(edge: Edge, rules: TokenRules = RULES, **keys: str) -> HAProxyRouter:
    edge.router = router = HAProxyRouter(edge.run_dir, token_rules=rules)
    if keys:
        router.use_public_keys({f"{name}.pem": text for name, text in keys.items()})
    return router


@pytest.fixture
async def closed(edge: Edge) -> Edge:
    """An edge whose service `echo` asks for a token; `open` does not."""
    takes_tokens(edge, now=public(KEY), next=public(NEXT_KEY))
    await edge.route(service("echo", auth="jwt"), service("open"))
    for name in ("echo", "open"):
        await edge.serve(name, f"{name}-1")
    return edge


async def status(edge: Edge, text: str = "", path: str = "/echo") -> int:
    async with edge.http.get(path, headers=bearer(text) if text else {}) as answer:
        await answer.read()
        return answer.status


IN_FORCE = {
    "good": GOOD,
    "of the next key": token(NEXT_KEY, CLAIMS),
    "begun": token(KEY, claims(nbf=NOW - 60)),
    "begun for ever": token(KEY, claims(nbf=0)),
    "a fraction": token(KEY, claims(exp=NOW + DAY_S + 0.5)),
    "aud in a list": token(KEY, claims(aud=["other", AUDIENCE, "more"])),
    "aud alone in a list": token(KEY, claims(aud=[AUDIENCE])),
    "spaces and another order": token(KEY, json.dumps(dict(sorted(claims(aud=["x", AUDIENCE]).items())), indent=2)),
    "large": token(KEY, claims(groups=["g" * 50] * 100)),
}


async def test_who_gets_in(closed: Edge) -> None:
    for name, text in IN_FORCE.items():
        headers = bearer(text) | {"x-pierhead-subject": "root", "X_Pierhead_Subject": "root"}
        async with closed.http.get("/echo", headers=headers) as answer:
            assert answer.status == 200, name
            received = (await answer.json())["headers"]
        assert received["authorization"] == headers["authorization"], name
        told = {key: text for key, text in received.items() if "ierhead" in key}
        assert told == {"x-pierhead-subject": "ann"}, name


async def test_clocks_may_differ_by_30_s(closed: Edge) -> None:
    now = time.time()
    sent = [claims(exp=now - 10), claims(exp=now - 40), claims(nbf=now + 20), claims(nbf=now + 600)]
    assert [await status(closed, token(KEY, each)) for each in sent] == [200, 401, 200, 401]


REFUSED: dict[str, tuple[str, str]] = {
    "none": ("", "token"),
    "ended": (token(KEY, claims(exp=NOW - 40)), "exp"),
    "ended long ago": (token(KEY, claims(exp=1)), "exp"),
    "no exp": (token(KEY, claims(exp=None)), "exp"),
    "exp as text": (token(KEY, claims(exp=str(NOW + DAY_S))), "exp"),
    "exp as a word": (token(KEY, claims(exp="never")), "exp"),
    "exp in a list": (token(KEY, claims(exp=[NOW + DAY_S])), "exp"),
    "exp of no kind": (token(KEY, claims(exp=True)), "exp"),
    "exp below": (token(KEY, {**claims(exp=None), "more": {"exp": NOW + DAY_S}}), "exp"),
    "exp beyond numbers": (token(KEY, claims(exp=10**30)), "exp"),
    "not yet valid": (token(KEY, claims(nbf=NOW + DAY_S)), "nbf"),
    "nbf beyond numbers": (token(KEY, claims(nbf=10**30)), "nbf"),
    "another iss": (token(KEY, claims(iss="https://idp.example/realms/b")), "iss"),
    "iss with a slash more": (token(KEY, claims(iss=ISSUER + "/")), "iss"),
    "iss in capitals": (token(KEY, claims(iss=ISSUER.upper())), "iss"),
    "no iss": (token(KEY, claims(iss=None)), "iss"),
    "another aud": (token(KEY, claims(aud="api://other")), "aud"),
    "a part of aud": (token(KEY, claims(aud=AUDIENCE[:-1])), "aud"),
    "no aud": (token(KEY, claims(aud=None)), "aud"),
    "others in the list": (token(KEY, claims(aud=["a", AUDIENCE + "x", "x" + AUDIENCE])), "aud"),
    "iss with backslashes, which HAProxy does not read": (token(KEY, json.dumps(CLAIMS).replace("/", "\\/")), "iss"),
    "an empty list": (token(KEY, claims(aud=[])), "aud"),
    "a text like a list": (token(KEY, claims(aud=f'["{AUDIENCE}"]')), "aud"),
    "a text like two in the list": (token(KEY, claims(aud=[f'x","{AUDIENCE}","y'])), "aud"),
    "aud by its key": (token(KEY, claims(aud={"0": AUDIENCE})), "aud"),
    "of another key": (token(OTHERS_KEY, CLAIMS), "signature"),
    "alg none": (token("", CLAIMS, "none"), "alg"),
    "alg none, signed": (f"{token(KEY, CLAIMS, 'none')}", "alg"),
    "alg none in capitals": (token("", CLAIMS, "NONE"), "alg"),
    "not signed": (token("", CLAIMS), "signature"),
    "the public key as a secret": (token(public(KEY), CLAIMS, "HS256"), "alg"),
    "the public key as a secret, said to be RS256": (token(public(KEY), CLAIMS), "signature"),
    "another alg": (token(KEY, CLAIMS, "RS512"), "alg"),
    "another padding": (token(KEY, CLAIMS, "PS256"), "alg"),
    "no alg": (token(KEY, CLAIMS, alg=None), "alg"),
    "alg in a list": (token(KEY, CLAIMS, alg=["RS256"]), "alg"),
    "what HAProxy does not know is critical": (token(KEY, CLAIMS, crit=["b64"], b64=False), "crit"),
    "other claims": (".".join((HEAD, token(OTHERS_KEY, claims(sub="root")).split(".")[1], SIGNATURE)), "signature"),
    "another header": (".".join((token(OTHERS_KEY, CLAIMS, kid="x").split(".")[0], BODY, SIGNATURE)), "signature"),
    "more": (f"{GOOD}AAAA", "signature"),
    "a part more": (f"{GOOD}.{SIGNATURE}", "signature"),
    "two in the header": (f"{GOOD}, Bearer {token(OTHERS_KEY, claims(sub='root'))}", "token"),
    "a word more": (f"{GOOD} {token(OTHERS_KEY, claims(sub='root'))}", "signature"),
    "claims that are no JSON": (token(KEY, "{"), "exp"),
    "claims in a list": (token(KEY, [CLAIMS]), "exp"),
    "garbage": ("garbage", "alg"),
    "dots": ("...", "alg"),
    "8 kB of garbage": ("x" * 8000, "alg"),
    "8 kB of dots": ("." * 8000, "alg"),
    "no base64": (GOOD.replace(".", ".*", 1), "exp"),
}


async def test_who_does_not_and_the_log_says_why(closed: Edge) -> None:
    names = {f"request-{number}": name for number, name in enumerate(REFUSED)}
    faults: dict[str, str] = {}
    lines: list[dict[str, Any]] = []

    async def all_are_told() -> bool:
        """HAProxy leaves a line out where the thread that writes another one has no processor: ask again."""
        for request_id, name in names.items():
            if name not in faults:
                text, _ = REFUSED[name]
                headers = {"x-request-id": request_id, **(bearer(text) if text else {})}
                code, error, answered = await error_of(closed, "/echo", headers=headers)
                assert (code, error["code"], answered["www-authenticate"]) == (401, "invalid_token", "Bearer"), name
        lines[:] = await closed.logged(1)
        faults.update({names[line["request_id"]]: line["token_fault"] for line in lines})
        return len(faults) == len(REFUSED)

    await until(all_are_told, "each refusal has a line")
    assert faults == {name: fault for name, (_, fault) in REFUSED.items()}
    assert {(line["status"], line["key"]) for line in lines} == {(401, "")}
    assert closed.replicas[0].requests == 0


async def test_of_two_headers_the_service_might_read_the_other_one(closed: Edge) -> None:
    for sent in ([GOOD, "x"], ["x", GOOD], [GOOD, GOOD]):
        headers = [("authorization", f"Bearer {text}") for text in sent]
        assert (await error_of(closed, "/echo", headers=headers))[0] == 401
    for other in ("Basic c2stdGVhbTo=", GOOD, f"Token {GOOD}"):
        assert (await error_of(closed, "/echo", headers={"authorization": other}))[0] == 401
    assert (await error_of(closed, "/echo", headers={"x-api-key": GOOD}))[0] == 401


SUBJECTS: list[tuple[object, str | None]] = [
    ("auth0|5f7c", "auth0|5f7c"),
    ("CN=Ann Lee,O=x", "CN=Ann Lee,O=x"),
    ('a"b\\c%[src]', 'a"b\\c%[src]'),
    ("x" * 255, "x" * 255),
    (1234567890123, "1234567890123"),
    (None, None),
    ("", None),
    ("x" * 256, None),
    ("x" * 4000, None),
    ("ann\n", None),
    ("ann\r\nx-admin: yes", None),
    ("ann\0", None),
    ("ann\x7f", None),
    (" ann", None),
    ("ann ", None),
    ("\u00e4nn", None),
    ("\u5b89", None),
]
"""What a token says, and what the service is told; None = nothing."""


async def test_the_subject_is_told_as_it_is_or_not_at_all(closed: Edge) -> None:
    for subject, told in SUBJECTS:
        async with closed.http.get("/echo", headers=bearer(token(KEY, claims(sub=subject)))) as answer:
            received = (await answer.json())["headers"]
        found = (answer.status, received.get("x-pierhead-subject"), received.get("x-admin"))
        assert found == (200, told, None), repr(subject)


async def test_the_longest_subject_goes_with_a_large_body(closed: Edge) -> None:
    headers = bearer(token(KEY, claims(sub="x" * 255, groups=["g" * 50] * 80)))
    async with closed.http.post("/echo/body", data=b"x" * 64_000, headers=headers) as answer:
        assert answer.status == 200
        assert (await answer.json())["headers"]["x-pierhead-subject"] == "x" * 255


async def test_a_service_that_asks_for_no_token_gets_no_subject(closed: Edge) -> None:
    headers = bearer(GOOD) | {"x-pierhead-subject": "ann", "x_pierhead-subject": "ann"}
    async with closed.http.get("/open", headers=headers) as answer:
        received = (await answer.json())["headers"]
    assert [name for name in received if "pierhead" in name] == []


async def test_issuer_and_audience_are_compared_where_they_are_set(edge: Edge) -> None:
    takes_tokens(edge, TokenRules(), a=public(KEY))
    await edge.route(service("echo", auth="jwt"))
    await edge.serve("echo", "echo-1")
    assert await status(edge, token(KEY, claims(iss=None, aud=None))) == 200
    assert await status(edge, token(KEY, claims(iss=None, aud=None, exp=None))) == 401


@pytest.mark.parametrize("algorithm", TOKEN_ALGORITHMS)
async def test_every_algorithm(edge: Edge, algorithm: str) -> None:
    key, other = made(algorithm), made(algorithm)
    takes_tokens(edge, TokenRules(algorithm), a=public(key))
    await edge.route(service("echo", auth="jwt"))
    await edge.serve("echo", "echo-1")
    assert await status(edge, token(key, CLAIMS, algorithm)) == 200
    assert await status(edge, token(other, CLAIMS, algorithm)) == 401
    assert await status(edge, token(public(key), CLAIMS, "HS256", alg=algorithm)) == 401


async def test_keys_are_rotated_by_a_reload_and_survive_restarts(closed: Edge) -> None:
    async def known(router: HAProxyRouter) -> tuple[int, ...]:
        closed.router = router
        await closed.route(*closed.specs.values())
        return tuple([await status(closed, token(key, CLAIMS)) for key in (KEY, NEXT_KEY, OTHERS_KEY)])

    before = await closed.state()
    assert await known(takes_tokens(closed, renamed=public(KEY), b=public(NEXT_KEY))) == (200, 200, 401)
    assert (await closed.state()).pid == before.pid, "the names of files do not matter"
    assert await known(takes_tokens(closed, b=public(NEXT_KEY))) == (401, 200, 401)
    assert len(list((closed.run_dir / "jwt").glob("*/*"))) == 1, "no key stays that is not used"
    now = await closed.state()
    assert now.pid != before.pid
    assert now.routing_hash == closed.router.routing_hash(tuple(closed.specs.values())) != before.routing_hash
    assert await known(takes_tokens(closed)) == (401, 200, 401), "a controller whose files are wrong now"
    assert (await closed.state()).pid == now.pid
    await asyncio.to_thread(closed.container.kill_and_wait)
    assert await known(takes_tokens(closed)) == (401, 200, 401), "after a crash"


async def test_without_public_keys_nobody_gets_in_and_other_services_do_not_mind(edge: Edge) -> None:
    takes_tokens(edge)
    await edge.route(service("echo", auth="jwt"), service("open"))
    for name in ("echo", "open"):
        await edge.serve(name, f"{name}-1")
    code, error, headers = await error_of(edge, "/echo", headers=bearer(GOOD))
    assert (code, error["code"], headers["retry-after"]) == (503, "keys_unknown", "10")
    assert await status(edge, path="/open") == 200
    takes_tokens(edge, a=public(KEY))
    await edge.route(*edge.specs.values())
    assert await status(edge, GOOD) == 200


async def test_a_websocket_needs_a_token_too(closed: Edge) -> None:
    for headers, expected in (({}, 401), (bearer(GOOD), 101)):
        try:
            async with closed.http.ws_connect("/echo/socket", headers=headers):
                found = 101
        except WSServerHandshakeError as error:
            found = error.status
        assert found == expected


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256"])
async def test_wrong_tokens_end_no_connection_with_tls(edge: Edge, algorithm: str) -> None:
    """OpenSSL keeps the errors of a thread, and asks the next connection about them."""
    key, other = made(algorithm), made(algorithm)
    edge.router = router = HAProxyRouter(edge.run_dir, token_rules=TokenRules(algorithm), https_port=8443)
    router.use_certificates({"a.pem": "".join(certificates.made("a.test", now=NOW))})
    router.use_public_keys({"a.pem": public(key)})
    await edge.route(service("echo", auth="jwt", max_ongoing_requests=100))
    await edge.serve("echo", "echo-1")
    good, bad = token(key, CLAIMS, algorithm), token(other, CLAIMS, algorithm)
    wrong = (bad, bad[:-90], bad.rpartition(".")[0] + ".", f"{bad}AAAA", "garbage", "...")
    url, connector = f"https://{edge.container.ip}:8443", TCPConnector(ssl=False, limit=0)
    async with ClientSession(url, connector=connector) as session, contextlib.AsyncExitStack() as sockets:
        connect = partial(session.ws_connect, "/echo/socket", headers=bearer(good))
        opened = [await sockets.enter_async_context(connect()) for _ in range(16)]

        async def asked(text: str) -> int:
            async with session.post("/echo", headers=bearer(text)) as answer:
                return answer.status

        for _ in range(10):
            found = await asyncio.gather(*map(asked, [*wrong, good] * 4))
            assert found == [*[401] * len(wrong), 200] * 4
            for socket in opened:
                await socket.send_str("still there")
                assert await socket.receive_str() == "still there"


async def test_a_held_request_is_judged_once(edge: Edge) -> None:
    takes_tokens(edge, TokenRules(), a=public(KEY))
    await edge.route(service("echo", auth="jwt", request_timeout_s=60.0))
    assert await status(edge, token(OTHERS_KEY, CLAIMS)) == 401, "nobody without a token waits"
    ends = token(KEY, claims(exp=int(time.time()) - 28))
    waiting = asyncio.ensure_future(edge.http.get("/echo", headers=bearer(ends)))

    async def is_held() -> bool:
        held = (await edge.state()).held.get("svc_echo")
        return bool(held and held.now)

    async def has_ended() -> bool:
        return await status_without_waiting(edge, ends) == 401

    await until(is_held, "the request is held")
    await until(has_ended, "the token is over")
    await edge.serve("echo", "echo-1")
    async with await waiting as answer:
        assert (answer.status, (await answer.json())["headers"]["x-pierhead-subject"]) == (200, "ann")


async def status_without_waiting(edge: Edge, text: str) -> int:
    """0 where the request is held."""
    async with ClientSession(edge.url) as session:
        try:
            async with asyncio.timeout(0.2), session.get("/echo", headers=bearer(text)) as answer:
                return answer.status
        except TimeoutError:
            return 0


async def test_grpc(edge: Edge) -> None:
    replica = GrpcReplica(edge.container.gateway)
    await replica.server.start()
    takes_tokens(edge, a=public(KEY))
    try:
        spec = service("echo", protocol="grpc", route=None, grpc_services=("test.Echo",), auth="jwt")
        await edge.route(spec)
        await edge.add("echo", "echo-1", replica.address)
        async with grpc.aio.insecure_channel(f"{edge.container.ip}:9000") as channel:
            echo: Any = channel.unary_unary("/test.Echo/Unary")
            for sent in (None, token(OTHERS_KEY, CLAIMS), token(KEY, claims(exp=1))):
                error = await refusal(echo(b"x", metadata=bearer(sent).items() if sent else ()))
                assert (error.code(), "echo needs a token" in (error.details() or "")) == (
                    grpc.StatusCode.UNAUTHENTICATED,
                    True,
                )
            for subject, told in (("ann", " x-pierhead-subject=ann"), ("\u00e4nn", "")):
                text = token(KEY, claims(sub=subject))
                call = echo(b"x", metadata=(*bearer(text).items(), ("x-pierhead-subject", "root")))
                assert await call == b"x"
                received = str(dict(await call.trailing_metadata())["received"])
                assert f"authorization=Bearer {text}" in received
                assert re.findall(r" ?x-pierhead-subject=\S*", received) == [told] * bool(told)
    finally:
        await replica.server.stop(None)


async def test_the_log_has_the_subject_and_no_token(closed: Edge) -> None:
    bad = token(OTHERS_KEY, CLAIMS)
    assert await status(closed, GOOD, "/echo/die") == 502
    assert await status(closed, bad) == 401
    first, second = await closed.logged(2)
    assert (first["status"], first["key"], first["token_fault"]) == (502, "ann", "")
    assert (second["status"], second["key"], second["token_fault"]) == (401, "", "signature")
    log = json.dumps(await asyncio.to_thread(closed.container.log_lines))
    assert SIGNATURE not in log
    assert bad.split(".")[2] not in log

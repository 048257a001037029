"""HTTPS and tokens at every edge of a Swarm with the operator's files, and after another `up` with other files."""

from __future__ import annotations

import http.client
import ssl
import time

import pytest
import yaml
from cryptography import x509

from controller.swarm.up.secrets import PROJECT_LABEL
from tests.harness import certificates, tokens
from tests.harness.stack import EVIDENCE
from tests.harness.swarm_rig import Node, SwarmRig
from tests.harness.swarm_stack import FILES, IMAGES, SwarmStack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(900)]

APP, TLS, JWT = (EVIDENCE / f"pierhead-test-swarm-{name}" for name in ("tokens.yaml", "tls", "jwt"))
ANSWER_S = 10.0


def test_certificates_and_public_keys_reach_every_node_and_are_renewed() -> None:
    SwarmStack.build()
    key, next_key = tokens.made(), tokens.made()
    first = certificates.made("shop.example", now=time.time(), begins=-80, ends=5)
    second = certificates.made("shop.example", now=time.time())
    EVIDENCE.mkdir(exist_ok=True)
    certificates.write(TLS / "shop.pem", *first)
    certificates.write(JWT / "idp.pem", tokens.public(key))
    APP.write_text(yaml.safe_dump({"services": {"faulty": {"x-serve": {"route": "/faulty", "auth": "jwt"}}}}))
    with SwarmRig(nodes=2, managers=1).running([], only_first=IMAGES) as rig:
        stack = SwarmStack(rig, files=f"{FILES}:{EVIDENCE.name}/{APP.name}")
        stack.variables |= {"PIERHEAD_TLS": "files", "PIERHEAD_TLS_DIR": f"{EVIDENCE.name}/{TLS.name}"}
        stack.variables |= {"PIERHEAD_JWT_DIR": f"{EVIDENCE.name}/{JWT.name}"}
        stack.make("up")
        stack.spread_images()
        for node in rig.nodes:
            eventually(lambda node=node: https(node, "/echo?message=hi") == 200, f"{node.name} answers")  # type: ignore[misc]
            assert shown(node) == serial(first[1])
            assert status(http.client.HTTPConnection(node.ip, 8000, timeout=ANSWER_S), "/echo") == 308
            assert https(node, "/faulty") == 401
            assert https(node, "/faulty", signed(key)) == 200
            assert https(node, "/faulty", signed(next_key)) == 401

        told = stack.make("status")
        assert "shop.pem: its certificate ends on" in told
        assert "put a new one in its place in the project, and type `pierhead up`" in told
        before = stack.ids(), own_secrets(stack)
        stack.make("up")
        assert (stack.ids(), own_secrets(stack)) == before, "nothing has changed, and nothing is replaced"

        certificates.write(TLS / "shop.pem", *second)
        certificates.write(JWT / "next.pem", tokens.public(next_key))
        began = time.monotonic()
        stack.make("up")
        print(f"renewed on {len(rig.nodes)} nodes after {time.monotonic() - began:.0f} s")
        for node in rig.nodes:
            assert shown(node) == serial(second[1])
            for one in (key, next_key):
                eventually(lambda node=node, one=one: https(node, "/faulty", signed(one)) == 200, "both keys count")  # type: ignore[misc]
        assert "certificate" not in stack.make("status"), "none ends soon"

        stack.variables["PIERHEAD_TLS"] = "off"
        stack.make("up")
        for node in rig.nodes:
            eventually(lambda node=node: stack.get(node, "/echo?message=hi").status == 200, "HTTP is served again")  # type: ignore[misc]
            assert https(node, "/echo") == 0
        assert not any("tls" in name for name in own_secrets(stack))


def own_secrets(stack: SwarmStack) -> set[str]:
    with stack.rig.nodes[0].client() as client:
        return {one["Spec"]["Name"] for one in client.secrets({"label": f"{PROJECT_LABEL}={stack.project}"})}


def https(node: Node, path: str, token: str = "") -> int:
    return status(http.client.HTTPSConnection(node.ip, 8443, timeout=ANSWER_S, context=trusting()), path, token)


def status(connection: http.client.HTTPConnection, path: str, token: str = "") -> int:
    """Of an answer; 0 = there was none."""
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {token}"} if token else {})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def shown(node: Node) -> int:
    """The serial number of the certificate that a client gets."""
    return serial(ssl.get_server_certificate((node.ip, 8443)))


def serial(pem: str) -> int:
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def signed(key: tokens.PrivateKey) -> str:
    return tokens.token(key, {"exp": time.time() + 3600})


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context

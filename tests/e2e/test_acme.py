"""A certificate by ACME on a whole stack, from a real server (Pebble): docs/how-to/tls.md."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest
from cryptography import x509

from tests.harness.commands import run
from tests.harness.pebble import SERVER, Pebble
from tests.harness.ports import free_ports
from tests.harness.stack import COMMAND_S, EVIDENCE, ROOT, Stack, address_of
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

NAME = "shop.test"
PATH = "/echo?message=hi"


class AcmeStack(Stack):
    """Started by `up`, which adds compose/tls.yaml and compose/acme.yaml to the files."""

    def __init__(self) -> None:
        self.files = EVIDENCE / "acme"
        files = ["compose/tls.yaml", "compose/acme.yaml", "compose/apps/echo.yaml"]
        (self.https_port,) = free_ports(1)
        options = {
            "PIERHEAD_TLS": "acme",
            "PIERHEAD_HTTPS_PORT": str(self.https_port),
            "PIERHEAD_ACME_DOMAINS": NAME,
            "PIERHEAD_ACME_EMAIL": "ops@shop.test",
            "PIERHEAD_ACME_SERVER": SERVER,
            "PIERHEAD_ACME_CA": str((self.files / "ca.pem").relative_to(ROOT)),
            "PIERHEAD_BUILD": "0",
        }
        super().__init__("pierhead-test-acme", files, options)

    def up(self) -> None:
        named = {**self.env, "COMPOSE_FILE": "compose/compose.yaml:compose/apps/echo.yaml"}
        done = run(["./pierhead", "up"], COMMAND_S, ROOT, named)
        assert done.returncode == 0, done.stdout + done.stderr

    def renews(self) -> None:
        """As docs/how-to/tls.md says."""
        self.container("acme").kill(signal="HUP")

    def notice(self) -> str:
        """What `pierhead status` says of ACME."""
        told = self.pierhead("status").stdout
        return next((line for line in told.splitlines() if "ACME server" in line), "")

    def connect(self, context: ssl.SSLContext) -> http.client.HTTPSConnection:
        """To HAProxy by the name, which no resolver knows."""
        connection = http.client.HTTPSConnection(NAME, timeout=30, context=context)
        plain = socket.create_connection(("127.0.0.1", self.https_port), 30)
        connection.sock = context.wrap_socket(plain, server_hostname=NAME)
        return connection

    def serial(self, context: ssl.SSLContext) -> int:
        with contextlib.closing(self.connect(context)) as connection:
            return x509.load_der_x509_certificate(connection.sock.getpeercert(binary_form=True) or b"").serial_number


def trusting(root: str = "") -> ssl.SSLContext:
    """Clients that trust this authority; without one, those that trust everybody."""
    context = ssl.create_default_context(cadata=root or None)
    if not root:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def status(connection: http.client.HTTPSConnection) -> int:
    connection.request("GET", PATH)
    answer = connection.getresponse()
    answer.read()
    return answer.status


class Load:
    """20 requests a second over connections of their own, and as many over one that is kept."""

    def __init__(self, stack: AcmeStack, context: ssl.SSLContext) -> None:
        self.statuses: list[int] = []
        self.failures: list[str] = []
        self._stack, self._context, self._ends = stack, context, threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._stack.connect(self._context)) as kept:
            kept.auto_open = 0
            while not self._ends.wait(0.05):
                try:
                    with contextlib.closing(self._stack.connect(self._context)) as fresh:
                        self.statuses += [status(fresh), status(kept)]
                except (OSError, http.client.HTTPException) as error:
                    self.failures.append(repr(error))


def test_a_certificate_is_given_and_renewed_and_a_server_that_refuses_stops_nothing() -> None:
    stack = AcmeStack()
    pebble = Pebble(stack.files, stack.docker)
    pebble.build()
    network = f"{stack.project}_default"
    with stack.running():
        eventually(lambda: "pebble.test" in stack.notice(), "a server that is not there is named")
        assert "HAProxy has a placeholder that no client trusts" in stack.notice()
        with contextlib.closing(stack.connect(trusting())) as connection:
            assert status(connection) == 200

        with pebble.running(network, shop_test="127.0.0.1"):
            stack.renews()
            eventually(lambda: f"http://{NAME}:8000/.well-known/" in stack.notice(), "the name leads elsewhere")

        with pebble.running(network, shop_test=address_of(stack.container("haproxy"))) as server:
            context = trusting(pebble.root(server))
            stack.renews()
            first = eventually(lambda: stack.serial(context), "the certificate is given")
            eventually(lambda: not stack.notice(), "nothing is wrong any more")
            assert "the ACME server has given the certificate" in stack.messages("certificates")
            worker, load = stack.haproxy_worker(), Load(stack, context)
            with load.running():
                stack.renews()
                second = eventually(lambda: (serial := stack.serial(context)) != first and serial, "it is renewed")
                seen = len(load.statuses)
                eventually(lambda: len(load.statuses) > seen + 20, "requests come after it")
            assert (load.failures, set(load.statuses)) == ([], {200})
            assert stack.haproxy_worker() == worker, "HAProxy was not reloaded"

            before = {name: str(stack.container(name).id) for name in ("haproxy", "controller", "acme")}
            stack.up()
            assert {name: str(stack.container(name).id) for name in before} == before

        stack.renews()
        eventually(lambda: "HAProxy keeps the certificate that it has" in stack.notice(), "the server is gone")
        stack.kill_process(stack.container("acme"))
        stack.container("controller").restart()
        eventually(lambda: "HAProxy keeps the certificate that it has" in stack.notice(), "it is known after restarts")
        stack.container("haproxy").kill()
        stack.container("haproxy").start()
        assert eventually(lambda: stack.serial(context), "HAProxy is back") == second
        logs = stack.container("acme").logs().decode()
        assert logs.count("asking https://pebble.test:14000/dir") == 5, "after a restart it waits as before"

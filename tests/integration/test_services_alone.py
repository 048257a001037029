"""The services' images without a controller: containers that find each other by Docker's DNS."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from tests.harness.stack import request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TAG = os.environ.get("PIERHEAD_TAG", "latest")
LABELS = {"pierhead.test": "services-alone"}


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(docker_network_kw={"labels": LABELS}) as made:
        yield made


def on(network: Network, service: str) -> DockerContainer:
    container = DockerContainer(f"pierhead/echo:{TAG}").with_network(network).with_network_aliases(service)
    return container.with_env("PIERHEAD_SERVICE", service).with_kwargs(labels=LABELS)


def test_ingress_and_child_find_each_other(network: Network) -> None:
    child = on(network, "echo-child")
    ingress = on(network, "echo").with_exposed_ports(8080)
    with ingress, child:
        port = ingress.get_exposed_port(8080)
        url = f"http://127.0.0.1:{port}/echo?message=hi"
        eventually(lambda: request(url).status == 200, "echo answers", within_s=120)
        assert request(url).json == {"response": "Echo: hi"}
        child.get_wrapped_container().kill()
        gone = request(url, headers={"x-request-timeout-seconds": "2"})
        assert gone.status in (502, 503, 504), "an error that says so, within the caller's time"
        assert gone.json["error"]["message"]

"""A real ACME server for tests: Pebble, in a container in the network of a stack."""

from __future__ import annotations

import contextlib
import ssl
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import docker
from docker.models.containers import Container

from tests.harness import certificates
from tests.harness.stack import address_of
from tests.harness.waiting import eventually

IMAGE = "pierhead-test/pebble"
NAME = "pebble.test"
LABELS = {"pierhead.test": "pebble"}
SERVER = f"https://{NAME}:14000/dir"


class Pebble:
    """`directory` is the server's; `authority` in it is what its clients trust."""

    def __init__(self, directory: Path, client: docker.DockerClient) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        key, certificate = certificates.made(NAME, now=time.time())
        self._directory, self._client = directory, client
        self.authority = directory / "ca.pem"
        certificates.write(self.authority, certificate, mode=0o644)
        certificates.write(directory / "pebble.pem", key, certificate)

    def build(self) -> None:
        """A cached build takes a second."""
        where = str(Path(__file__).parent / "pebble_container")
        self._client.images.build(path=where, tag=IMAGE, network_mode="host", rm=True, labels=LABELS)

    @contextlib.contextmanager
    def running(self, network: str, **names: str) -> Iterator[Container]:
        """In a network. `names`: the addresses that it takes names for; "_" is a dot."""
        api = self._client.api
        alias = {network: api.create_endpoint_config(aliases=[NAME])}
        hosts = {name.replace("_", "."): address for name, address in names.items()}
        volumes = [f"{self._directory}:/pebble:ro"]
        container = self._client.containers.create(
            IMAGE, network=network, networking_config=alias, extra_hosts=hosts, volumes=volumes, labels=LABELS
        )
        try:
            container.start()
            eventually(lambda: self.root(container), "Pebble answers")
            yield container
        finally:
            container.remove(force=True)

    def root(self, container: Container) -> str:
        """The certificate of the authority that signs."""
        context = ssl.create_default_context(cafile=str(self.authority))
        context.check_hostname = False
        url = f"https://{address_of(container)}:15000/roots/0"
        with urllib.request.urlopen(url, context=context, timeout=10) as answer:
            return str(answer.read().decode())

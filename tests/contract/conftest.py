"""What several contract suites share."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.harness.edge import Edge
from tests.harness.edge_nodes import Nodes, two_nodes
from tests.harness.haproxy_container import IMAGE, HAProxyContainer, build, docker


@pytest.fixture(scope="session")
def haproxy_image() -> Iterator[str]:
    """HAProxy's image, built from this checkout; its layers stay in the builder's cache."""
    image = build()
    yield image
    docker("rmi", "--force", image)


@pytest.fixture(scope="session")
def node_image() -> Iterator[str]:
    """The image of HAProxy on one of many nodes."""
    image = build(f"{IMAGE}-node", "--target", "node")
    yield image
    docker("rmi", "--force", image)


@pytest_asyncio.fixture
async def nodes(node_image: str) -> AsyncIterator[Nodes]:
    """Two real HAProxys, each with the program that fetches its routes, and the router that drives them."""
    async with two_nodes(node_image) as nodes:
        yield nodes


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """HAProxy's run directory. pytest's own directories are too deep for the path of a unix socket."""
    directory = Path(tempfile.mkdtemp(prefix="pierhead-haproxy-"))
    yield directory
    shutil.rmtree(directory)


@pytest_asyncio.fixture
async def edge(haproxy_image: str, run_dir: Path) -> AsyncIterator[Edge]:
    """A real HAProxy in a container of its own."""
    container = HAProxyContainer(run_dir)
    with contextlib.ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, container)
        edge = Edge(run_dir, container)
        try:
            yield edge
        finally:
            await edge.http.close()
            for replica in edge.replicas:
                replica.let_go.set()
                await replica.stop()

"""Documents in Docker Swarm's configs, which every manager has a copy of.

A config's data never changes, and its labels change only from the version that was read. So a document is a config (its
head) whose label names another config (its content).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import docker.errors
import requests

from ... import docker_http
from ...errors import StateChanged, StateTooLarge, StateUnreachable, StoreError
from ..names import LONGEST_NAME

if TYPE_CHECKING:
    from docker import APIClient

T = TypeVar("T")

LIMIT = 500 * 1024
"""Most bytes of a config's data that every version of Swarm accepts."""
CONTENT = "pierhead.content"
"""Label of a head: the name of its content."""
DOCUMENT = "pierhead.document"
"""Label of a content: the name of its document."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a document's head said when it was read."""

    version: int
    """Grows with every write, also across a removal of the document."""
    content: str
    """The name of the content; "" = there is none yet. Another content has another name."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Config:
    """A config as Swarm has it."""

    name: str
    version: int
    labels: Mapping[str, str]
    data: bytes


class SwarmConfigs:
    """A manager's API for configs. Every call may raise StateUnreachable.

    docker-py blocks, so its calls run in a thread; the client's timeout bounds each.
    """

    def __init__(self, client: APIClient) -> None:
        self._client = client
        self._calls = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pierhead-state")

    async def create(self, name: str, labels: Mapping[str, str], data: bytes) -> None:
        """Create a config. Raises StateChanged if the name is taken."""
        await self._call(partial(self._client.create_config, name, data, dict(labels)))

    async def inspect(self, name: str) -> Config | None:
        """Read one config; None if there is none."""
        with contextlib.suppress(_Absent):
            return _config(await self._call(partial(self._client.inspect_config, name)))
        return None

    async def update(self, name: str, version: int, labels: Mapping[str, str]) -> None:
        """Replace the labels of that version. Raises StateChanged if the config is gone or has another version."""
        await self._call(partial(self._update, name, version, {"Name": name, "Labels": dict(labels)}))

    async def remove(self, name: str) -> None:
        """Remove a config, if there is one."""
        with contextlib.suppress(_Absent):
            await self._call(partial(self._client.remove_config, name))

    async def labelled(self, label: str, value: str) -> list[Config]:
        """All configs that carry the label with that value."""
        found = await self._call(partial(self._client.configs, {"label": f"{label}={value}"}))
        return [_config(raw) for raw in found]

    def close(self) -> None:
        """End the threads; calls in progress are not waited for."""
        self._calls.shutdown(wait=False, cancel_futures=True)

    async def _call(self, call: Callable[[], T]) -> T:
        with _translated():
            return await asyncio.get_running_loop().run_in_executor(self._calls, call)

    def _update(self, name: str, version: int, spec: Mapping[str, object]) -> None:
        docker_http.post(self._client, f"/configs/{name}/update", spec, version=version)


class _Absent(StateChanged):
    """There is no such config."""


def _config(raw: Mapping[str, Any]) -> Config:
    spec = raw["Spec"]
    data = base64.b64decode(spec.get("Data") or "")
    return Config(spec["Name"], int(raw["Version"]["Index"]), dict(spec.get("Labels") or {}), data)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Convert docker-py's exceptions. Swarm answers 500 to a write from an old version, and where it has no leader."""
    try:
        yield
    except docker.errors.APIError as error:
        words = " ".join(str(error.explanation or error).split())
        if isinstance(error, docker.errors.NotFound):
            raise _Absent(words) from error
        if "out of sequence" in words or error.status_code == HTTPStatus.CONFLICT:
            raise StateChanged(words) from error
        if error.is_server_error():
            raise StateUnreachable(f"Swarm says: {words}; `docker node ls` shows the managers") from error
        raise StoreError(f"Swarm refuses to keep the state: {words}") from error
    except (requests.RequestException, docker.errors.DockerException, OSError) as error:
        raise StateUnreachable(f"the Docker Engine does not answer ({error}); check `docker info`") from error


def state_of(configs: SwarmConfigs, project: str) -> SwarmDocument:
    """The document that has a project's state, and the lease of its controller."""
    return SwarmDocument(configs, f"{project}_pierhead-state")


def compose_files_of(configs: SwarmConfigs, project: str) -> SwarmDocument:
    """The document that has a project's resolved compose files."""
    return SwarmDocument(configs, f"{project}_pierhead-files")


class SwarmDocument:
    """A document that several controllers may write: it is replaced only if nothing was written since it was read.

    Every call may raise StateUnreachable; a write that raised it may have been carried out, now or later.
    """

    limit = LIMIT
    """Most bytes of a content."""

    def __init__(self, configs: SwarmConfigs, name: str) -> None:
        """`name`: of the head; contents are named after it."""
        longest = LONGEST_NAME - len("-aside-00000000")
        if len(name) > longest:
            raise StoreError(f"config {name}: the name may have {longest} characters; give the project a shorter one")
        self._configs = configs
        self.name = name

    async def head(self) -> Head | None:
        """Read the head; None if there is no document."""
        config = await self._configs.inspect(self.name)
        if config is None:
            return None
        labels = dict(config.labels)
        return Head(config.version, labels.pop(CONTENT, ""), labels)

    async def content(self, head: Head) -> bytes | None:
        """Read the content that a head names; None if it has been replaced since, or was removed by hand."""
        config = await self._configs.inspect(head.content) if head.content else None
        return None if config is None else config.data

    async def create(self, labels: Mapping[str, str]) -> None:
        """Create the document without content. Raises StateChanged if there is one."""
        await self._configs.create(self.name, labels, b"{}")  # Swarm refuses a config without data

    async def replace(self, head: Head, labels: Mapping[str, str], content: bytes | None = None) -> None:
        """Replace the labels, and the content if one is given, if nothing was written since `head` was read.

        Raises StateChanged; StateTooLarge above the limit.
        """
        if content is None:
            await self._point(head, labels, head.content)
            return
        if len(content) > self.limit:
            raise StateTooLarge(f"config {self.name}: {len(content)} bytes, and Swarm keeps {self.limit}")
        name = self._new_name("")
        await self._configs.create(name, {DOCUMENT: self.name}, content)
        try:
            await self._point(head, labels, name)
        except StateChanged:
            await self._try_to_remove(name)
            raise
        if head.content:
            await self._try_to_remove(head.content)

    async def sweep(self, head: Head) -> None:
        """Remove contents that are older than `head` and not named by it: no write can name them any more."""
        for config in await self._configs.labelled(DOCUMENT, self.name):
            if config.version < head.version and config.name != head.content:
                await self._configs.remove(config.name)

    async def set_aside(self, content: bytes) -> str:
        """Keep a content that cannot be used, for a person to look at; return its name."""
        name = self._new_name("aside-")
        await self._configs.create(name, {}, content)
        return name

    async def _point(self, head: Head, labels: Mapping[str, str], content: str) -> None:
        await self._configs.update(self.name, head.version, {**labels, CONTENT: content} if content else labels)

    async def _try_to_remove(self, content: str) -> None:
        with contextlib.suppress(StoreError):  # the write is done; a sweep removes the content later
            await self._configs.remove(content)

    def _new_name(self, prefix: str) -> str:
        return f"{self.name}-{prefix}{secrets.token_hex(4)}"

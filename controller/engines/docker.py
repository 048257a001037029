"""The Docker Engine as a ClusterEngine. docker-py blocks, so its calls run in a few threads, each with a timeout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import docker.auth
import docker.errors
from docker import APIClient
from docker.utils import parse_repository_tag

from ..errors import EngineError, EngineSocketGone, EngineUnreachable, ImageNotFound
from ..model.actions import (
    CreateContainer,
    PullImage,
    RemoveContainer,
    RestartRouter,
    SignalContainer,
    StartContainer,
)
from .base import EngineAction, EngineEvent, EngineState
from .docker_errors import explanation, image_missing, refusal, translated
from .docker_events import EventQueue, EventReader
from .docker_reader import EngineReader
from .gpu_discovery import GpuDiscovery, GpuSources
from .labels import create_body

if TYPE_CHECKING:
    import requests

T = TypeVar("T")

_HTTP_TIMEOUT_S = 60.0
# Longer than the timeout of one HTTP call, because an action may make several.
_CALL_TIMEOUT_S = 75.0
_OBSERVE_TIMEOUT_S = 45.0
_PULL_TIMEOUT_S = 3600.0
_PULL_STALLED_S = 300.0
_LONGEST_LOG = 64 * 1024
# Shorter than the command's own timeout for an answer of the API.
_LOGS_TIMEOUT_S = 30.0
# Reads in progress or waiting for a thread: more than any service has replicas.
_MOST_LOG_READS = 1000

SOCKET = Path("/var/run/docker.sock")
"""The socket that docker-py uses by default."""


def is_orphaned(socket: Path | None) -> bool:
    """Whether the engine that made the socket file has deleted it, so that no answer will ever come. None: no file."""
    try:
        return socket is not None and socket.stat().st_nlink == 0
    except OSError:  # no file now: a client that sees the real directory finds the new one when it is made
        return False


def socket_of(client: APIClient) -> Path | None:
    """The file that a client connects to; None for an address of another kind."""
    path = getattr(client.get_adapter(client.base_url), "socket_path", None)
    return None if path is None else Path(path)


def open_client(base_url: str | None = None, socket: Path = SOCKET) -> APIClient:
    """A docker-py client that speaks the engine's own API version. Blocking.

    Raises EngineUnreachable; EngineSocketGone where `socket`, the file that is used without a `base_url`, is orphaned.
    """
    try:
        with translated("connecting"):
            return APIClient(base_url=base_url, version="auto", timeout=int(_HTTP_TIMEOUT_S))
    except EngineUnreachable as error:
        if base_url is None and is_orphaned(socket):
            raise EngineSocketGone(str(error)) from error
        raise


class DockerEngine:
    """See `ClusterEngine`."""

    def __init__(self, client: APIClient, gpu_sources: GpuSources | None = None) -> None:
        self._client = client
        sources = gpu_sources or GpuSources()
        self._cdi_kind = sources.cdi_kind
        self._discovery = GpuDiscovery(client, sources)
        self._reader = EngineReader(client, self._discovery, sources.cdi_kind)
        self._calls = ThreadPoolExecutor(max_workers=8, thread_name_prefix="pierhead-engine")
        # Thread pools for calls that must not wait for others, or that others must not wait for. Containers are read
        # while starts take long; while one read hangs, the next one has the second thread.
        self._looks = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pierhead-look")
        # Pulls take minutes.
        self._pulls = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pierhead-pull")
        # Some logging drivers never answer.
        self._log_calls = ThreadPoolExecutor(max_workers=4, thread_name_prefix="pierhead-logs")
        self._log_readers = 0
        self._event_readers: set[EventReader] = set()
        self._unstarted: set[str] = set()
        """Names of the replicas that this process created and whose start has not ended; worker threads add to it."""
        self._socket = socket_of(client)

    async def observe(self, project: str, service_names: Collection[str], images: Collection[str]) -> EngineState:
        """See `ClusterEngine.observe`."""
        read = partial(self._reader.read, project, frozenset(service_names), tuple(images), self._unstarted)
        return await self._call("reading containers", read, _OBSERVE_TIMEOUT_S, self._looks)

    async def perform(self, action: EngineAction, project: str) -> None:
        """See `ClusterEngine.perform`."""
        match action:
            case PullImage():
                await self._pull(action)
            case CreateContainer():
                await self._call(f"create of replica {action.target}", partial(self._create, action, project))
            case StartContainer():
                self._unstarted.add(action.target)
                try:
                    await self._call(f"start of replica {action.target}", partial(self._client.start, action.target))
                finally:
                    self._unstarted.discard(action.target)
            case SignalContainer():
                await self._call(f"{action.signal} to replica {action.target}", partial(self._signal, action))
            case RemoveContainer():
                await self._call(f"removal of replica {action.target}", partial(self._remove, action))
                self._unstarted.discard(action.target)
            case RestartRouter():
                await self._call(f"restart of {action.target}", partial(self._kill_and_start, project, action.target))

    async def used_gpu_memory(self) -> Mapping[str, int]:
        """See `ClusterEngine.used_gpu_memory`."""
        try:
            return await self._call("reading the memory of the GPUs", self._discovery.used_memory)
        except ValueError as error:
            raise EngineError(
                f"nvidia-smi cannot be asked for the memory of the GPUs: {error}; replicas are placed by what "
                "containers hold alone (CDI files as `nvidia-ctk cdi generate` writes them bring nvidia-smi along)"
            ) from error

    async def logs(self, container_id: str, tail: int, after: float | None = None, *, timed: bool = False) -> str:
        """See `ClusterEngine.logs`; whole lines, at most the last 64 KiB of them."""
        what, read = f"logs of {container_id[:12]}", partial(self._logs, container_id, tail, after, timed)
        if self._log_readers >= _MOST_LOG_READS:
            raise EngineError(
                f"{what}: {self._log_readers} other requests wait for logs that the Docker Engine does not send; "
                f"repeat it in a minute, or see whether `docker logs {container_id[:12]}` answers"
            )
        self._log_readers += 1
        try:
            return await self._call(what, read, _LOGS_TIMEOUT_S, self._log_calls)
        finally:
            self._log_readers -= 1

    async def has_image(self, image: str) -> bool:
        """See `ClusterEngine.has_image`."""
        look = partial(self._reader.has_image, image)
        return await self._call(f"looking for image {image}", look, _OBSERVE_TIMEOUT_S, self._looks)

    async def exists(self, project: str, compose_service: str) -> bool:
        """See `ClusterEngine.exists`."""
        look = partial(self._client.containers, all=True, filters=_made_by_compose(project, compose_service))
        return bool(await self._call(f"looking for {compose_service}", look))

    async def events(self, project: str) -> AsyncIterator[EngineEvent]:
        """See `ClusterEngine.events`."""
        queue = EventQueue(asyncio.get_running_loop())
        reader = EventReader(self._client, queue, partial(self._accept, project), self._reader.follow)
        self._event_readers.add(reader)
        try:
            while True:
                yield await queue.get()
        except EngineUnreachable as error:
            if is_orphaned(self._socket):
                raise EngineSocketGone(str(error)) from error
            raise
        finally:
            reader.close()
            self._event_readers.discard(reader)

    async def close(self) -> None:
        """Close connections and end threads; calls in progress are not waited for."""
        for reader in tuple(self._event_readers):
            reader.close()
        for pool in (self._calls, self._looks, self._pulls, self._log_calls):
            pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    async def _call(
        self, what: str, call: Callable[[], T], limit_s: float = _CALL_TIMEOUT_S, pool: ThreadPoolExecutor | None = None
    ) -> T:
        """Run a blocking call in a thread; raises the controller's errors. A cancelled call goes on in its thread."""
        try:
            async with asyncio.timeout(limit_s):
                with translated(what):
                    return await asyncio.get_running_loop().run_in_executor(pool or self._calls, call)
        except TimeoutError as error:
            raise EngineUnreachable(
                f"{what}: the Docker Engine did not finish within {limit_s:.0f} s; check `docker info`"
            ) from error

    # ------------------------------------------------------------------------------------- calls (in worker threads)

    def _create(self, action: CreateContainer, project: str) -> None:
        body = create_body(
            action.spec, action.target, action.version, action.number, action.gpus, project, self._cdi_kind, self._node
        )
        try:
            self._client.create_container_from_config(body, name=action.target)  # type: ignore[no-untyped-call]
            self._unstarted.add(action.target)
        except docker.errors.ImageNotFound as error:
            self._reader.forget_images()
            raise image_missing(action.spec) from error
        except docker.errors.APIError as error:
            if error.response is None or error.response.status_code != 409:
                raise
            self._accept_existing(action.target, body["Labels"], explanation(error))

    def _accept_existing(self, name: str, labels: Mapping[str, str], message: str) -> None:
        """Raise EngineError unless the container of that name is this very replica."""
        try:
            existing = self._client.inspect_container(name)["Config"]["Labels"] or {}
        except docker.errors.NotFound as error:  # it was just being removed; the next plan creates it again
            raise EngineError(refusal(f"create of replica {name}", message)) from error
        differing = sorted(key for key, value in labels.items() if existing.get(key) != value)
        if differing:
            raise EngineError(
                f"create of replica {name}: another container has that name (its labels {', '.join(differing)} "
                f"differ); remove it with `docker rm -f {name}`"
            )

    @cached_property
    def _node(self) -> str:
        """The engine's name for its machine; read once, blocking."""
        return str(self._client.info().get("Name", ""))

    def _kill_and_start(self, project: str, compose_service: str) -> None:
        """Kill and start: Docker's restart policy does not apply to a container that was killed through the API."""
        found = self._client.containers(all=True, filters=_made_by_compose(project, compose_service))
        if not found:
            raise EngineError(
                f"Compose made no container of service {compose_service} in project {project}; "
                f"`docker compose up -d {compose_service}` makes one"
            )
        for container in found:
            if container["State"] in ("running", "paused"):
                self._client.kill(container["Id"], "SIGKILL")
            self._client.start(container["Id"])

    def _signal(self, action: SignalContainer) -> None:
        """Send SIGKILL, or as `docker stop` the container's stop_signal, else its image's, else SIGTERM.

        A program that listens to another signal ignores SIGTERM as a container's first process, or ends at once.
        """
        signal: str = action.signal
        try:
            if signal == "SIGTERM":
                signal = self._client.inspect_container(action.container_id)["Config"].get("StopSignal") or signal
            self._client.kill(action.container_id, signal)
        except docker.errors.APIError as error:
            if not _is_gone(error):
                raise  # else no process is left to signal

    def _remove(self, action: RemoveContainer) -> None:
        try:
            self._client.remove_container(action.container_id, force=action.force, v=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:
            if "already in progress" not in explanation(error):
                raise

    def _logs(self, container_id: str, tail: int, after: float | None, timed: bool) -> str:
        try:
            since = None if after is None else max(after, 1.0)  # the library refuses 0
            output = self._client.logs(container_id, tail=tail, since=since, timestamps=timed)
        except docker.errors.APIError as error:
            if not _is_gone(error):
                raise
            return ""
        return _end_of(output).decode(errors="replace")

    def _accept(self, project: str, raw: Mapping[str, Any]) -> EngineEvent | None:
        """The event if it may change a plan of this project. Runs in the event thread."""
        actor = raw.get("Actor") or {}
        attributes: Mapping[str, str] = actor.get("Attributes") or {}
        kind = str(raw.get("Action", ""))
        if raw.get("Type") == "image":
            self._reader.forget_images()
            return EngineEvent(f"image {kind}", "", attributes.get("name", ""))
        container_id = str(actor.get("ID", ""))
        self._reader.note_event(container_id)
        ours = project in (attributes.get("com.docker.compose.project"), attributes.get("pierhead.project"))
        if not ours and not self._reader.holds_gpu(container_id):
            return None
        return EngineEvent(kind, container_id, attributes.get("name", ""))

    # ------------------------------------------------------------------------------------------------------- pull

    async def _pull(self, action: PullImage) -> None:
        if action.spec.has_build:
            raise image_missing(action.spec)
        what = f"pull of image {action.image} for service {action.service or action.target}"
        given_up = threading.Event()
        try:
            pull = partial(self._pull_image, action.image, what, given_up)
            await self._call(what, pull, _PULL_TIMEOUT_S, self._pulls)
        finally:
            given_up.set()
            self._reader.forget_images()

    def _pull_image(self, image: str, what: str, given_up: threading.Event) -> None:
        """Pull until done. It ends at the next progress line once `given_up` is set, which makes the engine stop, too.

        docker-py's `pull` would wait for ever for a registry that has stopped sending.
        """
        repository, tag = parse_repository_tag(image)
        registry, _ = docker.auth.resolve_repository_name(repository)
        credentials = docker.auth.get_config_header(self._client, registry)
        with self._client.post(
            f"{self._client.base_url}/v{self._client.api_version}/images/create",
            params={"fromImage": repository, "tag": tag or "latest"},
            headers={"X-Registry-Auth": credentials} if credentials else None,
            stream=True,
            timeout=(_HTTP_TIMEOUT_S, _PULL_STALLED_S),
        ) as response:
            if not response.ok:
                raise _pull_failed(image, what, _message(response))
            for line in response.iter_lines():
                if given_up.is_set():
                    return
                message = json.loads(line).get("error") if line.strip() else None
                if message:
                    raise _pull_failed(image, what, str(message))


def _is_gone(error: docker.errors.APIError) -> bool:
    """404: there is no such container; 409: it does not run, is dead, or is just being removed."""
    return error.response is not None and error.response.status_code in (404, 409)


def _end_of(log: bytes) -> bytes:
    """The last whole lines that fit into 64 KiB, so that two readings can be compared line by line.

    If the last line alone is longer, its end.
    """
    kept = log[-_LONGEST_LOG:]
    if len(kept) == len(log) or log[-_LONGEST_LOG - 1 : -_LONGEST_LOG] == b"\n":
        return kept
    return kept.partition(b"\n")[2] or kept


def _message(response: requests.Response) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):  # not the engine's JSON: its text will do
        return str(response.json()["message"])
    return response.text.strip() or response.reason


def _pull_failed(image: str, what: str, message: str) -> EngineError:
    unknown = ("manifest unknown", "not found", "pull access denied", "does not exist", "invalid reference format")
    if any(fragment in message for fragment in unknown):
        return ImageNotFound(
            f"{what} failed: the Docker Engine says: {message}; check the image's name, or `docker login` where it is "
            "private"
        )
    return EngineError(
        f"{what} failed: the Docker Engine says: {message}; where no registry is reachable, bring the image with "
        f"`docker load`, under the name {image}"
    )


def _made_by_compose(project: str, compose_service: str) -> dict[str, list[str]]:
    """Filters for the containers that `docker compose up` made of a service."""
    return {
        "label": [
            f"com.docker.compose.project={project}",
            f"com.docker.compose.service={compose_service}",
            "com.docker.compose.oneoff=False",
        ],
    }

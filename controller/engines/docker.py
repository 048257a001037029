"""The Docker Engine as a ClusterEngine. docker-py blocks, so its calls run in a few threads, each with a timeout."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import aclosing
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import docker.errors
from docker import APIClient

from ..errors import EngineError, EngineSocketGone, EngineUnreachable
from ..model.actions import (
    CreateContainer,
    PullImage,
    RemoveContainer,
    RestartRouter,
    SignalContainer,
    StartContainer,
    UpdateNode,
)
from ..model.observed import EngineState
from .base import EngineAction, EngineEvent, Places
from .docker_calls import EngineCalls, end_of
from .docker_errors import explanation, image_missing, refusal, translated
from .docker_events import EventStream
from .docker_images import ImageFiles, Images
from .docker_reader import EngineReader
from .gpu_discovery import GpuDiscovery, GpuSources
from .labels import check_same, create_body
from .sockets import SocketDirectory

HTTP_TIMEOUT_S = 60

SOCKET = Path("/var/run/docker.sock")
"""The socket that docker-py uses by default."""


def is_orphaned(socket: Path) -> bool:
    """Whether the engine that made the socket file has deleted it, so that no answer will ever come."""
    try:
        return socket.stat().st_nlink == 0
    except OSError:  # no file now: a client that sees the real directory finds the new one when it is made
        return False


def socket_of(client: APIClient) -> Path:
    """The file that a client connects to."""
    adapter: Any = client.get_adapter(client.base_url)
    return Path(adapter.socket_path)


def open_client(base_url: str | None = None, socket: Path = SOCKET, *, timeout_s: int = HTTP_TIMEOUT_S) -> APIClient:
    """A docker-py client that speaks the engine's own API version. Blocking.

    Raises EngineUnreachable; EngineSocketGone where `socket`, the file that is used without a `base_url`, is orphaned.
    """
    try:
        with translated("connecting"):
            return APIClient(base_url=base_url, version="auto", timeout=timeout_s)
    except EngineUnreachable as error:
        if base_url is None and is_orphaned(socket):
            raise EngineSocketGone(str(error)) from error
        raise


class DockerEngine:
    """See `ClusterEngine`."""

    places: Places = "ours"

    def __init__(
        self, client: APIClient, gpu_sources: GpuSources | None = None, sockets: SocketDirectory | None = None
    ) -> None:
        """`client`: of an engine at a Unix socket. `sockets`: of the replicas; None = they have none."""
        self._client = client
        self._sockets = sockets
        sources = gpu_sources or GpuSources()
        self._cdi_kind = sources.cdi_kind
        self._discovery = GpuDiscovery(client, sources)
        self._images = Images(client)
        self._files = ImageFiles(client)
        self._reader = EngineReader(client, self._discovery, sources.cdi_kind, self._images)
        self._calls = EngineCalls()
        self._event_streams: set[EventStream] = set()
        self._unstarted: set[str] = set()
        """Names of the replicas that this process created and whose start has not ended; worker threads add to it."""

    async def observe(self, project: str, service_names: Collection[str], images: Collection[str]) -> EngineState:
        """See `ClusterEngine.observe`."""
        read = partial(self._reader.read, project, frozenset(service_names), tuple(images), self._unstarted)
        return await self._calls.look("reading containers", read)

    async def perform(self, action: EngineAction, project: str) -> None:
        """See `ClusterEngine.perform`."""
        match action:
            case PullImage():
                await self._images.pull(action, self._calls)
            case CreateContainer():
                await self._calls.call(f"create of replica {action.target}", partial(self._create, action, project))
            case StartContainer():
                self._unstarted.add(action.target)
                try:
                    await self._calls.call(
                        f"start of replica {action.target}", partial(self._client.start, action.target)
                    )
                finally:
                    self._unstarted.discard(action.target)
            case SignalContainer():
                await self._calls.stop(f"{action.signal} to replica {action.target}", partial(self._signal, action))
            case RemoveContainer():
                await self._calls.stop(f"removal of replica {action.target}", partial(self._remove, action))
                self._unstarted.discard(action.target)
                if self._sockets is not None:
                    self._sockets.forget(action.service, action.target)
            case RestartRouter():
                await self._calls.call(
                    f"restart of {action.target}", partial(self._kill_and_start, project, action.target)
                )
            case UpdateNode():
                raise EngineError(f"{action.words}: this engine is one machine and has no nodes")

    async def used_gpu_memory(self) -> Mapping[str, int]:
        """See `ClusterEngine.used_gpu_memory`."""
        try:
            return await self._calls.call("reading the memory of the GPUs", self._discovery.used_memory)
        except ValueError as error:
            raise EngineError(
                f"nvidia-smi cannot be asked for the memory of the GPUs: {error}; replicas are placed by what "
                "containers hold alone (CDI files as `nvidia-ctk cdi generate` writes them bring nvidia-smi along)"
            ) from error

    async def logs(self, container_id: str, tail: int, after: float | None = None, *, timed: bool = False) -> str:
        """See `ClusterEngine.logs`; whole lines, at most the last 64 KiB of them."""
        return await self._calls.read_log(container_id, partial(self._logs, container_id, tail, after, timed))

    async def has_image(self, image: str) -> bool:
        """See `ClusterEngine.has_image`."""
        return await self._calls.look(f"looking for image {image}", partial(self._images.has, image))

    async def file_of_image(self, image: str, path: str, project: str) -> bytes | None:
        """See `ClusterEngine.file_of_image`."""
        return await self._calls.call(
            f"reading {path} of image {image}", partial(self._files.read, image, path, project)
        )

    async def exists(self, project: str, compose_service: str) -> bool:
        """See `ClusterEngine.exists`."""
        look = partial(self._client.containers, all=True, filters=_made_by_compose(project, compose_service))
        return bool(await self._calls.call(f"looking for {compose_service}", look))

    async def events(self, project: str) -> AsyncIterator[EngineEvent]:
        """See `ClusterEngine.events`."""
        socket = socket_of(self._client)
        stream = EventStream(socket, self._client.api_version, partial(self._accept, project), self._reader.follow)
        self._event_streams.add(stream)
        try:
            async with aclosing(stream.events()) as events:
                async for event in events:
                    yield event
        except EngineUnreachable as error:
            if is_orphaned(socket):
                raise EngineSocketGone(str(error)) from error
            raise
        finally:
            self._event_streams.discard(stream)

    async def close(self) -> None:
        """Close connections and end threads; calls in progress are not waited for."""
        for stream in self._event_streams:
            stream.close()
        self._calls.close()
        self._client.close()

    # ------------------------------------------------------------------------------------- calls (in worker threads)

    def _create(self, action: CreateContainer, project: str) -> None:
        body = create_body(
            action.spec, action.target, action.version, action.number, action.gpus, project, self._cdi_kind, self._node
        )
        if self._sockets is not None:
            self._sockets.prepare(body["HostConfig"].get("Mounts") or ())
        try:
            self._client.create_container_from_config(body, name=action.target)  # type: ignore[no-untyped-call]
            self._unstarted.add(action.target)
        except docker.errors.ImageNotFound as error:
            self._images.forget()
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
        check_same(name, labels, existing, "container", "docker rm -f")

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
            if container["State"] == "running" and self._waits_for_cpu(container["Id"], compose_service):
                raise EngineError(
                    f"{compose_service} does not hang: it waits for CPU time or for the disk, and is not killed; "
                    "see what keeps this machine busy"
                )
            if container["State"] in ("running", "paused"):
                self._client.kill(container["Id"], "SIGKILL")
            self._client.start(container["Id"])

    def _waits_for_cpu(self, container_id: str, command: str) -> bool:
        """Whether a thread of a program in the container could run (R), or waits for the disk (D): a program that hangs
        sleeps or is stopped. (One that spins is ended by HAProxy's own watchdog.)
        """
        try:
            threads: list[list[str]] = self._client.top(container_id, ps_args="-eLo pid,stat,comm")["Processes"] or []
        except docker.errors.APIError:  # the engine's machine has no ps, or one without these columns
            return False
        return any(name == command and state[0] in "RD" for _, state, name in threads)

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
        return end_of(output).decode(errors="replace")

    def _accept(self, project: str, raw: Mapping[str, Any]) -> EngineEvent | None:
        """The event if it may change a plan of this project."""
        actor = raw.get("Actor") or {}
        attributes: Mapping[str, str] = actor.get("Attributes") or {}
        kind = str(raw.get("Action", ""))
        if raw.get("Type") == "image":
            self._images.forget()
            return EngineEvent(f"image {kind}", "", attributes.get("name", ""))
        container_id = str(actor.get("ID", ""))
        self._reader.note_event(container_id)
        ours = project in (attributes.get("com.docker.compose.project"), attributes.get("pierhead.project"))
        if not ours and not self._reader.holds_gpu(container_id):
            return None
        return EngineEvent(kind, container_id, attributes.get("name", ""))


def _is_gone(error: docker.errors.APIError) -> bool:
    """404: there is no such container; 409: it does not run, is dead, or is just being removed."""
    return error.response is not None and error.response.status_code in (404, 409)


def _made_by_compose(project: str, compose_service: str) -> dict[str, list[str]]:
    """Filters for the containers that `docker compose up` made of a service."""
    return {
        "label": [
            f"com.docker.compose.project={project}",
            f"com.docker.compose.service={compose_service}",
            "com.docker.compose.oneoff=False",
        ],
    }

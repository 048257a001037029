"""Reads the engine's part of a snapshot. A world at rest costs one call: `GET /containers/json`.

Everything else is cached under a key that changes with it:

- Details of a container, under its state and exit code, while the engine's events are followed and none was about it.
  (Without the cache, a hundred replicas that start would be a hundred calls more in every reading for a minute.)
- While events may be missed: under its state and the engine's own text on it, once it is a minute old. The text is "Up
  2 minutes", and a restart that the state alone hides changes it.
- Image ids for ten seconds, or until an image event. GPUs for half a minute.
- Device requests of foreign containers for as long as they run, as they cannot change.

What replicas take is asked only while a service has new ones (docker_machine.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import docker.errors

from ..model.observed import EngineState
from ..model.world import ContainerState, ReplicaContainer, StrayContainer
from .docker_images import Images
from .docker_machine import DockerMachine
from .gpu_discovery import PROBE_LABEL, PROBE_VALUE, GpuDiscovery
from .gpus import foreign_holders, requested_gpus
from .labels import read_labels, why_left_alone

if TYPE_CHECKING:
    from docker import APIClient


_log = logging.getLogger(__name__)

_NEVER = "0001-01-01"
_UP = (ContainerState.RUNNING, ContainerState.PAUSED)
_TEXTED = (*_UP, ContainerState.EXITED)
"""States in which a new start (or a failed one) changes the text in the list, except in the first minute: "Up 3
seconds" and "Exited (1) Less than a second ago" may be the same after a restart, and "Created" after a failed start."""

Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Details:
    """What only `inspect` returns of a container."""

    state: ContainerState
    created_at: float
    started_at: float | None
    exit_code: int | None
    oom_killed: bool


@dataclass(frozen=True, slots=True)
class _KnownContainer:
    """Details, and the key that they are cached under."""

    state: str
    text: str
    news: int
    """The number of events before they were read (`_News`)."""
    details: _Details


class _News:
    """Which containers the engine's events were about, and since when no event is missed. Used by two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._followed_from: int | None = None
        self._of: dict[str, int] = {}

    @property
    def count(self) -> int:
        """A number that grows with every event."""
        with self._lock:
            return self._count

    def follow(self, on: bool) -> None:
        """Set whether every event arrives from now on, or some may be missed."""
        with self._lock:
            self._count += 1
            self._followed_from = self._count if on else None
            self._of.clear()

    def note(self, container_id: str) -> None:
        """Note an event of a container."""
        with self._lock:
            self._count += 1
            if self._followed_from is not None:
                self._of[container_id] = self._count

    def nothing_since(self, container_id: str, count: int) -> bool:
        """Whether it is certain that a container had no event since `count` was read."""
        with self._lock:
            return self._followed_from is not None and count >= max(self._followed_from, self._of.get(container_id, 0))

    def keep_only(self, container_ids: Collection[str]) -> None:
        """Forget the other containers, which are gone."""
        with self._lock:
            self._of = {key: count for key, count in self._of.items() if key in container_ids}


@dataclass(eq=False)
class EngineReader:
    """Blocking; one read at a time. All other methods may be called from any thread during it."""

    _client: APIClient
    _discovery: GpuDiscovery
    _cdi_kind: str
    _images: Images

    def __post_init__(self) -> None:
        self._machine = DockerMachine(self._client)
        self._lock = threading.Lock()
        self._known: dict[str, _KnownContainer] = {}
        self._replicas: dict[str, ReplicaContainer] = {}
        """What the last read returned, by id."""
        self._news = _News()
        self._requests: dict[str, frozenset[str]] = {}

    def read(
        self, project: str, service_names: Collection[str], images: Collection[str], unstarted: Collection[str] = ()
    ) -> EngineState:
        """One snapshot. Raises what docker-py raises.

        `unstarted` are names of replicas whose first start has not ended. They are not inspected: `inspect` waits for
        the end of the start, and the list has all that is known of them.
        """
        with self._lock:
            inventory = self._discovery.inventory()
            # Foreign containers matter only for the GPUs they hold.
            summaries = self._list(project, everything=bool(inventory.gpus))
            replicas, strays, left_alone = self._sort(summaries, project, service_names, unstarted)
            known = {replica.id for replica in replicas}
            holders: dict[str, str] = {}
            if inventory.gpus:
                foreign = [summary for summary in summaries if summary["Id"] not in known]
                holders, warnings = foreign_holders(self._foreign_requests(foreign), inventory)
                for warning in warnings:
                    self._discovery.warn_once(warning)
            found = self._images.ids(images)
            machine = self._machine.read(replicas)
            return EngineState(replicas, strays, found, inventory.gpus, holders, left_alone=left_alone, machine=machine)

    def follow(self, on: bool) -> None:
        """Set whether every event arrives from now on, or some may be missed."""
        self._news.follow(on)

    def note_event(self, container_id: str) -> None:
        """Read that container's details again at the next read: an event was about it."""
        self._news.note(container_id)

    def holds_gpu(self, container_id: str) -> bool:
        """Whether a foreign container was seen to hold a GPU: its end may let a replica start."""
        return bool(self._requests.get(container_id))

    # -------------------------------------------------------------------------------------------------- containers

    def _list(self, project: str, *, everything: bool) -> list[Summary]:
        filters = {} if everything else {"label": f"com.docker.compose.project={project}"}
        summaries: list[Summary] = self._client.containers(all=True, filters=filters)
        return summaries

    def _sort(
        self, summaries: Iterable[Summary], project: str, service_names: Collection[str], unstarted: Collection[str]
    ) -> tuple[tuple[ReplicaContainer, ...], tuple[StrayContainer, ...], dict[str, str]]:
        """Separate our replicas from strays and from what is left alone, and forget the details of containers that are
        gone."""
        replicas: list[ReplicaContainer] = []
        strays: list[StrayContainer] = []
        left_alone: dict[str, str] = {}
        for summary in summaries:
            labels: Mapping[str, str] = summary.get("Labels") or {}
            name = _name(summary)
            if labels.get("pierhead.project") != project:
                if _is_stray(name, labels, project, service_names):
                    strays.append(StrayContainer(summary["Id"], name, labels["com.docker.compose.service"]))
            elif (read := read_labels(labels, name, project)) is None:
                left_alone[name] = why_left_alone("container", name, project, "docker rm -f")
            elif replica := self._replica(summary, read, project, is_unstarted=name in unstarted):
                before = self._replicas.get(replica.id)
                # The same object where nothing has changed, so that values derived from it can be reused.
                replicas.append(before if before == replica else replica)
        self._replicas = {replica.id: replica for replica in replicas}
        alive = self._replicas.keys()
        self._known = {key: entry for key, entry in self._known.items() if key in alive}
        self._news.keep_only(alive)
        replicas.sort(key=lambda one: one.name)
        return tuple(replicas), tuple(sorted(strays, key=lambda one: one.name)), left_alone

    def _replica(
        self, summary: Summary, read: Mapping[str, Any], project: str, *, is_unstarted: bool
    ) -> ReplicaContainer | None:
        """Our replica, by what its labels say; None if it vanished between two calls."""
        is_new = summary.get("State") == ContainerState.CREATED and is_unstarted
        details = _before_its_start(summary) if is_new else self._inspected(summary)
        if details is None:
            return None
        return ReplicaContainer(
            id=summary["Id"],
            state=details.state,
            ip=_address(summary, project) if details.state.is_up else None,
            created_at=details.created_at,
            started_at=details.started_at,
            exit_code=details.exit_code,
            oom_killed=details.oom_killed,
            **read,
        )

    def _inspected(self, summary: Summary) -> _Details | None:
        container_id, state, text = summary["Id"], str(summary.get("State")), str(summary.get("Status"))
        known = self._known.get(container_id)
        if known is not None and known.state == state:
            same_text = known.text == text and "second" not in text
            same_outcome = state in _UP or _outcome(known.text) == _outcome(text)
            if same_text or (same_outcome and self._news.nothing_since(container_id, known.news)):
                return known.details
        news = self._news.count  # before the call: an event during the call causes another read
        try:
            details = _details(self._client.inspect_container(container_id))
        except docker.errors.NotFound:
            return None
        if state in _TEXTED:
            self._known[container_id] = _KnownContainer(state, text, news, details)
        return details

    # ---------------------------------------------------------------------------------------------- GPUs and images

    def _foreign_requests(self, summaries: Iterable[Summary]) -> dict[str, frozenset[str]]:
        """Container name -> names of the GPUs it was given, of those that are up."""
        requests: dict[str, frozenset[str]] = {}
        names: dict[str, frozenset[str]] = {}
        for summary in summaries:
            # The value counts, too: replicas of every stack have a label of that name.
            if not _is_up(summary) or (summary.get("Labels") or {}).get(PROBE_LABEL) == PROBE_VALUE:
                continue
            container_id = summary["Id"]
            wanted = self._requests.get(container_id)
            if wanted is None:
                try:
                    wanted = requested_gpus(self._client.inspect_container(container_id), self._cdi_kind)
                except docker.errors.NotFound:
                    continue
            requests[container_id] = names[_name(summary)] = wanted
        self._requests = requests
        return names


def _is_stray(name: str, labels: Mapping[str, str], project: str, service_names: Collection[str]) -> bool:
    """Whether `docker compose up` started the container for a service.

    Labels of project and service alone do not say so: Compose writes them into the images that it builds, so every
    container of such an image has them. A one-off belongs to the user who typed `docker compose run`.
    """
    service, number = labels.get("com.docker.compose.service"), labels.get("com.docker.compose.container-number")
    return (
        labels.get("com.docker.compose.project") == project
        and service in service_names
        and labels.get("com.docker.compose.oneoff") == "False"
        and name in (f"{project}-{service}-{number}", f"{project}_{service}_{number}")  # with --compatibility
    )


def _name(summary: Summary) -> str:
    names = summary.get("Names") or ()
    return str(names[0]).removeprefix("/") if names else str(summary["Id"])[:12]


def _is_up(summary: Summary) -> bool:
    state = summary.get("State")
    return state in (ContainerState.RUNNING, ContainerState.PAUSED, ContainerState.RESTARTING)


def _address(summary: Summary, project: str) -> str | None:
    """Its address in the network it was created in (the one shared with the controller, see networks.py).

    Else in the project's default network, else in the first by name that gives one.
    """
    networks: Mapping[str, Any] = (summary.get("NetworkSettings") or {}).get("Networks") or {}
    main = (summary.get("HostConfig") or {}).get("NetworkMode")
    for name in sorted(networks, key=lambda name: (name != main, name != f"{project}_default", name)):
        address = (networks[name] or {}).get("IPAddress")
        if address:
            return str(address)
    return None


def _details(container: Mapping[str, Any]) -> _Details:
    state = container["State"]
    status = _state(state)
    code = int(state.get("ExitCode") or 0)
    # A container whose start failed stays "created" with the failure's code; 0 there means that it was never started.
    ended = status in (ContainerState.EXITED, ContainerState.DEAD) or (status is ContainerState.CREATED and code != 0)
    return _Details(
        state=status,
        created_at=timestamp(container["Created"]) or 0.0,
        started_at=timestamp(state.get("StartedAt") or _NEVER),
        exit_code=code if ended else None,
        oom_killed=bool(state.get("OOMKilled")),
    )


def _outcome(text: str) -> str:
    """The list's text on an exit without its age: "Exited (1". A failed start sends no event, but changes the code."""
    return text.partition(")")[0]


def _before_its_start(summary: Summary) -> _Details:
    """The details of a container that never ran, from the list."""
    created_at = float(summary["Created"])
    return _Details(ContainerState.CREATED, created_at, started_at=None, exit_code=None, oom_killed=False)


def _state(state: Mapping[str, Any]) -> ContainerState:
    try:
        return ContainerState(state["Status"])
    except ValueError:
        # A state of a later engine: what matters is whether processes may exist.
        return ContainerState.RUNNING if state.get("Running") else ContainerState.EXITED


def timestamp(text: str) -> float | None:
    """Seconds since 1970 of the engine's RFC 3339 text; None for its "never"."""
    return None if text.startswith(_NEVER) else datetime.fromisoformat(text).timestamp()

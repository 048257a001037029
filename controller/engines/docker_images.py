"""Looks up and pulls images of one Docker Engine, and reads files of them. Blocking."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import docker.auth
import docker.errors
from docker.utils import parse_repository_tag

from .. import docker_http
from ..errors import EngineError, ImageNotFound
from ..model.actions import PullImage
from .base import MOST_FILE_BYTES
from .docker_calls import EngineCalls
from .docker_errors import image_missing

if TYPE_CHECKING:
    import requests
    from docker import APIClient

_PERIOD_S = 10.0
_CONNECT_TIMEOUT_S = 60.0
_PULL_STALLED_S = 300.0
_NOT_GIVEN = (
    *("manifest unknown", "not found", "does not exist", "invalid reference format"),
    *("denied", "unauthorized", "no basic auth credentials"),
)
"""What registries say that will say the same again."""


class Images:
    """The ids of images, each looked up at most every ten seconds, and pulls. `forget` may be called by any thread."""

    def __init__(self, client: APIClient, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._monotonic = monotonic
        self._ids: dict[str, str | None] = {}
        self._due = float("-inf")

    def ids(self, images: Collection[str]) -> dict[str, str | None]:
        """Name -> id; None for an image that the engine does not have."""
        now = self._monotonic()
        if now >= self._due:
            # Set before reading: an image event that arrives during it must not be overwritten.
            self._due = now + _PERIOD_S
            self._ids = {}
        for image in images:
            if image not in self._ids:
                found = self.inspect(image)
                self._ids[image] = None if found is None else str(found["Id"])
        return {image: self._ids[image] for image in images}

    def has(self, image: str) -> bool:
        """Whether the engine has an image, by name or by id."""
        return self.inspect(image) is not None

    def forget(self) -> None:
        """Look all ids up again at the next reading."""
        self._due = float("-inf")

    def inspect(self, image: str) -> dict[str, Any] | None:
        """What the engine knows of an image; None if it does not have it."""
        try:
            return self._client.inspect_image(image)  # type: ignore[no-untyped-call, no-any-return]
        except docker.errors.APIError as error:
            # 400 is a name that no image can have: the attempt to pull it reports that.
            if error.response is not None and error.response.status_code in (400, 404):
                return None
            raise

    def credentials(self, image: str) -> dict[str, str | bytes]:
        """The header with the credentials for an image's registry; empty where there are none."""
        registry, _ = docker.auth.resolve_repository_name(parse_repository_tag(image)[0])
        credentials = docker.auth.get_config_header(self._client, registry)
        return {"X-Registry-Auth": credentials} if credentials else {}

    async def pull(self, action: PullImage, calls: EngineCalls) -> None:
        """Pull an image that Compose does not build. Raises ImageNotFound, EngineError."""
        if action.spec.has_build:
            raise image_missing(action.spec)
        what = f"pull of image {action.image} for service {action.service or action.target}"
        given_up = threading.Event()
        try:
            await calls.pull(what, lambda: self._pull(action.image, what, given_up))
        finally:
            given_up.set()
            self.forget()

    def _pull(self, image: str, what: str, given_up: threading.Event) -> None:
        """Pull until done. It ends at the next progress line once `given_up` is set, which makes the engine stop, too.

        docker-py's `pull` would wait forever for a registry that has stopped sending.
        """
        repository, tag = parse_repository_tag(image)
        with self._client.post(
            docker_http.url(self._client, "/images/create"),
            params={"fromImage": repository, "tag": tag or "latest"},
            headers=self.credentials(image),
            stream=True,
            timeout=(_CONNECT_TIMEOUT_S, _PULL_STALLED_S),
        ) as response:
            if not response.ok:
                raise _pull_failed(image, what, _message(response))
            for line in response.iter_lines():
                if given_up.is_set():
                    return
                message = json.loads(line).get("error") if line.strip() else None
                if message:
                    raise _pull_failed(image, what, str(message))


def _message(response: requests.Response) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):  # not the engine's JSON: its text will do
        return str(response.json()["message"])
    return response.text.strip() or response.reason


def _pull_failed(image: str, what: str, message: str) -> EngineError:
    if any(fragment in message for fragment in _NOT_GIVEN):
        return ImageNotFound(
            f"{what} failed: the Docker Engine says: {message}; check the image's name; where it is private, "
            "`docker login` and `pierhead up` bring it"
        )
    return EngineError(
        f"{what} failed: the Docker Engine says: {message}; where no registry is reachable, bring the image with "
        f"`docker load`, under the name {image}"
    )


# ----------------------------------------------------------------------------------------------------
# A file of an image is read from a container that is created, never started, and removed.


HELPER_LABEL = "pierhead.reads-image"
"""Of such containers: the project of the controller that made it."""
_MOST_BYTES = MOST_FILE_BYTES + 16 * 1024
"""Of the archive: the file, and tar's blocks around it."""


class ImageFiles:
    """Reads one file at a time: a container that is there at the begin of a read was left behind, and is removed."""

    def __init__(self, client: APIClient) -> None:
        self._client = client

    def read(self, image: str, path: str, project: str) -> bytes | None:
        """See `ClusterEngine.file_of_image`. Raises what docker-py raises."""
        for left in self._client.containers(all=True, filters={"label": f"{HELPER_LABEL}={project}"}):
            self._remove(left["Id"])
        body = {
            "Image": image,
            "Entrypoint": ["never-started"],
            "Cmd": [],
            "Labels": {HELPER_LABEL: project},
            "HostConfig": {"NetworkMode": "none"},
        }
        try:
            container = self._client.create_container_from_config(body)["Id"]  # type: ignore[no-untyped-call]
        except docker.errors.ImageNotFound:
            return None
        try:
            return self._file(container, path)
        except docker.errors.NotFound:
            return None
        finally:
            self._remove(container)

    def _file(self, container: str, path: str) -> bytes | None:
        archive = io.BytesIO()
        with docker_http.stream(self._client, f"/containers/{container}/archive", {"path": path}) as response:
            for part in response.iter_content(64 * 1024):
                archive.write(part)
                if archive.tell() > _MOST_BYTES:
                    return None
        archive.seek(0)
        with tarfile.open(fileobj=archive) as entries:
            entry = entries.next()
            if entry is None or not entry.isfile() or entry.size > MOST_FILE_BYTES:
                return None
            file = entries.extractfile(entry)
            return None if file is None else file.read()

    def _remove(self, container: str) -> None:
        try:
            self._client.remove_container(container, force=True, v=True)
        except docker.errors.NotFound:
            return  # pruned since

"""Reads a file of an image from a container that is created, never started, and removed. Blocking."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import docker.errors

from .. import docker_http
from .base import MOST_FILE_BYTES

if TYPE_CHECKING:
    from docker import APIClient

LABEL = "pierhead.reads-image"
"""Of such containers: the project of the controller that made it."""
_MOST_BYTES = MOST_FILE_BYTES + 16 * 1024
"""Of the archive: the file, and tar's blocks around it."""


class ImageFiles:
    """Reads one file at a time: a container that is there at the begin of a read was left behind, and is removed."""

    def __init__(self, client: APIClient) -> None:
        self._client = client

    def read(self, image: str, path: str, project: str) -> bytes | None:
        """See `ClusterEngine.file_of_image`. Raises what docker-py raises."""
        for left in self._client.containers(all=True, filters={"label": f"{LABEL}={project}"}):
            self._remove(left["Id"])
        body = {
            "Image": image,
            "Entrypoint": ["never-started"],
            "Cmd": [],
            "Labels": {LABEL: project},
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

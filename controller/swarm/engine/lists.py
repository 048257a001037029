"""The lists of a Swarm's manager, which are read several times a second and seldom change.

Connections to the engine's socket are kept: a call costs a tenth of one through docker-py. What a manager answers with
the same bytes as before is the same object as before, so nothing is computed from it again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any
from urllib.parse import quote

import docker.errors
import requests
from docker import APIClient


class Lists:
    """The lists that the engine of a client gives. Each question's last answer is kept, so the questions must be few.

    Raises what docker-py raises.
    """

    def __init__(self, client: APIClient) -> None:
        self._client = client
        self._idle: list[_DockerConnection] = []
        self._last: dict[str, tuple[bytes, list[Any]]] = {}

    def get(self, kind: str, **filters: str) -> list[Any]:
        """The services, tasks or nodes that pass these filters; the caller changes nothing of it."""
        wanted = json.dumps({key.replace("_", "-"): [value] for key, value in filters.items()})
        path = f"/v{self._client.api_version}/{kind}?filters={quote(wanted)}"
        answer = self._answer(path)
        last = self._last.get(path)
        if last is None or last[0] != answer:
            last = self._last[path] = answer, json.loads(answer)
        return last[1]

    def close(self) -> None:
        """Close the connections that are not in use."""
        while (kept := self._taken()) is not None:
            kept.close()

    def _taken(self) -> _DockerConnection | None:
        """A connection that is not in use. Another thread may take the last one at any moment."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return None

    def _answer(self, path: str) -> bytes:
        status, body = self._asked(path)
        if status != http.HTTPStatus.OK:
            raise _api_error(status, body)
        return body

    def _asked(self, path: str) -> tuple[int, bytes]:
        adapter: Any = self._client.get_adapter(self._client.base_url)
        file = str(adapter.socket_path)
        while (kept := self._taken()) is not None:
            if kept.file == file:
                with contextlib.suppress(ConnectionError, http.client.HTTPException):
                    return self._asked_over(kept, path)  # the engine may have ended it, as after a restart
            kept.close()
        try:
            return self._asked_over(_DockerConnection(file, self._client.timeout), path)
        except http.client.HTTPException as error:
            raise requests.ConnectionError(str(error)) from error

    def _asked_over(self, connection: _DockerConnection, path: str) -> tuple[int, bytes]:
        try:
            answer = connection.get(path)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer


class _DockerConnection(http.client.HTTPConnection):
    """To the socket in that file."""

    def __init__(self, file: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self.file = file

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.file)

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self.request("GET", path)
        answer = self.getresponse()
        return answer.status, answer.read()


def _api_error(status: int, body: bytes) -> docker.errors.APIError:
    response = requests.Response()
    response.status_code = status
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, LookupError, TypeError):
        message = body.decode(errors="replace")
    kind = docker.errors.NotFound if status == http.HTTPStatus.NOT_FOUND else docker.errors.APIError
    return kind(message, response=response, explanation=message)

"""The lists of a Swarm's manager, which are read several times a second and seldom change.

They are asked over docker-py's own connections: a call through all of docker-py costs four times as much. What a
manager answers with the same bytes as before is the same object as before, so nothing is computed from it again.
"""

from __future__ import annotations

import http
import json
from typing import Any
from urllib.parse import quote

import docker.errors
import requests
import urllib3
from docker import APIClient


class Lists:
    """The lists that the engine of a client gives. Each question's last answer is kept, so the questions must be few.

    Raises what docker-py raises.
    """

    def __init__(self, client: APIClient) -> None:
        self._client = client
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

    def _answer(self, path: str) -> bytes:
        client = self._client
        adapter: Any = client.get_adapter(client.base_url)
        try:  # once more, as the engine may have ended the connection: after a restart
            answer = adapter.get_connection(client.base_url).urlopen("GET", path, timeout=client.timeout, retries=1)
        except urllib3.exceptions.HTTPError as error:
            raise requests.ConnectionError(str(error)) from error
        if answer.status != http.HTTPStatus.OK:
            raise _api_error(answer.status, answer.data)
        return bytes(answer.data)


def _api_error(status: int, body: bytes) -> docker.errors.APIError:
    response = requests.Response()
    response.status_code = status
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, LookupError, TypeError):
        message = body.decode(errors="replace")
    kind = docker.errors.NotFound if status == http.HTTPStatus.NOT_FOUND else docker.errors.APIError
    return kind(message, response=response, explanation=message)

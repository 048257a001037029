"""Calls of the Docker Engine's API that docker-py has no public method for, in public parts of it and of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import docker.errors
import requests
from docker import APIClient


def url(client: APIClient, path: str) -> str:
    """The address of a path of the API, in the client's version."""
    return f"{client.base_url}/v{client.api_version}{path}"


def get(client: APIClient, path: str, **query: str | float) -> requests.Response:
    """Raises docker-py's APIError for an answer that is one, and what requests raises."""
    return _checked(client.get(url(client, path), params=query, timeout=client.timeout))


def stream(client: APIClient, path: str, query: Mapping[str, str]) -> requests.Response:
    """An answer whose body is not read yet: close it. Raises as `get` does."""
    return _checked(client.get(url(client, path), params=query, timeout=client.timeout, stream=True))


def post(client: APIClient, path: str, body: object, headers: Mapping[str, Any] | None = None, **query: int) -> None:
    """Raises as `get` does."""
    _checked(client.post(url(client, path), json=body, params=query, headers=headers, timeout=client.timeout))


def _checked(response: requests.Response) -> requests.Response:
    try:
        response.raise_for_status()
    except requests.HTTPError as error:
        docker.errors.create_api_error_from_http_exception(error)
    return response

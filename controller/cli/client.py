"""The REST API as the command uses it: one small synchronous client, errors as one sentence."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

TIMEOUT_S = 40.0
"""Longer than the longest wait that `events -f` asks the API for."""


class ApiError(Exception):
    """The API refused, or does not answer; the message is for people."""

    exit_code = 1


class BadInputError(ApiError):
    """The API found the input wrong."""

    exit_code = 2


class SilentError(ApiError):
    """The API does not answer: the controller is down or being restarted."""


class Client:
    """`url` without a path; `token` for changes from another machine."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._token = token
        # The controller is next door: a proxy from the environment has no business here.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return the JSON at a path. Raises ApiError and its kinds."""
        return self._send("GET", path + (f"?{urllib.parse.urlencode(query)}" if query else ""), None)

    def put(self, path: str, document: object) -> Any:
        """Ask for a change. Raises ApiError and its kinds."""
        return self._send("PUT", path, json.dumps(document).encode())

    def _send(self, method: str, path: str, body: bytes | None) -> Any:
        if not self._url.startswith(("http://", "https://")):
            raise BadInputError(f"PIERHEAD_API_URL: expected http://host:port, found {self._url!r}")
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self._url + path, body, headers, method=method)  # noqa: S310 - checked above
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error.code, error.read()) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise SilentError(
                f"the controller does not answer at {self._url} ({reason}); start the stack with `make up`, or look at "
                "`docker compose logs controller`"
            ) from error
        except ValueError as error:
            raise ApiError(f"{self._url} is not Pierhead's API: its answer is not JSON") from error


def segment(name: str) -> str:
    """Return a name as one segment of a path."""
    return urllib.parse.quote(name, safe="")


def _refusal(status: int, body: bytes) -> ApiError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ApiError(f"the API answered {status}, without a reason")
    kind = BadInputError if status in (400, 403, 404, 413) else ApiError
    return kind(message)

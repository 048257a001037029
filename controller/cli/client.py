"""The REST API as the command uses it: one small synchronous client, errors as one sentence."""

from __future__ import annotations

import http
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from controller.cli.errors import BadInput, CommandError, NotYet, Unreachable

DEFAULT_URL = "http://127.0.0.1:8100"
TIMEOUT_S = 40.0
"""Longer than the longest wait that `events -f` asks the API for."""

_BAD_INPUT = (400, 403, 404, 405, 413)


class Client:
    """`url` without a path; `token` for changes from another machine."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        # The controller is next door: a proxy from the environment has no business here.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @classmethod
    def from_environment(cls, timeout_s: float = TIMEOUT_S) -> Client:
        """The API that PIERHEAD_API_URL names, else that of the controller whose container this is."""
        return cls(os.environ.get("PIERHEAD_API_URL") or DEFAULT_URL, os.environ.get("PIERHEAD_API_TOKEN"), timeout_s)

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return the JSON at a path. Raises CommandError and its kinds."""
        return self._send("GET", path + (f"?{urllib.parse.urlencode(query)}" if query else ""), None)

    def put(self, path: str, document: object) -> Any:
        """Ask for a change. Raises CommandError and its kinds."""
        return self._send("PUT", path, json.dumps(document).encode())

    def post(self, path: str, document: object) -> Any:
        """Ask for something to be done. Raises CommandError and its kinds."""
        return self._send("POST", path, json.dumps(document).encode())

    def _send(self, method: str, path: str, body: bytes | None) -> Any:
        if not is_address(self._url):
            raise BadInput(f"PIERHEAD_API_URL: expected http://host:port, found {self._url!r}")
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._token:
            _check_token(self._token)
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self._url + path, body, headers, method=method)  # noqa: S310 - checked above
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error.code, error.read(), is_passing="Retry-After" in error.headers) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise Unreachable(
                f"the controller does not answer at {self._url} ({reason}); start the stack with `make up`, or look at "
                "`docker compose logs controller`"
            ) from error
        except ValueError as error:
            raise CommandError(f"{self._url} is not Pierhead's API: its answer is not JSON") from error


def is_address(url: str) -> bool:
    """Whether a URL names a host that HTTP may be spoken with."""
    try:
        parts = urllib.parse.urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and url.isprintable()
            and " " not in url
        )
    except ValueError:  # half an IPv6 address, or a port that is no number
        return False


def _check_token(token: str) -> None:
    """Raises BadInput for one that no header can carry; the token itself is not shown."""
    odd = next((number for number, character in enumerate(token) if not " " <= character <= "~"), None)
    if odd is not None:
        raise BadInput(
            f"PIERHEAD_API_TOKEN: expected printable ASCII, found {token[odd]!a} as character {odd + 1} of "
            f"{len(token)}; a token that was read from a file may end with a line end of that file"
        )


def segment(name: str) -> str:
    """Return a name as one segment of a path."""
    return urllib.parse.quote(name, safe="")


def service_path(name: str, *below: str) -> str:
    """Return the path of a service's document, or of one below it."""
    return "/".join(["/api/v1/services", segment(name), *below])


def _refusal(status: int, body: bytes, *, is_passing: bool) -> CommandError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return CommandError(
            f"the API answered {status}, without a reason; `docker compose logs controller` may have it"
        )
    if status == http.HTTPStatus.SERVICE_UNAVAILABLE and is_passing:
        return NotYet(message)
    return (BadInput if status in _BAD_INPUT else CommandError)(message)

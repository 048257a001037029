"""The command's synchronous client of the REST API; each error is one sentence."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from ..build import BUILD_HEADER, current_build
from . import output as out
from .errors import BadInput, CommandError, NotYet, Unreachable
from .project.direct import UNIX, as_http, is_address, opened, reason

DEFAULT_URL = "http://127.0.0.1:8100"
TIMEOUT_S = 40.0
"""Longer than the longest wait that `events -f` asks the API for."""
CHANGE_TIMEOUT_S = 150.0
"""The timeout of changes. Longer than the longest answer of `deploy`: it waits for a current reading of the compose
files, reads them itself, and waits for a tick."""

POLL_S = 0.5
"""Between two tries to reach a controller that may be on its way (PIERHEAD_API_PATIENCE_S)."""
TOLD_AFTER_S = 5.0
"""A longer wait says what it waits for."""

LOG = "the controller's log (`pierhead logs controller`)"
_BAD_INPUT = (400, 403, 404, 405, 413, 421)


class ControllerClient:
    """`url`: http://host:port, or a Unix socket, unix:///path. `token`: for an API that asks for one.

    `patience_s`: how long a request that cannot be sent is tried again. The controller that acts may just have been
    lost, and another one takes its place. `own_stack`: see `stale_words`.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        change_timeout_s: float = CHANGE_TIMEOUT_S,
        patience_s: float = 0.0,
        own_stack: str = "",
    ) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._change_timeout_s = change_timeout_s
        self._patience_s = patience_s
        self._own_stack = own_stack

    @classmethod
    def from_environment(
        cls, timeout_s: float = TIMEOUT_S, change_timeout_s: float = CHANGE_TIMEOUT_S
    ) -> ControllerClient:
        """The API at PIERHEAD_API_URL, else that of the controller in this container."""
        url, token = os.environ.get("PIERHEAD_API_URL") or DEFAULT_URL, os.environ.get("PIERHEAD_API_TOKEN")
        patience_s = min(float(os.environ.get("PIERHEAD_API_PATIENCE_S") or 0), timeout_s)
        own_stack = os.environ.get("PIERHEAD_OWN_STACK", "")
        return cls(url, token, timeout_s, change_timeout_s, patience_s, own_stack)

    def get(self, path: str, query: Mapping[str, str] | Sequence[tuple[str, str]] = ()) -> Any:
        """Return the JSON at a path. Raises CommandError and its kinds."""
        path = path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        try:
            return self._send("GET", path, None, self._timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from error

    def put(self, path: str, document: object) -> Any:
        """Ask for a change. Raises CommandError and its kinds."""
        return self._change("PUT", path, document)

    def post(self, path: str, document: object) -> Any:
        """Ask for an operation. Raises CommandError and its kinds."""
        return self._change("POST", path, document)

    def delete(self, path: str) -> Any:
        """Ask for a removal. Raises CommandError and its kinds."""
        return self._change("DELETE", path, {})

    def _change(self, method: str, path: str, document: object) -> Any:
        try:
            return self._send(method, path, out.json_text(document).encode(), self._change_timeout_s)
        except urllib.error.URLError as error:  # it was never sent
            raise self._silent(error) from error
        except (OSError, http.client.HTTPException) as error:
            how = f"within {self._change_timeout_s:g} s" if isinstance(error, TimeoutError) else f"({error})"
            raise Unreachable(
                f"the controller at {self.url} was asked and has not answered {how}: it may have accepted the "
                "change, or may still accept it; `pierhead status` and `pierhead events` show whether it did, "
                f"{LOG} what it waits for"
            ) from error

    def _silent(self, error: Exception) -> Unreachable:
        if self.url.startswith(UNIX) and isinstance(reason(error), PermissionError):
            return Unreachable(
                f"{self.url} lets in root, the owner of the project's directory and members of Docker's group; others "
                "ask at the API's port (PIERHEAD_API_URL, and PIERHEAD_API_TOKEN for a token)"
            )
        return Unreachable(
            f"the controller does not answer at {self.url} ({reason(error)}); start the "
            f"stack with `pierhead up`, or look at {LOG}"
        )

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        """Raises CommandError and its kinds; URLError where nothing was sent, OSError or HTTPException later on."""
        if not is_address(self.url):
            raise BadInput(f"PIERHEAD_API_URL: expected http://host:port or unix:///path, found {self.url!r}")
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._token:
            _check_token(self._token)
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(as_http(self.url) + path, body, headers, method=method)  # noqa: S310 - checked above
        try:
            with self._opened(request, timeout_s) as response:
                self._warn_of_stale_code(response.headers.get(BUILD_HEADER))
                document = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                self._warn_of_stale_code(error.headers.get(BUILD_HEADER))  # it may not know the path
                raise _refusal(error.code, error.read(), is_passing="Retry-After" in error.headers) from None
        except ValueError as error:
            raise CommandError(f"{self.url} is not Pierhead's API: its answer is not JSON") from error
        if not isinstance(document, dict):  # every document that a command asks for is an object
            raise CommandError(f"{self.url} is not Pierhead's API: its answer is no JSON object")
        return document

    def _warn_of_stale_code(self, build: str | None) -> None:
        """Once, on standard error."""
        if build and (stale := stale_words(self._own_stack, build)):
            out.complain(stale)
        self._own_stack = ""

    def _opened(self, request: urllib.request.Request, timeout_s: float) -> Any:
        """The answer. A request that was not sent is tried again for `patience_s`; HTTPError is an answer."""
        began, is_told = time.monotonic(), False
        while True:
            try:
                return opened(request, timeout_s)
            except urllib.error.URLError as error:
                waited_s = time.monotonic() - began
                if isinstance(error, urllib.error.HTTPError) or waited_s >= self._patience_s:
                    raise
                if waited_s >= TOLD_AFTER_S and not is_told:
                    out.complain(f"pierhead: waiting for a controller that acts ({error.reason}) ...")
                    is_told = True
            time.sleep(POLL_S)


def _check_token(token: str) -> None:
    """Raise BadInput for a token that a header cannot contain; the token itself is not shown."""
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
    """Return the path of a service's document, or of a document below it."""
    return "/".join(["/api/v1/services", segment(name), *below])


def _refusal(status: int, body: bytes, *, is_passing: bool) -> CommandError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return CommandError(f"the API answered {status}, without a reason; {LOG} may have it")
    if status == http.HTTPStatus.SERVICE_UNAVAILABLE and is_passing:
        return NotYet(message)
    return (BadInput if status in _BAD_INPUT else CommandError)(message)


# ------------------------------------------------------------------------------------- a controller of another build


def stale_words(where: str, theirs: str) -> str:
    """A one-line warning that the controller's image was built from other code than the command; "" where it is not.

    `where`: "clone" or "directory", what the stack was started from; "" where it is another machine's. `theirs`: the
    controller's build.
    """
    if not where or not theirs or (ours := current_build()) == theirs:
        return ""
    if where == "clone":
        return (
            f"pierhead: the controller's image was built from other code than this clone (build {theirs}, the clone's "
            f"is {ours}); `make up` builds and starts the clone's, `make build` only builds it"
        )
    return (
        f"pierhead: the controller's image was built from other code than this tool (build {theirs}, the tool's "
        f"is {ours}); `pierhead up` brings both together"
    )


def mismatch(error: Exception) -> CommandError | None:
    """The error for an answer that lacks a member because the controller is of another build; None if it is not."""
    try:
        info = ControllerClient.from_environment().get("/api/v1/openapi.json")["info"]
    except (CommandError, KeyError):
        return None
    ours, theirs = current_build(), info.get("x-build", "unknown")
    if ours == theirs:
        return None
    return CommandError(
        f"the controller is of another build ({theirs}) than this command ({ours}), which cannot read its answer "
        f"({type(error).__name__}: {error}); bring both to the same version, or run `pierhead` on the controller's "
        "machine"
    )

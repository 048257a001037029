"""HTTP without a proxy: what a command asks is in the stack, or on this machine.

unix:///run/name.sock is the URL of a Unix socket.
"""

from __future__ import annotations

import functools
import http.client
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

CONNECT_S = 2.0
"""For each address of a name: the next one may be that of the controller that acts."""


UNIX = "unix://"


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        answer_s, self.timeout = self.timeout, CONNECT_S
        if self.host.startswith("/"):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(CONNECT_S)
            self.sock.connect(self.host)
        else:
            super().connect()
        self.sock.settimeout(answer_s)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        if req.host.startswith("/"):
            req.add_unredirected_header("Host", "localhost")
        return self.do_open(_Connection, req)


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Http())


def as_http(url: str) -> str:
    """The URL as urllib takes it: of a Unix socket, with its path as the host."""
    if not url.startswith(UNIX):
        return url
    return f"http://{urllib.parse.quote(url.removeprefix(UNIX), safe='')}"


def opened(request: str | urllib.request.Request, timeout_s: float) -> Any:
    """The answer, to be closed. Raises HTTPError for 400 and above, URLError where nothing was sent, and OSError or
    HTTPException where no answer came.
    """
    return _OPENER.open(request, timeout=timeout_s)


@functools.cache
def _opener_here() -> urllib.request.OpenerDirector:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    https = urllib.request.HTTPSHandler(context=context)
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _Http(), https)


def status_here(address: str, timeout_s: float) -> int:
    """The HTTP status that a GET on this machine is answered with; 0 where nothing answers. Over HTTPS any
    certificate is taken: none has the machine's own address.
    """
    try:
        with _opener_here().open(address, timeout=timeout_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except (OSError, http.client.HTTPException):
        return 0


def connects(host: str, port: int) -> bool:
    """Whether something listens there."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:
        return False
    return True


def lets_in(path: str) -> bool:
    """Whether something listens at a Unix socket, and this user may connect to it."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(CONNECT_S)
        try:
            asking.connect(path)
        except OSError:
            return False
    return True


def reason(error: Exception) -> object:
    """What an error of `opened` says."""
    return getattr(error, "reason", None) or error


def is_address(url: str) -> bool:
    """Whether a URL is a valid HTTP address."""
    try:
        parts = urllib.parse.urlsplit(url)
        at_host = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        named = at_host or (parts.scheme == "unix" and not parts.netloc and bool(parts.path))
    except ValueError:  # an incomplete IPv6 address, or a port that is not a number
        return False
    return named and url.isprintable() and " " not in url

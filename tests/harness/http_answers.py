"""An HTTP server of the test's own, for what a client makes of answers that no real server gives at will."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from types import MappingProxyType


class _AtSocket(ThreadingUnixStreamServer):
    daemon_threads = True


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None], port: int = 0, at: Path | None = None) -> Iterator[str]:
    """The address of a server that has every request answered by `answer`, in a thread of its own.

    `at`: a Unix socket in the place of a port.
    """

    class Handler(BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return str(self.client_address)  # of a Unix socket it is ""

        def do_GET(self) -> None:
            answer(self)

        do_PUT = do_POST = do_GET  # noqa: N815 - the base class calls them so

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
            pass

    server = _AtSocket(str(at), Handler) if at else ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"unix://{at}" if isinstance(server, _AtSocket) else f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sends(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str] = MappingProxyType({})
) -> None:
    """A whole answer."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)

"""A Docker daemon that answers as a test says, at a socket of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import queue
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from docker import APIClient

from tests.harness.waiting import PATIENCE_S

Answer = tuple[int, Any] | Callable[["Handler"], None]


class Daemon(socketserver.ThreadingUnixStreamServer):
    """Answers by method and path (without the version); 404 where a test has set nothing."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, Handler)
        self.path = path
        self.answers: dict[str, Answer] = {}
        self.calls: list[str] = []
        self.bodies: list[Any] = []
        self.ending = threading.Event()

    @contextlib.contextmanager
    def serving(self) -> Iterator[Daemon]:
        """Answer for as long as the block runs."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.ending.set()
            self.shutdown()
            thread.join()
            self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Daemon

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that hangs up is part of these tests
            super().handle_one_request()

    def respond(self) -> None:
        url = urlsplit(self.path)
        call = f"{self.command} /{url.path.split('/', 2)[2]}"
        length = int(self.headers.get("Content-Length") or 0)
        self.server.bodies.append(json.loads(self.rfile.read(length)) if length else parse_qs(url.query))
        self.server.calls.append(call)
        answer = self.server.answers.get(call, (404, {"message": f"no answer for {call}"}))
        if callable(answer):
            answer(self)
            # A client that was left without an answer would wait for it long after the test.
            self.close_connection = self.close_connection or self.server.ending.is_set()
        else:
            self.reply(*answer)

    do_GET = do_POST = do_DELETE = respond  # noqa: N815  (the base class looks for these names)

    def reply(self, status: int, body: Any) -> None:
        data = b"" if status in (204, 304) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


class Held:
    """An answer that comes once `over` is set; with the test's end the daemon hangs up."""

    def __init__(self, status: int = 204, body: Any = None) -> None:
        self.asked = threading.Semaphore(0)
        """Released by each request."""
        self.over = threading.Event()
        self._reply = status, body

    async def request(self) -> None:
        """Wait for the next request."""
        assert await asyncio.to_thread(self.asked.acquire, timeout=PATIENCE_S), "no request has come"

    def __call__(self, handler: Handler) -> None:
        self.asked.release()
        while not handler.server.ending.is_set():
            if self.over.wait(0.01):
                handler.reply(*self._reply)
                return


class Stream:
    """An answer in pieces: those that it is made with, then those that the test says, until it is ended."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        for piece in pieces:
            self._pieces.put(piece)

    def say(self, **event: Any) -> None:
        self._pieces.put(json.dumps(event).encode() + b"\n")

    def end(self) -> Stream:
        self._pieces.put(b"")
        return self

    def __call__(self, handler: Handler) -> None:
        handler.begin_stream()
        piece = b"none yet"
        while piece and not handler.server.ending.is_set():
            with contextlib.suppress(queue.Empty):
                handler.chunk(piece := self._pieces.get(timeout=0.01))


def client_of(path: object) -> APIClient:
    return APIClient(base_url=f"unix://{path}", version="1.45")

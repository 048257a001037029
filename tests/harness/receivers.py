"""Receivers of alerts for tests: a webhook that keeps what it gets, and a mail server."""

from __future__ import annotations

import contextlib
import email
import email.policy
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

from tests.harness.http_answers import sends


@dataclass
class Receivers:
    """What has come, and how the webhook answers."""

    address: str
    webhook_port: int = 0
    mail_port: int = 0
    status: int = 200
    taken: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the messages that the webhook has taken."""
    refused: int = 0
    mails: list[tuple[str, str]] = field(default_factory=list)
    """Subject and text of each."""

    def told(self, alert: str, state: str = "firing") -> list[dict[str, Any]]:
        """The messages about an alert that the webhook has taken."""
        return [one for one in self.taken if (one["groupLabels"]["alertname"], one["status"]) == (alert, state)]

    def mailed(self, *words: str) -> list[str]:
        """The texts of the mails whose subject has these words."""
        return [text for subject, text in self.mails if all(word in subject for word in words)]


@contextlib.contextmanager
def receiving(address: str) -> Iterator[Receivers]:
    """Both listen at this address of the machine, at ports of their own."""
    found = Receivers(address)
    hook, mail = ThreadingHTTPServer((address, 0), _hook(found)), ThreadingTCPServer((address, 0), _mail(found))
    found.webhook_port, found.mail_port = hook.server_port, int(mail.server_address[1])
    threads = [threading.Thread(target=each.serve_forever, args=(0.05,)) for each in (hook, mail)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        for server, thread in zip((hook, mail), threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


def _hook(found: Receivers) -> type[BaseHTTPRequestHandler]:
    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if found.status == 200:
                found.taken.append(body)
            else:
                found.refused += 1
            sends(self, found.status, b"")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
            pass

    return Hook


def _mail(found: Receivers) -> type[StreamRequestHandler]:
    class Mail(StreamRequestHandler):
        def handle(self) -> None:
            self._say("220 test")
            while line := self.rfile.readline().decode().strip():
                match line.split(" ")[0].upper():
                    case "DATA":
                        self._say("354 go ahead")
                        _keep(found, b"".join(iter(self.rfile.readline, b".\r\n")))
                        self._say("250 taken")
                    case "QUIT":
                        self._say("221 bye")
                        return
                    case _:
                        self._say("250 ok")

        def _say(self, words: str) -> None:
            self.wfile.write(f"{words}\r\n".encode())

    return Mail


def _keep(found: Receivers, data: bytes) -> None:
    message = email.message_from_bytes(data, policy=email.policy.default)
    body = message.get_body(("html", "plain"))
    found.mails.append((str(message["Subject"]), body.get_content() if body else ""))

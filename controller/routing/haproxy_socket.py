"""HAProxy's two sockets: the worker's runtime API and the master's command line, of this machine or of another (TLS).

Each connection carries one line of commands and is closed by HAProxy after its answer. So after a reload no command
reaches a replaced worker. Every exchange has a timeout.

An exchange is a few blocking calls in a thread. On the event loop it would take about ten turns, and each turn would
wait for all other work that is due.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import RoutingError, RoutingUnreachable

COMMAND_TIMEOUT_S = 5.0
RELOAD_TIMEOUT_S = 30.0
_MASTER_AWAY_S = 2.0
"""The master restarts itself after its start and after a reload, and cannot be reached for a moment."""
_CHUNK = 256 * 1024
_GIVEN_UP_WITHIN_S = 0.25
"""How long a thread may continue an exchange that was cancelled."""
_NO_WORKER = b"Can't find the target"
_NUMBERED = re.compile(r"\[(\d)\]: ")
_NO_MAP = "Unknown map identifier"
_WORST_NON_ERROR = 4
"""Severities as in syslog: 0 to 3 are errors; 4 and above are warnings and information."""


@dataclass(slots=True)
class TlsPeer:
    """A socket of HAProxy on another machine."""

    host: str
    port: int
    context: ssl.SSLContext
    name: str
    """The server name that the handshake asks for."""
    session: ssl.SSLSession | None = None
    """Of the last connection: the next one need not check the certificates again."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


Address = Path | TlsPeer


class CommandRefused(RoutingError):
    """HAProxy answered a command with an error. `answer` is its text, without the severity."""

    def __init__(self, command: str, answer: str) -> None:
        super().__init__(f"HAProxy refused `{command}`: {answer}")
        self.command = command
        self.answer = answer


def command(*words: str) -> str:
    """Join words to one command. Raises RoutingError for a word that HAProxy would read as more than one word."""
    for word in words:
        if not word or re.search(r"[;\\\s]|<<", word) or not word.isprintable():
            raise RoutingError(
                f"{word!r} cannot be part of a HAProxy command ({' '.join(words)!r}): "
                "expected one word without space, newline, ';', '<<' and backslash"
            )
    return " ".join(words)


class RuntimeSocket:
    """The worker's runtime API (`stats socket ... level admin`)."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def ask(self, line: str, timeout_s: float = COMMAND_TIMEOUT_S, payload: str = "") -> str:
        """Run one command and return its answer, which may be empty. Raises CommandRefused, RoutingUnreachable."""
        return (await self.ask_all((line,), timeout_s, payload))[0]

    async def ask_all(self, lines: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S, payload: str = "") -> list[str]:
        """Run commands in order on one connection, so that one worker answers all of them. The last one gets the lines
        of `payload`, without the empty ones.

        All of them are run even when one fails. Raises CommandRefused for the first that failed, RoutingUnreachable
        when HAProxy cannot be reached, takes too long or closes the connection before its last answer.
        """
        for line in lines:
            if ";" in line or "\n" in line:
                raise RoutingError(f"{line!r} is more than one HAProxy command")
        # Without numbers an error looks like any other answer.
        sent = ";".join(("set severity-output number", *lines))
        if payload:
            sent = "\n".join((f"{sent} <<", *filter(str.strip, payload.splitlines()), ""))
        raw = await _exchange(self._address, sent, timeout_s, of_master=False)
        answers = _split(raw)
        if len(answers) != len(lines) + 1:
            raise RoutingUnreachable(
                f"HAProxy closed {self._address} before it had answered `{'; '.join(lines)}` "
                f"({len(answers)} answers of {len(lines) + 1})"
            )
        return [_judged(line, answer) for line, answer in zip(lines, answers[1:], strict=True)]


class MasterSocket:
    """The master's command line (`haproxy -S`)."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def reload(self) -> None:
        """Start a new worker with the configuration on disk; returns when it runs.

        Raises RoutingUnreachable, or RoutingError with HAProxy's messages when it did not start (the old one stays).
        """
        answer = await _exchange(self._address, "reload", RELOAD_TIMEOUT_S, of_master=True)
        status, _, log = answer.partition("\n--\n")
        if status == "Success=1":
            return
        if status != "Success=0":
            raise RoutingUnreachable(
                f"HAProxy's master closed {self._address} without the outcome of `reload`: {answer!r}"
            )
        alerts = [line for line in log.splitlines() if line.startswith("[ALERT]")]
        reason = "\n".join(alerts or log.splitlines()).strip() or "it gave no reason; see the log of its container"
        raise RoutingError(f"HAProxy refused to load the new configuration and keeps the one it has: {reason}")

    async def leaving_workers(self) -> tuple[int, ...]:
        """Pids of replaced workers that still have connections. Raises RoutingUnreachable."""
        pids: list[int] = []
        leaving = False
        for line in (await _exchange(self._address, "show proc", COMMAND_TIMEOUT_S, of_master=True)).splitlines():
            if line.startswith("#"):
                leaving = line.strip() == "# old workers"
            elif leaving and line.strip():
                pids.append(int(line.split()[0]))
        return tuple(pids)

    async def ask_worker(self, pid: int, line: str) -> str:
        """A worker's answer to a command that only reads; "" if the worker has ended."""
        answer = await _exchange(self._address, f"@!{pid} {line}", COMMAND_TIMEOUT_S, of_master=True)
        return "" if answer.startswith(_NO_WORKER.decode()) else answer


async def _exchange(address: Address, line: str, timeout_s: float, *, of_master: bool) -> str:
    """Send one line, perhaps with a payload, and read until HAProxy closes."""
    said = line.partition("\n")[0]  # a payload may have a private key, which no message may show
    given_up, deadline = threading.Event(), time.monotonic() + timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            answer = await asyncio.to_thread(
                _talk, address, line.encode() + b"\n", deadline, given_up, of_master=of_master
            )
            return answer.decode(errors="replace")
    except TimeoutError:
        raise RoutingUnreachable(f"HAProxy did not answer `{said}` on {address} within {timeout_s:g} s") from None
    except OSError as error:
        raise RoutingUnreachable(f"HAProxy cannot be reached on {address} for `{said}`: {error}") from error
    finally:
        given_up.set()


def _talk(address: Address, line: bytes, deadline: float, given_up: threading.Event, *, of_master: bool) -> bytes:
    """The exchange, in a thread: until `deadline` (time.monotonic()), or soon after `given_up` is set.

    Raises TimeoutError, OSError.
    """
    with _connected(address, deadline, _MASTER_AWAY_S if of_master else 0.0, given_up) as connection:
        connection.settimeout(_left_s(deadline))
        if given_up.is_set():  # another command may have been sent since
            raise TimeoutError
        _send(connection, line, of_master=of_master)
        answer = bytearray()
        while True:
            connection.settimeout(min(_left_s(deadline), _GIVEN_UP_WITHIN_S))
            try:
                chunk = connection.recv(_CHUNK)
            except TimeoutError:
                if given_up.is_set():
                    raise
                continue
            if not chunk:
                if isinstance(address, TlsPeer) and isinstance(connection, ssl.SSLSocket):
                    address.session = connection.session
                return bytes(answer)
            answer += chunk
            if answer.startswith(_NO_WORKER) and answer.endswith(b"\n"):  # after it the master waits
                return bytes(answer)


def _send(connection: socket.socket, line: bytes, *, of_master: bool) -> None:
    """The master closes its side after ours is closed, which TLS cannot do for one direction, or after "quit"."""
    if of_master and isinstance(connection, ssl.SSLSocket):
        connection.sendall(line.replace(b"\n", b";quit\n"))
        return
    connection.sendall(line)
    if of_master:
        connection.shutdown(socket.SHUT_WR)


def _connected(address: Address, deadline: float, patience_s: float, given_up: threading.Event) -> socket.socket:
    """Connect; retry for `patience_s` while nothing listens, and longer while the queue of connections is full
    (BlockingIOError). No command has been sent yet, so none is sent twice.
    """
    patient_until = time.monotonic() + patience_s
    while True:
        try:
            return _opened(address, deadline)
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError) as error:
            is_listening = isinstance(error, BlockingIOError)
            if given_up.is_set() or (time.monotonic() >= patient_until and not is_listening):
                raise
        time.sleep(min(0.02, _left_s(deadline)))


def _opened(address: Address, deadline: float) -> socket.socket:
    if isinstance(address, TlsPeer):
        plain = socket.create_connection((address.host, address.port), _left_s(deadline))
        # It closes the connection when it fails.
        return address.context.wrap_socket(plain, server_hostname=address.name, session=address.session)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_left_s(deadline))
        connection.connect(str(address))
    except BaseException:
        connection.close()
        raise
    return connection


def _left_s(deadline: float) -> float:
    """Seconds until `deadline`; raises TimeoutError after it."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _split(raw: str) -> list[str]:
    """Answers of a line of commands. Each ends with an empty line; text after the last empty line was cut off."""
    answers: list[str] = []
    current: list[str] = []
    for line in raw.split("\n")[:-1]:
        if line:
            current.append(line)
        else:
            answers.append("\n".join(current))
            current = []
    return answers


def _judged(line: str, answer: str) -> str:
    numbered = _NUMBERED.match(answer)
    text = answer[numbered.end() :] if numbered else answer
    if line.startswith("get map ") and text.startswith(_NO_MAP):  # the process of an earlier build lacks some
        return ""
    # HAProxy counts a command that it does not know as information.
    if (numbered and int(numbered.group(1)) < _WORST_NON_ERROR) or text.startswith("Unknown command"):
        raise CommandRefused(line, text.strip())
    return text

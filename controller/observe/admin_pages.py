"""Asks a replica at its admin pages: whether it is ready, for its contract; and sends it what the controller wants."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import ReplicaError
from ..model.spec import ADMIN_SUFFIX
from ..model.text import storable, told
from ..model.world import NO_STATS, PublishedStats, SleepReport, Unreached, UserConfigReport
from .judge import ProbeReading
from .prober import MANAGED_PROBE, Subject

BODY_LIMIT = 64 * 1024
MOST_CONTRACT_BYTES = 4 * 1024 * 1024
"""A larger contract counts as none."""
MOST_TRACES_BYTES = 8 * 1024 * 1024
TRACES_S = 2.0
CONTRACT_TYPE = "application/x-protobuf"
MOST_COUNTED = 2**53
"""A greater count is ignored: the autoscaler uses floats, which are exact integers only up to here."""
MOST_STATS = 16
"""Numbers that a replica publishes, at most: the runtime has the same bound."""
STATUS_LINE = re.compile(rb"HTTP/1\.\d ([1-5]\d\d)\b")
NO_SOCKET = (
    "it listens at no socket yet. If its image was built with an earlier pierhead, build it again, or write "
    "x-serve.listen: tcp"
)
REFUSED_SOCKET = (
    ". SELinux, and runtimes that are sandboxes, keep containers from each other's sockets: write PIERHEAD_LISTEN=tcp "
    "in .env, and repeat `pierhead up`"
)

Report = TypeVar("Report", UserConfigReport, SleepReport)


class HttpProbe:
    """GET <path> of a replica's probe, 2xx = ready, on a new connection each time: at SIGTERM some servers wait until
    every client has closed its connections (Triton does).
    """

    def __init__(self, publish: Callable[[Path], bool] = lambda path: False) -> None:
        """`publish` shows others the socket that a replica has made, False if it has made none."""
        self._publish = publish

    async def __call__(self, subject: Subject) -> ProbeReading:
        """Probe one replica once. Never raises, whatever the replica answers."""
        spec = subject.spec
        where = spec.path if subject.socket else f":{spec.port}{spec.path}"
        if not self._is_published(subject, ADMIN_SUFFIX):
            return ProbeReading(ok=False, detail=NO_SOCKET)
        try:
            async with asyncio.timeout(spec.timeout_s):
                answer = await _ask(subject.at(spec.port), "GET", spec.path, limit=BODY_LIMIT if subject.managed else 0)
        except TimeoutError:
            return ProbeReading(ok=False, detail=f"no answer from {where} within {spec.timeout_s:g} s")
        except _NoConnection as error:
            return ProbeReading(ok=False, detail=f"no connection to {where}: {error}")
        except (OSError, ValueError) as error:
            return ProbeReading(
                ok=False, detail=f"no valid answer from {where}: {told(str(error)) or type(error).__name__}"
            )
        reading = _reading(answer.status, where, _report(answer.body))
        if reading.ok and not self._is_published(subject):
            return replace(reading, ok=False, detail=NO_SOCKET, reason=NO_SOCKET)
        return reading

    def _is_published(self, subject: Subject, suffix: str = "") -> bool:
        """Whether others find the socket that the replica has made."""
        return not subject.socket or self._publish(Path(subject.socket.removeprefix("unix:") + suffix))

    async def contract(self, subject: Subject) -> bytes | None:
        """Ask a managed replica for its contract, as `AskContract` says."""
        try:
            async with asyncio.timeout(subject.spec.timeout_s):
                answer = await _ask(_admin_of(subject), "GET", "/contract", limit=MOST_CONTRACT_BYTES)
        except (TimeoutError, OSError, ValueError):
            return None
        is_one = (answer.status, answer.content_type) == (200, CONTRACT_TYPE)
        return answer.body if is_one and len(answer.body) <= MOST_CONTRACT_BYTES else b""

    async def traces(self, subject: Subject) -> Sequence[Any] | None:
        """Ask a managed replica for the traces that it keeps, as `AskTraces` says."""
        try:
            async with asyncio.timeout(TRACES_S):
                answer = await _ask(_admin_of(subject), "GET", "/traces", limit=MOST_TRACES_BYTES)
        except (TimeoutError, OSError, ValueError):
            return None
        if answer.status == 404:  # it keeps none, or its runtime is an earlier one
            return ()
        found = _report(answer.body).get("traces")
        return found if answer.status == 200 and isinstance(found, list) else None

    async def give(self, address: str, text: str, token: str) -> UserConfigReport:
        """Send a replica a user_config; return its report. The caller sets a time limit. Raises ReplicaError."""
        return await _put(address, "/user-config", text, token, "user_config", _config_report)

    async def put_to_sleep(self, address: str, wanted: bool, token: str) -> SleepReport:
        """Have a replica sleep, or wake up; return its report, at once. As `give`."""
        return await _put(address, "/sleep", json.dumps({"sleep": wanted}), token, "sleep", _sleep_report)


def _admin_of(subject: Subject) -> str:
    """Where a managed replica's admin pages are. Its program's own readiness path may be at another port."""
    admin = subject.spec if subject.spec.path == MANAGED_PROBE.path else MANAGED_PROBE
    return subject.at(admin.port)


async def _put(
    address: str, path: str, text: str, token: str, member: str, read: Callable[[object], Report | None]
) -> Report:
    """What `read` finds in the answer's `member`. Raises ReplicaError."""
    where = f"{address} {path}" if address.startswith("unix:") else f"{address}{path}"
    try:
        headers = f"Content-Type: application/json\r\nAuthorization: Bearer {token}\r\n"
        answer = await _ask(address, "PUT", path, text.encode(), headers)
    except (OSError, ValueError) as error:
        why = told(str(error)) or type(error).__name__
        raise ReplicaError(f"{where} does not answer: {why}; it is tried again") from error
    body = _report(answer.body)
    report = read(body.get(member))
    if answer.status != 200 or report is None:
        why = told(str(body.get("error") or "no reason is given"))
        raise ReplicaError(f"{where} refused it with {answer.status}: {why}")
    return report


class _NoConnection(OSError):
    """A replica accepts no connection, in words."""


class _Answer(NamedTuple):
    """Of a replica, as far as it is read."""

    status: int
    content_type: str
    body: bytes
    """Of a longer one than the limit, one byte more than that."""


async def _ask(
    address: str, method: str, path: str, body: bytes = b"", headers: str = "", *, limit: int = BODY_LIMIT
) -> _Answer:
    """Ask on a new connection.

    `limit`: of the answer's body, in bytes; 0 = it is not read. Raises OSError, and ValueError for what is no HTTP/1.
    """
    reader, writer = await _connected(address)
    try:
        host = "localhost" if address.startswith("unix:") else address
        version = "1.0" if limit else "1.1"  # nobody answers 1.0 in chunks
        head = (
            f"{method} {path} HTTP/{version}\r\nHost: {host}\r\nUser-Agent: pierhead-probe\r\nAccept: */*\r\n{headers}"
        )
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        writer.write(f"{head}{length}Connection: close\r\n\r\n".encode() + body)
        line = await reader.readline()
        status = STATUS_LINE.match(line)
        if status is None:
            raise ValueError(f"{line[:40]!r} is no status line of HTTP/1" if line else "it ends without an answer")
        if not limit:
            return _Answer(int(status[1]), "", b"")
        fields = await _fields(reader)
        return _Answer(int(status[1]), _field(fields, "content-type"), await _body(reader, fields, limit))
    finally:
        writer.transport.abort()


async def _connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        if address.startswith("unix:"):
            return await asyncio.open_unix_connection(address.removeprefix("unix:"))
        host, _, port = address.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))
    except PermissionError as error:
        raise _NoConnection(f"{error.strerror}{REFUSED_SOCKET if address.startswith('unix:') else ''}") from error
    except OSError as error:
        raise _NoConnection(error.strerror or str(error)) from error


async def _fields(reader: asyncio.StreamReader) -> str:
    """The headers of an answer, in lower case."""
    fields = b""
    while (line := await reader.readline()) not in (b"\r\n", b"\n"):
        fields += line
        if not line or len(fields) > BODY_LIMIT:
            raise ValueError("the answer ends within its head, or its head is endless")
    return fields.decode("latin-1").lower()


def _field(fields: str, name: str) -> str:
    """A header of an answer, in lower case, without parameters; "" where it has none."""
    found = re.search(rf"(?:^|\n){name}:[ \t]*([^;\r\n]*)", fields)
    return found[1].strip() if found else ""


async def _body(reader: asyncio.StreamReader, fields: str, limit: int) -> bytes:
    """The body up to its length or its end, and little more than `limit` of it: it may be endless."""
    length = _field(fields, "content-length")
    most = min(limit + 1, int(length)) if length.isdecimal() and length.isascii() else limit + 1
    body = b""
    while len(body) < most and (chunk := await reader.read(most - len(body))):
        body += chunk
    if length and len(body) < most:
        raise ValueError("the answer ends within its body")
    return body


def _reading(status: int, where: str, report: Mapping[str, Any]) -> ProbeReading:
    ok = 200 <= status < 300
    written = report.get("detail")
    reason = told(written) if isinstance(written, str) else ""
    detail = f"{status} from {where}" + (f": {reason}" if reason else "")
    draining = not ok and report.get("state") == "draining"
    stage = report.get("stage")
    return ProbeReading(
        ok,
        detail,
        _count(report.get("progress")),
        "" if ok else reason,
        reported_draining=draining,
        ongoing=_count(report.get("ongoing")),
        lasting=_count(report.get("lasting")) or 0,
        queued=_count(report.get("queued")),
        waiting=_counts(report.get("waiting")),
        unreached=_unreached(report.get("unreached")),
        answered=_count(report.get("answered")),
        used=_count(report.get("used")),
        errors=_count(report.get("errors")),
        stage=told(stage) if not ok and isinstance(stage, str) else "",
        broken=not ok and not draining and report.get("broken") is True,
        user_config=_config_report(report.get("user_config")),
        sleep=_sleep_report(report.get("sleep")),
        stats=_published(report.get("stats"), report.get("stats_version")),
    )


def _report(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object of a managed replica's answer; empty where it is no JSON object."""
    try:
        report = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) else {}


def _config_report(value: object) -> UserConfigReport | None:
    """A replica's report on its user_config; None where it cannot be read (an earlier runtime)."""
    if not isinstance(value, dict):
        return None
    wanted, applied, error = value.get("wanted"), value.get("applied"), value.get("error")
    if not (isinstance(wanted, str) and isinstance(applied, str) and isinstance(error, str)):
        return None
    return UserConfigReport(told(wanted), told(applied), told(error))


def _sleep_report(value: object) -> SleepReport | None:
    """A replica's report on its sleep; None where it has none, or it cannot be read."""
    if not isinstance(value, dict):
        return None
    can, wanted, asleep, error = (value.get(name) for name in ("can", "wanted", "asleep", "error"))
    if not (isinstance(can, bool) and isinstance(wanted, bool) and isinstance(asleep, bool) and isinstance(error, str)):
        return None
    return SleepReport(can, wanted, asleep, told(error))


def _published(numbers: object, version: object) -> PublishedStats:
    """The numbers that a replica publishes; none where they cannot be read. Callers keep the last ones."""
    known = _count(version)
    if not known or not isinstance(numbers, dict) or len(numbers) > MOST_STATS:
        return NO_STATS
    found = {
        storable(str(name)): float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if abs(value) < sys.float_info.max and len(name) <= 64
    }
    return PublishedStats(found, known)


def _counts(value: object) -> Mapping[str, int]:
    """A replica's waiting calls, by service; what cannot be read counts as none."""
    if not isinstance(value, dict):
        return {}
    return {storable(str(name)): count for name, found in value.items() if (count := _count(found)) is not None}


def _unreached(value: object) -> Unreached:
    """The replicas that a replica does not reach; what cannot be read counts as none."""
    if not isinstance(value, dict):
        return {}
    return {
        storable(str(service)): {storable(str(name)): told(why) for name, why in found.items() if isinstance(why, str)}
        for service, found in value.items()
        if isinstance(found, dict)
    }


def _count(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MOST_COUNTED else None

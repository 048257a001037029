"""Probes every replica that is up, each in a task of its own.

    Judge       pure: takes readings, returns the verdict and the pause until the next question
    HttpProbe   sends one question over HTTP, returns the answer as a Reading
    Prober      owns the tasks and the verdicts; a verdict that changes wakes the loop

Health: UNKNOWN until the first good reading; READY; FAILED after `probe.failures` bad readings in a row, or after one
in which the replica reports that it is broken, and READY again if it answers before it is replaced. "Draining" is an
answer too, neither good nor bad: the replica received a SIGTERM. A good reading of a replica that the controller has
told to sleep makes it UNKNOWN until it is awake again, and FAILED if it cannot wake up.

A managed replica is asked for its contract with its first good reading, which counts once the contract is there: it
must be compared before the replica serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import ReplicaError
from ..model.spec import ADMIN_SUFFIX, ProbeSpec, ServiceSpec, socket_address, unix_address
from ..model.text import storable, told
from ..model.world import (
    NO_STATS,
    PublishedStats,
    ReplicaContainer,
    ReplicaHealth,
    ReplicaReport,
    ReplicaVerdict,
    SleepReport,
    Unreached,
    UserConfigReport,
)
from ..outlive import Background

EAGER_S = 0.25
"""Between readings of a replica that was never ready, for its first EAGER_FOR_S."""
EAGER_FOR_S = 30.0
PATIENT_S = 1.0
"""The same afterwards: a model that loads for minutes need not be probed often."""
RETIRING_S = 0.1
"""Between readings of a replica that drains: the controller waits for its last request."""
EARLY = 0.9
"""A bad answer counts from this part of a period after the last one: timers are not exact."""
BODY_LIMIT = 64 * 1024
MOST_CONTRACT_BYTES = 4 * 1024 * 1024
"""A larger contract counts as none."""
CONTRACT_TYPE = "application/x-protobuf"
MOST_COUNTED = 2**53
"""A greater count is ignored: the autoscaler uses floats, which are exact integers only up to here."""
MOST_STATS = 16
"""Numbers that a replica publishes, at most: the runtime has the same bound."""
STATUS_LINE = re.compile(rb"HTTP/1\.\d ([1-5]\d\d)\b")
MANAGED_PROBE = ProbeSpec(port=9100, path="/readyz")
"""The probe of a replica whose service was removed from the files while no controller ran."""

Report = TypeVar("Report", UserConfigReport, SleepReport)


@dataclass(frozen=True, slots=True)
class ProbeReading(ReplicaReport):
    """The answer to one question."""

    ok: bool
    detail: str
    """In words."""
    progress: int | None = None
    """A number that differs whenever its work, or its start, has moved."""
    reason: str = ""
    """Why it is not ready, as the replica reports it."""


NO_ADDRESS = ProbeReading(ok=False, detail="it has no network address")
"""The reading of a replica without a network: another container may have its address, and it reaches nobody."""
NO_SOCKET = (
    "it listens at no socket yet. If its image was built with an earlier pierhead, build it again, or write "
    "x-serve.listen: tcp"
)
REFUSED_SOCKET = (
    ". SELinux, and runtimes that are sandboxes, keep containers from each other's sockets: write PIERHEAD_LISTEN=tcp "
    "in .env, and repeat `pierhead up`"
)
CONTRACT_UNREAD = "it is ready, and its contract is not known yet"


class ProbeJudge:
    """One replica's verdict, from its readings. Times are seconds of the caller's clock."""

    def __init__(
        self, spec: ProbeSpec, since: float, *, was_ready: bool = False, reports_progress: bool = False
    ) -> None:
        """`was_ready`: it was ready before this controller started, and counts as ready until it has failed.

        A controller that starts on a busy machine must not take a working replica out of rotation. `reports_progress`:
        the replica reports the progress of its start. Earlier reports are not known, so its progress counts from now.
        """
        self.spec = spec
        """May be replaced; the verdict stays."""
        self.contract: bytes | None = None
        """As in `ReplicaContainer`; set before the reading that it came with is recorded."""
        self._since = since
        self._was_ready = was_ready
        self._reports_progress = reports_progress
        self._bad_in_a_row = 0
        self._bad_at = since
        """When the last bad answer was counted."""
        self._progress: int | None = None
        self.verdict = ReplicaVerdict(
            health=ReplicaHealth.READY if was_ready else ReplicaHealth.UNKNOWN,
            health_detail="was ready when last asked" if was_ready else "not asked yet",
            ready_since=since if was_ready else None,
            progressed_at=since,
        )

    def record(self, reading: ProbeReading, now: float, *, retiring: bool = False) -> bool:
        """Record one reading; return whether the verdict changed in a way that the loop waits for."""
        before = self.verdict
        health = self._health_after(reading, now)
        detail = reading.detail
        if health is ReplicaHealth.FAILED and reading.broken:
            detail = f"the replica reports that it is broken: {reading.reason or reading.detail}"
        elif reading.ok and reading.sleep and health is not ReplicaHealth.READY:
            detail = f"it does not wake up: {reading.sleep.error}" if reading.sleep.error else "it wakes up"
        elif health is ReplicaHealth.FAILED:
            detail = f"{self._bad_in_a_row} bad answers in a row, the last: {reading.detail}"
        progressed_at = self._progressed_at(reading, now, retiring)
        ready_since = before.ready_since if before.health is ReplicaHealth.READY else now
        reported = {one.name: getattr(reading, one.name) for one in fields(ReplicaReport)}
        self.verdict = ReplicaVerdict(
            **reported
            | {"user_config": reading.user_config or before.user_config, "sleep": reading.sleep or before.sleep},
            health=health,
            health_detail=detail,
            ongoing_at=None if reading.ongoing is None else now,
            progressed_at=progressed_at,
            stalled_since=self._stalled_since(reading, progressed_at, now),
            ready_since=ready_since if health is ReplicaHealth.READY else None,
            contract=self.contract,
        )
        is_news = before.health is not health or before.contract is not self.contract
        return is_news or before.reported_draining is not reading.reported_draining

    def learn_sleep(self, report: SleepReport) -> None:
        """Record what it reported when it was told to sleep, or to wake up."""
        self.verdict = replace(self.verdict, sleep=report)
        if not report.is_awake and self.verdict.health is ReplicaHealth.READY:
            self.verdict = replace(self.verdict, health=ReplicaHealth.UNKNOWN, ready_since=None)

    def pause_s(self, now: float, *, retiring: bool) -> float:
        """Seconds until the next question."""
        is_asleep = self.verdict.sleep is not None and self.verdict.sleep.asleep
        if retiring and not is_asleep:
            return RETIRING_S
        config, sleep = self.verdict.user_config, self.verdict.sleep
        is_changing = config is not None and config.applied != config.wanted
        is_turning = sleep is not None and sleep.asleep != sleep.wanted and not sleep.error
        if self._was_ready and (is_changing or is_turning):
            return min(PATIENT_S, self.spec.period_s)
        if self._was_ready:
            return self.spec.period_s
        pause_s = EAGER_S if now - self._since < EAGER_FOR_S else PATIENT_S
        return min(pause_s, self.spec.period_s)

    def _progressed_at(self, reading: ProbeReading, now: float, retiring: bool) -> float | None:
        """When its progress last changed. The first reading does not count against the replica."""
        if not self._reports_progress and reading.progress is None:
            return None
        is_due = retiring or self.verdict.health is ReplicaHealth.READY
        if is_due and reading.sleep and reading.sleep.wanted:
            return now  # the time in which it has to wake up begins when it is no longer to sleep
        if reading.progress is None or reading.progress == self._progress:
            return self.verdict.progressed_at
        self._progress = reading.progress
        return now

    def _stalled_since(self, reading: ProbeReading, progressed_at: float | None, now: float) -> float | None:
        """Since when it has had work without progress. Calls that wait for another service do not count."""
        if not (reading.ok and reading.ongoing) or reading.queued or reading.progress is None or progressed_at == now:
            return None
        before = self.verdict.stalled_since
        return now if before is None else before

    def _health_after(self, reading: ProbeReading, now: float) -> ReplicaHealth:
        """The health after one more reading. Only about one bad reading a period counts: a draining replica is asked
        more often, and may fail for as long as any other.
        """
        if reading.ok:
            self._bad_in_a_row = 0
            self._was_ready = True
            return _health_of(reading.sleep)
        if reading.reported_draining:
            self._bad_in_a_row = 0
            return self.verdict.health
        if reading.broken:
            self._bad_in_a_row, self._bad_at = max(self._bad_in_a_row + 1, self.spec.failures), now
            return ReplicaHealth.FAILED
        if self._bad_in_a_row and now - self._bad_at < EARLY * self.spec.period_s:
            return self.verdict.health
        self._bad_in_a_row += 1
        self._bad_at = now
        if not self._was_ready:
            return ReplicaHealth.UNKNOWN
        return ReplicaHealth.FAILED if self._bad_in_a_row >= self.spec.failures else self.verdict.health


def _health_of(sleep: SleepReport | None) -> ReplicaHealth:
    """The health of a replica that answers: one that sleeps, or is being woken, takes no requests."""
    if sleep is None or sleep.is_awake:
        return ReplicaHealth.READY
    return ReplicaHealth.FAILED if sleep.error and not sleep.wanted else ReplicaHealth.UNKNOWN


@dataclass(frozen=True, slots=True)
class Subject:
    """One start of a container, and how to ask it. Another start is another subject, with a verdict of its own; another
    address or probe is not."""

    container_id: str
    started_at: float
    ip: str
    """"" = it has none."""
    spec: ProbeSpec
    managed: bool
    socket: str = ""
    """`unix:<path>` of the socket that takes its requests; "" = it listens at ports alone."""

    def at(self, port: int) -> str:
        """Where it is asked: at the socket of its admin pages, or at a port."""
        return self.socket + ADMIN_SUFFIX if self.socket else socket_address(self.ip, port)

    def is_same_as(self, other: Subject | None) -> bool:
        """Whether the verdict on one is the verdict on the other."""
        return other is not None and (self.container_id, self.started_at) == (other.container_id, other.started_at)


class _SubjectWatch:
    """One subject's task, and the state that it shares with the prober."""

    def __init__(self, subject: Subject, judge: ProbeJudge) -> None:
        self.subject = subject
        self.judge = judge
        self.retiring = False
        self.nudge = asyncio.Event()
        self.asked = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._judged: tuple[ReplicaContainer, ReplicaVerdict, ReplicaContainer] | None = None
        """The last container, the verdict on it, and the container with the verdict filled in."""

    def judged(self, container: ReplicaContainer) -> ReplicaContainer:
        """The container with its verdict filled in; the same object as before while neither changes."""
        verdict = self.judge.verdict
        if self._judged is None or self._judged[0] is not container or self._judged[1] is not verdict:
            known = {one.name: getattr(verdict, one.name) for one in fields(ReplicaVerdict)}
            self._judged = container, verdict, replace(container, **known)
        return self._judged[2]


AskContract = Callable[[Subject], Awaitable[bytes | None]]
"""Asks a replica for its contract; b"" = it has none, None = it did not say. Does not raise."""


async def no_contract(subject: Subject) -> bytes | None:
    """Ask a replica that has none."""
    return b""


@dataclass(eq=False)
class Prober:
    """Owns one asking task for each replica that is up; the loop is woken when a verdict changes."""

    _ask: Callable[[Subject], Awaitable[ProbeReading]]
    """Must not raise, whatever a replica answers."""
    _background: Background
    _was_ready: Callable[[str, float], bool] = lambda container_id, started_at: False
    """Reads the memory (container id, start time) that outlives this controller; `_note_ready` writes it."""
    _note_ready: Callable[[str, float], None] = lambda container_id, started_at: None
    _ask_contract: AskContract = no_contract
    _watches: dict[str, _SubjectWatch] = field(default_factory=dict)

    def sync(
        self,
        containers: Iterable[ReplicaContainer],
        services: Mapping[str, ServiceSpec],
        retiring: Collection[str],
        outdated: Collection[str] = (),
    ) -> None:
        """Probe exactly these containers from now on, if they are up. A container without an address fails its probe.

        `retiring` and `outdated` hold container ids. An outdated replica, and one whose service was removed, keeps its
        probe: the compose files no longer describe it.
        """
        subjects = {}
        for container in containers:
            spec = services.get(container.service)
            known = self._watches.get(container.id)
            if spec is not None and not (known and container.id in outdated):
                subject = _subject(container, _probe_of(container, spec), managed=spec.managed)
            elif known is not None:
                subject = _subject(container, known.subject.spec, managed=known.subject.managed)
            else:
                subject = _subject(container, MANAGED_PROBE, managed=True)
            if subject is not None:
                subjects[container.id] = subject
        for container_id, watch in list(self._watches.items()):
            if not watch.subject.is_same_as(subjects.get(container_id)):
                self._stop(container_id)
        for container_id, subject in subjects.items():
            watch = self._watches.get(container_id) or self._start(subject)
            if watch.subject != subject:
                watch.subject = subject
                watch.judge.spec = subject.spec
                watch.nudge.set()
            if watch.retiring != (container_id in retiring):
                watch.retiring = container_id in retiring
                watch.nudge.set()

    def judged(self, container: ReplicaContainer) -> ReplicaContainer:
        """Return the container with its health filled in; UNKNOWN if it was never asked."""
        watch = self._watches.get(container.id)
        return watch.judged(container) if watch else container

    def learn(self, container_id: str, report: UserConfigReport | SleepReport) -> None:
        """Record what a replica reported to a PUT, and probe it soon to see what has come of it."""
        watch = self._watches.get(container_id)
        if watch is None:
            return
        if isinstance(report, SleepReport):
            watch.judge.learn_sleep(report)
        else:
            watch.judge.verdict = replace(watch.judge.verdict, user_config=report)
        watch.nudge.set()

    async def first_round(self, limit_s: float) -> None:
        """Return when every replica was probed once, or after `limit_s` seconds."""
        pending = [watch.asked.wait() for watch in self._watches.values()]
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*pending)
        except TimeoutError:
            return  # a replica that has not answered stays UNKNOWN, and the planner leaves it alone

    def _start(self, subject: Subject) -> _SubjectWatch:
        was_ready = self._was_ready(subject.container_id, subject.started_at)
        judge = ProbeJudge(
            subject.spec, self._background.clock(), was_ready=was_ready, reports_progress=subject.managed
        )
        watch = _SubjectWatch(subject, judge)
        self._watches[subject.container_id] = watch
        # The verdict stays while the task is started again: a defect of the controller is no fault of the replica.
        watch.task = self._background.begin("asking a replica", partial(self._ask_forever, watch))
        return watch

    def _stop(self, container_id: str) -> None:
        watch = self._watches.pop(container_id)
        if watch.task is not None:
            watch.task.cancel()

    async def _ask_forever(self, watch: _SubjectWatch) -> None:
        while True:
            reading = await self._reading_of(watch) if watch.subject.ip else NO_ADDRESS
            now = self._background.clock()
            before = watch.judge.verdict
            changed = watch.judge.record(reading, now, retiring=watch.retiring)
            if reading.ok and changed:
                self._note_ready(watch.subject.container_id, watch.subject.started_at)
            if changed or not watch.asked.is_set() or _is_awaited(before, watch):
                watch.asked.set()
                self._background.wake()
            await self._pause(watch, watch.judge.pause_s(now, retiring=watch.retiring))

    async def _reading_of(self, watch: _SubjectWatch) -> ProbeReading:
        """Ask a replica, and for its contract where it is ready and has not told it yet."""
        subject, judge = watch.subject, watch.judge
        reading = await self._ask(subject)
        if not (reading.ok and judge.contract is None):
            return reading
        judge.contract = await self._ask_contract(subject) if subject.managed else b""
        if judge.contract is None and judge.verdict.health is ReplicaHealth.UNKNOWN:
            return replace(reading, ok=False, detail=CONTRACT_UNREAD, reason=CONTRACT_UNREAD)
        return reading

    @staticmethod
    async def _pause(watch: _SubjectWatch, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):  # no nudge came: the usual case
            async with asyncio.timeout(pause_s):
                await watch.nudge.wait()
        watch.nudge.clear()


def _is_awaited(before: ReplicaVerdict, watch: _SubjectWatch) -> bool:
    """Whether the last reading has another value that the loop waits for."""
    now = watch.judge.verdict
    is_new = before.user_config != now.user_config or before.sleep != now.sleep
    return is_new or (watch.retiring and before.ongoing != now.ongoing)


def _probe_of(container: ReplicaContainer, spec: ServiceSpec) -> ProbeSpec:
    """The service's probe, at the port and path that the replica was made with."""
    if container.probe is None:
        return spec.probe
    port, path = container.probe
    return replace(spec.probe, port=port, path=path)


def _subject(container: ReplicaContainer, spec: ProbeSpec, *, managed: bool) -> Subject | None:
    if not container.state.is_up:
        return None
    socket = unix_address(container.service, container.name) if container.has_socket else ""
    return Subject(container.id, container.begun_at, container.ip or "", spec, managed, socket)


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
        # A program's own readiness path may be at another port than the runtime's admin pages.
        admin = subject.spec if subject.spec.path == MANAGED_PROBE.path else MANAGED_PROBE
        try:
            async with asyncio.timeout(subject.spec.timeout_s):
                answer = await _ask(subject.at(admin.port), "GET", "/contract", limit=MOST_CONTRACT_BYTES)
        except (TimeoutError, OSError, ValueError):
            return None
        is_one = (answer.status, answer.content_type) == (200, CONTRACT_TYPE)
        return answer.body if is_one and len(answer.body) <= MOST_CONTRACT_BYTES else b""

    async def give(self, address: str, text: str, token: str) -> UserConfigReport:
        """Send a replica a user_config; return its report. The caller sets a time limit. Raises ReplicaError."""
        return await _put(address, "/user-config", text, token, "user_config", _config_report)

    async def put_to_sleep(self, address: str, wanted: bool, token: str) -> SleepReport:
        """Have a replica sleep, or wake up; return its report, at once. As `give`."""
        return await _put(address, "/sleep", json.dumps({"sleep": wanted}), token, "sleep", _sleep_report)


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

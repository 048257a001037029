"""Probes every replica that is up, each in a task of its own, and owns the verdicts; one that changes wakes the loop.

A managed replica is asked for its contract with its first good reading, which counts once the contract is there: it
must be compared before the replica serves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial

from ..model.spec import ADMIN_SUFFIX, ProbeSpec, ServiceSpec, socket_address, unix_address
from ..model.world import ReplicaContainer, ReplicaHealth, ReplicaVerdict, SleepReport, UserConfigReport
from ..outlive import Background
from .judge import ProbeJudge, ProbeReading

MANAGED_PROBE = ProbeSpec(port=9100, path="/readyz")
"""The probe of a replica whose service was removed from the files while no controller ran."""
NO_ADDRESS = ProbeReading(ok=False, detail="it has no network address")
"""The reading of a replica without a network: another container may have its address, and it reaches nobody."""
CONTRACT_UNREAD = "it is ready, and its contract is not known yet"


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

    def managed(self) -> Mapping[str, Subject]:
        """The managed replicas that are up and have an address, by their containers' ids."""
        subjects = {container_id: watch.subject for container_id, watch in self._watches.items()}
        return {container_id: each for container_id, each in subjects.items() if each.managed and each.ip}

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
